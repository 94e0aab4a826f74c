"""DFR against scikit-learn and its own promises; LEACE against its theorem."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from ncm_cli.errors import InputError
from ncm_cli.solvers.dfr import SUBSETS, _subsets, fit_dfr, halves
from ncm_cli.solvers.leace import fit_eraser
from ncm_cli.solvers.methods import Config
from ncm_cli.solvers.trainer import Schedule, train
from ncm_cli.solvers.training_set import TrainingSet

OLD = LogisticRegression().get_params()["penalty"] == "l2"  # before scikit-learn 1.8
L1: dict[str, Any] = {"penalty": "l1"} if OLD else {"l1_ratio": 1.0}
"""The L1 penalty, as this version of scikit-learn is told of it."""


def spurious_problem(seed: int, n: int = 600, d: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features whose column 0 tells the label and column 1, louder, the place; groups are unequal."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    place = np.where(rng.random(n) < 0.9, y, 1 - y)
    X = rng.standard_normal((n, d))
    X[:, 0] += 2 * (2 * y - 1)
    X[:, 1] += 4 * (2 * place - 1)
    return X, y, 2 * y + place


def liblinear(Z: np.ndarray, y: np.ndarray, C: float) -> tuple[np.ndarray, float]:
    """The authors' estimator for two classes, to more digits."""
    model = LogisticRegression(**L1, C=C, solver="liblinear", tol=1e-9, max_iter=5000).fit(Z, y)
    return model.coef_[0], model.intercept_[0]


def test_subsets_hold_every_group_equally() -> None:
    _, _, groups = spurious_problem(0)
    rows = _subsets(groups, 3, SUBSETS)
    smallest = np.bincount(groups).min()
    assert rows.shape == (20, 4 * smallest)
    for subset in rows:
        assert len(set(subset.tolist())) == len(subset)
        assert (np.bincount(groups[subset]) == smallest).all()
    assert not np.array_equal(np.sort(rows[0]), np.sort(rows[1]))
    np.testing.assert_array_equal(rows, _subsets(groups, 3, SUBSETS))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_dfr_is_the_average_of_liblinears_fits_on_rows_scaled_by_the_training_rows(seed: int) -> None:
    X, y, groups = spurious_problem(seed, d=20)
    train, fresh = (3 * spurious_problem(other, d=20)[0] - 1 for other in (seed + 50, seed + 90))
    mean, scale = train.mean(0), train.std(0)
    for C, found in zip(
        [1.0, 0.3], fit_dfr(X, y, groups, 2, [1.0, 0.3], seed=seed, scale_by=train), strict=True
    ):
        fits = [liblinear((X[rows] - mean) / scale, y[rows], C) for rows in _subsets(groups, seed, 20)]
        weight, bias = (np.mean(part, axis=0) for part in zip(*fits, strict=True))
        assert found.converged and np.abs(weight).max() > 0.01
        np.testing.assert_allclose(found.weight[0] * scale, weight, atol=1e-5)
        logits = fresh @ found.weight[0] + found.bias[0]
        np.testing.assert_allclose(logits, (fresh - mean) / scale @ weight + bias, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_converged_means_close_to_another_solvers_solution(seed: int, classes: int) -> None:
    """saga, with the intercept as a feature so that it is penalised too."""
    rng = np.random.default_rng([seed, classes])
    n, d = 90 * classes, 12
    y = np.arange(n) % classes
    X = rng.standard_normal((n, d)) * rng.uniform(0.5, 3, d) + rng.standard_normal(d)
    X[:, :classes] += np.eye(classes)[y] * 2
    rows = _subsets(y, seed, 1)[0]
    Z = (X[rows] - X[rows].mean(0)) / X[rows].std(0)
    design = np.column_stack([Z, np.ones(len(rows))])
    for C, found in zip([3.0, 0.1], fit_dfr(X, y, y, classes, [3.0, 0.1], seed=seed, subsets=1), strict=True):
        assert found.converged
        for positive, weight, bias in zip(
            (1,) if classes == 2 else range(classes), found.weight, found.bias, strict=True
        ):
            model = LogisticRegression(
                **L1, solver="saga", C=C, tol=1e-10, max_iter=200_000, fit_intercept=False
            ).fit(design, y[rows] == positive)
            ours = np.append(weight * X[rows].std(0), bias + weight @ X[rows].mean(0))
            np.testing.assert_allclose(ours, model.coef_[0], atol=1e-5)
            assert np.abs(ours).max() > 0.1


def test_an_unfinished_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, groups = spurious_problem(0)
    monkeypatch.setattr("ncm_cli.solvers.dfr.LIBLINEAR_MAX_ITER", 2)
    assert [fit.converged for fit in fit_dfr(X, y, groups, 2, [10.0, 1e-6], seed=0)] == [False, True]


def test_groups_that_leave_a_subset_without_a_class_are_refused() -> None:
    X, y, _ = spurious_problem(0)
    groups = np.repeat([0, 1], [len(y) - 5, 5])
    with pytest.raises(InputError, match="lacks a class"):
        fit_dfr(X, (np.arange(len(y)) == 3).astype(int), groups, 2, [1.0], seed=0)


def test_dfr_lifts_the_worst_group_above_erms() -> None:
    X, y, groups = spurious_problem(1, n=1500)
    fresh, labels, members = spurious_problem(2, n=3000)
    erm = LogisticRegression(C=1.0).fit(X, y)
    dfr = fit_dfr(X, y, groups, 2, [0.1, 1e-6], seed=0)

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


@pytest.mark.parametrize(("rare", "unit"), [(8, 1.0), (1, 1e-6), (1, 1e6)])
def test_leace_erases_rare_values_whatever_the_unit(rare: int, unit: float) -> None:
    rng = np.random.default_rng(rare)
    codes = np.repeat([1, 0], [rare, 4000 - rare])
    X = rng.standard_normal((4000, 20)) + 5
    X[:rare, 3] += 2.5
    X *= unit
    eraser = fit_eraser(X, codes)
    before, after = (
        np.abs(part[codes == 1].mean(0) - part[codes == 0].mean(0)).max() / unit
        for part in (X, eraser.apply(X))
    )
    assert before > 1
    assert after < 1e-11
    y = (X[:, 3] > 6 * unit).astype(int)
    weights = []
    for features in (X / unit, eraser.apply(X) / unit):
        data = TrainingSet(X=features, y=y, n_classes=2)
        weights.append(train([Config(lr=0.05)], data, Schedule(epochs=5))[0].weight)
    folded, _ = eraser.fold(weights[1], np.zeros(1))
    assert np.abs(weights[0] - folded).max() > 1e-2


def test_leace_warns_where_a_difference_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    X, _, groups = spurious_problem(4)
    monkeypatch.setattr("ncm_cli.solvers.leace.LEAST_CORRELATION", 2.0)
    with pytest.warns(UserWarning, match="leaves a difference of means of"):
        eraser = fit_eraser(X, groups % 2)
    np.testing.assert_array_equal(eraser.apply(X), X)


def test_leace_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    X, _, groups = spurious_problem(5)
    with pytest.raises(InputError, match="one value only"):
        fit_eraser(X, np.zeros(len(groups), int))
    monkeypatch.setitem(sys.modules, "concept_erasure", None)
    with pytest.raises(InputError, match="needs the package concept-erasure") as caught:
        fit_eraser(X, groups)
    assert "ncm-cli[leace]" in str(caught.value)
