"""``ncm bound``: the theorem's bound on the test-domain risk of a probe, term by term.

Along ranks or numbers of pairs, and for an oracle, probes are fitted again. A refit is of the problem that
``ncm fit`` recorded: its rows, pairs, scaling, weights, method and solver. At the probe's own rank it is the
probe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError, listing
from ncm_cli.options import as_json, check
from ncm_cli.probes.apply import require_same_encoder, scale_like, scaling_of
from ncm_cli.probes.path import Fit
from ncm_cli.probes.problem import Part, Problem, reread_problem, train_path
from ncm_cli.probes.projection import blas_threads
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.columns import Target, number, read_target, split_filter
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import Probe, read_probe, seen_rows
from ncm_cli.store.results import write_result
from ncm_cli.theory import intervals, theorem
from ncm_cli.theory.options import BoundOptions, parse_grid

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class OraclePairs:
    """Test rows and their twins, scaled as the probe says, with the label that both share."""

    test: Array
    """x₊ (n, d)."""
    twin: Array
    """x₋ (n, d)."""
    target: NDArray
    """Class codes in the probe's order (n,), or targets for regression."""
    ids: tuple[str, ...]
    """Of the test rows."""
    disagreeing: int
    """Pairs whose members have different labels; the test row's is used."""
    unlabelled: int
    """Pairs left out because neither member's label is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What one probe does on the oracle pairs and on the rows of Term I."""

    terms: theorem.Terms
    test_logits: Array
    twin_logits: Array
    test_loss: Array
    twin_loss: Array
    train_loss: Array | None
    """On the training rows, where Term I is taken on them."""
    zero_one: dict[str, float] | None
    """None for regression."""

    @property
    def test_risk(self) -> float:
        return float(np.mean(self.test_loss))


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """What the probe and its refits are measured on."""

    loss: theorem.Loss
    oracle: OraclePairs
    moment: theorem.SecondMoment
    train: tuple[Array, NDArray] | None
    """Scaled rows (N, d) and their answers for Term I; None takes it on the twins."""

    def __call__(
        self, weight: Array, bias: Array, basis: Array, spurious_dim: int = 0, aligned: float | None = None
    ) -> Measured:
        """Measure weights (C, d) and a bias (C,); ``spurious_dim`` decides s, ``aligned`` may be known."""

        def logits(rows: Array) -> Array:
            return rows @ weight.T + bias

        oracle, rows = self.oracle, self.loss.rows
        test, twin = logits(oracle.test), logits(oracle.twin)
        twin_loss = rows(twin, oracle.target)
        train_loss = None if self.train is None else rows(logits(self.train[0]), self.train[1])
        terms = theorem.theorem(
            loss=self.loss,
            weight=weight,
            basis=basis,
            moment=self.moment,
            term_1=float(np.mean(twin_loss if train_loss is None else train_loss)),
            spurious_dim=spurious_dim,
            aligned=aligned,
        )
        errors = None if self.loss.name == "squared" else theorem.zero_one(test, twin, oracle.target)
        return Measured(terms, test, twin, rows(test, oracle.target), twin_loss, train_loss, errors)


