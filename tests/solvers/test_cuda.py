"""The trainer on CUDA: the CPU's result, and the same bits twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ncm_cli.solvers.methods import Config
from ncm_cli.solvers.projection import Spectrum
from ncm_cli.solvers.trainer import Schedule, train
from ncm_cli.solvers.training_set import TrainingSet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

METHODS = ("erm", "ncm", "irm", "vrex", "groupdro", "fish", "lisa", "matchdg")


def made(classes: int) -> TrainingSet:
    rng = np.random.default_rng(classes)
    n, d = 900, 40
    features = rng.standard_normal((n, d)).astype(np.float32)
    scores = features @ rng.standard_normal((d, classes)) + rng.standard_normal((n, classes))
    return TrainingSet(
        X=features,
        y=scores.argmax(1),
        n_classes=classes,
        codes={"envs": rng.integers(0, 3, n)},
        weights=rng.uniform(0.5, 2, n),
        spectrum=Spectrum(
            np.sqrt(np.linspace(1, 0.1, 6)), np.linalg.qr(rng.standard_normal((d, 6)))[0], 6, 0.0, 0
        ),
        pairs=1,
    )


@pytest.mark.parametrize("classes", [2, 5])
def test_cuda_gives_the_cpus_probes_and_the_same_bits_twice(classes: int) -> None:
    data = made(classes)
    configs = [
        Config(
            method=method,
            seed=seed,
            lr=0.01,
            penalty=30.0,
            anneal=5,
            rank=3 if method == "ncm" else 0,
            upweighted=up,
        )
        for method in METHODS
        for seed in (0, 1)
        for up in (False, True)
    ]
    schedule = Schedule(epochs=5, batch_size=128)
    first, second = (train(configs, data, schedule, device="cuda") for _ in range(2))
    on_cpu = train(configs, data, schedule)
    for config, a, b, c in zip(configs, first, second, on_cpu, strict=True):
        assert a.weight.tobytes() == b.weight.tobytes(), config
        np.testing.assert_allclose(a.weight, c.weight, atol=1e-8, err_msg=str(config))
