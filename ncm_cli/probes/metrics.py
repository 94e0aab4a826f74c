"""What is said about predictions: accuracy with intervals, groups, losses, and paired comparison.

Everything takes plain arrays. Row order never matters: sums are exactly rounded (`math.fsum`).

What rows and pairs say of many linear probes at once, in float64.

Everything that is known of a candidate, wherever it was trained, comes from here: errors and losses of
labelled rows, and what a pair's two members are told.

Comparing two probes on the same rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Flags = NDArray[np.bool_]

Z95 = 1.959963984540054
"""The standard normal's 97.5 % quantile."""


def mean(values: Floats | Flags) -> float:
    """The mean, the same to the last bit in any row order; raises `ValueError` for no value."""
    if len(values) == 0:
        raise ValueError("the mean of no value")
    return math.fsum(values) / len(values)


def accuracy(predicted: Codes, y: Codes) -> float:
    """Share of rows whose predicted class is the true one; both (n,) class codes."""
    return mean(np.asarray(predicted) == np.asarray(y))


def balanced_accuracy(predicted: Codes, y: Codes) -> float:
    """Mean over the classes present in ``y`` of the share predicted right (their recall)."""
    right = np.asarray(predicted) == np.asarray(y)
    return math.fsum(mean(right[y == code]) for code in np.unique(y)) / len(np.unique(y))


def decide(logits: Floats) -> Codes:
    """int64 (...): class codes of logits (..., C).

    One logit speaks for class 1, and one of exactly 0 goes to class 0; of more, the first of the largest.
    """
    if logits.shape[-1] == 1:
        return (logits[..., 0] > 0).astype(np.int64)
    return np.asarray(logits.argmax(axis=-1), np.int64)


def row_log_loss(logits: Floats, y: Codes) -> Floats:
    """−log of the probability of the true class for each row, in nats, (n,).

    Parameters
    ----------
    logits
        (n, 1): the logit of class 1 against class 0. (n, C) with C > 1: softmax logits. Or those of many
        probes, (n, R, C), for losses (n, R).
    y
        (n,) class codes.
    """
    z = np.asarray(logits, dtype=np.float64)
    codes = np.asarray(y).reshape(-1, *[1] * (z.ndim - 1))
    if z.shape[-1] == 1:
        # softplus(−z) for class 1 and softplus(z) for class 0; logaddexp never overflows.
        return np.logaddexp(0.0, np.where(codes == 1, -z, z))[..., 0]
    shifted = z - z.max(axis=-1, keepdims=True)
    own = np.take_along_axis(shifted, np.broadcast_to(codes, (*z.shape[:-1], 1)), axis=-1)[..., 0]
    return np.log(np.exp(shifted).sum(axis=-1)) - own


def log_loss(logits: Floats, y: Codes) -> float:
    """Mean of `row_log_loss`."""
    return mean(row_log_loss(logits, y))


