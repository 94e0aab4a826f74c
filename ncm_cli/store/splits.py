"""What the values of a split column mean: training, validation or test rows, or something else.

Every command asks here, so that none protects rows that another one doesn't know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ncm_cli.store.columns import Column
from ncm_cli.store.groups import categories_of

if TYPE_CHECKING:
    from ncm_cli.store.features import FeatureStore

Role = Literal["train", "val", "test"]

NAMES: dict[Role, frozenset[str]] = {
    "train": frozenset({"train", "training", "trn"}),
    "val": frozenset({"val", "valid", "validation", "validate", "dev", "development", "eval", "evaluation"}),
    "test": frozenset({"test", "testing", "tst", "heldout", "holdout"}),
}
"""Spellings of each role, in lower case and without what stands between letters."""


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
    if "split" not in store.columns and store.split_column is None:
        return None
    return categories_of(store.column("split"))


def split_values(store: FeatureStore) -> dict[str, Role | None]:
    """The values of the store's split column that have rows, each with its role; empty without the column."""
    column = split_column(store)
    counts = {} if column is None else column.counts()
    return {value: role_of(value) for value, rows in counts.items() if rows}


def split_filter(store: FeatureStore, role: Role) -> str | None:
    """The row filter of a role's rows, such as ``split=train|training``; None where the store has none."""
    values = [value for value, known in split_values(store).items() if known == role]
    return f"{store.split_column or 'split'}={'|'.join(values)}" if values else None


def unused_filter(store: FeatureStore, used: NDArray[np.bool_]) -> str:
    """A filter of some of the rows that aren't ``used`` (N,), by the split column if it can be; for hints."""
    split = split_column(store)
    for column in [split] if split else store.columns.values():
        if not isinstance(column, Column) or column.name == store.label_column:
            continue
        taken = np.bincount(column.codes[used & (column.codes >= 0)], minlength=len(column.categories))
        for (value, rows), own in zip(column.counts().items(), taken, strict=True):
            if 0 < rows < store.rows and not own:
                return f"{column.name}={value}"
    return "COLUMN=VALUE"


def unrecognised(store: FeatureStore, roles: Iterable[Role]) -> str | None:
    """A sentence for a store that has a split column, but no row of one of ``roles`` in it; else None."""
    values = split_values(store)
    missing = [role for role in roles if role not in values.values()]
    if not values or not missing:
        return None
    named = {"train": "training", "val": "validation", "test": "test"}
    shown = ", ".join(repr(value) for value in list(values)[:12])
    return (
        f"no {' or '.join(named[role] for role in missing)} rows can be recognised in the split column "
        f"{store.split_column or 'split'!r}, which holds {shown}"
    )
