"""Many regularised logistic regressions on leading columns of one design matrix, solved in lock-step.

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

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods.curvature import Data, Preconditioner, probabilities, row_blocks

Array = NDArray[np.float64]

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
