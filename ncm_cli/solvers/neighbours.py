"""Nearest rows: neighbours by cosine or Euclidean distance, and rows that are nearly copies of others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Codes, Features, applied, slices

Float32 = NDArray[np.float32]

BLOCK_ROWS = 1024
BLOCK_COLUMNS = 8192
"""Candidates that are compared at a time: 1024 × 8192 similarities in float32 are 32 MiB."""

SHORTLIST = 4
"""How many candidates, the most similar ones in float32, are ranked again in float64 to order close ones."""


def normalized_rows(features: Features, metric: str) -> Features:
    """Rows for a neighbour search: of unit length for ``cosine``, centred for ``euclidean``.

    Centring leaves distances unchanged and lets float32 resolve them better. A zero row stays zero and has
    cosine 0 with every row.
    """
    centre = np.zeros(features.shape[1])
    for block in slices(features, BLOCK_COLUMNS) if metric == "euclidean" else ():
        centre += features[block].sum(axis=0, dtype=np.float64)
    shift = (centre / max(len(features), 1)).astype(np.float32)

    def prepared(rows: NDArray[np.floating]) -> Float32:
        rows = np.asarray(rows, np.float32)
        if metric == "euclidean":
            return rows - shift
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
        return rows / np.where(norms == 0, 1, norms).astype(np.float32)[:, None]

    return applied(features, prepared)


def nearest_rows(
    rows: Features, queries: Codes, candidates: Codes, metric: str, codes: Codes
) -> tuple[Codes, Array]:
    """For each of a block of queries, the nearest candidate of another code (rows,), and its distance.

    Candidates are ascending. The result is −1 and infinity for a query without such a candidate. A shortlist
    by float32 similarity is ranked in float64. scikit-learn's search can't exclude codes, doesn't take the
    first of equally near rows, and isn't faster.
    """
    keep = min(SHORTLIST, len(candidates))
    best = np.full((len(queries), keep), -np.inf, dtype=np.float32)
    where = np.full((len(queries), keep), -1, dtype=np.int64)
    wanted, index = rows[queries], np.arange(len(queries))
    for part in slices(candidates, BLOCK_COLUMNS):
        chunk = candidates[part]
        keys = rows[chunk]
        score = wanted @ keys.T
        if metric == "euclidean":
            # Equals −distance²/2 up to a constant, since |q|² is the same for the whole row.
            score -= 0.5 * np.einsum("ij,ij->i", keys, keys)
        score[codes[chunk][None, :] == codes[queries][:, None]] = -np.inf
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
    exact, keys = wanted[:, None].astype(np.float64), rows[where.reshape(-1)].reshape(*where.shape, -1)
    if metric == "euclidean":
        distance = np.sqrt(((exact - keys) ** 2).sum(axis=2))
    else:
        distance = 1 - (exact * keys).sum(axis=2)
    distance[where < 0] = np.inf
    least = distance.min(axis=1)
    # For distances equal up to float32 rounding the first row is taken, whatever the block sizes.
    tied = (distance <= least[:, None] + 1e-12) & (where >= 0)
    first = np.where(tied, where, len(rows)).min(axis=1)
    return np.where(np.isfinite(least), first, -1), least


NEAR_COSINE = 0.95
"""The least cosine of nearly equal rows. Of 2,780 PACS pictures with EfficientNet-Lite0's features, four
pairs reach it; each is one picture twice: mirrored, re-encoded or with another watermark. The next pair, of
.946, is two different drawings."""

NEAR_SHARE = 0.1
"""The most that nearly equal rows may differ (1 − cosine), as a share of how much a row typically differs
from its nearest row of another class. Encoders with similar features for all pictures give different
pictures a cosine of `NEAR_COSINE` or more: raw pixels of 8 × 8 digits do so for 60 % of the rows."""

MAX_PRODUCTS = 1e11
"""Most multiplications of a search for nearly equal rows, six seconds on one core; for more, queries are
sampled."""


@dataclasses.dataclass(frozen=True, slots=True)
class NearCopies:
    """Queries that nearly equal a candidate, the most similar first."""

    threshold: float
    """The cosine from which rows are nearly equal: see `NEAR_COSINE` and `NEAR_SHARE`."""
    queries: Codes
    candidates: Codes
    """(m,) the queries and their nearest candidates."""
    cosines: Array
    all_candidates: Codes
    """Every candidate that a query nearly equals, ascending."""
    compared: int
    """How many queries were compared: those asked for, or a random sample."""

    @property
    def bound(self) -> str:
        """The threshold in three digits, rounded down, so that it isn't 1."""
        return f"{math.floor(self.threshold * 1000 + 1e-6) / 1000:.3f}"


