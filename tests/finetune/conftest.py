"""A folder of small pictures whose colour misleads, with pairs that differ in the colour alone."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.world import write_pair_store

SIDE = 16


def _picture(label: int, color: int, rng: np.random.Generator) -> Image.Image:
    """A bar, upright or level by the label, in the red or the green channel."""
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    at = int(rng.integers(2, SIDE - 4))
    bar = np.s_[:, at : at + 3] if label else np.s_[at : at + 3, :]
    pixels[..., color][bar] = rng.integers(120, 255)
    return Image.fromarray(pixels)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``manifest.csv`` of 48 training, 24 validation and 24 test rows, 16 pairs in ``pairs.h5``."""
    folder, rng = tmp_path_factory.mktemp("bars"), np.random.default_rng(0)
    rows, pairs = [], []
    for split, count, agree in (("train", 48, 0.9), ("val", 24, 0.9), ("test", 24, 0.1)):
        for i in range(count):
            label = i % 2
            color = label if rng.random() < agree else 1 - label
            name = f"{split}{i}"
            state = rng.bit_generator.state
            _picture(label, color, rng).save(folder / f"{name}.png")
            rows.append((name, f"{name}.png", label, split, f"d{i % 3}", color))
            if split == "train" and i < 16:
                rng.bit_generator.state = state
                _picture(label, 1 - color, rng).save(folder / f"{name}-twin.png")
                rows.append((f"{name}-twin", f"{name}-twin.png", label, "twin", "d0", 1 - color))
                pairs.append((name, f"{name}-twin"))
    with (folder / "manifest.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("id", "path", "label", "split", "domain", "color"), *rows])
    members = rng.standard_normal((2, len(pairs), 3)).astype(np.float32)
    ids = tuple(zip(*pairs, strict=True))
    write_pair_store(folder / "pairs.h5", *members, ids=ids)
    return folder
