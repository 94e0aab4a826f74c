"""Reads CSV, TSV and Parquet tables as text, and writes CSV.

The reader takes the variants that people save, and names the row that it can't read. The writer has one form:
a header line, one line end, one way to write a number.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from ncm_cli.errors import InputError, listing
from ncm_cli.store.arrow import parquet_columns, parquet_texts
from ncm_cli.store.files import write_bytes
from ncm_cli.store.sniff import HEAD_BYTES, WORDS, sniff
from ncm_cli.store.table import (
    DELIMITERS,
    MAX_TABLE_COLUMNS,
    NumberedRows,
    Table,
    refuse_repeated,
    without_saved_index,
)


class CsvWriter:
    """Writes a header and then rows to a stream."""

    def __init__(self, stream: IO[str], columns: Sequence[str]) -> None:
        self._csv = csv.writer(stream, lineterminator="\n")
        # Python 3.12 and earlier don't quote carriage returns, which readers take for the end of the line.
        self._quoting = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL)
        self._columns = len(columns)
        self.row(columns)

    def row(self, values: Iterable[Any]) -> None:
        """Write a row as long as the header: None and NaN are empty, floats have all their digits."""
        cells = [_cell(value) for value in values]
        assert len(cells) == self._columns
        returns = any(isinstance(cell, str) and "\r" in cell for cell in cells)
        (self._quoting if returns else self._csv).writerow(cells)


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table as CSV text."""
    stream = io.StringIO()
    writer = CsvWriter(stream, columns)
    for row in rows:
        writer.row(row)
    return stream.getvalue()


