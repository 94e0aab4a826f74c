"""Diagnostics of pairs as JSON values: repeats, unlike labels, likely wrong matches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.pairs.members import Members, Positions, repeated
from ncm_cli.progress import Reporter
from ncm_cli.solvers.folds import deal_sets
from ncm_cli.solvers.projection import Spectrum
from ncm_cli.store.columns import Column

Array = NDArray[np.float64]

FOLDS = 5
PASSES = 3
KEPT_SHARE = 0.75
"""The share of the pairs, those that others explain best, from which the next pass explains all pairs."""

FLOORS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Candidates for λ, the least variance in any direction of differences of unit length."""

BLOCK_PAIRS = 8192
"""Pairs that are converted to float64 at a time."""

MAX_NAMED = 1000
"""Most pairs that one diagnostic names; its count includes all."""

MIN_SUSPECTS = 0.15
"""The list of likely wrong matches has at least this share of the pairs."""

MIN_TIMES, MIN_RESIDUAL = 2.0, 0.1
"""A pair stands out if its unexplained part is at least this many times as long as the median's, and at least
this share of its own length. The second condition ignores rounding if the others explain all pairs."""


def diagnose(
    members: Members,
    labels: list[tuple[str, ...]],
    delta: NDArray[np.float32],
    together: Positions,
    spectrum: Spectrum,
    seed: int,
    reporter: Reporter,
) -> dict[str, Any]:
    """All diagnostics of k pairs with differences ``delta`` (d, k); warns of pairs to look at."""
    n, values = len(members), spectrum.singular_values
    identical = np.asarray(~delta.any(axis=0))
    repeats = repeated(members.a, members.b, either_way=members.stores[0] is members.stores[1])
    unlike = None
    names = [store.label_column for store in members.stores]
    if all(
        name and isinstance(s.columns[name], Column) for s, name in zip(members.stores, names, strict=True)
    ):
        a, b = (np.array(of_members, dtype=object) for of_members in labels)
        unlike = (a != b) & (a != "") & (b != "")
    if repeats.any():
        reporter.warn(f"{int(repeats.sum())} of {n} pairs repeat an earlier one and count twice")
    if identical.all():
        reporter.warn("no pair's members differ in their features: nothing can be removed")
    elif identical.any():
        reporter.warn(f"{int(identical.sum())} of {n} pairs have members with identical features")
    if unlike is not None and unlike.any():
        reporter.warn(f"the members of {int(unlike.sum())} of {n} pairs have different labels")
    residual = unexplained(delta, together, seed=seed)
    known = np.flatnonzero(~np.isnan(residual))
    length = residual * np.sqrt(np.einsum("dk,dk->k", delta, delta, dtype=np.float64))
    times = length / np.median(length[known]) if len(known) else length
    outstanding = int(stands_out(times[known], residual[known]).sum())
    order = known[np.argsort(-times[known], kind="stable")]
    suspects = order[: min(MAX_NAMED, max(10, outstanding, int(np.ceil(MIN_SUSPECTS * len(order)))))]
    # The singular value after the gap, or the tolerance if that is larger.
    floor = max([spectrum.tolerance, *values[spectrum.gap : spectrum.gap + 1].tolist()])

    def flagged(mask: NDArray[np.bool_]) -> dict[str, Any]:
        return _listed(members.ids(np.flatnonzero(mask)[:MAX_NAMED]), int(mask.sum()))

    return {
        "pairs": n,
        "held_out": 0 if members.holdout is None else int(members.holdout.sum()),
        "rank": spectrum.rank,
        "tolerance": spectrum.tolerance,
        "gap": spectrum.gap,
        "gap_ratio": float(values[spectrum.gap - 1]) / floor if spectrum.gap and floor > 0 else None,
        "label_disagreement": None if unlike is None else flagged(unlike),
        "straddling": _listed(members.straddlers, len(members.straddlers)),
        "dropped": [{"id_a": a, "id_b": b} for a, b in members.dropped],
        "repeated": flagged(repeats),
        "identical": flagged(identical),
        "suspects": [
            {"id_a": a, "id_b": b, "residual": float(residual[j]), "times": float(times[j])}
            for (a, b), j in zip(members.ids(suspects), suspects, strict=True)
        ],
        "stand_out": outstanding,
        "median_residual": float(np.median(residual[known])) if len(known) else None,
        "matching": members.facts,
    }


