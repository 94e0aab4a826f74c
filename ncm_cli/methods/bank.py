"""The weights of the configurations that step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ncm_cli.methods.config import Config, Schedule
from ncm_cli.methods.objectives import Batch, Erm, objective_of, probabilities_
from ncm_cli.methods.optim import make_optimizer
from ncm_cli.methods.problem import Problem


class Bank(Protocol):
    """Weights that one batch moves by one step."""

    order: list[int]
    """Which of the given configurations each row of ``weight`` is."""

    @property
    def weight(self) -> Tensor:
        """(R, C, width) weights, then the bias, then zeros."""

    def probes(self) -> tuple[Tensor, Tensor]:
        """(R, C, d) weights in the given coordinates, and (R, C) biases."""

    def step(self, batch: Batch, step: int) -> None:
        """Train on one batch; ``step`` counts from 0."""


class _Weights:
    """What all kinds of bank have: weights and their optimiser."""

    def __init__(self, configs: Sequence[Config], problem: Problem, schedule: Schedule) -> None:
        self._logits, self._dim = problem.data.logits, problem.dim
        self._configs = configs
        self._flat = torch.zeros(
            len(configs) * self._logits, problem.width, dtype=torch.float64, device=problem.device
        )
        self._gradient = torch.empty_like(self._flat)
        # Two logits as one: see `Schedule`.
        self._twofold = 2 if schedule.domainbed and self._logits == 1 else 1
        decay = self._per_row([config.weight_decay / self._twofold for config in configs])
        self.decay = decay if bool((decay > 0).any()) else None
        self._optimizer = make_optimizer(
            schedule.optimizer,
            self._flat,
            self._per_row([config.lr * self._twofold for config in configs]),
            self.decay,
            self._dim + schedule.domainbed,
            schedule.momentum,
        )

    def _per_row(self, values: Sequence[float]) -> Tensor:
        """(R·C, 1): one entry a logit."""
        return self._flat.new_tensor(values).repeat_interleave(self._logits)[:, None]

    @property
    def weight(self) -> Tensor:
        return self._flat.view(len(self._configs), self._logits, -1)

    def probes(self) -> tuple[Tensor, Tensor]:
        return self.weight[..., : self._dim].clone(), self.weight[..., self._dim].clone()


class SharedBank(_Weights):
    """Configurations whose gradient is one product: all methods but Fish.

    Configurations of one objective lie side by side, so that it sees a slice of the logits.
    """

    def __init__(self, configs: Sequence[Config], problem: Problem, schedule: Schedule) -> None:
        self.order = sorted(range(len(configs)), key=lambda i: (_block(configs[i]), configs[i].p_sel))
        configs = [configs[i] for i in self.order]
        super().__init__(configs, problem, schedule)
        self._restarts = schedule.domainbed
        self._blocks: list[tuple[slice, Erm]] = []
        start = 0
        for i, config in enumerate(configs):
            if i + 1 == len(configs) or _block(configs[i + 1]) != _block(config):
                kind = objective_of(config.method, domainbed=schedule.domainbed)
                own = slice(start, i + 1)
                self._blocks.append((own, kind(configs[own], self._flat, problem.parts[kind.grouping])))
                start = i + 1
        self._pairs = self._pair_penalty(problem)

    def _pair_penalty(self, problem: Problem) -> tuple[slice, Tensor, Tensor] | None:
        """MatchDG's rows, the (width, m) basis, and (rows, m) factors 2·penalty·σ²/k.

        penalty · mean_j ‖Wᵀδ_j‖² = penalty · tr(W M Wᵀ) with M = mean δδᵀ, diagonal in the coordinates of the
        pairs' own singular vectors (Mahajan et al. 2021, with the logits as
        the representation).
        """
        own = [i for i, config in enumerate(self._configs) if config.method == "matchdg"]
        if not own:
            return None
        rows = slice(own[0] * self._logits, (own[-1] + 1) * self._logits)
        basis = torch.as_tensor(problem.data.basis).to(self._flat)
        padded = self._flat.new_zeros(problem.width, basis.shape[1])
        padded[: problem.dim] = basis
        moments = torch.as_tensor(problem.data.pair_moments).to(self._flat)
        penalty = self._per_row([config.penalty / self._twofold for config in self._configs])[rows]
        return rows, padded, 2 * penalty * moments

    def _features(self, batch: Batch) -> Tensor:
        return batch.given()

    def gradient(self, batch: Batch, step: int) -> Tensor:
        """(R·C, width) gradients of the objectives without weight decay, which it rescales.

        The same buffer at every call.
        """
        features = self._features(batch)
        logits = features @ self._flat.T
        by_config = logits.view(len(logits), len(self._configs), self._logits)
        for own, objective in self._blocks:
            beginning = objective.begin(step)
            if beginning is not None:
                self._adapt(own, objective, beginning)
            objective.residual_(by_config[:, own], batch)
        torch.mm(logits.T, features, out=self._gradient)
        if self._pairs is not None:
            rows, basis, factors = self._pairs
            self._gradient[rows] += (self._flat[rows] @ basis * factors) @ basis.T
        return self._gradient

    def _adapt(self, own: slice, objective: Erm, beginning: Tensor) -> None:
        """Where a penalty begins, restart the optimiser (domainbed) or divide the decay too (papers)."""
        rows = slice(own.start * self._logits, own.stop * self._logits)
        if self._restarts:
            self._optimizer.reset(rows.start + beginning.repeat_interleave(self._logits).nonzero()[:, 0])
        elif self.decay is not None:
            decay = self._flat.new_tensor([config.weight_decay for config in self._configs[own]])
            self.decay[rows] = (decay * objective.scale).repeat_interleave(self._logits)[:, None]

    def step(self, batch: Batch, step: int) -> None:
        self._optimizer.step(self.gradient(batch, step))


class RotatedBank(SharedBank):
    """``ncm`` of rank 1 and more, in the coordinates [basis, complement].

    Rank r is then a mask on the first r weights, where they start at zero and stay; it changes nothing else.
    """

    def __init__(self, configs: Sequence[Config], problem: Problem, schedule: Schedule) -> None:
        super().__init__(configs, problem, schedule)
        self._unrotate = problem.unrotate
        ranks = self._per_row([config.rank for config in self._configs])
        self._keep = (torch.arange(int(ranks.max()), device=ranks.device) >= ranks).to(ranks.dtype)

    def _features(self, batch: Batch) -> Tensor:
        return batch.rotated()

    def gradient(self, batch: Batch, step: int) -> Tensor:
        """`SharedBank.gradient`, orthogonal to each configuration's first ``rank`` directions."""
        gradient = super().gradient(batch, step)
        gradient[:, : self._keep.shape[1]].mul_(self._keep)
        return gradient

    def probes(self) -> tuple[Tensor, Tensor]:
        weight, bias = super().probes()
        return self._unrotate(weight), bias