def write_csv(path: Path | str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a table atomically."""
    write_bytes(path, csv_text(columns, rows).encode("utf-8"))


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(float(value))
    return value


BLANK = " "
"""The separator of lists whose columns are separated by one or more blanks."""

SAMPLE_RECORDS = 50
"""Records from which the separator is determined."""

MAX_FIELD_CHARACTERS = 131_072
"""Most characters in a field; a longer one nearly always has a quotation mark that was left open."""

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_SEPARATOR_LINE = re.compile(r'"?sep=(\S|\t)"?\1* *', re.IGNORECASE)
"""The first line in which Excel states the separator."""

_DECIMAL_POINT, _DECIMAL_COMMA = (
    re.compile(
        rf"[+-]?((\d+|[1-9]\d?\d?([{between}]\d{{3}})+)({point}\d*)?|{point}\d+)([eE][+-]?\d+)?", re.ASCII
    )
    for point, between in ((r"\.", ","), (",", "."))
)

_BINARY = {"HDF5", "safetensors", "zip", "npy", "pickle", "JPEG", "PNG", "TIFF", "JPEG2000", "ICO", "gzip"}
_BINARY |= {"Excel", "PDF", "LFS"}
"""Kinds of files whose signature can't be the beginning of a table."""

_UTF16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


def read_table(path: str | os.PathLike[str] | Table, *, what: str = "manifest") -> Table:
    """Read a CSV, TSV or Parquet file with a header; a table given in Python stays as it is.

    All values stay text: ``001``, ``01`` and ``1`` are three values, ``NA`` and ``null`` are words. The
    separator is detected (comma, semicolon, tab, vertical bar, or blanks alone), a byte order mark and any of
    the three line endings are accepted, empty lines are skipped, and quoted fields may hold line breaks. A
    column without a name (a saved pandas index) is ignored. The header may follow comments that start with
    ``#``, Excel's ``sep=;``, and the number of rows, as in CelebA's lists. `parquet_texts` says how values of
    a Parquet file become text.

    Raises
    ------
    InputError
        No such file, not UTF-8, no header or no rows, a repeated column name, a row with too few or too
        many fields, a quotation mark that is never closed, or a number of rows that differs from the one
        above the header.
    """
    if isinstance(path, Table):
        return path
    if _is_parquet(path := Path(path)):
        texts, notes = parquet_texts(path, what)
        return NumberedRows.of(path, texts, notes)
    source = _open_source(path, what)
    lists: list[list[str]] = [[] for _ in source.kept]
    lines: list[int] = []
    # Labels and domains repeat: sharing equal texts saves memory.
    seen: dict[str, str] = {}
    for line, record in itertools.islice(source.every_record(), 1, None):
        if len(record) != len(source.header):
            raise _wrong_length(source, record, len(lines), line)
        for values, index in zip(lists, source.kept, strict=True):
            value = record[index].strip(" \t")
            values.append(seen.setdefault(value, value))
        lines.append(line)
    if not lines:
        raise InputError(
            f"the {what} has a header and no rows",
            where=source.path,
            found=listing(source.header),
            fix="; ".join(source.notes) or None,
        )
    if source.count not in (None, len(lines)):
        raise InputError(
            f"{len(lines):,} rows where the line above the header says {source.count:,}",
            where=source.path,
            fix=f"if no row is missing, write {len(lines)} there",
        )
    names = tuple(source.kept.values())
    return Table(
        source.path, names, dict(zip(names, lists, strict=True)), lines, source.delimiter, source.notes
    )


def read_header(path: Path) -> tuple[str, ...]:
    """The names of a table's columns, as `read_table` gives them."""
    if _is_parquet(path):
        return parquet_columns(path, "table")
    return tuple(_open_source(path, "table").kept.values())


def _is_parquet(path: Path) -> bool:
    """Whether a regular file begins as Parquet files do; a pipe isn't read."""
    try:
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(path.open("rb")) if path.is_file() else io.BytesIO()
            return sniff(stream.read(HEAD_BYTES)) == "Parquet"
    except (OSError, ValueError):  # reading says why
        return False


def plain_numbers(values: Iterable[str]) -> dict[str, str] | None:
    """Maps numbers as people write them to Python's form: ``0,5`` to ``0.5``, ``12,500.75`` to ``12500.75``.

    Either commas are decimal and points separate thousands, or the other way round. If only one of these
    reads all values, it is used; otherwise each value is read by itself, and an ambiguous one, such as
    ``12,500``, gives "". Returns None if a value isn't a number.
    """
    distinct = dict.fromkeys(values)
    ways = [{value: read(value) for value in distinct} for read in (_with_points, _with_commas)]
    possible = [way for way in ways if all(way.values())]
    if len(possible) == 1:
        return possible[0]
    numbers: dict[str, str] = {}
    for (value, with_points), with_commas in zip(ways[0].items(), ways[1].values(), strict=True):
        if not with_points and not with_commas:
            return None
        numbers[value] = (
            ""
            if with_points and with_commas and float(with_points) != float(with_commas)
            else with_points or with_commas
        )
    return numbers


def _with_points(text: str) -> str:
    return text.replace(",", "") if _DECIMAL_POINT.fullmatch(text) else ""


def _with_commas(text: str) -> str:
    return text.replace(".", "").replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else ""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A table's file, whose header has been read.

    Attributes
    ----------
    data
        The file's contents from the header on.
    skipped
        The number of lines before the header.
    count
        The number of rows that a line above the header states; None if there is no such line.
    """

    path: Path
    data: bytes
    skipped: int = 0
    delimiter: str = ","
    count: int | None = None
    notes: tuple[str, ...] = ()
    header: tuple[str, ...] = ()

    @cached_property
    def kept(self) -> dict[int, str]:
        """The columns that have a name, by position."""
        named = set(without_saved_index(self.header))
        return {i: name for i, name in enumerate(self.header) if name in named}

    @property
    def separators(self) -> str:
        return {**DELIMITERS, BLANK: "blank"}.get(self.delimiter, repr(self.delimiter)) + "s"

    def every_record(self) -> Iterator[tuple[int, list[str]]]:
        """(first line, fields) of each record, the header included; empty lines are skipped."""
        lines: Iterator[str] = io.TextIOWrapper(io.BytesIO(self.data), encoding="utf-8", newline="")
        if self.delimiter == BLANK:
            lines = (line.strip().replace("\t", BLANK) + "\n" for line in lines)
        reader = csv.reader(lines, delimiter=self.delimiter, skipinitialspace=True, strict=True)
        while True:
            first = self.skipped + reader.line_num + 1
            try:
                record = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise InputError(
                    "the table can't be read",
                    where=f"{self.path}, from line {first}",
                    found=str(error),
                    fix="a quotation mark in this record is never closed, or has text behind it: one inside "
                    'a quoted field is written as ""',
                ) from None
            if len(record) > 1 or (record and record[0].strip()):
                yield first, record

    def lengths(self, delimiter: str) -> list[int]:
        """The number of fields in each of the first records, the header's first."""
        records = replace(self, delimiter=delimiter).every_record()
        return [len(record) for _, record in itertools.islice(records, SAMPLE_RECORDS + 1)]


def _open_source(path: Path, what: str) -> _Source:
    data = _read_bytes(path, what)
    _require_text(data, path, what)
    source, stated_separator, last_comment = _without_preamble(path, data.removeprefix(codecs.BOM_UTF8))
    if not source.data.strip():
        raise InputError(f"the {what} has comments and no header", where=path)
    first = re.split(rb"[\r\n]", source.data, maxsplit=1)[0]
    if (columns := 1 + max(first.count(mark.encode()) for mark in DELIMITERS)) > MAX_TABLE_COLUMNS:
        raise InputError(
            f"the {what} has too many columns",
            where=path,
            found=f"{columns:,} in its first line",
            expected=f"at most {MAX_TABLE_COLUMNS:,}",
            fix="one line for each row; a matrix of features goes into an array (--from-array)",
        )
    source = _separated(source, stated_separator)
    if last_comment is not None:
        # A line that starts with # and has the table's number of columns is its header: ``#id,path,label``.
        names, *rows = last_comment.lengths(source.delimiter)
        if not last_comment.data.startswith(b"# ") and names > 1 and rows[:1] == [names]:
            source = _separated(last_comment, None)
    return _named(source)


def _without_preamble(path: Path, data: bytes) -> tuple[_Source, str | None, _Source | None]:
    """(source from the header on, separator from a line ``sep=;``, source from the last comment on)"""
    stated_separator, comments, count = None, list[tuple[int, int]](), None
    for number, match in enumerate(_LINE.finditer(data), start=1):
        line = match[0].decode("utf-8").strip("\ufeff\r\n")
        text = line.strip("\ufeff \t")
        if separator_line := _SEPARATOR_LINE.fullmatch(line):
            stated_separator = separator_line[1]
        elif text.startswith("#"):
            comments.append((number, match.start()))
        elif (
            text.isdecimal()
            and count is None
            and _are_names(data[match.end() : match.end() + MAX_FIELD_CHARACTERS])
        ):
            count = int(text)
        elif text or match.end() == len(data):
            break
    source = _Source(path=path, data=data[match.start() :], skipped=number - 1, count=count)
    if not comments:
        return source, stated_separator, None
    note = f"lines that start with # are taken for comments: {listing(number for number, _ in comments)}"
    last, start = comments[-1]
    return (
        replace(source, notes=(note,)),
        stated_separator,
        _Source(path=path, data=data[start:], skipped=last - 1),
    )


def _are_names(data: bytes) -> bool:
    """Whether the next line has several columns, so that a number alone above it is the number of rows."""
    text = data.lstrip().splitlines()[:1]
    return any(separator.encode() in line for line in text for separator in (*DELIMITERS, BLANK))


def _read_bytes(path: Path, what: str) -> bytes:
    try:
        facts = path.stat()
        # A pipe of the shell, <(...), has a writer; a named pipe may never get one.
        piped = stat.S_ISFIFO(facts.st_mode) and str(path).startswith(("/dev/", "/proc/"))
        if not (piped or stat.S_ISREG(facts.st_mode)):
            kind = "folder" if stat.S_ISDIR(facts.st_mode) else "device or pipe"
            raise InputError(f"the {what} is a {kind}", where=path, expected="a CSV, TSV or Parquet file")
        if not (piped or facts.st_size):
            return b""  # reading a file of the kernel (such as in /proc) may never end
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
            if (file_kind := sniff(head)) is not None and file_kind in _BINARY:
                what, expected = f"the {what} isn't a text file", "CSV or TSV, UTF-8"
                raise InputError(what, where=path, found=WORDS[file_kind], expected=expected)
            return head + stream.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"the {what} can't be read", where=path, found=reason.lower()) from None


