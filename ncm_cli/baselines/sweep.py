"""``ncm sweep``: many methods, hyper-parameters and seeds in one batched run, and the picks of each rule.

Every configuration is trained on all rows and pairs and, for the bound, on the training part of each fold of
the pairs, as in ``ncm fit``. Each seed has its own batches and its own folds.

``-o NAME.EXT`` writes three files: ``NAME.csv`` (one row for each configuration and rule, at the checkpoint
that the rule picks), ``NAME.h5`` (all checkpoints), and ``NAME.json`` (the picks, for ``ncm report``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli import __version__
from ncm_cli.baselines.choice import (
    choose_by_rules,
    chunks,
    columns_of,
    plan_configs,
    table_of,
    write_sweep,
)
from ncm_cli.baselines.options import SweepOptions, table_files
from ncm_cli.baselines.runner import Runner
from ncm_cli.options import check, values_of
from ncm_cli.probes.leave_out import leave_out
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.solvers.methods import Config
from ncm_cli.store.files import jsonable, sha256_file, write_result, writer_lock
from ncm_cli.store.journal import Journal
from ncm_cli.store.probe import write_probe
from ncm_cli.store.tables import write_csv


def sweep(options: SweepOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Train every configuration, write the tables, and choose by every rule.

    Returns
    -------
    dict
        The body of ``NAME.json``. Its ``rows`` are, for each method and rule, ``method, rule, oracle, trial,
        hyper_parameters, seeds, epochs, metrics`` (means over seeds), ``sd`` (their standard deviations) and
        ``values`` (one for each seed); ``rules`` has the reason why each rule could not be applied, None if
        it was. For ``--leave-out`` see `leave_out`.

    Raises
    ------
    UsageError
        Options that can't be used, or too many configurations.
    InputError
        Rows, columns, pairs or ranks that can't be used; another process writing the same output.
    MismatchError
        Features and pairs of different encoders.
    """
    check(options)
    if options.leave_out is not None:
        return leave_out(options, lambda each: _sweep(each, reporter), reporter)
    return _sweep(options, reporter)


def _sweep(options: SweepOptions, reporter: Reporter) -> dict[str, Any]:
    # All files are written, whichever was named; one of them has the lock and the journal.
    output = options.output.with_suffix(".json")
    with writer_lock(output):
        runner = Runner(options, reporter)
        configs = plan_configs(options, available_rank=runner.rank, reporter=reporter, steps=runner.steps)
        parts = chunks(configs, runner.whole.logits)
        with Journal.open(output, _key(options, runner), replace=True) as journal:
            results = _finished(configs, parts, runner, journal, reporter)
        for name, what in (
            ("diverged", "diverged (a weight became NaN or infinite) and can't be chosen"),
            ("unconverged", "stopped short of convergence"),
        ):
            labels = [configs[i].label for i in np.flatnonzero(results[name])]
            if labels:
                counts = ", ".join(f"{label} {labels.count(label):,}" for label in dict.fromkeys(labels))
                reporter.warn(f"{len(labels):,} of {len(configs):,} configurations {what}: {counts}")
        history = {name: results[name] for name in runner.metrics}
        table = table_of(options, configs, history, results["diverged"])
        rows, rules, seedless = choose_by_rules(options, configs, table)
        if seedless:
            held_out = runner.problem.pairs is not None and runner.problem.pairs.held_out.any()
            except_folds = ", except on the folds of the bound" if runner.folds and not held_out else ""
            reporter.note(
                f"the results of {', '.join(seedless)} don't depend on the seed{except_folds}, so ±.000 is "
                "not their spread. A seed varies the batches (--batch-size below the number of rows), the "
                "folds of pairs that aren't held out, and the draws of fish, lisa and dfr"
            )
        body: dict[str, Any] = jsonable(
            {
                "output": str(options.output),
                "rows": rows,
                "configurations": len(configs),
                "diverged": int(results["diverged"].sum()),
                "unconverged": int(results["unconverged"].sum()),
                "rules": rules,
                "options": jsonable(options),
                "classes": runner.problem.target.classes,
                "data": runner.data(),
                "table": output.with_suffix(".csv").name,
                "history": output.with_suffix(".h5").name,
            }
        )
        if options.save_probes is not None:
            save_probes(options.save_probes, runner, configs, parts, rows)
        columns = columns_of(configs, table, rules)
        writers: dict[str, Callable[[Path], object]] = {
            ".h5": lambda path: write_sweep(path, table),
            ".csv": lambda path: write_csv(path, list(columns), zip(*columns.values(), strict=True)),
            ".json": lambda path: write_result(path, "sweep", body),
        }
        # The named output is written last: if it exists, so do the others.
        for path in sorted(table_files(options.output), key=lambda path: path == options.output):
            writers[path.suffix](path)
        journal.discard()
    return body


