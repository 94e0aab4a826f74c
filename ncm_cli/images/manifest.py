"""The manifest of rows to embed (ids, image files and columns), and reading it from a table."""

from __future__ import annotations

import math
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, as_written, listing
from ncm_cli.images.options import SourceChoice
from ncm_cli.images.paths import is_remote, native
from ncm_cli.images.remote import require_installed
from ncm_cli.store.columns import Column, ImageFile, NumericColumn
from ncm_cli.store.digests import MAX_TEXT_BYTES, digest_of, require_few_columns
from ncm_cli.store.table import Table
from ncm_cli.store.tables import plain_numbers, read_table

# Names may be bytes, and there is one stat call for each row, so this module uses os.path.
# ruff: noqa: PTH100, PTH116, PTH118, PTH206

MAX_SHOWN_FILES = 100
"""Most missing files named in a message."""

MAX_FRACTIONS = 20
"""A label column with more distinct fractions holds measurements, not classes."""

FileFacts = tuple[str, int, int]
"""Path, size in bytes and time in nanoseconds of a file; size −1 and time 0 if they aren't known."""

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_BETWEEN_DIGITS = re.compile("[0-9],[0-9]")


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """The names of a table's columns by role; None for the default name, if the table has it."""

    id_col: str | None = None
    path_col: str | None = None
    label_col: str | None = None
    split_col: str | None = None
    numeric: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: SourceChoice) -> ColumnNames:
        """The column names that the options of a command name."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def resolved(self, columns: Sequence[str], *, with_files: bool) -> ColumnNames:
        """The names with defaults filled in, if the table has them; the path stands in for the id.

        ``id_col`` is None where there is neither, and rows are numbered.
        """

        def default(name: str) -> str | None:
            return name if name in columns else None

        path = self.path_col or ("path" if with_files else default("path"))
        return replace(
            self,
            id_col=self.id_col or default("id") or path,
            path_col=path,
            label_col=self.label_col or default("label"),
            split_col=self.split_col or default("split"),
        )

    def chosen(self) -> list[tuple[str, str]]:
        """(option, column) for each option that names a column."""
        roles = [("--label-col", self.label_col), ("--split-col", self.split_col)]
        numeric = [("--numeric", name) for name in self.numeric]
        return [(option, name) for option, name in roles if name] + numeric

    def kept(self, columns: Sequence[str]) -> list[str]:
        """The columns of a table that the store keeps; these names must be resolved."""
        roles, keys = {self.label_col, self.split_col, *self.numeric}, {self.id_col, self.path_col}
        return [name for name in columns if name in roles or name not in keys]


@dataclass(frozen=True)
class Manifest:
    """The rows to embed, in order; ``ids`` are unique and not blank.

    ``files``, in the same order and without digests, is None if the features come from an array. ``text`` has
    a list for each column, in which missing values are "". ``numeric`` names the columns that hold numbers.
    ``notes`` say which columns were chosen, ``warnings`` what is probably a mistake in the table or in names
    of folders. ``numbered`` says that the ids are row numbers, which mean nothing in another table.
    """

    source: Path
    ids: list[str]
    files: list[ImageFile] | None
    text: dict[str, list[str]]
    numeric: tuple[str, ...]
    label_column: str | None
    split_column: str | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    numbered: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def row_numbers_of(self) -> str | None:
        """The digest of the table whose row numbers are the ids; None if a column has the ids."""
        return digest_of([len(self), self.text]) if self.numbered else None

    def kept(self, rows: Sequence[int]) -> dict[str, Any]:
        """Some rows as arguments of `write_features`."""
        roles = {"label_column": self.label_column, "split_column": self.split_column}
        return {"ids": [self.ids[row] for row in rows], "columns": self.columns(rows), **roles}

    def columns(self, rows: Sequence[int]) -> dict[str, Column | NumericColumn]:
        """The columns of some rows, with the categories that occur in them."""
        columns: dict[str, Column | NumericColumn] = {}
        for name, values in self.text.items():
            texts = [values[row] for row in rows]
            if name in self.numeric:
                numbers = [float(text) if text else math.nan for text in texts]
                columns[name] = NumericColumn(name, np.array(numbers, np.float64))
            else:
                categories = ordered_categories(texts)
                code = {"": -1} | {category: i for i, category in enumerate(categories)}
                columns[name] = Column(name, np.array([code[text] for text in texts], np.int32), categories)
        return columns


ID_COLUMN = "__key__"
"""The id column of folders and archives: WebDataset's name, which isn't an entry of a sample."""


class NamedRows(Table):
    """Rows of a folder or an archive, which messages name by id."""

    def row_name(self, index: int) -> str:
        """The row's id."""
        return self.values[ID_COLUMN][index]


