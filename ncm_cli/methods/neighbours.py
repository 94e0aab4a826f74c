"""Nearest neighbours among many rows, in blocks."""

from __future__ import annotations

from collections.abc import Callable

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
