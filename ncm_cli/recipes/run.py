"""Runs a recipe's jobs in order, in this process; compares results with known values; prints shell lines."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, NcmError, UsageError, as_written, listing, unknown
from ncm_cli.options import command_words, fields_of
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.recipes.freshness import State
from ncm_cli.recipes.load import Expectation, Recipe
from ncm_cli.recipes.steps import REPORT, Job
from ncm_cli.registry import work_of
from ncm_cli.results.repetitions import SEED, WHERE, Facts, Made, Mean, by, facts_of, repetitions
from ncm_cli.store.files import jsonable, read_result, relative, write_result, writer_lock
from ncm_cli.store.outputs import refuse_no_folder
from ncm_cli.store.probe import read_probe

REPRODUCED, NEAR, MISSED, NOT_RUN = "reproduced", "near", "missed", "not run"

SLACK = 1e-9
"""Added to a tolerance, so that rounding doesn't make .85 miss .84 ± .01."""

SOME_ROWS_FAILED = 5
"""The exit code of a run in which more rows of a step failed than are allowed."""


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
    """Whether it is a rule's choice in a sweep or a finetune."""
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
    """Whether it is from a sweep or a finetune, whose methods share one step."""
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


def outcome(recipe: Recipe) -> tuple[list[Summary], list[Comparison]]:
    """The lines of the closing table and the comparisons, from the results that exist."""

    def line(result: CellResult) -> tuple[Any, ...]:
        names = (result.facts.fixed[name] for name in ("step", "method", "rule"))
        return (*names, *_without_seed(result.cell).items())

    results = list(_results(recipe))
    rows = [
        _summary(recipe, same.members, same.differs)
        for group in by((result for result in results if result.kind == "eval"), line)
        for same in repetitions(group, lambda result: tuple(_headings(recipe, result)))
    ]
    return rows, [row for expectation in recipe.expect for row in _compared(expectation, results)]


