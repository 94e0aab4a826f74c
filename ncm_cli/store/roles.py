"""The meaning of columns: groups, splits and targets.

Every command uses these definitions, so that all protect the same rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, listing
from ncm_cli.options import parse_names, where_text
from ncm_cli.store.columns import AnyColumn, Column, categories_of, number
from ncm_cli.store.rows import FeatureRows

Codes = NDArray[np.int64]


Role = Literal["train", "val", "test"]


_NO_CLASSES = "--task regression in ncm fit, or name a column of classes with --target"


MAX_LISTED_COMBINATIONS = 256
"""If there are more combinations than this, only those that occur in the store are listed."""


MAX_NUMERIC_GROUPS = 200
"""Most distinct values of a numeric column that can make groups."""


ROLE_NAMES: dict[Role, frozenset[str]] = {
    "train": frozenset({"train", "training", "trn"}),
    "val": frozenset({"val", "valid", "validation", "validate", "dev", "development", "eval", "evaluation"}),
    "test": frozenset({"test", "testing", "tst", "heldout", "holdout"}),
}
"""Spellings of each role, in lower case and with letters only."""


_ROLE_WORDS = {"train": "training", "val": "validation", "test": "test"}


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of a store's rows: the combinations of one or more crossings of columns.

    Attributes
    ----------
    columns
        The columns of all crossings.
    crossings
        The columns of each crossing.
    keys
        One category a column for each group, "" for a column that its crossing doesn't have. The groups of
        one crossing stand together.
    crossing : int64 (groups,)
        The crossing of each group.
    codes : int64 (N, crossings)
        The group of each row of the store in each crossing; −1 for a row without a value in one of its
        columns.
    """

    columns: tuple[str, ...]
    crossings: tuple[tuple[str, ...], ...]
    keys: tuple[tuple[str, ...], ...]
    crossing: Codes
    codes: Codes

    def key(self, index: int) -> dict[str, str]:
        """The category of each column of a group."""
        return {column: value for column, value in zip(self.columns, self.keys[index], strict=True) if value}

    def lacking(self, codes: Codes) -> Iterator[tuple[str, int]]:
        """Each crossing's columns, and how many rows of codes (n, crossings) are in none of its groups."""
        for columns, crossed in zip(self.crossings, codes.T, strict=True):
            yield ",".join(columns), int((crossed < 0).sum())

    def sizes(self, rows: NDArray[np.bool_]) -> Codes:
        """(groups,) the number of rows in a mask that are in each group."""
        chosen = self.codes[rows]
        return np.bincount(chosen[chosen >= 0], minlength=len(self.keys))


def make_groups(store: FeatureRows, names: str) -> Groups:
    """The groups of ``names``: "label,place" is one crossing, "label,male;label,black" are two that overlap.

    Combinations without a row are kept (with n = 0) up to `MAX_LISTED_COMBINATIONS`, in the order of the
    columns' categories. Without names there are no groups.

    Raises `InputError` for a column that isn't there, or a numeric one with more than `MAX_NUMERIC_GROUPS`
    values.
    """
    crossings: list[tuple[Column, ...]] = []
    for part in names.split(";"):
        named = {(column := _grouping(store, name)).name: column for name in parse_names(part)}
        crossings += [tuple(named.values())] if named else []
    columns = tuple(dict.fromkeys(column.name for crossed in crossings for column in crossed))
    keys: list[tuple[str, ...]] = []
    codes, crossing = [], []
    for at, crossed in enumerate(crossings):
        combinations, combination = _combinations(crossed)
        codes.append(np.where(combination >= 0, combination + len(keys), -1))
        crossing += [at] * len(combinations)
        for values in combinations:
            key = {column.name: value for column, value in zip(crossed, values, strict=True)}
            keys.append(tuple(key.get(name, "") for name in columns))
    return Groups(
        columns=columns,
        crossings=tuple(tuple(column.name for column in crossed) for crossed in crossings),
        keys=tuple(keys),
        crossing=np.array(crossing, dtype=np.int64),
        codes=np.stack(codes, axis=1) if codes else np.full((store.rows, 0), -1, dtype=np.int64),
    )


