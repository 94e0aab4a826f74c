"""The columns of a store's rows, and what they mean: groups, splits and targets.

Every command asks here, so that none protects rows that another one doesn't know.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, listing, unknown
from ncm_cli.options import Term, parse_names, where_text

if TYPE_CHECKING:
    from ncm_cli.store.features import FeatureStore

Codes = NDArray[np.int64]
Role = Literal["train", "val", "test"]

_NO_CLASSES = "--task regression in ncm fit, or name a column of classes with --target"

EVERY_COMBINATION = 256
"""Up to so many combinations all are listed; beyond, those that occur in the store."""

VALUES = 200
"""Distinct values up to which a numeric column is taken as groups."""

NAMES: dict[Role, frozenset[str]] = {
    "train": frozenset({"train", "training", "trn"}),
    "val": frozenset({"val", "valid", "validation", "validate", "dev", "development", "eval", "evaluation"}),
    "test": frozenset({"test", "testing", "tst", "heldout", "holdout"}),
}
"""Spellings of each role, in lower case and without what stands between letters."""

_ROLE_WORDS = {"train": "training", "val": "validation", "test": "test"}


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
        for value in term.values:
            if value not in self.categories:
                error = unknown(f"value in column {self.name!r}", value, self.categories, where=where)
                if {*parse_names(value)} <= {*self.categories}:
                    error.fix = where_text(term.column, *parse_names(value))
                raise error
        wanted = [self.categories.index(value) for value in term.values]
        return np.isin(self.codes, wanted, invert=term.negated)


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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Files:
    """The image file of each row: what it takes to tell whether it has changed."""

    path: Sequence[str]
    size: np.ndarray
    """int64 (N,), bytes."""
    mtime_ns: np.ndarray
    """int64 (N,), nanoseconds since 1970."""
    sha256: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that has no features, and why."""

    id: str
    path: str
    reason: str


def check_columns(columns: Sequence[AnyColumn], rows: int) -> None:
    """Refuse columns whose length, codes or names are off."""
    for column in columns:
        if wrong := _fault(column, rows):
            what, found, expected = wrong
            raise InputError(what, where=f"column {column.name!r}", found=found, expected=expected)


def _fault(column: AnyColumn, rows: int) -> tuple[str, object, object] | None:
    """(what, found, expected) of a column that can't be stored."""
    if not column.name or "\0" in column.name:
        return "a column name that can't be stored", None, "text without NUL"
    values = np.asarray(column.codes if isinstance(column, Column) else column.values)
    if values.shape != (rows,):
        return "a column of another length", values.shape, f"({rows},)"
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


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of a store's rows: the combinations of one or more crossings of columns.

    Attributes
    ----------
    columns
        Of all crossings.
    crossings
        The columns of each one.
    keys
        One category a column for each group, "" for a column that its crossing doesn't have. The groups of
        one crossing stand together.
    crossing : int64 (groups,)
        Which crossing each group is of.
    codes : int64 (N, crossings)
        The group of each row of the store in each crossing, −1 where a column has no value: such a row is in
        no group of it.
    """

    columns: tuple[str, ...]
    crossings: tuple[tuple[str, ...], ...]
    keys: tuple[tuple[str, ...], ...]
    crossing: Codes
    codes: Codes

    def key(self, index: int) -> dict[str, str]:
        """A group as an object of column to category."""
        return {column: value for column, value in zip(self.columns, self.keys[index], strict=True) if value}

    def lacking(self, codes: Codes) -> Iterator[tuple[str, int]]:
        """Each crossing's columns, and how many of the rows with these codes (n, crossings) it leaves out."""
        for columns, own in zip(self.crossings, codes.T, strict=True):
            yield ",".join(columns), int((own < 0).sum())

    def sizes(self, rows: NDArray[np.bool_]) -> Codes:
        """(groups,) rows of each group among those of a mask."""
        chosen = self.codes[rows]
        return np.bincount(chosen[chosen >= 0], minlength=len(self.keys))


