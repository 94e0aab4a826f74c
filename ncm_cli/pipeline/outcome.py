"""What a run found: one row for each method, and known values beside measured ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ncm_cli.recipe import Expectation, Job, Recipe
from ncm_cli.stages.report_repeats import SEED, WHERE, Facts, Mean, Run, facts_of, lines

REPRODUCED, MISSED, NOT_RUN = "reproduced", "missed", "not run"

SLACK = 1e-9
"""Added to a tolerance, so that .85 against .84 within .01 isn't missed by rounding."""

_SWEPT = ("accuracy", "log_loss", "worst_group")

_SHORT = {"worst_group": "worst_group.accuracy"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One result: a probe on some rows, in one cell of the matrix."""

    kind: str
    """``eval`` or ``bound``; what a sweep evaluated counts as ``eval``."""
    step: str
    method: str
    rule: str | None
    rank: int | None
    where: str
    cell: dict[str, str]
    metrics: dict[str, Any]
    file: Path
    facts: Facts
    grouped: bool = False
    """Whether groups were asked for; without, the worst group is the worst class."""
    swept: bool = False
    """Whether a sweep wrote it."""
    oracle: bool = False
    """Whether the rows that it is measured on were looked at to choose."""
    seen: int = 0
    """How many of the rows were also used in training or for choosing."""

    def metric(self, name: str) -> float | None:
        """A metric by its name in the result, dotted for inner ones."""
        found: Any = self.metrics
        for part in _SHORT.get(name, name).split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of the closing table: one method in one cell, over the seeds, and nothing but seeds."""

    step: str
    method: str
    rule: str | None
    cell: dict[str, str]
    """With what else tells this line from others of the same method and cell."""
    seeds: int
    rank: Mean | None
    columns: dict[str, Mean | None]
    """Heading of the recipe's table to accuracy."""
    worst_group: Mean | None
    """Of the last column's rows, where groups were asked for."""
    swept: bool
    """Whether it comes from a sweep, whose methods share one step."""
    oracle: bool
    """Whether the method looked at test rows to choose."""
    seen: bool
    """Whether rows of the last column were also used in training or for choosing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """An expectation and what was measured."""

    expectation: Expectation
    measured: Mean | None
    state: str

    def expected(self) -> str:
        """The value as text."""
        found = self.expectation
        if found.value is not None:
            return f"{found.value:g}±{found.tolerance:g}"
        bounds = (("≥", found.min), ("≤", found.max))
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Everything that the closing table shows."""

    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    measured: tuple[Measured, ...]

    @property
    def missed(self) -> int:
        return sum(verdict.state == MISSED for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        from ncm_cli.store.results import jsonable

        found: dict[str, Any] = jsonable({"rows": self.rows, "expect": self.verdicts})
        return found


def outcome(recipe: Recipe) -> Outcome:
    """Read the results that are there."""
    measured = tuple(_with_names(one) for one in _measurements(recipe))
    rows = tuple(_rows(recipe, measured))
    verdicts = tuple(verdict for one in recipe.expect for verdict in _verdicts(one, measured))
    return Outcome(rows=rows, verdicts=verdicts, measured=measured)


def _measurements(recipe: Recipe) -> Iterable[Measured]:
    """What eval, bound and sweep steps wrote."""
    makers = {path: job for job in recipe.jobs for paths in job.outputs.values() for path in paths}
    sweeps = {path.with_suffix(".json"): job for path, job in makers.items() if job.kind == "sweep"}
    run = Run.of(recipe.out, {path: (job.step, job.cell) for path, job in (makers | sweeps).items()})
    for job in recipe.jobs:
        for path in job.outputs.get("output", ()):
            if job.kind in ("eval", "bound") and path.is_file():
                yield _from_probe(job, path, makers, run)
            elif job.kind == "sweep" and path.with_suffix(".json").is_file():
                yield from _from_sweep(job, path.with_suffix(".json"), run)


def _from_probe(job: Job, path: Path, makers: dict[Path, Job], run: Run) -> Measured:
    from ncm_cli.store.probe import read_probe
    from ncm_cli.store.results import read_result

    (probe,) = job.inputs["probe"]
    maker = makers.get(probe)
    body = read_result(path)
    known = dict(body["probe"])
    if "selection" not in known and probe.is_file():
        known["selection"] = (read_probe(probe).meta.get("selection") or {}).get("rule")
    return Measured(
        kind=job.kind,
        step=maker.step if maker else job.step,
        method=str(known.get("method") or ""),
        rule=known.get("selection"),
        rank=known.get("rank"),
        where=_tidy(getattr(job.options, "where", None) or ""),
        cell=job.cell,
        metrics=body,
        grouped=bool(getattr(job.options, "groups", None)),
        file=path,
        facts=facts_of(path, body, run),
        oracle=bool(body.get("oracle")),
        seen=sum((body.get("overlap") or {}).values()),
    )


def _with_names(one: Measured) -> Measured:
    """With the names that expectations pick results by among its facts: they tell results apart as well."""
    names = {"step": one.step, "method": one.method, "rule": one.rule, WHERE: one.where}
    return dataclasses.replace(one, facts=dataclasses.replace(one.facts, fixed={**one.facts.fixed, **names}))


def _from_sweep(job: Job, path: Path, run: Run) -> Iterable[Measured]:
    """For each method, rule and seed of a sweep: its validation rows and its test rows."""
    from ncm_cli.store.results import read_result

    found = read_result(path, kind="sweep")
    facts = facts_of(path, found, run)
    wheres = {"val": job.options.val or "split=val", "test": job.options.test or "split=test"}
    for row in found["rows"]:
        for number, seed in enumerate(row["seeds"]):
            cell = {SEED: str(seed), **job.cell}
            one = dataclasses.replace(facts, seed=f"{facts.seed}, {seed}")
            for which, where in wheres.items():
                known = {name: _at(row["values"].get(f"{which}_{name}"), number) for name in _SWEPT}
                yield Measured(
                    kind="eval",
                    step=job.step,
                    method=row["method"],
                    rule=row["rule"],
                    rank=row["hyper_parameters"].get("rank"),
                    where=_tidy(where),
                    cell=cell,
                    metrics={**known, "worst_group": {"accuracy": known["worst_group"]}},
                    file=path,
                    facts=one,
                    grouped=bool(job.options.groups),
                    swept=True,
                    oracle=row["oracle"],
                )


def _at(values: list[Any] | None, number: int) -> Any:
    return None if values is None else values[number]


def _tidy(where: str) -> str:
    """A filter without the blanks that don't matter."""
    return "&".join(part.strip() for part in where.split("&"))


def _in_cell(text: str, cell: dict[str, str]) -> str:
    for name, value in cell.items():
        text = text.replace(f"${{{name}}}", value)
    return _tidy(text)


def _without_seed(cell: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in cell.items() if name != SEED}


def _rows(recipe: Recipe, measured: tuple[Measured, ...]) -> Iterable[Row]:
    groups: dict[tuple[Any, ...], list[Measured]] = {}
    for one in measured:
        if one.kind != "eval":
            continue
        cell = _without_seed(one.cell)
        groups.setdefault((one.step, one.method, one.rule, *cell.items()), []).append(one)
    for found in groups.values():
        for line in lines(found, lambda one: tuple(_headings(recipe, one))):
            yield _row(recipe, line.members, line.differs)


def _headings(recipe: Recipe, one: Measured) -> list[str]:
    """The columns of the closing table that a result stands in."""
    return [heading for heading, where in recipe.columns.items() if one.where == _in_cell(where, one.cell)]


def _row(recipe: Recipe, found: list[Measured], differs: dict[str, str]) -> Row:
    first = found[0]
    columns: dict[str, Mean | None] = {}
    worst, seen = None, False
    for heading in recipe.columns:
        own = [one for one in found if heading in _headings(recipe, one)]
        columns[heading] = Mean.of(one.metric("accuracy") for one in own)
        worst = Mean.of(one.metric("worst_group") for one in own if one.grouped)
        seen = any(one.seen for one in own)
    # One rank for each probe, however many results it has.
    ranks = {one.facts.seed: one.rank for one in found}
    return Row(
        step=first.step,
        method=first.method,
        rule=first.rule,
        cell={**_without_seed(first.cell), **differs},
        seeds=len(ranks),
        rank=Mean.of(ranks.values()),
        columns=columns,
        worst_group=worst,
        swept=first.swept,
        oracle=any(one.oracle for one in found),
        seen=seen,
    )


def _verdicts(expectation: Expectation, measured: tuple[Measured, ...]) -> Iterable[Verdict]:
    """One verdict; several where the expectation fits results that are no repetitions of one another."""
    own = [one for one in measured if expectation.applies and _fits(one, expectation.filters)]
    own = [one for one in own if one.metric(expectation.metric) is not None]
    if not own:
        yield Verdict(expectation=expectation, measured=None, state=NOT_RUN)
    column = (lambda one: None) if "where" in expectation.filters else None
    for line in lines(own, column):
        mean = Mean.of(one.metric(expectation.metric) for one in line.members)
        assert mean is not None
        yield Verdict(
            expectation=dataclasses.replace(expectation, filters={**expectation.filters, **line.differs}),
            measured=mean,
            state=REPRODUCED if _within(mean.mean, expectation) else MISSED,
        )


def _fits(one: Measured, filters: dict[str, str]) -> bool:
    own = {**one.cell, "step": one.step, "method": one.method, "rule": one.rule, "rank": str(one.rank)}
    for name, wanted in filters.items():
        if name == "where":
            if one.where != _in_cell(wanted, one.cell):
                return False
        elif own.get(name) != wanted:
            return False
    return True


def _within(value: float, expectation: Expectation) -> bool:
    if expectation.value is not None:
        assert expectation.tolerance is not None
        if abs(value - expectation.value) > expectation.tolerance + SLACK:
            return False
    if expectation.min is not None and value < expectation.min - SLACK:
        return False
    return expectation.max is None or value <= expectation.max + SLACK
