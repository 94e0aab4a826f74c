"""What encoders that run on torch share: device, precision, one forward pass over a batch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ncm_cli.errors import InputError
from ncm_cli.images import augment
from ncm_cli.images.encoder import EncoderRequest, check_resize, finish
from ncm_cli.options import parse_device
from ncm_cli.progress import Reporter

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
    """A network, its own preprocessing, and how to run it.

    Parameters
    ----------
    network
        Maps (B, 3, H, W) float32 to (B, dim); already in eval mode and on ``device``.
    transform
        The model's own published preprocessing: a PIL picture to a (3, H, W) float32 tensor.
    shortest
        The side that the transform gives a picture's shorter edge, or None where it can't enlarge much.
    """

    def __init__(
        self,
        request: EncoderRequest,
        *,
        network: Callable[[torch.Tensor], torch.Tensor],
        transform: Callable[[Image.Image], torch.Tensor],
        shortest: int | None,
        dim: int,
        device: str,
        description: dict[str, Any],
    ) -> None:
        self.description = description
        self.dim = dim
        self.device = device
        self.batch_size = CUDA_BATCH if device.startswith("cuda") else CPU_BATCH
        self._request = request
        self._network = network
        self._transform = transform
        self._shortest = shortest
        self._augment = augment.parse(request.augment)
        if device == "cpu":
            _keep_freed_memory()

    def preprocess(self, image: Image.Image, id: str) -> torch.Tensor:
        """(3, H, W) float32 from a decoded RGB picture; ``id`` seeds an augmentation."""
        image = augment.apply(self._augment, image, seed=self._request.seed, id=id)
        if self._shortest is not None:
            check_resize(image, self._shortest)
        return self._transform(image)

    def encode(self, items: Sequence[torch.Tensor]) -> np.ndarray:
        """(B, dim) float32 features of preprocessed pictures, in order."""
        import torch

        try:
            batch = torch.stack(list(items))
            with torch.inference_mode(), exact(self.device, self._request.precision):
                if self.device.startswith("cuda"):
                    batch = batch.pin_memory().to(self.device, non_blocking=True)
                    batch = batch.contiguous(memory_format=torch.channels_last)
                features = self._network(batch).float().cpu().numpy()
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            raise _out_of_memory(len(items), self.device) from error
        except RuntimeError as error:
            if "can't allocate memory" in str(error) or "out of memory" in str(error):
                raise _out_of_memory(len(items), self.device) from error
            raise
        return finish(features, self._request)


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of large tensors for the next batch instead of returning it to the system.

    Otherwise each layer's output is mapped and faulted in anew: with EfficientNet-Lite0 in batches of 32 that
    took more than half of the processor time. Other C libraries have no ``mallopt`` and need none.
    """
    import ctypes

    if os.name != "posix":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def choose_device(asked: str, precision: str, reporter: Reporter) -> str:
    """``cpu`` or ``cuda:N`` for what was asked (``auto``, ``cpu``, ``cuda``, ``cuda:N``); says which.

    Raises InputError where CUDA is asked for and there is none, or fp16 on a CPU: never a silent CPU run.
    """
    import torch

    index = parse_device(asked).partition(":")[2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver too old warns; the outcome is said below
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked.startswith("cuda") and count <= int(index or 0):
        raise InputError(
            f"--device {asked} asks for a CUDA device that isn't there",
            found=f"{count} CUDA devices",
            fix="--device cpu, or --device auto to take CUDA only where there is some",
        )
    device = "cpu" if asked == "cpu" or count == 0 else f"cuda:{int(index or 0)}"
    if device == "cpu" and precision == "fp16":
        raise InputError(
            "--precision fp16 needs CUDA, and the device is the CPU",
            fix="--precision bf16, or fp32",
        )
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device != "cpu" else "cpu"
    reporter.note(f"device: {name}, {precision}")
    return device


@contextmanager
def exact(device: str, precision: str) -> Iterator[None]:
    """Arithmetic as ``precision`` says: fp32 means fp32 (no TF32), the others are autocast."""
    import torch

    with ExitStack() as stack:
        if device.startswith("cuda"):
            stack.enter_context(
                torch.backends.cudnn.flags(
                    enabled=True, benchmark=False, deterministic=True, allow_tf32=False
                )
            )
            stack.enter_context(_highest_matmul_precision())
        if precision != "fp32":
            kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
            stack.enter_context(torch.autocast(device.partition(":")[0], dtype=kind))
        yield


@contextmanager
def _highest_matmul_precision() -> Iterator[None]:
    import torch

    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # someone set torch's newer switch, which forbids the older one
        matmul: Any = torch.backends.cuda.matmul
        switch = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = switch
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def own_random_numbers(seed: int) -> Iterator[None]:
    """Random initialisation from ``seed`` that leaves every global generator as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


_ACTIVATIONS = frozenset(
    {"GELU", "GELUTanh", "QuickGELU", "ReLU", "ReLU6", "SiLU", "Swish", "Mish", "Hardswish", "HardSwish"}
    | {"ELU", "LeakyReLU", "PReLU", "Tanh"}
)
"""By class name: timm and open_clip have classes of their own beside torch's."""


def activations(module: torch.nn.Module) -> str | None:
    """The kinds of activation in a network, such as ``QuickGELU`` or ``GELU``; joined by + if several."""
    return "+".join(sorted(_ACTIVATIONS & {type(part).__name__ for part in module.modules()})) or None


def measured_dim(
    network: Callable[[torch.Tensor], torch.Tensor], size: tuple[int, int], device: str, precision: str
) -> int:
    """The length of a feature, found by running a black picture: towers name it in different places."""
    import torch

    with torch.inference_mode(), exact(device, precision):
        return int(network(torch.zeros(1, 3, *size, device=device)).shape[1])


def numbers(values: Any) -> list[float]:
    """Three floats for a description, from one number or a sequence."""
    return [float(v) for v in values] if isinstance(values, Sequence) else [float(values)] * 3


def _out_of_memory(count: int, device: str) -> InputError:
    return InputError(
        f"not enough memory on {device} for a batch of {count}",
        fix=f"--batch-size {max(1, count // 2)}, or a smaller --precision",
    )
