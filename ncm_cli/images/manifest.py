"""What is to be embedded: ids, image files and columns, from a table or a folder of images."""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ncm_cli.errors import InputError, UsageError, as_written, listing
from ncm_cli.images.options import EmbedOptions, parse_layout
from ncm_cli.images.paths import is_remote, local_path, look_up, native, within
from ncm_cli.images.remote import DEEPEST, list_remote, require_installed
from ncm_cli.store.columns import Column, Files, NumericColumn
from ncm_cli.store.digests import MAX_TEXT_BYTES, require_few_columns
from ncm_cli.store.tables import Table, plain_numbers, read_table

if TYPE_CHECKING:
    from ncm_cli.finetune.options import FinetuneOptions

# Names may be bytes here, and a stat a row must stay cheap, so this module keeps to os.path.
# ruff: noqa: PTH100, PTH116, PTH118, PTH122, PTH206

SHOWN_FILES = 100
"""Missing files named in one message; more than that says little."""

CONTINUOUS_CLASSES = 20
"""More distinct fractions than this in a label column are a measurement, not classes."""

IMAGE_SUFFIXES = frozenset(
    {".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2c", ".j2k", ".jfif", ".jp2"}
    | {".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm"}
    | {".tga", ".tif", ".tiff", ".webp"}
)
"""Names that are taken for images in a folder, besides those without any suffix; content decides the rest."""

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_BETWEEN_DIGITS = re.compile("[0-9],[0-9]")


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Which columns of a table are which; None is the default name, where the table has it."""

    id_col: str | None = None
    path_col: str | None = None
    label_col: str | None = None
    split_col: str | None = None
    numeric: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: EmbedOptions | FinetuneOptions) -> ColumnNames:
        """What the options of a command that reads images say."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def resolved(self, columns: Sequence[str], *, with_files: bool) -> ColumnNames:
        """The names with the defaults that a table has; the id is the path where need be."""

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

    def chosen(self) -> list[tuple[str, str]]:
        """Each option that names a column, and the column."""
        own = [("--label-col", self.label_col), ("--split-col", self.split_col)]
        return [(option, name) for option, name in own if name] + [
            ("--numeric", name) for name in self.numeric
        ]

    def kept(self, columns: Sequence[str]) -> list[str]:
        """The columns of a table that the store keeps, once the names are resolved."""
        roles, keys = {self.label_col, self.split_col, *self.numeric}, {self.id_col, self.path_col}
        return [name for name in columns if name in roles or name not in keys]


@dataclass(frozen=True)
class Manifest:
    """The rows to embed, in order; ``ids`` are unique and not blank.

    ``files``, without their digests, is None when features come from an array; ``text`` has one list for each
    column, blank where a value is missing; ``numeric`` are the columns that hold numbers. ``notes`` say what
    was decided on the way, ``warnings`` what is probably a mistake in the table or the folders' names.
    """

    source: Path
    ids: list[str]
    files: Files | None
    text: dict[str, list[str]]
    numeric: tuple[str, ...]
    label_column: str | None
    split_column: str | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def kept(self, rows: Sequence[int]) -> dict[str, Any]:
        """Some rows as a store keeps them."""
        roles = {"label_column": self.label_column, "split_column": self.split_column}
        return {"ids": [self.ids[row] for row in rows], "columns": self.columns(rows), **roles}

    def columns(self, rows: Sequence[int]) -> dict[str, Column | NumericColumn]:
        """The columns of some rows, with the categories that occur in them."""
        made: dict[str, Column | NumericColumn] = {}
        for name, values in self.text.items():
            texts = [values[row] for row in rows]
            if name in self.numeric:
                numbers = [float(text) if text else math.nan for text in texts]
                made[name] = NumericColumn(name, np.array(numbers, np.float64))
            else:
                categories = ordered_categories(texts)
                code = {"": -1} | {category: i for i, category in enumerate(categories)}
                made[name] = Column(name, np.array([code[text] for text in texts], np.int32), categories)
        return made