def _require_text(data: bytes, path: Path, what: str) -> None:
    if not data.strip():
        raise InputError(f"the {what} is empty", where=path, expected="a header line and rows")
    head, place, text = data[:4096], "byte 0", None
    found, encoding = "UTF-16 or UTF-32", "UTF-16"
    if not data.startswith(_UTF16_OR_32) and head.count(0) * 4 <= len(head):
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            # The decoder removes a byte order mark and doesn't count it.
            start = error.start + (3 if data.startswith(codecs.BOM_UTF8) else 0)
            line = _line_of(data[:start].decode("utf-8", "replace"))
            place = f"byte 0x{data[start]:02x} at position {start}, line {line}"
            found, encoding = "another encoding, such as Latin-1", "LATIN1"
    if text is None:
        raise InputError(
            f"the {what} isn't UTF-8",
            where=f"{path}, {place}",
            found=found,
            expected="UTF-8",
            fix=f"save it as UTF-8, for example: iconv -f {encoding} -t UTF-8 OLD.csv > NEW.csv",
        )
    first = text[:MAX_FIELD_CHARACTERS].strip().split("\n")[0].strip()
    json = first in ("{", "[") or (first.startswith(('{"', "[{")) and first.endswith(("}", "}]", ",")))
    if json or first.startswith("<"):
        kind = "JSON" if json else "HTML or XML"
        raise InputError(f"the {what} isn't a table", where=path, found=kind, expected="CSV or TSV")
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


