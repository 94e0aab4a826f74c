"""Comparing two probes on the same rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods.metrics import Flags, Floats, mean, wilson


@dataclasses.dataclass(frozen=True, slots=True)
class Paired:
    """Two probes' hits on the same n rows."""

    n: int
    only_first: int
    """Rows that the first gets right and the second wrong."""
    only_second: int
    difference: float
    """Accuracy of the first minus that of the second."""
    low: float
    high: float
    """95 % interval of the difference."""
    p_value: float
    """McNemar's exact test, two-sided, of equal accuracy."""


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p-value of the exact McNemar test: the discordant rows as fair coin flips.

    McNemar (1947), Psychometrika 12; the exact binomial form. 1 where no row is discordant.
    """
    n, k = only_first + only_second, min(only_first, only_second)
    if n == 0 or 2 * k >= n:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(k + 1)]
    return min(1.0, 2 * math.fsum(math.exp(value - n * math.log(2)) for value in logs))


def newcombe(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """95 % interval of the difference of two paired shares; (−1, 1) for no row.

    Newcombe (1998), Improved confidence intervals for the difference between binomial proportions based
    on paired data, Statistics in Medicine 17:2635, method 10: Wilson's intervals of the two shares,
    squared and added, with their correlation φ (continuity-corrected). Unlike Wald's interval it never
    leaves [−1, 1] and isn't of width 0 when no row is discordant.
    """
    n = both + only_first + only_second + neither
    if n == 0:
        return -1.0, 1.0
    first, second = (both + only_first) / n, (both + only_second) / n
    low_1, high_1 = wilson(both + only_first, n)
    low_2, high_2 = wilson(both + only_second, n)
    phi = _phi(both, only_first, only_second, neither)
    difference = first - second
    down, up = (first - low_1, high_2 - second), (high_1 - first, second - low_2)
    low = difference - math.sqrt(max(down[0] ** 2 - 2 * phi * down[0] * down[1] + down[1] ** 2, 0.0))
    high = difference + math.sqrt(max(up[0] ** 2 - 2 * phi * up[0] * up[1] + up[1] ** 2, 0.0))
    return max(low, -1.0), min(high, 1.0)


def _phi(e: int, f: int, g: int, h: int) -> float:
    product = (e + f) * (g + h) * (e + g) * (f + h)
    if product == 0:
        return 0.0
    excess: float = e * h - f * g
    if excess > 0:
        excess = max(excess - (e + f + g + h) / 2, 0.0)
    return excess / math.sqrt(product)


def compare(first: Flags, second: Flags) -> Paired:
    """Compare hits (n,) of two probes on the same rows in the same order."""
    both, only_first = int((first & second).sum()), int((first & ~second).sum())
    only_second, neither = int((~first & second).sum()), int((~first & ~second).sum())
    n = len(first)
    difference = (only_first - only_second) / n if n else 0.0
    low, high = newcombe(both, only_first, only_second, neither)
    return Paired(n, only_first, only_second, difference, low, high, mcnemar(only_first, only_second))


@dataclasses.dataclass(frozen=True, slots=True)
class MeanDifference:
    """The mean of what two probes' losses differ by on the same rows."""

    difference: float
    low: float | None
    high: float | None
    """95 % interval; None from one row, which says nothing of how rows vary."""


def mean_difference(first: Floats, second: Floats) -> MeanDifference:
    """Mean of first − second over the rows (n,), with Student's interval of a mean of n values."""
    # Imported here: it takes longer than everything else that a quick command does.
    from scipy.special import stdtrit

    gap: NDArray[np.float64] = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    n, centre = len(gap), mean(gap)
    if n < 2:
        return MeanDifference(centre, None, None)
    half = float(stdtrit(n - 1, 0.975)) * math.sqrt(math.fsum((gap - centre) ** 2) / (n - 1) / n)
    return MeanDifference(centre, centre - half, centre + half)