ITSELF = "__key__"
"""The column of ids of what is in no table: WebDataset's name, which no entry of a sample has."""


class NamedRows(Table):
    """Rows that messages name by their ids: of a folder or an archive."""

    def row_name(self, index: int) -> str:
        """The row's id."""
        return self.values[ITSELF][index]


def is_number(text: str) -> bool:
    """Whether text is a finite decimal number (``nan``, ``1_000`` and ``0x1`` are words)."""
    return bool(_NUMBER.fullmatch(text)) and math.isfinite(float(text))


def ordered_categories(values: Sequence[str]) -> tuple[str, ...]:
    """The distinct values that aren't blank: in numeric order if all are numbers, otherwise sorted."""
    distinct = {value for value in values if value}
    if all(map(is_number, distinct)):
        return tuple(sorted(distinct, key=lambda text: (float(text), text)))
    return tuple(sorted(distinct))


def read_source(options: EmbedOptions | FinetuneOptions) -> Manifest:
    """The rows that a command reads with these options: of a table, a folder or tar archives."""
    source, names, with_files = options.source, ColumnNames.of(options), options.from_array is None
    text = as_written(source)
    archives = re.search(r"\.tar\W*$", text) and not source.is_dir()
    if archives and with_files and not (options.root or options.layout):
        from ncm_cli.images.archives import read_archives

        return read_archives(text, names)
    if not (is_remote(text) or source.is_dir()):
        if options.layout is not None:
            raise UsageError("--layout is for folders", found=f"{text} is no folder")
        return read_manifest(source, names, root=options.root, with_files=with_files)
    if not with_files:
        fix = "write a CSV with the ids and labels in the order of the array's rows"
        raise UsageError("--from-array needs a manifest", found=f"{text} is a folder", fix=fix)
    if options.root is not None:
        raise UsageError("--root is for manifests", found=f"{text} is a folder")
    return read_folder(source, parse_layout(options.layout) if options.layout else None, names)


def read_manifest(
    path: Path, names: ColumnNames, *, root: Path | None, with_files: bool = True, images_only: bool = False
) -> Manifest:
    """Read a table and look its image files up; with ``images_only`` whatever its other columns hold.

    Raises
    ------
    InputError
        The table can't be read, a column isn't there, an id is blank or repeated, a label is blank or a
        measurement, image files are missing (all are listed).
    """
    base = absolute_text(root if root is not None else path.parent) if with_files else None
    return manifest_of(read_table(path), names, base=base, images_only=images_only)


def manifest_of(
    table: Table,
    names: ColumnNames,
    *,
    base: str | None = None,
    files: Files | None = None,
    images_only: bool = False,
) -> Manifest:
    """The rows of a table, whose files are known, or named from ``base`` on; without either it has none."""
    path, notes, with_files = table.path, [*table.notes], base is not None or files is not None
    unnamed = names.id_col is None and "id" not in table.columns
    names = names.resolved(table.columns, with_files=with_files)
    if images_only:
        names = replace(names, label_col=None, split_col=None)
    id_col, path_col, label, split = names.id_col, names.path_col, names.label_col, names.split_col
    assert id_col is not None
    ids = table.column(id_col, option="--path-col" if id_col == path_col else "--id-col")
    if unnamed:
        notes.append(f"no column named 'id': {id_col!r} is the id (--id-col chooses another)")
    check_ids(ids, table, id_col)
    if label is None:
        none = "no column named 'label': the store has no labels (--label-col names another)"
        notes.append("no labels" if set(table.columns) == {ITSELF} else none)
    for option, name in names.chosen():
        table.column(name, option=option)
    kept = [] if images_only else names.kept(table.columns)
    require_few_columns(len(kept), path)
    _check_values(table, kept, label, names.numeric)
    if path_col is not None and base is not None:
        files = find_files(table.column(path_col, option="--path-col"), base, table.row_name, path)
    text = {name: table.values[name] for name in kept}
    alike = alike_categories(text, label, {split, *names.numeric})
    return Manifest(path, ids, files, text, names.numeric, label, split, tuple(notes), alike)


