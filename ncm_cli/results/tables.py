"""The tables of a report, by kind of result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ncm_cli.baselines.choice import told_epochs
from ncm_cli.probes.leave_out import averages
from ncm_cli.probes.metric_names import METRIC_NAMES
from ncm_cli.probes.metrics import wilson
from ncm_cli.probes.verdict import VERDICTS
from ncm_cli.results.lines import ORACLE, Line, Source, Sources
from ncm_cli.results.repetitions import Mean
from ncm_cli.store.files import part_of_name

INTERVALS = "brackets are 95 % intervals over rows"

TIE = 5e-4
"""Values closer than this look the same with three decimals, so all of them are bold."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spread(Mean):
    """A mean over repetitions, or one value with its interval."""

    low: float | None = None
    high: float | None = None


def spread(values: Iterable[float | None], interval: Sequence[float | None] | None = None) -> Spread | None:
    """The spread of the known values; a single value has its ``interval``."""
    mean = Spread.of(values)
    if mean is None or mean.n > 1 or interval is None or len(interval) != 2:
        return mean
    return Spread(mean.mean, low=interval[0], high=interval[1])


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

    A deviation or an end of an interval has three decimals if the number ``beside`` it does.
    """
    if beside is not None and 0 < abs(value) < 1e-3 and not 0 < abs(beside) < 1e-3:
        return "<0.001" if 0 < value < 5e-4 else f"{round(value, 3) + 0.0:.3f}"
    if float(value).is_integer() and abs(value) < 1e4:
        return f"{value:.0f}" if abs(value) >= 2 else f"{value:.3f}"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.3g}"


Row = list[Cell]


@dataclasses.dataclass(frozen=True, slots=True)
class ReportTable:
    """A table before it is written in a format. The first ``left`` columns are text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    left: int = 1
    note: str = ""


def cells(*values: str | Spread | None) -> Row:
    """Texts and numbers as cells; None is an empty cell."""
    return [Cell(value) if isinstance(value, str) else Cell(spread=value) for value in values]


def tables(
    sources: Sources, evals: Sequence[Line], bounds: Sequence[Line], by: str, over: str
) -> list[ReportTable]:
    """All tables of the sources; ``evals`` and ``bounds`` are lines, whose repetitions are ``over`` seeds."""
    others = [line for line in evals if line.sources[0].left_out is None]
    left_out = [line for line in evals if line not in others]
    shown = [_evals(others, over)] if others else []
    shown += [_left_out(left_out)] if left_out else []
    shown += [_more_metrics(evals, over)]
    shown += [*_left_out_sweeps(sources.sweeps), *map(_sweep, sources.sweeps)]
    shown += [_bounds(bounds, by, over), _paths(bounds, by, over)] if bounds else []
    for run in sources.runs:
        name = (run.body.get("provenance") or {}).get("recipe", {}).get("name", run.path.parent.name)
        shown += [known_values(name, expect)] if (expect := run.body.get("expect")) else []
    shown += [_choices(sources.probes), _pairs(sources)]
    return [table for table in shown if table.rows or table.title.startswith("Sweep")]


def _evals(lines: Sequence[Line], over: str) -> ReportTable:
    sources = [source for line in lines for source in line.sources]
    regression = all(source.body.get("task") == "regression" for source in sources)
    names = ("mse", "r2") if regression else ("accuracy", "worst_group")
    wheres = list(dict.fromkeys(source.where for source in sources))
    rows = []
    for line in lines:
        row = cells(line.label, line.selection, ranks_of(line.sources))
        for where in wheres:
            row += cells(*(measured(line.sources, where, name) for name in names))
        rows.append(row)
    _embolden(rows, 3, [name == "mse" for _ in wheres for name in names], [not line.oracle for line in lines])
    columns = [f"{where}: {name.replace('_', ' ')}" for where in wheres for name in names]
    return ReportTable(
        "Methods", ("method", "selection", "rank", *columns), rows, 3, _spread_note(rows, over)
    )


def _left_out(lines: Sequence[Line]) -> ReportTable:
    """Accuracy (for regression the mean squared error) on each domain while it was left out."""
    wheres = list(dict.fromkeys(source.where for line in lines for source in line.sources))
    regression = all(source.body.get("task") == "regression" for line in lines for source in line.sources)
    name, worst = ("mse", max) if regression else ("accuracy", min)
    rows = []
    for line in lines:
        values = [measured(line.sources, where, name) for where in wheres]
        known = [value.mean for value in values if value is not None]
        ends = (Spread(fmean(known)), Spread(worst(known))) if len(known) == len(wheres) else (None, None)
        rows.append(cells(line.label, line.selection, *values, *ends))
    _embolden(rows, 2, [regression] * (len(wheres) + 2), [not line.oracle for line in lines])
    columns = ("method", "selection", *wheres, "mean", "worst")
    return ReportTable(f"One domain left out: {name}", columns, rows, 2, _spread_note(rows, "seeds"))


