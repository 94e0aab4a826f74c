"""Columns of Parquet files, Arrow files and data frames as text, as if they had been saved as CSV.

Files aren't trusted: the number of rows is bounded, Arrow's offsets are validated before a value is read, and
whatever the reader raises on a damaged file becomes one `InputError`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, listing
from ncm_cli.store.files import one_line
from ncm_cli.store.sniff import HEAD_BYTES, TEXT, described, sniff
from ncm_cli.store.table import MAX_TABLE_COLUMNS, refuse_repeated, without_saved_index

MAX_ROWS = 50_000_000
"""Most rows of a file: a few bytes of Parquet can stand for any number of equal rows."""

TEXT_BATCH_ROWS = 1 << 16
"""Rows that are turned into text at once."""

_FRAMES = {("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table")}


def require_pyarrow(where: object) -> Any:
    """The module pyarrow with `parquet` and `ipc`; an `InputError` names the extra if it isn't installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        what, fix = "the package pyarrow isn't installed", "pip install 'ncm-cli[parquet]'"
        raise InputError(what, where=where, found="a Parquet or Arrow file", fix=fix) from None
    return pyarrow


@contextlib.contextmanager
def readable(path: object, what: str) -> Iterator[None]:
    """Turn what pyarrow raises on a damaged or foreign file into one `InputError`; memory errors pass."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # pyarrow raises errors of many classes on foreign bytes
        raise InputError(
            f"the {what} can't be read",
            where=path,
            found=one_line(error, 300) or type(error).__name__,
            fix="the file is damaged or cut short: write or copy it again",
        ) from error


def _refuse_text(path: Path, head: bytes, what: str) -> None:
    if head and described(head) == TEXT:
        raise InputError(
            f"the {what} is text, but its name says Parquet or Arrow",
            where=path,
            found=repr(head[:40].decode("utf-8", "replace")),
            fix="if it is CSV, give it a name that ends in .csv",
        )


class ColumnFile:
    """A Parquet file, or one of Arrow's record batches, as a stream (as `datasets` writes them) or a file.

    ``rows`` is the number of rows, ``groups`` that of each group of rows or batch, ``schema`` pyarrow's, and
    ``metadata`` that of a Parquet file. Batches are read one at a time.
    """

    def __init__(self, path: Path | str, what: str = "table") -> None:
        self.path, self.what = Path(path), what
        self.metadata: Any = None
        self._pa = require_pyarrow(path)
        with readable(path, what):
            with self.path.open("rb") as stream:
                head = stream.read(HEAD_BYTES)
            _refuse_text(self.path, head, what)
            self.is_parquet = sniff(head) == "Parquet"
            if self.is_parquet:
                with self._parquet() as file:
                    self.schema, self.metadata = file.schema_arrow, file.metadata
                self.rows = self.metadata.num_rows
                self.groups = [
                    self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)
                ]
            else:
                self.schema, self.rows, self.groups = None, 0, []
                for batch in self._arrow_batches():
                    self.rows += batch.num_rows
                    self.groups.append(batch.num_rows)
            self.names = list(self.schema.names)
        if self.rows > MAX_ROWS or len(self.names) > MAX_TABLE_COLUMNS:
            raise InputError(
                f"the {what} is too large",
                where=path,
                found=f"{self.rows:,} rows, {len(self.names):,} columns",
                expected=f"at most {MAX_ROWS:,} rows and {MAX_TABLE_COLUMNS:,} columns",
            )

    def _parquet(self, **options: Any) -> Any:
        return self._pa.parquet.ParquetFile(
            self.path, metadata=self.metadata, memory_map=True, page_checksum_verification=True, **options
        )

    def _arrow_batches(self) -> Iterator[Any]:
        """All record batches, mapped; sets the schema."""
        ipc = self._pa.ipc
        with self._pa.memory_map(str(self.path)) as source:
            if source.read(6) == b"ARROW1":
                with ipc.open_file(source) as file:
                    self.schema = file.schema
                    yield from (file.get_batch(i) for i in range(file.num_record_batches))
                return
            source.seek(0)
            with ipc.open_stream(source) as stream:
                self.schema = stream.schema
                yield from stream

    def lacks_nothing(self, column: str) -> bool:
        """Whether a Parquet file's statistics say that no value of a column, or of its ``bytes``, is null."""
        if not self.is_parquet:
            return False
        with readable(self.path, self.what):
            # Reads the metadata of the column's chunks here, where damage raises an error. If the calls below
            # read it first, damage would crash the process.
            with self._parquet(pre_buffer=True) as file:
                next(file.iter_batches(1, columns=[column]), None)
            leaves = [self.metadata.schema.column(i).path for i in range(self.metadata.num_columns)]
            wanted = [i for i, path in enumerate(leaves) if path in (column, f"{column}.bytes")]
            groups = range(len(self.groups))
            stats = [self.metadata.row_group(group).column(i).statistics for group in groups for i in wanted]
        return all(chunk is not None and chunk.has_null_count and not chunk.null_count for chunk in stats)

    def batches(
        self, columns: Sequence[str], *, size: int = TEXT_BATCH_ROWS, groups: Sequence[int] | None = None
    ) -> Iterator[Any]:
        """Record batches of some columns, of at most ``size`` rows; of all ``groups`` of rows, or of some."""
        with readable(self.path, self.what):
            if self.is_parquet:
                with self._parquet() as file:
                    wanted = range(len(self.groups)) if groups is None else groups
                    yield from file.iter_batches(size, row_groups=list(wanted), columns=list(columns))
                return
            for number, batch in enumerate(self._arrow_batches()):
                if groups is None or number in groups:
                    part = batch.select(list(columns))
                    part.validate(full=True)
                    yield from (part.slice(start, size) for start in range(0, part.num_rows, size))


