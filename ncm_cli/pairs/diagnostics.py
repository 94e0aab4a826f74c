"""What speaks for and against pairs: repeats, unlike labels, and likely wrong matches, as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.pairs.members import Members, Rows, repeated
from ncm_cli.progress import Reporter
from ncm_cli.solvers.projection import Spectrum
from ncm_cli.store.columns import Column

Array = NDArray[np.float64]

FOLDS = 5
PASSES = 3
KEPT = 0.75
"""Share of the pairs, those that the others explain best, that explain all in the next pass."""

FLOORS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Variances that differences of unit length may have in every direction."""

BLOCK = 8192
"""Pairs that are turned to float64 at a time."""

LISTED = 1000
"""Pairs that one diagnostic names; its count is always of all of them."""

SUSPECTS = 0.15
"""Share of the pairs that the list of likely wrong matches holds at least."""

STANDS_OUT = (2.0, 0.1)
"""A pair that stands out has an unexplained part of more than this many times the median length, and of more
than this share of its own: where all are explained but for a rounding, none is wrong."""


def diagnose(
    members: Members,
    labels: list[tuple[str, ...]],
    delta: NDArray[np.float32],
    together: Rows,
    found: Spectrum,
    seed: int,
    reporter: Reporter,
) -> dict[str, Any]:
    """All diagnostics of k pairs with differences ``delta`` (d, k); warns of those that need a look."""
    n, values = len(members), found.singular_values
    same = np.asarray(~delta.any(axis=0))
    again = repeated(members.a, members.b, either_way=members.stores[0] is members.stores[1])
    unlike = None
    names = [store.label_column for store in members.stores]
    if all(
        name and isinstance(s.columns[name], Column) for s, name in zip(members.stores, names, strict=True)
    ):
        a, b = (np.array(own, dtype=object) for own in labels)
        unlike = (a != b) & (a != "") & (b != "")
    if again.any():
        reporter.warn(f"{int(again.sum())} of {n} pairs repeat an earlier one and count twice")
    if same.all():
        reporter.warn("no pair's members differ in their features: nothing can be removed")
    elif same.any():
        reporter.warn(f"{int(same.sum())} of {n} pairs have members with identical features")
    if unlike is not None and unlike.any():
        reporter.warn(f"the members of {int(unlike.sum())} of {n} pairs have different labels")
    residual = unexplained(delta, together, seed=seed)
    known = np.flatnonzero(~np.isnan(residual))
    length = residual * np.sqrt(np.einsum("dk,dk->k", delta, delta, dtype=np.float64))
    times = length / np.median(length[known]) if len(known) else length
    out = known[(times[known] > STANDS_OUT[0]) & (residual[known] > STANDS_OUT[1])]
    order = known[np.argsort(-times[known], kind="stable")]
    suspects = order[: min(LISTED, max(10, len(out), int(np.ceil(SUSPECTS * len(order)))))]
    # How much larger the singular value at the gap is than the one behind it (at least the tolerance).
    floor = max([found.tolerance, *values[found.gap : found.gap + 1].tolist()])

    def flagged(mask: NDArray[np.bool_]) -> dict[str, Any]:
        return _listed(members.ids(np.flatnonzero(mask)[:LISTED]), int(mask.sum()))

    return {
        "pairs": n,
        "held_out": 0 if members.holdout is None else int(members.holdout.sum()),
        "rank": found.rank,
        "tolerance": found.tolerance,
        "gap": found.gap,
        "gap_ratio": float(values[found.gap - 1]) / floor if found.gap and floor > 0 else None,
        "label_disagreement": None if unlike is None else flagged(unlike),
        "straddling": _listed(members.straddlers, len(members.straddlers)),
        "dropped": [{"id_a": a, "id_b": b} for a, b in members.dropped],
        "repeated": flagged(again),
        "identical": flagged(same),
        "suspects": [
            {"id_a": a, "id_b": b, "residual": float(residual[j]), "times": float(times[j])}
            for (a, b), j in zip(members.ids(suspects), suspects, strict=True)
        ],
        "stand_out": len(out),
        "median_residual": float(np.median(residual[known])) if len(known) else None,
        "matching": members.facts,
    }


def _listed(ids: Sequence[tuple[str, str]], count: int) -> dict[str, Any]:
    return {"count": count, "pairs": [{"id_a": a, "id_b": b} for a, b in ids[:LISTED]]}


def unexplained(delta: NDArray[np.floating], together: Rows, *, seed: int = 0) -> Array:
    """How little of each pair's difference the other pairs explain: (k,) in [0, 1], NaN without a difference.

    The pairs are dealt into folds. Differences of unit length, so that a few long ones don't count more, are
    taken for draws from N(0, S + λ I), where S is the second moment of those in the *other* folds. A pair's
    share is the root of ``λ δᵀ (S + λ I)⁻¹ δ / ‖δ‖²``: for small λ the part of its length that lies outside
    the span of the others. λ is the one in `FLOORS` under which the pairs are likeliest.

    A right match moves along directions that the right matches share; a wrong one also changes what the
    picture shows, and brings directions of its own into S. So this is done again without the pairs that had
    the longest unexplained parts: the concentration steps of Rousseeuw and Van Driessen (1999), A fast
    algorithm for the minimum covariance determinant estimator.

    Parameters
    ----------
    delta
        (d, k) differences.
    together
        (k,) pairs with the same number stay in one fold (they share a row, so one would explain the other).
    """
    d, k = delta.shape
    norms = np.sqrt(np.einsum("dk,dk->k", delta, delta, dtype=np.float64))
    live = np.flatnonzero(norms > 0)
    # Sets of pairs are dealt in random order, so that folds have about the same number of them.
    sets = int(together.max(initial=-1)) + 1
    of_set = np.empty(sets, dtype=np.int64)
    of_set[np.random.default_rng(seed).permutation(sets)] = np.arange(sets) % FOLDS
    fold = of_set[together]
    # Without a pair more than there are dimensions, the same angles in fewer of them.
    rows: NDArray[Any] = np.asarray(np.linalg.qr(delta.astype(np.float64), mode="r")) if k < d else delta

    def unit(chosen: Rows) -> Iterator[tuple[Rows, Array]]:
        for start in range(0, len(chosen), BLOCK):
            part = chosen[start : start + BLOCK]
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
        kept = live[length[live] <= np.quantile(length[live], KEPT)] if len(live) else live
    share[norms == 0] = np.nan
    return np.minimum(share, 1)
