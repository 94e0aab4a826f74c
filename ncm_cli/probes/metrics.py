"""Metrics of predictions: decisions and losses, shares with intervals, groups, paired comparisons.

What ``ncm eval`` always measures is listed in `MEASURES`; what ``--metrics`` adds is in `metric_names` and
`more_metrics`. Everything takes plain arrays.
The order of rows never matters: sums are exactly rounded (`math.fsum`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Codes, Features, Mask, blocks

Z95 = 1.959963984540054
"""The standard normal's 97.5 % quantile."""

BLOCK_ELEMENTS = 4_000_000
"""Logits held at once: 32 MB."""


def mean(values: Array | Mask) -> float:
    """The mean, the same to the last bit in any row order; raises `ValueError` for no value."""
    if len(values) == 0:
        raise ValueError("the mean of no value")
    return math.fsum(values) / len(values)


def balanced_accuracy(predicted: Codes, y: Codes) -> float:
    """Mean over the classes present in ``y`` of the share predicted right (their recall)."""
    right = np.asarray(predicted) == np.asarray(y)
    return math.fsum(mean(right[y == code]) for code in np.unique(y)) / len(np.unique(y))


def joint(codes: Codes) -> Codes:
    """(n,) one code for each combination of codes (n, columns), in order; −1 where any is missing (−1)."""
    joined = np.zeros(len(codes), np.int64)
    for column in codes.T:  # much faster than sorting rows of several columns
        width = int(column.max(initial=0)) + 1
        joined = np.unique(joined * width + np.maximum(column, 0), return_inverse=True)[1]
    return np.where((codes >= 0).all(axis=1), joined, -1)


def decide(logits: Array) -> Codes:
    """int64 (...): class codes of logits (..., C).

    A single logit above 0 means class 1, else class 0. With more, the first of the largest decides.
    """
    if logits.shape[-1] == 1:
        return (logits[..., 0] > 0).astype(np.int64)
    return np.asarray(logits.argmax(axis=-1), np.int64)


def row_log_loss(logits: Array, y: Codes) -> Array:
    """−log of the probability of the true class for each row, in nats, (n,).

    Parameters
    ----------
    logits
        (n, 1): the logit of class 1 against class 0. (n, C) with C > 1: softmax logits. For R
        probes: (n, R, C), with losses (n, R).
    y
        (n,) class codes.
    """
    z = np.asarray(logits, dtype=np.float64)
    codes = np.asarray(y).reshape(-1, *[1] * (z.ndim - 1))
    if z.shape[-1] == 1:
        # softplus(−z) for class 1 and softplus(z) for class 0; logaddexp never overflows.
        return np.logaddexp(0.0, np.where(codes == 1, -z, z))[..., 0]
    shifted = z - z.max(axis=-1, keepdims=True)
    of_truth = np.take_along_axis(shifted, np.broadcast_to(codes, (*z.shape[:-1], 1)), axis=-1)[..., 0]
    return np.log(np.exp(shifted).sum(axis=-1)) - of_truth