def _left_out_sweeps(sweeps: Sequence[Source]) -> Iterator[ReportTable]:
    """Test accuracy on each domain while it was left out, of sweeps that left out different ones."""
    together: dict[tuple[Path, str], dict[str, dict[str, Any]]] = {}
    for sweep in sweeps:
        if left_out := (sweep.body.get("options") or {}).get("leave_out"):
            name, value = sweep.path.stem, str(left_out).partition("=")[2]
            name = name.removesuffix(f"-{part_of_name(value, otherwise='value')}")
            together.setdefault((sweep.path.parent, name), {})[left_out] = sweep.body
    for (_, name), bodies in together.items():
        if len(bodies) < 2:
            continue
        rows: list[Row] = []
        domain_averages = averages(bodies)
        for rule in dict.fromkeys(average.rule for average in domain_averages):
            of_rule = [
                cells(
                    f"{rule} {ORACLE}" if average.oracle else rule,
                    average.method,
                    *(Spread(value) for value in average.by_value.values()),
                    Spread(average.mean, average.sd),
                    Spread(average.worst),
                )
                for average in domain_averages
                if average.rule == rule
            ]
            _embolden(of_rule, 2, [False] * (len(bodies) + 2), [True] * len(of_rule))
            rows += of_rule
        columns = ("rule", "method", *bodies, "mean", "worst")
        note = "± is the standard deviation over seeds; the best of a rule is marked"
        yield ReportTable(f"Sweep {name}: test accuracy, one domain left out", columns, rows, 2, note)


def _more_metrics(lines: Sequence[Line], over: str) -> ReportTable:
    """The metrics of ``ncm eval --metrics``: a row for each metric and line, a column for each row filter."""
    sources = [source for line in lines for source in line.sources if source.body.get("metrics")]
    wheres = list(dict.fromkeys(source.where for source in sources))
    rows: list[Row] = []
    for name in dict.fromkeys(name for source in sources for name in source.body["metrics"]):
        metric, of_metric, may_win = METRIC_NAMES[name], list[Row](), list[bool]()
        for line in lines:
            values = [measured(line.sources, where, name) for where in wheres]
            if any(values):
                of_metric.append(cells(metric.text, line.label, line.selection, *values))
                may_win.append(not line.oracle)
        _embolden(of_metric, 3, [metric.lower] * len(wheres), may_win)
        rows += of_metric
    return ReportTable(
        "Metrics", ("metric", "method", "selection", *wheres), rows, 3, _spread_note(rows, over)
    )


def measured(sources: Iterable[Source], where: str, name: str) -> Spread | None:
    """A number (or a group's accuracy) from evals on the rows ``where``, by its name in the result."""
    bodies = [source.body for source in sources if source.where == where]
    values = [body.get(name) for body in bodies]
    numbers = [value.get("accuracy") if isinstance(value, dict) else value for value in values]
    if name in METRIC_NAMES and any((body.get("metrics") or {}).get(name) for body in bodies):
        numbers = [((body.get("metrics") or {}).get(name) or {}).get("value") for body in bodies]
    return spread(numbers, _interval(bodies[0], name) if len(bodies) == 1 else None)


def _interval(body: dict[str, Any], name: str) -> tuple[float | None, float | None] | None:
    """The 95 % interval over independent rows of an accuracy, or of a metric of ``ncm eval --metrics``."""
    if known := (body.get("metrics") or {}).get(name):
        return known.get("ci_low"), known.get("ci_high")
    if name == "accuracy" and (n := body.get("n") or 0) > 0 and 0 <= (body.get("accuracy") or 0.0) <= 1:
        return wilson(round((body.get("accuracy") or 0.0) * n), n)
    if name == "worst_group" and body.get("worst_group"):
        for group in body.get("groups", []):
            if group["group"] == body["worst_group"]["group"] and group.get("ci_low") is not None:
                return group["ci_low"], group.get("ci_high")
    return None


def ranks_of(sources: Iterable[Source]) -> str:
    """The rank of the probes, or the least and the largest; empty where none is known."""
    known = ((source.body.get("probe") or {}).get("rank") for source in sources)
    ranks = sorted({int(rank) for rank in known if rank is not None})
    return " to ".join(map(str, dict.fromkeys([*ranks[:1], *ranks[-1:]])))


