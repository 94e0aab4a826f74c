"""Trains and judges one chunk of a sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.options.catalog import HYPER
from ncm_cli.options.sweep import SweepOptions
from ncm_cli.stages.sweep_plan import Cell
from ncm_cli.stages.sweep_problem import Ready

if TYPE_CHECKING:
    from ncm_cli.methods.leace import Eraser

Array = NDArray[np.float64]
Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What became of some cells."""

    history: Array
    """(cells, checkpoints, metrics), columns as in `ncm_cli.methods.judge.METRICS`."""
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
        from ncm_cli.methods.judge import Judge

        self._ready, self._options, self._device = ready, options, device
        self._epochs = checkpoints(options)
        self._judge = Judge(
            len(ready.classes), val=ready.val, pairs=ready.pairs, test=ready.test, device=device
        )

    def run(self, cells: Sequence[Cell], advance: Advance) -> Chunk:
        """Train the cells, all of one seed and one family; ``advance`` counts configurations × epochs."""
        if cells[0].method == "dfr":
            return self._dfr(cells, advance)
        return self._train(cells, advance)

    def _empty(self, cells: Sequence[Cell]) -> Array:
        from ncm_cli.methods.judge import METRICS

        return np.full((len(cells), len(self._epochs), len(METRICS)), np.nan)

    def _train(self, cells: Sequence[Cell], advance: Advance) -> Chunk:
        import torch

        from ncm_cli.methods.config import Config, Schedule
        from ncm_cli.methods.judge import METRICS
        from ncm_cli.methods.trainer import Snapshot, train

        options, history = self._options, self._empty(cells)
        data, eraser = self._ready.data, None
        if cells[0].method == "leace":
            eraser = self._eraser
            data = dataclasses.replace(data, features=eraser.apply(data.features))

        def observe(snapshot: Snapshot) -> None:
            weight, bias = snapshot.weight, snapshot.bias
            if eraser is not None:
                folded = eraser.fold(weight.cpu().numpy(), bias.cpu().numpy())
                weight, bias = (torch.from_numpy(part).to(weight.device) for part in folded)
            judged = self._judge.judge(weight, bias)
            lost = snapshot.diverged.cpu().numpy()
            at = int(np.searchsorted(self._epochs, snapshot.epoch))
            for column, name in enumerate(METRICS):
                history[snapshot.indices, at, column] = np.where(lost, np.nan, judged[name])

        trained = train(
            [
                Config(
                    method=cell.method,
                    seed=cell.seed,
                    upweighted=cell.upweighted,
                    **_typed(cell.hyper),
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
        diverged = np.array([one.diverged for one in trained])
        return Chunk(history=history, diverged=diverged, unconverged=np.zeros_like(diverged))

    @cached_property
    def _eraser(self) -> Eraser:
        from ncm_cli.methods.leace import fit_eraser

        assert self._ready.erase is not None
        return fit_eraser(self._ready.data.features, self._ready.erase)

    def _dfr(self, cells: Sequence[Cell], advance: Advance) -> Chunk:
        """Fit half of the validation rows and judge on the other half; fit all for the test rows."""
        import torch

        from ncm_cli.methods.dfr import SUBSETS, fit_dfr, halves
        from ncm_cli.methods.judge import METRICS, Judge, LabelledRows

        val, seed = self._ready.val, cells[0].seed
        assert val.groups is not None
        fit_rows, judged_rows = halves(val.groups, seed)
        history, unconverged = self._empty(cells), np.zeros(len(cells), dtype=bool)
        other_half = LabelledRows(**{k: v[judged_rows] for k, v in _arrays(val).items()})
        every, train = np.arange(len(val.targets)), self._ready.data.features
        parts = {
            "val": (fit_rows, 1, None, other_half, None),
            "test": (every, SUBSETS, train, None, self._ready.test),
        }
        for name, (rows, subsets, scale_by, own_val, own_test) in parts.items():
            if own_val is None and own_test is None:
                continue
            fits = fit_dfr(
                val.features[rows],
                val.targets[rows],
                val.groups[rows],
                len(self._ready.classes),
                [cell.hyper["C"] for cell in cells],
                seed=seed,
                subsets=subsets,
                scale_by=scale_by,
            )
            judge = Judge(
                len(self._ready.classes),
                val=own_val,
                test=own_test,
                pairs=self._ready.pairs if own_val is not None else None,
            )
            judged = judge.judge(
                torch.from_numpy(np.stack([fit.weight for fit in fits])),
                torch.from_numpy(np.stack([fit.bias for fit in fits])),
            )
            unconverged |= np.array([not fit.converged for fit in fits])
            for column, metric in enumerate(METRICS):
                if metric.startswith("test_") == (name == "test"):
                    history[:, 0, column] = judged[metric]
        advance(len(cells) * self._options.epochs)
        return Chunk(history=history, diverged=np.zeros_like(unconverged), unconverged=unconverged)


def _typed(hyper: Mapping[str, float]) -> dict[str, Any]:
    """Whole hyper-parameters as int."""
    return {name: int(value) if HYPER[name].whole else value for name, value in hyper.items()}


def _arrays(rows: object) -> dict[str, NDArray]:
    return {name: getattr(rows, name) for name in ("features", "targets", "groups")}