def probabilities(logits: Floats) -> Floats:
    """(n, classes) class probabilities: sigmoid for one column of logits (two classes), else softmax."""
    z = np.asarray(logits, dtype=np.float64)
    if z.shape[1] == 1:
        z = np.concatenate([np.zeros_like(z), z], axis=1)
    grown = np.exp(z - z.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


def margins(logits: Floats) -> Floats:
    """(n,) logit of the predicted class minus the best other one's, in nats; never negative."""
    z = np.asarray(logits, dtype=np.float64)
    if z.shape[1] == 1:
        return np.abs(z[:, 0])
    top = np.partition(z, z.shape[1] - 2, axis=1)[:, -2:]
    return top[:, 1] - top[:, 0]


def mse(predicted: Floats, y: Floats) -> float:
    """Mean squared error, in the target's unit squared."""
    return mean((np.asarray(predicted, np.float64) - np.asarray(y, np.float64)) ** 2)


def r2(predicted: Floats, y: Floats) -> float | None:
    """1 − squared error / squared deviation from the mean; None where the target is constant."""
    total = mse(np.full(len(y), mean(y)), y)
    return None if total == 0 else 1 - mse(predicted, y) / total


def wilson(right: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 % by default; (0, 1) for no row.

    Wilson (1927), Probable inference, the law of succession, and statistical inference, JASA 22. ``n`` may
    be an effective number of rows, and ``right`` then isn't whole.
    """
    if n == 0:
        return 0.0, 1.0
    share = right / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # The ends are exactly 0 and 1 in these two cases; rounding must not say otherwise.
    return (0.0 if right == 0 else centre - half), (1.0 if right == n else centre + half)


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """One row of a group table. ``value`` and the interval are None where there is no row."""

    index: int
    n: int
    value: float | None
    low: float | None = None
    high: float | None = None


def group_table(group: Codes, n_groups: int, right: Flags) -> list[Group]:
    """Accuracy and its 95 % Wilson interval for each of ``n_groups`` groups, absent ones with n = 0.

    ``group`` (n,) holds each row's group, or −1 for a row in none; (n, crossings) where crossings overlap.
    """
    table = []
    for index, part in enumerate(_parts(group, n_groups)):
        hits = right[part]
        if len(hits) == 0:
            table.append(Group(index, 0, None))
        else:
            table.append(Group(index, len(hits), mean(hits), *wilson(int(hits.sum()), len(hits))))
    return table


def error_table(group: Codes, n_groups: int, squared: Floats) -> list[Group]:
    """Mean squared error for each group, as `group_table`."""
    parts = [squared[part] for part in _parts(group, n_groups)]
    return [Group(index, len(own), mean(own) if len(own) else None) for index, own in enumerate(parts)]


def _parts(group: Codes, n_groups: int) -> list[Flags]:
    """The rows (n,) of each group."""
    codes = group if group.ndim == 2 else group[:, None]
    return [(codes == index).any(axis=1) for index in range(n_groups)]


def worst(table: Sequence[Group], *, highest: bool = False) -> Group | None:
    """The group of lowest value (or, for errors, highest) among those present.

    Of equal ones the largest is taken, as the surest, and of those the first. None if no group has a row.
    """
    present = [row for row in table if row.value is not None]
    sign = -1.0 if highest else 1.0
    return min(present, key=lambda row: (sign * (row.value or 0.0), -row.n, row.index), default=None)


def adjusted_average(table: Sequence[Group], reference: NDArray[np.int64]) -> tuple[float | None, float]:
    """The mean over groups weighted by how frequent each is among the reference rows.

    Sagawa et al. (2020), Distributionally robust neural networks, section 4: "adjusted" average accuracy.

    Parameters
    ----------
    reference
        (groups,) rows of each group in the reference.

    Returns
    -------
    The average over the groups that have rows here (weights renormalised), and the share of the
    reference that lies in groups without a row here. The average is None where the two have no
    group in common.
    """
    total = int(np.sum(reference))
    shared = [row for row in table if row.value is not None and reference[row.index] > 0]
    weight = sum(int(reference[row.index]) for row in shared)
    if weight == 0:
        return None, 1.0
    average = math.fsum(int(reference[row.index]) * (row.value or 0.0) for row in shared) / weight
    return average, 1 - weight / total


Array = NDArray[np.float64]

BLOCK_ELEMENTS = 4_000_000
"""Logits held at once: 32 MB."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Scaled features (n, d) with what they should be predicted as.

    ``y`` (n,) holds class codes, or float targets for regression; ``group`` (n, crossings) a group of each
    crossing for each row, −1 for none.
    """

    X: Array
    y: NDArray[Any]
    group: Codes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairRows:
    """Scaled features of both members of m pairs, (m, d) each."""

    a: Array
    b: Array


def row_errors(weight: Array, bias: Array, rows: Rows) -> tuple[Array, Array]:
    """(errors (R, n), losses (R, n)) of R probes.

    Errors are 0 or 1, losses log losses in nats; for regression both are squared errors.

    Parameters
    ----------
    weight : float64 (R, C, d)
    bias : float64 (R, C)
    """
    errors, losses = (np.empty((len(weight), len(rows.X))) for _ in range(2))
    regression = rows.y.dtype.kind == "f"
    for own, logits in _logits(weight, bias, rows.X):
        if regression:
            losses[own] = errors[own] = ((logits[..., 0] - rows.y[:, None]) ** 2).T
        else:
            losses[own] = row_log_loss(logits, rows.y).T
            errors[own] = (decide(logits) != rows.y[:, None]).T
    return errors, losses


def pair_shifts(weight: Array, bias: Array, pairs: PairRows, *, regression: bool) -> tuple[Array, Array]:
    """(changes (R, m), shifts (R, m)) of R probes over m pairs.

    A change is 1 where the two members are predicted differently, for regression the squared difference of
    the predictions. A shift is ``|W delta|^2``, the squared distance of the members' logits.
    """
    changes, shifts = (np.empty((len(weight), len(pairs.a))) for _ in range(2))
    both = np.concatenate([pairs.a, pairs.b])
    for own, logits in _logits(weight, bias, both):
        a, b = logits[: len(pairs.a)], logits[len(pairs.a) :]
        with np.errstate(over="ignore"):  # a probe that is about to diverge has infinite shifts
            shifts[own] = ((a - b) ** 2).sum(axis=2).T
        changes[own] = shifts[own] if regression else (decide(a) != decide(b)).T
    return changes, shifts


def _logits(weight: Array, bias: Array, X: Array) -> Iterator[tuple[slice, Array]]:
    """Logits (n, r, C) of blocks of probes."""
    count, logits, dim = weight.shape
    step = max(1, BLOCK_ELEMENTS // max(1, len(X) * logits))
    for start in range(0, count, step):
        own = slice(start, min(start + step, count))
        flat = X @ weight[own].reshape(-1, dim).T + bias[own].reshape(-1)
        yield own, flat.reshape(len(X), -1, logits)


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
