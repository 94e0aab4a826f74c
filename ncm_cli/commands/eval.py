"""Shows the measures, groups and comparisons of ``ncm eval``.

The command's options are `probes.options.EvalOptions`; its work is in `probes.evaluate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ncm_cli.console import Ui
from ncm_cli.probes.evaluate import SEEN
from ncm_cli.probes.metric_names import METRIC_NAMES
from ncm_cli.probes.metrics import MEASURES

GROUPS_SHOWN = 40
"""Most rows in a table of groups; if there are more groups, the worst are shown."""

NAMES = {name: measure.text for measures in MEASURES.values() for name, measure in measures.items()}


def show(body: dict[str, Any], ui: Ui) -> None:
    """The numbers as tables."""
    probe, table = body["probe"], body["groups"]
    ui.text(
        f"{probe['method'] or 'probe'}, rank {probe['rank']}, on {body['where'] or 'all rows'}: "
        f"{body['n']:,} rows"
    )
    marks = ["ORACLE"] if body["oracle"] else []
    if body["oracle"]:
        ui.text("ORACLE: chosen by looking at the test rows")
    for part, n in body["overlap"].items():
        if n:
            ui.text(f"{n:,} of these rows are rows that the probe was {SEEN[part][1]}.")
            marks.append(SEEN[part][0])
    rows: list[tuple[str, object]] = []
    for name, text in NAMES.items():
        if name not in body or (name.startswith("adjusted") and body[name] is None):
            continue
        groups_as = f" (groups as in {body['reference']['where']})" if name.startswith("adjusted") else ""
        rows.append((text + groups_as, body[name]))
    if len(body["crossings"]) > 1:
        for crossing in body["crossings"]:
            if crossing["worst_group"]:
                rows.append(_worst(f"worst of {' × '.join(crossing['columns'])}", crossing["worst_group"]))
    if body["worst_group"] and len(table) > 1:
        of = "" if body["task"] == "classification" else "'s mean squared error"
        rows.append(_worst(f"worst group{of}", body["worst_group"]))
    mark = f" [{', '.join(marks)}]" if marks else ""
    ui.table(["measure", "value"], [(text + mark, value) for text, value in rows])
    if len(table) > 1:
        _show_groups(body, ui)
    if body.get("metrics"):
        _show_metrics(body, ui)
    if body["comparison"] is not None:
        _show_comparison(body, body["comparison"], ui)
    if body["options"]["output"]:
        ui.note(f"wrote {body['options']['output']}")


def _worst(text: str, entry: dict[str, Any]) -> tuple[str, object]:
    group = ", ".join(f"{column}={value}" for column, value in entry["group"].items())
    return f"{text} ({group})", entry.get("accuracy", entry.get("mse"))


def _columns(body: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for crossing in body["crossings"] for name in crossing["columns"]))


def _show_groups(body: dict[str, Any], ui: Ui) -> None:
    table, columns, footer = body["groups"], _columns(body), None
    name, sign = ("accuracy", 1) if body["task"] == "classification" else ("mse", -1)
    if len(table) > GROUPS_SHOWN:
        present = [entry for entry in table if entry["n"]]
        table = sorted(present, key=lambda entry: sign * entry[name])[:GROUPS_SHOWN]
        footer = f"The {len(table)} worst of {len(body['groups'])} groups; --json has all."
    rows = [[*_key(entry, columns), entry["n"], entry[name]] for entry in table]
    headings = ["n", NAMES["mse"]]
    if sign > 0:
        rows = [[*row, _interval(entry, ".3f")] for row, entry in zip(rows, table, strict=True)]
        headings = ["n", "accuracy", "95 % interval"]
    ui.table([*columns, *headings], rows, footer=footer, left=len(columns))


def _show_metrics(body: dict[str, Any], ui: Ui) -> None:
    columns, table = _columns(body), [entry for entry in body["groups"] if entry["n"]]
    for name, overall in body["metrics"].items():
        lines = [[*([""] * len(columns)), body["n"], overall["value"], _interval(overall, ".3f")]]
        if columns:
            lines[0][0] = "all"
        shown = (
            sorted(table, key=lambda entry: _goodness(name, entry)) if len(table) > GROUPS_SHOWN else table
        )
        for entry in shown[:GROUPS_SHOWN] if len(table) > 1 else ():
            known = entry["metrics"][name]
            lines.append([*_key(entry, columns), entry["n"], known["value"], _interval(known, ".3f")])
        footer = None
        if len(table) > GROUPS_SHOWN:
            footer = f"The {GROUPS_SHOWN} worst of {len(table)} groups; --json has all."
        elif len(table) > 1 and all(entry["metrics"][name]["value"] is None for entry in table):
            footer = (
                f"Groups of one class have no {METRIC_NAMES[name].text}; leave the label out of --groups."
            )
        ui.table(
            [*columns, "n", METRIC_NAMES[name].text, "95 % interval"],
            lines,
            footer=footer,
            left=len(columns),
        )


def _goodness(name: str, entry: dict[str, Any]) -> float:
    """Larger for better values of a metric; infinite if a group has none."""
    value = entry["metrics"][name]["value"]
    return float("inf") if value is None else -value if METRIC_NAMES[name].lower else value


def _key(entry: dict[str, Any], columns: list[str]) -> list[str]:
    return [entry["group"].get(column, "") for column in columns]


def _interval(entry: dict[str, Any], form: str) -> str | None:
    low, high = entry["ci_low"], entry["ci_high"]
    return None if None in (low, high) else f"{low:{form}} – {high:{form}}"


def _show_comparison(body: dict[str, Any], comparison: dict[str, Any], ui: Ui) -> None:
    other = Path(body["options"]["compare"] or "").name
    if "mse_difference" in comparison:
        interval = _interval(comparison, "+.4g") or "unknown from one row"
        ui.text(
            f"Against {other} (mean squared error {comparison['other_mse']:.4g}):\n"
            f"{comparison['mse_difference']:+.4g}, 95 % interval {interval}."
        )
        return
    ui.text(
        f"Against {other} (accuracy {comparison['other_accuracy']:.3f}):\n"
        f"{comparison['difference']:+.3f}, 95 % interval {_interval(comparison, '+.3f')}.\n"
        f"{comparison['only_this_right']:,} rows are right with this probe only, "
        f"{comparison['only_other_right']:,} with the other only.\n"
        f"McNemar p = {comparison['p_value']:.3g}."
    )
    if len(comparison["groups"]) > 1:
        columns, present = _columns(body), [entry for entry in comparison["groups"] if entry["n"]]
        ui.table(
            [*columns, "n", "difference", "95 % interval"],
            [
                [*_key(entry, columns), entry["n"], entry["difference"], _interval(entry, "+.3f")]
                for entry in present
            ],
            left=len(columns),
            most=GROUPS_SHOWN,
        )
