"""``ncm sweep``: many methods, hyper-parameters and seeds in one batched run, and what each rule picks.

Every configuration is trained on all rows and pairs and, for the bound, on what each fold of the pairs
leaves, as in ``ncm fit``. Each seed has its own batches and its own folds.

Of ``-o NAME.EXT`` three files come: ``NAME.csv`` (one row for each configuration and rule, at the checkpoint
that the rule picks), ``NAME.h5`` (all checkpoints), and ``NAME.json`` (the picks, for ``ncm report``);
``NAME.parquet`` too if that was asked for.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli import __version__
from ncm_cli.baselines.options import TABLES, SweepOptions
from ncm_cli.baselines.picks import columns_of, picks_of, seedless, table_of
from ncm_cli.baselines.plan import Cell, chunks, plan
from ncm_cli.errors import UsageError
from ncm_cli.options import as_json, check
from ncm_cli.probes.problem import resolve_device
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.files import sha256_file, writer_lock
from ncm_cli.store.journal import Journal
from ncm_cli.store.results import jsonable, write_result
from ncm_cli.store.sweep_table import require_pyarrow, write_parquet, write_sweep
from ncm_cli.store.tables import write_csv


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepReport:
    """What a sweep found."""

    output: str
    rows: list[dict[str, Any]]
    """For each method and rule: ``method, rule, oracle, trial, hyper_parameters, seeds, epochs, metrics``
    (means over seeds), ``sd`` (their standard deviations) and ``values`` (one for each seed)."""
    configurations: int
    diverged: int
    unconverged: int
    resumed: int
    """Configurations that an interrupted run had finished."""
    rules: dict[str, str | None]
    """Each rule, and why it could not be applied (None: it was)."""
    facts: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        body = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del body["resumed"]
        return jsonable({**body, **body.pop("facts")})


def sweep(options: SweepOptions, *, reporter: Reporter = SILENT) -> SweepReport:
    """Train every configuration, write the tables, and choose by every rule.

    Raises
    ------
    UsageError
        Options that can't be met: see `ncm_cli.baselines.plan.plan`.
    InputError
        Rows, columns or pairs that can't be used; another process writing the same output.
    MismatchError
        Features and pairs of different encoders.
    """
    _check(options)
    with writer_lock(_beside(options.output, ".json")):  # whichever of the files was named, all are written
        from ncm_cli.baselines.rows import read_ready

        ready = read_ready(options, reporter)
        cells = plan(options, available_rank=ready.rank, reporter=reporter)
        device = _device(options, reporter)
        key = _key(options, cells, ready.problem.content_sha256, device)
        with Journal.open(options.output, key, replace=True) as journal:
            history, diverged, unconverged, resumed = _run(options, cells, ready, device, journal, reporter)
        _warn(cells, diverged, unconverged, reporter)
        table = table_of(options, cells, history, diverged)
        rows, rules = picks_of(options, cells, history, diverged, table.epochs)
        _tell_seedless(ready, cells, history, reporter)
        report = SweepReport(
            output=str(options.output),
            rows=rows,
            configurations=len(cells),
            diverged=int(diverged.sum()),
            unconverged=int(unconverged.sum()),
            resumed=resumed,
            rules=rules,
            facts=_facts(options, ready),
        )
        _write(options, table, columns_of(cells, history, diverged, table, rules), report)
        journal.discard()
    return report


def _check(options: SweepOptions) -> None:
    """Everything that can be refused before a file is read."""
    check(options)
    if options.output.suffix == ".parquet":
        require_pyarrow()
    inputs = {os.path.realpath(path) for path in (options.features, options.pairs) if path is not None}
    for suffix in TABLES:
        if os.path.realpath(_beside(options.output, suffix)) in inputs:
            raise UsageError("the output would replace an input", where=_beside(options.output, suffix))


def _device(options: SweepOptions, reporter: Reporter) -> str:
    device = resolve_device(options.device)
    reporter.note(f"training on {device}")
    return device


def _key(options: SweepOptions, cells: list[Cell], content_sha256: str, device: str) -> dict[str, Any]:
    """What finished chunks depend on."""
    import torch

    shown = as_json(options)
    for name in ("output", "features", "pairs", "device"):
        del shown[name]
    return {
        "options": shown,
        "features": content_sha256,
        "pairs": None if options.pairs is None else sha256_file(options.pairs),
        "cells": [[cell.label, cell.trial, cell.seed, dict(cell.hyper)] for cell in cells],
        "device": device.partition(":")[0],
        "versions": {"ncm": __version__, "torch": torch.__version__},
    }


def _run(
    options: SweepOptions, cells: list[Cell], ready: Any, device: str, journal: Journal, reporter: Reporter
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], int]:
    """(cells, checkpoints, metrics) history, diverged and unconverged (cells,), how many were done before."""
    from ncm_cli.baselines.rows import Runner

    if journal.replaced:
        reporter.note("what an interrupted sweep with other options or data had finished is discarded")
    if journal.damaged:
        reporter.warn(f"{journal.damaged:,} finished chunks are damaged, and are trained anew")
    runner = Runner(ready, options, device)
    passes = options.epochs * (1 + max((len(folds) for folds in ready.folds.values()), default=0))
    todo = chunks(cells, 1 if len(ready.classes) == 2 else len(ready.classes))
    found: list[dict[str, np.ndarray]] = []
    resumed = 0
    with reporter.task("training", total=len(cells) * passes, unit="epochs") as task:
        for index, members in enumerate(todo):
            done = journal.get(str(index))
            if done is None:
                chunk = runner.run([cells[i] for i in members], task.advance)
                done = {field.name: getattr(chunk, field.name) for field in dataclasses.fields(chunk)}
                journal.put(str(index), done)
            else:
                resumed += len(members)
                task.advance(len(members) * passes)
            found.append(done)
    if resumed:
        reporter.note(f"{resumed:,} of {len(cells):,} configurations were finished before")
    order = np.argsort(np.concatenate(todo))
    history, diverged, unconverged = (
        np.concatenate([part[name] for part in found])[order]
        for name in ("history", "diverged", "unconverged")
    )
    return history, diverged, unconverged, resumed


def _warn(
    cells: list[Cell], diverged: NDArray[np.bool_], unconverged: NDArray[np.bool_], reporter: Reporter
) -> None:
    for mask, what in (
        (diverged, "diverged (a weight became NaN or infinite) and can't be chosen"),
        (unconverged, "stopped short of convergence"),
    ):
        if mask.any():
            labels = [cells[i].label for i in np.flatnonzero(mask)]
            counts = ", ".join(f"{label} {labels.count(label):,}" for label in dict.fromkeys(labels))
            reporter.warn(f"{int(mask.sum()):,} of {len(cells):,} configurations {what}: {counts}")


def _tell_seedless(ready: Any, cells: list[Cell], history: NDArray[np.float64], reporter: Reporter) -> None:
    """Say of which methods a spread over the seeds is none, and what would vary."""
    names = seedless(cells, history) if len({cell.seed for cell in cells}) > 1 else []
    if names:
        dealt = ready.folds and not ready.problem.pairs.held_out.any()
        but = " but the folds of the bound" if dealt else ""
        reporter.note(
            f"nothing is random in {', '.join(names)}{but}: ±.000 is not their spread. A seed varies the "
            "batches (--batch-size below the number of rows), the folds of pairs that aren't held out, and "
            "the draws of fish, lisa and dfr"
        )


def _facts(options: SweepOptions, ready: Any) -> dict[str, Any]:
    """What the result was made from."""
    problem = ready.problem
    return {
        "options": as_json(options),
        "classes": list(ready.classes),
        "data": {
            "features": str(options.features),
            "content_sha256": problem.content_sha256,
            "fingerprint": fingerprint(problem.encoder),
            "target": problem.target.name,
            **problem.roles.where,
            "test": None if problem.test is None else problem.roles.where["test"],
            "train_rows": len(ready.whole.X),
            "val_rows": 0 if problem.val is None else len(problem.val.ids),
            "test_rows": 0 if problem.test is None else len(problem.test.ids),
            "pairs": None if options.pairs is None else str(options.pairs),
            "pairs_used": 0 if problem.pairs is None else ready.whole.pairs,
            "pairs_held_out": 0 if problem.pairs is None else int(problem.pairs.held_out.sum()),
            "numerical_rank": ready.rank,
        },
        "table": _beside(options.output, ".csv").name,
        "history": _beside(options.output, ".h5").name,
    }


def _beside(output: Path, suffix: str) -> Path:
    return output.with_suffix(suffix)


def _write(options: SweepOptions, table: Any, columns: dict[str, list[Any]], report: SweepReport) -> None:
    """The named output comes last: where it is, the others are."""
    writers = {
        ".h5": lambda path: write_sweep(path, table),
        ".csv": lambda path: write_csv(path, list(columns), zip(*columns.values(), strict=True)),
        ".json": lambda path: write_result(path, "sweep", report.to_json()),
    }
    if options.output.suffix == ".parquet":
        writers[".parquet"] = lambda path: write_parquet(path, columns)
    for suffix in sorted(writers, key=lambda suffix: suffix == options.output.suffix):
        writers[suffix](_beside(options.output, suffix))
