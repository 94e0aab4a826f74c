"""Selecting a probe: which ranks, weight decays, group weights and rows are tried, and which is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.options import parse_ranks
from ncm_cli.probes.cells import comparison_pairs
from ncm_cli.probes.crossfit import CrossFit, FoldRows
from ncm_cli.probes.metrics import PairRows, Rows
from ncm_cli.probes.problem import Problem, Variant
from ncm_cli.probes.selection import Candidate, best_candidate, score_path
from ncm_cli.progress import Reporter
from ncm_cli.solvers.folds import Fold, units
from ncm_cli.solvers.methods import Solver
from ncm_cli.solvers.solve import train_path
from ncm_cli.solvers.training_set import Fit, TrainingSet

ONLY_CANDIDATE = "only-candidate"
"""The rule's name if there was only one setting, so that there was nothing to choose."""

MOST_RANKS = 64
"""The most ranks that ``--rank auto`` tries: every rank up to half this number, then in
geometric steps."""

MOST_RANKS_OF_VARIANTS = {1: MOST_RANKS, 2: 32, 4: 24}
"""`MOST_RANKS` for each number of variants, set so that four take at most 2.5 times as long as one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Which probes were tried, and the one that the rule chose."""

    rule: str
    note: str
    ranks: tuple[int, ...]
    available: int
    """The largest rank that can be tried: the rank of all pairs or, for ncm with the rule ``bound``, the
    smallest rank that the basis pairs of a fold have."""
    folds: tuple[Fold, ...]
    candidates: list[Candidate]
    chosen: int
    variant: Variant
    """The variant of the chosen candidate."""
    best: Fit
    """The chosen candidate, fitted on all rows and pairs."""
    estimates: CrossFit | None
    """What was measured on the folds, if the rule needs it."""


def choose_probe(problem: Problem, reporter: Reporter) -> Choice:
    """Resolve rule, folds and ranks, fit, and choose."""
    options = problem.options
    method, solver, decays = options.chosen_method, options.chosen_solver, options.decays
    rule, note = resolve_rule(options.select, problem, options.several)
    folds: tuple[Fold, ...] = ()
    try:
        folds = tuple(problem.pairs.folds(options.folds, options.seed)) if problem.pairs else ()
    except InputError:
        if rule == "bound":
            raise
    variants = problem.variants if rule == "bound" else problem.variants[:1]
    whole = problem.whole(variants[0])
    available = whole.rank
    if rule == "bound" and method == "ncm":
        available = min(available, *(problem.without(fold).rank for fold in folds))
    ranks = resolve_ranks(options.rank, method, available, reporter, MOST_RANKS_OF_VARIANTS[len(variants)])
    if solver == "adam":
        from ncm_cli.solvers.device import choose_device

        choose_device(options.device, "fp64", reporter)
    total = len(decays) * (options.epochs if solver == "adam" else 1)
    if rule == "bound":
        tried = sorted({0, *ranks})
        with reporter.task(
            "fitting folds", len(variants) * len(folds) * len(tried) * total, unit="fits"
        ) as bar:
            estimates = crossfit(
                problem, folds, variants=variants, ranks=tried, decays=decays, advance=bar.advance
            )
        indices = [i for i, candidate in enumerate(estimates.candidates) if candidate["rank"] in ranks]
        candidates = [estimates.candidates[i] for i in indices]
        pick = estimates.candidates[estimates.pick(indices)]
        variant = variant_of(pick, variants[0])
        chosen, best = candidates.index(pick), _fitted(problem, pick, variant)
        return Choice(rule, note, ranks, available, folds, candidates, chosen, variant, best, estimates)
    with reporter.task("fitting", len(ranks) * total, unit="fits") as bar:
        fits = train_path(whole, options.solving, ranks=ranks, decays=decays, advance=bar.advance)
    val, test = (None if rows is None else rows.scaled(whole.scaling) for rows in (problem.val, problem.test))
    candidates = score_path(fits, val=val, test=test)
    chosen = 0 if rule == ONLY_CANDIDATE else best_candidate(candidates, rule, options.task)
    return Choice(rule, note, ranks, available, folds, candidates, chosen, variants[0], fits[chosen], None)


def _fitted(problem: Problem, candidate: Candidate, variant: Variant) -> Fit:
    """A candidate fitted on all rows of its variant and all pairs."""
    return train_path(
        problem.whole(variant),
        problem.options.solving,
        ranks=[candidate["rank"]],
        decays=[candidate["weight_decay"]],
    )[0]


def chosen_instead(problem: Problem, choice: Choice, pick: Candidate) -> Choice:
    """The choice with another candidate, ``pick``, chosen instead."""
    variant = variant_of(pick, choice.variant)
    best = _fitted(problem, pick, variant)
    return dataclasses.replace(choice, chosen=choice.candidates.index(pick), variant=variant, best=best)


def variant_of(candidate: Candidate, otherwise: Variant) -> Variant:
    """The candidate's variant; ``otherwise`` if only one variant was tried."""
    return Variant(
        candidate.get("upweighted", otherwise.upweighted), candidate.get("pair_rows", otherwise.pair_rows)
    )