def check_ids(ids: list[str], table: Table, name: str) -> None:
    """Refuse blank, repeated and overlong ids, all of them at once."""
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
    """Refuse words in numeric columns, blank labels, and measurements where classes are meant."""
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
            if meant is not None:
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
    # 0.0 and 1.0 are classes, and so are a few half stars; 0.13, 0.52 ... are a regression target.
    distinct = set(values)
    meant = plain_numbers(distinct)
    if label in numeric or meant is None or not all(is_number(value or "0") for value in meant.values()):
        return
    numbers = {value: number or value.replace(",", ".") for value, number in meant.items()}
    fractions = {value for value, number in numbers.items() if not float(number).is_integer()}
    if fractions and (len(fractions) > CONTINUOUS_CLASSES or 2 * len(distinct) > len(values)):
        first = next(i for i, value in enumerate(values) if value in fractions)
        raise InputError(
            f"column {label!r} holds measurements, not classes",
            where=f"{table.path}, {table.row_name(first)}",
            found=f"{values[first]!r}, one of {len(distinct)} different values in {len(values)} rows",
            fix=("" if all(map(is_number, distinct)) else f"{_separators(table, meant)[1]}; then ")
            + f"--numeric {label} for a regression target, or --label-col with another column",
        )


def _separators(table: Table, meant: dict[str, str]) -> tuple[str, str]:
    """What stands in numbers that aren't written as programs write them, and what to do."""
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
    # A command changes every column, and would change the separators of a table with commas.
    safe = table.delimiter != ","
    for values in table.values.values():
        if touched := {value for value in values if _BETWEEN_DIGITS.search(value)}:
            own = plain_numbers(filter(None, values)) or {}
            safe = safe and all(own.get(value) == value.replace(",", ".") for value in touched)
    sed = r": sed -E 's/([0-9]),([0-9])/\1.\2/g' OLD > NEW" if safe else ""
    return "decimal commas", f"write decimal points{sed}"


def alike_categories(
    text: dict[str, list[str]], label: str | None, others: Collection[str | None]
) -> tuple[str, ...]:
    """A warning for each column with categories that differ in case, blanks or Unicode form alone.

    Columns of free text, with another value in most rows, have none unless they are the label.
    """

    def folded(value: str) -> str:  # without case, blanks, invisible characters and differences of form
        form = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", value).casefold())
        return "".join(c for c in form if not c.isspace() and unicodedata.category(c) != "Cf")

    def told_apart(values: Sequence[str]) -> str:  # what looks the same by its code points
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
                f"values of column {name!r} that differ only in case, blanks or Unicode form are categories "
                f"of their own: {listing(groups)}; write them alike if they are one"
            )
    return tuple(warnings)


def read_folder(folder: Path, layout: tuple[str, ...] | None, names: ColumnNames) -> Manifest:
    """The images under a folder, whose levels ``layout`` names; ids are the paths from the folder.

    Without a layout, images one folder down have that folder's name as their label, unless others lie
    elsewhere. Files that can't be read, or whose names aren't UTF-8, are listed too: they fail later.
    """
    for option, value in (("--id-col", names.id_col), ("--path-col", names.path_col)):
        if value is not None:
            raise UsageError(
                f"{option} is for tables", found=f"{as_written(folder)} is a folder", fix="leave it out"
            )
    images, others = walk_images(folder)
    notes = []
    if layout is None:
        levels = {path.count("/") for path in images}
        if len(levels) == 1 and min(levels) > 1:  # folders in folders mean something
            raise InputError(
                "what the folders mean must be said",
                where=folder,
                found=f"images by the number of folders they lie in: {_depths(images)}",
                fix=_LAYOUT,
            )
        layout = ("label",) if levels == {1} else ()
        notes += ["the folders' names are the labels (--layout label)"] if layout else []
    else:
        check_depth(folder, images, len(layout))
    if others:
        notes.append(f"{len(others)} other files are left out: {listing(others)}")
    for option, value in names.chosen():
        if value not in layout:
            what = f"no folder level named {value!r} ({option})"
            raise InputError(what, where=folder, expected=f"one of the layout's: {listing(layout)}")
    ids = [printable(image) for image in images]
    text = {ITSELF: ids}
    text |= {name: [path.split("/")[level] for path in ids] for level, name in enumerate(layout)}
    table = NamedRows(folder, tuple(text), text, range(len(ids)), "/", tuple(notes))
    files = _files_of_folder(folder, images)
    return manifest_of(table, replace(names, id_col=ITSELF, path_col=ITSELF), files=files)


