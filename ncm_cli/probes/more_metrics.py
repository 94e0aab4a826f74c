"""The metrics of ``ncm eval --metrics``, by scikit-learn and scipy where they have them, with intervals.

Rows are resampled as if they were independent: intervals are too narrow where several
rows show one specimen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Mask
from ncm_cli.probes.metric_names import METRIC_NAMES
from ncm_cli.probes.metrics import balanced_accuracy, mean, r2

RESAMPLES = 500
"""Bootstrap resamples of an interval."""

MIN_RESAMPLES = 100
"""The fewest resamples of an interval; with fewer there is none."""

MAX_RESAMPLED = 100_000_000
"""Probabilities in all resamples together: a minute or two for one metric."""

ECE_BINS = 15
"""Bins of equal width of the expected calibration error, as in Guo et al. (2017)."""


class Predictions(NamedTuple):
    """Answers for n rows."""

    truth: NDArray[Any]
    """(n,) class codes, or float64 numbers for regression; ``predicted`` likewise."""
    predicted: NDArray[Any]
    losses: Array
    """(n,) log losses in nats, or squared errors."""
    probability: Array
    """(n, classes) float64; (n, 0) for regression."""

    @property
    def confidence(self) -> Array:
        """(n,) the probability of the most probable class."""
        top: Array = self.probability.max(axis=1)
        return top

    @property
    def right(self) -> Mask:
        """(n,) whether each prediction is the truth."""
        return self.predicted == self.truth

    def take(self, rows: NDArray[Any]) -> Predictions:
        """The answers for some rows."""
        return Predictions(*(values[rows] for values in self))


def f1(rows: Predictions) -> float:
    """Mean of the F1 scores of the classes that occur among the rows."""
    from sklearn.metrics import f1_score

    present = np.unique(rows.truth)
    return float(f1_score(rows.truth, rows.predicted, labels=present, average="macro", zero_division=0))


def auroc(rows: Predictions) -> float | None:
    """Area under the ROC curve; for more than two classes the mean over classes, each against the rest.

    None for rows of one class. Computed from ranks, for all classes at once (Hanley and McNeil 1982), which
    agrees with scikit-learn's.
    """
    from scipy.stats import rankdata

    present = np.unique(rows.truth)
    if len(present) < 2:
        return None
    positive = np.array([1]) if rows.probability.shape[1] == 2 else present
    ranks, is_class = rankdata(rows.probability[:, positive], axis=0), rows.truth[:, None] == positive
    counts = is_class.sum(axis=0)
    sums = (ranks * is_class).sum(axis=0) - counts * (counts + 1) / 2
    return float((sums / (counts * (len(ranks) - counts))).mean())


def average_precision(rows: Predictions) -> float | None:
    """Average precision of the second of two classes; for more, the mean over classes, each against the rest.

    None for rows of one class.
    """
    from sklearn.metrics import average_precision_score

    present = np.unique(rows.truth)
    if len(present) < 2:
        return None
    positive = [1] if rows.probability.shape[1] == 2 else present
    scores = [
        float(average_precision_score(rows.truth == code, rows.probability[:, code])) for code in positive
    ]
    return math.fsum(scores) / len(scores)


def brier(rows: Predictions) -> float:
    """Brier score (Brier 1950): squared errors of probabilities, summed over classes; the mean over rows.

    For two classes it is halved, to the squared error of one probability, as in scikit-learn.
    """
    distance = rows.probability.copy()
    distance[np.arange(len(distance)), rows.truth] -= 1
    total = mean((distance**2).sum(axis=1))
    return total / 2 if distance.shape[1] == 2 else total


class Bin(NamedTuple):
    """The rows whose confidence lies between two ends."""

    low: float
    high: float
    n: int
    confidence: float
    """Their mean probability of the predicted class."""
    accuracy: float


def calibration(confidence: Array, right: Mask) -> list[Bin]:
    """Rows (n,) by confidence in `ECE_BINS` bins of equal width; empty bins are left out."""
    number = np.clip(np.ceil(confidence * ECE_BINS).astype(int) - 1, 0, ECE_BINS - 1)
    counts = np.bincount(number, minlength=ECE_BINS)
    sure = np.bincount(number, confidence, ECE_BINS)
    hits = np.bincount(number, right, ECE_BINS)
    return [
        Bin(i / ECE_BINS, (i + 1) / ECE_BINS, int(n), float(sure[i] / n), float(hits[i] / n))
        for i, n in enumerate(counts)
        if n
    ]


def ece(rows: Predictions) -> float:
    """Expected calibration error (Guo et al. 2017, On calibration of modern neural networks, equation 3).

    The mean over rows of the gap between accuracy and mean confidence in the row's bin.
    """
    return _ece(rows.confidence, rows.right)


def _ece(confidence: Array, right: Mask) -> float:
    bins = calibration(confidence, right)
    return math.fsum(one.n * abs(one.accuracy - one.confidence) for one in bins) / len(right)


def _seems_calibrated(rows: Predictions, value: float, resamples: int, rng: np.random.Generator) -> bool:
    """Whether a calibrated probe of these confidences has at least this calibration error in 5 % of draws.

    Bröcker and Smith (2007), Increasing the reliability of reliability diagrams: consistency resampling.
    """
    drawn = (_ece(rows.confidence, rng.random(len(rows.truth)) < rows.confidence) for _ in range(resamples))
    return sum(error >= value for error in drawn) >= 0.05 * resamples


def spearman(rows: Predictions) -> float | None:
    """Spearman's rank correlation of prediction and target; None where either is constant."""
    from scipy.stats import spearmanr

    if min(np.ptp(rows.truth), np.ptp(rows.predicted)) == 0:
        return None
    return float(spearmanr(rows.truth, rows.predicted).statistic)


