"""Small grammars of option values: ranks, grids of numbers, lists of names."""

from __future__ import annotations

import math

from ncm_cli.errors import UsageError

MOST_VALUES = 100_000
"""More than the dimensions of any embedding; a longer grid is a slip of the keyboard."""


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """``16``, ``2:24`` (both ends included), ``0:64:8``, ``0,8,56`` or a mix; None for ``auto``."""
    if text.strip() == "auto":
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        try:
            numbers = [int(piece) for piece in part.split(":")]
            if not 1 <= len(numbers) <= 3 or min(numbers) < 0:
                raise ValueError
            start, stop, step = (*numbers, numbers[0])[:2] + ((numbers[2],) if len(numbers) == 3 else (1,))
            if step < 1 or stop < start or (stop - start) // step >= MOST_VALUES:
                raise ValueError
        except ValueError:
            raise UsageError(
                "a rank grid that can't be read",
                found=repr(text),
                expected=f"16, or 2:24, or 0:64:8, or 0,8,56, or auto; at most {MOST_VALUES:,} ranks",
            ) from None
        ranks.update(range(start, stop + 1, step))
    return tuple(sorted(ranks))


def parse_numbers(text: str) -> tuple[float, ...]:
    """``1e-3``, ``1e-4,1e-2`` or ``log:1e-4:1:5`` (five values, evenly spaced in the logarithm)."""
    try:
        if text.startswith("log:"):
            low, high, count = text.removeprefix("log:").split(":")
            start, stop = math.log10(float(low)), math.log10(float(high))
            if not 1 <= int(count) <= MOST_VALUES:
                raise ValueError
            steps = max(int(count) - 1, 1)
            values = [10 ** (start + (stop - start) * i / steps) for i in range(int(count))]
        else:
            values = [float(part) for part in text.split(",")]
        if not values or any(not math.isfinite(value) for value in values):
            raise ValueError
    except ValueError:
        raise UsageError(
            "numbers that can't be read",
            found=repr(text),
            expected="1e-3, or 1e-4,1e-3,1e-2, or log:1e-4:1:5",
        ) from None
    return tuple(dict.fromkeys(values))


def parse_names(text: str) -> tuple[str, ...]:
    """``label,place``: names between commas, blanks around them dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_device(text: str) -> str:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    kind, colon, number = text.partition(":")
    if text not in ("auto", "cpu") and (kind != "cuda" or (colon and not number.isdecimal())):
        raise UsageError(f"no device named {text!r}", expected="auto, cpu, cuda or cuda:N")
    return text
