"""Groups of rows: the combinations of columns, and weights that make them count the same."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.options.grids import parse_names
from ncm_cli.store.columns import AnyColumn, Column

if TYPE_CHECKING:
    from ncm_cli.store.features import FeatureStore

Codes = NDArray[np.int64]

EVERY_COMBINATION = 256
"""Up to so many combinations all are listed; beyond, those that occur in the store."""

VALUES = 200
"""Distinct values up to which a numeric column is taken as groups."""


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
    made = []
    for part in names.split(";"):
        found = {column.name: column for column in (_categorical(store, name) for name in parse_names(part))}
        if found:
            made.append((tuple(found), *_combinations(list(found.values()))))
    columns = tuple(dict.fromkeys(name for own, _, _ in made for name in own))
    keys: list[tuple[str, ...]] = []
    codes, crossing = [], []
    for number, (own, combinations, found_codes) in enumerate(made):
        codes.append(np.where(found_codes >= 0, found_codes + len(keys), -1))
        crossing += [number] * len(combinations)
        for values in combinations:
            key = dict(zip(own, values, strict=True))
            keys.append(tuple(key.get(name, "") for name in columns))
    return Groups(
        columns=columns,
        crossings=tuple(own for own, _, _ in made),
        keys=tuple(keys),
        crossing=np.array(crossing, dtype=np.int64),
        codes=np.stack(codes, axis=1) if codes else np.full((store.rows, 0), -1, dtype=np.int64),
    )


def _combinations(columns: list[Column]) -> tuple[list[tuple[str, ...]], Codes]:
    """The combinations of columns, and which one each row has (N,), −1 where a value is missing."""
    codes = np.stack([column.codes.astype(np.int64) for column in columns])
    known = (codes >= 0).all(axis=0)
    sizes = [len(column.categories) for column in columns]
    if math.prod(sizes) <= EVERY_COMBINATION:
        combinations = np.array(list(itertools.product(*(range(size) for size in sizes))), dtype=np.int64)
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


def joint(codes: Codes) -> Codes:
    """(n,) one code for each combination of the crossings' groups (n, crossings), −1 where any is missing."""
    _, inverse = np.unique(codes, axis=0, return_inverse=True)
    return np.where((codes >= 0).all(axis=1), inverse.reshape(-1), -1).astype(np.int64)


def _categorical(store: FeatureStore, name: str) -> Column:
    column = store.column(name)
    found = categories_of(column)
    if not isinstance(column, Column) and len(found.categories) > VALUES:
        raise InputError(
            f"the numeric column {name!r} has too many values to be groups",
            where=store.path,
            found=f"{len(found.categories)} values",
            expected=f"at most {VALUES}",
        )
    return found


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
