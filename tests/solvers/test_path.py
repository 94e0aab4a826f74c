"""Rank paths against scikit-learn on explicitly projected features, and their invariances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge

from ncm_cli.errors import InputError
from ncm_cli.probes.metrics import probabilities
from ncm_cli.solvers import lockstep
from ncm_cli.solvers.path import fit_path
from ncm_cli.solvers.projection import project, spectrum
from ncm_cli.solvers.training_set import Fit
from tests.world import planted


def rows(n: int, d: int, classes: int, seed: int, k: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Correlated, off-centre features, noisy labels, and a basis of ``k`` directions."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)) @ (rng.normal(size=(d, d)) * np.linspace(0.1, 1, d)) + rng.normal(size=d)
    scores = (X - X.mean(axis=0)) @ rng.normal(size=(d, classes))
    y = (2 * scores / scores.std() + rng.gumbel(size=(n, classes))).argmax(axis=1)
    return X, y, spectrum(rng.normal(size=(d, k))).basis


def explicit(X: np.ndarray, y: np.ndarray, fit: Fit, basis: np.ndarray, **more: Any) -> np.ndarray:
    """scikit-learn's probabilities on projected features."""
    projected = project(X, basis[:, : fit.rank])
    solver = "newton-cholesky" if len(np.unique(y)) == 2 else "lbfgs"
    model = LogisticRegression(C=1 / (len(X) * fit.weight_decay), tol=1e-12, solver=solver, max_iter=50_000)
    return np.asarray(model.fit(projected, y, **more).predict_proba(projected))


def ours(X: np.ndarray, fit: Fit) -> np.ndarray:
    return probabilities(X @ fit.weight.T + fit.bias)


