"""From images to rows: where each row's features come from, and encoding those that are missing.

Each batch of finished rows is written to the journal at once, so an interrupted run can go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ncm_cli.errors import listing
from ncm_cli.images.background import Backgrounds
from ncm_cli.images.decode import SAMPLE_POLICY
from ncm_cli.images.packed import cell_of
from ncm_cli.images.paths import archive_of, fetch, is_remote, look_up, open_file
from ncm_cli.images.reading import ReadImage, encode_batches
from ncm_cli.images.request import Encoder
from ncm_cli.images.samples import DecodeError, range_advice
from ncm_cli.progress import Reporter, Task
from ncm_cli.store.columns import FailedRow, Files, ImageFile
from ncm_cli.store.digests import printable
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.journal import Journal
from ncm_cli.store.sniff import HEAD_BYTES, sniff

BLOCK_BYTES = 1 << 20
"""Bytes of features in one block when the store is written."""

MIN_TONE_SHARE = 0.9
"""From this share of images that are nearly all black, or all white, a note says so."""

LOOKUPS_AT_ONCE = 16
"""Number of concurrent lookups of remote files."""

NEW, OLD, OTHER, DONE, FAILED = 0, 1, 2, 3, 4
"""Where a row's features come from: not made yet, the existing output, ``--reuse``, or the journal of this or
an earlier run. A `FAILED` row has none: a finished shard found that its image can't be used."""


