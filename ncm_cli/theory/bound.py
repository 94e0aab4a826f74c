"""``ncm bound``: the theorem's bound on the test-domain risk of a probe, term by term."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import as_json, check
from ncm_cli.probes.apply import require_same_encoder
from ncm_cli.probes.problem import Problem, reread_problem
from ncm_cli.probes.projection import blas_threads
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import Probe, read_probe
from ncm_cli.store.results import write_result
from ncm_cli.theory import intervals, pairs, theorem
from ncm_cli.theory import theorem as theory
from ncm_cli.theory.options import BoundOptions
from ncm_cli.theory.pairs import FitPairs, OraclePairs
from ncm_cli.theory.refits import Paths, refit_paths

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class BoundReport:
    """Every term, what it was estimated from, and whether the inequality holds on the data."""

    terms: theory.Terms
    test_risk: float
    exact: bool
    """Term I was taken on the twins, which makes the inequality deterministic."""
    noise: theorem.NoiseCorollary
    zero_one: theory.ZeroOne | None
    eigenvalues: tuple[float, ...]
    spurious_dim_given: bool
    tolerance: float
    oracle_pairs: int
    train_rows: int | None
    disagreeing_pairs: int
    unlabelled_pairs: int
    intervals: dict[str, intervals.Interval]
    bootstrap: int
    seed: int
    paths: Paths
    probe: dict[str, Any]
    options: dict[str, Any]

    @property
    def slack(self) -> float:
        return self.terms.bound - self.test_risk

    @property
    def holds(self) -> bool:
        return theory.holds(self.test_risk, self.terms.bound)

    def to_json(self) -> dict[str, Any]:
        """The body of the result file."""
        terms = dataclasses.asdict(self.terms)
        noise = dataclasses.asdict(self.noise)
        return {
            **terms,
            "noise_corollary": {**noise, "reasons": list(self.noise.reasons)},
            "test_risk": self.test_risk,
            "slack": self.slack,
            "holds": self.holds,
            "exact": self.exact,
            "zero_one": dataclasses.asdict(self.zero_one) if self.zero_one else None,
            "estimates": {
                "oracle_pairs": self.oracle_pairs,
                "term_1_on": "twins" if self.exact else "training rows",
                "train_rows": self.train_rows,
                "spurious_dim": "given" if self.spurious_dim_given else "estimated",
                "tolerance": None if self.spurious_dim_given else self.tolerance,
                "disagreeing_pairs": self.disagreeing_pairs,
                "unlabelled_pairs": self.unlabelled_pairs,
                "eigenvalues": list(self.eigenvalues),
            },
            "intervals": {name: list(interval) for name, interval in self.intervals.items()},
            "bootstrap": {"level": intervals.LEVEL, "replicates": self.bootstrap, "seed": self.seed},
            "path": list(self.paths.ranks),
            "summary": self.paths.summary,
            "pair_counts": list(self.paths.pair_counts),
            "oracle": self.paths.oracle,
            "probe": self.probe,
            "options": self.options,
        }


def bound(options: BoundOptions, *, reporter: Reporter = SILENT) -> BoundReport:
    """Compute all terms of Theorem 1 and its corollaries for a saved probe.

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
        oracle_store = pairs.read_matching_pairs(options.oracle_pairs, options.probe, probe)
        oracle = pairs.oracle_pairs(options.oracle_pairs, oracle_store, probe, features, reporter)
        fitted = problem = None
        if options.pairs:
            if options.ranks or options.pair_counts:
                pairs.require_ncm(probe)
            pairs_store = pairs.read_matching_pairs(options.pairs, options.probe, probe)
            pairs.require_pairs_of_the_fit(options.pairs, pairs_store, probe)
            problem = reread_problem(probe, options.features, options.pairs, reporter=SILENT)
            assert problem.pairs is not None
            fitted = pairs.fit_pairs(pairs_store, problem.pairs.usable, probe)
        with blas_threads(oracle.test.size):
            report = _compute(options, probe, features, oracle, fitted, problem, reporter)
    if options.output:
        write_result(options.output, "bound", report.to_json())
    return report


