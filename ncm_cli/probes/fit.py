"""``ncm fit``: the choice among linear probes on projected features, the controls beside it, the verdict."""

from __future__ import annotations

import dataclasses
import os.path
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.blocks import blocks, joined
from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import as_json, check, given_flags, parse_ranks
from ncm_cli.probes.metrics import PairRows, Rows, decide, joint, row_errors, summary, worst
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.path import Fit
from ncm_cli.probes.rows_and_pairs import (
    Part,
    Problem,
    RawRows,
    pairs_digest,
    read_problem,
    rows_digest,
    train_path,
)
from ncm_cli.probes.selection import (
    Candidate,
    CrossFit,
    Estimate,
    Fold,
    Verdict,
    choose,
    error_estimate,
    judge,
    score_path,
    stacked,
    units,
    unmeasured,
)
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.pairs import TEXT, PairStore
from ncm_cli.store.probe import Probe, record_ids, write_probe

ONLY = "only-candidate"
"""The rule's name where there was one setting and so nothing to choose."""

AUTO_DENSE, AUTO_MOST = 32, 64
"""``--rank auto`` tries every rank up to the first, then ever wider steps, of the second's number at most."""

FOLD_TOLERANCE = 1e-5
"""Gradient norm for the fits of folds, which are judged by their decisions only: probabilities are then
within about 2e-3 of exact ones."""

CONSTANT, ERM, UPWEIGHTED, PAIR_ROWS = "constant", "erm", "erm-upweighted", "erm-pair-rows"
"""The controls, which any pick must beat and which are measured like it: always the training rows' commonest
class (or mean); nothing removed; the same, every group counting alike; the same, also on the labelled rows
that the pairs are made of."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Contest:
    """Which probes were tried, and the one that the rule chose."""

    rule: str
    note: str
    ranks: tuple[int, ...]
    available: int
    """The largest rank that can be tried: of all pairs, or of those that a fold leaves."""
    folds: tuple[Fold, ...]
    candidates: list[Candidate]
    chosen: int
    best: Fit
    """The choice's fit on all rows and pairs."""
    found: CrossFit | None
    """The folds' measurements, where the rule needs them."""


