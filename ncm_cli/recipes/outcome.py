"""What a run's results say: the lines of the closing table, and comparisons with known values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from ncm_cli.recipes.load import Expectation, Recipe
from ncm_cli.recipes.steps import Job
from ncm_cli.results.repetitions import SEED, WHERE, Facts, Made, Mean, by, facts_of, repetitions
from ncm_cli.store.files import read_result
from ncm_cli.store.probe import read_probe

REPRODUCED, NEAR, MISSED, NOT_RUN = "reproduced", "near", "missed", "not run"

SLACK = 1e-9
"""Added to a tolerance, so that rounding doesn't make .85 miss .84 ± .01."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """One result: a probe on some rows, in one cell of the matrix."""

    kind: str
    """``eval`` or ``bound``; results of a sweep or finetune count as ``eval``."""
    rank: int | None
    cell: dict[str, str]
    metrics: dict[str, Any]
    facts: Facts
    """With ``step``, ``method``, ``rule`` and ``--where`` (tidied), by which expectations select results."""
    grouped: bool
    """Whether ``--groups`` was given; without it the worst group is the worst class."""
    swept: bool = False
    """Whether it is a rule's choice in a sweep."""
    oracle: bool
    """Whether the rows that it is measured on were used for choosing."""
    seen: int = 0
    """How many of the rows were also used in training or for choosing."""

    def metric(self, name: str) -> float | None:
        """A metric by its name in the result, dotted if nested; None if there is no such number."""
        value: Any = self.metrics
        for part in ("worst_group.accuracy" if name == "worst_group" else name).split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def fits(self, filters: Mapping[str, str]) -> bool:
        """Whether an expectation's filters select this result."""
        names = {**self.cell, **self.facts.fixed, "rank": str(self.rank)}
        return all(
            self.is_on(text) if name == "where" else names.get(name) == text for name, text in filters.items()
        )

    def is_on(self, where: str) -> bool:
        """Whether its rows are those of a filter, which may contain matrix variables."""
        for name, value in self.cell.items():
            where = where.replace(f"${{{name}}}", value)
        return bool(self.facts.fixed[WHERE] == _tidy(where))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A line of the closing table: one method in one cell, averaged over results that differ only in seed."""

    step: str
    method: str
    rule: str | None
    cell: dict[str, str]
    """The matrix cell, and options in which this line differs from others of the same method and cell."""
    seeds: int
    rank: Mean | None
    columns: dict[str, Mean | None]
    """Accuracy by heading of the recipe's table."""
    worst_group: Mean | None
    """On the last column's rows, if ``--groups`` was given."""
    swept: bool
    """Whether it is from a sweep, whose methods share one step."""
    oracle: bool
    """Whether test rows were used for choosing."""
    seen: bool
    """Whether rows of the last column were also used in training or for choosing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """An expectation and what was measured."""

    expectation: Expectation
    measured: Mean | None
    state: str
    within: float | None
    """The distance from the expected value that the state rests on: reproduced or near within it, missed
    beyond it. None if there is no such value, or no result."""


def outcome(recipe: Recipe, without: Set[str] = frozenset()) -> tuple[list[Summary], list[Comparison]]:
    """The lines of the closing table and the comparisons, from the results that exist.

    Results of the jobs with the keys ``without`` don't count.
    """

    def line(result: CellResult) -> tuple[Any, ...]:
        names = (result.facts.fixed[name] for name in ("step", "method", "rule"))
        return (*names, *_without_seed(result.cell).items())

    results = list(_results(recipe, without))
    rows = [
        _summary(recipe, of_line.members, of_line.differs)
        for group in by((result for result in results if result.kind == "eval"), line)
        for of_line in repetitions(group, lambda result: tuple(_headings(recipe, result)))
    ]
    return rows, [row for expectation in recipe.expect for row in _compared(expectation, results)]


def _results(recipe: Recipe, without: Set[str]) -> Iterator[CellResult]:
    """The results of eval, bound, sweep and finetune steps."""
    makers = {path: job for job in recipe.jobs for path in job.written}
    run = (recipe.out, {recipe.name_of(path): (job.step, job.cell) for path, job in makers.items()})
    for job in (job for job in recipe.jobs if job.key not in without):
        path = job.outputs.get("output")
        if path and job.kind in ("sweep", "finetune") and path.with_suffix(".json").is_file():
            yield from _picked(job, path.with_suffix(".json"), run)
        elif path and job.kind in ("eval", "bound") and path.is_file():
            (probe,) = job.inputs["probe"]
            body = read_result(path)
            fitted = dict(body["probe"])
            if "selection" not in fitted and probe.is_file():
                fitted["selection"] = (read_probe(probe).meta.get("selection") or {}).get("rule")
            names = {
                "step": makers[probe].step if probe in makers else job.step,
                "method": str(fitted.get("method") or ""),
                "rule": fitted.get("selection"),
                WHERE: _tidy(getattr(job.options, "where", None) or ""),
            }
            yield CellResult(
                kind=job.kind,
                rank=fitted.get("rank"),
                cell=job.cell,
                metrics=body,
                grouped=bool(getattr(job.options, "groups", None)),
                facts=_with_names(facts_of(path, body, run=run), names),
                oracle=bool(body.get("oracle")),
                seen=sum((body.get("overlap") or {}).values()),
            )


def _picked(job: Job, path: Path, run: tuple[Path, Made]) -> Iterator[CellResult]:
    """For each method, rule and seed of a sweep or a finetune: its validation rows and its test rows."""
    body = read_result(path, kind=job.kind)
    facts = facts_of(path, body, run=run)
    if job.kind == "finetune":  # as the rows of a sweep
        method = {"method": body["method"], "seeds": [body["seed"]], "hyper_parameters": {}}
        body["rows"] = [
            method
            | {"rule": rule, "oracle": pick["oracle"]}
            | {"values": {name: [value] for name, value in pick["metrics"].items()}}
            for rule, pick in body["rules"].items()
            if pick
        ]
    wheres = {"val": job.options.val or "split=val", "test": job.options.test or "split=test"}
    for row in body["rows"]:
        for number, seed in enumerate(row["seeds"]):
            for which, where in wheres.items():
                values = {
                    name: None if (seeds := row["values"].get(f"{which}_{name}")) is None else seeds[number]
                    for name in ("accuracy", "log_loss", "worst_group")
                }
                names = {"step": job.step, "method": row["method"], "rule": row["rule"], WHERE: _tidy(where)}
                yield CellResult(
                    kind="eval",
                    rank=row["hyper_parameters"].get("rank"),
                    cell={SEED: str(seed), **job.cell},
                    metrics={**values, "worst_group": {"accuracy": values["worst_group"]}},
                    grouped=bool(job.options.groups),
                    facts=_with_names(dataclasses.replace(facts, seed=f"{facts.seed}, {seed}"), names),
                    swept=job.kind == "sweep",
                    oracle=row["oracle"],
                )


def _with_names(facts: Facts, names: dict[str, Any]) -> Facts:
    """Facts with the names by which expectations select results; results that differ in them differ."""
    return dataclasses.replace(facts, fixed={**facts.fixed, **names})


def _tidy(where: str) -> str:
    """A filter without blanks around its terms."""
    return "&".join(part.strip() for part in where.split("&"))


def _without_seed(cell: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in cell.items() if name != SEED}


def _headings(recipe: Recipe, result: CellResult) -> list[str]:
    """The columns of the closing table to which a result belongs."""
    return [heading for heading, where in recipe.columns.items() if result.is_on(where)]


def _summary(recipe: Recipe, results: list[CellResult], differs: dict[str, str]) -> Summary:
    first = results[0]
    columns = {
        heading: [result for result in results if result.is_on(where)]
        for heading, where in recipe.columns.items()
    }
    last = list(columns.values())[-1]
    # One rank for each probe, however many results it has.
    ranks = {result.facts.seed: result.rank for result in results}
    return Summary(
        **{name: first.facts.fixed[name] for name in ("step", "method", "rule")},
        cell={**_without_seed(first.cell), **differs},
        seeds=len(ranks),
        rank=Mean.of(ranks.values()),
        columns={
            heading: Mean.of(result.metric("accuracy") for result in column)
            for heading, column in columns.items()
        },
        worst_group=Mean.of(result.metric("worst_group") for result in last if result.grouped),
        swept=first.swept,
        oracle=any(result.oracle for result in results),
        seen=any(result.seen for result in last),
    )


def _compared(expectation: Expectation, results: Iterable[CellResult]) -> Iterator[Comparison]:
    """One comparison for each set of repetitions that the expectation selects; `NOT_RUN` if there is none."""
    fitting = [
        result
        for result in results
        if expectation.applies
        and result.fits(expectation.filters)
        and result.metric(expectation.metric) is not None
    ]
    if not fitting:
        yield Comparison(expectation=expectation, measured=None, state=NOT_RUN, within=None)
    for of_line in repetitions(fitting, (lambda _: None) if "where" in expectation.filters else None):
        mean = Mean.of(result.metric(expectation.metric) for result in of_line.members)
        assert mean is not None
        state, within = _judged(mean.mean, expectation)
        yield Comparison(
            expectation=dataclasses.replace(expectation, filters={**expectation.filters, **of_line.differs}),
            measured=mean,
            state=state,
            within=within,
        )


def _judged(measured: float, expectation: Expectation) -> tuple[str, float | None]:
    """The state of a mean, and the distance from the expected value that it rests on, if there is one."""
    low, high = expectation.min, expectation.max
    inside = (low is None or measured >= low - SLACK) and (high is None or measured <= high + SLACK)
    if expectation.value is None:
        return (REPRODUCED if inside else MISSED), None
    distance, within = abs(measured - expectation.value), expectation.reproduced_within
    if inside and distance <= within + SLACK:
        return REPRODUCED, within
    widest = within if expectation.tolerance is None else expectation.tolerance
    return (NEAR if inside and distance <= widest + SLACK else MISSED), widest
