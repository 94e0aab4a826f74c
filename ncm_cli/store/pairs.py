"""The pair store: matched rows, their differences, and the spectrum of those that aren't held out."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from ncm_cli.store.files import atomic_path
from ncm_cli.store.hdf5 import H5Reader, H5Writer, reading
from ncm_cli.store.results import jsonable, now

FORMAT = "ncm-pairs"
VERSION = 1

_TEXTS = ("id_a", "id_b", "label_a", "label_b")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairStore:
    """k pairs of rows (a, b), features of width d, in the order in which they were matched."""

    features_a: np.ndarray
    """float32 (k, d), unscaled."""
    features_b: np.ndarray
    """float32 (k, d), unscaled."""
    delta: np.ndarray
    """float32 (d, k), column j = a_j − b_j."""
    id_a: tuple[str, ...]
    id_b: tuple[str, ...]
    label_a: tuple[str, ...]
    """The label of each pair's first member, "" where unknown."""
    label_b: tuple[str, ...]
    holdout: np.ndarray
    """bool (k,): pairs kept out of the spectrum, for choosing the rank."""
    singular_values: np.ndarray
    """float64 (m,), descending, of the ``delta`` columns that aren't held out; m is their numerical rank."""
    basis: np.ndarray
    """float64 (d, m), the left singular vectors in that order."""
    strategy: str
    options: dict[str, Any]
    encoder: dict[str, Any]
    fingerprint: str
    sources: list[dict[str, Any]]
    """``path`` and ``content_sha256`` of each feature store."""
    diagnostics: dict[str, Any]
    created: str = ""
    ncm_version: str = __version__

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
    def content_sha256(self) -> str:
        """SHA-256 over members, ids, labels, held-out marks and encoder: equal for equal pairs."""
        digests = {name: text_digest(encode_text(getattr(self, name), name)) for name in _TEXTS}
        for name in ("features_a", "features_b", "holdout"):
            digests[name] = array_digest(getattr(self, name))
        return digest_of({"arrays": digests, "fingerprint": self.fingerprint, "strategy": self.strategy})


def write_pairs(path: Path | str, store: PairStore) -> None:
    """Write a pair store atomically; refuses shapes that don't agree and values that aren't finite."""
    _check(store, path)
    with atomic_path(path) as temporary, H5Writer(temporary) as writer:
        for name in ("features_a", "features_b", "delta"):
            writer.array(name, np.asarray(getattr(store, name), dtype=np.float32))
        writer.array("holdout", np.asarray(store.holdout, dtype=bool))
        writer.array("singular_values", np.asarray(store.singular_values, dtype=np.float64))
        writer.array("basis", np.asarray(store.basis, dtype=np.float64))
        for name in _TEXTS:
            writer.text(name, getattr(store, name), what=name.replace("_", " of member "))
        for name in ("options", "sources", "diagnostics"):
            writer.json(name, jsonable(getattr(store, name)))
        writer.finish(
            {
                "ncm_format": FORMAT,
                "ncm_format_version": VERSION,
                "ncm_version": __version__,
                "created": store.created or now(),
                "strategy": store.strategy,
                "encoder": canonical_json(store.encoder),
                "encoder_fingerprint": store.fingerprint,
                "content_sha256": store.content_sha256,
            }
        )


def read_pairs(path: Path | str) -> PairStore:
    """Read a pair store, every array checked; raises `InputError` for what isn't one or is damaged."""
    with H5Reader(path, FORMAT, VERSION, what="a pair store") as h5:
        k, d = (int(n) for n in h5.dataset("features_a", ndim=2, kinds="f").shape)
        m = int(h5.dataset("singular_values", ndim=1, kinds="f").shape[0])
        with reading(h5.path):
            encoder = dict(json.loads(h5.attrs["encoder"]))
        store = PairStore(
            features_a=h5.array("features_a", np.float32, shape=(k, d)),
            features_b=h5.array("features_b", np.float32, shape=(k, d)),
            delta=h5.array("delta", np.float32, shape=(d, k)),
            holdout=h5.array("holdout", bool, shape=(k,)),
            singular_values=h5.array("singular_values", np.float64, shape=(m,)),
            basis=h5.array("basis", np.float64, shape=(d, m)),
            id_a=h5.text("id_a", rows=k),
            id_b=h5.text("id_b", rows=k),
            label_a=h5.text("label_a", rows=k),
            label_b=h5.text("label_b", rows=k),
            strategy=str(h5.attrs.get("strategy", "")),
            options=dict(h5.json("options")),
            encoder=encoder,
            fingerprint=str(h5.attrs.get("encoder_fingerprint", "")),
            sources=list(h5.json("sources")),
            diagnostics=dict(h5.json("diagnostics")),
            created=str(h5.attrs.get("created", "")),
            ncm_version=str(h5.attrs.get("ncm_version", "")),
        )
        try:
            _check(store, h5.path)
        except InputError as error:
            raise damaged(h5.path, f"{error.what}: {error.found}") from error
        stated = h5.attrs.get("content_sha256")
        if stated is not None and stated != store.content_sha256:
            raise damaged(h5.path, "contents that don't match content_sha256")
        return store


def _check(store: PairStore, path: Path | str) -> None:
    k, d, m = store.pairs, store.dim, len(store.singular_values)
    if not k or not d:
        raise InputError("no pairs to store", where=path, found=f"{k} pairs of width {d}")
    shapes = {"features_a": (k, d), "features_b": (k, d), "delta": (d, k), "holdout": (k,), "basis": (d, m)}
    for name, shape in shapes.items():
        if np.shape(getattr(store, name)) != shape:
            raise InputError(
                f"{name} of another shape", where=path, found=np.shape(getattr(store, name)), expected=shape
            )
    for name in _TEXTS:
        if len(getattr(store, name)) != k:
            raise InputError(
                f"{name} of another length", where=path, found=len(getattr(store, name)), expected=k
            )
    for name in ("features_a", "features_b", "delta"):
        _require_finite(name, getattr(store, name), store, path, by_column=name == "delta")
    for name in ("singular_values", "basis"):
        if not np.isfinite(getattr(store, name)).all():
            raise InputError(f"{name} that aren't finite numbers", where=path, found="NaN or an infinity")
    difference = (store.features_a.astype(np.float32) - store.features_b).T
    # Room for the rounding of a difference taken in float64 and kept as float32.
    room = 1e-5 * max(float(np.abs(store.features_a).max()), float(np.abs(store.features_b).max()))
    if not np.allclose(store.delta, difference, rtol=1e-5, atol=room):
        raise InputError("delta isn't features_a − features_b", where=path, found="other differences")
    if fingerprint(store.encoder) != store.fingerprint:
        raise InputError("a fingerprint of another encoder", where=path, found=store.fingerprint)


def _require_finite(
    name: str, values: np.ndarray, store: PairStore, path: Path | str, *, by_column: bool
) -> None:
    bad = np.flatnonzero(~np.isfinite(values).all(axis=0 if by_column else 1))
    if len(bad):
        ids: Sequence[str] = (store.id_a[bad[0]], store.id_b[bad[0]])
        raise InputError(
            f"{name} that aren't finite numbers",
            where=path,
            found=f"pair {ids[0]!r}, {ids[1]!r} ({len(bad)} in all)",
        )