def _compute(
    options: BoundOptions,
    probe: Probe,
    features: FeatureStore,
    oracle: OraclePairs,
    fitted: FitPairs | None,
    problem: Problem | None,
    reporter: Reporter,
) -> BoundReport:
    loss = theory.loss_for(probe.task, len(probe.weight))
    differences = oracle.differences
    moment = theory.second_moment(theory.row_blocks(differences))
    dim = options.spurious_dim
    if dim is None:
        dim = theory.spurious_dimension(moment.values, options.tolerance)
    elif dim > features.dim:
        raise UsageError(
            "--spurious-dim is more than the features have dimensions",
            found=dim,
            expected=f"at most {features.dim}",
        )
    test_logits, twin_logits = (rows @ probe.weight.T + probe.bias for rows in (oracle.test, oracle.twin))
    test_loss, twin_loss = loss.rows(test_logits, oracle.target), loss.rows(twin_logits, oracle.target)
    train_loss = None
    if options.train is not None:
        train_loss = pairs.training_losses(probe, features, options.train, loss, reporter)
    aligned, direction = theory.misalignment(moment, probe.basis)
    terms = theory.theorem(
        loss=loss,
        weight=probe.weight,
        basis=probe.basis,
        moment=moment,
        term_1=float(np.mean(twin_loss if train_loss is None else train_loss)),
        spurious_dim=dim,
        aligned=aligned,
    )
    classified = probe.task != "regression"
    zero_one = theory.zero_one(test_logits, twin_logits, oracle.target) if classified else None
    noise = _noise(options, loss, terms, moment, fitted, probe)
    found: dict[str, intervals.Interval] = {}
    if options.bootstrap:
        rows = intervals.PairRows(
            test_loss=test_loss,
            twin_loss=twin_loss,
            spectral=intervals.spectral_rows(
                differences,
                weight=probe.weight,
                basis=probe.basis,
                moment=moment,
                s=terms.s,
                direction=direction,
            ),
            errors=intervals.error_rows(test_logits, twin_logits, oracle.target) if classified else None,
        )
        found = intervals.intervals(
            loss=loss,
            terms=terms,
            rows=rows,
            train_loss=train_loss,
            replicates=options.bootstrap,
            seed=options.seed,
        )
    paths = refit_paths(
        options,
        probe,
        features,
        oracle,
        problem,
        moment,
        test_error=zero_one.test_error if zero_one else None,
        reporter=reporter,
    )
    return BoundReport(
        terms=terms,
        test_risk=float(np.mean(test_loss)),
        exact=train_loss is None,
        noise=noise,
        zero_one=zero_one,
        eigenvalues=tuple(float(value) for value in moment.values),
        spurious_dim_given=options.spurious_dim is not None,
        tolerance=options.tolerance,
        oracle_pairs=len(differences),
        train_rows=None if train_loss is None else len(train_loss),
        disagreeing_pairs=oracle.disagreeing,
        unlabelled_pairs=oracle.unlabelled,
        intervals=found,
        bootstrap=options.bootstrap,
        seed=options.seed,
        paths=paths,
        probe={
            "path": str(options.probe),
            "sha256": probe.sha256,
            "method": probe.meta.get("method"),
            "rank": probe.basis.shape[1],
        },
        options=as_json(options),
    )


def _noise(
    options: BoundOptions,
    loss: theory.Loss,
    terms: theory.Terms,
    moment: theory.SecondMoment,
    fitted: FitPairs | None,
    probe: Probe,
) -> theorem.NoiseCorollary:
    if options.clean_pairs is None or fitted is None:
        return theorem.no_noise_corollary("no clean pairs are given (--clean-pairs with --pairs)")
    store = pairs.read_matching_pairs(options.clean_pairs, options.probe, probe)
    clean = pairs.clean_differences(options.clean_pairs, store, fitted, probe)
    if not clean.shape[1]:
        raise InputError("no pairs but held-out ones", where=options.pairs)
    return theorem.noise_corollary(loss=loss, terms=terms, moment=moment, noisy=fitted.delta, clean=clean)
