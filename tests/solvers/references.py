"""Plain autograd implementations of the methods' formulas, written from the papers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """(n,) log losses of (n, C) logits; targets are class codes, or (n, classes) distributions."""
    if logits.shape[1] == 1:
        soft = targets.double() if targets.ndim == 1 else targets[:, 1]
        return functional.binary_cross_entropy_with_logits(logits[:, 0], soft, reduction="none")
    return functional.cross_entropy(logits, targets, reduction="none")


def risk(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (losses(logits, targets) * weights).sum() / weights.sum()


class Problem:
    """A random problem, binary or multi-class, float64."""

    def __init__(self, seed: int, classes: int, *, n: int = 60, d: int = 7, environments: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.classes, self.logits = classes, 1 if classes == 2 else classes
        self.features = rng.standard_normal((n, d))
        self.targets = rng.permutation(np.arange(n) % classes)
        self.environments = rng.permutation(np.arange(n) % environments)
        self.row_weights = rng.uniform(0.2, 3.0, n)
        self.delta = rng.standard_normal((d, 9)) @ np.diag(rng.uniform(0.1, 2, 9))
        self.weight = rng.standard_normal((self.logits, d))
        self.bias = rng.standard_normal(self.logits)

    def gradient(self, objective, upweighted: bool = False) -> np.ndarray:
        """(C, d + 1) gradient of ``objective(logits, targets, environments, weights, W)`` by autograd."""
        weight = torch.tensor(self.weight, requires_grad=True)
        bias = torch.tensor(self.bias, requires_grad=True)
        logits = torch.tensor(self.features) @ weight.T + bias
        weights = torch.tensor(self.row_weights) if upweighted else torch.ones(len(self.targets)).double()
        value = objective(
            logits, torch.tensor(self.targets), torch.tensor(self.environments), weights, weight
        )
        value.backward()
        return np.concatenate([weight.grad.numpy(), bias.grad.numpy()[:, None]], axis=1)


def by_environment(logits, targets, environments, weights):
    for e in environments.unique():
        own = environments == e
        yield logits[own], targets[own], weights[own]


def erm(logits, targets, environments, weights, weight):
    return risk(logits, targets, weights)


def irm(penalty: float):
    """mean_e R_e + β mean_e ‖∇_{s|s=1} R_e(s·z)‖², divided by β when β > 1 (Arjovsky et al. 2019)."""

    def objective(logits, targets, environments, weights, weight):
        risks, penalties = [], []
        for z, y, w in by_environment(logits, targets, environments, weights):
            scale = torch.ones((), dtype=torch.float64, requires_grad=True)
            value = risk(z * scale, y, w)
            slope = torch.autograd.grad(value, scale, create_graph=True)[0]
            risks.append(value)
            penalties.append(slope**2)
        return (torch.stack(risks).mean() + penalty * torch.stack(penalties).mean()) / max(penalty, 1.0)

    return objective


def vrex(penalty: float):
    """mean_e R_e + β Var_e R_e, divided by β when β > 1 (Krueger et al. 2021)."""

    def objective(logits, targets, environments, weights, weight):
        risks = torch.stack([risk(*part) for part in by_environment(logits, targets, environments, weights)])
        return (risks.mean() + penalty * risks.var(unbiased=False)) / max(penalty, 1.0)

    return objective


def groupdro(eta: float):
    """q ← q exp(ηR)/Σ from uniform q, then Σ q R with q held (Sagawa et al. 2020)."""

    def objective(logits, targets, environments, weights, weight):
        risks = torch.stack([risk(*part) for part in by_environment(logits, targets, environments, weights)])
        q = torch.full_like(risks, 1 / len(risks)) * (eta * risks.detach()).exp()
        return (q / q.sum() * risks).sum()

    return objective


def matchdg(penalty: float, delta: np.ndarray):
    """Mean loss + penalty · mean over pairs of ‖W(x_a − x_b)‖² (Mahajan et al. 2021, on logits)."""

    def objective(logits, targets, environments, weights, weight):
        gaps = weight @ torch.tensor(delta)
        return risk(logits, targets, weights) + penalty * (gaps**2).sum(0).mean()

    return objective


def lisa(features: np.ndarray, classes: int, mix: np.ndarray, partner: np.ndarray, bias: np.ndarray):
    """The loss on λx_i + (1−λ)x_j and λy_i + (1−λ)y_j (Yao et al. 2022), made on the features themselves."""

    def objective(logits, targets, environments, weights, weight):
        share = torch.tensor(mix)[:, None]
        x = torch.tensor(features)
        hot = functional.one_hot(targets, classes).double()
        mixed = share * x + (1 - share) * x[partner]
        label = share * hot + (1 - share) * hot[partner]
        # The bias is added through logits − xW so that its gradient flows.
        offset = logits - x @ weight.T
        return risk(mixed @ weight.T + offset, label, weights)

    return objective
