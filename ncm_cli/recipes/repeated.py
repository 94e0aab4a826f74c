"""What the steps of a run say, without what a step says again in other cells of its matrix."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ncm_cli.progress import Reporter, Task
from ncm_cli.recipes.steps import Job

_VARIES = re.compile(r"'[^']*'|\d[\d.,]*")
"""Names and numbers, by which the same message differs between seeds."""


class Repetitions:
    """Tells a new message of a step from one that the step has said before, but for names and numbers."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._said = set[tuple[str, str]]()
        self._left_out = 0

    def reporter_of(self, job: Job, prefix: str = "") -> Reporter:
        """The run's reporter for what a job says; repetitions are details. Messages begin with ``prefix``."""
        return _OfStep(self._reporter, self, job.step, prefix)

    def is_new(self, step: str, message: str) -> bool:
        """Whether a step says this for the first time."""
        key = step, _VARIES.sub("#", message)
        is_new = key not in self._said
        self._said.add(key)
        self._left_out += not is_new
        return is_new

    def note_left_out(self) -> None:
        """Say how many messages weren't shown, if any."""
        if self._left_out:
            self._reporter.note(
                f"messages that differ from others in names or numbers only: {self._left_out:,}; "
                "--verbose shows them"
            )


class _OfStep(Reporter):
    def __init__(self, reporter: Reporter, repetitions: Repetitions, step: str, prefix: str) -> None:
        self._reporter, self._repetitions, self._step, self._prefix = reporter, repetitions, step, prefix

    @contextlib.contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        with self._reporter.task(f"{self._prefix}{label}", total, unit) as task:
            yield task

    def note(self, message: str) -> None:
        is_new = self._repetitions.is_new(self._step, message)
        (self._reporter.note if is_new else self._reporter.detail)(f"{self._prefix}{message}")

    def detail(self, message: str) -> None:
        self._reporter.detail(f"{self._prefix}{message}")

    def warn(self, message: str) -> None:
        is_new = self._repetitions.is_new(self._step, message)
        (self._reporter.warn if is_new else self._reporter.detail)(f"{self._prefix}{message}")
