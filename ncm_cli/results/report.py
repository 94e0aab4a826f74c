"""``ncm report``: results -> tables and plots."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ncm_cli.progress import SILENT, Reporter
from ncm_cli.results.lines import lines_of, read_sources
from ncm_cli.results.options import ReportOptions
from ncm_cli.results.tables import Table, tables, text_of
from ncm_cli.store.files import write_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The tables, and the plots that were drawn."""

    tables: tuple[Table, ...]
    output: Path | None
    plots: tuple[Path, ...]

    def to_json(self) -> dict[str, Any]:
        """Tables by title, each row an object of column to text or number."""
        made = [
            {
                "title": table.title,
                "note": table.note,
                "rows": [
                    {
                        column: dataclasses.asdict(cell.spread) if cell.spread else cell.text
                        for column, cell in zip(table.columns, row, strict=True)
                    }
                    for row in table.rows
                ],
            }
            for table in self.tables
        ]
        return {"tables": made, "output": self.output, "plots": self.plots}


def report(options: ReportOptions, *, reporter: Reporter = SILENT) -> Report:
    """Read results, make tables, and draw plots if a folder for them is named.

    Raises `InputError` for nothing to report, and for a file that isn't a result, probe or pair store.
    """
    sources = read_sources(options.results)
    evals = lines_of(sources.evals, options.by, reporter, columns=True)
    bounds = lines_of(sources.bounds, options.by, reporter)
    made = tuple(tables(sources, evals, bounds, options.by))
    if options.output is not None:
        write_bytes(options.output, text_of(made, options.format).encode("utf-8"))
    drawn: tuple[Path, ...] = ()
    if options.plots is not None:
        # matplotlib is slow to import, and only plots need it.
        from ncm_cli.results.plots import draw

        drawn = tuple(draw(sources, evals, bounds, options.plots, reporter))
    return Report(made, options.output, drawn)
