"""Reads a manifest from tar archives: of samples, as WebDataset writes them, or of a folder of images.

Files with the same name up to the first dot are a sample: ``00012.jpg``, ``00012.cls``, ``00012.json``. If no
image has a ``.cls`` or ``.json``, the archives are read like the folder that they were made from. Only
headers and labels are read here; images are read later, by their offsets.
"""

from __future__ import annotations

import json
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ncm_cli.errors import InputError, UsageError, listing
from ncm_cli.images.folder import looks_like_image
from ncm_cli.images.manifest import ID_COLUMN, ColumnNames, Manifest, NamedRows, absolute_text, manifest_of
from ncm_cli.images.paths import expanded, file_facts, open_file
from ncm_cli.images.remote import is_hidden, log_long_wait, reason_of
from ncm_cli.images.tar import content, members
from ncm_cli.store.digests import MAX_TEXT_BYTES, printable
from ncm_cli.store.files import one_line

MAX_ENTRY_BYTES = 1 << 24
"""Largest ``.json`` or ``.cls`` member; a column takes a few thousand bytes."""

MAX_LINKS = 40
"""Longest chain of links that is followed, as in Linux."""

_IMAGE = "__url__"
"""WebDataset's name for a sample's address, which isn't an entry of a sample."""

_META = re.compile(r"__[^/]*__($|/)")


def read_archives(source: str, names: ColumnNames, tars: Sequence[Path] = ()) -> Manifest:
    """The images in the archives that ``source`` names, perhaps with braces; ids are ``ARCHIVE/NAME``.

    If ``source`` is a folder, ``tars`` are its archives.

    Columns are ``cls``, which is the label if there is no other, and the entries of JSON members that are
    text, numbers, true or false. A note counts what is left out; a warning names archives that may be cut.

    Raises
    ------
    InputError
        Archives are missing, compressed or damaged; there are no images; a label is blank or missing.
    """
    for option, value in (("--id-col", names.id_col), ("--path-col", names.path_col)):
        if value is not None:
            found = f"{source} holds archives" if tars else f"{source} is an archive"
            raise UsageError(f"{option} is for tables", found=found, fix="leave it out")
    paths = [absolute_text(path) for path in tars or map(Path, expanded(source))]
    changed, missing = list[int](), list[str]()
    for path in paths:
        try:
            changed.append(file_facts(path)[1])
        except InputError:
            raise
        except Exception as error:  # file systems raise errors of any class
            missing.append(f"{path}: {reason_of(error)}")
    if missing:
        raise InputError(f"{len(missing)} of {len(paths)} archives can't be read", found=listing(missing))
    archives = [_Archive(path) for path in paths]
    as_folder = not any(archive.has_samples() for archive in archives)
    images = [(archive, image) for archive in archives for image in archive.images(as_folder=as_folder)]
    left = sum((archive.left for archive in archives), Counter[str]())
    left_out = listing(f"{what} ({count:,})" for what, count in left.most_common())
    cut = [f"{archive.path}: {archive.problem}" for archive in archives if archive.problem]
    if not images:
        what = "; ".join([f"other things: {left_out}" if left else "no files", *cut])
        raise InputError("no images in the archives", where=source, found=what)
    notes = [f"left out of the archives: {left_out}"] if left else []
    rows = [image.entries for _, image in images]
    if as_folder and (folders := _folders([image.name for _, image in images])):
        rows = [{"label": printable(folder)} for folder in folders]
        notes.append("the folders' names are the labels")
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row.get(name, "") for row in rows] for name in columns}
    values[ID_COLUMN] = [printable(f"{archive.stem}/{image.key}") for archive, image in images]
    values[_IMAGE] = [
        f"{archive.path}#{image.member.name}@{image.member.offset}" for archive, image in images
    ]
    table = NamedRows(Path(source), tuple(values), values, range(len(rows)), ",", tuple(notes))
    label = names.label_col or ("cls" if "cls" in columns and "label" not in columns else None)
    times = dict(zip(paths, changed, strict=True))
    files = [
        (path, image.member.size, times[archive.path])
        for path, (archive, image) in zip(values[_IMAGE], images, strict=True)
    ]
    names = replace(names, id_col=ID_COLUMN, path_col=_IMAGE, label_col=label)
    manifest = manifest_of(table, names, files=files)
    if cut:
        what = f"archives that may be incomplete, such as copies that were cut off: {listing(cut)}"
        manifest = replace(manifest, warnings=(*manifest.warnings, what))
    return manifest


@dataclass(frozen=True)
class _Image:
    """An image: its ``key`` (the id without the archive), its name, where it lies, and its entries."""

    key: str
    name: str
    member: tarfile.TarInfo
    entries: dict[str, str]


