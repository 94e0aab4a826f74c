"""How tables of results are written: as text, Markdown, LaTeX or CSV."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ncm_cli.results.tables import INTERVALS, Cell, ReportTable
from ncm_cli.store.tables import csv_text

_WORDS = ("backslash", "asciitilde", "asciicircum", "less", "greater", "bar", "quotedbl")
_SYMBOLS = ("pm", "times", "leq", "geq", "sigma", "lambda", "theta", "varepsilon")
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{symbol: f"\\text{name}{{}}" for symbol, name in zip('\\~^<>|"', _WORDS, strict=True)},
    **{symbol: f"$\\{name}$" for symbol, name in zip("±×≤≥σλθε", _SYMBOLS, strict=True)},
    "−": "$-$",
    "–": "--",
}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


MAX_WITH_INTERVALS = 2
"""The most columns of numbers whose intervals fit on a terminal."""


def terminal(table: ReportTable) -> dict[str, Any]:
    """Arguments of `Ui.table`. A star marks the best cells, since a log has no bold text."""
    roomy = len(table.columns) - table.left <= MAX_WITH_INTERVALS
    rows = [[_starred(cell, intervals=roomy) for cell in row] for row in table.rows]
    note = "; ".join(part for part in table.note.split("; ") if roomy or part != INTERVALS)
    shown = {"columns": table.columns, "rows": rows, "left": table.left}
    return {**shown, "title": table.title, "footer": note or None}


def _starred(cell: Cell, *, intervals: bool = True) -> str:
    return f"{cell.as_text(intervals=intervals)}{' *' if cell.bold else ''}"


def _grid(table: ReportTable, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """The headings and rows as text; ``bold`` formats the best."""
    rows = [
        [bold.format(escape(cell.as_text())) if cell.bold else escape(cell.as_text()) for cell in row]
        for row in table.rows
    ]
    return [[escape(column) for column in table.columns], *rows]


def markdown(table: ReportTable) -> str:
    """A table as GitHub shows it."""
    heading, *rows = (f"| {' | '.join(row)} |" for row in _grid(table, _md, "**{}**"))
    rule = "|".join(["---"] * table.left + ["---:"] * (len(table.columns) - table.left))
    note = ["", _md(table.note) + "."] if table.note else []
    return "\n".join([f"**{_md(table.title)}**", "", heading, f"|{rule}|", *rows, *note])


def _md(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", text).replace("\n", " ")


def latex(table: ReportTable) -> str:
    """A ``booktabs`` table for pdflatex with UTF-8."""
    heading, *rows = (f"    {' & '.join(row)} \\\\" for row in _grid(table, tex, r"\textbf{{{}}}"))
    shape = "l" * table.left + "r" * (len(table.columns) - table.left)
    note = [rf"  \par\smallskip\footnotesize {tex(table.note)}."] if table.note else []
    return "\n".join(
        [
            *(r"\begin{table}", r"  \centering", rf"  \caption{{{tex(table.title)}}}"),
            *(rf"  \begin{{tabular}}{{{shape}}}", r"    \toprule", heading, r"    \midrule", *rows),
            *(r"    \bottomrule", r"  \end{tabular}", *note, r"\end{table}"),
        ]
    )


def tex(text: str) -> str:
    """``text`` with LaTeX's special characters escaped."""
    return "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))


def aligned(table: ReportTable) -> str:
    """Plain text in columns."""
    cells = [list(table.columns), *([_starred(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<" if column < table.left else ">" for column in range(len(widths))]
    template = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    lines = [template.format(*row).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([table.title, "", *lines, *([table.note] if table.note else [])])


_PARTS = {"": "mean", " sd": "sd", " ci low": "low", " ci high": "high"}


def comma_separated(table: ReportTable) -> str:
    """CSV in full precision, with spreads in columns of their own."""
    parts = [
        (index, name)
        for index in range(len(table.columns))
        for name, attribute in _PARTS.items()
        if not name or any(getattr(row[index].spread, attribute, None) is not None for row in table.rows)
    ]
    columns = ["table", *(f"{table.columns[index]}{name}" for index, name in parts)]
    rows = ([table.title, *(_csv_value(row[index], name) for index, name in parts)] for row in table.rows)
    return csv_text(columns, rows).rstrip("\n")


def _csv_value(cell: Cell, part: str) -> str | float | None:
    if cell.spread is not None:
        return getattr(cell.spread, _PARTS[part])
    text = cell.text if part == "" else ""
    # A spreadsheet would run such text as a formula.
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


WRITERS = {"table": aligned, "markdown": markdown, "latex": latex, "csv": comma_separated}


def text_of(tables: Sequence[ReportTable], form: str) -> str:
    """All tables in one format, with blank lines between them."""
    head = ["% needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}"] if form == "latex" else []
    return "\n\n".join([*head, *map(WRITERS[form], tables)]) + "\n"
