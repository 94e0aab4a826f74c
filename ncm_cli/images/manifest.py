"""What is to be embedded: ids, image files and columns, from a table or a folder of images."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from ncm_cli.errors import InputError, UsageError, listing
from ncm_cli.images.files import (
    FoundFiles,
    absolute_text,
    check_depth,
    files_of_folder,
    find_files,
    guessed_layout,
    printable,
    walk_images,
)
from ncm_cli.images.options import EmbedOptions, parse_layout
from ncm_cli.store.columns import Column, NumericColumn
from ncm_cli.store.digests import MAX_TEXT_BYTES, require_few_columns
from ncm_cli.store.tables import Table, has_decimal_comma, read_table

CONTINUOUS_CLASSES = 20
"""More distinct fractions than this in a label column are a measurement, not classes."""

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which columns of a table are which; None is the default name, where the table has it."""

    id_col: str | None = None
    path_col: str | None = None
    label_col: str | None = None
    split_col: str | None = None
    col: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: EmbedOptions) -> Choice:
        """What the options of ``ncm embed`` say."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def resolved(self, columns: Sequence[str], *, with_files: bool) -> Choice:
        """The choice with the default names that a table has; the id is the path where need be."""

        def default(name: str) -> str | None:
            return name if name in columns else None

        path = self.path_col or ("path" if with_files else default("path"))
        return replace(
            self,
            id_col=self.id_col or default("id") or path or "id",
            path_col=path,
            label_col=self.label_col or default("label"),
            split_col=self.split_col or default("split"),
        )

    def kept(self, columns: Sequence[str]) -> list[str]:
        """The columns of a table that the store keeps, once the names are resolved."""
        named = {self.label_col, self.split_col, *self.col, *self.numeric}
        keys = {self.id_col, self.path_col}
        return [name for name in columns if name in named or (not self.col and name not in keys)]


@dataclass(frozen=True)
class Manifest:
    """The rows to embed, in order.

    Attributes
    ----------
    source
        The table or folder.
    ids
        Unique and not blank.
    files
        The image files; None when features come from an array.
    text
        One list of text for each column; blank is missing.
    numeric
        The columns that hold numbers.
    label_column, split_column
        Which of the columns they are, if any.
    notes
        What was decided on the way and is worth a line.
    warnings
        What is probably a mistake in the table or the folders' names.
    """

    source: Path
    ids: list[str]
    files: FoundFiles | None
    text: dict[str, list[str]]
    numeric: tuple[str, ...]
    label_column: str | None
    split_column: str | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def columns(self, rows: Sequence[int]) -> dict[str, Column | NumericColumn]:
        """The columns of some rows, with the categories that occur in them."""
        made: dict[str, Column | NumericColumn] = {}
        for name, values in self.text.items():
            texts = [values[row] for row in rows]
            made[name] = _numbers(name, texts) if name in self.numeric else _categories(name, texts)
        return made


def is_number(text: str) -> bool:
    """Whether text is a finite decimal number (``nan``, ``1_000`` and ``0x1`` are words)."""
    return bool(_NUMBER.fullmatch(text)) and math.isfinite(float(text))


def ordered_categories(values: Sequence[str]) -> tuple[str, ...]:
    """The distinct values that aren't blank: in numeric order if all are numbers, otherwise sorted."""
    distinct = {value for value in values if value}
    if all(map(is_number, distinct)):
        return tuple(sorted(distinct, key=lambda text: (float(text), text)))
    return tuple(sorted(distinct))


def _categories(name: str, values: list[str]) -> Column:
    categories = ordered_categories(values)
    code = {"": -1, **{category: i for i, category in enumerate(categories)}}
    return Column(name, np.array([code[value] for value in values], np.int32), categories)


def _numbers(name: str, values: list[str]) -> NumericColumn:
    return NumericColumn(name, np.array([float(value) if value else math.nan for value in values]))


def read_source(options: EmbedOptions) -> Manifest:
    """The images that ``ncm embed`` reads with these options: of a table, or of a folder."""
    if not options.source.is_dir():
        if options.layout is not None:
            raise UsageError("--layout is for folders", found=f"{options.source} is no folder")
        return read_manifest(options.source, Choice.of(options), root=options.root)
    if options.root is not None:
        raise UsageError("--root is for manifests", found=f"{options.source} is a folder")
    layout = None if options.layout is None else parse_layout(options.layout)
    return read_folder(options.source, layout, Choice.of(options))


