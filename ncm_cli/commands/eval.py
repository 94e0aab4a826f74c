"""``ncm eval``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncm_cli.probes.options import EvalOptions

if TYPE_CHECKING:
    from ncm_cli.console import Ui
    from ncm_cli.probes.evaluate import Comparison, EvalReport
    from ncm_cli.probes.metrics import Group

GROUPS_SHOWN = 40
"""Rows of a group table; of more groups the worst are shown."""

ORACLE = "ORACLE: chosen by looking at the test rows"

NAMES = {
    "accuracy": "average accuracy",
    "adjusted_accuracy": "adjusted average accuracy",
    "balanced_accuracy": "balanced accuracy",
    "log_loss": "log loss",
    "mse": "mean squared error",
    "adjusted_mse": "adjusted mean squared error",
    "r2": "R²",
}


def run(options: EvalOptions, ui: Ui) -> None:
    """Evaluate and show the numbers."""
    from ncm_cli.probes.evaluate import evaluate

    report = evaluate(options, reporter=ui.reporter)
    if ui.json:
        ui.result(report.to_json())
        return
    _show(report, ui)
    if report.comparison is not None:
        _show_comparison(report, report.comparison, ui)
    if options.output:
        ui.note(f"wrote {options.output}")


def _show(report: EvalReport, ui: Ui) -> None:
    probe = report.probe
    rows_shown = report.where or "all rows"
    ui.text(f"{probe['method'] or 'probe'}, rank {probe['rank']}, on {rows_shown}: {report.n:,} rows")
    if report.oracle:
        ui.text(ORACLE)
    _warn_of_seen_rows(report, ui)
    mark = _mark(report)
    rows: list[tuple[str, object]] = []
    for name, value in report.scores.items():
        text = NAMES[name]
        if name.startswith("adjusted"):
            if value is None:
                continue
            text += f" (groups as in {report.reference})"
        rows.append((text + mark, value))
    for crossing in report.to_json()["crossings"] if len(report.groups.crossings) > 1 else ():
        if crossing["worst_group"]:
            group = ", ".join(
                f"{column}={value}" for column, value in crossing["worst_group"]["group"].items()
            )
            value = crossing["worst_group"].get("accuracy", crossing["worst_group"].get("mse"))
            rows.append((f"worst of {' × '.join(crossing['columns'])} ({group}){mark}", value))
    worst = report.worst_group
    if worst is not None and len(report.table) > 1:
        word = "worst group" if report.task == "classification" else "worst group's mean squared error"
        rows.append((f"{word} ({_name(report, worst)}){mark}", worst.value))
    ui.table(["measure", "value"], rows)
    if len(report.table) > 1:
        _show_groups(report, ui)


def _mark(report: EvalReport) -> str:
    """What must stand beside every number."""
    marks = ["ORACLE"] if report.oracle else []
    words = {"train": "training rows", "val": "validation rows"}
    marks += [words[part] for part, n in report.overlap.items() if n]
    return f" [{', '.join(marks)}]" if marks else ""


def _warn_of_seen_rows(report: EvalReport, ui: Ui) -> None:
    for part, word in (("train", "fitted on"), ("val", "chosen by")):
        if report.overlap[part]:
            ui.text(f"{report.overlap[part]:,} of these rows are rows that the probe was {word}.")


def _name(report: EvalReport, group: Group) -> str:
    return ", ".join(f"{column}={value}" for column, value in report.groups.key(group.index).items())


def _show_groups(report: EvalReport, ui: Ui) -> None:
    table = list(report.table)
    footer = None
    if len(table) > GROUPS_SHOWN:
        sign = 1 if report.task == "classification" else -1
        present = [group for group in table if group.value is not None]
        table = sorted(present, key=lambda group: sign * (group.value or 0.0))[:GROUPS_SHOWN]
        footer = f"The {len(table)} worst of {len(report.table)} groups; --json has all."
    columns = list(report.groups.columns)
    if report.task == "classification":
        rows = [[*report.groups.keys[g.index], g.n, g.value, _interval(g.low, g.high)] for g in table]
        headings = ["n", "accuracy", "95 % interval"]
    else:
        rows = [[*report.groups.keys[g.index], g.n, g.value] for g in table]
        headings = ["n", "mean squared error"]
    ui.table([*columns, *headings], rows, footer=footer, left=len(columns))


def _interval(low: float | None, high: float | None, form: str = ".3f") -> str | None:
    return None if low is None or high is None else f"{low:{form}} – {high:{form}}"


def _show_comparison(report: EvalReport, found: Comparison, ui: Ui) -> None:
    from ncm_cli.probes.metrics import MeanDifference

    overall = found.overall
    if isinstance(overall, MeanDifference):
        interval = _interval(overall.low, overall.high, "+.4g") or "unknown from one row"
        ui.text(
            f"Against {found.other.name} (mean squared error {found.other_value:.4g}):\n"
            f"{overall.difference:+.4g}, 95 % interval {interval}."
        )
        return
    ui.text(
        f"Against {found.other.name} (accuracy {found.other_value:.3f}):\n"
        f"{overall.difference:+.3f}, 95 % interval {_interval(overall.low, overall.high, '+.3f')}.\n"
        f"{overall.only_first:,} rows are right here only, {overall.only_second:,} there only; "
        f"McNemar p = {overall.p_value:.3g}."
    )
    if len(found.by_group) > 1:
        columns = list(report.groups.columns)
        rows = [
            [*key, paired.n, paired.difference, _interval(paired.low, paired.high, "+.3f")]
            for key, paired in zip(report.groups.keys, found.by_group, strict=True)
            if paired.n
        ]
        footer = None
        if len(rows) > GROUPS_SHOWN:
            footer = f"The first {GROUPS_SHOWN} of {len(rows)} groups; --json has all."
        ui.table(
            [*columns, "n", "difference", "95 % interval"],
            rows[:GROUPS_SHOWN],
            footer=footer,
            left=len(columns),
        )
