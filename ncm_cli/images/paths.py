"""Reads what a path names: a file, a member of a tar archive, a picture in a table, or a remote file.

A path with a scheme is read through fsspec, whose file systems are installed separately. A member of an
archive is ``ARCHIVE.tar#MEMBER@OFFSET``, so that it is read without reading the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import quote

from ncm_cli.errors import InputError
from ncm_cli.images.decode import MAX_BYTES, open_regular, read_bytes
from ncm_cli.images.packed import cell_bytes, cell_of
from ncm_cli.images.remote import download, info, is_web, open_remote, reason_of
from ncm_cli.images.samples import DecodeError
from ncm_cli.images.tar import content, members

# Names may be bytes, and there is one stat call for each row, so this module uses os.path.
# ruff: noqa: PTH116

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

_MEMBER = re.compile(r"(.+?\.tar)#(.+)@(\d+)", re.IGNORECASE | re.DOTALL)

_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")
"""Names under which file systems report whether a file has changed."""

MAX_EXPANDED = 100_000
"""Most paths for which braces may stand."""


def native(path: str) -> str | bytes:
    """``path`` for system calls: bytes where the locale's encoding isn't UTF-8."""
    if sys.getfilesystemencoding().lower().replace("-", "") == "utf8":
        return path
    return path.encode("utf-8", "surrogateescape")


def is_remote(path: str) -> bool:
    """Whether a path has a scheme."""
    return _SCHEME.match(path) is not None


def expanded(pattern: str) -> list[str]:
    """The texts that a pattern with ``{000..099}`` or ``{a,b}``, also nested, stands for; leading zeros stay.

    Raises `InputError` for more than `MAX_EXPANDED`.
    """
    with contextlib.suppress(RecursionError):
        texts = list(itertools.islice(_expanded(pattern), MAX_EXPANDED + 1))
        if len(texts) <= MAX_EXPANDED:
            return list(dict.fromkeys(texts))
    raise InputError(
        "braces that stand for too many files", where=pattern, expected=f"at most {MAX_EXPANDED:,}"
    )


def _expanded(pattern: str) -> Iterator[str]:
    match = re.search(r"\{(\d{1,18})\.\.(\d{1,18})\}|\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    first, last, words = match.groups()
    numbers = () if words else range(int(first), int(last) + 1) or range(int(first), int(last) - 1, -1)
    parts = words.split(",") if words else (str(number).zfill(len(first)) for number in numbers)
    for part in parts:
        yield from _expanded(pattern[: match.start()] + part + pattern[match.end() :])


def local_path(path: str) -> str | None:
    """The path without file://; None if it has another scheme."""
    if not is_remote(path):
        return path
    scheme, _, rest = path.partition("://")
    return rest if scheme.lower() in ("file", "local") else None


def within(folder: str, name: str) -> str:
    """The path of a file in a folder; for web servers the name is percent-encoded."""
    if is_web(folder):
        name = quote(name, errors="surrogateescape")
    return f"{folder}/{name}"


def open_file(path: str) -> BinaryIO:
    """A regular file, or one with a scheme, opened for reading; seekable."""
    local = local_path(path)
    return open_remote(path) if local is None else open_regular(native(local))


def archive_of(path: str) -> str:
    """The archive of a member, the table of a picture; any other path as it is."""
    if cell := cell_of(path):
        return cell[0]
    match = _MEMBER.fullmatch(path)
    return match[1] if match else path


def file_facts(path: str) -> tuple[int, int]:
    """(size, time in ns) of a file or archive; raises the file system's own errors.

    For a remote file the time is a digest of its version, 0 if the file system reports none; an unknown size
    is −1.
    """
    path = archive_of(path)
    local = local_path(path)
    if local is not None:
        status = os.stat(native(local))
        return status.st_size, status.st_mtime_ns
    facts = info(path)
    versions = [f"{name} {facts[name]}" for name in _VERSIONS if facts.get(name)]
    digest = hashlib.sha256(repr(versions).encode()).hexdigest()
    return -1 if facts.get("size") is None else facts["size"], int(digest[:15], 16) if versions else 0


def look_up(path: str) -> tuple[int, int]:
    """`file_facts`; −1 and 0 after an error, which reading the file will report."""
    try:
        return file_facts(path)
    except Exception:  # file systems raise errors of any class
        return -1, 0


def fetch(path: str) -> bytes:
    """The bytes of an image; `DecodeError` with the reason if they can't be read."""
    if cell := cell_of(path):
        return cell_bytes(*cell)
    member, local = _MEMBER.fullmatch(path), local_path(path)
    if member is None and local is not None:
        return read_bytes(os.fsdecode(native(local)))
    try:
        return _member(*member.groups()) if member else download(path)
    except DecodeError:
        raise
    except FileNotFoundError:
        raise DecodeError("no such file") from None
    except Exception as error:  # file systems raise errors of any class
        raise DecodeError(f"cannot be read: {reason_of(error)}") from None


def _member(archive: str, name: str, offset: str) -> bytes:
    with open_file(archive) as stream:
        member = next(members(stream, int(offset)), None)
        if member is None or member.name != name or not member.isreg():
            raise DecodeError("the archive holds another file at its place")
        if member.size > MAX_BYTES:
            raise DecodeError(f"file of {member.size:,} bytes, over the limit of {MAX_BYTES:,}")
        return content(stream, member, MAX_BYTES)
