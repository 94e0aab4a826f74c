"""The members of a tar archive, read header by header; nothing is unpacked.

Archives aren't trusted: checksums of headers are verified, their size is bounded, and an archive that ends
early is reported.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Generator
from typing import BinaryIO, cast

from ncm_cli.store.digests import TEXT_ERRORS, printable

MAX_HEADER_BYTES, MAX_DIGITS = 1 << 20, 256
"""Largest extended header, and longest run of digits in it, for which `tarfile` takes quadratic time."""

MAX_PADDING_BYTES = 1 << 26
"""Most zeros after an archive that are skipped in search of another one."""

_PIECE_BYTES = 1 << 23
"""Bytes of one read of a member: a server's answer is held in memory until it is complete."""

_MAX_SIZE = (1 << 63) - 1
"""The largest size of a member: a header can state a size that no file can have."""

_ZEROS = bytes(1 << 20)


def members(archive: BinaryIO, offset: int = 0) -> Generator[tarfile.TarInfo, None, str]:
    """Everything in a tar archive but folders, from the header at ``offset`` on.

    Archives that follow in the same file are read as well. Bytes of a name that aren't UTF-8 are surrogates
    (`printable` shows them).

    Returns why the archive may be incomplete, "" if it is complete. Raises ValueError or `tarfile.TarError`
    if it isn't an archive, is compressed, or has a broken header.
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
        member = _plain_member(head, offset)
        if member is None:
            member, offset = _tarfile_member(archive, offset)
        else:
            offset = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        member.name.encode("utf-8", TEXT_ERRORS)  # raises for other surrogates, which tarfile may return
        if not member.isdir():
            yield member
        if member.isreg() and member.offset_data + member.size > size:
            return f"it ends in the middle of {printable(member.name)}"
    return problem if ended else "it ends without the empty blocks that close an archive"


def _after_zeros(archive: BinaryIO, offset: int, size: int) -> int:
    """The offset of the next block that isn't empty; the file's size if there is none."""
    archive.seek(offset)
    for start in range(offset, min(size, offset + MAX_PADDING_BYTES), len(_ZEROS)):
        data = archive.read(len(_ZEROS))
        if data != _ZEROS[: len(data)]:
            first = len(data) - len(data.lstrip(b"\0"))
            return start + first // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
    if offset + MAX_PADDING_BYTES < size:
        raise ValueError(f"more than {MAX_PADDING_BYTES:,} bytes of zeros after the end of the archive")
    return size


def _plain_member(head: bytes, offset: int) -> tarfile.TarInfo | None:
    """The member of a plain header, ten times as fast as `tarfile`; None for any other header."""
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


def _tarfile_member(archive: BinaryIO, offset: int) -> tuple[tarfile.TarInfo, int]:
    """The member at an offset, read by `tarfile`, and the offset of the next one."""
    archive.seek(offset)
    with tarfile.open(
        fileobj=cast(BinaryIO, _Headers(archive)), mode="r:", encoding="utf-8", errors=TEXT_ERRORS
    ) as tar:
        member, after = tar.next(), tar.offset
    if member is None or not member.name or not 0 <= member.size <= _MAX_SIZE or after <= offset:
        raise ValueError("a broken header")
    return member, after


class _Headers:
    """An archive whose headers are bounded, which `tarfile` doesn't do."""

    def __init__(self, archive: BinaryIO) -> None:
        self.seek, self.tell, self._archive = archive.seek, archive.tell, archive

    def read(self, size: int) -> bytes:
        """The next bytes; ValueError if they are more than a header may have."""
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size:,} bytes")
        data = self._archive.read(size)
        if max(map(len, re.findall(rb"\d+", data)), default=0) > MAX_DIGITS:
            raise ValueError("a broken header")
        return data


def content(archive: BinaryIO, member: tarfile.TarInfo, most: int) -> bytes:
    """The bytes of a member; ValueError if they are more than ``most`` or the archive ends within them."""
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
