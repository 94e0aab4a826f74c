"""Reads a manifest from tables that hold their pictures: a data set of Hugging Face, or Parquet files.

A data set is what `save_to_disk` of the package `datasets` writes (Arrow files, ``state.json``), or Parquet
files as they lie on the Hub. Only text is read here; pictures are read later, row by row (`packed`).
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, listing, unknown
from ncm_cli.images.manifest import (
    ID_COLUMN,
    ColumnNames,
    FileFacts,
    Manifest,
    NamedRows,
    absolute_text,
    find_files,
    manifest_of,
)
from ncm_cli.images.packed import cell_path
from ncm_cli.store.arrow import ColumnFile, column_texts, no_text, readable, require_pyarrow
from ncm_cli.store.digests import MAX_TEXT_BYTES, parse_json
from ncm_cli.store.files import read_json
from ncm_cli.store.sniff import HEAD_BYTES, PICTURES, sniff
from ncm_cli.store.table import without_saved_index

SUFFIXES = (".parquet", ".arrow")

MAX_FILES = 100_000
"""Most files of a data set."""

KNOWN_IDS = ("id", "key")
"""Columns that are the ids if they are there and no value occurs twice; ``key`` is img2dataset's."""

_SHARD = re.compile(r"(.+?)-(\d{1,6})-of-(\d{1,6})")
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in the names of files and folders, with the split that they mean to the package `datasets`."""


@dataclass(frozen=True)
class _Part:
    """One file, and the split that it is of; "" if nothing says one."""

    path: Path
    split: str = ""


def data_files(source: Path) -> list[_Part]:
    """The files of a data set, in order; empty if ``source`` is none.

    Raises `InputError` for a damaged list of splits or files.
    """
    if source.is_file():
        return [_Part(source)] if source.suffix.lower() in SUFFIXES else []
    if (source / "dataset_dict.json").is_file():
        splits = _names(source / "dataset_dict.json", lambda body: body["splits"])
        return [replace(part, split=split) for split in splits for part in _saved(source / split)]
    if (source / "state.json").is_file():
        return _saved(source)
    inside = (path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)
    paths = [path for path in inside if not any(p.startswith(".") for p in path.relative_to(source).parts)]
    return [_Part(path, _split_of(path.relative_to(source))) for path in sorted(paths, key=_in_order)]


def _saved(folder: Path) -> list[_Part]:
    files = _names(folder / "state.json", lambda body: [file["filename"] for file in body["_data_files"]])
    return [_Part(folder / name) for name in files]


def _names(path: Path, names_of: Any) -> list[str]:
    """The names of files or folders that a JSON file lists; they must lie beside it."""
    body = read_json(path)
    try:
        listed = names_of(body)
        names = list(listed) if isinstance(listed, list) else []
    except (LookupError, TypeError):
        names = []
    if not 0 < len(names) <= MAX_FILES or not all(map(_is_name, names)) or len({*names}) < len(names):
        raise InputError(
            "a data set's list of files can't be read",
            where=path,
            found=listing(map(repr, names)),
            expected="names of files or splits, each once, as save_to_disk of datasets writes them",
        )
    return names


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and name == Path(name).name


def _in_order(path: Path) -> tuple[Any, ...]:
    """Sorts paths as text, but their numbers as numbers."""
    parts = re.split(r"(\d+)", str(path))
    return tuple((int(part), "") if at % 2 else (-1, part) for at, part in enumerate(parts))


def _split_of(name: Path) -> str:
    """The split by a file's name, such as ``train-00000-of-00002.parquet`` or ``data/test/0.parquet``."""
    if shard := _SHARD.fullmatch(name.stem):
        return shard[1]
    words = (word for part in (name.stem, *reversed(name.parts[:-1])) for word in re.split(r"[-_.\s]", part))
    return next((_SPLITS[word.lower()] for word in words if word.lower() in _SPLITS), "")


