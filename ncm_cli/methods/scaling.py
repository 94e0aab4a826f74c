"""Feature scaling: none, rows to a norm, or columns to unit variance; pairs are scaled like rows."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError

Array = NDArray[np.float64]

KINDS = ("none", "norm", "standard")


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

    def apply(self, X: NDArray[np.floating]) -> Array:
        """Scaled rows, float64 (n, d). A row of zeros stays zero under ``norm``."""
        rows: Array = np.asarray(X, np.float64)
        if self.kind == "norm":
            norms = np.sqrt(np.einsum("nd,nd->n", rows, rows))
            return rows * (self.factor / np.where(norms > 0, norms, 1.0))[:, None]
        if self.mean is not None and self.scale is not None:
            return (rows - self.mean) / self.scale
        return rows

    def magnitude(self, X: NDArray[np.floating]) -> float:
        """Root mean square entry in the scaled unit, before centring: what rounding is relative to."""
        if not len(X):
            return 0.0
        rows: Array = np.asarray(X, np.float64)
        unit = rows / self.scale if self.scale is not None else self.apply(rows)
        return float(np.sqrt(np.mean(unit**2)))


def fit_scaling(kind: str, factor: float, X: NDArray[np.floating]) -> Scaling:
    """The scaling of ``kind``; ``X`` (n, d) are the training rows, used by ``standard`` only.

    Raises
    ------
    InputError
        An unknown kind, a factor that isn't positive, or no rows for ``standard``.
    """
    if kind not in KINDS:
        raise InputError(f"no feature scaling named {kind!r}", expected=" | ".join(KINDS))
    if kind == "norm" and not (np.isfinite(factor) and factor > 0):
        raise InputError("the scale factor must be above 0", found=factor)
    if kind != "standard":
        return Scaling(kind=kind, factor=float(factor))
    if not len(X):
        raise InputError("standard scaling needs training rows", found="none")
    X = np.asarray(X, np.float64)
    mean, deviation = X.mean(axis=0), X.std(axis=0)
    # A constant column's deviation is rounding of its mean, not spread.
    constant = deviation <= 1e-7 * np.abs(mean)
    return Scaling(kind=kind, factor=1.0, mean=mean, scale=np.where(constant, 1.0, deviation))
