"""Folds of pairs for cross-fitting: what is measured is never what was fitted on.

A flip rate on rows that were trained on is no estimate: features that interpolate flip none of them. So for
each fold neither its pairs (in the basis) nor the rows of its members (in training) are used, and its flips
are those of a probe that has seen neither.

Choosing rank and weight decay together, with or without the test domain.

The 0-1 bound needs neither test rows nor groups: for any classifier,
``P(wrong on x_e+) <= P(wrong on its training-domain twin) + P(the two predictions differ)``, so validation
error plus the share of pairs whose prediction flips bounds the error on the test domain. Both are measured on
folds (`ncm_cli.probes.selection`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.pairs.matching import components
from ncm_cli.probes import metrics
from ncm_cli.probes.metrics import Rows
from ncm_cli.probes.path import Fit

Codes = NDArray[np.int64]
Mask = NDArray[np.bool_]

HANGS_TOGETHER = 2.0
"""A set of connected pairs of more than this many folds' share is divided by rows instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fold:
    """One part of the pairs to measure, and what is left to fit on.

    Attributes
    ----------
    measured : bool (k,)
        Pairs whose members are compared.
    basis : bool (k,)
        Pairs that may span the basis: they share no row with the measured ones.
    apart : int64 (u,)
        The nodes of the rows that may not be trained on.
    """

    measured: Mask
    basis: Mask
    apart: Codes


