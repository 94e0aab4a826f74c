"""Singular value decomposition that doesn't give up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def svd(matrix: Array, *, full_matrices: bool = False) -> tuple[Array, Array, Array]:
    """``numpy.linalg.svd``, with LAPACK's slower ``gesvd`` where its ``gesdd`` fails.

    ``gesdd`` may report "did not converge" for finite matrices with many equal or tiny singular values,
    such as what is left of a matrix after a projection; ``gesvd`` handles those.
    """
    try:
        found = np.linalg.svd(matrix, full_matrices=full_matrices)
    except np.linalg.LinAlgError:
        # Importing scipy takes longer than all else that ncm bound does, and this is rare.
        import scipy.linalg

        found = scipy.linalg.svd(matrix, full_matrices=full_matrices, lapack_driver="gesvd")
    left, values, right = found
    return left, values, right


def spectral_norm(matrix: Array) -> float:
    """The largest singular value."""
    return float(svd(matrix)[1][0])
