"""Choosing among trained configurations: a checkpoint for each, then hyper-parameters over all seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

METRICS = (
    "val_accuracy",
    "val_log_loss",
    "val_worst_group",
    "flip_rate",
    "bound_01",
    "log_loss_bound",
    "test_accuracy",
    "test_log_loss",
    "test_worst_group",
)
"""In the order of the tables; those that can't be known are NaN. The bounds and the flip rate are those of
the folds of pairs, the others those of the fit on all rows and pairs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What a selection rule looks at."""

    metric: str
    sign: int
    """1: the least is best; -1: the greatest."""
    oracle: bool = False
    """Whether it looks at test rows."""


RULES: dict[str, Rule] = {
    "in-domain": Rule(metric="val_accuracy", sign=-1),
    "worst-group": Rule(metric="val_worst_group", sign=-1),
    "bound": Rule(metric="bound_01", sign=1),
    "oracle": Rule(metric="test_accuracy", sign=-1, oracle=True),
    "oracle-worst-group": Rule(metric="test_worst_group", sign=-1, oracle=True),
}

_LOSS = METRICS.index("val_log_loss")


def _scores(metrics: Array, rule: Rule) -> Array:
    """The rule's quantity, least best, infinite where not known; to 1e-12, below which it is rounding."""
    values = rule.sign * metrics[..., METRICS.index(rule.metric)]
    return np.where(np.isfinite(values), np.round(values, 12), np.inf)


def best_checkpoints(history: Array, rule: Rule) -> NDArray[np.int64]:
    """For each configuration its best checkpoint; ties go to the lower validation log loss, then the earlier.

    Parameters
    ----------
    history
        (n, checkpoints, metrics), columns as in `METRICS`; NaN where not known.

    Returns
    -------
    NDArray
        (n,) checkpoint, −1 where the rule has nothing to look at.
    """
    scores = _scores(history, rule)
    losses = history[..., _LOSS]
    losses = np.where(np.isfinite(losses), losses, np.inf)
    first = np.lexsort((losses, scores))[:, 0]
    known = np.isfinite(scores.min(axis=1))
    return np.where(known, first, -1).astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """The hyper-parameters that a rule chose for one method."""

    trial: int
    checkpoints: tuple[int, ...]
    """One for each seed."""
    values: Array
    """(seeds, metrics) at those checkpoints."""

    @property
    def mean(self) -> Array:
        """(metrics,)."""
        return np.asarray(self.values.mean(axis=0), np.float64)

    @property
    def sd(self) -> Array:
        """(metrics,) standard deviation over seeds (n − 1); NaN with one seed."""
        if len(self.values) < 2:
            return np.full(self.values.shape[1], np.nan)
        found = np.asarray(self.values.std(axis=0, ddof=1), np.float64)
        # Equal values differ from their mean by its rounding.
        return np.where(found < 1e-12, 0.0, found)


def pick_trial(history: Array, diverged: NDArray[np.bool_], trials: Sequence[int], rule: Rule) -> Pick | None:
    """The trial whose best checkpoints are best on average over the seeds.

    Parameters
    ----------
    history
        (trials, seeds, checkpoints, metrics).
    diverged
        (trials, seeds): a trial that diverged for any seed is never chosen.
    trials
        Their numbers.

    Returns
    -------
    Pick or None
        None where the rule can't judge any trial. Ties go to the lower validation log loss, then the
        earlier trial.
    """
    best: tuple[tuple[float, float], int] | None = None
    found: Pick | None = None
    for row, trial in enumerate(trials):
        chosen = best_checkpoints(history[row], rule)
        if diverged[row].any() or (chosen < 0).any():
            continue
        values = history[row][np.arange(len(chosen)), chosen]
        loss = float(values[:, _LOSS].mean())
        key = (round(float(_scores(values, rule).mean()), 12), loss if np.isfinite(loss) else np.inf)
        if best is None or (key, row) < best:
            best = (key, row)
            found = Pick(trial=trial, checkpoints=tuple(chosen.tolist()), values=values)
    return found
