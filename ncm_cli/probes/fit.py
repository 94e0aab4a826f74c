"""``ncm fit``: linear probes on projected features, and the choice among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.options import as_json, check, given_flags
from ncm_cli.probes.crossfit import CrossFit, unmeasured
from ncm_cli.probes.judge import (
    UPWEIGHTED,
    Judged,
    constant_fit,
    control_rows,
    crossfit,
    judge_pick,
    shift_of,
)
from ncm_cli.probes.metrics import decide
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.path import Fit
from ncm_cli.probes.problem import (
    Part,
    Problem,
    pairs_digest,
    read_problem,
    resolve_ranks,
    rows_digest,
    rows_record,
)
from ncm_cli.probes.selection import Candidate, Fold, choose, score_path
from ncm_cli.probes.train import resolve_device, train_path, without_effect, work
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.probe import Probe, write_probe

ONLY = "only-candidate"
"""The rule's name where there was one setting and so nothing to choose."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """What was fitted, how it was chosen, and from what."""

    output: str
    method: str
    solver: str
    task: str
    target: str
    classes: tuple[str, ...]
    rank: int
    weight_decay: float
    rule: str
    oracle: bool
    note: str
    candidates: tuple[Candidate, ...]
    chosen: int
    converged: bool
    train_rows: int
    val_rows: int
    pairs: int
    """That span the basis: all but those left out."""
    held_out: int
    """Of them, held out by the user while the choice was made."""
    folds: int
    """The folds of pairs that candidates were measured on; 0 without pairs."""
    numerical_rank: int
    judged: Judged | None
    """Verdict and controls; None without pairs."""
    flags: tuple[str, ...]

    @property
    def pick(self) -> Candidate:
        return self.candidates[self.chosen]

    def to_json(self) -> dict[str, Any]:
        """Everything, the whole path included, ready for JSON."""
        body = dataclasses.asdict(self)
        body["path"] = [candidate_json(candidate) for candidate in self.candidates]
        del body["candidates"], body["judged"]
        body |= judged_json(self.judged)
        return {**body, "classes": list(self.classes), "flags": list(self.flags)}


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """A candidate's known facts; non-finite numbers (a diverged probe's) are left out."""
    facts = dataclasses.asdict(candidate)
    return {
        name: value
        for name, value in facts.items()
        if value is not None and (not isinstance(value, float) or np.isfinite(value))
    }


def judged_json(judged: Judged | None) -> dict[str, Any]:
    """``verdict`` and ``controls`` as JSON values; None and no controls without pairs."""
    if judged is None:
        return {"verdict": None, "controls": []}
    controls = [dataclasses.asdict(control) for control in judged.controls]
    return {"verdict": dataclasses.asdict(judged.verdict), "controls": controls}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """How the probes of a fit are trained, and which are tried."""

    options: FitOptions
    method: str
    solver: str
    rule: str
    note: str
    ranks: tuple[int, ...]
    decays: tuple[float, ...]
    folds: tuple[Fold, ...]
    available: int
    """The largest rank that can be tried: of all pairs, or of those that a fold leaves."""

    @property
    def controls_solver(self) -> str:
        return self.solver if self.method == "ncm" else "lbfgs"


def fit(options: FitOptions, *, reporter: Reporter = SILENT) -> FitReport:
    """Fit the probes, choose one, and write it.

    Raises
    ------
    InputError
        Rows, labels, pairs or ranks that can't be used, or several candidates and nothing to choose by.
    MismatchError
        Features and pairs of different encoders.
    """
    check(options)
    method, solver = options.chosen_method, options.chosen_solver
    idle = given_flags(options, without_effect(options, method, solver))
    if idle:
        reporter.warn(f"no effect with --method {method} --solver {solver}: {', '.join(idle)}")
    problem = read_problem(options, oracle=options.select == "oracle", reporter=reporter)
    whole = problem.whole()
    setting = _setting(problem, whole, method, solver, reporter)
    if solver == "adam":
        reporter.note(f"training on {resolve_device(options.device)}")
    candidates, chosen, best, found = _choose(problem, whole, setting, reporter)
    judged = _judge(problem, whole, setting, best, found) if problem.pairs is not None else None
    _warn_unconverged(candidates, best, setting, reporter)
    _warn_pick(problem, whole, setting, best, reporter)
    report = FitReport(
        output=str(options.output),
        method=method,
        solver=solver,
        task=options.task,
        target=problem.target.name,
        classes=problem.target.classes,
        rank=best.rank,
        weight_decay=best.weight_decay,
        rule=setting.rule,
        oracle=setting.rule == "oracle",
        note=setting.note,
        candidates=tuple(candidates),
        chosen=chosen,
        converged=best.converged,
        train_rows=len(problem.train.ids),
        val_rows=0 if problem.val is None else len(problem.val.ids),
        pairs=whole.pairs,
        held_out=0 if problem.pairs is None else int(problem.pairs.held_out.sum()),
        folds=len(setting.folds),
        numerical_rank=whole.rank,
        judged=judged,
        flags=_flags(problem, options, setting.rule),
    )
    write_probe(options.output, _probe(problem, whole, report, best))
    if options.save_controls is not None:
        _save_controls(options.save_controls, problem, report, setting)
    return report


