"""Processes of this machine that do the steps of a run, several at once."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ncm_cli.child import Child
from ncm_cli.errors import InputError
from ncm_cli.progress import Reporter, Task
from ncm_cli.recipes.perform import Order, Outcome, gpu_asked, perform_elsewhere
from ncm_cli.recipes.repeated import Repetitions
from ncm_cli.recipes.steps import Job
from ncm_cli.results.plots import load_matplotlib

GRACE_SECONDS = 5.0
"""After Ctrl-C: time for steps to release their locks, before they are killed."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""The environment variables by which torch and numpy's libraries choose their number of threads."""

IDLE_SECONDS = 0.3
"""After so long without a step a process prepares for drawing."""

ADVANCE_SECONDS = 0.1
"""Between two messages of how far a step has come."""

Message = tuple[Any, ...]
"""A name, and arguments. ``note``, ``detail`` and ``warn`` of a reporter; ``task``, ``advance``, ``relabel``,
``end`` of a piece of work; ``print`` for standard output; ``warning`` of a library; last the ``outcome``."""

Send = Callable[..., None]


class Processes:
    """Child processes, at most ``count``, each of which does one step at a time.

    The first process has the first GPU, the second the second, and so on. A step that may use a GPU runs
    only in a process that has one, unless there is none at all.

    They are started with the first step, and end with the context: at once, but after an exception (such as
    KeyboardInterrupt) they get SIGINT and `GRACE_SECONDS`.
    """

    def __init__(self, jobs: Sequence[Job], count: int) -> None:
        """Processes for these jobs."""
        self._count = count
        self._gpus = any(gpu_asked(job) is not None for job in jobs)
        self._plots = any(job.kind == "report" and job.options.plots is not None for job in jobs)
        self._environment = environment(count, divided=not any(job.kind == "finetune" for job in jobs))
        self._workers: list[_Worker] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._interrupt()
        finally:
            for worker in self._workers:
                worker.child.close()

    def _interrupt(self) -> None:
        busy = [worker for worker in self._workers if worker.number is not None]
        for worker in busy:
            worker.child.process.send_signal(signal.SIGINT)
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until and any(worker.child.process.poll() is None for worker in busy):
            time.sleep(0.02)

    def takes(self, gpu: str | None) -> bool:
        """Whether a process is free for a step; ``gpu`` as in `start`."""
        return not self._workers or self._free(gpu) is not None

    def start(self, number: int, order: Order, gpu: str | None) -> None:
        """Start job ``number``. ``gpu`` is the device that it is given (``auto``, ``cuda``, ``cuda:N``) if it
        may use a GPU, otherwise None."""
        if not self._workers:
            self._workers = [self._started(index) for index in range(self._count)]
        if gpu is not None and not self._workers[0].ready:
            self._receive(self._workers[0])
        worker = self._free(gpu)
        assert worker is not None
        try:
            worker.child.connection.send(order)
        except ConnectionError:  # it has died while it was idle
            worker = self._replaced(worker)
            worker.child.connection.send(order)
        worker.number = number

    def _free(self, gpu: str | None) -> _Worker | None:
        free = [worker for worker in self._workers if worker.number is None]
        if gpu is None:  # a process without a GPU, if one is free; that which may have prepared
            return min(free, key=lambda worker: (worker.gpu is not None, worker.idle_since), default=None)
        if not self._workers[0].ready:  # it isn't known yet whether there are GPUs
            return None
        with_gpu = [worker for worker in self._workers if worker.gpu is not None]
        named = [worker for worker in with_gpu if gpu == f"cuda:{worker.gpu}"]
        return next((worker for worker in free if worker in (named or with_gpu or free)), None)

    def messages(self) -> Iterator[tuple[int, Message]]:
        """The messages that have come from jobs, each with the job's number; waits for at least one.

        The last message of each job is its outcome. That of a process that has died is an error, and another
        process takes its place.
        """
        by_connection = {worker.child.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection)):
            worker = by_connection[connection]  # type: ignore[index]
            number, message = worker.number, self._receive(worker)
            if number is not None and message is not None:
                yield number, message

    def _receive(self, worker: _Worker) -> Message | None:
        """The next message of a process's job; None if it is about the process itself."""
        try:
            message: Message = worker.child.connection.recv()
        except (EOFError, OSError):
            how, pid = worker.child.how_it_ended(), worker.child.process.pid
            if not worker.ready:
                raise InputError(
                    f"a process for steps {how} before its first one",
                    where=f"process {pid}",
                    fix="run the same command again; with fewer --jobs if memory was short",
                ) from None
            self._replaced(worker)
            return "outcome", Outcome(error=_ended(how, pid))
        if message[0] == "ready":
            worker.ready, worker.gpu = True, message[1]
            return None
        if message[0] == "outcome":
            worker.number, worker.idle_since = None, time.monotonic()
        return message

    def _replaced(self, worker: _Worker) -> _Worker:
        """A process in place of one that has died."""
        worker.child.close()
        self._workers[worker.index] = self._started(worker.index)
        return self._workers[worker.index]

    def _started(self, index: int) -> _Worker:
        return _Worker(index, self._gpus, self._plots, self._environment)


def _ended(how: str, pid: int) -> InputError:
    return InputError(
        f"the process of this step {how}",
        where=f"process {pid}",
        fix="run the same command again; with fewer --jobs if memory was short",
    )


