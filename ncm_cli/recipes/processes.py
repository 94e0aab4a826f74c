"""Processes of this machine that do the steps of a run, several at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ncm_cli.child import Child
from ncm_cli.errors import InputError
from ncm_cli.recipes.messages import Message, Send, do
from ncm_cli.recipes.perform import Order, Outcome, gpu_asked
from ncm_cli.recipes.steps import Job
from ncm_cli.results.plots import load_matplotlib

GRACE_SECONDS = 5.0
"""After Ctrl-C: time for steps to release their locks, before they are killed."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""The environment variables by which torch and numpy's libraries choose their number of threads."""

IDLE_SECONDS = 0.3
"""After so long without a step a process prepares for drawing."""


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
                raise _ended(f"a process for steps {how} before its first step", pid) from None
            self._replaced(worker)
            return "outcome", Outcome(error=_ended(f"the process of this step {how}", pid))
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


def _ended(what: str, pid: int) -> InputError:
    return InputError(
        what,
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
