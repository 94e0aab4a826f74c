"""What the folds of the pairs say of every candidate, with intervals and paired differences.

A candidate is fitted once for each fold. Its validation error is the mean over the folds; its flips are
counted on each fold's pairs by the probe that has seen neither these pairs nor their rows, and every measured
pair counts once. Estimates of such parts are cross-fitted (Chernozhukov et al. 2018, section 1).

Whether the pairs helped, in words, from validation rows and pairs only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ncm_cli.probes import metrics
from ncm_cli.probes.metrics import Z95, PairRows, Rows, wilson
from ncm_cli.probes.path import Fit
from ncm_cli.probes.selection import Candidate, bound_of, candidates_of, log_loss_bound, stacked

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
        errors, every = metrics.row_errors(weight, bias, val)
        losses = every.mean(axis=1)
    changes, shifts = metrics.pair_shifts(weight, bias, pairs, regression=regression)
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


FEWEST = 32
"""Below this many independent pairs neither directions nor flips can be told from chance."""

HARDLY = 0.01
"""A gain of the error bound below this, one answer in a hundred, is none that anybody would notice."""

HARDLY_SHARE = 0.05
"""For regression, the same as a share of the bound at rank 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What ``ncm fit`` says after a fit with pairs.

    Attributes
    ----------
    code
        ``helps``; ``no-gain``: the bound is hardly lower than ERM's; ``constant``: no better than always the
        same answer; ``too-few``: too few independent pairs; ``undecided``: the interval is wider than the
        gain; ``unmeasured``: no validation rows, or pairs that can't be divided into folds.
    text
        The same in a sentence.
    about
        Which shift it is about.
    bound, erm_bound
        With their intervals, of the pick and of rank 0.
    gain
        How much lower the pick's bound is than ERM's, paired.
    """

    code: str
    text: str
    about: str
    pairs: int
    units: int
    bound: Estimate | None = None
    erm_bound: Estimate | None = None
    flip_rate: Estimate | None = None
    erm_flip_rate: Estimate | None = None
    val_error: Estimate | None = None
    erm_val_error: Estimate | None = None
    gain: Estimate | None = None
    constant_error: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Measures:
    """What a verdict is passed on; as in `Verdict`."""

    bound: Estimate
    erm_bound: Estimate
    flip_rate: Estimate
    erm_flip_rate: Estimate
    val_error: Estimate
    erm_val_error: Estimate
    gain: Estimate
    constant_error: float

    @property
    def fewer_flips(self) -> float:
        """The part of the gain that isn't validation error."""
        return self.gain.value - (self.erm_val_error.value - self.val_error.value)


def judge(
    found: CrossFit,
    pick: int,
    erm: int,
    constant: float | None,
    answer: str,
    shift: str,
    *,
    least_bound: bool = True,
    one_answer: bool = False,
) -> Verdict:
    """The verdict on candidate ``pick`` beside candidate ``erm``, which removes nothing.

    Parameters
    ----------
    constant
        Validation error (or MSE) of always the same answer, which no shift can change.
    answer
        That answer, for the text.
    shift
        What the pairs differ in, for the text.
    least_bound
        The pick was chosen as the least bound of all ranks, so that what it doesn't reach no rank does.
    one_answer
        The pick gives every validation row the same answer.
    """
    bound, erm_bound = found.bound(pick), found.bound(erm)
    error, erm_error = found.error(pick), found.error(erm)
    gain = found.gain(pick, erm)
    if not (bound and erm_bound and error and erm_error and gain) or constant is None:
        return unmeasured(found.pairs, found.units, "no validation rows", shift)
    measures = _Measures(
        bound=bound,
        erm_bound=erm_bound,
        flip_rate=found.change(pick),
        erm_flip_rate=found.change(erm),
        val_error=error,
        erm_val_error=erm_error,
        gain=gain,
        constant_error=constant,
    )
    if found.units < FEWEST:
        code, text = _too_few(measures, found, answer)
    else:
        code, text = _compared(measures, found.regression, answer, least_bound, pick == erm, one_answer)
    known = {field.name: getattr(measures, field.name) for field in dataclasses.fields(measures)}
    return Verdict(code=code, text=text, about=_about(shift), pairs=found.pairs, units=found.units, **known)


def _too_few(measures: _Measures, found: CrossFit, answer: str) -> tuple[str, str]:
    apart = (
        f"{found.units} pairs" if found.units == found.pairs else f"{found.units} sets of {found.pairs} pairs"
    )
    text = f"It can't be told whether the pairs help: {apart} that share no row, where {FEWEST} are needed."
    if measures.bound.value >= measures.constant_error:
        text += (
            f" The bound is no lower than that of always answering {answer} ({measures.constant_error:.3g})."
        )
    return "too-few", text


def _compared(
    at: _Measures, regression: bool, answer: str, least_bound: bool, unchanged: bool, one_answer: bool
) -> tuple[str, str]:
    """Code and text where there are pairs enough; ``unchanged``: the pick is ERM itself."""
    # Probes of folds that are nearly constant come out a hair below the constant itself.
    hair = HARDLY_SHARE * at.constant_error if regression else HARDLY
    useless = one_answer or at.bound.value > at.constant_error - hair
    word, what = ("MSE", "mean squared change") if regression else ("error", "flip rate")
    least = HARDLY_SHARE * at.erm_bound.value if regression else HARDLY
    gain, before = at.gain, at.erm_bound.value
    if useless and least_bound:
        return "constant", (
            f"The pairs don't help: no rank that was tried beats always answering {answer} ({word} "
            f"{at.constant_error:.3g}): these pairs differ in the label's own directions, or the label "
            "can't be told without them."
        )
    if useless:
        return "constant", (
            f"The pairs don't help this probe: its bound, {at.bound.value:.3g}, is hardly lower than that of "
            f"always answering {answer} ({at.constant_error:.3g}). --select bound chooses by the bound."
        )
    if min(gain.value, at.fewer_flips) < least and unchanged and least_bound:
        return "no-gain", (
            f"The pairs don't help: no rank that was tried has a lower bound than {before:.3g}, with nothing "
            "removed."
        )
    if min(gain.value, at.fewer_flips) < least:
        return "no-gain", (
            f"The pairs don't help: the bound went from {before:.3g} with nothing removed to "
            f"{at.bound.value:.3g}, the {what} from {at.erm_flip_rate.value:.3g} to {at.flip_rate.value:.3g}."
        )
    if gain.low <= 0:
        return "undecided", (
            f"It can't be told whether the pairs help: the bound fell by {gain.value:.3g}, 95 % interval "
            f"{gain.low:.3g} to {gain.high:.3g}."
        )
    return "helps", (
        f"The pairs help: {what} fell from {at.erm_flip_rate.value:.3g} to {at.flip_rate.value:.3g}, "
        f"validation {word} went from {at.erm_val_error.value:.3g} to {at.val_error.value:.3g}, and the "
        f"bound fell by {gain.value:.3g} ({gain.low:.3g} to {gain.high:.3g})."
    )


def unmeasured(pairs: int, units: int, why: str, shift: str) -> Verdict:
    """The verdict where the bound can't be measured."""
    text = f"It can't be told whether the pairs help: {why}."
    return Verdict(code="unmeasured", text=text, about=_about(shift), pairs=pairs, units=units)


def _about(shift: str) -> str:
    return f"This is about rows that differ from training rows as {shift} do, and about no other shift."
