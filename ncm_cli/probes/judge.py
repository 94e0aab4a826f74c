"""Fits on what the folds of the pairs leave, the controls beside a pick, and the verdict on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.probes import selection as fold_methods
from ncm_cli.probes.crossfit import CrossFit, Estimate, Verdict, judge, measure, unmeasured
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.path import Fit
from ncm_cli.probes.problem import Part, Problem, RawRows
from ncm_cli.probes.selection import Fold, choose
from ncm_cli.probes.train import train_path
from ncm_cli.store.columns import joint

FOLD_TOLERANCE = 1e-5
"""Gradient norm for the fits of folds, which are judged by their decisions only: probabilities are then
within about 2e-3 of exact ones."""

CONSTANT, ERM, UPWEIGHTED, PAIR_ROWS = "constant", "erm", "erm-upweighted", "erm-pair-rows"
"""The controls' names."""

USE_PAIRS = ("ncm", "matchdg")
"""The methods that pairs can help."""


def crossfit(
    problem: Problem,
    folds: Sequence[Fold],
    options: FitOptions,
    *,
    method: str,
    solver: str,
    ranks: Sequence[int],
    decays: Sequence[float],
    rows: RawRows | None = None,
    advance: Callable[[int], None] | None = None,
) -> CrossFit:
    """Fit every rank and weight decay on what each fold leaves, and judge it by validation rows and pairs.

    Parameters
    ----------
    rows
        Other rows to train on than the problem's.
    """
    assert problem.pairs is not None
    measured = []
    for fold in folds:
        part = problem.without(fold, rows)
        # Where a fold's pairs have fewer directions than a rank asks for, all of them are removed.
        capped = [min(rank, part.rank) for rank in ranks]
        fits = train_path(
            part,
            options,
            method=method,
            solver=solver,
            ranks=sorted(set(capped)),
            decays=decays,
            tolerance=max(options.tolerance, FOLD_TOLERANCE),
            advance=advance,
        )
        found = {(fit.rank, fit.weight_decay): fit for fit in fits}
        named = [
            dataclasses.replace(found[own, decay], rank=rank)
            for rank, own in zip(ranks, capped, strict=True)
            for decay in dict.fromkeys(decays)
        ]
        val = None if problem.val is None else problem.val.scaled(part.scaling)
        pairs = problem.measured(fold, part.scaling)
        measured.append(measure(named, val, pairs, regression=problem.regression))
    unit = fold_methods.units(problem.pairs.node_a, problem.pairs.node_b, folds)
    return CrossFit.join(measured, unit, regression=problem.regression)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A probe that any pick must beat, measured like it.

    Attributes
    ----------
    name
        ``constant``: always the training rows' commonest class (or mean); ``erm``: nothing removed;
        ``erm-upweighted``: the same, every group counting alike; ``erm-pair-rows``: the same, also on the
        labelled rows that the pairs are made of.
    weight_decay
        None for the constant.
    """

    name: str
    weight_decay: float | None
    val_error: Estimate
    flip_rate: Estimate
    bound: Estimate


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What stands beside a pick."""

    verdict: Verdict
    controls: tuple[Control, ...]


def judge_pick(
    problem: Problem,
    folds: Sequence[Fold],
    options: FitOptions,
    found: CrossFit,
    rank: int,
    decay: float,
    *,
    method: str = "ncm",
    solver: str,
    decays: Sequence[float],
    least_bound: bool = True,
    one_answer: bool = False,
) -> Judged:
    """The verdict and the controls for the candidate of ``found`` with this rank and weight decay.

    ``solver`` is that of the controls; ``least_bound`` says that the candidate was chosen by its bound,
    ``one_answer`` that its final fit gives every validation row the same one.
    """
    settings = [(candidate.rank, candidate.weight_decay) for candidate in found.candidates]
    pick = settings.index((rank, decay))
    shift = shift_of(problem)
    if problem.val is None:
        verdict = unmeasured(found.pairs, found.units, "no validation rows", shift)
        return Judged(verdict=verdict, controls=())
    if method in ("ncm", "erm"):
        erm = _best(found, 0)
    else:
        plain = crossfit(problem, folds, options, method="erm", solver=solver, ranks=[0], decays=decays)
        erm = len(found.candidates) + _best(plain, 0)
        found = found.beside(plain)
    answer, constant = _constant(problem)
    verdict = judge(
        found, pick, erm, constant.value, answer, shift, least_bound=least_bound, one_answer=one_answer
    )
    if method not in USE_PAIRS:
        unused = unmeasured(found.pairs, found.units, f"{method} doesn't use them", shift)
        verdict = dataclasses.replace(verdict, code=unused.code, text=unused.text)
    nothing = Estimate(0.0, 0.0, 0.0)
    controls = [
        Control(name=CONSTANT, weight_decay=None, val_error=constant, flip_rate=nothing, bound=constant),
        _control(ERM, found, erm),
    ]
    for name, rows in control_rows(problem).items():
        own = crossfit(
            problem, folds, options, method="erm", solver=solver, ranks=[0], decays=decays, rows=rows
        )
        controls.append(_control(name, own, _best(own, 0)))
    if verdict.bound is not None and controls[-1].name == PAIR_ROWS and verdict.code == "helps":
        labelled = controls[-1].bound.value
        if labelled <= verdict.bound.value:
            text = (
                f"{verdict.text} But ERM that is also trained on the pairs' labelled rows has a bound of "
                f"{labelled:.3g}, no higher: whoever has these labels can as well train on them."
            )
            verdict = dataclasses.replace(verdict, text=text)
    return Judged(verdict=verdict, controls=tuple(controls))


