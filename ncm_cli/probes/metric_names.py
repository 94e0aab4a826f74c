"""The metrics that ``ncm eval --metrics`` takes; `ncm_cli.probes.more_metrics` computes them."""

from __future__ import annotations

from typing import NamedTuple

from ncm_cli.errors import UsageError, listing, unknown
from ncm_cli.options import parse_names


class MetricName(NamedTuple):
    """A metric's name in tables, and whether less is better."""

    text: str
    lower: bool = False


METRICS = {
    "classification": {
        "balanced_accuracy": MetricName("balanced accuracy"),
        "f1": MetricName("macro F1"),
        "auroc": MetricName("AUROC"),
        "average_precision": MetricName("average precision"),
        "log_loss": MetricName("log loss", lower=True),
        "brier": MetricName("Brier score", lower=True),
        "ece": MetricName("calibration error (ECE)", lower=True),
    },
    "regression": {
        "mae": MetricName("mean absolute error", lower=True),
        "rmse": MetricName("root mean squared error", lower=True),
        "r2": MetricName("R²"),
        "spearman": MetricName("Spearman's ρ"),
    },
}
"""The metrics of each task, by their names."""

METRIC_NAMES = {name: metric for metrics in METRICS.values() for name, metric in metrics.items()}


def parse_metrics(text: str) -> tuple[str, ...]:
    """Metrics' names separated by commas, or ``all``; raises `UsageError` for another name."""
    names = parse_names(text)
    if not names:
        raise UsageError("--metrics names no metric", found=repr(text), expected=listing(METRIC_NAMES))
    for name in names:
        if name not in METRIC_NAMES and name != "all":
            raise unknown("metric", name, [*METRIC_NAMES, "all"], error=UsageError)
    return tuple(dict.fromkeys(names))


def metrics_of(text: str, task: str) -> tuple[str, ...]:
    """The metrics that ``--metrics`` names, in its order; raises `UsageError` for one of another task."""
    known, names = METRICS[task], parse_metrics(text)
    for name in names:
        if name not in known and name != "all":
            raise UsageError(f"--metrics {name} isn't for {task}", expected=f"{', '.join(known)} or all")
    return tuple(known) if "all" in names else names
