"""Trains many configurations (`ncm_cli.solvers.methods.Config`) of linear probes at once.

The weights of R configurations with C logits each are one (R, C, d) tensor. A step is one product of the
batch with all of them, each method's derivative on its own columns (`objectives`), one product back, and one
step of Adam. Gradients are in closed form: no autograd, no loop over configurations. Weights start at zero
and come back in the given coordinates.

The shape suffix ``md`` is (rows, columns): a row is one logit of one configuration.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ncm_cli.errors import InputError, UsageError
from ncm_cli.solvers.batches import Batch, CellDraws, DeviceRows, drawn_batches, epoch_batches, generator_of
from ncm_cli.solvers.methods import METHODS, Config, Protocol, form_of
from ncm_cli.solvers.objectives import OBJECTIVES, Erm, probabilities_
from ncm_cli.solvers.training_set import Fit, TrainingSet


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How all configurations of a run are trained.

    ``protocol`` decides what a published setting means; ``ncm help methods`` compares the protocols. With
    ``common``, for all methods and as in ``ncm fit``: the papers' formulas, two classes have one logit, the
    bias isn't decayed, and an epoch passes over every row once, each batch holding the environments in
    proportion. With ``papers`` a hyper-parameter means what it means in the code of the method's authors,
    whose logits, decay (`Form`), annealing and ramp are used; batches (except lisa's), epochs and Adam are
    those of ``common``. In ``domainbed`` (Gulrajani and Lopez-Paz 2021) a batch holds ``batch_size`` rows of
    *each* environment, an epoch is as many batches as are needed for n rows, and methods that DomainBed
    doesn't have (ncm, lisa, matchdg, leace) use its logits, optimiser and batches.

    For two classes, training two logits with learning rate lr and weight decay λ gives the same probe as
    training one logit w = w₁ − w₀ with 2·lr and λ/2. Weights start at zero, so w₁ = −w₀ = w/2 at every step.
    The gradient of w₁, decay λ·w₁ included, then equals that of w with decay (λ/2)·w, so Adam moves w₁ as it
    would move w, and w = 2·w₁ moves twice as far. A penalty on pairs is halved as λ is. Forms with two
    logits are computed with one in this way, so a binary probe always has one logit.
    """

    epochs: int = 100
    batch_size: int = 256
    """0: the full batch."""
    protocol: Protocol = "common"
    last: int | None = None
    """The epoch to stop after, if it isn't the last one; the steps up to there are the same."""


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) with β = (0.9, 0.999), ε = 1e-8, as in ``torch.optim.Adam``.

    The rows of the matrix have their own learning rates and weight decays, so that many configurations take
    their step in a handful of passes.

    Parameters
    ----------
    parameters_md
        Changed in place.
    lr
        (rows, 1) learning rates.
    decay
        (rows, 1) or (rows, penalised) weight decays λ, or None: λw is added to the gradient. May be replaced
        between steps.
    penalised
        How many leading columns the decay applies to; a bias behind them stays free.
    amsgrad
        Divide by the largest mean square so far (Reddi et al. 2018).
    """

    def __init__(
        self,
        parameters_md: Tensor,
        lr: Tensor,
        decay: Tensor | None,
        penalised: int,
        *,
        amsgrad: bool = False,
    ) -> None:
        self.parameters, self.lr, self.decay, self.penalised = parameters_md, lr, decay, penalised
        self._age = torch.zeros_like(lr)
        self._mean = torch.zeros_like(parameters_md)
        self._square = torch.zeros_like(parameters_md)
        self._largest = torch.zeros_like(parameters_md) if amsgrad else None
        self._denominator = torch.empty_like(parameters_md)

    def step(self, gradient_md: Tensor) -> None:
        """One update in place; the gradient is used up.

        torch writes m / (√v/√c₂ + ε) · lr/c₁; multiplying both parts by √c₂ saves a pass over memory.
        """
        beta_1, beta_2, epsilon = 0.9, 0.999, 1e-8
        self._age += 1
        if self.decay is not None:
            gradient_md[:, : self.penalised].addcmul_(self.parameters[:, : self.penalised], self.decay)
        self._mean.lerp_(gradient_md, 1 - beta_1)
        self._square.mul_(beta_2).addcmul_(gradient_md, gradient_md, value=1 - beta_2)
        square = self._square
        if self._largest is not None:
            square = torch.maximum(self._largest, square, out=self._largest)
        root = (1 - beta_2**self._age).sqrt_()
        denominator = torch.sqrt(square, out=self._denominator).add_(root, alpha=epsilon)
        torch.div(self._mean, denominator, out=denominator)
        self.parameters.addcmul_(denominator, self.lr * root / (1 - beta_1**self._age), value=-1)

    def reset(self, rows: Tensor) -> None:
        """Reset the rows' moments and their bias correction."""
        for state in (self._age, self._mean, self._square, self._largest):
            if state is not None:
                state[rows] = 0


