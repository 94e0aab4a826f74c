"""What a feature store keeps of each row beside its features."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ncm_cli.errors import InputError, unknown
from ncm_cli.options.where import Term


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A categorical column: ``codes`` int32 (N,) into ``categories``, −1 where the row has no value."""

    name: str
    codes: np.ndarray
    categories: tuple[str, ...]

    def text(self) -> list[str]:
        """The category of each row, "" where it is missing."""
        names = (*self.categories, "")
        return [names[code] for code in self.codes.tolist()]

    def counts(self) -> dict[str, int]:
        """Rows of each category, in the order of the categories; missing rows aren't counted."""
        found = np.bincount(self.codes[self.codes >= 0], minlength=len(self.categories))
        return dict(zip(self.categories, found.tolist(), strict=True))

    @property
    def missing(self) -> int:
        """Rows without a value."""
        return int(np.count_nonzero(self.codes < 0))

    def matches(self, term: Term, where: object) -> np.ndarray:
        """bool (N,): rows whose category is among the term's values (or, negated, is not)."""
        known = {category: code for code, category in enumerate(self.categories)}
        for value in term.values:
            if value not in known:
                raise unknown(f"value in column {self.name!r}", value, self.categories, where=where)
        return np.isin(self.codes, [known[value] for value in term.values], invert=term.negated)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NumericColumn:
    """A numeric column: ``values`` float64 (N,), NaN where the row has no value."""

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
                value = float(text)
            except ValueError:
                value = np.nan
            if not np.any(self.values == value):
                raise InputError(
                    f"no value {text!r} in the numeric column {self.name!r}",
                    where=where,
                    expected=self.span(),
                )
            wanted.append(value)
        return np.isin(self.values, wanted, invert=term.negated)

    def span(self) -> str:
        """The range of the values, in words."""
        present = self.values[~np.isnan(self.values)]
        return f"numbers from {present.min():g} to {present.max():g}" if present.size else "no values at all"


AnyColumn = Column | NumericColumn


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Files:
    """The image file of each row: what it takes to tell whether it has changed."""

    path: tuple[str, ...]
    size: np.ndarray
    """int64 (N,), bytes."""
    mtime_ns: np.ndarray
    """int64 (N,), nanoseconds since 1970."""
    sha256: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that has no features, and why."""

    id: str
    path: str
    reason: str


def check_columns(columns: Sequence[AnyColumn], rows: int) -> None:
    """Refuse columns whose length, codes or names are off."""
    for column in columns:
        where = f"column {column.name!r}"
        if not column.name or "\0" in column.name:
            raise InputError("a column name that can't be stored", where=where, expected="text without NUL")
        values = column.codes if isinstance(column, Column) else column.values
        if np.shape(values) != (rows,):
            raise InputError(
                "a column of another length", where=where, found=np.shape(values), expected=f"({rows},)"
            )
        if not isinstance(column, Column):
            if np.isinf(values).any():
                raise InputError(
                    "an infinite value", where=where, found=f"row {int(np.isinf(values).argmax())}"
                )
            continue
        if len(set(column.categories)) != len(column.categories) or "" in column.categories:
            raise InputError(
                "categories that are blank or repeated", where=where, found=column.categories[:12]
            )
        if not np.issubdtype(np.asarray(values).dtype, np.integer):
            raise InputError(
                "category codes that aren't integers", where=where, found=np.asarray(values).dtype
            )
        if rows and (values.min() < -1 or values.max() >= len(column.categories)):
            raise InputError(
                "category codes out of range",
                where=where,
                found=f"{values.min()} to {values.max()}",
                expected=f"-1 to {len(column.categories) - 1}",
            )
