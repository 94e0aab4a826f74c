"""``ncm fit``: linear probes on projected features, and the choice among them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, UsageError
from ncm_cli.methods.path import Fit
from ncm_cli.methods.projection import Spectrum
from ncm_cli.methods.selection import Candidate, choose, score_path
from ncm_cli.options.fit import WEIGHT_DECAYS, FitOptions
from ncm_cli.options.grids import parse_numbers
from ncm_cli.options.spec import as_json, given_flags
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.stages.common_pairs import resolve_ranks
from ncm_cli.stages.common_problem import Problem, read_problem
from ncm_cli.stages.fit_train import resolve_solver, train_path, without_effect
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
    refit: bool
    converged: bool
    train_rows: int
    val_rows: int
    pairs: int
    held_out: int
    numerical_rank: int
    flags: tuple[str, ...]

    @property
    def pick(self) -> Candidate:
        return self.candidates[self.chosen]

    def to_json(self) -> dict[str, Any]:
        """Everything, the whole path included, ready for JSON."""
        body = dataclasses.asdict(self)
        body["path"] = [candidate_json(candidate) for candidate in self.candidates]
        del body["candidates"]
        return {**body, "classes": list(self.classes), "flags": list(self.flags)}


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """A candidate's known facts; non-finite numbers (a diverged probe's) are left out."""
    facts = dataclasses.asdict(candidate)
    return {
        name: value
        for name, value in facts.items()
        if value is not None and (not isinstance(value, float) or np.isfinite(value))
    }


def fit(options: FitOptions, *, reporter: Reporter = SILENT) -> FitReport:
    """Fit the probes, choose one, and write it.

    Raises
    ------
    InputError
        Rows, labels, pairs or ranks that can't be used, or several candidates and nothing to choose by.
    MismatchError
        Features and pairs of different encoders.
    """
    method = options.method or ("erm" if options.pairs is None else "ncm")
    _check_values(options, method)
    solver = resolve_solver(options, method)
    idle = given_flags(options, without_effect(options, method, solver))
    if idle:
        reporter.warn(f"no effect with --method {method} --solver {solver}: {', '.join(idle)}")
    problem = read_problem(options, oracle=options.select == "oracle", reporter=reporter)
    ranks = resolve_ranks(options.rank, method, problem.spectrum, reporter)
    decays = parse_numbers(options.weight_decay or WEIGHT_DECAYS[solver])
    rule, note = resolve_rule(options.select, problem, len(ranks) * len(decays))
    if note:
        reporter.note(note)
    fits = train_path(
        problem,
        options,
        method=method,
        solver=solver,
        spectrum=problem.spectrum,
        ranks=ranks,
        decays=decays,
        reporter=reporter,
    )
    candidates = score_path(
        fits, task=options.task, val=problem.val, held_out=problem.held_out, test=problem.test
    )
    chosen = 0 if rule == ONLY else choose(candidates, rule, options.task)
    best, spectrum = fits[chosen], problem.spectrum
    _warn_unconverged(fits, best, solver, options, reporter)
    refit = options.refit and problem.held_out is not None and method == "ncm"
    if refit:
        best, spectrum = _refit(problem, options, method, solver, best, reporter)
    report = FitReport(
        output=str(options.output),
        method=method,
        solver=solver,
        task=options.task,
        target=problem.target.name,
        classes=problem.target.classes,
        rank=best.rank,
        weight_decay=best.weight_decay,
        rule=rule,
        oracle=rule == "oracle",
        note=note,
        candidates=tuple(candidates),
        chosen=chosen,
        refit=refit,
        converged=best.converged,
        train_rows=len(problem.train.X),
        val_rows=0 if problem.val is None else len(problem.val.X),
        pairs=0 if problem.pairs is None else int(problem.pairs.used.sum()),
        held_out=0 if problem.held_out is None else len(problem.held_out.a),
        numerical_rank=spectrum.rank if spectrum else 0,
        flags=_flags(problem, options, rule, refit),
    )
    write_probe(options.output, _probe(problem, options, report, best, spectrum))
    return report


def _check_values(options: FitOptions, method: str) -> None:
    """Refuse values that no data could make right."""
    if method == "ncm" and options.pairs is None:
        raise UsageError("the method ncm needs pairs", fix="--pairs PAIRS.h5, or --method erm")
    for decay in parse_numbers(options.weight_decay or "0"):
        if decay < 0:
            raise UsageError("--weight-decay is at least 0", found=decay)
    for flag, value in (("--tolerance", options.tolerance), ("--scale-factor", options.scale_factor)):
        if not (np.isfinite(value) and value > 0):
            raise UsageError(f"{flag} is above 0", found=value)


def resolve_rule(asked: str | None, problem: Problem, candidates: int) -> tuple[str, str]:
    """The selection rule in force, and a line that says why where it wasn't asked for.

    Raises
    ------
    InputError
        Several candidates, and what the rule needs is missing.
    """
    if candidates == 1 and asked != "oracle":
        return ONLY, ""
    several = f"{candidates} combinations of rank and weight decay, and nothing to choose by"
    one = "or say one --rank and one --weight-decay"
    if problem.val is None and asked != "oracle":
        raise InputError(
            several,
            where=problem.source.path,
            found="no validation rows",
            fix=f"name some with --val, such as --val split=val, {one}",
        )
    if asked is not None and asked != "bound":
        return asked, ""
    if problem.held_out is not None:
        regression = not problem.target.classes
        measured = (
            "validation MSE + mean squared difference" if regression else "validation error + flip rate"
        )
        return "bound", "" if asked else f"choosing by {measured} of the held-out pairs (--select bound)"
    if asked is None and problem.pairs is None:
        return "in-domain", "choosing by validation rows only (--select in-domain): there are no pairs"
    raise InputError(
        "--select bound needs held-out pairs",
        where=None if problem.pairs is None else "the pair store",
        found="no pairs" if problem.pairs is None else "no pair is held out",
        fix=f"make the pairs with ncm pairs --holdout 0.25, {one}; --select in-domain works without, but "
        "prefers small ranks, since spurious features help in-domain",
    )


def _warn_unconverged(
    fits: list[Fit], best: Fit, solver: str, options: FitOptions, reporter: Reporter
) -> None:
    missed = [fit for fit in fits if not fit.converged]
    if not missed:
        return
    if solver == "adam":
        reporter.warn(f"{len(missed)} of {len(fits)} probes diverged: lower --lr")
        return
    about = "the chosen one among them" if not best.converged else "not the chosen one"
    reporter.warn(
        f"{len(missed)} of {len(fits)} probes did not reach the tolerance {options.tolerance:g} in "
        f"{options.max_iter} iterations, {about}: raise --max-iter, or --weight-decay"
    )


def _refit(
    problem: Problem, options: FitOptions, method: str, solver: str, best: Fit, reporter: Reporter
) -> tuple[Fit, Spectrum]:
    """The chosen setting again, with the directions of all pairs."""
    assert problem.pairs is not None
    every = problem.pairs.used | problem.pairs.held_out
    spectrum = problem.pairs.members(problem.scaling, every).spectrum()
    fits = train_path(
        problem,
        options,
        method=method,
        solver=solver,
        spectrum=spectrum,
        ranks=[best.rank],
        decays=[best.weight_decay],
        reporter=reporter,
    )
    return fits[0], spectrum


def _flags(problem: Problem, options: FitOptions, rule: str, refit: bool) -> tuple[str, ...]:
    """What a reader of this probe's numbers must know."""
    flags = []
    if rule == "oracle":
        flags.append("ORACLE: chosen by looking at the test rows")
    if options.overlap == "keep" and problem.copies:
        flags.append(f"OVERLAP: {problem.copies} training images are validation or test images")
    if options.overlap == "keep" and problem.pairs is not None and problem.pairs.overlapping:
        flags.append(f"OVERLAP: {problem.pairs.overlapping} pairs have a validation or test row as a member")
    if refit:
        flags.append("REFIT: the path was measured before the held-out pairs were added")
    return tuple(flags)