def _setting(problem: Problem, whole: Part, method: str, solver: str, reporter: Reporter) -> _Setting:
    """Resolve rule, ranks and weight decays."""
    options = problem.options
    rule, note = resolve_rule(options.select, problem, options.several)
    if note:
        reporter.note(note)
    folds: tuple[Fold, ...] = ()
    available = whole.rank
    if problem.pairs is not None:
        try:
            folds = tuple(problem.folds(options.folds, options.seed))
        except InputError:
            if rule == "bound":
                raise
    if rule == "bound" and method == "ncm":
        available = min(available, *(problem.fold_rank(fold) for fold in folds))
    return _Setting(
        options=options,
        method=method,
        solver=solver,
        rule=rule,
        note=note,
        ranks=resolve_ranks(options.rank, method, available, reporter),
        decays=options.decays,
        folds=folds,
        available=available,
    )


def _choose(
    problem: Problem, whole: Part, setting: _Setting, reporter: Reporter
) -> tuple[list[Candidate], int, Fit, CrossFit | None]:
    """The candidates, which one is chosen, its fit on all rows and pairs, and the folds' measurements."""
    options, task = setting.options, setting.options.task
    kind: dict[str, Any] = {"method": setting.method, "solver": setting.solver}
    count = len(setting.ranks) * len(setting.decays)
    if setting.rule != "bound":
        with reporter.task("fitting", work(count, options, setting.solver), unit="fits") as bar:
            fits = train_path(
                whole, options, ranks=setting.ranks, decays=setting.decays, advance=bar.advance, **kind
            )
        val, test = (
            None if rows is None else rows.scaled(whole.scaling) for rows in (problem.val, problem.test)
        )
        candidates = score_path(fits, val=val, test=test)
        chosen = 0 if setting.rule == ONLY else choose(candidates, setting.rule, task)
        return candidates, chosen, fits[chosen], None
    ranks = sorted({0, *setting.ranks}) if setting.method == "ncm" else setting.ranks
    total = len(setting.folds) * len(ranks) * len(setting.decays)
    with reporter.task("fitting folds", work(total, options, setting.solver), unit="fits") as bar:
        found = crossfit(
            problem, setting.folds, options, ranks=ranks, decays=setting.decays, advance=bar.advance, **kind
        )
    candidates = [candidate for candidate in found.candidates if candidate.rank in setting.ranks]
    chosen = choose(candidates, "bound", task)
    pick = candidates[chosen]
    best = train_path(whole, options, ranks=[pick.rank], decays=[pick.weight_decay], **kind)[0]
    return candidates, chosen, best, found


def _judge(problem: Problem, whole: Part, setting: _Setting, best: Fit, found: CrossFit | None) -> Judged:
    """Verdict and controls; where the rule didn't measure on folds, the pick and ERM are measured now."""
    assert problem.pairs is not None
    try:
        if not setting.folds:
            problem.folds(setting.options.folds, setting.options.seed)
        if found is None:
            found = crossfit(
                problem,
                setting.folds,
                setting.options,
                method=setting.method,
                solver=setting.solver,
                ranks=sorted({0, best.rank}),
                decays=setting.decays,
            )
        return judge_pick(
            problem,
            setting.folds,
            setting.options,
            found,
            best.rank,
            best.weight_decay,
            method=setting.method,
            solver=setting.controls_solver,
            decays=setting.decays,
            least_bound=setting.rule == "bound",
            one_answer=_one_answer(problem, whole, best) is not None,
        )
    except InputError as error:
        if setting.rule == "bound":
            raise
        pairs = int(problem.pairs.usable.sum())
        why = f"{error.what} ({error.found})" if error.found else error.what
        return Judged(verdict=unmeasured(pairs, 0, why, shift_of(problem)), controls=())


