"""Cross-fitted scores of candidates, with intervals: each fold of the pairs scores fits made without it.

A flip rate on rows that were trained on is no estimate: features that interpolate flip none of them. So a
candidate is fitted once for each fold of the pairs, on neither its pairs (in the basis) nor the rows of its
members (in training), and every measured pair counts once. Its validation error is the mean over the folds.
Estimates of such parts are cross-fitted (Chernozhukov et al. 2018, section 1).

Three scores are made of these parts, see `ncm_cli.probes.rules.SCORES`: the bound, the same with the
flips of random pairs across domains, and the error on held-out rows with every label × domain cell weighted
equally.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ncm_cli.blocks import Array, Codes
from ncm_cli.probes import metrics
from ncm_cli.probes.metrics import Z95, PairRows, Rows, wilson
from ncm_cli.probes.selection import (
    Candidate,
    best_candidate,
    candidates_of,
    cell_facts,
    pair_facts,
    score_name,
    stacked,
)
from ncm_cli.solvers.training_set import Fit

LEAST_STANDARD_ERRORS = 0.5
"""Removing directions must lower the cell error by at least this many paired standard errors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g}"


class FoldRows(NamedTuple):
    """R probes fitted on a fold's training part, and the scaled rows and pairs that they are scored on."""

    fits: Sequence[Fit]
    val: Rows | None
    pairs: PairRows
    """The pairs that the fold measures."""
    members: Rows | None = None
    """Labelled rows that the fold isn't trained on, their cells as groups (n, 1)."""
    random: PairRows | None = None
    """Random pairs of such rows: see `ncm_cli.probes.cells.comparison_pairs`."""


