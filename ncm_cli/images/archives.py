"""Tar archives of samples, as WebDataset writes them, or of a folder of images, as the rows of an embedding.

Files of one name up to its first dot are a sample: ``00012.jpg``, ``00012.cls``, ``00012.json``. Archives
where no image has a ``.cls`` or ``.json`` are read like the folder that they were made of. Only headers and
labels are read here; an image is read where it lies.
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
"""Bytes of a ``.json`` or ``.cls`` member, of which columns take a few thousand."""

MAX_LINKS = 40
"""Links from one to the next that are followed, as many as Linux does."""

_IMAGE = "__url__"
"""WebDataset's name for a sample's place; no entry of a sample's own has it."""

_META = re.compile(r"__[^/]*__($|/)")


def read_archives(source: str, names: ColumnNames) -> Manifest:
    """The images in the archives that ``source`` stands for; ids are ``ARCHIVE/NAME``.

    Columns are ``cls``, which is the label where no other is, and the entries of the JSON members that are
    text, numbers, true or false. A note counts what is left out; a warning names archives that may be cut.

    Raises
    ------
    InputError
        Archives are missing, compressed or damaged; there are no images; a label is blank or missing.
    """
    for option, value in (("--id-col", names.id_col), ("--path-col", names.path_col)):
        if value is not None:
            raise UsageError(f"{option} is for tables", found=f"{source} is an archive", fix="leave it out")
    paths = [absolute_text(Path(path)) for path in expanded(source)]
    changed, missing = list[int](), list[str]()
    for path in paths:
        try:
            changed.append(file_facts(path)[1])
        except InputError:
            raise
        except Exception as error:  # file systems raise what they like
            missing.append(f"{path}: {reason_of(error)}")
    if missing:
        raise InputError(f"{len(missing)} of {len(paths)} archives can't be read", found=listing(missing))
    archives = [_Archive(path) for path in paths]
    as_folder = not any(archive.has_samples() for archive in archives)
    found = [(archive, image) for archive in archives for image in archive.images(as_folder=as_folder)]
    left = sum((archive.left for archive in archives), Counter[str]())
    left_out = listing(f"{what} ({count:,})" for what, count in left.most_common())
    cut = [f"{archive.path}: {archive.problem}" for archive in archives if archive.problem]
    if not found:
        what = "; ".join([f"other things: {left_out}" if left else "no files", *cut])
        raise InputError("no images in the archives", where=source, found=what)
    notes = [f"left out of the archives: {left_out}"] if left else []
    rows = [image.entries for _, image in found]
    if as_folder and (folders := _folders([image.name for _, image in found])):
        rows = [{"label": printable(folder)} for folder in folders]
        notes.append("the folders' names are the labels")
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row.get(name, "") for row in rows] for name in columns}
    values[ID_COLUMN] = [printable(f"{archive.stem}/{image.key}") for archive, image in found]
    values[_IMAGE] = [f"{archive.path}#{image.member.name}@{image.member.offset}" for archive, image in found]
    table = NamedRows(Path(source), tuple(values), values, range(len(rows)), ",", tuple(notes))
    label = names.label_col or ("cls" if "cls" in columns and "label" not in columns else None)
    times = dict(zip(paths, changed, strict=True))
    files = [
        (path, image.member.size, times[archive.path])
        for path, (archive, image) in zip(values[_IMAGE], found, strict=True)
    ]
    names = replace(names, id_col=ID_COLUMN, path_col=_IMAGE, label_col=label)
    manifest = manifest_of(table, names, files=files)
    if cut:
        what = f"archives that may have lost something, such as by a copy that was cut: {listing(cut)}"
        manifest = replace(manifest, warnings=(*manifest.warnings, what))
    return manifest


@dataclass(frozen=True)
class _Image:
    """An image by its ``key``, the id without the archive, and where it lies."""

    key: str
    name: str
    member: tarfile.TarInfo
    entries: dict[str, str]


