"""Reads images ahead of the encoder, in order and with bounded memory, by threads or by processes.

A few images are read by threads. Many are read by processes, since the threads of one interpreter share its
lock. A reader process (`ncm_cli.child`) has no model and no torch. It receives requests for a few images, and
sends back the outcomes and the raw memory of the items.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import queue
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from PIL import Image

from ncm_cli.child import Child
from ncm_cli.errors import InputError, listing
from ncm_cli.images.paths import fetch, file_facts, is_remote
from ncm_cli.images.request import Encoder, Preprocess
from ncm_cli.images.samples import DecodeError, UndeclaredRangeError
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.digests import printable

MAX_THREADS, MAX_PROCESSES = 8, 32
"""Most readers of ``auto``: more threads would wait for each other, more processes for the GPU."""

IMAGES_PER_REQUEST = 16
"""Images in a request to a reader process: some 50 ms of work, so that the request itself costs little."""

MIN_SECONDS_FOR_PROCESSES = 4.0
"""Reading time on one core from which processes are used; starting one takes .2 s."""

IMAGE_SECONDS, BYTE_SECONDS = 1.5e-3, 2.5e-8
"""Approximate times to read an image, and each byte of its file (JPEG photographs on a current core)."""

MAX_TONE_LEVELS = 16
"""Levels of 256 that count as black, or as white: 12-bit samples read as 16-bit ones are all below this."""

REMOTE_READERS = 32
"""Threads of ``auto`` for files on a network, for which they wait most of the time."""

Read = Callable[[Sequence["ImageFile | FetchedImage"]], list["ReadImage"]]


@dataclass(frozen=True, slots=True)
class FetchedImage:
    """The bytes of an image and the time of its file, or the ``reason`` why they can't be read."""

    file: ImageFile
    mtime_ns: int = 0
    data: bytes = b""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReadImage:
    """The outcome of reading one image: the ``item`` for the encoder, or the ``reason`` why there is none.

    ``file`` describes the bytes that were decoded. ``note`` is a remark about an image that is used all the
    same, such as an animation. ``tone`` is ``black`` or ``white`` for a picture that has hardly anything
    else. ``declared`` is the range of samples that the file states; if it states none but needs one,
    ``undeclared`` is the range of the samples themselves.
    """

    file: ImageFile
    item: Any
    reason: str = ""
    note: str = ""
    tone: str = ""
    declared: tuple[float, float] | None = None
    undeclared: tuple[float, float] | None = None


def fetch_image(file: ImageFile) -> FetchedImage:
    """Read the bytes of an image."""
    if printable(file.path) != file.path:
        return FetchedImage(file, reason="its name isn't UTF-8: rename it, as names are stored as UTF-8")
    try:
        # The time is read before the bytes, so that a change in between is noticed in the next run.
        try:
            _, mtime_ns = file_facts(file.path)
        except TimeoutError as error:  # fetching would wait once more
            raise DecodeError(f"cannot be read: {error}") from None
        except Exception:  # fetching reports the reason
            mtime_ns = 0
        return FetchedImage(file, mtime_ns, fetch(file.path))
    except DecodeError as error:
        return FetchedImage(file, reason=error.reason)


def read_image(image: ImageFile | FetchedImage, preprocess: Preprocess) -> ReadImage:
    """Read one image, unless its bytes are there, decode and prepare it."""
    fetched = image if isinstance(image, FetchedImage) else fetch_image(image)
    data, file = fetched.data, ImageFile(fetched.file.id, fetched.file.path)
    if fetched.reason:
        return ReadImage(file, None, fetched.reason)
    file = ImageFile(file.id, file.path, len(data), fetched.mtime_ns, hashlib.sha256(data).hexdigest())
    try:
        picture = shown = preprocess.decode(data)
        if preprocess.backgrounds is not None:
            shown, beside = preprocess.backgrounds.replaced(picture, file.id, preprocess.decode)
            file = file._replace(beside=beside)
        item = preprocess(shown, file.id)
    except DecodeError as error:
        span = error.span if isinstance(error, UndeclaredRangeError) else None
        return ReadImage(file, None, error.reason, undeclared=span)
    note, declared = picture.info.get("note", ""), picture.info.get("declared")
    return ReadImage(file, item, note=note, tone=_tone_of(picture), declared=declared)


