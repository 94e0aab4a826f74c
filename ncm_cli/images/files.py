"""Finds the image files that a manifest or a folder names, and refuses what isn't there, all at once."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ncm_cli.errors import InputError, listing

# Names may be bytes here, and a stat a row must stay cheap, so this module keeps to os.path.
# ruff: noqa: PTH100, PTH116, PTH118, PTH122, PTH206, PTH208


SHOWN_FILES = 100
"""Missing files named in one message; more than that says little."""

DEEPEST = 64
"""Levels of folders that are followed."""

IMAGE_SUFFIXES = frozenset(
    {".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2c", ".j2k", ".jfif", ".jp2"}
    | {".jpc", ".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm"}
    | {".tga", ".tif", ".tiff", ".webp"}
)
"""Names that are taken for images in a folder, besides those without any suffix; content decides the rest."""


@dataclass(frozen=True)
class FoundFiles:
    """Image files on disk: absolute paths, sizes in bytes and modification times in nanoseconds (N,)."""

    path: list[str]
    size: np.ndarray
    mtime_ns: np.ndarray


def native(path: str) -> str | bytes:
    """``path`` as the system takes it: bytes where the locale would not let Python encode it."""
    if sys.getfilesystemencoding().lower().replace("-", "") == "utf8":
        return path
    return path.encode("utf-8", "surrogateescape")


def printable(name: str) -> str:
    """``name`` with the bytes that aren't UTF-8 as ``\\xe9``: how such a file is named in a store."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def absolute_text(path: str | os.PathLike[str]) -> str:
    """The absolute path as text that can be stored; a name that isn't UTF-8 is an `InputError`."""
    try:
        return os.fsencode(os.path.abspath(path)).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(
            "a file name that isn't UTF-8",
            where=repr(os.fsencode(path)),
            fix="rename it; names are stored as UTF-8",
        ) from None


def find_files(
    paths: Sequence[str],
    base: str,
    row_name: Callable[[int], str],
    where: Path,
) -> FoundFiles:
    """Look every path up before any work starts.

    A relative path starts from ``base``. Backslashes are tried as slashes, and other Unicode normal forms of
    the name are tried, since a manifest written on one system is often read on another.

    Raises
    ------
    InputError
        Some are blank, missing, folders or no regular files: all of them are listed.
    """
    found: list[str] = []
    size = np.zeros(len(paths), np.int64)
    mtime_ns = np.zeros(len(paths), np.int64)
    problems: list[str] = []
    finder = _Finder(base)
    for i, path in enumerate(paths):
        full, status, reason = finder.find(path)
        if status is None:
            problems.append(f"{row_name(i)}: {path!r} {reason}")
            continue
        found.append(full)
        size[i], mtime_ns[i] = status.st_size, status.st_mtime_ns
    if problems:
        raise _missing(problems, len(paths), base, where)
    return FoundFiles(found, size, mtime_ns)


def files_of_folder(folder: Path, images: Sequence[str]) -> FoundFiles:
    """The images of a folder, as `walk_images` lists them.

    Links that lead nowhere and names that aren't UTF-8 have the size -1, which no stored file has: reading
    them says what is wrong.
    """
    base = absolute_text(folder)
    found = FoundFiles([f"{base}/{image}" for image in images], *np.full((2, len(images)), -1, np.int64))
    for i, path in enumerate(found.path):
        if printable(path) == path:
            with contextlib.suppress(OSError):
                status = os.stat(native(path))
                found.size[i], found.mtime_ns[i] = status.st_size, status.st_mtime_ns
    return found


def _missing(problems: list[str], total: int, base: str, where: Path) -> InputError:
    shown = problems[:SHOWN_FILES]
    rest = [f"and {len(problems) - SHOWN_FILES} more"] if len(problems) > SHOWN_FILES else []
    return InputError(
        f"{len(problems)} of {total} image files can't be used",
        where=where,
        found="\n    ".join(["", *shown, *rest]),
        expected=f"files, relative paths starting from {base}",
        fix="--root FOLDER if relative paths start elsewhere; absolute paths are taken as they are",
    )


