"""A Parquet file and a data frame are read like the CSV file of the same rows."""

from __future__ import annotations

import datetime
import decimal
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.store.arrow import MAX_ROWS, ColumnFile
from ncm_cli.store.memory import given_table
from ncm_cli.store.tables import read_header, read_table

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")

ROWS = {
    "id": ["a", " b ", "007"],
    "label": ["cat", None, "dog"],
    "count": [3, -1, 2**53],
    "share": [0.1, float("nan"), 2.0],
    "kept": [True, False, True],
}
TEXTS = {
    "id": ["a", "b", "007"],
    "label": ["cat", "", "dog"],
    "count": ["3", "-1", "9007199254740992"],
    "share": ["0.1", "", "2"],
    "kept": ["true", "false", "true"],
}


def frame_of(library: Any) -> Any:
    return library.DataFrame(ROWS)


@pytest.mark.parametrize("writer", ["pandas", "polars", "pyarrow"])
def test_a_parquet_file_of_each_library_is_read_like_csv(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    if writer == "pandas":
        frame_of(pandas).to_parquet(path)
    elif writer == "polars":
        frame_of(polars).write_parquet(path)
    else:
        pq.write_table(pa.table(ROWS), path)
    table = read_table(path)
    assert table.values == TEXTS
    assert read_header(path) == tuple(ROWS)
    assert table.row_name(2) == "row 3"
    frame_of(polars).write_csv(tmp_path / "table.csv", null_value="")
    text = read_table(tmp_path / "table.csv").values
    assert {**text, "share": ["0.1", "", "2"]} == TEXTS  # polars writes NaN and 2.0


@pytest.mark.parametrize("frame", [frame_of(pandas), frame_of(polars), pa.table(ROWS)])
def test_a_data_frame_is_read_like_its_file(frame: Any) -> None:
    table = given_table("source", frame)
    assert table.values == TEXTS
    assert given_table("source", frame_of(polars)).sha256 == table.sha256
    assert given_table("source", frame_of(polars)[:2]).sha256 != table.sha256


def test_a_named_index_is_a_column_and_a_plain_one_is_not(tmp_path: Path) -> None:
    frame = frame_of(pandas)
    frame.iloc[::-1].to_parquet(tmp_path / "plain.parquet")
    assert read_header(tmp_path / "plain.parquet") == tuple(ROWS)
    frame.set_index("id").to_parquet(tmp_path / "named.parquet")
    assert set(read_header(tmp_path / "named.parquet")) == set(ROWS)
    assert given_table("source", frame.set_index("id")).values == TEXTS
    assert given_table("source", frame[1:]).columns == tuple(ROWS)


def test_every_plain_type_has_its_text(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9)
    columns = {
        "category": pa.array(["x", "y", "x"]).dictionary_encode(),
        "narrow": pa.array([0.1, 1e-5, None], pa.float32()),
        "half": pa.array(np.array([0.5, 1, 2], np.float16)),
        "day": pa.array([moment.date()] * 3),
        "time": pa.array([moment] * 3, pa.timestamp("ns")),
        "money": pa.array([decimal.Decimal("1.50")] * 3),
        "nothing": pa.nulls(3),
        "large": pa.array(["p", "q", "r"], pa.large_string()),
        "unsigned": pa.array([2**63, 0, 1], pa.uint64()),
    }
    pq.write_table(pa.table(columns), tmp_path / "types.parquet")
    assert read_table(tmp_path / "types.parquet").rows[0] == {
        "category": "x",
        "narrow": "0.1",
        "half": "0.5",
        "day": "2024-05-06",
        "time": "2024-05-06 07:08:09",
        "money": "1.50",
        "nothing": "",
        "large": "p",
        "unsigned": "9223372036854775808",
    }
    assert read_table(tmp_path / "types.parquet").values["narrow"] == ["0.1", "1e-05", ""]


def test_lists_structures_and_bytes_are_left_out_with_a_word(tmp_path: Path) -> None:
    columns = {"id": ["a"], "boxes": [[1.0]], "raw": [b"x"], "deep": [{"x": 1}]}
    pq.write_table(pa.table(columns), tmp_path / "odd.parquet")
    for table in (read_table(tmp_path / "odd.parquet"), given_table("source", pandas.DataFrame(columns))):
        assert table.columns == ("id",)
        assert "'boxes' (lists), 'raw' (bytes), 'deep' (structures)" in table.notes[0]
        with pytest.raises(InputError, match="no column named 'boxes'") as caught:
            table.column("boxes", option="--label-col")
        assert "left out" in str(caught.value)
    pq.write_table(pa.table({"boxes": [[1.0]]}), tmp_path / "none.parquet")
    with pytest.raises(InputError, match="no column of text or numbers"):
        read_table(tmp_path / "none.parquet")


def test_a_repeated_name_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"], ["b"]], names=["id", "id "]), tmp_path / "twice.parquet")
    with pytest.raises(InputError, match="a column name is used twice"):
        read_table(tmp_path / "twice.parquet")
    with pytest.raises(InputError, match="a column name is used twice"):
        given_table("source", pandas.DataFrame([["a", "b"]], columns=["id", "id"]))


def test_no_rows_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(InputError, match="the manifest has a header and no rows"):
        read_table(tmp_path / "empty.parquet")
    with pytest.raises(InputError, match="no rows"):
        given_table("source", polars.DataFrame({"id": []}))


def test_absurdly_many_rows_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "many.parquet"
    schema = pa.schema([("id", pa.null())])
    with pq.ParquetWriter(path, schema) as writer:
        for _ in range(60):
            writer.write_table(pa.table([pa.nulls(1_000_000)], schema=schema))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match="too large") as caught:
        read_table(path)
    assert f"60,000,000 rows, 1 columns\n  expected: at most {MAX_ROWS:,}" in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_file_is_one_clear_error(seed: int, tmp_path: Path) -> None:
    pq.write_table(pa.table(ROWS), tmp_path / "whole.parquet")
    whole, rng, refused = (tmp_path / "whole.parquet").read_bytes(), random.Random(seed), 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[rng.randrange(4, len(whole))] = rng.randrange(256)
        path = tmp_path / "damaged.parquet"
        path.write_bytes(damaged if rng.random() < 0.8 else damaged[: rng.randrange(4, len(whole))])
        try:
            read_table(path)
        except InputError as error:
            refused += 1
            assert error.where is not None
    assert refused > 30


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table(ROWS), tmp_path / "table.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match="the package pyarrow isn't installed") as caught:
        read_table(tmp_path / "table.parquet")
    assert "pip install 'ncm-cli[parquet]'" in str(caught.value)


def test_text_that_is_named_as_parquet_is_called_text(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    path.write_text("id,label\na,cat\n")
    with pytest.raises(InputError, match="is text") as caught:
        ColumnFile(path)
    assert ".csv" in str(caught.value.fix)
