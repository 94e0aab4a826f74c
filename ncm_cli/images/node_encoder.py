"""An encoder on a node of a cluster, as an actor of Ray; `ncm_cli.images.nodes` starts and feeds it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.child import Child
from ncm_cli.errors import NcmError, portable
from ncm_cli.images.background import Backgrounds
from ncm_cli.images.encoder import load_encoder, request_key
from ncm_cli.images.paths import archive_of, file_facts, local_path
from ncm_cli.images.reading import FetchedImage, Readers, ReadImage
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.digests import canonical_json, printable


@dataclass(frozen=True, kw_only=True)
class EncodingJob:
    """What an actor needs to encode: the request, and what else the command was told."""

    request: EncoderRequest
    backgrounds: Backgrounds | None
    device: str
    """``cpu`` or ``cuda``"""
    workers: int | None
    folder: str
    """The folder that relative paths start from."""
    key: dict[str, Any]
    description: dict[str, Any]
    """What the encoder's key and description must be."""


@dataclass(frozen=True)
class Loaded:
    """An actor's encoder: what its features depend on, and what was said as it loaded."""

    key: dict[str, Any]
    description: dict[str, Any]
    warnings: list[str]


@dataclass(frozen=True)
class Encoded:
    """An actor's batch: the images without their items, and float32 (b, d) features of the usable ones."""

    images: list[ReadImage]
    features: np.ndarray
    warnings: list[str]


@dataclass(frozen=True)
class Unread:
    """The position of a picture in a batch that a node can't read."""

    at: int


class Warnings(Reporter):
    """Keeps warnings for whoever asks for them."""

    def __init__(self) -> None:
        self._said: list[str] = []

    def warn(self, message: str) -> None:
        self._said.append(message)

    def taken(self) -> list[str]:
        """What was said since this was last asked."""
        messages, self._said = self._said, []
        return messages


class _ThreadEncoder:
    """An encoder in a thread of this process, for a GPU: the next batch is queued while one is computed."""

    def __init__(self, request: EncoderRequest, device: str, heard: Warnings) -> None:
        self._thread, self._heard = ThreadPoolExecutor(1, thread_name_prefix="encode"), heard
        self._encoder = self._thread.submit(load_encoder, request, device=device, reporter=heard).result()
        self.preprocess, self.description = self._encoder.preprocess, self._encoder.description

    def encode(self, items: list[np.ndarray]) -> np.ndarray:
        """float32 (b, d) features of preprocessed pictures."""
        return self._thread.submit(self._start, items).result()()

    def _start(self, items: list[np.ndarray]) -> Callable[[], np.ndarray]:
        return self._encoder.start(items) if items else np.zeros((0, self._encoder.dim), "f4").copy


class _ProcessEncoder:
    """An encoder on the CPU, in the main thread of a process of its own.

    What other threads free glibc returns to the system, and faulting the next batch's tensors in anew takes a
    third of the time (`TorchEncoder` keeps them for a main thread). Ray runs an actor's calls in threads.
    """

    def __init__(self, request: EncoderRequest, cores: int, heard: Warnings) -> None:
        self._heard, self._turn = heard, threading.Lock()
        self._child = Child(serve_encoder, environment={"OMP_NUM_THREADS": str(cores)})
        self.preprocess, self.description = self._ask((request, cores))

    def encode(self, items: list[np.ndarray]) -> np.ndarray:
        """float32 (b, d) features of preprocessed pictures."""
        features: np.ndarray = self._ask(items)
        return features

    def _ask(self, what: Any) -> Any:
        try:
            with self._turn:
                self._child.connection.send(what)
                answer, warnings = self._child.connection.recv()
        except (EOFError, ConnectionError):
            os._exit(1)  # as if the encoder had been in this process: the command starts another
        for warning in warnings:
            self._heard.warn(warning)
        if isinstance(answer, NcmError):
            raise answer
        return answer


def serve_encoder(connection: Connection, _: socket.socket) -> None:
    """What the process of an encoder runs: load it, then encode batches until the connection closes."""
    heard, (request, cores) = Warnings(), connection.recv()
    try:
        if request.has_network:
            import torch

            torch.set_num_threads(cores)
        encoder = load_encoder(request, device="cpu", reporter=heard)
        connection.send(((encoder.preprocess, encoder.description), heard.taken()))
    except NcmError as error:
        connection.send((portable(error), []))
        return
    while True:
        items = connection.recv()
        try:
            features = encoder.encode(items) if items else np.zeros((0, encoder.dim), "f4")
            connection.send((features, heard.taken()))
        except NcmError as error:
            connection.send((portable(error), heard.taken()))


class NodeEncoder:
    """An actor: an encoder on a node. Errors that a user can act on are returned, as Ray would wrap them."""

    def __init__(self, job: EncodingJob, cores: int, readers: tuple[int, bool]) -> None:
        self._job, self._cores, self._chosen, self._heard = job, cores, readers, Warnings()

    def load(self) -> Loaded | NcmError:
        """Load the encoder and start the readers."""
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # Ray gives each actor its own device
            os.environ.pop(name, None)
        with contextlib.suppress(OSError):
            os.chdir(self._job.folder)
        try:
            return self._load()
        except NcmError as error:
            return error

    def _load(self) -> Loaded:
        request, device = self._job.request, self._job.device
        key = json.loads(canonical_json(request_key(request)))
        self._encoder = (
            _ProcessEncoder(request, self._cores, self._heard)
            if device == "cpu"
            else _ThreadEncoder(request, device, self._heard)
        )
        preprocess = replace(self._encoder.preprocess, backgrounds=self._job.backgrounds)
        workers, processes = self._chosen
        self._readers = Readers(preprocess, workers=workers, processes=processes)
        return Loaded(key, self._encoder.description, self._heard.taken())

    def encode(self, images: Sequence[ImageFile | FetchedImage]) -> Encoded | Unread | NcmError:
        """Read and encode a batch."""
        missing = (at for at, image in enumerate(images) if not self._finds(image))
        if (at := next(missing, None)) is not None:
            return Unread(at)
        try:
            read = list(self._readers.ahead(images, window=len(images)))
            for at, (image, outcome) in enumerate(zip(images, read, strict=True)):
                if not outcome.file.sha256 and is_on_disk(image):
                    return Unread(at)
            items = [outcome.item for outcome in read if outcome.item is not None]
            features = self._encoder.encode(items)
        except NcmError as error:
            return error
        stripped = [image if image.item is None else replace(image, item=True) for image in read]
        return Encoded(stripped, features, self._heard.taken())

    def _finds(self, image: ImageFile | FetchedImage) -> bool:
        """Whether this node has the file that the manifest means, and its mask; others' errors come later."""
        masks = self._job.backgrounds.masks if self._job.backgrounds is not None else {}
        id = image.file.id if isinstance(image, FetchedImage) else image.id
        if id in masks and not Path(masks[id]).is_file():
            return False
        if isinstance(image, FetchedImage) or not is_on_disk(image):
            return True
        archive = archive_of(image.path)
        try:
            size, mtime_ns = file_facts(image.path)
        except OSError:
            return False
        same_size = archive != image.path or image.size < 0 or image.size == size
        return same_size and image.mtime_ns in (0, mtime_ns)


def is_on_disk(image: ImageFile | FetchedImage) -> bool:
    """Whether a node would read a picture from a disk, under a name that can be written."""
    if isinstance(image, FetchedImage):
        return False
    return local_path(archive_of(image.path)) is not None and printable(image.path) == image.path
