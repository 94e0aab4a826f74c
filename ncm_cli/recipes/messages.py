"""What steps say while they run: sent by the process that does a step, shown by the run's own."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ncm_cli.errors import listing
from ncm_cli.progress import Reporter, Task
from ncm_cli.recipes.perform import Order, Outcome, perform_elsewhere
from ncm_cli.recipes.steps import Job

ADVANCE_SECONDS = 0.1
"""Between two messages of how far a step has come."""

Message = tuple[Any, ...]
"""A name, and arguments. ``note``, ``detail`` and ``warn`` of a reporter; ``task``, ``advance``, ``relabel``,
``end`` of a piece of work; ``print`` for standard output; ``warning`` of a library; last the ``outcome``."""

Send = Callable[..., None]

_VARIES = re.compile(r"'[^']*'|\d[\d.,]*")
"""Names and numbers, by which the same message differs between seeds."""


def do(order: Order, send: Send) -> Outcome:
    """Do a step in this process, which isn't the run's own; all that it says is sent."""
    with warnings.catch_warnings(record=True) as recorded, contextlib.redirect_stdout(_Printed(send)):
        outcome = perform_elsewhere(order, _Sender(send))
    for warning in recorded if outcome.error is None else ():
        send("warning", str(warning.message), warning.category, warning.filename, warning.lineno)
    return outcome


class _Printed(io.TextIOBase):
    """Standard output of a step."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def write(self, text: str) -> int:
        self._send("print", text)
        return len(text)


class _Sender(Reporter):
    """Sends what a step reports."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        number = next(self._numbers)
        self._send("task", number, label, total, unit)
        counted = _Counted(lambda name, value: self._send(name, number, value))
        try:
            yield counted
        finally:
            counted.flush()
            self._send("end", number)

    def note(self, message: str) -> None:
        self._send("note", message)

    def detail(self, message: str) -> None:
        self._send("detail", message)

    def warn(self, message: str) -> None:
        self._send("warn", message)


class _Counted(Task):
    """Counts units, and sends them every `ADVANCE_SECONDS`."""

    def __init__(self, send: Callable[[str, Any], None]) -> None:
        self._send, self._count, self._sent = send, 0, time.monotonic()

    def advance(self, n: int = 1) -> None:
        self._count += n
        if time.monotonic() - self._sent >= ADVANCE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send what has been counted."""
        count, self._count, self._sent = self._count, 0, time.monotonic()
        if count:
            self._send("advance", count)

    def relabel(self, label: str) -> None:
        self._send("relabel", label)


class Listener:
    """Passes what jobs report on to the run's own reporter, with the job's title."""

    def __init__(self, jobs: Sequence[Job], repeated: RepeatedMessages) -> None:
        self._jobs, self._repeated = jobs, repeated
        self._tasks: dict[int, dict[int, tuple[contextlib.ExitStack, Task]]] = {}
        self._printed: dict[int, list[str]] = {}
        self._seen: dict[Any, Any] = {}

    def hear(self, number: int, message: Message) -> None:
        """Pass on one message of a job, but for its outcome, with which all of its tasks end."""
        name, *arguments = message
        reporter = self._repeated.reporter_of(self._jobs[number])
        tasks = self._tasks.setdefault(number, {})
        if name in ("note", "detail", "warn"):
            getattr(reporter, name)(*arguments)
        elif name == "task":
            key, *rest = arguments
            stack = contextlib.ExitStack()
            tasks[key] = stack, stack.enter_context(reporter.task(*rest))
        elif name == "advance":
            tasks[arguments[0]][1].advance(arguments[1])
        elif name == "relabel":
            tasks[arguments[0]][1].relabel(f"{self._jobs[number].title}: {arguments[1]}")
        elif name == "end":
            tasks.pop(arguments[0])[0].close()
        elif name == "warning":
            text, category, file, line = arguments
            warnings.warn_explicit(text, category, file, line, registry=self._seen)
        elif name == "print":
            self._printed.setdefault(number, []).append(arguments[0])
        elif name == "outcome":
            for stack, _ in self._tasks.pop(number).values():
                stack.close()
            if number in self._printed:  # as a whole, not among others'
                sys.stdout.write("".join(self._printed.pop(number)))

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._tasks):  # of jobs that were interrupted
            self.hear(number, ("outcome",))


class RepeatedMessages:
    """Shows what a step says in one cell of its matrix, and names the other cells that say it again.

    Names and numbers may differ. What a job repeats itself is shown each time, and ``--verbose`` shows all.
    The other cells are named when the context ends, however it does.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._said: dict[tuple[str, str, str], _Said] = {}

    def reporter_of(self, job: Job, *, titled: bool = True) -> Reporter:
        """The run's reporter for what a job says; without ``titled``, warnings alone begin with its title."""
        return _OfJob(self._reporter, self, job, titled)

    def is_new(self, job: Job, kind: str, message: str) -> bool:
        """Whether no other job of the step has said this."""
        key = job.step, kind, _VARIES.sub("#", message)
        said = self._said.setdefault(key, _Said(job.title, message))
        if said.title == job.title or self._reporter.verbose:
            return True
        said.others.append(job.title)
        return False

    def __enter__(self) -> RepeatedMessages:
        return self

    def __exit__(self, *_: object) -> None:
        self.name_others()

    def name_others(self) -> None:
        """Say again what several jobs have said, with the titles of those that weren't shown."""
        for (_, kind, _), said in self._said.items():
            if said.others:
                titles = listing(dict.fromkeys(said.others), 6)
                say = self._reporter.warn if kind == "warn" else self._reporter.note
                say(f"likewise, but for names and numbers, {titles}: {said.message}")


@dataclasses.dataclass
class _Said:
    title: str
    """Of the job that said it first."""
    message: str
    others: list[str] = dataclasses.field(default_factory=list)


class _OfJob(Reporter):
    def __init__(self, reporter: Reporter, repeated: RepeatedMessages, job: Job, titled: bool) -> None:
        self._reporter, self._repeated, self._job = reporter, repeated, job
        self._prefix = f"{job.title}: " if titled else ""

    @contextlib.contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        with self._reporter.task(f"{self._prefix}{label}", total, unit) as task:
            yield task

    def note(self, message: str) -> None:
        if self._repeated.is_new(self._job, "note", message):
            self._reporter.note(f"{self._prefix}{message}")

    def detail(self, message: str) -> None:
        self._reporter.detail(f"{self._prefix}{message}")

    def warn(self, message: str) -> None:
        if self._repeated.is_new(self._job, "warn", message):
            self._reporter.warn(f"{self._job.title}: {message}")
