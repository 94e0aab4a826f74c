"""Every CSV that ncm writes comes from one writer."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ncm_cli
from ncm_cli.store.tables import CsvWriter, csv_text, write_csv


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (math.nan, ""),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (True, "true"),
        (3, "3"),
        (16.0, "16"),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        ('a,"b"\n', '"a,""b""\n"'),
    ],
)
def test_values(value: object, text: str) -> None:
    assert csv_text(["x", "y"], [[value, 1]]) == f"x,y\n{text},1\n"


@given(st.lists(st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.text("a,\"\n\r'é"))))
def test_floats_and_texts_come_back(rows: list[tuple[float, str]]) -> None:
    read = list(csv.reader(io.StringIO(csv_text(["x", "y"], rows), newline="")))
    assert read[0] == ["x", "y"]
    assert [(float(x), y) for x, y in read[1:]] == rows


def test_a_row_has_the_header_s_length() -> None:
    writer = CsvWriter(io.StringIO(), ["x", "y"])
    with pytest.raises(AssertionError):
        writer.row([1])


def test_a_sweep_whose_loss_is_infinite_has_its_table(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ["method", "val_log_loss"], [("erm", math.inf)])
    assert (tmp_path / "t.csv").read_text() == "method,val_log_loss\nerm,inf\n"


def test_nothing_else_writes_csv() -> None:
    package = Path(ncm_cli.__file__).parent
    files = [path for path in package.rglob("*.py") if "csv.writer(" in path.read_text(encoding="utf-8")]
    assert {str(path.relative_to(package)) for path in files} == {"store/tables.py"}
