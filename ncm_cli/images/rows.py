"""From images to rows: where each row's features come from, and making those that are missing.

Images are read ahead of the encoder, in order, with bounded memory; finished rows are durable while it goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ncm_cli.errors import listing
from ncm_cli.images.decode import (
    SAMPLE_POLICY,
    DecodeError,
    UndeclaredRangeError,
    decode,
    range_advice,
    read_bytes,
    sniff,
)
from ncm_cli.images.encoder import Encoder
from ncm_cli.images.manifest import FoundFiles, native, printable
from ncm_cli.progress import Reporter, Task
from ncm_cli.store.columns import FailedRow, Files
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import sha256_file
from ncm_cli.store.journal import Journal, JournalRow, journal_folder, remove_journal

BLOCK_BYTES = 1 << 20
"""Features gathered at once when the store is written."""

MOST_WORKERS = 8
"""Reader threads of ``auto``: decoding outruns every encoder well before that."""

MOSTLY = 0.9
"""The share of a run's images that makes a tone the data set's."""

NEARLY = 16
"""Levels of 256 next to black or white: 12 bits taken for 16 have no others."""

NEW, OLD, OTHER, DONE = 0, 1, 2, 3
"""Where a row's features come from: nowhere yet, the existing output, ``--reuse``, this run or one before."""


@dataclass(frozen=True, slots=True)
class ImageJob:
    """One image to embed: its row in the manifest, its id and its absolute path."""

    row: int
    id: str
    path: str


@dataclass(frozen=True, slots=True)
class ReadImage:
    """What reading one image gave: the ``item`` that the encoder takes, or the ``reason`` why there is none.

    ``size``, ``mtime_ns`` and ``sha256`` are of the very bytes that were decoded. ``note`` tells something
    about an image that is used all the same, such as an animation; ``tone`` is ``black`` or ``white`` where a
    picture has hardly anything else; ``declared`` and ``undeclared`` are the range of samples that the file
    states, and that which it holds and doesn't state.
    """

    job: ImageJob
    item: Any
    size: int = 0
    mtime_ns: int = 0
    sha256: str = ""
    reason: str = ""
    note: str = ""
    tone: str = ""
    declared: tuple[float, float] | None = None
    undeclared: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """The images of one batch, and the (b, d) float32 features of those that have an item, in order."""

    images: list[ReadImage]
    features: np.ndarray


def default_workers() -> int:
    """The threads of ``--workers auto``: the cores this process may use, up to `MOST_WORKERS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def read_image(job: ImageJob, encoder: Encoder | None) -> ReadImage:
    """Read, decode and prepare one image; without an encoder, only find out whether it decodes."""
    if printable(job.path) != job.path:
        return ReadImage(job, None, reason="its name isn't UTF-8: rename it, as names are stored as UTF-8")
    size = mtime_ns = 0
    digest = ""
    try:
        # The time is taken before the bytes: a later change is then seen as one.
        with contextlib.suppress(OSError):  # reading the file says what is wrong with it
            mtime_ns = os.stat(native(job.path)).st_mtime_ns  # noqa: PTH116
        data = read_bytes(os.fsdecode(native(job.path)))
        size, digest = len(data), hashlib.sha256(data).hexdigest()
        image = decode(data, encoder.description.get("intensity_range") if encoder is not None else None)
        item = True if encoder is None else encoder.preprocess(image, job.id)
    except DecodeError as error:
        found = error.span if isinstance(error, UndeclaredRangeError) else None
        return ReadImage(job, None, size, mtime_ns, digest, error.reason, undeclared=found)
    note, declared = image.info.get("note", ""), image.info.get("declared")
    return ReadImage(job, item, size, mtime_ns, digest, note=note, tone=_tone_of(image), declared=declared)


def _tone_of(image: Image.Image) -> str:
    """``black`` or ``white`` for a picture that is nearly nothing else at 256 places, otherwise blank."""
    lows, highs = zip(*image.resize((16, 16), Image.Resampling.NEAREST).getextrema(), strict=True)
    return "black" if max(highs) < NEARLY else "white" if min(lows) >= 256 - NEARLY else ""


def read_ahead(
    jobs: Iterable[ImageJob], encoder: Encoder | None, *, workers: int, window: int
) -> Iterator[ReadImage]:
    """The jobs' images in the order of the jobs, at most ``window`` of them read ahead."""
    if workers == 0:
        yield from (read_image(job, encoder) for job in jobs)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read-image")
    waiting: deque[Future[ReadImage]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(read_image, job, encoder))
            if len(waiting) > window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def encode_batches(
    encoder: Encoder, batches: Sequence[Sequence[ImageJob]], *, workers: int | None
) -> Iterator[EncodedBatch]:
    """Encode batch by batch, reading the next images meanwhile.

    What is in a batch is the caller's choice and is kept, failures apart: a matrix product may round
    differently in batches of other sizes, and a resumed run must give the bits of an uninterrupted one.
    """
    threads = default_workers() if workers is None else workers
    largest = max(map(len, batches), default=0)
    jobs = (job for batch in batches for job in batch)
    images = read_ahead(jobs, encoder, workers=threads, window=largest + 2 * threads)
    with contextlib.closing(images):  # type: ignore[type-var]
        for batch in batches:
            read = [next(images) for _ in batch]
            items = [image.item for image in read if image.item is not None]
            yield EncodedBatch(read, encoder.encode(items) if items else np.zeros((0, encoder.dim), "f4"))


