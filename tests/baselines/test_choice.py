"""Judging many probes, and choosing among them."""

from __future__ import annotations

import numpy as np
import pytest

from ncm_cli.baselines.choice import METRICS, best_checkpoints, pick_trial
from ncm_cli.probes import metrics
from ncm_cli.probes import metrics as scoring
from ncm_cli.probes.rules import RULES
from ncm_cli.probes.selection import worst_group_error

AT = {name: i for i, name in enumerate(METRICS)}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_scores_of_many_probes_agree_with_plain_metrics(
    classes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncm_cli.probes.metrics.BLOCK_ELEMENTS", 70)
    rng = np.random.default_rng(seed)
    logits, d, count = (1 if classes == 2 else classes), 5, 6
    rows = scoring.Rows(
        X=rng.standard_normal((40, d)), y=rng.integers(0, classes, 40), group=rng.choice([0, 2, 7], 40)
    )
    pairs = scoring.PairRows(a=rng.standard_normal((21, d)), b=rng.standard_normal((21, d)))
    weight, bias = rng.standard_normal((count, logits, d)), rng.standard_normal((count, logits))
    errors, losses = scoring.row_errors(weight, bias, rows)
    changes, shifts = scoring.pair_shifts(weight, bias, pairs, regression=False)
    worst = worst_group_error(errors, rows.group)

    def decided(z: np.ndarray) -> np.ndarray:
        return (z[:, 0] > 0).astype(int) if logits == 1 else z.argmax(1)

    for r in range(count):
        z = rows.X @ weight[r].T + bias[r]
        wrong = decided(z) != rows.y
        np.testing.assert_array_equal(errors[r], wrong)
        np.testing.assert_allclose(losses[r], metrics.row_log_loss(z, rows.y), rtol=1e-10)
        assert worst[r] == pytest.approx(max(wrong[rows.group == g].mean() for g in (0, 2, 7)), abs=1e-12)
        z_a, z_b = (member @ weight[r].T + bias[r] for member in (pairs.a, pairs.b))
        np.testing.assert_array_equal(changes[r], decided(z_a) != decided(z_b))
        np.testing.assert_allclose(shifts[r], ((z_a - z_b) ** 2).sum(1), atol=1e-10)


def history_of(*trials: list[dict[str, list[float]]]) -> dict[str, np.ndarray]:
    """(trials, seeds, checkpoints) by metric, from lists by metric of each seed of each trial."""
    unknown = [np.nan] * len(next(iter(trials[0][0].values())))
    return {
        name: np.array([[seed.get(name, unknown) for seed in seeds] for seeds in trials]) for name in METRICS
    }


def test_each_rule_picks_its_own_checkpoint() -> None:
    history = history_of(
        [
            {
                "val_accuracy": [0.6, 0.9, 0.8],
                "val_worst_group": [0.5, 0.1, 0.2],
                "bound_01": [0.6, 0.5, 0.4],
                "test_accuracy": [0.7, 0.2, 0.3],
                "test_worst_group": [0.1, 0.2, 0.1],
                "val_log_loss": [0.6, 0.5, 0.5],
            }
        ]
    )
    picked = {name: int(best_checkpoints(history, rule)[0, 0]) for name, rule in RULES.items()}
    assert picked == {"in-domain": 1, "worst-group": 0, "bound": 2, "oracle": 0, "oracle-worst-group": 1}
    assert {name for name, rule in RULES.items() if rule.oracle} == {"oracle", "oracle-worst-group"}


def test_ties_go_to_the_lower_log_loss_then_the_earlier_epoch() -> None:
    tied = {"val_accuracy": [0.9, 0.9, 0.9 + 1e-15, 0.1]}
    by_loss = history_of([{**tied, "val_log_loss": [0.5, 0.3, 0.4, 0.1]}])
    assert best_checkpoints(by_loss, RULES["in-domain"]).tolist() == [[1]]
    by_epoch = history_of([{**tied, "val_log_loss": [0.5, 0.3, 0.3, 0.1]}])
    assert best_checkpoints(by_epoch, RULES["in-domain"]).tolist() == [[1]]


def test_unknown_checkpoints_are_never_picked() -> None:
    nan = np.nan
    history = history_of(
        [{"val_accuracy": [nan, 0.2, nan], "val_log_loss": [nan, nan, 0.1]}],
        [{"val_accuracy": [nan, nan, nan], "val_log_loss": [0.1, 0.1, 0.1]}],
    )
    assert best_checkpoints(history, RULES["in-domain"]).tolist() == [[1], [-1]]


def test_a_trial_is_chosen_by_its_mean_over_seeds() -> None:
    lucky = [{"val_accuracy": [0.99, 0.1]}, {"val_accuracy": [0.5, 0.4]}]
    steady = [{"val_accuracy": [0.7, 0.8]}, {"val_accuracy": [0.9, 0.6]}]
    found = pick_trial(history_of(lucky, steady), np.zeros((2, 2), bool), RULES["in-domain"])
    assert found is not None
    assert (found.row, found.checkpoints) == (1, (1, 0))
    assert found.mean[AT["val_accuracy"]] == pytest.approx(0.85)
    assert found.sd[AT["val_accuracy"]] == pytest.approx(np.std([0.8, 0.9], ddof=1))


def test_a_trial_that_diverged_for_one_seed_is_never_chosen() -> None:
    best, other = ([{"val_accuracy": [value]}] * 2 for value in (0.99, 0.6))
    diverged = np.array([[False, True], [False, False]])
    found = pick_trial(history_of(best, other), diverged, RULES["in-domain"])
    assert found is not None and found.row == 1
    assert pick_trial(history_of(best), diverged[:1], RULES["in-domain"]) is None
    assert pick_trial(history_of(other), diverged[1:], RULES["bound"]) is None


def test_one_seed_has_no_deviation() -> None:
    found = pick_trial(history_of([{"val_accuracy": [0.6]}]), np.zeros((1, 1), bool), RULES["in-domain"])
    assert found is not None and np.isnan(found.sd).all()