def bound(options: BoundOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Compute all terms of Theorem 1 and its corollaries for a saved probe: the body of the result file.

    Raises
    ------
    InputError
        No labelled oracle pairs, oracle pairs the wrong way round, or no rows for Term I.
    MismatchError
        Files of different encoders, pairs that the probe wasn't fitted with, or clean pairs that aren't
        those of ``--pairs``.
    UsageError
        ``--ranks``, ``--pair-counts`` or ``--clean-pairs`` without ``--pairs``, or |I| above the dimension.
    """
    check(options)
    probe = read_probe(options.probe)
    with FeatureStore.open(options.features) as features:
        require_same_encoder(
            str(options.probe), probe.meta["encoder"], str(options.features), features.encoder
        )
        target = read_target(features, probe.target, None if probe.task == "regression" else probe.classes)
        oracle = _oracle_pairs(options, probe, features, target, reporter)
        problem = None if options.pairs is None else _fitted_problem(options, options.pairs, probe)
        with blas_threads(oracle.test.size):
            body = _compute(options, probe, features, target, oracle, problem, reporter)
    if options.output:
        write_result(options.output, "bound", body)
    return body


def _compute(
    options: BoundOptions,
    probe: Probe,
    features: FeatureStore,
    target: Target,
    oracle: OraclePairs,
    problem: Problem | None,
    reporter: Reporter,
) -> dict[str, Any]:
    classified = "logistic" if len(probe.weight) == 1 else "cross-entropy"
    loss = theorem.LOSSES["squared" if probe.task == "regression" else classified]
    differences = oracle.test - oracle.twin
    moment = theorem.second_moment(theorem.row_blocks(differences))
    dim = theorem.spurious_dimension(moment.values) if options.spurious_dim is None else options.spurious_dim
    if dim > features.dim:
        raise UsageError(
            "--spurious-dim is more than the features have dimensions",
            found=dim,
            expected=f"at most {features.dim}",
        )
    train = None
    if options.train is not None:
        train = _training_rows(options.train, probe, features, target, reporter)
    measure = Measure(loss, oracle, moment, train)
    aligned, direction = theorem.misalignment(moment, probe.basis)
    own = measure(probe.weight, probe.bias, probe.basis, dim, aligned)
    terms, risk = own.terms, own.test_risk
    found: dict[str, intervals.Interval] = {}
    if options.bootstrap:
        if own.zero_one:
            found |= intervals.share_intervals(own.test_logits, own.twin_logits, oracle.target)
        found |= intervals.intervals(
            loss=loss,
            terms=terms,
            weight=probe.weight,
            basis=probe.basis,
            moment=moment,
            direction=direction,
            differences=differences,
            test_loss=own.test_loss,
            twin_loss=own.twin_loss,
            train_loss=own.train_loss,
            replicates=options.bootstrap,
            seed=options.seed,
        )
    exact, given = own.train_loss is None, options.spurious_dim is not None
    return {
        **dataclasses.asdict(terms),
        "noise_corollary": _noise(options, loss, terms, moment, problem, probe),
        "test_risk": risk,
        "slack": terms.bound - risk,
        "holds": theorem.holds(risk, terms.bound),
        "exact": exact,
        "zero_one": own.zero_one,
        "estimates": {
            "oracle_pairs": len(differences),
            "term_1_on": "twins" if exact else "training rows",
            "train_rows": None if own.train_loss is None else len(own.train_loss),
            "spurious_dim": "given" if given else "estimated",
            "tolerance": None if given else theorem.SPURIOUS_TOLERANCE,
            "disagreeing_pairs": oracle.disagreeing,
            "unlabelled_pairs": oracle.unlabelled,
            "eigenvalues": moment.values.tolist(),
        },
        "intervals": {name: list(interval) for name, interval in found.items()},
        "bootstrap": {
            "level": intervals.LEVEL,
            "replicates": options.bootstrap,
            "seed": options.seed,
        },
        **_paths(options, probe, problem, measure, reporter),
        "oracle": _oracle_probe(options, probe, features, measure, own, reporter),
        "probe": {
            "path": str(options.probe),
            "sha256": probe.sha256,
            "method": probe.meta.get("method"),
            "rank": probe.basis.shape[1],
        },
        "options": as_json(options),
    }


def _matching_pairs(path: Path, options: BoundOptions, probe: Probe) -> PairStore:
    """A pair store of the probe's encoder."""
    store = read_pairs(path)
    require_same_encoder(str(options.probe), probe.meta["encoder"], str(path), store.encoder)
    return store


def _oracle_pairs(
    options: BoundOptions, probe: Probe, features: FeatureStore, target: Target, reporter: Reporter
) -> OraclePairs:
    """The oracle pairs with labels by the test row's id in ``features``, else as the pair store has them."""
    path = options.oracle_pairs
    store = _matching_pairs(path, options, probe)
    _require_test_rows_first(path, store, probe, features, reporter)
    own = _answers(store.id_a, store.label_a, probe, features, target)
    twin = _answers(store.id_b, store.label_b, probe, features, target)
    known = own.known | twin.known
    if not known.any():
        raise InputError(
            "no oracle pair has a label that the probe knows",
            where=path,
            found=f"ids such as {listing(store.id_a[:3])}",
            expected=f"rows of {features.path} with a value of {probe.target!r}",
        )
    if unlabelled := int((~known).sum()):
        reporter.warn(f"{unlabelled:,} of {len(known):,} oracle pairs have no known label and are left out")
    if disagreeing := int((own.known & twin.known & (own.y != twin.y)).sum()):
        reporter.warn(
            f"{disagreeing:,} oracle pairs have members of different labels; the theorem takes them as "
            "equal, so the test row's label is used for both"
        )
    return OraclePairs(
        test=scale_like(probe, store.features_a[known]),
        twin=scale_like(probe, store.features_b[known]),
        target=np.where(own.known, own.y, twin.y)[known],
        ids=tuple(np.array(store.id_a, dtype=object)[known]),
        disagreeing=disagreeing,
        unlabelled=unlabelled,
    )


def _require_test_rows_first(
    path: Path, store: PairStore, probe: Probe, features: FeatureStore, reporter: Reporter
) -> None:
    """Refuse pairs the wrong way round; warn of rows the probe was trained on, as far as that is known."""
    test = (probe.meta.get("data") or {}).get("test") or split_filter(features, "test")
    turned = 0
    if test and not _among(features, test, store.id_a):
        turned = _among(features, test, store.id_b)
    if turned:
        raise InputError(
            "oracle pairs the wrong way round",
            where=path,
            found=f"{turned:,} of {len(store.id_b):,} second members are rows of {test}, no first member is",
            expected="test rows as first members (a), their twins in a training domain as second ones (b)",
            fix="make the pairs again with the columns swapped: ncm pairs --a-col id_b --b-col id_a",
        )
    if seen := int(seen_rows(probe, "train", store.id_a).sum()):
        reporter.warn(
            f"{seen:,} of {len(store.id_a):,} oracle pairs have a first member that the probe was trained "
            "on: the risk measured there isn't that of the test domain"
        )


def _among(features: FeatureStore, where: str, ids: Sequence[str]) -> int:
    """How many of the ids are rows of the filter; 0 if it was written for another store."""
    try:
        mask = features.mask(where)
    except NcmError:
        return 0
    positions = features.positions(ids)
    return int(mask[positions[positions >= 0]].sum())


def _answers(
    ids: Sequence[str], labels: Sequence[str], probe: Probe, features: FeatureStore, target: Target
) -> Target:
    """Answers by id in the store; of ids that it lacks, by the label that the pair store keeps."""
    code = {name: index for index, name in enumerate(probe.classes)}

    def stored(label: str) -> float:
        try:
            return code.get(label, -1) if probe.classes else number(label)
        except ValueError:
            return float("nan")

    positions = features.positions(ids)
    absent = (positions < 0) | ~target.known[positions]
    kept = np.array([stored(label) for label in labels], dtype=target.y.dtype)
    return dataclasses.replace(target, y=np.where(absent, kept, target.y[positions]))


def _training_rows(
    where: str, probe: Probe, features: FeatureStore, target: Target, reporter: Reporter
) -> tuple[Array, NDArray]:
    """The labelled rows of ``--train``, scaled, and their answers."""
    chosen = features.mask(where)
    labelled = chosen & target.known
    rows, known = int(chosen.sum()), int(labelled.sum())
    if not known:
        raise InputError(
            "no rows for Term I",
            where=f"--train {where}",
            found=f"{rows:,} rows, none of known {target.name}",
        )
    if known < rows:
        reporter.warn(
            f"{rows - known:,} of {rows:,} rows of {where} have no known {target.name} and are left out of "
            "Term I"
        )
    return scale_like(probe, features.read(labelled)), target.y[labelled]


def _fitted_problem(options: BoundOptions, path: Path, probe: Probe) -> Problem:
    """The problem that the probe was fitted on, read again, once it is known that the pairs are its own."""
    if (options.ranks or options.pair_counts) and probe.meta.get("method") != "ncm":
        raise MismatchError(
            "a probe that removes no directions can't be fitted again along ranks or pairs",
            found=f"method {probe.meta.get('method')}",
            expected="method ncm: a probe of ncm fit --pairs P.h5 --method ncm",
        )
    store = _matching_pairs(path, options, probe)
    fitted = (probe.meta.get("data") or {}).get("pairs") or {}
    expected = fitted.get("content_sha256")
    if expected is not None and expected != store.content_sha256:
        raise MismatchError(
            "not the pairs that the probe was fitted with",
            where=path,
            found=f"content {store.content_sha256[:12]}",
            expected=f"content {expected[:12]}, which was {fitted.get('path')}",
            fix="name that pair store, or fit the probe again with these pairs",
        )
    return reread_problem(probe, options.features, path, reporter=SILENT)


def _noise(
    options: BoundOptions,
    loss: theorem.Loss,
    terms: theorem.Terms,
    moment: theorem.SecondMoment,
    problem: Problem | None,
    probe: Probe,
) -> dict[str, Any]:
    """The noise corollary, clean pairs being matched with the fit's by their ids."""
    if options.clean_pairs is None or problem is None or problem.pairs is None:
        unknown = ("value", "bound", "epsilon_norm", "sigma_s", "sigma_s_next", "condition_limit")
        reasons = ["no clean pairs are given (--clean-pairs with --pairs)"]
        nothing = dict.fromkeys((*unknown, "clean_rank", "clean_distance"))
        return {"applicable": False, **nothing, "reasons": reasons}
    clean = _matching_pairs(options.clean_pairs, options, probe)
    noisy, used = problem.pairs.store, np.flatnonzero(problem.pairs.usable)
    # Of repeated pairs the first is taken.
    position = {ids: row for row, ids in reversed([*enumerate(zip(clean.id_a, clean.id_b, strict=True))])}
    ids = [(noisy.id_a[row], noisy.id_b[row]) for row in used]
    if missing := [one for one in ids if one not in position]:
        raise MismatchError(
            "the clean pairs aren't those of the noisy pairs",
            where=options.clean_pairs,
            found=f"no clean pair {missing[0]}, and {len(missing) - 1:,} more missing",
            expected="the same ids in --pairs and --clean-pairs",
        )

    def delta(store: PairStore, rows: Sequence[int] | NDArray[np.int64]) -> Array:
        return (scale_like(probe, store.features_a[rows]) - scale_like(probe, store.features_b[rows])).T

    return theorem.noise_corollary(
        loss=loss,
        terms=terms,
        moment=moment,
        noisy=delta(noisy, used),
        clean=delta(clean, [position[one] for one in ids]),
    )


def _refit(
    probe: Probe,
    problem: Problem,
    part: Part,
    ranks: Sequence[int],
    advance: Callable[[int], None] | None = None,
) -> list[Fit]:
    """Fits at these ranks, by the probe's method (ERM where the problem has no pairs)."""
    return train_path(
        part,
        problem.options,
        method="erm" if problem.pairs is None else "ncm",
        solver=probe.meta["options"]["solver"],
        ranks=ranks,
        decays=[float(probe.meta["hyper_parameters"]["weight_decay"])],
        advance=advance,
    )


def _paths(
    options: BoundOptions, probe: Probe, problem: Problem | None, measure: Measure, reporter: Reporter
) -> dict[str, Any]:
    """``path`` along ranks, its ``summary``, and ``pair_counts``: empty where they aren't asked for."""
    path: list[dict[str, Any]] = []
    counts: list[dict[str, Any]] = []
    if problem is not None and problem.pairs is not None:
        usable, scaling = problem.pairs.usable, scaling_of(probe)
        if options.ranks:
            part = problem.part(problem.train, usable, scaling)
            asked = parse_grid(options.ranks)
            ranks = [rank for rank in asked if rank <= part.rank]
            if len(ranks) < len(asked):
                reporter.note(f"ranks above {part.rank} are skipped: the pairs' differences have that rank")
            with reporter.task("ranks", len(ranks), "ranks") as task:
                fits = _refit(probe, problem, part, ranks, task.advance) if ranks else []
            path = [_path_row(fit, part, measure) for fit in fits]
        if options.pair_counts:
            there, asked = int(usable.sum()), parse_grid(options.pair_counts)
            possible = [count for count in asked if count <= there]
            if len(possible) < len(asked):
                reporter.note(f"counts above {there} are skipped: there are no more pairs")
            with reporter.task("pair counts", len(possible), "fits") as task:
                for count in possible:
                    part = problem.part(problem.train, usable & (np.cumsum(usable) <= count), scaling)
                    rank = min(count, probe.basis.shape[1], part.rank)
                    counts.append(_path_row(_refit(probe, problem, part, [rank])[0], part, measure))
                    task.advance()
    return {"path": path, "summary": _summary(path), "pair_counts": counts}


def _path_row(fit: Fit, part: Part, measure: Measure) -> dict[str, Any]:
    """The bound and the measurements of one refit."""
    basis = np.zeros((part.X.shape[1], 0)) if part.spectrum is None else part.spectrum.basis[:, : fit.rank]
    found = measure(fit.weight, fit.bias, basis)
    terms, errors = found.terms, found.zero_one or {}
    return {
        "rank": fit.rank,
        "pairs": part.pairs,
        "converged": fit.converged,
        "term_1": terms.term_1,
        "theta_m_theta": terms.theta_m_theta,
        "term_2": terms.term_2,
        "bound": terms.bound,
        "test_risk": found.test_risk,
        "twin_error": errors.get("twin_error"),
        "flip_rate": errors.get("flip_rate"),
        "zero_one_bound": errors.get("bound"),
        "test_error": errors.get("test_error"),
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | int | None] | None:
    """What a rank path says in a few numbers; None without classes or ranks.

    ``bound_rank`` is the rank at the least 0-1 bound. ``in_domain_rise`` is by how much the in-domain
    accuracy (on the twins) ever rises from one rank to a larger one.
    """
    if not rows or rows[0]["test_error"] is None:
        return None
    test, own = (1 - np.array([row[name] for row in rows]) for name in ("test_error", "twin_error"))
    best, least = int(test.argmax()), int(np.argmin([row["zero_one_bound"] for row in rows]))
    erm = rows[0]["rank"] == 0
    return {
        "erm_test_accuracy": float(test[0]) if erm else None,
        "erm_in_domain_accuracy": float(own[0]) if erm else None,
        "best_rank": rows[best]["rank"],
        "best_test_accuracy": float(test[best]),
        "bound_rank": rows[least]["rank"],
        "bound_test_accuracy": float(test[least]),
        "bound_regret": float(test[best] - test[least]),
        "in_domain_drop": float(own[0] - own[-1]),
        "in_domain_rise": float(np.max(own - np.minimum.accumulate(own))),
    }


def _oracle_probe(
    options: BoundOptions,
    probe: Probe,
    features: FeatureStore,
    measure: Measure,
    own: Measured,
    reporter: Reporter,
) -> dict[str, Any] | None:
    """What a probe that is trained on other rows of the test domain, nothing removed, reaches there."""
    where, oracle = options.oracle_train, measure.oracle
    if not where:
        return None
    positions = features.positions(oracle.ids)
    shared = [row for row in positions[positions >= 0] if features.mask(where)[row]]
    if shared:
        raise InputError(
            "the oracle would be trained on the rows it is measured on",
            where=f"--oracle-train {where}",
            found=f"{len(shared):,} of the oracle pairs' test rows, such as {features.ids[shared[0]]!r}",
            expected="other rows of the test domain",
        )
    problem = reread_problem(probe, options.features, None, where=where, reporter=reporter)
    part = problem.part(problem.train, None, scaling_of(probe))
    fit = _refit(probe, problem, part, [0])[0]
    found = measure(fit.weight, fit.bias, np.zeros((features.dim, 0)))
    error = found.zero_one["test_error"] if found.zero_one else None
    return {
        "where": where,
        "train_rows": len(part.X),
        "test_risk": found.test_risk,
        "test_error": error,
        # Its test accuracy less the bounded probe's.
        "gap": own.zero_one["test_error"] - error if own.zero_one and error is not None else None,
    }