class _Worker:
    """A child process, and the job that it does."""

    def __init__(self, index: int, gpus: bool, plots: bool, environment: Mapping[str, str]) -> None:
        """``gpus``: whether some step may use a GPU; ``plots``: whether some step draws."""
        self.index = index
        self.number: int | None = None
        self.idle_since = 0.0
        self.gpu: int | None = None
        self.ready = not gpus
        self.child = Child(serve_steps, environment=environment)
        self.child.connection.send((index, gpus, plots))


def environment(count: int, *, divided: bool = True) -> dict[str, str]:
    """The variables of one of ``count`` processes of this machine: its share of the cores.

    Numbers of threads that are already set stay. Without ``divided`` all do, as for finetune: on a CPU the
    gradient of a convolution's weights is summed by threads, so that its last bits depend on their number.
    """
    from ncm_cli.images.reading import cores

    if not divided:
        return {"LOCAL_WORLD_SIZE": str(count)}
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // count))
    shares = {name: os.environ.get(name) or threads for name in THREAD_VARIABLES}
    return {**shares, "LOCAL_WORLD_SIZE": str(count)}


def serve_steps(connection: Connection, _: socket.socket) -> None:
    """What a child process runs: one step after another."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    lock = threading.Lock()

    def send(*message: Any) -> None:
        with lock:
            connection.send(message)

    try:
        _serve(connection, send)
    except KeyboardInterrupt:  # locks are released; the run's own process says how this one ended
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _serve(connection: Connection, send: Send) -> None:
    index, gpus, plots = connection.recv()
    os.environ.pop("LOCAL_RANK", None)
    if gpus:
        gpu = index if index < count_gpus() else None
        if gpu is not None:
            os.environ["LOCAL_RANK"] = str(gpu)
        send("ready", gpu)
    while True:
        if plots and not connection.poll(IDLE_SECONDS):
            plots = False
            with contextlib.suppress(Exception):  # the report will raise the error again
                load_matplotlib()  # it is often the last step, at which only one process has work
        send("outcome", do(connection.recv(), send))


def count_gpus() -> int:
    """The GPUs that torch sees."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old driver warns; the step says which device it uses
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def do(order: Order, send: Send) -> Outcome:
    """Do a step in this process, which isn't the run's own; all that it says is sent."""
    with warnings.catch_warnings(record=True) as recorded, contextlib.redirect_stdout(_Printed(send)):
        outcome = perform_elsewhere(order, _Sender(send))
    for warning in recorded if outcome.error is None else ():
        send("warning", str(warning.message), warning.category, warning.filename, warning.lineno)
    return outcome


class _Printed(io.TextIOBase):
    """Standard output of a step."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def write(self, text: str) -> int:
        self._send("print", text)
        return len(text)


class _Sender(Reporter):
    """Sends what a step reports."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        number = next(self._numbers)
        self._send("task", number, label, total, unit)
        counted = _Counted(lambda name, value: self._send(name, number, value))
        try:
            yield counted
        finally:
            counted.flush()
            self._send("end", number)

    def note(self, message: str) -> None:
        self._send("note", message)

    def detail(self, message: str) -> None:
        self._send("detail", message)

    def warn(self, message: str) -> None:
        self._send("warn", message)


class _Counted(Task):
    """Counts units, and sends them every `ADVANCE_SECONDS`."""

    def __init__(self, send: Callable[[str, Any], None]) -> None:
        self._send, self._count, self._sent = send, 0, time.monotonic()

    def advance(self, n: int = 1) -> None:
        self._count += n
        if time.monotonic() - self._sent >= ADVANCE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send what has been counted."""
        count, self._count, self._sent = self._count, 0, time.monotonic()
        if count:
            self._send("advance", count)

    def relabel(self, label: str) -> None:
        self._send("relabel", label)


class Listener:
    """Passes what jobs report on to the run's own reporter, with the job's title."""

    def __init__(self, jobs: Sequence[Job], repetitions: Repetitions) -> None:
        self._jobs, self._repetitions = jobs, repetitions
        self._tasks: dict[int, dict[int, tuple[contextlib.ExitStack, Task]]] = {}
        self._printed: dict[int, list[str]] = {}
        self._seen: dict[Any, Any] = {}

    def hear(self, number: int, message: Message) -> None:
        """Pass on one message of a job, but for its outcome, with which all of its tasks end."""
        name, *arguments = message
        prefix = f"{self._jobs[number].title}: "
        reporter = self._repetitions.reporter_of(self._jobs[number], prefix)
        tasks = self._tasks.setdefault(number, {})
        if name in ("note", "detail", "warn"):
            getattr(reporter, name)(*arguments)
        elif name == "task":
            key, *rest = arguments
            stack = contextlib.ExitStack()
            tasks[key] = stack, stack.enter_context(reporter.task(*rest))
        elif name == "advance":
            tasks[arguments[0]][1].advance(arguments[1])
        elif name == "relabel":
            tasks[arguments[0]][1].relabel(prefix + arguments[1])
        elif name == "end":
            tasks.pop(arguments[0])[0].close()
        elif name == "warning":
            text, category, file, line = arguments
            warnings.warn_explicit(text, category, file, line, registry=self._seen)
        elif name == "print":
            self._printed.setdefault(number, []).append(arguments[0])
        elif name == "outcome":
            for stack, _ in self._tasks.pop(number).values():
                stack.close()
            if number in self._printed:  # as a whole, not among others'
                sys.stdout.write("".join(self._printed.pop(number)))

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._tasks):  # of jobs that were interrupted
            self.hear(number, ("outcome",))
