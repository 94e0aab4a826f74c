"""What a run found: one row for each method, and known values beside measured ones.

report.json: what a run was made of and what it found, for other programs and for the record.

A recipe as the shell script that it stands for.

Runs a recipe's jobs in order, in this process.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, NcmError, UsageError, listing, unknown
from ncm_cli.options import Field, as_json, fields_of
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.recipes.document import REPORT, Expectation, Job, Recipe
from ncm_cli.recipes.freshness import Stamp, State
from ncm_cli.registry import work_of
from ncm_cli.results.lines import SEED, WHERE, Facts, Mean, Run, facts_of, lines

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


PACKAGES = ("ncm-cli", "numpy", "scipy", "scikit-learn", "torch", "open_clip_torch", "timm", "h5py", "pillow")


def write_report(path: Path, recipe: Recipe, state: State, found: Outcome) -> None:
    """Write the outcome, and for every file the recipe, step, options, seed and input digests behind it."""
    from ncm_cli.store.results import write_result

    provenance = {
        "recipe": {"name": recipe.name, "file": str(recipe.file), "sha256": recipe.sha256},
        "vars": recipe.vars,
        "matrix": {name: list(values) for name, values in recipe.matrix.items()},
        "versions": versions(),
        "files": [entry for job in recipe.jobs for entry in _files(job, recipe, state)],
    }
    write_result(path, "run", {**found.to_json(), "provenance": provenance})


def versions() -> dict[str, str | None]:
    """Python's and the packages' versions."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _files(job: Job, recipe: Recipe, state: State) -> list[dict[str, Any]]:
    facts = state.facts(job)
    entries = []
    for path in (item for items in job.outputs.values() for item in items):
        name = str(path.relative_to(recipe.out)) if path.is_relative_to(recipe.out) else str(path)
        entries.append(
            {
                "file": name,
                "step": job.step,
                "kind": job.builder or job.kind,
                "cell": job.cell,
                "seed": getattr(job.options, "seed", None),
                "options": as_json(job.options),
                "inputs": facts.get("inputs"),
                "sha256": (facts.get("outputs") or {}).get(name),
                "seconds": facts.get("seconds"),
            }
        )
    return entries


def shell_lines(recipe: Recipe, jobs: tuple[Job, ...], *, cwd: Path | None = None) -> list[str]:
    """Lines for bash that do what the jobs do, and write the same files."""
    here = Path.cwd() if cwd is None else cwd
    lines = [f"cd {shlex.quote(str(here))}", f"mkdir -p {shlex.quote(str(_shown(recipe.out, here)))}"]
    return [*lines, *(shlex.join(command_line(job)) for job in jobs)]


def _shown(path: Path, here: Path) -> Path:
    return path.relative_to(here) if path.is_relative_to(here) else path


def command_line(job: Job) -> list[str]:
    """The command line of one job: options that have their default are left out."""
    command = ["ncm", job.kind, *([job.builder] if job.builder else [])]
    fields = fields_of(type(job.options))
    positional: list[str] = []
    flagged: list[str] = []
    for field in fields:
        value = getattr(job.options, field.name)
        if field.spec.positional:
            positional += _texts(field, value)
        elif field.required or value != field.default:
            flagged += _flagged(field, value)
    if any(text.startswith("-") for text in positional):
        # After -- nothing is taken for an option.
        return [*command, *flagged, "--", *positional]
    return [*command, *positional, *flagged]


def _flagged(field: Field, value: Any) -> list[str]:
    if value is None:
        return []
    if field.type is bool:
        return [field.flag if value else f"--no-{field.flag[2:]}"]
    return [word for text in _texts(field, value) for word in (field.flag, text)]