def _listed(ids: Sequence[tuple[str, str]], count: int) -> dict[str, Any]:
    return {"count": count, "pairs": [{"id_a": a, "id_b": b} for a, b in ids[:MAX_NAMED]]}


def stands_out(times: Any, residual: Any) -> Any:
    """Whether pairs stand out, by unexplained length over the median's (``times``) and over their own."""
    return (times > MIN_TIMES) & (residual > MIN_RESIDUAL)


def unexplained(delta: NDArray[np.floating], together: Positions, *, seed: int = 0) -> Array:
    """The share of each pair's difference that the others don't explain: (k,) in [0, 1], NaN for zero ones.

    The pairs are dealt into folds. Differences are scaled to unit length, so that a few long ones don't count
    more, and modelled as draws from N(0, S + λ I), where S is the second moment in the *other* folds.
    A pair's share is the root of ``λ δᵀ (S + λ I)⁻¹ δ / ‖δ‖²``: for small λ the part of its length outside
    the span of the others. λ is the value of `FLOORS` with the highest likelihood.

    The members of a right match differ along directions that the right matches share. Those of a wrong match
    also differ in what the pictures show, which adds directions of its own to S. So the estimate is repeated
    without the pairs with the longest unexplained parts: the concentration steps of Rousseeuw and Van
    Driessen (1999), A fast algorithm for the minimum covariance determinant estimator.

    Parameters
    ----------
    delta
        (d, k) differences.
    together
        (k,) pairs with the same number stay in one fold: they share a row, so one would explain the other.
    """
    d, k = delta.shape
    norms = np.sqrt(np.einsum("dk,dk->k", delta, delta, dtype=np.float64))
    live = np.flatnonzero(norms > 0)
    fold = deal_sets(together, FOLDS, seed)
    # With fewer pairs than dimensions, R of QR has the same angles in fewer dimensions.
    rows: NDArray[Any] = np.asarray(np.linalg.qr(delta.astype(np.float64), mode="r")) if k < d else delta

    def unit(chosen: Positions) -> Iterator[tuple[Positions, Array]]:
        for start in range(0, len(chosen), BLOCK_PAIRS):
            part = chosen[start : start + BLOCK_PAIRS]
            yield part, rows[:, part].astype(np.float64) / norms[part]

    floors = np.array(FLOORS)[:, None]
    share, kept = np.full(k, np.nan), live
    for _ in range(PASSES):
        parts = [kept[fold[kept] == number] for number in range(FOLDS)]
        moments = [sum(u @ u.T for _, u in unit(part)) for part in parts]
        left, fit = np.ones((len(FLOORS), k)), np.zeros((len(FLOORS), k))
        for number in range(FOLDS):
            n = max(1, len(kept) - len(parts[number]))
            others = sum(moments[:number] + moments[number + 1 :], np.zeros((len(rows), len(rows))))
            values, basis = np.linalg.eigh(others / n)
            spread = np.maximum(values, 0) + floors
            size = np.log(spread).sum(axis=1, keepdims=True) + (d - len(rows)) * np.log(floors)
            for part, u in unit(live[fold[live] == number]):
                left[:, part] = (floors / spread) @ (basis.T @ u) ** 2
                fit[:, part] = size + left[:, part] / floors
        share = np.sqrt(left[fit[:, kept].sum(axis=1).argmin()])
        length = share * norms
        kept = live[length[live] <= np.quantile(length[live], KEPT_SHARE)] if len(live) else live
    share[norms == 0] = np.nan
    return np.minimum(share, 1)