def _combinations(columns: tuple[Column, ...]) -> tuple[list[tuple[str, ...]], Codes]:
    """The combinations of columns, and each row's combination (N,), −1 if a value is missing."""
    codes = np.stack([column.codes.astype(np.int64) for column in columns])
    known = (codes >= 0).all(axis=0)
    sizes = [len(column.categories) for column in columns]
    if math.prod(sizes) <= MAX_LISTED_COMBINATIONS:
        combinations = np.array(list(itertools.product(*map(range, sizes))), dtype=np.int64)
        row_combination = (
            np.ravel_multi_index(tuple(np.maximum(codes, 0)), sizes) if combinations.size else codes[0]
        )
    else:
        combinations, inverse = np.unique(codes[:, known], axis=1, return_inverse=True)
        combinations = combinations.T
        row_combination = np.zeros(codes.shape[1], dtype=np.int64)
        row_combination[known] = inverse.reshape(-1)
    names = [
        tuple(column.categories[code] for column, code in zip(columns, combination, strict=True))
        for combination in combinations.reshape(-1, len(columns)).tolist()
    ]
    return names, np.where(known, row_combination, -1)


def _grouping(store: FeatureRows, name: str) -> Column:
    column = categories_of(store.column(name))
    count = len(column.categories)
    if column is not store.column(name) and count > MAX_NUMERIC_GROUPS:
        raise InputError(
            f"the numeric column {name!r} has too many values to form groups",
            where=store.path,
            found=f"{count} values",
            expected=f"at most {MAX_NUMERIC_GROUPS}",
        )
    return column


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
        roles = [role for role, names in ROLE_NAMES.items() if candidates & names]
        if roles:
            return roles[0] if len(roles) == 1 else None
    return None


def split_column(store: FeatureRows) -> Column | None:
    """The store's split column, a numeric one as text; None if it has none."""
    has_split = "split" in store.columns or store.split_column is not None
    return categories_of(store.column("split")) if has_split else None


def split_values(store: FeatureRows) -> dict[str, Role | None]:
    """The values of the store's split column that have rows, each with its role; empty without the column."""
    column = split_column(store)
    return {value: role_of(value) for value, rows in column.counts().items() if rows} if column else {}


def split_filter(store: FeatureRows, role: Role) -> str | None:
    """The filter for a role's rows, such as ``split=train|training``; None if the store has no such rows."""
    values = [value for value, known in split_values(store).items() if known == role]
    return where_text(store.split_column or "split", *values) if values else None


def unused_filter(store: FeatureRows, used: NDArray[np.bool_]) -> str:
    """A filter for rows that aren't ``used`` (N,), if possible by the split column; quoted for a shell."""
    split = split_column(store)
    for column in [split] if split else store.columns.values():
        if isinstance(column, Column) and column.name != store.label_column:
            taken = np.bincount(column.codes[used & (column.codes >= 0)], minlength=len(column.categories))
            for (value, rows), used_here in zip(column.counts().items(), taken, strict=True):
                if 0 < rows < store.rows and not used_here:
                    return shlex.quote(where_text(column.name, value))
    return "COLUMN=VALUE"


def unrecognised(store: FeatureRows, roles: Iterable[Role]) -> str | None:
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
    """The targets of all rows of a store."""

    name: str
    """The column."""
    classes: tuple[str, ...]
    """In the order of the codes; empty for regression."""
    y: NDArray[Any]
    """int64 (N,) codes, −1 if missing or not among ``classes``; or float64 (N,), NaN if missing."""

    @property
    def known(self) -> NDArray[np.bool_]:
        """bool (N,)."""
        return ~np.isnan(self.y) if self.y.dtype.kind == "f" else self.y >= 0


def read_target(store: FeatureRows, name: str, classes: Sequence[str] | None) -> Target:
    """The column ``name`` as codes among ``classes``, or as numbers if ``classes`` is None.

    Raises `InputError` if the column is missing, is numeric although classes are wanted, or holds text that
    is no number although numbers are wanted.
    """
    if classes is None:
        column = store.column(name)
        return Target(name=column.name, classes=(), y=_numbers(store, column))
    column = store.categorical(name, fix=_NO_CLASSES)
    code = {category: index for index, category in enumerate(classes)}
    table = np.array([code.get(category, -1) for category in column.categories] + [-1], dtype=np.int64)
    return Target(name=column.name, classes=tuple(classes), y=table[column.codes])


def classes_among(store: FeatureRows, name: str, rows: NDArray[np.bool_]) -> tuple[str, ...]:
    """The classes of the column that occur among ``rows``, in the order of its categories."""
    column = store.categorical(name, fix=_NO_CLASSES)
    present = np.unique(column.codes[rows & (column.codes >= 0)])
    return tuple(column.categories[code] for code in present)


def label_name(store: FeatureRows) -> str:
    """The store's label column; raises `InputError` if it has none."""
    if store.label_column is None:
        fix = f"--target COLUMN, one of: {listing(store.columns)}"
        raise InputError("the feature store has no label", where=store.path, fix=fix)
    return store.label_column


def _numbers(store: FeatureRows, column: AnyColumn) -> NDArray[np.float64]:
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
