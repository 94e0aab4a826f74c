"""The pair store: matched rows, and the spectrum of differences of the pairs that aren't held out."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError
from ncm_cli.store.digests import (
    array_digest,
    canonical_json,
    damaged,
    digest_of,
    encode_text,
    fingerprint,
    text_digest,
)
from ncm_cli.store.files import Shown, jsonable, now
from ncm_cli.store.hdf5 import H5Reader, writing

FORMAT = "ncm-pairs"
VERSION = 2
"""Version 1 also held ``delta`` and the left singular vectors ``basis``, which follow from the members."""

TEXT = "text"
"""The strategy of pairs of prompts: the ids are the prompts, and there are no rows or pictures."""

SAME_ID = "same-id"
"""The strategy that pairs rows with the same id in two stores: a row and its view, or two measurements."""

COUNTERFACTUAL, MATCHED = "counterfactual", "matched"
"""Values of the option ``kind``: pairs of one thing seen twice, or of two different rows with one label."""


class _Options(TypedDict, total=False):
    kind: str | None
    features: str
    features_b: str | None
    same: str | None
    across: str | None
    where: str | None


class _Source(TypedDict, total=False):
    path: str
    content_sha256: str
    augment: str
    row_numbers_of: str


class _Ids(TypedDict):
    id_a: str
    id_b: str


class _Suspect(_Ids):
    residual: float


class _Flagged(TypedDict, total=False):
    count: int
    pairs: list[_Ids]


class _Diagnostics(TypedDict, total=False):
    label_disagreement: _Flagged | None
    straddling: _Flagged | None
    repeated: _Flagged | None
    identical: _Flagged | None
    dropped: list[_Ids] | None
    suspects: list[_Suspect] | None
    median_residual: float | None
    matching: dict[str, Any]


_ARRAYS = {"features_a": np.float32, "features_b": np.float32, "holdout": bool, "singular_values": np.float64}
_TEXTS = ("id_a", "id_b", "label_a", "label_b")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PairStore(Shown):
    """k pairs of rows (a, b), features of width d, in the order in which they were matched."""

    features_a: np.ndarray
    """float32 (k, d), unscaled."""
    features_b: np.ndarray
    """float32 (k, d), unscaled."""
    id_a: tuple[str, ...]
    id_b: tuple[str, ...]
    label_a: tuple[str, ...]
    """The label of each pair's first member, "" if unknown."""
    label_b: tuple[str, ...]
    holdout: np.ndarray
    """bool (k,): pairs kept out of the spectrum, for choosing the rank."""
    singular_values: np.ndarray
    """float64 (m,), descending: those of the pairs that aren't held out; m is their numerical rank."""
    strategy: str
    options: dict[str, Any]
    encoder: dict[str, Any]
    fingerprint: str
    sources: list[dict[str, Any]]
    """The ``path`` and ``content_sha256`` of each feature store."""
    diagnostics: dict[str, Any]
    created: str = ""
    ncm_version: str = __version__

    def __repr__(self) -> str:
        return f"PairStore(pairs={self.pairs}, rank={self.rank}, strategy={self.strategy!r}, dim={self.dim})"

    @property
    def pairs(self) -> int:
        """k, held-out pairs included."""
        return len(self.id_a)

    @property
    def dim(self) -> int:
        """d."""
        return int(self.features_a.shape[1])

    @property
    def rank(self) -> int:
        """m, the numerical rank of the pairs that aren't held out."""
        return len(self.singular_values)

    @functools.cached_property
    def delta(self) -> np.ndarray:
        """float32 (d, k), column j = a_j − b_j."""
        with np.errstate(over="ignore"):  # infinite differences are refused on writing and reading
            return np.ascontiguousarray((self.features_a - self.features_b).T)

    @functools.cached_property
    def content_sha256(self) -> str:
        """SHA-256 over members, ids, labels, held-out marks and encoder: equal for equal pairs."""
        digests = {name: text_digest(encode_text(getattr(self, name), name)) for name in _TEXTS}
        for name in ("features_a", "features_b", "holdout"):
            digests[name] = array_digest(getattr(self, name))
        return digest_of({"arrays": digests, "fingerprint": self.fingerprint, "strategy": self.strategy})


def write_pairs(path: Path | str, store: PairStore) -> None:
    """Write a pair store atomically; refuses shapes that don't agree and values that aren't finite."""
    if fault := _fault(store):
        what, found, expected = fault
        raise InputError(what, where=path, found=found, expected=expected)
    with writing(path, FORMAT, VERSION) as writer:
        for name, dtype in _ARRAYS.items():
            writer.array(name, np.asarray(getattr(store, name), dtype=dtype))
        for name in _TEXTS:
            writer.text(name, getattr(store, name), what=name.replace("_", " of member "))
        for name in ("options", "sources", "diagnostics"):
            writer.json(name, jsonable(getattr(store, name)))
        writer.attrs |= {
            "created": store.created or now(),
            "strategy": store.strategy,
            "encoder": canonical_json(store.encoder),
            "encoder_fingerprint": store.fingerprint,
            "content_sha256": store.content_sha256,
        }


def read_pairs(path: Path | str) -> PairStore:
    """Read a pair store and check all its arrays; raises `InputError` for another or a damaged file."""
    with H5Reader(path, FORMAT, VERSION, what="a pair store") as h5:
        k, d = (int(n) for n in h5.dataset("features_a", ndim=2, kinds="f").shape)
        shapes = {"features_a": (k, d), "features_b": (k, d), "holdout": (k,), "singular_values": (None,)}
        held: dict[str, Any] = {name: h5.array(name, _ARRAYS[name], shape=shapes[name]) for name in _ARRAYS}
        held |= {name: h5.texts(name, rows=k) for name in _TEXTS}
        held |= {name: str(h5.attrs.get(name, "")) for name in ("strategy", "created", "ncm_version")}
        store = PairStore(
            **held,
            options=dict(h5.json("options", _Options)),
            encoder=h5.encoder,
            fingerprint=fingerprint(h5.encoder),
            sources=list(h5.json("sources", list[_Source])),
            diagnostics=dict(h5.json("diagnostics", _Diagnostics)),
        )
        if fault := _fault(store):
            raise damaged(h5.path, f"{fault[0]}: {fault[1]}")
        if h5.attrs.get("content_sha256", store.content_sha256) != store.content_sha256:
            raise damaged(h5.path, "contents that don't match content_sha256")
        return store


def _fault(store: PairStore) -> tuple[str, object, object] | None:
    """(what, found, expected) if the arrays of a store contradict one another; None if they don't."""
    k, d = store.pairs, store.dim
    if not k or not d:
        return "no pairs to store", f"{k} pairs of width {d}", None
    for name, shape in {"features_a": (k, d), "features_b": (k, d), "holdout": (k,)}.items():
        if np.shape(getattr(store, name)) != shape:
            return f"{name} of the wrong shape", np.shape(getattr(store, name)), shape
    for name in _TEXTS:
        if len(getattr(store, name)) != k:
            return f"{name} of the wrong length", len(getattr(store, name)), k
    for name in ("features_a", "features_b", "delta"):
        values = store.delta.T if name == "delta" else getattr(store, name)
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            pair = f"pair {store.id_a[bad[0]]!r}, {store.id_b[bad[0]]!r} ({len(bad)} in all)"
            return f"{name} that aren't finite numbers", pair, None
    if not np.isfinite(store.singular_values).all():
        return "singular_values that aren't finite numbers", "NaN or an infinity", None
    if fingerprint(store.encoder) != store.fingerprint:
        return "a fingerprint of another encoder", store.fingerprint, None
    return None