def _key(options: SweepOptions, runner: Runner) -> dict[str, Any]:
    """The journal's key: everything that finished chunks depend on."""
    import torch

    free = ("output", "save_probes", "features", "pairs", "device")
    return {
        "metrics": runner.metrics,
        "options": {name: value for name, value in jsonable(options).items() if name not in free},
        "features": runner.problem.content_sha256,
        "pairs": None if options.pairs is None else [*map(sha256_file, values_of(options.pairs))],
        "device": runner.device.partition(":")[0],
        "versions": {"ncm": __version__, "torch": torch.__version__},
    }


def _finished(
    configs: Sequence[Config], parts: list[list[int]], runner: Runner, journal: Journal, reporter: Reporter
) -> dict[str, NDArray[Any]]:
    """The results of `Runner.run` for all configurations; chunks that an earlier run finished are read."""
    if journal.replaced:
        reporter.note("the finished part of an interrupted sweep with other options or data is discarded")
    if journal.damaged:
        reporter.warn(f"{journal.damaged:,} finished chunks are damaged, and are trained anew")
    passes = runner.options.epochs * (1 + max(map(len, runner.folds.values()), default=0))
    results: list[dict[str, NDArray[Any]]] = []
    resumed = 0
    with reporter.task("training", total=len(configs) * passes, unit="epochs") as task:
        for index, members in enumerate(parts):
            chunk = journal.get(str(index))
            if chunk is None:
                chunk = runner.run([configs[i] for i in members], task.advance)
                journal.put(str(index), chunk)
            else:
                resumed += len(members)
                task.advance(len(members) * passes)
            results.append(chunk)
    if resumed:
        reporter.note(f"{resumed:,} of {len(configs):,} configurations were already finished")
    order = np.argsort(np.concatenate(parts))
    return {name: np.concatenate([part[name] for part in results])[order] for name in results[0]}


def save_probes(
    folder: Path,
    runner: Runner,
    configs: Sequence[Config],
    parts: list[list[int]],
    rows: list[dict[str, Any]],
) -> None:
    """Write each rule's picks for each method as probes, one for each seed, with their records."""
    options = runner.options
    position = {(config.label, config.trial, config.seed): i for i, config in enumerate(configs)}
    picks: list[tuple[int, int | None, str, dict[str, Any]]] = []
    for row in rows:
        for at, (seed, epoch) in enumerate(zip(row["seeds"], row["epochs"], strict=True)):
            selection = {
                "rule": row["rule"],
                "oracle": row["oracle"],
                "note": f"picked by ncm sweep -o {options.output.name}",
                "folds": len(runner.folds.get(seed, ())),
                "groups": options.groups,
                "trial": row["trial"],
                "epoch": epoch,
                "metrics": {name: values[at] for name, values in row["values"].items()},
            }
            name = f"{row['method']}-{row['rule']}" + (f"-seed{seed}" if len(row["seeds"]) > 1 else "")
            picks.append((position[row["method"], row["trial"], seed], epoch, name, selection))
    folder.mkdir(parents=True, exist_ok=True)
    for members in parts:
        place = {i: at for at, i in enumerate(members)}
        picks_of_chunk = [pick for pick in picks if pick[0] in place]
        wanted = list(dict.fromkeys((place[i], epoch) for i, epoch, *_ in picks_of_chunk))
        fits = runner.probes([configs[i] for i in members], wanted) if picks_of_chunk else {}
        for i, epoch, name, selection in picks_of_chunk:
            probe = runner.probe(configs[i], fits[place[i], epoch], selection)
            write_probe(folder / f"{name}.safetensors", probe)
