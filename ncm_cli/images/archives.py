"""Tar archives of samples, as WebDataset writes them, as the rows of an embedding.

Files of one name up to its first dot, one after another in an archive, are a sample: ``00012.jpg``,
``00012.cls``, ``00012.json``. Only headers and labels are read here; an image is read where it lies.
"""

from __future__ import annotations

import itertools
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ncm_cli.errors import InputError, UsageError, listing
from ncm_cli.images.manifest import (
    IMAGE_SUFFIXES,
    ITSELF,
    ColumnNames,
    Manifest,
    NamedRows,
    absolute_text,
    manifest_of,
)
from ncm_cli.images.paths import content, expanded, file_system, is_remote, look_up, members, open_file
from ncm_cli.store.columns import Files
from ncm_cli.store.digests import MAX_TEXT_BYTES
from ncm_cli.store.files import one_line

_IMAGE = "__url__"
"""WebDataset's name for a sample's place; no entry of a sample's own has it."""

_NAME = re.compile(r"((?:.*/|)[^./][^.]*)\.([^/]+)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")


def read_archives(source: str, names: ColumnNames) -> Manifest:
    """The samples with an image in the archives that ``source`` stands for; ids are ``ARCHIVE/KEY``.

    Columns are ``cls``, which is the label where no other is, and the entries of the JSON members that are
    text, numbers, true or false.

    Raises
    ------
    InputError
        Archives are missing, compressed or damaged; there are no images; a label is blank or missing.
    """
    for option, value in (("--id-col", names.id_col), ("--path-col", names.path_col)):
        if value is not None:
            raise UsageError(f"{option} is for tables", found=f"{source} is an archive", fix="leave it out")
    archives = [absolute_text(Path(path)) for path in expanded(source)]
    for archive in filter(is_remote, archives):
        file_system(archive)
    facts = {archive: look_up(archive) for archive in archives}
    if missing := [archive for archive, (size, _) in facts.items() if size < 0]:
        raise InputError(f"{len(missing)} of {len(facts)} archives can't be read", found=listing(missing))
    rows, known, without = list[dict[str, str]](), list[tuple[int, int]](), 0
    for archive, (_, changed) in facts.items():
        stem = archive.rpartition("/")[2].rpartition(".")[0]
        for key, image, entries in _samples(archive):
            without += image is None
            if image is not None:
                own = {ITSELF: f"{stem}/{key}", _IMAGE: f"{archive}#{image.name}@{image.offset}"}
                rows.append(entries | own)
                known.append((image.size, changed))
    if not rows:
        raise InputError("no images in the archives", where=source, found=f"{without} samples of other kinds")
    notes = [f"{without:,} samples without an image are left out"] if without else []
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row.get(name, "") for row in rows] for name in columns}
    table = NamedRows(Path(source), columns, values, range(len(rows)), ",", tuple(notes))
    label = names.label_col or ("cls" if "cls" in columns and "label" not in columns else None)
    size, mtime_ns = np.array(known, np.int64).T
    files = Files(tuple(values[_IMAGE]), size, mtime_ns, ("",) * len(rows))
    return manifest_of(table, replace(names, id_col=ITSELF, path_col=_IMAGE, label_col=label), files=files)


def _samples(archive: str) -> Iterator[tuple[str, tarfile.TarInfo | None, dict[str, str]]]:
    """The key of each sample, its image, its class and the entries of its JSON, as text."""
    try:
        with open_file(archive) as stream:
            for key, named in itertools.groupby(_named(stream), lambda one: one[0]):
                images: dict[str, tarfile.TarInfo] = {}
                entries: dict[str, str] = {}
                seen: set[str] = set()
                for _, suffix, member in named:
                    if suffix in seen:
                        raise ValueError(f"{member.name} twice in one sample")
                    seen.add(suffix)
                    if f".{suffix.rpartition('.')[2]}" in IMAGE_SUFFIXES:
                        images[suffix] = member
                    elif suffix in ("cls", "json"):
                        entries |= _label(suffix, member.name, content(stream, member))
                # Of several, such as left.png and jpg, that with the plain name.
                yield key, images[min(images, key=lambda name: name.count("."))] if images else None, entries
    except Exception as error:  # file systems raise what they like
        raise InputError(
            "an archive that can't be read", where=archive, found=one_line(error),
            expected="an uncompressed tar file, with text in .cls and an object in .json",
        ) from None  # fmt: skip


def _named(archive: BinaryIO) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """(key, suffix, member) of the files of an archive that are part of a sample."""
    for member in members(archive):
        named = _NAME.fullmatch(member.name)
        if named and not _META.match(member.name):
            yield named[1], named[2].lower(), member


def _label(suffix: str, name: str, data: bytes) -> dict[str, str]:
    try:
        text = data.decode("utf-8")
        found = {"cls": text} if suffix == "cls" else json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("no object")
        return _flat(found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {one_line(error)}") from None


def _flat(entries: dict[str, Any]) -> dict[str, str]:
    """The entries of a sample that a column takes, as text."""
    texts = {}
    for name, value in entries.items():
        text = json.dumps(value) if isinstance(value, bool) else str(value).strip()
        missing = value is None or value != value or isinstance(value, list | dict)
        if name.encode() and not missing and len(text.encode()) <= MAX_TEXT_BYTES:
            texts[name] = text
    return texts
