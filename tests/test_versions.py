"""The lowest versions that pyproject.toml declares, with which `.ci/run` runs the quick tests, too."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

import pytest
from packaging.version import Version

TEXT = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
MINIMUMS = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)",$', TEXT, flags=re.MULTILINE))


def test_every_dependency_has_a_minimum() -> None:
    listed = TEXT.split("dependencies = [\n")[1].split("]")[0]
    assert len(MINIMUMS) == len(listed.splitlines()) > 10


@pytest.mark.parametrize("name", MINIMUMS)
def test_what_is_installed_is_the_minimum_or_newer(name: str) -> None:
    # A local version (2.6.0+cpu) is the same release.
    installed, minimum = Version(Version(importlib.metadata.version(name)).public), Version(MINIMUMS[name])
    assert installed == minimum if "NCM_LOWEST" in os.environ else installed >= minimum


def test_the_classifiers_name_the_versions_of_python() -> None:
    named = re.findall(r"Python :: (3\.\d+)", TEXT)
    assert named[0] == re.findall(r'requires-python = ">=(3\.\d+)"', TEXT)[0]
    assert named == [f"3.{minor}" for minor in range(10, 10 + len(named))]
