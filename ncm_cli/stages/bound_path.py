"""The bound along a path: refits at each rank, or with a growing number of pairs.

A refit is of the problem that ``ncm fit`` recorded: its rows, pairs, scaling, weights, method and solver. At
the probe's own rank it is the probe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods import bound as theory
from ncm_cli.methods.metrics import decide
from ncm_cli.methods.path import Fit
from ncm_cli.progress import Reporter
from ncm_cli.stages.bound_pairs import OraclePairs
from ncm_cli.stages.common import scaling_of
from ncm_cli.stages.common_problem import Part, Problem
from ncm_cli.stages.common_train import train_path
from ncm_cli.store.probe import Probe

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