class RowPlan:
    """For each of the N rows of a manifest: where its features come from, and the file they are made from.

    ``source`` int8 (N,) is `NEW`, `OLD`, `OTHER`, `DONE` or `FAILED`; ``position`` int64 (N,) the row within
    that store, −1 for `DONE`, whose rows are found by id. A file's digest is blank where it isn't known yet.
    """

    def __init__(self, files: Sequence[ImageFile], backgrounds: Backgrounds | None = None) -> None:
        self.files, self._backgrounds = list(files), backgrounds
        self.source, self.position = np.zeros(len(files), np.int8), np.full(len(files), -1, np.int64)
        self._hashed: dict[int, str] = {}

    def pending(self) -> list[int]:
        """The rows whose features are still to be made, in manifest order."""
        return np.flatnonzero(self.source == NEW).tolist()

    def take(self, row: int, source: int, position: int, sha256: str, beside: str) -> None:
        """Use the features of row ``position`` of ``source`` for row ``row``."""
        self.source[row], self.position[row] = source, position
        self.files[row] = self.files[row]._replace(sha256=sha256, beside=beside)

    def _beside(self, row: int, told: str, *, verify: bool) -> str | None:
        """What else a row is made of, if a store has ``told`` the same; None if it is to be made anew."""
        if self._backgrounds is None:
            return None if told else ""
        return self._backgrounds.still(self.files[row].id, told, verify=verify)

    def digest(self, row: int) -> str:
        """SHA-256 of a row's file now; blank when it can't be read (reading it later says why)."""
        if row not in self._hashed:
            self._hashed[row] = ""
            with contextlib.suppress(DecodeError):
                self._hashed[row] = hashlib.sha256(fetch(self.files[row].path)).hexdigest()
        return self._hashed[row]

    def _usable(self, store: FeatureStore) -> list[int]:
        """The pending rows that a store can supply: no TIFF files if its sample policy is another."""
        rows = self.pending()
        if store.request.get("encoder", {}).get("sample_policy") == SAMPLE_POLICY:
            return rows
        return [row for row in rows if not self._is_tiff(row)]

    def _is_tiff(self, row: int) -> bool:
        path = self.files[row].path
        with contextlib.suppress(DecodeError, OSError):
            if is_remote(path) or archive_of(path) != path:
                return sniff(fetch(path)[:HEAD_BYTES]) == "TIFF"
            with open_file(path) as stream:
                return sniff(stream.read(HEAD_BYTES)) == "TIFF"
        return False

    def take_unchanged(self, old: FeatureStore, *, verify: bool, reporter: Reporter) -> None:
        """Take rows of the existing output whose files haven't changed.

        Path, size and time decide; if path or time differs, or with ``verify``, the content does.
        """
        if (files := old.files) is None:
            return
        known = {id: old_row for old_row, id in enumerate(old.ids)}
        usable = [
            (row, old_row) for row in self._usable(old) if (old_row := known.get(self.files[row].id, -1)) >= 0
        ]
        self._look_up(usable, files, reporter)
        doubtful = []
        for row, old_row in usable:
            file = self.files[row]
            if files.size[old_row] != file.size:
                continue
            if (beside := self._beside(row, files.beside_of(old_row), verify=verify)) is None:
                continue
            if not verify and (files.path[old_row], files.mtime_ns[old_row]) == (
                file.path,
                file.mtime_ns or None,
            ):
                self.take(row, OLD, old_row, files.sha256[old_row], beside)
            else:
                doubtful.append((row, old_row, beside))
        with reporter.task("comparing contents", len(doubtful), "images") as task:
            for row, old_row, beside in doubtful:
                if self.digest(row) == files.sha256[old_row]:
                    self.take(row, OLD, old_row, files.sha256[old_row], beside)
                task.advance()

    def _look_up(self, pairs: Sequence[tuple[int, int]], old: Files, reporter: Reporter) -> None:
        """Look up size and time of remote files that the old store has, too; its size if there is none.

        The size of a picture in a table isn't known before it is read: the table's time tells a change.
        """
        for row, old_row in pairs:
            if cell_of(self.files[row].path):
                self.files[row] = self.files[row]._replace(size=int(old.size[old_row]))
        asked = ((row, old_row, self.files[row]) for row, old_row in pairs if self.files[row].size < 0)
        pairs = [
            (row, old_row)
            for row, old_row, file in asked
            if is_remote(file.path) and file.path == old.path[old_row]
        ]
        with (
            reporter.task("looking up", len(pairs), "files") as task,
            ThreadPoolExecutor(LOOKUPS_AT_ONCE) as pool,
        ):
            facts = pool.map(look_up, [self.files[row].path for row, _ in pairs])
            for (row, old_row), (size, mtime_ns) in zip(pairs, facts, strict=True):
                size = int(old.size[old_row]) if size < 0 else size
                self.files[row] = self.files[row]._replace(size=size, mtime_ns=mtime_ns)
                task.advance()

    def take_equal(self, other: FeatureStore, reporter: Reporter) -> None:
        """Take rows of ``--reuse`` whose files have the same content.

        For augmented views the ids must be equal too, since the view is drawn from the id.
        """
        if (files := other.files) is None:
            return
        view = "view" in other.encoder
        pairs = zip(other.ids, files.sha256, strict=True)
        places = {(id if view else "", sha256): other_row for other_row, (id, sha256) in enumerate(pairs)}
        sizes = set(files.size.tolist())
        rows = [
            row
            for row in self._usable(other)
            if self.files[row].size in sizes
            or is_remote(self.files[row].path)
            or cell_of(self.files[row].path)
        ]
        with reporter.task("comparing contents", len(rows), "images") as task:
            for row in rows:
                digest = self.digest(row)
                other_row = places.get((self.files[row].id if view else "", digest), -1)
                beside = (
                    self._beside(row, files.beside_of(other_row), verify=True)
                    if digest and other_row >= 0
                    else None
                )
                if beside is not None:
                    self.take(row, OTHER, other_row, digest, beside)
                    self.files[row] = self.files[row]._replace(size=int(files.size[other_row]))
                task.advance()

    def take_finished(self, journal: Journal, rows: Sequence[int], *, verify: bool) -> None:
        """Take those of ``rows`` that an interrupted run has finished and whose files haven't changed."""
        for row in rows if journal.rows else ():
            finished = journal.lookup(self.files[row].id)
            if finished is None:
                continue
            # Remote files that the run has read aren't looked up again.
            same_path = finished.path == self.files[row].path
            if same_path and is_remote(finished.path):
                self.files[row] = finished
            if same_path and cell_of(finished.path) and finished.mtime_ns == self.files[row].mtime_ns:
                self.files[row] = self.files[row]._replace(size=finished.size)
            unchanged = not verify and finished[:4] == self.files[row][:4]
            beside = self._beside(row, finished.beside, verify=verify)
            if beside is not None and (unchanged or self.digest(row) == finished.sha256):
                self.take(row, DONE, -1, finished.sha256, beside)

    def take_failed(self, reported: Iterable[Sequence[Any]]) -> dict[str, FailedRow]:
        """Mark the pending rows that finished shards ``reported`` as failed; returns them by id.

        Each is reported as (id, path, size, time, reason), and counts if the file hasn't changed.
        """
        rows = {self.files[row].id: row for row in self.pending()}
        failed = {}
        for id, path, size, mtime_ns, reason in reported:
            if (row := rows.get(id)) is not None and self.files[row][:4] == (id, path, size, mtime_ns):
                self.source[row] = FAILED
                failed[id] = FailedRow(id, printable(path), reason)
        return failed