def read_dataset(
    source: Path, parts: Sequence[_Part], names: ColumnNames, *, with_files: bool = True
) -> Manifest:
    """The rows of a data set's files; ids are ``SPLIT/NUMBER`` unless a column has them.

    Classes are given by name. The files' splits are the column ``split``, unless the table has one. A row
    without a picture is left out. ``with_files`` looks for pictures; without it only the text is read.

    Raises
    ------
    InputError
        A file is damaged or has other columns than the first, or there are no pictures or several columns of
        them.
    """
    files = [_DataFile(part, str(names.path_col or "")) for part in parts]
    first = files[0]
    for file in files:
        if file.file.names != first.file.names:
            raise InputError(
                "files of one data set with different columns",
                where=file.part.path,
                found=listing(file.file.names),
                expected=f"as in {first.part.path.name}: {listing(first.file.names)}",
            )
    column = _picture_column(files, names.path_col, source) if with_files else ""
    texts, rows, notes = _texts(files, column, names), list(_numbers(files)), list[str]()
    facts: list[FileFacts] | None = None
    if with_files:
        facts, kept = _pictures(files, column, source)
        if len(kept) < len(rows):
            notes.append(f"{len(rows) - len(kept):,} of {len(rows):,} rows have no picture and are left out")
            rows, texts = (
                [rows[i] for i in kept],
                {name: [values[i] for i in kept] for name, values in texts.items()},
            )
        if not rows:
            raise InputError(f"no row has a picture in {column!r}", where=source)
    asked = {names.label_col, names.split_col, *names.numeric}
    texts, left = _without_long(texts, asked)
    left += [name for file in files[:1] for name in file.left if name != column]
    notes += [f"columns that aren't short text are left out: {listing(map(repr, left))}"] if left else []
    if names.id_col is not None and names.id_col not in texts:
        raise unknown("column", names.id_col, texts, where=source)
    id_col = names.id_col or next((name for name in KNOWN_IDS if _unique(texts.get(name))), None)
    if id_col is None:
        notes.append("rows are numbered from 0: their numbers are the ids (--id-col chooses a column)")
    label = names.label_col
    if (
        label is None
        and "label" not in texts
        and len(first.classes) == 1
        and not set(first.classes) - set(texts)
    ):
        (label,) = first.classes
        notes.append(f"the only column of classes, {label!r}, is the label (--label-col chooses another)")
    ids = rows if id_col is None else texts.pop(id_col)
    values = texts | {ID_COLUMN: ids}
    table = NamedRows(source, tuple(values), values, range(len(ids)), ",", tuple(notes))
    chosen = replace(names, id_col=ID_COLUMN, path_col=ID_COLUMN, label_col=label)
    manifest = manifest_of(table, chosen, files=facts)
    return replace(manifest, numbered=True) if id_col is None else manifest


class _DataFile:
    """A file with its kinds of columns: ``classes`` by column, ``pictures``, and those ``left`` out."""

    def __init__(self, part: _Part, asked: str) -> None:
        self.part, self.file = part, ColumnFile(part.path, "data set")
        with readable(part.path, "data set"):  # names of inner fields may be damaged, too
            self._sort_columns(_features(self.file.schema))

    def _sort_columns(self, features: Mapping[str, Any]) -> None:
        names = without_saved_index(self.file.names)
        classes = {name: _class_names(features.get(name), self.part.path, name) for name in names}
        self.classes = {name: of_column for name, of_column in classes.items() if of_column}
        kinds = {name: no_text(self.file.schema.field(name).type) for name in names}
        self.pictures = [
            name for name in names if self._may_hold_pictures(name, kinds[name], features.get(name))
        ]
        self.text = [name for name in names if not kinds[name] and name not in self.pictures]
        self.left = [name for name in names if name not in self.text]

    def _may_hold_pictures(self, name: str, kind: str, feature: Any) -> bool:
        if isinstance(feature, Mapping) and feature.get("_type") == "Image":
            return True
        type_ = self.file.schema.field(name).type
        inner = {type_.field(i).name for i in range(type_.num_fields)} if kind == "structures" else set()
        return kind == "bytes" or inner == {"bytes", "path"}


def _features(schema: Any) -> dict[str, Any]:
    """What the package `datasets` says of the columns; empty for other writers."""
    text = (schema.metadata or {}).get(b"huggingface")
    try:
        features = parse_json(text)["info"]["features"] if text else {}
    except (ValueError, LookupError, TypeError):
        features = {}
    return features if isinstance(features, dict) else {}


