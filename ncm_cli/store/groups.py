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
    """The groups of a store's rows."""

    columns: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]
    """One category a column for each group."""
    codes: Codes
    """(N,) the group of each row of the store, −1 where a column has no value: such a row is in no group."""

    def key(self, index: int) -> dict[str, str]:
        """A group as an object of column to category."""
        return dict(zip(self.columns, self.keys[index], strict=True))

    def sizes(self, rows: NDArray[np.bool_]) -> Codes:
        """(groups,) rows of each group among those of a mask."""
        chosen = self.codes[rows]
        return np.bincount(chosen[chosen >= 0], minlength=len(self.keys))


def make_groups(store: FeatureStore, names: str) -> Groups:
    """The combinations of the columns in ``names`` ("label,place"); no group for no names.

    Combinations without a row are kept (with n = 0) up to `EVERY_COMBINATION`, in the order of the
    columns' categories.

    Raises `InputError` for a column that isn't there, or a numeric one with more than `VALUES` values.
    """
    named = (_categorical(store, name) for name in parse_names(names))
    columns = list({column.name: column for column in named}.values())
    if not columns:
        return Groups((), (), np.full(store.rows, -1, dtype=np.int64))
    codes = np.stack([column.codes.astype(np.int64) for column in columns])
    known = (codes >= 0).all(axis=0)
    sizes = [len(column.categories) for column in columns]
    if math.prod(sizes) <= EVERY_COMBINATION:
        combinations = np.array(list(itertools.product(*(range(size) for size in sizes))), dtype=np.int64)
        found = np.ravel_multi_index(tuple(np.maximum(codes, 0)), sizes) if combinations.size else codes[0]
    else:
        combinations, inverse = np.unique(codes[:, known], axis=1, return_inverse=True)
        combinations = combinations.T
        found = np.zeros(store.rows, dtype=np.int64)
        found[known] = inverse.reshape(-1)
    keys = tuple(
        tuple(column.categories[code] for column, code in zip(columns, combination, strict=True))
        for combination in combinations.reshape(-1, len(columns)).tolist()
    )
    return Groups(tuple(column.name for column in columns), keys, np.where(known, found, -1))


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
