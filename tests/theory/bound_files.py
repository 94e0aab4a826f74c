"""Small stores for the tests of ``ncm bound``: a spurious-correlation model with classes or a number."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import FitOptions
from tests.world import write_pair_store, write_store


def write_pairs_of(
    path: Path,
    a: np.ndarray,
    b: np.ndarray,
    labels: list[str],
    *,
    name: str = "p",
    labels_b: list[str] | None = None,
) -> None:
    """Pairs ``name-a-0, name-b-0 ...`` of rows a and b (k, d)."""
    ids = tuple([f"{name}-{side}-{i}" for i in range(len(a))] for side in "ab")
    write_pair_store(
        path, a.astype(np.float32), b.astype(np.float32), ids=ids, labels=(labels, labels_b or labels)
    )


def make(folder: Path, *, seed: int = 0, classes: int = 3, rank: int = 2, noise: float = 0.01) -> None:
    """features.h5, oracle.h5, noisy.h5, clean.h5 and probe.safetensors; ``classes`` 0 is regression."""
    rng = np.random.default_rng(seed)
    d, spurious, n, k = 8, 3, 300, 40
    axes = np.linalg.qr(rng.normal(size=(d, d)))[0]
    theta = rng.normal(size=(d - spurious, max(classes, 1)))

    def draw(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inner = rng.normal(size=(count, d - spurious))
        scores = inner @ theta
        return (
            inner,
            scores[:, 0] if classes == 0 else scores.argmax(axis=1),
            rng.normal(size=(count, spurious)),
        )

    def observe(inner: np.ndarray, u: np.ndarray, scale: float) -> np.ndarray:
        return np.hstack([inner, scale * u]) @ axes.T

    inner, y, u = draw(n)
    X = observe(inner, u, 0.3)
    test_inner, test_y, test_u = draw(200)
    pair_inner, _, pair_u = draw(k)
    a, b = observe(pair_inner, pair_u, 0.3), observe(pair_inner, pair_u, 1.0)
    epsilon = rng.normal(size=b.shape)
    noisy = b + noise * epsilon / np.linalg.norm(epsilon, 2)
    test = observe(test_inner, test_u, 3.0)
    names = [f"class {code}" for code in range(classes)]
    text = [names[code] for code in test_y] if classes else [f"{value}" for value in test_y]
    write_pairs_of(folder / "oracle.h5", test, observe(test_inner, test_u, 0.3), text, name="o")
    write_pairs_of(folder / "noisy.h5", a, noisy, [""] * k)
    write_pairs_of(folder / "clean.h5", a, b, [""] * k)
    values = np.concatenate([y, test_y])
    columns = {
        "split": ["train"] * n + ["test"] * 200,
        "label": [names[int(code)] for code in values] if classes else values,
    }
    ids = [*(f"t-{i}" for i in range(n)), *(f"o-a-{i}" for i in range(200))]
    write_store(folder / "features.h5", np.concatenate([X, test]), columns, ids=ids)
    fit(
        FitOptions(
            features=folder / "features.h5",
            pairs=folder / "noisy.h5",
            output=folder / "probe.safetensors",
            rank=str(rank),
            weight_decay="1e-3",
            task="classification" if classes else "regression",
        )
    )
