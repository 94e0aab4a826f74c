"""The bound along a path: refits at each rank, or with a growing number of pairs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.methods import bound as theory
from ncm_cli.methods.path import Fit, fit_path
from ncm_cli.methods.projection import Spectrum, spectrum
from ncm_cli.progress import Reporter
from ncm_cli.stages.bound_pairs import FitPairs, OraclePairs, is_known, targets_of
from ncm_cli.stages.common import scale_like
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import Probe

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What every refit shares: the probe's own training rows, scaling and weight decay."""

    features: Array
    target: NDArray
    row_weights: Array | None
    n_classes: int
    task: str
    weight_decay: float
    loss: theory.Loss


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


def refit_setting(
    probe: Probe, features: FeatureStore, loss: theory.Loss, where: str | None = None
) -> Setting:
    """The training problem that the probe's metadata records, on rows of ``features``.

    ``where`` are other rows than those the probe was trained on.
    """
    options = probe.meta["options"]
    where = where or (probe.meta.get("data") or {}).get("train") or options.get("train")
    mask = features.mask(where)
    target = targets_of(probe, features)
    mask &= is_known(target)
    if not mask.any():
        raise InputError(
            "none of the probe's training rows are in the features",
            where=features.path,
            found=f"--train {where}",
        )
    decay = probe.meta["hyper_parameters"]["weight_decay"]
    return Setting(
        features=scale_like(probe, features.read(mask)),
        target=target[mask],
        row_weights=_group_weights(features, options.get("upweight"), mask),
        n_classes=max(len(probe.classes), 2),
        task=probe.task,
        weight_decay=float(decay),
        loss=loss,
    )


def _group_weights(features: FeatureStore, columns: str | None, mask: NDArray[np.bool_]) -> Array | None:
    """Each row's weight when every group of ``columns`` counts the same."""
    if not columns:
        return None
    codes = [features.categorical(name.strip()).codes[mask] for name in columns.split(",")]
    _, group, sizes = np.unique(np.stack(codes), axis=1, return_inverse=True, return_counts=True)
    return 1.0 / sizes[group.reshape(-1)]


def pair_spectrum(pairs: FitPairs) -> Spectrum:
    """The singular spectrum of the pairs' differences, with the rounding of float32 features allowed for."""
    magnitude = math.sqrt(float(np.mean(np.square(pairs.a))))
    return spectrum(pairs.delta, magnitude=magnitude)


def rank_path(
    setting: Setting,
    pairs: FitPairs,
    oracle: OraclePairs,
    moment: theory.SecondMoment,
    ranks: Sequence[int],
    train_rows: tuple[Array, NDArray] | None,
    reporter: Reporter,
) -> list[PathRow]:
    """One row for each rank that the pairs have; the others are skipped with a note."""
    found = pair_spectrum(pairs)
    possible = [rank for rank in ranks if rank <= found.rank]
    if len(possible) < len(ranks):
        reporter.note(f"ranks above {found.rank} are skipped: the pairs' differences have that rank")
    with reporter.task("ranks", len(possible), "ranks") as task:
        fits = _fits(setting, found.basis, possible, advance=task.advance)
    return [_row(setting, fit, found.basis, len(pairs.ids), oracle, moment, train_rows) for fit in fits]


def count_path(
    setting: Setting,
    pairs: FitPairs,
    oracle: OraclePairs,
    moment: theory.SecondMoment,
    counts: Sequence[int],
    most: int,
    train_rows: tuple[Array, NDArray] | None,
    reporter: Reporter,
) -> list[PathRow]:
    """One row for each number of pairs, the first K of them, at rank min(K, ``most``, their own rank)."""
    rows = []
    possible = [count for count in counts if count <= len(pairs.ids)]
    if len(possible) < len(counts):
        reporter.note(f"counts above {len(pairs.ids)} are skipped: there are no more pairs")
    with reporter.task("pair counts", len(possible), "fits") as task:
        for count in possible:
            first = FitPairs(pairs.a[:count], pairs.b[:count], pairs.ids[:count])
            basis, rank = np.zeros((pairs.a.shape[1], 0)), 0
            if count:
                found = pair_spectrum(first)
                basis, rank = found.basis, min(count, most, found.rank)
            fit = _fits(setting, basis, [rank])[0]
            rows.append(_row(setting, fit, basis, count, oracle, moment, train_rows))
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
    fit = _fits(setting, np.zeros((setting.features.shape[1], 0)), [0])[0]
    logits = pairs.test @ fit.weight.T + fit.bias
    error = None
    if setting.task != "regression":
        error = float(np.mean(theory.predicted(logits) != pairs.target))
    return Oracle(
        where=where,
        train_rows=len(setting.features),
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


def _fits(setting: Setting, basis: Array, ranks: Sequence[int], advance: Any = None) -> list[Fit]:
    return fit_path(
        setting.features,
        setting.target,
        setting.n_classes,
        basis,
        ranks,
        [setting.weight_decay],
        weights=setting.row_weights,
        task=setting.task,
        advance=advance,
    )


def _row(
    setting: Setting,
    fit: Fit,
    basis: Array,
    count: int,
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
        basis=basis[:, : fit.rank],
        moment=moment,
        term_1=float(np.mean(loss.rows(*own))),
        spurious_dim=0,  # decides s, which only the upper bound of Term II uses
    )
    errors = theory.zero_one(test, twin, oracle.target) if setting.task != "regression" else None
    return PathRow(
        rank=fit.rank,
        pairs=count,
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
