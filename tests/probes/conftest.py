"""A colour-swap problem on disk, and pictures by a small CLIP that reads texts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.progress import SILENT
from tests.world import Planted, planted, write_pair_store, write_store


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


CLASSES = ("polar_bear", "cat", "dog")


@dataclass(frozen=True)
class Stores:
    """The model, the model as open_clip makes it, and the same 36 pictures twice."""

    model: str
    reference: Any
    tokenizer: Any
    images: Any
    """(36, 3, 32, 32), preprocessed by open_clip."""
    raw: Path
    unit: Path
    pictures: Path


@pytest.fixture(scope="session")
def stores(text_clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Stores:
    import open_clip
    import torch

    root, model = tmp_path_factory.mktemp("zeroshot"), f"local-dir:{text_clip}"
    reference, _, transform = open_clip.create_model_and_transforms(model)
    rng = np.random.default_rng(0)
    lines, images = ["id,path,label,place,split"], []
    for i in range(36):
        label, place, split = CLASSES[i % 3], ("land", "water")[i // 3 % 2], ("train", "val", "test")[i // 12]
        shades = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        images.append(Image.fromarray(shades).resize((40, 32)))
        images[-1].save(root / f"{i}.png")
        lines.append(f"r{i},{i}.png,{label},{place},{split}")
    (root / "m.csv").write_text("\n".join(lines) + "\n")
    for name, normalize in (("raw", False), ("unit", True)):
        options = {"source": root / "m.csv", "output": root / f"{name}.h5", "model": model}
        embed(EmbedOptions(**options, normalize=normalize, workers="0"), reporter=SILENT)
    tokenizer = open_clip.get_tokenizer(model)
    batch = torch.stack([transform(image) for image in images])
    return Stores(model, reference.eval(), tokenizer, batch, root / "raw.h5", root / "unit.h5", root)