def control_rows(problem: Problem) -> dict[str, RawRows]:
    """The training rows of the controls that train on others than ERM's, or weight them."""
    found = {}
    train = problem.train
    if train.group is not None and train.upweight is None:
        codes = joint(train.group)
        found[UPWEIGHTED] = dataclasses.replace(train, upweight=codes).take(codes >= 0)
    if problem.extra is not None and train.upweight is None:
        extra = problem.extra
        found[PAIR_ROWS] = RawRows(
            ids=(*train.ids, *extra.ids),
            X=np.concatenate([train.X, extra.X]),
            y=np.concatenate([train.y, extra.y]),
            node=np.concatenate([train.node, extra.node]),
        )
    return found


def constant_fit(part: Part) -> Fit:
    """The probe that always gives the training rows' commonest class, or their mean."""
    outputs = 1 if part.n_classes in (0, 2) else part.n_classes
    bias = np.zeros(outputs)
    if not part.n_classes:
        bias[0] = part.y.mean()
    else:
        shares = np.bincount(part.y, minlength=part.n_classes) / len(part.y)
        logs = np.log(np.maximum(shares, 0.5 / len(part.y)))
        bias = logs[1:] - logs[0] if outputs == 1 else logs
    return Fit(0, 0.0, np.zeros((outputs, part.X.shape[1])), bias, True, 0, 0.0)


def shift_of(problem: Problem) -> str:
    """What the pairs differ in, in words: how they were made says it."""
    assert problem.pairs is not None
    store = problem.pairs.store
    options = store.options
    same, across = options.get("same"), options.get("across")
    if store.strategy == "same-id":
        return "a row and its other view in these pairs"
    if store.strategy == "table" or not across:
        return "these pairs"
    return f"{store.strategy} pairs across {across}{f' with the same {same}' if same else ''}"


def _best(found: CrossFit, rank: int) -> int:
    """The candidate of this rank with the least bound."""
    own = [index for index, candidate in enumerate(found.candidates) if candidate.rank == rank]
    task = "regression" if found.regression else "classification"
    return own[choose([found.candidates[index] for index in own], "bound", task)]


def _control(name: str, found: CrossFit, index: int) -> Control:
    error, bound = found.error(index), found.bound(index)
    if error is None or bound is None:
        raise InputError("controls need validation rows")
    return Control(
        name=name,
        weight_decay=found.candidates[index].weight_decay,
        val_error=error,
        flip_rate=found.change(index),
        bound=bound,
    )


def _constant(problem: Problem) -> tuple[str, Estimate]:
    """The constant answer in words, and its error on the validation rows."""
    assert problem.val is not None
    y, val = problem.train.y, problem.val.y
    if problem.regression:
        answer, errors = f"{y.mean():.4g}", (val - y.mean()) ** 2
    else:
        code = int(np.bincount(y).argmax())
        answer, errors = repr(problem.target.classes[code]), (val != code).astype(np.float64)
    alone = CrossFit(
        candidates=(),
        errors=errors[None],
        changes=np.zeros((1, 1)),
        unit=np.zeros(1, np.int64),
        regression=problem.regression,
    )
    error = alone.error(0)
    assert error is not None
    return answer, error
