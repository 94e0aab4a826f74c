"""Exact rank paths: linear probes of every rank and weight decay, solved side by side.

NCM (paper, equation 4) minimises the training loss over theta subject to ``theta^T Q_r = 0``. In coordinates
[bias, complement of the basis, basis reversed] this says that the last r coefficients are zero: after one
rotation every rank is a slice of leading columns. The Cholesky factor of a leading block is the leading block
of the factor, so one factor L of a Hessian serves all ranks: ``H_r^-1 g = L^-T mask(L^-1 g)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Features, blocks, in_memory
from ncm_cli.errors import InputError
from ncm_cli.solvers.design import Design
from ncm_cli.solvers.lockstep import Curvature, LockStep, Solution
from ncm_cli.solvers.methods import MAX_ITER, TOLERANCE
from ncm_cli.solvers.projection import blas_threads
from ncm_cli.solvers.training_set import Fit

LARGEST_FEATURE = 1e100
"""Features beyond this would overflow in sums of squares."""

CHUNK_ELEMENTS = 4_000_000
"""Most scores (rows × problems × classes) in memory at once: 32 MB an array."""

BLOCKED_ELEMENTS = 32_000_000
"""`CHUNK_ELEMENTS` for row blocks, which are read twice per iteration: at most three arrays of 256 MB."""

FIRST_RANKS = 8
"""Ranks in the first chunk: few, as they start far from their solutions; eight cost about as much as one."""

STALE_ITERATIONS = 8
"""If a chunk took more iterations than this on average, the curvature is recomputed for the next one."""

SLOW_ITERATIONS = 60
"""If a fit of a chunk took more iterations than this, the next chunk is smaller."""


Solutions = Iterator[tuple[list[tuple[int, float]], Solution]]
"""The (rank, weight decay) of some problems, and their solution."""


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
        Most iterations of each fit. Ignored for regression, which is solved directly.
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
    rows = in_memory(X)
    if len(X) < X.shape[1]:  # the rows span fewer dimensions than they have
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
        design = Design.rotate(rows, y, n_classes, basis[:, : ranks[-1]], weights, regression)
        solutions = (
            _ridge(design, ranks, decays)
            if regression
            else _logistic(design, ranks, decays, tolerance, max_iter)
        )
        for group, solution in solutions:
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
    for part, rows in blocks(X):
        largest = float(np.abs(rows).max(initial=0.0))
        if not np.isfinite(largest):
            bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
            raise InputError("features hold NaN or an infinity", where=f"row {part.start + bad}")
        if largest > LARGEST_FEATURE:
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


def _ridge(design: Design, ranks: list[int], decays: list[float]) -> Solutions:
    """All ranks at once for each weight decay: one factorisation and two triangular solves.

    Weight decay 0 gives least squares; for dependent columns, the solution of least norm up to rounding.
    """
    y = design.targets[:, 0]
    n, p = design.shape
    mask = (np.arange(p)[:, None] < p - np.asarray(ranks)[None, :]).astype(np.float64)
    q = design.A.shape[1]
    gram, right = np.zeros((q, q)), np.zeros(q)
    for part, rows in blocks(design.A):
        weighted = rows * design.weights[part, None]
        gram += weighted.T @ rows
        right += weighted.T @ y[part]
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
        yield [(rank, decay) for rank in ranks], Solution(B[:, :, None], norms, ones > 0, ones)


def _logistic(
    design: Design, ranks: list[int], decays: list[float], tolerance: float, max_iter: int
) -> Solutions:
    """Solve the path in chunks of ranks that grow as solutions change less from one to the next."""
    (n, p), C = design.shape, design.targets.shape[1]
    square = sum(np.einsum("np,np,n->", rows, rows, design.weights[part]) for part, rows in blocks(design.A))
    limit = tolerance * float(np.sqrt(square / n))
    most = (CHUNK_ELEMENTS if design.turn is None else BLOCKED_ELEMENTS) // (n * C)
    if design.turn is not None and 1 < len(decays) > most:
        for decay_part in np.array_split(decays, -(-len(decays) // max(1, most))):
            yield from _logistic(design, ranks, decay_part.tolist(), tolerance, max_iter)
        return
    D = len(decays)
    widest = max(1, most // D)
    curvature = Curvature(design)
    curvature.take(decays, None)
    start = np.zeros((p, D, C))
    done, width = 0, min(FIRST_RANKS, widest)
    while done < len(ranks):
        chunk = ranks[done : done + width]
        sizes, tiled = np.repeat(p - np.asarray(chunk, np.int64), D), np.tile(decays, len(chunk))
        problems = LockStep(design, sizes, tiled, np.tile(start, (1, len(chunk), 1)), curvature)
        solution = problems.run(limit, max_iter)
        yield [(rank, decay) for rank in chunk for decay in decays], solution
        start = solution.B[:, -D:]
        if solution.iterations.mean() > STALE_ITERATIONS and done + width < len(ranks):
            for j, decay in enumerate(decays):
                curvature.take([decay], design.times(start[:, j]))
        done += len(chunk)
        slow = solution.iterations.max() > SLOW_ITERATIONS
        width = max(1, len(chunk) // 4) if slow else min(2 * len(chunk), widest)
