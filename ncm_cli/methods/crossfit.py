"""What the folds of the pairs say of every candidate, with intervals and paired differences.

A candidate is fitted once for each fold. Its validation error is the mean over the folds; its flips are
counted on each fold's pairs by the probe that has seen neither these pairs nor their rows, and every measured
pair counts once. Estimates of such parts are cross-fitted (Chernozhukov et al. 2018, section 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods import scoring
from ncm_cli.methods.metrics import Z95, wilson
from ncm_cli.methods.path import Fit
from ncm_cli.methods.scoring import PairRows, Rows
from ncm_cli.methods.selection import Candidate, bound_of, candidates_of, log_loss_bound, stacked

Array = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One fold's measurements of R candidates, in the order of ``fits``.

    Attributes
    ----------
    errors : float64 (R, n) or None
        Of the validation rows, as `scoring.row_errors`; None without validation rows.
    losses : float64 (R,) or None
        Mean log loss of the validation rows.
    changes, shifts : float64 (R, m)
        As `scoring.pair_shifts`.
    """

    fits: Sequence[Fit]
    errors: Array | None
    losses: Array | None
    changes: Array
    shifts: Array


def measure(fits: Sequence[Fit], val: Rows | None, pairs: PairRows, *, regression: bool) -> Measured:
    """Judge the probes that were fitted on what a fold leaves."""
    weight, bias = stacked(fits)
    errors = losses = None
    if val is not None:
        errors, every = scoring.row_errors(weight, bias, val)
        losses = every.mean(axis=1)
    changes, shifts = scoring.pair_shifts(weight, bias, pairs, regression=regression)
    return Measured(fits=fits, errors=errors, losses=losses, changes=changes, shifts=shifts)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CrossFit:
    """R candidates over all folds.

    Attributes
    ----------
    candidates
        In the order of the fits.
    errors : float64 (R, n) or None
        Mean over the folds of each validation row's error (or squared error).
    changes : float64 (R, m)
        Of each measured pair: 1 where its members are predicted differently, or the squared difference.
    unit : int64 (m,)
        Pairs that hang together by a row have one number: they count as one in the intervals.
    """

    candidates: tuple[Candidate, ...]
    errors: Array | None
    changes: Array
    unit: Codes
    regression: bool

    @classmethod
    def join(cls, folds: Sequence[Measured], unit: Codes, *, regression: bool) -> CrossFit:
        """Put the folds' measurements together."""
        changes = np.concatenate([fold.changes for fold in folds], axis=1)
        shift = np.concatenate([fold.shifts for fold in folds], axis=1).mean(axis=1)
        change = changes.mean(axis=1)
        facts = {"pair_mse" if regression else "flip_rate": change}
        errors = None
        if folds[0].errors is not None:
            errors = np.mean([fold.errors for fold in folds if fold.errors is not None], axis=0)
            error = errors.mean(axis=1)
            facts |= {"val_mse": error} if regression else {"val_accuracy": 1 - error}
            facts["bound_mse" if regression else "bound_01"] = bound_of(error, change, regression=regression)
            if not regression:
                loss = np.mean([fold.losses for fold in folds if fold.losses is not None], axis=0)
                facts["val_log_loss"] = loss
                facts["log_loss_bound"] = log_loss_bound(loss, shift, len(folds[0].fits[0].bias))
        fits = [
            dataclasses.replace(same[0], converged=all(fit.converged for fit in same))
            for same in zip(*(fold.fits for fold in folds), strict=True)
        ]
        return cls(
            candidates=tuple(candidates_of(fits, facts)),
            errors=errors,
            changes=changes,
            unit=unit,
            regression=regression,
        )

    @property
    def pairs(self) -> int:
        """m, the measured pairs."""
        return len(self.unit)

    @property
    def units(self) -> int:
        """Sets of measured pairs that share no row with others."""
        return len(np.unique(self.unit))

    def beside(self, other: CrossFit) -> CrossFit:
        """These candidates, then another's, measured on the same rows and pairs."""
        errors = None
        if self.errors is not None and other.errors is not None:
            errors = np.concatenate([self.errors, other.errors])
        return dataclasses.replace(
            self,
            candidates=(*self.candidates, *other.candidates),
            errors=errors,
            changes=np.concatenate([self.changes, other.changes]),
        )

    def change(self, index: int) -> Estimate:
        """Flip rate of a candidate (or mean squared change) with its interval.

        Wilson's interval with as many pairs as independent ones would be worth (Kish's effective number:
        pairs over the design effect of their units; Korn and Graubard 1998).
        """
        values = self.changes[index]
        mean, error = float(values.mean()), _clustered_error(values, self.unit)
        if self.regression:
            return _normal(mean, error)
        worth = float(self.units)
        if 0 < mean < 1:
            worth = min(self.pairs, mean * (1 - mean) / error**2) if error > 0 else float(self.pairs)
        return Estimate(mean, *wilson(mean * worth, worth))

    def error(self, index: int) -> Estimate | None:
        """Validation error of a candidate (or MSE) with its interval; Wilson's, over the rows."""
        if self.errors is None:
            return None
        values = self.errors[index]
        mean, n = float(values.mean()), len(values)
        if self.regression:
            return _normal(mean, _clustered_error(values, np.arange(n)))
        return Estimate(mean, *wilson(mean * n, n))

    def bound(self, index: int) -> Estimate | None:
        """Their sum (for MSEs, of the roots) with its interval: distances to the ends, squared and added.

        Zou and Donner (2008), Construction of confidence limits about effect measures, Statistics in
        Medicine 27 (MOVER).
        """
        error, change = self.error(index), self.change(index)
        if error is None:
            return None
        parts = np.array([[part.value, part.low, part.high] for part in (error, change)])
        if self.regression:
            parts = np.sqrt(np.maximum(parts, 0))
        value, low, high = parts.T
        ends = [
            value.sum(),
            max(float(value.sum() - np.hypot(*(value - low))), 0.0),
            value.sum() + np.hypot(*(high - value)),
        ]
        return Estimate(*(float(end**2 if self.regression else end) for end in ends))

    def gain(self, index: int, other: int) -> Estimate | None:
        """How much lower one candidate's bound is than another's, paired on the same rows and pairs.

        First order: the interval is the normal one of the rows' and the units' paired differences.
        """
        if self.errors is None:
            return None
        weights = [self._slopes(i) for i in (other, index)]
        rows = weights[0][0] * self.errors[other] - weights[1][0] * self.errors[index]
        pairs = weights[0][1] * self.changes[other] - weights[1][1] * self.changes[index]
        first, second = self.bound(other), self.bound(index)
        assert first is not None and second is not None
        spread = np.hypot(_clustered_error(rows, np.arange(len(rows))), _clustered_error(pairs, self.unit))
        return _normal(first.value - second.value, float(spread))

    def _slopes(self, index: int) -> tuple[float, float]:
        """Derivatives of the bound by validation error and by change."""
        if not self.regression or self.errors is None:
            return 1.0, 1.0
        a, b = (max(float(part[index].mean()), 1e-300) for part in (self.errors, self.changes))
        return 1 + float(np.sqrt(b / a)), 1 + float(np.sqrt(a / b))


def _normal(mean: float, error: float) -> Estimate:
    return Estimate(mean, mean - Z95 * error, mean + Z95 * error)


def _clustered_error(values: Array, unit: Codes) -> float:
    """Standard error of the mean of ``values`` (m,) when those of one unit are not independent."""
    _, number = np.unique(unit, return_inverse=True)
    totals = np.bincount(number, weights=values - values.mean())
    count = len(totals)
    if count < 2:
        return float("inf")
    return float(np.sqrt(count / (count - 1) * (totals**2).sum()) / len(values))
