"""Shared fixtures. Tests on real images skip, visibly, where the data folder is absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _data(name: str) -> Path:
    folder = Path(os.environ.get("NCM_TEST_DATA", ROOT.parent / "shared" / "data")) / name
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set NCM_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """MNIST's four IDX files."""
    return _data("mnist")


@pytest.fixture(scope="session")
def pacs_dir() -> Path:
    """A sample of PACS, ``domain/class/file``."""
    return _data("pacs100")
