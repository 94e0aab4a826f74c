"""The scikit-learn estimators: scikit-learn's own checks, agreement with the path, use in its tools."""

from __future__ import annotations

import doctest
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from ncm_cli import NCMClassifier, NCMRegressor, SpuriousProjection, estimator


@pytest.mark.parametrize("made", [NCMClassifier(), NCMRegressor()], ids=repr)
def test_passes_scikit_learns_checks(made: Any) -> None:
    with warnings.catch_warnings():
        # Optional checks that scikit-learn skips where pandas or the array API are missing.
        warnings.simplefilter("ignore")
        check_estimator(made)


def test_docstring_example_runs() -> None:
    assert doctest.testmod(estimator).failed == 0
    assert doctest.testmod(estimator).attempted > 0


def test_without_pairs_it_is_logistic_regression(make_planted: Callable[[int], Any]) -> None:
    X, y = make_planted(0).rows(300, 0.9, classes=3)
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


def test_pairs_remove_the_shortcut(make_planted: Callable[[int], Any]) -> None:
    made = make_planted(2)
    (X, y), (X_test, y_test), (a, b) = made.rows(800, 0.95), made.rows(800, 0.05), made.pairs(60)
    erm, ncm = NCMClassifier().fit(X, y), NCMClassifier().fit(X, y, pairs=(a - b).T)
    assert erm.score(X, y) > 0.9
    assert erm.score(X_test, y_test) < 0.4, "the shortcut must be there before it is removed"
    assert ncm.rank_ == 3
    assert ncm.score(X_test, y_test) > 0.6
    assert np.abs(ncm.coef_ @ ncm.basis_).max() < 1e-9


def test_works_in_pipeline_and_grid_search(make_planted: Callable[[int], Any]) -> None:
    made = make_planted(3)
    (X, y), (a, b) = made.rows(200, 0.9), made.pairs(30)
    scaler = StandardScaler().fit(X)
    pipeline = make_pipeline(StandardScaler(), NCMClassifier())
    pipeline.fit(X, y, ncmclassifier__pairs=((a - b) / scaler.scale_).T)
    assert pipeline.predict(X).shape == (200,)
    search = GridSearchCV(NCMClassifier(), {"rank": [0, 1, 3], "weight_decay": [1e-3, 1.0]}, cv=3)
    search.fit(X, y, pairs=(a - b).T)
    assert search.best_params_["rank"] == 0, "in-domain selection prefers the shortcut"


def test_projection_then_logistic_equals_the_classifier(make_planted: Callable[[int], Any]) -> None:
    made = make_planted(4)
    (X, y), (a, b) = made.rows(300, 0.9), made.pairs(30)
    removed = SpuriousProjection(rank=3).fit((a - b).T).transform(X)
    explicit = LogisticRegression(C=1 / (300 * 1e-3), tol=1e-10, max_iter=5000).fit(removed, y)
    ours = NCMClassifier(rank=3, weight_decay=1e-3).fit(X, y, pairs=(a - b).T)
    assert np.abs(ours.predict_proba(X) - explicit.predict_proba(removed)).max() < 1e-5


def test_a_frozen_projection_works_in_a_pipeline(make_planted: Callable[[int], Any]) -> None:
    frozen = pytest.importorskip("sklearn.frozen")
    made = make_planted(5)
    (X, y), (a, b) = made.rows(300, 0.9), made.pairs(30)
    projection = SpuriousProjection(rank=3).fit((a - b).T)
    steps = make_pipeline(frozen.FrozenEstimator(projection), LogisticRegression()).fit(X, y)
    ours = LogisticRegression().fit(projection.transform(X), y)
    assert np.allclose(steps.predict_proba(X), ours.predict_proba(projection.transform(X)))


def test_refitting_a_projection_on_rows_is_refused(make_planted: Callable[[int], Any]) -> None:
    X, y = make_planted(6).rows(300, 0.9)
    with pytest.raises(ValueError, match="features"):
        make_pipeline(SpuriousProjection(rank=3), LogisticRegression()).fit(X, y)


def test_sample_weights_count_as_repeats() -> None:
    rng = np.random.default_rng(5)
    X, y = rng.normal(size=(60, 4)), rng.integers(2, size=60)
    times = rng.integers(1, 4, size=60)
    weighted = NCMClassifier(weight_decay=1e-2).fit(X, y, sample_weight=times)
    repeated = NCMClassifier(weight_decay=1e-2).fit(np.repeat(X, times, axis=0), np.repeat(y, times))
    assert np.allclose(weighted.coef_, repeated.coef_, atol=1e-6)


@pytest.mark.parametrize(
    ("pairs", "rank", "message"),
    [
        (np.ones((5, 4)), None, "another number of features"),
        (np.ones((3, 6)), None, r"try: pairs\.T"),
        (np.ones((6, 4)), 2, "a whole number from 0 to 1"),
        (np.full((6, 4), np.nan), None, "NaN or an infinity"),
        (None, 1, "a whole number from 0 to 0"),
    ],
)
def test_bad_pairs_are_value_errors(pairs: Any, rank: int | None, message: str) -> None:
    rng = np.random.default_rng(6)
    with pytest.raises(ValueError, match=message):
        NCMClassifier(rank).fit(rng.normal(size=(20, 6)), np.arange(20) % 2, pairs=pairs)


def test_says_when_it_did_not_converge(make_planted: Callable[[int], Any]) -> None:
    X, y = make_planted(7).rows(200, 0.9)
    with pytest.warns(ConvergenceWarning, match="after 1 iterations"):
        NCMClassifier(max_iter=1).fit(X, y)
