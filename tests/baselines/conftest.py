"""A small data set with two training environments, a test environment, groups and pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.baselines.options import SweepOptions
from tests.world import write_pair_store, write_store


def write_problem(
    folder: Path,
    *,
    classes: int = 2,
    n: int = 900,
    d: int = 12,
    seed: int = 0,
    held_out: int = 16,
    of_rows: bool = False,
) -> None:
    """``f.h5`` and ``p.h5``: the first columns tell the label; the last, the colour, misleads in test.

    40 pairs are of the same row in both colours, or with ``of_rows`` 24 of training rows of one label and
    either colour. The last ``held_out`` are held out.
    """
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, n)
    split = np.repeat(np.arange(3), (n // 2, n // 4, n - n // 2 - n // 4))
    domain = np.where(split == 2, 2, rng.integers(0, 2, n))
    agree = np.choose(domain, [0.9, 0.8, 0.1])
    color = np.where(rng.random(n) < agree, label % 2, 1 - label % 2)
    features = rng.standard_normal((n, d))
    features[:, :classes] += 1.2 * np.eye(classes)[label]
    features[:, -1] = 3 * (2 * color - 1) + 0.3 * rng.standard_normal(n)
    texts = {"split": ("train", "val", "test"), "domain": "abc", "color": ("green", "red")}
    codes = {"split": split, "domain": domain, "color": color}
    columns = {name: [texts[name][code] for code in codes[name]] for name in texts}
    columns["label"] = [f"class{code}" for code in label]
    write_store(folder / "f.h5", features, columns)
    k = 24 if of_rows else 40
    a = rng.standard_normal((k, d)).astype(np.float32)
    a[:, -1] = 3
    b = a + 0.05 * rng.standard_normal((k, d)).astype(np.float32)
    b[:, -1] = -3
    ids = [f"a{i}" for i in range(k)], [f"b{i}" for i in range(k)]
    if of_rows:
        rows = [
            np.flatnonzero((split == 0) & (label == i % 2) & (color == side))
            for i in range(2)
            for side in (1, 0)
        ]
        first, second = (np.concatenate([rows[side][:12], rows[2 + side][:12]]) for side in (0, 1))
        a, b = (features[members].astype(np.float32) for members in (first, second))
        ids = [f"r{i}" for i in first], [f"r{i}" for i in second]
    write_pair_store(folder / "p.h5", a, b, held_out=held_out, ids=ids)


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    """A folder with ``f.h5`` and ``p.h5``."""
    write_problem(tmp_path)
    return tmp_path


@pytest.fixture
def swept(problem: Path) -> Callable[..., SweepOptions]:
    """Options of a quick sweep over the problem, changed as asked."""
    base = SweepOptions(
        features=problem / "f.h5",
        pairs=problem / "p.h5",
        output=problem / "s.h5",
        envs="domain",
        groups="label,color",
        test="split=test",
        methods="erm,ncm",
        search=("lr=0.01,0.1", "rank=1:3"),
        trials=3,
        seeds=2,
        epochs=4,
        batch_size=64,
        device="cpu",
    )
    return lambda **changes: dataclasses.replace(base, **changes)
