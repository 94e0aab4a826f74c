"""Groups of rows: combinations of columns, and how many rows of each there are."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.options.grids import parse_names
from ncm_cli.store.features import Column, FeatureStore

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
    codes: NDArray[np.int64]
    """(N,) the group of each row of the store, −1 where a column has no value."""

    def key(self, index: int) -> dict[str, str]:
        """A group as an object of column to category."""
        return dict(zip(self.columns, self.keys[index], strict=True))

    def sizes(self, rows: NDArray[np.bool_]) -> NDArray[np.int64]:
        """(groups,) rows of each group among those of a mask."""
        chosen = self.codes[rows]
        return np.bincount(chosen[chosen >= 0], minlength=len(self.keys))


def make_groups(store: FeatureStore, names: str | None, target: str, task: str) -> Groups:
    """The combinations of the columns in ``names`` ("label,place"); by default the target's classes.

    ``label`` and ``split`` also mean the columns that play these parts under another name.
    Combinations without a row are kept (with n = 0) up to `EVERY_COMBINATION`, in the order of the
    columns' categories.

    Raises `InputError` for a column that isn't there, or a numeric one with more than `VALUES` values.
    """
    wanted = parse_names(names) if names is not None else ((target,) if task == "classification" else ())
    columns = [_categorical(store, resolve(store, name)) for name in dict.fromkeys(wanted)]
    codes = [column.codes.astype(np.int64) for column in columns]
    sizes = [len(column.categories) for column in columns]
    if not columns:
        return Groups((), (), np.full(store.rows, -1, dtype=np.int64))
    known = np.all([code >= 0 for code in codes], axis=0)
    if math.prod(sizes) <= EVERY_COMBINATION:
        combinations = list(itertools.product(*(range(size) for size in sizes)))
    else:
        present = np.unique(np.stack(codes, axis=1)[known], axis=0)
        combinations = [tuple(row) for row in present.tolist()]
    number = {combination: index for index, combination in enumerate(combinations)}
    rows = zip(*(code.tolist() for code in codes), strict=True)
    found = np.array([number.get(row, -1) for row in rows], dtype=np.int64)
    keys = tuple(
        tuple(column.categories[code] for column, code in zip(columns, combination, strict=True))
        for combination in combinations
    )
    return Groups(tuple(column.name for column in columns), keys, found)


def resolve(store: FeatureStore, name: str) -> str:
    """The column that ``name`` means: itself, or for ``label`` and ``split`` the one that plays that part."""
    part = {"label": store.label_column, "split": store.split_column}.get(name)
    return part if part is not None and name not in store.columns else name


def _categorical(store: FeatureStore, name: str) -> Column:
    column = store.column(name)
    if isinstance(column, Column):
        return column
    values, codes = np.unique(column.values[~np.isnan(column.values)], return_inverse=True)
    if len(values) > VALUES:
        raise InputError(
            f"the numeric column {name!r} has too many values to be groups",
            where=store.path,
            found=f"{len(values)} values",
            expected=f"at most {VALUES}",
        )
    every = np.full(store.rows, -1, dtype=np.int32)
    every[~np.isnan(column.values)] = codes
    return Column(name, every, tuple(f"{value:g}" for value in values))
