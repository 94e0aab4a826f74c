"""Reads pictures that lie in the rows of Parquet and Arrow files.

The path of such a picture is ``FILE.parquet#COLUMN@ROW``. Rows are mostly asked for in order, by several
threads at once: each file is decoded a few rows at a time, and the last of them are kept.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Any

from ncm_cli.errors import InputError
from ncm_cli.images.decode import MAX_BYTES
from ncm_cli.images.samples import DecodeError
from ncm_cli.store.arrow import ColumnFile

# Names may be bytes, so this module uses os.path.
# ruff: noqa: PTH116

BATCH_ROWS, KEPT_BATCHES = 16, 4
"""Rows that are decoded at once, and how many such batches are kept: threads are that far apart at most."""

MAX_OPEN = 8
"""Most files that are kept open."""

_CELL = re.compile(r"(.+?\.(?:parquet|arrow))#(.+)@(\d+)", re.IGNORECASE | re.DOTALL)


def cell_path(file: str, column: str, row: int) -> str:
    """The path of the picture in a row of a file."""
    return f"{file}#{column}@{row}"


def cell_of(path: str) -> tuple[str, str, int] | None:
    """The file, column and row of a picture in a table; None for any other path."""
    match = _CELL.fullmatch(path)
    return (match[1], match[2], int(match[3])) if match else None


def cell_bytes(file: str, column: str, row: int) -> bytes:
    """The bytes of a picture; `DecodeError` with the reason if they can't be read."""
    try:
        status = os.stat(file)
        value = _reader(file, column, status.st_size, status.st_mtime_ns).value(row)
    except (InputError, OSError) as error:
        reason = getattr(error, "found", None) or getattr(error, "strerror", None)
        raise DecodeError(f"cannot be read: {reason or error}") from None
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes):
        raise DecodeError("no picture in this row")
    if len(data) > MAX_BYTES:
        raise DecodeError(f"picture of {len(data):,} bytes, over the limit of {MAX_BYTES:,}")
    return data


class _Reader:
    """The values of one column of a file."""

    def __init__(self, file: ColumnFile, column: str) -> None:
        self._file, self._column = file, column
        self._starts = [0, *itertools.accumulate(file.groups)]
        self._lock, self._kept = threading.Lock(), deque[tuple[int, Any]](maxlen=KEPT_BATCHES)
        self._rest: Iterator[Any] = iter(())
        self._next = -1
        """The first row of what is left in ``_rest``."""

    def value(self, row: int) -> Any:
        """The value of a row; `InputError` if the file has fewer rows."""
        with self._lock:
            while True:
                for start, values in self._kept:
                    if start <= row < start + len(values):
                        return values[row - start].as_py()
                if not 0 <= row < self._starts[-1]:
                    raise InputError("fewer rows", found=f"row {row:,} of {self._starts[-1]:,}")
                self._decode(row)

    def _decode(self, row: int) -> None:
        """Keep the next batch: on the way to ``row``, or the first of its group of rows."""
        group = self._group(row)
        if not (0 <= self._next <= row and self._group(self._next) == group):
            groups = range(group, len(self._file.groups))
            self._rest = self._file.batches([self._column], size=BATCH_ROWS, groups=groups)
            self._next = self._starts[group]
        batch = next(self._rest, None)
        if batch is None or not batch.num_rows:
            raise InputError("fewer rows than the file says", found=f"{self._next:,} rows")
        self._kept.append((self._next, batch.column(0)))
        self._next += batch.num_rows

    def _group(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1


@functools.lru_cache(MAX_OPEN)
def _reader(file: str, column: str, size: int, mtime_ns: int) -> _Reader:
    """The reader of a file as it is at this size and time."""
    opened = ColumnFile(file)
    if column not in opened.names:
        raise InputError("no such column", found=f"no column {column!r}")
    return _Reader(opened, column)
