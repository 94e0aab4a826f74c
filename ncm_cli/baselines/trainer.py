"""Adam and SGD over a matrix whose rows have their own learning rates and weight decays.

Shape suffixes: ``md`` is (rows, columns). A row is one logit of one configuration, so that many
configurations take their step in a handful of passes over one matrix. The arithmetic is that of
``torch.optim.Adam`` and ``torch.optim.SGD`` with their defaults, weight decay added to the gradient.

The weights of the configurations that step together.

Trains many configurations of linear probes at once.

The weights of R configurations with C logits each are one (R, C, d) tensor. A step is one product of the
batch with all of them, each method's derivative on its own columns (`objectives`), one product back, and one
optimiser update. Gradients are in closed form: no autograd, no loop over configurations.

All methods train in the given coordinates, whether there are pairs or not, except ``ncm``: its features are
rotated once into [basis, complement], where rank r is a mask on the first r columns. Adam, unlike SGD, isn't
invariant to rotations, so that its ``ncm`` is ``erm`` on projected features in these coordinates. At rank 0
nothing is removed and nothing is rotated: it is ``erm`` to the last bit. Weights start at zero and come back
in the given coordinates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ncm_cli.baselines.config import Config, Problem, Schedule, TrainData
from ncm_cli.baselines.objectives import (
    Batch,
    Erm,
    Mixing,
    drawn_batches,
    epoch_batches,
    generator_of,
    objective_of,
    partners,
    probabilities_,
)
from ncm_cli.errors import InputError, UsageError

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


ORDER, MIXING, VISITS = range(3)
"""Streams of random numbers of one seed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A probe at the end of its last epoch."""

    config: Config
    weight: Any
    """(C, d) float64, orthogonal to the basis's first ``rank`` columns."""
    bias: Any
    """(C,) float64."""
    diverged: bool
    """Whether a weight is NaN or infinite: such a probe is of no use."""
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All configurations of one seed at the end of an epoch."""

    epoch: int
    """From 1."""
    indices: list[int]
    """Their positions in the list of configurations."""
    weight: Tensor
    """(R, C, d) float64 on the device, in the given coordinates."""
    bias: Tensor
    """(R, C) float64."""
    diverged: Tensor
    """(R,) bool."""


def train(
    configs: Sequence[Config],
    data: TrainData,
    schedule: Schedule | None = None,
    *,
    device: str = "cpu",
    observe: Callable[[Snapshot], None] | None = None,
    observe_every: int = 1,
    advance: Callable[[int], None] | None = None,
) -> list[Trained]:
    """Train every configuration, in the order given.

    Configurations of one seed train side by side on the same batches; seeds follow one another. Neither
    changes what a configuration becomes, beyond float64's rounding of matrix products of another width.

    Parameters
    ----------
    observe
        Called every ``observe_every`` epochs, and after the last, with the weights of one seed.
    advance
        Called after each epoch with the number of configurations that went through it.

    Raises
    ------
    InputError
        Where a method needs environments or pairs that ``data`` lacks, or a rank is beyond the basis.
    """
    schedule = schedule or Schedule()
    _check(configs, data)
    problem = Problem(data, device)
    results: list[Trained | None] = [None] * len(configs)
    for seed in dict.fromkeys(config.seed for config in configs):
        indices = [i for i, config in enumerate(configs) if config.seed == seed]
        group = Group(problem, [configs[i] for i in indices], schedule)
        for epoch in range(1, schedule.epochs + 1):
            group.epoch()
            if observe and (epoch % observe_every == 0 or epoch == schedule.epochs):
                observe(group.snapshot(epoch, indices))
            if advance:
                advance(len(indices))
        last = group.snapshot(schedule.epochs, indices)
        weight, bias, lost = last.weight.cpu().numpy(), last.bias.cpu().numpy(), last.diverged.tolist()
        for row, i in enumerate(indices):
            results[i] = Trained(
                config=configs[i], weight=weight[row], bias=bias[row], diverged=lost[row], steps=group.steps
            )
    return [result for result in results if result is not None]


def _check(configs: Sequence[Config], data: TrainData) -> None:
    from ncm_cli.baselines.options import METHODS

    width = 0 if data.basis is None else data.basis.shape[1]
    for config in configs:
        needs = METHODS[config.method].needs
        if config.method == "dfr":
            raise UsageError("dfr isn't trained by steps", fix="ncm_cli.baselines.dfr.fit_dfr")
        if "envs" in needs and data.environments is None:
            raise InputError(f"{config.method} needs environments", fix="name their column with --envs")
        if config.method == "matchdg" and data.pair_moments is None:
            raise InputError("matchdg needs pairs", fix="give a pair store with --pairs")
        if config.method == "ncm" and config.rank > width:
            raise InputError(
                f"rank {config.rank} is more than the pairs span",
                expected=f"at most {width}",
                fix="more pairs",
            )


class Group:
    """The configurations of one seed."""

    def __init__(self, problem: Problem, configs: Sequence[Config], schedule: Schedule) -> None:
        seed = configs[0].seed
        self._problem, self._schedule = problem, schedule
        self._generators = [generator_of(seed, stream) for stream in (ORDER, MIXING, VISITS)]
        self._order: list[int] = []
        self.banks: list[Bank] = []
        for kind in (SharedBank, RotatedBank, FishBank):
            own = [i for i, config in enumerate(configs) if _bank_of(config) is kind]
            if own:
                made = kind([configs[i] for i in own], problem, schedule)
                self.banks.append(made)
                self._order += [own[i] for i in made.order]
        self.steps = 0

    def epoch(self) -> None:
        """One pass over the rows."""
        problem = self._problem
        batches = drawn_batches if self._schedule.domainbed else epoch_batches
        for rows in batches(problem.strata, problem.n, self._schedule.batch_size, self._generators[ORDER]):
            batch = self.batch(rows)
            for bank in self.banks:
                bank.step(batch, self.steps)
            self.steps += 1

    def batch(self, rows: Tensor) -> Batch:
        """The rows of one step."""
        problem, domainbed = self._problem, self._schedule.domainbed
        on_device = rows.to(problem.device)
        known: dict[Any, Any] = {}

        def once(key: Any, make: Callable[[], Any]) -> Any:
            if key not in known:
                known[key] = make()
            return known[key]

        def mixing() -> Mixing:
            generator = self._generators[MIXING]
            draws = torch.rand(2 * len(rows) + 1, generator=generator)
            labels, domains = problem.targets[rows], problem.codes["environments"][rows]
            return Mixing(
                strategy=float(draws[-1]),
                intra_label=partners(labels, domains, draws[: len(rows)]),
                intra_domain=partners(domains, labels, draws[len(rows) : -1]),
            )

        def visits() -> list[tuple[int, Tensor]]:
            codes = problem.codes["environments"][rows]
            count = problem.parts["environments"]
            order = (
                torch.arange(count)
                if domainbed
                else torch.randperm(count, generator=self._generators[VISITS])
            )
            found = [(e, (codes == e).nonzero()[:, 0].to(problem.device)) for e in order.tolist()]
            return [(environment, members) for environment, members in found if len(members)]

        return Batch(
            given=lambda: once("given", lambda: problem.given.index_select(0, on_device)),
            rotated=lambda: once("rotated", lambda: problem.rotated.index_select(0, on_device)),
            targets=problem.targets_hot.index_select(0, on_device),
            shares=lambda grouping, upweighted: once(
                (grouping, upweighted), lambda: problem.shares(on_device, grouping, upweighted)
            ),
            mixing=lambda: once("mixing", mixing),
            visits=lambda: once("visits", visits),
        )

    def snapshot(self, epoch: int, indices: list[int]) -> Snapshot:
        """The weights in the order of the configurations."""
        probes = [bank.probes() for bank in self.banks]
        order = torch.argsort(torch.tensor(self._order)).to(self._problem.device)
        weight, bias = (torch.cat(part)[order] for part in zip(*probes, strict=True))
        finite = torch.isfinite(weight).all(-1) & torch.isfinite(bias)
        return Snapshot(epoch=epoch, indices=indices, weight=weight, bias=bias, diverged=~finite.all(-1))


def _bank_of(config: Config) -> type[SharedBank | FishBank]:
    if config.method == "fish":
        return FishBank
    return RotatedBank if config.method == "ncm" and config.rank else SharedBank
