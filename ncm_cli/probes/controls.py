"""The controls that the chosen probe is compared with, and the verdict on it.

Controls remove no directions, or always give the same answer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ncm_cli.blocks import blocks
from ncm_cli.errors import InputError, listing
from ncm_cli.probes.cells import unbalanced
from ncm_cli.probes.choose import Choice, chosen_instead, crossfit
from ncm_cli.probes.crossfit import CrossFit, Estimate, error_estimate
from ncm_cli.probes.metrics import decide
from ncm_cli.probes.problem import Pairs, Problem, Variant
from ncm_cli.probes.verdict import (
    Circumstances,
    StoreVerdict,
    Verdict,
    control_name,
    judge,
    unmeasured,
    verdict_code,
)
from ncm_cli.progress import Reporter
from ncm_cli.solvers.folds import Fold
from ncm_cli.solvers.training_set import Fit, TrainingSet
from ncm_cli.store.pairs import SAME_ID, TEXT, PairStore

CONSTANT = "constant"
"""The control that always gives the training rows' commonest class, or their mean. The others, named by
`control_name`, remove nothing: plain training, and training with group weights, the pairs' rows, or both."""

LEAST_ONE_SIDED_SHARE = 0.95
"""A probe is nearly constant if it predicts one class for at least this share of the validation rows, and far
fewer of them have that class."""

LEAST_CELL_ROWS = 16
"""Fewest training rows of a cell that allow enough pairs."""


def with_verdict(
    problem: Problem, choice: Choice, reporter: Reporter
) -> tuple[Choice, Verdict | None, list[dict[str, Any]]]:
    """The final choice, its verdict and the controls; if removing directions gains nothing, the choice is the
    best candidate that removes none.

    If the rule measured no candidates on folds, the pick and ERM are measured on them now.
    """
    if problem.pairs is None:
        return choice, None, []
    options = problem.options
    try:
        # For pairs that can't be cut into folds this raises the error again.
        folds = choice.folds or tuple(problem.pairs.folds(options.folds, options.seed))
        estimates = choice.estimates or crossfit(
            problem,
            folds,
            ranks=sorted({0, choice.best.rank}),
            decays=options.decays,
            variants=(choice.variant,),
        )
        return judge_choice(problem, choice, folds, estimates, reporter)
    except InputError as error:
        if choice.rule == "bound":
            raise
        why = f"{error.what} ({error.found})" if error.found else error.what
        return choice, unmeasured((int(problem.pairs.usable.sum()), 0), why, about(problem.pairs)), []


def judge_choice(
    problem: Problem, choice: Choice, folds: tuple[Fold, ...], estimates: CrossFit, reporter: Reporter
) -> tuple[Choice, Verdict, list[dict[str, Any]]]:
    """`with_verdict`, from what was measured on the folds."""
    pairs, options = problem.pairs, problem.options
    assert pairs is not None
    if problem.val is None or estimates.constant is None:
        return choice, unmeasured(estimates, "no validation rows", about(pairs)), []
    with_controls, first = _with_controls(problem, choice, folds, estimates)
    best = choice.best
    pick = with_controls.best(best.rank, weight_decay=best.weight_decay, **choice.variant._asdict())
    erm, control = with_controls.best(0, **first._asdict()), with_controls.best(0)
    case = Circumstances(
        answer=_answer(problem),
        about=about(pairs),
        against=", ".join(augmentations(pairs.stores)),
        least_score=choice.rule == "bound",
        one_answer=one_answer(problem, choice) is not None,
        unlike=_unlike(pairs.stores),
        advice=_advice(problem),
    )
    written = pick
    if (
        choice.rule == "bound"
        and best.rank > 0
        and 0 in choice.ranks
        and verdict_code(with_controls, pick, erm, case, control)[0] in ("no-gain", "constant")
    ):
        kept = [i for i, candidate in enumerate(estimates.candidates) if candidate["rank"] == 0]
        unprojected = estimates.pick(kept)
        instead = chosen_instead(problem, choice, estimates.candidates[unprojected])
        # A constant is not written if the pick has a lower score.
        if (
            case.one_answer
            or one_answer(problem, instead) is None
            or estimates.gain(pick, unprojected).value <= 0
        ):
            written, choice = unprojected, instead
    verdict = judge(with_controls, pick, erm, case, control=control, written=written)
    verdict = with_stores(verdict, pairs, with_controls, case, written=written, erm=erm, control=control)
    if (method := options.chosen_method) != "ncm":
        unused = unmeasured(estimates, f"{method} doesn't use them", about(pairs))
        verdict = dataclasses.replace(verdict, code=unused.code, text=unused.text, stores=())
    for warning in _doubts(problem, with_controls, written, erm):
        reporter.warn(warning)
    return choice, verdict, _controls(problem, with_controls)


