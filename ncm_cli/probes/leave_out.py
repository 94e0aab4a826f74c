"""``--leave-out``: fits or sweeps once for each domain, which is left out of training and tested on.

Gulrajani and Lopez-Paz (2021), In search of lost domain generalization, section 3: training-domain validation
is the rule ``in-domain``, test-domain validation the rule ``oracle``.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from ncm_cli.errors import InputError, UsageError, listing
from ncm_cli.options import check, parse_left_out, where_text
from ncm_cli.probes.options import TrainingOptions
from ncm_cli.progress import Reporter
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import part_of_name
from ncm_cli.store.outputs import check_outputs
from ncm_cli.store.roles import split_filter

O = TypeVar("O", bound=TrainingOptions)  # noqa: E741

Work = Callable[[O], dict[str, Any]]


def leave_out(
    options: O, work: Work[O], reporter: Reporter, *, beside: Callable[[O], Any] | None = None
) -> dict[str, Any]:
    """Do the work for the one value that ``--leave-out`` names, or for all values in turn.

    ``beside`` gives the options of what else is written for each value, to be checked before any work.

    Returns
    -------
    For one value, the body of ``work``. For several, ``leave_out`` is the column and ``left_out`` has the
    body of each value by value; the outputs of a value are named NAME-VALUE.

    Raises
    ------
    InputError
        A column with fewer than two values, or two values whose outputs have the same name.
    """
    assert options.leave_out is not None
    column, value = parse_left_out(options.leave_out)
    with FeatureStore(options.features) as store:
        column = store.categorical(column).name
        values = [name for name, rows in store.categorical(column).counts().items() if rows]
        if value is None and len(values) < 2:
            raise InputError(
                "--leave-out needs two domains or more", where=store.path, found=f"{column} = {values}"
            )
        of_value = {
            name: _without(options, store, column, name, alone=value is not None)
            for name in (values if value is None else [value])
        }
        target = options.target or store.label_column
        if column == target:
            raise UsageError(
                f"--leave-out {column}: a class that is left out can't be learned",
                expected="a column of domains, which the classes share",
            )
        for name, value_options in of_value.items():
            _refuse_empty(value_options, store, where_text(column, name))
    if value is not None:
        return work(of_value[value])
    by_name: dict[str, list[str]] = {}
    for name, value_options in of_value.items():
        by_name.setdefault(value_options.output.name.casefold(), []).append(name)
    for names in by_name.values():
        if len(names) > 1:
            raise InputError(
                "domains whose outputs would have the same name",
                where=f"--leave-out {column}",
                found=f"{listing(map(repr, names))}: {of_value[names[0]].output.name}",
                fix=f"leave them out one by one: --leave-out {shlex.quote(where_text(column, names[0]))}",
            )
    for value_options in of_value.values():
        check_outputs(check(value_options))
        if beside is not None:
            check_outputs(beside(value_options))
    bodies = {}
    for number, (name, value_options) in enumerate(of_value.items(), 1):
        reporter.note(f"left out: {column} = {name} ({number} of {len(of_value)})")
        bodies[name] = work(value_options)
    return {"leave_out": column, "left_out": bodies}


def _refuse_empty(options: TrainingOptions, store: FeatureStore, left_out: str) -> None:
    """Refuse a domain without which there are no rows to train on, to validate on, or to test on."""
    for role in ("train", "val", "test"):
        where = getattr(options, role)
        if where is not None and not store.mask(where).any():
            raise InputError(
                f"no {role} row is left where {left_out} is left out",
                where=store.path,
                found=f"no row of {where}",
                expected="test rows of every domain, and training and validation rows of other domains",
                fix=f"name other rows with --{role} WHERE, or one domain with --leave-out COLUMN=VALUE",
            )


def _without(options: O, store: FeatureStore, column: str, value: str, *, alone: bool) -> O:
    """The options without the rows of ``value``, which are the test rows."""

    def others(where: str | None, role: Any) -> str | None:
        base = where or split_filter(store, role)
        return base and f"{base} & {where_text(column, value, negated=True)}"

    left_out = where_text(column, value)
    test = f"{options.test} & {left_out}" if options.test else left_out
    changed: dict[str, Any] = {
        "leave_out": left_out,
        "train": others(options.train, "train"),
        "val": others(options.val, "val"),
        "test": test,
    }
    if not alone:
        changed["output"] = _named(options.output, value)
        for name in ("save_probes", "save_controls"):
            folder: Path | None = getattr(options, name, None)
            if folder is not None:
                changed[name] = folder / part_of_name(value, otherwise="value")
    return dataclasses.replace(options, **changed)


def _named(output: Path, value: str) -> Path:
    return output.with_name(f"{output.stem}-{part_of_name(value, otherwise='value')}{output.suffix}")


class Average(NamedTuple):
    """The test accuracies of one rule and method, each with one domain left out, and their mean."""

    rule: str
    method: str
    oracle: bool
    by_value: dict[str, float]
    mean: float
    sd: float | None
    """Standard deviation over seeds of the mean over domains; None for one seed."""
    worst: float


def averages(left_out: Mapping[str, Mapping[str, Any]]) -> list[Average]:
    """For each rule and method that every domain's sweep has: test accuracies, their mean and the worst.

    ``left_out`` are the bodies of ``ncm sweep`` by the value left out. Means are over domains, each with the
    same weight, as in DomainBed's tables.
    """
    picks = {
        value: {(row["rule"], row["method"]): row for row in body["rows"]} for value, body in left_out.items()
    }
    shared = [key for key in next(iter(picks.values())) if all(key in rows for rows in picks.values())]
    domain_averages = []
    for rule, method in shared:
        rows = {value: of_value[rule, method] for value, of_value in picks.items()}
        by_value = {value: row["metrics"]["test_accuracy"] for value, row in rows.items()}
        if None in by_value.values():
            continue
        seeds = list(zip(*(row["values"]["test_accuracy"] for row in rows.values()), strict=False))
        sd = stdev(map(fmean, seeds)) if len(seeds) > 1 else None
        oracle, values = any(row["oracle"] for row in rows.values()), by_value.values()
        domain_averages.append(Average(rule, method, oracle, by_value, fmean(values), sd, min(values)))
    return domain_averages