def make_groups(store: FeatureStore, names: str) -> Groups:
    """The groups of ``names``: "label,place" is one crossing, "label,male;label,black" are two that overlap.

    Combinations without a row are kept (with n = 0) up to `EVERY_COMBINATION`, in the order of the
    columns' categories. No names are no group.

    Raises `InputError` for a column that isn't there, or a numeric one with more than `VALUES` values.
    """
    found = (
        {(column := _grouping(store, name)).name: column for name in parse_names(part)}
        for part in names.split(";")
    )
    crossings = [tuple(own.values()) for own in found if own]
    columns = tuple(dict.fromkeys(column.name for own in crossings for column in own))
    keys: list[tuple[str, ...]] = []
    codes, crossing = [], []
    for number, own in enumerate(crossings):
        combinations, mine = _combinations(own)
        codes.append(np.where(mine >= 0, mine + len(keys), -1))
        crossing += [number] * len(combinations)
        for values in combinations:
            key = {column.name: value for column, value in zip(own, values, strict=True)}
            keys.append(tuple(key.get(name, "") for name in columns))
    return Groups(
        columns=columns,
        crossings=tuple(tuple(column.name for column in own) for own in crossings),
        keys=tuple(keys),
        crossing=np.array(crossing, dtype=np.int64),
        codes=np.stack(codes, axis=1) if codes else np.full((store.rows, 0), -1, dtype=np.int64),
    )


def _combinations(columns: tuple[Column, ...]) -> tuple[list[tuple[str, ...]], Codes]:
    """The combinations of columns, and which one each row has (N,), −1 where a value is missing."""
    codes = np.stack([column.codes.astype(np.int64) for column in columns])
    known = (codes >= 0).all(axis=0)
    sizes = [len(column.categories) for column in columns]
    if math.prod(sizes) <= EVERY_COMBINATION:
        combinations = np.array(list(itertools.product(*map(range, sizes))), dtype=np.int64)
        found = np.ravel_multi_index(tuple(np.maximum(codes, 0)), sizes) if combinations.size else codes[0]
    else:
        combinations, inverse = np.unique(codes[:, known], axis=1, return_inverse=True)
        combinations = combinations.T
        found = np.zeros(codes.shape[1], dtype=np.int64)
        found[known] = inverse.reshape(-1)
    names = [
        tuple(column.categories[code] for column, code in zip(columns, combination, strict=True))
        for combination in combinations.reshape(-1, len(columns)).tolist()
    ]
    return names, np.where(known, found, -1)


def _grouping(store: FeatureStore, name: str) -> Column:
    made = categories_of(store.column(name))
    count = len(made.categories)
    if made is not store.column(name) and count > VALUES:
        raise InputError(
            f"the numeric column {name!r} has too many values to be groups",
            where=store.path,
            found=f"{count} values",
            expected=f"at most {VALUES}",
        )
    return made


def categories_of(column: AnyColumn) -> Column:
    """The column itself, or a numeric one with its values as categories, in ascending order."""
    if isinstance(column, Column):
        return column
    known = ~np.isnan(column.values)
    values, inverse = np.unique(column.values[known], return_inverse=True)
    codes = np.full(len(known), -1, dtype=np.int32)
    codes[known] = inverse
    return Column(column.name, codes, tuple(f"{value:.15g}" for value in values))


def group_weights(codes: Codes) -> NDArray[np.float64]:
    """Row weights (n,), mean 1, that make every group count equally: inverse group frequency."""
    _, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
    return np.asarray(len(codes) / (len(counts) * counts[inverse]), np.float64)


def role_of(value: str) -> Role | None:
    """The role that a split value names, in any case and spelling; None for any other value.

    ``Held-Out`` is test and ``ood_val`` is val. A value that names two roles, as ``train+val``, has none.
    """
    words = re.findall(r"[^\W_]+", value.casefold())
    for candidates in ({"".join(words)}, set(words)):
        roles = [role for role, names in NAMES.items() if candidates & names]
        if roles:
            return roles[0] if len(roles) == 1 else None
    return None


def split_column(store: FeatureStore) -> Column | None:
    """The store's split column, a numeric one by its digits; None where it has none."""
    has_split = "split" in store.columns or store.split_column is not None
    return categories_of(store.column("split")) if has_split else None


def split_values(store: FeatureStore) -> dict[str, Role | None]:
    """The values of the store's split column that have rows, each with its role; empty without the column."""
    column = split_column(store)
    return {value: role_of(value) for value, rows in column.counts().items() if rows} if column else {}


