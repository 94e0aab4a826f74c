"""Encoders that run on torch: imports timm or open_clip, and runs their models."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.images.clip_model import load_open_clip
from ncm_cli.images.domainbed_model import load_domainbed
from ncm_cli.images.request import ENCODER_KINDS, CentreCrop, EncoderRequest, Preprocess, Resize
from ncm_cli.images.timm_model import load_timm
from ncm_cli.progress import Reporter
from ncm_cli.solvers.device import (
    choose_device,
    exact,
    is_short_of_memory,
)

if TYPE_CHECKING:
    import torch

CPU_BATCH = 32
"""On a CPU larger batches gain nothing measurable, and this one bounds memory."""

CUDA_BATCH = 256
"""Fills a current GPU with a ViT-B and fits a ViT-L at 336 pixels in 16 GiB; constant, so that the order of
sums never depends on how much memory happens to be free."""

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
"""Names of parameters in glibc's malloc.h."""


class TorchEncoder:
    """A model of timm or open_clip on its device, and how to run it."""

    def __init__(self, request: EncoderRequest, device: str, reporter: Reporter) -> None:
        import_library(request.kind)
        import torch

        self.device, self._reporter = choose_device(device, request.precision, reporter), reporter
        self._request, self.model = request, _LOADERS[request.kind](request, reporter)
        try:
            module = self.model.module.eval().to(self.device)
        except RuntimeError as error:
            if not is_short_of_memory(error):
                raise
            what = f"not enough memory on {self.device} for {request.model}"
            raise InputError(what, fix="end what else is on it, or --device cpu") from error
        if self.device == "cpu":
            _keep_freed_memory()
        else:
            module.to(memory_format=torch.channels_last)
        self.batch_size = CPU_BATCH if self.device == "cpu" else CUDA_BATCH
        self.description = request.describe(image_size=list(self.model.size), **self.model.facts)
        steps, scale = picture_steps(self.model.transform)
        self.preprocess = Preprocess(request, steps, self.model.shortest)
        self._scale = [torch.as_tensor(value, device=self.device).view(-1, 1, 1) for value in scale]
        self._copies = torch.cuda.Stream(self.device) if self.device != "cpu" else None
        self._most = sys.maxsize
        self._started = 0

    @functools.cached_property
    def dim(self) -> int:
        """Length of a feature: what a batch gave, or a black picture; towers name it in different places."""
        black = np.zeros((1, 3, *self.model.size), "f4")
        return int(self.encode(list(black)).shape[1])

    def batch(self, items: Sequence[np.ndarray]) -> torch.Tensor:
        """(B, 3, H, W) float32 on the device: each picture after the model's own transform.

        8-bit items are sent on as they are, and scaled and normalised there: on the CPU to the very bits of
        torchvision's ``ToTensor`` and ``Normalize``, whose operations these are.
        """
        import torch

        kind, pinned = torch.from_numpy(np.empty(0, items[0].dtype)).dtype, self._copies is not None
        batch = torch.empty((len(items), *items[0].shape), dtype=kind, pin_memory=pinned)
        np.stack(items, out=batch.numpy())
        if self._copies is not None:
            # On a stream of its own, so that it need not wait for the batch before.
            with torch.cuda.stream(self._copies):
                batch = batch.to(self.device, non_blocking=True)
            work = torch.cuda.current_stream(self.device)
            work.wait_stream(self._copies)
            batch.record_stream(work)
        if batch.dtype == torch.uint8:
            largest, mean, std = self._scale
            batch = batch.permute(0, 3, 1, 2)
            # In the layout that the device's kernels are given, which decides how they round.
            batch = batch.contiguous() if self.device == "cpu" else batch
            batch = batch.float().div_(largest).sub_(mean).div_(std)
        return batch if self.device == "cpu" else batch.contiguous(memory_format=torch.channels_last)

    def encode(self, items: Sequence[np.ndarray]) -> np.ndarray:
        """(B, dim) float32 features of preprocessed pictures, in order."""
        return self.start(items)()

    def start(self, items: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
        """Start to encode pictures; calling the result waits for their float32 (B, dim) features.

        If memory is short, these and all later pictures are run in halves, quarters and so on. Raises
        `InputError` if memory is too short for one picture.
        """
        import torch

        self._started += 1
        # The first batch is slow for other reasons.
        compared = self._started == 2 and self._request.precision != "fp32"
        if compared and self._copies is not None:
            torch.cuda.synchronize(self.device)
        began, parts, at, most = time.perf_counter(), list[Callable[[], np.ndarray]](), 0, self._most
        while at < len(items):
            part = items[at : at + self._most]
            if (wait := self._run(part, self._request.precision)) is not None:
                parts.append(wait)
                at += len(part)
            elif len(part) > 1:
                self._most = len(part) // 2
            else:
                what = f"not enough memory on {self.device} for one picture"
                raise InputError(what, fix="end what else is on it, or a smaller model")
        if self._most < most:
            self._reporter.warn(
                f"not enough memory on {self.device} for {len(items)} pictures at once: going on with "
                f"{self._most}. As arithmetic rounds differently in batches of other sizes, --batch-size "
                f"{self._most} makes this run the same to the last bit wherever memory is short"
            )
        features: list[np.ndarray] = []
        if compared:
            features = [wait() for wait in parts]
            rate = len(items) / (time.perf_counter() - began)
            self._compare(items[: max(1, len(items) // 4)], rate)
        return lambda: self._request.finish(np.concatenate(features or [wait() for wait in parts]))

    def _run(self, items: Sequence[np.ndarray], precision: str) -> Callable[[], np.ndarray] | None:
        """Queue pictures; calling the result waits for their features. None if memory is short."""
        import torch

        try:
            with torch.inference_mode(), exact(self.device, precision):
                features = self.model.encode(self.batch(items)).float().to("cpu", non_blocking=True)
            self.dim = int(features.shape[1])
            if self._copies is None:
                return features.numpy
            done = torch.cuda.current_stream(self.device).record_event()
        except (RuntimeError, MemoryError) as error:
            if not is_short_of_memory(error):
                raise
            features = None
        if features is None:  # and the error gone, whose traceback held what the layers had made
            if self._copies is not None:
                torch.cuda.empty_cache()
            return None

        def wait() -> np.ndarray:
            done.synchronize()
            return np.asarray(features)

        return wait

    def _compare(self, items: Sequence[np.ndarray], rate: float) -> None:
        """Warn if fp32 encodes more of these pictures a second than the ``rate`` of the lower precision."""
        fp32_rate = 0.0
        for _ in range(2):  # the first includes warming up
            began, wait = time.perf_counter(), self._run(items, "fp32")
            if wait is not None:
                wait()
                fp32_rate = len(items) / (time.perf_counter() - began)
        if fp32_rate > 1.2 * rate:  # less is noise
            self._reporter.warn(
                f"{self._request.precision} is slower than fp32 on {self.device}: {rate:.3g} against "
                f"{fp32_rate:.3g} pictures/s. Features made with --precision fp32 come faster, and are exact"
            )


def picture_steps(transform: Any) -> tuple[tuple[Callable[[Any], Any], ...], list[Any]]:
    """The steps of a transform that change pictures, and the scale, mean and deviation that follow them.

    Known steps are replaced by our own, so that reader processes needn't import torch. A transform that
    doesn't end in scaling to 0..1 and normalising is a single step, and the second list is empty.
    """
    from torchvision import transforms

    steps = list(getattr(transform, "transforms", ()))
    is_scaled = len(steps) > 1 and isinstance(steps[-2], transforms.ToTensor)
    if not (is_scaled and type(steps[-1]) is transforms.Normalize):
        return (transform, np.asarray), []
    # Pictures are RGB already, so steps that convert them are left out.
    named_steps = [(getattr(step, "__name__", type(step).__name__), step) for step in steps[:-2]]
    kept = [
        _plain_step(step) for name, step in named_steps if name not in ("MaybeConvertMode", "_convert_to_rgb")
    ]
    return tuple(kept), [255.0, steps[-1].mean, steps[-1].std]


def _plain_step(step: Any) -> Callable[[Any], Any]:
    """Our own version of one of torchvision's steps if there is one, else the step itself."""
    from torchvision import transforms
    from torchvision.transforms.functional import pil_modes_mapping

    if type(step) is transforms.Resize and step.max_size is None:
        size = step.size if isinstance(step.size, int) else tuple(step.size)
        if isinstance(size, int) or len(size) == 2:
            return Resize(size, int(pil_modes_mapping[step.interpolation]))
    if type(step) is transforms.CenterCrop:
        return CentreCrop(*map(int, step.size))
    return step


_IMPORTING = threading.Lock()
_COMPILER = "torch._dynamo.utils"


def import_library(kind: str) -> None:
    """Import torch and the library of an encoder's kind, without torch's compiler.

    The garbage collector is off meanwhile: it would traverse all that modules define,
    which takes .2 s.
    """
    with _IMPORTING, contextlib.ExitStack() as stack:
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        importlib.import_module("torch")
        if _COMPILER not in sys.modules:
            stack.enter_context(_compiler_put_off())
        library = ENCODER_KINDS[kind].library
        assert library is not None
        importlib.import_module(library)


@contextlib.contextmanager
def _compiler_put_off() -> Iterator[None]:
    """Put off the import of torch's compiler until it is used: it takes nearly as long as torch itself.

    Nothing here compiles, but torchvision asks it whether a detection layer can be compiled, and timm marks
    methods of one model that it is to leave alone: both when they are imported.
    """
    compiler: Any = importlib.import_module("torch.compiler")
    marked, stand_in = compiler.disable, ModuleType(_COMPILER)

    def give_way() -> None:
        if sys.modules.get(_COMPILER) is stand_in:
            del sys.modules[_COMPILER]

    def attribute(name: str) -> Any:
        if name.startswith("__"):  # what the import system asks for
            raise AttributeError(name)
        give_way()
        return getattr(importlib.import_module(_COMPILER), name)

    later = {"is_compile_supported": lambda device: attribute("is_compile_supported")(device)}
    vars(stand_in).update(later, __getattr__=attribute)
    sys.modules[_COMPILER] = stand_in
    compiler.disable = lambda function=None, **_: function or (lambda decorated: decorated)
    try:
        yield
    finally:
        compiler.disable = marked
        give_way()


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of large tensors for the next batch instead of returning it to the system.

    Otherwise each layer's output is mapped and faulted in anew: with EfficientNet-Lite0 in batches of 32 that
    took more than half of the processor time. Other C libraries have no ``mallopt`` and need none.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_LOADERS = {"timm": load_timm, "open_clip": load_open_clip, "domainbed": load_domainbed}
"""The loader of each kind of encoder that has networks."""
