"""The tables of a report: methods × metrics × rules, the bound, sweeps, known values beside measured ones.

A report's tables as Markdown, LaTeX, CSV, or cells for the terminal.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from ncm_cli.probes.metrics import wilson
from ncm_cli.results.lines import ORACLE, Found, Group, Sources, Spread, spread
from ncm_cli.results.options import parse_metrics
from ncm_cli.store.tables import csv_text

INTERVALS = "brackets are 95 % intervals over rows"

LOWER_IS_BETTER = frozenset({"log_loss", "mse", "adjusted_mse"})

TIE = 5e-4
"""Values this close look the same with three decimals: all of them are bold."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell: text, or a number with its spread."""

    text: str = ""
    spread: Spread | None = None
    bold: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table before it has a format. The first ``left`` columns are text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left: int = 1
    note: str = ""


def tables(
    sources: Sources, evals: Sequence[Group], bounds: Sequence[Group], by: str, metrics: str | None
) -> list[Table]:
    """Every table that the sources give; ``evals`` and ``bounds`` are theirs as lines."""
    made = []
    if evals:
        made.append(_evals(evals, metrics))
    made += [_sweep(found) for found in sources.sweeps]
    if bounds:
        made.append(_bounds(bounds, by))
        if any(found.body.get("summary") for found in sources.bounds):
            made.append(_paths(bounds, by))
    made += [_verdicts(found) for found in sources.runs if found.body.get("expect")]
    if any((found.body.get("selection") or {}).get("verdict") for found in sources.probes):
        made.append(_choices(sources.probes))
    if sources.pairs:
        made.append(_pairs(sources))
    return made


def _number(body: dict[str, Any], name: str) -> float | None:
    value = body.get(name)
    if isinstance(value, dict):
        value = value.get("accuracy", value.get("mse"))
    return None if value is None else float(value)


def _interval(body: dict[str, Any], name: str) -> tuple[float, float] | None:
    """The 95 % interval of an accuracy over independent rows."""
    if name == "accuracy" and body.get("n") and body.get("accuracy") is not None:
        return wilson(round(body["accuracy"] * body["n"]), body["n"])
    if name == "worst_group" and body.get("worst_group"):
        worst = body["worst_group"]["group"]
        for group in body.get("groups", []):
            if group["group"] == worst and group.get("ci_low") is not None:
                return group["ci_low"], group["ci_high"]
    return None


def _chosen_metrics(found: Sequence[Found], asked: str | None) -> list[str]:
    if asked:
        return list(parse_metrics(asked))
    regression = all(one.body.get("task") == "regression" for one in found)
    return ["mse", "r2"] if regression else ["accuracy", "worst_group"]


def _evals(groups: Sequence[Group], metrics: str | None) -> Table:
    found = [one for group in groups for one in group.found]
    names = _chosen_metrics(found, metrics)
    wheres = list(dict.fromkeys(one.where for one in found))
    rows = []
    for group in groups:
        cells = [Cell(group.label), Cell(group.selection), Cell(_ranks(group.found))]
        for where in wheres:
            here = [one for one in group.found if one.where == where]
            for name in names:
                interval = _interval(here[0].body, name) if len(here) == 1 else None
                cells.append(Cell(spread=spread([_number(one.body, name) for one in here], interval)))
        rows.append(cells)
    columns = [f"{where}: {name.replace('_', ' ')}" for where in wheres for name in names]
    lower = [name in LOWER_IS_BETTER for _ in wheres for name in names]
    return Table(
        title="Methods",
        columns=("method", "selection", "rank", *columns),
        rows=_bold(rows, 3, lower, [not group.oracle for group in groups]),
        left=3,
        note=_spread_note(rows),
    )


def _choices(probes: Sequence[Found]) -> Table:
    """Of each probe with a verdict: what was measured when it was chosen, beside its controls."""
    rows = []
    for found in probes:
        selection = found.body.get("selection") or {}
        verdict = selection.get("verdict")
        if not verdict:
            continue
        controls = {one["name"]: one["bound"] for one in selection.get("controls", [])}
        measured = [verdict["flip_rate"], verdict["bound"], controls.get("erm"), controls.get("constant")]
        rows.append(
            (
                Cell(str(found.path)),
                Cell(f"{ORACLE} {selection['rule']}" if selection.get("oracle") else str(selection["rule"])),
                Cell(str(found.body.get("rank"))),
                *(
                    Cell(spread=spread([one["value"]], (one["low"], one["high"]))) if one else Cell()
                    for one in measured
                ),
                Cell(verdict["code"]),
            )
        )
    columns = ("probe", "selection", "rank", "flip rate", "bound", "ERM's bound", "constant's", "verdict")
    return Table(
        title="Did the pairs help? (validation rows and pairs only)",
        columns=columns,
        rows=tuple(rows),
        left=3,
        note="brackets are 95 % intervals",
    )


