"""Many regularised logistic regressions on leading columns of one design matrix, solved in lock-step.

All problems share the design A (n, p). Problem j sees its first ``sizes[j]`` columns (a rank path: each
rank drops the last columns) and has its own weight decay. Its objective, over coefficients B (p, C), is

    mean_i s_i loss(A_i B, y_i) + decay/2 * sum of squares of B, the bias's row 0 left out

with the logistic loss (C = 1) or softmax cross-entropy (C classes).

The method is L-BFGS preconditioned by the Hessian at a nearby solution. Two facts make a path cheap. The
Cholesky factor of the leading block of a matrix is the leading block of its factor, so one factorisation
serves every rank: ``H_r^-1 g = L^-T mask(L^-1 g)``. And scores are linear along a direction, so that a line
search needs no further product with A, and the products of all problems are one matrix product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.linalg
import scipy.special
from numpy.typing import NDArray

Array = NDArray[np.float64]

DENSE_COLUMNS = 4000
"""Above this many columns the preconditioner is the Hessian's diagonal: a factor would not pay."""

MEMORY = 10
"""Curvature pairs that L-BFGS keeps."""

ROW_BLOCK = 4096
"""Rows whose weighted copy is made at a time for a Hessian."""

FLAT_LINE = 0.3
"""A step is accepted when the slope along it is at most this share of the initial slope."""

LINE_STEPS = 30


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """What the problems share.

    Attributes
    ----------
    A : float64 (n, p)
        Column 0 is ones (the bias, unpenalised); the others are centred.
    targets : float64 (n, C)
        0 or 1; C = 1 for two classes.
    weights : float64 (n,)
        Of the rows, mean 1.
    """

    A: Array
    targets: Array
    weights: Array


@dataclasses.dataclass(slots=True)
class Solution:
    """Coefficients and how they were reached, for R problems.

    Attributes
    ----------
    B : float64 (p, R, C)
        Zero beyond each problem's columns.
    gradient_norm : float64 (R,)
        Euclidean norm of each objective's gradient.
    converged : bool (R,)
    iterations : int (R,)
    """

    B: Array
    gradient_norm: Array
    converged: NDArray[np.bool_]
    iterations: NDArray[np.int64]


def probabilities(scores: Array) -> Array:
    """Sigmoid of scores (n, R, 1), or softmax over the last axis of scores (n, R, C)."""
    if scores.shape[-1] == 1:
        return np.asarray(scipy.special.expit(scores))
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


