"""The finished rows of an output that is still being written: images of an embedding, chunks of a sweep.

The folder ``.NAME.partial`` beside the output ``NAME`` holds ``journal.json`` (what is being made) and
``rows.log``, to which rows are appended. A row is::

    b"NCMROW1\n"   u32 bytes of facts   u32 bytes of content   16 bytes BLAKE2b over the rest
    facts: a JSON list, the row's id first        content: little-endian float32, or arrays as npz

A process killed at any moment leaves at most one row half-written, at the end; it is dropped when the journal
is opened again. Rows whose bytes have changed are dropped and counted as well; all dropped rows are computed
again.

Processes that share the rows of one output have a log each, ``rows.I-of-N.log``. Each process records in
``I-of-N.json`` a digest of the plan by which the rows are shared, and whether it is done; it reads the rows
of all. The folder and its key are made, compared and deleted under the output's writer lock; a log is
written under its own lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import mmap
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError, MismatchError
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.digests import canonical_json, damaged, differences, parse_json
from ncm_cli.store.files import (
    BusyError,
    full_disk_is_an_input_error,
    read_document,
    sync_folder,
    write_document,
    writer_lock,
)

FORMAT = "ncm-journal"
VERSION = 2

SYNC_SECONDS = 2.0
"""Appending syncs the log to the disk if the last sync was at least this long ago."""

_MAGIC = b"NCMROW1\n"
_HEAD = struct.Struct("<8sII16s")

Record = tuple[list[Any], bytes]
"""The facts and the content of a row."""


def journal_folder(output: Path | str) -> Path:
    """The folder of an output's journal."""
    output = Path(os.path.realpath(output))
    return output.with_name(f".{output.name}.partial")


def remove_journal(output: Path | str) -> None:
    """Delete the journal of an output, if there is one."""
    folder = journal_folder(output)
    # The key goes first: rows without one are never used.
    (folder / "journal.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def log_path(output: Path | str, part: str = "") -> Path:
    """The file of a journal's rows, or of those of its part ``I-of-N``."""
    return journal_folder(output) / (f"rows.{part}.log" if part else "rows.log")


def write_part(output: Path | str, part: str, **facts: Any) -> None:
    """Record a part's ``plan``, whether it is ``done`` and, if so, which images ``failed``."""
    write_document(journal_folder(output) / f"{part}.json", FORMAT, VERSION, facts)


def read_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """The latest record of each part of the journal in a folder, by the part's name."""
    paths = {path.stem: path for path in sorted(folder.glob("*-of-*.json"))}
    return {part: read_document(path, FORMAT, VERSION, what="a part") for part, path in paths.items()}


def refuse_busy_parts(output: Path | str, part: str = "*") -> None:
    """Raise `BusyError` if a part is being written.

    The caller must hold the output's writer lock, so that no part can start meanwhile.
    """
    for log in journal_folder(output).glob(f"rows.{part}.log"):
        with writer_lock(log, wait=0):
            pass


def _logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("rows*.log"))


def prepare(output: Path | str, key: Mapping[str, Any], *, replace: bool = False) -> bool:
    """Make the folder of a journal, with its key, if there is none.

    ``key`` is JSON that says everything the rows depend on. If the existing rows have another key, or an
    unreadable one, ``replace`` deletes them; without it, raises `MismatchError` naming the fields, or
    `InputError`. Rows that are being written are never deleted. Returns whether any rows were deleted.
    """
    folder, had_rows = journal_folder(output), False
    facts = folder / "journal.json"
    ours = json.loads(canonical_json(dict(key)))
    with full_disk_is_an_input_error(folder):
        if facts.exists():
            try:
                if found := differences(_read_facts(folder)["key"], ours, "then", "now"):
                    raise MismatchError(
                        "an interrupted run with other settings wrote here",
                        where=folder,
                        found=found,
                        fix=f"use the same settings to resume it, or delete {folder} to start over",
                    )
            except (InputError, MismatchError) as error:
                had_rows = any(log.stat().st_size for log in _logs(folder))
                if had_rows and not replace:
                    raise
                try:
                    refuse_busy_parts(output)
                except BusyError:
                    raise error from None
                remove_journal(output)
        if not facts.exists():
            # Rows without a key may be those of another run.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            body = {"ncm_version": __version__, "output": Path(output).name, "key": ours}
            write_document(facts, FORMAT, VERSION, body)
            sync_folder(folder.parent)
    return had_rows