def parquet_texts(path: Path, what: str) -> tuple[dict[str, list[str]], list[str]]:
    """The columns of a Parquet file as text, and notes on those that are left out.

    Nulls and NaN are blank, numbers are written as `CsvWriter` writes them, dates and times as Python does,
    categories as their values. Blanks around a text are dropped. Columns of lists, structures or bytes, and a
    saved index without a name, are left out.
    """
    file = ColumnFile(path, what)
    names, notes = _text_columns(file.schema, path)
    texts = column_texts(file, names)
    if not file.rows:
        raise InputError(f"the {what} has a header and no rows", where=path, found=listing(names))
    return texts, notes


def parquet_columns(path: Path, what: str, *, empty: bool = False) -> tuple[str, ...]:
    """The names of the columns that `parquet_texts` gives; with ``empty``, there may be none."""
    schema = ColumnFile(path, what).schema
    if empty:
        names = without_saved_index(schema.names)
        return tuple(name.strip() for name in names if not no_text(schema.field(name).type))
    return tuple(name.strip() for name in _text_columns(schema, path)[0])


def column_texts(file: ColumnFile, names: Sequence[str]) -> dict[str, list[str]]:
    """Columns of text or numbers as text, by their names without blanks around them."""
    texts: dict[str, list[str]] = {name: [] for name in names}
    seen: dict[str, str] = {}  # labels and domains repeat: sharing equal texts saves memory
    for batch in file.batches(names):
        with readable(file.path, file.what):
            for name in names:
                values = arrow_texts(batch.column(batch.schema.get_field_index(name)))
                texts[name] += [seen.setdefault(value, value) for value in values]
    lengths = {len(values) for values in texts.values()}
    if lengths - {file.rows}:
        found = f"{listing(sorted(lengths))} rows where it says {file.rows:,}"
        raise InputError(f"the {file.what} can't be read", where=file.path, found=found)
    return {name.strip(): values for name, values in texts.items()}


def _text_columns(schema: Any, where: object) -> tuple[list[str], list[str]]:
    """The columns that are text or numbers, and notes on the others; refuses repeated names."""
    names = without_saved_index(schema.names)
    refuse_repeated([name.strip() for name in names], where)
    reasons = {name: no_text(schema.field(name).type) for name in names}
    return _kept(reasons, where)