def _place(config: Config, protocol: Protocol) -> tuple[int, str, bool, float, float]:
    """Sort key of configurations: the kind of weights, then what one objective shares, then ``p_sel``."""
    kind = 2 if config.method == "fish" else 1 if config.method == "ncm" and config.rank else 0
    if config.method == "lisa" and protocol == "papers":
        kind = 3
    alpha = config.alpha if config.method == "lisa" else 0.0
    return kind, config.method, config.upweighted, alpha, config.p_sel


class SharedWeights:
    """The weights of configurations that a batch updates by one product: of all methods but fish.

    Configurations of one objective lie side by side (they come sorted by `_place`), so that each objective
    gets one slice of the logits. All train in the given coordinates, whether there are pairs or not, except
    `ncm` of rank 1 and more: its features are rotated into [basis, complement], where rank r is a mask on the
    first r weights, which start at zero and stay zero. (At rank 0 nothing is removed and nothing is rotated:
    it is ``erm`` to the last bit. Adam, unlike plain gradient descent, isn't invariant to rotations.)
    """

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, schedule: Schedule) -> None:
        self._configs, self._rows, self._logits = configs, rows, rows.training.logits
        self._flat = rows.targets.new_zeros(len(configs) * self._logits, rows.width)
        self._gradient = torch.empty_like(self._flat)
        self._schedule, protocol = schedule, schedule.protocol
        forms = [form_of(config.method, protocol) for config in configs]
        # Two logits as one: see `Schedule`.
        self._twofold = self._of_rows(1 + (form.two_logits and self._logits == 1) for form in forms)
        self._decay = (
            self._per_row("weight_decay") * self._of_rows(form.decay for form in forms) / self._twofold
        )
        free = [not form.bias_decays for form in forms]
        if any(free) and not all(free):
            self._decay = self._decay.repeat(1, rows.dim + 1)
            self._decay[self._of_rows(free)[:, 0] > 0, rows.dim] = 0
        self.adam = Adam(
            self._flat,
            self._per_row("lr") * self._twofold,
            self._decay.clone() if bool((self._decay > 0).any()) else None,
            rows.dim + (not all(free)),
            amsgrad=protocol == "papers" and configs[0].method == "fish",
        )
        self._blocks: list[tuple[slice, Erm]] = []
        for (_, method, *_), of_method in itertools.groupby(
            configs, lambda config: _place(config, protocol)[:-1]
        ):
            method_configs, start = list(of_method), self._blocks[-1][0].stop if self._blocks else 0
            objective = OBJECTIVES.get(method, Erm)(method_configs, rows, protocol=protocol)
            self._blocks.append((slice(start, start + len(method_configs)), objective))
        self._pairs = self._pair_penalty()
        self._ramp = 1.0
        self._keep: Tensor | None = None
        self._turn: Tensor | None = None
        if configs[0].method == "ncm" and configs[0].rank:
            ranks = self._per_row("rank")
            self._turn = rows.turn
            self._keep = (torch.arange(int(ranks.max()), device=ranks.device) >= ranks).to(ranks.dtype)

    def _per_row(self, name: str) -> Tensor:
        """(R·C, 1) float64: a hyper-parameter, one entry per logit."""
        return self._of_rows(getattr(config, name) for config in self._configs)

    def _of_rows(self, values: Iterable[float]) -> Tensor:
        """(R·C, 1) float64: a value of each configuration, one entry per logit."""
        return self._flat.new_tensor(list(values)).repeat_interleave(self._logits)[:, None]

    @property
    def weight(self) -> Tensor:
        """(R, C, width) weights, then the bias, then zeros."""
        return self._flat.view(len(self._configs), self._logits, -1)

    def probes(self) -> tuple[Tensor, Tensor]:
        """(R, C, d) weights in the given coordinates, and (R, C) biases."""
        weight, bias = self.weight[..., : self._rows.dim].clone(), self.weight[..., self._rows.dim].clone()
        if self._keep is not None:
            weight = weight @ torch.from_numpy(self._rows.rotation).T.to(weight.device)
        return weight, bias

    def _pair_penalty(self) -> tuple[slice, Tensor, Tensor] | None:
        """MatchDG's rows, the (width, m) basis, and (rows, m) factors 2·penalty·σ²/k.

        penalty · mean_j ‖Wᵀδ_j‖² = penalty · tr(W M Wᵀ) with M = mean δδᵀ, diagonal in the coordinates of the
        pairs' own singular vectors (Mahajan et al. 2021, with the logits as the representation).
        """
        penalised = [i for i, config in enumerate(self._configs) if config.method == "matchdg"]
        if not penalised:
            return None
        rows = slice(penalised[0] * self._logits, (penalised[-1] + 1) * self._logits)
        training = self._rows.training
        basis = torch.as_tensor(training.basis(training.rank)).to(self._flat)
        moments = torch.as_tensor(training.moments).to(self._flat)
        padded = self._flat.new_zeros(self._rows.width, basis.shape[1])
        padded[: self._rows.dim] = basis
        return rows, padded, 2 * (self._per_row("penalty") / self._twofold)[rows] * moments

    def begin_epoch(self, epoch: int) -> None:
        """Prepare for an epoch (from 1). With ``papers``, matchdg's penalty grows by epoch as in its code."""
        if self._schedule.protocol == "papers":
            self._ramp = epoch / (self._schedule.epochs + 1)

    def gradient(self, batch: Batch, step: int) -> Tensor:
        """(R·C, width) gradients of the objectives without weight decay; the decay's factor is updated.

        Every call returns the same buffer.
        """
        rotated = self._keep is not None
        logits = self._logits_of(batch.features(rotated), len(batch.targets))
        by_config = logits.view(len(logits), len(self._configs), self._logits)
        for block, objective in self._blocks:
            beginning = objective.begin(step)
            if beginning is not None:
                self._adapt(block, objective, beginning)
            objective.residual_(by_config[:, block], batch)
        self._back(logits, batch.features(rotated))
        if self._pairs is not None:
            rows, basis, factors = self._pairs
            self._gradient[rows] += (self._flat[rows] @ basis * (factors * self._ramp)) @ basis.T
        if self._keep is not None:
            self._gradient[:, : self._keep.shape[1]].mul_(self._keep)
        return self._gradient

    def _logits_of(self, features: Iterator[tuple[slice, Tensor]], count: int) -> Tensor:
        """(count, R·C) logits of rows."""
        logits = self._flat.new_empty(count, len(self._flat))
        weights = self._flat if self._turn is None else self._flat @ self._turn.T
        for part, rows in features:
            torch.mm(rows, weights.T, out=logits[part])
        return logits

    def _back(self, residual: Tensor, features: Iterator[tuple[slice, Tensor]]) -> None:
        """Compute the gradient from rows' residuals (B, R·C)."""
        for part, rows in features:
            self._gradient.addmm_(residual[part].T, rows, beta=int(part.start > 0))
        if self._turn is not None:
            self._gradient.copy_(self._gradient @ self._turn)

    def _adapt(self, block: slice, objective: Erm, beginning: Tensor) -> None:
        """When a penalty begins, restart the optimiser (domainbed) or rescale the decay too (the others)."""
        rows = slice(block.start * self._logits, block.stop * self._logits)
        if self._schedule.protocol == "domainbed":
            self.adam.reset(rows.start + beginning.repeat_interleave(self._logits).nonzero()[:, 0])
        elif self.adam.decay is not None:
            scale = objective.scale.repeat_interleave(self._logits)[:, None]
            self.adam.decay[rows] = self._decay[rows] * scale

    def step(self, batch: Batch, step: int) -> None:
        """Train on one batch; ``step`` counts from 0."""
        self.adam.step(self.gradient(batch, step))


