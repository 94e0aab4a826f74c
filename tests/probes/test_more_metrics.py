"""``ncm eval --metrics`` against definitions written out, scikit-learn, and planted truths."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as reference

from ncm_cli.errors import UsageError
from ncm_cli.main import run
from ncm_cli.probes import more_metrics
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.metric_names import METRIC_NAMES, METRICS, metrics_of, parse_metrics
from ncm_cli.probes.more_metrics import Predictions, with_interval
from ncm_cli.probes.options import EvalOptions
from ncm_cli.store.probe import write_probe
from tests.world import Heard, make_probe, write_store


def _predictions(seed: int, classes: int, n: int = 200) -> Predictions:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)).round(1)  # rounded, so that there are ties
    logits[np.arange(n), truth] += 1
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    losses = -np.log(probability[np.arange(n), truth])
    return Predictions(truth, probability.argmax(axis=1), losses, probability)


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of (positive, negative) pairs that are in the right order; ties count half."""
    gaps = scores[positive][:, None] - scores[~positive][None, :]
    return float(((gaps > 0) + (gaps == 0) / 2).mean())


def _precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Precision at each threshold, weighted by what the threshold adds to the recall."""
    total, before = 0.0, 0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        hits = int((chosen & positive).sum())
        total += hits / int(chosen.sum()) * (hits - before) / int(positive.sum())
        before = hits
    return total


def test_every_name_has_a_function() -> None:
    assert set(more_metrics.FUNCTIONS) == set(METRIC_NAMES)


@pytest.mark.parametrize(("seed", "classes"), list(itertools.product(range(3), (2, 3, 5))))
def test_classification_agrees_with_the_definitions(seed: int, classes: int) -> None:
    rows = _predictions(seed, classes)
    value = {
        name: function(rows)
        for name, function in more_metrics.FUNCTIONS.items()
        if name in METRICS["classification"]
    }
    areas = [_area(rows.probability[:, c], rows.truth == c) for c in range(classes)]
    precisions = [_precision(rows.probability[:, c], rows.truth == c) for c in range(classes)]
    assert value["auroc"] == pytest.approx(areas[1] if classes == 2 else np.mean(areas))
    assert value["average_precision"] == pytest.approx(precisions[1] if classes == 2 else np.mean(precisions))
    assert value["f1"] == pytest.approx(reference.f1_score(rows.truth, rows.predicted, average="macro"))
    assert value["log_loss"] == pytest.approx(reference.log_loss(rows.truth, rows.probability))
    squares = ((rows.probability - np.eye(classes)[rows.truth]) ** 2).sum(axis=1).mean()
    assert value["brier"] == pytest.approx(squares / (2 if classes == 2 else 1))
    confidence, gaps = rows.probability.max(axis=1), 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            gaps += (
                abs((rows.predicted == rows.truth)[inside].mean() - confidence[inside].mean()) * inside.mean()
            )
    assert value["ece"] == pytest.approx(gaps)


def test_regression_agrees_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=80)
    predicted = truth + rng.normal(size=80)
    rows = Predictions(truth, predicted, (predicted - truth) ** 2, np.empty((80, 0)))
    value = {name: more_metrics.FUNCTIONS[name](rows) for name in METRICS["regression"]}
    ranks = [np.argsort(np.argsort(values)) for values in (truth, predicted)]
    assert value == {
        "mae": pytest.approx(reference.mean_absolute_error(truth, predicted)),
        "rmse": pytest.approx(reference.mean_squared_error(truth, predicted) ** 0.5),
        "r2": pytest.approx(reference.r2_score(truth, predicted)),
        "spearman": pytest.approx(np.corrcoef(*ranks)[0, 1]),
    }
    assert more_metrics.spearman(rows._replace(predicted=np.zeros(80))) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sharpness"), [("auroc", 1), ("f1", 1), ("brier", 1), ("ece", 1), ("ece", 2.5)]
)
def test_intervals_hold_the_value_of_all_rows(name: str, sharpness: float) -> None:
    """A sharpness of 1 is nearly calibrated, as the logits are made."""
    everything = _predictions(9, 2, 100_000)
    shares = everything.probability**sharpness
    everything = everything._replace(probability=shares / shares.sum(axis=1, keepdims=True))
    truth = more_metrics.FUNCTIONS[name](everything)
    inside = 0
    for part in np.random.default_rng(0).choice(100_000, (60, 400)):
        interval = with_interval(name, everything.take(part), 100)
        inside += interval["ci_low"] <= truth <= interval["ci_high"]
    assert inside >= 51  # of 60; 57 are expected, and fewer than 51 one time in 600


def test_rows_of_one_class_have_no_area() -> None:
    rows = _predictions(0, 3)
    one = rows.take(rows.truth == 2)
    for name in ("auroc", "average_precision"):
        assert with_interval(name, one, 100) == {"value": None, "ci_low": None, "ci_high": None}
    assert with_interval("f1", one, 100)["value"] is not None


def test_huge_evaluations_have_no_interval() -> None:
    assert more_metrics.resamples_for("auroc", 10_000, 2) == more_metrics.RESAMPLES
    assert more_metrics.resamples_for("auroc", 10_000_000, 1000) == 0
    assert more_metrics.resamples_for("average_precision", 1000, 1000) == 0


@pytest.mark.parametrize("text", ["aurox", "", "auroc,", "accuracy"])
def test_unknown_names_are_refused(text: str) -> None:
    if text == "auroc,":
        assert parse_metrics(text) == ("auroc",)
    else:
        with pytest.raises(UsageError):
            parse_metrics(text)


def test_names_of_another_task_are_refused() -> None:
    assert metrics_of("all", "regression") == tuple(METRICS["regression"])
    with pytest.raises(UsageError, match="mae isn't for classification"):
        metrics_of("auroc,mae", "classification")


@pytest.fixture
def evaluation(tmp_path: Path) -> EvalOptions:
    rng = np.random.default_rng(0)
    label, place = rng.integers(0, 2, (2, 300))
    X = rng.normal(size=(300, 3)) + np.stack([2 * label - 1, 2 * place - 1, 0 * label], axis=1)
    columns = {
        name: [str(value) for value in values] for name, values in (("label", label), ("place", place))
    }
    meta: dict[str, Any] = {"method": "ncm", "scaling": {"kind": "none", "factor": 1.0}}
    write_probe(tmp_path / "p.safetensors", make_probe([1.0, 0.4, 0.0], ("0", "1"), **meta))
    store = write_store(tmp_path / "f.h5", X, columns)
    return EvalOptions(
        probe=tmp_path / "p.safetensors",
        features=store,
        groups="place",
        metrics="auroc,ece",
        output=tmp_path / "r.json",
    )


def test_results_tables_and_plots_show_them(
    evaluation: EvalOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = evaluate(evaluation, reporter=Heard())
    overall = body["metrics"]["auroc"]
    by_place = {entry["group"]["place"]: entry["metrics"]["auroc"]["value"] for entry in body["groups"]}
    assert overall["worst_group"]["value"] == min(by_place.values())
    assert overall["ci_low"] < overall["value"] < overall["ci_high"]
    assert sum(one["n"] for one in body["calibration"]) == 300
    said = json.loads((tmp_path / "r.json").read_text())
    assert said["metrics"] == body["metrics"]
    assert run(["report", str(tmp_path / "r.json"), "--plots", str(tmp_path / "figures")]) == 0
    assert (
        f"{overall['value']:.3f} [{overall['ci_low']:.3f}, {overall['ci_high']:.3f}]"
        in capsys.readouterr().out
    )
    assert (tmp_path / "figures" / "calibration-all-rows.png").is_file()


def test_a_result_without_them_is_as_before(evaluation: EvalOptions) -> None:
    import dataclasses

    body = evaluate(dataclasses.replace(evaluation, metrics=None), reporter=Heard())
    assert not {"metrics", "calibration"} & set(body)
    assert all("metrics" not in entry for entry in body["groups"])


def test_the_command_says_why_groups_have_no_area(
    evaluation: EvalOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "eval",
        evaluation.probe,
        "-f",
        evaluation.features,
        "--groups",
        "label,place",
        "--metrics",
        "auroc",
    ]
    assert run([str(part) for part in line]) == 0
    assert "leave the label out of --groups" in capsys.readouterr().out
