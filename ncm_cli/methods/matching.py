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

from ncm_cli.methods.neighbours import Advance, Float32, nearest_rows

Positions = NDArray[np.int64]


def components(a: Positions, b: Positions) -> Positions:
    """(k,) a number for each connected component of the graph whose edges are the pairs (a_j, b_j).

    Components are numbered in the order of their first pair.
    """
    parent: dict[int, int] = {}

    def find(node: int) -> int:
        root = node
        while (above := parent.setdefault(root, root)) != root:
            root = above
        while parent[node] != root:
            parent[node], node = root, parent[node]
        return root

    for left, right in zip(a.tolist(), b.tolist(), strict=True):
        parent[find(left)] = find(right)
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(find(node), len(numbers)) for node in a.tolist()], dtype=np.int64)


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

    ``same``, ``across`` and ``side`` are (n,) codes; ``side`` is 0 or 1 for rows of the first or
    second store, all 0 with one store. ``any_across`` lets rows of equal ``across`` be paired.
    """

    same: Positions
    across: Positions
    side: Positions
    any_across: bool = False

    @property
    def two_sided(self) -> bool:
        return bool(self.side.any())

    def subset(self, rows: Positions) -> Pool:
        """The pool of some of the rows."""
        return Pool(self.same[rows], self.across[rows], self.side[rows], self.any_across)

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

    def unmatchable(self) -> Positions:
        """One row of each value of ``same`` whose rows can't be paired, all being in one cell."""
        alone = []
        for group in self.cells():
            pairable = any(self.compatible(x, y) for x in group for y in group if x is not y or len(x) > 1)
            if not pairable:
                alone.append(group[0][0])
        return np.array(alone, dtype=np.int64)


def random_pairs(pool: Pool, rng: np.random.Generator) -> tuple[Positions, Positions]:
    """As many random pairs as there can be, each row in at most one, in random order.

    Within a value of ``same``, rows are drawn at random. When one cell holds at least half of what
    is left, one member is drawn from it, or rows that could be paired would be left over.
    """
    left: list[int] = []
    right: list[int] = []
    for group in pool.cells():
        piles = [rng.permutation(cell).tolist() for cell in group]
        friends = [
            [
                j
                for j, other in enumerate(group)
                if (j != i or pool.any_across) and pool.compatible(cell, other)
            ]
            for i, cell in enumerate(group)
        ]
        while (drawn := _draw(piles, friends, rng)) is not None:
            left.append(drawn[0])
            right.append(drawn[1])
    a, b = np.array(left, dtype=np.int64), np.array(right, dtype=np.int64)
    if pool.two_sided:
        swap = pool.side[a] == 1
        a, b = np.where(swap, b, a), np.where(swap, a, b)
    order = rng.permutation(len(a))
    return a[order], b[order]


def _draw(
    piles: list[list[int]], friends: list[list[int]], rng: np.random.Generator
) -> tuple[int, int] | None:
    """Take one random pair off the piles; None when none is left."""
    sizes = np.array([len(pile) for pile in piles])
    open_ = np.array([bool(n) and any(sizes[j] > (j == i) for j in friends[i]) for i, n in enumerate(sizes)])
    if not open_.any():
        return None
    weights = np.where(open_, sizes, 0)
    total = int(weights.sum())
    largest = int(weights.argmax())
    first = largest if 2 * weights[largest] >= total else _pick(weights, rng)
    partners = np.zeros_like(sizes)
    for j in friends[first]:
        partners[j] = sizes[j] - (j == first)
    second = _pick(partners, rng)
    return piles[first].pop(), piles[second].pop()


def _pick(weights: NDArray[np.int64], rng: np.random.Generator) -> int:
    return int(np.searchsorted(np.cumsum(weights), rng.integers(int(weights.sum())), side="right"))


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
        for cell in group:
            own = cell[wanted[cell]]
            others = [c for c in group if (c is not cell or pool.any_across) and pool.compatible(cell, c)]
            candidates = np.sort(np.concatenate(others)) if others else np.empty(0, dtype=np.int64)
            if len(candidates):
                neighbour, distance = nearest_rows(rows, own, candidates, metric, advance)
                real = neighbour >= 0
                found_a.append(own[real])
                found_b.append(neighbour[real])
                found_distance.append(distance[real])
            elif advance:
                advance(len(own))
    if not found_a:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    a, b, distance = np.concatenate(found_a), np.concatenate(found_b), np.concatenate(found_distance)
    order = np.argsort(a, kind="stable")
    return a[order], b[order], distance[order]


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
    if not columns:
        return np.zeros(n, dtype=np.int64)
    stacked = np.stack([np.asarray(column, dtype=np.int64) for column in columns])
    _, codes = np.unique(stacked, axis=1, return_inverse=True)
    return np.where((stacked < 0).any(axis=0), -1, codes.reshape(-1))
