"""Shows what each rule picks, as tables.

The command's options are `baselines.options.SweepOptions`; its work is in `baselines.sweep`.
"""

from __future__ import annotations

from typing import Any

from ncm_cli.baselines.choice import told_epochs
from ncm_cli.console import Ui
from ncm_cli.probes.leave_out import averages
from ncm_cli.results.repetitions import Mean

METRIC_TITLES = {
    "val_accuracy": "validation accuracy",
    "test_accuracy": "test accuracy",
    "test_worst_group": "test accuracy of the worst group",
}
"""The tables on the terminal; the files hold every metric."""

HEADINGS = {"oracle": "ORACLE", "oracle-worst-group": "ORACLE worst"}


def show(body: dict[str, Any], ui: Ui) -> None:
    """Show each rule's picks, as tables."""
    if "left_out" in body:
        _show_left_out(body, ui)
        return
    options = body["options"]
    rows, rules = body["rows"], body["rules"]
    applied = [rule for rule, why in rules.items() if why is None]
    for metric, title in METRIC_TITLES.items():
        cells = {(row["method"], row["rule"]): _cell(row, metric) for row in rows}
        if any(cells.values()):
            spread = f"mean ± sd of {options['seeds']} seeds" if options["seeds"] > 1 else "one seed"
            ui.table(
                ["method", *(HEADINGS.get(rule, rule) for rule in applied)],
                [
                    (method, *(cells.get((method, rule)) for rule in applied))
                    for method in dict.fromkeys(row["method"] for row in rows)
                ],
                title=f"{title}, by selection rule ({spread})",
            )
    chosen = [
        (row["method"], row["rule"], " ".join(filter(None, [_hyper(row), told_epochs(row, rows)])))
        for row in rows
    ]
    ui.table(["method", "rule", "chosen hyper-parameters"], chosen, left=3)
    if skipped := [f"{rule}: {why}" for rule, why in rules.items() if why is not None]:
        ui.prose("Rules that don't apply. " + "; ".join(skipped) + ".")
    if any(row["oracle"] for row in rows):
        ui.text("ORACLE rules look at the test rows: they show what could be reached, not what to expect.")
    probes = "" if options["save_probes"] is None else f", and probes in {options['save_probes']}"
    ui.note(f"{body['configurations']:,} configurations; wrote {body['output']}{probes}")


def _show_left_out(body: dict[str, Any], ui: Ui) -> None:
    """The test accuracy on each domain while it was left out, with the mean and the worst."""
    domain_averages, column = averages(body["left_out"]), body["leave_out"]
    for rule in dict.fromkeys(average.rule for average in domain_averages):
        of_rule = [average for average in domain_averages if average.rule == rule]
        rows = [(value, *(average.by_value[value] for average in of_rule)) for value in body["left_out"]]
        rows += [
            ("mean", *(str(Mean(average.mean, average.sd)) for average in of_rule)),
            ("worst", *(average.worst for average in of_rule)),
        ]
        ui.table(
            [f"{column} left out", *(average.method for average in of_rule)],
            rows,
            title=f"test accuracy, rule {HEADINGS.get(rule, rule)}",
        )
    if any(average.oracle for average in domain_averages):
        ui.text("ORACLE rules look at the test rows: they show what could be reached, not what to expect.")
    for swept in body["left_out"].values():
        ui.note(f"wrote {swept['output']}")


def _cell(row: dict[str, Any], metric: str) -> str | None:
    """Mean ± standard deviation; no zero before the point, since five rules must fit 80 columns."""
    parts = [row["metrics"][metric], row["sd"][metric]]
    if parts[0] is None:
        return None
    return "±".join(f"{part:.3f}".removeprefix("0") for part in parts if part is not None)


def _hyper(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={value:.3g}" for name, value in row["hyper_parameters"].items())
