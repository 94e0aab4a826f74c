"""Cross-fitting against an independent float64 reference, and its intervals against simulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.linear_model import LogisticRegression, Ridge

from ncm_cli.probes.choose import crossfit
from ncm_cli.probes.crossfit import CrossFit, FoldRows
from ncm_cli.probes.metrics import PairRows, Rows, wilson
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.problem import Problem
from ncm_cli.probes.reading import read_problem
from ncm_cli.progress import SILENT
from ncm_cli.solvers.folds import units
from ncm_cli.solvers.solve import train_path
from ncm_cli.solvers.training_set import Fit

RANKS, DECAYS = (0, 2, 3), (1e-2, 1e-1)


def _problem(on_disk: Any, classes: int, **options: Any) -> Problem:
    """Fresh rows with pairs of training rows (in chains) and of rows outside; ``classes`` 0 is regression."""
    made = on_disk.planted
    X, y = made.rows(160, 0.8, classes=max(classes, 2))
    columns: dict[str, Any] = {"split": ["train"] * 110 + ["val"] * 50}
    if classes:
        columns["label"] = [f"c{code}" for code in y]
    else:
        columns["age"] = X[:, 0] + 2 * y + made.rng.normal(size=160)
        options |= {"task": "regression", "target": "age"}
    features = on_disk.store("fresh.h5", X, columns)
    outside = made.pairs(20)
    first, second = np.arange(0, 36), np.arange(1, 37)
    chained = (first % 3 != 2).nonzero()[0]
    a, b = X[first[chained]], X[second[chained]]
    ids = [[f"r{row}" for row in rows[chained]] for rows in (first, second)]
    pairs = on_disk.pair_store(
        "fresh-p.h5",
        np.concatenate([a, outside[0]]),
        np.concatenate([b, outside[1]]),
        ids=tuple(tuple(ids[side] + [f"{'ab'[side]}{i}" for i in range(20)]) for side in (0, 1)),
    )
    made_options = FitOptions(features=features, pairs=pairs, output=on_disk.folder / "p", **options)
    return read_problem(made_options, oracle=False, reporter=SILENT)


def _reference(problem: Problem, folds: list[Any]) -> dict[tuple[int, float], dict[str, float]]:
    """What the definition says, by loops, scikit-learn and numpy's SVD."""
    assert problem.pairs is not None
    assert problem.val is not None
    store = problem.pairs.stores[0]
    a, b = store.features_a.astype(float), store.features_b.astype(float)
    X, y = problem.train.X.astype(float), problem.train.y
    val, truth = problem.val.X.astype(float), problem.val.y
    found = {}
    for rank in RANKS:
        for decay in DECAYS:
            errors, losses, changes = [], [], []
            for fold in folds:
                left = [
                    row
                    for row, node in enumerate(problem.train.node)
                    if node not in set(fold.untrained_nodes)
                ]
                Q = np.linalg.svd((a - b)[fold.basis].T, full_matrices=False)[0][:, :rank]
                project = np.eye(X.shape[1]) - Q @ Q.T
                rows, answers = X[left] @ project, y[left]
                inside = [(x @ project)[fold.measured] for x in (a, b)]
                if problem.regression:
                    model = Ridge(alpha=len(left) * decay, tol=1e-12).fit(rows, answers)
                    errors.append(np.mean((model.predict(val @ project) - truth) ** 2))
                    changes += list((model.predict(inside[0]) - model.predict(inside[1])) ** 2)
                else:
                    model = LogisticRegression(C=1 / (len(left) * decay), tol=1e-12, max_iter=20_000)
                    model.fit(rows, answers)
                    errors.append(np.mean(model.predict(val @ project) != truth))
                    told = model.predict_proba(val @ project)
                    losses.append(-np.mean(np.log(told[np.arange(len(truth)), truth])))
                    changes += list(model.predict(inside[0]) != model.predict(inside[1]))
            found[rank, decay] = {
                "error": float(np.mean(errors)),
                "change": float(np.mean(changes)),
                "loss": float(np.mean(losses)) if losses else 0.0,
            }
    return found


