"""Ridge regressions on leading columns of one design matrix, by one factorisation a weight decay.

The objective is ``mean_i s_i (y_i - A_i b)^2 + decay * |b|^2`` on centred columns and targets, the
intercept unpenalised: scikit-learn's ``Ridge(alpha=n * decay)``.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

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
