"""Scaling of features, and spurious directions: left singular vectors of pair differences, projected out.

Paper, Algorithm 1, phase I: ``Q_r, S_r, V_r = TruncatedSVD(delta, r)`` and ``P = I - Q_r Q_r^T``. P is
never formed; it is applied as ``x - (x Q) Q^T``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Features, applied, moments
from ncm_cli.errors import InputError
from ncm_cli.solvers.methods import SCALINGS

SMALL_ELEMENTS = 4_000_000
"""One thread is used if the largest matrix has at most this many entries.

An exact rank path is thousands of products of a few milliseconds, between which OpenBLAS's threads spin. On
two busy cores, several threads took 15 times the processor time of one on 2,000 × 100 rows, and three times
on 5,000 × 512.
"""

FEATURE_EPS = float(np.finfo(np.float32).eps)
"""Relative rounding of features on disk (float32, 1.2e-7), which limits the precision of differences."""

GRAM_RATIO = 4
"""With more pairs per dimension than this, the d×d Gram matrix is decomposed instead of ``delta``."""

GRAM_BLOCK = 8192
"""Columns of ``delta`` that are converted to float64 at a time for the Gram matrix."""


@contextmanager
def blas_threads(elements: int) -> Iterator[None]:
    """Let BLAS use one thread inside, if the largest matrix has at most `SMALL_ELEMENTS` entries."""
    if elements > SMALL_ELEMENTS:
        yield
        return
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield


def svd(matrix: Array, *, full_matrices: bool = False) -> tuple[Array, Array, Array]:
    """``numpy.linalg.svd``, with LAPACK's slower ``gesvd`` if its ``gesdd`` fails.

    ``gesdd`` may report "did not converge" for finite matrices with many equal or tiny singular values,
    such as what is left of a matrix after a projection; ``gesvd`` handles those.
    """
    try:
        left, values, right = np.linalg.svd(matrix, full_matrices=full_matrices)
    except np.linalg.LinAlgError:
        # Imported here, where it is rarely needed: it takes longer than all else that ncm bound does.
        import scipy.linalg

        left, values, right = scipy.linalg.svd(matrix, full_matrices=full_matrices, lapack_driver="gesvd")
    return left, values, right


def spectral_norm(matrix: Array) -> float:
    """The largest singular value."""
    return float(svd(matrix)[1][0])


@dataclasses.dataclass(frozen=True, slots=True)
class Spectrum:
    """Singular values and left singular vectors of pair differences."""

    singular_values: Array
    """float64 (m,), in descending order, m = min(d, k)."""
    basis: Array
    """float64 (d, m): orthonormal columns; only the first ``rank`` are above the noise."""
    rank: int
    """Number of singular values above ``tolerance``."""
    tolerance: float
    """The noise floor, in the features' unit (see `spectrum`)."""
    gap: int
    """The r <= rank with the largest ratio ``s_r / s_{r+1}`` (values under the tolerance count as the
    tolerance); 0 if there is none, since the end of the spectrum doesn't count as a gap."""


def spectrum(delta: NDArray[np.floating], *, magnitude: float = 0.0, eps: float = FEATURE_EPS) -> Spectrum:
    """The singular spectrum of pair differences, in float64, the same bits on every run.

    Parameters
    ----------
    delta : (d, k)
        One difference a column. k may be 0.
    magnitude
        Root mean square entry of the pairs' members, if known. Rounding features of that size to
        float32 leaves a noise matrix of spectral norm about ``eps/2 * sqrt(2) * magnitude * (sqrt(d) +
        sqrt(k))`` in ``delta``, which matters when members are large and their differences small.
    eps
        Relative precision of the features.

    Returns
    -------
    Spectrum
        The numerical rank counts singular values above ``max(d, k) * eps * s_1`` (numpy's rule, at the
        precision of the features) and above the rounding noise that ``magnitude`` implies. Each column's
        sign makes its largest entry (in absolute value) positive.

    Raises
    ------
    InputError
        ``delta`` isn't two-dimensional, or holds NaN or an infinity.

    Notes
    -----
    For ``k > 4 d`` the Gram matrix ``delta delta^T`` is summed over blocks of columns. Squaring halves the
    digits: singular values under about ``sqrt(d * eps64) * s_1`` (3e-7 for d = 512) are noise, so the
    tolerance is at least that. With float32 features the rule above is the larger one.
    """
    if delta.ndim != 2:
        raise InputError("differences aren't a matrix", found=f"shape {delta.shape}", expected="(d, k)")
    d, k = delta.shape
    bad = np.flatnonzero(~np.isfinite(delta).all(axis=0))
    if bad.size:
        raise InputError("a pair's difference holds NaN or an infinity", where=f"pair {int(bad[0])}")
    if min(d, k) == 0:
        return Spectrum(np.zeros(0), np.zeros((d, 0)), 0, 0.0, 0)
    floor = 0.0
    if k > GRAM_RATIO * d:
        gram = np.zeros((d, d))
        for start in range(0, k, GRAM_BLOCK):
            block = np.asarray(delta[:, start : start + GRAM_BLOCK], np.float64)
            gram += block @ block.T
        squares, vectors = np.linalg.eigh(gram)
        values, vectors = np.sqrt(np.maximum(squares[::-1], 0.0)), vectors[:, ::-1]
        floor = float(np.sqrt(d * np.finfo(np.float64).eps))
    else:
        with blas_threads(delta.size):
            vectors, values, _ = svd(np.asarray(delta, np.float64))
    signs = np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])])
    basis = np.ascontiguousarray(vectors * np.where(signs == 0, 1.0, signs))
    rounding = eps / np.sqrt(2) * magnitude * (np.sqrt(d) + np.sqrt(k))
    tolerance = max(max(max(d, k) * eps, floor) * float(values[0]), rounding)
    rank = int((values > tolerance).sum())
    floored = np.maximum(values[: rank + 1], tolerance)
    gap = int(np.argmax(floored[:-1] / floored[1:])) + 1 if rank and len(floored) > 1 else 0
    return Spectrum(values, basis, rank, tolerance, gap)


