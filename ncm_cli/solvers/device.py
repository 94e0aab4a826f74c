"""The device that torch computes on: its choice, its arithmetic, its random numbers, its memory."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from ncm_cli.errors import InputError
from ncm_cli.options import parse_device
from ncm_cli.progress import Reporter


def choose_device(asked: str, precision: str, reporter: Reporter) -> str:
    """``cpu`` or ``cuda:N``, for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; reports which.

    Raises `InputError` if CUDA is asked for and there is none, or for fp16 on a CPU: it never falls back on
    the CPU silently.
    """
    import torch

    index = parse_device(asked).partition(":")[2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old driver warns; the outcome is reported below
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked.startswith("cuda") and count <= int(index or 0):
        raise InputError(
            f"--device {asked} asks for a CUDA device that isn't there",
            found=f"{count} CUDA devices",
            fix="--device cpu, or --device auto to take CUDA only where there is some",
        )
    # Each of the processes that share a machine takes the device that its LOCAL_RANK numbers.
    index = index or str(int(os.environ.get("LOCAL_RANK") or 0) % max(count, 1))
    device = "cpu" if asked == "cpu" or count == 0 else f"cuda:{int(index)}"
    if device == "cpu" and precision == "fp16":
        what = "--precision fp16 needs CUDA, and the device is the CPU"
        raise InputError(what, fix="--precision bf16, or fp32")
    if device != "cpu" and os.environ.get("LOCAL_RANK"):
        torch.cuda.set_device(device)  # otherwise pinned memory uses the first device as well
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device != "cpu" else "cpu"
    reporter.note(f"device: {name}, {precision}")
    return device


@contextlib.contextmanager
def exact(device: str, precision: str) -> Iterator[None]:
    """Compute in ``precision``: fp32 means fp32 (no TF32), the others are autocast."""
    import torch

    with contextlib.ExitStack() as stack:
        if device.startswith("cuda"):
            cudnn = {"enabled": True, "benchmark": False, "deterministic": True, "allow_tf32": False}
            stack.enter_context(torch.backends.cudnn.flags(**cudnn))
            try:
                stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("highest")
            except RuntimeError:  # torch's newer switch was set, which forbids the older one
                matmul: Any = torch.backends.cuda.matmul
                stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
                matmul.fp32_precision = "ieee"
        if precision != "fp32":
            kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
            stack.enter_context(torch.autocast(device.partition(":")[0], dtype=kind))
        yield


@contextlib.contextmanager
def no_random_numbers() -> Iterator[None]:
    """Leave a network's parameters uninitialised, as weights will replace them all; saves a second for a
    ViT-B.

    The loader checks that no weight is missing. Modules still draw whatever isn't a parameter.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Undrawn(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_", "erfinv_"):
                target = args[0] if args else (kwargs or {}).get("tensor")
                if isinstance(target, torch.nn.Parameter):
                    return target
            return function(*args, **(kwargs or {}))

    with Undrawn():
        yield


@contextlib.contextmanager
def own_random_numbers(seed: int) -> Iterator[None]:
    """Random initialisation from ``seed`` that leaves every global generator as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def is_short_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out: in Python, in torch on a CPU, in CUDA or its libraries."""
    words = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
