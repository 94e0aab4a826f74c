"""What ``--augment`` takes: a chain ``NAME[:AMOUNT]`` joined by ``+``, such as ``hue:0.3+blur``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ncm_cli.errors import UsageError, unknown


@dataclass(frozen=True)
class Kind:
    """One augmentation: the meaning, default and range of its amount (None: takes none)."""

    summary: str
    default: float | None = None
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Step:
    """One augmentation of a chain with its amount."""

    name: str
    amount: float | None


KINDS: dict[str, Kind] = {
    "grayscale": Kind("luminance in all three channels"),
    "flip": Kind("mirrored left to right, every picture"),
    "vflip": Kind("mirrored top to bottom, every picture"),
    "invert": Kind("the negative"),
    "hue": Kind("largest turn of the hue, as a share of the colour circle", 0.5, 0, 0.5),
    "brightness": Kind("largest relative change", 0.5),
    "contrast": Kind("largest relative change", 0.5),
    "saturation": Kind("largest relative change", 0.5),
    "blur": Kind("largest Gaussian sigma, as a share of the shorter side", 0.02, 0, 0.5),
    "jpeg": Kind("quality of the recompression", 10, 0, 95),
    "noise": Kind("standard deviation, as a share of the range 0..255", 0.1),
    "rotate": Kind("largest turn either way, in degrees", 30, 0, 180),
    "crop": Kind("least share of the area that is kept", 0.5),
}
"""Every augmentation by name."""


def parse(spec: str | None) -> tuple[Step, ...]:
    """The steps of a chain such as ``hue:0.3+blur``; empty for None. Raises UsageError on a malformed one."""
    if spec is None:
        return ()
    return tuple(_parse_step(part.strip(), spec) for part in spec.split("+"))


def _parse_step(text: str, spec: str) -> Step:
    name, colon, amount = text.partition(":")
    if name not in KINDS:
        raise unknown("augmentation", name, KINDS, where=f"--augment {spec}", error=UsageError)
    kind = KINDS[name]
    if kind.default is None:
        if colon:
            raise UsageError(
                f"augmentation {name!r} takes no amount", where=f"--augment {spec}", fix=f"--augment {name}"
            )
        return Step(name, None)
    if not colon:
        return Step(name, kind.default)
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not kind.low < value <= kind.high:  # NaN compares false
        raise UsageError(
            f"the amount of augmentation {name!r} is out of range",
            where=f"--augment {spec}",
            found=amount or "nothing",
            expected=f"a number above {kind.low:g}, up to {kind.high:g} ({kind.summary})",
        )
    return Step(name, value)
