"""Reads images ahead of the encoder, in order and with bounded memory, by threads or by processes.

A few images are read by threads. Many are read by processes, since the threads of one interpreter share its
lock. A reader process is a new interpreter that holds no model and imports no torch; it is asked for a few
images at a time over a socket, and sends back what it found and the items, as they are in memory. It ends
when this process does, whatever ended it, since the socket then closes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from PIL import Image

from ncm_cli.errors import InputError, listing
from ncm_cli.images.paths import fetch, file_facts, is_remote
from ncm_cli.images.request import Encoder, Preprocess
from ncm_cli.images.samples import DecodeError, UndeclaredRangeError
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.digests import printable

MAX_THREADS, MAX_PROCESSES = 8, 32
"""Readers of ``auto``, cores allowing: more threads only wait for each other, more processes for the GPU."""

IMAGES_PER_REQUEST = 16
"""Images that a process is asked for at once: some 50 ms of work, beside which asking costs nothing."""

MIN_SECONDS_FOR_PROCESSES = 4.0
"""Seconds that one core would read for, from which on processes are started, which takes each .2 s."""

IMAGE_SECONDS, BYTE_SECONDS = 1.5e-3, 2.5e-8
"""Rough times to read an image and each byte of its file: JPEG photographs on a current core."""

MAX_TONE_LEVELS = 16
"""Levels of 256 that count as black, or as white: samples of 12 bits that are taken for 16 have no others."""

REMOTE_READERS = 32
"""Threads of ``auto`` where files come over a network: they wait for it most of their time."""

Read = Callable[[Sequence[ImageFile]], list["ReadImage"]]


@dataclass(frozen=True, slots=True)
class ReadImage:
    """The outcome of reading one image: the ``item`` for the encoder, or the ``reason`` why there is none.

    ``file`` is of the very bytes that were decoded. ``note`` tells something about an image that is used all
    the same, such as an animation; ``tone`` is ``black`` or ``white`` where a picture has hardly anything
    else; ``declared`` and ``undeclared`` are the range of samples that the file states, and that which it
    holds and doesn't state.
    """

    file: ImageFile
    item: Any
    reason: str = ""
    note: str = ""
    tone: str = ""
    declared: tuple[float, float] | None = None
    undeclared: tuple[float, float] | None = None


def read_image(file: ImageFile, preprocess: Preprocess) -> ReadImage:
    """Read, decode and prepare one image."""
    if printable(file.path) != file.path:
        return ReadImage(file, None, reason="its name isn't UTF-8: rename it, as names are stored as UTF-8")
    file = ImageFile(file.id, file.path)
    try:
        # The time is read before the bytes, so that a change in between is noticed later.
        try:
            _, mtime_ns = file_facts(file.path)
        except TimeoutError as error:  # it would be waited for once more
            raise DecodeError(f"cannot be read: {error}") from None
        except Exception:  # reading it says why
            mtime_ns = 0
        data = fetch(file.path)
        file = ImageFile(file.id, file.path, len(data), mtime_ns, hashlib.sha256(data).hexdigest())
        image = preprocess.decode(data)
        item = preprocess(image, file.id)
    except DecodeError as error:
        found = error.span if isinstance(error, UndeclaredRangeError) else None
        return ReadImage(file, None, error.reason, undeclared=found)
    note, declared = image.info.get("note", ""), image.info.get("declared")
    return ReadImage(file, item, note=note, tone=_tone_of(image), declared=declared)


def _tone_of(image: Image.Image) -> str:
    """``black`` or ``white`` for a picture that is nearly nothing else at 256 places, otherwise blank."""
    lows, highs = zip(*image.resize((16, 16), Image.Resampling.NEAREST).getextrema(), strict=True)
    return "black" if max(highs) < MAX_TONE_LEVELS else "white" if min(lows) >= 256 - MAX_TONE_LEVELS else ""


def read_ahead(
    files: Iterable[ImageFile],
    preprocess: Preprocess,
    *,
    workers: int,
    window: int,
    processes: bool = False,
) -> Iterator[ReadImage]:
    """The images in the order of the files, at most ``window`` of them read ahead.

    Raises `InputError` where a reader process ends before it is told to.
    """
    if workers == 0:
        yield from (read_image(file, preprocess) for file in files)
        return
    rest, size = iter(files), IMAGES_PER_REQUEST if processes else 1
    waiting: deque[Future[list[ReadImage]]] = deque()
    with contextlib.ExitStack() as stack:
        if processes:
            read = stack.enter_context(_reader_processes(workers, preprocess))
        else:
            read = lambda part: [read_image(file, preprocess) for file in part]  # noqa: E731
        # With processes, a thread does no more than wait for one of them.
        pool = ThreadPoolExecutor(workers, thread_name_prefix="read-image")
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        while part := list(itertools.islice(rest, size)):
            waiting.append(pool.submit(read, part))
            if len(waiting) * size > window:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


@contextlib.contextmanager
def _reader_processes(count: int, preprocess: Preprocess) -> Iterator[Read]:
    """A function that has images read by one of ``count`` processes, for as many threads to call."""
    free: queue.SimpleQueue[_ReaderProcess] = queue.SimpleQueue()

    def read(files: Sequence[ImageFile]) -> list[ReadImage]:
        process = free.get()
        try:
            return process.read(files)
        finally:  # one that has ended goes back too, or a thread would wait for it for ever
            free.put(process)

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            free.put(stack.enter_context(contextlib.closing(_ReaderProcess(preprocess))))
        yield read


class _ReaderProcess:
    """A process that reads images, seen from here."""

    def __init__(self, preprocess: Preprocess) -> None:
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        # It has this process's modules, but not its main one, which may be anybody's script.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from ncm_cli.images.reading import serve; serve({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process to see
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self._ask(preprocess, ())

    def _ask(self, what: Any, files: Sequence[ImageFile]) -> None:
        try:
            self._connection.send(what)
        except ConnectionError:
            raise self._end(files) from None

    def read(self, files: Sequence[ImageFile]) -> list[ReadImage]:
        """The outcome for each file, in order."""
        self._ask(files, files)
        try:
            images, shape, dtype = self._connection.recv()
            items = np.empty(shape, dtype)
            got = 0
            while got < items.nbytes:
                count = self._socket.recv_into(items.data.cast("B")[got:], 0, socket.MSG_WAITALL)
                if not count:
                    raise EOFError
                got += count
        except (EOFError, ConnectionError):
            raise self._end(files) from None
        rest = iter(items)
        return [image if image.item is None else replace(image, item=next(rest)) for image in images]

    def _end(self, files: Sequence[ImageFile]) -> InputError:
        """The error of a process that ended by itself."""
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return InputError(
            f"a process that reads images {how}",
            where=f"process {self._process.pid}",
            found="it was reading " + listing([printable(file.path) for file in files], IMAGES_PER_REQUEST),
            fix="run the same command again (embed goes on from the finished rows), with fewer --workers if "
            "memory was short",
        )

    def close(self) -> None:
        """End the process; it has nothing to lose."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._socket.close()


