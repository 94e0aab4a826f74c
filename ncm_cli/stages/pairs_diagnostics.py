"""What a pair store says about its pairs, as JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods import diagnostics as methods
from ncm_cli.methods.projection import Spectrum
from ncm_cli.progress import Reporter
from ncm_cli.stages.pairs_members import Members
from ncm_cli.store.features import Column, FeatureStore

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
    same = methods.identical(delta)
    again = methods.repeated(members.a, members.b, either_way=store_a is store_b)
    unlike = _label_disagreement(store_a, store_b, members)
    residual = methods.unexplained(delta, together, seed=seed)

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