def _class_names(feature: Any, path: Path, column: str) -> list[str]:
    if not (isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel"):
        return []
    names = feature.get("names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError("names of classes that can't be read", where=path, found=f"column {column!r}")
    return names


def _picture_column(files: Sequence[_DataFile], asked: str | None, source: Path) -> str:
    """The column of pictures: the one asked for, or the only one, or ``image`` of several."""
    first = files[0]
    if asked is not None:
        if asked not in first.pictures:
            raise InputError(
                f"no pictures in the column {asked!r}",
                where=source,
                expected=f"one of: {listing(first.pictures)}",
                fix="leave out --path-col, or name a column of pictures with it",
            )
        return asked
    picture_columns = [name for name in first.pictures if any(_looks_right(file, name) for file in files)]
    if len(picture_columns) == 1 or "image" in picture_columns:
        return "image" if "image" in picture_columns else picture_columns[0]
    if picture_columns:
        fix = f"--path-col {picture_columns[0]}"
        raise InputError("several columns of pictures", where=source, found=listing(picture_columns), fix=fix)
    raise InputError(
        "no column of pictures",
        where=source,
        found=f"columns {listing(first.file.names)}",
        expected="a column of pictures, as bytes, or, if SOURCE is a file, a column of paths named 'path'",
    )


def _looks_right(file: _DataFile, name: str) -> bool:
    """Whether a column's first value that isn't null is a picture."""
    for batch in file.file.batches([name], size=16):
        with readable(file.part.path, "data set"):
            for value in batch.column(0).to_pylist():
                data = value.get("bytes") if isinstance(value, dict) else value
                if isinstance(value, dict) and data is None and value.get("path"):
                    return True
                if isinstance(data, bytes):
                    return sniff(data[:HEAD_BYTES]) in PICTURES
    return False


def _texts(files: Sequence[_DataFile], column: str, names: ColumnNames) -> dict[str, list[str]]:
    """The columns of text of all files, with names for classes, and the splits."""
    texts: dict[str, list[str]] = {name: [] for name in files[0].text}
    for file in files:
        read = column_texts(file.file, [name for name in file.text if name in texts])
        for name, classes in file.classes.items():
            if name in read:
                read[name] = [_class_of(text, classes, file.part.path, name) for text in read[name]]
        for name in texts:
            texts[name] += read[name]
    splits = [file.part.split for file in files for _ in range(file.file.rows)]
    if any(splits) and names.split_col is None and "split" not in texts:
        texts["split"] = splits
    return texts


def _class_of(text: str, classes: Sequence[str], path: Path, column: str) -> str:
    if text in ("", "-1"):  # the package's mark of a class that isn't known
        return ""
    if not text.isdecimal() or int(text) >= len(classes):
        found, expected = f"{text} in column {column!r}", f"a number below {len(classes)}, or -1"
        raise InputError("a class without a name", where=path, found=found, expected=expected)
    return classes[int(text)]


def _numbers(files: Sequence[_DataFile]) -> Iterator[str]:
    """The number of each row within its split, after the split's name."""
    count = Counter[str]()
    for file in files:
        split = file.part.split
        for _ in range(file.file.rows):
            yield f"{split}/{count[split]}" if split else str(count[split])
            count[split] += 1


def _unique(values: Sequence[str] | None) -> bool:
    return values is not None and all(values) and len(set(values)) == len(values)


def _without_long(
    texts: dict[str, list[str]], asked: set[str | None]
) -> tuple[dict[str, list[str]], list[str]]:
    """The columns that a store takes, or that were asked for; and the names of the others."""

    def is_long(name: str) -> bool:
        longest = max(texts[name], key=len, default="")
        return name not in asked and len(longest.encode()) > MAX_TEXT_BYTES

    left = [name for name in texts if is_long(name)]
    return {name: values for name, values in texts.items() if name not in left}, left


def _pictures(files: Sequence[_DataFile], column: str, source: Path) -> tuple[list[FileFacts], list[int]]:
    """Path, size and time of each picture, and the numbers of the rows that have one."""
    facts: list[FileFacts] = []
    rows: list[int] = []
    start = 0
    for file in files:
        path = absolute_text(file.part.path)
        changed = os.stat(file.part.path).st_mtime_ns  # noqa: PTH116
        outside: dict[int, str] = {}
        for row, place in enumerate(_places(file, column)):
            if place is None:
                continue
            if place:
                outside[len(facts)] = place
            facts.append((cell_path(path, column, row), -1, changed))
            rows.append(start + row)
        base, indices = absolute_text(file.part.path.parent), list(outside)
        row_name = functools.partial(_row_of, [rows[at] - start for at in indices])
        for at, fact in zip(indices, find_files(list(outside.values()), base, row_name, source), strict=True):
            facts[at] = fact
        start += file.file.rows
    return facts, rows


def _row_of(rows: Sequence[int], index: int) -> str:
    return f"row {rows[index] + 1}"


def _places(file: _DataFile, column: str) -> Iterator[str | None]:
    """Where each row's picture is: "" in the table, else a path; None for no picture."""
    if file.file.lacks_nothing(column):
        yield from [""] * file.file.rows
        return
    pa = require_pyarrow(file.part.path)
    for batch in file.file.batches([column], size=64):
        with readable(file.part.path, "data set"):
            values = batch.column(0)
            paths: list[Any] = [None] * len(values)
            if pa.types.is_struct(values.type):
                inner = dict(zip([field.name for field in values.type], values.flatten(), strict=True))
                values = inner["bytes"]
                paths = inner["path"].to_pylist() if "path" in inner else paths
            packed = values.is_valid().to_pylist()
        yield from ("" if is_packed else path or None for is_packed, path in zip(packed, paths, strict=True))
