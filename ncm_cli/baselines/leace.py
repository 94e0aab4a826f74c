"""LEACE: features from which a column can no longer be told linearly (Belrose et al. 2023).

The eraser x − L R (x − μ) is affine, so a probe on erased features is a probe on the features themselves.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError

Array = NDArray[np.float64]

CORRELATION = 1e-8
"""The least correlation with the column that is erased: above float64's rounding, below what a row shows."""

GAP = 1e-6
"""Standard deviations: far more than `CORRELATION` leaves, far less than a probe could use."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Eraser:
    """x ↦ x − L R (x − μ), theorem 4.3."""

    left: Array
    """(d, k)."""
    right: Array
    """(k, d)."""
    mean: Array
    """(d,)."""

    def apply(self, X: NDArray[np.floating]) -> Array:
        """Erased rows, float64 (n, d)."""
        X = np.asarray(X, np.float64)
        return X - ((X - self.mean) @ self.right.T) @ self.left.T

    def fold(self, weight: Any, bias: Any) -> tuple[Any, Any]:
        """The probe on given features equal to (``weight`` (..., C, d), ``bias`` (..., C)) on erased ones.

        Takes and gives numpy arrays.
        """
        through = weight @ self.left
        return weight - through @ self.right, bias + through @ (self.right @ self.mean)


def fit_eraser(X: NDArray[np.floating], codes: NDArray[np.integer]) -> Eraser:
    """The eraser of a categorical column that changes the features least.

    It takes the difference of the values' means out of the features, whatever its size. "Least" is meant in
    mean square under a covariance of the features that is shrunk towards an isotropic one (the package's
    default): not quite the least-squares eraser of these rows, but one that holds up where there are few rows
    for the dimensions. A warning says where a difference stays.

    Parameters
    ----------
    X
        (n, d) training features.
    codes
        (n,) the column's codes; erasing is of their one-hot form.

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
    import torch

    _, values = np.unique(codes, return_inverse=True)
    if values.max() == 0:
        raise InputError("the column to erase has one value only on the training rows")
    hot = np.eye(values.max() + 1)[values.reshape(-1)]
    # The package's tolerances are absolute. With features of unit size and standardised indicators its
    # singular values are correlations, however rare a value is and whatever the features' unit.
    mean: Array = np.asarray(X, np.float64).mean(0)
    centred = X - mean
    size = np.sqrt((centred**2).mean()) or 1.0
    indicators = ((hot - hot.mean(0)) / hot.std(0))[:, 1:]  # the first follows from the others
    fitter = LeaceFitter(X.shape[1], indicators.shape[1], dtype=torch.float64, svd_tol=CORRELATION)
    fitter.update(torch.from_numpy(centred / size), torch.from_numpy(indicators))
    left, right = fitter.eraser.proj_left.numpy(), fitter.eraser.proj_right.numpy()
    eraser = Eraser(left=left, right=right, mean=mean)
    gap = _gap(eraser.apply(X), hot, centred.std(0))
    if gap > GAP:
        warnings.warn(
            f"leace leaves a difference of means of {gap:.2g} standard deviations: "
            "a feature that tells the erased column is too small beside the others; try --scaling standard",
            stacklevel=2,
        )
    return eraser


def _gap(X: Array, hot: Array, deviation: Array) -> float:
    """The largest difference of a value's mean from all rows', in the features' standard deviations."""
    means = hot.T @ X / hot.sum(0)[:, None]
    varies = deviation > 0
    return float(np.abs((means - X.mean(0)) / np.where(varies, deviation, 1.0))[:, varies].max(initial=0.0))
