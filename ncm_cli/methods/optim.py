"""Adam and SGD over a matrix whose rows have their own learning rates and weight decays.

Shape suffixes: ``md`` is (rows, columns). A row is one logit of one configuration, so that many
configurations take their step in a handful of passes over one matrix. The arithmetic is that of
``torch.optim.Adam`` and ``torch.optim.SGD`` with their defaults, weight decay added to the gradient.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

OPTIMIZERS = ("adam", "sgd")


class Optimizer(Protocol):
    """What the trainer asks of an optimiser."""

    decay: Tensor | None
    """(rows, 1) weight decays, or None: the trainer replaces it when an objective is rescaled."""

    def step(self, gradient_md: Tensor) -> None:
        """Move the parameters in place; the gradient is used up."""

    def reset(self, rows: Tensor) -> None:
        """Make some rows' next step that of a new optimiser."""


def _add_decay(gradient_md: Tensor, parameters_md: Tensor, decay: Tensor | None, penalised: int) -> None:
    """Add λw to the first ``penalised`` columns; a bias behind them stays free."""
    if decay is not None:
        gradient_md[:, :penalised].addcmul_(parameters_md[:, :penalised], decay)


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) with β = (0.9, 0.999), ε = 1e-8.

    Parameters
    ----------
    parameters_md
        (rows, columns), changed in place.
    lr
        (rows, 1) learning rates.
    decay
        (rows, 1) weight decays, or None.
    penalised
        How many leading columns the decay applies to.
    """

    def __init__(self, parameters_md: Tensor, lr: Tensor, decay: Tensor | None, penalised: int) -> None:
        self.parameters, self.lr, self.decay, self.penalised = parameters_md, lr, decay, penalised
        self._age = torch.zeros_like(lr)
        self._mean = torch.zeros_like(parameters_md)
        self._square = torch.zeros_like(parameters_md)
        self._denominator = torch.empty_like(parameters_md)

    def step(self, gradient_md: Tensor) -> None:
        """One update in place.

        torch writes m / (√v/√c₂ + ε) · lr/c₁; multiplying both parts by √c₂ saves a pass over memory.
        """
        beta_1, beta_2, epsilon = 0.9, 0.999, 1e-8
        self._age += 1
        _add_decay(gradient_md, self.parameters, self.decay, self.penalised)
        self._mean.lerp_(gradient_md, 1 - beta_1)
        self._square.mul_(beta_2).addcmul_(gradient_md, gradient_md, value=1 - beta_2)
        root = (1 - beta_2**self._age).sqrt_()
        denominator = torch.sqrt(self._square, out=self._denominator).add_(root, alpha=epsilon)
        torch.div(self._mean, denominator, out=denominator)
        self.parameters.addcmul_(denominator, self.lr * root / (1 - beta_1**self._age), value=-1)

    def reset(self, rows: Tensor) -> None:
        """Forget the rows' moments, and start their bias correction anew."""
        for state in (self._age, self._mean, self._square):
            state[rows] = 0


class Sgd:
    """Stochastic gradient descent with momentum μ: b ← μb + g, w ← w − lr·b (as torch writes it)."""

    def __init__(
        self, parameters_md: Tensor, lr: Tensor, decay: Tensor | None, penalised: int, momentum: float = 0.0
    ) -> None:
        self.parameters, self.lr, self.decay, self.penalised = parameters_md, lr, decay, penalised
        self._momentum = momentum
        self._buffer = torch.zeros_like(parameters_md) if momentum else None

    def step(self, gradient_md: Tensor) -> None:
        """One update in place."""
        _add_decay(gradient_md, self.parameters, self.decay, self.penalised)
        if self._buffer is not None:
            gradient_md = self._buffer.mul_(self._momentum).add_(gradient_md)
        self.parameters.addcmul_(gradient_md, self.lr, value=-1)

    def reset(self, rows: Tensor) -> None:
        """Forget the rows' momentum."""
        if self._buffer is not None:
            self._buffer[rows] = 0


def make_optimizer(
    name: str, parameters_md: Tensor, lr: Tensor, decay: Tensor | None, penalised: int, momentum: float
) -> Optimizer:
    """The optimiser of a name in `OPTIMIZERS`."""
    if name == "adam":
        return Adam(parameters_md, lr, decay, penalised)
    return Sgd(parameters_md, lr, decay, penalised, momentum)
