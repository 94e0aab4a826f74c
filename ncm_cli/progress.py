"""How stages report progress: a callback object that knows no console."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Task:
    """A piece of work with a count of units; the base class does nothing."""

    def advance(self, n: int = 1) -> None:
        """Count ``n`` more units as done."""

    def relabel(self, label: str) -> None:
        """Show this label from now on."""


class Reporter:
    """Receives what a person should see while a stage runs; the base class is silent."""

    verbose = False
    """Whether details are shown."""

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        """A piece of work of ``total`` units (None: unknown), shown while the context is open."""
        yield Task()

    def note(self, message: str) -> None:
        """A fact that is always shown, such as the device in use."""

    def detail(self, message: str) -> None:
        """A fact shown only with ``--verbose``."""

    def warn(self, message: str) -> None:
        """A fact that the user may have to act on."""


SILENT = Reporter()
