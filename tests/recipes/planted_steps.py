"""What child processes run in tests: steps that note where they run, wait, or die.

The functions ``serve_*`` take the place of `ncm_cli.recipes.processes.serve_steps`. What they need to know is
in the environment: ``PLANTED_NOTES``, the file for notes, ``PLANTED_STEP``, the output of the step that waits
or dies, and ``PLANTED_SIGNAL``, of which it dies.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ncm_cli.recipes import cluster, perform, processes
from ncm_cli.registry import work_of
from ncm_cli.store.files import writer_lock

serve = processes.serve_steps
cluster_step = cluster._step


def _before(planted: Callable[[Any], None]) -> None:
    """Let every step of this process begin with a function of its options."""

    def planted_work(kind: str) -> Callable[..., Any]:
        work = work_of(kind)

        def both(options: Any, **more: Any) -> Any:
            planted(options)
            return work(options, **more)

        return both

    perform.work_of = planted_work  # type: ignore[attr-defined]


def note(*words: object) -> None:
    """Add a line to the notes."""
    with Path(os.environ["PLANTED_NOTES"]).open("a") as stream:
        stream.write(" ".join(map(str, words)) + "\n")


def _is_planted(options: Any) -> bool:
    return Path(options.output).name == os.environ["PLANTED_STEP"]


def serve_with_two_gpus(connection: Connection, stream: socket.socket) -> None:
    """As if torch saw two GPUs; notes the output and the variables of each step."""
    processes.count_gpus = lambda: 2
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    _before(lambda options: note(options.output, *(os.environ.get(name) for name in names), os.getpid()))
    serve(connection, stream)


def serve_until_killed(connection: Connection, stream: socket.socket) -> None:
    """The planted step ends its process by the signal ``PLANTED_SIGNAL``."""

    def die(options: Any) -> None:
        if _is_planted(options):
            os.kill(os.getpid(), int(os.environ["PLANTED_SIGNAL"]))

    _before(die)
    serve(connection, stream)


def serve_slowly(connection: Connection, stream: socket.socket) -> None:
    """The planted step waits for a minute in the lock of its output; all note their processes."""
    note(os.getpid())

    def wait(options: Any) -> None:
        if _is_planted(options):
            with writer_lock(options.output):
                note("waiting")
                time.sleep(60)

    _before(wait)
    serve(connection, stream)


def serve_with_a_bug(connection: Connection, stream: socket.socket) -> None:
    """The planted step has a bug."""

    def fail(options: Any) -> None:
        if _is_planted(options):
            raise ZeroDivisionError("planted")

    _before(fail)
    serve(connection, stream)


def serve_nothing(connection: Connection, stream: socket.socket) -> None:
    """The process ends at once."""
    raise SystemExit(7)


def step_that_waits_once(place: Any, cpus: int, order: Any, read: Any) -> Any:
    """A task of Ray: the planted step, when it runs for the first time, waits in the lock of its output."""
    import ray

    if _is_planted(order.options):
        first = "waiting" not in Path(os.environ["PLANTED_NOTES"]).read_text()
        node = ray.get_runtime_context().get_node_id()
        with writer_lock(order.options.output):
            note("waiting" if first else "again", node)
            if first:
                time.sleep(60)
    return cluster_step(place, cpus, order, read)
