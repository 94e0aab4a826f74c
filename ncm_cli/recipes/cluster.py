"""Steps of a run as tasks on a cluster of Ray, whose nodes share the disk with the run's folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError
from ncm_cli.progress import Reporter
from ncm_cli.ray_cluster import ClusterNode, checked_nodes, connected, nodes, on_node
from ncm_cli.recipes.load import Recipe
from ncm_cli.recipes.messages import Message, do
from ncm_cli.recipes.perform import Order, Outcome
from ncm_cli.recipes.processes import GRACE_SECONDS, THREAD_VARIABLES
from ncm_cli.recipes.steps import REPORT, Job
from ncm_cli.store.files import lock_path, remove_lock_of

MAX_TRIES = 4
"""Most times that a step is started, if its process or node is lost."""

LOOK_SECONDS = 2.0
"""Seconds between two look-ups of the live nodes."""

_KEPT = ("note", "detail", "warn", "warning", "print")
"""The kinds of messages that are passed on when a step has ended: all but its progress."""


@contextlib.contextmanager
def cluster_of(
    address: str, recipe: Recipe, jobs: Sequence[Job], *, cpus: int, most: int | None, reporter: Reporter
) -> Iterator[ClusterTasks]:
    """The cluster at an address for the jobs of a recipe, each with ``cpus`` cores and ``most`` at once.

    Raises `InputError` for a node that doesn't see the run's folder, and what `connected` and `checked_nodes`
    raise.
    """
    with connected(address, reporter) as ray:
        alive = checked_nodes(ray, address, cpus=cpus)
        cluster = ClusterTasks(ray, recipe, jobs, cpus=cpus, most=most)
        cluster.check_folders(alive)
        yield cluster


class _Place:
    """Where a step runs: the current folder, and what shows that a node sees the run's folder."""

    def __init__(self, recipe: Recipe) -> None:
        self.folder = str(Path.cwd())
        self.lock = lock_path(recipe.out / REPORT).absolute()
        self.content = self.lock.read_bytes()

    def unseen(self) -> Path | None:
        """On a node: the folder that isn't there, or is another one; None if all is as it should be."""
        try:
            os.chdir(self.folder)
        except OSError:
            return Path(self.folder)
        with contextlib.suppress(OSError):
            if self.lock.read_bytes() == self.content:
                return None
        return self.lock.parent


def _not_seen(folder: Path, node: str) -> InputError:
    return InputError(
        "a node of the cluster doesn't see the folder of the run",
        where=folder,
        found=f"another folder or none on {node}",
        fix="--out with a folder on a disk that all nodes share, in the same place",
    )


