"""Small sets of pictures with a manifest, and a small open_clip model with its checkpoint."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.images.options import EmbedOptions
from ncm_cli.store.columns import Column
from ncm_cli.store.features import FeatureStore
from tests.world import Heard


class Pictures:
    """A folder of pictures ``NAME.png`` and the manifest that lists them."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.manifest = folder / "manifest.csv"
        self.output = folder / "features.h5"
        self._rng = np.random.default_rng(seed)
        self.rows: list[dict[str, str]] = []

    def picture(self, name: str, size: int = 8) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(self._rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(path)
        return path

    def add(self, id: str, *, name: str | None = None, **columns: str) -> Path:
        name = name or f"{len(self.rows)}.png"
        self.rows.append({"id": id, "path": name, **columns})
        return self.picture(name)

    def write(self, rows: Sequence[dict[str, str]] | None = None) -> Path:
        rows = self.rows if rows is None else rows
        with self.manifest.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return self.manifest

    def options(self, **changes: Any) -> EmbedOptions:
        given = {"source": self.manifest, "output": self.output, "model": "pixels:2", "workers": "2"}
        return EmbedOptions(**(given | changes))

    def embed(self, *, verify: bool = False, **changes: Any) -> Any:
        from ncm_cli.images.embed import embed

        self.said = Heard()
        return embed(self.options(**changes), verify=verify, reporter=self.said)


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    return Pictures(tmp_path)


@pytest.fixture
def make_pictures(tmp_path: Path) -> Callable[..., Pictures]:
    def make(count: int, seed: int = 0) -> Pictures:
        made = Pictures(tmp_path, seed)
        for i in range(count):
            made.add(
                f"x{i:03d}",
                label=["cat", "dog", "fox"][i % 3],
                split="train" if i % 4 else "test",
                place=str(i % 2),
            )
        made.write()
        return made

    return make


def contents(path: Path) -> dict[str, Any]:
    """Everything that a store says of its rows, for comparison."""
    with FeatureStore(path) as store:
        files = store.files
        return {
            "ids": store.ids,
            "features": store.read().tobytes(),
            "columns": {name: (column.categories, column.codes.tolist()) if isinstance(column, Column)
                        else column.values.tolist() for name, column in store.columns.items()},
            "roles": (store.label_column, store.split_column),
            "failed": store.failed,
            "files": files and (files.path, files.size.tolist(), files.mtime_ns.tolist(), files.sha256),
            "fingerprint": store.fingerprint,
            "content": store.content_sha256,
        }  # fmt: skip


TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 100, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture
def heard() -> Heard:
    return Heard()


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """A smooth random RGB picture: compresses well, unlike noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@dataclass(frozen=True)
class TinyClip:
    """A small model under two activations: configurations and one state dict in several containers."""

    config: Path
    quick_config: Path
    checkpoint: Path
    safetensors: Path
    training: Path
    folder: Path


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> TinyClip:
    """Seeded random weights in a local file; see TinyClip."""
    import torch
    from safetensors.torch import save_file

    from ncm_cli.images.clip_model import quiet_root_logger
    from ncm_cli.solvers.device import own_random_numbers

    root = tmp_path_factory.mktemp("clip")
    folder = root / "own"
    folder.mkdir()
    own = {
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.4],
        "interpolation": "bilinear",
        "resize_mode": "squash",
    }
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY, "preprocess_cfg": own}))
    (root / "tiny.json").write_text(json.dumps(TINY | {"quick_gelu": False}))
    (root / "tiny-quickgelu.json").write_text(json.dumps(TINY | {"quick_gelu": True}))
    import open_clip

    with own_random_numbers(7), quiet_root_logger():
        state = open_clip.create_model(f"local-dir:{folder}", load_weights=False).state_dict()
    save_file(state, folder / "open_clip_model.safetensors")
    save_file(state, root / "plain.safetensors")
    torch.save(state, root / "plain.pt")
    wrapped = {"epoch": 3, "name": "run", "state_dict": {f"module.{k}": v for k, v in state.items()}}
    torch.save(wrapped, root / "epoch_3.pt")
    return TinyClip(
        root / "tiny.json",
        root / "tiny-quickgelu.json",
        root / "plain.pt",
        root / "plain.safetensors",
        root / "epoch_3.pt",
        folder,
    )


@pytest.fixture
def images() -> list[Image.Image]:
    """Square, wide, tall, smaller and larger than the tiny model's input."""
    sizes = [(32, 32), (50, 90), (200, 40), (31, 33), (300, 300)]
    return [picture(h, w, seed) for seed, (h, w) in enumerate(sizes)]


def reference(name: str, checkpoint: Path | None = None) -> tuple[Any, Any]:
    """The model and transform that open_clip itself makes for a name and a checkpoint."""
    import open_clip

    from ncm_cli.images.clip_model import quiet_root_logger

    with quiet_root_logger():
        pretrained = str(checkpoint) if checkpoint else None
        model, _, transform = open_clip.create_model_and_transforms(name, pretrained=pretrained)
    return model.eval(), transform


def copied(source: Path, target: Path) -> Path:
    """A copy of a file, in folders that are made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    return target


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty hub cache, and a hub that can't be reached; returns the cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"
