"""The CSV that ncm writes: one header line, one line end, one way to write a number."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any


class CsvWriter:
    """Writes rows to a stream as they come, after the header."""

    def __init__(self, stream: IO[str], columns: Sequence[str]) -> None:
        self._csv = csv.writer(stream, lineterminator="\n")
        self._columns = len(columns)
        self._csv.writerow(columns)

    def row(self, values: Iterable[Any]) -> None:
        """One row, as long as the header: None and NaN are empty, floats have all their digits."""
        cells = [_cell(value) for value in values]
        assert len(cells) == self._columns
        self._csv.writerow(cells)


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A whole table."""
    stream = io.StringIO()
    writer = CsvWriter(stream, columns)
    for row in rows:
        writer.row(row)
    return stream.getvalue()


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """A whole table as a new file."""
    path.write_text(csv_text(columns, rows), encoding="utf-8", newline="")


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(float(value))
    return value
