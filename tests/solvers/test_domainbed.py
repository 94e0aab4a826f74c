"""``Schedule(protocol="domainbed")`` against DomainBed's update rules written with autograd, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ncm_cli.solvers.batches import drawn_batches, generator_of
from ncm_cli.solvers.methods import Config
from ncm_cli.solvers.projection import spectrum
from ncm_cli.solvers.trainer import Schedule, train
from ncm_cli.solvers.training_set import Fit, TrainingSet

METHODS = ("erm", "irm", "vrex", "groupdro", "fish", "matchdg")
Part = tuple[Tensor, Tensor]
DELTA = np.random.default_rng(0).standard_normal((8, 5))


def made(classes: int, *, n: int = 300, d: int = 8) -> TrainingSet:
    """Three environments of unequal size; they disagree on how much the last feature says. Five pairs."""
    rng = np.random.default_rng(classes)
    targets = rng.integers(0, classes, n)
    environments = rng.choice(3, n, p=(0.5, 0.3, 0.2))
    features = rng.standard_normal((n, d))
    features[:, :classes] += np.eye(classes)[targets]
    features[:, -1] += (environments + 1) * (targets - 0.5)
    return TrainingSet(
        X=features,
        y=targets,
        n_classes=classes,
        codes={"envs": environments},
        spectrum=spectrum(DELTA),
        pairs=DELTA.shape[1],
    )


def config_of(method: str, anneal: int = 20) -> Config:
    return Config(
        method=method, lr=0.03, weight_decay=0.1, penalty=50.0, anneal=anneal, eta=0.3, meta_lr=0.4, seed=4
    )


class Reference:
    """A linear layer with an output for every class, trained as DomainBed trains its classifier."""

    def __init__(self, data: TrainingSet, config: Config) -> None:
        self.config = config
        self.weight = torch.zeros(data.n_classes, data.X.shape[1], dtype=torch.float64).requires_grad_()
        self.bias = torch.zeros(data.n_classes, dtype=torch.float64).requires_grad_()
        self.restart()
        self.q = torch.ones(3, dtype=torch.float64)
        self.steps = 0

    def restart(self) -> None:
        self.optimizer = torch.optim.Adam(
            [self.weight, self.bias], lr=self.config.lr, weight_decay=self.config.weight_decay
        )

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias

    def risk(self, part: Part) -> Tensor:
        return functional.cross_entropy(self.logits(part[0]), part[1])

    def slope(self, part: Part) -> Tensor:
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        value = functional.cross_entropy(self.logits(part[0]) * scale, part[1])
        return torch.autograd.grad(value, scale, create_graph=True)[0]

    def objective(self, parts: list[Part]) -> Tensor:
        beta = self.config.penalty if self.steps >= self.config.anneal else 1.0
        risks = torch.stack([self.risk(part) for part in parts])
        if self.config.method == "irm":
            pairs = [((x[0::2], y[0::2]), (x[1::2], y[1::2])) for x, y in parts]
            return risks.mean() + beta * sum(self.slope(a) * self.slope(b) for a, b in pairs) / len(pairs)
        if self.config.method == "vrex":
            return risks.mean() + beta * ((risks - risks.mean()) ** 2).mean()
        if self.config.method == "groupdro":
            self.q = self.q * (self.config.eta * risks.detach()).exp()
            self.q = self.q / self.q.sum()
            return self.q @ risks
        pooled = self.risk((torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
        if self.config.method == "matchdg":
            gaps = self.weight @ torch.tensor(DELTA)
            return pooled + self.config.penalty * (gaps**2).sum(0).mean()
        return pooled

    def descend(self, value: Tensor) -> None:
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()

    def step(self, parts: list[Part]) -> None:
        if self.config.method == "fish":
            before = [parameter.detach().clone() for parameter in (self.weight, self.bias)]
            for part in parts:
                self.descend(self.risk(part))
            with torch.no_grad():
                for parameter, start in zip((self.weight, self.bias), before, strict=True):
                    parameter.copy_(start + self.config.meta_lr * (parameter - start))
        else:
            if self.config.method in ("irm", "vrex") and self.steps == self.config.anneal:
                self.restart()
            self.descend(self.objective(parts))
        self.steps += 1

    def probe(self) -> np.ndarray:
        """(C, d + 1), for two classes the difference of the logits."""
        found = torch.cat([self.weight, self.bias[:, None]], 1).detach().numpy()
        return found[1:] - found[:1] if len(found) == 2 else found


def minibatches(data: TrainingSet, epochs: int, size: int, seed: int) -> Iterator[list[Part]]:
    """The rows that the trainer draws, one environment after another."""
    environments = torch.tensor(data.codes["envs"])
    features, targets = torch.tensor(data.X), torch.tensor(data.y)
    generator = generator_of(seed, 0)
    for _ in range(epochs):
        for rows in drawn_batches(environments, len(targets), size, generator):
            yield [(features[own], targets[own]) for own in rows.split(size)]


def probe_of(found: Fit) -> np.ndarray:
    return np.column_stack([found.weight, found.bias])


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.slow
def test_every_method_is_domainbeds(classes: int) -> None:
    data = made(classes)
    configs = [*map(config_of, METHODS), config_of("irm", anneal=0), config_of("vrex", anneal=50)]
    together = train(configs, data, Schedule(epochs=12, batch_size=16, protocol="domainbed"))
    ours = train(configs, data, Schedule(epochs=12, batch_size=16))
    for config, found, other in zip(configs, together, ours, strict=True):
        reference = Reference(data, config)
        for parts in minibatches(data, 12, 16, config.seed):
            reference.step(parts)
        assert found.iterations == reference.steps == 12 * 7
        np.testing.assert_allclose(probe_of(found), reference.probe(), atol=1e-9, err_msg=str(config))
        assert np.abs(probe_of(found) - probe_of(other)).max() > 1e-2, config


def test_two_logits_are_one_with_twice_the_rate_and_half_the_decay() -> None:
    """DomainBed's (lr, weight decay) for two logits, with ``papers``, which leave the bias free."""
    data = made(2)
    features, targets = torch.tensor(data.X), torch.tensor(data.y)
    reference = Reference(data, config_of("erm"))
    groups = [{"params": [reference.weight], "weight_decay": 0.1}, {"params": [reference.bias]}]
    reference.optimizer = torch.optim.Adam(groups, lr=0.03)
    for _ in range(60):
        reference.descend(reference.risk((features, targets)))
    schedule = Schedule(epochs=60, batch_size=0)
    same, given = (
        probe_of(train([Config(lr=lr, weight_decay=decay)], data, schedule)[0])
        for lr, decay in ((0.06, 0.05), (0.03, 0.1))
    )
    np.testing.assert_allclose(same, reference.probe(), atol=1e-10)
    assert np.abs(given - reference.probe()).max() > 0.05


def test_the_full_batch_is_every_row_once() -> None:
    data = made(2)
    found = train([config_of("erm")], data, Schedule(epochs=5, batch_size=0, protocol="domainbed"))[0]
    reference = Reference(data, config_of("erm"))
    for _ in range(5):
        reference.step([(torch.tensor(data.X), torch.tensor(data.y))])
    np.testing.assert_allclose(probe_of(found), reference.probe(), atol=1e-10)