def _ranks(found: Sequence[Found]) -> str:
    ranks = sorted(
        {int(rank) for one in found if (rank := (one.body.get("probe") or {}).get("rank")) is not None}
    )
    if not ranks:
        return ""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _spread_note(rows: Sequence[Sequence[Cell]]) -> str:
    spreads = [cell.spread for row in rows for cell in row if cell.spread]
    parts = []
    most = max((one.n for one in spreads), default=1)
    fewer = any(1 < one.n < most for one in spreads)
    if most > 1:
        parts.append(f"± is the standard deviation over {'up to ' if fewer else ''}{most} seeds")
    if any(one.low is not None for one in spreads):
        parts.append(INTERVALS)
    if any(cell.text.endswith(ORACLE) for row in rows for cell in row):
        parts.append(f"{ORACLE}: chosen by test rows, never bold")
    return "; ".join(parts)


def _bold(
    rows: Sequence[Sequence[Cell]], first: int, lower: Sequence[bool], eligible: Sequence[bool]
) -> tuple[tuple[Cell, ...], ...]:
    """Mark the best of each column from ``first`` on, among the rows that may win."""
    made = [list(row) for row in rows]
    if sum(eligible) < 2:
        return tuple(tuple(row) for row in made)
    for offset, less in enumerate(lower):
        column = first + offset
        known = [row[column].spread for row, may in zip(made, eligible, strict=True) if may]
        means = [one.mean for one in known if one is not None]
        if len(means) < 2:
            continue
        best = min(means) if less else max(means)
        for row, may in zip(made, eligible, strict=True):
            own = row[column].spread
            if may and own is not None and abs(own.mean - best) < TIE:
                row[column] = dataclasses.replace(row[column], bold=True)
    return tuple(tuple(row) for row in made)


def _bounds(groups: Sequence[Group], by: str) -> Table:
    def of(name: str, inner: str | None = None) -> Callable[[dict[str, Any]], float | None]:
        def read(body: dict[str, Any]) -> float | None:
            value = body.get(name)
            return value.get(inner) if isinstance(value, dict) else value

        return read

    columns: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "Term I": of("term_1"),
        "Term II": of("term_2"),
        "bound": of("bound"),
        "test risk": of("test_risk"),
        "0-1 bound": of("zero_one", "bound"),
        "test error": of("zero_one", "test_error"),
    }
    intervals = {"Term I": "term_1", "Term II": "term_2", "bound": "bound", "test risk": "test_risk"}
    intervals |= {"0-1 bound": "zero_one_bound", "test error": "test_error"}
    rows = []
    for group in groups:
        own = group.found
        cells = [Cell(group.label), Cell(_ranks(own)), Cell(_holds(own))]
        for heading, read in columns.items():
            interval = (own[0].body.get("intervals") or {}).get(intervals[heading]) if len(own) == 1 else None
            cells.append(Cell(spread=spread([read(one.body) for one in own], interval)))
        rows.append(tuple(cells))
    return Table(
        title="Bound on the test-domain risk (Theorem 1)",
        columns=(by, "rank", "holds", *columns),
        rows=tuple(rows),
        left=3,
        note=_spread_note(rows),
    )


def _holds(found: Sequence[Found]) -> str:
    held = sum(bool(one.body.get("holds")) for one in found)
    exact = "exact" if all(one.body.get("exact") for one in found) else "up to sampling error"
    return f"{held} of {len(found)}, {exact}"


def _paths(groups: Sequence[Group], by: str) -> Table:
    columns = {
        "ERM": "erm_test_accuracy",
        "at least 0-1 bound": "bound_test_accuracy",
        "its rank": "bound_rank",
        f"best on the path ({ORACLE})": "best_test_accuracy",
        f"best rank ({ORACLE})": "best_rank",
        "lost to the best": "bound_regret",
    }
    rows = []
    for group in groups:
        with_path = [one.body["summary"] for one in group.found if one.body.get("summary")]
        if with_path:
            cells = [Cell(spread=spread([body.get(name) for body in with_path])) for name in columns.values()]
            rows.append((Cell(group.label), *cells))
    return Table(
        title="Test accuracy along the ranks",
        columns=(by, *columns),
        rows=tuple(rows),
        note=_spread_note(rows),
    )