def _probe(
    problem: Problem, options: FitOptions, report: FitReport, best: Fit, spectrum: Spectrum | None
) -> Probe:
    dim = problem.source.dim
    filters, scaling = problem.filters, problem.scaling
    resolved = as_json(options) | {
        "method": report.method,
        "solver": report.solver,
        "train": filters.train,
        "val": filters.val,
        "test": filters.test,
        "target": report.target,
    }
    trained = ("lr", "epochs", "batch_size", "seed") if report.solver == "adam" else ("tolerance", "max_iter")
    meta = {
        "encoder": problem.source.encoder,
        "fingerprint": problem.source.fingerprint,
        "scaling": {"kind": scaling.kind, "factor": scaling.factor},
        "method": report.method,
        "rank": report.rank,
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
            "chosen": report.chosen,
            "path": [candidate_json(candidate) for candidate in report.candidates],
            "groups": options.groups,
        },
        "converged": report.converged,
        "refit": report.refit,
        "flags": list(report.flags),
        "envs": options.envs,
        "options": resolved,
        "data": {
            "features": {"path": problem.source.path, "content_sha256": problem.source.content_sha256},
            "pairs": _pairs_json(problem, options, report),
            "train": filters.train,
            "val": filters.val,
            "test": filters.test,
            "train_rows": report.train_rows,
            "val_rows": report.val_rows,
        },
    }
    return Probe(
        weight=best.weight,
        bias=best.bias,
        basis=np.zeros((dim, 0))
        if spectrum is None
        else np.ascontiguousarray(spectrum.basis[:, : best.rank]),
        singular_values=np.zeros(0) if spectrum is None else spectrum.singular_values[: spectrum.rank],
        mean=scaling.mean,
        scale=scaling.scale,
        classes=report.classes,
        task=report.task,
        target=report.target,
        meta=meta,
    )


def _pairs_json(problem: Problem, options: FitOptions, report: FitReport) -> dict[str, Any] | None:
    if problem.pairs is None:
        return None
    return {
        "path": str(options.pairs),
        "content_sha256": problem.pairs.store.content_sha256,
        "used": report.pairs + (report.held_out if report.refit else 0),
        "held_out": report.held_out,
        "left_out": problem.pairs.excluded,
        "strategy": problem.pairs.store.strategy,
        "sources": [dict(source) for source in problem.pairs.store.sources],
        "numerical_rank": report.numerical_rank,
    }
