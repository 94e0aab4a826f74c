"""Reads folders as clip-retrieval and img2dataset write them.

clip-retrieval writes ``img_emb/img_emb_0.npy``, ``text_emb/text_emb_0.npy`` and
``metadata/metadata_0.parquet``, whose rows correspond file by file. img2dataset writes ``00000.tar``, or
``00000.parquet`` with the pictures in it, or a folder ``00000`` of pictures; beside the first and the last,
``00000.parquet`` with a row for each address, whether it was downloaded or not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ncm_cli.errors import InputError, UsageError, listing
from ncm_cli.images.arrays import ArraySource, open_array, open_arrays
from ncm_cli.images.folder import walk_images
from ncm_cli.images.manifest import (
    ID_COLUMN,
    ColumnNames,
    Manifest,
    NamedRows,
    absolute_text,
    find_files,
    manifest_of,
)
from ncm_cli.store.arrow import ColumnFile, column_texts, no_text
from ncm_cli.store.digests import MAX_TEXT_BYTES, printable
from ncm_cli.store.memory import GivenArray
from ncm_cli.store.table import NumberedRows, without_saved_index

IMAGES, TEXTS, METADATA = "img_emb", "text_emb", "metadata"
"""clip-retrieval's folders."""

_NUMBER = re.compile(r"(?:.*\D)?(\d{1,18})", re.DOTALL)


def shards_of(folder: Path, suffix: str) -> dict[int, Path]:
    """The files ``NAME_7.npy`` or ``00007.parquet`` of a folder by their numbers, in numeric order."""
    shards: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*{suffix}")):
        if (number := _NUMBER.fullmatch(path.stem)) is None or path.name.startswith("."):
            continue
        if (other := shards.setdefault(int(number[1]), path)) != path:
            raise InputError("two files with one number", where=folder, found=f"{other.name}, {path.name}")
    return dict(sorted(shards.items()))


def embeddings_of(source: Path) -> Path | None:
    """The folder of features in clip-retrieval's output: of the images, else of the texts; None elsewhere."""
    if not (source / METADATA).is_dir():
        return None
    return next((source / name for name in (IMAGES, TEXTS) if shards_of(source / name, ".npy")), None)


def array_files(folder: Path) -> tuple[Path, ...]:
    """The arrays of a folder in the order of their numbers; for clip-retrieval's output, those of images."""
    folder = embeddings_of(folder) or folder
    if files := tuple(shards_of(folder, ".npy").values()):
        return files
    what, expected = "no arrays in the folder", "files named by number: img_emb_0.npy, img_emb_1.npy ..."
    raise InputError(what, where=folder, expected=expected)


def features_of(given: Path | GivenArray) -> ArraySource:
    """The features in a file, in a folder's files, or given in Python."""
    if isinstance(given, Path) and given.is_dir():
        return open_arrays(array_files(given), given)
    return open_array(given)


def read_embeddings(source: Path, arrays: Path | GivenArray, names: ColumnNames) -> Manifest:
    """The rows of clip-retrieval's metadata, which lie in ``source`` or its folder ``metadata``.

    ``image_path`` is the id, if no value occurs twice; otherwise rows are numbered.

    Raises
    ------
    InputError
        Arrays and metadata don't correspond file by file.
    """
    folder = source / METADATA if (source / METADATA).is_dir() else source
    tables = shards_of(folder, ".parquet")
    by_file = isinstance(arrays, Path) and arrays.is_dir()
    features = {_number_of(path): path for path in array_files(Path(str(arrays)))} if by_file else {}
    if by_file and (alone := tables.keys() ^ features.keys()):
        paths = [str((tables.get(number) or features[number]).name) for number in sorted(alone)]
        fix = "copy the missing files, or make them again: rows correspond file by file"
        raise InputError("arrays and metadata of other files", where=source, found=listing(paths), fix=fix)
    files = {number: ColumnFile(path, "metadata") for number, path in tables.items()}
    for number, path in features.items():
        if (rows := open_array(path).rows) != files[number].rows:
            raise InputError(
                "an array and its metadata have different numbers of rows",
                where=path,
                found=f"{rows:,} rows in it, {files[number].rows:,} in {files[number].path.name}",
                expected="one row of metadata for each row of features, in the same order",
            )
    texts, notes = joined_texts(list(files.values()), names)
    other = source / TEXTS
    if by_file and Path(str(arrays)).name != TEXTS and other.is_dir():
        notes.append(f"features of texts aren't used: --from-array {other} takes them instead")
    table = NumberedRows.of(source, texts, notes)
    ids = texts.get("image_path", [])
    if names.id_col is None and ids and all(ids) and len(set(ids)) == len(ids):
        names = replace(names, id_col="image_path")
    return manifest_of(table, names)


