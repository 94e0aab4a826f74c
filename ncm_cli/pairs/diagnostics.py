"""Can these pairs be trusted? Repeats, pairs without a difference, and likely wrong matches.

What a pair store says about its pairs, as JSON values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.pairs.table import Members
from ncm_cli.probes.projection import Spectrum, svd
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import Column
from ncm_cli.store.features import FeatureStore

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


LISTED = 1000
"""Pairs that one diagnostic names; its count is always of all of them."""

SUSPECTS = 0.15
"""Share of the pairs that the list of likely wrong matches holds."""


def diagnose(
    store_a: FeatureStore,
    store_b: FeatureStore,
    members: Members,
    delta: NDArray[np.float32],
    together: NDArray[np.int64],
    found: Spectrum,
    straddlers: list[tuple[str, str]],
    *,
    seed: int,
    reporter: Reporter,
) -> dict[str, Any]:
    """All diagnostics of k pairs with differences ``delta`` (d, k); warns of those that need a look."""
    same = identical(delta)
    again = repeated(members.a, members.b, either_way=store_a is store_b)
    unlike = _label_disagreement(store_a, store_b, members)
    residual = unexplained(delta, together, seed=seed)

    def named(chosen: Iterable[int]) -> list[dict[str, Any]]:
        return [
            {"id_a": store_a.ids[members.a[j]], "id_b": store_b.ids[members.b[j]]}
            for j in list(chosen)[:LISTED]
        ]

    def flagged(mask: NDArray[np.bool_]) -> dict[str, Any]:
        return {"count": int(mask.sum()), "pairs": named(np.flatnonzero(mask).tolist())}

    known = np.flatnonzero(~np.isnan(residual))
    order = known[np.argsort(-residual[known], kind="stable")]
    listed = order[: min(LISTED, max(10, int(np.ceil(SUSPECTS * len(order)))))].tolist()
    suspects = [
        {**name, "residual": float(residual[j])} for name, j in zip(named(listed), listed, strict=True)
    ]
    _warn(reporter, len(members), same, again, unlike)
    return {
        "pairs": len(members),
        "held_out": 0 if members.holdout is None else int(members.holdout.sum()),
        "rank": found.rank,
        "tolerance": found.tolerance,
        "gap": found.gap,
        "gap_ratio": _gap_ratio(found),
        "label_disagreement": None if unlike is None else flagged(unlike),
        "straddling": {
            "count": len(straddlers),
            "pairs": [{"id_a": a, "id_b": b} for a, b in straddlers[:LISTED]],
        },
        "repeated": flagged(again),
        "identical": flagged(same),
        "suspects": suspects,
        "median_residual": float(np.median(residual[known])) if len(known) else None,
        "matching": members.facts,
    }


def _warn(
    reporter: Reporter,
    n: int,
    same: NDArray[np.bool_],
    again: NDArray[np.bool_],
    unlike: NDArray[np.bool_] | None,
) -> None:
    if again.any():
        reporter.warn(f"{int(again.sum())} of {n} pairs repeat an earlier one and count twice")
    if same.all():
        reporter.warn("no pair's members differ in their features: nothing can be removed")
    elif same.any():
        reporter.warn(f"{int(same.sum())} of {n} pairs have members with identical features")
    if unlike is not None and unlike.any():
        reporter.warn(f"the members of {int(unlike.sum())} of {n} pairs have different labels")


def _label_disagreement(
    store_a: FeatureStore, store_b: FeatureStore, members: Members
) -> NDArray[np.bool_] | None:
    """(k,) pairs whose labels are both known and differ; None where there are no labels to compare."""
    texts = []
    for store, rows in ((store_a, members.a), (store_b, members.b)):
        if store.label_column is None:
            return None
        column = store.columns[store.label_column]
        if not isinstance(column, Column):
            return None
        names = np.array([*column.categories, ""], dtype=object)
        texts.append(names[column.codes[rows]])
    return (texts[0] != texts[1]) & (texts[0] != "") & (texts[1] != "")


def _gap_ratio(found: Spectrum) -> float | None:
    """How much larger the singular value at the gap is than the one behind it (at least the tolerance)."""
    if found.gap == 0:
        return None
    values = found.singular_values
    behind = float(values[found.gap]) if found.gap < len(values) else 0.0
    floor = max(behind, found.tolerance)
    return float(values[found.gap - 1]) / floor if floor > 0 else None
