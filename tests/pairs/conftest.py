"""Stores for the tests of pairs: rows with labels, domains and splits."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.store.columns import Column
from ncm_cli.store.features import write_features

ENCODER = {"kind": "array", "model": "test", "normalize": False}


def column(name: str, values: Sequence[str]) -> Column:
    """A categorical column of these texts; '' is missing."""
    categories = tuple(sorted({value for value in values if value}))
    code = {category: index for index, category in enumerate(categories)}
    return Column(name, np.array([code.get(value, -1) for value in values], dtype=np.int32), categories)


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Path]:
    """Write a feature store and return its path."""

    def make(
        name: str,
        features: np.ndarray,
        *,
        ids: Sequence[str] | None = None,
        encoder: dict[str, Any] | None = None,
        label_column: str | None = "label",
        files: Any = None,
        **columns: Sequence[str],
    ) -> Path:
        path = tmp_path / name
        made = {key: column(key, values) for key, values in columns.items()}
        write_features(
            path,
            ids=ids or [f"r{i}" for i in range(len(features))],
            blocks=[np.asarray(features, np.float32)],
            dim=features.shape[1],
            columns=made,
            label_column=label_column if label_column in made else None,
            split_column="split" if "split" in made else None,
            encoder=encoder or ENCODER,
            files=files,
            options={},
        )
        return path

    return make


@pytest.fixture
def make_table(tmp_path: Path) -> Callable[..., Path]:
    """Write a CSV of pairs and return its path."""

    def make(
        rows: Sequence[Sequence[str]], header: Sequence[str] = ("id_a", "id_b"), name: str = "pairs.csv"
    ) -> Path:
        path = tmp_path / name
        with path.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([header, *rows])
        return path

    return make
