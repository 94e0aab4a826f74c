"""Label × domain cells: whether pairs were matched by label, and the rows that candidates are compared on.

Two different rows of one label are no counterfactuals: even a perfect probe of error e predicts them
differently with probability 2e(1 − e), so validation error + flip rate prefers a constant probe where labels
are hard to predict. But the members of such pairs have labels. The error on the members that a fold isn't
trained on, with every cell weighted equally, is a direct estimate of the error in a test domain where label
and domain are independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ncm_cli.blocks import Codes, Mask
from ncm_cli.errors import InputError
from ncm_cli.options import parse_names
from ncm_cli.store.columns import Column
from ncm_cli.store.pairs import COUNTERFACTUAL, MATCHED, PairStore
from ncm_cli.store.roles import Target, make_groups
from ncm_cli.store.rows import FeatureRows

BY_LABEL = ("random", "nearest", "iterative")
"""Strategies that pair different rows."""

LEAST_MATCHED_SHARE = 0.95
"""A table counts as matched by label across a column if at least this share of its pairs have members of one
label that differ in the column."""

LEAST_MEMBERS_PER_CELL = 4
"""A column can be the domains of a table of pairs if its cells have at least this many members on average."""

MOST_DOMAINS = 32
"""A column with more values is never taken as the domains unless it is named."""


def domain_columns(
    store: FeatureRows, target: Target, pairs: PairStore, a: Codes, b: Codes
) -> tuple[str, ...]:
    """The columns across which pairs were matched by label; none if they are counterfactuals.

    Parameters
    ----------
    a, b : int64 (k,)
        Positions of the members in the store, −1 for those that it lacks.

    Raises
    ------
    InputError
        Pairs are marked as matched, but there is no column in which their members differ.
    """
    kind, options = pairs.options.get("kind"), pairs.options
    if kind == COUNTERFACTUAL or not target.classes or pairs.options.get("features_b"):
        return ()
    if pairs.strategy in BY_LABEL:
        same = {store.column(name).name for name in _present(store, options.get("same"))}
        across = tuple(store.column(name).name for name in _present(store, options.get("across")))
        return across if target.name in same else ()
    if pairs.strategy != "table":
        return ()
    known = (a >= 0) & (b >= 0)
    known[known] = target.known[a[known]] & target.known[b[known]]
    columns: tuple[str, ...] = ()
    if known.sum() > len(a) / 2 and (target.y[a[known]] == target.y[b[known]]).mean() >= LEAST_MATCHED_SHARE:
        columns = _told_apart(store, target, a[known], b[known])
    if kind == MATCHED and not columns:
        raise InputError(
            "pairs are marked as matched by label, but there is no column that tells their members apart",
            where=store.path,
            expected=f"members of one {target.name!r}, and a column of domains in which nearly all differ",
            fix=f"make them again with ncm pairs --kind {COUNTERFACTUAL}, or embed a table with that column",
        )
    return columns


def _present(store: FeatureRows, names: object) -> list[str]:
    """The columns that an option of ``ncm pairs`` names, as far as the store has them."""
    roles = {"label": store.label_column, "split": store.split_column}
    return [name for name in parse_names(str(names or "")) if (roles.get(name) or name) in store.columns]


def _told_apart(store: FeatureRows, target: Target, a: Codes, b: Codes) -> tuple[str, ...]:
    """The column with the fewest values among those in which nearly all pairs of rows differ."""
    candidates: list[tuple[int, str]] = []
    for name, column in store.columns.items():
        if name in (target.name, store.label_column, store.split_column) or not isinstance(column, Column):
            continue
        codes = column.codes
        differ = (codes[a] >= 0) & (codes[b] >= 0) & (codes[a] != codes[b])
        values = len(np.unique(codes[np.concatenate([a, b])]))
        members = len(np.unique(np.concatenate([a, b])))
        if differ.mean() >= LEAST_MATCHED_SHARE and members >= LEAST_MEMBERS_PER_CELL * values * len(
            target.classes
        ):
            candidates.append((values, name))
    return (min(candidates)[1],) if candidates else ()


def environment_columns(
    store: FeatureRows, target: Target, groups: str | None, rows: Mask
) -> tuple[str, ...]:
    """The columns that give the rows' domains if the pairs don't; none if it isn't clear which do.

    They are the columns of ``--groups``, else ``domain``, else the only other column with 2 to
    `MOST_DOMAINS` categories.
    """
    if not target.classes:
        return ()
    named = [store.column(name).name for part in (groups or "").split(";") for name in parse_names(part)]
    if named:
        return tuple(dict.fromkeys(name for name in named if name != target.name))
    others = [
        name
        for name, column in store.columns.items()
        if name not in (target.name, store.label_column, store.split_column)
        and isinstance(column, Column)
        and 2 <= len(np.unique(column.codes[rows & (column.codes >= 0)])) <= MOST_DOMAINS
    ]
    if "domain" in others:
        return ("domain",)
    return (others[0],) if len(others) == 1 else ()


def read_cells(store: FeatureRows, target: Target, columns: Sequence[str]) -> dict[str, Codes]:
    """Codes (N,) of rows, −1 if unknown: ``domain``, from these columns, and ``cell``, label × domain."""
    domain = make_groups(store, ",".join(columns)).codes[:, 0]
    width = int(domain.max(initial=0)) + 1
    return {
        "domain": domain,
        "cell": np.where((target.y >= 0) & (domain >= 0), target.y * width + domain, -1),
    }


def comparison_pairs(label: Codes, domain: Codes, *, across: bool, seed: int) -> tuple[Codes, Codes]:
    """Positions of random pairs of rows of one label, each row in at most one pair.

    Both rows of a pair are of the same domain or, with ``across``, of different ones. For these, the rows of
    a label are sorted by domain and the first half is paired with the second; pairs of one domain are
    dropped.
    """
    rng = np.random.default_rng(seed)
    found_a: list[Codes] = [np.zeros(0, np.int64)]
    found_b = list(found_a)
    keys = label if across else np.unique(np.stack([label, domain], axis=1), axis=0, return_inverse=True)[1]
    for key in np.unique(keys):
        rows = rng.permutation(np.flatnonzero(keys.ravel() == key))
        if across:
            rows = rows[np.argsort(domain[rows], kind="stable")]
        half = len(rows) // 2
        found_a.append(rows[:half])
        found_b.append(rows[len(rows) - half :])
    a, b = np.concatenate(found_a), np.concatenate(found_b)
    kept = (domain[a] != domain[b]) if across else np.ones(len(a), dtype=bool)
    return a[kept], b[kept]


def unbalanced(names: Sequence[str], counts: Sequence[int], times: float = 5.0) -> str:
    """A description of pairs that are very unequal over classes; else empty."""
    most, least = int(np.argmax(counts)), int(np.argmin(counts))
    if len(counts) < 2 or counts[most] < times * max(counts[least], 1):
        return ""
    return f"{counts[most]:,} pairs of {names[most]!r} and {counts[least]:,} of {names[least]!r}"