def split_filter(store: FeatureStore, role: Role) -> str | None:
    """The row filter of a role's rows, such as ``split=train|training``; None where the store has none."""
    values = [value for value, known in split_values(store).items() if known == role]
    return where_text(store.split_column or "split", *values) if values else None


def unused_filter(store: FeatureStore, used: NDArray[np.bool_]) -> str:
    """A filter of some of the rows that aren't ``used`` (N,), by the split column if it can be; for hints."""
    split = split_column(store)
    for column in [split] if split else store.columns.values():
        if isinstance(column, Column) and column.name != store.label_column:
            taken = np.bincount(column.codes[used & (column.codes >= 0)], minlength=len(column.categories))
            for (value, rows), own in zip(column.counts().items(), taken, strict=True):
                if 0 < rows < store.rows and not own:
                    return where_text(column.name, value)
    return "COLUMN=VALUE"


def unrecognised(store: FeatureStore, roles: Iterable[Role]) -> str | None:
    """A sentence for a store that has a split column, but no row of one of ``roles`` in it; else None."""
    values = split_values(store)
    missing = [_ROLE_WORDS[role] for role in roles if role not in values.values()]
    if not values or not missing:
        return None
    shown = ", ".join(repr(value) for value in list(values)[:12])
    return (
        f"no {' or '.join(missing)} rows can be recognised in the split column "
        f"{store.split_column or 'split'!r}, which holds {shown}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The answers of all rows of a store."""

    name: str
    """The column."""
    classes: tuple[str, ...]
    """In the order of the codes; empty for regression."""
    y: NDArray[Any]
    """int64 (N,) codes, −1 where missing or not among ``classes``; or float64 (N,), NaN where missing."""

    @property
    def known(self) -> NDArray[np.bool_]:
        """bool (N,)."""
        return ~np.isnan(self.y) if self.y.dtype.kind == "f" else self.y >= 0


def read_target(store: FeatureStore, name: str, classes: Sequence[str] | None) -> Target:
    """The column ``name`` as codes among ``classes``, or as numbers where ``classes`` is None.

    Raises `InputError` for a column that isn't there, numbers where classes are wanted, or text that is no
    number.
    """
    if classes is None:
        column = store.column(name)
        return Target(name=column.name, classes=(), y=_numbers(store, column))
    column = store.categorical(name, fix=_NO_CLASSES)
    code = {category: index for index, category in enumerate(classes)}
    table = np.array([code.get(category, -1) for category in column.categories] + [-1], dtype=np.int64)
    return Target(name=column.name, classes=tuple(classes), y=table[column.codes])


def classes_among(store: FeatureStore, name: str, rows: NDArray[np.bool_]) -> tuple[str, ...]:
    """The classes of the column that occur among ``rows``, in the order of its categories."""
    column = store.categorical(name, fix=_NO_CLASSES)
    present = np.unique(column.codes[rows & (column.codes >= 0)])
    return tuple(column.categories[code] for code in present)


def own_column(store: FeatureStore, name: str) -> str | None:
    """The name of the store's column that is meant; None where it has none.

    ``label`` and ``split`` mean the columns that play these parts, whatever they are called.
    """
    name = {"label": store.label_column, "split": store.split_column}.get(name) or name
    return name if name in store.columns else None


def label_name(store: FeatureStore) -> str:
    """The store's label column; `InputError` where it has none."""
    if store.label_column is None:
        fix = f"--target COLUMN, one of: {listing(store.columns)}"
        raise InputError("the feature store has no label", where=store.path, fix=fix)
    return store.label_column


def number(text: str) -> float:
    """A label's text as a number, NaN for an empty one; raises ValueError for other text."""
    return float(text) if text.strip() else math.nan


def _numbers(store: FeatureStore, column: AnyColumn) -> NDArray[np.float64]:
    if not isinstance(column, Column):
        return np.asarray(column.values, np.float64)
    try:
        values = np.array([*map(number, column.categories), np.nan])
    except ValueError:
        raise InputError(
            f"the column {column.name!r} holds text where numbers are needed",
            where=store.path,
            found=listing(column.categories),
            fix="name the numeric column with --target, or fit with --task classification",
        ) from None
    return np.asarray(values[column.codes], np.float64)
