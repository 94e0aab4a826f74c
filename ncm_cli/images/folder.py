"""Lists the images of a folder, local or remote, and reads a manifest from them."""

# ruff: noqa: PTH116, PTH122

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ncm_cli.errors import InputError, UsageError, as_written, listing
from ncm_cli.images.manifest import (
    ID_COLUMN,
    ColumnNames,
    FileFacts,
    Manifest,
    NamedRows,
    absolute_text,
    manifest_of,
)
from ncm_cli.images.paths import is_remote, local_path, look_up, native, within
from ncm_cli.images.remote import MAX_FOLDER_DEPTH, list_remote
from ncm_cli.store.digests import printable

IMAGE_SUFFIXES = frozenset(
    {".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2c", ".j2k", ".jfif", ".jp2"}
    | {".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm"}
    | {".tga", ".tif", ".tiff", ".webp"}
)
"""Suffixes of files that may be images, besides files without a suffix; their content decides."""


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
                "the meaning of the folders isn't given",
                where=folder,
                found=f"images by the number of folders they lie in: {_depths(images)}",
                fix=_SAY_LAYOUT,
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
    text = {ID_COLUMN: ids}
    text |= {name: [path.split("/")[level] for path in ids] for level, name in enumerate(layout)}
    table = NamedRows(folder, tuple(text), text, range(len(ids)), "/", tuple(notes))
    files = _files_of_folder(folder, images)
    return manifest_of(table, replace(names, id_col=ID_COLUMN, path_col=ID_COLUMN), files=files)


_SAY_LAYOUT = "--layout with one name for each level of folders, such as --layout domain/label"


def check_depth(folder: Path, images: Sequence[str], depth: int) -> None:
    """Refuse images (listed) that don't lie under ``depth`` levels of folders."""
    wrong = [printable(path) for path in images if path.count("/") != depth]
    if wrong:
        levels = {path.count("/") for path in images}
        fix = _SAY_LAYOUT
        if levels == {0} or len(levels) > 1:
            fix = "move them, or name the images in a manifest; ncm embed takes images at any depth "
            fix += "without --layout, and without labels"
        raise InputError(
            f"{len(wrong)} of {len(images)} images don't lie where the layout says",
            where=folder,
            found=f"{_depths(images)} folders: {listing(wrong)}",
            expected=f"every image under {depth} folders",
            fix=fix,
        )


def _depths(images: Sequence[str]) -> str:
    """How many images lie under how many folders: ``3 under 0, 12 under 1``."""
    levels = [path.count("/") for path in images]
    return ", ".join(f"{levels.count(level)} under {level}" for level in sorted(set(levels)))


def _files_of_folder(folder: Path, images: Sequence[str]) -> list[FileFacts]:
    """The images of a folder, as `walk_images` lists them.

    Links that lead nowhere and names that aren't UTF-8 have the size -1, which no stored file has: reading
    them says what is wrong.
    """
    base = absolute_text(folder)
    paths = [within(base, image) for image in images]
    untold = is_remote(base)
    return [(path, *((-1, 0) if untold or printable(path) != path else look_up(path))) for path in paths]


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
    inode = (status.st_dev, status.st_ino)
    if inode in above or len(above) > MAX_FOLDER_DEPTH:
        what = f"more than {MAX_FOLDER_DEPTH} folders inside one another"
        if inode in above:
            what = "folders without end: a link leads back to a folder above it"
        raise InputError(what, where=folder, fix="remove it, or use a manifest")
    with os.scandir(native(folder)) as entries:
        for entry in entries:
            name = os.fsencode(entry.name).decode("utf-8", "surrogateescape")
            if name.startswith("."):
                continue
            is_folder = False
            with contextlib.suppress(OSError):  # a circle of links, which reading the file will report
                is_folder = entry.is_dir()
            if is_folder:
                _scan(f"{folder}/{name}", f"{prefix}{name}/", images, others, (*above, inode))
            else:
                (images if looks_like_image(name) else others).append(prefix + name)


def looks_like_image(name: str) -> bool:
    """Whether a file may be an image by its name; without a suffix it may, since the content decides."""
    return os.path.splitext(name)[1].lower() in {*IMAGE_SUFFIXES, ""}