def resolve_rule(asked: str | None, problem: Problem, several: bool) -> tuple[str, str]:
    """The selection rule in force, and a line that says why where it wasn't asked for.

    Raises
    ------
    InputError
        Several candidates, and what the rule needs is missing.
    """
    if not several and asked != "oracle":
        return ONLY, ""
    what = "several combinations of rank and weight decay, and nothing to choose by"
    one = "or say one --rank and one --weight-decay"
    if problem.val is None and asked != "oracle":
        raise InputError(
            what,
            where=problem.origin.path,
            found="no validation rows",
            fix=f"name some with --val W, such as --val '{problem.filters.unused}', {one}",
        )
    if asked is not None and asked != "bound":
        return asked, ""
    if problem.pairs is None:
        return "in-domain", "choosing by validation rows only (--select in-domain): there are no pairs"
    measured = (
        "the bound on MSE from validation MSE and squared changes"
        if problem.regression
        else ("validation error + flip rate")
    )
    return "bound", "" if asked else f"choosing by {measured} of pairs, cross-fitted (--select bound)"


def _warn_unconverged(
    candidates: Sequence[Candidate], best: Fit, setting: _Setting, reporter: Reporter
) -> None:
    missed = sum(not candidate.converged for candidate in candidates)
    if setting.solver == "adam":
        if missed or not best.converged:
            reporter.warn(f"{missed} of {len(candidates)} probes diverged: lower --lr")
        return
    if missed or not best.converged:
        about = "not the chosen one" if best.converged else "the chosen one among them"
        options = setting.options
        reporter.warn(
            f"{max(missed, 1)} of {len(candidates)} probes did not reach the tolerance {options.tolerance:g} "
            f"in {options.max_iter} iterations, {about}: raise --max-iter, or --weight-decay"
        )


def _one_answer(problem: Problem, whole: Part, best: Fit) -> str | None:
    """The class that a probe gives every validation row, if it is one alone."""
    if problem.val is None or problem.regression or len(problem.val.ids) < 2:
        return None
    told = np.unique(decide(whole.scaling.apply(problem.val.X) @ best.weight.T + best.bias))
    return problem.target.classes[int(told[0])] if len(told) == 1 else None


def _warn_pick(problem: Problem, whole: Part, setting: _Setting, best: Fit, reporter: Reporter) -> None:
    """Say when the pick is a constant, or lies at the end of what was tried."""
    if (answer := _one_answer(problem, whole, best)) is not None:
        reporter.warn(f"the chosen probe says {answer!r} of every validation row: it is a constant")
    last = max(setting.ranks)
    if setting.rule == ONLY or best.rank != last or len(setting.ranks) < 2:
        return
    if last < setting.available:
        reporter.warn(
            f"rank {last} is the largest that was tried, of {setting.available} that these pairs allow: "
            f"--rank 0:{setting.available} tries more"
        )
    else:
        reporter.note(
            f"rank {last} is the largest that these pairs allow: more pairs may hold more directions"
        )


def _flags(problem: Problem, options: FitOptions, rule: str) -> tuple[str, ...]:
    """What a reader of this probe's numbers must know."""
    flags = []
    if rule == "oracle":
        flags.append("ORACLE: chosen by looking at the test rows")
    if options.overlap == "keep" and problem.copies:
        flags.append(f"OVERLAP: {problem.copies} training images are validation or test images")
    if options.overlap == "keep" and problem.pairs is not None and problem.pairs.overlapping:
        flags.append(f"OVERLAP: {problem.pairs.overlapping} pairs have a validation or test row as a member")
    return tuple(flags)


