"""Stores of pictures by a small CLIP that reads texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.progress import SILENT

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
