"""What a shell completes: choices, names, and the columns and values of the files that the line names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.world import write_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    columns = {"label": ["cat", "dog"], "place": ["land", "water"], "split": ["train", "test"]}
    write_store(tmp_path / "f.h5", np.eye(2, 3), columns)
    (tmp_path / "m.csv").write_text("path,kind,label\n")
    return tmp_path


def completed(folder: Path, line: str, shell: str) -> list[str]:
    words = {"_NCM_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    words |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    words |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "COLUMNS": "80"}
    program = "from ncm_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=os.environ | words, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_columns(folder: Path, shell: str) -> None:
    assert "place" in " ".join(completed(folder, "ncm eval p -f f.h5 --groups pl", shell))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ncm eval p -f f.h5 --groups label,pl", {"label,place"}),
        ("ncm eval p -f f.h5 --where pl", {"place="}),
        ("ncm eval p -f f.h5 --where place=w", {"place=water"}),
        ("ncm embed m.csv --label-col k", {"kind"}),
        ("ncm embed m.csv --augment hue+gray", {"hue+grayscale"}),
        ("ncm help tro", {"troubleshooting"}),
        ("ncm run dig", {"digits"}),
        ("ncm embed m.csv --dtype float1", {"float16"}),
    ],
)
def test_what_is_completed(folder: Path, line: str, found: set[str]) -> None:
    assert set(completed(folder, line, "bash")) == found
