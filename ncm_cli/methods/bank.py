"""The weights of the configurations that step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ncm_cli.methods.config import Config, Schedule
from ncm_cli.methods.objectives import OBJECTIVES, Batch, Erm, probabilities_
from ncm_cli.methods.optim import make_optimizer
from ncm_cli.methods.problem import Problem


class Bank(Protocol):
    """Weights that one batch moves by one step."""

    order: list[int]
    """Which of the given configurations each row of ``weight`` is."""

    @property
    def weight(self) -> Tensor:
        """(R, C, width)."""

    def step(self, batch: Batch, step: int) -> None:
        """Train on one batch; ``step`` counts from 0."""


class _Weights:
    """What both kinds of bank have: weights, optimiser, rank mask."""

    def __init__(self, configs: Sequence[Config], problem: Problem, schedule: Schedule) -> None:
        self._logits, self._dim = problem.data.logits, problem.dim
        self._configs = configs
        like = problem.features
        self._flat = like.new_zeros(len(configs) * self._logits, like.shape[1])
        self._gradient = torch.empty_like(self._flat)
        self._lr = self._per_row([config.lr for config in configs])
        decay = self._per_row([config.weight_decay for config in configs])
        self.decay = decay if bool((decay > 0).any()) else None
        self._optimizer = make_optimizer(
            schedule.optimizer, self._flat, self._lr, self.decay, self._dim, schedule.momentum
        )
        ranks = self._per_row([config.rank for config in configs])
        self._max_rank = int(ranks.max())
        self._keep = (torch.arange(self._max_rank, device=like.device) >= ranks).to(like.dtype)

    def _per_row(self, values: Sequence[float]) -> Tensor:
        """(R·C, 1): one entry a logit."""
        return self._flat.new_tensor(values, dtype=self._flat.dtype).repeat_interleave(self._logits)[:, None]

    @property
    def weight(self) -> Tensor:
        return self._flat.view(len(self._configs), self._logits, -1)

    def _constrain(self) -> None:
        """Keep the weights orthogonal to the first ``rank`` columns, where they started."""
        if self._max_rank:
            self._gradient[:, : self._max_rank].mul_(self._keep)


class SharedBank(_Weights):
    """Configurations whose gradient is one product: all methods but Fish.

    Configurations of one objective lie side by side, so that it sees a slice of the logits.
    """

    def __init__(self, configs: Sequence[Config], problem: Problem, schedule: Schedule) -> None:
        self.order = sorted(range(len(configs)), key=lambda i: (_block(configs[i]), configs[i].p_sel))
        configs = [configs[i] for i in self.order]
        super().__init__(configs, problem, schedule)
        self._blocks: list[tuple[slice, Erm]] = []
        start = 0
        for i, config in enumerate(configs):
            if i + 1 == len(configs) or _block(configs[i + 1]) != _block(config):
                kind = OBJECTIVES[config.method]
                parts = problem.parts[kind.grouping]
                own = slice(start, i + 1)
                self._blocks.append((own, kind(configs[own], self._flat, parts)))
                start = i + 1
        self._pairs = self._pair_penalty(problem)

    def _pair_penalty(self, problem: Problem) -> tuple[slice, Tensor] | None:
        """MatchDG's rows, and (rows, m) factors 2·penalty·σ²/k of its penalty's gradient.

        penalty · mean_j ‖Wᵀδ_j‖² = penalty · tr(W M Wᵀ) with M = mean δδᵀ, diagonal in the coordinates of the
        pairs' own singular vectors (Mahajan et al. 2021, with the logits as
        the representation).
        """
        own = [i for i, config in enumerate(self._configs) if config.method == "matchdg"]
        if not own:
            return None
        rows = slice(own[0] * self._logits, (own[-1] + 1) * self._logits)
        moments = torch.as_tensor(problem.data.pair_moments).to(self._flat)
        penalty = self._per_row([config.penalty for config in self._configs])[rows]
        return rows, 2 * penalty * moments

    def gradient(self, batch: Batch, step: int) -> Tensor:
        """(R·C, width) gradients of the objectives without weight decay, and rescales the decay.

        The same buffer at every call.
        """
        logits = batch.features @ self._flat.T
        by_config = logits.view(len(logits), len(self._configs), self._logits)
        for own, objective in self._blocks:
            self._rescale(own, objective.rescaling(step))
            objective.residual_(by_config[:, own], batch, step)
        torch.mm(logits.T, batch.features, out=self._gradient)
        if self._pairs is not None:
            rows, factors = self._pairs
            width = factors.shape[1]
            self._gradient[rows, :width].addcmul_(self._flat[rows, :width], factors)
        self._constrain()
        return self._gradient

    def _rescale(self, own: slice, factors: Tensor | None) -> None:
        if factors is None or self.decay is None:
            return
        decay = self._flat.new_tensor([config.weight_decay for config in self._configs[own]]) * factors
        rows = slice(own.start * self._logits, own.stop * self._logits)
        self.decay[rows] = decay.repeat_interleave(self._logits)[:, None]

    def step(self, batch: Batch, step: int) -> None:
        self._optimizer.step(self.gradient(batch, step))


def _block(config: Config) -> tuple[str, bool, float]:
    """What configurations of one objective share."""
    return config.method, config.upweighted, config.alpha if config.method == "lisa" else 0.0


class FishBank(_Weights):
    """Fish (Shi et al. 2022, algorithm 1).

    A step clones the weights, takes one optimiser step on each environment's rows of the batch in random
    order, and then moves by ``meta_lr`` towards where that led: θ ← θ + ε(θ̃ − θ). The inner optimiser
    keeps its state between steps, as DomainBed's does; weight decay acts in the inner steps.
    """

    def __init__(self, configs: Sequence[Config], problem: Problem, schedule: Schedule) -> None:
        self.order = list(range(len(configs)))
        super().__init__(configs, problem, schedule)
        self._meta = self._per_row([config.meta_lr for config in configs])
        self._before = torch.empty_like(self._flat)
        self._upweighted = [config.upweighted for config in configs]

    def step(self, batch: Batch, step: int) -> None:
        self._before.copy_(self._flat)
        for environment, rows in batch.visits():
            features = batch.features.index_select(0, rows)
            logits = (features @ self._flat.T).view(len(rows), len(self._configs), self._logits)
            residual = probabilities_(logits).sub_(batch.targets.index_select(0, rows))
            residual.mul_(self._shares(batch, environment, rows)[:, :, None])
            torch.mm(residual.view(len(rows), -1).T, features, out=self._gradient)
            self._constrain()
            self._optimizer.step(self._gradient)
        torch.lerp(self._before, self._flat, self._meta, out=self._flat)

    def _shares(self, batch: Batch, environment: int, rows: Tensor) -> Tensor:
        """(rows, R) shares in the environment's risk, or (rows, 1) where all configurations weight alike."""
        kinds = sorted(set(self._upweighted))
        found = [batch.shares("environments", kind)[rows, environment, None] for kind in kinds]
        if len(found) == 1:
            return found[0]
        return torch.where(torch.tensor(self._upweighted, device=rows.device), found[1], found[0])
