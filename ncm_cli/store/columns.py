"""The columns of a store's rows, the files of the rows, and the rows that failed."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ncm_cli.errors import InputError, unknown
from ncm_cli.options import Term, parse_names, where_text


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A categorical column: ``codes`` int32 (N,) into ``categories``, −1 for a row without a value."""

    name: str
    codes: np.ndarray
    categories: tuple[str, ...]

    def text(self) -> list[str]:
        """The category of each row, "" if it is missing."""
        names = (*self.categories, "")
        return [names[code] for code in self.codes.tolist()]

    def counts(self) -> dict[str, int]:
        """Rows of each category, in the order of the categories; missing rows aren't counted."""
        counts = np.bincount(self.codes[self.codes >= 0], minlength=len(self.categories))
        return dict(zip(self.categories, counts.tolist(), strict=True))

    @property
    def missing(self) -> int:
        """Rows without a value."""
        return int(np.count_nonzero(self.codes < 0))

    def matches(self, term: Term, where: object) -> np.ndarray:
        """bool (N,): rows whose category is among the term's values (or, negated, is not)."""
        for value in term.values:
            if value not in self.categories:
                error = unknown(f"value in column {self.name!r}", value, self.categories, where=where)
                if {*parse_names(value)} <= {*self.categories}:
                    meant = where_text(term.column, *parse_names(value), negated=term.negated)
                    error.fix = shlex.quote(meant)
                elif _JOINED.search(value):
                    meant = " & ".join(_JOINED.split(f"{term.column}{'!' * term.negated}={value}"))
                    error.fix = f"{shlex.quote(meant)}: & joins two filters (ncm help where)"
                raise error
        wanted = [self.categories.index(value) for value in term.values]
        return np.isin(self.codes, wanted, invert=term.negated)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NumericColumn:
    """A numeric column: ``values`` float64 (N,), NaN for a row without a value."""

    name: str
    values: np.ndarray

    @property
    def missing(self) -> int:
        """Rows without a value."""
        return int(np.count_nonzero(np.isnan(self.values)))

    def matches(self, term: Term, where: object) -> np.ndarray:
        """bool (N,): rows whose value equals one of the term's (or, negated, does not)."""
        wanted = []
        for text in term.values:
            try:
                wanted.append(float(text))
            except ValueError:
                wanted.append(math.nan)
            if not np.any(self.values == wanted[-1]):
                what = f"no value {text!r} in the numeric column {self.name!r}"
                raise InputError(what, where=where, expected=self.span())
        return np.isin(self.values, wanted, invert=term.negated)

    def span(self) -> str:
        """The range of the values, in words."""
        present = self.values[~np.isnan(self.values)]
        return f"numbers from {present.min():g} to {present.max():g}" if present.size else "no values at all"


AnyColumn = Column | NumericColumn

_JOINED = re.compile(r"(?:\s+(?:and|AND)\s+|\s*[,;]\s*)(?=[^=,;]+=)")
"""The text between two row filters that were probably meant to be joined by ``&``."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Files:
    """The image file of each row, with the facts that show whether it has changed."""

    path: Sequence[str]
    size: np.ndarray
    """int64 (N,), bytes."""
    mtime_ns: np.ndarray
    """int64 (N,), nanoseconds since 1970."""
    sha256: Sequence[str]
    beside: Sequence[str] = ()
    """The other files that each view was made of (`images.background.Beside`); empty without views."""

    @classmethod
    def of(cls, images: Sequence[ImageFile]) -> Files:
        """The files of some images."""
        _, path, size, mtime_ns, sha256, beside = zip(*images, strict=True)
        return cls(
            path,
            np.array(size, np.int64),
            np.array(mtime_ns, np.int64),
            sha256,
            beside if any(beside) else (),
        )

    def beside_of(self, row: int) -> str:
        """The other files that a row was made of; "" if there are none."""
        return self.beside[row] if len(self.beside) else ""


@dataclasses.dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that has no features, and why."""

    id: str
    path: str
    reason: str


def check_columns(columns: Sequence[AnyColumn], rows: int) -> None:
    """Refuse columns whose length, codes or names are wrong."""
    for column in columns:
        if wrong := _fault(column, rows):
            what, found, expected = wrong
            raise InputError(what, where=f"column {column.name!r}", found=found, expected=expected)


def _fault(column: AnyColumn, rows: int) -> tuple[str, object, object] | None:
    """(what, found, expected) of a column that can't be stored; None for any other."""
    if not column.name or "\0" in column.name:
        return "a column name that can't be stored", None, "text without NUL"
    values = np.asarray(column.codes if isinstance(column, Column) else column.values)
    if values.shape != (rows,):
        return "a column of the wrong length", values.shape, f"({rows},)"
    if not isinstance(column, Column):
        infinite = np.isinf(values)
        return ("an infinite value", f"row {int(infinite.argmax())}", None) if infinite.any() else None
    names = column.categories
    if len(set(names)) != len(names) or "" in names:
        return "categories that are blank or repeated", names[:12], None
    if not np.issubdtype(values.dtype, np.integer):
        return "category codes that aren't integers", values.dtype, None
    if rows and (values.min() < -1 or values.max() >= len(names)):
        return "category codes out of range", f"{values.min()} to {values.max()}", f"-1 to {len(names) - 1}"
    return None


def categories_of(column: AnyColumn) -> Column:
    """The column itself, or a numeric one with its values as categories, in ascending order."""
    if isinstance(column, Column):
        return column
    known = ~np.isnan(column.values)
    values, inverse = np.unique(column.values[known], return_inverse=True)
    codes = np.full(len(known), -1, dtype=np.int32)
    codes[known] = inverse
    return Column(column.name, codes, tuple(f"{value:.15g}" for value in values))


def number(text: str) -> float:
    """A label's text as a number, NaN for an empty one; raises ValueError for other text."""
    return float(text) if text.strip() else math.nan


class ImageFile(NamedTuple):
    """The file of one image, as it was when it was looked up or read; the facts of a finished row."""

    id: str
    path: str
    size: int = 0
    mtime_ns: int = 0
    sha256: str = ""
    beside: str = ""