_LAYOUT = "--layout with one name for each level of folders, such as --layout domain/label"


def check_depth(folder: Path, images: Sequence[str], depth: int) -> None:
    """Refuse images (listed) that don't lie under ``depth`` levels of folders."""
    wrong = [printable(path) for path in images if path.count("/") != depth]
    if wrong:
        levels = {path.count("/") for path in images}
        named = len(levels) == 1 and levels != {0}
        raise InputError(
            f"{len(wrong)} of {len(images)} images don't lie where the layout says",
            where=folder,
            found=f"{_depths(images)} folders: {listing(wrong)}",
            expected=f"every image under {depth} folders",
            fix=_LAYOUT if named else "move them, or name the images in a manifest; ncm embed takes images "
            "at any depth without --layout, and without labels",
        )  # fmt: skip


def _depths(images: Sequence[str]) -> str:
    """How many images lie under how many folders: ``3 under 0, 12 under 1``."""
    levels = [path.count("/") for path in images]
    return ", ".join(f"{levels.count(level)} under {level}" for level in sorted(set(levels)))


def printable(name: str) -> str:
    """``name`` with the bytes that aren't UTF-8 as ``\\xe9``: how such a file is named in a store."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def absolute_text(path: str | os.PathLike[str]) -> str:
    """The absolute path as text that can be stored; a name that isn't UTF-8 is an `InputError`."""
    if is_remote(text := as_written(Path(path))):
        return text.rstrip("/")
    try:
        return os.fsencode(os.path.abspath(path)).decode("utf-8")
    except UnicodeDecodeError:
        what, fix = "a file name that isn't UTF-8", "rename it; names are stored as UTF-8"
        raise InputError(what, where=repr(os.fsencode(path)), fix=fix) from None


def find_files(paths: Sequence[str], base: str, row_name: Callable[[int], str], where: Path) -> Files:
    """Look every path up before any work starts.

    Those with a scheme are not: reading them says what is wrong. A relative path starts from ``base``.
    Backslashes are tried as slashes, and the path is tried in both Unicode normal forms, since a manifest
    written on one system is often read on another.

    Raises
    ------
    InputError
        Some are blank, missing, folders or no regular files: all of them are listed.
    """
    found: list[str] = []
    size, mtime_ns = np.zeros((2, len(paths)), np.int64)
    problems: list[str] = []
    for i, path in enumerate(paths):
        reason = "is missing" if path else "is blank"
        if path and (is_remote(path) or is_remote(base)):
            found.append(path if is_remote(path) else f"{base}/{path}")
            size[i] = -1
            continue
        for candidate in _spellings(path, base) if path else ():
            try:
                status = os.stat(native(candidate))
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    reason = f"can't be read: {(error.strerror or str(error)).lower()}"
                continue
            if stat.S_ISREG(status.st_mode):
                found.append(candidate)
                size[i], mtime_ns[i], reason = status.st_size, status.st_mtime_ns, ""
                break
            reason = "is a folder" if stat.S_ISDIR(status.st_mode) else "is no regular file"
        problems += [f"{row_name(i)}: {path!r} {reason}"] if reason else []
    if problems:
        more = [f"and {len(problems) - SHOWN_FILES} more"] if len(problems) > SHOWN_FILES else []
        raise InputError(
            f"{len(problems)} of {len(paths)} image files can't be used",
            where=where,
            found="\n    ".join(["", *problems[:SHOWN_FILES], *more]),
            expected=f"files, relative paths starting from {base}",
            fix="--root FOLDER if relative paths start elsewhere; absolute paths are taken as they are",
        )
    for one in {path.partition("://")[0]: path for path in found if is_remote(path)}.values():
        require_installed(one)
    return Files(tuple(found), size, mtime_ns, ("",) * len(found))