def _tone_of(image: Image.Image) -> str:
    """``black`` or ``white`` if all of 256 sampled pixels are nearly so, otherwise ""."""
    lows, highs = zip(*image.resize((16, 16), Image.Resampling.NEAREST).getextrema(), strict=True)
    return "black" if max(highs) < MAX_TONE_LEVELS else "white" if min(lows) >= 256 - MAX_TONE_LEVELS else ""


class Readers(contextlib.AbstractContextManager["Readers"]):
    """Threads that read images, or processes, for each of which a thread waits."""

    def __init__(self, preprocess: Preprocess, *, workers: int, processes: bool = False) -> None:
        self._preprocess, self._workers = preprocess, workers
        self._size = IMAGES_PER_REQUEST if processes else 1
        self._open = contextlib.ExitStack()
        self._read: Read = lambda part: [read_image(file, preprocess) for file in part]
        if workers and processes:
            self._read = self._open.enter_context(_reader_processes(workers, preprocess))
        self._pool = ThreadPoolExecutor(max(1, workers), thread_name_prefix="read-image")
        self._open.callback(self._pool.shutdown, wait=False, cancel_futures=True)

    def ahead(self, files: Iterable[ImageFile | FetchedImage], *, window: int) -> Iterator[ReadImage]:
        """The images in the order of the files, at most ``window`` of them read ahead.

        Several threads may call it at once. Raises `InputError` if a reader process ends unexpectedly.
        """
        if self._workers == 0:
            yield from (read_image(file, self._preprocess) for file in files)
            return
        rest, waiting = iter(files), deque[Future[list[ReadImage]]]()
        while part := list(itertools.islice(rest, self._size)):
            waiting.append(self._pool.submit(self._read, part))
            if len(waiting) * self._size > window:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()

    def __exit__(self, *_: object) -> None:
        self._open.close()


def read_ahead(
    files: Iterable[ImageFile],
    preprocess: Preprocess,
    *,
    workers: int,
    window: int,
    processes: bool = False,
) -> Iterator[ReadImage]:
    """`Readers.ahead`, by readers that end with it."""
    with Readers(preprocess, workers=workers, processes=processes) as readers:
        yield from readers.ahead(files, window=window)


@contextlib.contextmanager
def _reader_processes(count: int, preprocess: Preprocess) -> Iterator[Read]:
    """A function that reads images in one of ``count`` processes; as many threads may call it at once."""
    free: queue.SimpleQueue[_ReaderProcess] = queue.SimpleQueue()

    def read(files: Sequence[ImageFile | FetchedImage]) -> list[ReadImage]:
        process = free.get()
        try:
            return process.read(files)
        finally:  # a process that has ended goes back too, or a thread would wait for ever
            free.put(process)

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            free.put(stack.enter_context(contextlib.closing(_ReaderProcess(preprocess))))
        yield read


