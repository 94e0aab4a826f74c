"""Fits probes for every rank and weight decay, with the solver that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ncm_cli.progress import SILENT
from ncm_cli.solvers.methods import Config, Solver
from ncm_cli.solvers.path import fit_path
from ncm_cli.solvers.training_set import Fit, TrainingSet


def train_path(
    training: TrainingSet,
    solver: Solver,
    *,
    ranks: Iterable[int],
    decays: Sequence[float],
    advance: Callable[[int], None] | None = None,
) -> list[Fit]:
    """Fit every rank and weight decay, by rank and then weight decay.

    ``advance`` is called with the work just finished: fits, or with adam fits times epochs.
    """
    ranks = sorted(ranks)
    if solver.name != "adam":
        return fit_path(
            training.X,
            training.y,
            training.n_classes,
            training.basis(),
            ranks,
            decays,
            weights=training.weights,
            task="classification" if training.n_classes else "regression",
            tolerance=solver.tolerance,
            max_iter=solver.max_iter,
            advance=advance,
        )
    # Imported here: torch takes seconds, and exact fits need none.
    from ncm_cli.solvers.device import choose_device
    from ncm_cli.solvers.trainer import Schedule, train

    shared = {"seed": solver.seed, "lr": solver.lr, "upweighted": training.weights is not None}
    return train(
        [
            # With rank 0 this equals erm bit for bit.
            Config(method="ncm", rank=rank, weight_decay=decay, **shared)  # type: ignore[arg-type]
            for rank in ranks
            for decay in decays
        ],
        training,
        Schedule(epochs=solver.epochs, batch_size=solver.batch_size),
        device=choose_device(solver.device, "fp64", SILENT),
        advance=advance,
    )
