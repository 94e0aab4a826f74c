"""The bytes behind a path: of a file, of a member of a tar archive, or of what a scheme such as s3:// names.

A path with a scheme is read through fsspec, whose file systems are installed apart. A member of an archive is
``ARCHIVE.tar#MEMBER@OFFSET``: so it is read without a look at the others.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ncm_cli.errors import InputError
from ncm_cli.images.decode import MAX_BYTES, DecodeError, read_bytes
from ncm_cli.store.files import one_line

# Names may be bytes here, and a stat a row must stay cheap, so this module keeps to os.path.
# ruff: noqa: PTH116, PTH123

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

_MEMBER = re.compile(r"(.+?\.tar)#(.+)@(\d+)", re.IGNORECASE | re.DOTALL)

_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")
"""What file systems call the facts by which a changed file is told."""

_NEAR = 1 << 18
"""Bytes of a remote archive that are read at once: a member's header, and most images whole."""


def native(path: str) -> str | bytes:
    """``path`` as the system takes it: bytes where the locale would not let Python encode it."""
    if sys.getfilesystemencoding().lower().replace("-", "") == "utf8":
        return path
    return path.encode("utf-8", "surrogateescape")


def is_remote(path: str) -> bool:
    """Whether a path has a scheme."""
    return _SCHEME.match(path) is not None


def as_written(path: Path | str) -> str:
    """The text of a path; pathlib leaves one slash after a scheme, and a file's is of the root."""
    text = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/+", r"\1://", str(path))
    return re.sub(r"^(file|local)://", r"\1:///", text)


def expanded(pattern: str) -> list[str]:
    """The texts that ``{000..099}`` and ``{a,b}``, also one in another, stand for; zeros in front count."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    first, last, words = found.groups()
    numbers = () if words else range(int(first), int(last) + 1) or range(int(first), int(last) - 1, -1)
    parts = words.split(",") if words else [str(number).zfill(len(first)) for number in numbers]
    texts = (expanded(pattern[: found.start()] + part + pattern[found.end() :]) for part in parts)
    return list(dict.fromkeys(text for several in texts for text in several))


def file_system(path: str) -> Any:
    """What reads paths of this scheme; an `InputError` says what has to be installed for it."""
    scheme = path.partition("://")[0]
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:
        what, fix = f"paths with {scheme}:// can't be read here", "pip install 'ncm-cli[remote]'"
        raise InputError(what, where=path, found=one_line(error), fix=fix) from None


def list_remote(folder: str) -> list[str]:
    """The files in a folder with a scheme, at any depth, by their names from it on; no hidden ones."""
    system = file_system(folder)
    start = len(system._strip_protocol(folder).rstrip("/")) + 1
    try:
        names = [name[start:] for name in system.find(folder)] if system.isdir(folder) else []
    except Exception as error:  # file systems raise what they like
        raise InputError("a remote folder can't be read", where=folder, found=one_line(error)) from error
    return [name for name in names if not any(part.startswith(".") for part in name.split("/"))]


def open_file(path: str) -> BinaryIO:
    """A file with or without a scheme, to be read from any place of it."""
    if is_remote(path):
        return cast(BinaryIO, file_system(path).open(path, "rb", block_size=_NEAR))
    return open(native(path), "rb")


def members(archive: BinaryIO, offset: int = 0) -> Iterator[tarfile.TarInfo]:
    """The files in a tar archive from a header on; what is no file is passed over.

    Raises ValueError or `tarfile.TarError` for what is no archive, is compressed, or has a broken header.
    """
    while True:
        archive.seek(offset)
        head = archive.read(tarfile.BLOCKSIZE)
        if head in (b"", bytes(tarfile.BLOCKSIZE)):
            return
        # Nearly all headers are plain, and ten times as fast to read without the library.
        if head[257:262] == b"ustar" and head[156:157] in b"0\0" and head[124] < 0x80 and not head[345]:
            member = tarfile.TarInfo(head[:100].rstrip(b"\0").decode("utf-8"))
            member.size, member.offset = int(head[124:136].rstrip(b" \0"), 8), offset
            member.offset_data = offset + tarfile.BLOCKSIZE
            offset = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        else:
            archive.seek(offset)
            with tarfile.open(fileobj=archive, mode="r:") as tar:
                told, offset = tar.next(), tar.offset
            if told is None:
                raise ValueError("a broken header")
            member = told
        member.name.encode("utf-8")  # the library gives other names too
        if member.isreg() and not member.issparse():
            yield member


def content(archive: BinaryIO, member: tarfile.TarInfo) -> bytes:
    """The bytes of a member."""
    archive.seek(member.offset_data)
    data = archive.read(member.size)
    if len(data) < member.size:
        raise ValueError("the archive ends early")
    return data


def archive_of(path: str) -> str:
    """The file that has to be there for a path to be read: the archive of a member, or the path."""
    found = _MEMBER.fullmatch(path)
    return found[1] if found else path


def look_up(path: str) -> tuple[int, int]:
    """(size, time in ns) of a file or archive now; −1 and 0 where they aren't told: reading it says why.

    Of a remote file the time is a number that changes with what its file system tells of it.
    """
    path = archive_of(path)
    try:
        if not is_remote(path):
            status = os.stat(native(path))
            return status.st_size, status.st_mtime_ns
        told = file_system(path).info(path)
    except Exception:  # file systems raise what they like
        return -1, 0
    said = [f"{name} {told[name]}" for name in _VERSIONS if told.get(name)]
    digest = hashlib.sha256(repr(said).encode()).hexdigest()
    return -1 if told.get("size") is None else told["size"], int(digest[:15], 16) if said else 0


def fetch(path: str) -> bytes:
    """The bytes of an image, or `DecodeError` with the reason why they can't be had."""
    found = _MEMBER.fullmatch(path)
    if found is None and not is_remote(path):
        return read_bytes(os.fsdecode(native(path)))
    try:
        return _member(*found.groups()) if found else cast(bytes, file_system(path).cat_file(path))
    except DecodeError:
        raise
    except FileNotFoundError:
        raise DecodeError("no such file") from None
    except Exception as error:  # file systems raise what they like
        reason = error.what if isinstance(error, InputError) else one_line(error) or type(error).__name__
        raise DecodeError(f"cannot be read: {reason}") from None


def _member(archive: str, name: str, offset: str) -> bytes:
    with open_file(archive) as stream:
        member = next(members(stream, int(offset)), None)
        if member is None or member.name != name:
            raise DecodeError("the archive holds another file at its place")
        if member.size > MAX_BYTES:
            raise DecodeError(f"file of {member.size:,} bytes, over the limit of {MAX_BYTES:,}")
        return content(stream, member)
