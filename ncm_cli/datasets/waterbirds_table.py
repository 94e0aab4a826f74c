"""Reading Waterbirds' metadata.csv in the forms that are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ncm_cli.errors import InputError, listing, nearest
from ncm_cli.store.tables import read_table

NAMES = {
    "id": ("img_id", "id"),
    "file": ("img_filename", "filename", "image_filename"),
    "label": ("y", "label"),
    "split": ("split",),
    "place": ("place", "a"),
    "place_file": ("place_filename",),
}
"""What is needed, and the columns that may hold it."""

SPLITS = {
    "0": "train",
    "1": "val",
    "2": "test",
    **{name: name for name in ("train", "val", "test", "counterfactual")},
    "validation": "val",
    "cf": "counterfactual",
}

LABELS = {"0": "landbird", "1": "waterbird"}
PLACES = {"0": "land", "1": "water"}

UNPAIRED = ("", "-1", "nan", "none")


@dataclass(frozen=True, slots=True)
class Bird:
    """One row of the metadata."""

    line: int
    id: str
    file: str
    label: str
    place: str
    split: str
    place_file: str
    cf: str
    """The text of the ``cf`` column; empty if there is none or the row has no twin."""


def read_metadata(folder: Path) -> tuple[list[Bird], bool]:
    """The rows of ``metadata.csv``, and whether it has a ``cf`` column."""
    path = folder / "metadata.csv"
    if not path.is_file():
        raise InputError("no metadata.csv in the Waterbirds folder", where=folder)
    table = read_table(path, what="metadata.csv")
    columns = _columns(table.columns, path)
    birds = [
        _bird(row, columns, path, line) for row, line in zip(table.rows, table.line_numbers, strict=True)
    ]
    _require_unique(birds, path)
    return birds, "cf" in columns


def _columns(found: Sequence[str], path: Path) -> dict[str, str]:
    columns: dict[str, str] = {}
    for what, names in NAMES.items():
        name = next((name for name in names if name in found), None)
        if name is None and what not in ("place_file", "id"):
            close = nearest(names[0], found)
            raise InputError(
                f"no column {' or '.join(names)}",
                where=path,
                found=listing(found),
                fix=f"rename {close!r}?" if close else None,
            )
        if name is not None:
            columns[what] = name
    if "cf" in found:
        columns["cf"] = "cf"
    return columns


def _bird(row: dict[str, str], columns: dict[str, str], path: Path, line: int) -> Bird:
    values = {what: row[name] for what, name in columns.items()}
    for what, known in (("label", LABELS), ("place", PLACES), ("split", SPLITS)):
        if values[what] not in known and values[what] not in known.values():
            raise InputError(
                f"a value of column {columns[what]!r} that can't be read",
                where=f"{path}, line {line}",
                found=repr(values[what]),
                expected=" or ".join(known),
            )
    if not values["file"]:
        raise InputError("a row without an image", where=f"{path}, line {line}")
    cf = values.get("cf", "")
    return Bird(
        line=line,
        id=values.get("id") or values["file"],
        file=values["file"],
        label=LABELS.get(values["label"], values["label"]),
        place=PLACES.get(values["place"], values["place"]),
        split=SPLITS[values["split"]],
        place_file=values.get("place_file", ""),
        cf="" if cf.lower() in UNPAIRED else cf,
    )


def _require_unique(birds: list[Bird], path: Path) -> None:
    lines: dict[str, int] = {}
    for bird in birds:
        if bird.file in lines:
            raise InputError(
                f"the image {bird.file!r} twice", where=f"{path}, lines {lines[bird.file]} and {bird.line}"
            )
        lines[bird.file] = bird.line


def twins(birds: list[Bird], path: Path) -> list[tuple[Bird, Bird]]:
    """The pairs that the ``cf`` column names, (original, counterfactual).

    A value is either a number that exactly two rows share, or the id or image of the row's twin.
    """
    named = [bird for bird in birds if bird.cf]
    sharing: dict[str, list[Bird]] = {}
    for bird in named:
        sharing.setdefault(bird.cf, []).append(bird)
    if named and all(len(group) == 2 for group in sharing.values()):
        return [_ordered(a, b) for a, b in sharing.values()]
    by_name = {name: bird for bird in birds for name in (bird.file, bird.id)}
    pairs: dict[frozenset[str], tuple[Bird, Bird]] = {}
    for bird in named:
        twin = by_name.get(bird.cf)
        if twin is None or twin is bird:
            raise InputError(
                "a value of column 'cf' that names no other row",
                where=f"{path}, line {bird.line}",
                found=repr(bird.cf),
                expected="the img_id or image of the twin, or a number that exactly two rows share",
            )
        pairs[frozenset((bird.file, twin.file))] = _ordered(bird, twin)
    return list(pairs.values())


def _ordered(a: Bird, b: Bird) -> tuple[Bird, Bird]:
    return (b, a) if a.split == "counterfactual" else (a, b)
