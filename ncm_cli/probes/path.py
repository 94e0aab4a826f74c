"""Exact rank paths: linear probes of every rank and weight decay, solved side by side.

NCM (paper, equation 4) minimises the training loss over theta subject to ``theta^T Q_r = 0``. In coordinates
[bias, complement of the basis, basis reversed] this says that the last r coefficients are zero: after one
rotation every rank is a slice of leading columns. The Cholesky factor of a leading block is the leading block
of the factor, so one factor L of a Hessian serves all ranks: ``H_r^-1 g = L^-T mask(L^-1 g)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import scipy.linalg
import scipy.special
from numpy.typing import NDArray

from ncm_cli.blocks import Features, RowBlocks, block_rows, blocks, held
from ncm_cli.errors import InputError
from ncm_cli.probes.options import MAX_ITER, TOLERANCE
from ncm_cli.probes.projection import Array, blas_threads

LARGEST = 1e100
"""Features beyond this would overflow in sums of squares."""

CHUNK_ELEMENTS = 4_000_000
"""Scores (rows × problems × classes) held at once: 32 MB an array."""

BLOCKED_ELEMENTS = 32_000_000
"""The same for rows in blocks, which are read twice an iteration: 256 MB an array, three at the most."""

FIRST_RANKS = 8
"""Ranks that are solved side by side at first: so few start near nothing, so many cost as much as one."""

STALE_ITERATIONS = 8
"""A chunk that took more iterations than this on average makes the next one take the curvature anew."""

SLOW_ITERATIONS = 60
"""A chunk with a fit that took more makes the next one smaller: each fit then has curvature of its own."""

JOINT_COLUMNS = 2500
"""Up to this many columns times classes the Hessian of all classes together is factored."""

SHARED_COLUMNS = 4000
"""Above this many columns only the Hessian's diagonal is used: a factor would not pay."""

ROW_BLOCK = 4096
"""Rows whose weighted copy is made at a time for a Hessian."""

