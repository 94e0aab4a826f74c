"""Where training runs.

From rows, ranks and weight decays to fitted probes: the exact path, or the trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ncm_cli.baselines.config import TrainData
from ncm_cli.errors import UsageError
from ncm_cli.options import parse_device
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.path import Fit, fit_path
from ncm_cli.probes.problem import Part


def resolve_device(name: str) -> str:
    """``cuda`` or ``cpu``; asking for CUDA where there is none is an error.

    Raises
    ------
    UsageError
        An unknown name, or CUDA without CUDA.
    """
    import torch

    if parse_device(name) == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device here", found=f"--device {name}", fix="--device cpu")
    return name


if TYPE_CHECKING:
    from ncm_cli.baselines.leace import Eraser

Array = NDArray[np.float64]


SOLVER_OPTIONS = {
    "lbfgs": {"tolerance", "max_iter"},
    "adam": {"lr", "epochs", "batch_size", "device"},
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
    part: Part,
    options: FitOptions,
    *,
    method: str,
    solver: str,
    ranks: Sequence[int],
    decays: Sequence[float],
    tolerance: float | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[Fit]:
    """Fit every rank and weight decay, by rank and then weight decay.

    ``advance`` is told of finished work: fits, or with adam fits times epochs (see `work`).

    Raises
    ------
    InputError
        What the method needs is missing: pairs or environments.
    """
    eraser = None
    if method == "leace":
        eraser = _eraser(part)
        part = dataclasses.replace(part, X=eraser.apply(part.X), spectrum=None)
    if solver == "adam":
        fits = _by_steps(part, options, method, ranks, decays, advance)
    else:
        fits = fit_path(
            part.X,
            part.y,
            part.n_classes,
            np.zeros((part.X.shape[1], 0)) if part.spectrum is None else part.spectrum.basis,
            ranks,
            decays,
            weights=part.weights,
            task=options.task,
            tolerance=tolerance or options.tolerance,
            max_iter=options.max_iter,
            advance=advance,
        )
    if eraser is None:
        return fits
    folded = [eraser.fold(fit.weight, fit.bias) for fit in fits]
    return [
        dataclasses.replace(fit, weight=weight, bias=bias)
        for fit, (weight, bias) in zip(fits, folded, strict=True)
    ]


def work(fits: int, options: FitOptions, solver: str) -> int:
    """How much ``advance`` of `train_path` will be told of."""
    return fits * (options.epochs if solver == "adam" else 1)


def _eraser(part: Part) -> Eraser:
    from ncm_cli.baselines.leace import fit_eraser

    assert part.erase is not None
    return fit_eraser(part.X, part.erase)


def train_data(part: Part) -> TrainData:
    """What the trainer takes of a part.

    The whole spectrum, whichever ranks are asked for: a rank's probe doesn't depend on its neighbours.
    """
    spectrum, rank = part.spectrum, part.rank
    basis = moments = None
    if spectrum is not None and rank:
        basis = spectrum.basis[:, :rank]
        moments = spectrum.singular_values[:rank] ** 2 / part.pairs
    return TrainData(
        features=part.X,
        targets=part.y,
        n_classes=part.n_classes,
        environments=part.environments,
        dro_groups=part.dro_groups,
        row_weights=part.weights,
        basis=basis,
        pair_moments=moments,
    )


def _by_steps(
    part: Part,
    options: FitOptions,
    method: str,
    ranks: Sequence[int],
    decays: Sequence[float],
    advance: Callable[[int], None] | None,
) -> list[Fit]:
    from ncm_cli.baselines.config import Config, Schedule
    from ncm_cli.baselines.trainer import train

    configs = [
        Config(
            method=method,
            rank=rank,
            weight_decay=decay,
            upweighted=part.weights is not None,
            **{
                name: getattr(options, name)
                for name in ("seed", "lr", "penalty", "anneal", "eta", "meta_lr", "p_sel", "alpha")
            },
        )
        for rank in sorted(ranks)
        for decay in decays
    ]
    trained = train(
        configs,
        train_data(part),
        Schedule(epochs=options.epochs, batch_size=options.batch_size),
        device=resolve_device(options.device),
        advance=advance,
    )
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