def read_manifest(path: Path, choice: Choice, *, root: Path | None, with_files: bool = True) -> Manifest:
    """Read a table and look its image files up.

    Raises
    ------
    InputError
        The table can't be read, a column isn't there, an id is blank or repeated, a label is blank or a
        measurement, image files are missing (all are listed).
    """
    table = read_table(path)
    notes = [*table.notes]
    unnamed = choice.id_col is None and "id" not in table.columns
    choice = choice.resolved(table.columns, with_files=with_files)
    assert choice.id_col is not None
    ids = table.column(choice.id_col, option="--path-col" if choice.id_col == choice.path_col else "--id-col")
    if unnamed:
        notes.append(f"no column named 'id': {choice.id_col!r} is the id (--id-col chooses another)")
    check_ids(ids, table, choice.id_col)
    if choice.label_col is None:
        notes.append("no column named 'label': the store has no labels (--label-col chooses another)")
    for option, names in (
        ("--label-col", [choice.label_col]),
        ("--split-col", [choice.split_col]),
        ("--col", choice.col),
        ("--numeric", choice.numeric),
    ):
        for name in names:
            if name is not None:
                table.column(name, option=option)
    kept = choice.kept(table.columns)
    require_few_columns(len(kept), path)
    _check_values(table, kept, choice.label_col, choice.numeric)
    files = None
    if choice.path_col is not None and with_files:
        paths = table.column(choice.path_col, option="--path-col")
        base = absolute_text(root if root is not None else path.parent)
        files = find_files(paths, base, table.row_name, path)
    text = {name: table.values[name] for name in kept}
    label, split = choice.label_col, choice.split_col
    alike = alike_categories(text, label, {split, *choice.numeric})
    return Manifest(path, ids, files, text, choice.numeric, label, split, tuple(notes), alike)


def check_ids(ids: list[str], table: Table, name: str) -> None:
    """Refuse blank, repeated and overlong ids, all of them at once."""
    _check_lengths(table, [name], "choose another column with --id-col")
    blank = [table.row_name(i) for i, value in enumerate(ids) if not value]
    if blank:
        raise InputError("an id is blank", where=f"{table.path}, column {name!r}", found=listing(blank))
    if len(set(ids)) == len(ids):
        return
    rows: dict[str, list[str]] = {}
    for i, value in enumerate(ids):
        rows.setdefault(value, []).append(table.row_name(i))
    repeated = [f"{value!r} in {listing(places)}" for value, places in rows.items() if len(places) > 1]
    raise InputError(
        f"{len(repeated)} {'id is' if len(repeated) == 1 else 'ids are'} used more than once",
        where=f"{table.path}, column {name!r}",
        found=listing(repeated),
        expected="one row for each id",
        fix="remove the repeated rows, or choose another column with --id-col",
    )


def _check_lengths(table: Table, names: Sequence[str], fix: str) -> None:
    """Refuse text that no store takes, before any work."""
    for name in names:
        for i, value in enumerate(table.values[name]):
            if 4 * len(value) > MAX_TEXT_BYTES < len(value.encode()):
                raise InputError(
                    f"column {name!r} holds text that is too long",
                    where=f"{table.path}, {table.row_name(i)}",
                    found=f"{len(value.encode()):,} bytes: {value[:40]!r}...",
                    expected=f"at most {MAX_TEXT_BYTES:,} bytes",
                    fix=fix,
                )


def _check_values(table: Table, kept: list[str], label: str | None, numeric: tuple[str, ...]) -> None:
    _check_lengths(table, kept, "--col with each column to keep leaves the others out")
    for name in numeric:
        values = table.values[name]
        wrong = [i for i, value in enumerate(values) if value and not is_number(value)]
        if wrong:
            commas = all(has_decimal_comma(values[i]) for i in wrong)
            raise InputError(
                f"column {name!r} holds " + ("decimal commas" if commas else "something other than numbers"),
                where=table.path,
                found=listing(f"{values[i]!r} in {table.row_name(i)}" for i in wrong),
                fix=_decimal_points(table)
                if commas
                else f"leave it out of --numeric to read {name!r} as categories",
            )
    if label is None:
        return
    values = table.values[label]
    blank = [table.row_name(i) for i, value in enumerate(values) if not value]
    if blank:
        raise InputError(
            f"{len(blank)} {'label is' if len(blank) == 1 else 'labels are'} blank",
            where=f"{table.path}, column {label!r}",
            found=listing(blank),
            fix="fill them in, or embed the rows without a label from a manifest of their own",
        )
    if label not in numeric:
        _refuse_measurements(table, label, values)