def _separated(source: _Source, stated: str | None) -> _Source:
    """The source with the separator that splits the first records most evenly, and then into the most fields.

    If no separator splits the header, the table has a single column. A separator that occurs equally often in
    all rows is still chosen then, so that the header is refused.
    """
    if stated is not None and source.lengths(stated)[:1] > [1]:
        return replace(source, delimiter=stated)
    counts: dict[str, list[int]] = {}
    problem: InputError | None = None
    for delimiter in (*DELIMITERS, BLANK):
        try:
            counts[delimiter] = source.lengths(delimiter) or [0]
        except InputError as error:
            counts[delimiter] = [0]
            problem = problem or error
    agreement = {d: lengths.count(lengths[0]) / len(lengths) for d, lengths in counts.items()}
    splitting = [delimiter for delimiter in DELIMITERS if counts[delimiter][0] > 1]
    if splitting:
        return replace(source, delimiter=max(splitting, key=lambda d: (agreement[d], counts[d][0])))
    header, *rows = counts[BLANK]
    # CelebA's lists and tables from R have no name for the first column: one field more in every row.
    if header > 1 and rows and set(rows) in ({header}, {header + bool(source.count or problem)}):
        return replace(source, delimiter=BLANK)
    if problem:
        raise problem
    splits_rows = [d for d in DELIMITERS if len(counts[d]) > 2 and set(counts[d][1:]) not in ({1}, {0})]
    return replace(source, delimiter=next((d for d in splits_rows if len(set(counts[d][1:])) == 1), ","))


def _named(source: _Source) -> _Source:
    """The source with the names in its header; refuses repeated names, and a header without any."""
    records = source.every_record()
    _, header = next(records, (0, []))
    header = [name.strip("\ufeff").strip() for name in header]
    if source.count and len(header) + 1 == len(next(records, (0, []))[1]):
        # CelebA's lists have no name for the first column, the files.
        header = ["id", *header]
        source = replace(source, notes=(*source.notes, "the first column has no name: 'id' is taken"))
    source = replace(source, header=tuple(header))
    if not source.kept:
        raise InputError("the header names no column", where=source.path, found=listing(map(repr, header)))
    refuse_repeated(source.kept.values(), f"{source.path}, the header")
    return source


def _wrong_length(source: _Source, record: list[str], index: int, line: int) -> InputError:
    header, fix = source.header, "put quotation marks around a value that holds the separator"
    if record[0].startswith("#"):
        fix = f"if line {line} is a comment: sed '{line}d' OLD > NEW"
    elif source.delimiter == "," and any(
        a.isdecimal() and b.isdecimal() for a, b in itertools.pairwise(record)
    ):
        fix = f"write numbers with decimal points and no other separators, not 0,5 or 12,500; or {fix}"
    elif index == 0 and (error := _header_alone(source)):
        return error
    return InputError(
        f"row {index + 1} has {len(record)} fields where the header has {len(header)}",
        where=f"{source.path}, line {line}",
        found=listing(map(repr, record)),
        expected=f"{len(header)} fields separated by {source.separators}: {listing(header)}",
        fix=fix,
    )


def _header_alone(source: _Source) -> InputError | None:
    """The error if all rows have the same number of fields, but the header has another."""
    (first, header), *rows = source.every_record()
    fields = {len(record) for _, record in rows}
    if len(rows) < 2 or len(fields) > 1:
        return None
    second, fix = rows[0][0], "give every column a name"
    if len(header) + 1 == len(rows[0][1]) and not any(record[-1].strip() for _, record in rows):
        fix = "all rows end with a separator: put one at the end of the header, too"
    elif second == first + 1:
        fix += f"; if line {first} isn't part of the table: sed '{first}d' OLD > NEW"
    return InputError(
        f"the header has {len(header)} fields where all rows have {fields.pop()}",
        where=f"{source.path}, line {first}",
        found=listing(map(repr, header)),
        expected=f"names separated by {source.separators}, such as those rows' values: "
        + listing(map(repr, rows[0][1])),
        fix=fix,
    )
