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
    """The least-squares eraser of a categorical column.

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
    hot = torch.nn.functional.one_hot(torch.from_numpy(values.reshape(-1)))
    features = torch.from_numpy(np.asarray(X, np.float64))
    fitter = LeaceFitter(features.shape[1], hot.shape[1], dtype=torch.float64)
    fitter.update(features, hot.to(torch.float64))
    eraser = fitter.eraser
    mean = features.mean(0) if eraser.bias is None else eraser.bias
    return Eraser(left=eraser.proj_left.numpy(), right=eraser.proj_right.numpy(), mean=mean.numpy())