class Preconditioner:
    """Approximate Hessians, one for each weight decay, that serve every rank.

    For two classes the curvature is exact at the point where it was taken. For C classes each class has the
    curvature ``(1 - sum p^2) / (C - 1)``, the mean eigenvalue of ``diag(p) - p p^T`` off its null space.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self._factors: dict[float, tuple[str, Array]] = {}

    def knows(self, decay: float) -> bool:
        """Whether a curvature has been taken for this weight decay."""
        return decay in self._factors

    def update(self, decays: Sequence[float], scores: Array | None) -> None:
        """Take the curvature at ``scores`` (n, C), or at zero coefficients, for these weight decays."""
        curvature = self._curvature(scores)
        for decay in decays:
            self._factors[decay] = _factor(curvature, decay)

    def _curvature(self, scores: Array | None) -> Array:
        A, C = self._data.A, self._data.targets.shape[1]
        if scores is None:
            weights = self._data.weights * (0.25 if C == 1 else 1.0 / C)
        else:
            p = probabilities(scores[:, None, :])[:, 0, :]
            spread = (p * (1 - p))[:, 0] if C == 1 else (1 - (p * p).sum(axis=1)) / (C - 1)
            weights = self._data.weights * spread
        roots = np.sqrt(np.maximum(weights, 0.0) / len(A))
        if A.shape[1] > DENSE_COLUMNS:
            return np.einsum("np,np,n->p", A, A, roots**2)
        total = np.zeros((A.shape[1], A.shape[1]))
        for start in range(0, len(A), ROW_BLOCK):
            block = A[start : start + ROW_BLOCK] * roots[start : start + ROW_BLOCK, None]
            total += block.T @ block
        return total

    def apply(self, G: Array, decays: Array, mask: Array) -> Array:
        """Inverse approximate Hessians times gradients G (p, R, C); ``mask`` (p, R, 1) cuts the ranks."""
        p = len(G)
        out = np.empty_like(G)
        for decay in np.unique(decays):
            chosen = np.flatnonzero(decays == decay)
            kind, factor = self._factors[float(decay)]
            part = G[:, chosen]
            if kind == "diagonal":
                out[:, chosen] = part / factor[:p, None, None] * mask[:, chosen]
                continue
            lower = factor[:p, :p]
            flat = part.reshape(p, -1)
            half = scipy.linalg.solve_triangular(lower, flat, lower=True, check_finite=False)
            half = (half.reshape(part.shape) * mask[:, chosen]).reshape(p, -1)
            full = scipy.linalg.solve_triangular(lower, half, lower=True, trans="T", check_finite=False)
            out[:, chosen] = full.reshape(part.shape)
        return out


def _factor(curvature: Array, decay: float) -> tuple[str, Array]:
    diagonal = curvature if curvature.ndim == 1 else np.diagonal(curvature)
    # Flat directions (constant columns, weight decay 0) need some curvature to have an inverse.
    jitter = 1e-12 * max(float(diagonal.max()), 1e-12)
    added = np.full(len(diagonal), decay)
    added[0] = 0.0
    if curvature.ndim == 1:
        return "diagonal", curvature + added + jitter
    while True:
        try:
            return "cholesky", np.asfortranarray(np.linalg.cholesky(curvature + np.diag(added + jitter)))
        except np.linalg.LinAlgError:
            jitter *= 100


def minimise(
    data: Data,
    sizes: NDArray[np.int64],
    decays: Array,
    start: Array,
    preconditioner: Preconditioner,
    *,
    tolerance: float,
    max_iter: int,
    patience: int,
) -> Solution:
    """Solve R problems at once.

    Parameters
    ----------
    sizes : int (R,)
        Leading columns of each problem.
    decays : float64 (R,)
    start : float64 (p, R, C)
        Where each problem starts; what lies beyond its columns is ignored.
    preconditioner
        Curvature is taken anew, at the problem furthest from its solution, for a weight decay that is not
        known or after ``patience`` iterations since the last time.
    tolerance
        On the Euclidean norm of each gradient.
    """
    return _LockStep(data, sizes, decays, start, preconditioner).run(tolerance, max_iter, patience)


class _LockStep:
    """The state of the problems that have not converged; the others are set aside as they finish."""

    def __init__(
        self, data: Data, sizes: NDArray[np.int64], decays: Array, start: Array, pre: Preconditioner
    ) -> None:
        p = int(sizes.max())
        self.data, self.pre, self.A = data, pre, data.A[:, :p]
        self.mask = (np.arange(p)[:, None] < sizes[None, :])[:, :, None].astype(np.float64)
        self.decays = decays
        self.penalty = np.broadcast_to(decays[None, :, None], self.mask.shape).copy()
        self.penalty[0] = 0.0
        self.B = start[:p] * self.mask
        self.scores = self._times(self.B)
        self.residual = self._residual(self.scores)
        self.gradient = self._gradient()
        self.live = np.arange(len(sizes))
        self.pairs: list[tuple[Array, Array, Array]] = []
        width = len(start)
        self.solution = Solution(
            np.zeros((width, len(sizes), start.shape[2])),
            np.zeros(len(sizes)),
            np.zeros(len(sizes), dtype=bool),
            np.zeros(len(sizes), dtype=np.int64),
        )

    def run(self, tolerance: float, max_iter: int, patience: int) -> Solution:
        self._refresh(only_unknown=True)
        age = 0
        for iteration in range(max_iter + 1):
            norms = np.sqrt(np.einsum("prc,prc->r", self.gradient, self.gradient))
            done = norms <= tolerance
            stop = done if iteration < max_iter else np.ones_like(done)
            if stop.any():
                self._set_aside(stop, done, norms, iteration)
            if not len(self.live):
                break
            if age >= patience:
                self._refresh(only_unknown=False)
                age = 0
            self._step()
            age += 1
        return self.solution

    def _times(self, B: Array) -> Array:
        p, R, C = B.shape
        return (self.A @ B.reshape(p, R * C)).reshape(len(self.A), R, C)

    def _residual(self, scores: Array) -> Array:
        return (probabilities(scores) - self.data.targets[:, None, :]) * self.data.weights[:, None, None]

    def _gradient(self) -> Array:
        n, R, C = self.residual.shape
        product = (self.A.T @ self.residual.reshape(n, R * C)).reshape(-1, R, C) / n
        return (product + self.penalty * self.B) * self.mask

    def _refresh(self, only_unknown: bool) -> None:
        """Take the curvature of each weight decay at its problem with the largest gradient."""
        norms = np.einsum("prc,prc->r", self.gradient, self.gradient)
        for decay in np.unique(self.decays):
            if only_unknown and self.pre.knows(float(decay)):
                continue
            among = np.flatnonzero(self.decays == decay)
            worst = among[np.argmax(norms[among])]
            self.pre.update([float(decay)], self.scores[:, worst])

    def _set_aside(
        self, stop: NDArray[np.bool_], done: NDArray[np.bool_], norms: Array, iteration: int
    ) -> None:
        leaving, keep = self.live[stop], ~stop
        self.solution.B[: len(self.B), leaving] = self.B[:, stop]
        self.solution.gradient_norm[leaving] = norms[stop]
        self.solution.converged[leaving] = done[stop]
        self.solution.iterations[leaving] = iteration
        self.live, self.decays = self.live[keep], self.decays[keep]
        for name in ("mask", "penalty", "B", "scores", "residual", "gradient"):
            setattr(self, name, np.ascontiguousarray(getattr(self, name)[:, keep]))
        self.pairs = [
            (np.ascontiguousarray(s[:, keep]), np.ascontiguousarray(g[:, keep]), rho[keep])
            for s, g, rho in self.pairs
        ]

    def _direction(self) -> Array:
        """Two-loop recursion of L-BFGS, on all problems at once."""
        q = self.gradient.copy()
        alphas = []
        for s, g, rho in reversed(self.pairs):
            alpha = rho * np.einsum("prc,prc->r", s, q)
            q -= alpha[None, :, None] * g
            alphas.append(alpha)
        q = self.pre.apply(q, self.decays, self.mask)
        for (s, g, rho), alpha in zip(self.pairs, reversed(alphas), strict=True):
            beta = rho * np.einsum("prc,prc->r", g, q)
            q += (alpha - beta)[None, :, None] * s
        return -q

    def _step(self) -> None:
        direction = self._direction()
        slope = np.einsum("prc,prc->r", self.gradient, direction)
        along = self._times(direction)
        steps = self._line_search(direction, along, slope)
        move = steps[None, :, None] * direction
        before = self.gradient
        self.B = self.B + move
        self.scores = self.scores + steps[None, :, None] * along
        self.residual = self._residual(self.scores)
        self.gradient = self._gradient()
        change = self.gradient - before
        curvature = np.einsum("prc,prc->r", move, change)
        rho = np.divide(1.0, curvature, out=np.zeros_like(curvature), where=curvature > 1e-300)
        self.pairs = [*self.pairs[-(MEMORY - 1) :], (move, change, rho)]

    def _line_search(self, direction: Array, along: Array, slope: Array) -> Array:
        """Step lengths at which each convex objective is nearly flat along its direction.

        Safeguarded Newton on the slope, from step 1. Only slopes are compared, since objective values are
        too coarse near a solution (their rounding hides a gradient under 1e-8).
        """
        curve = np.einsum("prc,prc,prc->r", self.penalty, direction, direction)
        line = np.einsum("prc,prc,prc->r", self.penalty, self.B, direction)
        steps, low, high = np.ones(len(slope)), np.zeros(len(slope)), np.full(len(slope), np.inf)
        open_ = np.arange(len(slope))
        for _ in range(LINE_STEPS):
            t = steps[open_]
            scores = self.scores[:, open_] + t[None, :, None] * along[:, open_]
            tangent = along[:, open_]
            p = probabilities(scores)
            weighted = tangent * self.data.weights[:, None, None]
            at = np.einsum("nrc,nrc->r", p - self.data.targets[:, None, :], weighted) / len(p)
            at += line[open_] + t * curve[open_]
            flat = np.abs(at) <= FLAT_LINE * np.abs(slope[open_])
            if flat.all():
                break
            second = _second_derivative(p, tangent, weighted) + curve[open_]
            high[open_] = np.where(at > 0, np.minimum(high[open_], t), high[open_])
            low[open_] = np.where(at < 0, np.maximum(low[open_], t), low[open_])
            steps[open_[~flat]] = _next_step(t, at, second, low[open_], high[open_])[~flat]
            open_ = open_[~flat]
        return steps


def _second_derivative(p: Array, tangent: Array, weighted: Array) -> Array:
    if p.shape[2] == 1:
        return np.einsum("nrc,nrc,nrc->r", p * (1 - p), tangent, weighted) / len(p)
    mean = np.einsum("nrc,nrc->nr", p, tangent)
    return np.einsum("nrc,nrc->r", p * (tangent - mean[:, :, None]), weighted) / len(p)


def _next_step(t: Array, slope: Array, second: Array, low: Array, high: Array) -> Array:
    """A Newton step kept inside the bracket, at most ten times longer; halfway where it would leave."""
    newton = t - slope / np.maximum(second, 1e-300)
    longest = np.where(np.isfinite(high), high, 10 * t)
    middle = np.where(np.isfinite(high), (low + np.minimum(high, longest)) / 2, longest)
    inside = (newton > low) & (newton < longest)
    return np.where(inside, newton, middle)
