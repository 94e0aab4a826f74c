"""The scikit-learn estimators: scikit-learn's own checks, agreement with the path, use in its tools."""

from __future__ import annotations

import doctest
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from ncm_cli import NCMClassifier, NCMRegressor, SpuriousProjection
from ncm_cli.probes import estimator
from ncm_cli.solvers.projection import spectrum
from ncm_cli.store.pairs import read_pairs
from tests.world import planted


@pytest.mark.parametrize(
    "made", [NCMClassifier(), pytest.param(NCMRegressor(), marks=pytest.mark.slow)], ids=repr
)
def test_passes_scikit_learns_checks(made: Any) -> None:
    with warnings.catch_warnings():
        # Optional checks that scikit-learn skips where pandas or the array API are missing.
        warnings.simplefilter("ignore")
        check_estimator(made)


def test_docstring_example_runs() -> None:
    assert doctest.testmod(estimator).failed == 0
    assert doctest.testmod(estimator).attempted > 0


def test_without_pairs_it_is_logistic_regression() -> None:
    X, y = planted(0).rows(300, 0.9, classes=3)
    ours = NCMClassifier(weight_decay=1e-3).fit(X, y)
    theirs = LogisticRegression(C=1 / (300 * 1e-3), tol=1e-10, max_iter=5000).fit(X.astype(np.float64), y)
    assert np.abs(ours.predict_proba(X) - theirs.predict_proba(X.astype(np.float64))).max() < 1e-5
    assert ours.decision_function(X).shape == (300, 3)
    assert ours.rank_ == 0


def test_regressor_without_pairs_is_ridge() -> None:
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(80, 6)) + 5, rng.normal(size=80)
    ours, theirs = NCMRegressor(weight_decay=0.1).fit(X, y), Ridge(alpha=80 * 0.1).fit(X, y)
    assert np.allclose(ours.coef_, theirs.coef_, atol=1e-10)
    assert ours.intercept_ == pytest.approx(theirs.intercept_, abs=1e-9)


def test_pairs_remove_the_shortcut() -> None:
    made = planted(2)
    (X, y), (X_test, y_test), (a, b) = made.rows(800, 0.95), made.rows(800, 0.05), made.pairs(60)
    erm, ncm = NCMClassifier().fit(X, y), NCMClassifier().fit(X, y, pairs=(a, b))
    assert erm.score(X, y) > 0.9
    assert erm.score(X_test, y_test) < 0.4, "the shortcut must be there before it is removed"
    assert ncm.rank_ == 3
    assert ncm.score(X_test, y_test) > 0.6
    assert np.abs(ncm.coef_ @ ncm.basis_).max() < 1e-9


def _uneven(made: Any, n: int, k: int) -> tuple[Any, ...]:
    """Training rows, test rows and pairs whose features have scales from .1 to 10: a scaler matters."""
    scales = 10.0 ** np.linspace(-1, 1, made.directions.shape[0])
    (X, y), (X_test, y_test), (a, b) = made.rows(n, 0.95), made.rows(800, 0.05), made.pairs(k)
    return X * scales, y, X_test * scales, y_test, a * scales, b * scales


@pytest.fixture
def _routing() -> Iterator[None]:
    with config_context(enable_metadata_routing=True):
        yield


@pytest.mark.usefixtures("_routing")
@pytest.mark.parametrize("kind", ["classifier", "projection"])
def test_a_pipeline_transforms_routed_pairs_like_rows(kind: str) -> None:
    X, y, X_test, y_test, a, b = _uneven(planted(3), 800, 60)
    scaler = StandardScaler().fit(X)
    by_hand = NCMClassifier(rank=3).fit(
        scaler.transform(X), y, pairs=(scaler.transform(a), scaler.transform(b))
    )
    expected = by_hand.score(scaler.transform(X_test), y_test)
    assert expected > 0.6
    if kind == "classifier":
        last = [NCMClassifier(rank=3).set_fit_request(pairs=True)]
    else:
        last = [SpuriousProjection(rank=3).set_fit_request(pairs=True), LogisticRegression(C=1 / 0.08)]
    steps = [(str(i), step) for i, step in enumerate([StandardScaler(), *last])]
    routed = Pipeline(steps, transform_input=["pairs"]).fit(X, y, pairs=(a, b))
    assert routed.score(X_test, y_test) == pytest.approx(expected, abs=0.005)
    searched = GridSearchCV(Pipeline(steps, transform_input=["pairs"]), {"1__rank": [0, 3]}, cv=3)
    assert searched.fit(X, y, pairs=(a, b)).best_params_["1__rank"] == 0, "in-domain selection prefers it"