def fit(options: FitOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Fit the probes, choose one, write it, and return what ``--json`` prints: how it was chosen, from what.

    ``pairs`` are those that span the basis, ``held_out`` of them by the user while the choice was made, and
    ``folds`` those that candidates were measured on; without pairs there is no ``verdict``.

    Raises
    ------
    InputError
        Rows, labels, pairs or ranks that can't be used, or several candidates and nothing to choose by.
    MismatchError
        Features and pairs of different encoders.
    """
    check(options)
    method, solver = options.chosen_method, options.chosen_solver
    if idle := given_flags(options, options.idle):
        reporter.warn(f"no effect with --method {method} --solver {solver}: {', '.join(idle)}")
    problem = read_problem(options, oracle=options.select == "oracle", reporter=reporter)
    if options.save_controls is not None and problem.val is None:
        raise _no_controls("no validation rows")
    whole = problem.whole()
    contest = _hold(problem, whole, reporter)
    best = contest.best
    answer = _one_answer(problem, whole, best)
    verdict, controls = _judged(problem, contest, answer is not None)
    _warn(contest, options, answer, reporter)
    body = {
        "output": str(options.output),
        "method": method,
        "solver": solver,
        "task": options.task,
        "target": problem.target.name,
        "classes": list(problem.target.classes),
        "rank": best.rank,
        "weight_decay": best.weight_decay,
        "rule": contest.rule,
        "oracle": contest.rule == "oracle",
        "note": contest.note,
        "path": contest.candidates,
        "chosen": contest.chosen,
        "converged": best.converged,
        "train_rows": len(problem.train.ids),
        "val_rows": 0 if problem.val is None else len(problem.val.ids),
        "pairs": whole.pairs,
        "held_out": 0 if problem.pairs is None else int(problem.pairs.held_out.sum()),
        "folds": len(contest.folds),
        "numerical_rank": whole.rank,
        "verdict": verdict and dataclasses.asdict(verdict),
        "controls": controls,
        "crossings": worst_groups(problem, whole, best),
        "flags": flags_of(problem, contest.rule == "oracle"),
    }
    made = {options.output: _probe(problem, whole, body, best)}
    if options.save_controls is not None:
        beside = _control_probes(options.save_controls, problem, body)
        if os.path.realpath(options.output) in map(os.path.realpath, beside):
            raise UsageError("the probe and one of its controls have the same name", found=options.output)
        options.save_controls.mkdir(parents=True, exist_ok=True)
        made |= beside
    for path, probe in made.items():
        write_probe(path, probe)
    return body


def worst_groups(problem: Problem, whole: Part, best: Fit) -> list[dict[str, Any]]:
    """The worst group of the validation rows in each crossing of ``--groups``, as ``ncm eval`` has them."""
    val, groups = problem.val, problem.groups
    if val is None or groups is None:
        return []
    rows = val.scaled(whole.scaling)
    values = row_errors(*stacked([best]), rows)[0][0]
    if not problem.regression:
        values = values == 0
    found = []
    for number, columns in enumerate(groups.crossings):
        own = np.flatnonzero(groups.crossing == number).tolist()
        table = [{"group": groups.key(i), **summary(values[val.group[:, number] == i])} for i in own]  # type: ignore[index]
        found.append({"columns": list(columns), "worst_group": worst(table)})
    return found


def _hold(problem: Problem, whole: Part, reporter: Reporter) -> _Contest:
    """Resolve rule, folds and ranks, fit, and choose."""
    options = problem.options
    method, solver, decays = options.chosen_method, options.chosen_solver, options.decays
    rule, note = resolve_rule(options.select, problem, options.several)
    if note:
        reporter.note(note)
    folds: tuple[Fold, ...] = ()
    try:
        folds = tuple(problem.pairs.folds(options.folds, options.seed)) if problem.pairs else ()
    except InputError:
        if rule == "bound":
            raise
    available = whole.rank
    if rule == "bound" and method == "ncm":
        available = min(available, *(problem.without(fold).rank for fold in folds))
    ranks = resolve_ranks(options.rank, method, available, reporter)
    if solver == "adam":
        from ncm_cli.images.network import choose_device

        choose_device(options.device, "fp64", reporter)
    kind: dict[str, Any] = {"method": method, "solver": solver}
    total = len(decays) * (options.epochs if solver == "adam" else 1)
    found = None
    if rule == "bound":
        tried = sorted({0, *ranks})
        with reporter.task("fitting folds", len(folds) * len(tried) * total, unit="fits") as bar:
            found = crossfit(problem, folds, ranks=tried, decays=decays, advance=bar.advance, **kind)
        candidates = [candidate for candidate in found.candidates if candidate["rank"] in ranks]
        pick = candidates[chosen := choose(candidates, rule, options.task)]
        best = train_path(whole, options, ranks=[pick["rank"]], decays=[pick["weight_decay"]], **kind)[0]
    else:
        with reporter.task("fitting", len(ranks) * total, unit="fits") as bar:
            fits = train_path(whole, options, ranks=ranks, decays=decays, advance=bar.advance, **kind)
        val, test = (
            None if rows is None else rows.scaled(whole.scaling) for rows in (problem.val, problem.test)
        )
        candidates = score_path(fits, val=val, test=test)
        chosen = 0 if rule == ONLY else choose(candidates, rule, options.task)
        best = fits[chosen]
    return _Contest(rule, note, ranks, available, folds, candidates, chosen, best, found)


def resolve_rule(asked: str | None, problem: Problem, several: bool) -> tuple[str, str]:
    """The selection rule in force, and a line that says why where it wasn't asked for.

    Raises `InputError` for several candidates where what the rule needs is missing.
    """
    if asked != "oracle":
        if not several:
            return ONLY, ""
        if problem.val is None:
            raise InputError(
                "several combinations of rank and weight decay, and nothing to choose by",
                where=problem.options.features,
                found="no validation rows",
                fix=f"name some with --val W, such as --val '{problem.roles.unused}', "
                "or say one --rank and one --weight-decay",
            )
    if asked is not None and asked != "bound":
        return asked, ""
    if problem.pairs is None:
        return "in-domain", "choosing by validation rows only (--select in-domain): there are no pairs"
    measured = "validation error + flip rate"
    if problem.regression:
        measured = "the bound on MSE from validation MSE and squared changes"
    return "bound", "" if asked else f"choosing by {measured} of pairs, cross-fitted (--select bound)"


def resolve_ranks(text: str, method: str, available: int, reporter: Reporter) -> tuple[int, ...]:
    """The ranks to try, of at most ``available``; raises `InputError` where none of those asked for is."""
    asked = parse_ranks(text)
    if method != "ncm":
        return (0,)
    if asked is None:
        return auto_ranks(available)
    possible = tuple(rank for rank in asked if rank <= available)
    if not possible:
        raise InputError(
            "a rank above the pairs' numerical rank",
            found=f"--rank {text}",
            expected=f"at most {available}",
            fix=f"--rank {available}, or a grid such as 0:{available}, or more pairs",
        )
    if len(possible) < len(asked):
        reporter.note(
            f"ranks above {available}, the numerical rank of the pairs that a fold leaves to fit on, are "
            f"skipped ({len(asked) - len(possible)} of {len(asked)})"
        )
    return possible


def auto_ranks(available: int) -> tuple[int, ...]:
    """0 to ``available``: each up to `AUTO_DENSE`, then geometric steps, at most `AUTO_MOST` ranks."""
    if available < AUTO_MOST:
        return tuple(range(available + 1))
    sparse = np.geomspace(AUTO_DENSE, available, AUTO_MOST - AUTO_DENSE)
    return tuple(sorted({*range(AUTO_DENSE + 1), *(round(float(rank)) for rank in sparse)}))


def crossfit(
    problem: Problem,
    folds: Sequence[Fold],
    *,
    method: str,
    solver: str,
    ranks: Sequence[int],
    decays: Sequence[float],
    rows: RawRows | None = None,
    advance: Callable[[int], None] | None = None,
) -> CrossFit:
    """Fit every rank and weight decay on what each fold leaves, and judge it by validation rows and pairs.

    ``rows`` are others to train on than the problem's, for ERM.
    """
    pairs, val = problem.pairs, problem.val
    assert pairs is not None

    def measured(fold: Fold) -> tuple[list[Fit], Rows | None, PairRows]:
        part = problem.without(fold, rows)
        # Where a fold's pairs have fewer directions than a rank asks for, all of them are removed.
        capped = [min(rank, part.rank) for rank in ranks]
        fits = train_path(
            part,
            problem.options,
            method=method,
            solver=solver,
            ranks=set(capped),
            decays=decays,
            tolerance=max(problem.options.tolerance, FOLD_TOLERANCE),
            advance=advance,
        )
        found = {(fit.rank, fit.weight_decay): fit for fit in fits}
        named = [
            dataclasses.replace(found[own, decay], rank=rank)
            for rank, own in zip(ranks, capped, strict=True)
            for decay in decays
        ]
        judged = None if val is None else val.scaled(part.scaling)
        return named, judged, pairs.members(fold.measured, part.scaling)

    unit = units(pairs.node_a, pairs.node_b, folds)
    return CrossFit.join(map(measured, folds), unit, regression=problem.regression)


def _judged(
    problem: Problem, contest: _Contest, one_answer: bool
) -> tuple[Verdict | None, list[dict[str, Any]]]:
    """Verdict and controls; where the rule didn't measure on folds, the pick and ERM are measured now."""
    if problem.pairs is None:
        return None, []
    options, best, least_bound = problem.options, contest.best, contest.rule == "bound"
    try:
        # Pairs that can't be cut say so again.
        folds = contest.folds or problem.pairs.folds(options.folds, options.seed)
        found = contest.found or crossfit(
            problem,
            folds,
            method=options.chosen_method,
            solver=options.chosen_solver,
            ranks=sorted({0, best.rank}),
            decays=options.decays,
        )
        setting = (best.rank, best.weight_decay)
        return judge_pick(problem, folds, found, *setting, least_bound=least_bound, one_answer=one_answer)
    except InputError as error:
        if least_bound:
            raise
        why = f"{error.what} ({error.found})" if error.found else error.what
        return unmeasured(int(problem.pairs.usable.sum()), 0, why, shift_of(problem.pairs.store)), []


def judge_pick(
    problem: Problem,
    folds: Sequence[Fold],
    found: CrossFit,
    rank: int,
    decay: float,
    *,
    least_bound: bool = True,
    one_answer: bool = False,
) -> tuple[Verdict, list[dict[str, Any]]]:
    """The verdict and the controls for the candidate of ``found`` with this rank and weight decay.

    ``least_bound`` says that the candidate was chosen by its bound, ``one_answer`` that its final fit gives
    every validation row the same one.
    """
    assert problem.pairs is not None
    method, shift = problem.options.chosen_method, shift_of(problem.pairs.store)
    if problem.val is None:
        return unmeasured(found.pairs, found.units, "no validation rows", shift), []
    pick = [(one["rank"], one["weight_decay"]) for one in found.candidates].index((rank, decay))
    erm = found.best(0)
    answer, constant = _constant(problem)
    labels = list(zip(problem.pairs.store.label_a, problem.pairs.store.label_b, strict=True))
    unlike = sum(bool(a and b and a != b) for a, b in labels), len(labels)
    known: dict[str, Any] = {"least_bound": least_bound, "one_answer": one_answer}
    verdict = judge(found, pick, erm, constant.value, answer, shift, unlike=unlike, **known)
    if method != "ncm":
        unused = unmeasured(found.pairs, found.units, f"{method} doesn't use them", shift)
        verdict = dataclasses.replace(verdict, code=unused.code, text=unused.text)
    controls = [_control(CONSTANT, None, constant, Estimate(0.0, 0.0, 0.0), constant)]
    controls.append(_measured(ERM, found, erm))
    plain: dict[str, Any] = {"method": "erm", "solver": _erm_solver(problem.options), "ranks": [0]}
    for name, rows in _control_rows(problem).items():
        own = crossfit(problem, folds, decays=problem.options.decays, rows=rows, **plain)
        controls.append(_measured(name, own, own.best(0)))
    labelled = controls[-1]["bound"]["value"] if controls[-1]["name"] == PAIR_ROWS else np.inf
    if verdict.code == "helps" and verdict.bound and labelled <= verdict.bound.value:
        text = (
            f"{verdict.text} But ERM that is also trained on the pairs' labelled rows has a bound of "
            f"{labelled:.3g}, no higher: whoever has these labels can as well train on them."
        )
        verdict = dataclasses.replace(verdict, text=text)
    return verdict, controls


def _erm_solver(options: FitOptions) -> str:
    """That of controls: the one of ``ncm``."""
    return options.chosen_solver if options.chosen_method == "ncm" else "lbfgs"


def _measured(name: str, found: CrossFit, index: int) -> dict[str, Any]:
    decay = found.candidates[index]["weight_decay"]
    return _control(name, decay, found.error(index), found.change(index), found.bound(index))


def _control(
    name: str, weight_decay: float | None, error: Estimate, flips: Estimate, bound: Estimate
) -> dict[str, Any]:
    measures = {"val_error": error, "flip_rate": flips, "bound": bound}
    known = {measure: dataclasses.asdict(estimate) for measure, estimate in measures.items()}
    return {"name": name, "weight_decay": weight_decay, **known}


def _control_rows(problem: Problem) -> dict[str, RawRows]:
    """The training rows of the controls that train on others than ERM's, or weight them."""
    train, extra, found = problem.train, problem.extra, {}
    if "upweight" in train.codes:
        return {}
    if train.group is not None:
        codes = joint(train.group)
        found[UPWEIGHTED] = dataclasses.replace(train, codes={"upweight": codes}).take(codes >= 0)
    if extra is not None:
        found[PAIR_ROWS] = RawRows(
            ids=train.ids.joined(extra.ids),
            X=joined(train.X, extra.X),
            y=np.concatenate([train.y, extra.y]),
            node=np.concatenate([train.node, extra.node]),
        )
    return found


def _constant(problem: Problem) -> tuple[str, Estimate]:
    """The training rows' commonest class (or mean) in words, and its error on the validation rows."""
    assert problem.val is not None
    y, val = problem.train.y, problem.val.y
    if problem.regression:
        return f"{y.mean():.4g}", error_estimate((val - y.mean()) ** 2, regression=True)
    code = int(np.bincount(y).argmax())
    errors = (val != code).astype(np.float64)
    return repr(problem.target.classes[code]), error_estimate(errors, regression=False)


def _constant_fit(part: Part) -> Fit:
    """The probe that always gives the training rows' commonest class, or their mean."""
    if not part.n_classes:
        bias = np.array([part.y.mean()])
    else:
        shares = np.bincount(part.y, minlength=part.n_classes) / len(part.y)
        logs = np.log(np.maximum(shares, 0.5 / len(part.y)))
        bias = logs[1:] - logs[0] if part.n_classes == 2 else logs
    return Fit(0, 0.0, np.zeros((len(bias), part.X.shape[1])), bias, True, 0, 0.0)


def shift_of(store: PairStore) -> str:
    """What the pairs differ in, in words: how they were made says it."""
    same, across = store.options.get("same"), store.options.get("across")
    if store.strategy == "same-id":
        return "a row and its other view in these pairs"
    if store.strategy == TEXT:
        return "the prompts of these text pairs (texts, not pictures)"
    if store.strategy == "table" or not across:
        return "these pairs"
    return f"{store.strategy} pairs across {across}{f' with the same {same}' if same else ''}"


def _one_answer(problem: Problem, whole: Part, best: Fit) -> str | None:
    """The class that a probe gives every validation row, if it is one alone."""
    if problem.val is None or problem.regression or len(problem.val.ids) < 2:
        return None
    parts = (X @ best.weight.T + best.bias for _, X in blocks(whole.scaling.apply(problem.val.X)))
    told = np.unique(np.concatenate([decide(logits) for logits in parts]))
    return problem.target.classes[int(told[0])] if len(told) == 1 else None


def _warn(contest: _Contest, options: FitOptions, answer: str | None, reporter: Reporter) -> None:
    """Say when fits stopped short, the pick is a constant, or it lies at the end of what was tried."""
    best, count, last = contest.best, len(contest.candidates), max(contest.ranks)
    missed = sum(not candidate["converged"] for candidate in contest.candidates)
    if (missed or not best.converged) and options.chosen_solver == "adam":
        reporter.warn(f"{missed} of {count} probes diverged: lower --lr")
    elif missed or not best.converged:
        about = "not the chosen one" if best.converged else "the chosen one among them"
        reporter.warn(
            f"{max(missed, 1)} of {count} probes did not reach the tolerance {options.tolerance:g} "
            f"in {options.max_iter} iterations, {about}: raise --max-iter, or --weight-decay"
        )
    if answer is not None:
        reporter.warn(f"the chosen probe says {answer!r} of every validation row: it is a constant")
    if contest.rule == ONLY or best.rank != last or len(contest.ranks) < 2:
        return
    if last < contest.available:
        reporter.warn(
            f"rank {last} is the largest that was tried, of {contest.available} that these pairs allow: "
            f"--rank 0:{contest.available} tries more"
        )
    else:
        reporter.note(
            f"rank {last} is the largest that these pairs allow: more pairs may hold more directions"
        )


def flags_of(problem: Problem, oracle: bool) -> list[str]:
    """What a reader of this probe's numbers must know."""
    flags = ["ORACLE: chosen by looking at the test rows"] if oracle else []
    if problem.options.overlap == "keep":
        if problem.copies:
            flags.append(f"OVERLAP: {problem.copies} training images are validation or test images")
        if problem.pairs is not None and (overlapping := problem.pairs.overlapping):
            flags.append(f"OVERLAP: {overlapping} pairs have a validation or test row as a member")
    return flags


def _probe(problem: Problem, whole: Part, body: dict[str, Any], best: Fit) -> Probe:
    options, where = problem.options, problem.roles.where
    trained = (
        ("lr", "epochs", "batch_size", "seed") if body["solver"] == "adam" else ("tolerance", "max_iter")
    )
    selection = ("rule", "oracle", "note", "folds", "chosen", "path", "verdict", "controls", "crossings")
    own = {name: body[name] for name in ("method", "solver", "target")}
    record = {
        "method": body["method"],
        "hyper_parameters": {
            "weight_decay": body["weight_decay"],
            "solver": body["solver"],
            "upweight": options.upweight,
            **{name: getattr(options, name) for name in trained},
        },
        "selection": {**{name: body[name] for name in selection}, "groups": options.groups},
        "flags": body["flags"],
        "options": as_json(options) | own | {"train": where["train"], "val": where["val"]},
    }
    return probe_of(problem, whole, best, record, origin_of(problem, whole))


def origin_of(problem: Problem, part: Part, *, weighted: bool = True) -> dict[str, Any]:
    """What a probe records of its rows, ``weighted`` where up-weighted, and pairs; every row is read."""
    pairs, parts = problem.pairs, {"train": problem.train, "val": problem.val}
    paired = pairs and {
        "path": str(problem.options.pairs),
        "content_sha256": pairs.store.content_sha256,
        "used": part.pairs,
        "used_sha256": pairs_digest(problem),
        "held_out": int(pairs.held_out.sum()),
        "left_out": int((~pairs.usable).sum()),
        "strategy": pairs.store.strategy,
        "sources": [dict(source) for source in pairs.store.sources],
        "numerical_rank": part.rank,
    }
    return {
        "rows": {name: record_ids(rows.ids) for name, rows in parts.items() if rows is not None},
        "data": {
            "features": {
                "path": str(problem.options.features),
                "content_sha256": problem.content_sha256,
                "train_sha256": rows_digest(problem, weighted=weighted),
            },
            "pairs": paired,
            **problem.roles.where,
            "train_rows": len(problem.train.ids),
            "val_rows": 0 if problem.val is None else len(problem.val.ids),
        },
    }


def probe_of(
    problem: Problem, part: Part, best: Fit, record: Mapping[str, Any], origin: Mapping[str, Any]
) -> Probe:
    """A probe fitted on a part of a problem; ``record`` says how, and ``origin`` is `origin_of` both."""
    scaling, spectrum = part.scaling, part.spectrum
    meta = {
        "encoder": problem.encoder,
        "fingerprint": fingerprint(problem.encoder),
        "scaling": {"kind": scaling.kind, "factor": scaling.factor},
        **record,
        "rank": best.rank,
        "converged": best.converged,
        **origin,
    }
    return Probe(
        weight=best.weight,
        bias=best.bias,
        basis=np.ascontiguousarray(part.basis(best.rank)),
        singular_values=np.zeros(0) if spectrum is None else spectrum.singular_values[: spectrum.rank],
        mean=scaling.mean,
        scale=scaling.scale,
        classes=problem.target.classes,
        task="regression" if problem.regression else "classification",
        target=problem.target.name,
        meta=meta,
    )


def _no_controls(why: str) -> InputError:
    return InputError("there are no controls to save", found=why, fix="leave --save-controls out")


def _control_probes(folder: Path, problem: Problem, body: dict[str, Any]) -> dict[Path, Probe]:
    """Each control as a probe, fitted on all of its rows, by its file: NAME.safetensors."""
    if not body["controls"]:
        raise _no_controls(body["verdict"]["text"])
    rows, solver, made = _control_rows(problem), _erm_solver(problem.options), {}
    for control in body["controls"]:
        name, decay = control["name"], control["weight_decay"]
        own = rows.get(name, problem.train)
        part = problem.part(own, None)
        if decay is None:
            best = _constant_fit(part)
        else:
            best = train_path(part, problem.options, method="erm", solver=solver, ranks=[0], decays=[decay])[
                0
            ]
        # The constant had no others to be chosen among; the others' weight decays had.
        only = {"path": [{"rank": 0, "weight_decay": 0.0, "converged": True}], "rule": ONLY}
        record = {
            "method": name,
            "solver": solver,
            "weight_decay": best.weight_decay,
            "oracle": False,
            "note": f"control of {body['output']}",
            "chosen": 0,
            "verdict": None,
            "controls": [],
            **(only if decay is None else {"path": [], "rule": "bound"}),
        }
        upweight = problem.options.upweight
        if name == UPWEIGHTED and problem.groups is not None:
            upweight = ",".join(problem.groups.columns)
        options = dataclasses.replace(problem.options, pairs=None, upweight=upweight)
        alone = dataclasses.replace(problem, train=own, pairs=None, options=options)
        made[folder / f"{name}.safetensors"] = _probe(alone, part, body | record, best)
    return made