def probabilities(logits: Array) -> Array:
    """(n, classes) class probabilities: sigmoid for one column of logits (two classes), else softmax."""
    z = np.asarray(logits, dtype=np.float64)
    if z.shape[1] == 1:
        z = np.concatenate([np.zeros_like(z), z], axis=1)
    grown = np.exp(z - z.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


def true_margins(logits: Array, y: Codes) -> Array:
    """The lead of the true class's logit over the highest other one (n,): above 0 where it is predicted.

    ``y`` (n,) are class codes. A single logit (two classes) is its own lead, negated where class 0 is true.
    """
    if logits.shape[1] == 1:
        return np.where(y == 1, logits[:, 0], -logits[:, 0])
    rows, others = np.arange(len(y)), np.array(logits, np.float64)
    of_truth = others[rows, y]
    others[rows, y] = -np.inf
    return of_truth - others.max(axis=1)


def margins(logits: Array) -> Array:
    """(n,) logit of the predicted class minus the best other one's, in nats; never negative."""
    z = np.asarray(logits, dtype=np.float64)
    if z.shape[1] == 1:
        return np.abs(z[:, 0])
    top = np.partition(z, z.shape[1] - 2, axis=1)[:, -2:]
    return top[:, 1] - top[:, 0]


def r2(predicted: Array, y: Array) -> float | None:
    """1 − squared error / squared deviation from the mean; None if the target is constant."""
    total = mean((np.full(len(y), mean(y)) - y) ** 2)
    return None if total == 0 else 1 - mean((predicted - y) ** 2) / total


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Scaled features (n, d) with targets.

    ``y`` (n,) holds class codes, or float targets for regression; ``group`` (n, crossings) the group of each
    row in each crossing, −1 for none.
    """

    X: Features
    y: NDArray[Any]
    group: Codes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairRows:
    """Scaled features of both members of m pairs, (m, d) each."""

    a: Array
    b: Array


def row_errors(weight: Array, bias: Array, rows: Rows) -> tuple[Array, Array]:
    """(errors (R, n), losses (R, n)) of R probes, ``weight`` (R, C, d) and ``bias`` (R, C).

    Errors are 0 or 1, losses log losses in nats; for regression both are squared errors.
    """
    errors, losses = (np.empty((len(weight), len(rows.X))) for _ in range(2))
    for part, X in blocks(rows.X):
        y = rows.y[part]
        for probes, logits in _logits(weight, bias, X):
            if y.dtype.kind == "f":
                losses[probes, part] = errors[probes, part] = ((logits[..., 0] - y[:, None]) ** 2).T
            else:
                losses[probes, part] = row_log_loss(logits, y).T
                errors[probes, part] = (decide(logits) != y[:, None]).T
    return errors, losses


def pair_shifts(weight: Array, bias: Array, pairs: PairRows, *, regression: bool) -> tuple[Array, Array]:
    """(changes (R, m), shifts (R, m)) of R probes over m pairs.

    A change is 1 if the two members are predicted differently, else 0; for regression it is the squared
    difference of the predictions. A shift is ``|W delta|^2``, the squared distance of the members' logits.
    """
    changes, shifts = (np.empty((len(weight), len(pairs.a))) for _ in range(2))
    for probes, logits in _logits(weight, bias, np.concatenate([pairs.a, pairs.b])):
        a, b = logits[: len(pairs.a)], logits[len(pairs.a) :]
        with np.errstate(over="ignore"):  # a probe that is about to diverge has infinite shifts
            shifts[probes] = ((a - b) ** 2).sum(axis=2).T
        changes[probes] = shifts[probes] if regression else (decide(a) != decide(b)).T
    return changes, shifts


def _logits(weight: Array, bias: Array, X: NDArray[np.floating]) -> Iterator[tuple[slice, Array]]:
    """Logits (n, r, C) of blocks of probes."""
    count, logits, dim = weight.shape
    step = max(1, BLOCK_ELEMENTS // max(1, len(X) * logits))
    for start in range(0, count, step):
        probes = slice(start, min(start + step, count))
        flat = X @ weight[probes].reshape(-1, dim).T + bias[probes].reshape(-1)
        yield probes, flat.reshape(len(X), probes.stop - probes.start, logits)


class Measure(NamedTuple):
    """One number of ``ncm eval``: its name in the table, and how it is computed from all rows."""

    text: str
    of: Callable[[Any], float | None] | None = None
    """Takes an object with arrays (n,) ``predicted``, ``truth``, ``values`` (hits, or squared errors) and
    ``losses``. None for an average over groups, which `adjusted_average` computes."""


MEASURES = {
    "classification": {
        "accuracy": Measure("average accuracy", lambda answers: mean(answers.values)),
        "adjusted_accuracy": Measure("adjusted average accuracy"),
        "balanced_accuracy": Measure(
            "balanced accuracy", lambda answers: balanced_accuracy(answers.predicted, answers.truth)
        ),
        "log_loss": Measure("log loss", lambda answers: mean(answers.losses)),
    },
    "regression": {
        "mse": Measure("mean squared error", lambda answers: mean(answers.losses)),
        "r2": Measure("R²", lambda answers: r2(answers.predicted, answers.truth)),
        "adjusted_mse": Measure("adjusted mean squared error"),
    },
}
"""The measures of each task, by their names in the result's JSON."""


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


def summary(values: Array | Mask) -> dict[str, Any]:
    """A group's entry in a result: n and, for hits (bool), accuracy with interval, for squared errors mse.

    Without rows everything but n is None.
    """
    n, value = len(values), mean(values) if len(values) else None
    if values.dtype != bool:
        return {"n": n, "mse": value}
    low, high = wilson(int(values.sum()), n) if n else (None, None)
    return {"n": n, "accuracy": value, "ci_low": low, "ci_high": high}


def worst(table: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry with the lowest accuracy or highest mse, without its interval; None if no group has rows.

    Ties go to the largest group, then to the first.
    """
    present = [entry for entry in table if entry["n"]]
    sign, name = (1, "accuracy") if table and "accuracy" in table[0] else (-1, "mse")
    entry = min(present, key=lambda entry: (sign * entry[name], -entry["n"]), default=None)
    return entry and {key: value for key, value in entry.items() if not key.startswith("ci_")}


def adjusted_average(table: Sequence[dict[str, Any]], reference: Codes) -> tuple[float | None, float]:
    """The mean over groups weighted by how frequent each is among the reference rows.

    Sagawa et al. (2020), Distributionally robust neural networks, section 4: "adjusted" average accuracy.

    Parameters
    ----------
    table
        Entries as `summary` makes them.
    reference
        (groups,) rows of each group in the reference.

    Returns
    -------
    The average over the groups that have rows here (weights renormalised), and the share of the
    reference that lies in groups without a row here. The average is None where the two have no
    group in common.
    """
    weights = [(int(n), entry) for entry, n in zip(table, reference, strict=True) if entry["n"] and n > 0]
    weight = sum(n for n, _ in weights)
    if weight == 0:
        return None, 1.0
    average = (
        math.fsum(n * entry["accuracy" if "accuracy" in entry else "mse"] for n, entry in weights) / weight
    )
    return average, 1 - weight / int(np.sum(reference))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p-value of the exact McNemar test, in which discordant rows are fair coin flips.

    McNemar (1947), Psychometrika 12; the exact binomial form. 1 if no row is discordant.
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
    product = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    excess: float = both * neither - only_first * only_second
    if excess > 0:
        excess = max(excess - n / 2, 0.0)
    phi = excess / math.sqrt(product) if product else 0.0
    down, up = (first - low_1, high_2 - second), (high_1 - first, second - low_2)
    low = (first - second) - math.sqrt(max(down[0] ** 2 - 2 * phi * down[0] * down[1] + down[1] ** 2, 0.0))
    high = (first - second) + math.sqrt(max(up[0] ** 2 - 2 * phi * up[0] * up[1] + up[1] ** 2, 0.0))
    return max(low, -1.0), min(high, 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Paired:
    """Two probes' hits on the same n rows, under the names of results."""

    n: int
    difference: float
    """Accuracy of the first probe minus accuracy of the second."""
    ci_low: float
    ci_high: float
    """95 % interval of the difference."""
    p_value: float
    """Of McNemar's exact test, two-sided, for equal accuracy."""
    only_this_right: int
    only_other_right: int


def compare(this: Mask, other: Mask) -> Paired:
    """Compare hits (n,) of two probes on the same rows in the same order."""
    both, neither, n = int((this & other).sum()), int((~this & ~other).sum()), len(this)
    only_this, only_other = int((this & ~other).sum()), int((~this & other).sum())
    difference = (only_this - only_other) / n if n else 0.0
    interval = newcombe(both, only_this, only_other, neither)
    return Paired(n, difference, *interval, mcnemar(only_this, only_other), only_this, only_other)


def mean_difference(first: Array, second: Array) -> tuple[float, float | None, float | None]:
    """Mean of first − second over the rows (n,), and its 95 % interval by Student's t.

    The interval is (None, None) for a single row, which doesn't show how rows vary.
    """
    # Imported here: it takes longer than everything else that a quick command does.
    from scipy.special import stdtrit

    gap: Array = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    n, centre = len(gap), mean(gap)
    if n < 2:
        return centre, None, None
    half = float(stdtrit(n - 1, 0.975)) * math.sqrt(math.fsum((gap - centre) ** 2) / (n - 1) / n)
    return centre, centre - half, centre + half
