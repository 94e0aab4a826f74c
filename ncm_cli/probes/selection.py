"""Choosing rank, weight decay, group weights and rows together, with or without the test domain.

The 0-1 bound needs neither test rows nor groups: for any classifier,
``P(wrong on x_e+) <= P(wrong on its training-domain twin) + P(the two predictions differ)``, so validation
error plus the share of pairs whose prediction flips bounds the error on the test domain. Where pairs were
matched by label, their members' labels tell more: see `ncm_cli.probes.cells`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from ncm_cli.blocks import Array, Codes
from ncm_cli.errors import InputError
from ncm_cli.probes import metrics
from ncm_cli.probes.metrics import PairRows, Rows
from ncm_cli.probes.rules import REGRESSION_METRICS, RULES, SCORES, TIE_BREAKERS
from ncm_cli.solvers.training_set import Fit

Candidate = dict[str, Any]
"""A combination of settings with its known, finite metrics, as in the ``path`` of a result.

- ``rank``, ``weight_decay``, and whether it ``converged``.
- ``val_accuracy``, ``val_log_loss``, or ``val_mse``: on the validation rows; means over the folds for the
  rule ``bound``. ``worst_group``: the lowest accuracy (highest MSE) of a group of these rows.
- ``flip_rate``: share of the measured pairs whose members are predicted differently; ``bound_01`` is
  ``1 - val_accuracy + flip_rate``. For regression ``pair_mse``, the mean squared difference between the
  predictions for a pair's members, and ``bound_mse``, ``(sqrt(val_mse) + sqrt(pair_mse))^2``: by Minkowski's
  inequality the test domain's MSE is at most ``bound_mse``.
- With pairs of several stores: ``flip_rate_1`` ... (``pair_mse_1`` ...) of each store's pairs, while
  ``flip_rate`` is that of all pairs. The bounds have the sum of the stores' flip rates in its place (of the
  roots of their ``pair_mse``).
- ``log_loss_bound``: ``val_log_loss + L sqrt(mean |W delta|^2)`` over the measured pairs, L = 1 for two
  classes and sqrt(2) for more (softmax cross-entropy is sqrt(2)-Lipschitz in the logits). Not used to
  select: shrinking the weights drives it to log 2.
- For pairs matched by label: ``cell_error``, the mean of the label × domain cells' error rates on the pairs'
  members, each by the fold not trained on it, and the validation rows; ``worst_cell_error`` and
  ``cell_log_loss`` on the same rows; ``within_flip_rate``, the flip rate of random pairs within a cell: flips
  that domains don't explain. With pairs of other stores that were not matched: ``cell_bound``, cell error +
  the sum of these stores' flip rates.
- For augmented pairs whose rows have domains: ``across_flip_rate``, the flip rate of random pairs of one
  class from different domains; ``guarded_bound``, validation error + the larger of the two flip rates.