BLOCK_SCORES = 1 << 18
"""Scores that are worked on at a time: 2 MB, so that what is made of them stays in the cache."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """One probe: of a path, or trained by steps."""

    rank: int
    weight_decay: float
    weight: Array
    """float64 (C, d), orthogonal to the first ``rank`` directions; C = 1 for two classes and regression."""
    bias: Array
    """float64 (C,)."""
    converged: bool = True
    """Whether the gradient norm met the tolerance; of a probe trained by steps, whether it is finite."""
    iterations: int = 0
    gradient_norm: float = float("nan")
    """Euclidean norm of the gradient of the mean loss plus penalty, where it was measured."""


def fit_path(
    X: Features,
    y: NDArray[np.generic],
    n_classes: int,
    basis: Array,
    ranks: Sequence[int],
    weight_decays: Sequence[float],
    *,
    weights: Array | None = None,
    task: str = "classification",
    tolerance: float = TOLERANCE,
    max_iter: int = MAX_ITER,
    advance: Callable[[int], None] | None = None,
) -> list[Fit]:
    """Fit a linear probe for every rank and weight decay.

    The objective is ``mean s_i loss_i + weight_decay/2 |W|^2`` (scikit-learn: ``C = 1 / (n * weight_decay)``)
    with the logistic loss for two classes and softmax cross-entropy for more; for regression it is
    ``mean s_i (y_i - f_i)^2 + weight_decay |w|^2`` (``Ridge(alpha=n * weight_decay)``). The bias is never
    penalised.

    Parameters
    ----------
    X : (n, d)
    y : (n,)
        Class codes 0..n_classes-1, or float targets for regression.
    basis : float64 (d, m)
        Orthonormal directions, most important first.
    ranks
        Each from 0 to m.
    weights : float64 (n,), optional
        Row weights; normalised to mean 1.
    tolerance
        A fit has converged when its gradient's Euclidean norm is at most this times the root mean square
        norm of the centred rows (with the bias's 1 counted): the criterion does not change when features
        are multiplied by a constant.
    max_iter
        For each fit. Ignored for regression, which is solved directly.
    advance
        Called with the number of fits that have just finished.

    Returns
    -------
    list of Fit
        By rank in ascending order, then by weight decay as given.

    Raises
    ------
    InputError
        Non-finite or huge features, non-finite targets, no rows, one class only, or a rank above m.
    """
    rows = held(X)
    if len(X) < X.shape[1]:  # the rows' span is smaller than they are
        rows = np.asarray(rows[:], np.float64)
    ranks = sorted({int(r) for r in ranks})
    decays = list(dict.fromkeys(float(decay) for decay in weight_decays))
    regression = task == "regression"
    _check(rows, y, n_classes, basis, ranks, decays, regression)
    if not tolerance > 0 or max_iter < 1:
        raise InputError("the tolerance must be above 0 and max_iter at least 1", found=(tolerance, max_iter))
    weights = np.ones(len(X)) if weights is None else weights / weights.mean()
    fits: dict[tuple[int, float], Fit] = {}
    with blas_threads(len(rows) * rows.shape[1]):
        design = _Design.rotate(rows, y, n_classes, basis[:, : ranks[-1]], weights, regression)
        made = (
            _ridge(design, ranks, decays)
            if regression
            else _logistic(design, ranks, decays, tolerance, max_iter)
        )
        for group, solution in made:
            facts = (solution.converged, solution.iterations, solution.gradient_norm)
            for j, (rank, decay) in enumerate(group):
                folded = design.fold(solution.B[:, j], basis[:, :rank])
                fits[rank, decay] = Fit(rank, decay, *folded, *(values[j].item() for values in facts))
            if advance:
                advance(len(group))
    return [fits[rank, decay] for rank in ranks for decay in decays]


def _check(
    X: Features,
    y: NDArray[np.generic],
    n_classes: int,
    basis: Array,
    ranks: list[int],
    decays: list[float],
    regression: bool,
) -> None:
    if not len(X):
        raise InputError("no training rows")
    for own, rows in blocks(X):
        largest = float(np.abs(rows).max(initial=0.0))
        if not np.isfinite(largest):
            bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
            raise InputError("features hold NaN or an infinity", where=f"row {own.start + bad}")
        if largest > LARGEST:
            raise InputError("features too large to be squared", found=f"up to {largest:.1e}")
    if not ranks or ranks[0] < 0 or ranks[-1] > basis.shape[1]:
        raise InputError(
            "a rank that the pairs don't have",
            found=ranks[-1] if ranks else "none",
            expected=f"0 to {basis.shape[1]}",
        )
    if not decays or min(decays) < 0 or not np.isfinite(decays).all():
        raise InputError("weight decays must be 0 or more", found=decays)
    if regression and not np.isfinite(np.asarray(y, np.float64)).all():
        raise InputError("targets hold NaN or an infinity")
    if not regression and (len(np.unique(y)) < 2 or n_classes < 2):
        raise InputError(
            "only one class among the training rows", found=f"{len(X)} rows", expected="two or more"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Design:
    """Rows in rotated, centred coordinates, and what they should be predicted as.

    Rows that don't fit into memory are centred as they are read, and not rotated: coefficients are instead.
    """

    A: Features
    """(n, p): [ones (for classes),] complement, basis reversed; of rows in blocks (n, q): [ones,] centred."""
    turn: Array | None
    """(q, p): what coefficients of rows in blocks are multiplied by; None for an array."""
    rotation: Array | None
    """(d, q): complement, basis reversed; None means the identity."""
    mean: Array
    """(d,)"""
    targets: NDArray[np.bool_] | Array
    """bool (n, C), C = 1 for two classes; for regression float64 (n, 1), centred."""
    offset: Array | None
    """(1,) mean of the targets of a regression."""
    weights: Array
    """(n,) of the rows, mean 1."""

    @classmethod
    def rotate(
        cls,
        X: Features,
        y: NDArray[np.generic],
        n_classes: int,
        basis: Array,
        weights: Array,
        regression: bool,
    ) -> _Design:
        """Centre and rotate X (n, d) once; ``basis`` (d, m) are the directions that the path removes.

        When there are fewer rows than dimensions, coefficients lie in the span of the rows and the basis,
        so the complement is cut to that span.
        """
        n, d = X.shape
        m = basis.shape[1]
        mean = np.zeros(d)
        for own, rows in blocks(X):
            mean += weights[own] @ rows
        mean /= n
        Z: Features = X if isinstance(X, RowBlocks) else X - mean
        rotation: Array | None = None
        if n < d - m and not isinstance(Z, RowBlocks):
            outside = Z - (Z @ basis) @ basis.T
            span = scipy.linalg.qr(outside.T, mode="economic", check_finite=False)[0]
            span -= basis @ (basis.T @ span)
            rotation = np.hstack([span, basis[:, ::-1]])
        elif m:
            full = scipy.linalg.qr(basis, mode="full", check_finite=False)[0]
            rotation = np.hstack([full[:, m:], basis[:, ::-1]])
        turn: Array | None = None
        ones = 0 if regression else 1

        def centred(rows: NDArray[np.floating]) -> Array:
            made = np.ones((len(rows), ones + d))
            np.subtract(rows, mean, out=made[:, ones:])
            return made

        if isinstance(Z, RowBlocks):
            turn = scipy.linalg.block_diag(np.eye(ones), np.eye(d) if rotation is None else rotation)
            Z = Z.then(centred, ones + d)
        else:
            Z = Z if rotation is None else Z @ rotation
            Z = Z if regression else np.hstack([np.ones((n, 1)), Z])
        if regression:
            values = np.asarray(y, np.float64)
            offset = np.array([float(weights @ values / n)])
            return cls(Z, turn, rotation, mean, (values - offset)[:, None], offset, weights)
        codes = np.array([1]) if n_classes == 2 else np.arange(n_classes)
        targets = np.asarray(y, np.int64)[:, None] == codes[None, :]
        return cls(Z, turn, rotation, mean, targets, None, weights)

    @property
    def shape(self) -> tuple[int, int]:
        """n and p."""
        return len(self.A), self.A.shape[1] if self.turn is None else self.turn.shape[1]

    def leading(self, p: int) -> tuple[Features, Array | None]:
        """The rows, and the turn, for the first p coefficients."""
        if self.turn is None:
            return self.A[:, :p], None  # type: ignore[index]
        return self.A, self.turn[:, :p]

    def times(self, B: Array) -> Array:
        """Scores (n, ...) of the first coefficients B (p', ...)."""
        A, turn = self.leading(len(B))
        flat = B.reshape(len(B), -1)
        flat = flat if turn is None else turn @ flat
        made = np.empty((len(A), flat.shape[1]))
        for own, rows in blocks(A):
            np.matmul(rows, flat, out=made[own])
        return made.reshape(len(A), *B.shape[1:])

    def back(self, p: int, size: int, residual: Callable[[slice], Array]) -> Array:
        """``A^T r`` (p, size), of residuals that are made for some rows at a time."""
        A, turn = self.leading(p)
        product = np.zeros((A.shape[1], size))
        for own in _row_blocks(A, size):
            product += A[own].T @ residual(own)
        return product if turn is None else turn.T @ product

    def fold(self, B: Array, removed: Array) -> tuple[Array, Array]:
        """Coefficients B (p, C) as weight (C, d) and bias (C,) on the features themselves."""
        bias, B = (B[0], B[1:]) if self.offset is None else (self.offset, B)
        weight = (B if self.rotation is None else self.rotation @ B).T
        weight = weight - (weight @ removed) @ removed.T
        return np.ascontiguousarray(weight), bias - weight @ self.mean


@dataclasses.dataclass(frozen=True, slots=True)
class _Solution:
    """Coefficients (p, R, C) of R problems, zero beyond each one's columns, and how they were reached."""

    B: Array
    gradient_norm: Array
    converged: NDArray[np.bool_]
    iterations: NDArray[np.int64]


_Solutions = Iterator[tuple[list[tuple[int, float]], _Solution]]
"""(rank, weight decay) of some problems, and their solution."""


def _ridge(design: _Design, ranks: list[int], decays: list[float]) -> _Solutions:
    """All ranks at once for each weight decay: one factorisation and two triangular solves.

    Weight decay 0 gives least squares, of dependent columns the solution of least norm up to rounding.
    """
    y = design.targets[:, 0]
    n, p = design.shape
    mask = (np.arange(p)[:, None] < p - np.asarray(ranks)[None, :]).astype(np.float64)
    q = design.A.shape[1]
    gram, right = np.zeros((q, q)), np.zeros(q)
    for own, rows in blocks(design.A):
        weighted = rows * design.weights[own, None]
        gram += weighted.T @ rows
        right += weighted.T @ y[own]
    if design.turn is not None:
        gram, right = design.turn.T @ gram @ design.turn, design.turn.T @ right
    gram, right = gram / n, right / n
    for decay in decays:
        H = gram.copy()
        H[np.diag_indices(p)] += decay
        jitter, scale = 0.0, max(float(np.diagonal(H).max(initial=0.0)), 1e-300)
        while True:
            try:
                lower = np.linalg.cholesky(H + jitter * np.eye(p))
                break
            except np.linalg.LinAlgError:
                jitter = max(jitter * 10, 1e-14 * scale)
        half = scipy.linalg.solve_triangular(lower, right, lower=True, check_finite=False)
        half = half[:, None] * mask
        B = scipy.linalg.solve_triangular(lower, half, lower=True, trans="T", check_finite=False)
        errors = (design.times(B) - y[:, None]) * design.weights[:, None]
        gradients = 2 * (design.back(p, len(ranks), errors.__getitem__) / n + decay * B) * mask
        norms = np.array([np.linalg.norm(gradients[:, j]) for j in range(len(ranks))])
        ones = np.ones(len(ranks), np.int64)
        yield [(rank, decay) for rank in ranks], _Solution(B[:, :, None], norms, ones > 0, ones)


def _logistic(
    design: _Design, ranks: list[int], decays: list[float], tolerance: float, max_iter: int
) -> _Solutions:
    """Solve the path in chunks of ranks that grow as solutions change less from one to the next."""
    (n, p), C = design.shape, design.targets.shape[1]
    square = sum(np.einsum("np,np,n->", rows, rows, design.weights[own]) for own, rows in blocks(design.A))
    limit = tolerance * float(np.sqrt(square / n))
    most = (CHUNK_ELEMENTS if design.turn is None else BLOCKED_ELEMENTS) // (n * C)
    if design.turn is not None and 1 < len(decays) > most:
        for some in np.array_split(decays, -(-len(decays) // max(1, most))):
            yield from _logistic(design, ranks, some.tolist(), tolerance, max_iter)
        return
    D = len(decays)
    widest = max(1, most // D)
    curvature = _Curvature(design)
    curvature.take(decays, None)
    start = np.zeros((p, D, C))
    done, width = 0, min(FIRST_RANKS, widest)
    while done < len(ranks):
        chunk = ranks[done : done + width]
        sizes, tiled = np.repeat(p - np.asarray(chunk, np.int64), D), np.tile(decays, len(chunk))
        problems = _LockStep(design, sizes, tiled, np.tile(start, (1, len(chunk), 1)), curvature)
        solution = problems.run(limit, max_iter)
        yield [(rank, decay) for rank in chunk for decay in decays], solution
        start = solution.B[:, -D:]
        if solution.iterations.mean() > STALE_ITERATIONS and done + width < len(ranks):
            for j, decay in enumerate(decays):
                curvature.take([decay], design.times(start[:, j]))
        done += len(chunk)
        slow = solution.iterations.max() > SLOW_ITERATIONS
        width = max(1, len(chunk) // 4) if slow else min(2 * len(chunk), widest)


def _row_blocks(rows: Features, scores: int) -> Iterator[slice]:
    """All rows in blocks of few enough for `BLOCK_SCORES`, where a row has so many scores."""
    step = max(1, min(BLOCK_SCORES // scores, block_rows(rows)))
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def _inverse_link(scores: Array) -> Array:
    """Sigmoid of scores (..., 1), or softmax over the last axis of scores (..., C)."""
    if scores.shape[-1] == 1:
        return np.asarray(scipy.special.expit(scores))
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


class _Curvature:
    """Approximate Hessians, one for each weight decay, that precondition every rank of a path.

    - Two classes, or few columns and classes: the exact Hessian where it was taken.
    - More of them: each class has the curvature ``(1 - sum p^2) / (C - 1)``, the mean eigenvalue of
      ``diag(p) - p p^T`` off its null space.
    - Very many columns: that curvature's diagonal.
    """

    def __init__(self, design: _Design) -> None:
        self._A, self._turn, self._weights = design.A, design.turn, design.weights
        self._p, self._C = p, C = design.shape[1], design.targets.shape[1]
        self._joint = C > 1 and p * C <= JOINT_COLUMNS
        self._diagonal = not self._joint and p > SHARED_COLUMNS
        self.cost = p * C * (C + 1) / 8 if self._joint else 1.0 if self._diagonal else p / 4
        """What taking the curvature costs, in iterations of a single problem's arithmetic."""
        self._factors: dict[float, Array] = {}

    def take(self, decays: Sequence[float], scores: Array | None) -> None:
        """Take the curvature at ``scores`` (n, C), or at zero coefficients, for these weight decays."""
        # At zero coefficients all rows are alike.
        scores = np.zeros((1, self._C)) if scores is None else scores
        curvature = self._of_all(scores) if self._joint else self._of_each(scores)
        for decay in decays:
            self._factors[decay] = self._factor(curvature, decay)

    def solve(self, G: Array, decays: Array, mask: Array) -> Array:
        """Inverse approximate Hessians times gradients G (p, R, C); ``mask`` (p, R, 1) cuts the ranks."""
        out = np.empty_like(G)
        for decay in np.unique(decays):
            own = np.flatnonzero(decays == decay)
            out[:, own] = self._solve(self._factors[float(decay)], G[:, own], mask[:, own])
        return out

    def _of_each(self, scores: Array) -> Array:
        n, C = scores.shape
        spread = np.empty(n)
        for rows in _row_blocks(scores, C):
            prob = _inverse_link(scores[rows])
            spread[rows] = (prob * (1 - prob))[:, 0] if C == 1 else (1 - (prob * prob).sum(axis=1)) / (C - 1)
        if self._diagonal:
            shares = np.broadcast_to(spread, len(self._A)) / len(self._A)
            parts = ((own, X if self._turn is None else X @ self._turn) for own, X in blocks(self._A))
            return np.asarray(sum(np.einsum("np,np,n->p", X, X, shares[own]) for own, X in parts))
        return self._gram(spread)

    def _of_all(self, scores: Array) -> Array:
        """Rows and columns by column of the design, and within it by class."""
        p, C, prob = self._p, self._C, _inverse_link(scores)
        full = np.empty((p, C, p, C))
        for c in range(C):
            full[:, c, :, c] = self._gram(prob[:, c] * (1 - prob[:, c]))
            for other in range(c):
                full[:, c, :, other] = full[:, other, :, c] = -self._gram(prob[:, c] * prob[:, other])
        # Adding a constant to all classes changes nothing, so that curvature is 0 there; gradients have no
        # part in it, and any positive number makes the matrix invertible.
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
        """Lower Cholesky factor of curvature plus weight decay; for a diagonal (p,), their sum."""
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


class _LockStep:
    """Regularised logistic regressions on leading columns of one design, by preconditioned L-BFGS.

    Problem j sees the first ``sizes[j]`` columns and has its own weight decay: coefficients B (p, C) minimise

        mean_i s_i loss(A_i B, y_i) + decay/2 * sum of squares of B, the bias's row 0 left out

    with the logistic loss (C = 1) or softmax cross-entropy. Scores are linear along a direction, so that a
    line search needs no further product with A, and the products of all problems are one matrix product.
    Problems are set aside as they converge.
    """

    def __init__(
        self, design: _Design, sizes: NDArray[np.int64], decays: Array, start: Array, curvature: _Curvature
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
        nothing = np.zeros((width, *start.shape[1:]))
        self.solution = _Solution(nothing, np.zeros(len(R)), R < 0, np.zeros_like(R))

    def _start(self, B: Array) -> None:
        """Start from the best multiple of B: without what was masked it may be far too sure of itself."""
        self.B, self.scores = np.zeros_like(B), np.zeros((len(self.weights), *B.shape[1:]))
        if not B.any():
            return
        scores = self.design.times(B)
        slope = self._slopes(scores, np.zeros(B.shape[1]), np.arange(B.shape[1]))[0]
        share = np.where(slope < 0, self._line_search(B, scores, slope), 0.0)[None, :, None]
        self.B, self.scores = share * B, share * scores
        unsure = (share[0, :, 0] < SURE) & B.any(axis=(0, 2))
        for decay in np.unique(self.decays[unsure]):
            among = np.flatnonzero(self.decays == decay)
            worst = among[np.argmin(share[0, among, 0])]
            self.curvature.take([float(decay)], self.scores[:, worst])

    def run(self, tolerance: float, max_iter: int) -> _Solution:
        """Solve all problems, to gradients of this Euclidean norm or in so many iterations."""
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

    def _gradient(self) -> Array:
        n, R, C = self.scores.shape

        def residual(rows: slice) -> Array:
            made = _inverse_link(self.scores[rows]) - self.targets[rows, None, :]
            made *= self.weights[rows, None, None]
            return made.reshape(-1, R * C)

        product = self.design.back(len(self.mask), R * C, residual)
        return (product.reshape(-1, R, C) / n + self.penalty * self.B) * self.mask

    def _refresh(self, before: Array, norms: Array, age: int, tolerance: float) -> bool:
        """Take curvature anew for each weight decay where the iterations it saves are worth it.

        The problem furthest from its solution decides: at its rate since the last time it would need
        ``left`` more iterations, against a few with its own curvature.
        """
        # A few problems at once cost as much as eight: their products are bound by memory.
        price = self.curvature.cost / max(self.B.shape[1] * self.B.shape[2], 8)
        taken = False
        for decay in np.unique(self.decays):
            among = np.flatnonzero(self.decays == decay)
            worst = among[np.argmax(norms[among])]
            rate = np.log(before[worst] / norms[worst]) / age
            left = np.log(norms[worst] / tolerance) / rate if rate > 0 else np.inf
            if left > FRESH_ITERATIONS + price:
                self.curvature.take([float(decay)], self.scores[:, worst])
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
        for rows in _row_blocks(along, along[0].size):
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
        for _ in range(LINE_STEPS):
            t = steps[left]
            at, second = self._slopes(along, t, left)
            at += line[left] + t * curve[left]
            flat = np.abs(at) <= FLAT_LINE * np.abs(slope[left])
            if flat.all():
                break
            second += curve[left]
            high[left] = np.where(at > 0, np.minimum(high[left], t), high[left])
            low[left] = np.where(at < 0, np.maximum(low[left], t), low[left])
            steps[left[~flat]] = _next_step(t, at, second, low[left], high[left])[~flat]
            left = left[~flat]
        return steps

    def _slopes(self, along: Array, t: Array, chosen: NDArray[np.int64]) -> tuple[Array, Array]:
        """First and second derivatives of the mean losses of some problems at steps t (R') along a line."""
        n, R, C = along.shape
        first, second = np.zeros(len(chosen)), np.zeros(len(chosen))
        every = slice(None) if len(chosen) == R else chosen
        for rows in _row_blocks(along, len(chosen) * C):
            tangent = along[rows, every]
            p = _inverse_link(self.scores[rows, every] + t[None, :, None] * tangent)
            weighted = tangent * self.weights[rows, None, None]
            first += np.einsum("nrc,nrc->r", p - self.targets[rows, None, :], weighted)
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
    return np.where((newton > low) & (newton < longest), newton, middle)