def with_stores(
    verdict: Verdict,
    pairs: Pairs,
    estimates: CrossFit,
    case: Circumstances,
    *,
    written: int,
    erm: int,
    control: int,
) -> Verdict:
    """The verdict with those on the pairs of each store, if there are several.

    Each compares the written candidate with ERM under the shift that this store's pairs show.
    """
    if pairs.several is None:
        return verdict
    stores = []
    for at, (path, store) in enumerate(zip(pairs.paths, pairs.stores, strict=True)):
        store_case = dataclasses.replace(
            case,
            against=", ".join(augmentations([store])),
            one_answer=False,
            least_score=False,
            unlike=_unlike([store]),
            by_score=f"--pairs {path} alone",
            store=path.name,
        )
        store_verdict = judge(estimates.of_store(at), written, erm, store_case, control=control)
        stores.append(StoreVerdict.of(str(path), store_verdict))
    return dataclasses.replace(verdict, stores=tuple(stores))


def _with_controls(
    problem: Problem, choice: Choice, folds: tuple[Fold, ...], estimates: CrossFit
) -> tuple[CrossFit, Variant]:
    """The estimates with the controls, and the variant of plain training.

    The controls that are added are candidates of rank 0, of the variants that weren't tried. Every candidate
    in the estimates then names its variant.
    """
    options = problem.options

    def named(measured: CrossFit, variant: Variant) -> CrossFit:
        candidates = tuple(variant._asdict() | candidate for candidate in measured.candidates)
        return dataclasses.replace(measured, candidates=candidates)

    first = problem.variants[0]
    weights = {first.upweighted} if options.named_upweight or not problem.upweight else {False, True}
    rows = {first.pair_rows} if options.pair_rows == "yes" or problem.extra is None else {False, True}
    tried = set(problem.variants) if choice.rule == "bound" else {choice.variant}
    solver = options.fold_solving
    if options.chosen_method != "ncm":
        solver = dataclasses.replace(solver, name="lbfgs")
    parts = [named(estimates, choice.variant)]
    for variant in sorted(set(itertools.starmap(Variant, itertools.product(weights, rows))) - tried):
        control = crossfit(
            problem, folds, ranks=[0], decays=options.decays, variants=(variant,), solver=solver
        )
        parts.append(named(control, variant))
    return CrossFit.merged(parts), first


def _controls(problem: Problem, estimates: CrossFit) -> list[dict[str, Any]]:
    """The controls as results record them: the constant, and each variant's best candidate of rank 0."""
    assert problem.val is not None and estimates.constant is not None
    val, zero = problem.val.y, Estimate(0.0, 0.0, 0.0)
    errors = (val - problem.constant) ** 2 if problem.regression else (val != problem.constant).astype(float)
    constant = error_estimate(errors, regression=problem.regression)
    controls = [_control(CONSTANT, None, val_error=constant, flip_rate=zero, bound=constant)]
    present = sorted(
        {
            (candidate["upweighted"], candidate["pair_rows"])
            for candidate in estimates.candidates
            if candidate["rank"] == 0
        }
    )
    for variant in itertools.starmap(Variant, present):
        index = estimates.best(0, **variant._asdict())
        measures = {
            "val_error": estimates.error(index),
            "flip_rate": estimates.change(index),
            "bound": estimates.bound(index),
        }
        if estimates.cell is not None:
            measures["cell_error"] = estimates.cell_error(index)
        plain = variant == problem.variants[0]
        name = "erm" if plain else control_name(*variant)
        controls.append(_control(name, estimates.candidates[index]["weight_decay"], **measures))
    return sorted(controls, key=lambda control: len(control["name"]) * (control["name"] != CONSTANT))