class ClusterTasks:
    """A cluster that does jobs, `ncm_cli.recipes.run.Workers`: each is a task of Ray.

    A task that is lost with its node is started again elsewhere, `MAX_TRIES` times in all. The messages of a
    step are passed on when it has ended.
    """

    def __init__(self, ray: Any, recipe: Recipe, jobs: Sequence[Job], *, cpus: int, most: int | None) -> None:
        self._ray, self._jobs, self._cpus, self._most = ray, jobs, cpus, most
        self._place = _Place(recipe)
        self._task = ray.remote(_step)
        self._running: dict[Any, tuple[int, Order, str | None, int]] = {}
        self._nodes: list[ClusterNode] = []
        self._looked = -LOOK_SECONDS

    def __enter__(self) -> ClusterTasks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        tasks = list(self._running)
        for task in tasks:  # interrupts them, so that they release their locks
            self._ray.cancel(task)
        if tasks:
            self._ray.wait(tasks, num_returns=len(tasks), timeout=GRACE_SECONDS)

    def check_folders(self, alive: Sequence[ClusterNode]) -> None:
        """Raise `InputError` for a node that doesn't see the run's folder."""
        look = self._ray.remote(_Place.unseen)
        asked = [(node, on_node(self._ray, node, look, num_cpus=0).remote(self._place)) for node in alive]
        for node, answer in asked:
            with contextlib.suppress(self._ray.exceptions.RayError):  # a node that no longer exists
                if (folder := self._ray.get(answer)) is not None:
                    raise _not_seen(folder, node.name)

    def _alive(self) -> list[ClusterNode]:
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._nodes, self._looked = nodes(self._ray), time.monotonic()
        return self._nodes

    def takes(self, gpu: str | None) -> bool:
        """Whether another job has room: cores, and a GPU if it may use one and the cluster has any."""
        alive = self._alive()
        room = sum(node.cpus // self._cpus for node in alive)
        room = room if self._most is None else min(room, self._most)
        gpus = sum(node.gpus for node in alive)
        used = sum(asked is not None for _, _, asked, _ in self._running.values())
        return len(self._running) < room and (gpu is None or not gpus or used < gpus)

    def start(self, number: int, order: Order, gpu: str | None, tries: int = 1) -> None:
        """Start job ``number``; ``gpu`` is the device that it is given if it may use a GPU."""
        has_gpu = gpu is not None and any(node.gpus for node in self._alive())
        threads = os.environ.get("OMP_NUM_THREADS") or str(self._cpus)
        options = {
            "num_cpus": self._cpus,
            "num_gpus": int(has_gpu),
            "max_retries": 0,
            "runtime_env": {"env_vars": dict.fromkeys(THREAD_VARIABLES, threads)},
        }
        task = self._task.options(**options).remote(self._place, self._cpus, order, self._jobs[number].read)
        self._running[task] = number, order, gpu, tries

    def messages(self) -> Iterator[tuple[int, Message]]:
        """The messages of jobs that have ended, each with the job's number; waits a while for one."""
        ended, _ = self._ray.wait(list(self._running), timeout=LOOK_SECONDS)
        for task in ended:
            number, order, gpu, tries = self._running.pop(task)
            errors = self._ray.exceptions
            try:
                for message in self._ray.get(task):
                    yield number, message
            except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
                if tries < MAX_TRIES:
                    time.sleep(LOOK_SECONDS)  # the process may outlive its node for a moment
                    self._remove_locks(self._jobs[number])
                    self.start(number, order, gpu, tries + 1)
                    continue
                yield number, ("outcome", Outcome(error=_gone(tries, error)))

    def _remove_locks(self, job: Job) -> None:
        """Remove the locks that a step left on nodes that no longer exist."""
        hosts: dict[bool, set[str]] = {True: set(), False: set()}
        for node in self._ray.nodes():
            hosts[node["Alive"]].add(node["NodeManagerHostname"])
        for path in job.written:
            remove_lock_of(path, hosts[False] - hosts[True])


def _gone(tries: int, error: Exception) -> InputError:
    return InputError(
        f"the process of this step was lost {tries} times",
        found=" ".join(str(error).split())[:300],
        fix="run the same command again; with more --cpus (fewer steps on a node) if memory was short",
    )


def _step(place: _Place, cpus: int, order: Order, read: Sequence[Path]) -> list[Message]:
    """Do a step on a node; returns its messages and its outcome."""
    from ncm_cli.images.reading import cores

    os.environ["LOCAL_WORLD_SIZE"] = str(max(1, cores() // cpus))
    messages: list[Message] = []
    node = os.uname().nodename
    if (folder := place.unseen()) is not None:
        return [("outcome", Outcome(error=_not_seen(folder, node)))]
    if missing := [path for path in read if not path.exists()]:
        error = InputError(
            "a node of the cluster doesn't see an input",
            where=missing[0],
            found=f"nothing there on {node}",
            fix="put it on a disk that all nodes share",
        )
        return [("outcome", Outcome(error=error))]
    outcome = do(order, lambda *message: messages.append(message))
    heard = [message for message in messages if message[0] in _KEPT]
    return [*heard, ("outcome", outcome)]
