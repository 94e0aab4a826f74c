"""Metrics against scikit-learn, scipy, published examples, and their own definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference

from ncm_cli.probes import metrics


def _problem(seed: int, classes: int, n: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=(n, 1 if classes == 2 else classes))
    predicted = (logits[:, 0] > 0).astype(int) if classes == 2 else logits.argmax(1)
    return logits, predicted, rng.integers(0, classes, n)


def _table(group: np.ndarray, groups: int, values: np.ndarray) -> list[dict[str, Any]]:
    return [{"group": g, **metrics.summary(values[group == g])} for g in range(groups)]


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_agrees_with_scikit_learn(classes: int) -> None:
    logits, predicted, y = _problem(classes, classes)
    shares = metrics.probabilities(logits)
    assert metrics.mean(predicted == y) == pytest.approx(reference.accuracy_score(y, predicted))
    assert metrics.balanced_accuracy(predicted, y) == pytest.approx(
        reference.balanced_accuracy_score(y, predicted)
    )
    assert metrics.mean(metrics.row_log_loss(logits, y)) == pytest.approx(
        reference.log_loss(y, shares, labels=range(classes))
    )
    assert shares.sum(axis=1) == pytest.approx(np.ones(len(y)))


def test_regression_agrees_with_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    y, guess = rng.normal(size=(2, 100))
    squared = metrics.summary((guess - y) ** 2)
    assert squared == {"n": 100, "mse": pytest.approx(reference.mean_squared_error(y, guess))}
    assert metrics.r2(guess, y) == pytest.approx(reference.r2_score(y, guess))
    assert metrics.r2(guess, np.ones(100)) is None


@pytest.mark.parametrize("logits", [[[1000.0], [-1000.0]], [[1000.0, 0.0], [-1000.0, 0.0]]])
def test_log_loss_of_huge_logits_is_exact(logits: list[list[float]]) -> None:
    z = np.array(logits)
    wrong = np.array([0, 1]) if z.shape[1] == 1 else np.array([1, 0])
    assert metrics.mean(metrics.row_log_loss(z, wrong)) == pytest.approx(1000.0)
    assert metrics.mean(metrics.row_log_loss(z, 1 - wrong)) == 0.0


@pytest.mark.parametrize(("right", "n"), [(0, 1), (0, 10), (3, 10), (10, 10), (81, 263), (499, 500)])
def test_wilson_agrees_with_scipy(right: int, n: int) -> None:
    interval = scipy.stats.binomtest(right, n).proportion_ci(0.95, "wilson")
    assert metrics.wilson(right, n) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_wilson_of_no_row_says_nothing() -> None:
    assert metrics.wilson(0, 0) == (0.0, 1.0)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_agrees_with_scipys_binomial_test(only_first: int, only_second: int) -> None:
    n = only_first + only_second
    expected = scipy.stats.binomtest(only_first, n, 0.5).pvalue if n else 1.0
    assert metrics.mcnemar(only_first, only_second) == pytest.approx(expected, abs=1e-12)


def test_newcombe_agrees_with_the_published_example() -> None:
    # Newcombe (1998), method 10, for e, f, g, h = 36, 12, 2, 0.
    assert metrics.newcombe(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_newcombe_keeps_a_width_without_discordant_rows_and_stays_in_range() -> None:
    low, high = metrics.newcombe(43, 0, 0, 0)
    assert -0.1 < low < 0 < high < 0.1
    assert metrics.newcombe(0, 0, 0, 0) == (-1.0, 1.0)
    low, high = metrics.newcombe(0, 30, 0, 0)
    assert low > 0.8 and high == pytest.approx(1.0)


def test_newcombes_interval_covers_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(0)
    shares = np.array([0.6, 0.15, 0.08, 0.17])
    hits = 0
    for cells in rng.multinomial(120, shares, size=2000).tolist():
        low, high = metrics.newcombe(*cells)
        hits += low <= shares[1] - shares[2] <= high
    assert 0.94 <= hits / 2000 <= 0.97


def test_groups_name_the_absent_and_the_worst_is_among_the_present() -> None:
    group = np.array([0, 0, 1, 1, 3, 3, -1])
    right = np.array([True, True, True, False, True, True, False])
    table = _table(group, 4, right)
    assert [row["n"] for row in table] == [2, 2, 0, 2]
    assert table[2]["accuracy"] is table[2]["ci_low"] is table[2]["ci_high"] is None
    assert metrics.worst(table) == {"group": 1, "n": 2, "accuracy": 0.5}


def test_ties_for_the_worst_go_to_the_largest_group_then_the_first() -> None:
    group = np.array([0, 1, 1, 2, 2])
    right = np.zeros(5, dtype=bool)
    worst = metrics.worst(_table(group, 3, right))
    assert worst is not None and worst["group"] == 1
    assert metrics.worst(_table(np.array([], int), 2, np.array([], bool))) is None


def test_adjusted_average_weights_by_the_reference() -> None:
    """PolinaKirichenko/deep_feature_reweighting#1."""
    accuracies = [0.99, 0.70, 0.60, 0.97]
    group = np.repeat(np.arange(4), 100)
    right = np.concatenate([np.arange(100) < 100 * a for a in accuracies])
    sizes = np.array([3498, 184, 56, 1057])
    adjusted, missing = metrics.adjusted_average(_table(group, 4, right), sizes)
    assert adjusted == pytest.approx(float(np.dot(sizes, accuracies) / sizes.sum()))
    assert missing == 0
    assert metrics.mean(right) == pytest.approx(np.mean(accuracies))


