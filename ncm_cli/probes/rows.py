"""Which rows a fit learns from and chooses by, and what they should be predicted as."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, listing
from ncm_cli.probes.options import FitOptions
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import (
    Column,
    Target,
    classes_among,
    label_name,
    make_groups,
    read_target,
    split_filter,
    split_values,
    unrecognised,
    unused_filter,
)
from ncm_cli.store.features import FeatureStore

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
    unused: str = ""
    """A filter of rows that have no part to play, for hints."""

    def apart(self) -> Mask:
        """(N,) the validation and test rows."""
        apart = np.zeros_like(self.train_rows)
        for mask in (self.val_rows, self.test_rows):
            if mask is not None:
                apart |= mask
        return apart


def select_rows(store: FeatureStore, options: FitOptions, *, oracle: bool, reporter: Reporter) -> Filters:
    """Resolve --train, --val and --test, and refuse rows that have two parts to play.

    Raises
    ------
    InputError
        No training row, a filter that selects nothing, or validation rows that are training or test rows.
    """
    train = options.train or split_filter(store, "train")
    if train is None:
        example = unused_filter(store, np.zeros(store.rows, dtype=bool))
        raise InputError(
            "nothing says which rows to train on",
            where=store.path,
            found=unrecognised(store, ["train"]) or f"no split column; columns: {listing(store.columns)}",
            fix=f"--train W and --val W, such as --train '{example}'; or embed a table with a split column, "
            "as ncm data folder writes it",
        )
    if oracle and options.test is None:
        example = split_filter(store, "test") or unused_filter(store, _selected(store, train))
        raise InputError(
            "--select oracle needs test rows to look at",
            fix=f"--test '{example}', or a rule that needs no test domain: --select bound",
        )
    val = options.val or split_filter(store, "val")
    test = options.test or split_filter(store, "test")
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
    filters = Filters(
        train=train, val=val, test=test, train_rows=train_rows, val_rows=val_rows, test_rows=test_rows
    )
    what = None if options.test else unrecognised(store, ["test"])
    if what or val is None:
        filters = dataclasses.replace(filters, unused=unused_filter(store, train_rows | filters.apart()))
    if what:
        say = reporter.warn if None in split_values(store).values() else reporter.note
        say(f"{what}: nothing is kept apart as test rows; --test W names them: --test '{filters.unused}'")
    return filters


def training_only(store: FeatureStore, options: FitOptions) -> Filters:
    """The rows of --train, with nothing to choose or to judge by."""
    assert options.train is not None
    rows = _selected(store, options.train)
    return Filters(train=options.train, val=None, test=None, train_rows=rows, val_rows=None, test_rows=None)


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


def content_nodes(store: FeatureStore) -> Codes:
    """(N,) a number for each row: equal for rows whose image files are byte for byte the same."""
    if store.files is None:
        return np.arange(store.rows)
    first: dict[str, int] = {}
    return np.array(
        [first.setdefault(digest, row) if digest else row for row, digest in enumerate(store.files.sha256)],
        dtype=np.int64,
    )


def drop_copies(
    store: FeatureStore, filters: Filters, overlap: str, reporter: Reporter
) -> tuple[Filters, int]:
    """Leave training rows out whose image is byte-identical to a validation or test row's.

    Returns the filters and how many rows are such copies (left out unless ``overlap`` is ``keep``).
    """
    nodes, apart = content_nodes(store), filters.apart()
    copies = np.flatnonzero(filters.train_rows & np.isin(nodes, nodes[apart]))
    if not copies.size:
        return filters, 0
    twin = np.flatnonzero(apart & (nodes == nodes[copies[0]]))[0]
    example = f"{store.ids[copies[0]]!r} is {store.ids[twin]!r}"
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


def fit_target(store: FeatureStore, options: FitOptions, train_rows: Mask) -> Target:
    """The target column as codes in the order of the training rows' classes, or as values for regression.

    Raises
    ------
    InputError
        No such column, one of the wrong kind for the task, or one class only.
    """
    name = options.target or label_name(store)
    if options.task == "regression":
        return read_target(store, name, None)
    classes = classes_among(store, name, train_rows)
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
    return read_target(store, name, classes)


def known_rows(store: FeatureStore, target: Target, mask: Mask, name: str, reporter: Reporter) -> Mask:
    """The rows of a mask whose target is known; says how many are not."""
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
    return known


def column_codes(store: FeatureStore, names: str | None) -> Codes | None:
    """(N,) a code for each combination of the columns ``names``, −1 where one is missing."""
    if not names:
        return None
    if ";" in names:
        raise InputError(
            "several crossings where one is meant",
            found=repr(names),
            expected="columns between commas; crossings are for --groups",
        )
    return make_groups(store, names).codes[:, 0]


def valued_rows(
    store: FeatureStore, codes: Codes | None, rows: Mask, option: str, names: str | None, reporter: Reporter
) -> Mask:
    """Training rows that have a value of the columns that ``option`` names; says how many have none.

    A row without a value takes no part: it must not become a group of its own in silence.
    """
    if codes is None:
        return rows
    missing = np.flatnonzero(rows & (codes < 0))
    if missing.size:
        flag = f"--{option.replace('_', '-')}"
        reporter.warn(
            f"{missing.size:,} training rows without a value of {names} ({flag}) are left out, such as "
            f"{store.ids[missing[0]]!r}"
        )
    left = rows & (codes >= 0)
    if not left.any():
        raise InputError(f"no training row has a value of {names!r}", where=store.path, found=f"--{option}")
    return left