@dataclass
class Tally:
    """Totals of a run: rows encoded, seconds, failed rows by id, and observations about the images."""

    encoded: int = 0
    seconds: float = 0.0
    failed: dict[str, FailedRow] = field(default_factory=dict)
    noted: list[str] = field(default_factory=list)
    tones: Counter[str] = field(default_factory=Counter)
    declared: Counter[tuple[float, float]] = field(default_factory=Counter)
    undeclared: list[tuple[float, float]] = field(default_factory=list)

    @property
    def rate(self) -> float | None:
        """Images read and encoded a second; None if there were none."""
        return self.encoded / self.seconds if self.seconds else None

    def fail(self, image: ReadImage, reason: str) -> None:
        """Record that an image can't be used."""
        file = image.file
        self.failed[file.id] = FailedRow(file.id, printable(file.path), reason)
        self.undeclared += [image.undeclared] if image.undeclared else []

    def take(self, images: Sequence[ReadImage]) -> None:
        """Count images that were read, usable or not."""
        self.encoded += len(images)
        self.noted += [f"{image.file.id}: {image.note}" for image in images if image.note]
        self.tones.update(image.tone for image in images if image.item is not None)
        self.declared.update(image.declared for image in images if image.declared)

    def range_advice(self) -> str | None:
        """The option that covers all images without a declared range; None if there are none."""
        return _spanning(self.undeclared) if self.undeclared else None

    def say(self, reporter: Reporter) -> None:
        """Report what the images have in common."""
        if self.noted:
            reporter.warn(f"{len(self.noted)} images are used in part: {listing(self.noted)}")
        if self.undeclared:
            reporter.warn(
                f"{len(self.undeclared)} images failed since nothing says which samples are black and white; "
                f"over all of them: {self.range_advice()} --fresh"
            )
        if len(self.declared) > 1:
            reporter.warn(
                f"the images declare {len(self.declared)} different ranges of samples, which may be each "
                f"picture's own extremes; to show all alike: {_spanning(self.declared)} --fresh"
            )
        total = sum(self.tones.values())
        for tone in ("black", "white"):
            if total and self.tones[tone] >= MIN_TONE_SHARE * total:
                reporter.note(
                    f"{self.tones[tone]:,} of {total:,} images are nearly all {tone}; if their samples use a "
                    "part of their bits only, --intensity-range LOW:HIGH says which"
                )


def _spanning(ranges: Iterable[tuple[float, float]]) -> str:
    lows, highs = zip(*ranges, strict=True)
    return range_advice(min(lows), max(highs))


Encode = Callable[
    [Sequence[Sequence[ImageFile]], Task], Generator[tuple[int, list[ReadImage], np.ndarray], None, None]
]
"""Encodes batches: the number of each, its images, and float32 (b, d) features of the usable ones, in any
order."""


