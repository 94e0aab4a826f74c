"""What is said about predictions: accuracy with intervals, groups, losses, and paired comparison.

Everything takes plain arrays. Row order never matters: sums are exactly rounded (`math.fsum`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

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