def _block(config: Config) -> tuple[str, bool, float]:
    """What configurations of one objective share."""
    return config.method, config.upweighted, config.alpha if config.method == "lisa" else 0.0


class FishBank(_Weights):
    """Fish (Shi et al. 2022, algorithm 1).

    A step clones the weights, takes one optimiser step on each environment's rows of the batch in random
    order (DomainBed: in order), and then moves by ``meta_lr`` towards where that led: θ ← θ + ε(θ̃ − θ). The
    inner optimiser keeps its state between steps, as DomainBed's does; weight decay acts in the inner steps.
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
            features = batch.given().index_select(0, rows)
            logits = (features @ self._flat.T).view(len(rows), len(self._configs), self._logits)
            residual = probabilities_(logits).sub_(batch.targets.index_select(0, rows))
            residual.mul_(self._shares(batch, environment, rows)[:, :, None])
            torch.mm(residual.view(len(rows), -1).T, features, out=self._gradient)
            self._optimizer.step(self._gradient)
        torch.lerp(self._before, self._flat, self._meta, out=self._flat)

    def _shares(self, batch: Batch, environment: int, rows: Tensor) -> Tensor:
        """(rows, R) shares in the environment's risk, or (rows, 1) where all configurations weight alike."""
        kinds = sorted(set(self._upweighted))
        found = [batch.shares("environments", kind)[rows, environment, None] for kind in kinds]
        if len(found) == 1:
            return found[0]
        return torch.where(torch.tensor(self._upweighted, device=rows.device), found[1], found[0])
