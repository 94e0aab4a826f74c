"""Options of ``ncm report``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ncm_cli.errors import unknown
from ncm_cli.options.grids import parse_names
from ncm_cli.options.spec import argument, option

FORMATS = ("table", "markdown", "latex", "csv")
BY = ("method", "probe", "pairs", "file")
METRICS = (
    *("accuracy", "worst_group", "adjusted_accuracy", "balanced_accuracy", "log_loss"),
    *("mse", "r2", "adjusted_mse"),
)


def parse_metrics(text: str) -> tuple[str, ...]:
    """``accuracy,worst_group``: names of an eval result."""
    names = parse_names(text)
    for name in names:
        if name not in METRICS:
            raise unknown("metric", name, METRICS, where="--metrics")
    return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What ``ncm report`` reads and how it shows it."""

    results: tuple[Path, ...] = argument(
        help="Results (.json) of eval, bound, sweep and run, probes, pair stores, or folders of them.",
        metavar="RESULTS...",
        role="input",
    )
    format: str = option("table", choices=FORMATS, help="How tables are written.")
    output: Path | None = option(
        None, flags=("-o",), role="output", metavar="FILE", help="Write the tables here, not to stdout."
    )
    plots: Path | None = option(
        None, role="output", metavar="DIR", help="Draw what the results have, as PNG and SVG, in this folder."
    )
    by: str = option(
        "method",
        choices=BY,
        help="What names a line; means are over seeds, and what else differs has a line of its own.",
    )
    metrics: str | None = option(
        None,
        parse=parse_metrics,
        metavar="NAMES",
        help="Metrics of eval results to show; without it accuracy and worst_group, or mse and r2.",
    )
