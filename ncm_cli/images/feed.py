"""Reads images ahead of the encoder, in order, with bounded memory."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ncm_cli.images.decode import UndeclaredRangeError, decode, note_of, read_bytes
from ncm_cli.images.encoder import Encoder
from ncm_cli.images.files import native, printable
from ncm_cli.images.formats import DecodeError

MOST_WORKERS = 8
"""Reader threads of ``auto``: decoding outruns every encoder well before that."""

NEARLY = 16
"""Levels of 256 next to black or white: 12 bits taken for 16 have no others."""


@dataclass(frozen=True, slots=True)
class Job:
    """One image to embed: its row in the manifest, its id and its absolute path."""

    row: int
    id: str
    path: str


@dataclass(frozen=True, slots=True)
class ReadImage:
    """What reading one image gave.

    Attributes
    ----------
    item
        What the encoder takes; None when the image can't be used.
    size, mtime_ns, sha256
        Of the very bytes that were decoded; the digest is empty when the file can't be read.
    reason
        Why there is no item.
    note
        Something to tell about an image that is used all the same, such as an animation.
    tone
        ``black`` or ``white`` where the picture has hardly anything else.
    declared, undeclared
        The range of samples that the file states, and that which it holds and doesn't state.
    """

    job: Job
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


def read_image(job: Job, encoder: Encoder | None) -> ReadImage:
    """Read, decode and prepare one image; without an encoder, only find out whether it decodes."""
    if printable(job.path) != job.path:
        return ReadImage(job, None, reason="its name isn't UTF-8: rename it, as names are stored as UTF-8")
    size = mtime_ns = 0
    digest = ""
    try:
        # The time is taken before the bytes: a later change is then seen as one.
        mtime_ns = _mtime_ns(job.path)
        data = read_bytes(os.fsdecode(native(job.path)))
        size, digest = len(data), hashlib.sha256(data).hexdigest()
        image = decode(data, encoder.description.get("intensity_range") if encoder is not None else None)
        item = True if encoder is None else encoder.preprocess(image, job.id)
    except DecodeError as error:
        found = error.span if isinstance(error, UndeclaredRangeError) else None
        return ReadImage(job, None, size, mtime_ns, digest, error.reason, undeclared=found)
    note, declared = note_of(image) or "", image.info.get("declared")
    return ReadImage(job, item, size, mtime_ns, digest, note=note, tone=tone_of(image), declared=declared)


def tone_of(image: Image.Image) -> str:
    """``black`` or ``white`` for a picture that is nearly nothing else at 256 places, otherwise blank."""
    lows, highs = zip(*image.resize((16, 16), Image.Resampling.NEAREST).getextrema(), strict=True)
    return "black" if max(highs) < NEARLY else "white" if min(lows) >= 256 - NEARLY else ""


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(native(path)).st_mtime_ns  # noqa: PTH116
    except OSError:
        # Reading the file says what is wrong with it.
        return 0


def read_ahead(
    jobs: Iterable[Job], encoder: Encoder | None, *, workers: int, window: int
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
    encoder: Encoder, batches: Sequence[Sequence[Job]], *, workers: int
) -> Iterator[EncodedBatch]:
    """Encode batch by batch, reading the next images meanwhile.

    What is in a batch is the caller's choice and is kept, failures apart: a matrix product may round
    differently in batches of other sizes, and a resumed run must give the bits of an uninterrupted one.
    """
    largest = max(map(len, batches), default=0)
    jobs = (job for batch in batches for job in batch)
    images = read_ahead(jobs, encoder, workers=workers, window=largest + 2 * workers)
    try:
        for batch in batches:
            read = [next(images) for _ in batch]
            items = [image.item for image in read if image.item is not None]
            features = encoder.encode(items) if items else np.zeros((0, encoder.dim), np.float32)
            yield EncodedBatch(read, features)
    finally:
        images.close()  # type: ignore[attr-defined]