_SWEEP = {
    "val_accuracy": "validation accuracy",
    "val_worst_group": "validation worst group",
    "test_accuracy": "test accuracy",
    "test_worst_group": "test worst group",
}


def _sweep(found: Found) -> Table:
    picks = found.body.get("rows") or []
    names = [name for name in _SWEEP if any(pick["metrics"].get(name) is not None for pick in picks)]
    rules = list(dict.fromkeys(pick["rule"] for pick in picks))
    made: list[tuple[Cell, ...]] = []
    for rule in rules:
        own = [pick for pick in picks if pick["rule"] == rule]
        rows = [_pick_cells(pick, names) for pick in own]
        # Under an oracle rule all methods look at the test rows alike: among them the comparison is fair.
        made += _bold(rows, 3, [False] * len(names), [True] * len(rows))
    columns = tuple(_SWEEP[name] for name in names)
    spreads = any(cell.spread and cell.spread.sd is not None for row in made for cell in row)
    return Table(
        title=f"Sweep {found.path.stem}: {found.body.get('configurations', 0):,} configurations",
        columns=("rule", "method", "hyper-parameters", *columns),
        rows=tuple(made),
        left=3,
        note=f"{'± is the standard deviation over seeds; ' if spreads else ''}bold is best of a rule; "
        f"{ORACLE}: chosen by test rows",
    )


def _pick_cells(pick: dict[str, Any], names: Sequence[str]) -> list[Cell]:
    rule = f"{pick['rule']} {ORACLE}" if pick.get("oracle") else pick["rule"]
    hyper = ", ".join(f"{name} {value:.3g}" for name, value in pick["hyper_parameters"].items())
    cells = [Cell(rule), Cell(pick["method"]), Cell(hyper)]
    seeds = pick.get("seeds")
    n = len(seeds) if isinstance(seeds, list) else int(seeds or 1)
    for name in names:
        value = pick["metrics"].get(name)
        sd = (pick.get("sd") or {}).get(name) if n > 1 else None
        cells.append(Cell(spread=None if value is None else Spread(float(value), sd, n)))
    return cells


def _verdicts(found: Found) -> Table:
    rows = []
    for verdict in found.body["expect"]:
        known = verdict["expectation"]
        measured = verdict.get("measured")
        filters = ", ".join(f"{name} {value}" for name, value in known["filters"].items())
        own = spread([measured["mean"]]) if measured else None
        if own and measured.get("sd") is not None:
            own = Spread(measured["mean"], measured["sd"], measured["n"])
        rows.append(
            (
                Cell(f"{known['metric']}{': ' if filters else ''}{filters}"),
                Cell(known.get("source") or ""),
                Cell(verdict["state"], bold=verdict["state"] == "missed"),
                Cell(_expected(known)),
                Cell(spread=own),
            )
        )
    name = (found.body.get("provenance") or {}).get("recipe", {}).get("name", found.path.parent.name)
    return Table(
        title=f"Known values, recipe {name}",
        columns=("what", "source", "state", "known", "measured"),
        rows=tuple(rows),
        left=3,
    )


def _expected(known: dict[str, Any]) -> str:
    if known.get("value") is not None:
        return f"{known['value']:g} ± {known['tolerance']:g}"
    bounds = (("at least", known.get("min")), ("at most", known.get("max")))
    return ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def _pairs(sources: Sources) -> Table:
    rows = []
    for path, store in sources.pairs:
        values = store.singular_values
        rows.append(
            (
                Cell(path.stem),
                Cell(store.strategy),
                Cell(f"{store.pairs:,}"),
                Cell(f"{int(store.holdout.sum()):,}"),
                Cell(f"{store.rank:,}"),
                Cell(spread=Spread(float(values[0])) if len(values) else None),
                Cell(spread=Spread(float(values[-1])) if len(values) else None),
            )
        )
    return Table(
        title="Pairs",
        columns=("pairs", "strategy", "count", "held out", "rank", "largest σ", "smallest σ"),
        rows=tuple(rows),
        left=2,
    )


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
