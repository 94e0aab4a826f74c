"""``ncm sweep``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncm_cli.baselines.options import SweepOptions

if TYPE_CHECKING:
    from ncm_cli.baselines.sweep import SweepReport
    from ncm_cli.console import Ui

SHOWN = (
    ("validation accuracy", "val_accuracy"),
    ("test accuracy", "test_accuracy"),
    ("test accuracy of the worst group", "test_worst_group"),
)
"""The tables on the terminal; the files hold every metric."""

HEADINGS = {"oracle": "ORACLE", "oracle-worst-group": "ORACLE worst"}


def run(options: SweepOptions, ui: Ui) -> None:
    """Run the sweep and show what each rule picks."""
    from ncm_cli.baselines.sweep import sweep

    report = sweep(options, reporter=ui.reporter)
    if ui.json:
        ui.result(report.to_json())
        return
    rules = [rule for rule, why in report.rules.items() if why is None]
    for title, metric in SHOWN:
        _show(report, rules, title, metric, ui)
    ui.table(
        ["method", "rule", "chosen hyper-parameters"],
        [(row["method"], row["rule"], _hyper(row)) for row in report.rows],
        left=3,
    )
    skipped = [f"{rule}: {why}" for rule, why in report.rules.items() if why is not None]
    if skipped:
        ui.text("Rules that don't apply. " + "; ".join(skipped) + ".")
    if any(row["oracle"] for row in report.rows):
        ui.text("ORACLE rules look at the test rows: they say what could be reached, not what one gets.")
    ui.note(f"{report.configurations:,} configurations; wrote {report.output}")


def _show(report: SweepReport, rules: list[str], title: str, metric: str, ui: Ui) -> None:
    """Methods by rules, mean ± standard deviation over the seeds."""
    cells = {(row["method"], row["rule"]): _cell(row, metric) for row in report.rows}
    if not any(cells.values()):
        return
    methods = list(dict.fromkeys(row["method"] for row in report.rows))
    seeds = len(report.rows[0]["seeds"])
    ui.table(
        ["method", *(HEADINGS.get(rule, rule) for rule in rules)],
        [(method, *(cells.get((method, rule)) for rule in rules)) for method in methods],
        title=f"{title}, by selection rule"
        + (f" (mean ± sd of {seeds} seeds)" if seeds > 1 else " (one seed)"),
    )


def _cell(row: dict[str, Any], metric: str) -> str | None:
    mean, sd = row["metrics"][metric], row["sd"][metric]
    if mean != mean:
        return None
    # No zero before the point: five rules must fit 80 columns.
    parts = [mean] if sd != sd else [mean, sd]
    return "±".join(f"{part:.3f}".removeprefix("0") for part in parts)


def _hyper(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={value:.3g}" for name, value in row["hyper_parameters"].items())
