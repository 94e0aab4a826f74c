"""A sweep's numbers as tables: every configuration, and what every rule picks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.baselines.choice import METRICS, RULES, Rule, best_checkpoints, pick_trial
from ncm_cli.baselines.options import HYPER, SweepOptions
from ncm_cli.baselines.plan import Cell
from ncm_cli.baselines.rows import checkpoints
from ncm_cli.options import as_json
from ncm_cli.store.sweep_table import SweepTable

Array = NDArray[np.float64]

ROUNDING = 1e-9
"""Nats: far more than the order of the rows changes in a full batch, far less than other batches do."""

_MISSING = {
    "val_accuracy": "there are no validation rows",
    "val_worst_group": "there are no --groups",
    "bound_01": "there are no --pairs",
    "test_accuracy": "there are no --test rows",
    "test_worst_group": "there are no --test rows with --groups",
}


def table_of(
    options: SweepOptions, cells: Sequence[Cell], history: Array, diverged: NDArray[np.bool_]
) -> SweepTable:
    """The whole history, for the HDF5 file."""
    used = [name for name in HYPER if any(name in cell.hyper for cell in cells)]
    return SweepTable(
        method=tuple(cell.label for cell in cells),
        trial=np.array([cell.trial for cell in cells], np.int64),
        seed=np.array([cell.seed for cell in cells], np.int64),
        hyper={name: np.array([cell.hyper.get(name, np.nan) for cell in cells]) for name in used},
        diverged=diverged,
        epochs=checkpoints(options),
        metrics={name: history[:, :, column] for column, name in enumerate(METRICS)},
        options=as_json(options),
    )


def columns_of(
    cells: Sequence[Cell],
    history: Array,
    diverged: NDArray[np.bool_],
    table: SweepTable,
    rules: dict[str, str | None],
) -> dict[str, list[Any]]:
    """The columns of the CSV: for each configuration, one row for each rule that applies.

    A diverged configuration has one row, without rule, epoch and metrics.
    """
    chosen = {rule: best_checkpoints(history, RULES[rule]) for rule, why in rules.items() if why is None}
    names = ["method", "trial", "seed", *table.hyper, "diverged", "rule", "oracle", "epoch", *METRICS]
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for i, cell in enumerate(cells):
        known = {rule: int(at[i]) for rule, at in chosen.items() if at[i] >= 0}
        for rule, at in known.items() if known and not diverged[i] else [(None, -1)]:
            row = {
                "method": cell.label,
                "trial": cell.trial,
                "seed": cell.seed,
                **{name: cell.hyper.get(name) for name in table.hyper},
                "diverged": bool(diverged[i]),
                "rule": rule,
                "oracle": None if rule is None else RULES[rule].oracle,
                "epoch": _epoch(cell, table.epochs, at),
                **{
                    name: None if at < 0 else float(history[i, at, column])
                    for column, name in enumerate(METRICS)
                },
            }
            for name, value in row.items():
                columns[name].append(value)
    return columns


def _epoch(cell: Cell, epochs: NDArray[np.int64], at: int) -> int | None:
    """The epoch of a checkpoint; None for a method that isn't trained by steps."""
    return None if at < 0 or cell.method == "dfr" else int(epochs[at])


def picks_of(
    options: SweepOptions,
    cells: Sequence[Cell],
    history: Array,
    diverged: NDArray[np.bool_],
    epochs: NDArray[np.int64],
) -> tuple[list[dict[str, Any]], dict[str, str | None]]:
    """The rows of the result, by method and rule, and why a rule was left out."""
    rows: list[dict[str, Any]] = []
    rules = {name: _why_not(rule, history, diverged, options) for name, rule in RULES.items()}
    labels = list(dict.fromkeys(cell.label for cell in cells))
    for label in labels:
        own = [i for i, cell in enumerate(cells) if cell.label == label]
        trials = list(dict.fromkeys(cells[i].trial for i in own))
        shape = (len(trials), len(own) // len(trials))
        for name, rule in RULES.items():
            if rules[name] is not None:
                continue
            found = pick_trial(
                history[own].reshape(*shape, *history.shape[1:]), diverged[own].reshape(shape), trials, rule
            )
            if found is None:
                continue
            first = cells[own[trials.index(found.trial) * shape[1]]]
            rows.append(
                {
                    "method": label,
                    "rule": name,
                    "oracle": rule.oracle,
                    "trial": found.trial,
                    "hyper_parameters": dict(first.hyper),
                    "seeds": [first.seed + i for i in range(shape[1])],
                    "epochs": [_epoch(first, epochs, at) for at in found.checkpoints],
                    "metrics": dict(zip(METRICS, found.mean.tolist(), strict=True)),
                    "sd": dict(zip(METRICS, found.sd.tolist(), strict=True)),
                    "values": dict(zip(METRICS, found.values.T.tolist(), strict=True)),
                }
            )
    return rows, rules


def _why_not(rule: Rule, history: Array, diverged: NDArray[np.bool_], options: SweepOptions) -> str | None:
    """Why a rule can't be applied, None if it can."""
    if diverged.all():
        return "every configuration diverged"
    if np.isfinite(history[..., METRICS.index(rule.metric)]).any():
        return None
    if rule.metric == "bound_01" and options.pairs is not None:
        return "with --folds 0 no pair is measured"
    return _MISSING[rule.metric]


def seedless(cells: Sequence[Cell], history: Array) -> list[str]:
    """The methods of which every configuration has one result for all seeds, but for the folds of pairs."""
    names = ("val_log_loss", "val_accuracy")
    seen = np.nan_to_num(history[..., [METRICS.index(name) for name in names]])
    found: dict[tuple[str, int], Array] = {}
    varying = set()
    for cell, values in zip(cells, seen, strict=True):
        first = found.setdefault((cell.label, cell.trial), values)
        if np.abs(values - first).max() > ROUNDING:
            varying.add(cell.label)
    return [label for label in dict.fromkeys(cell.label for cell in cells) if label not in varying]
