"""From rows, ranks and weight decays to fitted probes: the exact path, or the trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, UsageError
from ncm_cli.methods.path import Fit, fit_path
from ncm_cli.methods.projection import Spectrum
from ncm_cli.options.fit import EXACT_METHODS, FitOptions
from ncm_cli.progress import Reporter
from ncm_cli.stages.common_device import resolve_device
from ncm_cli.stages.common_problem import Problem
from ncm_cli.stages.common_rows import combine
from ncm_cli.store.features import FeatureStore

if TYPE_CHECKING:
    from ncm_cli.methods.leace import Eraser

Array = NDArray[np.float64]


def resolve_solver(options: FitOptions, method: str) -> str:
    """``lbfgs`` where the problem is convex and nothing else was asked for, else ``adam``.

    Raises
    ------
    UsageError
        The exact solver for a method that is trained by steps, or regression by the trainer.
    """
    exact = method in EXACT_METHODS
    solver = options.solver or ("lbfgs" if exact else "adam")
    if solver == "lbfgs" and not exact:
        raise UsageError(f"{method} has no exact solver", fix="--solver adam")
    if solver == "adam" and options.task == "regression":
        raise UsageError("regression is solved exactly", found=f"--method {method}", fix="--solver lbfgs")
    return solver


SOLVER_OPTIONS = {
    "lbfgs": {"tolerance", "max_iter"},
    "adam": {"lr", "epochs", "batch_size", "seed", "device"},
}
METHOD_OPTIONS = {
    "irm": {"envs", "penalty", "anneal"},
    "vrex": {"envs", "penalty", "anneal"},
    "groupdro": {"envs", "eta"},
    "fish": {"envs", "meta_lr"},
    "lisa": {"envs", "p_sel", "alpha"},
    "matchdg": {"penalty"},
    "leace": {"erase"},
}
"""The options that only some solvers and methods read."""


def without_effect(options: FitOptions, method: str, solver: str) -> set[str]:
    """Names of the options that this solver, method and scaling don't read."""
    every = set().union(*SOLVER_OPTIONS.values(), *METHOD_OPTIONS.values())
    read = SOLVER_OPTIONS[solver] | METHOD_OPTIONS.get(method, set())
    return (every - read) | (set() if options.scaling == "norm" else {"scale_factor"})


def train_path(
    problem: Problem,
    options: FitOptions,
    *,
    method: str,
    solver: str,
    spectrum: Spectrum | None,
    ranks: Sequence[int],
    decays: Sequence[float],
    reporter: Reporter,
) -> list[Fit]:
    """Fit every rank and weight decay, by rank and then weight decay.

    Raises
    ------
    InputError
        What the method needs is missing: pairs, environments or columns to erase.
    """
    eraser = None
    if method == "leace":
        eraser = _eraser(problem, options)
        erased = dataclasses.replace(problem.train, X=eraser.apply(problem.train.X))
        problem, spectrum = dataclasses.replace(problem, train=erased), None
    fits = _fitted(problem, options, method, solver, spectrum, ranks, decays, reporter)
    if eraser is None:
        return fits
    folded = [eraser.fold(fit.weight, fit.bias) for fit in fits]
    return [
        dataclasses.replace(fit, weight=weight, bias=bias)
        for fit, (weight, bias) in zip(fits, folded, strict=True)
    ]


def _eraser(problem: Problem, options: FitOptions) -> Eraser:
    from ncm_cli.methods.leace import fit_eraser

    if options.erase is None:
        raise InputError("leace needs columns to erase", fix="--erase place")
    with FeatureStore.open(options.features) as store:
        codes = combine(store, options.erase)
    assert codes is not None
    rows = np.flatnonzero(problem.filters.train_rows & problem.target.known)
    return fit_eraser(problem.train.X, codes[rows])


def _fitted(
    problem: Problem,
    options: FitOptions,
    method: str,
    solver: str,
    spectrum: Spectrum | None,
    ranks: Sequence[int],
    decays: Sequence[float],
    reporter: Reporter,
) -> list[Fit]:
    basis = np.zeros((problem.source.dim, 0)) if spectrum is None else spectrum.basis
    count = len(ranks) * len(decays)
    if solver == "adam":
        return _by_steps(problem, options, method, spectrum, ranks, decays, reporter)
    with reporter.task("fitting", total=count, unit="probes") as task:
        return fit_path(
            problem.train.X,
            problem.train.y,
            len(problem.target.classes),
            basis,
            ranks,
            decays,
            weights=problem.weights,
            task=options.task,
            tolerance=options.tolerance,
            max_iter=options.max_iter,
            advance=task.advance,
        )


def _by_steps(
    problem: Problem,
    options: FitOptions,
    method: str,
    spectrum: Spectrum | None,
    ranks: Sequence[int],
    decays: Sequence[float],
    reporter: Reporter,
) -> list[Fit]:
    from ncm_cli.methods.config import Config, TrainData
    from ncm_cli.methods.trainer import Schedule, train

    width = max(ranks) if method == "ncm" else 0
    moments = None
    if method == "matchdg":
        if spectrum is None or problem.pairs is None:
            raise InputError("matchdg needs pairs", fix="--pairs PAIRS.h5")
        width = spectrum.rank
        moments = spectrum.singular_values[:width] ** 2 / int(problem.pairs.used.sum())
    configs = [
        Config(
            method="erm" if method == "leace" else method,
            rank=rank,
            weight_decay=decay,
            upweighted=problem.weights is not None,
            **{
                name: getattr(options, name)
                for name in ("seed", "lr", "penalty", "anneal", "eta", "meta_lr", "p_sel", "alpha")
            },
        )
        for rank in sorted(ranks)
        for decay in decays
    ]
    data = TrainData(
        features=problem.train.X,
        targets=problem.train.y,
        n_classes=len(problem.target.classes),
        environments=problem.environments,
        row_weights=problem.weights,
        basis=spectrum.basis[:, :width] if spectrum and width else None,
        pair_moments=moments,
    )
    schedule = Schedule(epochs=options.epochs, batch_size=options.batch_size)
    device = resolve_device(options.device)
    reporter.note(f"training on {device}")
    with reporter.task("training", total=options.epochs * len(configs), unit="epochs") as task:
        trained = train(configs, data, schedule, device=device, advance=task.advance)
    return [
        Fit(
            rank=one.config.rank,
            weight_decay=one.config.weight_decay,
            weight=np.asarray(one.weight, np.float64),
            bias=np.asarray(one.bias, np.float64),
            converged=not one.diverged,
            iterations=one.steps,
            gradient_norm=float("nan"),
        )
        for one in trained
    ]
