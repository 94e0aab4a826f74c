"""Hessians of logistic regressions as preconditioners that serve every rank of a path.

With the columns of the design in the order [bias, complement, basis reversed], dropping a direction drops the
last column. The Cholesky factor of a leading block is the leading block of the factor, so one factor L gives
``H_r^-1 g = L^-T mask(L^-1 g)`` for every rank r.

Many regularised logistic regressions on leading columns of one design matrix, solved in lock-step.

All problems share the design A (n, p). Problem j sees its first ``sizes[j]`` columns (a rank path: each
rank drops the last columns) and has its own weight decay. Its objective, over coefficients B (p, C), is

    mean_i s_i loss(A_i B, y_i) + decay/2 * sum of squares of B, the bias's row 0 left out

with the logistic loss (C = 1) or softmax cross-entropy (C classes).

The method is L-BFGS preconditioned by the Hessian at a nearby solution (`curvature`). Scores are linear along
a direction, so that a line search needs no further product with A, and the products of all problems are one
matrix product.
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


MEMORY = 10
"""Curvature pairs that L-BFGS keeps."""

FLAT_LINE = 0.3
"""A step is accepted when the slope along it is at most this share of the initial slope."""

LINE_STEPS = 30

SURE = 0.3
"""A start that had to be shrunk to less than this share says nothing about curvature."""

YOUNG = 3
"""Iterations after which a curvature may be found wanting."""

FRESH_ITERATIONS = 5
"""What a problem needs at most, as a rule, with curvature taken near its solution."""


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


def minimise(
    data: Data,
    sizes: NDArray[np.int64],
    decays: Array,
    start: Array,
    preconditioner: Preconditioner,
    *,
    tolerance: float,
    max_iter: int,
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
        Must know each weight decay. Curvature is taken anew, at the problem furthest from its solution, when
        progress is so slow that this pays.
    tolerance
        On the Euclidean norm of each gradient.
    """
    return _LockStep(data, sizes, decays, start, preconditioner).run(tolerance, max_iter)


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
        self._start(start[:p] * self.mask)
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

    def _start(self, B: Array) -> None:
        """Start from the best multiple of B: without what was masked it may be far too sure of itself."""
        self.B, self.scores = np.zeros_like(B), np.zeros((len(self.A), *B.shape[1:]))
        if not B.any():
            return
        scores = self._times(B)
        slope = self._slopes(scores, np.zeros(B.shape[1]), np.arange(B.shape[1]))[0]
        share = np.where(slope < 0, self._line_search(B, scores, slope), 0.0)[None, :, None]
        self.B, self.scores = share * B, share * scores
        unsure = (share[0, :, 0] < SURE) & B.any(axis=(0, 2))
        for decay in np.unique(self.decays[unsure]):
            among = np.flatnonzero(self.decays == decay)
            worst = among[np.argmin(share[0, among, 0])]
            self.pre.update([float(decay)], self.scores[:, worst])

    def run(self, tolerance: float, max_iter: int) -> Solution:
        age, before = 0, self._norms()
        for iteration in range(max_iter + 1):
            norms = self._norms()
            done = norms <= tolerance
            stop = done if iteration < max_iter else np.ones_like(done)
            if stop.any():
                self._set_aside(stop, done, norms, iteration)
                before = before[~stop]
            if not len(self.live):
                break
            if age >= YOUNG and self._refresh(before, norms[~stop], age, tolerance):
                self.pairs = []
                age, before = 0, norms[~stop]
            self._step()
            age += 1
        return self.solution

    def _norms(self) -> Array:
        return np.sqrt(np.einsum("prc,prc->r", self.gradient, self.gradient))

    def _times(self, B: Array) -> Array:
        p, R, C = B.shape
        return (self.A @ B.reshape(p, R * C)).reshape(len(self.A), R, C)

    def _gradient(self) -> Array:
        n, R, C = self.scores.shape
        product = np.zeros((self.A.shape[1], R * C))
        for rows in row_blocks(n, R * C):
            residual = probabilities(self.scores[rows]) - self.data.targets[rows, None, :]
            residual *= self.data.weights[rows, None, None]
            product += self.A[rows].T @ residual.reshape(-1, R * C)
        return (product.reshape(-1, R, C) / n + self.penalty * self.B) * self.mask

    def _refresh(self, before: Array, norms: Array, age: int, tolerance: float) -> bool:
        """Take curvature anew for each weight decay where the iterations it saves are worth it.

        The problem furthest from its solution decides: at its rate since the last time it would need
        ``left`` more iterations, against a few with its own curvature.
        """
        # A few problems at once cost as much as eight: their products are bound by memory.
        price = self.pre.cost / max(self.B.shape[1] * self.B.shape[2], 8)
        taken = False
        for decay in np.unique(self.decays):
            among = np.flatnonzero(self.decays == decay)
            worst = among[np.argmax(norms[among])]
            rate = np.log(before[worst] / norms[worst]) / age
            left = np.log(norms[worst] / tolerance) / rate if rate > 0 else np.inf
            if left > FRESH_ITERATIONS + price:
                self.pre.update([float(decay)], self.scores[:, worst])
                taken = True
        return taken

    def _set_aside(
        self, stop: NDArray[np.bool_], done: NDArray[np.bool_], norms: Array, iteration: int
    ) -> None:
        leaving, keep = self.live[stop], ~stop
        self.solution.B[: len(self.B), leaving] = self.B[:, stop]
        self.solution.gradient_norm[leaving] = norms[stop]
        self.solution.converged[leaving] = done[stop]
        self.solution.iterations[leaving] = iteration
        self.live, self.decays = self.live[keep], self.decays[keep]
        for name in ("mask", "penalty", "B", "scores", "gradient"):
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
        for rows in row_blocks(len(along), along[0].size):
            self.scores[rows] += steps[None, :, None] * along[rows]
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
            at, second = self._slopes(along, t, open_)
            at += line[open_] + t * curve[open_]
            flat = np.abs(at) <= FLAT_LINE * np.abs(slope[open_])
            if flat.all():
                break
            second += curve[open_]
            high[open_] = np.where(at > 0, np.minimum(high[open_], t), high[open_])
            low[open_] = np.where(at < 0, np.maximum(low[open_], t), low[open_])
            steps[open_[~flat]] = _next_step(t, at, second, low[open_], high[open_])[~flat]
            open_ = open_[~flat]
        return steps

    def _slopes(self, along: Array, t: Array, open_: NDArray[np.int64]) -> tuple[Array, Array]:
        """First and second derivatives of the mean losses of some problems at steps t (R') along a line."""
        n, R, C = along.shape
        first, second = np.zeros(len(open_)), np.zeros(len(open_))
        every = slice(None) if len(open_) == R else open_
        for rows in row_blocks(n, len(open_) * C):
            tangent = along[rows, every]
            p = probabilities(self.scores[rows, every] + t[None, :, None] * tangent)
            weighted = tangent * self.data.weights[rows, None, None]
            first += np.einsum("nrc,nrc->r", p - self.data.targets[rows, None, :], weighted)
            if C == 1:
                second += np.einsum("nrc,nrc,nrc->r", p * (1 - p), tangent, weighted)
            else:
                mean = np.einsum("nrc,nrc->nr", p, tangent)
                second += np.einsum("nrc,nrc->r", p * (tangent - mean[:, :, None]), weighted)
        return first / n, second / n


def _next_step(t: Array, slope: Array, second: Array, low: Array, high: Array) -> Array:
    """A Newton step kept inside the bracket, at most ten times longer; halfway where it would leave."""
    with np.errstate(over="ignore"):
        newton = t - slope / np.maximum(second, 1e-300)
    longest = np.where(np.isfinite(high), high, 10 * t)
    # From 0 the bracket shrinks tenfold: a direction can be too long by many orders of magnitude.
    middle = np.where(np.isfinite(high), np.where(low > 0, (low + high) / 2, high / 10), longest)
    inside = (newton > low) & (newton < longest)
    return np.where(inside, newton, middle)
