"""Which rows a fit learns from and chooses by, and what they should be predicted as."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, listing
from ncm_cli.options.fit import FitOptions
from ncm_cli.options.grids import parse_names
from ncm_cli.progress import Reporter
from ncm_cli.store.features import Column, FeatureStore

Mask = NDArray[np.bool_]
Codes = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """The row filters in force (None: no such rows) and the rows they select, as masks over the store."""

    train: str
    val: str | None
    test: str | None
    train_rows: Mask
    val_rows: Mask | None
    test_rows: Mask | None


def select_rows(store: FeatureStore, options: FitOptions, *, oracle: bool, reporter: Reporter) -> Filters:
    """Resolve --train, --val and --test, and refuse rows that have two parts to play.

    Raises
    ------
    InputError
        No training row, a filter that selects nothing, or validation rows that are training or test rows.
    """
    split = store.split_column or "split"
    if options.train is None and split not in store.columns:
        raise InputError(
            "nothing says which rows to train on",
            where=store.path,
            found=f"no split column; columns: {listing(store.columns)}",
            fix="--train W and --val W, such as --train 'domain!=sketch'; or embed a table with a split "
            "column, as ncm data folder writes it",
        )
    train = f"{split}=train" if options.train is None else options.train
    val = _default(store, split, "val") if options.val is None else options.val
    test = _default(store, split, "test") if options.test is None else options.test
    if oracle and options.test is None:
        raise InputError(
            "--select oracle needs test rows to look at",
            fix="--test 'split=test', or a rule that needs no test domain: --select bound",
        )
    masks = [None if where is None else _selected(store, where) for where in (train, val, test)]
    train_rows, val_rows, test_rows = masks
    assert train_rows is not None
    _refuse_shared(store, "validation", val_rows, "training", train_rows)
    _refuse_shared(store, "validation", val_rows, "test", test_rows)
    if options.test is not None:
        _refuse_shared(store, "test", test_rows, "training", train_rows)
    elif test_rows is not None and (test_rows & train_rows).any():
        reporter.warn(f"{int((test_rows & train_rows).sum()):,} training rows are rows of {test}")
        test_rows = test_rows & ~train_rows
    return Filters(
        train=train, val=val, test=test, train_rows=train_rows, val_rows=val_rows, test_rows=test_rows
    )


def _default(store: FeatureStore, split: str, name: str) -> str | None:
    column = store.columns.get(split)
    if not isinstance(column, Column) or not column.counts().get(name):
        return None
    return f"{split}={name}"


def _selected(store: FeatureStore, where: str) -> Mask:
    mask = store.mask(where)
    if not mask.any():
        raise InputError("a row filter selects no rows", where=store.path, found=repr(where))
    return mask


def _refuse_shared(
    store: FeatureStore, name: str, rows: Mask | None, other: str, others: Mask | None
) -> None:
    if rows is None or others is None or not (rows & others).any():
        return
    shared = np.flatnonzero(rows & others)
    raise InputError(
        f"{name} rows that are {other} rows as well",
        where=store.path,
        found=f"{len(shared):,} rows, such as {store.ids[shared[0]]!r}",
        expected="rows that play one part: the number would look better than it is",
        fix="say --train, --val and --test such that no row is in two of them",
    )


def drop_copies(
    store: FeatureStore, filters: Filters, overlap: str, reporter: Reporter
) -> tuple[Filters, int]:
    """Leave training rows out whose image is byte-identical to a validation or test row's.

    Returns the filters and how many rows are such copies (left out unless ``overlap`` is ``keep``).
    """
    if store.files is None:
        return filters, 0
    digests = np.asarray(store.files.sha256, dtype=object)
    kept_apart = np.zeros(store.rows, dtype=bool)
    for mask in (filters.val_rows, filters.test_rows):
        if mask is not None:
            kept_apart |= mask
    apart = {
        digest: int(row) for row, digest in zip(np.flatnonzero(kept_apart), digests[kept_apart], strict=True)
    }
    apart.pop("", None)
    copies = [int(row) for row in np.flatnonzero(filters.train_rows) if digests[row] in apart]
    if not copies:
        return filters, 0
    example = f"{store.ids[copies[0]]!r} is {store.ids[apart[digests[copies[0]]]]!r}"
    what = f"{len(copies):,} training images are byte-identical to validation or test images ({example})"
    if overlap == "error":
        raise InputError(what, where=store.path, fix="--overlap exclude leaves them out of training")
    if overlap == "keep":
        reporter.warn(f"{what}; they are kept, as --overlap keep says")
        return filters, len(copies)
    reporter.warn(f"{what}; they are left out of training")
    train_rows = filters.train_rows.copy()
    train_rows[copies] = False
    return dataclasses.replace(filters, train_rows=train_rows), len(copies)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is predicted: ``y`` over all rows of the store (codes, -1 unknown; or values, NaN unknown)."""

    name: str
    classes: tuple[str, ...]
    y: NDArray[Any]

    @property
    def known(self) -> Mask:
        return ~np.isnan(self.y) if self.y.dtype.kind == "f" else self.y >= 0