def _spread_note(rows: Sequence[Row], over: str) -> str:
    spreads = [cell.spread for row in rows for cell in row if cell.spread]
    most = max((spread.n for spread in spreads), default=1)
    fewer = "up to " if any(1 < spread.n < most for spread in spreads) else ""
    parts = {
        f"± is the standard deviation over {fewer}{most} {over}": most > 1,
        INTERVALS: any(spread.low is not None for spread in spreads),
        f"{ORACLE}: chosen by test rows, never marked as best": any(
            cell.text.endswith(ORACLE) for row in rows for cell in row
        ),
    }
    return "; ".join(part for part, applies in parts.items() if applies)


def _embolden(rows: Sequence[Row], first: int, lower: Sequence[bool], may_win: Sequence[bool]) -> None:
    """Mark the best of each column from ``first`` on, the lowest where ``lower``, among rows that may win."""
    for column, lowest in enumerate(lower, first):
        spreads = [(row, row[column].spread) for row, may in zip(rows, may_win, strict=True) if may]
        means = [(row, spread.mean) for row, spread in spreads if spread is not None]
        best = (min if lowest else max)((mean for _, mean in means), default=0.0)
        for row, mean in means:
            if len(means) > 1 and abs(mean - best) < TIE:
                row[column] = dataclasses.replace(row[column], bold=True)


def _choices(probes: Sequence[Source]) -> ReportTable:
    """For each probe with a verdict, the measurements when it was chosen, with its controls."""
    rows = []
    for probe in probes:
        selection = probe.body.get("selection") or {}
        if verdict := selection.get("verdict"):
            controls = {control["name"]: control["bound"] for control in selection.get("controls", [])}
            names = ("erm_flip_rate", "flip_rate", "erm_cell_error", "cell_error", "erm_bound", "bound")
            estimates = [*(verdict.get(name) for name in names), controls.get("constant")]
            rule = f"{ORACLE} {selection['rule']}" if selection.get("oracle") else str(selection["rule"])
            spreads = [_estimate(known) for known in estimates]
            verdict_words = f"{VERDICTS.get(verdict['code'], '')} ({verdict['code']})"
            rank = str(probe.body.get("rank"))
            rows.append(cells(str(probe.path), verdict_words, rule, rank, trained_on(probe.body), *spreads))
            rows += [_of_store(probe.path, store, names) for store in verdict.get("stores") or ()]
    scores = ("flip rate", "cell error", "bound")
    measures = [head for score in scores for head in (f"{score} at rank 0", score)]
    columns = ["probe", "verdict", "selection", "rank", "trained on", *measures, "constant's"]
    # Columns that are empty for all probes are left out.
    kept = [i for i in range(len(columns)) if i < 4 or any(row[i].text or row[i].spread for row in rows)]
    title = "Did the pairs help? (validation rows and pairs only)"
    note = "brackets are 95 % intervals"
    if "cell error" in (columns[i] for i in kept):
        note += "; cell error: on held-out rows, with every label × domain cell weighted equally"
    rows = [[row[i] for i in kept] for row in rows]
    left = 4 + ("trained on" in (columns[i] for i in kept))
    return ReportTable(title, tuple(columns[i] for i in kept), rows, left, note)


def _of_store(probe: Path, verdict: Mapping[str, Any], names: Sequence[str]) -> Row:
    """The line of the verdict on one of several stores' pairs, with measurements by ``names``."""
    spreads = [_estimate(verdict.get(name)) for name in names]
    verdict_words = f"{VERDICTS.get(verdict['code'], '')} ({verdict['code']})"
    return cells(f"{probe}: {Path(verdict['path']).name}", verdict_words, "", "", "", *spreads, None)


def _estimate(known: Mapping[str, Any] | None) -> Spread | None:
    """An estimate with its interval; None if there is none."""
    return spread([known["value"]], (known["low"], known["high"])) if known else None


def trained_on(meta: Mapping[str, Any]) -> str:
    """The weights and extra rows that a probe was trained with, by its metadata."""
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
"""For each heading: the name in a bound's result, the name inside it, and the name of its interval."""


def _bounds(lines: Sequence[Line], by: str, over: str) -> ReportTable:
    rows = []
    for line in lines:
        bodies = [source.body for source in line.sources]
        held = sum(bool(body.get("holds")) for body in bodies)
        exact = "exact" if all(body.get("exact") for body in bodies) else "up to sampling error"
        row = cells(line.label, ranks_of(line.sources), f"{held} of {len(bodies)}, {exact}")
        for name, inner, interval in _BOUND.values():
            values = [(body.get(name) or {}).get(inner) if inner else body.get(name) for body in bodies]
            known = (bodies[0].get("intervals") or {}).get(interval) if len(bodies) == 1 else None
            row += cells(spread(values, known))
        rows.append(row)
    title = "Bound on the test-domain risk (Theorem 1)"
    return ReportTable(title, (by, "rank", "holds", *_BOUND), rows, 3, _spread_note(rows, over))