class _ReaderProcess:
    """A reader process, as the parent uses it."""

    def __init__(self, preprocess: Preprocess) -> None:
        self._child = Child(read_requested, environment={"OMP_NUM_THREADS": "1"})
        self._ask(preprocess, ())

    def _ask(self, what: Any, files: Sequence[ImageFile | FetchedImage]) -> None:
        try:
            self._child.connection.send(what)
        except ConnectionError:
            raise self._end(files) from None

    def read(self, files: Sequence[ImageFile | FetchedImage]) -> list[ReadImage]:
        """The outcome for each file, in order."""
        self._ask(files, files)
        try:
            images, shape, dtype = self._child.connection.recv()
            items = np.empty(shape, dtype)
            received = 0
            while received < items.nbytes:
                count = self._child.socket.recv_into(items.data.cast("B")[received:], 0, socket.MSG_WAITALL)
                if not count:
                    raise EOFError
                received += count
        except (EOFError, ConnectionError):
            raise self._end(files) from None
        rest = iter(items)
        return [image if image.item is None else replace(image, item=next(rest)) for image in images]

    def _end(self, files: Sequence[ImageFile | FetchedImage]) -> InputError:
        """The error for a process that ended unexpectedly."""
        paths = [(file.file if isinstance(file, FetchedImage) else file).path for file in files]
        return InputError(
            f"a process that reads images {self._child.how_it_ended()}",
            where=f"process {self._child.process.pid}",
            found="it was reading " + listing(map(printable, paths), IMAGES_PER_REQUEST),
            fix="run the same command again (embed goes on from the finished rows), with fewer --workers if "
            "memory was short",
        )

    def close(self) -> None:
        """Kill the process, which has nothing to save."""
        self._child.close()


def read_requested(connection: Connection, stream: socket.socket) -> None:
    """What a reader process runs: read the requested images until the connection closes."""
    preprocess = connection.recv()
    while True:
        images = [read_image(file, preprocess) for file in connection.recv()]
        items = [image.item for image in images if image.item is not None]
        stacked = np.stack(items) if items else np.empty(0, np.uint8)
        answers = [image if image.item is None else replace(image, item=True) for image in images]
        connection.send((answers, stacked.shape, stacked.dtype))
        stream.sendall(stacked.data)


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_process() -> int:
    """The cores for this process, one of ``LOCAL_WORLD_SIZE`` that share the machine."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def choose_readers(
    workers: int | None, files: Sequence[ImageFile], cores: int | None = None
) -> tuple[int, bool]:
    """(number of readers, whether they are processes); None chooses by cores (the process's) and images."""
    cores = cores or cores_of_process()
    seconds = sum(IMAGE_SECONDS + BYTE_SECONDS * file.size for file in files)
    processes = (
        workers != 0
        and os.name == "posix"
        and seconds >= MIN_SECONDS_FOR_PROCESSES
        and (workers or cores) > 1
    )
    if files and is_remote(files[0].path):
        return REMOTE_READERS if workers is None else workers, False
    most = MAX_PROCESSES if processes else MAX_THREADS
    return min(cores, most) if workers is None else workers, processes


def encode_batches(
    encoder: Encoder, batches: Sequence[Sequence[ImageFile]], *, workers: int | None
) -> Iterator[tuple[list[ReadImage], np.ndarray]]:
    """The images of each batch, and float32 (b, d) features of those that have an item, in order.

    The next images are read in the meantime. Batches stay as the caller has chosen them, apart from failures:
    matrix products may round differently in batches of other sizes, and a resumed run must give the same bits
    as an uninterrupted one.
    """
    files = [file for batch in batches for file in batch]
    count, processes = choose_readers(workers, files)
    window = max(map(len, batches), default=0) + 2 * count * (IMAGES_PER_REQUEST if processes else 1)
    images = read_ahead(files, encoder.preprocess, workers=count, window=window, processes=processes)
    # A GPU gets the next batch before the features of the last one are fetched; a CPU gains nothing by that.
    ahead, waiting = int(encoder.device != "cpu"), deque[tuple[list[ReadImage], Callable[[], np.ndarray]]]()
    with contextlib.closing(images):  # type: ignore[type-var]
        for batch in batches:
            read = [next(images) for _ in batch]
            items = [image.item for image in read if image.item is not None]
            waiting.append((read, encoder.start(items) if items else np.zeros((0, encoder.dim), "f4").copy))
            if len(waiting) > ahead:
                read, features = waiting.popleft()
                yield read, features()
        for read, features in waiting:
            yield read, features()
