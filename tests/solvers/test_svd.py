"""The decomposition goes on where LAPACK's quick routine gives up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncm_cli.solvers.projection import spectral_norm, svd


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (25, 25)])
@pytest.mark.parametrize("failing", [False, True])
def test_the_fallback_gives_the_same(
    shape: tuple[int, int], failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = np.random.default_rng(3).standard_normal(shape)
    expected = np.linalg.svd(matrix, compute_uv=False)

    def fails(*_: Any, **__: Any) -> None:
        raise np.linalg.LinAlgError("SVD did not converge")

    if failing:
        monkeypatch.setattr(np.linalg, "svd", fails)
    left, values, right = svd(matrix)
    assert np.allclose(values, expected, rtol=1e-12)
    assert np.allclose((left * values) @ right, matrix, atol=1e-12)
    assert spectral_norm(matrix) == pytest.approx(expected[0])
