"""Many regularised logistic regressions on leading columns of one design, solved in lock-step by L-BFGS."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.linalg
import scipy.special

from ncm_cli.blocks import Array, Codes, Mask, blocks
from ncm_cli.solvers.design import Design, score_slices

JOINT_COLUMNS = 2500
"""Up to this many columns times classes, the joint Hessian of all classes is factored."""

SHARED_COLUMNS = 4000
"""Above this many columns only the diagonal is used: a full factorisation would cost more than it saves."""

ROW_BLOCK = 4096
"""Rows that are copied and weighted at a time when a Hessian is computed."""

MEMORY = 10
"""Curvature pairs that L-BFGS keeps."""

MOST_SLOPE_SHARE = 0.3
"""A step is accepted when the slope along it is at most this share of the initial slope."""

MAX_LINE_STEPS = 30
"""Most steps of a line search."""

LEAST_START_SHARE = 0.3
"""If the start had to be scaled below this factor, the curvature is recomputed at the scaled start."""

MIN_ITERATIONS = 3
"""Fewest iterations before the curvature may be recomputed."""

FRESH_ITERATIONS = 5
"""With curvature computed near its solution, a problem rarely needs more iterations than this."""


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """Coefficients (p, R, C) of R problems, zero for columns that a problem doesn't use, and convergence."""

    B: Array
    gradient_norm: Array
    converged: Mask
    iterations: Codes


def _inverse_link(scores: Array) -> Array:
    """Sigmoid of scores (..., 1), or softmax over the last axis of scores (..., C)."""
    if scores.shape[-1] == 1:
        return np.asarray(scipy.special.expit(scores))
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


class Curvature:
    """Approximate Hessians, one for each weight decay, that precondition every rank of a path.

    - Two classes, or few columns and classes: the exact Hessian at the given scores.
    - More of them: each class has the curvature ``(1 - sum p^2) / (C - 1)``, the mean eigenvalue of
      ``diag(p) - p p^T`` off its null space.
    - Very many columns: that curvature's diagonal.
    """

    def __init__(self, design: Design) -> None:
        self._A, self._turn, self._weights = design.A, design.turn, design.weights
        self._p, self._C = p, C = design.shape[1], design.targets.shape[1]
        self._joint = C > 1 and p * C <= JOINT_COLUMNS
        self._diagonal = not self._joint and p > SHARED_COLUMNS
        self.cost = p * C * (C + 1) / 8 if self._joint else 1.0 if self._diagonal else p / 4
        """The cost of computing the curvature, in iterations of a single problem."""
        self._factors: dict[float, Array] = {}

    def take(self, decays: Sequence[float], scores: Array | None) -> None:
        """Compute the curvature at ``scores`` (n, C), or at zero coefficients, for these weight decays."""
        # With zero coefficients every row has the same scores, so one row is enough.
        scores = np.zeros((1, self._C)) if scores is None else scores
        curvature = self._of_all(scores) if self._joint else self._of_each(scores)
        for decay in decays:
            self._factors[decay] = self._factor(curvature, decay)

    def solve(self, G: Array, decays: Array, mask: Array) -> Array:
        """Inverse approximate Hessians times gradients G (p, R, C).

        ``mask`` (p, R, 1) zeroes the columns that a problem doesn't use.
        """
        out = np.empty_like(G)
        for decay in np.unique(decays):
            problems = np.flatnonzero(decays == decay)
            out[:, problems] = self._solve(self._factors[float(decay)], G[:, problems], mask[:, problems])
        return out

    def _of_each(self, scores: Array) -> Array:
        n, C = scores.shape
        spread = np.empty(n)
        for rows in score_slices(scores, C):
            prob = _inverse_link(scores[rows])
            spread[rows] = (prob * (1 - prob))[:, 0] if C == 1 else (1 - (prob * prob).sum(axis=1)) / (C - 1)
        if self._diagonal:
            shares = np.broadcast_to(spread, len(self._A)) / len(self._A)
            parts = ((part, X if self._turn is None else X @ self._turn) for part, X in blocks(self._A))
            return np.asarray(sum(np.einsum("np,np,n->p", X, X, shares[part]) for part, X in parts))
        return self._gram(spread)

    def _of_all(self, scores: Array) -> Array:
        """The joint Hessian, ordered by design column and, within a column, by class."""
        p, C, prob = self._p, self._C, _inverse_link(scores)
        full = np.empty((p, C, p, C))
        for c in range(C):
            full[:, c, :, c] = self._gram(prob[:, c] * (1 - prob[:, c]))
            for other in range(c):
                full[:, c, :, other] = full[:, other, :, c] = -self._gram(prob[:, c] * prob[:, other])
        # Adding a constant to every class's score leaves the loss unchanged, so the Hessian is singular in
        # that direction. Gradients have no component along it, so any positive value there makes the matrix
        # invertible.
        full[np.arange(p), :, np.arange(p), :] += np.einsum("pcpc->", full) / (p * C * C)
        return full.reshape(p * C, p * C)

    def _gram(self, rows: Array) -> Array:
        """``A^T diag(weights * rows) A / n``."""
        roots = np.sqrt(np.maximum(rows, 0.0) * self._weights / len(self._A))
        total = np.zeros((self._A.shape[1], self._A.shape[1]))
        for start in range(0, len(self._A), ROW_BLOCK):
            block = self._A[start : start + ROW_BLOCK] * roots[start : start + ROW_BLOCK, None]
            total += block.T @ block
        return total if self._turn is None else self._turn.T @ total @ self._turn

    def _factor(self, curvature: Array, decay: float) -> Array:
        """Lower Cholesky factor of curvature plus weight decay; with only a diagonal (p,), the sum itself."""
        diagonal = curvature if self._diagonal else np.diagonal(curvature)
        # Flat directions (constant columns, weight decay 0) need some curvature to have an inverse.
        jitter = 1e-12 * max(float(diagonal.max()), 1e-100)
        added = np.full(len(diagonal), decay)
        added[: self._C if self._joint else 1] = 0.0
        if self._diagonal:
            return curvature + added + jitter
        while True:
            try:
                return np.asfortranarray(np.linalg.cholesky(curvature + np.diag(added + jitter)))
            except np.linalg.LinAlgError:
                jitter *= 100

    def _solve(self, factor: Array, G: Array, mask: Array) -> Array:
        p, R, C = G.shape
        if self._diagonal:
            return G / factor[:p, None, None] * mask
        if self._joint:
            flat, cut = G.transpose(0, 2, 1).reshape(p * C, R), np.repeat(mask[:, :, 0], C, axis=0)
        else:
            flat, cut = G.reshape(p, R * C), np.repeat(mask[:, :, 0], C, axis=1)
        lower = factor[: len(flat), : len(flat)]
        half = scipy.linalg.solve_triangular(lower, flat, lower=True, check_finite=False) * cut
        full = scipy.linalg.solve_triangular(lower, half, lower=True, trans="T", check_finite=False)
        return full.reshape(p, C, R).transpose(0, 2, 1) if self._joint else full.reshape(p, R, C)


