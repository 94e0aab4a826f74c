"""Reads CSV and TSV files as they are: every value is text, and what can't be read is refused by row."""

from __future__ import annotations

import csv
import io
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ncm_cli.errors import InputError, NcmError, listing, nearest

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
"""The separators told apart, in the order of preference when several fit equally well."""

SAMPLE_RECORDS = 50
"""Records read to tell the separator: enough to see a pattern, few enough to cost nothing."""

FIELD_LIMIT = 131_072
"""Characters in one field; a longer one is nearly always a quotation mark that is never closed."""

_SAVED_INDEX = re.compile(r"Unnamed: \d+(_level_\d+)?")
"""The name that pandas gives to a column without one."""

_SIGNATURES = {
    b"PK\x03\x04": "a zip archive or an Excel workbook",
    b"\x1f\x8b": "a gzip file",
    b"PAR1": "a Parquet file",
    b"\x89HDF": "an HDF5 file",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"%PDF": "a PDF file",
}

_UTF16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes
    ----------
    path
        The file, for messages.
    columns
        The names of the header; those without a name (a saved index) are left out.
    values
        One list of text for each column, all of the same length. Blanks around a value are dropped.
    line_numbers
        The line of the file on which each row begins; the header is line 1 of an ordinary file.
    delimiter
        The separator found.
    """

    path: Path
    columns: tuple[str, ...]
    values: dict[str, list[str]]
    line_numbers: Sequence[int]
    delimiter: str

    def __len__(self) -> int:
        return len(self.line_numbers)

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """The rows as dictionaries, column to text."""
        names = self.columns
        return [dict(zip(names, row, strict=True)) for row in zip(*self.values.values(), strict=True)]

    def row_name(self, index: int) -> str:
        """How messages name row ``index``: counted from 1 without the header, and the line of the file."""
        return f"row {index + 1} (line {self.line_numbers[index]})"

    def column(self, name: str, *, option: str | None = None) -> list[str]:
        """The values of one column; a name that isn't there is an `InputError` listing those that are.

        ``option`` is the command-line option that chooses the column, for the hint.
        """
        if name not in self.values:
            raise self._unknown(name, option)
        return self.values[name]

    def _unknown(self, name: str, option: str | None) -> NcmError:
        close = nearest(name, self.columns)
        hints = [f"did you mean {close!r}?"] if close else []
        if option:
            hints.append(f"name the column with {option}")
        if len(self.columns) == 1:
            hints.append(f"only one column was found, separated by {DELIMITERS[self.delimiter]}s")
        return InputError(
            f"no column named {name!r}",
            where=self.path,
            expected=f"one of: {listing(self.columns)}",
            fix="; ".join(hints) or None,
        )


def read_table(path: str | os.PathLike[str], *, what: str = "manifest") -> Table:
    """Read a CSV or TSV file with a header.

    Ids and everything else stay text: ``001``, ``01`` and ``1`` are three values, ``NA`` and ``null`` are
    words. The separator is found (comma, semicolon, tab, vertical bar), a byte order mark and any of the
    three line endings are accepted, empty lines are skipped, quoted fields may hold line breaks. A column
    without a name (a saved pandas index) is ignored.

    Raises
    ------
    InputError
        No such file, not UTF-8, no header or no rows, a repeated column name, a row with too few or too
        many fields, a quotation mark that is never closed.
    """
    where = Path(path)
    header, kept, records, delimiter = _opened(where, what)
    lists: list[list[str]] = [[] for _ in kept]
    lines: list[int] = []
    # Labels and domains repeat: one object for each distinct text keeps long tables small.
    seen: dict[str, str] = {}
    for line, record in records:
        if len(record) != len(header):
            raise _ragged(record, header, len(lines), line, where, delimiter)
        for values, index in zip(lists, kept, strict=True):
            value = record[index].strip(" \t")
            values.append(seen.setdefault(value, value))
        lines.append(line)
    if not lines:
        raise InputError(f"the {what} has a header and no rows", where=where, found=listing(header))
    names = tuple(header[index] for index in kept)
    return Table(where, names, dict(zip(names, lists, strict=True)), lines, delimiter)


def read_header(path: Path) -> tuple[str, ...]:
    """The names of a table's columns, as `read_table` gives them."""
    header, kept, _, _ = _opened(path, "table")
    return tuple(header[index] for index in kept)


def _opened(path: Path, what: str) -> tuple[list[str], list[int], Iterator[tuple[int, list[str]]], str]:
    """(header, indices of its columns that have a name, records after it, separator)"""
    data = _read_bytes(path, what)
    _require_text(data, path, what)
    delimiter = _delimiter(data, path)
    records = _records(data, delimiter, path)
    _, header = next(records, (0, []))
    return header, _kept(header, path), records, delimiter


