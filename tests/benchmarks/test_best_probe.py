"""The benchmark of the best probe runs, and goes on from where it was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).with_name("bench_best_probe.py")


def _run(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCH), *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_part_runs_and_a_stopped_one_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "found.jsonl"
    whole = _run("--smoke", "-o", file)
    for heading in ("| probe | accuracy |", "| generator | pairs |", "| pairs | helps |", "| headline |"):
        assert heading in whole
    lines = [line for line in file.read_text().splitlines() if line]
    assert {json.loads(line)["job"]["part"] for line in lines} == {"real", "hard", "verdicts", "augmented"}
    file.write_text("\n".join([*lines[:2], lines[2][:40]]))
    real = whole[: whole.index("| generator")]
    assert _run("real", "--smoke", "-o", file, "--processes", 2) == real
    earlier = _run("real", "--smoke", "-o", file, "--earlier", file)
    differences = [line for line in earlier.splitlines() if line.startswith("| earlier")]
    assert len(differences) == 2
    assert all(line.endswith("| 0.000 | 0.000 |") for line in differences)