def project(X: NDArray[np.floating], basis: Array) -> Array:
    """Rows X (n, d) with the directions of ``basis`` (d, r) projected out, in float64: ``X - (X Q) Q^T``."""
    rows: Array = np.asarray(X, np.float64)
    return rows - (rows @ basis) @ basis.T if basis.shape[1] else rows.copy()


def complement(basis: Array) -> Array:
    """An orthonormal basis of everything orthogonal to ``basis``: float64 (d, d - r)."""
    d, r = basis.shape
    if r == 0:
        return np.eye(d)
    # Imported here: it takes longer than everything else that a quick command does.
    import scipy.linalg

    full = scipy.linalg.qr(basis, mode="full", check_finite=False)[0]
    return np.ascontiguousarray(full[:, r:])


@dataclasses.dataclass(frozen=True, slots=True)
class Scaling:
    """How features are scaled before anything is fitted on them.

    Attributes
    ----------
    kind
        ``none``; ``norm``: each row divided by its Euclidean norm, times ``factor``; ``standard``: each
        column minus ``mean``, divided by ``scale``.
    factor
        The rows' norm, for ``norm`` only.
    mean, scale : float64 (d,) or None
        For ``standard`` only. A column that is constant on the training rows has scale 1.
    """

    kind: str = "none"
    factor: float = 1.0
    mean: Array | None = None
    scale: Array | None = None

    def apply(self, X: Features) -> Any:
        """Scaled rows, float64 (n, d); an array for an array. A row of zeros stays zero under ``norm``."""
        return applied(X, self._scaled)

    def _scaled(self, X: NDArray[np.floating]) -> Array:
        rows: Array = np.asarray(X, np.float64)
        if self.kind == "norm":
            norms = np.sqrt(np.einsum("nd,nd->n", rows, rows))
            return rows * (self.factor / np.where(norms > 0, norms, 1.0))[:, None]
        if self.mean is not None and self.scale is not None:
            return (rows - self.mean) / self.scale
        return rows

    def magnitude(self, X: NDArray[np.floating]) -> float:
        """Root mean square entry in the scaled unit, before centring; rounding is relative to it."""
        if not len(X):
            return 0.0
        unit = np.asarray(X, np.float64) / self.scale if self.scale is not None else self.apply(X)
        return float(np.sqrt(np.mean(unit**2)))


def fit_scaling(kind: str, factor: float, X: Features) -> Scaling:
    """The scaling of ``kind``; ``X`` (n, d) are the training rows, used by ``standard`` only.

    Raises `InputError` for an unknown kind, a factor that isn't positive, or no rows for ``standard``.
    """
    if kind not in SCALINGS:
        raise InputError(f"no feature scaling named {kind!r}", expected=" | ".join(SCALINGS))
    if kind == "norm" and not (np.isfinite(factor) and factor > 0):
        raise InputError("the scale factor must be above 0", found=factor)
    if kind != "standard":
        return Scaling(kind, float(factor))
    if not len(X):
        raise InputError("standard scaling needs training rows", found="none")
    mean, deviation = moments(X)
    # A constant column's deviation is rounding of its mean, not spread.
    return Scaling(kind, 1.0, mean, np.where(deviation <= 1e-7 * np.abs(mean), 1.0, deviation))
