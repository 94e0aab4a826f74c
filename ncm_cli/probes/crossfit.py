"""Cross-fitted scores of candidates, with intervals: each fold of the pairs scores fits made without it.

A flip rate on pairs whose members were trained on is no estimate: a probe that interpolates its training rows
flips none of these pairs. So a candidate is fitted once for each fold of the pairs: the fold's pairs don't
span the basis, their members aren't trained on, and every measured pair counts once. The candidate's
validation error is the mean over the folds. Such estimates are called cross-fitted (Chernozhukov et al. 2018,
section 1).

Four scores are made from these measurements, see `ncm_cli.probes.rules.SCORES`: the bound; the bound with the
flips of random pairs across domains; the error on held-out rows with every label × domain cell weighted
equally; and the sum of that error and the flip rate of pairs that weren't matched by label. The flip rates of
several stores are added, however many pairs each has, so that a score bounds the error where all of their
shifts occur at once.
"""

from __future__ import annotations

import dataclasses
import functools
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
    cell_bound_facts,
    cell_facts,
    means_of_kinds,
    pair_facts,
    score_name,
    stacked,
    store_metric,
)
from ncm_cli.solvers.training_set import Fit

LEAST_STANDARD_ERRORS = 0.5
"""Removing directions must lower the cell error by at least this many paired standard errors."""