def deal(a: Codes, b: Codes, count: int, seed: int) -> list[Fold]:
    """Cut k pairs into at most ``count`` folds of about the same number of pairs.

    Pairs that share a row, directly or through others, stay together. Where so many hang together that they
    would be most of the pairs, their rows are dealt instead: a pair with both rows in one part is measured
    with it, one across two parts is never measured, and spans the basis of the folds that have neither row.

    Parameters
    ----------
    a, b
        (k,) the node of each pair's members; rows with the same content are one node.

    Raises
    ------
    InputError
        Fewer than two sets of pairs that share no row.
    """
    rng = np.random.default_rng(seed)
    together = components(a, b)
    sizes = np.bincount(together)
    nodes = np.unique(np.concatenate([a, b]))
    part_of = np.zeros(len(nodes), dtype=np.int64)
    load = np.zeros(count)
    large = sizes > HANGS_TOGETHER / count * len(a)
    for number in rng.permutation(len(sizes)):
        own = np.searchsorted(
            nodes, np.unique(np.concatenate([a[together == number], b[together == number]]))
        )
        if large[number] and len(own) > 2 * count:
            part_of[own[rng.permutation(len(own))]] = np.arange(len(own)) % count
        else:
            part_of[own] = int(load.argmin())
            load[part_of[own[0]]] += sizes[number]
    part_a, part_b = part_of[np.searchsorted(nodes, a)], part_of[np.searchsorted(nodes, b)]
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

    Raises
    ------
    InputError
        No pair is left for the basis.
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


Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One setting and what is known of it; None where there were no rows or pairs to tell.

    Attributes
    ----------
    val_accuracy, val_log_loss
        On the validation rows; ``val_mse`` for regression. For the rule ``bound``, means over the folds.
    flip_rate
        Share of the measured pairs whose members are predicted differently.
    bound_01
        ``1 - val_accuracy + flip_rate``. For regression ``bound_mse``: ``(sqrt(val_mse) + sqrt(pair_mse))^2``
        with ``pair_mse`` the mean squared difference between the predictions for a pair's members: by
        Minkowski's inequality the test domain's MSE is at most that.
    log_loss_bound
        ``val_log_loss + L sqrt(mean |W delta|^2)`` over the measured pairs, L = 1 for two classes and sqrt(2)
        for more (softmax cross-entropy is sqrt(2)-Lipschitz in the logits). Not used to select: shrinking
        the weights drives it to log 2.
    worst_group
        Lowest accuracy among the validation rows' groups (highest MSE for regression).
    test_accuracy, test_mse
        Only known to the oracle.
    """

    rank: int
    weight_decay: float
    converged: bool
    val_accuracy: float | None = None
    val_log_loss: float | None = None
    flip_rate: float | None = None
    bound_01: float | None = None
    log_loss_bound: float | None = None
    worst_group: float | None = None
    test_accuracy: float | None = None
    val_mse: float | None = None
    pair_mse: float | None = None
    bound_mse: float | None = None
    test_mse: float | None = None


def bound_of(error: Array, change: Array, *, regression: bool) -> Array:
    """The bound on the test domain's error from validation error and change over pairs, elementwise.

    Error rates add up; mean squared errors do by their roots.
    """
    return np.asarray((np.sqrt(error) + np.sqrt(change)) ** 2 if regression else error + change)


def log_loss_bound(log_loss: Array, shift: Array, n_logits: int) -> Array:
    """``log_loss + L sqrt(shift)``, ``shift`` being the mean over pairs of ``|W delta|^2``."""
    return np.asarray(log_loss + (1.0 if n_logits == 1 else np.sqrt(2.0)) * np.sqrt(shift))


def stacked(fits: Sequence[Fit]) -> tuple[Array, Array]:
    """Weights (R, C, d) and biases (R, C)."""
    return np.stack([fit.weight for fit in fits]), np.stack([fit.bias for fit in fits])


def score_path(fits: Sequence[Fit], *, val: Rows | None = None, test: Rows | None = None) -> list[Candidate]:
    """What validation rows and (oracle only) test rows say of every fit, in its order."""
    weight, bias = stacked(fits)
    facts: dict[str, Array] = {}
    for name, rows in (("val", val), ("test", test)):
        if rows is None:
            continue
        regression = rows.y.dtype.kind == "f"
        errors, losses = metrics.row_errors(weight, bias, rows)
        mean = errors.mean(axis=1)
        facts[f"{name}_{'mse' if regression else 'accuracy'}"] = mean if regression else 1 - mean
        if name == "val":
            if not regression:
                facts["val_log_loss"] = losses.mean(axis=1)
            if rows.group is not None:
                worst = worst_group_error(errors, rows.group)
                facts["worst_group"] = worst if regression else 1 - worst
    return candidates_of(fits, facts)


def candidates_of(fits: Sequence[Fit], facts: dict[str, Array]) -> list[Candidate]:
    """A candidate for each fit, with facts (R,) by name; rounding of shares is taken off at 1e-15."""
    return [
        Candidate(
            rank=fit.rank,
            weight_decay=fit.weight_decay,
            converged=fit.converged,
            **{name: round(float(values[index]), 15) for name, values in facts.items()},
        )
        for index, fit in enumerate(fits)
    ]


def worst_group_error(errors: Array, group: Codes) -> Array:
    """(R,) the highest mean among the groups of rows, (n,) or (n, crossings); −1 is no group."""
    codes = group if group.ndim == 2 else group[:, None]
    parts = [(codes == code).any(axis=1) for code in np.unique(codes[codes >= 0])]
    return np.max([errors[:, part].mean(axis=1) for part in parts], axis=0)


RULES: dict[str, dict[str, tuple[str, int]]] = {
    "bound": {"classification": ("bound_01", 1), "regression": ("bound_mse", 1)},
    "in-domain": {"classification": ("val_accuracy", -1), "regression": ("val_mse", 1)},
    "worst-group": {"classification": ("worst_group", -1), "regression": ("worst_group", 1)},
    "oracle": {"classification": ("test_accuracy", -1), "regression": ("test_mse", 1)},
}
"""What each rule looks at, and whether the least (1) or the greatest (-1) is best."""


def choose(candidates: Sequence[Candidate], rule: str, task: str) -> int:
    """The index of the best candidate; ties go to the lower validation loss, then the lower rank.

    Raises
    ------
    InputError
        The rule's quantity is not known (no validation rows, pairs, groups or test rows).
    """
    name, sign = RULES[rule][task]
    loss = "val_log_loss" if task == "classification" else "val_mse"

    def key(index: int) -> tuple[float, float, int, int]:
        candidate = candidates[index]
        value = getattr(candidate, name)
        if value is None:
            raise InputError(f"the rule {rule!r} needs {name}, which is not known here")
        known = getattr(candidate, loss)
        # Accuracies are shares of counts: differences below 1e-12 are rounding of sums, not of rows.
        return round(sign * value, 12), np.inf if known is None else known, candidate.rank, index

    return min(range(len(candidates)), key=key)