class _Archive:
    """The members of an archive by name, links resolved; ``left`` counts unused members by kind."""

    def __init__(self, path: str) -> None:
        self.path, self.stem = path, path.rpartition("/")[2].rpartition(".")[0]
        self.left, self.problem = Counter[str](), ""
        self._files: dict[str, tarfile.TarInfo] = {}
        self._entries: dict[str, dict[str, str] | ValueError] = {}
        try:
            with log_long_wait(path), open_file(path) as stream:
                self._scan(stream)
        except Exception as error:  # file systems raise errors of any class
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(
            "an archive that can't be read", where=self.path, found=reason_of(error),
            expected="an uncompressed tar file, with text in .cls and an object in .json",
        )  # fmt: skip

    def _scan(self, stream: BinaryIO) -> None:
        def every() -> Iterator[tarfile.TarInfo]:
            self.problem = yield from members(stream)

        known: dict[str, tarfile.TarInfo] = {}
        for member in every():
            known[posixpath.normpath(member.name)] = member
            if is_hidden(member.name):
                self.left["hidden files"] += 1
            elif member.name in self._files:
                raise ValueError(f"{printable(member.name)} twice in one sample")
            else:
                self._files[member.name] = member
                if member.isreg():
                    self._read_entries(member.name, member, stream)
        for name, member in list(self._files.items()):
            target = _target(member, known)
            if target is None:
                del self._files[name]
                linked = member.issym() or member.islnk()
                self.left[
                    "links to no file in the archive" if linked else "members that aren't plain files"
                ] += 1
            elif target is not member:
                self._files[name] = target
                self._read_entries(name, target, stream)

    def _read_entries(self, name: str, member: tarfile.TarInfo, stream: BinaryIO) -> None:
        """Read a class or JSON member; an error in it is raised only if an image needs it."""
        suffix = _suffix(name)
        if suffix in (".cls", ".json"):
            try:
                data = content(stream, member, MAX_ENTRY_BYTES)
                text = data.decode("utf-8")
                entries = {"cls": text} if suffix == ".cls" else json.loads(text)
                if not isinstance(entries, dict):
                    raise ValueError("not an object")
                self._entries[name] = self._flat(entries)
            except (ValueError, RecursionError) as error:
                self._entries[name] = ValueError(f"{printable(name)}: {one_line(error)}")

    def _flat(self, entries: dict[str, Any]) -> dict[str, str]:
        """The entries that can be columns, as text."""
        texts = {}
        for name, value in entries.items():
            text = json.dumps(value) if isinstance(value, bool) else str(value).strip()
            if not name.encode() or value is None or value != value:
                continue
            if isinstance(value, list | dict) or len(text.encode()) > MAX_TEXT_BYTES:
                self.left[f"entries {one_line(name)[:40]!r}, not text, numbers, true or false"] += 1
            else:
                texts[name] = text
        return texts

    def has_samples(self) -> bool:
        """Whether an image has a class or a JSON member."""
        images = filter(looks_like_image, self._files)
        owners = {owner for name in images for owner in (_key(name), _stem(name))}
        return any(_stem(name) in owners for name in self._entries)

    def images(self, *, as_folder: bool) -> Iterator[_Image]:
        """The images in the order of the archive, or of their names if it is read like a folder.

        A sample's only image has the sample's key. If one of several is named like the sample, only that one
        is used, and those with a class or JSON member of their own; otherwise all are used.
        """
        samples: dict[str, list[str]] = {}
        for name in sorted(self._files) if as_folder else self._files:
            if as_folder or (_suffix(name) and not _META.match(name)):
                samples.setdefault(_key(name), []).append(name)
            else:
                self.left[_kind(name)] += 1
        for key, names in samples.items():
            images = [name for name in names if looks_like_image(name)]
            entries = [] if as_folder else [name for name in names if name in self._entries]
            owners = {_stem(name) for name in entries}
            if not as_folder and any(_stem(name) == key for name in images):
                images = [name for name in images if _stem(name) in {key, *owners - {key}}]
            if not (images or as_folder):
                self.left["samples without an image"] += 1
                continue
            keys = [key] if len(images) == 1 else [_stem(name) for name in images]
            if len(set(keys)) < len(keys):
                keys = images
            used = set(images)
            for name, image_key in zip(images, keys, strict=True):
                entries_of_image = [
                    entry
                    for owner in dict.fromkeys((key, _stem(name)))
                    for entry in entries
                    if _stem(entry) == owner
                ]
                used.update(entries_of_image)
                yield _Image(image_key, name, self._files[name], self._joined(entries_of_image))
            for name in names:
                if name not in used:
                    self.left["further images of samples" if looks_like_image(name) else _kind(name)] += 1

    def _joined(self, names: Sequence[str]) -> dict[str, str]:
        """The entries of some members; later ones override earlier ones."""
        joined: dict[str, str] = {}
        if twice := [name for name, count in Counter(map(str.lower, names)).items() if count > 1]:
            raise self._unreadable(ValueError(f"{printable(twice[0])} twice in one sample"))
        for name in names:
            entries = self._entries[name]
            if isinstance(entries, ValueError):
                raise self._unreadable(entries)
            joined |= entries
        return joined


def _target(member: tarfile.TarInfo, known: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """The plain file that a member is or links to; None if there is none."""
    target: tarfile.TarInfo | None = member
    for _ in range(MAX_LINKS):
        if target is None or not (target.issym() or target.islnk()):
            break
        folder = posixpath.dirname(target.name) if target.issym() else ""
        target = known.get(posixpath.normpath(posixpath.join(folder, target.linkname)))
    return target if target is not None and target.isreg() and not target.issparse() else None


def _key(name: str) -> str:
    """A path up to the first dot in its file name."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]


def _suffix(name: str) -> str:
    return posixpath.splitext(name)[1].lower()


def _kind(name: str) -> str:
    return f"{printable(_suffix(name))} files" if _suffix(name) else "files without suffix"


def _folders(names: Iterable[str]) -> list[str] | None:
    """Each image's folder below the folders that all share; None unless that is exactly one level."""
    folders = [posixpath.normpath(name).split("/")[:-1] for name in names]
    levels = enumerate(zip(*folders, strict=False))
    shared = next((at for at, level in levels if len(set(level)) > 1), min(map(len, folders)))
    below_shared = [folder[shared:] for folder in folders]
    return (
        [folder[0] for folder in below_shared] if all(len(folder) == 1 for folder in below_shared) else None
    )
