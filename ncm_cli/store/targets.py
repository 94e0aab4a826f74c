"""What is predicted: a column as class codes, or as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, listing
from ncm_cli.store.columns import Column

if TYPE_CHECKING:
    from ncm_cli.store.features import FeatureStore


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
    column = store.column(name)
    if classes is None:
        return Target(name=column.name, classes=(), y=_numbers(store, column))
    if not isinstance(column, Column):
        raise InputError(
            f"the column {column.name!r} holds numbers, not classes",
            where=store.path,
            found=column.span(),
            fix="--task regression in ncm fit, or name a column of classes with --target",
        )
    code = {category: index for index, category in enumerate(classes)}
    table = np.array([code.get(category, -1) for category in column.categories] + [-1], dtype=np.int64)
    return Target(name=column.name, classes=tuple(classes), y=table[column.codes])


def classes_among(store: FeatureStore, name: str, rows: NDArray[np.bool_]) -> tuple[str, ...]:
    """The classes of the column that occur among ``rows``, in the order of its categories."""
    column = store.column(name)
    if not isinstance(column, Column):
        return read_target(store, name, ()).classes  # which says what is wrong with it
    present = np.unique(column.codes[rows & (column.codes >= 0)])
    return tuple(column.categories[code] for code in present)


def label_name(store: FeatureStore) -> str:
    """The store's label column; `InputError` where it has none."""
    if store.label_column is None:
        raise InputError(
            "the feature store has no label",
            where=store.path,
            fix=f"--target COLUMN, one of: {listing(store.columns)}",
        )
    return store.label_column


def number(text: str) -> float:
    """A label's text as a number, NaN for an empty one; raises ValueError for other text."""
    return float(text) if text.strip() else float("nan")


def _numbers(store: FeatureStore, column: Any) -> NDArray[np.float64]:
    if not isinstance(column, Column):
        return np.asarray(column.values, np.float64)
    try:
        values = np.array([*(number(text) for text in column.categories), np.nan])
    except ValueError:
        raise InputError(
            f"the column {column.name!r} holds text where numbers are needed",
            where=store.path,
            found=listing(column.categories),
            fix="name the numeric column with --target, or fit with --task classification",
        ) from None
    return values[column.codes]
