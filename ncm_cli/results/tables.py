"""The tables of results: their type, and one for each kind of result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ncm_cli.probes.metrics import wilson
from ncm_cli.probes.verdict import VERDICTS
from ncm_cli.results.lines import ORACLE, Found, Line, Mean, Sources

INTERVALS = "brackets are 95 % intervals over rows"

TIE = 5e-4
"""Values this close look the same with three decimals: all of them are bold."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spread(Mean):
    """A mean over repetitions, or one value with its interval."""

    low: float | None = None
    high: float | None = None


def spread(values: Iterable[float | None], interval: Sequence[float | None] | None = None) -> Spread | None:
    """The spread of the values that are known; ``interval`` is used for a single one."""
    found = Spread.of(values)
    if found is None or found.n > 1 or interval is None or len(interval) != 2:
        return found
    return Spread(found.mean, low=interval[0], high=interval[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell: text, or a number with its spread."""

    text: str = ""
    spread: Spread | None = None
    bold: bool = False

    def as_text(self, *, intervals: bool = True) -> str:
        """Without bold: ``0.663 ± 0.012``, ``0.663 [0.641, 0.684]``."""
        known = self.spread
        if known is None:
            return self.text
        text = decimals(known.mean)
        if known.sd is not None:
            text += f" ± {decimals(known.sd, beside=known.mean)}"
        elif intervals and known.low is not None and known.high is not None:
            low, high = (decimals(end, beside=known.mean) for end in (known.low, known.high))
            text += f" [{low}, {high}]"
        return text


def decimals(value: float, *, beside: float | None = None) -> str:
    """Three decimals, or three digits for very large and very small numbers.

    A deviation or an end of an interval has three decimals as far as the number ``beside`` it has them.
    """
    if beside is not None and 0 < abs(value) < 1e-3 and not 0 < abs(beside) < 1e-3:
        return "<0.001" if 0 < value < 5e-4 else f"{round(value, 3) + 0.0:.3f}"
    if float(value).is_integer() and abs(value) < 1e4:
        return f"{value:.0f}" if abs(value) >= 2 else f"{value:.3f}"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.3g}"


Row = list[Cell]


@dataclasses.dataclass(frozen=True, slots=True)
class ReportTable:
    """A table before it has a format. The first ``left`` columns are text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    left: int = 1
    note: str = ""


def cells(*values: str | Spread | None) -> Row:
    """Texts and numbers as cells; None is an empty one."""
    return [Cell(value) if isinstance(value, str) else Cell(spread=value) for value in values]


def tables(sources: Sources, evals: Sequence[Line], bounds: Sequence[Line], by: str) -> list[ReportTable]:
    """Every table that the sources give; ``evals`` and ``bounds`` are theirs as lines."""
    made = [_evals(evals)] if evals else []
    made += [_sweep(found) for found in sources.sweeps]
    made += [_bounds(bounds, by), _paths(bounds, by)] if bounds else []
    for found in sources.runs:
        name = (found.body.get("provenance") or {}).get("recipe", {}).get("name", found.path.parent.name)
        made += [known_values(name, expect)] if (expect := found.body.get("expect")) else []
    made += [_choices(sources.probes), _pairs(sources)]
    return [table for table in made if table.rows or table.title.startswith("Sweep")]


def _evals(lines: Sequence[Line]) -> ReportTable:
    found = [one for line in lines for one in line.found]
    regression = all(one.body.get("task") == "regression" for one in found)
    names = ("mse", "r2") if regression else ("accuracy", "worst_group")
    wheres = list(dict.fromkeys(one.where for one in found))
    rows = []
    for line in lines:
        row = cells(line.label, line.selection, ranks_of(line.found))
        for where in wheres:
            row += cells(*(measured(line.found, where, name) for name in names))
        rows.append(row)
    _embolden(rows, 3, [name == "mse" for _ in wheres for name in names], [not one.oracle for one in lines])
    columns = [f"{where}: {name.replace('_', ' ')}" for where in wheres for name in names]
    return ReportTable("Methods", ("method", "selection", "rank", *columns), rows, 3, _spread_note(rows))


def measured(found: Iterable[Found], where: str, name: str) -> Spread | None:
    """A number of evals' results on the same rows, by its name there; of the worst group its accuracy."""
    bodies = [one.body for one in found if one.where == where]
    values = [body.get(name) for body in bodies]
    numbers = [value.get("accuracy") if isinstance(value, dict) else value for value in values]
    return spread(numbers, _interval(bodies[0], name) if len(bodies) == 1 else None)


def _interval(body: dict[str, Any], name: str) -> tuple[float, float | None] | None:
    """The 95 % interval of an accuracy over independent rows."""
    if name == "accuracy" and (n := body.get("n") or 0) > 0 and 0 <= (body.get("accuracy") or 0.0) <= 1:
        return wilson(round((body.get("accuracy") or 0.0) * n), n)
    if name == "worst_group" and body.get("worst_group"):
        for group in body.get("groups", []):
            if group["group"] == body["worst_group"]["group"] and group.get("ci_low") is not None:
                return group["ci_low"], group.get("ci_high")
    return None


def ranks_of(found: Iterable[Found]) -> str:
    """The rank of the results' probes, or the least and the largest; empty where none is known."""
    known = ((one.body.get("probe") or {}).get("rank") for one in found)
    ranks = sorted({int(rank) for rank in known if rank is not None})
    return " to ".join(map(str, dict.fromkeys([*ranks[:1], *ranks[-1:]])))


def _spread_note(rows: Sequence[Row]) -> str:
    spreads = [cell.spread for row in rows for cell in row if cell.spread]
    most = max((one.n for one in spreads), default=1)
    fewer = "up to " if any(1 < one.n < most for one in spreads) else ""
    parts = {
        f"± is the standard deviation over {fewer}{most} seeds": most > 1,
        INTERVALS: any(one.low is not None for one in spreads),
        f"{ORACLE}: chosen by test rows, never bold": any(
            c.text.endswith(ORACLE) for row in rows for c in row
        ),
    }
    return "; ".join(part for part, applies in parts.items() if applies)


def _embolden(rows: Sequence[Row], first: int, lower: Sequence[bool], may_win: Sequence[bool]) -> None:
    """Mark the best of each column from ``first`` on, among the rows that may win."""
    for column, less in enumerate(lower, first):
        own = [(row, row[column].spread) for row, may in zip(rows, may_win, strict=True) if may]
        means = [(row, known.mean) for row, known in own if known is not None]
        best = (min if less else max)((mean for _, mean in means), default=0.0)
        for row, mean in means:
            if len(means) > 1 and abs(mean - best) < TIE:
                row[column] = dataclasses.replace(row[column], bold=True)


def _choices(probes: Sequence[Found]) -> ReportTable:
    """Of each probe with a verdict: what was measured when it was chosen, beside its controls."""
    rows = []
    for found in probes:
        selection = found.body.get("selection") or {}
        if verdict := selection.get("verdict"):
            controls = {one["name"]: one["bound"] for one in selection.get("controls", [])}
            names = ("erm_flip_rate", "flip_rate", "erm_cell_error", "cell_error", "erm_bound", "bound")
            numbers = [*(verdict.get(name) for name in names), controls.get("constant")]
            rule = f"{ORACLE} {selection['rule']}" if selection.get("oracle") else str(selection["rule"])
            spreads = [spread([one["value"]], (one["low"], one["high"])) if one else None for one in numbers]
            said = f"{VERDICTS.get(verdict['code'], '')} ({verdict['code']})"
            rank = str(found.body.get("rank"))
            rows.append(cells(str(found.path), said, rule, rank, trained_on(found.body), *spreads))
    scores = ("flip rate", "cell error", "bound")
    measures = [head for score in scores for head in (f"{score} at rank 0", score)]
    columns = ["probe", "verdict", "selection", "rank", "trained on", *measures, "constant's"]
    # Columns that no probe has anything in.
    kept = [i for i in range(len(columns)) if i < 4 or any(row[i].text or row[i].spread for row in rows)]
    title = "Did the pairs help? (validation rows and pairs only)"
    note = "brackets are 95 % intervals"
    if "cell error" in (columns[i] for i in kept):
        note += "; cell error: on held-out rows, every label × domain cell alike"
    rows = [[row[i] for i in kept] for row in rows]
    left = 4 + ("trained on" in (columns[i] for i in kept))
    return ReportTable(title, tuple(columns[i] for i in kept), rows, left, note)


def trained_on(meta: Mapping[str, Any]) -> str:
    """Which weights and further rows a probe was trained with, by its record."""
    hyper = meta.get("hyper_parameters") or {}
    weights, rows = hyper.get("upweight"), hyper.get("pair_rows")
    return ", ".join([f"{weights} up-weighted"] * bool(weights) + ["the pairs' rows"] * bool(rows))


_BOUND = {
    "Term I": ("term_1", None, "term_1"),
    "Term II": ("term_2", None, "term_2"),
    "bound": ("bound", None, "bound"),
    "test risk": ("test_risk", None, "test_risk"),
    "0-1 bound": ("zero_one", "bound", "zero_one_bound"),
    "test error": ("zero_one", "test_error", "test_error"),
}
"""Heading to name in a bound's result, name within that, and name of its interval."""


def _bounds(lines: Sequence[Line], by: str) -> ReportTable:
    rows = []
    for line in lines:
        bodies = [one.body for one in line.found]
        held = sum(bool(body.get("holds")) for body in bodies)
        exact = "exact" if all(body.get("exact") for body in bodies) else "up to sampling error"
        row = cells(line.label, ranks_of(line.found), f"{held} of {len(bodies)}, {exact}")
        for name, inner, interval in _BOUND.values():
            values = [(body.get(name) or {}).get(inner) if inner else body.get(name) for body in bodies]
            known = (bodies[0].get("intervals") or {}).get(interval) if len(bodies) == 1 else None
            row += cells(spread(values, known))
        rows.append(row)
    title = "Bound on the test-domain risk (Theorem 1)"
    return ReportTable(title, (by, "rank", "holds", *_BOUND), rows, 3, _spread_note(rows))


_PATH = {
    "ERM": "erm_test_accuracy",
    "at least 0-1 bound": "bound_test_accuracy",
    "its rank": "bound_rank",
    f"best on the path ({ORACLE})": "best_test_accuracy",
    f"best rank ({ORACLE})": "best_rank",
    "lost to the best": "bound_regret",
}


def _paths(lines: Sequence[Line], by: str) -> ReportTable:
    rows = []
    for line in lines:
        if summaries := [one.body["summary"] for one in line.found if one.body.get("summary")]:
            values = (spread([summary.get(name) for summary in summaries]) for name in _PATH.values())
            rows.append(cells(line.label, *values))
    return ReportTable("Test accuracy along the ranks", (by, *_PATH), rows, 1, _spread_note(rows))


SWEEP = {
    "val_accuracy": "validation accuracy",
    "val_worst_group": "validation worst group",
    "test_accuracy": "test accuracy",
    "test_worst_group": "test worst group",
}


def _sweep(found: Found) -> ReportTable:
    picks = found.body.get("rows") or []
    names = [name for name in SWEEP if any(pick["metrics"].get(name) is not None for pick in picks)]
    made: list[Row] = []
    for rule in dict.fromkeys(pick["rule"] for pick in picks):
        rows = [_pick(pick, names) for pick in picks if pick["rule"] == rule]
        # Under an oracle rule all methods look at the test rows alike: among them the comparison is fair.
        _embolden(rows, 3, [False] * len(names), [True] * len(rows))
        made += rows
    spreads = any(cell.spread and cell.spread.sd is not None for row in made for cell in row)
    note = f"bold is best of a rule; {ORACLE}: chosen by test rows"
    return ReportTable(
        f"Sweep {found.path.stem}: {found.body.get('configurations', 0):,} configurations",
        ("rule", "method", "hyper-parameters", *(SWEEP[name] for name in names)),
        made,
        3,
        f"± is the standard deviation over seeds; {note}" if spreads else note,
    )


def _pick(pick: dict[str, Any], names: Sequence[str]) -> Row:
    seeds = pick.get("seeds")
    n = len(seeds) if isinstance(seeds, list) else int(seeds or 1)
    hyper = ", ".join(f"{name} {value:.3g}" for name, value in pick["hyper_parameters"].items())
    row = cells(f"{pick['rule']} {ORACLE}" if pick.get("oracle") else pick["rule"], pick["method"], hyper)
    for name in names:
        value = pick["metrics"].get(name)
        sd = (pick.get("sd") or {}).get(name) if n > 1 else None
        row += cells(None if value is None else Spread(float(value), sd, n))
    return row


def known_values(recipe: str, verdicts: Iterable[dict[str, Any]]) -> ReportTable:
    """Known values of a recipe beside measured ones."""
    rows = []
    for verdict in verdicts:
        known, measured = verdict["expectation"], verdict.get("measured")
        filters = ", ".join(f"{name} {value}" for name, value in known["filters"].items())
        bounds = (("at least", known.get("min")), ("at most", known.get("max")))
        expected = ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        if known.get("value") is not None:
            expected = f"{known['value']:g} ± {known['tolerance']:g}"
        row = cells(f"{known['metric']}{': ' if filters else ''}{filters}", known.get("source") or "")
        row.append(Cell(verdict["state"], bold=verdict["state"] == "missed"))
        own = Spread(measured["mean"], measured.get("sd"), measured["n"]) if measured else None
        rows.append([*row, *cells(expected, own)])
    columns = ("what", "source", "state", "known", "measured")
    return ReportTable(f"Known values, recipe {recipe}", columns, rows, 3)


def _pairs(sources: Sources) -> ReportTable:
    rows = []
    for path, store in sources.pairs:
        counts = [f"{count:,}" for count in (store.pairs, int(store.holdout.sum()), store.rank)]
        ends = [Spread(float(store.singular_values[i])) if store.rank else None for i in (0, -1)]
        rows.append(cells(path.stem, store.strategy, *counts, *ends))
    columns = ("pairs", "strategy", "count", "held out", "rank", "largest σ", "smallest σ")
    return ReportTable("Pairs", columns, rows, 2)
