"""Every comparator in every protocol against its authors' own training loop, on the same batches.

``pytest -s tests/solvers/test_authors.py`` prints the largest differences.
"""

from __future__ import annotations

import numpy as np
import pytest

from ncm_cli.solvers.methods import PROTOCOLS, Config, Protocol
from ncm_cli.solvers.projection import spectrum
from ncm_cli.solvers.trainer import Schedule, train
from ncm_cli.solvers.training_set import TrainingSet

from .authors import OWN_CODE, reference_of, trained_by_authors

PROBLEMS = ((2, 2), (2, 3), (4, 3))
"""(classes, environments)."""

LARGEST = 1e-10
"""Difference of a weight or bias, which are about 1, after any epoch."""


def problem(classes: int, environments: int, *, n: int = 300, d: int = 8) -> TrainingSet:
    """Rows in matched pairs of one label and two environments, of environments of unequal size."""
    rng = np.random.default_rng([classes, environments])
    targets = np.repeat(rng.integers(0, classes, n // 2), 2)
    shares = np.array([0.5, 0.3, 0.2])[:environments]
    codes = np.concatenate(
        [rng.choice(environments, 2, replace=False, p=shares / shares.sum()) for _ in range(n // 2)]
    )
    features = rng.standard_normal((n, d))
    features[:, :classes] += np.eye(classes)[targets]
    features[:, -1] += (codes + 1) * (targets - 0.5)
    return TrainingSet(
        X=features,
        y=targets,
        n_classes=classes,
        codes={"envs": codes},
        spectrum=spectrum((features[0::2] - features[1::2]).T),
        pairs=n // 2,
    )


def config_of(method: str) -> Config:
    return Config(
        method=method, lr=0.03, weight_decay=0.1, penalty=50.0, anneal=11, eta=0.3, meta_lr=0.4, seed=4
    )


def largest_difference(method: str, protocol: Protocol, classes: int, environments: int) -> tuple[float, int]:
    """Of weights and biases after each of 6 epochs, and the number of steps."""
    data, config = problem(classes, environments), config_of(method)
    # The pairs in their batch are all pairs if the batch is all rows.
    schedule = Schedule(epochs=6, batch_size=0 if method == "matchdg" else 48, protocol=protocol)
    probes: list[np.ndarray] = []
    fits = train(
        [config],
        data,
        schedule,
        observe=lambda epoch, indices, weight, bias: probes.append(np.c_[weight[0], bias[0]]),
    )
    expected = trained_by_authors(data, config, schedule)
    assert len(probes) == len(expected) == 6
    assert np.abs(probes[-1] - probes[0]).max() > 1e-2
    return max(float(np.abs(a - b).max()) for a, b in zip(probes, expected, strict=True)), fits[0].iterations


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("method", OWN_CODE)
def test_a_comparator_is_its_authors(method: str, protocol: Protocol) -> None:
    if reference_of(method, protocol) is None:
        return
    # LISA's code mixes the four cells of two labels and two attributes.
    problems = PROBLEMS[:1] if (method, protocol) == ("lisa", "papers") else PROBLEMS
    found = [largest_difference(method, protocol, *shape) for shape in problems]
    difference, steps = max(found)
    print(f"\n{method:9} {protocol:10} {steps:3} steps, largest difference {difference:.0e}", end="")
    assert difference <= LARGEST
