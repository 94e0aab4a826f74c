"""The bytes of a journal's log: one checked record a row.

A record is::

    b"NCMROW1\\n"   u32 bytes of facts   u32 bytes of features   16 bytes BLAKE2b over the rest
    facts: JSON [id, path, size, mtime_ns, sha256]          features: little-endian float32
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

_MAGIC = b"NCMROW1\n"
_HEAD = struct.Struct("<8sII16s")
_MAX_FACT_BYTES = 64 << 10
_MAX_FEATURE_BYTES = 64 << 20
_SEARCH_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class JournalRow:
    """One finished row: the image it came from, as it was when it was read."""

    id: str
    path: str
    size: int
    mtime_ns: int
    sha256: str


def record(row: JournalRow, features: bytes) -> bytes:
    """The record of one row."""
    facts = json.dumps([row.id, row.path, int(row.size), int(row.mtime_ns), row.sha256]).encode("ascii")
    digest = _digest(facts, features)
    return _HEAD.pack(_MAGIC, len(facts), len(features), digest) + facts + features


def _digest(facts: bytes, features: bytes) -> bytes:
    lengths = struct.pack("<II", len(facts), len(features))
    return hashlib.blake2b(lengths + facts + features, digest_size=16).digest()


def read_record(log: BinaryIO, offset: int) -> tuple[JournalRow, np.ndarray, int] | None:
    """(row, features, end) of the record at ``offset``, or None if there is no whole one."""
    log.seek(offset)
    head = log.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    magic, fact_bytes, feature_bytes, digest = _HEAD.unpack(head)
    if magic != _MAGIC or fact_bytes > _MAX_FACT_BYTES or feature_bytes > _MAX_FEATURE_BYTES:
        return None
    body = log.read(fact_bytes + feature_bytes)
    facts, features = body[:fact_bytes], body[fact_bytes:]
    if len(body) < fact_bytes + feature_bytes or digest != _digest(facts, features):
        return None
    try:
        row = JournalRow(*json.loads(facts))
    except (ValueError, TypeError):
        return None
    return row, np.frombuffer(features, dtype="<f4"), offset + _HEAD.size + len(body)


def scan(path: Path) -> Iterator[tuple[int, int, JournalRow | None, np.ndarray]]:
    """Yield (offset, end, row, features) of every record in a log; None for the row of a damaged one.

    What a killed writer left half-written at the end is passed over.
    """
    width: int | None = None
    if not path.is_file():
        return
    with path.open("rb", buffering=_SEARCH_BYTES) as log:
        offset, size = 0, os.fstat(log.fileno()).st_size
        while offset < size:
            found = read_record(log, offset)
            if found is not None and width in (None, len(found[1])):
                row, features, end = found
                width = len(features)
                yield offset, end, row, features
            else:
                end = _next_magic(log, offset + 1)
                if end < size or not _is_cut_short(log, offset, size):
                    yield offset, end, None, np.empty(0, "<f4")
            offset = end


def _is_cut_short(log: BinaryIO, offset: int, size: int) -> bool:
    """Whether the log ends before the record at ``offset`` does."""
    log.seek(offset)
    head = log.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return True
    magic, fact_bytes, feature_bytes, _ = _HEAD.unpack(head)
    return magic == _MAGIC and offset + _HEAD.size + fact_bytes + feature_bytes > size


def _next_magic(log: BinaryIO, offset: int) -> int:
    """Where the next record may begin, at or after ``offset``; the end of the file if nowhere."""
    log.seek(offset)
    kept = b""
    while block := log.read(_SEARCH_BYTES):
        window = kept + block
        at = window.find(_MAGIC)
        if at >= 0:
            return offset - len(kept) + at
        offset += len(block)
        kept = window[-(len(_MAGIC) - 1) :]
    return offset
