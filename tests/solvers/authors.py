"""The training loops of the methods' authors, as their code has them, on linear models in float64.

Written with autograd and ``torch.optim`` after Arjovsky's and Krueger's ColoredMNIST, Sagawa's group_DRO,
Shi's fish, Yao's LISA (subpopulation shifts), Mahajan's robustdg (ErmMatch) and DomainBed. What differs on
purpose: Adam throughout (group_DRO, LISA and robustdg default to SGD), and weights that start at zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ncm_cli.solvers.batches import Batch, CellDraws, DeviceRows, drawn_batches, epoch_batches, generator_of
from ncm_cli.solvers.methods import Config, Protocol
from ncm_cli.solvers.trainer import Schedule
from ncm_cli.solvers.training_set import TrainingSet

from . import references

Part = tuple[Tensor, Tensor]


def steps_of(data: TrainingSet, schedule: Schedule, seed: int) -> Iterator[tuple[int, Batch, list[Part]]]:
    """The trainer's steps: the epoch (from 0), the batch, and its rows by environment in fish's order."""
    rows = DeviceRows(data, "cpu")
    draw, mix, visit = (generator_of(seed, stream) for stream in range(3))
    features, targets = torch.tensor(data.X), torch.tensor(data.y)
    domainbed = schedule.protocol == "domainbed"
    for epoch in range(schedule.epochs):
        batches = drawn_batches if domainbed else epoch_batches
        for chosen in batches(rows.strata, rows.n, schedule.batch_size, draw):
            batch = Batch(rows, chosen, mix, None if domainbed else visit)
            parts = [chosen[members] for _, members in batch.visits]
            yield epoch, batch, [(features[part], targets[part]) for part in parts]


class Linear:
    """A linear layer of ``logits`` outputs that starts at zero."""

    def __init__(self, data: TrainingSet, logits: int) -> None:
        self.weight = torch.zeros(logits, data.X.shape[1], dtype=torch.float64).requires_grad_()
        self.bias = torch.zeros(logits, dtype=torch.float64).requires_grad_()

    @property
    def parameters(self) -> list[Tensor]:
        return [self.weight, self.bias]

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias

    def probe(self) -> np.ndarray:
        """(C, d + 1), for two logits their difference."""
        found = torch.cat([self.weight, self.bias[:, None]], 1).detach().numpy().copy()
        return found[1:] - found[:1] if len(found) == 2 else found


def nll(logits: Tensor, y: Tensor) -> Tensor:
    """Mean log loss, of one logit or of one for every class."""
    if logits.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(logits, y[:, None].double())
    return functional.cross_entropy(logits, y)


def slope_of(logits: Tensor, y: Tensor) -> Tensor:
    """The derivative of the loss with respect to a factor of the logits at 1."""
    scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(nll(logits * scale, y), [scale], create_graph=True)[0]


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Formulas:
    """The papers' formulas in ``common`` form: one logit for two classes, a free bias, (λ/2)‖W‖² inside."""

    def __init__(self, data: TrainingSet, config: Config, schedule: Schedule) -> None:
        self.data, self.config, self.steps = data, config, 0
        self.model = Linear(data, data.logits)
        self.inner = torch.optim.Adam(
            [
                {"params": [self.model.weight], "weight_decay": config.weight_decay},
                {"params": [self.model.bias]},
            ],
            lr=config.lr,
        )
        self.optimizer = torch.optim.Adam(self.model.parameters, lr=config.lr)
        self.log_q = 0.0
        self.draws = np.random.default_rng([config.seed, int(config.alpha * 1e6)])

    def objective(self, batch: Batch, parts: list[Part]) -> Tensor:
        config, model = self.config, self.model
        x, y = (torch.cat(columns) for columns in zip(*parts, strict=True))
        environments = torch.cat([torch.full((len(y),), float(e)) for e, (_, y) in enumerate(parts)])
        beta = config.penalty if self.steps >= config.anneal else 1.0
        if config.method == "groupdro":
            # Environments come in order here: see `run`.
            risks = torch.stack([nll(model(x), y) for x, y in parts])
            self.log_q = self.log_q + config.eta * risks.detach()
            return torch.softmax(self.log_q, 0) @ risks
        formula = {
            "irm": references.irm(beta),
            "vrex": references.vrex(beta),
            "matchdg": references.matchdg(config.penalty, self.data.X[0::2].T - self.data.X[1::2].T),
        }[config.method]
        return formula(model(x), y, environments, torch.ones(len(y)).double(), model.weight)

    def mixed(self, batch: Batch, chosen: Tensor) -> Tensor:
        """lisa's objective on the rows of the batch in its own order."""
        strategy, (_, label), (_, domain) = batch.mixing
        mix = self.draws.beta(self.config.alpha, self.config.alpha, len(chosen))
        x, y = torch.tensor(self.data.X)[chosen], torch.tensor(self.data.y)[chosen]
        partner = (label if strategy < self.config.p_sel else domain).numpy()
        formula = references.lisa(x.numpy(), self.data.n_classes, mix, partner, self.model.bias)
        ones = torch.ones(len(y)).double()
        return formula(self.model(x), y, y, ones, self.model.weight)

    def step(self, epoch: int, batch: Batch, parts: list[Part]) -> None:
        config = self.config
        if config.method == "fish":
            before = [parameter.detach().clone() for parameter in self.model.parameters]
            for x, y in parts:
                descend(self.inner, nll(self.model(x), y))
            with torch.no_grad():
                for parameter, start in zip(self.model.parameters, before, strict=True):
                    parameter.copy_(start + config.meta_lr * (parameter - start))
        else:
            loss = (
                self.mixed(batch, batch._chosen) if config.method == "lisa" else self.objective(batch, parts)
            )
            annealed = config.method in ("irm", "vrex") and self.steps >= config.anneal
            share = 1 / max(config.penalty, 1.0) if annealed else 1.0
            descend(self.optimizer, loss + share * config.weight_decay / 2 * self.model.weight.square().sum())
        self.steps += 1


