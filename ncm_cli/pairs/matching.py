"""Nearest neighbours among many rows, in blocks.

Making pairs at random or by the nearest neighbour, and splitting pairs.

Rows live in *cells*: a cell holds the rows of one value of the ``same`` columns and one value of
the ``across`` columns, in one of two stores. Rows of two cells can be paired when ``same`` agrees
and the rest differs.

MatchDG's alternation on frozen features: match, fit a representation, match again.

Mahajan, Tople, Sharma (2021), Domain generalization using causal matching, Algorithm 1, phase I.
There a network is trained with a contrastive loss on the matches and the matches are renewed by
nearest neighbours in it. Here the features stay frozen and the representation is linear, so each
fit has a closed form:

1. Within each class the domain with the most rows is the base. Every row of it gets one match in each other
   domain, at random at first (as there).
2. The representation f(x) = Bᵀ Σ^{-1/2} (x − mean) minimises the spectral contrastive loss
   −2 E[f(x)ᵀ f(x⁺)] + E[(f(x)ᵀ f(x'))²] (HaoChen et al. 2021, Provable guarantees for self-supervised deep
   learning with spectral contrastive loss, eq. 6) over matched (x, x⁺) and unrelated (x, x'): B Bᵀ
   is the best positive approximation, of rank ``dims``, of Σ^{-1/2} C Σ^{-1/2}, where Σ is the
   covariance of the matched rows and C the symmetrised cross-covariance of the matches. Directions
   in which matched rows are alike are kept, and those that differ between domains have negative
   eigenvalues and drop out.
3. Every base row is matched with the nearest row of its class in each other domain, in f. Back to 2, until at
   most `CHANGED` of the matches change or ``rounds`` is reached.

No step is random but the first matching.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
Float32 = NDArray[np.float32]
Advance = Callable[[int], None]

BLOCK_ROWS = 1024
BLOCK_COLUMNS = 8192
"""Similarities held at once: 1024 × 8192 float32 are 32 MiB."""

SHORTLIST = 4
"""Candidates by float32 similarity that are ranked again in float64, where close ones can be told apart."""


def prepare(features: Float32, metric: str) -> Float32:
    """Rows for a neighbour search: of unit length for ``cosine``, centred for ``euclidean``.

    Centring leaves distances as they are and keeps float32's digits for the differences. A zero row
    stays zero and is at cosine 0 from everything.
    """
    if metric == "euclidean":
        centre = np.zeros(features.shape[1])
        for start in range(0, len(features), BLOCK_COLUMNS):
            centre += features[start : start + BLOCK_COLUMNS].sum(axis=0, dtype=np.float64)
        return features - (centre / max(len(features), 1)).astype(np.float32)
    norms = np.sqrt(np.einsum("ij,ij->i", features, features, dtype=np.float64))
    return features / np.where(norms == 0, 1, norms).astype(np.float32)[:, None]


def nearest_rows(
    rows: Float32,
    queries: Positions,
    candidates: Positions,
    metric: str,
    advance: Advance | None = None,
    apart: Positions | None = None,
) -> tuple[Positions, NDArray[np.float64]]:
    """For each of ``queries``, the nearest of ``candidates`` (ascending) other than itself, and its distance.

    With codes ``apart`` (rows,), the nearest of another code. −1 and infinity where there is none.
    """
    codes = np.arange(len(rows)) if apart is None else apart
    neighbour = np.full(len(queries), -1, dtype=np.int64)
    distance = np.full(len(queries), np.inf)
    for start in range(0, len(queries), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        neighbour[block], distance[block] = _nearest_block(rows, queries[block], candidates, metric, codes)
        if advance:
            advance(len(queries[block]))
    return neighbour, distance


def _nearest_block(
    rows: Float32, block: Positions, candidates: Positions, metric: str, codes: Positions
) -> tuple[Positions, NDArray[np.float64]]:
    """The nearest candidate of another code for each of ``block``: a float32 shortlist, ranked in float64."""
    keep = min(SHORTLIST, len(candidates))
    best = np.full((len(block), keep), -np.inf, dtype=np.float32)
    where = np.full((len(block), keep), -1, dtype=np.int64)
    queries = rows[block]
    index = np.arange(len(block))
    for start in range(0, len(candidates), BLOCK_COLUMNS):
        chunk = candidates[start : start + BLOCK_COLUMNS]
        keys = rows[chunk]
        score = queries @ keys.T
        if metric == "euclidean":
            # Ascending in distance: |q|² is the same for the whole row.
            score -= 0.5 * np.einsum("ij,ij->i", keys, keys)
        score[codes[chunk][None, :] == codes[block][:, None]] = -np.inf
        for _ in range(min(keep, len(chunk))):
            top = score.argmax(axis=1)
            value = score[index, top]
            weakest = best.argmin(axis=1)
            better = value > best[index, weakest]
            if not better.any():
                break
            best[index[better], weakest[better]] = value[better]
            where[index[better], weakest[better]] = chunk[top[better]]
            score[index, top] = -np.inf
    return _rank_exactly(rows, block, where, metric)


def _rank_exactly(
    rows: Float32, block: Positions, where: Positions, metric: str
) -> tuple[Positions, NDArray[np.float64]]:
    queries = rows[block].astype(np.float64)
    distance = np.full(where.shape, np.inf)
    for column in range(where.shape[1]):
        there = where[:, column] >= 0
        keys = rows[where[there, column]].astype(np.float64)
        if metric == "euclidean":
            distance[there, column] = np.sqrt(((queries[there] - keys) ** 2).sum(axis=1))
        else:
            distance[there, column] = 1 - (queries[there] * keys).sum(axis=1)
    least = distance.min(axis=1, keepdims=True)
    # Equal up to the rounding of unit rows to float32: the first row wins, whatever the block sizes.
    tied = distance <= least + 1e-12
    chosen = np.where(tied & (where >= 0), where, np.iinfo(np.int64).max).min(axis=1)
    chosen = np.where(np.isfinite(least[:, 0]), chosen, -1)
    return chosen, least[:, 0]


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


Array = NDArray[np.float64]

CHANGED = 0.01
"""Share of matches that may still change when the alternation counts as converged."""

RIDGE = 1e-3
"""Added to Σ as a share of its mean eigenvalue: with fewer rows than dimensions Σ has no inverse,
and in directions of next to no variance two rows agree by chance."""

BLOCK = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternation:
    """Settings: the distance in the representation, the most rounds, and its dimensions.

    Few dimensions are better: random matches within a class can only show what the class decides (one
    direction fewer than classes). Any further direction starts as chance, and matching by it confirms it.
    """

    metric: str = "euclidean"
    rounds: int = 10
    dims: int = 2


@dataclasses.dataclass(frozen=True)
class Matched:
    """The last matches, and how the alternation went."""

    a: Positions
    b: Positions
    changed: tuple[float, ...]
    """Share of the matches that changed in each round."""
    converged: bool
    mean: Array
    weight: Array
    """(d, m): the representation is (x − mean) @ weight."""
    settings: Alternation

    def match(self, features: Float32, pool: Pool) -> tuple[Positions, Positions]:
        """Match other rows in the representation found, base rows with each other domain as before."""
        a, b = _nearest(embed(features, self.mean, self.weight), pool, self.settings.metric)
        return _oriented(a, b, pool)


def alternate(
    features: Float32,
    pool: Pool,
    settings: Alternation,
    rng: np.random.Generator,
    advance: Callable[[int], None] | None = None,
) -> Matched:
    """Run the alternation on (n, d) features; ``pool`` says which rows may be matched.

    ``advance`` is called with 1 after each round.
    """
    a, b = _at_random(pool, rng)
    changed: list[float] = []
    mean, weight = fit(features, a, b, settings.dims)
    for _ in range(settings.rounds if len(a) else 0):
        new_a, new_b = _nearest(embed(features, mean, weight), pool, settings.metric)
        # Both list the same base rows and domains in the same order.
        changed.append(float((new_b != b).mean()))
        a, b = new_a, new_b
        if advance:
            advance(1)
        if changed[-1] <= CHANGED:
            break
        mean, weight = fit(features, a, b, settings.dims)
    converged = not changed or changed[-1] <= CHANGED
    a, b = _oriented(a, b, pool)
    return Matched(a, b, tuple(changed), converged, mean, weight, settings)


def _bases(pool: Pool) -> Iterator[tuple[Positions, list[Positions]]]:
    """For each class, its largest cell that can be matched, and the cells it is matched with."""
    matchable = pool.most_pairs() > 0
    for group in itertools.compress(pool.cells(), matchable):
        for base in sorted(group, key=len, reverse=True):
            others = [cell for cell in group if (cell is not base) and pool.compatible(base, cell)]
            if others:
                yield base, others
                break


def _at_random(pool: Pool, rng: np.random.Generator) -> tuple[Positions, Positions]:
    left, right = [], []
    for base, others in _bases(pool):
        for other in others:
            left.append(base)
            right.append(other[rng.integers(len(other), size=len(base))])
    return _joined(left), _joined(right)


def _nearest(embedded: Float32, pool: Pool, metric: str) -> tuple[Positions, Positions]:
    rows = prepare(embedded, metric)
    left, right = [], []
    for base, others in _bases(pool):
        for other in others:
            left.append(base)
            right.append(nearest_rows(rows, base, other, metric)[0])
    return _joined(left), _joined(right)


def _oriented(a: Positions, b: Positions, pool: Pool) -> tuple[Positions, Positions]:
    """With two stores, members of the first store first."""
    if not pool.two_sided or not len(a):
        return a, b
    swap = pool.side[a] == 1
    return np.where(swap, b, a), np.where(swap, a, b)


def fit(features: Float32, a: Positions, b: Positions, dims: int) -> tuple[Array, Array]:
    """The linear representation of the matches: mean (d,) and weight (d, m), m at most ``dims``.

    m is 1 at least, even if no direction is alike in matched rows.
    """
    d = features.shape[1]
    if not len(a):
        return np.zeros(d), np.eye(d)[:, : min(dims, d)]
    mean = np.zeros(d)
    for start in range(0, len(a), BLOCK):
        block = slice(start, start + BLOCK)
        mean += features[a[block]].sum(axis=0, dtype=np.float64)
        mean += features[b[block]].sum(axis=0, dtype=np.float64)
    mean /= 2 * len(a)
    total, cross = np.zeros((d, d)), np.zeros((d, d))
    for start in range(0, len(a), BLOCK):
        x = features[a[start : start + BLOCK]] - mean
        y = features[b[start : start + BLOCK]] - mean
        total += x.T @ x + y.T @ y
        cross += x.T @ y
    total /= 2 * len(a)
    cross = (cross + cross.T) / (2 * len(a))
    ridge = RIDGE * np.trace(total) / d
    values, vectors = np.linalg.eigh(total)
    # All rows equal: any scale does, and 1 avoids dividing by zero.
    root = vectors / np.sqrt(np.maximum(values, 0) + (ridge or 1.0)) @ vectors.T
    alike, directions = np.linalg.eigh(root @ cross @ root)
    kept = max(1, min(dims, int((alike > 0).sum())))
    top = directions[:, ::-1][:, :kept]
    return mean, root @ top * np.sqrt(np.maximum(alike[::-1][:kept], 0))


def embed(features: Float32, mean: Array, weight: Array) -> Float32:
    """(n, m) float32 representation of (n, d) features, block by block."""
    out = np.empty((len(features), weight.shape[1]), dtype=np.float32)
    for start in range(0, len(features), BLOCK):
        out[start : start + BLOCK] = (features[start : start + BLOCK] - mean) @ weight
    return out


def _joined(parts: list[Positions]) -> Positions:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
