"""The members of a tar archive, read header by header; nothing is unpacked.

Archives are written by strangers: headers need their checksum, their size is bounded, and an archive that
ends early is reported.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Generator
from typing import BinaryIO, cast

from ncm_cli.store.digests import TEXT_ERRORS, printable

MAX_HEADER_BYTES, MAX_DIGITS = 1 << 20, 256
"""Most bytes of an extended header, and most digits in a row there: they cost the library quadratic time."""

MAX_PADDING_BYTES = 1 << 26
"""Most bytes of zeros behind an archive that are searched for another archive."""

_PIECE_BYTES = 1 << 23
"""Bytes of a member that are asked for at once: what a server sends is kept until all of it is there."""

_MAX_SIZE = (1 << 63) - 1
"""The largest size of a member: a header can state one that no file has."""

_ZEROS = bytes(1 << 20)


def members(archive: BinaryIO, offset: int = 0) -> Generator[tarfile.TarInfo, None, str]:
    """Everything in a tar archive but folders, from a header on; also of archives that follow in one file.

    Bytes of a name that aren't UTF-8 are escaped as Python does (`printable` shows them).
    Returns why the archive may not be whole, and a blank where it is.
    Raises ValueError or `tarfile.TarError` for what is no archive, is compressed, or has a broken header.
    """
    size, ended, problem = archive.seek(0, io.SEEK_END), False, ""
    while offset < size:
        archive.seek(offset)
        head = archive.read(tarfile.BLOCKSIZE)
        if len(head) < tarfile.BLOCKSIZE:
            return "it ends in the middle of a header"
        if ended := head == _ZEROS[: tarfile.BLOCKSIZE]:
            empty, offset = offset, _after_zeros(archive, offset, size)
            if offset == empty + tarfile.BLOCKSIZE < size:
                problem = f"it has an empty block at byte {empty:,}, where a header may have been"
            elif offset == empty + tarfile.BLOCKSIZE:
                problem = "it ends after the first of the two empty blocks that close an archive"
            continue
        member = _plain(head, offset)
        if member is None:
            member, offset = _any(archive, offset)
        else:
            offset = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        member.name.encode("utf-8", TEXT_ERRORS)  # the library gives other names too
        if not member.isdir():
            yield member
        if member.isreg() and member.offset_data + member.size > size:
            return f"it ends in the middle of {printable(member.name)}"
    return problem if ended else "it ends without the empty blocks that close an archive"


def _after_zeros(archive: BinaryIO, offset: int, size: int) -> int:
    """Where the next block that isn't empty begins, or the size of the file if there is none."""
    archive.seek(offset)
    for start in range(offset, min(size, offset + MAX_PADDING_BYTES), len(_ZEROS)):
        data = archive.read(len(_ZEROS))
        if data != _ZEROS[: len(data)]:
            first = len(data) - len(data.lstrip(b"\0"))
            return start + first // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
    if offset + MAX_PADDING_BYTES < size:
        raise ValueError(f"more than {MAX_PADDING_BYTES:,} bytes of zeros after the end of the archive")
    return size


def _plain(head: bytes, offset: int) -> tarfile.TarInfo | None:
    """The file that a plain header tells of, as nearly all do: ten times as fast as by the library."""
    if head[257:262] != b"ustar" or head[156:157] not in b"0\0" or head[345]:
        return None
    name = head[:100].partition(b"\0")[0].decode("utf-8", TEXT_ERRORS)
    size, checksum = head[124:136].strip(b" \0"), head[148:156].strip(b" \0")
    if name.endswith("/") or not (size.isdigit() and checksum.isdigit()):
        return None
    if int(checksum, 8) != sum(head) - sum(head[148:156]) + 8 * ord(" "):
        return None
    member = tarfile.TarInfo(name)
    member.size, member.offset, member.offset_data = int(size, 8), offset, offset + tarfile.BLOCKSIZE
    return member


def _any(archive: BinaryIO, offset: int) -> tuple[tarfile.TarInfo, int]:
    """The member at an offset, by the library, and where the next one begins."""
    archive.seek(offset)
    with tarfile.open(
        fileobj=cast(BinaryIO, _Headers(archive)), mode="r:", encoding="utf-8", errors=TEXT_ERRORS
    ) as tar:
        member, after = tar.next(), tar.offset
    if member is None or not member.name or not 0 <= member.size <= _MAX_SIZE or after <= offset:
        raise ValueError("a broken header")
    return member, after


class _Headers:
    """An archive of which only headers are read, as the library doesn't bound what it takes for one."""

    def __init__(self, archive: BinaryIO) -> None:
        self.seek, self.tell, self._archive = archive.seek, archive.tell, archive

    def read(self, size: int) -> bytes:
        """The next bytes, or ValueError for more than a header has."""
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size:,} bytes")
        data = self._archive.read(size)
        if max(map(len, re.findall(rb"\d+", data)), default=0) > MAX_DIGITS:
            raise ValueError("a broken header")
        return data


def content(archive: BinaryIO, member: tarfile.TarInfo, most: int) -> bytes:
    """The bytes of a member; ValueError for more than ``most``, and where the archive ends within it."""
    if member.size > most:
        raise ValueError(f"{printable(member.name)} has {member.size:,} bytes, over the limit of {most:,}")
    archive.seek(member.offset_data)
    pieces, left = list[bytes](), member.size
    while left:
        pieces.append(archive.read(min(left, _PIECE_BYTES)))
        if not pieces[-1]:
            raise ValueError("the archive ends early")
        left -= len(pieces[-1])
    return b"".join(pieces)
