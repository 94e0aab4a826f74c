"""Encoders on the nodes of a cluster of Ray, for ``ncm embed --cluster``.

Each GPU of a node, or each few of its cores, has an actor of Ray: a process that loads the encoder once and
reads and encodes whole batches, as one process does. The command that was started hands out the batches, two
to each actor, and takes in the rows, so that nothing is lost with a node: its batches go to others. A node
that joins gets actors, too.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError, listing
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.node_encoder import EncodingJob, NodeEncoder, Unread, Warnings, is_on_disk
from ncm_cli.images.options import EmbedOptions
from ncm_cli.images.pixels import PIXELS_BATCH
from ncm_cli.images.reading import FetchedImage, ReadImage, choose_readers, fetch_image
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import Reporter, Task
from ncm_cli.ray_cluster import (
    ClusterNode,
    ask_versions,
    checked_nodes,
    connected,
    counted,
    nodes,
    on_node,
    refuse_other_versions,
)
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.digests import differences, printable

DEFAULT_CPUS = 4
"""Cores of an encoder on the CPU, unless ``--cpus`` says otherwise; a node with fewer gives all it has."""

IN_FLIGHT = 2
"""Batches that an actor has at once: one is read while the other is encoded."""

LOOK_SECONDS = 2.0
"""How often nodes that came or went are looked for."""

MAX_SECONDS_WITHOUT = 60.0
"""Longest wait for a node when none is left, and for free cores or GPUs before a note says so."""

MAX_DEATHS = 3
"""From so many ends of actors that had the same batch it is refused; from the first on it has an
actor for itself."""

MAX_FAILURES = 5
"""After so many ends of actors, for each that it has room for, and no finished batch a node gets no more."""

READ_FIRST = 10_000
"""Pictures that are looked at to choose how to read all."""

READERS_OF_DRIVER = 16
"""Threads that read pictures which nodes can't."""


@dataclass(frozen=True)
class Reference:
    """What the driver knows of the encoder: enough to compare others with it, and to write a store."""

    description: dict[str, Any]
    dim: int
    device: str