class LockStep:
    """Regularised logistic regressions on leading columns of one design, by preconditioned L-BFGS.

    Problem j sees the first ``sizes[j]`` columns and has its own weight decay: coefficients B (p, C) minimise

        mean_i s_i loss(A_i B, y_i) + decay/2 * sum of squares of B, the bias's row 0 left out

    with the logistic loss (C = 1) or softmax cross-entropy. Scores are linear along a direction, so that a
    line search needs no further product with A, and the products of all problems are one matrix product.
    Problems are set aside as they converge.
    """

    def __init__(
        self, design: Design, sizes: Codes, decays: Array, start: Array, curvature: Curvature
    ) -> None:
        p, width = int(sizes.max()), len(start)
        self.design, self.targets, self.weights = design, design.targets, design.weights
        self.curvature, self.decays = curvature, decays
        self.mask = (np.arange(p)[:, None] < sizes[None, :])[:, :, None].astype(np.float64)
        self.penalty = np.broadcast_to(decays[None, :, None], self.mask.shape).copy()
        self.penalty[0] = 0.0
        self._start(start[:p] * self.mask)
        self.gradient = self._gradient()
        self.live = R = np.arange(len(sizes))
        self.pairs: list[tuple[Array, Array, Array]] = []
        zeros = np.zeros((width, *start.shape[1:]))
        self.solution = Solution(zeros, np.zeros(len(R)), R < 0, np.zeros_like(R))

    def _start(self, B: Array) -> None:
        """Start from the best multiple of B: with columns masked out, B's scores may be far too large."""
        self.B, self.scores = np.zeros_like(B), np.zeros((len(self.weights), *B.shape[1:]))
        if not B.any():
            return
        scores = self.design.times(B)
        slope = self._slopes(scores, np.zeros(B.shape[1]), np.arange(B.shape[1]))[0]
        share = np.where(slope < 0, self._line_search(B, scores, slope), 0.0)[None, :, None]
        self.B, self.scores = share * B, share * scores
        unsure = (share[0, :, 0] < LEAST_START_SHARE) & B.any(axis=(0, 2))
        for decay in np.unique(self.decays[unsure]):
            problems = np.flatnonzero(self.decays == decay)
            worst = problems[np.argmin(share[0, problems, 0])]
            self.curvature.take([float(decay)], self.scores[:, worst])

    def run(self, tolerance: float, max_iter: int) -> Solution:
        """Iterate until each gradient norm is at most ``tolerance``, or for ``max_iter`` iterations."""
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
            if age >= MIN_ITERATIONS and self._refresh(before, norms[~stop], age, tolerance):
                self.pairs = []
                age, before = 0, norms[~stop]
            self._step()
            age += 1
        return self.solution

    def _norms(self) -> Array:
        return np.sqrt(np.einsum("prc,prc->r", self.gradient, self.gradient))

    def _gradient(self) -> Array:
        n, R, C = self.scores.shape

        def residual(rows: slice) -> Array:
            residuals = _inverse_link(self.scores[rows]) - self.targets[rows, None, :]
            residuals *= self.weights[rows, None, None]
            return residuals.reshape(-1, R * C)

        product = self.design.back(len(self.mask), R * C, residual)
        return (product.reshape(-1, R, C) / n + self.penalty * self.B) * self.mask

    def _refresh(self, before: Array, norms: Array, age: int, tolerance: float) -> bool:
        """Recompute the curvature of each weight decay if that saves more iterations than it costs.

        The problem furthest from its solution decides: at its convergence rate since the last recomputation
        it needs ``left`` more iterations; after recomputing, about `FRESH_ITERATIONS`.
        """
        # Up to eight problems cost about the same, because their products are limited by memory bandwidth.
        price = self.curvature.cost / max(self.B.shape[1] * self.B.shape[2], 8)
        taken = False
        for decay in np.unique(self.decays):
            problems = np.flatnonzero(self.decays == decay)
            worst = problems[np.argmax(norms[problems])]
            rate = np.log(before[worst] / norms[worst]) / age
            left = np.log(norms[worst] / tolerance) / rate if rate > 0 else np.inf
            if left > FRESH_ITERATIONS + price:
                self.curvature.take([float(decay)], self.scores[:, worst])
                taken = True
        return taken

    def _set_aside(self, stop: Mask, done: Mask, norms: Array, iteration: int) -> None:
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
        q = self.curvature.solve(q, self.decays, self.mask)
        for (s, g, rho), alpha in zip(self.pairs, reversed(alphas), strict=True):
            beta = rho * np.einsum("prc,prc->r", g, q)
            q += (alpha - beta)[None, :, None] * s
        return -q

    def _step(self) -> None:
        direction = self._direction()
        slope = np.einsum("prc,prc->r", self.gradient, direction)
        along = self.design.times(direction)
        steps = self._line_search(direction, along, slope)[None, :, None]
        move, before = steps * direction, self.gradient
        self.B = self.B + move
        for rows in score_slices(along, along[0].size):
            self.scores[rows] += steps * along[rows]
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
        left = np.arange(len(slope))
        for _ in range(MAX_LINE_STEPS):
            t = steps[left]
            slopes, second = self._slopes(along, t, left)
            slopes += line[left] + t * curve[left]
            flat = np.abs(slopes) <= MOST_SLOPE_SHARE * np.abs(slope[left])
            if flat.all():
                break
            second += curve[left]
            high[left] = np.where(slopes > 0, np.minimum(high[left], t), high[left])
            low[left] = np.where(slopes < 0, np.maximum(low[left], t), low[left])
            steps[left[~flat]] = _next_step(t, slopes, second, low[left], high[left])[~flat]
            left = left[~flat]
        return steps

    def _slopes(self, along: Array, t: Array, chosen: Codes) -> tuple[Array, Array]:
        """First and second derivatives of the mean losses of some problems at steps t (R') along a line."""
        n, R, C = along.shape
        first, second = np.zeros(len(chosen)), np.zeros(len(chosen))
        problems = slice(None) if len(chosen) == R else chosen
        for rows in score_slices(along, len(chosen) * C):
            tangent = along[rows, problems]
            prob = _inverse_link(self.scores[rows, problems] + t[None, :, None] * tangent)
            weighted = tangent * self.weights[rows, None, None]
            first += np.einsum("nrc,nrc->r", prob - self.targets[rows, None, :], weighted)
            if C == 1:
                second += np.einsum("nrc,nrc,nrc->r", prob * (1 - prob), tangent, weighted)
            else:
                mean = np.einsum("nrc,nrc->nr", prob, tangent)
                second += np.einsum("nrc,nrc->r", prob * (tangent - mean[:, :, None]), weighted)
        return first / n, second / n


def _next_step(t: Array, slope: Array, second: Array, low: Array, high: Array) -> Array:
    """Newton's step if it stays inside the bracket and is at most ten times the current one, else a safe
    point inside it."""
    with np.errstate(over="ignore"):
        newton = t - slope / np.maximum(second, 1e-300)
    longest = np.where(np.isfinite(high), high, 10 * t)
    # From 0 the bracket shrinks tenfold: a direction can be too long by many orders of magnitude.
    middle = np.where(np.isfinite(high), np.where(low > 0, (low + high) / 2, high / 10), longest)
    return np.where((newton > low) & (newton < longest), newton, middle)
