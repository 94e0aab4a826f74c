"""``ncm report``."""

from __future__ import annotations

from ncm_cli.console import Ui
from ncm_cli.results.options import ReportOptions
from ncm_cli.results.report import report, terminal, text_of


def run(options: ReportOptions, ui: Ui) -> None:
    """Make the report and show it."""
    made = report(options, reporter=ui.reporter)
    if ui.json:
        ui.result(made.to_json())
    elif options.output is None and options.format != "table":
        ui.text(text_of(made.tables, options.format).rstrip("\n"))
    elif options.output is None:
        for table in made.tables:
            ui.table(**terminal(table))
    if options.output is not None:
        ui.note(f"tables: {options.output}")
    for path in made.plots:
        ui.note(f"plot: {path}")
    if options.html is not None:
        ui.note(f"page: {options.html}")
