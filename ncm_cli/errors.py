"""The errors a user can act on, and the exit code of each."""

from __future__ import annotations

import difflib
import errno
import re
import traceback
from collections.abc import Iterable

_FREE_SPACE = "free some space and run the same command again"
_GET_PERMISSION = "another place, or permission to read or write there"
_SAVE_MEMORY = "fewer rows (--where), a smaller --batch-size, or a higher ulimit -v if there is one"

EXPECTED_OS_ERRORS = {
    errno.ENOSPC: ("the disk is full", _FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _FREE_SPACE),
    errno.ENOENT: ("no such file or folder", None),
    errno.EACCES: ("permission denied", _GET_PERMISSION),
    errno.EPERM: ("permission denied", _GET_PERMISSION),
    errno.EEXIST: ("a file where a folder is expected", "another place to write to, or move that file away"),
    errno.EISDIR: ("a folder where a file is expected", None),
    errno.ENOTDIR: ("a file where a folder is expected", None),
    errno.EROFS: ("the file system is read-only", "another place to write to"),
    errno.ENAMETOOLONG: ("the file name is too long", None),
    errno.EMFILE: ("too many files are open", "a higher ulimit -n, or fewer --workers"),
    errno.ENFILE: ("too many files are open on this machine", None),
    errno.ENOMEM: ("out of memory", _SAVE_MEMORY),
    errno.EAGAIN: ("the system allows no more processes or threads", "ending some, or a higher ulimit -u"),
}
"""Refusals of the system by errno: in words, and the advice. Any other `OSError` is a bug."""

_LIBRARY_WORDS = {
    "Too many open files": errno.EMFILE,
    "failed to map": errno.ENOMEM,
    "allocate memory": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
    "bad_alloc": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
}
"""Words in errors that libraries raise if the system refuses something, and the errno that they mean."""


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
    """The user's file, row or value can't be used."""


class MismatchError(NcmError):
    """Two artefacts that don't belong together, such as features of different encoders."""

    exit_code = 4
    title = "files that don't belong together"


class UnexpectedError(NcmError):
    """An unexpected error in another process, with its traceback in ``found``."""

    exit_code = 1
    title = "a bug of ncm"


def portable(error: Exception) -> NcmError:
    """The error as one that can be sent to another process, with its parts as text."""
    refusal = error if isinstance(error, NcmError) else system_refusal(error)
    if refusal is None:
        trace = "".join(traceback.format_exception(error)).rstrip()
        return UnexpectedError(f"{type(error).__name__}: {error}", found=f"\n{trace}", fix="please report it")
    kinds = (UsageError, MismatchError, UnexpectedError, InputError, NcmError)
    kind = next(kind for kind in kinds if isinstance(refusal, kind))
    parts = {name: getattr(refusal, name) for name in ("where", "found", "expected", "fix")}
    texts = {name: None if part is None else str(part) for name, part in parts.items()}
    if refusal.where is not None:
        texts["where"] = as_written(refusal.where)
    return kind(refusal.what, **texts)


def as_written(path: object) -> str:
    """A path as text; addresses get back the slashes that pathlib drops after their scheme."""
    text = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/+", lambda match: f"{match[1].lower()}://", str(path))
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


def system_refusal(error: Exception) -> NcmError | None:
    """The `NcmError` for an error that is a refusal of the system; None for any other error."""
    if isinstance(error, OSError) and error.errno in EXPECTED_OS_ERRORS:
        what, fix = EXPECTED_OS_ERRORS[error.errno]
        if error.errno == errno.ENOENT and error.filename is None:  # from os.getcwd
            return NcmError("the current folder no longer exists", fix="cd to another folder")
        return NcmError(what, where=error.filename, found=error.strerror, fix=fix)
    cause: BaseException | None = error
    while cause is not None:
        number = next((number for words, number in _LIBRARY_WORDS.items() if words in str(cause)), None)
        if number is not None or isinstance(cause, MemoryError):
            what, fix = EXPECTED_OS_ERRORS[number or errno.ENOMEM]
            return NcmError(what, found=" ".join(str(cause).split())[:300] or None, fix=fix)
        cause = cause.__cause__ or cause.__context__
    return None
