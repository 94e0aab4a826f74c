"""Finished rows of an embedding that isn't finished: durable, checked one by one, ready to go on from.

The folder ``.NAME.partial`` beside the output ``NAME`` holds ``journal.json`` (what is being made) and
``rows.log``, to which rows are appended (see `journal_log`).

A process killed at any moment leaves at most one row half-written, at the end; it is dropped when the journal
is opened again, and so is any row whose bytes have changed since: dropped rows are embedded anew.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError, MismatchError, listing
from ncm_cli.store.atomic import full_disk_is_an_input_error, read_json, sync_folder, write_json
from ncm_cli.store.checks import damaged, require_version
from ncm_cli.store.fingerprint import canonical_json, differing_fields
from ncm_cli.store.journal_log import SEARCH_BYTES, JournalRow, hashed, read_record, record, scan, sort_rows

__all__ = ["Journal", "JournalRow", "journal_folder", "read_facts"]

FORMAT = "ncm-journal"
VERSION = 1

SYNC_SECONDS = 2.0
"""Appended rows reach the disk at least this often, as long as rows are appended."""

_RECENT_ROWS = 1 << 16
"""Rows kept in a dictionary until they are sorted in among the others."""


def journal_folder(output: Path | str) -> Path:
    """Where the journal of an output is."""
    output = Path(os.path.realpath(output))
    return output.with_name(f".{output.name}.partial")


class Journal:
    """Durable rows of one output. The caller holds the output's writer lock.

    Memory: 32 bytes a row; ids, paths and features stay on disk.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder = folder
        self.key = dict(key)
        self.dim: int | None = None
        """Width of the rows, once there is one."""
        self._names = array("Q")
        self._offsets = array("Q")
        self._sorted: tuple[np.ndarray, np.ndarray] = sort_rows(self._names, self._offsets)
        self._recent: dict[int, list[int]] = {}
        self._synced = time.monotonic()
        self._log: BinaryIO = (folder / "rows.log").open("a+b", buffering=0)
        try:
            self._end = self._scan()
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
        with full_disk_is_an_input_error(folder):
            if facts.exists():
                _require_same_key(folder, _read_facts(facts)["key"], key)
            else:
                # Rows without a key can't be trusted to be of this run.
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                write_json(
                    facts,
                    {
                        "ncm_format": FORMAT,
                        "ncm_format_version": VERSION,
                        "ncm_version": __version__,
                        "output": Path(output).name,
                        "key": json.loads(canonical_json(dict(key))),
                    },
                )
                sync_folder(folder.parent)
            return cls(folder, key)

    @property
    def rows(self) -> int:
        """Rows in the log, repeated ids included."""
        return len(self._offsets)

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
            self._remember(row.id, self._end)
            self._end += len(made)
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
        found = self._find(id)
        return None if found is None else found[0]

    def features(self, ids: Sequence[str], *, block_rows: int = 256) -> Iterator[np.ndarray]:
        """Yield the features of ``ids``, in that order, as float32 (b, d) blocks.

        Raises KeyError for an id that isn't there, and `InputError` for a row that was damaged since.
        """
        for start in range(0, len(ids), block_rows):
            yield self.take(ids[start : start + block_rows])

    def take(self, ids: Sequence[str]) -> np.ndarray:
        """float32 (n, d): the features of ``ids``, in that order; errors as of `features`."""
        made = np.empty((len(ids), self.dim or 0), dtype=np.float32)
        for position, id in enumerate(ids):
            found = self._find(id)
            if found is None:
                raise KeyError(id)
            made[position] = found[1]
        return made

    def __iter__(self) -> Iterator[tuple[JournalRow, np.ndarray]]:
        """Yield (row, float32 (d,)) in the order in which they were appended, repeated ids included."""
        for offset in list(self._offsets):
            yield self._row_at(offset)

    def __len__(self) -> int:
        return self.rows

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self._find(id) is not None

    def _find(self, id: str) -> tuple[JournalRow, np.ndarray] | None:
        # Two ids may share 64 bits of hash, so the id itself is compared.
        for offset in self._candidates(hashed(id)):
            row, feature = self._row_at(offset)
            if row.id == id:
                return row, feature
        return None

    def _candidates(self, name: int) -> Iterator[int]:
        """Offsets of the rows with that hash, the last one first."""
        yield from reversed(self._recent.get(name, ()))
        names, offsets = self._sorted
        last = int(np.searchsorted(names, np.uint64(name), side="right"))
        while last and int(names[last - 1]) == name:
            last -= 1
            yield int(offsets[last])

    def _row_at(self, offset: int) -> tuple[JournalRow, np.ndarray]:
        found = read_record(self._log, offset)
        if found is None:
            raise damaged(self.folder, f"a row at byte {offset:,} that was whole a while ago")
        return found[0], found[1]

    def _remember(self, id: str, offset: int) -> None:
        name = hashed(id)
        self._names.append(name)
        self._offsets.append(offset)
        self._recent.setdefault(name, []).append(offset)
        if len(self._recent) >= _RECENT_ROWS:
            self._settle()

    def _settle(self) -> None:
        self._sorted = sort_rows(self._names, self._offsets)
        self._recent = {}

    def _scan(self) -> int:
        """Index all whole rows; returns the end of the last one."""
        size = os.fstat(self._log.fileno()).st_size
        with (self.folder / "rows.log").open("rb", buffering=SEARCH_BYTES) as log:
            end = 0
            for offset, stop, row, feature in scan(log, size):
                if self.dim not in (None, len(feature)):
                    continue
                self.dim = len(feature)
                self._remember(row.id, offset)
                end = stop
        self._settle()
        return end

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

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_facts(folder: Path) -> dict[str, Any]:
    """What the journal in a folder says of itself, with its ``rows`` and ``dim``; changes nothing."""
    facts = _read_facts(folder / "journal.json")
    rows, dim = 0, None
    log_path = folder / "rows.log"
    if log_path.is_file():
        with log_path.open("rb", buffering=SEARCH_BYTES) as log:
            for _, _, _, feature in scan(log, log_path.stat().st_size):
                rows, dim = rows + 1, len(feature)
    return {**facts, "rows": rows, "dim": dim}


def _read_facts(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if (
        not isinstance(found, dict)
        or found.get("ncm_format") != FORMAT
        or not isinstance(found.get("key"), dict)
    ):
        raise InputError("not a journal", where=path, fix=f"delete the folder {path.parent}")
    require_version(found.get("ncm_format_version"), VERSION, path)
    return found


def _require_same_key(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    fields = differing_fields(theirs, json.loads(canonical_json(dict(ours))))
    if fields:
        raise MismatchError(
            "an interrupted run with other settings wrote here",
            where=folder,
            found=listing((f"{name}: {a!r} then, {b!r} now" for name, a, b in fields), limit=6),
            fix=f"use its settings to go on with it, or delete {folder} to start anew",
        )
