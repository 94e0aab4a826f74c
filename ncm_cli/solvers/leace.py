"""LEACE: erases a column from features, so that no linear probe can predict it (Belrose et al. 2023).

The eraser x − L R (x − μ) is affine, so a probe on erased features is a probe on the features themselves.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Features, applied, blocks, moments
from ncm_cli.errors import InputError

LEAST_CORRELATION = 1e-8
"""Correlations below this aren't erased: above float64's rounding, below the effect of a single row."""

LARGEST_GAP = 1e-6
"""Largest remaining difference of means without a warning, in standard deviations: far more than
`LEAST_CORRELATION` leaves, far less than a probe could use."""


@dataclasses.dataclass(frozen=True, slots=True)
class Eraser:
    """x ↦ x − L R (x − μ), theorem 4.3, with L (d, k), R (k, d) and μ (d,)."""

    left: Array
    right: Array
    mean: Array

    def apply(self, X: Features) -> Any:
        """Erased rows, float64 (n, d)."""
        return applied(X, lambda rows: rows - ((rows - self.mean) @ self.right.T) @ self.left.T)

    def fold(self, weight: Array, bias: Array) -> tuple[Array, Array]:
        """Turn a probe on erased features, ``weight`` (..., C, d) and ``bias`` (..., C), into the same one on
        the original features."""
        through = weight @ self.left
        return weight - through @ self.right, bias + through @ (self.right @ self.mean)


def fit_eraser(X: Features, codes: NDArray[np.integer]) -> Eraser:
    """The eraser of a categorical column with codes (n,) that changes the features (n, d) least.

    It removes the differences between the values' mean features, whatever their size. "Least" is in mean
    square, under a covariance of the features that is shrunk towards an isotropic one (the package's
    default). This isn't quite the least-squares eraser of these rows, but it works with few rows for the
    dimensions. A warning is given if a difference remains.

    Raises
    ------
    InputError
        The package ``concept-erasure`` isn't installed, or the column has one value only.
    """
    try:
        with warnings.catch_warnings():
            # The package scripts a function with torch.jit, which warns of its deprecation at import.
            warnings.simplefilter("ignore")
            from concept_erasure import LeaceFitter
    except ImportError:
        raise InputError(
            "leace needs the package concept-erasure", fix="pip install 'ncm-cli[leace]'"
        ) from None
    values = np.unique(codes, return_inverse=True)[1].reshape(-1)
    if values.max() == 0:
        raise InputError("the column to erase has one value only on the training rows")
    one_hot = np.eye(values.max() + 1)[values]
    # The package's tolerances are absolute. With features of unit size and standardised indicators its
    # singular values are correlations, however rare a value is and whatever the features' unit.
    mean, deviation = moments(X)
    square = sum(float(((rows - mean) ** 2).sum()) for _, rows in blocks(X))
    size = np.sqrt(square / (len(X) * X.shape[1])) or 1.0
    indicators = ((one_hot - one_hot.mean(0)) / one_hot.std(0))[:, 1:]  # the first follows from the others
    fitter = LeaceFitter(X.shape[1], indicators.shape[1], dtype=torch.float64, svd_tol=LEAST_CORRELATION)
    for part, rows in blocks(X):
        fitter.update(torch.from_numpy((rows - mean) / size), torch.from_numpy(indicators[part]))
    eraser = Eraser(fitter.eraser.proj_left.numpy(), fitter.eraser.proj_right.numpy(), mean)
    # The largest difference between the mean of a value's rows and of all rows, in standard deviations.
    sums = sum(
        (one_hot[part].T @ rows for part, rows in blocks(eraser.apply(X))),
        np.zeros((one_hot.shape[1], X.shape[1])),
    )
    differences = np.abs(sums / one_hot.sum(0)[:, None] - sums.sum(0) / len(X))[:, deviation > 0]
    gap = float((differences / deviation[deviation > 0]).max(initial=0.0))
    if gap > LARGEST_GAP:
        warnings.warn(
            f"leace leaves a difference of means of {gap:.2g} standard deviations: "
            "a feature that predicts the erased column is too small beside others; try --scaling standard",
            stacklevel=2,
        )
    return eraser