class FishWeights(SharedWeights):
    """Fish (Shi et al. 2022, algorithm 1).

    A step clones the weights, takes one optimiser step on each environment's rows of the batch in random
    order (DomainBed: in order), and then moves by ε = ``meta_lr`` towards the result: θ ← θ + ε(θ̃ − θ). The
    inner optimiser keeps its state between steps, as DomainBed's does; weight decay acts in the inner steps.
    The authors' own code (``papers``) divides ``meta_lr`` by the number of inner steps, uses AMSGrad, and
    begins every epoch with a new inner optimiser.
    """

    def begin_epoch(self, epoch: int) -> None:
        """With ``papers``, forget the inner optimiser's state."""
        super().begin_epoch(epoch)
        if self._schedule.protocol == "papers":
            self.adam.reset(torch.arange(len(self._flat)))

    def step(self, batch: Batch, step: int) -> None:
        before = self._flat.clone()
        for environment, rows in batch.visits:
            flat = self._logits_of(batch.features(within=rows), len(rows))
            logits = flat.view(len(rows), len(self._configs), self._logits)
            residual = probabilities_(logits).sub_(batch.targets.index_select(0, rows))
            for block, objective in self._blocks:
                shares = batch.shares("environments", objective.upweighted)
                residual[:, block].mul_(shares[rows, environment, None, None])
            self._back(residual.view(len(rows), -1), batch.features(within=rows))
            self.adam.step(self._gradient)
        torch.lerp(before, self._flat, self._meta_lr, out=self._flat)

    @cached_property
    def _meta_lr(self) -> Tensor:
        steps = self._rows.members["environments"].shape[1] if self._schedule.protocol == "papers" else 1
        return self._per_row("meta_lr") / steps


