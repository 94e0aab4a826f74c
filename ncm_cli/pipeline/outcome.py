"""What a run found: one row for each method, and known values beside measured ones."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ncm_cli.recipe import Expectation, Job, Recipe

SEED = "seed"
"""The matrix variable over which mean and standard deviation are taken."""

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
class Spread:
    """Mean and standard deviation (of the sample; None for one value) over the seeds."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None when there is no value."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(mean=statistics.fmean(known), sd=sd, n=len(known))

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.sd is None else f"±{self.sd:.3f}".replace("±0.", "±."))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of the closing table: one method in one cell, over the seeds."""

    step: str
    method: str
    rule: str | None
    cell: dict[str, str]
    seeds: int
    rank: Spread | None
    columns: dict[str, Spread | None]
    """Heading of the recipe's table to accuracy."""
    worst_group: Spread | None
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
    measured: Spread | None
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
    measured = tuple(_measurements(recipe))
    rows = tuple(_rows(recipe, measured))
    verdicts = tuple(_verdict(one, measured) for one in recipe.expect)
    return Outcome(rows=rows, verdicts=verdicts, measured=measured)


def _measurements(recipe: Recipe) -> Iterable[Measured]:
    """What eval, bound and sweep steps wrote."""
    makers = {path: job for job in recipe.jobs for paths in job.outputs.values() for path in paths}
    for job in recipe.jobs:
        for path in job.outputs.get("output", ()):
            if job.kind in ("eval", "bound") and path.is_file():
                yield _from_probe(job, path, makers)
            elif job.kind == "sweep" and path.with_suffix(".json").is_file():
                yield from _from_sweep(job, path.with_suffix(".json"))


def _from_probe(job: Job, path: Path, makers: dict[Path, Job]) -> Measured:
    from ncm_cli.store.probe import read_probe
    from ncm_cli.store.results import read_result

    (probe,) = job.inputs["probe"]
    maker = makers.get(probe)
    meta = read_probe(probe).meta if probe.is_file() else {}
    body = read_result(path)
    return Measured(
        kind=job.kind,
        step=maker.step if maker else job.step,
        method=str(meta.get("method", "")),
        rule=(meta.get("selection") or {}).get("rule"),
        rank=meta.get("rank"),
        where=_tidy(getattr(job.options, "where", None) or ""),
        cell=_texts(job),
        metrics=body,
        grouped=bool(getattr(job.options, "groups", None)),
        file=path,
        oracle=bool(body.get("oracle")),
        seen=sum((body.get("overlap") or {}).values()),
    )


def _from_sweep(job: Job, path: Path) -> Iterable[Measured]:
    """For each method, rule and seed of a sweep: its validation rows and its test rows."""
    from ncm_cli.store.results import read_result

    found = read_result(path, kind="sweep")
    wheres = {"val": job.options.val or "split=val", "test": job.options.test or "split=test"}
    for row in found["rows"]:
        for number, seed in enumerate(row["seeds"]):
            cell = {SEED: str(seed), **_texts(job)}
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
                    grouped=bool(job.options.groups),
                    swept=True,
                    oracle=row["oracle"],
                )


def _texts(job: Job) -> dict[str, str]:
    """The cell with its values as expectations give them."""
    return {name: str(value) for name, value in job.cell.items()}


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
        first = found[0]
        columns: dict[str, Spread | None] = {}
        worst, seen = None, False
        for heading, where in recipe.columns.items():
            own = [one for one in found if one.where == _in_cell(where, one.cell)]
            columns[heading] = Spread.of(one.metric("accuracy") for one in own)
            worst = Spread.of(one.metric("worst_group") for one in own if one.grouped)
            seen = any(one.seen for one in own)
        # One rank for each probe, however many results it has.
        ranks = {tuple(one.cell.items()): one.rank for one in found}
        yield Row(
            step=first.step,
            method=first.method,
            rule=first.rule,
            cell=_without_seed(first.cell),
            seeds=len({one.cell.get(SEED) for one in found}),
            rank=Spread.of(ranks.values()),
            columns=columns,
            worst_group=worst,
            swept=first.swept,
            oracle=any(one.oracle for one in found),
            seen=seen,
        )


def _verdict(expectation: Expectation, measured: tuple[Measured, ...]) -> Verdict:
    own = [one for one in measured if expectation.applies and _fits(one, expectation.filters)]
    spread = Spread.of(one.metric(expectation.metric) for one in own)
    if spread is None:
        return Verdict(expectation=expectation, measured=None, state=NOT_RUN)
    state = REPRODUCED if _within(spread.mean, expectation) else MISSED
    return Verdict(expectation=expectation, measured=spread, state=state)


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
