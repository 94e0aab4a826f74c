"""Feature scaling."""

from __future__ import annotations

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.solvers.projection import fit_scaling


def test_norm_gives_every_row_the_factor_as_its_norm() -> None:
    X = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    X[3] = 0
    scaled = fit_scaling("norm", 10.0, X).apply(X)
    norms = np.linalg.norm(scaled, axis=1)
    assert np.allclose(np.delete(norms, 3), 10)
    assert norms[3] == 0, "a row of zeros has no direction and stays"
    assert scaled.dtype == np.float64


def test_norms_are_not_taken_in_the_features_own_precision() -> None:
    """numpy/numpy#8775."""
    X = np.full((2, 4096), 20, np.float16)
    scaled = fit_scaling("norm", 1.0, X).apply(X)
    assert np.allclose(np.linalg.norm(scaled, axis=1), 1), "their squares sum to more than float16 holds"


def test_standard_uses_the_training_rows_only() -> None:
    rng = np.random.default_rng(1)
    train, other = rng.normal(3, 2, size=(500, 4)), rng.normal(size=(10, 4))
    train[:, 2] = 0.1
    scaling = fit_scaling("standard", 10.0, train)
    scaled = scaling.apply(train)
    assert np.allclose(scaled.mean(axis=0), 0, atol=1e-12)
    assert np.allclose(scaled[:, [0, 1, 3]].std(axis=0), 1)
    assert scaling.scale is not None
    assert scaling.scale[2] == 1, "a constant column isn't blown up"
    assert np.allclose(scaling.apply(other), (other - train.mean(axis=0)) / scaling.scale)


def test_differences_scale_like_members_under_standard() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(6, 3)), rng.normal(size=(6, 3))
    scaling = fit_scaling("standard", 1.0, a)
    assert np.allclose(scaling.apply(a) - scaling.apply(b), (a - b) / scaling.scale)


def test_none_changes_nothing() -> None:
    X = np.random.default_rng(3).normal(size=(4, 2))
    assert np.array_equal(fit_scaling("none", 10.0, X).apply(X), X)


@pytest.mark.parametrize(
    ("kind", "factor", "rows", "message"),
    [
        ("unit", 1.0, 2, "no feature scaling named 'unit'"),
        ("norm", 0.0, 2, "must be above 0"),
        ("norm", float("nan"), 2, "must be above 0"),
        ("standard", 1.0, 0, "needs training rows"),
    ],
)
def test_bad_scalings_are_refused(kind: str, factor: float, rows: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_scaling(kind, factor, np.ones((rows, 3)))