def _texts(field: Field, value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if field.repeated else [str(value)]


SOME_ROWS_FAILED = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run did and found."""

    recipe: Recipe
    ran: tuple[str, ...]
    """Titles of the jobs that ran."""
    skipped: tuple[str, ...]
    """Titles of the jobs that were up to date."""
    exit_code: int
    """0, or 5 when rows failed in some step, now or when it last ran."""
    outcome: Outcome
    report: Path
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "out": str(self.recipe.out),
            "report": str(self.report),
            "ran": list(self.ran),
            "up_to_date": list(self.skipped),
            "seconds": self.seconds,
            **self.outcome.to_json(),
        }


def chosen(recipe: Recipe, only: Sequence[str]) -> tuple[Job, ...]:
    """The jobs of the steps named, or of a kind; all of them if none is named."""
    names = dict.fromkeys([job.step for job in recipe.jobs] + [job.kind for job in recipe.jobs])
    for name in only:
        if name not in names:
            raise unknown("step", name, names, where=recipe.file, error=UsageError)
    if not only:
        return recipe.jobs
    named = {name for name in only if any(job.step == name for job in recipe.jobs)}
    return tuple(
        job for job in recipe.jobs if job.step in named or (job.kind in only and job.kind not in named)
    )


def run(
    recipe: Recipe, *, only: Sequence[str] = (), force: bool = False, reporter: Reporter = SILENT
) -> RunReport:
    """Run what is stale, and write report.json.

    A step that was killed is run again by the next call, and picks up where it can. The first error stops the
    run; what is finished by then stays.

    Raises `InputError` if another run has the same folder, if a step that ``only`` leaves out hasn't made an
    input, or if a file that this run didn't make is where a step would write.
    """
    from ncm_cli.store.files import writer_lock

    jobs = chosen(recipe, only)
    start = time.monotonic()
    if recipe.out.exists() and not recipe.out.is_dir():
        raise InputError("a file where the run's folder should go", where=recipe.out, fix="another --out")
    recipe.out.mkdir(parents=True, exist_ok=True)
    ran, skipped, code = [], [], 0
    with writer_lock(recipe.out / REPORT):
        state = State(recipe.out, reporter)
        _refuse_foreign(recipe, jobs, state)
        for number, job in enumerate(jobs, 1):
            label = f"step {number} of {len(jobs)}: {job.title}"
            with _named(label, reporter):
                _require_inputs(job)
                stamp = state.stamp(job)
                why = "forced" if force else state.why_stale(job, stamp)
                if why is None:
                    _confirm(recipe, job)
                    skipped.append(job.title)
                    reporter.detail(f"{label}: up to date")
                else:
                    reporter.note(f"{label}{'' if why == 'not run yet' else f' ({why})'}")
                    _run_one(job, stamp, state, reporter)
                    ran.append(job.title)
            code = code or int(state.facts(job).get("exit_code", 0))
        state.save()
        if skipped:
            reporter.note(f"{len(skipped)} of {len(jobs)} steps were up to date")
        found = outcome(recipe)
        write_report(recipe.out / REPORT, recipe, state, found)
    return RunReport(
        recipe=recipe,
        ran=tuple(ran),
        skipped=tuple(skipped),
        exit_code=code,
        outcome=found,
        report=recipe.out / REPORT,
        seconds=time.monotonic() - start,
    )


def _refuse_foreign(recipe: Recipe, jobs: Sequence[Job], state: State) -> None:
    """Refuse to replace what this run hasn't made, before the first step."""
    paths = [path for job in jobs for path in job.written if not state.made(path)]
    paths += [recipe.out / REPORT] if state.is_new else []
    foreign = [path for path in paths if path.is_file() or (path.is_dir() and any(path.iterdir()))]
    if foreign:
        raise InputError(
            "a step would replace what this run didn't make",
            where=listing(foreign),
            fix="move it away, or another --out",
        )


@contextmanager
def _named(label: str, reporter: Reporter) -> Iterator[None]:
    """Say which step an error belongs to."""
    try:
        yield
    except NcmError:
        reporter.warn(f"{label} failed; the steps before it are kept")
        raise


def _require_inputs(job: Job) -> None:
    for path in (item for items in job.inputs.values() for item in items):
        if not path.exists():
            raise InputError(
                f"an input of step {job.step!r} isn't there",
                where=path,
                fix="run the recipe without --only, or name the step that writes it as well",
            )


def _confirm(recipe: Recipe, job: Job) -> None:
    """Make a job's outputs as new as what they come from: make knows what is up to date by times alone."""
    sources = [recipe.file, *(path for paths in job.inputs.values() for path in paths)]
    newest = max(path.stat().st_mtime_ns for path in sources if path.exists())
    for path in job.written:
        if path.exists() and path.stat().st_mtime_ns < newest:
            os.utime(path)


def _run_one(job: Job, stamp: Stamp, state: State, reporter: Reporter) -> None:
    options = job.options
    if job.kind == "embed" and state.has_other_options(job, stamp):
        # The store there is this recipe's own, of an earlier wording: embed would refuse to replace it.
        options = dataclasses.replace(options, fresh=True)
    if job.kind == "embed" and options.from_array is None:
        # Its own shortcut takes an image of the same size and time for unchanged.
        options = dataclasses.replace(options, verify_content=True)
    state.starting(job)
    for path in (item for items in job.outputs.values() for item in items):
        path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    report = work_of(job.kind)(options, reporter=reporter)
    code = exit_code(report)
    if code:
        reporter.warn(f"{job.title}: some rows failed (ncm info says which); the run goes on with the others")
    state.finished(job, stamp, exit_code=code, seconds=round(time.monotonic() - start, 3))


def exit_code(report: Any) -> int:
    """5 when a stage's report says that more rows failed than were allowed, else 0."""
    return SOME_ROWS_FAILED if getattr(report, "too_many_failed", False) else 0
