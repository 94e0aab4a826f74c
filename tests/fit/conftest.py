"""A small colour-swap problem in memory and on disk: the shape that ncm is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.probes.projection import spectrum
from ncm_cli.store.columns import Column, Files, NumericColumn
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.features import FeatureStore, write_features
from ncm_cli.store.pairs import PairStore, write_pairs

ENCODER = {"kind": "array", "model": "planted", "precision": "fp32", "normalize": False}

DIM, SPURIOUS = 24, 3


@dataclasses.dataclass
class Planted:
    """Rows whose label shows in one direction, and more strongly in `SPURIOUS` others that flip at test."""

    rng: np.random.Generator
    directions: np.ndarray
    """(d, 1 + SPURIOUS) orthonormal: the causal one, then the spurious ones."""

    def rows(self, n: int, agree: float, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
        """Features (n, d) float32 and labels; ``agree`` is how often the spurious part tells the label."""
        y = self.rng.integers(classes, size=n)
        shown = np.where(self.rng.random(n) < agree, y, (y + 1) % classes)
        X = self.rng.normal(size=(n, DIM))
        X -= (X @ self.directions) @ self.directions.T
        causal = 1.2 * (y - (classes - 1) / 2) + self.rng.normal(size=n)
        style = (shown - (classes - 1) / 2)[:, None] * [3.0, 2.0, 1.0] + 0.5 * self.rng.normal(size=(n, 3))
        return (X + np.column_stack([causal, style]) @ self.directions.T).astype(np.float32), y

    def pairs(self, k: int, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
        """Members (k, d) float32: rows, and the same with the other label's spurious part, up to noise."""
        a, _ = self.rows(k, 0.5)
        style = a @ self.directions[:, 1:]
        moved = -2 * style + 0.5 * self.rng.normal(size=(k, SPURIOUS))
        b = a + moved @ self.directions[:, 1:].T + noise * self.rng.normal(size=a.shape)
        return a, b.astype(np.float32)


def planted(seed: int) -> Planted:
    rng = np.random.default_rng(seed)
    return Planted(rng, np.linalg.qr(rng.normal(size=(DIM, 1 + SPURIOUS)))[0])


@pytest.fixture
def make_planted() -> Callable[[int], Planted]:
    return planted


@dataclasses.dataclass
class OnDisk:
    """Paths of a feature store and a pair store, and how to make others."""

    folder: Path
    planted: Planted
    features: Path
    pairs: Path

    def store(self, name: str, X: np.ndarray, columns: dict[str, list[str]], **more: Any) -> Path:
        return write_store(self.folder / name, X, columns, **more)

    def pair_store(self, name: str, a: np.ndarray, b: np.ndarray, **more: Any) -> Path:
        return write_pair_store(self.folder / name, a, b, **more)


def write_store(
    path: Path,
    X: np.ndarray,
    columns: dict[str, list[str]],
    *,
    ids: tuple[str, ...] | None = None,
    sha256: tuple[str, ...] | None = None,
    encoder: dict[str, Any] = ENCODER,
    numeric: dict[str, np.ndarray] | None = None,
) -> Path:
    n = len(X)
    made: list[Any] = []
    for name, texts in columns.items():
        categories = tuple(sorted(set(texts) - {""}))
        codes = np.array([categories.index(text) if text else -1 for text in texts], np.int32)
        made.append(Column(name, codes, categories))
    made += [NumericColumn(name, values) for name, values in (numeric or {}).items()]
    files = None
    if sha256 is not None:
        files = Files(
            path=tuple(f"{i}.png" for i in range(n)),
            size=np.ones(n, np.int64),
            mtime_ns=np.ones(n, np.int64),
            sha256=sha256,
        )
    write_features(
        path,
        ids=ids or tuple(f"row{i}" for i in range(n)),
        blocks=[X],
        dim=X.shape[1],
        columns=made,
        label_column="label" if "label" in columns else None,
        split_column="split" if "split" in columns else None,
        encoder=encoder,
        files=files,
        options={},
    )
    return path


def write_pair_store(
    path: Path,
    a: np.ndarray,
    b: np.ndarray,
    *,
    held_out: int = 0,
    ids: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
    features: Path | None = None,
    encoder: dict[str, Any] = ENCODER,
) -> Path:
    k = len(a)
    holdout = np.arange(k) >= k - held_out
    found = spectrum((a - b).T[:, ~holdout])
    id_a, id_b = ids or (tuple(f"a{i}" for i in range(k)), tuple(f"b{i}" for i in range(k)))
    sources = []
    if features is not None:
        with FeatureStore(features) as store:
            sources = [{"path": str(features), "content_sha256": store.content_sha256}]
    write_pairs(
        path,
        PairStore(
            features_a=a,
            features_b=b,
            id_a=id_a,
            id_b=id_b,
            label_a=("",) * k,
            label_b=("",) * k,
            holdout=holdout,
            singular_values=found.singular_values[: found.rank],
            strategy="csv",
            options={},
            encoder=encoder,
            fingerprint=fingerprint(encoder),
            sources=sources,
            diagnostics={},
        ),
    )
    return path


@pytest.fixture
def on_disk(tmp_path: Path) -> OnDisk:
    """600 training, 300 validation, 300 test rows (the spurious part flips there), 40 pairs + 40 held out."""
    made = planted(7)
    parts = [
        ("train", *made.rows(600, 0.95)),
        ("val", *made.rows(300, 0.95)),
        ("test", *made.rows(300, 0.05)),
    ]
    X = np.concatenate([X for _, X, _ in parts])
    label = [("cat", "dog")[code] for _, _, y in parts for code in y]
    split = [name for name, _, y in parts for _ in y]
    place = [("land", "water")[i % 2] for i in range(len(X))]
    features = write_store(tmp_path / "f.h5", X, {"label": label, "split": split, "place": place})
    a, b = made.pairs(80)
    pairs = write_pair_store(tmp_path / "p.h5", a, b, held_out=40)
    return OnDisk(tmp_path, made, features, pairs)