@pytest.mark.parametrize("classes", [2, 3, 0], ids=["two classes", "three classes", "regression"])
def test_crossfit_is_what_its_definition_says(on_disk: Any, classes: int) -> None:
    problem = _problem(on_disk, classes, tolerance=1e-10)
    folds = problem.pairs.folds(4, 1)
    assert len(folds) == 4
    setting = {"ranks": RANKS, "decays": DECAYS}
    found = crossfit(problem, folds, **setting)
    expected = _reference(problem, folds)
    assert [(c["rank"], c["weight_decay"]) for c in found.candidates] == list(expected)
    for candidate in found.candidates:
        own = expected[candidate["rank"], candidate["weight_decay"]]
        if problem.regression:
            assert candidate["val_mse"] == pytest.approx(own["error"], rel=1e-6)
            assert candidate["pair_mse"] == pytest.approx(own["change"], rel=1e-6)
            both = (np.sqrt(own["error"]) + np.sqrt(own["change"])) ** 2
            assert candidate["bound_mse"] == pytest.approx(both, rel=1e-6)
        else:
            assert candidate["val_accuracy"] == pytest.approx(1 - own["error"], abs=1e-12)
            assert candidate["flip_rate"] == pytest.approx(own["change"], abs=1e-12)
            assert candidate["bound_01"] == pytest.approx(own["error"] + own["change"], abs=1e-12)
            assert candidate["val_log_loss"] == pytest.approx(own["loss"], rel=1e-5)
    assert found.pairs == 44
    assert found.units == 12 + 20, "two pairs of a chain are one unit"


@pytest.mark.slow
def test_the_looser_tolerance_of_folds_changes_hardly_a_decision(on_disk: Any) -> None:
    problem = _problem(on_disk, 2)
    folds = problem.pairs.folds(5, 0)
    setting = {"ranks": RANKS, "decays": DECAYS}
    found = crossfit(problem, folds, **setting)
    for candidate, own in zip(found.candidates, _reference(problem, folds).values(), strict=True):
        assert candidate["flip_rate"] == pytest.approx(own["change"], abs=1 / 44)
        assert candidate["val_accuracy"] == pytest.approx(1 - own["error"], abs=1 / 50)
        assert candidate["val_log_loss"] == pytest.approx(own["loss"], abs=2e-3)


def test_features_that_interpolate_hide_their_flips_from_all_but_folds(on_disk: Any) -> None:
    """As many dimensions as rows: what was trained on is told right, so its pairs flip never."""
    rng = np.random.default_rng(3)
    y = np.arange(120) % 2
    X = rng.normal(size=(120, 200)).astype(np.float32)
    X[:, 0] += y
    columns = {"label": [("cat", "dog")[code] for code in y], "split": ["train"] * 80 + ["val"] * 40}
    features = on_disk.store("wide.h5", X, columns)
    a, b = np.arange(0, 40), np.arange(40, 80)
    ids = tuple(tuple(f"r{row}" for row in rows) for rows in (a, b))
    options = FitOptions(
        features=features,
        pairs=on_disk.pair_store("wide-p.h5", X[a], X[b], ids=ids),
        output=on_disk.folder / "p",
    )
    problem = read_problem(options, oracle=False, reporter=SILENT)
    folds = problem.pairs.folds(5, 0)
    setting = {"ranks": [0, 8], "decays": [1e-3]}
    whole = problem.whole()
    assert problem.pairs is not None
    everything = problem.pairs.members(problem.pairs.usable, whole.scaling)
    fits = train_path(whole, options.solving, **setting)
    naive = CrossFit.join([FoldRows(fits, None, everything)], np.arange(len(everything.a)), regression=False)
    assert naive.changes.sum() == 0, "the probes of all rows flip none of their own rows' pairs"
    found = crossfit(problem, folds, **setting)
    assert all((candidate["flip_rate"] or 0) > 0.25 for candidate in found.candidates)


def joined(changes: np.ndarray, unit: np.ndarray, errors: np.ndarray | None, regression: bool) -> CrossFit:
    """Candidates of these measurements; their ranks count them."""
    scores = changes.mean(axis=1)
    if errors is not None:
        own = errors.mean(axis=1)
        scores = (np.sqrt(own) + np.sqrt(scores)) ** 2 if regression else own + scores
    name = "bound_mse" if regression else "bound_01"
    return CrossFit(
        candidates=tuple(
            {"rank": rank, "weight_decay": 1e-2, "converged": True, name: float(score)}
            for rank, score in enumerate(scores)
        ),
        errors=errors,
        changes=changes,
        unit=unit,
        regression=regression,
    )