@dataclass
class Cluster:
    """A cluster of Ray that encoders run on."""

    ray: Any
    address: str
    device: str
    """``cpu`` or ``cuda``"""
    cpus: int | None
    devices: str | None = None
    """The devices that were used, once there are some."""
    _checked: set[str] = field(default_factory=set)

    def check(self) -> None:
        """Refuse a cluster without what is asked for, or with other versions than this process has."""
        checked = checked_nodes(self.ray, self.address, gpu=self.device == "cuda", cpus=self.cpus or 1)
        self._checked = {node.id for node in checked}

    def batch_size(self, request: EncoderRequest) -> int:
        """The ``auto`` choice, which depends on the kind of encoder and of device alone."""
        if not request.has_network:
            return PIXELS_BATCH
        from ncm_cli.images.network import CPU_BATCH, CUDA_BATCH

        return CPU_BATCH if self.device == "cpu" else CUDA_BATCH

    def encode(
        self,
        batches: Sequence[Sequence[ImageFile]],
        task: Task,
        *,
        job: EncodingJob,
        reporter: Reporter,
    ) -> Generator[tuple[int, list[ReadImage], np.ndarray], None, None]:
        """The number of each batch, its images, and float32 (b, d) features of the usable ones, in any order.

        Returns once the first encoder is loaded. Raises `MismatchError` for a node whose encoder has another
        key or description than the job, `InputError` if no node is left, or for a batch that ends actors.
        """
        work = _Work(self, batches, task, job, reporter)
        work.begin()
        return work.results()

    def cores(self, node: ClusterNode) -> int:
        """The cores of an encoder on a node, or those that read for a GPU."""
        if self.device == "cuda":
            return max(1, node.cpus // max(1, node.gpus))
        return self.cpus or min(DEFAULT_CPUS, max(1, node.cpus))

    def places(self, node: ClusterNode) -> int:
        """How many encoders a node has."""
        return node.gpus if self.device == "cuda" else node.cpus // self.cores(node)

    def is_checked(self, node: ClusterNode) -> bool:
        """Whether a node has the versions of this process."""
        return node.id in self._checked

    def take(self, node: ClusterNode, found: dict[str, str]) -> None:
        """Take a node that joined; raises `MismatchError` if it has other versions."""
        refuse_other_versions(node, found)
        self._checked.add(node.id)


@contextlib.contextmanager
def joined_cluster(options: EmbedOptions, reporter: Reporter) -> Iterator[Cluster | None]:
    """The cluster that the options name, connected and checked; None if they name none."""
    if options.cluster is None:
        yield None
        return
    with connected(options.cluster, reporter) as ray:
        network = EncoderRequest(model=options.model).has_network
        gpu = options.device == "cuda" or (
            options.device == "auto" and network and any(node.gpus for node in nodes(ray))
        )
        if gpu and options.cpus is not None:
            raise UsageError(
                "--cpus is for encoders on the CPU",
                found=f"--device {options.device}, and the cluster has GPUs",
                fix="--device cpu, or leave out --cpus",
            )
        cluster = Cluster(ray, options.cluster, "cuda" if gpu else "cpu", options.cpus)
        cluster.check()
        yield cluster


def reference_of(request: EncoderRequest, reporter: Reporter) -> Reference:
    """Load an encoder on the CPU to have its description, which doesn't depend on the device."""
    heard = Warnings()
    loaded = load_encoder(replace(request, precision="fp32"), device="cpu", reporter=heard)
    for warning in heard.taken():
        reporter.warn(warning)
    precision = request.precision if request.has_network else "fp32"
    return Reference(loaded.description | {"precision": precision}, loaded.dim, "cpu")


class _Handle(Protocol):
    """An actor as Ray gives it."""

    load: Any
    encode: Any


@dataclass(eq=False)
class _Actor:
    node: ClusterNode
    handle: _Handle
    batches: set[int] = field(default_factory=set)
    is_loaded: bool = False


class _Work:
    """Batches on their way through the actors of a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        batches: Sequence[Sequence[ImageFile]],
        task: Task,
        job: EncodingJob,
        reporter: Reporter,
    ) -> None:
        self._cluster, self._ray, self._batches, self._task = cluster, cluster.ray, batches, task
        self._job, self._reporter = job, reporter
        self._remote, self._shared = self._ray.remote(NodeEncoder), self._ray.put(job)
        self._some = [*itertools.islice(itertools.chain.from_iterable(batches), READ_FIRST)]
        self._left, self._alone = deque(range(len(batches))), deque[int]()
        self._done, self._undone = bytearray(len(batches)), len(batches)
        self._actors: list[_Actor] = []
        self._calls: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        """What is to be done with each answer."""
        self._asked: set[str] = set()
        self._known: dict[str, ClusterNode] = {}
        self._looked = self._had_actors = self._had_loaded = time.monotonic()
        self._looked -= LOOK_SECONDS
        self._said: set[str] = set()
        self._sent_to: set[str] = set()
        self._failures: Counter[str] = Counter()
        self._deaths: Counter[int] = Counter()
        self._reasons: dict[int | str, Exception] = {}
        """Why actors failed: the last error of a batch, and of a node."""
        self._suspected: dict[str, list[int]] = defaultdict(list)
        self._used: set[str] = set()
        self._driver_readers = ThreadPoolExecutor(READERS_OF_DRIVER, thread_name_prefix="read-image")

    def begin(self) -> None:
        """Wait for the first encoder."""
        self._task.relabel("starting encoders")
        try:
            while not any(actor.is_loaded for actor in self._actors):
                self._look()
                for _ in self._answers():
                    raise AssertionError("no batch was handed out")
        except BaseException:
            self._end()
            raise

    def results(self) -> Generator[tuple[int, list[ReadImage], np.ndarray], None, None]:
        """The finished batches."""
        try:
            while self._undone:
                self._look()
                self._hand_out()
                yield from self._answers()
        finally:
            self._end()

    def _end(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):  # Ray may be gone
                self._ray.kill(actor.handle)
        self._driver_readers.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        """Take in nodes that came, let go of those that went, and see that each has its actors."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        alive = {node.id: node for node in nodes(self._ray)}
        for id in self._known.keys() - alive.keys():
            self._forget(id)
        for node in alive.values():
            if not self._cluster.is_checked(node):
                if node.id not in self._asked:
                    self._asked.add(node.id)
                    self._calls[ask_versions(self._ray, node)] = (self._answered, (node,))
                continue
            self._known[node.id] = node
            running = sum(actor.node.id == node.id for actor in self._actors)
            for _ in range(running, 0 if self._is_given_up(node) else self._cluster.places(node)):
                self._start(node)
        self._wait_or_give_up(now)

    def _is_given_up(self, node: ClusterNode) -> bool:
        return self._failures[node.id] >= MAX_FAILURES * max(1, self._cluster.places(node))

    def _wait_or_give_up(self, now: float) -> None:
        if self._actors:
            self._had_actors = now
        if any(actor.is_loaded for actor in self._actors):
            self._had_loaded = now
        kind = "GPU" if self._cluster.device == "cuda" else "core"
        if not self._actors:
            for node in filter(self._is_given_up, self._known.values()):
                raise self._reasons[node.id]
            self._say(f"no node of the cluster is left: waiting {MAX_SECONDS_WITHOUT:.0f} s for one")
            if now - self._had_actors > MAX_SECONDS_WITHOUT:
                raise InputError(
                    "no node of the cluster is left",
                    where=f"--cluster {self._cluster.address}",
                    found=f"none that gives a {kind} for {MAX_SECONDS_WITHOUT:.0f} s",
                    fix="run the same command again once there are some: finished rows are kept",
                )
        elif now - self._had_loaded > MAX_SECONDS_WITHOUT:
            self._say(f"waiting for a free {kind}: other work of the cluster has them (ray status says more)")

    def _say(self, message: str) -> None:
        """Note something once."""
        if message not in self._said:
            self._said.add(message)
            self._reporter.note(message)

    def _answered(self, ref: Any, node: ClusterNode) -> None:
        self._asked.discard(node.id)
        with contextlib.suppress(self._ray.exceptions.RayError):  # the node is asked again, if it is there
            self._cluster.take(node, self._ray.get(ref))
            self._reporter.note(f"{node.name} has joined")
            self._looked -= LOOK_SECONDS

    def _start(self, node: ClusterNode) -> None:
        cores = self._cluster.cores(node)
        readers = choose_readers(self._job.workers, self._some, cores)
        needs = {"num_cpus": 0, "num_gpus": 1} if self._cluster.device == "cuda" else {"num_cpus": cores}
        remote = on_node(self._ray, node, self._remote, max_concurrency=IN_FLIGHT, **needs)
        actor = _Actor(node, remote.remote(self._shared, cores, readers))
        self._actors.append(actor)
        self._calls[actor.handle.load.remote()] = (self._loaded, (actor,))

    def _loaded(self, ref: Any, actor: _Actor) -> None:
        try:
            reply = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._lost(actor, error)
            return
        if isinstance(reply, NcmError):
            if not self._used:
                raise _on_node(reply, actor.node)
            self._lost(actor, reply)  # others have loaded it: perhaps this node's GPU is full
            return
        for theirs, ours in ((reply.key, self._job.key), (reply.description, self._job.description)):
            if found := differences(theirs, ours, "there", "where the command runs"):
                raise MismatchError(
                    "a node of the cluster has another encoder",
                    where=actor.node.name,
                    found=found,
                    expected="one encoder on all nodes: the same weights and libraries",
                    fix="weights in a file that all nodes have, and the same versions everywhere",
                )
        actor.is_loaded = True
        self._warn(actor, reply.warnings)
        self._used.add(actor.node.id)
        # The node lives, so its lost actors ended for another reason: perhaps what they were encoding.
        for batch in self._suspected.pop(actor.node.id, ()):
            self._blame(batch)
        self._label()

    def _label(self) -> None:
        loaded = {actor.node.id for actor in self._actors if actor.is_loaded}
        self._task.relabel(f"embedding on {counted(len(loaded), 'node')}")
        self._cluster.devices = f"{counted(len(self._used), 'node')} ({self._cluster.device})"

    def _warn(self, actor: _Actor, warnings: Sequence[str]) -> None:
        for warning in warnings:
            self._reporter.warn(f"{actor.node.name}: {warning}")

    def _hand_out(self) -> None:
        """Give each loaded actor its batches, the idle ones first."""
        while self._left or self._alone:
            free = [actor for actor in self._actors if actor.is_loaded and self._has_room(actor)]
            if not free:
                return
            actor = min(free, key=lambda actor: len(actor.batches))
            if self._left:
                batch = self._left.popleft()
                if self._deaths[batch]:  # after all others
                    self._alone.append(batch)
                    continue
            elif not actor.batches:
                batch = self._alone.popleft()
            else:
                return
            files = self._batches[batch]
            sent = actor.node.id in self._sent_to
            images = [*self._driver_readers.map(self._fetched, files)] if sent else files
            self._call(actor, batch, images)

    def _has_room(self, actor: _Actor) -> bool:
        return len(actor.batches) < IN_FLIGHT and not any(self._deaths[batch] for batch in actor.batches)

    def _fetched(self, file: ImageFile) -> Any:
        """The picture with its bytes if it is on a disk, else where it is."""
        return fetch_image(file) if is_on_disk(file) else file

    def _call(self, actor: _Actor, batch: int, images: Sequence[Any]) -> None:
        actor.batches.add(batch)
        self._calls[actor.handle.encode.remote(list(images))] = (self._encoded, (actor, batch))

    def _answers(self) -> Iterator[tuple[int, list[ReadImage], np.ndarray]]:
        """Wait a little for answers, and deal with those that have come."""
        if not self._calls:
            time.sleep(0.2)
            return
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=0.5)
        if ready:
            ready, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for ref in ready:
            if ref in self._calls:  # not one of a lost actor
                handle, arguments = self._calls.pop(ref)
                finished = handle(ref, *arguments)
                self._hand_out()
                if finished is not None:
                    yield finished

    def _encoded(self, ref: Any, actor: _Actor, batch: int) -> tuple[int, list[ReadImage], np.ndarray] | None:
        try:
            reply = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._lost(actor, error)
            return None
        if isinstance(reply, NcmError):
            self._lost(actor, reply)
            return None
        actor.batches.discard(batch)
        if isinstance(reply, Unread):
            self._send(actor, batch, reply.at)
            return None
        self._done[batch], self._undone = 1, self._undone - 1
        self._deaths.pop(batch, None)
        self._failures.pop(actor.node.id, None)
        self._warn(actor, reply.warnings)
        return batch, reply.images, reply.features

    def _send(self, actor: _Actor, batch: int, at: int) -> None:
        """Send a batch again, with the bytes of its pictures."""
        path = printable(self._batches[batch][at].path)
        if self._job.backgrounds is not None:
            raise InputError(
                "a node of the cluster can't read the pictures, or their masks",
                where=actor.node.name,
                found=path,
                fix="--augment background takes pictures and masks from a disk that all nodes share",
            )
        images = [*self._driver_readers.map(self._fetched, self._batches[batch])]
        missing = isinstance(images[at], FetchedImage) and images[at].reason
        if not missing and actor.node.id not in self._sent_to:
            self._sent_to.add(actor.node.id)
            self._reporter.note(f"{actor.node.name} can't read {path}: its pictures are sent to it")
        self._call(actor, batch, images)

    def _forget(self, id: str) -> None:
        """Let go of a node that has gone."""
        node = self._known.pop(id)
        actors = [actor for actor in self._actors if actor.node.id == id]
        batches = sum(len(actor.batches) for actor in actors)
        for actor in actors:
            self._drop(actor)
        self._suspected.pop(id, None)
        self._failures.pop(id, None)
        self._reporter.note(
            f"{node.name} has gone" + (f": {batches} batches go to others" if batches else "")
        )

    def _drop(self, actor: _Actor) -> None:
        """Let go of an actor; its batches are to be done by others."""
        self._actors.remove(actor)
        with contextlib.suppress(Exception):
            self._ray.kill(actor.handle)
        self._calls = {ref: call for ref, call in self._calls.items() if actor not in call[1]}
        self._left.extendleft(sorted(actor.batches, reverse=True))
        self._label()

    def _lost(self, actor: _Actor, error: Exception) -> None:
        """Deal with an actor that has ended, or failed."""
        node, batches = actor.node, sorted(actor.batches)
        self._drop(actor)
        self._failures[node.id] += 1
        if isinstance(error, NcmError):
            error = _on_node(error, node)
        elif not isinstance(error, self._ray.exceptions.RayTaskError):
            # Whether it went with its node will be seen.
            self._suspected[node.id] += batches
            ended = InputError(
                "the encoders of a node ended, and nothing says why",
                found=_in_short(error),
                fix="mostly memory: fewer --workers, or a smaller --batch-size; run the same command again, "
                "since finished rows are kept",
            )
            self._reasons[node.id] = _on_node(ended, node)
            batches, error = [], self._reasons[node.id]
        self._reasons |= dict.fromkeys([node.id, *batches], error)
        for batch in batches:
            self._blame(batch)
        if self._is_given_up(node):
            self._reporter.warn(f"{node.name} gets no more work: {_in_short(error)}")

    def _blame(self, batch: int) -> None:
        """Count the end of an actor that had this batch."""
        if self._done[batch]:
            return
        self._deaths[batch] += 1
        if self._deaths[batch] >= MAX_DEATHS:
            if batch in self._reasons:
                raise self._reasons[batch]
            files = self._batches[batch]
            raise InputError(
                f"an encoder of the cluster ended {MAX_DEATHS} times while it had the same pictures",
                found=listing([printable(file.path) for file in files], len(files)),
                fix="look at these pictures, or at the memory of the nodes (a smaller --batch-size, or fewer "
                "--workers, take less); finished rows are kept",
            )


def _on_node(error: NcmError, node: ClusterNode) -> NcmError:
    """An error of a node's, with its name."""
    where = node.name if error.where is None else f"{error.where}, on {node.name}"
    return type(error)(error.what, where=where, found=error.found, expected=error.expected, fix=error.fix)


def _in_short(error: Exception) -> str:
    """The first line of an error, and the last one if that names what was raised on the node."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{lines[0]} {lines[-1]}" if "Error: " in lines[-1] and len(lines) > 1 else lines[0]
