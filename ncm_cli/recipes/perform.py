"""One job of a run: whether it has to run, its work, and the record of it."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, NcmError, listing, portable
from ncm_cli.progress import Reporter
from ncm_cli.recipes.freshness import Stamp, State
from ncm_cli.recipes.load import Recipe
from ncm_cli.recipes.steps import REPORT, Job
from ncm_cli.registry import work_of
from ncm_cli.store.files import lent_lock

SOME_ROWS_FAILED = 5
"""The exit code of a run in which more rows of a step failed than are allowed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a job that has to run does: all that another process needs to know."""

    run: Path
    """The run's report, whose lock the run's own process holds."""
    kind: str
    options: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended: its exit code (0, or 5 if rows failed), or the error."""

    code: int = 0
    error: NcmError | None = None
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """A job that has to run."""

    order: Order
    stamp: Stamp


def due(job: Job, recipe: Recipe, state: State, label: str, force: bool, reporter: Reporter) -> Due | None:
    """What a job has to do, said and recorded as started; None if it is up to date.

    Raises `InputError` if an input is missing.
    """
    for path in job.read:
        if not path.exists():
            raise InputError(
                f"an input of step {job.step!r} isn't there",
                where=path,
                fix="run the same command again; with --only, name the step that writes it as well"
                if any(path in other.written for other in recipe.jobs)
                else "put it back, and run the same command again",
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
    state.starting(job)
    for path in job.outputs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    return Due(order=Order(run=recipe.out / REPORT, kind=job.kind, options=options), stamp=stamp)


def perform(order: Order, reporter: Reporter) -> Outcome:
    """Do a job's work; raises its errors."""
    start = time.monotonic()
    # By default embed considers an image of the same size and time unchanged.
    more = {"verify": True} if order.kind == "embed" else {}
    report = work_of(order.kind)(order.options, reporter=reporter, **more)
    code = SOME_ROWS_FAILED if getattr(report, "too_many_failed", False) else 0
    return Outcome(code=code, seconds=round(time.monotonic() - start, 3))


def perform_elsewhere(order: Order, reporter: Reporter) -> Outcome:
    """Do a job's work in another process; its errors are in the outcome, which can be sent back."""
    try:
        with lent_lock(order.run):
            return perform(order, reporter)
    except Exception as error:
        return Outcome(error=portable(error))


def record(job: Job, stamp: Stamp, outcome: Outcome, state: State, reporter: Reporter) -> None:
    """Record a job that has ended without an error."""
    if outcome.code:
        reporter.warn(f"{some_failed(job)}; the run goes on with the others")
    state.finished(job, stamp, exit_code=outcome.code, seconds=outcome.seconds)


def some_failed(job: Job) -> str:
    """The warning about a job of which more rows failed than are allowed."""
    return f"{job.title}: some rows failed; ncm info {listing(job.outputs.values())} says which"


def gpu_asked(job: Job) -> str | None:
    """The device of a job that may use a GPU: ``auto``, ``cuda`` or ``cuda:N``; None for any other job."""
    options = job.options
    device: str = getattr(options, "device", "cpu")
    on_cpu = (
        device == "cpu"
        or (getattr(options, "model", None) or "").startswith("pixels:")
        or getattr(options, "from_array", None) is not None
        or getattr(options, "cluster", None) is not None
        or getattr(options, "chosen_solver", "adam") != "adam"
    )
    return None if on_cpu else device
