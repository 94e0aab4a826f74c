"""Judging many probes, and choosing among them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ncm_cli.methods import metrics
from ncm_cli.methods.choice import RULES, best_checkpoints, pick_trial
from ncm_cli.methods.judge import METRICS, Judge, LabelledRows

AT = {name: i for i, name in enumerate(METRICS)}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_judge_agrees_with_plain_metrics(
    classes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncm_cli.methods.judge.BLOCK_ELEMENTS", 70)
    rng = np.random.default_rng(seed)
    logits, d, count = (1 if classes == 2 else classes), 5, 6
    rows = {
        name: LabelledRows(
            features=rng.standard_normal((n, d)),
            targets=rng.integers(0, classes, n),
            groups=rng.choice([0, 2, 7], n),
        )
        for name, n in (("val", 40), ("test", 33))
    }
    a, b = rng.standard_normal((2, 21, d))
    weight, bias = rng.standard_normal((count, logits, d)), rng.standard_normal((count, logits))
    judge = Judge(classes, val=rows["val"], test=rows["test"], pairs=(a, b))
    found = judge.judge(torch.tensor(weight), torch.tensor(bias))
    assert set(found) == set(METRICS)

    def decided(z: np.ndarray) -> np.ndarray:
        return (z[:, 0] > 0).astype(int) if logits == 1 else z.argmax(1)

    for r in range(count):
        for name, part in rows.items():
            z = part.features @ weight[r].T + bias[r]
            right = decided(z) == part.targets
            assert found[f"{name}_accuracy"][r] == pytest.approx(right.mean(), abs=1e-12)
            assert found[f"{name}_log_loss"][r] == pytest.approx(metrics.log_loss(z, part.targets), abs=1e-10)
            worst = min(right[part.groups == g].mean() for g in (0, 2, 7))
            assert found[f"{name}_worst_group"][r] == pytest.approx(worst, abs=1e-12)
        z_a, z_b = (member @ weight[r].T + bias[r] for member in (a, b))
        flips = (decided(z_a) != decided(z_b)).mean()
        assert found["flip_rate"][r] == pytest.approx(flips, abs=1e-12)
        assert found["bound_01"][r] == pytest.approx(1 - found["val_accuracy"][r] + flips, abs=1e-12)
        drift = np.sqrt((((z_a - z_b) ** 2).sum(1)).mean()) * (1 if logits == 1 else np.sqrt(2))
        assert found["log_loss_bound"][r] == pytest.approx(found["val_log_loss"][r] + drift, abs=1e-10)


def test_what_is_not_given_is_not_known() -> None:
    rows = LabelledRows(features=np.ones((3, 2)), targets=np.array([0, 1, 1]))
    found = Judge(2, val=rows).judge(torch.zeros(1, 1, 2).double(), torch.zeros(1, 1).double())
    known = {name for name, values in found.items() if np.isfinite(values).all()}
    assert known == {"val_accuracy", "val_log_loss"}


def history_of(*rows: dict[str, list[float]]) -> np.ndarray:
    """(n, checkpoints, metrics) from lists by metric."""
    made = np.full((len(rows), len(next(iter(rows[0].values()))), len(METRICS)), np.nan)
    for i, row in enumerate(rows):
        for name, values in row.items():
            made[i, :, AT[name]] = values
    return made


def test_each_rule_picks_its_own_checkpoint() -> None:
    history = history_of(
        {
            "val_accuracy": [0.6, 0.9, 0.8],
            "val_worst_group": [0.5, 0.1, 0.2],
            "bound_01": [0.6, 0.5, 0.4],
            "test_accuracy": [0.7, 0.2, 0.3],
            "test_worst_group": [0.1, 0.2, 0.1],
            "val_log_loss": [0.6, 0.5, 0.5],
        }
    )
    picked = {name: int(best_checkpoints(history, rule)[0]) for name, rule in RULES.items()}
    assert picked == {"in-domain": 1, "worst-group": 0, "bound": 2, "oracle": 0, "oracle-worst-group": 1}
    assert {name for name, rule in RULES.items() if rule.oracle} == {"oracle", "oracle-worst-group"}


def test_ties_go_to_the_lower_log_loss_then_the_earlier_epoch() -> None:
    tied = {"val_accuracy": [0.9, 0.9, 0.9 + 1e-15, 0.1]}
    by_loss = history_of({**tied, "val_log_loss": [0.5, 0.3, 0.4, 0.1]})
    assert best_checkpoints(by_loss, RULES["in-domain"]).tolist() == [1]
    by_epoch = history_of({**tied, "val_log_loss": [0.5, 0.3, 0.3, 0.1]})
    assert best_checkpoints(by_epoch, RULES["in-domain"]).tolist() == [1]


def test_unknown_checkpoints_are_never_picked() -> None:
    nan = np.nan
    history = history_of(
        {"val_accuracy": [nan, 0.2, nan], "val_log_loss": [nan, nan, 0.1]},
        {"val_accuracy": [nan, nan, nan], "val_log_loss": [0.1, 0.1, 0.1]},
    )
    assert best_checkpoints(history, RULES["in-domain"]).tolist() == [1, -1]


def test_a_trial_is_chosen_by_its_mean_over_seeds() -> None:
    lucky = history_of({"val_accuracy": [0.99, 0.1]}, {"val_accuracy": [0.5, 0.4]})
    steady = history_of({"val_accuracy": [0.7, 0.8]}, {"val_accuracy": [0.9, 0.6]})
    found = pick_trial(np.stack([lucky, steady]), np.zeros((2, 2), bool), [3, 8], RULES["in-domain"])
    assert found is not None
    assert (found.trial, found.checkpoints) == (8, (1, 0))
    assert found.mean[AT["val_accuracy"]] == pytest.approx(0.85)
    assert found.sd[AT["val_accuracy"]] == pytest.approx(np.std([0.8, 0.9], ddof=1))


def test_a_trial_that_diverged_for_one_seed_is_never_chosen() -> None:
    best = history_of({"val_accuracy": [0.99]}, {"val_accuracy": [0.99]})
    other = history_of({"val_accuracy": [0.6]}, {"val_accuracy": [0.6]})
    diverged = np.array([[False, True], [False, False]])
    found = pick_trial(np.stack([best, other]), diverged, [0, 1], RULES["in-domain"])
    assert found is not None and found.trial == 1
    assert pick_trial(np.stack([best]), diverged[:1], [0], RULES["in-domain"]) is None
    assert pick_trial(np.stack([other]), diverged[1:], [0], RULES["bound"]) is None


def test_one_seed_has_no_deviation() -> None:
    found = pick_trial(
        history_of({"val_accuracy": [0.6]})[None], np.zeros((1, 1), bool), [0], RULES["in-domain"]
    )
    assert found is not None and np.isnan(found.sd).all()
