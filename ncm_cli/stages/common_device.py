"""Where training runs."""

from __future__ import annotations

from ncm_cli.errors import UsageError
from ncm_cli.options.grids import parse_device


def resolve_device(name: str) -> str:
    """``cuda`` or ``cpu``; asking for CUDA where there is none is an error.

    Raises
    ------
    UsageError
        An unknown name, or CUDA without CUDA.
    """
    import torch

    if parse_device(name) == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device here", found=f"--device {name}", fix="--device cpu")
    return name