class Journal(contextlib.AbstractContextManager["Journal"]):
    """Durable rows of one output, images or chunks. The caller holds the writer lock of the output.

    With ``part``, rows are added to the log of that part, and its lock is enough. Memory: about 250 bytes a
    row, since the rows' contents stay on disk.

    Attributes
    ----------
    rows
        Rows in the log, repeated ids included.
    dim
        Width of an embedding's rows, once there is one.
    damaged
        Rows whose bytes had changed when the journal was opened.
    replaced
        Whether rows of a run with another key were found, and deleted.
    """

    def __init__(self, output: Path | str, part: str = "") -> None:
        self.output, self.folder = output, journal_folder(output)
        self.replaced = False
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self.rows = self.damaged = self._end = 0
        self.dim: int | None = None
        self._synced = time.monotonic()
        part_log = log_path(output, part)
        self._log: BinaryIO = part_log.open("a+b", buffering=0)
        self._open = contextlib.ExitStack()
        self._open.callback(self._log.close)
        try:
            for path in (*(log for log in _logs(self.folder) if log != part_log), part_log):
                log = (
                    self._log if path == part_log else self._open.enter_context(path.open("rb", buffering=0))
                )
                for offset, end, record in _scan(path):
                    if record is None:
                        self.damaged += 1
                        continue
                    self._places[record[0][0]] = (log, offset)
                    self.rows, self.dim = self.rows + 1, _width(record)
                    self._end = end if path == part_log else 0
            self._log.truncate(self._end)
        except BaseException:
            self._open.close()
            raise

    @classmethod
    def open(cls, output: Path | str, key: Mapping[str, Any], *, replace: bool = False) -> Journal:
        """The journal of ``output``, made if there is none; see `prepare`."""
        replaced = prepare(output, key, replace=replace)
        journal = cls(output)
        journal.replaced = replaced
        return journal

    def append(self, rows: Sequence[ImageFile], features: np.ndarray) -> None:
        """Add images with their features, float32 (n, d).

        Once it returns they survive the end of this process. They survive a power cut once they are synced:
        by an append `SYNC_SECONDS` or more after the last sync, or by `close`. Raises `InputError` when the
        disk is full; earlier rows are safe then.
        """
        features = np.ascontiguousarray(features, dtype="<f4")
        if features.ndim != 2 or len(features) != len(rows):
            raise ValueError(f"{len(rows)} rows with features of shape {features.shape}")
        if self.dim not in (None, features.shape[1]):
            raise ValueError(f"features of width {features.shape[1]} in a journal of width {self.dim}")
        self._append((list(row), content.tobytes()) for row, content in zip(rows, features, strict=True))
        if rows and time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def lookup(self, id: str) -> ImageFile | None:
        """The finished image with that id (the last one, if it was finished twice), or None."""
        return ImageFile(*self._read(id)[0]) if id in self._places else None

    def take(self, ids: Sequence[str]) -> np.ndarray:
        """float32 (n, d): the features of ``ids``, in that order.

        Raises KeyError for an id that isn't there, and `InputError` for a row that was damaged since.
        """
        features = np.empty((len(ids), self.dim or 0), dtype=np.float32)
        for position, id in enumerate(ids):
            features[position] = np.frombuffer(self._read(id)[1], dtype="<f4")
        return features

    def put(self, id: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Add a chunk: named arrays. Once it returns it is on the disk; raises like `append`."""
        stream = io.BytesIO()
        np.savez(stream, **dict(arrays))  # type: ignore[arg-type]
        self._append([([id], stream.getvalue())])
        self.sync()

    def get(self, id: str) -> dict[str, np.ndarray] | None:
        """The arrays of the finished chunk with that id, or None."""
        if id not in self._places:
            return None
        with np.load(io.BytesIO(self._read(id)[1]), allow_pickle=False) as arrays:
            return dict(arrays)

    def _append(self, records: Iterable[Record]) -> None:
        packed = [(record, _packed(record)) for record in records]
        try:
            with full_disk_is_an_input_error(self.folder):
                left = memoryview(b"".join(raw for _, raw in packed))
                while left:
                    left = left[self._log.write(left) :]
        except BaseException:
            # Half a row must not stay in front of the next one.
            self._log.truncate(self._end)
            raise
        for record, raw in packed:
            self._places[record[0][0]] = (self._log, self._end)
            self.rows, self.dim, self._end = self.rows + 1, _width(record), self._end + len(raw)

    def _read(self, id: str) -> Record:
        log, offset = self._places[id]
        record, _ = _read_record(log, offset, os.fstat(log.fileno()).st_size)
        if record is None:
            raise damaged(self.folder, f"a row at byte {offset:,} that was intact earlier in this run")
        return record

    def sync(self) -> None:
        """Put everything appended so far on the disk."""
        with full_disk_is_an_input_error(self.folder):
            os.fsync(self._log.fileno())
        self._synced = time.monotonic()

    def discard(self) -> None:
        """Delete the journal, once its rows are safe elsewhere or no longer wanted."""
        self._open.close()
        remove_journal(self.output)

    def close(self) -> None:
        """Put everything on the disk and close; closing twice is fine."""
        if not self._log.closed:
            try:
                self.sync()
            finally:
                self._open.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of the journal in a folder, with its ``rows``, ``dim`` and ``damaged`` rows.

    ``shards`` has the rows of each part that was begun, the images that failed, and whether it is done.
    """
    facts = _read_facts(folder)
    held: dict[str, Any] = {"rows": 0, "dim": None, "damaged": 0}
    parts, shards = read_parts(folder), {}
    for path in _logs(folder):
        rows = 0
        for _, _, record in _scan(path):
            rows += record is not None
            held["damaged"] += record is None
            held["dim"] = held["dim"] if record is None else _width(record)
        held["rows"] += rows
        if part := path.name[len("rows.") : -len(".log")]:
            log = parts.get(part, {})
            shards[part.replace("-of-", "/")] = {
                "rows": rows, "failed": len(log.get("failed", ())), "done": log.get("done", False)
            }  # fmt: skip
    return {**facts, **held, "shards": shards}


def _read_facts(folder: Path) -> dict[str, Any]:
    path, fix = folder / "journal.json", f"delete the folder {folder} and run the command again"
    facts = read_document(path, FORMAT, VERSION, what="a journal", fix=fix)
    if not isinstance(facts.get("key"), dict):
        raise InputError("not a journal", where=path, found="no key", fix=fix)
    return facts


def _width(record: Record) -> int | None:
    """The width of an image's features; None for a chunk, which has no facts but its id."""
    return len(record[1]) // 4 if len(record[0]) > 1 else None


def _packed(record: Record) -> bytes:
    facts, content = json.dumps(record[0]).encode("ascii"), record[1]
    return _HEAD.pack(_MAGIC, len(facts), len(content), _digest(facts, content)) + facts + content


def _digest(facts: bytes, content: bytes) -> bytes:
    lengths = struct.pack("<II", len(facts), len(content))
    return hashlib.blake2b(lengths + facts + content, digest_size=16).digest()


def _read_record(log: BinaryIO | mmap.mmap, offset: int, size: int) -> tuple[Record | None, int]:
    """The row at ``offset`` of a log of ``size`` bytes, None if its bytes have changed; and its end.

    A row that was cut short ends beyond ``size``.
    """
    log.seek(offset)
    head = log.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None, size + 1
    magic, fact_bytes, content_bytes, digest = _HEAD.unpack(head)
    if magic != _MAGIC:
        return None, offset
    end = offset + _HEAD.size + fact_bytes + content_bytes
    body = log.read(fact_bytes + content_bytes) if end <= size else b""
    facts, content = body[:fact_bytes], body[fact_bytes:]
    if digest == _digest(facts, content):
        with contextlib.suppress(ValueError):
            return (parse_json(facts), content), end
    return None, end


def _scan(path: Path) -> Iterator[tuple[int, int, Record | None]]:
    """Yield (offset, end, row) of every row in a log; None for a damaged one.

    A row that a killed writer left half-written at the end is skipped.
    """
    size = path.stat().st_size
    if not size:  # nothing to map
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
        offset = 0
        while offset < size:
            record, end = _read_record(log, offset, size)
            if record is None:
                cut_short, following = end > size, log.find(_MAGIC, offset + 1)
                end = size if following < 0 else following
            if record is not None or end < size or not cut_short:
                yield offset, end, record
            offset = end