def resolve_rule(asked: str | None, problem: Problem, several: bool) -> tuple[str, str]:
    """The selection rule to use, and a note explaining it if the user named none.

    Raises `InputError` if there are several candidates and what the rule needs is missing.
    """
    if asked != "oracle":
        if not several:
            return ONLY_CANDIDATE, ""
        if problem.val is None:
            raise InputError(
                "can't choose among several combinations of rank and weight decay",
                where=problem.options.features,
                found="no validation rows",
                fix=f"name some with --val W, such as --val {problem.roles.unused}, "
                "or give a single --rank and a single --weight-decay",
            )
    if asked is not None and asked != "bound":
        return asked, ""
    if problem.pairs is None:
        return "in-domain", "choosing by validation rows only (--select in-domain), since there are no pairs"
    measured = "validation error + flip rate of pairs"
    if problem.regression:
        measured = "the bound on MSE from validation MSE and squared changes of pairs"
    elif problem.cells:
        measured = f"the error on held-out rows, with every {' × '.join(problem.cells)} cell weighted equally"
        if not all(problem.matched):
            measured += ", + flip rate of the pairs that weren't matched by label"
    elif problem.members is not None:
        measured = "validation error + flip rate of pairs, or of random pairs across domains if larger"
    elif problem.pairs.several is not None:
        measured = "validation error + flip rates of the pairs of each store"
    return "bound", "" if asked else f"choosing by {measured}, cross-fitted (--select bound)"


def resolve_ranks(
    text: str, method: str, available: int, reporter: Reporter, most: int = MOST_RANKS
) -> tuple[int, ...]:
    """The ranks to try; raises `InputError` if every requested rank exceeds ``available``."""
    asked = parse_ranks(text)
    if method != "ncm":
        return (0,)
    if asked is None:
        return auto_ranks(available, most)
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
            f"skipped {len(asked) - len(possible)} of {len(asked)} ranks: they exceed {available}, "
            "the largest rank that the pairs allow"
        )
    return possible


def auto_ranks(available: int, most: int = MOST_RANKS) -> tuple[int, ...]:
    """At most ``most`` ranks from 0 to ``available``: all up to half of ``most``, then geometric steps."""
    if available < most:
        return tuple(range(available + 1))
    sparse = np.geomspace(most // 2, available, most // 2)
    return tuple(sorted({*range(most // 2 + 1), *(round(float(rank)) for rank in sparse)}))


def crossfit(
    problem: Problem,
    folds: Sequence[Fold],
    *,
    ranks: Sequence[int],
    decays: Sequence[float],
    variants: Sequence[Variant] | None = None,
    solver: Solver | None = None,
    advance: Callable[[int], None] | None = None,
) -> CrossFit:
    """Fit every variant, rank and weight decay on each fold's training part, and score them on validation
    rows and held-out pairs."""
    pairs, val = problem.pairs, problem.val
    assert pairs is not None
    variants = variants or problem.variants[:1]
    unit = units(pairs.node_a, pairs.node_b, folds)

    def measured(fold: Fold, variant: Variant) -> FoldRows:
        training = problem.without(fold, variant)
        # If a fold's pairs have fewer directions than the rank, all of them are removed.
        capped = [min(rank, training.rank) for rank in ranks]
        fits = train_path(
            training,
            solver or problem.options.fold_solving,
            ranks=set(capped),
            decays=decays,
            advance=advance,
        )
        by_setting = {(fit.rank, fit.weight_decay): fit for fit in fits}
        named = [
            dataclasses.replace(by_setting[removed, decay], rank=rank)
            for rank, removed in zip(ranks, capped, strict=True)
            for decay in decays
        ]
        validation = None if val is None else val.scaled(training.scaling)
        members, random = untrained_rows(problem, fold, training)
        return FoldRows(named, validation, pairs.members(fold.measured, training.scaling), members, random)

    shared: dict[str, Any] = {"regression": problem.regression, "answer": problem.constant}
    if pairs.several is not None:
        shared |= {"kind": pairs.measured_kinds(folds), "matched": problem.matched}
    if problem.cells:
        y = problem.train.y
        shared["shares"] = np.bincount(y, minlength=len(problem.target.classes)) / len(y)
        if val is not None:
            shared["val_cell"] = val.codes["cell"]
    parts = []
    for variant in variants:
        estimates = CrossFit.join((measured(fold, variant) for fold in folds), unit, **shared)
        if len(variants) > 1:
            candidates = tuple(candidate | variant._asdict() for candidate in estimates.candidates)
            estimates = dataclasses.replace(estimates, candidates=candidates)
        parts.append(estimates)
    return CrossFit.merged(parts)


def untrained_rows(
    problem: Problem, fold: Fold, training: TrainingSet
) -> tuple[Rows | None, PairRows | None]:
    """The rows and the random pairs, besides its own pairs, that a fold is scored on; it is trained on none.

    If pairs were matched by label: their members, and random pairs of members of one cell. If all pairs are
    augmented: no rows, and random pairs of one class from different domains. (None, None) if labels or
    domains aren't known.
    """
    if problem.members is None:
        return None, None
    untrained = problem.members.take(np.isin(problem.members.node, fold.untrained_nodes))
    X = np.asarray(training.scaling.apply(untrained.X)[:])
    a, b = comparison_pairs(
        untrained.y, untrained.codes["domain"], across=not problem.cells, seed=problem.options.seed
    )
    random = PairRows(a=X[a], b=X[b])
    if not problem.cells:
        return None, random
    return Rows(X=X, y=untrained.y, group=untrained.codes["cell"][:, None]), random