def _control(name: str, weight_decay: float | None, **measures: Estimate) -> dict[str, Any]:
    known = {measure: dataclasses.asdict(estimate) for measure, estimate in measures.items()}
    return {"name": name, "weight_decay": weight_decay, **known}


def variant_of_control(problem: Problem, name: str) -> Variant:
    """The variant of a control that removes nothing, by the control's name."""
    if name == "erm":
        return problem.variants[0]
    return Variant(upweighted="upweighted" in name, pair_rows="pair-rows" in name)


def constant_fit(training: TrainingSet) -> Fit:
    """The probe that always gives the training rows' commonest class, or their mean."""
    if not training.n_classes:
        bias = np.array([training.y.mean()])
    else:
        shares = np.bincount(training.y, minlength=training.n_classes) / len(training.y)
        logs = np.log(np.maximum(shares, 0.5 / len(training.y)))
        bias = logs[1:] - logs[0] if training.n_classes == 2 else logs
    return Fit(0, 0.0, np.zeros((len(bias), training.X.shape[1])), bias, True, 0, 0.0)


def _answer(problem: Problem) -> str:
    """The constant's answer in words."""
    constant, classes = problem.constant, problem.target.classes
    return f"{constant:.4g}" if problem.regression else repr(classes[int(constant)])


def _unlike(stores: Sequence[PairStore]) -> tuple[int, int]:
    """(number of pairs whose members have different labels, number of all pairs)."""
    labels = [pair for store in stores for pair in zip(store.label_a, store.label_b, strict=True)]
    return sum(bool(a and b and a != b) for a, b in labels), len(labels)


def augmentations(stores: Sequence[PairStore]) -> tuple[str, ...]:
    """The augmentations of the pairs' second views; none if some pairs aren't augmented."""
    if any(store.strategy != SAME_ID for store in stores):
        return ()
    sources = itertools.chain(*(store.sources for store in stores))
    return tuple(dict.fromkeys(str(source["augment"]) for source in sources if source.get("augment")))


def about(pairs: Pairs) -> str:
    """The shift that a verdict on these pairs applies to, in sentences."""
    shifts = dict.fromkeys(map(_shift_of, pairs.stores))
    if len(pairs.stores) > 1:
        named = zip(map(_shift_of, pairs.stores), pairs.paths, strict=True)
        shifts = dict.fromkeys(f"{shift} ({path.name})" for shift, path in named)
    text = f"This is about rows that differ from training rows as {' or '.join(shifts)} do"
    text += ", and about no other shift."
    counts = _labels(pairs)
    if counts and len(counts) <= 12:
        wheres = {store.options.get("where") for store in pairs.stores}
        where = wheres.pop() if len(wheres) == 1 else None
        classes = listing(f"{label} ({n:,})" for label, n in sorted(counts.items()))
        text += f" The pairs are of {classes}{f', from rows with {where}' if where else ''}."
    return text


def _labels(pairs: Pairs) -> Counter[str]:
    """The number of usable pairs of each label; pairs of texts aren't counted."""
    labels = itertools.chain(*(store.label_a for store in pairs.stores))
    counted = pairs.usable & pairs.of(store.strategy != TEXT for store in pairs.stores)
    return Counter(label for label, count in zip(labels, counted.tolist(), strict=True) if count and label)


def _shift_of(store: PairStore) -> str:
    """The shift between the members of the pairs, in words, by how the pairs were made."""
    same, across = store.options.get("same"), store.options.get("across")
    if store.strategy == SAME_ID:
        views = ", ".join(augmentations([store]))
        return (
            f"a row and its {views} view in these pairs"
            if views
            else "a row and its other view in these pairs"
        )
    if store.strategy == TEXT:
        return "the prompts of these text pairs (texts, not pictures)"
    if store.strategy == "table" or not across:
        return "these pairs"
    return f"{store.strategy} pairs across {across}{f' with the same {same}' if same else ''}"


