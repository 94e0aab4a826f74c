"""Ridge regressions on leading columns of one design matrix, by one factorisation a weight decay.

The objective is ``mean_i s_i (y_i - A_i b)^2 + decay * |b|^2`` on centred columns and targets, the
intercept unpenalised: scikit-learn's ``Ridge(alpha=n * decay)``.

Exact rank paths: one rotation of the features, after which every rank is a column slice.

NCM (paper, equation 4): minimise the training loss over theta subject to ``theta^T Q_r = 0``. In
coordinates [complement of the basis, basis in reverse order] the constraint of rank r says that the last r
coefficients are zero, so the problems of all ranks are nested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.probes import logistic
from ncm_cli.probes.logistic import Data, Preconditioner
from ncm_cli.probes.options import MAX_ITER, TOLERANCE
from ncm_cli.probes.projection import blas_threads

Array = NDArray[np.float64]


def solve_sizes(A: Array, y: Array, weights: Array, sizes: NDArray[np.int64], decay: float) -> Array:
    """Coefficients of each problem, zero beyond its columns.

    Parameters
    ----------
    A : float64 (n, p)
        Centred columns (weighted mean 0).
    y : float64 (n,)
        Centred targets.
    weights : float64 (n,)
        Of the rows, mean 1.
    sizes : int (R,)
        Leading columns that each problem sees.
    decay
        0 gives least squares; where columns are dependent, the solution of least norm up to rounding.

    Returns
    -------
    float64 (p, R)

    Notes
    -----
    With ``H = A^T S A / n + decay I = L L^T``, the factor of a leading block is the leading block of L, so
    all ranks are ``L^-T mask(L^-1 A^T S y / n)``: one factorisation and two triangular solves.
    """
    n, p = A.shape
    weighted = A * weights[:, None]
    H = weighted.T @ A / n
    right = weighted.T @ y / n
    H[np.diag_indices(p)] += decay
    mask = (np.arange(p)[:, None] < sizes[None, :]).astype(np.float64)
    jitter = 0.0
    scale = max(float(np.diagonal(H).max(initial=0.0)), 1e-300)
    while True:
        try:
            lower = np.linalg.cholesky(H + jitter * np.eye(p))
            break
        except np.linalg.LinAlgError:
            jitter = max(jitter * 10, 1e-14 * scale)
    half = scipy.linalg.solve_triangular(lower, right, lower=True, check_finite=False)
    return np.asarray(
        scipy.linalg.solve_triangular(lower, half[:, None] * mask, lower=True, trans="T", check_finite=False)
    )


CHUNK_ELEMENTS = 4_000_000
"""Scores (rows × problems × classes) held at once: 32 MB an array."""

LARGEST = 1e100
"""Features beyond this would overflow in sums of squares."""

STALE_ITERATIONS = 8
"""A chunk that took more iterations than this on average makes the next one take the curvature anew."""


FIRST_RANKS = 8
"""Ranks that are solved side by side at first: so few start near nothing, so many cost as much as one."""

SLOW_ITERATIONS = 60
"""A chunk with a fit that took more makes the next one smaller: each fit then has curvature of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """One probe of a path.

    Attributes
    ----------
    rank, weight_decay
    weight : float64 (C, d)
        The projection folded in: orthogonal to the first ``rank`` directions. C = 1 for two classes and for
        regression.
    bias : float64 (C,)
    converged
        The gradient norm met the tolerance.
    iterations
    gradient_norm
        Euclidean norm of the gradient of the mean loss plus penalty.
    """

    rank: int
    weight_decay: float
    weight: Array
    bias: Array
    converged: bool
    iterations: int
    gradient_norm: float


