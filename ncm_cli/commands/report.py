"""``ncm report``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncm_cli.results.options import ReportOptions

if TYPE_CHECKING:
    from ncm_cli.console import Ui

WIDE = 2
"""Columns of numbers up to which a terminal has room for their intervals."""


def run(options: ReportOptions, ui: Ui) -> None:
    """Make the report and show it."""
    from ncm_cli.results.report import report, terminal, text_of, without_intervals

    made = report(options, reporter=ui.reporter)
    if ui.json:
        ui.result(made.to_json())
    elif options.output is None and options.format != "table":
        ui.text(text_of(made.tables, options.format).rstrip("\n"))
    elif options.output is None:
        for table in made.tables:
            roomy = len(table.columns) - table.left <= WIDE
            ui.table(
                table.columns,
                [[terminal(cell, intervals=roomy) for cell in row] for row in table.rows],
                title=table.title,
                footer=(table.note if roomy else without_intervals(table.note)) or None,
                left=table.left,
            )
    if options.output is not None:
        ui.note(f"tables: {options.output}")
    for path in made.plots:
        ui.note(f"plot: {path}")