SHARED = {
    *("rank", "weight_decay", "converged", "upweighted", "pair_rows"),
    *("val_accuracy", "val_log_loss", "val_mse"),
}
"""The settings and metrics of a candidate that are the same for the pairs of every store."""


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
    """Labelled rows that the fold isn't trained on, with their cells as groups (n, 1)."""
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
    kind: Codes | None = None
    """(m,) the position of each measured pair's store; None for one store."""
    matched: tuple[bool, ...] = ()
    """For each of several stores, whether its pairs were matched by label."""
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
    row_constant: Scored | None = None
    """The error of always giving the same answer on the validation rows; None without them."""
    random: Array | None = None
    """(R, b) for each random pair: 1 if its members are predicted differently. If pairs were matched, both
    members are from one cell. If pairs are augmented, both are of one class but from different domains, and
    these flips count in the score."""

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
        kind: Codes | None = None,
        matched: tuple[bool, ...] = (),
    ) -> CrossFit:
        """Score each fold's R probes on the validation rows, its pairs and their members, and join the folds.

        ``val_cell`` (n,) has the cells of the validation rows, −1 if unknown; ``answer`` is the constant's
        answer, a class code or a value; ``shares`` (classes,), ``kind`` (m,) and ``matched`` are as in the
        class.
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
        name = "pair_mse" if regression else "flip_rate"
        by_store = means_of_kinds(changes, kind)
        facts = {name: changes.mean(axis=1)}
        facts |= {store_metric(name, at): values for at, values in enumerate(by_store)}
        added = by_store or [changes.mean(axis=1)]
        errors = losses = cell_row_errors = cell = truth = constant = row_constant = random = None
        if val is not None:
            missed = (val.y - answer) ** 2 if regression else (val.y != answer).astype(np.float64)
            constant = row_constant = Scored(float(missed.mean()), {"rows": missed})
        if by_rows:
            errors, losses = (np.mean(parts, axis=0) for parts in zip(*by_rows, strict=True))
            error, loss, change = errors.mean(axis=1), losses.mean(axis=1), changes.mean(axis=1)
            if regression:
                facts |= {"val_mse": error, "bound_mse": (np.sqrt(error) + sum(map(np.sqrt, added))) ** 2}
            else:
                facts |= {"val_accuracy": 1 - error, "val_log_loss": loss}
                shift = shifts.mean(axis=1)
                store_means = list(zip(by_store, means_of_kinds(shifts, kind), strict=True))
                facts |= pair_facts(error, loss, change, shift, len(paths[0][0].bias), store_means)
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
            facts |= cell_bound_facts(facts["cell_error"], by_store, matched)
            missed = (truth != answer).astype(np.float64)
            every_cell = cell_facts(missed[None], missed[None], cell)["cell_error"]
            constant = Scored(float(every_cell[0]), {"cells": missed})
        if by_random and sum(part.shape[1] for part in by_random):
            random = np.concatenate(by_random, axis=1)
            flips = random.mean(axis=1)
            if cell_row_errors is not None:
                facts["within_flip_rate"] = flips
            elif errors is not None:
                guarded = errors.mean(axis=1) + np.maximum(flips, sum(added))
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
            kind=kind,
            matched=matched,
            cell_row_errors=cell_row_errors,
            constant=constant,
            row_constant=row_constant,
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
        """m, the number of measured pairs."""
        return len(self.unit)

    @property
    def units(self) -> int:
        """The number of sets of measured pairs that share no row with other sets."""
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

        If cells are weighted equally, the best candidate of rank 0 is kept unless the least score is lower
        by more than `LEAST_STANDARD_ERRORS` standard errors.
        """
        if len({round(self.candidates[index][self.score], 12) for index in among}) == 1:
            smallest = min(self.candidates[index]["rank"] for index in among)
            among = [index for index in among if self.candidates[index]["rank"] == smallest]
        least = among[best_candidate([self.candidates[index] for index in among], "bound", self.task)]
        kept = [index for index in among if self.candidates[index]["rank"] == 0]
        if self.cell is None or not kept or self.candidates[least]["rank"] == 0:
            return least
        unprojected = kept[best_candidate([self.candidates[index] for index in kept], "bound", self.task)]
        gain = self.gain(least, unprojected)
        return least if gain.value > LEAST_STANDARD_ERRORS * (gain.high - gain.value) / Z95 else unprojected

    def of_store(self, at: int) -> CrossFit:
        """The same candidates on the pairs of one of several stores alone.

        Their score is the error with every cell weighted equally if these pairs were matched by label, else
        the bound.
        """
        assert self.kind is not None
        in_store, by_label = self.kind == at, self.matched[at] and self.cell is not None
        name, kept = "pair_mse" if self.regression else "flip_rate", SHARED
        if by_label:
            kept = kept | {"cell_error", "worst_cell_error", "cell_log_loss", "within_flip_rate"}
        candidates = []
        for candidate in self.candidates:
            change = candidate[store_metric(name, at)]
            facts = {key: value for key, value in candidate.items() if key in kept} | {name: change}
            if "val_mse" in facts:
                facts["bound_mse"] = (np.sqrt(facts["val_mse"]) + np.sqrt(change)) ** 2
            elif "val_accuracy" in facts:
                facts["bound_01"] = 1 - facts["val_accuracy"] + change
            candidates.append(facts)
        one_store = dataclasses.replace(
            self, candidates=tuple(candidates), changes=self.changes[:, in_store], unit=self.unit[in_store]
        )
        one_store = dataclasses.replace(one_store, kind=None, matched=())
        if by_label:
            return one_store
        return dataclasses.replace(
            one_store, constant=self.row_constant, cell_row_errors=None, cell=None, truth=None, random=None
        )

    def change(self, index: int, at: int | None = None) -> Estimate:
        """Flip rate (or mean squared change) of a candidate with its interval; ``at``: on that store's pairs.

        Wilson's interval at the effective sample size (Kish's: the number of pairs over the design effect of
        their units; Korn and Graubard 1998).
        """
        values, unit = self.changes[index][self._in_store(at)], self.unit[self._in_store(at)]
        mean, error = float(values.mean()), _clustered_error(values, unit)
        if self.regression:
            return _normal(mean, error)
        effective_n = float(len(np.unique(unit)))
        if 0 < mean < 1:
            effective_n = min(len(unit), mean * (1 - mean) / error**2) if error > 0 else float(len(unit))
        return Estimate(mean, *wilson(mean * effective_n, effective_n))

    def random_change(self, index: int) -> Estimate | None:
        """Flip rate of the random pairs with its interval; None without them."""
        return None if self.random is None else error_estimate(self.random[index], regression=False)

    def error(self, index: int) -> Estimate:
        """Validation error of a candidate with its interval."""
        assert self.errors is not None
        return error_estimate(self.errors[index], regression=self.regression)

    def bound(self, index: int) -> Estimate:
        """The sum of validation error and flip rates with its interval.

        For regression, the square of the sum of their roots. The distances from the terms to the ends of
        their intervals are squared and added: Zou and Donner (2008), Construction of confidence limits about
        effect measures, Statistics in Medicine 27 (MOVER).
        """
        return self._sum(self.error(index), *(self.change(index, at) for at in self._stores))

    def changes_of_all(self, index: int) -> Estimate:
        """The sum of the stores' flip rates with its interval; for squared changes as in `bound`."""
        return (
            self.change(index)
            if self.kind is None
            else self._sum(*(self.change(index, at) for at in self._stores))
        )

    @property
    def _stores(self) -> Sequence[int | None]:
        """The stores by their positions; None alone stands for the pairs of a single one."""
        return [None] if self.kind is None else range(len(self.matched))

    @property
    def _counted(self) -> list[int | None]:
        """The stores whose pairs' flips are part of the score."""
        if self.kind is None:
            return [None] if self.cell is None else []
        return [at for at, by_label in enumerate(self.matched) if self.cell is None or not by_label]

    def _in_store(self, at: int | None) -> Any:
        """The measured pairs of a store, as an index of (m,)."""
        return slice(None) if at is None else self.kind == at

    def _sum(self, *terms: Estimate) -> Estimate:
        parts = np.array([dataclasses.astuple(term) for term in terms])
        if self.regression:
            parts = np.sqrt(np.maximum(parts, 0))
        value, low, high = parts.T
        ends = [
            value.sum(),
            max(float(value.sum() - functools.reduce(np.hypot, value - low)), 0.0),
            value.sum() + functools.reduce(np.hypot, high - value),
        ]
        # An error rate can't exceed 1.
        return Estimate(*(float(end**2 if self.regression else min(end, 1.0)) for end in ends))

    def estimate(self, index: int) -> Estimate:
        """A candidate's score with its interval."""
        if self.cell_row_errors is not None:
            flips = [self.change(index, at) for at in self._counted]
            return self._sum(self.cell_error(index), *flips) if flips else self.cell_error(index)
        random_flips = self.random_change(index)
        if random_flips is not None and random_flips.value > self.changes_of_all(index).value:
            return self._sum(self.error(index), random_flips)
        return self.bound(index)

    def cell_error(self, index: int) -> Estimate:
        """Mean of the cells' error rates, with Wilson's interval for the effective number of rows."""
        assert self.cell_row_errors is not None and self.cell is not None
        value, errors = float(self.candidates[index]["cell_error"]), self.cell_row_errors[index]
        spread, effective_n = self._stratified_error(errors), self._effective_n
        # If errors don't vary within any cell, `_effective_n` is the effective number.
        if spread > 0:
            effective_n = min(float(len(errors)), value * (1 - value) / spread**2)
        return Estimate(value, *wilson(value * effective_n, effective_n))

    @property
    def _effective_n(self) -> float:
        """The effective number of rows if all cells had the same error rate."""
        assert self.cell is not None
        sizes = np.unique(self.cell, return_counts=True)[1]
        return len(sizes) ** 2 / float((1 / sizes).sum())

    @property
    def undetected_limit(self) -> float:
        """Upper end of the 95 % Wilson interval for how often two candidates differ on new pairs (or rows) if
        they agree on all measured ones; for several stores, the sum of these."""
        numbers = [] if self.cell is None else [self._effective_n]
        numbers += [len(np.unique(self.unit[self._in_store(at)])) for at in self._counted]
        return sum(wilson(0, n)[1] for n in numbers)

    def _stratified_error(self, values: Array) -> float:
        """Standard error of the mean over cells of the means of values (q,)."""
        assert self.cell is not None
        parts = [values[self.cell == code] for code in np.unique(self.cell)]
        return float(np.sqrt(sum(part.var() / max(len(part) - 1, 1) for part in parts)) / len(parts))

    def scored(self, index: int) -> Scored:
        """A candidate's score with its parts."""
        value = float(self.candidates[index][self.score])
        changes = {_pairs_of(at): self.changes[index][self._in_store(at)] for at in self._counted}
        if self.cell_row_errors is not None:
            return Scored(value, {"cells": self.cell_row_errors[index], **changes})
        assert self.errors is not None
        if self.random is not None and self.random[index].mean() > sum(
            part.mean() for part in changes.values()
        ):
            return Scored(value, {"rows": self.errors[index], "random": self.random[index]})
        parts = {"rows": self.errors[index], **changes}
        if self.regression:
            means = {name: max(float(part.mean()), 1e-300) for name, part in parts.items()}
            for name, own_mean in means.items():  # times the derivative of the score
                others = (mean for other, mean in means.items() if other != name)
                parts[name] = (1 + sum(float(np.sqrt(mean / own_mean)) for mean in others)) * parts[name]
        return Scored(value, parts)

    def gain(self, index: int, other: int | Scored) -> Estimate:
        """How much lower one candidate's score is than another's, paired on the same rows and pairs.

        The interval is the normal one, with the first-order standard error of the paired differences of rows
        and of units.
        """
        this, that = self.scored(index), other if isinstance(other, Scored) else self.scored(other)
        spread = 0.0
        for name in {*this.parts, *that.parts}:
            difference: Array = np.asarray(that.parts.get(name, 0.0) - this.parts.get(name, np.float64(0.0)))
            if name == "cells":
                error = self._stratified_error(difference)
            else:
                error = _clustered_error(difference, self._unit_of(name, len(difference)))
            spread = float(np.hypot(spread, error))
        return _normal(that.value - this.value, spread)

    def _unit_of(self, part: str, n: int) -> Codes:
        """(n,) a number for each value of a part of a score: equal for values that aren't independent."""
        if not part.startswith("pairs"):
            return np.arange(n)
        at = part.removeprefix("pairs")
        return self.unit[self._in_store(int(at) if at else None)]

    def frequent_gain(self, index: int, other: int) -> Estimate | None:
        """How much lower one candidate's score is than another's, if classes are as frequent as in training
        and domains equally frequent within a class; None without cells."""
        if self.cell_row_errors is None or self.cell is None or self.truth is None or self.shares is None:
            return None
        difference = self.cell_row_errors[other] - self.cell_row_errors[index]
        parts = [(self.cell == code) for code in np.unique(self.cell)]
        labels = np.array([self.truth[part][0] for part in parts])
        weights = self.shares[labels] / np.bincount(labels, minlength=len(self.shares))[labels]
        weights /= weights.sum()
        means = np.array([difference[part].mean() for part in parts])
        spread = [difference[part].var() / max(int(part.sum()) - 1, 1) for part in parts]
        value, error = float(weights @ means), float(np.sqrt(weights**2 @ np.array(spread)))
        for at in self._counted:
            flips, in_store = self.changes[other] - self.changes[index], self._in_store(at)
            value += float(flips[in_store].mean())
            error = float(np.hypot(error, _clustered_error(flips[in_store], self.unit[in_store])))
        return _normal(value, error)


def _pairs_of(at: int | None) -> str:
    """The name of the part of a score that comes from a store's pairs."""
    return "pairs" if at is None else f"pairs{at}"


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
