"""Hessians of logistic regressions as preconditioners that serve every rank of a path.

With the columns of the design in the order [bias, complement, basis reversed], dropping a direction drops the
last column. The Cholesky factor of a leading block is the leading block of the factor, so one factor L gives
``H_r^-1 g = L^-T mask(L^-1 g)`` for every rank r.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import scipy.linalg
import scipy.special
from numpy.typing import NDArray

Array = NDArray[np.float64]

SHARED_COLUMNS = 4000
"""Above this many columns only the Hessian's diagonal is used: a factor would not pay."""

JOINT_COLUMNS = 2500
"""Up to this many columns times classes the Hessian of all classes together is factored."""

ROW_BLOCK = 4096
"""Rows whose weighted copy is made at a time for a Hessian."""

BLOCK_SCORES = 1 << 18
"""Scores that are worked on at a time: 2 MB, so that what is made of them stays in the cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """What the problems of a path share.

    Attributes
    ----------
    A : float64 (n, p)
        Column 0 is ones (the bias, unpenalised); the others are centred.
    targets : bool (n, C)
        C = 1 for two classes.
    weights : float64 (n,)
        Of the rows, mean 1.
    """

    A: Array
    targets: NDArray[np.bool_]
    weights: Array


def row_blocks(rows: int, scores: int) -> Iterator[slice]:
    """All rows in blocks of few enough for `BLOCK_SCORES`, where a row has so many scores."""
    step = max(1, BLOCK_SCORES // scores)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def probabilities(scores: Array) -> Array:
    """Sigmoid of scores (..., 1), or softmax over the last axis of scores (..., C)."""
    if scores.shape[-1] == 1:
        return np.asarray(scipy.special.expit(scores))
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


class Preconditioner:
    """Approximate Hessians, one for each weight decay.

    - Two classes, or few columns and classes: the exact Hessian where it was taken.
    - More of them: each class has the curvature ``(1 - sum p^2) / (C - 1)``, the mean eigenvalue of
      ``diag(p) - p p^T`` off its null space.
    - Very many columns: that curvature's diagonal.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        p, C = data.A.shape[1], data.targets.shape[1]
        self._joined = C > 1 and p * C <= JOINT_COLUMNS
        self._take: Callable[[Array], Array] = self._shared
        if self._joined:
            self._take = self._joint
        elif p > SHARED_COLUMNS:
            self._take = self._diagonal
        self._factors: dict[float, Array] = {}

    @property
    def cost(self) -> float:
        """What taking the curvature costs, in iterations of a single problem's arithmetic."""
        p, C = self._data.A.shape[1], self._data.targets.shape[1]
        if self._joined:
            return p * C * (C + 1) / 8
        return p / 4 if p <= SHARED_COLUMNS else 1.0

    def update(self, decays: Sequence[float], scores: Array | None) -> None:
        """Take the curvature at ``scores`` (n, C), or at zero coefficients, for these weight decays."""
        # At zero coefficients all rows are alike.
        curvature = self._take(np.zeros((1, self._data.targets.shape[1])) if scores is None else scores)
        unpenalised = self._data.targets.shape[1] if self._joined else 1
        for decay in decays:
            self._factors[decay] = _factor(curvature, decay, unpenalised)

    def apply(self, G: Array, decays: Array, mask: Array) -> Array:
        """Inverse approximate Hessians times gradients G (p, R, C); ``mask`` (p, R, 1) cuts the ranks."""
        out = np.empty_like(G)
        for decay in np.unique(decays):
            own = np.flatnonzero(decays == decay)
            out[:, own] = _solve(self._factors[float(decay)], G[:, own], mask[:, own], joint=self._joined)
        return out

    def _diagonal(self, scores: Array) -> Array:
        weights = np.broadcast_to(self._spread(scores), len(self._data.A))
        return np.einsum("np,np,n->p", self._data.A, self._data.A, weights / len(weights))

    def _shared(self, scores: Array) -> Array:
        return self._gram(self._spread(scores))

    def _joint(self, scores: Array) -> Array:
        """Rows and columns by column of the design, and within it by class."""
        C, p = scores.shape[1], self._data.A.shape[1]
        prob = probabilities(scores)
        full = np.empty((p, C, p, C))
        for c in range(C):
            full[:, c, :, c] = self._gram(prob[:, c] * (1 - prob[:, c]))
            for other in range(c):
                full[:, c, :, other] = full[:, other, :, c] = -self._gram(prob[:, c] * prob[:, other])
        # Adding a constant to all classes changes nothing, so that curvature is 0 there; gradients have no
        # part in it, and any positive number makes the matrix invertible.
        full[np.arange(p), :, np.arange(p), :] += np.einsum("pcpc->", full) / (p * C * C)
        return full.reshape(p * C, p * C)

    def _spread(self, scores: Array) -> Array:
        n, C = scores.shape
        spread = np.empty(n)
        for rows in row_blocks(n, C):
            prob = probabilities(scores[rows])
            spread[rows] = (prob * (1 - prob))[:, 0] if C == 1 else (1 - (prob * prob).sum(axis=1)) / (C - 1)
        return spread

    def _gram(self, rows: Array) -> Array:
        """``A^T diag(weights * rows) A / n``."""
        A = self._data.A
        roots = np.sqrt(np.maximum(rows, 0.0) * self._data.weights / len(A))
        total = np.zeros((A.shape[1], A.shape[1]))
        for start in range(0, len(A), ROW_BLOCK):
            block = A[start : start + ROW_BLOCK] * roots[start : start + ROW_BLOCK, None]
            total += block.T @ block
        return total


def _factor(curvature: Array, decay: float, unpenalised: int) -> Array:
    """Lower Cholesky factor of curvature plus weight decay; for a diagonal (p,), their sum."""
    diagonal = curvature if curvature.ndim == 1 else np.diagonal(curvature)
    # Flat directions (constant columns, weight decay 0) need some curvature to have an inverse.
    jitter = 1e-12 * max(float(diagonal.max()), 1e-100)
    added = np.full(len(diagonal), decay)
    added[:unpenalised] = 0.0
    if curvature.ndim == 1:
        return curvature + added + jitter
    while True:
        try:
            return np.asfortranarray(np.linalg.cholesky(curvature + np.diag(added + jitter)))
        except np.linalg.LinAlgError:
            jitter *= 100


def _solve(factor: Array, G: Array, mask: Array, *, joint: bool) -> Array:
    p, R, C = G.shape
    if factor.ndim == 1:
        return G / factor[:p, None, None] * mask
    if joint:
        flat, cut = G.transpose(0, 2, 1).reshape(p * C, R), np.repeat(mask[:, :, 0], C, axis=0)
    else:
        flat, cut = G.reshape(p, R * C), np.repeat(mask[:, :, 0], C, axis=1)
    lower = factor[: len(flat), : len(flat)]
    half = scipy.linalg.solve_triangular(lower, flat, lower=True, check_finite=False) * cut
    full = scipy.linalg.solve_triangular(lower, half, lower=True, trans="T", check_finite=False)
    return full.reshape(p, C, R).transpose(0, 2, 1) if joint else full.reshape(p, R, C)
