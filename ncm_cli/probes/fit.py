"""``ncm fit``: fits linear probes on projected features, chooses one, and judges whether the pairs helped."""

from __future__ import annotations

import dataclasses
import os.path
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import check, given_flags, parse_left_out
from ncm_cli.probes.choose import ONLY_CANDIDATE, Choice, choose_probe
from ncm_cli.probes.controls import (
    constant_fit,
    nearly_constant,
    one_answer,
    variant_of_control,
    with_verdict,
)
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.leave_out import leave_out
from ncm_cli.probes.metrics import row_errors, summary, worst
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.probes.problem import Problem, Variant
from ncm_cli.probes.reading import read_problem
from ncm_cli.probes.record import flags_of, origin_of, probe_of
from ncm_cli.probes.selection import stacked
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.solvers.solve import train_path
from ncm_cli.solvers.training_set import Fit, TrainingSet
from ncm_cli.store.files import jsonable
from ncm_cli.store.probe import Probe, write_probe


def fit(options: FitOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Fit the probes, choose one, write it, and return what ``--json`` prints.

    In the result, ``pairs`` counts the pairs that span the final basis, ``held_out`` those of them that the
    user held out while the choice was made, and ``folds`` the folds that candidates were measured on. Without
    pairs there is no ``verdict``. For ``--leave-out`` see `leave_out`; ``test`` is then the result of
    ``ncm eval`` on the rows left out.

    Raises
    ------
    InputError
        Rows, labels, pairs or ranks that can't be used, or several candidates without validation rows.
    MismatchError
        Features and pairs of different encoders.
    """
    check(options)
    if options.leave_out is None:
        return _fit(options, reporter)
    if parse_left_out(options.leave_out)[1] is not None:
        return leave_out(options, lambda each: _fit(each, reporter), reporter)

    def fit_and_test(each: FitOptions) -> dict[str, Any]:
        return _fit(each, reporter) | {"test": evaluate(_test_of(each), reporter=reporter)}

    return leave_out(options, fit_and_test, reporter, beside=_test_of)


def _test_of(options: FitOptions) -> EvalOptions:
    """The evaluation of a probe on its test rows, written beside it as NAME.json."""
    return EvalOptions(
        probe=options.output,
        features=options.features,
        where=options.test,
        groups=options.groups,
        target=options.target,
        output=options.output.with_suffix(".json"),
    )


def _fit(options: FitOptions, reporter: Reporter) -> dict[str, Any]:
    method, solver = options.chosen_method, options.chosen_solver
    if idle := given_flags(options, options.idle):
        reporter.warn(f"no effect with --method {method} --solver {solver}: {', '.join(idle)}")
    problem = read_problem(options, oracle=options.select == "oracle", reporter=reporter)
    if options.save_controls is not None and problem.val is None:
        raise _no_controls("no validation rows")
    choice, verdict, controls = with_verdict(problem, choose_probe(problem, reporter), reporter)
    best, variant, whole = choice.best, choice.variant, problem.whole(choice.variant)
    _warn(problem, choice, reporter)
    body = {
        "output": str(options.output),
        "method": method,
        "solver": solver,
        "task": options.task,
        "target": problem.target.name,
        "classes": list(problem.target.classes),
        "rank": best.rank,
        "weight_decay": best.weight_decay,
        "upweight": problem.upweight if variant.upweighted else None,
        "pair_rows": variant.pair_rows,
        "rule": choice.rule,
        "oracle": choice.rule == "oracle",
        "note": choice.note,
        "path": choice.candidates,
        "chosen": choice.chosen,
        "converged": best.converged,
        "train_rows": len(whole.X),
        "val_rows": 0 if problem.val is None else len(problem.val.ids),
        "pairs": whole.pairs,
        "held_out": 0 if problem.pairs is None else int(problem.pairs.held_out.sum()),
        "folds": len(choice.folds),
        "numerical_rank": whole.rank,
        "verdict": verdict and verdict.record(),
        "controls": controls,
        "crossings": worst_groups(problem, whole, best),
        "flags": flags_of(problem, choice.rule == "oracle"),
    }
    probes = {options.output: _probe(problem, whole, variant, body, best)}
    if options.save_controls is not None:
        control_probes = _control_probes(options.save_controls, problem, body)
        if os.path.realpath(options.output) in map(os.path.realpath, control_probes):
            raise UsageError("the probe and one of its controls have the same name", found=options.output)
        options.save_controls.mkdir(parents=True, exist_ok=True)
        probes |= control_probes
    for path, probe in probes.items():
        write_probe(path, probe)
    return body


def worst_groups(problem: Problem, training: TrainingSet, best: Fit) -> list[dict[str, Any]]:
    """The worst group of the validation rows in each crossing of ``--groups``, as ``ncm eval`` records it."""
    val, groups = problem.val, problem.groups
    if val is None or groups is None:
        return []
    rows = val.scaled(training.scaling)
    values = row_errors(*stacked([best]), rows)[0][0]
    if not problem.regression:
        values = values == 0
    crossings = []
    for number, columns in enumerate(groups.crossings):
        members = np.flatnonzero(groups.crossing == number).tolist()
        table = [{"group": groups.key(i), **summary(values[val.group[:, number] == i])} for i in members]  # type: ignore[index]
        crossings.append({"columns": list(columns), "worst_group": worst(table)})
    return crossings


def _warn(problem: Problem, choice: Choice, reporter: Reporter) -> None:
    """Warn if fits didn't converge, or if the pick is nearly a constant or the last rank tried."""
    options, answer = problem.options, one_answer(problem, choice)
    best, count, last = choice.best, len(choice.candidates), max(choice.ranks)
    missed = sum(not candidate["converged"] for candidate in choice.candidates)
    if (missed or not best.converged) and options.chosen_solver == "adam":
        reporter.warn(f"{missed} of {count} probes diverged: lower --lr")
    elif missed or not best.converged:
        about = "not the chosen one" if best.converged else "the chosen one among them"
        reporter.warn(
            f"{max(missed, 1)} of {count} probes did not reach the tolerance {options.tolerance:g} "
            f"in {options.max_iter} iterations, {about}: raise --max-iter, or --weight-decay"
        )
    if answer is not None:
        reporter.warn(f"the chosen probe predicts {answer!r} for every validation row: it is a constant")
    elif words := nearly_constant(problem, choice):
        reporter.warn(f"{words}: it is nearly a constant")
    if choice.rule == ONLY_CANDIDATE or best.rank != last or len(choice.ranks) < 2:
        return
    if last < choice.available:
        reporter.warn(
            f"rank {last} is the largest that was tried, of {choice.available} that these pairs allow: "
            f"--rank 0:{choice.available} tries more"
        )
    else:
        reporter.note(
            f"rank {last} is the largest that these pairs allow: more pairs may span more directions"
        )


def _probe(
    problem: Problem, training: TrainingSet, variant: Variant, body: dict[str, Any], best: Fit
) -> Probe:
    options, where = problem.options, problem.roles.where
    trained = (
        ("lr", "epochs", "batch_size", "seed") if body["solver"] == "adam" else ("tolerance", "max_iter")
    )
    selection = ("rule", "oracle", "note", "folds", "chosen", "path", "verdict", "controls", "crossings")
    resolved = {name: body[name] for name in ("method", "solver", "target", "upweight")}
    resolved["pair_rows"] = "yes" if variant.pair_rows and problem.pairs is not None else "no"
    record = {
        "method": body["method"],
        "hyper_parameters": {
            "weight_decay": body["weight_decay"],
            "solver": body["solver"],
            "upweight": body["upweight"],
            "pair_rows": variant.pair_rows,
            **{name: getattr(options, name) for name in trained},
        },
        "selection": {**{name: body[name] for name in selection}, "groups": options.groups},
        "flags": body["flags"],
        "options": jsonable(options) | resolved | {"train": where["train"], "val": where["val"]},
    }
    return probe_of(problem, training, best, record, origin_of(problem, training, variant))


def _no_controls(why: str) -> InputError:
    return InputError("there are no controls to save", found=why, fix="leave --save-controls out")


def _control_probes(folder: Path, problem: Problem, body: dict[str, Any]) -> dict[Path, Probe]:
    """The controls as probes fitted on all of their rows, by file: NAME.safetensors."""
    if not body["controls"]:
        raise _no_controls(body["verdict"]["text"])
    solver, probes = problem.options.solving, {}
    if body["method"] != "ncm":
        solver = dataclasses.replace(solver, name="lbfgs")
    for control in body["controls"]:
        name, decay = control["name"], control["weight_decay"]
        variant = variant_of_control(problem, name)
        training = dataclasses.replace(problem.whole(variant), spectrum=None, pairs=0)
        control_fit = (
            constant_fit(training)
            if decay is None
            else train_path(training, solver, ranks=[0], decays=[decay])[0]
        )
        # The constant has nothing to choose; the weight decay of every other control was chosen.
        single = {"path": [{"rank": 0, "weight_decay": 0.0, "converged": True}], "rule": ONLY_CANDIDATE}
        record = {
            "method": name,
            "solver": solver.name,
            "weight_decay": control_fit.weight_decay,
            "oracle": False,
            "note": f"control of {body['output']}",
            "chosen": 0,
            "verdict": None,
            "controls": [],
            **(single if decay is None else {"path": [], "rule": "bound"}),
        }
        record["upweight"] = problem.upweight if variant.upweighted else None
        alone = dataclasses.replace(
            problem, pairs=None, options=dataclasses.replace(problem.options, pairs=None)
        )
        probes[folder / f"{name}.safetensors"] = _probe(alone, training, variant, body | record, control_fit)
    return probes
