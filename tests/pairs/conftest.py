"""Stores for the tests of pairs: rows with labels, domains and splits."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.world import write_store


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Path]:
    """Write a feature store and return its path."""
    names = ("ids", "encoder", "label_column", "sha256")

    def make(name: str, features: np.ndarray, **given: Any) -> Path:
        more = {key: given.pop(key) for key in names if key in given}
        return write_store(tmp_path / name, features, given, **more)

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
