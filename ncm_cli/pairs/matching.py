"""Makes pairs: at random, by nearest neighbours, or by MatchDG's alternation.

Rows are in *cells*: a cell holds the rows of one value of the ``same`` columns and one value of the
``across`` columns, in one of two stores. Rows of two cells can be paired if ``same`` is equal and the rest
differs.

MatchDG's alternation (Mahajan, Tople, Sharma 2021, Domain generalization using causal matching, Algorithm 1,
phase I) trains a network with a contrastive loss on the matches and matches anew by nearest neighbours in it.
Here the features stay frozen and the representation is linear, so each fit has a closed form:

1. Within each class the domain with the most rows is the base. Every row of it gets one match in each other
   domain, at random at first (as in MatchDG).
2. The representation f(x) = Bᵀ Σ^{-1/2} (x − mean) minimises the spectral contrastive loss
   −2 E[f(x)ᵀ f(x⁺)] + E[(f(x)ᵀ f(x'))²] (HaoChen et al. 2021, Provable guarantees for self-supervised deep
   learning with spectral contrastive loss, eq. 6) over matched (x, x⁺) and unrelated (x, x'): B Bᵀ
   is the best positive approximation, of rank ``dims``, of Σ^{-1/2} C Σ^{-1/2}, where Σ is the
   covariance of the matched rows and C the symmetrised cross-covariance of the matches. Directions
   in which matched rows agree are kept; those that differ between domains have negative eigenvalues and are
   dropped.
3. Every base row is matched with the nearest row of its class in each other domain, in f. Back to 2, until at
   most `MAX_CHANGED` of the matches change or ``rounds`` is reached.

Only the first matching is random.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Features, slices
from ncm_cli.probes.metrics import joint
from ncm_cli.solvers.neighbours import BLOCK_COLUMNS, BLOCK_ROWS, nearest_rows, normalized_rows

Positions = NDArray[np.int64]
Array = NDArray[np.float64]
Advance = Callable[[int], None]

MAX_CHANGED = 0.01
"""The alternation has converged when at most this share of the matches changes in a round."""

RIDGE = 1e-3
"""Added to Σ's diagonal as a share of its mean eigenvalue: with fewer rows than dimensions Σ has no inverse,
and in directions of almost no variance two rows agree by chance."""


@dataclasses.dataclass(frozen=True)
class Pool:
    """The rows that may be paired: n of them, each with its cell.

    ``same``, ``across`` and ``side`` are (n,) codes from 0; ``side`` is 1 for rows of the second store.
    ``any_across`` lets rows of equal ``across`` be paired. With ``two_sided`` only rows of different stores
    are paired; it is set if any ``side`` is 1, and subsets keep it.
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
        """For each value of ``same``, in order, its cells: their rows, ascending."""
        order = np.lexsort((self.across, self.side, self.same))
        keys = np.stack([self.same, self.side, self.across])[:, order]
        cells = np.split(order, np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1)
        for _, group in itertools.groupby(cells if len(order) else [], lambda cell: self.same[cell[0]]):
            yield list(group)

    def most_pairs(self) -> Positions:
        """(values of ``same``,) the largest possible number of pairs of each value, with every row in at most
        one.

        That is the number of rows outside the largest set in which no two can be paired (Kőnig's theorem):
        one store, or one value of ``across`` in both. With one store it is also at most half of the rows.
        """
        group = np.unique(self.same, return_inverse=True)[1]
        n = np.bincount(group)
        second = np.bincount(group[self.side == 1], minlength=len(n))
        most = np.minimum(second, n - second) if self.two_sided else n // 2
        if self.any_across:
            return most
        cell = joint(np.stack([group, self.across], axis=1))
        largest = np.zeros_like(n)
        np.maximum.at(largest, group, np.bincount(cell)[cell])
        return np.minimum(most, n - largest)

    def unmatchable(self) -> Positions:
        """One row for each value of ``same`` whose rows can't be paired."""
        return np.unique(self.same, return_index=True)[1][self.most_pairs() == 0]


def random_pairs(pool: Pool, rng: np.random.Generator) -> tuple[Positions, Positions]:
    """As many random pairs as possible, each row in at most one, in random order.

    Random rows, as many of each value of ``across`` as can have partners, are paired at random. Pairs within
    one value then swap members with each other, or with pairs without that value. Rows of one value are
    treated alike, so with two values, or one that most rows have, all choices of pairs are equally likely.
    """
    rows = rng.permutation(len(pool.same))
    group = np.unique(pool.same, return_inverse=True)[1]
    cell = group if pool.any_across else joint(np.stack([group, pool.across], axis=1))
    most = pool.most_pairs()[group]
    everything = np.full(len(rows), len(rows))
    if pool.two_sided:
        left, right = rows[pool.side[rows] == 0], rows[pool.side[rows] == 1]
        # The number of rows of the second store that may be a row's partner.
        partners = np.bincount(group[right], minlength=len(rows))[group]
        partners -= np.bincount(cell[right], minlength=len(rows))[cell]
        a = _take(left, group, cell, everything if pool.any_across else partners, most)
        free = most - np.bincount(cell[a], minlength=len(rows))[cell]
        b = _take(right, group, cell, everything if pool.any_across else free, most)
    else:
        drawn = _take(rows, group, cell, everything if pool.any_across else most, 2 * most)
        first = _rank(group[drawn]) < most[drawn]
        a, b = drawn[first], drawn[~first]
    if not pool.any_across:
        _separate_equals(a, b, group, cell)
    order = rng.permutation(len(a))
    return a[order], b[order]


