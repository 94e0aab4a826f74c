"""Where training runs."""

from __future__ import annotations

from ncm_cli.errors import UsageError


def resolve_device(name: str) -> str:
    """``cuda`` or ``cpu``; asking for CUDA where there is none is an error.

    Raises
    ------
    UsageError
        An unknown name, or CUDA without CUDA.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    if name.partition(":")[0] != "cuda":
        raise UsageError(f"no device named {name!r}", expected="auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device here", found=f"--device {name}", fix="--device cpu")
    return name