- ``upweighted``, ``pair_rows``: the `Variant`, if several are tried.
- ``test_accuracy`` or ``test_mse``: only with the rule ``oracle``.
"""

RANKED = ("val_accuracy", "val_log_loss", "val_mse", "worst_group", "test_accuracy", "test_mse")
"""The metrics that `score_path` gives a candidate, from validation and test rows."""


def best_candidate(candidates: Sequence[Candidate], rule: str, task: str) -> int:
    """The index of the best candidate; ties go to the lower validation loss, then the lower rank.

    Raises `InputError` if what the rule needs is not known (no validation rows, pairs, groups, test rows).
    """
    name, sign, _ = RULES[rule]
    if task == "regression":
        name, sign = REGRESSION_METRICS.get(name, name), 1
    elif rule == "bound":
        name = score_name(candidates[0], task)
    name = name.replace("val_worst", "worst")
    loss = TIE_BREAKERS.get(name, "val_log_loss" if task == "classification" else "val_mse")

    def key(index: int) -> tuple[float, float, int, int]:
        candidate = candidates[index]
        if name not in candidate:
            raise InputError(f"the rule {rule!r} needs {name}, which is not known here")
        # Accuracies are fractions of whole rows, so differences below 1e-12 are rounding errors.
        return round(sign * candidate[name], 12), candidate.get(loss, np.inf), candidate["rank"], index

    return min(range(len(candidates)), key=key)


def score_name(known: Container[str], task: str = "classification") -> str:
    """The metric that the rule ``bound`` uses, given the names of the known ones."""
    if task == "regression":
        return REGRESSION_METRICS[RULES["bound"].metric]
    return next((name for name in SCORES if name in known), RULES["bound"].metric)


def stacked(fits: Sequence[Fit]) -> tuple[Array, Array]:
    """Weights (R, C, d) and biases (R, C)."""
    return np.stack([fit.weight for fit in fits]), np.stack([fit.bias for fit in fits])


def row_facts(weight: Array, bias: Array, name: str, rows: Rows) -> dict[str, Array]:
    """Metrics of R probes on rows, (R,) each: ``NAME_accuracy`` and ``NAME_log_loss``, or ``NAME_mse``.

    With groups also ``NAME_worst_group``; with several crossings ``NAME_worst_group_1`` ... for each.
    """
    errors, losses = metrics.row_errors(weight, bias, rows)
    mean, regression = errors.mean(axis=1), rows.y.dtype.kind == "f"
    row_metrics = {f"{name}_mse": mean}
    if not regression:
        row_metrics = {f"{name}_accuracy": 1 - mean, f"{name}_log_loss": losses.mean(axis=1)}
    groups = [] if rows.group is None else [rows.group]
    if rows.group is not None and rows.group.ndim == 2 and rows.group.shape[1] > 1:
        groups += [*rows.group.T]
    for number, codes in enumerate(groups):
        worst = worst_group_error(errors, codes)
        row_metrics[f"{name}_worst_group" + (f"_{number}" if number else "")] = (
            worst if regression else 1 - worst
        )
    return row_metrics


def pair_facts(
    error: Array,
    loss: Array,
    change: Array,
    shift: Array,
    n_logits: int,
    by_store: Sequence[tuple[Array, Array]] = (),
) -> dict[str, Array]:
    """Flip rates and bounds of classifiers, elementwise, under the names in `Candidate`.

    ``change`` and ``shift`` are means over all pairs; ``by_store`` has the means of each of several stores.
    """
    added = by_store or [(change, shift)]
    lipschitz = 1.0 if n_logits == 1 else np.sqrt(2.0)
    return {
        "flip_rate": change,
        **{store_metric("flip_rate", at): flips for at, (flips, _) in enumerate(by_store)},
        "bound_01": error + sum(flips for flips, _ in added),
        "log_loss_bound": loss + lipschitz * sum(np.sqrt(shifts) for _, shifts in added),
    }


def store_metric(name: str, at: int) -> str:
    """The name of a metric of one store's pairs, by the store's position."""
    return f"{name}_{at + 1}"


def means_of_kinds(values: Array, kind: Codes | None) -> list[Array]:
    """Means (R,) of values (R, m) over the pairs of each store, by ``kind`` (m,); none if that is None."""
    return [] if kind is None else [values[:, kind == code].mean(axis=1) for code in np.unique(kind)]


def cell_facts(errors: Array, losses: Array, cell: Codes) -> dict[str, Array]:
    """Cell errors and log losses from errors and losses (R, q) of rows, under the names in `Candidate`."""
    parts = [cell == code for code in np.unique(cell)]
    by_cell, loss_by_cell = (
        np.stack([values[:, part].mean(axis=1) for part in parts]) for values in (errors, losses)
    )
    return {
        "cell_error": by_cell.mean(axis=0),
        "worst_cell_error": by_cell.max(axis=0),
        "cell_log_loss": loss_by_cell.mean(axis=0),
    }


def cell_bound_facts(cell_error: Array, flips: Sequence[Array], matched: Sequence[bool]) -> dict[str, Array]:
    """``cell_bound`` from the flip rates (..., R) of several stores; else, or if all are matched, empty."""
    others = [values for values, by_label in zip(flips, matched, strict=False) if not by_label]
    return {"cell_bound": cell_error + sum(others)} if others else {}


def facts(
    weight: Array,
    bias: Array,
    *,
    val: Rows | None = None,
    test: Rows | None = None,
    pairs: PairRows | None = None,
    kind: Codes | None = None,
) -> dict[str, Array]:
    """Metrics of R probes on rows and pairs that they weren't trained on, (R,) by name.

    ``kind`` (m,) has the store of each pair if there are several.
    """
    measured: dict[str, Array] = {}
    for name, rows in (("val", val), ("test", test)):
        if rows is not None:
            measured |= row_facts(weight, bias, name, rows)
    if pairs is not None:
        changes, shifts = metrics.pair_shifts(weight, bias, pairs, regression=False)
        error, loss = 1 - measured["val_accuracy"], measured["val_log_loss"]
        by_store = list(zip(*(means_of_kinds(values, kind) for values in (changes, shifts)), strict=True))
        means = (changes.mean(axis=1), shifts.mean(axis=1))
        measured |= pair_facts(error, loss, *means, weight.shape[1], by_store)
    return measured


def score_path(fits: Sequence[Fit], *, val: Rows | None = None, test: Rows | None = None) -> list[Candidate]:
    """Every fit with its metrics on validation rows and (oracle only) test rows, in order."""
    measured = facts(*stacked(fits), val=val, test=test)
    measured = {name.replace("val_worst", "worst"): values for name, values in measured.items()}
    return candidates_of(fits, {name: measured[name] for name in RANKED if name in measured})


def candidates_of(fits: Sequence[Fit], facts: dict[str, Array]) -> list[Candidate]:
    """A candidate for each fit, with facts (R,) by name, rounded to 15 digits."""
    return [
        {"rank": fit.rank, "weight_decay": fit.weight_decay, "converged": fit.converged}
        | {name: round(float(values[i]), 15) for name, values in facts.items() if np.isfinite(values[i])}
        for i, fit in enumerate(fits)
    ]


def worst_group_error(errors: Array, group: Codes) -> Array:
    """(R,) the highest group mean of errors (R, n); ``group`` is (n,) or (n, crossings), −1 for no group."""
    codes = group if group.ndim == 2 else group[:, None]
    parts = [(codes == code).any(axis=1) for code in np.unique(codes[codes >= 0])]
    return np.max([errors[:, part].mean(axis=1) for part in parts], axis=0)