def _results(recipe: Recipe) -> Iterator[CellResult]:
    """The results of eval, bound, sweep and finetune steps."""
    makers = {path: job for job in recipe.jobs for path in job.written}
    run = (recipe.out, {recipe.name_of(path): (job.step, job.cell) for path, job in makers.items()})
    for job in recipe.jobs:
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
                    swept=True,
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
    for same in repetitions(fitting, (lambda _: None) if "where" in expectation.filters else None):
        mean = Mean.of(result.metric(expectation.metric) for result in same.members)
        assert mean is not None
        state, within = _judged(mean.mean, expectation)
        yield Comparison(
            expectation=dataclasses.replace(expectation, filters={**expectation.filters, **same.differs}),
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


PACKAGES = (
    *("ncm-cli", "torch", "torchvision", "open_clip_torch", "timm"),
    *("numpy", "scipy", "scikit-learn", "h5py", "safetensors", "pillow"),
)


def versions() -> dict[str, str | None]:
    """Versions of Python and the packages; None if a package isn't installed."""
    installed: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def _write_report(recipe: Recipe, state: State, rows: list[Summary], comparisons: list[Comparison]) -> None:
    """Write the outcome, and for every file its step, options, seed, and digests of it and its inputs."""
    files = [
        {
            "file": recipe.name_of(path),
            "step": job.step,
            "kind": job.builder or job.kind,
            "cell": job.cell,
            "seed": getattr(job.options, "seed", None),
            "options": jsonable(job.options),
            "inputs": state.facts(job).get("inputs"),
            "sha256": state.facts(job).get("outputs", {}).get(recipe.name_of(path)),
            "seconds": state.facts(job).get("seconds"),
        }
        for job in recipe.jobs
        for path in job.written
    ]
    provenance = {
        "recipe": {"name": recipe.name, "file": str(recipe.file), "sha256": recipe.sha256},
        "vars": recipe.vars,
        "matrix": recipe.matrix,
        "versions": versions(),
        "files": files,
    }
    body = {"rows": rows, "expect": comparisons, "provenance": provenance}
    write_result(recipe.out / REPORT, "run", body)


def shell_lines(recipe: Recipe, jobs: Sequence[Job]) -> list[str]:
    """Lines for bash that do the jobs' work and write the same files."""
    here = Path.cwd()
    out = relative(recipe.out, here)
    lines = [f"cd {shlex.quote(str(here))}", f"mkdir -p {shlex.quote(str(out))}"]
    for job in jobs:
        values = {field.name: getattr(job.options, field.name) for field in fields_of(type(job.options))}
        words = map(as_written, command_words(type(job.options), values))
        line = ["ncm", job.kind, *([job.builder] if job.builder else []), *words]
        lines.append(" ".join(map(_shell_word, line)))
    return lines


def _shell_word(text: str) -> str:
    """A word for bash; control characters are escaped."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = (
        character if character.isprintable() and character not in "\\'" else _shell_escape(character)
        for character in text
    )
    return f"$'{''.join(escaped)}'"


def _shell_escape(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """The outcome of a run, and its results."""

    recipe: Recipe
    ran: tuple[str, ...]
    """Titles of the jobs that ran."""
    skipped: tuple[str, ...]
    """Titles of the jobs that were up to date."""
    exit_code: int
    """0, or 5 if rows failed in some step, now or in an earlier run."""
    rows: list[Summary]
    comparisons: list[Comparison]
    seconds: float

    @property
    def missed(self) -> int:
        return sum(comparison.state == MISSED for comparison in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """The output of ``--json``."""
        out = self.recipe.out
        said = {"recipe": self.recipe.name, "out": out, "report": out / REPORT, "ran": self.ran}
        said |= {"up_to_date": self.skipped, "seconds": self.seconds}
        return said | {"rows": self.rows, "expect": self.comparisons}


def selected_jobs(recipe: Recipe, only: Sequence[str]) -> tuple[Job, ...]:
    """The jobs of the steps of these names or kinds; all jobs without any."""
    steps = dict.fromkeys(job.step for job in recipe.jobs)
    names = {**steps, **dict.fromkeys(job.kind for job in recipe.jobs)}
    for name in only:
        if name not in names:
            raise unknown("step", name, names, where=recipe.file, error=UsageError)
    kinds = [name for name in only if name not in steps]
    return tuple(job for job in recipe.jobs if not only or job.step in only or job.kind in kinds)


def run(
    recipe: Recipe, *, only: Sequence[str] = (), force: bool = False, reporter: Reporter = SILENT
) -> RunReport:
    """Run the jobs that are stale, and write report.json.

    The next call runs a killed step again, which resumes where it can. The first error stops the run;
    finished steps are kept.

    Raises `InputError` if another run uses the folder, if an input is missing whose step ``only`` leaves out,
    or if a step would replace a file that this run didn't make.
    """
    jobs = selected_jobs(recipe, only)
    start = time.monotonic()
    refuse_no_folder(recipe.out)
    recipe.out.mkdir(parents=True, exist_ok=True)
    ran, skipped = list[str](), list[str]()
    code = 0
    with writer_lock(recipe.out / REPORT):
        state = State(recipe.out, reporter)
        _refuse_foreign(recipe, jobs, state)
        for number, job in enumerate(jobs, 1):
            label = f"step {number} of {len(jobs)}: {job.title}"
            try:
                why = _refreshed(job, recipe, state, label, force, reporter)
            except NcmError:
                reporter.warn(f"{label} failed; the steps before it are kept")
                raise
            (ran if why else skipped).append(job.title)
            code = code or int(state.facts(job).get("exit_code", 0))
        state.save()
        if skipped:
            reporter.note(f"{len(skipped)} of {len(jobs)} steps were up to date")
        rows, comparisons = outcome(recipe)
        _write_report(recipe, state, rows, comparisons)
    return RunReport(
        recipe=recipe,
        ran=tuple(ran),
        skipped=tuple(skipped),
        exit_code=code,
        rows=rows,
        comparisons=comparisons,
        seconds=time.monotonic() - start,
    )


def _refuse_foreign(recipe: Recipe, jobs: Sequence[Job], state: State) -> None:
    """Refuse to replace files that this run hasn't made, before the first step."""
    paths = [path for job in jobs for path in job.written if not state.made(path)]
    paths += [recipe.out / REPORT] if state.is_new else []
    foreign = [path for path in paths if path.is_file() or (path.is_dir() and any(path.iterdir()))]
    if foreign:
        raise InputError(
            "a step would replace what this run didn't make",
            where=listing(foreign),
            fix="move it away, or another --out",
        )


def _refreshed(
    job: Job, recipe: Recipe, state: State, label: str, force: bool, reporter: Reporter
) -> str | None:
    """Run a job if it is stale; returns why it was, or None if it is up to date."""
    for path in job.read:
        if not path.exists():
            raise InputError(
                f"an input of step {job.step!r} isn't there",
                where=path,
                fix="run the recipe without --only, or name the step that writes it as well",
            )
    stamp, options = state.stamp(job), job.options
    why = "forced" if force else state.why_stale(job, stamp)
    if why is None:
        reporter.detail(f"{label}: up to date")
        # make compares times: outputs must not be older than inputs.
        newest = max(path.stat().st_mtime_ns for path in (recipe.file, *job.read) if path.exists())
        for path in job.written:
            if path.exists() and path.stat().st_mtime_ns < newest:
                os.utime(path)
        return None
    reporter.note(f"{label}{'' if why == 'not run yet' else f' ({why})'}")
    kept = {"embed": ("options",), "finetune": ("options", "inputs")}.get(job.kind, ())
    if any(state.facts(job).get(name) not in (None, stamp[name]) for name in kept):
        # The output was made with other settings: without --fresh the command would refuse it.
        options = dataclasses.replace(options, fresh=True)
    # By default embed considers an image of the same size and time unchanged.
    more = {"verify": True} if job.kind == "embed" else {}
    state.starting(job)
    for path in job.outputs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    report = work_of(job.kind)(options, reporter=reporter, **more)
    code = SOME_ROWS_FAILED if getattr(report, "too_many_failed", False) else 0
    if code:
        reporter.warn(f"{job.title}: some rows failed (ncm info says which); the run goes on with the others")
    state.finished(job, stamp, exit_code=code, seconds=round(time.monotonic() - start, 3))
    return why
