"""Selection rules on hand-made candidates, and what is measured of a path."""

from __future__ import annotations

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.probes.crossfit import CrossFit, FoldRows
from ncm_cli.probes.metrics import PairRows, Rows, decide
from ncm_cli.probes.selection import Candidate, best_candidate, score_path
from ncm_cli.solvers.training_set import Fit
from ncm_cli.store.roles import group_weights


def candidate(rank: int, accuracy: float, flips: float, loss: float = 0.5, **more: float) -> Candidate:
    settings = {"rank": rank, "weight_decay": 1e-2, "converged": True}
    known = {"val_accuracy": accuracy, "val_log_loss": loss, "flip_rate": flips}
    return settings | known | {"bound_01": 1 - accuracy + flips} | more


def test_rules_disagree_as_they_should() -> None:
    path = [
        candidate(0, 0.85, 0.80, worst_group=0.3, test_accuracy=0.1),
        candidate(8, 0.75, 0.05, worst_group=0.5, test_accuracy=0.62),
        candidate(16, 0.70, 0.02, worst_group=0.6, test_accuracy=0.66),
        candidate(24, 0.60, 0.00, worst_group=0.4, test_accuracy=0.68),
    ]
    picks = {
        rule: path[best_candidate(path, rule, "classification")]["rank"]
        for rule in ("in-domain", "bound", "worst-group", "oracle")
    }
    assert picks == {"in-domain": 0, "bound": 8, "worst-group": 16, "oracle": 24}


def test_ties_go_to_the_lower_log_loss_then_the_lower_rank() -> None:
    path = [
        candidate(4, 0.7, 0.1, loss=0.6),
        candidate(3, 0.6, 0.0, loss=0.55),
        candidate(2, 0.65, 0.05, 0.55),
    ]
    assert path[best_candidate(path, "bound", "classification")]["rank"] == 2


def test_unknown_quantity_is_refused() -> None:
    with pytest.raises(InputError, match="needs worst_group"):
        best_candidate([candidate(0, 0.9, 0.0)], "worst-group", "classification")


def test_decisions() -> None:
    assert decide(np.array([[-1.0], [0.0], [1e-9], [2.0]])).tolist() == [0, 0, 1, 1]
    assert decide(np.array([[1.0, 3.0, 2.0], [1.0, 1.0, 0.0]])).tolist() == [1, 0]


def scored(
    fits: list[Fit], val: Rows, pairs: PairRows, test: Rows | None = None
) -> tuple[list[Candidate], CrossFit]:
    """What rows alone say of probes, and what rows and one fold of pairs do."""
    regression = val.y.dtype.kind == "f"
    found = CrossFit.join([FoldRows(fits, val, pairs)], np.arange(len(pairs.a)), regression=regression)
    return score_path(fits, val=val, test=test), found


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_of_a_path_are_what_they_say(classes: int) -> None:
    rng = np.random.default_rng(classes)
    C = 1 if classes == 2 else classes
    fits = [
        Fit(r, w, rng.normal(size=(C, 5)), rng.normal(size=C), True, 1, 0.0)
        for r in (0, 1)
        for w in (0.1, 1.0)
    ]
    val = Rows(X=rng.normal(size=(60, 5)), y=rng.integers(classes, size=60), group=rng.integers(3, size=60))
    pairs = PairRows(a=rng.normal(size=(20, 5)), b=rng.normal(size=(20, 5)))
    alone, crossed = scored(fits, val, pairs, test=val)
    assert [(c["rank"], c["weight_decay"]) for c in alone] == [(f.rank, f.weight_decay) for f in fits]
    assert [(c["rank"], c["weight_decay"]) for c in crossed.candidates] == [
        (f.rank, f.weight_decay) for f in fits
    ]
    for fit, rows, both in zip(fits, alone, crossed.candidates, strict=True):

        def full(X: np.ndarray, fit: Fit = fit) -> np.ndarray:
            logits = X @ fit.weight.T + fit.bias
            return np.hstack([np.zeros((len(X), 1)), logits]) if C == 1 else logits

        logits = full(val.X)
        right = logits.argmax(axis=1) == val.y
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(60), val.y]
        drift = np.sqrt(np.mean((((pairs.a - pairs.b) @ fit.weight.T) ** 2).sum(axis=1)))
        flips = np.mean(full(pairs.a).argmax(axis=1) != full(pairs.b).argmax(axis=1))
        for found in (rows, both):
            assert found["val_accuracy"] == pytest.approx(right.mean())
            assert found["val_log_loss"] == pytest.approx(losses.mean())
        assert rows["test_accuracy"] == rows["val_accuracy"]
        assert rows["worst_group"] == pytest.approx(min(right[val.group == g].mean() for g in range(3)))
        assert both["flip_rate"] == pytest.approx(flips)
        assert both["bound_01"] == pytest.approx(1 - right.mean() + flips)
        assert both["log_loss_bound"] == pytest.approx(losses.mean() + (1 if C == 1 else 2**0.5) * drift)