@pytest.mark.parametrize(
    ("share", "clusters", "largest"), [(0.05, 40, 1), (0.2, 40, 6), (0.5, 40, 6), (0.05, 150, 4)]
)
def test_intervals_of_flip_rates_cover_whatever_the_pairs_share(
    share: float, clusters: int, largest: int
) -> None:
    rng = np.random.default_rng([clusters, largest, round(100 * share)])
    sizes = rng.integers(1, largest + 1, size=clusters)
    unit = np.repeat(np.arange(clusters), sizes)
    draws = 1500
    # Flips of one cluster are alike: its own rate is drawn from a beta distribution of mean `share`.
    rates = rng.beta(2 * share, 2 * (1 - share), size=(draws, clusters))[:, unit]
    found = joined((rng.random(rates.shape) < rates).astype(float), unit, None, False)
    intervals = [found.change(index) for index in range(draws)]
    covered = np.mean([one.low <= share <= one.high for one in intervals])
    assert covered >= 0.93
    naive = [wilson(one.value * len(unit), len(unit)) for one in intervals]
    if largest == 6:
        assert np.mean([low <= share <= high for low, high in naive]) < 0.9, "the clusters matter"
    assert np.mean([one.high - one.low for one in intervals]) < 0.5, "and the intervals aren't trivial"


