"""What the protocol ``domainbed`` means for a setting and for a batch; its methods: see `test_authors`."""

from __future__ import annotations

import numpy as np
import torch

from ncm_cli.solvers.methods import Config
from ncm_cli.solvers.trainer import Schedule, train
from ncm_cli.solvers.training_set import Fit, TrainingSet

from .authors import DomainBed, descend, nll

SETTING = Config(lr=0.03, weight_decay=0.1)


def made() -> TrainingSet:
    """Three environments of unequal size; they disagree on how much the last feature says."""
    rng = np.random.default_rng(2)
    targets = rng.integers(0, 2, 300)
    environments = rng.choice(3, 300, p=(0.5, 0.3, 0.2))
    features = rng.standard_normal((300, 8))
    features[:, :2] += np.eye(2)[targets]
    features[:, -1] += (environments + 1) * (targets - 0.5)
    return TrainingSet(X=features, y=targets, n_classes=2, codes={"envs": environments})


def probe_of(found: Fit) -> np.ndarray:
    return np.column_stack([found.weight, found.bias])


def test_two_logits_are_one_with_twice_the_rate_and_half_the_decay() -> None:
    """DomainBed's (lr, weight decay) for two logits, in ``common`` form, which leaves the bias free."""
    data = made()
    features, targets = torch.tensor(data.X), torch.tensor(data.y)
    reference = DomainBed(data, SETTING, Schedule())
    weight, bias = reference.model.parameters
    optimizer = torch.optim.Adam([{"params": [weight], "weight_decay": 0.1}, {"params": [bias]}], lr=0.03)
    for _ in range(60):
        descend(optimizer, nll(reference.model(features), targets))
    schedule = Schedule(epochs=60, batch_size=0)
    same, given = (
        probe_of(train([Config(lr=lr, weight_decay=decay)], data, schedule)[0])
        for lr, decay in ((0.06, 0.05), (0.03, 0.1))
    )
    np.testing.assert_allclose(same, reference.model.probe(), atol=1e-10)
    assert np.abs(given - reference.model.probe()).max() > 0.05


def test_the_full_batch_is_every_row_once() -> None:
    data = made()
    schedule = Schedule(epochs=5, batch_size=0, protocol="domainbed")
    found = train([SETTING], data, schedule)[0]
    reference = DomainBed(data, SETTING, schedule)
    for _ in range(5):
        descend(reference.optimizer, reference.objective([(torch.tensor(data.X), torch.tensor(data.y))]))
    np.testing.assert_allclose(probe_of(found), reference.model.probe(), atol=1e-10)
