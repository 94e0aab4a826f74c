"""What a sweep learns from and judges by, made from its options."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.methods.config import TrainData
from ncm_cli.methods.judge import LabelledRows
from ncm_cli.methods.selection import Rows
from ncm_cli.options.fit import FitOptions
from ncm_cli.options.grids import parse_names
from ncm_cli.options.sweep import SweepOptions
from ncm_cli.progress import Reporter
from ncm_cli.stages.common_problem import Problem, read_problem
from ncm_cli.stages.common_rows import combine
from ncm_cli.store.features import FeatureStore

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
    problem = read_problem(_as_fit(options), oracle=options.test is not None, reporter=reporter)
    if problem.val is None:
        raise InputError(
            "no validation rows: nothing to choose by",
            where=options.features,
            fix="--val 'split=val', or any filter that shares no row with --train and --test",
        )
    train = np.flatnonzero(problem.filters.train_rows & problem.target.known)
    with FeatureStore.open(options.features) as store:
        _require_values(store, options, train)
        dro, lisa, erase = (
            combine(store, names) for names in (options.dro_groups, options.lisa_domains, options.erase)
        )
    spectrum = problem.spectrum
    rank = 0 if spectrum is None else spectrum.rank
    basis = moments = None
    if spectrum is not None and problem.pairs is not None and rank:
        basis = spectrum.basis[:, :rank]
        moments = spectrum.singular_values[:rank] ** 2 / int(problem.pairs.used.sum())
    held_out = problem.held_out
    return Ready(
        problem=problem,
        data=TrainData(
            features=problem.train.X,
            targets=problem.train.y,
            n_classes=len(problem.target.classes),
            environments=problem.environments,
            dro_groups=None if dro is None else dro[train],
            lisa_domains=None if lisa is None else lisa[train],
            row_weights=problem.weights,
            basis=basis,
            pair_moments=moments,
        ),
        classes=problem.target.classes,
        val=_labelled(problem.val),
        test=None if problem.test is None else _labelled(problem.test),
        pairs=None if held_out is None else (held_out.a, held_out.b),
        erase=None if erase is None else erase[train],
        rank=rank,
    )


def _require_values(store: FeatureStore, options: SweepOptions, train: Codes) -> None:
    """Refuse training rows without an environment or group: they would silently make one of their own."""
    for option in ("envs", "dro_groups", "lisa_domains", "upweight", "erase"):
        for name in parse_names(getattr(options, option) or ""):
            missing = train[store.categorical(name).codes[train] < 0]
            if missing.size:
                raise InputError(
                    f"{missing.size:,} training rows have no value in the column {name!r}",
                    where=store.path,
                    found=f"such as {store.ids[missing[0]]!r}",
                    fix=f"leave them out with --train, or give --{option.replace('_', '-')} another column",
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
        "overlap",
        "scaling",
        "scale_factor",
    }
    return FitOptions(**{name: getattr(options, name) for name in shared})