def _decimal_points(table: Table) -> str:
    """How to get rid of decimal commas, by a command where no comma separates columns."""
    command = "" if table.delimiter == "," else r": sed -E 's/([0-9]),([0-9])/\1.\2/g' OLD > NEW"
    return f"write decimal points{command}"


def _refuse_measurements(table: Table, label: str, values: list[str]) -> None:
    """0.0 and 1.0 are classes, and so are a few half stars; 0.13, 0.52 ... are a regression target."""
    distinct = set(values)
    commas = any(map(has_decimal_comma, distinct))
    numbers = {value: value.replace(",", ".") if has_decimal_comma(value) else value for value in distinct}
    if not all(map(is_number, numbers.values())):
        return
    fractions = {value for value, number in numbers.items() if not float(number).is_integer()}
    if fractions and (len(fractions) > CONTINUOUS_CLASSES or 2 * len(distinct) > len(values)):
        first = next(i for i, value in enumerate(values) if value in fractions)
        raise InputError(
            f"column {label!r} holds measurements, not classes",
            where=f"{table.path}, {table.row_name(first)}",
            found=f"{values[first]!r}, one of {len(distinct)} different values in {len(values)} rows",
            fix=(f"{_decimal_points(table)}; then " if commas else "")
            + f"--numeric {label} for a regression target, or --label-col with another column",
        )


def read_folder(folder: Path, layout: tuple[str, ...] | None, choice: Choice) -> Manifest:
    """The images under a folder, whose levels ``layout`` names; ids are the paths from the folder.

    Without a layout, images one folder down have that folder's name as their label, unless others lie
    elsewhere. Files that can't be read, or whose names aren't UTF-8, are listed too: they fail later.
    """
    for option, value in (("--id-col", choice.id_col), ("--path-col", choice.path_col)):
        if value is not None:
            raise UsageError(f"{option} is for tables", found=f"{folder} is a folder", fix="leave it out")
    images, others = walk_images(folder)
    notes = []
    if layout is None:
        layout = guessed_layout(folder, images)
        notes.append("the folders' names are the labels (--layout label)" if layout else "no labels")
    else:
        check_depth(folder, images, len(layout))
    if others:
        notes.append(f"{len(others)} other files are left out: {listing(others)}")
    ids = [printable(image) for image in images]
    parts = [path.split("/")[:-1] for path in ids]
    text = {name: [row[level] for row in parts] for level, name in enumerate(layout)}
    label = _level(choice.label_col, "label", layout, "--label-col", folder)
    split = _level(choice.split_col, "split", layout, "--split-col", folder)
    for name in (*choice.col, *choice.numeric):
        _level(name, name, layout, "--col", folder)
    kept = replace(choice, label_col=label, split_col=split).kept(layout)
    text = {name: values for name, values in text.items() if name in kept}
    files = files_of_folder(folder, images)
    alike = alike_categories(text, label, {split, *choice.numeric})
    return Manifest(folder, ids, files, text, choice.numeric, label, split, tuple(notes), alike)


def alike_categories(
    text: dict[str, list[str]], label: str | None, others: Collection[str | None]
) -> tuple[str, ...]:
    """A warning for each column with categories that differ in case, blanks or Unicode form alone.

    Columns of free text, with another value in most rows, have none unless they are the label.
    """
    warnings = []
    for name, values in text.items():
        distinct = set(values)
        if name in others or (name != label and 2 * len(distinct) > len(values)):
            continue
        same: dict[str, list[str]] = {}
        for value in sorted(distinct):
            same.setdefault(_folded(value), []).append(value)
        groups = [" and ".join(_told_apart(group)) for group in same.values() if len(group) > 1]
        if groups:
            warnings.append(
                f"values of column {name!r} that differ only in case, blanks or Unicode form are categories "
                f"of their own: {listing(groups)}; write them alike if they are one"
            )
    return tuple(warnings)


def _folded(value: str) -> str:
    """The text without case, blanks, invisible characters and differences of form."""
    form = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", value).casefold())
    return "".join(c for c in form if not c.isspace() and unicodedata.category(c) != "Cf")


def _told_apart(values: Sequence[str]) -> list[str]:
    """The values as a message shows them: what looks the same by its code points."""
    visible = {unicodedata.normalize("NFKC", value) for value in values}
    return [ascii(value) if len(visible) < len(values) else repr(value) for value in values]


def _level(name: str | None, default: str, layout: tuple[str, ...], option: str, folder: Path) -> str | None:
    if name is not None and name not in layout:
        raise InputError(
            f"no folder level named {name!r} ({option})",
            where=folder,
            expected=f"one of the layout's: {listing(layout)}",
        )
    return name or (default if default in layout else None)
