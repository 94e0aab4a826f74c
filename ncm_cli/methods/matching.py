"""Making pairs at random or by the nearest neighbour, and splitting pairs.

Rows live in *cells*: a cell holds the rows of one value of the ``same`` columns and one value of
the ``across`` columns, in one of two stores. Rows of two cells can be paired when ``same`` agrees
and the rest differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods.neighbours import BLOCK_ROWS, Advance, Float32, nearest_rows

Positions = NDArray[np.int64]


def components(a: Positions, b: Positions) -> Positions:
    """(k,) a number for each connected component of the graph whose edges are the pairs (a_j, b_j).

    Components are numbered in the order of their first pair.
    """
    # Imported here: it takes longer than everything else that a quick command does.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    nodes, ends = np.unique(np.concatenate([a, b]), return_inverse=True)
    left, right = ends.reshape(2, -1)
    graph = coo_array((np.ones(len(left), dtype=bool), (left, right)), shape=(len(nodes), len(nodes)))
    component = connected_components(graph, directed=False)[1][left]
    _, first, number = np.unique(component, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def split_components(component: Positions, count: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """(k,) a mask of at most ``count`` pairs made of whole components, taken in random order."""
    sizes = np.bincount(component, minlength=1)
    chosen = np.zeros(len(sizes), dtype=bool)
    left = count
    for number in rng.permutation(len(sizes)):
        if sizes[number] <= left:
            chosen[number] = True
            left -= int(sizes[number])
    return chosen[component]


@dataclasses.dataclass(frozen=True)
class Pool:
    """The rows that may be paired: n of them, each with its cell.

    ``same``, ``across`` and ``side`` are (n,) codes from 0; ``side`` is 1 for rows of the second store.
    ``any_across`` lets rows of equal ``across`` be paired. ``two_sided`` is for two stores, whose rows are
    only paired with each other's: it follows from a ``side`` of 1, and stays for a part of the rows.
    """

    same: Positions
    across: Positions
    side: Positions
    any_across: bool = False
    two_sided: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "two_sided", self.two_sided or bool(self.side.any()))

    def subset(self, rows: Positions) -> Pool:
        """The pool of some of the rows."""
        return dataclasses.replace(self, same=self.same[rows], across=self.across[rows], side=self.side[rows])

    def cells(self) -> Iterator[list[Positions]]:
        """For each value of ``same``, in order, the rows (ascending) of each of its cells."""
        if not len(self.same):
            return
        order = np.lexsort((self.across, self.side, self.same))
        keys = np.stack([self.same, self.side, self.across])[:, order]
        new_cell = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
        pieces = np.split(order, new_cell)
        group: list[Positions] = []
        for piece in pieces:
            if group and self.same[group[0][0]] != self.same[piece[0]]:
                yield group
                group = []
            group.append(np.sort(piece))
        if group:
            yield group

    def compatible(self, cell: Positions, other: Positions) -> bool:
        """Whether a row of one cell may be paired with a row of the other."""
        i, j = cell[0], other[0]
        apart = self.any_across or self.across[i] != self.across[j]
        return apart and (not self.two_sided or self.side[i] != self.side[j])

    def most_pairs(self) -> Positions:
        """(values of ``same``,) how many pairs each allows at most, every row in one of them.

        That is all rows but the largest set of which no two can be paired (Kőnig's theorem), which is one
        store, or one value of ``across`` in both; with one store also no more than half of the rows.
        """
        group = np.unique(self.same, return_inverse=True)[1]
        n = np.bincount(group)
        second = np.bincount(group[self.side == 1], minlength=len(n))
        most = np.minimum(second, n - second) if self.two_sided else n // 2
        if self.any_across:
            return most
        cell = as_codes([group, self.across], len(group))
        largest = np.zeros_like(n)
        np.maximum.at(largest, group, np.bincount(cell)[cell])
        return np.minimum(most, n - largest)

    def unmatchable(self) -> Positions:
        """One row of each value of ``same`` of whose rows no two can be paired."""
        return np.unique(self.same, return_index=True)[1][self.most_pairs() == 0]


def random_pairs(pool: Pool, rng: np.random.Generator) -> tuple[Positions, Positions]:
    """As many random pairs as there can be, each row in at most one, in random order.

    Random rows, as many of each value of ``across`` as can have partners, are paired at random. Pairs of one
    value then exchange members: with each other, or with pairs that don't hold that value. Rows of one value
    are treated alike, so with two values, or one that most rows have, every choice of pairs is as likely.
    """
    rows = rng.permutation(len(pool.same))
    group = np.unique(pool.same, return_inverse=True)[1]
    cell = as_codes([group] if pool.any_across else [group, pool.across], len(group))
    most = pool.most_pairs()[group]
    everything = np.full(len(rows), len(rows))
    if pool.two_sided:
        left, right = rows[pool.side[rows] == 0], rows[pool.side[rows] == 1]
        # What is left of the second store for a row's partner.
        partners = np.bincount(group[right], minlength=len(rows))[group]
        partners -= np.bincount(cell[right], minlength=len(rows))[cell]
        a = _take(left, group, cell, everything if pool.any_across else partners, most)
        free = most - np.bincount(cell[a], minlength=len(rows))[cell]
        b = _take(right, group, cell, everything if pool.any_across else free, most)
    else:
        both = _take(rows, group, cell, everything if pool.any_across else most, 2 * most)
        first = _rank(group[both]) < most[both]
        a, b = both[first], both[~first]
    if not pool.any_across:
        _part_equals(a, b, group, cell)
    order = rng.permutation(len(a))
    return a[order], b[order]


def _rank(codes: Positions) -> Positions:
    """(n,) how many earlier entries have the same code."""
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    rank = np.empty(len(codes), dtype=np.int64)
    rank[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def _take(
    rows: Positions, group: Positions, cell: Positions, of_cell: Positions, of_group: Positions
) -> Positions:
    """The first ``of_group`` rows of each group, of them at most ``of_cell`` of each cell; group by group."""
    rows = rows[_rank(cell[rows]) < of_cell[rows]]
    rows = rows[_rank(group[rows]) < of_group[rows]]
    return rows[np.argsort(group[rows], kind="stable")]


def _part_equals(a: Positions, b: Positions, group: Positions, cell: Positions) -> None:
    """Exchange second members, in place, until no pair is of one cell; pairs come group by group.

    No cell has more than half of a group's members, so pairs that don't hold it are as many as those it has
    to itself.
    """
    owner = group[a]
    equal = np.flatnonzero(cell[a] == cell[b])
    for pairs in np.split(equal, np.flatnonzero(np.diff(owner[equal])) + 1):
        waiting: list[int] = []
        for pair in pairs.tolist():
            if waiting and cell[a[waiting[-1]]] != cell[a[pair]]:
                other = waiting.pop()
                b[pair], b[other] = b[other], b[pair]
            else:
                waiting.append(pair)
        if waiting:
            start, stop = np.searchsorted(owner, owner[waiting[0]] + np.arange(2))
            alone = cell[a[waiting[0]]]
            others = (cell[a[start:stop]] != alone) & (cell[b[start:stop]] != alone)
            partners = start + np.flatnonzero(others)[: len(waiting)]
            b[waiting], b[partners] = b[partners], b[waiting]


def nearest_pairs(
    rows: Float32, pool: Pool, metric: str, anchors: Positions | None = None, advance: Advance | None = None
) -> tuple[Positions, Positions, NDArray[np.float64]]:
    """The nearest row that each anchor may be paired with; anchors without one are left out.

    Parameters
    ----------
    rows
        (n, d) of `neighbours.prepare` with the same ``metric``.
    anchors
        Rows whose neighbour is wanted, ascending; by default all (with two stores: all of the first).
    advance
        Called with the number of anchors done.

    Returns
    -------
    Anchors (m,), their neighbours (m,) and distances (m,): 1 − cosine, or Euclidean. Of equally
    near neighbours the first row is taken. Memory beside ``rows`` is bounded by the block size.
    """
    wanted = np.ones(len(rows), dtype=bool) if anchors is None else np.zeros(len(rows), dtype=bool)
    if anchors is not None:
        wanted[anchors] = True
    elif pool.two_sided:
        wanted = pool.side == 0
    found_a, found_b, found_distance = [], [], []
    for group in pool.cells():
        everyone = np.sort(np.concatenate(group))
        for cells in _batches(group, pool):
            queries = np.concatenate(cells)
            candidates = everyone
            if pool.two_sided:
                candidates = everyone[pool.side[everyone] != pool.side[queries[0]]]
            apart = None if pool.any_across else pool.across
            if len(cells) == 1 and apart is not None:
                candidates = candidates[apart[candidates] != apart[queries[0]]]
            queries = queries[wanted[queries]]
            if len(candidates):
                neighbour, distance = nearest_rows(rows, queries, candidates, metric, advance, apart)
                real = neighbour >= 0
                found_a.append(queries[real])
                found_b.append(neighbour[real])
                found_distance.append(distance[real])
            elif advance:
                advance(len(queries))
    if not found_a:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    a, b, distance = np.concatenate(found_a), np.concatenate(found_b), np.concatenate(found_distance)
    order = np.argsort(a, kind="stable")
    return a[order], b[order], distance[order]


def _batches(group: list[Positions], pool: Pool) -> Iterator[list[Positions]]:
    """The cells of one value of ``same`` in batches of one side, of at most `BLOCK_ROWS` rows or one cell.

    Small cells share their candidates: gathering others for each would cost more than the distances.
    """
    batch: list[Positions] = []
    for cell in group:
        full = sum(map(len, batch)) + len(cell) > BLOCK_ROWS
        if batch and (full or pool.side[batch[0][0]] != pool.side[cell[0]]):
            yield batch
            batch = []
        batch.append(cell)
    yield batch


def unique_pairs(a: Positions, b: Positions) -> NDArray[np.bool_]:
    """(k,) False for a pair that repeats an earlier one, either way round."""
    keys = np.stack([np.minimum(a, b), np.maximum(a, b)])
    _, first = np.unique(keys, axis=1, return_index=True)
    fresh = np.zeros(len(a), dtype=bool)
    fresh[first] = True
    return fresh


def stratified_parts(pool: Pool, fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """(n,) a random mask of about ``fraction`` of the rows of each cell.

    Matching within each part by itself is what keeps the held-out pairs free of the other pairs'
    rows: a neighbour graph can hang together so much that no part of it could be held out
    afterwards.
    """
    held = np.zeros(len(pool.same), dtype=bool)
    for group in pool.cells():
        for cell in group:
            # Rounded at random, so that cells of one or two rows are not always on the same side.
            n = int(np.floor(fraction * len(cell) + rng.random()))
            held[rng.permutation(cell)[:n]] = True
    return held


def as_codes(columns: Sequence[NDArray[np.int64]], n: int) -> Positions:
    """(n,) one code for each combination of columns of codes; −1 where any of them is missing (−1)."""
    codes, known = np.zeros(n, dtype=np.int64), np.ones(n, dtype=bool)
    for column in columns:
        width = int(column.max(initial=0)) + 1
        codes = np.unique(codes * width + np.maximum(column, 0), return_inverse=True)[1]
        known &= column >= 0
    return np.where(known, codes, -1)
