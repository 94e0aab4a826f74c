"""A network with its weights, as timm or open_clip make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    import torch


_ACTIVATIONS = frozenset(
    {"GELU", "GELUTanh", "QuickGELU", "ReLU", "ReLU6", "SiLU", "Swish", "Mish", "Hardswish", "HardSwish"}
    | {"ELU", "LeakyReLU", "PReLU", "Tanh"}
)
"""Activations by class name, as timm and open_clip have their own classes beside torch's."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its weights, as its library makes it, and the ``facts`` for its description.

    ``encode`` maps (B, 3, H, W) float32 to (B, dim), with (H, W) the ``size``; ``transform`` is the model's
    own published preprocessing, to (3, H, W) float32. ``shortest`` is the length to which it scales the
    shorter edge of a picture, or None if it can't enlarge much. ``tokenizer`` makes the text tower's
    tokenizer, and ``lacks`` names the tensors of that tower that the weights don't have.
    """

    module: torch.nn.Module
    encode: Callable[[torch.Tensor], torch.Tensor]
    transform: Callable[[Image.Image], torch.Tensor]
    size: tuple[int, int]
    shortest: int | None
    facts: dict[str, Any]
    tokenizer: Callable[[], Any] | None = None
    lacks: Sequence[str] = ()


def activations(module: torch.nn.Module) -> str | None:
    """The kinds of activation in a network, such as ``QuickGELU`` or ``GELU``; joined by + if several."""
    return "+".join(sorted(_ACTIVATIONS & {type(part).__name__ for part in module.modules()})) or None


def three_floats(values: Any) -> list[float]:
    """Three floats for a description, from one number or a sequence."""
    three = list(values) if isinstance(values, Sequence) else [values] * 3
    if len(three) != 3 or any(isinstance(number, bool | str) or not abs(number) < 1e6 for number in three):
        raise ValueError(f"{values!r}, where one or three numbers are expected")
    return [float(value) for value in three]