def test_adjusted_average_says_what_it_leaves_out() -> None:
    table = _table(np.array([0, 0]), 2, np.array([True, False]))
    assert metrics.adjusted_average(table, np.array([30, 10])) == (0.5, 0.25)
    assert metrics.adjusted_average(table, np.array([0, 10])) == (None, 1.0)


def test_mean_doesnt_depend_on_order_to_the_last_bit() -> None:
    rng = np.random.default_rng(3)
    values = rng.lognormal(sigma=8, size=5000)
    assert len({metrics.mean(rng.permutation(values)) for _ in range(20)}) == 1
    with pytest.raises(ValueError, match="no value"):
        metrics.mean(np.array([]))


def test_margin_is_the_lead_of_the_predicted_class() -> None:
    assert metrics.margins(np.array([[2.0], [-3.0]])).tolist() == [2.0, 3.0]
    assert metrics.margins(np.array([[1.0, 5.0, 3.5]])).tolist() == [1.5]


def test_the_margin_of_the_true_class_is_above_zero_where_it_is_predicted() -> None:
    rng = np.random.default_rng(0)
    for classes in (2, 3, 7):
        logits, y = rng.normal(size=(500, classes)), rng.integers(classes, size=500)
        found = metrics.true_margins(logits, y)
        wanted = [row[code] - max(np.delete(row, code)) for row, code in zip(logits, y, strict=True)]
        assert np.array_equal(found, wanted) and 0 < (found > 0).sum() < 500
        assert np.array_equal(found > 0, metrics.decide(logits) == y)
    single = logits[:, :1]
    of_two = metrics.true_margins(np.concatenate([np.zeros_like(single), single], axis=1), y % 2)
    assert np.array_equal(metrics.true_margins(single, y % 2), of_two)


@pytest.mark.parametrize("n", [2, 3, 40])
def test_mean_difference_agrees_with_scipys_paired_t_interval(n: int) -> None:
    first, second = np.random.default_rng(n).exponential(size=(2, n))
    expected = scipy.stats.ttest_rel(first, second).confidence_interval(0.95)
    found = metrics.mean_difference(first, second)
    assert found == pytest.approx((np.mean(first - second), expected.low, expected.high))


def test_mean_difference_of_equal_arrays_is_zero_and_of_one_row_has_no_interval() -> None:
    x = np.arange(5.0)
    assert metrics.mean_difference(x, x) == (0.0, 0.0, 0.0)
    assert metrics.mean_difference(x[3:4], x[:1]) == (3.0, None, None)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4))
def test_a_comparison_of_few_rows_is_finite_and_its_interval_holds_the_difference(
    hits: list[tuple[bool, bool]],
) -> None:
    first, second = np.array(hits, dtype=bool).reshape(-1, 2).T
    found = metrics.compare(first, second)
    assert -1 <= found.ci_low <= found.difference <= found.ci_high <= 1
    assert found.ci_low < found.ci_high and 0 < found.p_value <= 1
