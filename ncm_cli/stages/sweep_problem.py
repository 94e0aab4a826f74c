"""What a sweep learns from and judges by, made from its options."""

from __future__ import annotations

import dataclasses

from ncm_cli.errors import InputError
from ncm_cli.methods.config import TrainData
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
    pairs: PairRows | None
    """The pairs that a method which trains on none of their rows is measured on; None like the folds."""
    rank: int
    """The largest rank that every fold's pairs have, 0 without."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.problem.target.classes

    def val(self, scaling: Scaling) -> Rows:
        """The validation rows, scaled."""
        assert self.problem.val is not None
        return self.problem.val.scaled(scaling)

    def test(self, scaling: Scaling) -> Rows | None:
        """The test rows, scaled; None where the sweep has none."""
        return None if self.problem.test is None else self.problem.test.scaled(scaling)


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
    pairs = None
    if problem.pairs is not None and options.folds:
        seeds = range(options.seed, options.seed + options.seeds)
        folds = {seed: problem.folds(options.folds, seed) for seed in seeds}
        pairs = problem.pairs.members(problem.pairs.usable, whole.scaling)
    ranks = [problem.fold_rank(fold) for dealt in folds.values() for fold in dealt]
    return Ready(problem=problem, whole=whole, folds=folds, pairs=pairs, rank=min([whole.rank, *ranks]))


def train_data(part: Part) -> TrainData:
    """What the trainer takes of a part."""
    spectrum, rank = part.spectrum, part.rank
    return TrainData(
        features=part.X,
        targets=part.y,
        n_classes=part.n_classes,
        environments=part.environments,
        dro_groups=part.dro_groups,
        row_weights=part.weights,
        basis=None if spectrum is None or not rank else spectrum.basis[:, :rank],
        pair_moments=None
        if spectrum is None or not rank
        else spectrum.singular_values[:rank] ** 2 / part.pairs,
    )


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
