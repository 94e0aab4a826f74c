"""What a sweep learns from and judges by, made from its options."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.methods.config import TrainData
from ncm_cli.methods.judge import LabelledRows
from ncm_cli.methods.scoring import Rows
from ncm_cli.options.fit import FitOptions
from ncm_cli.options.sweep import SweepOptions
from ncm_cli.progress import Reporter
from ncm_cli.stages.common_problem import Part, Problem, read_problem

Codes = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Everything that training and judging need."""

    problem: Problem
    data: TrainData
    classes: tuple[str, ...]
    val: LabelledRows
    test: LabelledRows | None
    pairs: tuple[NDArray[np.float64], NDArray[np.float64]] | None
    """Held-out pairs' members."""
    erase: Codes | None
    """(n,) codes of leace's column on the training rows."""
    rank: int
    """Numerical rank of the pairs, 0 without."""


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
    held_out = problem.pairs is not None and problem.pairs.held_out.any()
    members = (
        problem.pairs.members(problem.pairs.held_out, whole.scaling) if problem.pairs and held_out else None
    )
    return Ready(
        problem=problem,
        data=train_data(whole),
        classes=problem.target.classes,
        val=_labelled(problem.val.scaled(whole.scaling)),
        test=None if problem.test is None else _labelled(problem.test.scaled(whole.scaling)),
        pairs=None if members is None else (members.a, members.b),
        erase=whole.erase,
        rank=whole.rank,
    )


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


def _labelled(rows: Rows) -> LabelledRows:
    return LabelledRows(features=rows.X, targets=np.asarray(rows.y, np.int64), groups=rows.group)


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
