"""The errors a user can act on, and the exit code of each."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class NcmError(Exception):
    """Bad input: says what is wrong, where, found versus expected, and what to do.

    ``what`` is one sentence without a full stop. The other parts are optional, and each is shown on a line
    of its own.
    """

    exit_code = 3
    title = "bad input"

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        found: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.found = found
        self.expected = expected
        self.fix = fix

    def lines(self) -> list[tuple[str, str]]:
        """The parts after ``what`` as (label, text), in the order in which they are shown."""
        where = None if self.where is None else as_written(self.where)
        parts = (("where", where), ("found", self.found), ("expected", self.expected), ("try", self.fix))
        return [(label, str(text)) for label, text in parts if text is not None]

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in self.lines())])


class UsageError(NcmError):
    """A command line or an option's value that can't be used."""

    exit_code = 2
    title = "usage"


class InputError(NcmError):
    """A file, row or value of the user's can't be used."""


class MismatchError(NcmError):
    """Two artefacts that don't belong together, such as features of different encoders."""

    exit_code = 4
    title = "files that don't belong together"


def as_written(path: object) -> str:
    """A path as text; addresses get back the slashes that pathlib drops after their scheme."""
    text = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/+", lambda found: f"{found[1].lower()}://", str(path))
    return re.sub(r"^(file|local)://", r"\1:///", text)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a mistyped one, or None when nothing is close."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def listing(names: Iterable[object], limit: int = 12) -> str:
    """Names joined for a message, at most ``limit``, with a count of the rest."""
    texts = [str(name) for name in names]
    shown = ", ".join(texts[:limit])
    return f"{shown} and {len(texts) - limit} more" if len(texts) > limit else shown or "none"


def unknown(
    kind: str, name: str, known: Iterable[str], *, where: object = None, error: type[NcmError] = InputError
) -> NcmError:
    """The error for an unknown name: lists the known names and suggests the nearest."""
    names = list(known)
    close = nearest(name, names)
    return error(
        f"no {kind} named {name!r}",
        where=where,
        expected=f"one of: {listing(names)}",
        fix=f"did you mean {close!r}?" if close else None,
    )
