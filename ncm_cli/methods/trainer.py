"""Trains many configurations of linear probes at once.

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
from typing import Any

import torch
from torch import Tensor

from ncm_cli.errors import InputError, UsageError
from ncm_cli.methods.bank import Bank, FishBank, RotatedBank, SharedBank
from ncm_cli.methods.batches import Mixing, drawn_batches, epoch_batches, generator_of, partners
from ncm_cli.methods.config import Config, Schedule, TrainData
from ncm_cli.methods.objectives import Batch
from ncm_cli.methods.problem import Problem

__all__ = ["Schedule", "Snapshot", "Trained", "train"]

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
    from ncm_cli.options.catalog import METHODS

    width = 0 if data.basis is None else data.basis.shape[1]
    for config in configs:
        needs = METHODS[config.method].needs
        if config.method == "dfr":
            raise UsageError("dfr isn't trained by steps", fix="ncm_cli.methods.dfr.fit_dfr")
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
