"""Recipes are read and run in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.images.test_cluster import _cluster, nodes  # noqa: F401 (fixtures)
from tests.recipes.test_pipeline import RECIPE, _images


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def eight_steps(tmp_path: Path) -> Path:
    """A folder with a recipe of seven steps and a report, and its images."""
    _images(tmp_path)
    text = RECIPE.replace("{decay: 1e-2,", "{decay: 1e-2, rows: test,")
    report = '  - report: {results: "test-*.json", format: markdown, output: table.md}\n'
    text = text.replace("where: split=test\n", "where: split=${rows}\n")
    (tmp_path / "tiny.yaml").write_text(text.replace("expect:", report + "expect:"))
    return tmp_path
