"""Deep feature reweighting: the last layer retrained on group-balanced rows (Kirichenko et al. 2023).

It is the variant on validation rows (DFR^Val_Tr, section 4), as in the authors' ``dfr_evaluate_spurious.py``:
random subsets are drawn in which every group has as many rows as the smallest group, a logistic regression
with an ℓ1 penalty, which liblinear puts on the intercept too, is fitted on each subset, and weights and
intercepts are averaged.

C is chosen on one half of the validation rows, by a fit on one subset of the other half with features
standardised by that subset. The final probe is the mean of fits with that C on `SUBSETS` subsets of
all validation rows, standardised by the training rows. Differences from the authors' code change the test
rows' worst-group accuracy by less than .005: the halves are drawn group by group, so that none lacks a group;
liblinear's tolerance is 1e-8 (theirs, 1e-4, leaves weights up to 1e-2 off); more than two classes are fitted
one against the rest.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Codes, Features, blocks
from ncm_cli.errors import InputError
from ncm_cli.solvers.batches import generator_of
from ncm_cli.solvers.training_set import Fit

SUBSETS = 20
"""Balanced subsets that are averaged in the final probe, as in the authors' code."""

SPLIT_STREAM, DRAW_STREAM = 10, 11
"""Streams of random numbers for a seed; the trainer uses 0 to 4."""

LIBLINEAR_TOLERANCE, LIBLINEAR_MAX_ITER = 1e-8, 1000
"""With these, weights are within about 1e-6 of the solution after some 30 iterations."""


def halves(groups: Codes, seed: int) -> tuple[Codes, Codes]:
    """Two random halves of the rows, split group by group: one to fit on, and one to choose C on.

    Raises `InputError` for a group with one row only.
    """
    generator = generator_of(seed, SPLIT_STREAM)
    fit: list[Codes] = []
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        if len(rows) < 2:
            raise InputError(
                "dfr needs two validation rows of every group",
                found=f"a group with {len(rows)}",
                fix="coarser --groups, or leave dfr out",
            )
        order = torch.randperm(len(rows), generator=generator).numpy()
        fit.append(rows[order[: (len(rows) + 1) // 2]])
    chosen = np.sort(np.concatenate(fit))
    return chosen, np.setdiff1d(np.arange(len(groups)), chosen)


def fit_dfr(
    X: NDArray[np.floating],
    y: Codes,
    groups: Codes,
    n_classes: int,
    Cs: Sequence[float],
    *,
    seed: int,
    subsets: int = SUBSETS,
    scale_by: Features | None = None,
) -> list[Fit]:
    """Retrain on validation rows ``X`` (n, d) for every C: C · Σ loss + ‖w‖₁ + |b| on standardised features.

    Parameters
    ----------
    subsets
        Number of balanced subsets that are drawn and averaged.
    scale_by
        (m, d) rows by which features are standardised; None: each subset by itself.

    Raises
    ------
    InputError
        A balanced subset lacks a class, as it may if the groups don't depend on the labels.
    """
    from sklearn.preprocessing import StandardScaler

    X = np.asarray(X, np.float64)
    common = None
    if scale_by is not None:
        common = StandardScaler()
        for _, rows in blocks(scale_by):
            common.partial_fit(rows)
    fits: list[list[Fit]] = [[] for _ in Cs]
    for rows in _subsets(groups, seed, subsets):
        if len(np.unique(y[rows])) < n_classes:
            raise InputError(
                "a balanced subset of the validation rows lacks a class",
                fix="--groups with the label among its columns, or leave dfr out",
            )
        scaler = common or StandardScaler().fit(X[rows])
        for C, of_subsets in zip(Cs, fits, strict=True):
            of_subsets.append(_solve(X[rows], y[rows], n_classes, C, scaler))
    return [
        dataclasses.replace(
            of_subsets[0],
            weight=np.mean([fit.weight for fit in of_subsets], axis=0),
            bias=np.mean([fit.bias for fit in of_subsets], axis=0),
            converged=all(fit.converged for fit in of_subsets),
            iterations=max(fit.iterations for fit in of_subsets),
        )
        for of_subsets in fits
    ]


def _subsets(groups: Codes, seed: int, count: int) -> Codes:
    """(count, G·n_min) positions: from each group as many random rows as the smallest has."""
    generator = generator_of(seed, DRAW_STREAM)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    smallest = min(len(rows) for rows in members)

    def draw(rows: Codes) -> Codes:
        return rows[torch.randperm(len(rows), generator=generator).numpy()[:smallest]]

    return np.stack([np.concatenate([draw(rows) for rows in members]) for _ in range(count)])


def _solve(X: Array, y: Codes, n_classes: int, C: float, scaler: Any) -> Fit:
    """One fit on standardised rows: the positive class against the other, or each against the rest."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # scikit-learn 1.8 renamed the parameter for ℓ1.
    old = LogisticRegression().get_params()["penalty"] == "l2"
    l1: dict[str, Any] = {"penalty": "l1"} if old else {"l1_ratio": 1.0}
    model = LogisticRegression(
        solver="liblinear", C=C, tol=LIBLINEAR_TOLERANCE, max_iter=LIBLINEAR_MAX_ITER, random_state=0, **l1
    )
    weights, biases, iterations = [], [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # ``converged`` reports it
        for positive in (1,) if n_classes == 2 else range(n_classes):
            model.fit(scaler.transform(X), y == positive)
            weights.append(model.coef_[0])
            biases.append(model.intercept_[0])
            iterations = max(iterations, int(model.n_iter_.max()))
    weight = np.stack(weights) / scaler.scale_
    bias = np.stack(biases) - weight @ scaler.mean_
    return Fit(0, 0.0, weight, bias, converged=iterations < LIBLINEAR_MAX_ITER, iterations=iterations)