class Irm:
    """InvariantRiskMinimization/code/colored_mnist/main.py."""

    logits = 1

    def __init__(self, data: TrainingSet, config: Config, schedule: Schedule) -> None:
        self.config, self.schedule, self.steps, self.data = config, schedule, 0, data
        self.model = Linear(data, data.logits if self.logits == 1 else data.n_classes)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters, lr=self.config.lr)

    def loss(self, parts: list[Part], weight_norm: Tensor, penalty_weight: float) -> Tensor:
        logits = [self.model(x) for x, _ in parts]
        train_nll = torch.stack([nll(z, y) for z, (_, y) in zip(logits, parts, strict=True)]).mean()
        penalty = torch.stack([slope_of(z, y) ** 2 for z, (_, y) in zip(logits, parts, strict=True)]).mean()
        return train_nll + self.config.weight_decay * weight_norm + penalty_weight * penalty

    def step(self, epoch: int, batch: Batch, parts: list[Part]) -> None:
        weight_norm = sum(w.norm().pow(2) for w in self.model.parameters)
        penalty_weight = self.config.penalty if self.steps >= self.config.anneal else 1.0
        loss = self.loss(parts, weight_norm, penalty_weight)
        if penalty_weight > 1.0:
            loss = loss / penalty_weight
        descend(self.optimizer, loss)
        self.steps += 1


class Vrex(Irm):
    """REx_code_release/InvariantRiskMinimization/colored_mnist/main.py; its PACS code's penalty for three."""

    def loss(self, parts: list[Part], weight_norm: Tensor, penalty_weight: float) -> Tensor:
        losses = [nll(self.model(x), y) for x, y in parts]
        if len(losses) == 2:
            rex_penalty = (losses[0] - losses[1]) ** 2
        else:
            mu = sum(losses) / len(losses)
            rex_penalty = sum((loss - mu) ** 2 for loss in losses) / len(losses)
        return sum(losses) + self.config.weight_decay * weight_norm + penalty_weight * rex_penalty


class TwoLogits(Irm):
    """Cross-entropy of a logit for every class; the decay is the optimiser's."""

    logits = 2

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            self.model.parameters, lr=self.config.lr, weight_decay=self.config.weight_decay
        )


