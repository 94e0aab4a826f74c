"""Small sets of random pictures with a manifest, and a short way to embed them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.images.options import EmbedOptions
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import Column
from ncm_cli.store.features import FeatureStore


class Recorder(Reporter):
    """Keeps what a stage says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)


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

        self.said = Recorder()
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


def arrays_of(path: Path) -> dict[str, Any]:
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


@pytest.fixture
def contents() -> Callable[[Path], dict[str, Any]]:
    return arrays_of
