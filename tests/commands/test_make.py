"""Make compares times alone: what a command finds up to date is new to it all the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ncm_cli.main import run

START = (Path(__file__).resolve().parents[2] / "ncm_cli" / "help" / "start.md").read_text(encoding="utf-8")
OLD = 1_000_000_000
"""Seconds since 1970: in 2001."""


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``photos/DOMAIN/LABEL/file.png`` in the current folder."""
    rng = np.random.default_rng(0)
    for domain in ("day", "night"):
        for label in ("bar", "dot"):
            (tmp_path / "photos" / domain / label).mkdir(parents=True)
            for i in range(20):
                pixels = rng.integers(0, 128, (8, 8, 3)) + 64 * (label == "dot") + 32 * (domain == "day")
                file = tmp_path / "photos" / domain / label / f"{i}.png"
                Image.fromarray(pixels.astype(np.uint8)).save(file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "ncm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ncm_cli "$@"\n')
    (folder / "bin" / "ncm").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["make"], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make isn't installed")
def test_a_second_make_does_nothing_after_a_touch(photos: Path) -> None:
    """v8-cmake#28."""
    example = re.search(r"<!-- example: makefile -->\n```make\n(.*?)```", START, flags=re.DOTALL)
    assert example
    (photos / "Makefile").write_text(example[1].replace("ncm embed", "ncm embed --model pixels:8"))
    assert make(photos).returncode == 0
    (photos / "data" / "manifest.csv").touch()
    first, second = make(photos), make(photos)
    assert "already up to date" in first.stdout
    assert (first.returncode, second.returncode) == (0, 0)
    assert "ncm" not in second.stdout


def test_a_store_that_is_up_to_date_is_as_new_as_its_manifest(photos: Path) -> None:
    assert run(["data", "folder", "photos", "--layout", "domain/label", "-o", "data", "-q"]) == 0
    embed = ["embed", "data/manifest.csv", "--model", "pixels:8", "-o", "f.h5", "-q"]
    assert run(embed) == 0
    before = Path("f.h5").read_bytes()
    os.utime("f.h5", (OLD, OLD))
    assert run(embed) == 0
    assert Path("f.h5").stat().st_mtime > Path("data/manifest.csv").stat().st_mtime
    assert Path("f.h5").read_bytes() == before


def test_outputs_of_a_run_that_is_up_to_date_are_as_new_as_their_inputs(photos: Path) -> None:
    Path("recipe.yaml").write_text(
        "name: small\n"
        "steps:\n"
        "  - data: {builder: folder, source: photos, layout: domain/label, output: data}\n"
        '  - embed: {source: data/manifest.csv, model: "pixels:8", output: f.h5}\n'
        "  - fit: {features: f.h5, select: in-domain, output: p.safetensors}\n"
    )
    assert run(["run", "recipe.yaml", "--out", "out", "-q"]) == 0
    written = [Path("out/f.h5"), Path("out/p.safetensors")]
    for path in written:
        os.utime(path, (OLD, OLD))
    assert run(["run", "recipe.yaml", "--out", "out", "-q"]) == 0
    recipe = Path("recipe.yaml").stat().st_mtime
    assert all(path.stat().st_mtime >= recipe for path in written)
    times = [path.stat().st_mtime_ns for path in written]
    assert run(["run", "recipe.yaml", "--out", "out", "-q"]) == 0
    assert [path.stat().st_mtime_ns for path in written] == times
