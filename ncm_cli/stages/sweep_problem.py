"""What a sweep learns from and judges by, made from its options."""

from __future__ import annotations

import dataclasses

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.methods.folds import Fold
from ncm_cli.methods.scaling import Scaling
from ncm_cli.methods.scoring import PairRows, Rows
from ncm_cli.options.fit import FitOptions
from ncm_cli.options.sweep import SweepOptions
from ncm_cli.progress import Reporter
from ncm_cli.stages.common_problem import Part, Problem, read_problem


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Everything that training and judging need."""

    problem: Problem
    whole: Part
    """All rows and pairs."""
    folds: dict[int, list[Fold]]
    """Of each seed; empty without pairs, or where the bound isn't asked for."""
    rank: int
    """The largest rank that every fold's pairs have, 0 without."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.problem.target.classes

    @property
    def logits(self) -> int:
        """C: one logit for two classes."""
        return 1 if len(self.classes) == 2 else len(self.classes)

    def rows(self, name: str, scaling: Scaling) -> Rows | None:
        """The ``val`` or ``test`` rows, scaled; None where the sweep has none."""
        found = getattr(self.problem, name)
        return None if found is None else found.scaled(scaling)

    def measured(self, seed: int) -> PairRows | None:
        """The pairs of all folds of a seed, scaled as all rows are; None without folds."""
        if seed not in self.folds:
            return None
        assert self.problem.pairs is not None
        which = np.any([fold.measured for fold in self.folds[seed]], axis=0)
        return self.problem.pairs.members(which, self.whole.scaling)

    def takes_rows(self, seed: int) -> bool:
        """Whether a fold of a seed takes rows away from training."""
        train = self.problem.train.node
        return any(bool(np.isin(train, fold.apart).any()) for fold in self.folds.get(seed, ()))


def read_ready(options: SweepOptions, reporter: Reporter) -> Ready:
    """Read and check everything the sweep names.

    Raises
    ------
    InputError
        Rows, columns or pairs that can't be used; no validation rows, or rows with two parts to play.
    """
    problem = read_problem(
        _as_fit(options), oracle=options.test is not None, reporter=reporter, dro_groups=options.dro_groups
    )
    if problem.val is None:
        raise InputError(
            "no validation rows: nothing to choose by",
            where=options.features,
            fix="--val W: any filter that shares no row with --train and --test",
        )
    whole = problem.whole()
    folds: dict[int, list[Fold]] = {}
    ranks = [whole.rank]
    if problem.pairs is not None and options.folds:
        seeds = range(options.seed, options.seed + options.seeds)
        try:
            folds = {seed: problem.folds(options.folds, seed) for seed in seeds}
            ranks += [problem.without(fold).rank for dealt in folds.values() for fold in dealt]
        except InputError as error:
            error.fix = "more pairs, or pairs of rows that are not trained on; or --folds 0: no bound"
            raise
    return Ready(problem=problem, whole=whole, folds=folds, rank=min(ranks))


def _as_fit(options: SweepOptions) -> FitOptions:
    """The options that a sweep shares with a fit: they mean the same rows, pairs and scaling."""
    shared = {field.name for field in dataclasses.fields(FitOptions)} & {
        "features",
        "pairs",
        "output",
        "train",
        "val",
        "test",
        "target",
        "groups",
        "upweight",
        "envs",
        "erase",
        "overlap",
        "scaling",
        "scale_factor",
    }
    return FitOptions(**{name: getattr(options, name) for name in shared})
