"""Small stores with known contents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.store.columns import Column, FailedRow, Files, NumericColumn
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.features import FeatureStore, write_features
from ncm_cli.store.pairs import PairStore, write_pairs
from ncm_cli.store.probe import Probe, write_probe

ENCODER = {"kind": "pixels", "model": "pixels:8", "preprocess": {"resize": 8, "mean": [0.0, 0.5]}}


def store_arguments(rows: int = 40, width: int = 8, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Arguments of `write_features` for random contents; ``features`` overrides the blocks."""
    rng = np.random.default_rng(seed)
    features = changes.pop("features", rng.standard_normal((rows, width)).astype(np.float32))
    rows, width = features.shape
    cuts = np.sort(rng.integers(0, rows + 1, 3))
    made: dict[str, Any] = {
        "ids": [f"{i:03d} é" for i in range(rows)],
        "blocks": np.split(features, cuts),
        "dim": width,
        "columns": [
            Column("label", rng.integers(0, 3, rows).astype(np.int32), ("cat", "dog", "fox")),
            Column("place", rng.integers(-1, 2, rows).astype(np.int32), ("land", "water")),
            NumericColumn("age/years", np.where(rng.random(rows) < 0.2, np.nan, rng.standard_normal(rows))),
        ],
        "label_column": "label",
        "split_column": None,
        "encoder": ENCODER,
        "files": Files(
            path=tuple(f"/pictures/{i}.png" for i in range(rows)),
            size=rng.integers(1, 10**6, rows),
            mtime_ns=rng.integers(10**17, 10**18, rows),
            sha256=tuple(f"{i:064x}" for i in range(rows)),
        ),
        "failed": [FailedRow("bad", "/pictures/bad.png", "cut short")],
        "options": {"model": "pixels:8", "rate": 0.1},
        "request": {"model": "pixels:8"},
    }
    return made | changes


@pytest.fixture
def write_store(tmp_path: Path) -> Callable[..., Path]:
    """Write a feature store with random contents; returns its path."""

    def write(name: str = "features.h5", **arguments: Any) -> Path:
        path = tmp_path / name
        write_features(path, **store_arguments(**arguments))
        return path

    return write


def everything(path: Path) -> tuple[Any, ...]:
    """All that a reader can learn from a feature store, in a form that can be compared."""
    with FeatureStore(path) as store:
        store.verify()
        files = store.files
        columns = [
            (name, column.categories, column.codes.tobytes())
            if isinstance(column, Column)
            else (name, column.values.tobytes())
            for name, column in store.columns.items()
        ]
        return (
            store.read().tobytes(),
            store.ids,
            columns,
            (store.rows, store.dim, store.dtype, store.label_column, store.split_column),
            (store.encoder, store.fingerprint, store.content_sha256, store.created, store.ncm_version),
            (store.options, store.request, store.failed),
            files and (files.path, files.size.tobytes(), files.mtime_ns.tobytes(), files.sha256),
        )


def pair_store(k: int = 12, d: int = 6, seed: int = 0) -> PairStore:
    """Random pairs with their spectrum."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, k, d)).astype(np.float32)
    holdout = np.arange(k) % 4 == 3
    values = np.linalg.svd((a - b)[~holdout].T.astype(np.float64), compute_uv=False)
    return PairStore(
        features_a=a,
        features_b=b,
        id_a=tuple(f"a{i}" for i in range(k)),
        id_b=tuple(f"é{i}" for i in range(k)),
        label_a=("",) * k,
        label_b=tuple("xy"[i % 2] for i in range(k)),
        holdout=holdout,
        singular_values=values,
        strategy="csv",
        options={"holdout": "0.25"},
        encoder=ENCODER,
        fingerprint=fingerprint(ENCODER),
        sources=[{"path": "f.h5", "content_sha256": "0" * 64}],
        diagnostics={"suspects": [{"id_a": "a1", "id_b": "é1", "residual": 0.5}]},
    )


def make_probe(classes: tuple[str, ...] = ("cat", "dog"), d: int = 6, rank: int = 2, **meta: Any) -> Probe:
    """A random probe with its basis folded in; no classes make it a regression."""
    rng = np.random.default_rng(len(classes))
    rows = len(classes) if len(classes) > 2 else 1
    basis = np.linalg.qr(rng.standard_normal((d, rank)))[0]
    weight = rng.standard_normal((rows, d))
    return Probe(
        weight=weight - weight @ basis @ basis.T,
        bias=rng.standard_normal(rows),
        basis=basis,
        singular_values=np.arange(rank, 0, -1.0),
        classes=classes,
        task="classification" if classes else "regression",
        target="label",
        meta={
            "encoder": ENCODER,
            "fingerprint": fingerprint(ENCODER),
            "scaling": {"kind": "norm", "factor": 10.0},
            "converged": True,
            **meta,
        },
    )


@pytest.fixture
def pairs_path(tmp_path: Path) -> Path:
    """A pair store with random contents."""
    write_pairs(tmp_path / "pairs.h5", pair_store())
    return tmp_path / "pairs.h5"


@pytest.fixture
def probe_path(tmp_path: Path) -> Path:
    """A probe with random contents."""
    write_probe(tmp_path / "probe.safetensors", make_probe())
    return tmp_path / "probe.safetensors"
