"""The bound along a path: refits at each rank, or with a growing number of pairs.

A refit is of the problem that ``ncm fit`` recorded: its rows, pairs, scaling, weights, method and solver. At
the probe's own rank it is the probe.

What ``ncm bound`` refits when it is asked to: along ranks, along numbers of pairs, on the test domain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.probes.apply import scale_like, scaling_of
from ncm_cli.probes.metrics import decide
from ncm_cli.probes.path import Fit
from ncm_cli.probes.problem import Part, Problem, reread_problem
from ncm_cli.probes.train import train_path
from ncm_cli.progress import Reporter
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import Probe
from ncm_cli.theory import pairs
from ncm_cli.theory import theorem as theory
from ncm_cli.theory.options import BoundOptions, parse_grid
from ncm_cli.theory.pairs import OraclePairs

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A problem read again, with the probe's own scaling and hyper-parameters."""

    probe: Probe
    problem: Problem
    loss: theory.Loss

    def part(self, pairs: NDArray[np.bool_] | None) -> Part:
        """All training rows, with some of the pairs."""
        return self.problem.part(self.problem.train, pairs, scaling_of(self.probe))

    def fits(
        self, part: Part, ranks: Sequence[int], advance: Callable[[int], None] | None = None
    ) -> list[Fit]:
        """Refits at these ranks, by the probe's method (ERM where the problem has no pairs)."""
        recorded = self.probe.meta["options"]
        return train_path(
            part,
            self.problem.options,
            method="ncm" if self.problem.pairs is not None else "erm",
            solver=recorded["solver"],
            ranks=ranks,
            decays=[float(self.probe.meta["hyper_parameters"]["weight_decay"])],
            advance=advance,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PathRow:
    """The bound and the measurements of one refit."""

    rank: int
    pairs: int
    converged: bool
    term_1: float
    theta_m_theta: float
    term_2: float
    bound: float
    test_risk: float
    twin_error: float | None
    flip_rate: float | None
    zero_one_bound: float | None
    test_error: float | None


def rank_path(
    setting: Setting,
    ranks: Sequence[int],
    oracle: OraclePairs,
    moment: theory.SecondMoment,
    train_rows: tuple[Array, NDArray] | None,
    reporter: Reporter,
) -> list[PathRow]:
    """One row for each rank that the pairs have; the others are skipped with a note."""
    assert setting.problem.pairs is not None
    part = setting.part(setting.problem.pairs.usable)
    possible = [rank for rank in ranks if rank <= part.rank]
    if len(possible) < len(ranks):
        reporter.note(f"ranks above {part.rank} are skipped: the pairs' differences have that rank")
    with reporter.task("ranks", len(possible), "ranks") as task:
        fits = setting.fits(part, possible, task.advance) if possible else []
    return [_row(setting, fit, part, oracle, moment, train_rows) for fit in fits]


def count_path(
    setting: Setting,
    counts: Sequence[int],
    most: int,
    oracle: OraclePairs,
    moment: theory.SecondMoment,
    train_rows: tuple[Array, NDArray] | None,
    reporter: Reporter,
) -> list[PathRow]:
    """One row for each number of pairs, the first K of them, at rank min(K, ``most``, their own rank)."""
    assert setting.problem.pairs is not None
    usable = setting.problem.pairs.usable
    rows, there = [], int(usable.sum())
    possible = [count for count in counts if count <= there]
    if len(possible) < len(counts):
        reporter.note(f"counts above {there} are skipped: there are no more pairs")
    with reporter.task("pair counts", len(possible), "fits") as task:
        for count in possible:
            part = setting.part(usable & (np.cumsum(usable) <= count))
            fit = setting.fits(part, [min(count, most, part.rank)])[0]
            rows.append(_row(setting, fit, part, oracle, moment, train_rows))
            task.advance()
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class Oracle:
    """What a probe that is trained on the test domain itself reaches on the oracle pairs' test rows."""

    where: str
    train_rows: int
    test_risk: float
    test_error: float | None
    gap: float | None
    """Its test accuracy less the bounded probe's."""


def oracle_probe(setting: Setting, where: str, pairs: OraclePairs, test_error: float | None) -> Oracle:
    """Train on the rows of ``setting`` with nothing removed; ``test_error`` is the bounded probe's."""
    part = setting.part(None)
    fit = setting.fits(part, [0])[0]
    logits = pairs.test @ fit.weight.T + fit.bias
    error = None
    if not setting.problem.regression:
        error = float(np.mean(decide(logits) != pairs.target))
    return Oracle(
        where=where,
        train_rows=len(part.X),
        test_risk=float(np.mean(setting.loss.rows(logits, pairs.target))),
        test_error=error,
        gap=None if error is None or test_error is None else test_error - error,
    )


def summary(rows: Sequence[PathRow]) -> dict[str, float | int | None] | None:
    """What a rank path says in a few numbers; None without classes or ranks.

    ``bound_rank`` is the rank at the least 0-1 bound. ``in_domain_rise`` is by how much the in-domain
    accuracy (on the twins) ever rises from one rank to a larger one.
    """
    if not rows or rows[0].test_error is None:
        return None
    test = np.array([1 - (row.test_error or 0.0) for row in rows])
    own = np.array([1 - (row.twin_error or 0.0) for row in rows])
    best = int(test.argmax())
    least = int(np.argmin([row.zero_one_bound or 0.0 for row in rows]))
    erm = next((index for index, row in enumerate(rows) if row.rank == 0), None)
    return {
        "erm_test_accuracy": None if erm is None else float(test[erm]),
        "erm_in_domain_accuracy": None if erm is None else float(own[erm]),
        "best_rank": rows[best].rank,
        "best_test_accuracy": float(test[best]),
        "bound_rank": rows[least].rank,
        "bound_test_accuracy": float(test[least]),
        "bound_regret": float(test[best] - test[least]),
        "in_domain_drop": float(own[0] - own[-1]),
        "in_domain_rise": float(np.max(own - np.minimum.accumulate(own))),
    }


def _row(
    setting: Setting,
    fit: Fit,
    part: Part,
    oracle: OraclePairs,
    moment: theory.SecondMoment,
    train_rows: tuple[Array, NDArray] | None,
) -> PathRow:
    def logits(rows: Array) -> Array:
        return rows @ fit.weight.T + fit.bias

    loss = setting.loss
    test, twin = logits(oracle.test), logits(oracle.twin)
    own = (twin, oracle.target) if train_rows is None else (logits(train_rows[0]), train_rows[1])
    terms = theory.theorem(
        loss=loss,
        weight=fit.weight,
        basis=np.zeros((part.X.shape[1], 0)) if part.spectrum is None else part.spectrum.basis[:, : fit.rank],
        moment=moment,
        term_1=float(np.mean(loss.rows(*own))),
        spurious_dim=0,  # decides s, which only the upper bound of Term II uses
    )
    errors = theory.zero_one(test, twin, oracle.target) if not setting.problem.regression else None
    return PathRow(
        rank=fit.rank,
        pairs=part.pairs,
        converged=fit.converged,
        term_1=terms.term_1,
        theta_m_theta=terms.theta_m_theta,
        term_2=terms.term_2,
        bound=terms.bound,
        test_risk=float(np.mean(loss.rows(test, oracle.target))),
        twin_error=errors.twin_error if errors else None,
        flip_rate=errors.flip_rate if errors else None,
        zero_one_bound=errors.bound if errors else None,
        test_error=errors.test_error if errors else None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Paths:
    """What refitting found; empty where it wasn't asked for."""

    ranks: tuple[dict[str, Any], ...] = ()
    summary: dict[str, Any] | None = None
    pair_counts: tuple[dict[str, Any], ...] = ()
    oracle: dict[str, Any] | None = None


def refit_paths(
    options: BoundOptions,
    probe: Probe,
    features: FeatureStore,
    oracle: OraclePairs,
    problem: Problem | None,
    moment: theory.SecondMoment,
    *,
    test_error: float | None,
    reporter: Reporter,
) -> Paths:
    """Refit along ranks and numbers of pairs, and on the test domain, as far as the options ask for it.

    ``problem`` is the probe's own, for the first two.

    ``test_error`` is the bounded probe's, for the oracle's gap.
    """
    if not (options.ranks or options.pair_counts or options.oracle_train):
        return Paths()
    # scipy comes in with the solvers, which a plain bound doesn't need.

    loss = theory.loss_for(probe.task, len(probe.weight))
    ranks: list[PathRow] = []
    counts: list[PathRow] = []
    if problem is not None:
        setting = Setting(probe, problem, loss)
        own = _rows_of(options.train, probe, features) if options.train is not None else None
        if options.ranks:
            grid = parse_grid(options.ranks)
            ranks = rank_path(setting, grid, oracle, moment, own, reporter)
        if options.pair_counts:
            grid, most = parse_grid(options.pair_counts), probe.basis.shape[1]
            counts = count_path(setting, grid, most, oracle, moment, own, reporter)
    best = None
    if options.oracle_train:
        _refuse_shared(options.oracle_train, features, oracle)
        other = reread_problem(probe, options.features, None, where=options.oracle_train, reporter=reporter)
        setting = Setting(probe, other, loss)
        best = oracle_probe(setting, options.oracle_train, oracle, test_error)
    return Paths(
        ranks=tuple(dataclasses.asdict(row) for row in ranks),
        summary=summary(ranks),
        pair_counts=tuple(dataclasses.asdict(row) for row in counts),
        oracle=dataclasses.asdict(best) if best else None,
    )


def _refuse_shared(where: str, features: FeatureStore, oracle: OraclePairs) -> None:
    positions = features.positions(oracle.ids)
    found = positions[positions >= 0]
    shared = found[features.mask(where)[found]]
    if len(shared):
        raise InputError(
            "the oracle would be trained on the rows it is measured on",
            where=f"--oracle-train {where}",
            found=f"{len(shared):,} of the oracle pairs' test rows, such as {features.ids[shared[0]]!r}",
            expected="other rows of the test domain",
        )


def _rows_of(where: str, probe: Probe, features: FeatureStore) -> tuple[Array, NDArray]:
    target = pairs.targets_of(probe, features)
    mask = features.mask(where) & target.known
    return scale_like(probe, features.read(mask)), target.y[mask]