def _rank(codes: Positions) -> Positions:
    """(n,) the number of earlier entries with the same code."""
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    rank = np.empty(len(codes), dtype=np.int64)
    rank[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def _take(
    rows: Positions, group: Positions, cell: Positions, of_cell: Positions, of_group: Positions
) -> Positions:
    """The first ``of_group`` rows of each group, with at most ``of_cell`` from each cell, group by group."""
    rows = rows[_rank(cell[rows]) < of_cell[rows]]
    rows = rows[_rank(group[rows]) < of_group[rows]]
    return rows[np.argsort(group[rows], kind="stable")]


def _separate_equals(a: Positions, b: Positions, group: Positions, cell: Positions) -> None:
    """Swap second members, in place, until no pair lies within one cell; pairs are sorted by group.

    No cell has more than half of a group's members, so there are at least as many pairs without it as pairs
    within it.
    """
    pair_group = group[a]
    equal = np.flatnonzero(cell[a] == cell[b])
    for pairs in np.split(equal, np.flatnonzero(np.diff(pair_group[equal])) + 1):
        waiting: list[int] = []
        for pair in pairs.tolist():
            if waiting and cell[a[waiting[-1]]] != cell[a[pair]]:
                other = waiting.pop()
                b[pair], b[other] = b[other], b[pair]
            else:
                waiting.append(pair)
        if waiting:
            start, stop = np.searchsorted(pair_group, pair_group[waiting[0]] + np.arange(2))
            alone = cell[a[waiting[0]]]
            others = (cell[a[start:stop]] != alone) & (cell[b[start:stop]] != alone)
            partners = start + np.flatnonzero(others)[: len(waiting)]
            b[waiting], b[partners] = b[partners], b[waiting]


def nearest_pairs(
    rows: Features, pool: Pool, metric: str, anchors: Positions | None = None, advance: Advance | None = None
) -> tuple[Positions, Positions, Array]:
    """The nearest row that each anchor can be paired with; anchors without one are left out.

    Parameters
    ----------
    rows
        (n, d) from `normalized_rows` with the same ``metric``.
    anchors
        Rows to find neighbours for; by default all (with two stores: all of the first).
    advance
        Called with the number of anchors done.

    Returns
    -------
    Anchors (m,), ascending, their neighbours (m,) and distances (m,): 1 − cosine, or Euclidean. Of equally
    near neighbours the first row is taken. Memory beyond ``rows`` is bounded by the block size.
    """
    wanted = pool.side == 0 if anchors is None else np.isin(np.arange(len(rows)), anchors)
    codes = np.arange(len(rows)) if pool.any_across else pool.across
    neighbour, distance = np.full(len(rows), -1), np.full(len(rows), np.inf)
    for cells in pool.cells():
        group = np.concatenate(cells)
        queries, everyone = group[wanted[group]], np.sort(group)
        if pool.two_sided:
            everyone = everyone[pool.side[everyone] == 1]
        for block in (queries[part] for part in slices(queries, BLOCK_ROWS)):
            # Queries are sorted by code. Small cells in one block share candidates: gathering each cell's own
            # would cost more than the distances.
            alike = codes[block[0]] == codes[block[-1]]
            others = everyone[codes[everyone] != codes[block[0]]] if alike else everyone
            if len(others):
                neighbour[block], distance[block] = nearest_rows(rows, block, others, metric, codes)
            if advance:
                advance(len(block))
    matched = np.flatnonzero(neighbour >= 0)
    return matched, neighbour[matched], distance[matched]


def stratified_parts(pool: Pool, fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """(n,) a random mask of about ``fraction`` of the rows of each cell.

    Matching within each part keeps the held-out pairs free of the other pairs' rows: a neighbour graph may be
    so connected that no part of it could be held out afterwards.
    """
    held = np.zeros(len(pool.same), dtype=bool)
    for cell in itertools.chain.from_iterable(pool.cells()):
        # Rounded at random, so that cells of one or two rows don't always fall on the same side.
        n = int(np.floor(fraction * len(cell) + rng.random()))
        held[rng.permutation(cell)[:n]] = True
    return held


@dataclasses.dataclass(frozen=True)
class Matched:
    """The final matches of the alternation, and how many changed in each round."""

    a: Positions
    b: Positions
    changed: tuple[float, ...]
    """Share of the matches that changed in each round."""
    mean: Array
    weight: Array
    """(d, m): the representation is (x − mean) @ weight."""

    @property
    def converged(self) -> bool:
        return not self.changed or self.changed[-1] <= MAX_CHANGED

    def match(self, features: Features, pool: Pool) -> tuple[Positions, Positions]:
        """Match other rows in this representation: base rows with each other domain."""
        return _oriented(*_nearest(features, self.mean, self.weight, pool), pool)


def alternate(
    features: Features,
    pool: Pool,
    rng: np.random.Generator,
    *,
    rounds: int,
    dims: int,
    advance: Advance | None = None,
) -> Matched:
    """Run the alternation on (n, d) features; ``pool`` says which rows may be matched.

    Few ``dims`` are better: random matches within a class only show directions that separate classes, of
    which there is one fewer than classes. Any further direction starts as noise, and matching by it
    reinforces it. ``advance`` is called with 1 after each round.
    """
    a, b = _base_pairs(pool, lambda base, other: other[rng.integers(len(other), size=len(base))])
    changed: list[float] = []
    mean, weight = represent(features, a, b, dims)
    for _ in range(rounds if len(a) else 0):
        before = b
        # Both list the same base rows and domains in the same order.
        a, b = _nearest(features, mean, weight, pool)
        changed.append(float((before != b).mean()))
        if advance:
            advance(1)
        if changed[-1] <= MAX_CHANGED:
            break
        mean, weight = represent(features, a, b, dims)
    return Matched(*_oriented(a, b, pool), tuple(changed), mean, weight)


def _base_pairs(
    pool: Pool, match: Callable[[Positions, Positions], Positions]
) -> tuple[Positions, Positions]:
    """The rows of each class's largest cell that has partners, and their ``match`` in each other cell."""
    left, right = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for group in itertools.compress(pool.cells(), pool.most_pairs() > 0):
        for base in sorted(group, key=len, reverse=True):
            others = [cell for cell in group if cell is not base and _compatible(pool, base[0], cell[0])]
            for other in others:
                left.append(base)
                right.append(match(base, other))
            if others:
                break
    return np.concatenate(left), np.concatenate(right)


def _compatible(pool: Pool, i: int, j: int) -> bool:
    apart = pool.any_across or pool.across[i] != pool.across[j]
    return bool(apart and (not pool.two_sided or pool.side[i] != pool.side[j]))


def _nearest(features: Features, mean: Array, weight: Array, pool: Pool) -> tuple[Positions, Positions]:
    """Base rows and the nearest row of each other domain in the representation."""
    embedded = np.empty((len(features), weight.shape[1]), dtype=np.float32)
    for block in slices(features, BLOCK_COLUMNS):
        embedded[block] = (features[block] - mean) @ weight
    rows, itself = normalized_rows(embedded, "euclidean"), np.arange(len(features))

    def match(base: Positions, other: Positions) -> Positions:
        blocks = (base[part] for part in slices(base, BLOCK_ROWS))
        return np.concatenate([nearest_rows(rows, block, other, "euclidean", itself)[0] for block in blocks])

    return _base_pairs(pool, match)


def _oriented(a: Positions, b: Positions, pool: Pool) -> tuple[Positions, Positions]:
    """With two stores, the first store's members first."""
    swap = (pool.side[a] == 1) & pool.two_sided
    return np.where(swap, b, a), np.where(swap, a, b)


def represent(features: Features, a: Positions, b: Positions, dims: int) -> tuple[Array, Array]:
    """The linear representation of the matches: mean (d,) and weight (d, m), m at most ``dims``.

    m is at least 1, even if matched rows agree in no direction.
    """
    d = features.shape[1]
    if not len(a):
        return np.zeros(d), np.eye(d)[:, : min(dims, d)]
    mean = np.zeros(d)
    for block in slices(a, BLOCK_COLUMNS):
        mean += features[a[block]].sum(axis=0, dtype=np.float64)
        mean += features[b[block]].sum(axis=0, dtype=np.float64)
    mean /= 2 * len(a)
    total, cross = np.zeros((d, d)), np.zeros((d, d))
    for block in slices(a, BLOCK_COLUMNS):
        x, y = features[a[block]] - mean, features[b[block]] - mean
        total += x.T @ x + y.T @ y
        cross += x.T @ y
    total /= 2 * len(a)
    cross = (cross + cross.T) / (2 * len(a))
    ridge = RIDGE * np.trace(total) / d
    values, vectors = np.linalg.eigh(total)
    # If all rows are equal any scale will do; 1 avoids a division by zero.
    root = vectors / np.sqrt(np.maximum(values, 0) + (ridge or 1.0)) @ vectors.T
    correlations, directions = np.linalg.eigh(root @ cross @ root)
    kept = max(1, min(dims, int((correlations > 0).sum())))
    top = directions[:, ::-1][:, :kept]
    return mean, root @ top * np.sqrt(np.maximum(correlations[::-1][:kept], 0))
