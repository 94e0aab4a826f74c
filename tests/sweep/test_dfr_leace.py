"""DFR against scikit-learn and its own promises; LEACE against its theorem."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from ncm_cli.errors import InputError
from ncm_cli.methods.dfr import SUBSETS, _subsets, fit_dfr, halves
from ncm_cli.methods.leace import fit_eraser


def spurious_problem(seed: int, n: int = 600, d: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features whose column 0 tells the label and column 1, louder, the place; groups are unequal."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    place = np.where(rng.random(n) < 0.9, y, 1 - y)
    X = rng.standard_normal((n, d))
    X[:, 0] += 2 * (2 * y - 1)
    X[:, 1] += 4 * (2 * place - 1)
    return X, y, 2 * y + place


def test_subsets_hold_every_group_equally() -> None:
    _, _, groups = spurious_problem(0)
    rows = _subsets(groups, seed=3)
    smallest = np.bincount(groups).min()
    assert rows.shape == (SUBSETS, 4 * smallest)
    for subset in rows:
        assert len(set(subset.tolist())) == len(subset)
        assert (np.bincount(groups[subset]) == smallest).all()
    assert not np.array_equal(np.sort(rows[0]), np.sort(rows[1]))
    np.testing.assert_array_equal(rows, _subsets(groups, seed=3))


@pytest.mark.parametrize("classes", [2, 3])
def test_each_fit_is_scikit_learns(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncm_cli.methods.dfr.SUBSETS", 1)
    rng = np.random.default_rng(classes)
    n, d = 240, 6
    y = np.arange(n) % classes
    X = rng.standard_normal((n, d)) * rng.uniform(0.5, 3, d) + rng.standard_normal(d)
    X[:, :classes] += np.eye(classes)[y] * 2
    groups = y.astype(np.int64)
    rows = _subsets(groups, seed=0)[0]
    for l1 in (0.003, 0.05):
        found = fit_dfr(X, y, groups, classes, [l1], seed=0, tolerance=1e-8, max_iter=20_000)[0]
        assert found.converged
        mean, scale = X.mean(0), X.std(0)
        model = LogisticRegression(
            l1_ratio=1.0, solver="saga", C=1 / (len(rows) * l1), tol=1e-10, max_iter=200_000
        ).fit(((X - mean) / scale)[rows], y[rows])
        np.testing.assert_allclose(found.weight, model.coef_ / scale, atol=2e-4)
        ours = X @ found.weight.T + found.bias
        theirs = ((X - mean) / scale) @ model.coef_.T + model.intercept_
        shift = 0 if classes == 2 else (ours - theirs).mean()
        np.testing.assert_allclose(ours - shift, theirs, atol=2e-3)


def test_dfr_lifts_the_worst_group_above_erms() -> None:
    X, y, groups = spurious_problem(1, n=1500)
    fresh, labels, members = spurious_problem(2, n=3000)
    erm = LogisticRegression(C=1.0).fit(X, y)
    dfr = fit_dfr(X, y, groups, 2, [0.01, 10.0], seed=0)

    def worst(right: np.ndarray) -> float:
        return min(right[members == g].mean() for g in range(4))

    before = worst(erm.predict(fresh) == labels)
    after = worst(((fresh @ dfr[0].weight[0] + dfr[0].bias[0]) > 0) == labels)
    assert after > before + 0.02
    assert np.abs(dfr[1].weight).max() == 0, "a huge penalty leaves nothing"


def test_halves_split_every_group_and_refuse_lone_rows() -> None:
    _, _, groups = spurious_problem(3)
    fit, judged = halves(groups, seed=1)
    assert sorted([*fit, *judged]) == list(range(len(groups)))
    for g in range(4):
        assert abs((groups[fit] == g).sum() - (groups[judged] == g).sum()) <= 1
    with pytest.raises(InputError, match="two validation rows of every group"):
        halves(np.array([0, 0, 1]), seed=0)


def test_leace_erases_the_column_and_the_probe_folds() -> None:
    X, _, groups = spurious_problem(4)
    place = groups % 2
    before = np.abs(X[place == 1].mean(0) - X[place == 0].mean(0)).max()
    eraser = fit_eraser(X, place)
    erased = eraser.apply(X)
    after = np.abs(erased[place == 1].mean(0) - erased[place == 0].mean(0)).max()
    assert before > 1
    assert after < 1e-10
    assert LogisticRegression().fit(X, place).score(X, place) > 0.95
    assert LogisticRegression().fit(erased, place).score(erased, place) < 0.65
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((5, 3, 8)), rng.standard_normal((5, 3))
    folded, shifted = eraser.fold(weight, bias)
    expected = np.einsum("nd,rcd->nrc", erased, weight) + bias
    np.testing.assert_allclose(np.einsum("nd,rcd->nrc", X, folded) + shifted, expected, atol=1e-10)


def test_leace_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    X, _, groups = spurious_problem(5)
    with pytest.raises(InputError, match="one value only"):
        fit_eraser(X, np.zeros(len(groups), int))
    monkeypatch.setitem(sys.modules, "concept_erasure", None)
    with pytest.raises(InputError, match="needs the package concept-erasure") as caught:
        fit_eraser(X, groups)
    assert "ncm-cli[leace]" in str(caught.value)
