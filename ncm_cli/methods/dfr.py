"""Deep feature reweighting: the last layer retrained on group-balanced rows (Kirichenko et al. 2023).

Uses the *validation* rows and their group labels for training (DFR^Val_Tr, section 4): standardised features,
ℓ1-regularised logistic regression on several random subsets in which every group has as many rows as the
smallest, and the average of their weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncm_cli.errors import InputError
from ncm_cli.methods.batches import generator_of

Array = NDArray[np.float64]
Codes = NDArray[np.int64]

SUBSETS = 10
"""Balanced subsets that are averaged, as in the authors' code."""

SPLIT, DRAW = 10, 11
"""Streams of random numbers of one seed (0 to 2 are the trainer's)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DfrFit:
    """One averaged probe."""

    l1: float
    weight: Array
    """(C, d), on the given features."""
    bias: Array
    """(C,)."""
    converged: bool
    """Whether every subset's fit reached the tolerance."""


def halves(groups: Codes, seed: int) -> tuple[Codes, Codes]:
    """Two random halves of the rows, group by group: where to fit, and where to choose the penalty.

    Raises
    ------
    InputError
        A group with one row only.
    """
    generator = generator_of(seed, SPLIT)
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
    l1s: Sequence[float],
    *,
    seed: int,
    tolerance: float = 1e-4,
    max_iter: int = 2000,
    advance: Callable[[int], None] | None = None,
) -> list[DfrFit]:
    """Retrain on ``X`` for every ℓ1 weight at once.

    The objective of each subset is mean loss + l1·‖W‖₁ on standardised features, the bias free
    (scikit-learn's ``LogisticRegression(penalty="l1")`` with C = 1/(n·l1)).

    Parameters
    ----------
    X
        (n, d) validation rows.
    tolerance
        Largest entry of the proximal gradient at which a fit counts as converged (liblinear's default).
    advance
        Called once with the number of fits.
    """
    X = np.asarray(X, np.float64)
    mean, deviation = X.mean(0), X.std(0)
    scale = np.where(deviation > 1e-7 * np.abs(mean), deviation, 1.0)
    rows = torch.from_numpy(_subsets(groups, seed))
    design = torch.ones(*rows.shape, X.shape[1] + 1, dtype=torch.float64)
    design[..., :-1] = torch.from_numpy((X - mean) / scale)[rows]
    codes = torch.from_numpy(np.asarray(y, np.int64))[rows]
    hot = codes[..., None] if n_classes == 2 else torch.nn.functional.one_hot(codes, n_classes)
    weights, converged = _fista(
        design, hot.to(torch.float64), torch.tensor(l1s, dtype=torch.float64), tolerance, max_iter
    )
    average = weights.mean(0).numpy()
    if advance:
        advance(len(l1s))
    folded = average[..., :-1] / scale
    bias = average[..., -1] - folded @ mean
    return [
        DfrFit(l1=l1, weight=folded[j], bias=bias[j], converged=bool(converged[:, j].all()))
        for j, l1 in enumerate(l1s)
    ]


def _subsets(groups: Codes, seed: int) -> Codes:
    """(S, G·n_min) positions: as many random rows of every group as the smallest has."""
    generator = generator_of(seed, DRAW)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    smallest = min(len(rows) for rows in members)
    return np.stack(
        [
            np.concatenate(
                [rows[torch.randperm(len(rows), generator=generator).numpy()[:smallest]] for rows in members]
            )
            for _ in range(SUBSETS)
        ]
    )


def _fista(
    design: Tensor, targets: Tensor, l1s: Tensor, tolerance: float, max_iter: int
) -> tuple[Tensor, Tensor]:
    """Accelerated proximal gradient (Beck and Teboulle 2009) with O'Donoghue and Candès's restart.

    Parameters
    ----------
    design
        (S, n, d + 1), the last column 1.
    targets
        (S, n, C) 0 or 1.
    l1s
        (J,).

    Returns
    -------
    tuple
        (S, J, C, d + 1) weights and (S, J) whether each reached the tolerance.
    """
    subsets, n, width = design.shape
    count, logits = len(l1s), targets.shape[-1]
    # The logistic loss has curvature at most 1/4 in the logit, softmax cross-entropy at most 1/2.
    curvature = 0.25 if logits == 1 else 0.5
    lipschitz = curvature * torch.linalg.matrix_norm(design, ord=2) ** 2 / n
    step = (1 / lipschitz)[:, None, None, None]
    threshold = step * l1s[None, :, None, None]
    result = torch.zeros(subsets, count, logits, width, dtype=design.dtype)
    converged = torch.zeros(subsets, count, dtype=torch.bool)
    # Large penalties finish early: the products then go on without them.
    active = torch.arange(count)
    weight = result.clone()
    ahead, momentum = weight.clone(), torch.ones(subsets, count, dtype=design.dtype)
    for iteration in range(max_iter):
        gradient = _gradient(design, targets, ahead)
        moved = ahead - step * gradient
        shrunk = moved[..., :-1]
        shrunk = shrunk.sign() * (shrunk.abs() - threshold[:, active]).clamp_min_(0)
        new = torch.cat([shrunk, moved[..., -1:]], -1)
        done = ((new - ahead).abs() / step).amax((2, 3)) <= tolerance if iteration % 10 == 9 else None
        restart = ((ahead - new) * (new - weight)).sum((2, 3)) > 0
        following = (1 + (1 + 4 * momentum**2).sqrt()) / 2
        pull = torch.where(restart, 0.0, (momentum - 1) / following)[..., None, None]
        ahead = new + pull * (new - weight)
        momentum = torch.where(restart, 1.0, following)
        weight = new
        if done is not None:
            result[:, active], converged[:, active] = weight, done
            going = ~done.all(0)
            if not bool(going.any()):
                break
            active, weight, ahead, momentum = (
                active[going],
                weight[:, going],
                ahead[:, going],
                momentum[:, going],
            )
    return result, converged


def _gradient(design: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the mean loss, shaped like ``weight`` (S, J, C, d + 1)."""
    subsets, n, width = design.shape
    logits = targets.shape[-1]
    z = torch.bmm(design, weight.reshape(subsets, -1, width).mT).view(subsets, n, -1, logits)
    p = z.sigmoid() if logits == 1 else z.softmax(-1)
    residual = (p - targets[:, :, None]).view(subsets, n, -1) / n
    return torch.bmm(residual.mT, design).view(weight.shape)
