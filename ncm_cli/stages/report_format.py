"""A report's tables as Markdown, LaTeX, CSV, or cells for the terminal."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ncm_cli.stages.report_read import Spread
from ncm_cli.stages.report_tables import INTERVALS, Cell, Table
from ncm_cli.store.csv_writer import csv_text

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "−": r"$-$",
    "–": "--",
    "σ": r"$\sigma$",
    "λ": r"$\lambda$",
    "θ": r"$\theta$",
    "ε": r"$\varepsilon$",
}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def number(value: float) -> str:
    """Three decimals, or three digits for very large and very small numbers."""
    if float(value).is_integer() and abs(value) < 1e4:
        return f"{value:.0f}" if abs(value) >= 2 else f"{value:.3f}"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.3g}"


def plain(cell: Cell) -> str:
    """A cell as text without bold: ``0.663 ± 0.012``, ``0.663 [0.641, 0.684]``."""
    own = cell.spread
    if own is None:
        return cell.text
    if own.sd is not None:
        return f"{number(own.mean)} ± {number(own.sd)}"
    if own.low is not None and own.high is not None:
        return f"{number(own.mean)} [{number(own.low)}, {number(own.high)}]"
    return number(own.mean)


def terminal(cell: Cell, *, intervals: bool = True) -> str:
    """The same, the best marked with a star: a log has no bold. ``intervals`` False leaves brackets out."""
    own = cell.spread
    if not intervals and own is not None and own.sd is None:
        cell = dataclasses.replace(cell, spread=Spread(own.mean))
    return f"{plain(cell)}{' *' if cell.bold else ''}"


def without_intervals(note: str) -> str:
    """A table's note for a table that is shown without its intervals."""
    return "; ".join(part for part in note.split("; ") if part != INTERVALS)


def markdown(tables: Sequence[Table]) -> str:
    """GitHub's tables, one after another."""
    parts = []
    for table in tables:
        lines = [f"**{_md(table.title)}**", ""]
        lines.append("| " + " | ".join(_md(column) for column in table.columns) + " |")
        lines.append(
            "|" + "|".join(["---"] * table.left + ["---:"] * (len(table.columns) - table.left)) + "|"
        )
        for row in table.rows:
            cells = [f"**{_md(plain(cell))}**" if cell.bold else _md(plain(cell)) for cell in row]
            lines.append("| " + " | ".join(cells) + " |")
        if table.note:
            lines += ["", _md(table.note) + "."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _md(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", text).replace("\n", " ")


def latex(tables: Sequence[Table]) -> str:
    r"""``booktabs`` tables for pdflatex with UTF-8; needs ``\usepackage{booktabs}`` and T1 fonts."""
    parts = ["% needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}"]
    for table in tables:
        shape = "l" * table.left + "r" * (len(table.columns) - table.left)
        lines = [r"\begin{table}", r"  \centering", rf"  \caption{{{_tex(table.title)}}}"]
        lines.append(rf"  \begin{{tabular}}{{{shape}}}")
        lines.append(r"    \toprule")
        lines.append("    " + " & ".join(_tex(column) for column in table.columns) + r" \\")
        lines.append(r"    \midrule")
        for row in table.rows:
            cells = [rf"\textbf{{{_tex(plain(cell))}}}" if cell.bold else _tex(plain(cell)) for cell in row]
            lines.append("    " + " & ".join(cells) + r" \\")
        lines += [r"    \bottomrule", r"  \end{tabular}"]
        if table.note:
            lines.append(rf"  \par\smallskip\footnotesize {_tex(table.note)}.")
        lines.append(r"\end{table}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _tex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))


def comma_separated(tables: Sequence[Table]) -> str:
    """One CSV block for each table: full precision, spreads in columns of their own; a blank line between."""
    blocks = []
    for table in tables:
        parts = [(i, name) for i in range(len(table.columns)) for name in _csv_parts(table, i)]
        columns = ["table", *(f"{table.columns[i]}{name}" for i, name in parts)]
        rows = ([table.title, *(_csv_value(row[i], name) for i, name in parts)] for row in table.rows)
        blocks.append(csv_text(columns, rows))
    return "\n".join(blocks)


_PARTS = {"": "mean", " sd": "sd", " ci low": "low", " ci high": "high"}


def _csv_parts(table: Table, column: int) -> list[str]:
    spreads = [row[column].spread for row in table.rows]
    known = [own for own in spreads if own is not None]
    return [""] + [
        name
        for name, attribute in _PARTS.items()
        if name and any(getattr(own, attribute) is not None for own in known)
    ]


def _csv_value(cell: Cell, part: str) -> str | float | None:
    own: Spread | None = cell.spread
    if own is not None:
        value: float | None = getattr(own, _PARTS[part])
        return value
    text = cell.text if part == "" else ""
    # A spreadsheet would take such text for a formula.
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
