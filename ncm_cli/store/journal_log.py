"""The bytes of a journal's log: one checked record a row.

A record is::

    b"NCMROW1\\n"   u32 bytes of facts   u32 bytes of features   16 bytes BLAKE2b over the rest
    facts: JSON [id, path, size, mtime_ns, sha256]          features: little-endian float32
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from array import array
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from ncm_cli.store.checks import TEXT_ERRORS

_MAGIC = b"NCMROW1\n"
_HEAD = struct.Struct("<8sII16s")
_MAX_FACT_BYTES = 64 << 10
_MAX_FEATURE_BYTES = 64 << 20
SEARCH_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class JournalRow:
    """One finished row: the image it came from, as it was when it was read."""

    id: str
    path: str
    size: int
    mtime_ns: int
    sha256: str


def hashed(id: str) -> int:
    """64 bits of an id's BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(id.encode("utf-8", TEXT_ERRORS), digest_size=8).digest(), "little")


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


def next_magic(log: BinaryIO, offset: int) -> int:
    """Where the next record may begin, at or after ``offset``; the end of the file if nowhere."""
    log.seek(offset)
    kept = b""
    while block := log.read(SEARCH_BYTES):
        window = kept + block
        at = window.find(_MAGIC)
        if at >= 0:
            return offset - len(kept) + at
        offset += len(block)
        kept = window[-(len(_MAGIC) - 1) :]
    return offset


def scan(log: BinaryIO, size: int) -> Iterator[tuple[int, int, JournalRow, np.ndarray]]:
    """Yield (offset, end, row, features) of every whole record in the first ``size`` bytes."""
    offset = 0
    while offset < size:
        found = read_record(log, offset)
        if found is None:
            offset = next_magic(log, offset + 1)
            continue
        row, features, end = found
        yield offset, end, row, features
        offset = end


def sort_rows(names: array[int], offsets: array[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes in ascending order and the offsets that belong to them, as copies."""
    hashes = np.array(names, dtype=np.uint64)
    order = np.argsort(hashes, kind="stable")
    return hashes[order], np.array(offsets, dtype=np.uint64)[order]
