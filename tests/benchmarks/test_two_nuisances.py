"""The benchmark of two nuisances runs, and finds that pairs of both kinds beat those of either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).with_name("bench_two_nuisances.py")


@pytest.mark.slow
def test_both_kinds_of_pairs_beat_either_and_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "made.jsonl"
    tables = []
    for _ in range(2):
        words = [sys.executable, str(BENCH), "--smoke", "-o", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        tables.append(done.stdout)
    assert tables[0] == tables[1]
    (line,) = map(json.loads, file.read_text().splitlines())
    worst = {name: found["worst_group"] for name, found in line["found"].items()}
    assert worst["both"] > max(worst["colour"], worst["position"]) + 0.2
    assert max(worst["colour"], worst["position"]) > worst["none"]