def encode_here(encoder: Encoder, workers: int | None) -> Encode:
    """Batches are encoded by this process, in order."""

    def encode(batches: Sequence[Sequence[ImageFile]], task: Task) -> Generator[Any, None, None]:
        for at, (images, features) in enumerate(encode_batches(encoder, batches, workers=workers)):
            yield at, images, features

    return encode


def make_features(
    plan: RowPlan,
    batches: Sequence[Sequence[int]],
    encode: Encode,
    journal: Journal,
    *,
    unit: bool,
    dtype: str,
    reporter: Reporter,
) -> Tally:
    """Encode the rows of ``batches`` that are still pending, batch by batch, into the journal.

    A row counts as done once the journal has it. Rows stay in the batches of an uninterrupted run. With
    ``unit`` features are of length 1, and rows that can't be are refused.
    """
    tally = Tally()
    left = [[row for row in batch if plan.source[row] == NEW] for batch in batches]
    left = [rows for rows in left if rows]
    if not left:
        return tally
    with contextlib.ExitStack() as stack:
        task = stack.enter_context(reporter.task("embedding", sum(map(len, left)), "images"))
        encoded = encode([[plan.files[row] for row in rows] for rows in left], task)
        stack.enter_context(contextlib.closing(encoded))
        started = time.monotonic()
        for at, images, features in encoded:
            rows = left[at]
            usable = [(row, image) for row, image in zip(rows, images, strict=True) if image.item is not None]
            reasons = faults(features, np.dtype(dtype), unit)
            kept = [at for at, reason in enumerate(reasons) if not reason]
            journal.append([usable[at][1].file for at in kept], features[kept])
            for row, image in (usable[at] for at in kept):
                plan.files[row], plan.source[row] = image.file, DONE
            for (_, image), reason in zip(usable, reasons, strict=True):
                if reason:
                    tally.fail(image, f"the encoder's output is {reason}")
            for image in images:
                if image.item is None:
                    tally.fail(image, image.reason)
            tally.take(images)
            task.advance(len(images))
        tally.seconds = time.monotonic() - started
    return tally


def faults(features: np.ndarray, dtype: np.dtype, unit: bool) -> list[str]:
    """Why each row of (n, d) can't be stored as ``dtype``; "" for a row that can.

    With ``unit``, rows must have length 1, so zero rows are refused.
    """
    finite = np.isfinite(features).all(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        fits = np.isfinite(features.astype(dtype)).all(axis=1)
    reasons = np.where(fits, "", f"too large for {dtype} (--dtype float32)")
    reasons = np.where(unit & ~features.any(axis=1), "zero and can't be scaled to unit length", reasons)
    return np.where(finite, reasons, "not finite").tolist()


def gathered(
    plan: RowPlan,
    rows: Sequence[int],
    stores: dict[int, FeatureStore | None],
    journal: Journal,
    dim: int,
    task: Task,
) -> Iterator[np.ndarray]:
    """float32 (b, dim) blocks of ``rows``, in order, each row read from its source in the plan."""
    step = max(1, BLOCK_BYTES // (4 * dim))
    for start in range(0, len(rows), step):
        part = np.asarray(rows[start : start + step])
        block = np.empty((len(part), dim), np.float32)
        for kind in np.unique(plan.source[part]).tolist():
            rows_of_source = np.flatnonzero(plan.source[part] == kind)
            if store := stores.get(kind):
                block[rows_of_source] = store.read(plan.position[part[rows_of_source]])
            else:
                block[rows_of_source] = journal.take([plan.files[row].id for row in part[rows_of_source]])
        yield block
        task.advance(len(part))


def alike(a: Any, b: Any) -> bool:
    """Whether two columns, or two sets of file records, are equal."""

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, np.ndarray):
            return np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        return bool(x == y)

    names = [field.name for field in dataclasses.fields(a)] if type(a) is type(b) else []
    return bool(names) and all(same(getattr(a, name), getattr(b, name)) for name in names)