@pytest.mark.parametrize("classes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_equals_logistic_regression_on_projected_features(classes: int) -> None:
    X, y, basis = rows(240, 24, classes, seed=0)
    fits = fit_path(X, y, classes, basis, range(13), [1e-3, 1e-1])
    assert [(fit.rank, fit.weight_decay) for fit in fits] == [(r, w) for r in range(13) for w in (1e-3, 1e-1)]
    assert all(fit.converged for fit in fits)
    assert max(np.abs(ours(X, fit) - explicit(X, y, fit, basis)).max() for fit in fits) < 1e-5


def test_more_dimensions_than_rows() -> None:
    X, y, basis = rows(40, 150, 2, seed=2)
    fits = fit_path(X, y, 2, basis, [0, 3, 12], [1e-3, 1.0])
    assert max(np.abs(ours(X, fit) - explicit(X, y, fit, basis)).max() for fit in fits) < 1e-5
    assert all(np.abs(fit.weight @ basis[:, : fit.rank]).max(initial=0) < 1e-12 for fit in fits)


def test_row_weights_are_scikit_learns_sample_weights() -> None:
    X, y, basis = rows(200, 10, 2, seed=3, k=4)
    weights = np.random.default_rng(3).uniform(0.1, 3, size=200)
    for fit in fit_path(X, y, 2, basis, [0, 2, 4], [1e-2], weights=weights):
        expected = explicit(X, y, fit, basis, sample_weight=weights / weights.mean())
        assert np.abs(ours(X, fit) - expected).max() < 1e-5


@pytest.mark.parametrize("mode", ["shared", "diagonal"])
def test_every_kind_of_preconditioner_reaches_the_same_solution(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y, basis = rows(200, 16, 3, seed=4, k=6)
    joint = fit_path(X, y, 3, basis, [0, 3, 6], [1e-2])
    monkeypatch.setattr(lockstep, "JOINT_COLUMNS", 0)
    if mode == "diagonal":
        monkeypatch.setattr(lockstep, "SHARED_COLUMNS", 0)
    other = fit_path(X, y, 3, basis, [0, 3, 6], [1e-2])
    assert all(fit.converged for fit in other)
    assert max(np.abs(ours(X, a) - ours(X, b)).max() for a, b in zip(joint, other, strict=True)) < 1e-6


@pytest.mark.parametrize("decay", [0.0, 1e-3, 1.0])
def test_ridge_equals_scikit_learns(decay: float) -> None:
    X, _, basis = rows(90, 20, 2, seed=5)
    y = X @ np.arange(20) + np.random.default_rng(5).normal(size=90)
    fits = fit_path(X, y, 0, basis, range(13), [decay], task="regression")
    for fit in fits:
        projected = project(X, basis[:, : fit.rank])
        model = (Ridge(alpha=90 * decay) if decay else LinearRegression()).fit(projected, y)
        assert np.abs(X @ fit.weight[0] + fit.bias[0] - model.predict(projected)).max() < 1e-6
        assert fit.converged
        assert fit.gradient_norm < 1e-6


def test_rank_0_is_erm_with_and_without_pairs() -> None:
    X, y, basis = rows(150, 12, 2, seed=6)
    with_pairs = fit_path(X, y, 2, basis, [0, 5], [1e-2])[0]
    without = fit_path(X, y, 2, basis[:, :0], [0], [1e-2])[0]
    assert np.allclose(with_pairs.weight, without.weight, atol=1e-6)


def test_removing_the_span_of_clean_pairs_makes_members_equal() -> None:
    made = planted(0)
    (X, y), (a, b) = made.rows(400, 0.95), made.pairs(30, noise=0.0)
    found = spectrum((a - b).T)
    assert found.rank == 3
    erm, ncm = fit_path(X, y, 2, found.basis, [0, 3], [1e-3])
    assert np.abs((a - b) @ erm.weight.T).max() > 1, "ERM tells the members apart"
    assert np.abs((a - b) @ ncm.weight.T).max() < 1e-5 * np.abs(a @ ncm.weight.T).max()


def test_planted_spurious_directions_are_found_and_unlearned() -> None:
    made = planted(1)
    (X, y), (X_test, y_test), (a, b) = made.rows(1500, 0.95), made.rows(1500, 0.05), made.pairs(60)
    found = spectrum((a - b).T)
    overlap = np.linalg.svd(found.basis[:, :3].T @ made.directions[:, 1:], compute_uv=False)
    assert found.gap == 3
    assert overlap.min() > 0.99
    erm, ncm = fit_path(X, y, 2, found.basis, [0, 3], [1e-3])
    accuracy = [np.mean((X_test @ fit.weight[0] + fit.bias[0] > 0) == y_test) for fit in (erm, ncm)]
    assert accuracy[0] < 0.4
    assert accuracy[1] > 0.65


@pytest.mark.parametrize("change", ["rows", "pairs", "rotation", "units"])
def test_what_must_not_matter_does_not(change: str) -> None:
    X, y, _ = rows(180, 14, 2, seed=7)
    rng = np.random.default_rng(7)
    delta = rng.normal(size=(14, 30)) * np.geomspace(1, 0.1, 14)[:, None]
    base = [ours(X, fit) for fit in fit_path(X, y, 2, spectrum(delta).basis, [0, 3, 7], [1e-2])]
    order, decay = np.arange(180), 1e-2
    if change == "rows":
        order = rng.permutation(180)
    elif change == "pairs":
        delta = delta[:, rng.permutation(30)] * rng.choice([-1, 1], size=30)
    elif change == "rotation":
        turn = np.linalg.qr(rng.normal(size=(14, 14)))[0]
        X, delta = X @ turn.T, turn @ delta
    else:
        X, delta, decay = X * 1000, delta * 1000, decay * 1e6
    fits = fit_path(X[order], y[order], 2, spectrum(delta).basis, [0, 3, 7], [decay])
    for before, fit in zip(base, fits, strict=True):
        assert np.abs(ours(X, fit) - before).max() < 1e-5


def test_a_path_alone_and_among_others_is_the_same() -> None:
    X, y, basis = rows(200, 15, 3, seed=8)
    every = {(f.rank, f.weight_decay): f for f in fit_path(X, y, 3, basis, range(13), [1e-4, 1e-2, 1.0])}
    alone = fit_path(X, y, 3, basis, [7], [1e-4])[0]
    assert np.abs(ours(X, alone) - ours(X, every[7, 1e-4])).max() < 1e-5


def test_separable_classes_and_no_weight_decay_still_end() -> None:
    rng = np.random.default_rng(9)
    X = rng.normal(size=(120, 30))
    y = (X @ rng.normal(size=30) > 0).astype(int)
    basis = spectrum(rng.normal(size=(30, 10))).basis
    fits = fit_path(X, y, 2, basis, range(8), [0.0, 1e-8, 1e-4], max_iter=400)
    assert all(np.isfinite(fit.weight).all() for fit in fits)
    assert all(fit.converged for fit in fits if fit.weight_decay > 0)
    assert np.mean((X @ fits[0].weight[0] + fits[0].bias[0] > 0) == y) == 1


def test_constant_and_badly_scaled_columns() -> None:
    X, y, basis = rows(200, 10, 2, seed=10, k=3)
    X = np.hstack([X * np.geomspace(1e-3, 1e3, 10), np.full((200, 2), 7.0)])
    basis = np.vstack([basis, np.zeros((2, 3))])
    for fit in fit_path(X, y, 2, basis, [0, 3], [1e-4]):
        assert fit.converged
        residual = scipy.special.expit(X @ fit.weight[0] + fit.bias[0]) - y
        gradient = project((X.T @ residual / 200 + 1e-4 * fit.weight[0])[None], basis[:, : fit.rank])
        assert np.abs(gradient).max() < 1e-4, "the columns reach 1e4, and the criterion is relative to that"
        assert np.abs(fit.weight[0, 10:]).max() < 1e-6


def test_two_iterations_on_features_times_1000_are_reported() -> None:
    """embeddings-benchmark/mteb#944."""
    X, y, basis = rows(150, 12, 3, seed=11)
    fits = fit_path(X * 1000, y, 3, basis, [0, 4], [1e-4], max_iter=2)
    assert not any(fit.converged for fit in fits)
    assert all(fit.iterations == 2 and fit.gradient_norm > 0 for fit in fits)
    assert all(fit.converged for fit in fit_path(X * 1000, y, 3, basis, [0, 4], [1e-4]))


def test_gradient_norm_is_the_one_stated() -> None:
    X, y, basis = rows(150, 12, 2, seed=12)
    fit = fit_path(X, y, 2, basis, [5], [1e-2], max_iter=2)[0]
    residual = scipy.special.expit(X @ fit.weight[0] + fit.bias[0]) - y
    centred = X - X.mean(axis=0)
    gradient = project((centred.T @ residual / 150 + 1e-2 * fit.weight[0])[None], basis[:, :5])
    assert fit.gradient_norm == pytest.approx(np.hypot(np.linalg.norm(gradient), residual.mean()), rel=1e-8)


def test_progress_counts_every_fit() -> None:
    X, y, basis = rows(100, 8, 2, seed=13, k=5)
    seen: list[int] = []
    fit_path(X, y, 2, basis, range(6), [1e-2, 1.0], advance=seen.append)
    assert sum(seen) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.zeros(50, int)}, "only one class"),
        ({"ranks": [4]}, "a rank that the pairs don't have"),
        ({"ranks": [-1]}, "a rank that the pairs don't have"),
        ({"weight_decays": [-1.0]}, "weight decays must be 0 or more"),
        ({"X": np.full((50, 6), np.nan)}, "NaN or an infinity"),
        ({"X": np.full((50, 6), 1e200)}, "too large to be squared"),
        ({"tolerance": 0.0}, "tolerance must be above 0"),
        ({"max_iter": 0}, "max_iter at least 1"),
        ({"X": np.zeros((0, 6)), "y": np.zeros(0, int)}, "no training rows"),
        ({"task": "regression", "y": np.full(50, np.inf)}, "targets hold NaN"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    X, y, basis = rows(50, 6, 2, seed=14, k=3)
    given: dict[str, Any] = {"X": X, "y": y, "n_classes": 2, "basis": basis, "ranks": [0]}
    given |= {"weight_decays": [1e-2]} | change
    with pytest.raises(InputError, match=message):
        fit_path(**given)