def serve(descriptor: int) -> None:
    """The work of a reader process: read the images that it is asked for until the socket closes."""
    connection, stream = Connection(descriptor), socket.socket(fileno=os.dup(descriptor))
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        preprocess = connection.recv()
        while True:
            images = [read_image(file, preprocess) for file in connection.recv()]
            items = [image.item for image in images if image.item is not None]
            stacked = np.stack(items) if items else np.empty(0, np.uint8)
            answers = [image if image.item is None else replace(image, item=True) for image in images]
            connection.send((answers, stacked.shape, stacked.dtype))
            stream.sendall(stacked.data)


def _end_with(descriptor: int) -> None:
    """End this process as soon as the other end of a socket is closed, even in the middle of an image."""
    waiting = select.poll()
    waiting.register(descriptor, 0)  # what is left is that it is closed
    waiting.poll()
    os._exit(0)


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_readers(workers: int | None, files: Sequence[ImageFile]) -> tuple[int, bool]:
    """How many readers, None being ``auto``, and whether they are processes, which pay with many images."""
    cores_of_rank = max(
        1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    )  # torchrun's, one rank a device
    seconds = sum(IMAGE_SECONDS + BYTE_SECONDS * file.size for file in files)
    processes = (
        workers != 0
        and os.name == "posix"
        and seconds >= MIN_SECONDS_FOR_PROCESSES
        and (workers or cores_of_rank) > 1
    )
    if files and is_remote(files[0].path):
        return REMOTE_READERS if workers is None else workers, False
    most = MAX_PROCESSES if processes else MAX_THREADS
    return min(cores_of_rank, most) if workers is None else workers, processes


def encode_batches(
    encoder: Encoder, batches: Sequence[Sequence[ImageFile]], *, workers: int | None
) -> Iterator[tuple[list[ReadImage], np.ndarray]]:
    """The images of each batch, and the (b, d) float32 features of those that have an item, in order.

    The next images are read meanwhile. What is in a batch is the caller's choice and is kept, failures apart:
    a matrix product may round differently in batches of other sizes, and a resumed run must give the bits of
    an uninterrupted one.
    """
    files = [file for batch in batches for file in batch]
    count, processes = choose_readers(workers, files)
    window = max(map(len, batches), default=0) + 2 * count * (IMAGES_PER_REQUEST if processes else 1)
    images = read_ahead(files, encoder.preprocess, workers=count, window=window, processes=processes)
    # A GPU has the next batch before it's asked for the last one's features; a CPU gains nothing by that.
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
