"""Thumbnails of a page within a budget of bytes, and doubtful pairs side by side for a person to judge."""

from __future__ import annotations

import base64
import hashlib
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, features

from ncm_cli.images.augment import apply
from ncm_cli.images.background import again
from ncm_cli.images.decode import decode
from ncm_cli.images.options import parse_augment
from ncm_cli.images.paths import fetch
from ncm_cli.images.samples import DecodeError
from ncm_cli.options import command_words
from ncm_cli.pairs.diagnostics import stands_out
from ncm_cli.pairs.options import PairsOptions
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import TEXT, PairStore

MAX_SUSPICIOUS, MAX_NEXT = 200, 24
"""Most pairs of one store that are shown: suspicious ones, and the next in the ranking."""

PAIR_SIDE = 144
"""Pixels along a pair's pictures: details matter there."""

PAIR_BUDGET = 1_500_000
"""Bytes for the pictures of a page's pairs."""

FLAGS = {
    "label_disagreement": "the labels differ",
    "straddling": "a training row with a test row",
    "identical": "the members have the same features",
    "repeated": "listed more than once: dropping it drops every copy",
}
"""Diagnostics that name pairs, and the words of each for one pair."""

_LOSSY: tuple[str, dict[str, Any]] = (
    ("WEBP", {"quality": 75, "method": 4}) if features.check("webp") else ("JPEG", {"quality": 80})
)

Ids = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Tile:
    """A row's picture on a page."""

    id: str
    src: str | None
    """A ``data:`` URL; None if there is no picture, and ``why`` tells the reason."""
    why: str = ""
    crisp: bool = False
    """Whether it is so small that its pixels are enlarged as squares."""


class Thumbnails:
    """Thumbnails of at most ``side`` pixels, of the images as the encoder saw them; ``budget`` bytes in all.

    A picture that can't be shown raises nothing: its tile has the reason.
    """

    def __init__(self, *, side: int = 112, budget: int = 3_500_000) -> None:
        self.side, self.left = side, budget
        self._made: dict[object, tuple[str | None, str, bool]] = {}

    def row(self, store: FeatureStore | None, id: str) -> Tile:
        """The picture of a row of a store."""
        if store is None or (position := int(store.positions([id])[0])) < 0:
            return Tile(
                id, None, "the feature store isn't there" if store is None else "not in the feature store"
            )
        if (files := store.files) is None:
            return self.tile(id, None)
        encoder = dict(store.encoder) | {"beside": files.beside_of(position)}
        return self.tile(id, files.path[position], files.sha256[position], encoder=encoder)

    def tile(
        self,
        id: str,
        path: str | None,
        sha256: str | None = None,
        *,
        encoder: Mapping[str, Any] | None = None,
    ) -> Tile:
        """The picture of an image file, unless the file's digest has changed; rows of arrays have no path.

        The encoder's description gives the range of samples and the augmentation, if there are any.
        """
        if path is None:
            return Tile(id, None, "a row of an array has no picture")
        if self.left <= 0:
            return Tile(id, None, "the page is full")
        facts = encoder or {}
        view = facts.get("view") or {}
        key = (path, sha256, str(facts.get("intensity_range")), (str(view), id) if view else None)
        if key not in self._made:
            self._made[key] = self._read(
                id, path, sha256, facts.get("intensity_range"), view, facts.get("beside")
            )
        src, why, crisp = self._made[key]
        if src is not None and len(src) > self.left:
            self.left = 0  # else small pictures would still be shown among missing ones
            return Tile(id, None, "the page is full")
        self.left -= len(src or "")
        return Tile(id, src, why, crisp)

    def _read(
        self, id: str, path: str, sha256: str | None, span: Any, view: Mapping[str, Any], beside: str | None
    ) -> tuple[str | None, str, bool]:
        try:
            data = fetch(path)
            if sha256 and hashlib.sha256(data).hexdigest() != sha256:
                return None, "changed since it was embedded", False
            image = decode(data, tuple(span) if span else None)
            if beside:
                image = again(image, id, beside, view, partial(decode, span=tuple(span) if span else None))
            if view:
                image = apply(parse_augment(view["augment"]), image, seed=view["seed"], id=id)
        except DecodeError as error:
            return None, error.reason, False
        crisp = max(image.size) <= self.side // 2
        image.thumbnail((self.side, self.side), Image.Resampling.LANCZOS)
        kind, settings = ("PNG", {"optimize": True}) if crisp else _LOSSY
        stream = io.BytesIO()
        image.save(stream, kind, **settings)
        text = base64.b64encode(stream.getvalue()).decode("ascii")
        return f"data:image/{kind.lower()};base64,{text}", "", crisp


def look(path: Path, store: PairStore, located: Sequence[Any], pictures: Thumbnails) -> dict[str, Any]:
    """The doubtful pairs of a store for the template, the most doubtful first.

    ``located`` are its feature stores, each with ``content`` or ``why`` there is none. The page's list of
    pairs to drop repeats those that were ``dropped`` when the store was made.
    """
    at = {ids: j for j, ids in enumerate(zip(store.id_a, store.id_b, strict=True))}
    diagnostics = store.diagnostics
    median = diagnostics.get("median_residual") or 1.0
    times: dict[Ids, float] = {}
    share: dict[Ids, float] = {}
    reasons: dict[Ids, list[str]] = {}
    for pair in diagnostics.get("suspects") or []:
        ids = (pair["id_a"], pair["id_b"])
        share[ids], times[ids] = pair["residual"], pair.get("times", pair["residual"] / median)
        doubtful = stands_out(times[ids], share[ids])
        reasons[ids] = [f"{times[ids]:.1f} times as much is unexplained as in the median pair"] * doubtful
    for name, text in FLAGS.items():
        for pair in (diagnostics.get(name) or {}).get("pairs", []):
            if (ids := (pair["id_a"], pair["id_b"])) in at:
                reasons.setdefault(ids, []).append(text)
    # Equally doubtful pairs stay in the order in which they were found.
    ranked = sorted(reasons, key=lambda ids: (not reasons[ids], -times.get(ids, 0)))
    suspicious = sum(map(bool, reasons.values()))
    shown = [*ranked[: min(suspicious, MAX_SUSPICIOUS)], *ranked[suspicious:][:MAX_NEXT]]
    stores = (located[0].content, located[-1].content) if located else (None, None)
    pairs = [
        {
            "tiles": [
                Tile(id, None, "a text, no picture") if store.strategy == TEXT else pictures.row(of_id, id)
                for of_id, id in zip(stores, ids, strict=True)
            ],
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
        "digest": store.content_sha256,
        "pairs": pairs,
        "suspicious": suspicious,
        "more": max(0, suspicious - MAX_SUSPICIOUS),
        "of": store.pairs,
        "dropped": [(pair["id_a"], pair["id_b"]) for pair in diagnostics.get("dropped") or []],
        "command": shlex.join(["ncm", "pairs", *words, "--drop", "drop.csv"]) if words else "",
        "missing": "; ".join(file.why for file in located if file.why),
    }