class _Finder:
    def __init__(self, base: str) -> None:
        self._base = base
        self._listings: dict[str, dict[str, str]] = {}

    def find(self, path: str) -> tuple[str, os.stat_result | None, str]:
        """(absolute path, its status or None, what is wrong)."""
        if not path:
            return path, None, "is blank"
        reason = "is missing"
        for candidate in self._candidates(path):
            try:
                status = os.stat(native(candidate))
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    reason = f"can't be read: {(error.strerror or str(error)).lower()}"
                continue
            if stat.S_ISREG(status.st_mode):
                return candidate, status, ""
            reason = "is a folder" if stat.S_ISDIR(status.st_mode) else "is no regular file"
        return path, None, reason

    def _candidates(self, path: str) -> Iterator[str]:
        """The names to try, the likely and cheap one first."""
        spellings = [path, path.replace("\\", "/")] if "\\" in path and os.sep == "/" else [path]
        for spelling in spellings:
            written = os.path.join(self._base, spelling)
            if ".." not in written.split(os.sep):
                # Behind a link to a folder, ".." isn't what the text says, so such a path is kept.
                written = os.path.normpath(written)
            yield written
            other = None if written.isascii() else self._other_name(written)
            if other:
                yield other

    def _other_name(self, written: str) -> str | None:
        """The file whose name has, in every part, the same composed form as ``written``."""
        drive, rest = os.path.splitdrive(written)
        current = drive + os.sep
        for part in rest.split(os.sep)[1:]:
            if current not in self._listings:
                self._listings[current] = _composed_names(current)
            actual = self._listings[current].get(unicodedata.normalize("NFC", part))
            if actual is None:
                return None
            current = os.path.join(current, actual)
        return current


def _composed_names(folder: str) -> dict[str, str]:
    """The names in a folder, by their composed form (NFC)."""
    try:
        names = [os.fsencode(name).decode("utf-8", "surrogateescape") for name in os.listdir(native(folder))]
    except OSError:
        return {}
    return {unicodedata.normalize("NFC", name): name for name in names}


def guessed_layout(folder: Path, images: Sequence[str]) -> tuple[str, ...]:
    """What the folders mean if nobody says: images under one folder have labels, others have none.

    Folders in folders mean something, so where all images lie as deep it must be said what.
    """
    levels = {path.count("/") for path in images}
    if len(levels) == 1 and min(levels) > 1:
        raise InputError(
            "what the folders mean must be said",
            where=folder,
            found=f"images by the number of folders they lie in: {_depths(images)}",
            fix=_LAYOUT,
        )
    return ("label",) if levels == {1} else ()


def check_depth(folder: Path, images: Sequence[str], depth: int) -> None:
    """Refuse images (listed) that don't lie under ``depth`` levels of folders."""
    wrong = [printable(path) for path in images if path.count("/") != depth]
    if wrong:
        same = len({path.count("/") for path in images}) == 1
        raise InputError(
            f"{len(wrong)} of {len(images)} images don't lie where the layout says",
            where=folder,
            found=f"{_depths(images)} folders: {listing(wrong)}",
            expected=f"every image under {depth} folders",
            fix=_LAYOUT if same else "move them, or name the images in a manifest; ncm embed takes images at "
            "any depth without --layout, and without labels",
        )  # fmt: skip


_LAYOUT = "--layout with one name for each level of folders, such as --layout domain/label"


def _depths(images: Sequence[str]) -> str:
    """How many images lie under how many folders: ``3 under 0, 12 under 1``."""
    levels = [path.count("/") for path in images]
    return ", ".join(f"{levels.count(level)} under {level}" for level in sorted(set(levels)))


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
    try:
        _scan(absolute_text(folder), "", images, others, ())
    except OSError as error:
        raise InputError(
            "a folder can't be read", where=error.filename, found=(error.strerror or str(error)).lower()
        ) from None
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
        raise InputError(
            "folders without end: a link leads back to a folder above it" if here in above else
            f"more than {DEEPEST} folders inside one another",
            where=folder, fix="remove it, or use a manifest",
        )  # fmt: skip
    with os.scandir(native(folder)) as entries:
        for entry in entries:
            name = os.fsencode(entry.name).decode("utf-8", "surrogateescape")
            if name.startswith("."):
                continue
            if _is_folder(entry):
                _scan(f"{folder}/{name}", f"{prefix}{name}/", images, others, (*above, here))
            elif os.path.splitext(name)[1].lower() in {*IMAGE_SUFFIXES, ""}:
                images.append(prefix + name)
            else:
                others.append(prefix + name)


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as links in a circle: what is wrong is said with the other files
        return False
