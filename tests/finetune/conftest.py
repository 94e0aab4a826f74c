"""A folder of small pictures whose colour misleads, with pairs that differ in the colour alone."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ncm_cli.store.digests import fingerprint
from ncm_cli.store.pairs import PairStore, write_pairs

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
    encoder = {"kind": "array", "model": "any"}
    write_pairs(
        folder / "pairs.h5",
        PairStore(
            features_a=members[0],
            features_b=members[1],
            id_a=tuple(a for a, _ in pairs),
            id_b=tuple(b for _, b in pairs),
            label_a=("",) * len(pairs),
            label_b=("",) * len(pairs),
            holdout=np.zeros(len(pairs), bool),
            singular_values=np.ones(3),
            strategy="csv",
            options={},
            encoder=encoder,
            fingerprint=fingerprint(encoder),
            sources=[],
            diagnostics={},
        ),
    )
    return folder