FUNCTIONS: dict[str, Callable[[Predictions], float | None]] = {
    "balanced_accuracy": lambda rows: balanced_accuracy(rows.predicted, rows.truth),
    "f1": f1,
    "auroc": auroc,
    "average_precision": average_precision,
    "log_loss": lambda rows: mean(rows.losses),
    "brier": brier,
    "ece": ece,
    "mae": lambda rows: mean(np.abs(rows.predicted - rows.truth)),
    "rmse": lambda rows: math.sqrt(mean(rows.losses)),
    "r2": lambda rows: r2(rows.predicted, rows.truth),
    "spearman": spearman,
}
"""How each metric of `METRIC_NAMES` is computed from one row or more."""


def resamples_for(name: str, rows: int, classes: int) -> int:
    """How often rows are resampled for a metric's interval; 0 where that would take too long."""
    # scikit-learn's average precision is called for each class, which costs as much as 20,000 rows.
    row_cost = rows + 20_000 if name == "average_precision" and classes > 2 else rows
    affordable = MAX_RESAMPLED // max(row_cost * max(classes, 1), 1)
    return min(RESAMPLES, affordable) if affordable >= MIN_RESAMPLES else 0


def with_interval(name: str, rows: Predictions, resamples: int) -> dict[str, float | None]:
    """``value`` of a metric with the ends of its 95 % interval, ``ci_low`` and ``ci_high``; None if unknown.

    The percentile bootstrap (Efron 1979) over rows. Resampling increases a calibration error, as sampling the
    rows already did. So its interval is the basic bootstrap's, which is reflected at the value, and it begins
    at 0 if a calibrated probe may show as large an error. There is no interval if the value, or its
    counterpart in more than one resample in twenty, isn't defined, or for fewer than two rows.
    """
    metric, n = FUNCTIONS[name], len(rows.truth)
    value = metric(rows) if n else None
    if value is None or n < 2 or not resamples:
        return {"value": value, "ci_low": None, "ci_high": None}
    rng = np.random.default_rng(0)
    drawn = [metric(rows.take(rng.integers(0, n, n))) for _ in range(resamples)]
    known = [resampled for resampled in drawn if resampled is not None]
    if len(known) < 0.95 * resamples:
        return {"value": value, "ci_low": None, "ci_high": None}
    low, high = (float(end) for end in np.quantile(known, [0.025, 0.975]))
    if name == "ece":
        calibrated = _seems_calibrated(rows, value, resamples, rng)
        low, high = 0.0 if calibrated else max(2 * value - high, 0.0), max(2 * value - low, value)
    return {"value": value, "ci_low": low, "ci_high": high}


def worst_of(table: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The group whose metric is worst, with its value and n; None where no group has one."""
    known = [entry for entry in table if entry["metrics"][name]["value"] is not None]
    sign = -1 if METRIC_NAMES[name].lower else 1
    entry = min(known, key=lambda entry: (sign * entry["metrics"][name]["value"], -entry["n"]), default=None)
    return entry and {"group": entry["group"], "n": entry["n"], "value": entry["metrics"][name]["value"]}