def _number_of(path: Path) -> int:
    number = _NUMBER.fullmatch(path.stem)
    assert number is not None
    return int(number[1])


def joined_texts(files: Sequence[ColumnFile], names: ColumnNames) -> tuple[dict[str, list[str]], list[str]]:
    """The columns of text of several files, blank where a file has none; and a note on what is left out.

    Columns that aren't text are left out, and so are those with a text too long for a store, unless an option
    names them.
    """
    texts: dict[str, list[str]] = {}
    left: dict[str, None] = {}
    count = 0
    for file in files:
        columns = without_saved_index(file.names)
        left |= {name: None for name in columns if no_text(file.schema.field(name).type)}
        read = column_texts(file, [name for name in columns if name not in left])
        for name in read.keys() - texts.keys():
            texts[name] = [""] * count
        count += file.rows
        for name, values in texts.items():
            values += read.get(name, [""] * file.rows)
    asked = {names.id_col, names.label_col, names.split_col, *names.numeric}
    for name in [name for name in texts if name not in asked]:
        if len(max(texts[name], key=len, default="").encode()) > MAX_TEXT_BYTES:
            left[name] = None
            del texts[name]
    if not texts or not count:
        raise InputError("tables without rows", where=files[0].path.parent if files else None)
    order = [name for file in files for name in without_saved_index(file.names)]
    ordered = {name.strip(): texts[name.strip()] for name in dict.fromkeys(order) if name.strip() in texts}
    return ordered, [
        f"columns that aren't short text are left out: {listing(map(repr, left))}"
    ] if left else []


def downloads_of(source: Path) -> list[Path]:
    """The tables ``00000.parquet`` of img2dataset beside folders ``00000`` of pictures; empty elsewhere."""
    tables = [path for path in shards_of(source, ".parquet").values() if path.stem.isdecimal()]
    return tables if any((source / path.stem).is_dir() for path in tables) else []


def read_downloads(source: Path, tables: Sequence[Path], names: ColumnNames) -> Manifest:
    """The pictures of img2dataset's output format ``files``, with the columns of its tables.

    Ids are ``SHARD/KEY``, as in its tar files. A note counts addresses without a picture.
    """
    for option, value in (("--id-col", names.id_col), ("--path-col", names.path_col)):
        if value is not None:
            raise UsageError(f"{option} is for tables", found=f"{source} is a folder", fix="leave it out")
    images = {os.path.splitext(name)[0]: name for name in walk_images(source)[0]}  # noqa: PTH122
    files = [ColumnFile(path, "table of downloads") for path in tables]
    texts, notes = joined_texts(files, names)
    if "key" not in texts:
        raise InputError("a table of downloads without keys", where=tables[0], found=listing(texts))
    stems = [file.path.stem for file in files for _ in range(file.rows)]
    ids = [f"{stem}/{key}" for stem, key in zip(stems, texts["key"], strict=True)]
    kept = [row for row, id in enumerate(ids) if id in images]
    if len(kept) < len(ids):
        notes.append(f"{len(ids) - len(kept):,} of {len(ids):,} addresses have no picture and are left out")
    if strange := images.keys() - set(ids):
        found = listing(sorted(map(printable, strange)))
        fix = "let img2dataset end its work, or move these pictures away"
        raise InputError("pictures that aren't in any table of downloads", where=source, found=found, fix=fix)
    values = {name: [column[row] for row in kept] for name, column in texts.items()}
    values[ID_COLUMN] = [ids[row] for row in kept]
    table = NamedRows(source, tuple(values), values, range(len(kept)), "/", tuple(notes))
    paths = [images[id] for id in values[ID_COLUMN]]
    facts = find_files(paths, absolute_text(source), table.row_name, source)
    return manifest_of(table, replace(names, id_col=ID_COLUMN, path_col=ID_COLUMN), files=facts)
