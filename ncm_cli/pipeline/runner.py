"""Runs a recipe's jobs in order, in this process."""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, NcmError, UsageError, listing, unknown
from ncm_cli.pipeline.freshness import Stamp, State
from ncm_cli.pipeline.outcome import Outcome, outcome
from ncm_cli.pipeline.record import write_report
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.recipe import Job, Recipe
from ncm_cli.recipe.model import REPORT

STAGES = {
    "data": "data:data",
    "embed": "embed:embed",
    "pairs": "pairs:pairs",
    "fit": "fit:fit",
    "eval": "evaluate:evaluate",
    "bound": "bound:bound",
    "sweep": "sweep:sweep",
    "predict": "predict:predict",
    "report": "report:report",
}
"""Step to the function of ncm_cli.stages that does it."""

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
    from ncm_cli.store.lock import writer_lock

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
    module, _, function = STAGES[job.kind].partition(":")
    start = time.monotonic()
    report = getattr(importlib.import_module(f"ncm_cli.stages.{module}"), function)(
        options, reporter=reporter
    )
    code = exit_code(report)
    if code:
        reporter.warn(f"{job.title}: some rows failed (ncm info says which); the run goes on with the others")
    state.finished(job, stamp, exit_code=code, seconds=round(time.monotonic() - start, 3))


def exit_code(report: Any) -> int:
    """5 when a stage's report says that more rows failed than were allowed, else 0."""
    return SOME_ROWS_FAILED if getattr(report, "too_many_failed", False) else 0
