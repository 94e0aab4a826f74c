"""Choosing rank and weight decay together, with or without the test domain, and what the choice is worth.

The 0-1 bound needs neither test rows nor groups: for any classifier,
``P(wrong on x_e+) <= P(wrong on its training-domain twin) + P(the two predictions differ)``, so validation
error plus the share of pairs whose prediction flips bounds the error on the test domain.

A flip rate on rows that were trained on is no estimate: features that interpolate flip none of them. So a
candidate is fitted once for each fold of the pairs, on neither its pairs (in the basis) nor the rows of its
members (in training), and every measured pair counts once. Its validation error is the mean over the folds.
Estimates of such parts are cross-fitted (Chernozhukov et al. 2018, section 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.probes import metrics
from ncm_cli.probes.metrics import Z95, PairRows, Rows, wilson
from ncm_cli.probes.projection import components

if TYPE_CHECKING:  # scipy is slow to import, and ncm info reads results by these rules
    from ncm_cli.probes.path import Fit

Array = NDArray[np.float64]
Codes = NDArray[np.int64]
Mask = NDArray[np.bool_]

HANGS_TOGETHER = 2.0
"""A set of connected pairs of more than this many folds' share is divided by rows instead."""

FEWEST = 32
"""Below this many independent pairs neither directions nor flips can be told from chance."""

SELDOM = 0.05
"""A flip rate below this leaves little to gain."""

HARDLY = 0.01
"""A gain of the error bound below this, one answer in a hundred, is none that anybody would notice."""

HARDLY_SHARE = 0.05
"""For regression, the same as a share of the bound at rank 0."""

VERDICTS = {
    "helps": "The pairs help",
    "no-gain": "The pairs don't help",
    "constant": "The pairs don't help",
    **dict.fromkeys(("too-few", "undecided", "unmeasured"), "It can't be told whether the pairs help"),
}
"""What each code of a verdict says."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """One part of k pairs to measure, and what is left to fit on."""

    measured: Mask
    """(k,) pairs whose members are compared."""
    basis: Mask
    """(k,) pairs that may span the basis: they share no row with the measured ones."""
    apart: Codes
    """(u,) the nodes of the rows that may not be trained on."""


def deal(a: Codes, b: Codes, count: int, seed: int) -> list[Fold]:
    """Cut k pairs into at most ``count`` folds of about the same number of pairs.

    ``a`` and ``b`` (k,) are the nodes of their members; rows with the same content are one node. Pairs that
    share a row, directly or through others, stay together. Where so many hang together that they would be
    most of the pairs, their rows are dealt instead: a pair with both rows in one part is measured with it,
    one across two parts is never measured, and spans the basis of the folds that have neither row.

    Raises `InputError` for fewer than two sets of pairs that share no row.
    """
    rng = np.random.default_rng(seed)
    together = components(a, b)
    sizes = np.bincount(together)
    nodes, ends = np.unique(np.concatenate([a, b]), return_inverse=True)
    end_a, end_b = ends.reshape(2, -1)
    part_of = np.zeros(len(nodes), dtype=np.int64)
    load = np.zeros(count)
    large = sizes > HANGS_TOGETHER / count * len(a)
    for number in rng.permutation(len(sizes)):
        own = np.unique(np.concatenate([end_a[together == number], end_b[together == number]]))
        if large[number] and len(own) > 2 * count:
            part_of[own[rng.permutation(len(own))]] = np.arange(len(own)) % count
        else:
            part_of[own] = int(load.argmin())
            load[part_of[own[0]]] += sizes[number]
    part_a, part_b = part_of[end_a], part_of[end_b]
    folds = []
    for part in range(count):
        measured = (part_a == part) & (part_b == part)
        if measured.any():
            folds.append(Fold(measured, (part_a != part) & (part_b != part), nodes[part_of == part]))
    if len(folds) < 2 or not all(fold.basis.any() for fold in folds):
        raise InputError(
            "too few pairs to be cut into folds",
            found=f"{len(a):,} pairs in {len(sizes):,} sets that share no row",
            expected="two or more pairs that share no row",
            fix="more pairs, or one --rank and one --weight-decay, so that there is nothing to choose",
        )
    return folds


def set_aside(a: Codes, b: Codes, held_out: Mask) -> list[Fold]:
    """One fold of the pairs that a user holds out; pairs that share a row with them leave the basis.

    Raises `InputError` where none is left.
    """
    apart = np.unique(np.concatenate([a[held_out], b[held_out]]))
    basis = ~(np.isin(a, apart) | np.isin(b, apart))
    if not basis.any():
        raise InputError(
            "every pair shares a row with the held-out pairs, so none is left for the basis",
            found=f"{len(a):,} pairs, {int(held_out.sum()):,} held out",
            fix="hold out pairs of other rows, or none: ncm pairs --holdout 0",
        )
    return [Fold(held_out, basis, apart)]


def units(a: Codes, b: Codes, folds: Sequence[Fold]) -> Codes:
    """(m,) a number for each measured pair, fold by fold: equal for pairs that hang together there."""
    found: list[Codes] = []
    start = 0
    for fold in folds:
        own = components(a[fold.measured], b[fold.measured]) + start
        start = int(own.max()) + 1
        found.append(own)
    return np.concatenate(found)


Candidate = dict[str, Any]
"""One setting and what is finite and known of it, as in the ``path`` of a result.

