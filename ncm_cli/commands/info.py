"""``ncm info``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncm_cli.results.options import InfoOptions

if TYPE_CHECKING:
    from ncm_cli.console import Ui

FAILURES_SHOWN = 10
CATEGORIES_SHOWN = 8

SKLEARN_LINES = """With scikit-learn (X: rows of features from the same encoder):
  z = np.load({path!r})
  model = {model}()
  for name in {names!r}: setattr(model, name, z[name])
{normalize}  model.{method}(X)"""


def run(options: InfoOptions, ui: Ui) -> None:
    """Describe a file, or the system."""
    from ncm_cli.results.info import info, system

    if options.system:
        _show_system(system(), ui)
    if options.file is None:
        return
    facts = info(options, reporter=ui.reporter)
    if not ui.json:
        _show(facts, ui)
    elif not options.system:
        ui.result(facts)
    if facts["verified"]:
        ui.note(f"verified: every byte that counts in {options.file} is as it was written")
    if options.output is not None:
        ui.note(f"wrote {options.output}")
        if options.export == "sklearn":
            ui.note(_sklearn_lines(facts, options.output))


def _show_system(found: dict[str, Any], ui: Ui) -> None:
    if ui.json:
        ui.result(found)
        return
    ui.table(
        ["package", "version"],
        [(name, version or "not installed") for name, version in found["versions"].items()],
        left=2,
    )
    ui.text(found["platform"])
    for line in found["devices"]:
        ui.text(line)


def _show(facts: dict[str, Any], ui: Ui) -> None:
    rows = [(name, _short(value)) for name, value in facts.items() if _is_shown(name, value)]
    rows += _choice_rows(facts.get("selection") or {})
    ui.table([facts["format"], ""], rows, title=facts["path"], left=2)
    if facts["columns"]:
        lines = [(name, *_column_cells(name, column, facts)) for name, column in facts["columns"].items()]
        ui.table(["column", "role", "values", "missing"], lines, left=3)
    if facts["failed"]:
        shown = [(row["id"], row["reason"]) for row in facts["failed"][:FAILURES_SHOWN]]
        more = len(facts["failed"]) - len(shown)
        ui.table(
            ["failed id", "reason"],
            shown,
            left=2,
            footer=f"and {more:,} more: --json has all" if more > 0 else None,
        )


_ELSEWHERE = {"format", "path", "columns", "failed", "label_column", "split_column", "verified"}
_LONG = {"options", "diagnostics", "singular_values", "data", "key", "selection"}
"""Shown in full by ``--json`` only."""


def _is_shown(name: str, value: Any) -> bool:
    return name not in _ELSEWHERE | _LONG and value is not None and value not in ({}, [])


def _choice_rows(selection: dict[str, Any]) -> list[tuple[str, str]]:
    """How a probe was chosen, what its bound is, and whether its pairs helped."""
    if not selection:
        return []
    count, folds = len(selection.get("path") or []), selection.get("folds")
    parts = f"{folds} folds of pairs" if folds and folds > 1 else "held-out pairs"
    measured = f", measured on {parts}" if folds and selection["rule"] == "bound" else ""
    mark = "ORACLE: " if selection.get("oracle") else ""
    rows = [("chosen by", f"{mark}{selection['rule']}, of {count:,} candidates{measured}")]
    verdict = selection.get("verdict") or {}
    if bound := verdict.get("bound"):
        rows.append(("bound", f"{bound['value']:.3g} (95 %: {bound['low']:.3g} to {bound['high']:.3g})"))
    return [*rows, ("verdict", verdict["text"])] if verdict else rows


def _short(value: Any) -> str:
    if isinstance(value, dict):
        shown = {name: item for name, item in value.items() if item is not None and not _is_nested(item)}
        return ", ".join(f"{name} {_short(item)}" for name, item in shown.items())
    if isinstance(value, list):
        return _listed([_short(item) for item in value])
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | dict) and len(str(value)) > 60


def _listed(items: list[str]) -> str:
    shown = ", ".join(items[:CATEGORIES_SHOWN])
    return f"{shown} and {len(items) - CATEGORIES_SHOWN:,} more" if len(items) > CATEGORIES_SHOWN else shown


def _column_cells(name: str, column: dict[str, Any], facts: dict[str, Any]) -> tuple[str, str, int]:
    role = {facts["label_column"]: "label", facts["split_column"]: "split"}.get(name, "")
    if column["kind"] == "categorical":
        values = _listed([f"{category} {count:,}" for category, count in column["counts"].items()])
    elif column["min"] is None:
        values = "numbers, all missing"
    else:
        values = f"numbers from {column['min']:g} to {column['max']:g}"
    return role, values, column["missing"]


def _sklearn_lines(facts: dict[str, Any], output: Path) -> str:
    classes = facts["classes"]
    by_norm = (facts.get("scaling") or {}).get("kind") == "norm"
    return SKLEARN_LINES.format(
        path=str(output),
        model="LogisticRegression" if classes else "LinearRegression",
        names=("coef_", "intercept_", "classes_") if classes else ("coef_", "intercept_"),
        normalize="  X = X / np.linalg.norm(X, axis=1, keepdims=True)\n" if by_norm else "",
        method="predict_proba" if classes else "predict",
    )