def read_target(store: FeatureStore, options: FitOptions, train_rows: Mask) -> Target:
    """The target column as codes in the order of the training rows' classes, or as values for regression.

    Raises
    ------
    InputError
        No such column, one of the wrong kind for the task, or one class only.
    """
    name = options.target or store.label_column
    if name is None:
        raise InputError(
            "the feature store has no label",
            where=store.path,
            fix=f"--target COLUMN, one of: {listing(store.columns)}",
        )
    column = store.column(name)
    if options.task == "regression":
        values = column.values if not isinstance(column, Column) else _numbers(store, column)
        return Target(name=name, classes=(), y=np.asarray(values, np.float64))
    if not isinstance(column, Column):
        raise InputError(
            f"the column {name!r} holds numbers, not classes", where=store.path, fix="--task regression"
        )
    present = np.unique(column.codes[train_rows & (column.codes >= 0)])
    classes = tuple(column.categories[code] for code in present)
    if len(classes) < 2:
        raise InputError(
            "only one class among the training rows" if classes else "no training row has a label",
            where=f"{store.path}, column {name!r}",
            found=f"{classes[0]!r} on all {int(train_rows.sum()):,} rows"
            if classes
            else "missing on every row",
            expected="at least two classes",
            fix="another --train or --target",
        )
    order = np.full(len(column.categories) + 1, -1, np.int64)
    order[present] = np.arange(len(present))
    return Target(name=name, classes=classes, y=order[column.codes])


def _numbers(store: FeatureStore, column: Column) -> NDArray[np.float64]:
    values = np.full(len(column.categories) + 1, np.nan)
    for code, text in enumerate(column.categories):
        try:
            values[code] = float(text)
        except ValueError:
            raise InputError(
                f"the column {column.name!r} isn't numeric",
                where=store.path,
                found=repr(text),
                fix="--task classification",
            ) from None
    return values[column.codes]


def known_rows(store: FeatureStore, target: Target, mask: Mask, name: str, reporter: Reporter) -> Codes:
    """Positions of the rows whose target is known; says how many are not."""
    known = mask & target.known
    missing = np.flatnonzero(mask & ~known)
    if missing.size:
        column = store.column(target.name)
        texts: list[str] = []
        if isinstance(column, Column):
            codes = np.unique(column.codes[missing])
            texts = [column.categories[code] for code in codes if code >= 0]
        unseen = f" or with a class that training lacks ({listing(texts)})" if texts else ""
        reporter.warn(
            f"{missing.size:,} {name} rows without a {target.name}{unseen} are left out, "
            f"such as {store.ids[missing[0]]!r}"
        )
    if not known.any():
        raise InputError(
            f"no {name} row has a known {target.name!r}", where=store.path, fix="another filter or --target"
        )
    return np.flatnonzero(known)


def combine(store: FeatureStore, names: str | None) -> Codes | None:
    """One code for each combination of the columns ``names`` over all rows; None for no names."""
    if not names:
        return None
    codes = np.stack([store.categorical(name).codes.astype(np.int64) for name in parse_names(names)])
    return np.asarray(np.unique(codes, axis=1, return_inverse=True)[1].reshape(-1), np.int64)