def _spellings(path: str, base: str) -> Iterator[str]:
    """The names of a file to try, the likely and cheap one first."""
    slashed = [path.replace("\\", "/")] if "\\" in path and os.sep == "/" else []
    for spelling in (path, *slashed):
        forms = (
            [] if spelling.isascii() else [unicodedata.normalize(form, spelling) for form in ("NFC", "NFD")]
        )
        for name in dict.fromkeys((spelling, *forms)):
            written = os.path.join(base, name)
            # Behind a link to a folder, ".." isn't what the text says, so such a path is kept.
            yield written if ".." in written.split(os.sep) else os.path.normpath(written)


def _files_of_folder(folder: Path, images: Sequence[str]) -> Files:
    """The images of a folder, as `walk_images` lists them.

    Links that lead nowhere and names that aren't UTF-8 have the size -1, which no stored file has: reading
    them says what is wrong.
    """
    base = absolute_text(folder)
    paths = tuple(within(base, image) for image in images)
    untold = is_remote(base)
    facts = [(-1, 0) if untold or printable(path) != path else look_up(path) for path in paths]
    size, mtime_ns = np.array(facts, np.int64).T
    return Files(paths, size, mtime_ns, ("",) * len(paths))


def walk_images(folder: Path) -> tuple[list[str], list[str]]:
    """The image files under ``folder`` as sorted relative POSIX paths, and the other files left out.

    Hidden files and folders are left out without a word. Links to folders are followed. Bytes of a name that
    aren't UTF-8 are escaped as Python does (`printable` shows them).

    Raises
    ------
    InputError
        No images, a folder that can't be read, a link that leads back to a folder above it.
    """
    images: list[str] = []
    others: list[str] = []
    base = absolute_text(folder)
    try:
        if (local := local_path(base)) is None:
            for name in list_remote(base):
                (images if looks_like_image(name) else others).append(name)
        else:
            _scan(local, "", images, others, ())
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise InputError("a folder can't be read", where=error.filename, found=what) from None
    except ValueError as error:  # a NUL in the name
        raise InputError("a folder can't be read", where=folder, found=error) from None
    if not images:
        raise InputError(
            "no images in the folder",
            where=folder,
            found=f"other files: {listing(map(printable, sorted(others)))}" if others else "no files",
            expected=f"files named like images ({', '.join(sorted(IMAGE_SUFFIXES))}) or without any suffix",
        )
    return sorted(images), [printable(other) for other in sorted(others)]


def _scan(
    folder: str, prefix: str, images: list[str], others: list[str], above: tuple[tuple[int, int], ...]
) -> None:
    status = os.stat(native(folder))
    here = (status.st_dev, status.st_ino)
    if here in above or len(above) > DEEPEST:
        what = f"more than {DEEPEST} folders inside one another"
        if here in above:
            what = "folders without end: a link leads back to a folder above it"
        raise InputError(what, where=folder, fix="remove it, or use a manifest")
    with os.scandir(native(folder)) as entries:
        for entry in entries:
            name = os.fsencode(entry.name).decode("utf-8", "surrogateescape")
            if name.startswith("."):
                continue
            is_folder = False
            with contextlib.suppress(
                OSError
            ):  # links in a circle: what is wrong is said with the other files
                is_folder = entry.is_dir()
            if is_folder:
                _scan(f"{folder}/{name}", f"{prefix}{name}/", images, others, (*above, here))
            else:
                (images if looks_like_image(name) else others).append(prefix + name)


def looks_like_image(name: str) -> bool:
    """Whether a file is taken for an image by its name: without any suffix too, as its content decides."""
    return os.path.splitext(name)[1].lower() in {*IMAGE_SUFFIXES, ""}
