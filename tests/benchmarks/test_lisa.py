"""LISA on rare cells reaches what a loop written after its authors' code reaches."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.bench_lisa import main, worst_groups


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smoke"]) == 0
    assert "| the authors' loop, batch 64 |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_worst_group_is_that_of_the_authors_loop() -> None:
    found = [worst_groups(seed, 32, 2.0, (64,), 100) for seed in range(3)]
    common, papers, authors = (
        np.array([one[f"{name}, batch 64"] for one in found])
        for name in ("common", "papers", "the authors' loop")
    )
    assert abs(papers.mean() - authors.mean()) < 0.03
    assert authors.mean() - common.mean() > 0.04