def _probe(problem: Problem, whole: Part, report: FitReport, best: Fit) -> Probe:
    options, filters = problem.options, problem.filters
    resolved = as_json(options) | {
        "method": report.method,
        "solver": report.solver,
        "train": filters.train,
        "val": filters.val,
        "target": report.target,
    }
    trained = ("lr", "epochs", "batch_size", "seed") if report.solver == "adam" else ("tolerance", "max_iter")
    record = {
        "method": report.method,
        "hyper_parameters": {
            "weight_decay": report.weight_decay,
            "solver": report.solver,
            "upweight": options.upweight,
            **{name: getattr(options, name) for name in trained},
        },
        "selection": {
            "rule": report.rule,
            "oracle": report.oracle,
            "note": report.note,
            "folds": report.folds,
            "chosen": report.chosen,
            "path": [candidate_json(candidate) for candidate in report.candidates],
            "groups": options.groups,
            **judged_json(report.judged),
        },
        "flags": list(report.flags),
        "envs": options.envs,
        "options": resolved,
    }
    return probe_of(problem, whole, best, record)


def probe_of(problem: Problem, part: Part, best: Fit, record: Mapping[str, Any]) -> Probe:
    """A probe fitted on a part of a problem, whose rows and pairs it records; ``record`` says how."""
    filters, scaling, spectrum = problem.filters, part.scaling, part.spectrum
    meta = {
        "encoder": problem.origin.encoder,
        "fingerprint": problem.origin.fingerprint,
        "scaling": {"kind": scaling.kind, "factor": scaling.factor},
        **record,
        "rank": best.rank,
        "converged": best.converged,
        "rows": rows_record(problem),
        "data": {
            "features": {
                "path": problem.origin.path,
                "content_sha256": problem.origin.content_sha256,
                "train_sha256": rows_digest(problem),
            },
            "pairs": _pairs_json(problem, part),
            "train": filters.train,
            "val": filters.val,
            "test": filters.test,
            "train_rows": len(problem.train.ids),
            "val_rows": 0 if problem.val is None else len(problem.val.ids),
        },
    }
    return Probe(
        weight=best.weight,
        bias=best.bias,
        basis=np.zeros((problem.origin.dim, 0))
        if spectrum is None
        else np.ascontiguousarray(spectrum.basis[:, : best.rank]),
        singular_values=np.zeros(0) if spectrum is None else spectrum.singular_values[: spectrum.rank],
        mean=scaling.mean,
        scale=scaling.scale,
        classes=problem.target.classes,
        task="regression" if problem.regression else "classification",
        target=problem.target.name,
        meta=meta,
    )


def _pairs_json(problem: Problem, part: Part) -> dict[str, Any] | None:
    pairs = problem.pairs
    if pairs is None:
        return None
    return {
        "path": str(problem.options.pairs),
        "content_sha256": pairs.store.content_sha256,
        "used": part.pairs,
        "used_sha256": pairs_digest(problem),
        "held_out": int(pairs.held_out.sum()),
        "left_out": pairs.excluded,
        "strategy": pairs.store.strategy,
        "sources": [dict(source) for source in pairs.store.sources],
        "numerical_rank": part.rank,
    }


def _save_controls(folder: Path, problem: Problem, report: FitReport, setting: _Setting) -> None:
    """Write each control as a probe, fitted on all of its rows: NAME.safetensors."""
    if report.judged is None or not report.judged.controls:
        raise InputError("there are no controls to save", found="no pairs, or pairs that can't be measured")
    rows = control_rows(problem)
    folder.mkdir(parents=True, exist_ok=True)
    for control in report.judged.controls:
        own = rows.get(control.name, problem.train)
        part = problem.part(own, None)
        if control.weight_decay is None:
            best = constant_fit(part)
        else:
            best = train_path(
                part,
                setting.options,
                method="erm",
                solver=setting.controls_solver,
                ranks=[0],
                decays=[control.weight_decay],
            )[0]
        path = folder / f"{control.name}.safetensors"
        record = dataclasses.replace(
            report,
            output=str(path),
            method=control.name,
            solver=setting.controls_solver,
            rank=0,
            weight_decay=best.weight_decay,
            rule=ONLY if control.weight_decay is None else "bound",
            oracle=False,
            note=f"control of {report.output}",
            # The constant had no others to be chosen among; the others' weight decays had.
            candidates=(Candidate(rank=0, weight_decay=0.0, converged=True),)
            if control.weight_decay is None
            else (),
            chosen=0,
            converged=best.converged,
            train_rows=len(own.ids),
            judged=None,
        )
        options = dataclasses.replace(
            problem.options,
            pairs=None,
            upweight=problem.options.groups if control.name == UPWEIGHTED else problem.options.upweight,
        )
        alone = dataclasses.replace(problem, train=own, pairs=None, options=options)
        write_probe(path, _probe(alone, part, record, best))
