"""Makes the features that are missing, and keeps them durable while it goes."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import listing
from ncm_cli.images.decode import range_advice
from ncm_cli.images.encoder import Encoder
from ncm_cli.images.feed import EncodedBatch, Job, ReadImage, default_workers, encode_batches, read_ahead
from ncm_cli.images.files import printable
from ncm_cli.images.plan import DONE, NEW, OLD, Plan
from ncm_cli.progress import Reporter, Task
from ncm_cli.store.columns import FailedRow
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.journal import Journal, JournalRow, journal_folder, remove_journal

BLOCK_BYTES = 1 << 20
"""Features gathered at once when the store is written."""

MOSTLY = 0.9
"""The share of a run's images that makes a tone the data set's."""


@dataclass
class Outcome:
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


def batches_of(rows: Sequence[int], size: int) -> list[list[int]]:
    """``rows`` cut into batches of ``size``, the last one shorter."""
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def jobs_of(rows: Sequence[int], ids: Sequence[str], plan: Plan) -> list[Job]:
    """The images of some rows."""
    return [Job(row, ids[row], plan.path[row]) for row in rows]


def any_decodes(
    rows: Sequence[int], ids: Sequence[str], plan: Plan, outcome: Outcome, workers: int, *, ranged: bool
) -> bool:
    """Whether any of the rows' images decodes; the reasons of those that don't are recorded.

    Used on images that failed before, so that a model is loaded only if one of them has been mended. Where
    the run has a range of samples (``ranged``), those without one of their own are taken to decode.
    """
    for image in read_ahead(jobs_of(rows, ids, plan), None, workers=workers, window=2 * workers):
        if image.item is not None or (ranged and image.undeclared):  # its range is the encoder's
            outcome.failed.clear()
            return True
        outcome.fail(image, image.reason)
    return False


def take_finished(plan: Plan, ids: Sequence[str], journal: Journal, *, verify_content: bool) -> None:
    """Take what an interrupted run has finished, as far as the files are still the same."""
    for row in plan.pending() if journal.rows else ():
        found = journal.lookup(ids[row])
        if found is None:
            continue
        same = (found.path, found.size, found.mtime_ns) == (
            plan.path[row],
            plan.size[row],
            plan.mtime_ns[row],
        )
        if (same and not verify_content) or plan.digest(row) == found.sha256:
            plan.take(row, DONE, -1, found.sha256)


def make_features(
    plan: Plan,
    ids: Sequence[str],
    batches: Sequence[Sequence[int]],
    encoder: Encoder,
    journal: Journal,
    *,
    workers: int | None,
    dtype: str,
    reporter: Reporter,
) -> Outcome:
    """Encode the rows of ``batches`` that are still pending.

    Every batch keeps the place it has in an uninterrupted run, so that the features are the same bits.
    """
    outcome = Outcome()
    threads = default_workers() if workers is None else workers
    left = [jobs_of([row for row in batch if plan.source[row] == NEW], ids, plan) for batch in batches]
    left = [batch for batch in left if batch]
    total = sum(map(len, left))
    started = time.monotonic()
    writer = _Writer(plan, journal, encoder, dtype)
    with reporter.task("embedding", total, "images") as task:
        for batch in encode_batches(encoder, left, workers=threads):
            writer.add(batch, outcome)
            outcome.take(batch.images)
            task.advance(len(batch.images))
    outcome.seconds = time.monotonic() - started
    return outcome


class _Writer:
    """Puts finished rows into the journal, and what can't be used among the failures."""

    def __init__(self, plan: Plan, journal: Journal, encoder: Encoder, dtype: str) -> None:
        self._plan, self._journal = plan, journal
        self._dtype = np.dtype(dtype)
        self._normalize = bool(encoder.description.get("normalize"))

    def add(self, batch: EncodedBatch, outcome: Outcome) -> None:
        """Make a batch durable, and only then count it as done."""
        usable = [image for image in batch.images if image.item is not None]
        reasons = {image.job.row: image.reason for image in batch.images if image.item is None}
        kept = []
        for at, image in enumerate(usable):
            reason = self._refusal(batch.features[at])
            if reason:
                reasons[image.job.row] = reason
            else:
                kept.append(at)
        rows = [_journal_row(usable[at]) for at in kept]
        self._journal.append(rows, batch.features[kept])
        for at in kept:
            self._plan.take_read(usable[at])
        for image in batch.images:
            if image.job.row in reasons:
                outcome.fail(image, reasons[image.job.row])

    def _refusal(self, feature: np.ndarray) -> str:
        if not np.isfinite(feature).all():
            return "the encoder's output isn't finite"
        if self._normalize and not feature.any():
            return "the encoder's output is zero and can't be scaled to unit length"
        with np.errstate(over="ignore"):
            fits = np.isfinite(feature.astype(self._dtype)).all()
        return "" if fits else f"{np.abs(feature).max():.3g} is too large for {self._dtype} (--dtype float32)"


def _journal_row(image: ReadImage) -> JournalRow:
    return JournalRow(image.job.id, image.job.path, image.size, image.mtime_ns, image.sha256)


@dataclass(frozen=True)
class Sources:
    """Where the rows of a plan lie."""

    old: FeatureStore | None
    other: FeatureStore | None
    journal: Journal | None

    def read(self, kind: int, positions: np.ndarray, ids: Sequence[str]) -> np.ndarray:
        """float32 (n, d): rows of one source; those of the journal are asked for by id."""
        if kind == DONE:
            assert self.journal is not None
            return self.journal.take(ids)
        store = self.old if kind == OLD else self.other
        assert store is not None
        return store.read(positions)


def gathered(
    plan: Plan, rows: Sequence[int], ids: Sequence[str], sources: Sources, dim: int, task: Task
) -> Iterator[np.ndarray]:
    """float32 (b, dim) blocks of ``rows``, in order, each row from where the plan says."""
    step = max(1, BLOCK_BYTES // (4 * dim))
    for start in range(0, len(rows), step):
        part = np.asarray(rows[start : start + step])
        block = np.empty((len(part), dim), np.float32)
        for kind in np.unique(plan.source[part]).tolist():
            mine = np.flatnonzero(plan.source[part] == kind)
            block[mine] = sources.read(kind, plan.position[part[mine]], [ids[row] for row in part[mine]])
        yield block
        task.advance(len(part))


@contextlib.contextmanager
def open_journal(output: Path, key: dict[str, Any], *, create: bool) -> Iterator[Journal | None]:
    """The journal of an output while the block runs; None where none was left behind, unless ``create``.

    An empty one is removed again, whatever its settings were: nothing is lost by that.
    """
    folder = journal_folder(output)
    log = folder / "rows.log"
    if folder.exists() and not (log.exists() and log.stat().st_size):
        remove_journal(output)
    if not create and not folder.exists():
        yield None
        return
    with Journal.open(output, key) as journal:
        try:
            yield journal
        finally:
            if not journal.rows:
                journal.discard()


def remove_other_journal(output: Path, key: dict[str, Any]) -> None:
    """Delete an unfinished run that has other settings or can't be read; one with these is kept."""
    if journal_folder(output).exists():
        Journal.open(output, key, replace=True).close()