def test_a_row_in_no_group_is_in_no_worst_group() -> None:
    fit = Fit(0, 0.1, np.array([[1.0]]), np.zeros(1), True, 1, 0.0)
    X, y = np.array([[1.0], [1.0], [-1.0], [-1.0]]), np.array([1, 0, 0, 1])
    assert score_path([fit], val=Rows(X=X, y=y, group=np.array([0, -1, 1, -1])))[0]["worst_group"] == 1.0
    assert score_path([fit], val=Rows(X=X, y=y, group=np.array([0, 2, 1, 1])))[0]["worst_group"] == 0.0


def test_the_01_bound_holds_on_the_pairs_it_was_measured_on() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        fit = Fit(0, 0.1, rng.normal(size=(1, 4)), rng.normal(size=1), True, 1, 0.0)
        y = rng.integers(2, size=30)
        twins, shifted = rng.normal(size=(30, 4)), rng.normal(size=(30, 4))
        alone, crossed = scored(
            [fit], Rows(X=twins, y=y), PairRows(a=twins, b=shifted), test=Rows(X=shifted, y=y)
        )
        test, bound = alone[0]["test_accuracy"], crossed.candidates[0]["bound_01"]
        assert test is not None
        assert bound is not None
        assert 1 - test <= bound + 1e-12


def test_regression_scores() -> None:
    rng = np.random.default_rng(5)
    fit = Fit(2, 0.1, rng.normal(size=(1, 4)), np.array([0.5]), True, 1, 0.0)
    val = Rows(X=rng.normal(size=(20, 4)), y=rng.normal(size=20), group=np.arange(20) % 2)
    pairs = PairRows(a=rng.normal(size=(7, 4)), b=rng.normal(size=(7, 4)))
    (alone,), crossed = scored([fit], val, pairs)
    squared = (val.X @ fit.weight[0] + 0.5 - val.y) ** 2
    between = np.mean(((pairs.a - pairs.b) @ fit.weight[0]) ** 2)
    assert alone["val_mse"] == pytest.approx(squared.mean())
    assert alone["worst_group"] == pytest.approx(max(squared[::2].mean(), squared[1::2].mean()))
    assert "val_accuracy" not in alone
    both = crossed.candidates[0]
    assert both["pair_mse"] == pytest.approx(between)
    assert both["bound_mse"] == pytest.approx((np.sqrt(squared.mean()) + np.sqrt(between)) ** 2)


def test_group_weights_make_groups_count_equally() -> None:
    groups = np.array([0, 0, 0, 0, 0, 1, 1, 4])
    weights = group_weights(groups)
    assert weights.mean() == pytest.approx(1)
    sums = [weights[groups == group].sum() for group in (0, 1, 4)]
    assert sums == pytest.approx([8 / 3] * 3)
