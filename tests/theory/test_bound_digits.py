"""On coloured digits: the bound over measured risk along ranks, and what its least is worth as a choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ncm_cli.main import run
from ncm_cli.store.files import read_result

SEEDS = 4


def _one_seed(folder: Path, seed: int) -> dict:
    data, features = folder / "data", folder / "features.h5"
    lines = [
        f"data digits -o {data} --seed {seed}",
        f"embed {data}/manifest.csv --model pixels:8 -o {features}",
        f"pairs {data}/pairs.csv --kind counterfactual --features {features} --holdout-col holdout "
        f"-o {folder}/pairs.h5",
        f"pairs {data}/oracle_pairs.csv --features {features} --holdout 0 --straddling keep "
        f"-o {folder}/oracle.h5",
        f"fit --features {features} --pairs {folder}/pairs.h5 --rank 0:64 -o {folder}/ncm.safetensors",
        f"bound {folder}/ncm.safetensors --features {features} --oracle-pairs {folder}/oracle.h5 "
        f"--pairs {folder}/pairs.h5 --ranks 0:64 --bootstrap 0 -o {folder}/bound.json",
    ]
    for line in lines:
        assert run([*line.split(), "--quiet"]) == 0, line
    return read_result(folder / "bound.json", kind="bound")


@pytest.mark.slow
def test_rank_of_least_bound_is_nearly_the_best(tmp_path: Path) -> None:
    regrets, accuracies = [], []
    for seed in range(SEEDS):
        (tmp_path / str(seed)).mkdir()
        found = _one_seed(tmp_path / str(seed), seed)
        assert found["holds"] and found["exact"]
        for row in found["path"]:
            assert row["test_risk"] <= row["bound"] * (1 + 1e-9)
            assert row["test_error"] <= row["zero_one_bound"] + 1e-12
        summary = found["summary"]
        assert summary["erm_test_accuracy"] < 0.3, "without the pairs the probe follows the colour"
        regrets.append(summary["bound_regret"])
        accuracies.append(summary["bound_test_accuracy"])
    print(
        f"test accuracy at the least 0-1 bound {np.mean(accuracies):.3f}, "
        f"{np.mean(regrets):.3f} below the best rank (largest {max(regrets):.3f}) over {SEEDS} seeds"
    )
    assert np.mean(regrets) <= 0.03
