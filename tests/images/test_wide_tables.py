"""Tables of so many columns that no store could hold them are refused before any image is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncm_cli.main import run


@pytest.mark.parametrize("columns", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_too_many_columns_are_refused(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = ["id", "path", *(f"c{i}" for i in range(columns))]
    row = ["a", "a.png", *["x"] * columns]
    (tmp_path / "m.csv").write_text(f"{','.join(header)}\n{','.join(row)}\n")
    output = tmp_path / "f.h5"
    assert run(["embed", str(tmp_path / "m.csv"), "--model", "pixels:8", "-o", str(output)]) == 3
    assert "columns" in capsys.readouterr().err
    assert not output.exists()


def test_a_circle_of_links_is_no_output_of_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").symlink_to(tmp_path / "b.csv")
    (tmp_path / "b.csv").symlink_to(tmp_path / "a.csv")
    (tmp_path / "f.h5").write_bytes(b"")
    code = run(["sweep", "-f", str(tmp_path / "f.h5"), "--methods", "erm", "-o", str(tmp_path / "a.csv")])
    assert code in (2, 3), capsys.readouterr().err
