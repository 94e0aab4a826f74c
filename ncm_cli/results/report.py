"""``ncm report``: results as tables, plots and a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ncm_cli.progress import SILENT, Reporter
from ncm_cli.results.encoders import encoder_table
from ncm_cli.results.figures import draw
from ncm_cli.results.formats import text_of
from ncm_cli.results.lines import differing, lines_of, read_sources, repeated_over
from ncm_cli.results.located import FileFinder
from ncm_cli.results.options import ReportOptions, parse_mean_over
from ncm_cli.results.tables import ReportTable, tables
from ncm_cli.store.files import write_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The tables, and the files that were written."""

    tables: Sequence[ReportTable]
    format: str
    output: Path | None
    plots: Sequence[Path]
    html: Path | None

    def to_json(self) -> dict[str, Any]:
        """Tables by title, each row an object of column to text or number."""
        by_title = [
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
        return {"tables": by_title, "output": self.output, "plots": self.plots, "html": self.html}


def _encoded(text: str) -> bytes:
    """UTF-8; bytes of file names that aren't UTF-8 become escapes."""
    return text.encode("utf-8", "backslashreplace")


def report(options: ReportOptions, *, reporter: Reporter = SILENT) -> Report:
    """Read results, make tables, and write tables, plots and a page where that is asked for.

    Raises `InputError` if there is nothing to report, or for a file that isn't a result, probe or store.
    """
    sources = read_sources(options.results)
    names = parse_mean_over(options.mean_over) if options.mean_over is not None else ()
    evals = lines_of(repeated_over(sources.evals, names), options.by, reporter, columns=True)
    bounds = lines_of(repeated_over(sources.bounds, names), options.by, reporter)
    repeats = " × ".join((*differing(sources.evals + sources.bounds, names), "seeds"))
    made = tables(sources, evals, bounds, options.by, repeats)
    if len((encoders := encoder_table(sources, repeats)).rows) > 1:
        made.insert(0, encoders)
    drawn: list[Path] = []
    if options.plots is not None:
        with FileFinder(sources) as files:
            drawn = list(draw(files.sources, evals, bounds, options.plots, reporter))
    if options.output is not None:
        write_bytes(options.output, _encoded(text_of(made, options.format)))
    if options.html is not None:
        from ncm_cli.results.page import page

        write_bytes(options.html, _encoded(page(sources, evals, bounds, made, reporter)))
    return Report(made, options.format, options.output, drawn, options.html)