def fit_path(
    X: NDArray[np.floating],
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
    rows: Array = np.asarray(X, np.float64)
    ranks = sorted({int(r) for r in ranks})
    decays = list(dict.fromkeys(float(decay) for decay in weight_decays))
    _check(rows, y, n_classes, basis, ranks, decays, task)
    if not tolerance > 0 or max_iter < 1:
        raise InputError("the tolerance must be above 0 and max_iter at least 1", found=(tolerance, max_iter))
    weights = np.ones(len(X)) if weights is None else weights / weights.mean()
    with blas_threads(rows.size):
        design = Design.rotate(rows, basis[:, : ranks[-1]], weights, ones=task != "regression")
        if task == "regression":
            return _ridge_path(design, np.asarray(y, np.float64), weights, basis, ranks, decays, advance)
        codes = np.asarray(y, np.int64)
        targets = codes[:, None] == (np.array([1]) if n_classes == 2 else np.arange(n_classes))[None, :]
        data = Data(design.A, targets, weights)
        limit = tolerance * float(np.sqrt(np.einsum("np,np,n->", design.A, design.A, weights) / len(X)))
        fits: dict[tuple[int, float], Fit] = {}
        for group, solution in _solve(data, design, ranks, decays, limit, max_iter):
            for j, (rank, decay) in enumerate(group):
                weight, bias = design.fold(solution.B[:, j], basis[:, :rank])
                fits[rank, decay] = Fit(
                    rank,
                    decay,
                    weight,
                    bias,
                    bool(solution.converged[j]),
                    int(solution.iterations[j]),
                    float(solution.gradient_norm[j]),
                )
            if advance:
                advance(len(group))
        return [fits[rank, decay] for rank in ranks for decay in decays]


def _check(
    X: Array,
    y: NDArray[np.generic],
    n_classes: int,
    basis: Array,
    ranks: list[int],
    decays: list[float],
    task: str,
) -> None:
    if not len(X):
        raise InputError("no training rows")
    bad = np.flatnonzero(~np.isfinite(X).all(axis=1))
    if bad.size:
        raise InputError("features hold NaN or an infinity", where=f"row {int(bad[0])}")
    if np.abs(X).max(initial=0.0) > LARGEST:
        raise InputError("features too large to be squared", found=f"up to {np.abs(X).max():.1e}")
    if not ranks or ranks[0] < 0 or ranks[-1] > basis.shape[1]:
        raise InputError(
            "a rank that the pairs don't have",
            found=ranks[-1] if ranks else "none",
            expected=f"0 to {basis.shape[1]}",
        )
    if not decays or min(decays) < 0 or not np.isfinite(decays).all():
        raise InputError("weight decays must be 0 or more", found=decays)
    if task == "regression":
        if not np.isfinite(np.asarray(y, np.float64)).all():
            raise InputError("targets hold NaN or an infinity")
    elif len(np.unique(y)) < 2 or n_classes < 2:
        raise InputError(
            "only one class among the training rows", found=f"{len(X)} rows", expected="two or more"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Design:
    """Rows in rotated, centred coordinates.

    Attributes
    ----------
    A : float64 (n, p)
        [ones,] complement, basis reversed.
    rotation : float64 (d, q) or None
        Columns: complement, basis reversed; None means the identity.
    mean : float64 (d,)
    ones
        Whether column 0 is ones.
    """

    A: Array
    rotation: Array | None
    mean: Array
    ones: bool

    @classmethod
    def rotate(cls, X: Array, basis: Array, weights: Array, *, ones: bool) -> Design:
        """Centre and rotate X (n, d) once; ``basis`` (d, m) are the directions that the path removes.

        When there are fewer rows than dimensions, coefficients lie in the span of the rows and the basis,
        so the complement is cut to that span.
        """
        n, d = X.shape
        m = basis.shape[1]
        mean = weights @ X / n
        centred = X - mean
        rotation: Array | None = None
        if n < d - m:
            outside = centred - (centred @ basis) @ basis.T
            span = scipy.linalg.qr(outside.T, mode="economic", check_finite=False)[0]
            span -= basis @ (basis.T @ span)
            rotation = np.hstack([span, basis[:, ::-1]])
        elif m:
            full = scipy.linalg.qr(basis, mode="full", check_finite=False)[0]
            rotation = np.hstack([full[:, m:], basis[:, ::-1]])
        Z = centred if rotation is None else centred @ rotation
        A = np.hstack([np.ones((n, 1)), Z]) if ones else Z
        return cls(A, rotation, mean, ones)

    def sizes(self, ranks: Sequence[int]) -> NDArray[np.int64]:
        """How many leading columns each rank keeps."""
        return self.A.shape[1] - np.asarray(ranks, np.int64)

    def fold(self, B: Array, removed: Array) -> tuple[Array, Array]:
        """Coefficients B (p, C) as weight (C, d) and bias (C,) on the features themselves."""
        bias, B = (B[0], B[1:]) if self.ones else (np.zeros(B.shape[1]), B)
        weight = (B if self.rotation is None else self.rotation @ B).T
        weight = weight - (weight @ removed) @ removed.T
        return np.ascontiguousarray(weight), bias - weight @ self.mean


def _solve(
    data: Data,
    design: Design,
    ranks: list[int],
    decays: list[float],
    limit: float,
    max_iter: int,
) -> Iterator[tuple[list[tuple[int, float]], logistic.Solution]]:
    """Solve the path in chunks of ranks that grow as solutions change less from one to the next."""
    n, p = data.A.shape
    C, D = data.targets.shape[1], len(decays)
    widest = max(1, CHUNK_ELEMENTS // (n * C * D))
    pre = Preconditioner(data)
    pre.update(decays, None)
    start = np.zeros((p, D, C))
    done, width = 0, min(FIRST_RANKS, widest)
    while done < len(ranks):
        chunk = ranks[done : done + width]
        group = [(rank, decay) for rank in chunk for decay in decays]
        solution = logistic.minimise(
            data,
            np.repeat(design.sizes(chunk), D),
            np.tile(decays, len(chunk)),
            np.tile(start, (1, len(chunk), 1)),
            pre,
            tolerance=limit,
            max_iter=max_iter,
        )
        yield group, solution
        start = solution.B[:, -D:]
        if solution.iterations.mean() > STALE_ITERATIONS and done + width < len(ranks):
            for j, decay in enumerate(decays):
                pre.update([decay], data.A @ start[:, j])
        done += len(chunk)
        slow = solution.iterations.max() > SLOW_ITERATIONS
        width = max(1, len(chunk) // 4) if slow else min(2 * len(chunk), widest)


def _ridge_path(
    design: Design,
    y: Array,
    weights: Array,
    basis: Array,
    ranks: list[int],
    decays: list[float],
    advance: Callable[[int], None] | None,
) -> list[Fit]:
    A, n = design.A, len(design.A)
    mean = float(weights @ y / n)
    sizes = design.sizes(ranks)
    fits: dict[tuple[int, float], Fit] = {}
    for decay in decays:
        B = solve_sizes(A, y - mean, weights, sizes, decay)
        errors = (A @ B - (y - mean)[:, None]) * weights[:, None]
        gradients = 2 * (A.T @ errors / n + decay * B) * (np.arange(len(B))[:, None] < sizes[None, :])
        for j, rank in enumerate(ranks):
            weight, bias = design.fold(B[:, j : j + 1], basis[:, :rank])
            norm = float(np.linalg.norm(gradients[:, j]))
            fits[rank, decay] = Fit(rank, decay, weight, bias + mean, True, 1, norm)
        if advance:
            advance(len(ranks))
    return [fits[rank, decay] for rank in ranks for decay in decays]
