"""Thousands of classes: scores are worked on in blocks of rows, and few arrays of their size are held."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ncm_cli.solvers import design, lockstep
from ncm_cli.solvers.path import fit_path
from ncm_cli.solvers.training_set import Fit


def path(classes: int, n: int = 60, d: int = 8, **options: float) -> list[Fit]:
    rng = np.random.default_rng(classes)
    y = np.arange(n) % classes
    X = rng.normal(size=(classes, d))[y] + rng.normal(size=(n, d))
    basis = np.linalg.qr(rng.normal(size=(d, 4)))[0]
    weights = rng.uniform(0.5, 2, size=n)
    return fit_path(X, y, classes, basis, [0, 2, 4], [1e-2, 1.0], weights=weights, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [2, 30])
@pytest.mark.parametrize("joint", [True, False])
def test_blocks_of_rows_change_no_number(classes: int, joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not joint:
        monkeypatch.setattr(lockstep, "JOINT_COLUMNS", 0)
    whole = path(classes)
    for scores in (1, 70):
        monkeypatch.setattr(design, "BLOCK_SCORES", scores)
        for a, b in zip(whole, path(classes), strict=True):
            assert a.converged and b.converged
            np.testing.assert_allclose(b.weight, a.weight, atol=1e-8)
            np.testing.assert_allclose(b.bias, a.bias, atol=1e-8)


def test_few_arrays_of_rows_by_classes_are_held() -> None:
    n = classes = 1500
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(n, 4)), np.arange(n)
    tracemalloc.start()
    fit_path(X, y, classes, np.zeros((4, 0)), [0], [1e-2], max_iter=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The scores, the scores along a direction, and the targets as booleans.
    assert peak < 3 * 8 * n * classes