class _Archive:
    """The members of an archive by name, links followed; ``left`` counts by kind what isn't used."""

    def __init__(self, path: str) -> None:
        self.path, self.stem = path, path.rpartition("/")[2].rpartition(".")[0]
        self.left, self.problem = Counter[str](), ""
        self._files: dict[str, tarfile.TarInfo] = {}
        self._entries: dict[str, dict[str, str] | ValueError] = {}
        try:
            with log_long_wait(path), open_file(path) as stream:
                self._scan(stream)
        except Exception as error:  # file systems raise what they like
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
                    "links to no file in the archive" if linked else "members that are no plain files"
                ] += 1
            elif target is not member:
                self._files[name] = target
                self._read_entries(name, target, stream)

    def _read_entries(self, name: str, member: tarfile.TarInfo, stream: BinaryIO) -> None:
        """Read a class or JSON member; an error in it is raised only where a sample needs it."""
        suffix = _suffix(name)
        if suffix in (".cls", ".json"):
            try:
                data = content(stream, member, MAX_ENTRY_BYTES)
                text = data.decode("utf-8")
                found = {"cls": text} if suffix == ".cls" else json.loads(text)
                if not isinstance(found, dict):
                    raise ValueError("no object")
                self._entries[name] = self._flat(found)
            except (ValueError, RecursionError) as error:
                self._entries[name] = ValueError(f"{printable(name)}: {one_line(error)}")

    def _flat(self, entries: dict[str, Any]) -> dict[str, str]:
        """The entries of a sample that a column takes, as text."""
        texts = {}
        for name, value in entries.items():
            text = json.dumps(value) if isinstance(value, bool) else str(value).strip()
            if not name.encode() or value is None or value != value:
                continue
            if isinstance(value, list | dict) or len(text.encode()) > MAX_TEXT_BYTES:
                self.left[f"entries {one_line(name)[:40]!r}, no text, numbers, true or false"] += 1
            else:
                texts[name] = text
        return texts

    def has_samples(self) -> bool:
        """Whether an image has a class or a JSON member."""
        images = filter(looks_like_image, self._files)
        owners = {owner for name in images for owner in (_key(name), _stem(name))}
        return any(_stem(name) in owners for name in self._entries)

    def images(self, *, as_folder: bool) -> Iterator[_Image]:
        """The images in the order of the archive, or of their names where it is read like a folder.

        The only image of a sample has the sample's key. Of several, one that is named like the sample stands
        for it, with those that have a class or JSON member of their own; otherwise each is a row.
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
            for name, named in zip(images, keys, strict=True):
                entries_of_image = [
                    entry
                    for owner in dict.fromkeys((key, _stem(name)))
                    for entry in entries
                    if _stem(entry) == owner
                ]
                used.update(entries_of_image)
                yield _Image(named, name, self._files[name], self._joined(entries_of_image))
            for name in names:
                if name not in used:
                    self.left["further images of samples" if looks_like_image(name) else _kind(name)] += 1

    def _joined(self, names: Sequence[str]) -> dict[str, str]:
        """The entries of some members, the later ones first."""
        joined: dict[str, str] = {}
        if twice := [name for name, count in Counter(map(str.lower, names)).items() if count > 1]:
            raise self._unreadable(ValueError(f"{printable(twice[0])} twice in one sample"))
        for name in names:
            found = self._entries[name]
            if isinstance(found, ValueError):
                raise self._unreadable(found)
            joined |= found
        return joined


def _target(member: tarfile.TarInfo, known: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """The plain file that a member is, or that its links lead to; None where there is none."""
    found: tarfile.TarInfo | None = member
    for _ in range(MAX_LINKS):
        if found is None or not (found.issym() or found.islnk()):
            break
        folder = posixpath.dirname(found.name) if found.issym() else ""
        found = known.get(posixpath.normpath(posixpath.join(folder, found.linkname)))
    return found if found is not None and found.isreg() and not found.issparse() else None


def _key(name: str) -> str:
    """A name up to the first dot behind its folders."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]


def _suffix(name: str) -> str:
    return posixpath.splitext(name)[1].lower()


def _kind(name: str) -> str:
    return f"{printable(_suffix(name))} files" if _suffix(name) else "files without suffix"


def _folders(names: Iterable[str]) -> list[str] | None:
    """The folder of each image below those that hold all images; None unless exactly one level is left."""
    folders = [posixpath.normpath(name).split("/")[:-1] for name in names]
    levels = enumerate(zip(*folders, strict=False))
    shared = next((at for at, level in levels if len(set(level)) > 1), min(map(len, folders)))
    below_shared = [folder[shared:] for folder in folders]
    return (
        [folder[0] for folder in below_shared] if all(len(folder) == 1 for folder in below_shared) else None
    )
