"""Trains and judges one chunk of a sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods import scoring
from ncm_cli.methods.choice import METRICS
from ncm_cli.methods.selection import bound_of, log_loss_bound, worst_group_error
from ncm_cli.options.catalog import HYPER
from ncm_cli.options.sweep import SweepOptions
from ncm_cli.stages.common_problem import Part
from ncm_cli.stages.sweep_plan import Cell
from ncm_cli.stages.sweep_problem import Ready, train_data

if TYPE_CHECKING:
    from ncm_cli.methods.leace import Eraser
    from ncm_cli.methods.trainer import Snapshot, Trained

Array = NDArray[np.float64]
Advance = Callable[[int], None]
Judge = Callable[[Array, Array], Mapping[str, Array]]
"""Weights (R, C, d) and biases (R, C) -> metrics (R,) by name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What became of some cells."""

    history: Array
    """(cells, checkpoints, metrics), columns as in `ncm_cli.methods.choice.METRICS`."""
    diverged: NDArray[np.bool_]
    """(cells,): a weight became NaN or infinite."""
    unconverged: NDArray[np.bool_]
    """(cells,): an exact fit stopped short of its tolerance (dfr)."""


def checkpoints(options: SweepOptions) -> NDArray[np.int64]:
    """The epochs after which configurations are judged; the last is among them."""
    every = list(range(options.evaluate_every, options.epochs + 1, options.evaluate_every))
    if not every or every[-1] != options.epochs:
        every.append(options.epochs)
    return np.asarray(every, np.int64)


class Runner:
    """Runs chunks; keeps what they share."""

    def __init__(self, ready: Ready, options: SweepOptions, device: str) -> None:
        self._ready, self._options, self._device = ready, options, device
        self._epochs = checkpoints(options)
        self._erasers: dict[int, Eraser] = {}

    def run(self, cells: Sequence[Cell], advance: Advance) -> Chunk:
        """Train the cells, all of one seed and one family; ``advance`` counts configurations × epochs."""
        if cells[0].method == "dfr":
            return self._dfr(cells, advance)
        ready = self._ready
        history, diverged = self._train(ready.whole, cells, self._judge_rows(ready.whole), advance)
        folds = ready.folds.get(cells[0].seed, ())
        if not folds:
            return Chunk(history=history, diverged=diverged, unconverged=np.zeros_like(diverged))
        seen = []
        for fold in folds:
            part = ready.problem.without(fold)
            val = ready.val(part.scaling)
            pairs = ready.problem.measured(fold, part.scaling)

            def judge(weight: Array, bias: Array, val: Any = val, pairs: Any = pairs) -> Mapping[str, Array]:
                errors, losses = scoring.row_errors(weight, bias, val)
                changes, shifts = scoring.pair_shifts(weight, bias, pairs, regression=False)
                return {
                    "val_accuracy": errors.mean(axis=1),
                    "val_log_loss": losses.mean(axis=1),
                    "flip_rate": changes.sum(axis=1),
                    "log_loss_bound": shifts.sum(axis=1),
                }

            found, lost = self._train(part, cells, judge, advance)
            seen.append(found)
            diverged |= lost
        self._bound(history, seen, sum(int(fold.measured.sum()) for fold in folds))
        return Chunk(history=history, diverged=diverged, unconverged=np.zeros_like(diverged))

    def _bound(self, history: Array, folds: Sequence[Array], pairs: int) -> None:
        """Fill in what the folds say: means of errors and losses, sums of flips and shifts over all pairs."""
        at = {name: column for column, name in enumerate(METRICS)}
        error, loss = (
            np.mean([fold[..., at[name]] for fold in folds], axis=0)
            for name in ("val_accuracy", "val_log_loss")
        )
        flips, shift = (
            np.sum([fold[..., at[name]] for fold in folds], axis=0) / pairs
            for name in ("flip_rate", "log_loss_bound")
        )
        logits = 1 if len(self._ready.classes) == 2 else len(self._ready.classes)
        history[..., at["flip_rate"]] = flips
        history[..., at["bound_01"]] = bound_of(error, flips, regression=False)
        history[..., at["log_loss_bound"]] = log_loss_bound(loss, shift, logits)

    def _empty(self, cells: Sequence[Cell]) -> Array:
        return np.full((len(cells), len(self._epochs), len(METRICS)), np.nan)

    def _judge_rows(self, part: Part) -> Judge:
        """What validation and test rows say."""
        parts = {"val": self._ready.val(part.scaling), "test": self._ready.test(part.scaling)}

        def judge(weight: Array, bias: Array) -> Mapping[str, Array]:
            found: dict[str, Array] = {}
            for name, rows in parts.items():
                if rows is None:
                    continue
                errors, losses = scoring.row_errors(weight, bias, rows)
                found[f"{name}_accuracy"] = 1 - errors.mean(axis=1)
                found[f"{name}_log_loss"] = losses.mean(axis=1)
                if rows.group is not None:
                    found[f"{name}_worst_group"] = 1 - worst_group_error(errors, rows.group)
            return found

        return judge

    def _train(
        self, part: Part, cells: Sequence[Cell], judge: Judge, advance: Advance
    ) -> tuple[Array, NDArray[np.bool_]]:
        """Train on a part and judge at every checkpoint: (history, diverged)."""
        from ncm_cli.methods.config import Config, Schedule
        from ncm_cli.methods.trainer import train

        options, history = self._options, self._empty(cells)
        data, eraser = train_data(part), None
        if cells[0].method == "leace":
            eraser = self._eraser(part)
            data = dataclasses.replace(data, features=eraser.apply(data.features))

        def observe(snapshot: Snapshot) -> None:
            weight, bias = (values.cpu().numpy() for values in (snapshot.weight, snapshot.bias))
            if eraser is not None:
                weight, bias = eraser.fold(weight, bias)
            lost = snapshot.diverged.cpu().numpy()
            judged = judge(np.where(lost[:, None, None], 0.0, weight), np.where(lost[:, None], 0.0, bias))
            at = int(np.searchsorted(self._epochs, snapshot.epoch))
            for name, values in judged.items():
                history[snapshot.indices, at, METRICS.index(name)] = np.where(lost, np.nan, values)

        trained: list[Trained] = train(
            [
                Config(
                    method=cell.method,
                    seed=cell.seed,
                    upweighted=cell.upweighted,
                    **_typed(cell.hyper, part.rank),
                )
                for cell in cells
            ],
            data,
            Schedule(
                epochs=options.epochs,
                batch_size=options.batch_size,
                optimizer=options.optimizer,  # type: ignore[arg-type]
                momentum=options.momentum,
                protocol=options.protocol,  # type: ignore[arg-type]
            ),
            device=self._device,
            observe=observe,
            observe_every=options.evaluate_every,
            advance=advance,
        )
        return history, np.array([one.diverged for one in trained])

    def _eraser(self, part: Part) -> Eraser:
        """The eraser of a part; that of all rows serves every chunk."""
        from ncm_cli.methods.leace import fit_eraser

        assert part.erase is not None
        if part is not self._ready.whole:
            return fit_eraser(part.X, part.erase)
        if 0 not in self._erasers:
            self._erasers[0] = fit_eraser(part.X, part.erase)
        return self._erasers[0]

    def _dfr(self, cells: Sequence[Cell], advance: Advance) -> Chunk:
        """Fit half of the validation rows and judge on the other half; fit all for the test rows.

        It trains on no row of a pair, so that flips are measured on all pairs without folds.
        """
        from ncm_cli.methods.dfr import SUBSETS, fit_dfr, halves

        ready, seed = self._ready, cells[0].seed
        val, test = ready.val(ready.whole.scaling), ready.test(ready.whole.scaling)
        assert val.group is not None
        grouped = np.flatnonzero(val.group >= 0)
        X, y, group = val.X[grouped], val.y[grouped], val.group[grouped]
        fit_rows, judged_rows = halves(group, seed)
        history, unconverged = self._empty(cells), np.zeros(len(cells), dtype=bool)
        half = scoring.Rows(X=X[judged_rows], y=y[judged_rows], group=group[judged_rows])
        parts: list[tuple[str, NDArray[np.int64], int, Array | None, scoring.Rows]]
        parts = [("val", fit_rows, 1, None, half)]
        if test is not None:
            parts.append(("test", np.arange(len(y)), SUBSETS, ready.whole.X, test))
        for name, rows, subsets, scale_by, judged in parts:
            fits = fit_dfr(
                X[rows],
                y[rows],
                group[rows],
                len(ready.classes),
                [cell.hyper["C"] for cell in cells],
                seed=seed,
                subsets=subsets,
                scale_by=scale_by,
            )
            unconverged |= np.array([not fit.converged for fit in fits])
            weight, bias = np.stack([fit.weight for fit in fits]), np.stack([fit.bias for fit in fits])
            errors, losses = scoring.row_errors(weight, bias, judged)
            facts = {f"{name}_accuracy": 1 - errors.mean(axis=1), f"{name}_log_loss": losses.mean(axis=1)}
            if judged.group is not None:
                facts[f"{name}_worst_group"] = 1 - worst_group_error(errors, judged.group)
            if name == "val" and ready.pairs is not None:
                changes, shifts = scoring.pair_shifts(weight, bias, ready.pairs, regression=False)
                facts["flip_rate"] = changes.mean(axis=1)
                facts["bound_01"] = bound_of(errors.mean(axis=1), facts["flip_rate"], regression=False)
                facts["log_loss_bound"] = log_loss_bound(
                    losses.mean(axis=1), shifts.mean(axis=1), weight.shape[1]
                )
            for metric, values in facts.items():
                history[:, 0, METRICS.index(metric)] = values
        advance(len(cells) * self._options.epochs * (1 + len(ready.folds.get(seed, ()))))
        return Chunk(history=history, diverged=np.zeros_like(unconverged), unconverged=unconverged)


def _typed(hyper: Mapping[str, float], rank: int) -> dict[str, Any]:
    """Whole hyper-parameters as int, the rank at most that of the part's pairs."""
    found = {name: int(value) if HYPER[name].whole else value for name, value in hyper.items()}
    return found | ({"rank": min(int(found["rank"]), rank)} if "rank" in found else {})