def _kept(reasons: dict[str, str], where: object) -> tuple[list[str], list[str]]:
    kept = [name for name, reason in reasons.items() if not reason]
    left = [f"{name!r} ({reason})" for name, reason in reasons.items() if reason]
    if not kept:
        expected = "at least one"
        raise InputError("no column of text or numbers", where=where, found=listing(left), expected=expected)
    return kept, [f"columns that hold neither text nor numbers are left out: {listing(left)}"] if left else []


def no_text(type_: Any) -> str:
    """Why values of a pyarrow type can't be text; "" if they can."""
    pa = require_pyarrow(None)
    while isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_nested(type_):
        return "structures" if pa.types.is_struct(type_) else "lists"
    return "bytes" if "binary" in str(type_) else ""


def arrow_texts(array: Any) -> list[str]:
    """The values of a pyarrow array, of a type that `no_text` takes, as text."""
    pa = require_pyarrow(None)
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_timestamp(array.type) and array.type.unit == "ns":
        array = array.cast(pa.timestamp("us", array.type.tz), safe=False)
    if str(array.type) in ("halffloat", "float"):
        return list(map(_text, array.to_numpy(zero_copy_only=False)))
    return list(map(_text, array.to_pylist()))


def is_frame(value: object) -> bool:
    """Whether a value is a data frame of pandas or polars, or pyarrow's table."""
    kind = type(value)
    return (kind.__module__.partition(".")[0], kind.__name__) in _FRAMES


def frame_texts(frame: Any) -> tuple[dict[str, list[str]], list[str]]:
    """The columns of a data frame as `parquet_texts` gives those of a file; a named index is a column."""
    where = "the data frame"
    if any(name is not None for name in getattr(getattr(frame, "index", None), "names", ())):
        frame = frame.reset_index()
    names = frame.column_names if hasattr(frame, "column_names") else list(frame.columns)
    if odd := [name for name in names if isinstance(name, tuple)]:
        fix = "one level of names: df.columns = ['_'.join(names) for names in df.columns]"
        raise InputError("columns with several levels of names", where=where, found=listing(odd), fix=fix)
    texts = [str(name).strip() for name in names]
    refuse_repeated(texts, where)
    values = {text: _values(frame[name]) for text, name in zip(texts, names, strict=True)}
    reasons = {name: _why_no_text(values[name]) for name in without_saved_index(texts)}
    kept, notes = _kept(reasons, where)
    if not values[kept[0]]:
        raise InputError("the data frame has no rows", where=where, found=f"columns {listing(texts)}")
    return {name: list(map(_text, values[name])) for name in kept}, notes


def _values(series: Any) -> list[Any]:
    """The values of a column of a data frame."""
    if str(getattr(series, "dtype", "")).lower() in ("float16", "float32"):
        return list(series.to_numpy())  # as doubles they would get a longer text
    for name in ("to_pylist", "to_list", "tolist"):
        if hasattr(series, name):
            return list(getattr(series, name)())
    raise AssertionError(type(series))


def _why_no_text(values: list[Any]) -> str:
    for value in values:
        if isinstance(value, bytes | bytearray | memoryview):
            return "bytes"
        if isinstance(value, list | tuple | dict | set | np.ndarray):
            return "structures" if isinstance(value, dict) else "lists"
        if type(value).__module__.partition(".")[0] not in _PLAIN:
            return type(value).__name__
    return ""


_PLAIN = {"builtins", "numpy", "datetime", "decimal", "uuid", "pandas", "zoneinfo"}
"""Modules of the types whose values can be written as text."""


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value.strip(" \t")
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return ""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating):
        if value != value:
            return ""
        whole = abs(float(value)) < 1e15 and bool(float(value).is_integer())
        return str(int(value)) if whole else str(value)
    return re.sub(" 00:00:00$", "", str(value))  # dates that pandas and polars keep as times