- ``rank``, ``weight_decay``, and whether it ``converged``.
- ``val_accuracy``, ``val_log_loss``, or ``val_mse``: on the validation rows; for the rule ``bound`` means
  over the folds. ``worst_group``: lowest accuracy among their groups (highest MSE).
- ``flip_rate``: share of the measured pairs whose members are predicted differently; ``bound_01`` is
  ``1 - val_accuracy + flip_rate``. For regression ``pair_mse``, the mean squared difference between the
  predictions for a pair's members, and ``bound_mse``, ``(sqrt(val_mse) + sqrt(pair_mse))^2``: by Minkowski's
  inequality the test domain's MSE is at most that.
- ``log_loss_bound``: ``val_log_loss + L sqrt(mean |W delta|^2)`` over the measured pairs, L = 1 for two
  classes and sqrt(2) for more (softmax cross-entropy is sqrt(2)-Lipschitz in the logits). Not used to
  select: shrinking the weights drives it to log 2.
- ``test_accuracy`` or ``test_mse``: only known to the oracle.
"""

RANKED = ("val_accuracy", "val_log_loss", "val_mse", "worst_group", "test_accuracy", "test_mse")
"""What rows say of a candidate."""


class Rule(NamedTuple):
    """What a selection rule looks at, and whether the least (1) or the greatest (-1) is best."""

    metric: str
    sign: int
    missing: str
    """Why it isn't known, where it isn't."""

    @property
    def oracle(self) -> bool:
        """Whether it looks at test rows."""
        return self.metric.startswith("test")


RULES: dict[str, Rule] = {
    "in-domain": Rule("val_accuracy", -1, "there are no validation rows"),
    "worst-group": Rule("val_worst_group", -1, "there are no --groups"),
    "bound": Rule("bound_01", 1, "there are no --pairs"),
    "oracle": Rule("test_accuracy", -1, "there are no --test rows"),
    "oracle-worst-group": Rule("test_worst_group", -1, "there are no --test rows with --groups"),
}
SQUARED = {"val_accuracy": "val_mse", "bound_01": "bound_mse", "test_accuracy": "test_mse"}
"""What rules look at for regression, where the least is always best."""


def choose(candidates: Sequence[Candidate], rule: str, task: str) -> int:
    """The index of the best candidate; ties go to the lower validation loss, then the lower rank.

    Raises `InputError` where what the rule needs is not known (no validation rows, pairs, groups, test rows).
    """
    name, sign, _ = RULES[rule]
    if task == "regression":
        name, sign = SQUARED.get(name, name), 1
    name = name.replace("val_worst", "worst")
    loss = "val_log_loss" if task == "classification" else "val_mse"

    def key(index: int) -> tuple[float, float, int, int]:
        candidate = candidates[index]
        if name not in candidate:
            raise InputError(f"the rule {rule!r} needs {name}, which is not known here")
        # Accuracies are shares of counts: differences below 1e-12 are rounding of sums, not of rows.
        return round(sign * candidate[name], 12), candidate.get(loss, np.inf), candidate["rank"], index

    return min(range(len(candidates)), key=key)


def stacked(fits: Sequence[Fit]) -> tuple[Array, Array]:
    """Weights (R, C, d) and biases (R, C)."""
    return np.stack([fit.weight for fit in fits]), np.stack([fit.bias for fit in fits])


def row_facts(weight: Array, bias: Array, name: str, rows: Rows) -> dict[str, Array]:
    """What rows say of R probes, (R,) each: ``NAME_accuracy`` and ``NAME_log_loss``, or ``NAME_mse``.

    With groups also ``NAME_worst_group``, and of each of several crossings ``NAME_worst_group_1`` ...
    """
    errors, losses = metrics.row_errors(weight, bias, rows)
    mean, regression = errors.mean(axis=1), rows.y.dtype.kind == "f"
    found = {f"{name}_mse": mean}
    if not regression:
        found = {f"{name}_accuracy": 1 - mean, f"{name}_log_loss": losses.mean(axis=1)}
    groups = [] if rows.group is None else [rows.group]
    if rows.group is not None and rows.group.ndim == 2 and rows.group.shape[1] > 1:
        groups += [*rows.group.T]
    for number, own in enumerate(groups):
        worst = worst_group_error(errors, own)
        found[f"{name}_worst_group" + (f"_{number}" if number else "")] = worst if regression else 1 - worst
    return found


def pair_facts(error: Array, loss: Array, change: Array, shift: Array, n_logits: int) -> dict[str, Array]:
    """Flip rate and bounds of classifiers by the names of `Candidate`, elementwise."""
    return {
        "flip_rate": change,
        "bound_01": error + change,
        "log_loss_bound": loss + (1.0 if n_logits == 1 else np.sqrt(2.0)) * np.sqrt(shift),
    }


def facts(
    weight: Array,
    bias: Array,
    *,
    val: Rows | None = None,
    test: Rows | None = None,
    pairs: PairRows | None = None,
) -> dict[str, Array]:
    """What rows and pairs that R probes weren't trained on say of them, (R,) by name."""
    found: dict[str, Array] = {}
    for name, rows in (("val", val), ("test", test)):
        if rows is not None:
            found |= row_facts(weight, bias, name, rows)
    if pairs is not None:
        changes, shifts = metrics.pair_shifts(weight, bias, pairs, regression=False)
        error, loss = 1 - found["val_accuracy"], found["val_log_loss"]
        found |= pair_facts(error, loss, changes.mean(axis=1), shifts.mean(axis=1), weight.shape[1])
    return found