def _read_bytes(path: Path, what: str) -> bytes:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise InputError(f"the {what} is a folder", where=path, expected="a CSV or TSV file")
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise InputError(f"the {what} is a device", where=path, expected="a CSV or TSV file")
        with path.open("rb") as stream:
            head = stream.read(8)
            _refuse_other_formats(head, path, what)
            return head + stream.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"the {what} can't be read", where=path, found=reason.lower()) from None


def _refuse_other_formats(head: bytes, path: Path, what: str) -> None:
    for signature, kind in _SIGNATURES.items():
        if head.startswith(signature):
            raise InputError(
                f"the {what} isn't a text file", where=path, found=kind, expected="CSV or TSV, UTF-8"
            )


def _require_text(data: bytes, path: Path, what: str) -> None:
    if not data.strip():
        raise InputError(f"the {what} is empty", where=path, expected="a header line and rows")
    head = data[:4096]
    if data.startswith(_UTF16_OR_32) or head.count(0) * 4 > len(head):
        raise _encoding(path, what, "UTF-16 or UTF-32", "byte 0", "UTF-16")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The position counts from behind a byte order mark, which the decoder has taken off.
        start = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = _line_of(data[:start].decode("utf-8", "replace"))
        place = f"byte 0x{data[start]:02x} at position {start}, line {line}"
        raise _encoding(path, what, "another encoding, such as Latin-1", place, "LATIN1") from None
    if "\0" in text:
        position = text.index("\0")
        raise InputError(
            f"the {what} holds a NUL character",
            where=f"{path}, line {_line_of(text[:position])}",
            found=f"NUL at character {position}",
            fix="the file is damaged or binary: export it again as UTF-8 text",
        )


def _line_of(before: str) -> int:
    return before.replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1


def _encoding(path: Path, what: str, found: str, place: str, name: str) -> InputError:
    return InputError(
        f"the {what} isn't UTF-8",
        where=f"{path}, {place}",
        found=found,
        expected="UTF-8",
        fix=f"save it as UTF-8, for example: iconv -f {name} -t UTF-8 OLD.csv > NEW.csv",
    )


def _records(data: bytes, delimiter: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(first line, fields) of each record; lines that are empty are left out."""
    lines = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                "the table can't be read",
                where=f"{path}, from line {first}",
                found=str(error),
                fix="a quotation mark in this record is never closed, or has text behind it: one inside a "
                'quoted field is written as ""',
            ) from None
        if len(record) > 1 or (record and record[0].strip()):
            yield first, record


def _delimiter(data: bytes, path: Path) -> str:
    """The separator with which the first records have most nearly one number of fields, and the most fields.

    Where none of the four splits the header the table has a single column, and any will do.
    """
    best, best_score = ",", (0.0, 0)
    problem: InputError | None = None
    for delimiter in DELIMITERS:
        counts = []
        try:
            for _, record in _records(data, delimiter, path):
                counts.append(len(record))
                if len(counts) > SAMPLE_RECORDS:
                    break
        except InputError as error:
            problem = problem or error
        if not counts or counts[0] < 2:
            continue
        score = (sum(count == counts[0] for count in counts) / len(counts), counts[0])
        if score > best_score:
            best, best_score = delimiter, score
    if problem and best_score == (0.0, 0):
        raise problem
    return best


def _kept(header: list[str], path: Path) -> list[int]:
    """Strips the header's names in place; returns the indices of the columns that have one."""
    header[:] = [name.strip("\ufeff").strip() for name in header]
    kept = [i for i, name in enumerate(header) if name and not _SAVED_INDEX.fullmatch(name)]
    if not kept:
        raise InputError("the header names no column", where=path, found=listing(map(repr, header)))
    counts = Counter(header[index] for index in kept)
    repeated = [repr(name) for name, count in counts.items() if count > 1]
    if repeated:
        raise InputError(
            "a column name is used twice",
            where=f"{path}, the header",
            found=listing(repeated),
            fix="rename one of them",
        )
    return kept


def _ragged(
    record: list[str], header: list[str], index: int, line: int, path: Path, delimiter: str
) -> InputError:
    return InputError(
        f"row {index + 1} has {len(record)} fields where the header has {len(header)}",
        where=f"{path}, line {line}",
        found=listing(map(repr, record)),
        expected=f"{len(header)} fields separated by {DELIMITERS[delimiter]}s: {listing(header)}",
        fix="put quotation marks around a value that holds the separator",
    )
