"""Can these pairs be trusted? Repeats, pairs without a difference, and likely wrong matches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods.svd import svd

Array = NDArray[np.float64]
Codes = NDArray[np.int64]

LEADING = 16
"""Directions of the other pairs that should explain a right match's difference."""

FOLDS = 5
BLOCK = 8192
"""Pairs that are turned to float64 at a time."""


def identical(delta: NDArray[np.floating]) -> NDArray[np.bool_]:
    """(k,) pairs whose two members have the same features, so that they say nothing; ``delta`` is (d, k)."""
    return np.asarray(~delta.any(axis=0))


def repeated(a: Codes, b: Codes, *, either_way: bool) -> NDArray[np.bool_]:
    """(k,) pairs that repeat an earlier one, also the other way round with ``either_way``."""
    keys = np.stack([np.minimum(a, b), np.maximum(a, b)]) if either_way else np.stack([a, b])
    _, first = np.unique(keys, axis=1, return_index=True)
    again = np.ones(len(a), dtype=bool)
    again[first] = False
    return again


def unexplained(
    delta: NDArray[np.floating],
    together: Codes,
    *,
    leading: int = LEADING,
    folds: int = FOLDS,
    seed: int = 0,
) -> Array:
    """How little of each pair's difference the other pairs explain: (k,) in [0, 1], NaN without a difference.

    The pairs are dealt into folds. A pair's residual is ``‖δ − U Uᵀ δ‖ / ‖δ‖`` where U holds the
    leading left singular vectors of the differences in the *other* folds, each scaled to unit
    length so that a few long ones (wrong matches tend to be long) don't take the leading
    directions. A right match moves along the directions that the right matches share; a wrong one
    also changes what the picture shows.

    Parameters
    ----------
    delta
        (d, k) differences.
    together
        (k,) pairs with the same number stay in one fold (they share a row, so one would explain the other).
    leading
        Directions; fewer where the other folds have fewer than twice as many pairs, so that the
        wrong ones among them can't be explained by themselves.
    """
    d, k = delta.shape
    norms = np.sqrt(np.einsum("dk,dk->k", delta, delta, dtype=np.float64))
    fold = _deal(together, folds, seed)
    residual = np.full(k, np.nan)
    live = norms > 0
    for number in np.unique(fold):
        inside, others = live & (fold == number), live & (fold != number)
        if not inside.any():
            continue
        count = min(leading, d, int(others.sum()) // 2)
        basis = _leading(delta, norms, np.flatnonzero(others), count)
        for start in range(0, k, BLOCK):
            part = np.flatnonzero(inside[start : start + BLOCK]) + start
            unit = delta[:, part].astype(np.float64) / norms[part]
            explained = ((basis.T @ unit) ** 2).sum(axis=0)
            residual[part] = np.sqrt(np.clip(1 - explained, 0, 1))
    return residual


def _deal(together: Codes, folds: int, seed: int) -> Codes:
    """(k,) a fold for each pair; at most ``folds``, of about the same number of sets of pairs."""
    sets = int(together.max()) + 1 if len(together) else 0
    order = np.random.default_rng(seed).permutation(sets)
    of_set = np.empty(sets, dtype=np.int64)
    of_set[order] = np.arange(sets) % folds
    return of_set[together]


def _leading(delta: NDArray[np.floating], norms: Array, chosen: Codes, count: int) -> Array:
    """(d, count) leading left singular vectors of the chosen differences at unit length."""
    d = len(delta)
    if count == 0:
        return np.zeros((d, 0))
    if len(chosen) <= d:
        unit = delta[:, chosen].astype(np.float64) / norms[chosen]
        return svd(unit)[0][:, :count]
    gram = np.zeros((d, d))
    for start in range(0, len(chosen), BLOCK):
        part = chosen[start : start + BLOCK]
        unit = delta[:, part].astype(np.float64) / norms[part]
        gram += unit @ unit.T
    # Squaring costs digits only in the small directions, and only the leading ones are used.
    return np.linalg.eigh(gram)[1][:, ::-1][:, :count]