def is_number(text: str) -> bool:
    """Whether text is a finite decimal number; ``nan``, ``1_000`` and ``0x1`` aren't."""
    return bool(_NUMBER.fullmatch(text)) and math.isfinite(float(text))


def ordered_categories(values: Sequence[str]) -> tuple[str, ...]:
    """The distinct values that aren't blank, in numeric order if all are numbers, otherwise as text."""
    distinct = {value for value in values if value}
    if all(map(is_number, distinct)):
        return tuple(sorted(distinct, key=lambda text: (float(text), text)))
    return tuple(sorted(distinct))


def read_manifest(
    path: Path, names: ColumnNames, *, root: Path | None, with_files: bool = True, images_only: bool = False
) -> Manifest:
    """Read a table and look up its image files; ``images_only`` ignores other columns.

    Raises
    ------
    InputError
        The table can't be read, a column is missing, an id is blank or repeated, a label is blank or a
        measurement, or image files are missing (all are listed).
    """
    base = absolute_text(root if root is not None else path.parent) if with_files else None
    return manifest_of(read_table(path), names, base=base, images_only=images_only)


def manifest_of(
    table: Table,
    names: ColumnNames,
    *,
    base: str | None = None,
    files: Sequence[FileFacts] | None = None,
    images_only: bool = False,
) -> Manifest:
    """The manifest of a table; its files are ``files``, or found by its paths from ``base`` on, or none."""
    path, notes, with_files = table.path, [*table.notes], base is not None or files is not None
    unnamed = names.id_col is None and "id" not in table.columns
    names = names.resolved(table.columns, with_files=with_files)
    if images_only:
        names = replace(names, label_col=None, split_col=None)
    id_col, path_col, label, split = names.id_col, names.path_col, names.label_col, names.split_col
    if id_col is None:
        ids = list(map(str, range(len(table))))
        notes.append("no column named 'id': rows are numbered from 0 (--id-col chooses a column)")
    else:
        chosen_by = "--path-col" if id_col == path_col else "--id-col"
        ids = table.column(id_col, option=None if images_only else chosen_by)
        check_ids(ids, table, id_col)
    if unnamed and id_col is not None:
        notes.append(f"no column named 'id': {id_col!r} is the id (--id-col chooses another)")
    if label is None:
        none = "no column named 'label': the store has no labels (--label-col names another)"
        notes.append("no labels" if set(table.columns) == {ID_COLUMN} else none)
    for option, name in names.chosen():
        table.column(name, option=option)
    kept = [] if images_only else names.kept(table.columns)
    require_few_columns(len(kept), path)
    _check_values(table, kept, label, names.numeric)
    if path_col is not None and base is not None:
        paths = table.column(path_col, option=None if images_only else "--path-col")
        files = find_files(paths, base, table.row_name, path)
    images = None
    if files is not None:
        images = [ImageFile(id, *facts) for id, facts in zip(ids, files, strict=True)]
    text = {name: table.values[name] for name in kept}
    alike = alike_categories(text, label, {split, *names.numeric})
    return Manifest(
        path, ids, images, text, names.numeric, label, split, tuple(notes), alike, numbered=id_col is None
    )