class RowPlan:
    """Where each of the N rows of a manifest comes from, and the state of its file.

    ``source`` int8 (N,) is `NEW`, `OLD`, `OTHER` or `DONE`; ``position`` int64 (N,) the row within that
    store, −1 for `DONE`, whose rows are found by id. ``size``, ``mtime_ns`` and ``sha256`` are of the file's
    bytes that the features belong to; digests are blank where they aren't known yet.
    """

    def __init__(self, ids: Sequence[str], files: FoundFiles) -> None:
        self.ids, self.path, n = ids, files.path, len(ids)
        self.source, self.position = np.zeros(n, np.int8), np.full(n, -1, np.int64)
        self.size, self.mtime_ns, self.sha256 = files.size.copy(), files.mtime_ns.copy(), [""] * n
        self._hashed: dict[int, str] = {}

    def pending(self) -> list[int]:
        """The rows whose features must be made, in manifest order."""
        return np.flatnonzero(self.source == NEW).tolist()

    def jobs(self, rows: Iterable[int]) -> list[ImageJob]:
        """The images of some rows."""
        return [ImageJob(row, self.ids[row], self.path[row]) for row in rows]

    def files(self, rows: Sequence[int]) -> Files:
        """The file records of some rows."""
        path, sha256 = (tuple(values[row] for row in rows) for values in (self.path, self.sha256))
        return Files(path=path, size=self.size[rows], mtime_ns=self.mtime_ns[rows], sha256=sha256)

    def take(self, row: int, source: int, position: int, sha256: str) -> None:
        """Row ``row`` has the features of row ``position`` of ``source``."""
        self.source[row], self.position[row], self.sha256[row] = source, position, sha256

    def digest(self, row: int) -> str:
        """SHA-256 of a row's file now; blank when it can't be read (reading it later says why)."""
        if row not in self._hashed:
            self._hashed[row] = ""
            with contextlib.suppress(OSError):
                self._hashed[row] = sha256_file(os.fsdecode(native(self.path[row])))
        return self._hashed[row]

    def _is_same(self, row: int, path: str, size: int, mtime_ns: int) -> bool:
        return (path, size, mtime_ns) == (self.path[row], self.size[row], self.mtime_ns[row])

    def _usable(self, store: FeatureStore) -> list[int]:
        """The pending rows that a store could have: TIFF files were perhaps read by another policy."""
        rows = self.pending()
        if store.request.get("encoder", {}).get("sample_policy") == SAMPLE_POLICY:
            return rows
        return [row for row in rows if not self._is_tiff(row)]

    def _is_tiff(self, row: int) -> bool:
        with contextlib.suppress(OSError), open(native(self.path[row]), "rb") as stream:  # noqa: PTH123
            return sniff(stream.read(8)) == "TIFF"
        return False

    def take_unchanged(self, old: FeatureStore, *, verify: bool, reporter: Reporter) -> None:
        """Take the rows whose file is the one that the existing output's row was made from.

        Path, size and time decide; where they differ, or with ``verify``, the content does.
        """
        files, known = old.files, {id: at for at, id in enumerate(old.ids)}
        if files is None:
            return
        doubtful = []
        for row in self._usable(old):
            at = known.get(self.ids[row], -1)
            if at < 0 or files.size[at] != self.size[row]:
                continue
            if self._is_same(row, files.path[at], files.size[at], files.mtime_ns[at]) and not verify:
                self.take(row, OLD, at, files.sha256[at])
            else:
                doubtful.append((row, at))
        with reporter.task("comparing contents", len(doubtful), "images") as task:
            for row, at in doubtful:
                if self.digest(row) == files.sha256[at]:
                    self.take(row, OLD, at, files.sha256[at])
                task.advance()

    def take_equal(self, other: FeatureStore, reporter: Reporter) -> None:
        """Take the rows of ``--reuse`` of equal content; an augmented view is drawn from the id as well."""
        if (files := other.files) is None:
            return
        view = "view" in other.encoder
        pairs = zip(other.ids, files.sha256, strict=True)
        places = {(id if view else "", sha256): at for at, (id, sha256) in enumerate(pairs)}
        sizes = set(files.size.tolist())
        rows = [row for row in self._usable(other) if int(self.size[row]) in sizes]
        with reporter.task("comparing contents", len(rows), "images") as task:
            for row in rows:
                digest = self.digest(row)
                at = places.get((self.ids[row] if view else "", digest), -1)
                if digest and at >= 0:
                    self.take(row, OTHER, at, digest)
                task.advance()

    def take_finished(self, journal: Journal, *, verify: bool) -> None:
        """Take what an interrupted run has finished, as far as the files are still the same."""
        for row in self.pending() if journal.rows else ():
            found = journal.lookup(self.ids[row])
            if found is None:
                continue
            same = not verify and self._is_same(row, found.path, found.size, found.mtime_ns)
            if same or self.digest(row) == found.sha256:
                self.take(row, DONE, -1, found.sha256)


