"""The bytes of a journal's log: one checked record a row.

A record is::

    b"NCMROW1\n"   u32 bytes of facts   u32 bytes of features   16 bytes BLAKE2b over the rest
    facts: JSON [id, path, size, mtime_ns, sha256]          features: little-endian float32

Finished rows of an embedding that isn't finished: durable, checked one by one, ready to go on from.

The folder ``.NAME.partial`` beside the output ``NAME`` holds ``journal.json`` (what is being made) and
``rows.log``, to which rows are appended (see `journal_log`).

A process killed at any moment leaves at most one row half-written, at the end; it is dropped when the journal
is opened again, and so is any row whose bytes have changed since, which is counted: dropped rows are embedded
anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError, MismatchError, listing
from ncm_cli.store.digests import canonical_json, damaged, differing_fields
from ncm_cli.store.files import full_disk_is_an_input_error, sync_folder
from ncm_cli.store.results import read_document, write_document

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


FORMAT = "ncm-journal"
VERSION = 2

SYNC_SECONDS = 2.0
"""Appended rows reach the disk at least this often, as long as rows are appended."""


def journal_folder(output: Path | str) -> Path:
    """Where the journal of an output is."""
    output = Path(os.path.realpath(output))
    return output.with_name(f".{output.name}.partial")


class Journal(contextlib.AbstractContextManager["Journal"]):
    """Durable rows of one output. The caller holds the output's writer lock.

    Memory: about 200 bytes a row; paths and features stay on disk.

    Attributes
    ----------
    rows
        Rows in the log, repeated ids included.
    dim
        Width of the rows, once there is one.
    damaged
        Rows whose bytes had changed when the journal was opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._offsets: dict[str, int] = {}
        self.rows = self.damaged = self._end = 0
        self.dim: int | None = None
        self._synced = time.monotonic()
        self._log: BinaryIO = (folder / "rows.log").open("a+b", buffering=0)
        try:
            for offset, end, row, features in scan(folder / "rows.log"):
                if row is None:
                    self.damaged += 1
                    continue
                self._offsets[row.id] = offset
                self.rows, self.dim, self._end = self.rows + 1, len(features), end
            self._log.truncate(self._end)
        except BaseException:
            self._log.close()
            raise

    @classmethod
    def open(cls, output: Path | str, key: Mapping[str, Any]) -> Journal:
        """The journal of ``output``, made if there is none.

        ``key`` is JSON that says everything the rows depend on. Raises `MismatchError` naming the fields in
        which it differs from that of the rows already there.
        """
        folder = journal_folder(output)
        facts = folder / "journal.json"
        ours = json.loads(canonical_json(dict(key)))
        with full_disk_is_an_input_error(folder):
            if facts.exists():
                _require_same_key(folder, _read_facts(folder)["key"], ours)
            else:
                # Rows without a key can't be trusted to be of this run.
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                body = {"ncm_version": __version__, "output": Path(output).name, "key": ours}
                write_document(facts, FORMAT, VERSION, body)
                sync_folder(folder.parent)
            return cls(folder)

    def append(self, rows: Sequence[JournalRow], features: np.ndarray) -> None:
        """Add finished rows with their features, float32 (n, d).

        Once it returns they survive the end of this process, and within `SYNC_SECONDS` a power cut. Raises
        `InputError` when the disk is full; the rows before are safe then.
        """
        features = np.ascontiguousarray(features, dtype="<f4")
        if features.ndim != 2 or len(features) != len(rows):
            raise ValueError(f"{len(rows)} rows with features of shape {features.shape}")
        if self.dim not in (None, features.shape[1]):
            raise ValueError(f"features of width {features.shape[1]} in a journal of width {self.dim}")
        if not rows:
            return
        records = [record(row, feature.tobytes()) for row, feature in zip(rows, features, strict=True)]
        self._write(b"".join(records))
        for row, made in zip(rows, records, strict=True):
            self._offsets[row.id] = self._end
            self._end += len(made)
        self.rows += len(rows)
        self.dim = int(features.shape[1])
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def _write(self, data: bytes) -> None:
        try:
            with full_disk_is_an_input_error(self.folder):
                left = memoryview(data)
                while left:
                    left = left[self._log.write(left) :]
        except BaseException:
            # Half a row must not stay in front of the next one.
            self._log.truncate(self._end)
            raise

    def sync(self) -> None:
        """Put everything appended so far on the disk."""
        with full_disk_is_an_input_error(self.folder):
            os.fsync(self._log.fileno())
        self._synced = time.monotonic()

    def lookup(self, id: str) -> JournalRow | None:
        """The finished row of that id (the last one, if it was finished twice), or None."""
        return self._read(id)[0] if id in self._offsets else None

    def take(self, ids: Sequence[str]) -> np.ndarray:
        """float32 (n, d): the features of ``ids``, in that order.

        Raises KeyError for an id that isn't there, and `InputError` for a row that was damaged since.
        """
        made = np.empty((len(ids), self.dim or 0), dtype=np.float32)
        for position, id in enumerate(ids):
            made[position] = self._read(id)[1]
        return made

    def _read(self, id: str) -> tuple[JournalRow, np.ndarray]:
        offset = self._offsets[id]
        found = read_record(self._log, offset)
        if found is None:
            raise damaged(self.folder, f"a row at byte {offset:,} that was whole a while ago")
        return found[0], found[1]

    def discard(self) -> None:
        """Delete the journal, once its rows are safe elsewhere or no longer wanted."""
        self._log.close()
        # The key goes first: rows without a key are never used.
        (self.folder / "journal.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Put everything on the disk and close; closing twice is fine."""
        if not self._log.closed:
            try:
                self.sync()
            finally:
                self._log.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_facts(folder: Path) -> dict[str, Any]:
    """What the journal in a folder says of itself, with its ``rows``, ``dim`` and ``damaged`` rows."""
    facts = _read_facts(folder)
    widths = [None if row is None else len(features) for _, _, row, features in scan(folder / "rows.log")]
    damaged_rows = widths.count(None)
    dim = next((width for width in widths if width is not None), None)
    return {**facts, "rows": len(widths) - damaged_rows, "dim": dim, "damaged": damaged_rows}


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / "journal.json"
    fix = f"delete the folder {folder}, and embed anew what it held"
    found = read_document(path, FORMAT, VERSION, what="a journal", fix=fix)
    if not isinstance(found.get("key"), dict):
        raise InputError("not a journal", where=path, found="no key", fix=fix)
    return found


def _require_same_key(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    fields = differing_fields(theirs, ours)
    if fields:
        raise MismatchError(
            "an interrupted run with other settings wrote here",
            where=folder,
            found=listing((f"{name}: {a!r} then, {b!r} now" for name, a, b in fields), limit=6),
            fix=f"use its settings to go on with it, or delete {folder} to start anew",
        )