def near_copies(
    rows: Features, queries: Codes, candidates: Codes, classes: Codes, *, most: float | None = None
) -> NearCopies:
    """The queries with a nearly equal candidate.

    Parameters
    ----------
    rows
        (n, d) from `normalized_rows` with ``cosine``; zero rows equal nothing.
    queries, candidates
        Positions among the rows, ascending.
    classes
        (n,) a code for each row, −1 where it has none; all −1 if rows have no classes.
    most
        The most multiplications, by default `MAX_PRODUCTS`.
    """
    work = MAX_PRODUCTS if most is None else most
    affordable = int(work // max(len(candidates) * rows.shape[1], 1))
    if affordable < len(queries):
        queries = np.sort(np.random.default_rng(0).choice(queries, max(affordable, 1), replace=False))
    nearest, nearest_other = np.full((2, len(queries)), -1.0, np.float32)
    for part, block in _scored(rows, queries, candidates):
        for score, chunk in block:
            order = np.argsort(classes[chunk], kind="stable")
            codes = classes[chunk][order]
            starts = np.flatnonzero(np.diff(codes, prepend=codes[0] - 1))
            highest = np.maximum.reduceat(score[:, order], starts, axis=1)
            nearest[part] = np.maximum(nearest[part], highest.max(axis=1))
            highest[codes[starts][None, :] == classes[queries[part]][:, None]] = -1.0
            nearest_other[part] = np.maximum(nearest_other[part], highest.max(axis=1))
    known = (classes[queries] >= 0) & (nearest_other > -1)
    typical = float(np.median(nearest_other[known] if known.any() else nearest)) if len(queries) else 0.0
    threshold = max(NEAR_COSINE, 1 - NEAR_SHARE * (1 - typical))
    near_queries = queries[nearest >= threshold]
    mask = np.zeros(len(candidates), dtype=bool)
    for _, block in _scored(rows, near_queries, candidates):
        done = 0
        for score, chunk in block:
            mask[done : done + len(chunk)] |= (score >= threshold).any(axis=0)
            done += len(chunk)
    every = np.arange(len(rows))
    parts = [
        nearest_rows(rows, near_queries[part], candidates, "cosine", every)
        for part in slices(near_queries, BLOCK_ROWS)
    ]
    partners = np.concatenate([np.empty(0, np.int64), *(partner for partner, _ in parts)])
    cosines = 1 - np.concatenate([np.empty(0), *(distance for _, distance in parts)])
    order = np.argsort(-cosines, kind="stable")
    return NearCopies(
        threshold, near_queries[order], partners[order], cosines[order], candidates[mask], len(queries)
    )


def _scored(
    rows: Features, queries: Codes, candidates: Codes
) -> Iterator[tuple[slice, Iterator[tuple[Float32, Codes]]]]:
    """For blocks of queries, their cosines (b, c) with chunks of candidates (c,)."""
    for part in slices(queries, BLOCK_ROWS):
        wanted = rows[queries[part]]
        chunks = (candidates[chunk] for chunk in slices(candidates, BLOCK_COLUMNS))
        yield part, ((np.asarray(wanted @ rows[chunk].T, np.float32), chunk) for chunk in chunks)


def most_similar(rows: Features, queries: Codes, candidates: Codes, count: int) -> tuple[Codes, Array]:
    """(q, k) the candidates with the highest cosines to each query, and these cosines, in descending order.

    ``rows`` are from `normalized_rows` with ``cosine``; k is ``count``, or the number of candidates if that
    is smaller.
    """
    count = min(count, len(candidates))
    best = np.full((len(queries), count), -np.inf, np.float32)
    where = np.zeros((len(queries), count), np.int64)
    for part, block in _scored(rows, queries, candidates):
        for score, chunk in block:
            scores = np.concatenate([best[part], score], axis=1)
            places = np.concatenate([where[part], np.broadcast_to(chunk, score.shape)], axis=1)
            top = np.argsort(-scores, axis=1, kind="stable")[:, :count]
            best[part] = np.take_along_axis(scores, top, axis=1)
            where[part] = np.take_along_axis(places, top, axis=1)
    return where, best.astype(np.float64)