class GroupDro(TwoLogits):
    """group_DRO/loss.py, robust, without generalization adjustment."""

    def __init__(self, data: TrainingSet, config: Config, schedule: Schedule) -> None:
        super().__init__(data, config, schedule)
        self.n_groups = len(np.unique(data.codes["envs"]))
        self.adv_probs = torch.ones(self.n_groups).double() / self.n_groups

    def step(self, epoch: int, batch: Batch, parts: list[Part]) -> None:
        x, y = (torch.cat(columns) for columns in zip(*parts, strict=True))
        group = torch.cat([torch.full((len(y),), g) for g, (_, y) in enumerate(parts)])
        losses = functional.cross_entropy(self.model(x), y, reduction="none")
        group_map = (group == torch.arange(self.n_groups).unsqueeze(1)).double()
        group_count = group_map.sum(1)
        group_loss = (group_map @ losses) / (group_count + (group_count == 0).double())
        self.adv_probs = self.adv_probs * torch.exp(self.config.eta * group_loss.data)
        self.adv_probs = self.adv_probs / self.adv_probs.sum()
        descend(self.optimizer, group_loss @ self.adv_probs)


class Fish(TwoLogits):
    """fish/src/main.py, with ``meta_steps`` the number of domains."""

    def step(self, epoch: int, batch: Batch, parts: list[Part]) -> None:
        if epoch != getattr(self, "epoch", None):
            self.epoch, self.opt_inner_pre = epoch, None
        inner = copy.deepcopy(self.model)
        opt_inner = torch.optim.Adam(
            inner.parameters, lr=self.config.lr, weight_decay=self.config.weight_decay, amsgrad=True
        )
        if self.opt_inner_pre is not None:
            opt_inner.load_state_dict(self.opt_inner_pre)
        for x, y in parts:
            descend(opt_inner, functional.cross_entropy(inner(x), y))
        self.opt_inner_pre = opt_inner.state_dict()
        meta_lr = self.config.meta_lr / len(parts)
        with torch.no_grad():
            for weight, moved in zip(self.model.parameters, inner.parameters, strict=True):
                weight += meta_lr * (moved - weight)


class Lisa(TwoLogits):
    """LISA/subpopulation_shifts/train.py: ``mix_forward`` of the four groups y · 2 + confounder."""

    def __init__(self, data: TrainingSet, config: Config, schedule: Schedule) -> None:
        super().__init__(data, config, schedule)
        draw, mix = (generator_of(config.seed, stream) for stream in (3, 4))
        self.loaders = CellDraws(DeviceRows(data, "cpu"), schedule.batch_size, draw, mix)
        self.draws = np.random.default_rng([config.seed, int(config.alpha * 1e6)])

    def step(self, epoch: int, batch: Batch, parts: list[Part]) -> None:
        batch = self.loaders.next()
        chosen, strategy = batch._chosen, batch.mixing[0]
        every_y, every_c = torch.tensor(self.data.y)[chosen], torch.tensor(self.data.codes["envs"])[chosen]
        groups = [chosen[every_y * 2 + every_c == g] for g in range(4)]
        x = [torch.tensor(self.data.X)[group] for group in groups]
        y_onehot = [functional.one_hot(torch.tensor(self.data.y)[group], 2).double() for group in groups]
        draws = iter(self.draws.beta(self.config.alpha, self.config.alpha, len(chosen)))

        def mix_up(a: int, b: int) -> Part:
            length = min(len(x[a]), len(x[b]))
            mix = torch.tensor([next(draws) for _ in range(length)])[:, None]
            return tuple(mix * v[a][:length] + (1 - mix) * v[b][:length] for v in (x, y_onehot))

        mixed = [mix_up(0, 1), mix_up(2, 3)] if strategy < self.config.p_sel else [mix_up(0, 2), mix_up(1, 3)]
        mixed_x, mixed_y = (torch.cat(columns) for columns in zip(*mixed, strict=True))
        per_sample = -functional.log_softmax(self.model(mixed_x), dim=-1) * mixed_y
        descend(self.optimizer, per_sample.sum(-1).mean())