def check_ids(ids: list[str], table: Table, name: str) -> None:
    """Refuse blank, repeated and overlong ids."""
    where = f"{table.path}, column {name!r}"
    _check_lengths(table, [name], "choose another column with --id-col")
    blank = [table.row_name(i) for i, value in enumerate(ids) if not value]
    if blank:
        raise InputError("an id is blank", where=where, found=listing(blank))
    if len(set(ids)) == len(ids):
        return
    rows: dict[str, list[str]] = {}
    for i, value in enumerate(ids):
        rows.setdefault(value, []).append(table.row_name(i))
    repeated = [f"{value!r} in {listing(places)}" for value, places in rows.items() if len(places) > 1]
    raise InputError(
        f"{len(repeated)} {'id is' if len(repeated) == 1 else 'ids are'} used more than once",
        where=where,
        found=listing(repeated),
        expected="one row for each id",
        fix="remove the repeated rows, or choose another column with --id-col",
    )


def _check_lengths(table: Table, names: Sequence[str], fix: str) -> None:
    """Refuse text that is too long for a store."""
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
    """Refuse words in numeric columns, blank labels, and measurements in the label column."""
    _check_lengths(table, kept, "shorten it, or leave that column out of the table")
    for name in numeric:
        values = table.values[name]
        wrong = [i for i, value in enumerate(values) if value and not is_number(value)]
        if wrong:
            meant = plain_numbers(filter(None, values))
            what, fix = (
                "something other than numbers",
                f"leave it out of --numeric to read {name!r} as categories",
            )
            if meant and (too_large := [i for i in wrong if not is_number(meant[values[i]] or "0")]):
                wrong, what = too_large, "numbers that float64 can't hold"
            elif meant is not None:
                what, fix = _separators(table, meant)
            raise InputError(
                f"column {name!r} holds {what}",
                where=table.path,
                found=listing(f"{values[i]!r} in {table.row_name(i)}" for i in wrong),
                fix=fix,
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
    # 0.0 and 1.0 are classes, and so are 0.5, 1.5 ...; 0.13, 0.52 ... are a regression target.
    distinct = set(values)
    meant = plain_numbers(distinct)
    if label in numeric or meant is None or not all(is_number(value or "0") for value in meant.values()):
        return
    numbers = {value: number or value.replace(",", ".") for value, number in meant.items()}
    fractions = {value for value, number in numbers.items() if not float(number).is_integer()}
    if fractions and (len(fractions) > MAX_FRACTIONS or 2 * len(distinct) > len(values)):
        first = next(i for i, value in enumerate(values) if value in fractions)
        raise InputError(
            f"column {label!r} holds measurements, not classes",
            where=f"{table.path}, {table.row_name(first)}",
            found=f"{values[first]!r}, one of {len(distinct)} different values in {len(values)} rows",
            fix=("" if all(map(is_number, distinct)) else f"{_separators(table, meant)[1]}; then ")
            + f"--numeric {label} for a regression target, or --label-col with another column",
        )


def _separators(table: Table, meant: dict[str, str]) -> tuple[str, str]:
    """The kind of separators in a column's numbers, in words, and the advice."""
    doubtful = [value for value, number in meant.items() if not number]
    if doubtful:
        value = doubtful[0]
        thousands, decimal = re.sub("[.,]", "", value), value.replace(",", ".")
        return "separators that may be decimal, or between thousands", (
            f"write what is meant, {thousands} or {decimal} for {value!r}"
        )
    changed = {value: number for value, number in meant.items() if value != number}
    if any(value.replace(",", ".") != number for value, number in changed.items()):
        examples = (f"{number} for {value!r}" for value, number in changed.items())
        return "separators of thousands", f"write numbers without them: {listing(examples, 3)}"
    # The sed command changes all columns, and would change commas that separate columns.
    safe = table.delimiter != ","
    for values in table.values.values():
        if touched := {value for value in values if _BETWEEN_DIGITS.search(value)}:
            numbers = plain_numbers(filter(None, values)) or {}
            safe = safe and all(numbers.get(value) == value.replace(",", ".") for value in touched)
    sed = r": sed -E 's/([0-9]),([0-9])/\1.\2/g' OLD > NEW" if safe else ""
    return "decimal commas", f"write decimal points{sed}"


def alike_categories(
    text: dict[str, list[str]], label: str | None, others: Collection[str | None]
) -> tuple[str, ...]:
    """A warning for each column with categories that differ only in case, blanks or Unicode form.

    Columns of free text, whose values are mostly distinct, are skipped unless they are the label.
    """

    def folded(value: str) -> str:  # without case, blanks, invisible characters and Unicode forms
        form = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", value).casefold())
        return "".join(c for c in form if not c.isspace() and unicodedata.category(c) != "Cf")

    def told_apart(values: Sequence[str]) -> str:  # by code points if they look the same
        visible = {unicodedata.normalize("NFKC", value) for value in values}
        return " and ".join(ascii(value) if len(visible) < len(values) else repr(value) for value in values)

    warnings = []
    for name, values in text.items():
        distinct = set(values)
        if name in others or (name != label and 2 * len(distinct) > len(values)):
            continue
        same: dict[str, list[str]] = {}
        for value in sorted(distinct):
            same.setdefault(folded(value), []).append(value)
        groups = [told_apart(group) for group in same.values() if len(group) > 1]
        if groups:
            warnings.append(
                f"values of column {name!r} that differ only in case, blanks or Unicode form are different "
                f"categories: {listing(groups)}; write them alike if they are the same"
            )
    return tuple(warnings)


def absolute_text(path: str | os.PathLike[str]) -> str:
    """The absolute path as text that can be stored; a name that isn't UTF-8 is an `InputError`."""
    if is_remote(text := as_written(Path(path))):
        return text.rstrip("/")
    try:
        return os.fsencode(os.path.abspath(path)).decode("utf-8")
    except UnicodeDecodeError:
        what, fix = "a file name that isn't UTF-8", "rename it; names are stored as UTF-8"
        raise InputError(what, where=repr(os.fsencode(path)), fix=fix) from None


def find_files(
    paths: Sequence[str], base: str, row_name: Callable[[int], str], where: Path
) -> list[FileFacts]:
    """Look up all files before any work, except those with a scheme, whose errors come when they are read.

    A relative path starts from ``base``. Backslashes are tried as slashes, and paths in both Unicode normal
    forms, since a manifest written on one system is often read on another.

    Raises
    ------
    InputError
        Some paths are blank, missing, folders or not regular files (all are listed).
    """
    files: list[FileFacts] = []
    problems: list[str] = []
    for i, path in enumerate(paths):
        reason = "is missing" if path else "is blank"
        if path and (is_remote(path) or is_remote(base)):
            files.append((path if is_remote(path) else f"{base}/{path}", -1, 0))
            continue
        for candidate in _spellings(path, base) if path else ():
            try:
                status = os.stat(native(candidate))
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    reason = f"can't be read: {(error.strerror or str(error)).lower()}"
                continue
            if stat.S_ISREG(status.st_mode):
                files.append((candidate, status.st_size, status.st_mtime_ns))
                reason = ""
                break
            reason = "is a folder" if stat.S_ISDIR(status.st_mode) else "isn't a regular file"
        problems += [f"{row_name(i)}: {path!r} {reason}"] if reason else []
    if problems:
        rest = [f"and {len(problems) - MAX_SHOWN_FILES} more"] if len(problems) > MAX_SHOWN_FILES else []
        raise InputError(
            f"{len(problems)} of {len(paths)} image files can't be used",
            where=where,
            found="\n    ".join(["", *problems[:MAX_SHOWN_FILES], *rest]),
            expected=f"files, relative paths starting from {base}",
            fix="--root FOLDER if relative paths start elsewhere; absolute paths are taken as they are",
        )
    for path in {path.partition("://")[0]: path for path, _, _ in files if is_remote(path)}.values():
        require_installed(path)
    return files


def _spellings(path: str, base: str) -> Iterator[str]:
    """The names to try for a file, the most likely one first."""
    slashed = [path.replace("\\", "/")] if "\\" in path and os.sep == "/" else []
    for spelling in (path, *slashed):
        forms = (
            [] if spelling.isascii() else [unicodedata.normalize(form, spelling) for form in ("NFC", "NFD")]
        )
        for name in dict.fromkeys((spelling, *forms)):
            written = os.path.join(base, name)
            # After a link to a folder, ".." isn't the folder before it in the text, so such a path is kept.
            yield written if ".." in written.split(os.sep) else os.path.normpath(written)