def test_raw_pairs_behind_a_scaler_are_warned_of() -> None:
    X, y, X_test, y_test, a, b = _uneven(planted(3), 800, 60)
    pipeline = make_pipeline(StandardScaler(), NCMClassifier(rank=3))
    with pytest.warns(UserWarning, match="the features of pairs' members are typically spread"):
        pipeline.fit(X, y, ncmclassifier__pairs=(a, b))
    first = make_pipeline(SpuriousProjection(rank=3, pairs=(a, b)), NCMClassifier()).fit(X, y)
    assert first.score(X_test, y_test) > pipeline.score(X_test, y_test) + 0.1


def test_pairs_of_one_scene_or_few_are_no_reason_to_warn() -> None:
    made = planted(3)
    (X, y), (a, b) = made.rows(200, 0.9), made.pairs(30)
    NCMClassifier().fit(X, y, pairs=(0.6 * a, 0.6 * b))
    NCMClassifier().fit(X, y, pairs=(a[:2], b[:2] / 100))


@pytest.mark.parametrize("n", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_grid_search_passes_pairs_whole(n: int) -> None:
    """Also where there are as many rows as features, or as pairs."""
    made = planted(3)
    (X, y), (a, b) = made.rows(n, 0.9), made.pairs(24)
    grid = {"rank": [0, 1, 3], "weight_decay": [1e-3, 1.0]}
    routed = GridSearchCV(NCMClassifier(), grid, cv=3).fit(X, y, pairs=(a, b))
    built = GridSearchCV(NCMClassifier(pairs=(a, b)), grid, cv=3).fit(X, y)
    assert routed.best_params_ == built.best_params_
    assert np.allclose(routed.cv_results_["mean_test_score"], built.cv_results_["mean_test_score"])


@pytest.mark.parametrize("kind", [list, tuple])
def test_pairs_of_several_kinds_make_one_spectrum(kind: type) -> None:
    made = planted(5)
    (X, y), (a, b), (c, d) = made.rows(300, 0.9), made.pairs(30), made.pairs(12)
    several = NCMClassifier(rank=3).fit(X, y, pairs=kind([(a, b), [c, d]]))
    stacked = NCMClassifier(rank=3).fit(X, y, pairs=(np.vstack([a, c]), np.vstack([b, d])))
    assert np.array_equal(several.coef_, stacked.coef_)
    basis = np.linalg.svd(np.vstack([a - b, c - d]).T.astype(float), full_matrices=False)[0][:, :3]
    assert np.allclose(several.basis_ @ several.basis_.T, basis @ basis.T, atol=1e-6)
    alone = SpuriousProjection(rank=3, pairs=kind([(a, b), (c, d)])).fit()
    assert np.array_equal(alone.basis_, several.basis_)
    with pytest.raises(ValueError, match="the same pairs are given twice"):
        NCMClassifier().fit(X, y, pairs=[(a, b), (a, b)])
    with pytest.raises(ValueError, match="a different number of features than other pairs"):
        SpuriousProjection(pairs=[(a, b), (c[:, :3], d[:, :3])]).fit()
    with pytest.raises(ValueError, match="not by differences"):
        NCMClassifier().fit(X, y, pairs=[a - b, c - d, a - b])


def test_projection_then_logistic_equals_the_classifier() -> None:
    made = planted(4)
    (X, y), (a, b) = made.rows(300, 0.9), made.pairs(30)
    removed = SpuriousProjection(rank=3, pairs=(a, b)).fit().transform(X)
    explicit = LogisticRegression(C=1 / (300 * 1e-3), tol=1e-10, max_iter=5000).fit(removed, y)
    ours = NCMClassifier(rank=3, weight_decay=1e-3).fit(X, y, pairs=(a, b))
    assert np.abs(ours.predict_proba(X) - explicit.predict_proba(removed)).max() < 1e-5


@pytest.mark.parametrize("rows", [24, 300])
def test_a_projection_in_a_pipeline_keeps_its_pairs(rows: int) -> None:
    """Refitted or frozen, and where X is square, which a matrix of differences could be taken for."""
    made = planted(5)
    (X, y), (a, b) = made.rows(rows, 0.9), made.pairs(30)
    alone = SpuriousProjection(rank=3, pairs=(a, b)).fit()
    ours = LogisticRegression().fit(alone.transform(X), y).predict_proba(alone.transform(X))
    for first in (SpuriousProjection(rank=3, pairs=(a, b)), alone, FrozenEstimator(alone)):
        steps = make_pipeline(first, LogisticRegression()).fit(X, y)
        assert np.allclose(steps.predict_proba(X), ours)
    with pytest.raises(ValueError, match="fitted on pairs, not on rows or differences"):
        make_pipeline(SpuriousProjection(rank=3), LogisticRegression()).fit(X, y)
    with pytest.raises(ValueError, match="fitted on pairs, not on rows or differences"):
        SpuriousProjection().fit((a - b).T)


def test_a_pair_store_is_taken_without_its_held_out_pairs(on_disk: Any) -> None:
    store = read_pairs(on_disk.pairs)
    assert store.holdout.any()
    X, y = on_disk.planted.rows(300, 0.9)
    members = (store.features_a[~store.holdout], store.features_b[~store.holdout])
    given, built = NCMClassifier(3).fit(X, y, pairs=members), NCMClassifier(3, pairs=store).fit(X, y)
    assert np.array_equal(given.coef_, built.coef_)
    assert np.allclose(built.basis_, spectrum(store.delta[:, ~store.holdout]).basis[:, :3], atol=1e-6)
    assert np.array_equal(clone(NCMRegressor(3, pairs=store)).fit(X, y).basis_, built.basis_)


def test_sample_weights_count_as_repeats() -> None:
    rng = np.random.default_rng(5)
    X, y = rng.normal(size=(60, 4)), rng.integers(2, size=60)
    times = rng.integers(1, 4, size=60)
    weighted = NCMClassifier(weight_decay=1e-2).fit(X, y, sample_weight=times)
    repeated = NCMClassifier(weight_decay=1e-2).fit(np.repeat(X, times, axis=0), np.repeat(y, times))
    assert np.allclose(weighted.coef_, repeated.coef_, atol=1e-6)


ROWS = np.random.default_rng(6).normal(size=(4, 6))


@pytest.mark.parametrize(
    ("pairs", "rank", "message"),
    [
        (ROWS.T, None, r"by their members, not by differences\n  found: an array of shape \(6, 4\)"),
        (ROWS, None, r"expected: pairs=\(A, B\)"),
        ("pairs.h5", None, "found: str"),
        ((ROWS, ROWS, ROWS), None, "found: tuple"),
        ((ROWS, ROWS[:3]), None, "have different shapes"),
        ((ROWS[:, :5], ROWS[:, 1:]), None, "a different number of features"),
        ((ROWS, 2 * ROWS), 5, "a whole number from 0 to 4"),
        ((ROWS, np.full((4, 6), np.nan)), None, "contains NaN"),
        ((ROWS[0], ROWS[1]), None, "Expected 2D array"),
        (None, 1, "a whole number from 0 to 0"),
    ],
)
def test_bad_pairs_are_value_errors(pairs: Any, rank: int | None, message: str) -> None:
    X, y = np.random.default_rng(6).normal(size=(20, 6)), np.arange(20) % 2
    for fit in (
        lambda: NCMClassifier(rank).fit(X, y, pairs=pairs),
        lambda: NCMRegressor(rank, pairs=pairs).fit(X, y),
    ):
        with pytest.raises(ValueError, match=message):
            fit()


def test_pairs_are_given_once() -> None:
    X, y = np.random.default_rng(6).normal(size=(20, 6)), np.arange(20) % 2
    with pytest.raises(ValueError, match="both at construction and in fit"):
        NCMClassifier(pairs=(ROWS, 2 * ROWS)).fit(X, y, pairs=(ROWS, 2 * ROWS))


def test_says_when_it_did_not_converge() -> None:
    X, y = planted(7).rows(200, 0.9)
    with pytest.warns(ConvergenceWarning, match="after 1 iterations"):
        NCMClassifier(max_iter=1).fit(X, y)
