"""Pairs of a page that are likely wrong, as pictures side by side, for a person to keep or to drop."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ncm_cli.options import command_words
from ncm_cli.pairs.options import PairsOptions
from ncm_cli.pairs.pairs import STANDS_OUT
from ncm_cli.results.pictures import Pictures, Tile
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import PairStore

SHOWN, NEXT = 200, 24
"""Most suspicious pairs of one store that are shown, and of those that are next in the ranking."""

SIDE = 144
"""Pixels of a picture: a pair is judged by details."""

BUDGET = 1_500_000
"""Bytes of the pictures of one page's pairs."""

FLAGS = {
    "label_disagreement": "the labels differ",
    "straddling": "a training row with a test row",
    "identical": "the members have the same features",
    "repeated": "listed more than once: dropping it drops every copy",
}
"""Diagnostics that name pairs, and what they say of one."""

Ids = tuple[str, str]


def look(path: Path, store: PairStore, found: Sequence[Any], pictures: Pictures) -> dict[str, Any]:
    """The doubtful pairs of a store, the most doubtful first, for the template.

    ``found`` are its feature stores, each with ``made`` or ``why`` not. The page's list to drop has to name
    again what was ``dropped`` when the store was made.
    """
    at = {ids: j for j, ids in enumerate(zip(store.id_a, store.id_b, strict=True))}
    told = store.diagnostics
    median = told.get("median_residual") or 1.0
    times: dict[Ids, float] = {}
    share: dict[Ids, float] = {}
    reasons: dict[Ids, list[str]] = {}
    for pair in told.get("suspects") or []:
        ids = (pair["id_a"], pair["id_b"])
        share[ids], times[ids] = pair["residual"], pair.get("times", pair["residual"] / median)
        stands_out = times[ids] > STANDS_OUT[0] and share[ids] > STANDS_OUT[1]
        reasons[ids] = [f"{times[ids]:.1f} times as much is unexplained as in the median pair"] * stands_out
    for name, text in FLAGS.items():
        for pair in (told.get(name) or {}).get("pairs", []):
            if (ids := (pair["id_a"], pair["id_b"])) in at:
                reasons.setdefault(ids, []).append(text)
    # Those of equal standing stay in the order in which they were found.
    ranked = sorted(reasons, key=lambda ids: (not reasons[ids], -times.get(ids, 0)))
    suspicious = sum(map(bool, reasons.values()))
    shown = [*ranked[: min(suspicious, SHOWN)], *ranked[suspicious:][:NEXT]]
    stores = (found[0].made, found[-1].made) if found else (None, None)
    made = [
        {
            "tiles": [_tile(pictures, own, id) for own, id in zip(stores, ids, strict=True)],
            "labels": (store.label_a[at[ids]], store.label_b[at[ids]]),
            "share": share.get(ids),
            "reasons": reasons[ids] or [f"{times[ids]:.1f} times the median"],
            "suspicious": bool(reasons[ids]),
            "held_out": bool(store.holdout[at[ids]]),
        }
        for ids in shown
        if ids in at
    ]
    options = {name: value for name, value in store.options.items() if name != "drop"}
    words = command_words(PairsOptions, options) if options.get("features") else []
    return {
        "path": path,
        "pairs": made,
        "suspicious": suspicious,
        "more": max(0, suspicious - SHOWN),
        "of": store.pairs,
        "dropped": [(pair["id_a"], pair["id_b"]) for pair in told.get("dropped") or []],
        "command": shlex.join(["ncm", "pairs", *words, "--drop", "drop.csv"]) if words else "",
        "missing": "; ".join(one.why for one in found if one.why),
    }


def _tile(pictures: Pictures, store: FeatureStore | None, id: str) -> Tile:
    if store is None:
        return Tile(id, None, "the feature store isn't there")
    return dataclasses.replace(pictures.row(store, int(store.positions([id])[0])), id=id)
