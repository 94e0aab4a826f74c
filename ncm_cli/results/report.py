"""``ncm report``: results -> tables and plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ncm_cli.progress import SILENT, Reporter
from ncm_cli.results.lines import grouped, read_sources
from ncm_cli.results.options import ReportOptions
from ncm_cli.results.tables import Table, comma_separated, latex, markdown, tables, terminal
from ncm_cli.store.files import write_bytes

WRITERS: dict[str, Callable[[Sequence[Table]], str]] = {
    "markdown": markdown,
    "latex": latex,
    "csv": comma_separated,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The tables, the text they make in the format asked for, and the plots that were drawn."""

    tables: tuple[Table, ...]
    text: str | None
    """None for the terminal's own format."""
    output: Path | None
    plots: tuple[Path, ...]

    def to_json(self) -> dict[str, Any]:
        """Tables by title, each row an object of column to text or number."""
        return {
            "tables": [
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
            ],
            "output": str(self.output) if self.output else None,
            "plots": [str(path) for path in self.plots],
        }


def report(options: ReportOptions, *, reporter: Reporter = SILENT) -> Report:
    """Read results, make tables, and draw plots if a folder for them is named.

    Raises
    ------
    InputError
        Nothing to report, or a file that isn't a result, probe or pair store.
    """
    sources = read_sources(options.results)
    evals = grouped(sources.evals, options.by, reporter, columns=True)
    bounds = grouped(sources.bounds, options.by, reporter)
    made = tables(sources, evals, bounds, options.by, options.metrics)
    text = WRITERS[options.format](made) if options.format in WRITERS else None
    if options.output is not None:
        write_bytes(options.output, (text or _aligned(made)).encode("utf-8"))
    drawn: tuple[Path, ...] = ()
    if options.plots is not None:
        # matplotlib is slow to import, and only plots need it.
        from ncm_cli.results.plots import draw

        drawn = tuple(draw(sources, evals, bounds, options.plots, reporter))
    return Report(tables=tuple(made), text=text, output=options.output, plots=drawn)


def _aligned(made: Sequence[Table]) -> str:
    """Plain text in columns, for a file."""
    blocks = []
    for table in made:
        cells = [
            list(table.columns),
            *([terminal(cell) for cell in row] for row in table.rows),
        ]
        widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
        lines = [
            "  ".join(
                text.ljust(width) if column < table.left else text.rjust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        blocks.append("\n".join([table.title, "", *lines, *([table.note] if table.note else [])]))
    return "\n\n".join(blocks) + "\n"