@dataclass
class Tally:
    """What a run did: rows encoded, the time it took, rows that failed by their place, what was noticed."""

    encoded: int = 0
    seconds: float = 0.0
    failed: dict[int, FailedRow] = field(default_factory=dict)
    noted: list[str] = field(default_factory=list)
    tones: Counter[str] = field(default_factory=Counter)
    declared: Counter[tuple[float, float]] = field(default_factory=Counter)
    undeclared: list[tuple[float, float]] = field(default_factory=list)

    def fail(self, image: ReadImage, reason: str) -> None:
        """An image that can't be used."""
        job = image.job
        self.failed[job.row] = FailedRow(job.id, printable(job.path), reason)
        self.undeclared += [image.undeclared] if image.undeclared else []

    def take(self, images: Sequence[ReadImage]) -> None:
        """Images that were read, whatever came of them."""
        self.encoded += len(images)
        self.noted += [f"{image.job.id}: {image.note}" for image in images if image.note]
        self.tones.update(image.tone for image in images if image.item is not None)
        self.declared.update(image.declared for image in images if image.declared)

    def range_advice(self) -> str | None:
        """The option that takes all samples whose range no file declares; None where there are none."""
        return _spanning(self.undeclared) if self.undeclared else None

    def say(self, reporter: Reporter) -> None:
        """What a person should know of the pictures as a whole."""
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
            if total and self.tones[tone] >= MOSTLY * total:
                reporter.note(
                    f"{self.tones[tone]:,} of {total:,} images are nearly all {tone}; if their samples use a "
                    "part of their bits only, --intensity-range LOW:HIGH says which"
                )


def _spanning(ranges: Iterable[tuple[float, float]]) -> str:
    lows, highs = zip(*ranges, strict=True)
    return range_advice(min(lows), max(highs))


def none_decodes(jobs: list[ImageJob], tally: Tally, workers: int | None, *, ranged: bool) -> bool:
    """Whether none of the images decodes; the reasons are recorded.

    Used on images that failed before, so that a model is loaded only if one of them has been mended. Where
    the run has a range of samples (``ranged``), those without one of their own are taken to decode.
    """
    threads = 1 if workers is None else workers
    for image in read_ahead(jobs, None, workers=threads, window=2 * threads):
        if image.item is not None or (ranged and image.undeclared):  # its range is the encoder's
            tally.failed.clear()
            return False
        tally.fail(image, image.reason)
    return True