def _answers(problem: Problem, choice: Choice) -> np.ndarray | None:
    """The chosen probe's classes (n,) for the validation rows; None without classes or rows."""
    if problem.val is None or problem.regression or len(problem.val.ids) < 2:
        return None
    best, scaling = choice.best, problem.whole(choice.variant).scaling
    parts = (X @ best.weight.T + best.bias for _, X in blocks(scaling.apply(problem.val.X)))
    return np.concatenate([decide(logits) for logits in parts])


def one_answer(problem: Problem, choice: Choice) -> str | None:
    """The class that the chosen probe predicts for every validation row; None if there are several."""
    answers = _answers(problem, choice)
    if answers is None or len(np.unique(answers)) > 1:
        return None
    return problem.target.classes[int(answers[0])]


def nearly_constant(problem: Problem, choice: Choice) -> str:
    """A warning if the probe predicts one class for nearly all validation rows, but far fewer have it."""
    answers = _answers(problem, choice)
    if answers is None or problem.val is None:
        return ""
    code = int(np.bincount(answers).argmax())
    count, n = int((answers == code).sum()), len(answers)
    if (
        len(np.unique(answers)) < 2
        or count < LEAST_ONE_SIDED_SHARE * n
        or count - (problem.val.y == code).sum() < n / 10
    ):
        return ""
    name = problem.target.classes[code]
    return f"the chosen probe predicts {name!r} for {count:,} of {n:,} validation rows"


def _advice(problem: Problem) -> str:
    """What to do about too few pairs if a rare cell allows no more; else empty."""
    if not problem.cells:
        return ""
    cell = problem.train.codes["cell"]
    rarest = int(np.unique(cell[cell >= 0], return_counts=True)[1].min(initial=LEAST_CELL_ROWS))
    if rarest >= LEAST_CELL_ROWS:
        return ""
    words = " × ".join(problem.cells)
    return (
        f"the rarest {words} cell has {rarest:,} training rows: more of them help, or pairs with labelled "
        "rows outside training (ncm pairs --where 'split=train|pool'); group weights are tried already"
    )


def _doubts(problem: Problem, estimates: CrossFit, pick: int, erm: int) -> list[str]:
    """Warnings: classes without pairs, and augmented pairs that don't lower the flips across domains."""
    assert problem.pairs is not None
    doubts, classes = [], problem.target.classes
    counts = _labels(problem.pairs)
    if counts and classes and problem.label_column == problem.target.name:
        numbers = [counts.get(name, 0) for name in classes]
        lacking = [name for name, number in zip(classes, numbers, strict=True) if not number]
        if lacking:
            named = listing(map(repr, lacking))
            doubts.append(f"no pair is of the class {named}, so a shift of that class alone isn't removed")
        elif words := unbalanced(classes, numbers):
            doubts.append(f"the pairs are unequal over classes: {words}")
    erm_flips, pick_flips = estimates.random_change(erm), estimates.random_change(pick)
    views = ", ".join(augmentations(problem.pairs.stores))
    if (
        not problem.cells
        and erm_flips is not None
        and pick_flips is not None
        and pick_flips.value >= erm_flips.value
    ):
        doubts.append(
            "the flip rate of random pairs of a class across domains doesn't fall "
            f"({erm_flips}, now {pick_flips}): {views or 'these pairs'} may not represent the shift between "
            "domains"
        )
    if not estimates.regression and estimates.errors is not None and estimates.constant is not None:
        pick_error, erm_error = estimates.error(pick), estimates.error(erm)
        if estimates.gain(pick, estimates.constant).low <= 0 and pick_error.low > erm_error.high:
            doubts.append(
                "the chosen probe can't be distinguished from one that always gives the same answer, and its "
                f"validation accuracy is {1 - pick_error.value:.3g}, against {1 - erm_error.value:.3g} with "
                "nothing removed: --rank 0 removes nothing"
            )
    return doubts
