"""Shows the tables of ``ncm report``.

The command's options are `results.options.ReportOptions`; its work is in `results.report`.
"""

from __future__ import annotations

from ncm_cli.console import Ui
from ncm_cli.results.formats import terminal, text_of
from ncm_cli.results.report import Report


def show(made: Report, ui: Ui) -> None:
    """The tables, unless a file has them; and what was written."""
    if made.output is None and made.format != "table":
        ui.text(text_of(made.tables, made.format).rstrip("\n"))
    elif made.output is None:
        for table in made.tables:
            ui.table(**terminal(table))
    if not (made.tables or made.plots or made.html):
        ui.note("no table: probes, pair stores and feature stores are shown by --plots DIR and --html FILE")
    for what, path in (
        ("tables", made.output),
        *(("plot", path) for path in made.plots),
        ("page", made.html),
    ):
        if path is not None:
            ui.note(f"{what}: {path}")