class MatchDg(TwoLogits):
    """robustdg/algorithms/erm_match.py with ``pos_metric`` l2 and ``penalty_s`` −1, on every matched pair."""

    def step(self, epoch: int, batch: Batch, parts: list[Part]) -> None:
        data_match = torch.tensor(self.data.X).view(-1, 2, self.data.X.shape[1])
        feat_match = self.model(data_match.view(-1, data_match.shape[2]))
        erm_loss = functional.cross_entropy(feat_match, torch.tensor(self.data.y))
        feat_match = feat_match.view(len(data_match), 2, -1)
        wasserstein_loss = ((feat_match[:, 0] - feat_match[:, 1]) ** 2).sum(1).sum() / len(feat_match)
        penalty_s = -1
        ramp = (epoch - penalty_s) / (self.schedule.epochs - penalty_s)
        descend(self.optimizer, self.config.penalty * ramp * wasserstein_loss + erm_loss)


class DomainBed(TwoLogits):
    """domainbed/algorithms.py: ERM, IRM, VREx, GroupDRO and Fish."""

    def __init__(self, data: TrainingSet, config: Config, schedule: Schedule) -> None:
        super().__init__(data, config, schedule)
        self.q = torch.ones(len(np.unique(data.codes["envs"]))).double()

    def objective(self, parts: list[Part]) -> Tensor:
        config = self.config
        penalty_weight = config.penalty if self.steps >= config.anneal else 1.0
        if config.method == "erm":
            x, y = (torch.cat(columns) for columns in zip(*parts, strict=True))
            return functional.cross_entropy(self.model(x), y)
        losses = torch.stack([functional.cross_entropy(self.model(x), y) for x, y in parts])
        if config.method == "irm":
            penalties = [
                slope_of(self.model(x[::2]), y[::2]) * slope_of(self.model(x[1::2]), y[1::2])
                for x, y in parts
            ]
            return losses.mean() + penalty_weight * sum(penalties) / len(parts)
        if config.method == "vrex":
            return losses.mean() + penalty_weight * ((losses - losses.mean()) ** 2).mean()
        self.q = self.q * (config.eta * losses.data).exp()
        self.q = self.q / self.q.sum()
        return torch.dot(losses, self.q)

    def step(self, epoch: int, batch: Batch, parts: list[Part]) -> None:
        if self.config.method == "fish":
            before = [parameter.detach().clone() for parameter in self.model.parameters]
            for x, y in parts:
                descend(self.optimizer, functional.cross_entropy(self.model(x), y))
            with torch.no_grad():
                for parameter, start in zip(self.model.parameters, before, strict=True):
                    parameter.copy_(start + self.config.meta_lr * (parameter - start))
        else:
            loss = self.objective(parts)
            if self.config.method in ("irm", "vrex") and self.steps == self.config.anneal:
                self.optimizer = self.make_optimizer()
            descend(self.optimizer, loss)
        self.steps += 1


OWN_CODE = {"irm": Irm, "vrex": Vrex, "groupdro": GroupDro, "fish": Fish, "lisa": Lisa, "matchdg": MatchDg}


def reference_of(method: str, protocol: Protocol) -> type | None:
    """The loop to compare with; None where the protocol's authors don't have the method."""
    if protocol == "domainbed":
        return DomainBed if method in ("irm", "vrex", "groupdro", "fish") else None
    return OWN_CODE[method] if protocol == "papers" else Formulas


def trained_by_authors(data: TrainingSet, config: Config, schedule: Schedule) -> Sequence[np.ndarray]:
    """(C, d + 1) weights and bias after each epoch."""
    kind = reference_of(config.method, schedule.protocol)
    assert kind is not None
    loop, probes = kind(data, config, schedule), {}
    for epoch, batch, visited in steps_of(data, schedule, config.seed):
        parts = visited
        if config.method != "fish":
            order = np.argsort([int(environment) for environment, _ in batch.visits])
            parts = [visited[int(i)] for i in order]
        loop.step(epoch, batch, parts)
        probes[epoch] = loop.model.probe()
    return list(probes.values())
