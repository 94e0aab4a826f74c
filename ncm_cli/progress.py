"""How stages report progress: a callback object that knows no console."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Task:
    """One countable piece of work; the base class ignores what it is told."""

    def advance(self, n: int = 1) -> None:
        """``n`` more units are done."""


class Reporter:
    """Receives what a stage wants a person to see while it runs; the base class is silent."""

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        """A piece of work of ``total`` units (None: unknown), shown while the context is open."""
        yield Task()

    def note(self, message: str) -> None:
        """A fact worth a line, such as the device in use."""

    def detail(self, message: str) -> None:
        """A fact shown only with ``--verbose``."""

    def warn(self, message: str) -> None:
        """Something the user can act on."""


SILENT = Reporter()