class Scored(NamedTuple):
    """A score and its parts, with each row's or pair's contribution."""

    value: float
    parts: dict[str, Array]
    """(n,) by part. To first order the score is a constant plus the sum of the parts' means."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CrossFit:
    """R candidates over all folds."""

    candidates: tuple[Candidate, ...]
    errors: Array | None
    """(R, n) mean over the folds of each validation row's error (or squared error)."""
    changes: Array
    """(R, m) for each measured pair: 1 if its members are predicted differently, or the squared change."""
    unit: Codes
    """(m,) pairs connected by shared rows have the same number; they count as one in the intervals."""
    regression: bool
    cell_row_errors: Array | None = None
    """(R, q) errors on the labelled members of matched pairs, each by the fold not trained on it, and on the
    validation rows whose cell is known."""
    cell: Codes | None = None
    """(q,) the cells of these rows."""
    truth: Codes | None = None
    """(q,) their classes."""
    shares: Array | None = None
    """(classes,) the frequency of each class among the training rows."""
    constant: Scored | None = None
    """The score of always giving the same answer, which no shift changes; None without validation rows."""
    random: Array | None = None
    """(R, b) for each random pair: 1 if its members are predicted differently. For matched pairs both are
    from one cell; for augmented pairs of one class from different domains, and count in the score."""

    @classmethod
    def join(
        cls,
        folds: Iterable[FoldRows],
        unit: Codes,
        *,
        regression: bool,
        val_cell: Codes | None = None,
        answer: float = 0,
        shares: Array | None = None,
    ) -> CrossFit:
        """Score each fold's R probes on the validation rows, its pairs and their members, and join the folds.

        ``val_cell`` (n,) has the cells of the validation rows, −1 if unknown; ``answer`` is the constant's
        answer, a class code or a value; ``shares`` (classes,) is as in the class.
        """
        paths, by_rows, by_pairs, by_members, by_random, cells = [], [], [], [], [], []
        val: Rows | None = None
        truths = []
        for fold in folds:
            probes = stacked(fold.fits)
            paths.append(fold.fits)
            by_pairs.append(metrics.pair_shifts(*probes, fold.pairs, regression=regression))
            if (val := fold.val) is not None:
                by_rows.append(metrics.row_errors(*probes, val))
            if fold.members is not None and fold.members.group is not None:
                by_members.append(metrics.row_errors(*probes, fold.members))
                cells.append(fold.members.group[:, 0])
                truths.append(fold.members.y)
            if fold.random is not None:
                by_random.append(metrics.pair_shifts(*probes, fold.random, regression=regression)[0])
        changes, shifts = (np.concatenate(parts, axis=1) for parts in zip(*by_pairs, strict=True))
        facts = {"pair_mse" if regression else "flip_rate": changes.mean(axis=1)}
        errors = losses = cell_row_errors = cell = truth = constant = random = None
        if by_rows:
            errors, losses = (np.mean(parts, axis=0) for parts in zip(*by_rows, strict=True))
            error, loss, change = errors.mean(axis=1), losses.mean(axis=1), changes.mean(axis=1)
            if regression:
                facts |= {"val_mse": error, "bound_mse": (np.sqrt(error) + np.sqrt(change)) ** 2}
            else:
                facts |= {"val_accuracy": 1 - error, "val_log_loss": loss}
                facts |= pair_facts(error, loss, change, shifts.mean(axis=1), len(paths[0][0].bias))
        if by_members:
            if errors is not None and losses is not None and val is not None and val_cell is not None:
                known = val_cell >= 0
                by_members.append((errors[:, known], losses[:, known]))
                cells.append(val_cell[known])
                truths.append(val.y[known])
            cell_row_errors, cell_row_losses = (
                np.concatenate(part, axis=1) for part in zip(*by_members, strict=True)
            )
            cell, truth = np.concatenate(cells), np.concatenate(truths)
            facts |= cell_facts(cell_row_errors, cell_row_losses, cell)
            missed = (truth != answer).astype(np.float64)
            every_cell = cell_facts(missed[None], missed[None], cell)["cell_error"]
            constant = Scored(float(every_cell[0]), {"cells": missed})
        elif val is not None:
            missed = (val.y - answer) ** 2 if regression else (val.y != answer).astype(np.float64)
            constant = Scored(float(missed.mean()), {"rows": missed})
        if by_random and sum(part.shape[1] for part in by_random):
            random = np.concatenate(by_random, axis=1)
            flips = random.mean(axis=1)
            if cell_row_errors is not None:
                facts["within_flip_rate"] = flips
            elif errors is not None:
                guarded = errors.mean(axis=1) + np.maximum(flips, changes.mean(axis=1))
                facts |= {"across_flip_rate": flips, "guarded_bound": guarded}
        fits = [
            dataclasses.replace(same[0], converged=all(fit.converged for fit in same))
            for same in zip(*paths, strict=True)
        ]
        return cls(
            candidates=tuple(candidates_of(fits, facts)),
            errors=errors,
            changes=changes,
            unit=unit,
            regression=regression,
            cell_row_errors=cell_row_errors,
            constant=constant,
            cell=cell,
            truth=truth,
            shares=shares,
            random=random,
        )

    @classmethod
    def merged(cls, parts: Sequence[CrossFit]) -> CrossFit:
        """One `CrossFit` of the candidates of several, all measured on the same rows and pairs."""
        first = parts[0]

        def stack(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else np.concatenate(values)

        return dataclasses.replace(
            first,
            candidates=tuple(candidate for part in parts for candidate in part.candidates),
            **{name: stack(name) for name in ("errors", "changes", "cell_row_errors", "random")},
        )

    @property
    def pairs(self) -> int:
        """m, the measured pairs."""
        return len(self.unit)

    @property
    def units(self) -> int:
        """Sets of measured pairs that share no row with others."""
        return len(np.unique(self.unit))

    @property
    def task(self) -> str:
        """``regression`` or ``classification``."""
        return "regression" if self.regression else "classification"

    @property
    def score(self) -> str:
        """The name of the score that candidates are compared by."""
        return score_name(self.candidates[0], self.task)

    def best(self, rank: int | None = None, **setting: object) -> int:
        """The candidate with the least score, among those with this rank and these settings, if given."""
        wanted = setting if rank is None else {"rank": rank, **setting}
        matching = [
            index
            for index, candidate in enumerate(self.candidates)
            if all(candidate.get(name, False) == value for name, value in wanted.items())
        ]
        return matching[best_candidate([self.candidates[index] for index in matching], "bound", self.task)]

    def pick(self, among: Sequence[int]) -> int:
        """The candidate with the least score among some; if all scores are equal, one of the smallest rank.

        When cells are weighted equally, removing directions must pay: the best candidate of rank 0 is kept
        unless the least score is lower by more than `LEAST_STANDARD_ERRORS` standard errors.
        """
        if len({round(self.candidates[index][self.score], 12) for index in among}) == 1:
            smallest = min(self.candidates[index]["rank"] for index in among)
            among = [index for index in among if self.candidates[index]["rank"] == smallest]
        least = among[best_candidate([self.candidates[index] for index in among], "bound", self.task)]
        kept = [index for index in among if self.candidates[index]["rank"] == 0]
        if self.cell is None or not kept or self.candidates[least]["rank"] == 0:
            return least
        nothing = kept[best_candidate([self.candidates[index] for index in kept], "bound", self.task)]
        gain = self.gain(least, nothing)
        return least if gain.value > LEAST_STANDARD_ERRORS * (gain.high - gain.value) / Z95 else nothing

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

    def random_change(self, index: int) -> Estimate | None:
        """Flip rate of the random pairs with its interval; None without them."""
        return None if self.random is None else error_estimate(self.random[index], regression=False)

    def error(self, index: int) -> Estimate:
        """Validation error of a candidate with its interval."""
        assert self.errors is not None
        return error_estimate(self.errors[index], regression=self.regression)

    def bound(self, index: int) -> Estimate:
        """The sum of error and flip rate (for MSEs, of their roots) with its interval by squared distances.

        Zou and Donner (2008), Construction of confidence limits about effect measures, Statistics in
        Medicine 27 (MOVER).
        """
        return self._sum(self.error(index), self.change(index))

    def _sum(self, *terms: Estimate) -> Estimate:
        parts = np.array([dataclasses.astuple(term) for term in terms])
        if self.regression:
            parts = np.sqrt(np.maximum(parts, 0))
        value, low, high = parts.T
        ends = [
            value.sum(),
            max(float(value.sum() - np.hypot(*(value - low))), 0.0),
            value.sum() + np.hypot(*(high - value)),
        ]
        return Estimate(*(float(end**2 if self.regression else end) for end in ends))

    def estimate(self, index: int) -> Estimate:
        """A candidate's score with its interval."""
        if self.cell_row_errors is not None:
            return self.cell_error(index)
        across = self.random_change(index)
        if across is not None and across.value > self.change(index).value:
            return self._sum(self.error(index), across)
        return self.bound(index)

    def cell_error(self, index: int) -> Estimate:
        """Mean of the cells' error rates, with Wilson's interval for the effective number of rows."""
        assert self.cell_row_errors is not None and self.cell is not None
        value, errors = float(self.candidates[index]["cell_error"]), self.cell_row_errors[index]
        spread, worth = self._stratified_error(errors), self._worth
        # At 0 or 1, or without spread in any cell: the number if all cells had the same error rate.
        if spread > 0:
            worth = min(float(len(errors)), value * (1 - value) / spread**2)
        return Estimate(value, *wilson(value * worth, worth))

    @property
    def _worth(self) -> float:
        """The effective number of rows if all cells had the same error rate."""
        assert self.cell is not None
        sizes = np.unique(self.cell, return_counts=True)[1]
        return len(sizes) ** 2 / float((1 / sizes).sum())

    @property
    def undetected_limit(self) -> float:
        """Upper end of the 95 % Wilson interval for how often two candidates differ on new pairs (or rows) if
        they agree on all measured ones."""
        return wilson(0, self.units if self.cell is None else self._worth)[1]

    def _stratified_error(self, values: Array) -> float:
        """Standard error of the mean over cells of the means of values (q,)."""
        assert self.cell is not None
        parts = [values[self.cell == code] for code in np.unique(self.cell)]
        return float(np.sqrt(sum(part.var() / max(len(part) - 1, 1) for part in parts)) / len(parts))

    def scored(self, index: int) -> Scored:
        """A candidate's score with its parts."""
        value = float(self.candidates[index][self.score])
        if self.cell_row_errors is not None:
            return Scored(value, {"cells": self.cell_row_errors[index]})
        assert self.errors is not None
        if self.random is not None and self.random[index].mean() > self.changes[index].mean():
            return Scored(value, {"rows": self.errors[index], "random": self.random[index]})
        by_error, by_change = self._slopes(index)
        return Scored(
            value, {"rows": by_error * self.errors[index], "pairs": by_change * self.changes[index]}
        )

    def gain(self, index: int, other: int | Scored) -> Estimate:
        """How much lower one candidate's score is than another's, paired on the same rows and pairs.

        First order: the interval is the normal one of the rows' and the units' paired differences.
        """
        this, that = self.scored(index), other if isinstance(other, Scored) else self.scored(other)
        spread = 0.0
        for name in {*this.parts, *that.parts}:
            difference: Array = np.asarray(that.parts.get(name, 0.0) - this.parts.get(name, np.float64(0.0)))
            if name == "cells":
                error = self._stratified_error(difference)
            else:
                unit = self.unit if name == "pairs" else np.arange(len(difference))
                error = _clustered_error(difference, unit)
            spread = float(np.hypot(spread, error))
        return _normal(that.value - this.value, spread)

    def frequent_gain(self, index: int, other: int) -> Estimate | None:
        """How much lower one candidate's error on held-out rows is than another's, if classes are as frequent
        as in training and domains equally frequent within a class; None without cells."""
        if self.cell_row_errors is None or self.cell is None or self.truth is None or self.shares is None:
            return None
        difference = self.cell_row_errors[other] - self.cell_row_errors[index]
        parts = [(self.cell == code) for code in np.unique(self.cell)]
        labels = np.array([self.truth[part][0] for part in parts])
        weights = self.shares[labels] / np.bincount(labels, minlength=len(self.shares))[labels]
        weights /= weights.sum()
        means = np.array([difference[part].mean() for part in parts])
        spread = [difference[part].var() / max(int(part.sum()) - 1, 1) for part in parts]
        return _normal(float(weights @ means), float(np.sqrt(weights**2 @ np.array(spread))))

    def _slopes(self, index: int) -> tuple[float, float]:
        """Derivatives of the bound by validation error and by change."""
        if not self.regression or self.errors is None:
            return 1.0, 1.0
        a, b = (max(float(part[index].mean()), 1e-300) for part in (self.errors, self.changes))
        return 1 + float(np.sqrt(b / a)), 1 + float(np.sqrt(a / b))


def error_estimate(errors: Array, *, regression: bool) -> Estimate:
    """The mean of rows' errors (n,) with Wilson's interval, or of squared errors with the normal one."""
    mean, n = float(errors.mean()), len(errors)
    if regression:
        return _normal(mean, _clustered_error(errors, np.arange(n)))
    return Estimate(mean, *wilson(mean * n, n))


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
