"""Every problem of a recipe is collected, so that one run shows them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ncm_cli.errors import InputError, nearest

SHOWN = 40
"""Problems listed before the rest are only counted."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong at one place; ``line`` is 1-based, 0 where there is none."""

    line: int
    path: str
    what: str


class RecipeError(InputError):
    """A recipe that can't be run, with all that is wrong with it."""

    title = "bad recipe"

    def __init__(self, file: Path, problems: Iterable[Problem], source: list[str]) -> None:
        self.file = file
        self.problems = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
        self._source = source
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count > 1 else ''} in {file}")

    def lines(self) -> list[tuple[str, str]]:
        shown = [self._shown(problem) for problem in self.problems[:SHOWN]]
        left = len(self.problems) - SHOWN
        return [*shown, ("and", f"{left} more")] if left > 0 else shown

    def _shown(self, problem: Problem) -> tuple[str, str]:
        label = f"line {problem.line}" if problem.line else "at"
        text = f"{problem.path}: {problem.what}" if problem.path else problem.what
        if 0 < problem.line <= len(self._source):
            snippet = self._source[problem.line - 1].strip()
            # A snippet says which line is meant; a longer one would bury the message.
            text += f"\n      | {snippet[:100]}{' ...' if len(snippet) > 100 else ''}"
        return label, text


class Problems:
    """Collects problems of one recipe file."""

    def __init__(self, file: Path, source: str = "") -> None:
        self.file = file
        self._source = source.splitlines()
        self._found: list[Problem] = []

    def add(self, line: int, path: str, what: str) -> None:
        self._found.append(Problem(line, path, what))

    def unknown(self, line: int, path: str, kind: str, name: str, known: Iterable[str]) -> None:
        """A name that isn't there, with the nearest that is, or all of them."""
        every = list(known)
        close = nearest(name, every)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(every) or 'none'}"
        self.add(line, path, f"no {kind} named {name!r}; {hint}")

    def stop_if_any(self) -> None:
        """Raise `RecipeError` with everything found so far."""
        if self._found:
            raise RecipeError(self.file, self._found, self._source)