def make_features(
    plan: RowPlan,
    batches: Sequence[Sequence[int]],
    encoder: Encoder,
    journal: Journal,
    *,
    workers: int | None,
    dtype: str,
    reporter: Reporter,
) -> Tally:
    """Encode the rows of ``batches`` that are still pending, each durable before it counts as done.

    Every batch keeps the place it has in an uninterrupted run, so that the features are the same bits.
    """
    tally = Tally()
    left = [plan.jobs(row for row in batch if plan.source[row] == NEW) for batch in batches]
    left = [batch for batch in left if batch]
    started = time.monotonic()
    with reporter.task("embedding", sum(map(len, left)), "images") as task:
        for batch in encode_batches(encoder, left, workers=workers):
            _keep(batch, plan, journal, tally, np.dtype(dtype), bool(encoder.description.get("normalize")))
            tally.take(batch.images)
            task.advance(len(batch.images))
    tally.seconds = time.monotonic() - started
    return tally


def _keep(
    batch: EncodedBatch, plan: RowPlan, journal: Journal, tally: Tally, dtype: np.dtype, unit: bool
) -> None:
    """Put a batch's rows into the journal, and what can't be used among the failures."""
    usable = [image for image in batch.images if image.item is not None]
    refusals = [_refusal(feature, dtype, unit) for feature in batch.features]
    kept = [at for at, reason in enumerate(refusals) if not reason]
    rows = [
        JournalRow(image.job.id, image.job.path, image.size, image.mtime_ns, image.sha256)
        for image in (usable[at] for at in kept)
    ]
    journal.append(rows, batch.features[kept])
    for image in (usable[at] for at in kept):
        row = image.job.row
        plan.size[row], plan.mtime_ns[row] = image.size, image.mtime_ns
        plan.take(row, DONE, -1, image.sha256)
    reasons = {image.job.row: reason for image, reason in zip(usable, refusals, strict=True)}
    for image in batch.images:
        if reason := reasons.get(image.job.row, image.reason):
            tally.fail(image, reason)


def _refusal(feature: np.ndarray, dtype: np.dtype, unit: bool) -> str:
    if not np.isfinite(feature).all():
        return "the encoder's output isn't finite"
    if unit and not feature.any():
        return "the encoder's output is zero and can't be scaled to unit length"
    with np.errstate(over="ignore"):
        fits = np.isfinite(feature.astype(dtype)).all()
    return "" if fits else f"{np.abs(feature).max():.3g} is too large for {dtype} (--dtype float32)"


def gathered(
    plan: RowPlan,
    rows: Sequence[int],
    stores: dict[int, FeatureStore | None],
    journal: Journal | None,
    dim: int,
    task: Task,
) -> Iterator[np.ndarray]:
    """float32 (b, dim) blocks of ``rows``, in order, each row from where the plan says."""
    step = max(1, BLOCK_BYTES // (4 * dim))
    for start in range(0, len(rows), step):
        part = np.asarray(rows[start : start + step])
        block = np.empty((len(part), dim), np.float32)
        for kind in np.unique(plan.source[part]).tolist():
            mine = np.flatnonzero(plan.source[part] == kind)
            if store := stores.get(kind):
                block[mine] = store.read(plan.position[part[mine]])
            else:
                assert journal is not None
                block[mine] = journal.take([plan.ids[row] for row in part[mine]])
        yield block
        task.advance(len(part))


def is_unfinished(output: Path) -> bool:
    """Whether an interrupted run left its finished rows beside an output."""
    return journal_folder(output).exists()


@contextlib.contextmanager
def open_journal(output: Path, key: dict[str, Any], *, fresh: bool) -> Iterator[Journal]:
    """The journal of an output while the block runs; one that stays empty is removed again.

    Raises `MismatchError` for finished rows of another ``key``; with ``fresh`` they are deleted.
    """
    log = journal_folder(output) / "rows.log"
    if not (log.exists() and log.stat().st_size):
        remove_journal(output)
    with Journal.open(output, key, replace=fresh) as journal:
        try:
            yield journal
        finally:
            if not journal.rows:
                journal.discard()