_PATH = {
    "ERM": "erm_test_accuracy",
    "at the least 0-1 bound": "bound_test_accuracy",
    "its rank": "bound_rank",
    f"best on the path ({ORACLE})": "best_test_accuracy",
    f"best rank ({ORACLE})": "best_rank",
    "lost to the best": "bound_regret",
}


def _paths(lines: Sequence[Line], by: str, over: str) -> ReportTable:
    rows = []
    for line in lines:
        if summaries := [source.body["summary"] for source in line.sources if source.body.get("summary")]:
            values = (spread([summary.get(name) for summary in summaries]) for name in _PATH.values())
            rows.append(cells(line.label, *values))
    return ReportTable("Test accuracy along the ranks", (by, *_PATH), rows, 1, _spread_note(rows, over))


SWEEP = {
    "val_accuracy": "validation accuracy",
    "val_worst_group": "validation worst group",
    "test_accuracy": "test accuracy",
    "test_worst_group": "test worst group",
}


def _sweep(sweep: Source) -> ReportTable:
    picks = sweep.body.get("rows") or []
    names = [name for name in SWEEP if any(pick["metrics"].get(name) is not None for pick in picks)]
    rows: list[Row] = []
    for rule in dict.fromkeys(pick["rule"] for pick in picks):
        of_rule = [_pick(pick, picks, names) for pick in picks if pick["rule"] == rule]
        # An oracle rule uses the test rows for every method, so comparing methods is fair.
        _embolden(of_rule, 3, [False] * len(names), [True] * len(of_rule))
        rows += of_rule
    spreads = any(cell.spread and cell.spread.sd is not None for row in rows for cell in row)
    note = f"the best of a rule is marked; {ORACLE}: chosen by test rows"
    return ReportTable(
        f"Sweep {sweep.path.stem}: {sweep.body.get('configurations', 0):,} configurations",
        ("rule", "method", "hyper-parameters", *(SWEEP[name] for name in names)),
        rows,
        3,
        f"± is the standard deviation over seeds; {note}" if spreads else note,
    )


def _pick(pick: dict[str, Any], picks: Sequence[dict[str, Any]], names: Sequence[str]) -> Row:
    seeds = pick.get("seeds")
    n = len(seeds) if isinstance(seeds, list) else int(seeds or 1)
    parts = [f"{name} {value:.3g}" for name, value in pick["hyper_parameters"].items()]
    hyper = ", ".join(filter(None, [*parts, told_epochs(pick, picks)]))
    row = cells(f"{pick['rule']} {ORACLE}" if pick.get("oracle") else pick["rule"], pick["method"], hyper)
    for name in names:
        value = pick["metrics"].get(name)
        sd = (pick.get("sd") or {}).get(name) if n > 1 else None
        row += cells(None if value is None else Spread(float(value), sd, n))
    return row


def known_values(recipe: str, verdicts: Iterable[dict[str, Any]]) -> ReportTable:
    """A recipe's known values beside the measured ones, each state with the tolerance that it rests on."""
    rows = []
    for verdict in verdicts:
        expectation, measured = verdict["expectation"], verdict.get("measured")
        filters = ", ".join(f"{name} {value}" for name, value in expectation["filters"].items())
        bounds = (("at least", expectation.get("min")), ("at most", expectation.get("max")))
        expected = ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        if expectation.get("value") is not None:
            published = f"{expectation['value']:g}"
            if expectation.get("spread") is not None:
                published += f" ± {expectation['spread']:g}"
            expected = ", ".join(filter(None, (published, expected)))
        row = cells(
            f"{expectation['metric']}{': ' if filters else ''}{filters}", expectation.get("source") or ""
        )
        # Until 0.6.0 a state rested on the tolerance alone.
        within = verdict.get("within", expectation.get("tolerance") if measured else None)
        mean = Spread(measured["mean"], measured.get("sd"), measured["n"]) if measured else None
        tolerance = "" if within is None else f"±{within:g}"
        rows.append([*row, *cells(verdict["state"], tolerance, expected, mean)])
    columns = ("what", "source", "state", "within", "known", "measured")
    return ReportTable(f"Known values, recipe {recipe}", columns, rows, 3)


def _pairs(sources: Sources) -> ReportTable:
    rows = []
    for path, store in sources.pairs:
        counts = [f"{count:,}" for count in (store.pairs, int(store.holdout.sum()), store.rank)]
        ends = [Spread(float(store.singular_values[i])) if store.rank else None for i in (0, -1)]
        rows.append(cells(path.stem, store.strategy, *counts, *ends))
    columns = ("pairs", "strategy", "count", "held out", "rank", "largest σ", "smallest σ")
    return ReportTable("Pairs", columns, rows, 2)
