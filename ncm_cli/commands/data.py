"""``ncm data``, the same for every builder."""

from __future__ import annotations

from typing import Any

from ncm_cli.console import Ui
from ncm_cli.datasets.base import data

ROWS_SHOWN = 40
"""Rows of a table of counts."""


def run(options: Any, ui: Ui) -> None:
    """Make the data set and show its counts."""
    built = data(options, reporter=ui.reporter)
    made = built.contents
    more = len(made.rows) - ROWS_SHOWN
    footer = f"and {more:,} more: --json has all" if more > 0 else None
    names = sum(isinstance(cell, str) for cell in made.rows[0])
    ui.table(made.columns, made.rows[:ROWS_SHOWN], title=made.title, footer=footer, left=names)
    for role, path in built.files.items():
        ui.note(f"{role}: {path}")
    if ui.json:
        ui.result(built.to_json())