def score_path(fits: Sequence[Fit], *, val: Rows | None = None, test: Rows | None = None) -> list[Candidate]:
    """What validation rows and (oracle only) test rows say of every fit, in its order."""
    known = facts(*stacked(fits), val=val, test=test)
    known = {name.replace("val_worst", "worst"): values for name, values in known.items()}
    return _candidates(fits, {name: known[name] for name in RANKED if name in known})


def _candidates(fits: Sequence[Fit], facts: dict[str, Array]) -> list[Candidate]:
    """A candidate for each fit, with facts (R,) by name; rounding of shares is taken off at 1e-15."""
    return [
        {"rank": fit.rank, "weight_decay": fit.weight_decay, "converged": fit.converged}
        | {name: round(float(own[i]), 15) for name, own in facts.items() if np.isfinite(own[i])}
        for i, fit in enumerate(fits)
    ]


def worst_group_error(errors: Array, group: Codes) -> Array:
    """(R,) the highest mean among the groups of rows, (n,) or (n, crossings); −1 is no group."""
    codes = group if group.ndim == 2 else group[:, None]
    parts = [(codes == code).any(axis=1) for code in np.unique(codes[codes >= 0])]
    return np.max([errors[:, part].mean(axis=1) for part in parts], axis=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CrossFit:
    """R candidates over all folds."""

    candidates: tuple[Candidate, ...]
    errors: Array | None
    """(R, n) mean over the folds of each validation row's error (or squared error)."""
    changes: Array
    """(R, m) of each measured pair: 1 where its members are predicted differently, or the squared change."""
    unit: Codes
    """(m,) a number for the pairs that hang together by a row: they count as one in the intervals."""
    regression: bool

    @classmethod
    def join(
        cls, folds: Iterable[tuple[Sequence[Fit], Rows | None, PairRows]], unit: Codes, *, regression: bool
    ) -> CrossFit:
        """Judge each fold's R probes by the validation rows and its pairs, and put the folds together."""
        paths, by_rows, by_pairs = [], [], []
        for fits, val, pairs in folds:
            probes = stacked(fits)
            paths.append(fits)
            by_pairs.append(metrics.pair_shifts(*probes, pairs, regression=regression))
            if val is not None:
                own, losses = metrics.row_errors(*probes, val)
                by_rows.append((own, losses.mean(axis=1)))
        changes, shifts = (np.concatenate(parts, axis=1) for parts in zip(*by_pairs, strict=True))
        facts, errors = {"pair_mse" if regression else "flip_rate": changes.mean(axis=1)}, None
        if by_rows:
            errors, loss = (np.mean(parts, axis=0) for parts in zip(*by_rows, strict=True))
            error, change = errors.mean(axis=1), changes.mean(axis=1)
            if regression:
                facts |= {"val_mse": error, "bound_mse": (np.sqrt(error) + np.sqrt(change)) ** 2}
            else:
                facts |= {"val_accuracy": 1 - error, "val_log_loss": loss}
                facts |= pair_facts(error, loss, change, shifts.mean(axis=1), len(paths[0][0].bias))
        fits = [
            dataclasses.replace(same[0], converged=all(fit.converged for fit in same))
            for same in zip(*paths, strict=True)
        ]
        candidates = tuple(_candidates(fits, facts))
        return cls(candidates=candidates, errors=errors, changes=changes, unit=unit, regression=regression)

    @property
    def pairs(self) -> int:
        """m, the measured pairs."""
        return len(self.unit)

    @property
    def units(self) -> int:
        """Sets of measured pairs that share no row with others."""
        return len(np.unique(self.unit))

    def best(self, rank: int) -> int:
        """The candidate of this rank with the least bound."""
        own = [index for index, candidate in enumerate(self.candidates) if candidate["rank"] == rank]
        task = "regression" if self.regression else "classification"
        return own[choose([self.candidates[index] for index in own], "bound", task)]

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

    def error(self, index: int) -> Estimate:
        """Validation error of a candidate with its interval."""
        assert self.errors is not None
        return error_estimate(self.errors[index], regression=self.regression)

    def bound(self, index: int) -> Estimate:
        """Their sum (for MSEs, of the roots) with its interval: distances to the ends, squared and added.

        Zou and Donner (2008), Construction of confidence limits about effect measures, Statistics in
        Medicine 27 (MOVER).
        """
        parts = np.array([dataclasses.astuple(part) for part in (self.error(index), self.change(index))])
        if self.regression:
            parts = np.sqrt(np.maximum(parts, 0))
        value, low, high = parts.T
        ends = [
            value.sum(),
            max(float(value.sum() - np.hypot(*(value - low))), 0.0),
            value.sum() + np.hypot(*(high - value)),
        ]
        return Estimate(*(float(end**2 if self.regression else end) for end in ends))

    def gain(self, index: int, other: int) -> Estimate:
        """How much lower one candidate's bound is than another's, paired on the same rows and pairs.

        First order: the interval is the normal one of the rows' and the units' paired differences.
        """
        assert self.errors is not None
        (by_error, by_change), (own_by_error, own_by_change) = self._slopes(other), self._slopes(index)
        rows = by_error * self.errors[other] - own_by_error * self.errors[index]
        pairs = by_change * self.changes[other] - own_by_change * self.changes[index]
        spread = np.hypot(_clustered_error(rows, np.arange(len(rows))), _clustered_error(pairs, self.unit))
        return _normal(self.bound(other).value - self.bound(index).value, float(spread))

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the pairs helped, in words, from validation rows and pairs only.

    Attributes
    ----------
    code
        ``helps``; ``no-gain``: the bound is hardly lower than ERM's; ``constant``: no better than always the
        same answer; ``too-few``: too few independent pairs; ``undecided``: the interval is wider than the
        gain; ``unmeasured``: no validation rows, or pairs that can't be divided into folds.
    text
        The same in a sentence, with flip rate and validation accuracy at rank 0 and now.
    reasons
        Why they don't, or may not, help, as far as the path tells; in ``text`` too.
    about
        Which shift it is about.
    bound, erm_bound
        With their intervals, of the pick and of rank 0.
    gain
        How much lower the pick's bound is than ERM's, paired.
    """

    code: str
    text: str
    reasons: tuple[str, ...]
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
    unlike: tuple[int, int] = (0, 0),
    by_bound: str = "--select bound",
) -> Verdict:
    """The verdict on candidate ``pick`` beside candidate ``erm``, which removes nothing.

    ``constant`` is the validation error (or MSE) of always the same ``answer``, which no shift can change,
    and ``shift`` what the pairs differ in, in words. ``least_bound``: the pick was chosen as the least bound
    of all ranks, so that what it doesn't reach no rank does. ``one_answer``: it tells all rows the same.
    ``unlike`` are how many pairs have members of different labels, and of how many. ``by_bound`` is the
    option that chooses by the bound.
    """
    if found.errors is None or constant is None:
        return unmeasured(found.pairs, found.units, "no validation rows", shift)
    bound, erm_bound = found.bound(pick), found.bound(erm)
    flips, erm_flips = found.change(pick), found.change(erm)
    error, erm_error = found.error(pick), found.error(erm)
    gain = found.gain(pick, erm)
    regression, alone = found.regression, found.units == found.pairs
    hardly, least = (HARDLY_SHARE * of if regression else HARDLY for of in (constant, erm_bound.value))
    # Probes of folds that are nearly constant come out a hair below the constant itself.
    useless = one_answer or bound.value > constant - hardly
    # What remains of the gain without validation error is the pairs' own part.
    idle = min(gain.value, gain.value - (erm_error.value - error.value)) < least
    word = "MSE" if regression else "error"
    always = f"always answering {answer} ({word} {constant:.3g})"
    if found.units < FEWEST:
        sets = f"{'' if alone else f'{found.units} sets of '}{found.pairs} pairs that share no row"
        code, why = "too-few", f"{sets}, where {FEWEST} are needed"
        why += f"; the bound is no lower than that of {always}" * (bound.value >= constant)
    elif useless and least_bound:
        code, why = "constant", f"no rank that was tried beats {always}"
    elif useless:
        code, why = "constant", f"this probe's bound, {bound}, is hardly lower than that of {always}"
        why += f": {by_bound} chooses by the bound"
    elif idle and pick == erm:
        code, why = "no-gain", "no rank that was tried has a lower bound" if least_bound else ""
    elif idle:
        code, why = "no-gain", ""
    elif gain.low <= 0:
        code, why = "undecided", f"if they do, the bound falls by at most {gain.high:.2g}"
    else:
        code, why = "helps", ""
    reasons = () if code == "helps" else _reasons(found, erm, code, unlike, whole_path=least_bound)
    text = f"{VERDICTS[code]}: {'; '.join(filter(None, (why, _change(found, pick, erm), *reasons)))}."
    return dataclasses.replace(
        unmeasured(found.pairs, found.units, "", shift),
        code=code,
        text=text,
        reasons=reasons,
        bound=bound,
        erm_bound=erm_bound,
        flip_rate=flips,
        erm_flip_rate=erm_flips,
        val_error=error,
        erm_val_error=erm_error,
        gain=gain,
        constant_error=constant,
    )


def _measured(found: CrossFit, index: int) -> tuple[str, str]:
    """Flip rate and validation accuracy of a candidate, or what regression has for them, in words."""
    what, val = ("mean squared change", "MSE") if found.regression else ("flip rate", "accuracy")
    error = found.error(index).value
    right = error if found.regression else 1 - error
    return f"{what} {found.change(index)}", f"validation {val} {right:.3g}"


def _change(found: CrossFit, pick: int, erm: int) -> str:
    """From rank 0 to the pick, in words."""
    flips, right = _measured(found, erm)
    now, still = (part.rsplit(" ", 1)[1] for part in _measured(found, pick))
    if pick == erm:
        return f"{flips} and {right} with nothing removed"
    gain, rank = found.gain(pick, erm), found.candidates[pick]["rank"]
    bound = f"bound {found.bound(erm)}, now {found.bound(pick)}"
    change = f"95 % of the change: {0 - gain.high:+.2g} to {0 - gain.low:+.2g}"
    return f"{flips} with nothing removed, {now} with rank {rank}; {right}, now {still}; {bound} ({change})"


def _reasons(
    found: CrossFit, erm: int, code: str, unlike: tuple[int, int], *, whole_path: bool
) -> tuple[str, ...]:
    """Why the pairs don't help; with ``whole_path`` the candidates are of every rank that was tried."""
    flips, reasons = found.changes.mean(axis=1), []
    fewest = int(flips.argmin())
    at = f"least {', '.join(_measured(found, fewest))}, at rank {found.candidates[fewest]['rank']}"
    if code == "constant" and whole_path:
        reasons.append("what they differ in tells the label, too, or the label can't be told without it")
    elif code == "no-gain" and not found.regression and flips[erm] < SELDOM:
        reasons.append("a probe with nothing removed seldom flips them: it hardly uses what they differ in")
    elif code == "no-gain" and whole_path and flips[fewest] > flips[erm] / 2:
        reasons.append(f"no rank helps much ({at}): what one pair differs in, the others hardly show")
    elif code == "no-gain" and whole_path:
        reasons.append(f"fewer flips cost too much ({at}): what they differ in tells the label, too")
    if unlike[0]:
        reasons.append("the members of {:,} of {:,} pairs have different labels".format(*unlike))
    return tuple(reasons)


def unmeasured(pairs: int, units: int, why: str, shift: str) -> Verdict:
    """The verdict where the bound can't be measured."""
    return Verdict(
        code="unmeasured",
        text=f"{VERDICTS['unmeasured']}: {why}.",
        reasons=(),
        about=f"This is about rows that differ from training rows as {shift} do, and about no other shift.",
        pairs=pairs,
        units=units,
    )