@pytest.mark.slow
def test_intervals_of_bounds_and_gains_cover(rng: np.random.Generator) -> None:
    draws, rows, pairs = 1500, 60, 50
    unit = np.arange(pairs) // 2
    errors = (rng.random((draws, rows)) < 0.15).astype(float)
    changes = np.repeat(rng.random((draws, pairs // 2)) < 0.3, 2, axis=1).astype(float)
    better = np.where(rng.random((draws, rows)) < 0.5, errors, rng.random((draws, rows)) < 0.15)
    calmer = changes * np.repeat(rng.random((draws, pairs // 2)) < 0.4, 2, axis=1)
    found = joined(np.concatenate([changes, calmer]), unit, np.concatenate([errors, better]), False)
    bounds = [found.bound(index) for index in range(draws)]
    assert np.mean([one.low <= 0.45 <= one.high for one in bounds]) >= 0.93
    gains = [found.gain(draws + index, index) for index in range(draws)]
    assert np.mean([one.low <= 0.18 <= one.high for one in gains]) >= 0.92


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def test_wilsons_special_cases() -> None:
    independent = np.arange(50)
    none, every = np.zeros((1, 50)), np.ones((1, 50))
    assert _interval(joined(none, independent, None, False)) == wilson(0, 50)
    assert _interval(joined(every, independent, None, False)) == wilson(50, 50)
    pairwise = np.arange(50) // 2
    assert _interval(joined(none, pairwise, None, False)) == wilson(0, 25), "one unit counts once"
    some = (np.arange(50) < 10).astype(float)[None]
    assert _interval(joined(some, independent, None, False)) == pytest.approx(wilson(0.2 * 49, 49))
    alike = np.repeat(some[:, ::2], 2, axis=1)
    assert _interval(joined(alike, pairwise, None, False)) == pytest.approx(wilson(0.2 * 24, 24))
    assert _interval(joined(some, np.zeros(50, int), None, False)) == (0, 1), "one unit tells nothing"
    opposite = np.tile([0.0, 1.0], 25)[None]
    assert _interval(joined(opposite, pairwise, None, False)) == pytest.approx(wilson(25, 50))


def _interval(found: CrossFit) -> tuple[float, float]:
    one = found.change(0)
    assert one.low <= one.value <= one.high
    return one.low, one.high


@settings(max_examples=60, deadline=None)
@given(
    errors=st.integers(0, 30), flips=st.integers(0, 20), regression=st.booleans(), scale=st.floats(1e-3, 1e3)
)
def test_the_ends_of_a_bound_are_movers(errors: int, flips: int, regression: bool, scale: float) -> None:
    rows = (np.arange(30) < errors).astype(float)[None] * (scale if regression else 1)
    pairs = (np.arange(20) < flips).astype(float)[None] * (scale if regression else 1)
    found = joined(pairs, np.arange(20), rows, regression)
    error, change, bound = found.error(0), found.change(0), found.bound(0)
    root = (lambda x: max(x, 0.0) ** 0.5) if regression else (lambda x: x)
    back = (lambda x: x * x) if regression else (lambda x: x)
    value = root(error.value) + root(change.value)
    below = np.hypot(root(error.value) - root(error.low), root(change.value) - root(change.low))
    above = np.hypot(root(error.high) - root(error.value), root(change.high) - root(change.value))
    most = np.inf if regression else 1.0  # no error is above 1
    assert bound.value == pytest.approx(min(back(value), most))
    assert bound.low == pytest.approx(min(back(max(value - below, 0.0)), most))
    assert bound.high == pytest.approx(min(back(value + above), most))
    assert 0 <= bound.low <= bound.value + 1e-12
    assert bound.value <= bound.high + 1e-12


@pytest.mark.parametrize("regression", [False, True])
def test_a_gain_is_positive_where_the_first_is_better(regression: bool, rng: np.random.Generator) -> None:
    errors = (rng.random((1, 200)) < 0.2).astype(float)
    changes = (rng.random((1, 80)) < 0.4).astype(float)
    calmer = changes * (np.arange(80) % 3 > 0)
    found = joined(
        np.concatenate([calmer, changes]), np.arange(80), np.concatenate([errors, errors]), regression
    )
    gain, loss, none = found.gain(0, 1), found.gain(1, 0), found.gain(0, 0)
    bounds = [found.bound(index) for index in (0, 1)]
    assert gain.value == pytest.approx(bounds[1].value - bounds[0].value)
    assert 0 < gain.low < gain.value < gain.high
    assert (loss.value, loss.low, loss.high) == pytest.approx((-gain.value, -gain.high, -gain.low))
    assert dataclasses.astuple(none) == (0, 0, 0)
    if not regression:
        lost = calmer != changes
        assert gain.value == pytest.approx(lost.mean())
        assert gain.high - gain.value == pytest.approx(1.96 * lost.std(ddof=1) / np.sqrt(80), rel=1e-3), (
            "the rows are the same, so only the pairs that differ count"
        )


floats = st.floats(-100, 100, width=32)


@settings(max_examples=40, deadline=None)
@given(
    twins=arrays(np.float64, (12, 3), elements=floats),
    shifted=arrays(np.float64, (12, 3), elements=floats),
    y=arrays(np.float64, 12, elements=floats),
    weight=arrays(np.float64, (1, 3), elements=floats),
    bias=floats,
)
def test_the_regression_bound_holds_on_exact_problems(
    twins: np.ndarray, shifted: np.ndarray, y: np.ndarray, weight: np.ndarray, bias: float
) -> None:
    """Minkowski's inequality for root mean squared errors, the twins being the validation rows."""
    fit = Fit(0, 1e-2, weight, np.array([bias]), True, 1, 0.0)
    fold = FoldRows([fit], Rows(X=twins, y=y), PairRows(a=twins, b=shifted))
    (candidate,) = CrossFit.join([fold], np.arange(12), regression=True).candidates
    test = np.mean((shifted @ weight[0] + bias - y) ** 2)
    assert candidate["bound_mse"] is not None
    assert test <= candidate["bound_mse"] * (1 + 1e-9) + 1e-6
    opposite = Rows(X=twins, y=twins @ weight[0] + bias - (shifted - twins) @ weight[0])
    fold = FoldRows([fit], opposite, PairRows(a=twins, b=shifted))
    (tight,) = CrossFit.join([fold], np.arange(12), regression=True).candidates
    test = np.mean((shifted @ weight[0] + bias - opposite.y) ** 2)
    assert test == pytest.approx(tight["bound_mse"], rel=1e-6, abs=1e-6), "and nothing smaller would hold"


def test_units_hang_together_within_a_fold(on_disk: Any) -> None:
    problem = _problem(on_disk, 2)
    folds = problem.pairs.folds(5, 0)
    assert problem.pairs is not None
    number = units(problem.pairs.node_a, problem.pairs.node_b, folds)
    order = np.concatenate([np.flatnonzero(fold.measured) for fold in folds])
    ids = [(problem.pairs.ids[0][pair], problem.pairs.ids[1][pair]) for pair in order]
    for i, one in enumerate(ids):
        for j, other in enumerate(ids):
            if set(one) & set(other):
                assert number[i] == number[j]
