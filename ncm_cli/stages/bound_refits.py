"""What ``ncm bound`` refits when it is asked to: along ranks, along numbers of pairs, on the test domain."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.methods import bound as theory
from ncm_cli.options.bound import BoundOptions, parse_grid
from ncm_cli.progress import Reporter
from ncm_cli.stages import bound_pairs
from ncm_cli.stages.bound_pairs import OraclePairs
from ncm_cli.stages.common import scale_like
from ncm_cli.stages.common_problem import Problem, reread_problem
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import Probe

if TYPE_CHECKING:
    from ncm_cli.stages import bound_path

Array = NDArray[np.float64]


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
    from ncm_cli.stages import bound_path

    loss = theory.loss_for(probe.task, len(probe.weight))
    ranks: list[bound_path.PathRow] = []
    counts: list[bound_path.PathRow] = []
    if problem is not None:
        setting = bound_path.Setting(probe, problem, loss)
        own = _rows_of(options.train, probe, features) if options.train is not None else None
        if options.ranks:
            grid = parse_grid(options.ranks)
            ranks = bound_path.rank_path(setting, grid, oracle, moment, own, reporter)
        if options.pair_counts:
            grid, most = parse_grid(options.pair_counts), probe.basis.shape[1]
            counts = bound_path.count_path(setting, grid, most, oracle, moment, own, reporter)
    best = None
    if options.oracle_train:
        _refuse_shared(options.oracle_train, features, oracle)
        other = reread_problem(probe, options.features, None, where=options.oracle_train, reporter=reporter)
        setting = bound_path.Setting(probe, other, loss)
        best = bound_path.oracle_probe(setting, options.oracle_train, oracle, test_error)
    return Paths(
        ranks=tuple(dataclasses.asdict(row) for row in ranks),
        summary=bound_path.summary(ranks),
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
    target = bound_pairs.targets_of(probe, features)
    mask = features.mask(where) & target.known
    return scale_like(probe, features.read(mask)), target.y[mask]