class LisaWeights(SharedWeights):
    """LISA as its authors train it for subpopulation shifts (``papers``): on rows drawn by `CellDraws`."""

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, schedule: Schedule) -> None:
        super().__init__(configs, rows, schedule)
        draw, mix = (generator_of(configs[0].seed, stream) for stream in (3, 4))
        self._draws = CellDraws(rows, schedule.batch_size, draw, mix)

    def step(self, batch: Batch, step: int) -> None:
        """Train on rows of its own in place of the batch's."""
        super().step(self._draws.next(), step)


Observer = Callable[[int, list[int], Any, Any], None]
"""Called with the epoch (from 1), the positions of the R configurations of one seed, and their weights
(R, C, d) and biases (R, C), float64, in the given coordinates."""


def train(
    configs: Sequence[Config],
    training: TrainingSet,
    schedule: Schedule | None = None,
    *,
    device: str = "cpu",
    observe: Observer | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[Fit]:
    """Train every configuration; returns the probes after the last epoch, in the order given.

    Configurations of one seed train side by side on the same batches; seeds follow one another. Which other
    configurations are trained changes a probe only by float64's rounding of matrix products of another width.

    Parameters
    ----------
    observe
        Called after each epoch with the weights of one seed.
    advance
        Called after each epoch with the number of configurations that went through it.

    Raises
    ------
    InputError
        A method needs environments or pairs that ``training`` lacks, or a rank is beyond the basis.
    """
    schedule = schedule or Schedule()
    protocol = schedule.protocol
    _check(configs, training)
    rows = DeviceRows(training, device)
    results: dict[int, Fit] = {}
    for seed in dict.fromkeys(config.seed for config in configs):
        indices = [i for i, config in enumerate(configs) if config.seed == seed]
        order = sorted(indices, key=lambda i: _place(configs[i], protocol))
        kinds = itertools.groupby((configs[i] for i in order), lambda config: _place(config, protocol)[0])
        families = [
            {2: FishWeights, 3: LisaWeights}.get(kind, SharedWeights)(list(family), rows, schedule)
            for kind, family in kinds
        ]
        # Each use has its own stream of random numbers.
        draw, mix, visit = (generator_of(seed, stream) for stream in range(3))
        steps, last = 0, schedule.last or schedule.epochs
        for epoch in range(1, last + 1):
            batches = drawn_batches if protocol == "domainbed" else epoch_batches
            for weights in families:
                weights.begin_epoch(epoch)
            for chosen in batches(rows.strata, rows.n, schedule.batch_size, draw):
                batch = Batch(rows, chosen, mix, None if protocol == "domainbed" else visit)
                for weights in families:
                    weights.step(batch, steps)
                steps += 1
            if observe or epoch == last:
                parts = zip(*(weights.probes() for weights in families), strict=True)
                weight, bias = (torch.cat(training)[np.argsort(order)].cpu().numpy() for training in parts)
            if observe:
                observe(epoch, indices, weight, bias)
            if advance:
                advance(len(indices))
        for i, family, offset in zip(indices, weight, bias, strict=True):
            finite = bool(np.isfinite(family).all() and np.isfinite(offset).all())
            results[i] = Fit(configs[i].rank, configs[i].weight_decay, family, offset, finite, steps)
    return [results[i] for i in range(len(configs))]


def _check(configs: Sequence[Config], training: TrainingSet) -> None:
    if training.n_classes < 2:
        raise InputError("the training rows hold one class only", expected="at least two classes")
    for config in configs:
        if config.method == "dfr":
            raise UsageError("dfr isn't trained by steps", fix="ncm_cli.solvers.dfr.fit_dfr")
        if "envs" in METHODS[config.method].needs and "envs" not in training.codes:
            raise InputError(f"{config.method} needs environments", fix="name their column with --envs")
        if config.method == "matchdg" and not training.rank:
            raise InputError("matchdg needs pairs", fix="give a pair store with --pairs")
        if config.method == "ncm" and config.rank > training.rank:
            raise InputError(
                f"rank {config.rank} is more than the pairs span",
                expected=f"at most {training.rank}",
                fix="more pairs",
            )
