"""Cuts pairs into folds. Connected pairs, which share a row directly or through others, stay together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ncm_cli.blocks import Codes, Mask
from ncm_cli.errors import InputError

LARGEST_SET_SHARES = 2.0
"""Sets of connected pairs larger than this many folds' share of all pairs are split by rows."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """The pairs, of k, that a fold measures, those that may span its basis, and the rows it isn't trained on.

    A *node* is a number shared by rows of equal content: a fold treats them as one row.
    """

    measured: Mask
    """(k,) pairs whose members are compared."""
    basis: Mask
    """(k,) pairs that may span the basis: they share no row with the measured ones."""
    untrained_nodes: Codes
    """(u,) nodes of the rows that may not be trained on, the members of measured pairs among them."""


def components(a: Codes, b: Codes) -> Codes:
    """(k,) a number for each set of connected pairs: components of the graph with edges (a_j, b_j).

    Components are numbered in the order of their first pair.
    """
    # Imported here: it takes longer than everything else that a quick command does.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    nodes, ends = np.unique(np.concatenate([a, b]), return_inverse=True)
    left, right = ends.reshape(2, -1).astype(np.int32)  # scipy before 1.13 takes no other indices here
    graph = coo_array((np.ones(len(left), dtype=bool), (left, right)), shape=(len(nodes), len(nodes)))
    component = connected_components(graph, directed=False)[1][left]
    _, first, number = np.unique(component, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def deal(a: Codes, b: Codes, count: int, seed: int, kind: Codes | None = None) -> list[Fold]:
    """Cut k pairs into at most ``count`` folds of about the same number of pairs.

    ``a`` and ``b`` (k,) are the nodes of their members; rows with the same content are one node. Pairs that
    share a row, directly or through others, stay together. Larger sets are split by rows: a pair with both
    rows in one part is measured with that part; a pair across two parts is never measured, and is used for
    the basis of the folds that have neither row. With the number of each pair's ``kind`` (k,), each fold has
    about the same share of every kind.

    Raises `InputError` for fewer than two sets of pairs that share no row.
    """
    rng = np.random.default_rng(seed)
    together = components(a, b)
    kinds = np.zeros(len(a), np.int64) if kind is None else kind
    of_kind = kinds[:, None] == np.unique(kinds)
    sizes = np.stack([np.bincount(together, weights=in_kind) for in_kind in of_kind.T], axis=1)
    totals = of_kind.sum(axis=0)
    nodes, ends = np.unique(np.concatenate([a, b]), return_inverse=True)
    end_a, end_b = ends.reshape(2, -1)
    component = np.zeros(len(nodes), dtype=np.int64)
    component[end_a] = component[end_b] = together
    members = np.split(np.argsort(component, kind="stable"), np.cumsum(np.bincount(component))[:-1])
    part_of = np.zeros(len(nodes), dtype=np.int64)
    load = np.zeros((count, len(totals)))
    large = (sizes > LARGEST_SET_SHARES / count * totals).any(axis=1)
    for number in rng.permutation(len(sizes)):
        rows = members[number]
        if large[number] and len(rows) > 2 * count:
            part_of[rows[rng.permutation(len(rows))]] = np.arange(len(rows)) % count
        else:
            # A set goes where the sum of the squared shares of all kinds grows least.
            part_of[rows] = int((load @ (sizes[number] / totals**2)).argmin())
            load[part_of[rows[0]]] += sizes[number]
    part_a, part_b = part_of[end_a], part_of[end_b]
    folds = []
    for part in range(count):
        measured = (part_a == part) & (part_b == part)
        if measured.any():
            folds.append(Fold(measured, (part_a != part) & (part_b != part), nodes[part_of == part]))
    if len(folds) < 2 or not all(fold.basis.any() for fold in folds):
        raise InputError(
            "too few pairs to be cut into folds",
            found=f"{len(a):,} pairs in {len(sizes):,} sets that share no row",
            expected="two or more pairs that share no row",
            fix="more pairs, or one --rank and one --weight-decay, so that there is nothing to choose",
        )
    return folds


def set_aside(a: Codes, b: Codes, held_out: Mask) -> list[Fold]:
    """One fold of the pairs that a user holds out; pairs that share a row with them leave the basis.

    Raises `InputError` if no pair is left for the basis.
    """
    untrained_nodes = np.unique(np.concatenate([a[held_out], b[held_out]]))
    basis = ~(np.isin(a, untrained_nodes) | np.isin(b, untrained_nodes))
    if not basis.any():
        raise InputError(
            "every pair shares a row with the held-out pairs, so none is left for the basis",
            found=f"{len(a):,} pairs, {int(held_out.sum()):,} held out",
            fix="hold out pairs of other rows, or none: ncm pairs --holdout 0",
        )
    return [Fold(held_out, basis, untrained_nodes)]


def draw_sets(together: Codes, count: int, seed: int) -> Mask:
    """(k,) at most ``count`` pairs: sets of connected pairs, numbered by ``together`` (k,), drawn whole."""
    sizes = np.bincount(together, minlength=1)
    drawn = np.zeros(len(sizes), dtype=bool)
    for number in np.random.default_rng(seed).permutation(len(sizes)):
        drawn[number] = sizes[number] <= count
        count -= int(sizes[number]) * drawn[number]
    return np.asarray(drawn[together])


def deal_sets(together: Codes, count: int, seed: int) -> Codes:
    """(k,) the part of each pair, 0 to ``count`` − 1: sets of connected pairs are dealt at random."""
    sets = int(together.max(initial=-1)) + 1
    part = np.empty(sets, dtype=np.int64)
    part[np.random.default_rng(seed).permutation(sets)] = np.arange(sets) % count
    return part[together]


def units(a: Codes, b: Codes, folds: Sequence[Fold]) -> Codes:
    """(m,) a number for each measured pair, fold by fold: equal for pairs that are connected there."""
    units_of_folds: list[Codes] = []
    start = 0
    for fold in folds:
        numbers = components(a[fold.measured], b[fold.measured]) + start
        start = int(numbers.max()) + 1
        units_of_folds.append(numbers)
    return np.concatenate(units_of_folds)
