"""Runs a recipe's jobs, in order or several at once; writes the run's report; prints shell lines."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shlex
import time
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from ncm_cli.errors import InputError, NcmError, UsageError, as_written, listing, unknown
from ncm_cli.options import command_words, fields_of
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.recipes.freshness import State
from ncm_cli.recipes.load import Recipe
from ncm_cli.recipes.messages import Listener, Message, RepeatedMessages
from ncm_cli.recipes.outcome import MISSED, Comparison, Summary, outcome
from ncm_cli.recipes.perform import (
    SOME_ROWS_FAILED,
    Due,
    Order,
    Outcome,
    due,
    gpu_asked,
    perform,
    record,
    some_failed,
)
from ncm_cli.recipes.processes import Processes
from ncm_cli.recipes.schedule import Plan, dependencies
from ncm_cli.recipes.steps import REPORT, Job
from ncm_cli.store.files import jsonable, relative, write_result, writer_lock
from ncm_cli.store.outputs import refuse_no_folder

PACKAGES = (
    *("ncm-cli", "torch", "torchvision", "open_clip_torch", "timm"),
    *("numpy", "scipy", "scikit-learn", "h5py", "safetensors", "pillow"),
)


def versions() -> dict[str, str | None]:
    """Versions of Python and the packages; None if a package isn't installed."""
    installed: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def shell_lines(recipe: Recipe, jobs: Sequence[Job]) -> list[str]:
    """Lines for bash that do the jobs' work and write the same files."""
    cwd = Path.cwd()
    out = relative(recipe.out, cwd)
    lines = [f"cd {shlex.quote(str(cwd))}", f"mkdir -p {shlex.quote(str(out))}"]
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
class Failure:
    """A step that failed."""

    step: str
    """The job's title."""
    error: NcmError

    def to_json(self) -> dict[str, Any]:
        """The step, and the error's exit code and parts."""
        return {"step": self.step, "exit_code": self.error.exit_code, "error": self.error.what} | dict(
            self.error.lines()
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """A step that didn't run."""

    step: str
    """The job's title."""
    because: str
    """The title of the failed job that it depends on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """The outcome of a run, and its results."""

    recipe: Recipe
    ran: tuple[str, ...]
    """Titles of the jobs that ran, in the recipe's order."""
    skipped: tuple[str, ...]
    """Titles of the jobs that were up to date."""
    failed: tuple[Failure, ...]
    stopped: tuple[Stopped, ...]
    """Both are empty for steps that run one by one: there the first error is raised."""
    exit_code: int
    """That of the first failed step in the recipe's order; otherwise 0, or 5 if rows failed in some step, now
    or in an earlier run."""
    rows: list[Summary]
    comparisons: list[Comparison]
    seconds: float

    @property
    def missed(self) -> int:
        return sum(comparison.state == MISSED for comparison in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """The output of ``--json``."""
        out = self.recipe.out
        body = {"recipe": self.recipe.name, "out": out, "report": out / REPORT, "ran": self.ran}
        body |= {"up_to_date": self.skipped, "failed": self.failed, "stopped": self.stopped}
        return body | {"seconds": self.seconds, "rows": self.rows, "expect": self.comparisons}


class Workers(contextlib.AbstractContextManager[Any], Protocol):
    """What does jobs, several at once: `Processes`, or a cluster."""

    def takes(self, gpu: str | None) -> bool:
        """Whether another job may start; ``gpu`` as `gpu_asked` says."""

    def start(self, number: int, order: Order, gpu: str | None) -> None:
        """Start a job, which is known by its number."""

    def messages(self) -> Iterator[tuple[int, Message]]:
        """What jobs have said, the last being their outcome; waits for something."""


@dataclasses.dataclass(slots=True)
class _Run:
    """Jobs of a recipe that are being run, and how they ended, by their index."""

    recipe: Recipe
    jobs: Sequence[Job]
    state: State
    force: bool
    reporter: Reporter
    ran: list[int] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    failed: dict[int, NcmError] = dataclasses.field(default_factory=dict)
    stopped: dict[int, int] = dataclasses.field(default_factory=dict)

    def one_by_one(self) -> None:
        """Run the jobs in order, in this process."""
        with RepeatedMessages(self.reporter) as repeated:
            for number, job in enumerate(self.jobs):
                try:
                    if (due_job := self.due(number)) is not None:
                        result = perform(due_job.order, repeated.reporter_of(job, titled=False))
                        record(job, due_job.stamp, result, self.state, self.reporter)
                except NcmError:
                    self.reporter.warn(f"{self.label(number)} failed; the steps before it are kept")
                    raise
                (self.skipped if due_job is None else self.ran).append(number)

    def at_once(self, workers: Workers) -> None:
        """Run the jobs whose inputs are there, several at once. This process alone keeps the record."""
        jobs = self.jobs
        schedule = Plan(dependencies(jobs))
        gpus, running = [gpu_asked(job) for job in jobs], dict[int, Due]()
        outcomes = deque[tuple[int, Outcome]]()
        with (
            workers,
            RepeatedMessages(self.reporter) as repeated,
            Listener(jobs, repeated) as listener,
            self.reporter.task("steps", len(jobs), "steps") as task,
        ):

            def end(number: int, error: NcmError | None = None) -> None:
                if error is None:
                    (self.ran if number in running else self.skipped).append(number)
                    schedule.end(number)
                else:
                    self.failed[number] = error
                    stopped = schedule.fail(number)
                    task.advance(len(stopped))
                    consequence = (
                        f"; it also stops {listing(jobs[at].title for at in stopped)}" if stopped else ""
                    )
                    self.reporter.warn(f"{self.label(number)} failed: {error.what}{consequence}")
                task.advance()

            while schedule.open:
                takes = {gpu: workers.takes(gpu) for gpu in set(gpus)}
                ready = next((number for number in schedule.ready if takes[gpus[number]]), None)
                if ready is not None:
                    schedule.start(ready)
                    try:
                        due_job = self.due(ready)
                    except NcmError as error:
                        end(ready, error)
                        continue
                    if due_job is None:
                        end(ready)
                    else:
                        running[ready] = due_job
                        workers.start(ready, due_job.order, gpus[ready])
                    continue
                if outcomes:  # recorded once all workers have something to do, since contents are compared
                    number, result = outcomes.popleft()
                    if result.error is None:
                        record(jobs[number], running[number].stamp, result, self.state, self.reporter)
                    end(number, result.error)
                    continue
                for number, message in workers.messages():
                    listener.hear(number, message)
                    if message[0] == "outcome":
                        outcomes.append((number, message[1]))
        self.stopped = schedule.stopped()

    def due(self, number: int) -> Due | None:
        """What a job has to do, as `perform.due` says."""
        label = self.label(number)
        return due(self.jobs[number], self.recipe, self.state, label, self.force, self.reporter)

    def label(self, number: int) -> str:
        """A job's place among all, and its title."""
        return f"step {number + 1} of {len(self.jobs)}: {self.jobs[number].title}"

    def titles(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """Their titles, in the recipe's order."""
        return tuple(self.jobs[number].title for number in sorted(numbers))

    def failures(self) -> dict[str, tuple[Any, ...]]:
        """The failed and the stopped jobs, in the recipe's order."""
        titles = [job.title for job in self.jobs]
        return {
            "failed": tuple(
                Failure(step=titles[number], error=error) for number, error in sorted(self.failed.items())
            ),
            "stopped": tuple(
                Stopped(step=titles[number], because=titles[other])
                for number, other in sorted(self.stopped.items())
            ),
        }

    def write_report(self, rows: list[Summary], comparisons: list[Comparison]) -> None:
        """Write the outcome, and for every file its step, options, seed, and digests of it and its inputs.

        Of what a failed or stopped job made earlier, nothing is said.
        """
        recipe, state = self.recipe, self.state
        left_out = {self.jobs[number].key for number in (*self.failed, *self.stopped)}
        facts_of = {job.key: {} if job.key in left_out else state.facts(job) for job in recipe.jobs}
        files = [
            {
                "file": recipe.name_of(path),
                "step": job.step,
                "kind": job.builder or job.kind,
                "cell": job.cell,
                "seed": getattr(job.options, "seed", None),
                "options": jsonable(job.options),
                "inputs": facts_of[job.key].get("inputs"),
                "sha256": facts_of[job.key].get("outputs", {}).get(recipe.name_of(path)),
                "seconds": facts_of[job.key].get("seconds"),
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
        if self.failed:
            body |= self.failures()
        write_result(recipe.out / REPORT, "run", body)


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
    recipe: Recipe,
    *,
    only: Sequence[str] = (),
    force: bool = False,
    jobs: int | None = None,
    cluster: str | None = None,
    cpus: int | None = None,
    reporter: Reporter = SILENT,
) -> RunReport:
    """Run the jobs that are stale, and write report.json.

    The next call runs a killed step again, which resumes where it can. Finished steps are kept. One by one
    (``jobs`` of 1 or None), the first error stops the run. With more ``jobs`` at once, or on a ``cluster``
    (``cpus`` cores for each), it stops only the jobs that depend on the failed one.

    Raises `InputError` if another run uses the folder, if an input is missing whose step ``only`` leaves out,
    or if a step would replace a file that this run didn't make; and what `ncm_cli.ray_cluster` raises.
    """
    chosen = selected_jobs(recipe, only)
    start = time.monotonic()
    refuse_no_folder(recipe.out)
    recipe.out.mkdir(parents=True, exist_ok=True)
    with writer_lock(recipe.out / REPORT):
        state = State(recipe.out, reporter)
        _refuse_foreign(recipe, chosen, state)
        this = _Run(recipe, chosen, state, force, reporter)
        if cluster is not None:
            from ncm_cli.recipes.cluster import cluster_of

            with cluster_of(cluster, recipe, chosen, cpus=cpus or 1, most=jobs, reporter=reporter) as workers:
                this.at_once(workers)
        elif (count := min(jobs or 1, len(chosen))) > 1:
            this.at_once(Processes(chosen, count))
        else:
            this.one_by_one()
        state.save()
        if this.skipped:
            reporter.note(f"{len(this.skipped)} of {len(chosen)} steps were up to date")
        for job in (chosen[number] for number in sorted(this.skipped)):
            if state.facts(job).get("exit_code") == SOME_ROWS_FAILED:
                reporter.warn(some_failed(job))
        left_out = {*this.failed, *this.stopped}
        rows, comparisons = outcome(recipe, {chosen[number].key for number in left_out})
        this.write_report(rows, comparisons)
    codes = [this.failed[number].exit_code for number in sorted(this.failed)]
    codes += [int(state.facts(job).get("exit_code", 0)) for job in chosen]
    return RunReport(
        recipe=recipe,
        ran=this.titles(this.ran),
        skipped=this.titles(this.skipped),
        **this.failures(),
        exit_code=next((code for code in codes if code), 0),
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
