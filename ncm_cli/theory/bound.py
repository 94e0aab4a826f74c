"""``ncm bound``: the theorem's bound on the test-domain risk of a probe, term by term.

For ``--ranks``, ``--pair-counts`` and an oracle, probes are fitted again on the problem that ``ncm fit``
recorded: its rows, pairs, scaling, weights, method and solver. At the probe's own rank the refit equals the
probe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Codes, Features, blocks
from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError, listing
from ncm_cli.options import check, values_of
from ncm_cli.probes.evaluate import scale_like, scaling_of
from ncm_cli.probes.metrics import decide
from ncm_cli.probes.options import PairPaths
from ncm_cli.probes.problem import Problem
from ncm_cli.probes.reading import reread_problem
from ncm_cli.probes.usable_pairs import read_pair_stores
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.solvers.projection import blas_threads
from ncm_cli.solvers.solve import train_path
from ncm_cli.solvers.training_set import Fit, TrainingSet
from ncm_cli.store.columns import number
from ncm_cli.store.digests import require_same_encoder
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import jsonable, write_result
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import read_probe, seen_rows
from ncm_cli.store.roles import Target, read_target, split_filter
from ncm_cli.theory import theorem
from ncm_cli.theory.options import BoundOptions, parse_grid


def bound(options: BoundOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Compute all terms of Theorem 1 and its corollaries for a saved probe; returns the body of the result.

    Raises
    ------
    InputError
        No labelled oracle pairs, oracle pairs the wrong way round, or no rows for Term I.
    MismatchError
        Files of different encoders, pairs that the probe wasn't fitted with, or clean pairs other than
        those of ``--pairs``.
    UsageError
        ``--ranks``, ``--pair-counts`` or ``--clean-pairs`` without ``--pairs``, or |I| above the dimension.
    """
    check(options)
    with FeatureStore(options.features) as features:
        judged = _Judged(options, features, reporter)
        with blas_threads(judged.test.size):
            body = judged.body()
    if options.output:
        write_result(options.output, "bound", body)
    return body


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A probe's terms, logits and losses on the oracle pairs and on the rows of Term I."""

    terms: theorem.Terms
    logits: tuple[Array, Array]
    """The logits of the test rows and of their twins, (n, C) each."""
    losses: tuple[Array, Array, Array | None]
    """The losses on the test rows, on their twins, and on the training rows if Term I is taken on them."""
    zero_one: dict[str, float] | None
    """None for regression."""

    @property
    def test_risk(self) -> float:
        return float(np.mean(self.losses[0]))


class _Judged:
    """A probe, the pairs and rows to measure it on, and refits; each part of the result is a method.

    ``test`` and ``twin`` (n, d) are the members of the oracle pairs, scaled as the probe says, with the
    ``answers`` (n,) that both share: class codes in the probe's order, or numbers.
    """

    def __init__(self, options: BoundOptions, features: FeatureStore, reporter: Reporter) -> None:
        self.options, self.features, self.reporter = options, features, reporter
        self.probe = probe = read_probe(options.probe)
        self._require_encoder(options.features, features.encoder)
        name = "logistic" if len(probe.weight) == 1 else "cross-entropy"
        self.loss = theorem.LOSSES["squared" if probe.task == "regression" else name]
        self.target = read_target(features, probe.target, probe.classes or None)
        self._read_oracle_pairs()
        self.problem = None if options.pairs is None else self._fitted_problem(options.pairs)

    def _require_encoder(self, path: Path, encoder: dict[str, Any]) -> None:
        require_same_encoder(str(self.options.probe), self.probe.meta["encoder"], str(path), encoder)

    def _read_oracle_pairs(self) -> None:
        """Read the oracle pairs, with targets by the test row's id, else as the pair store has them."""
        probe, reporter, unlabelled, disagreeing = self.probe, self.reporter, 0, 0
        self.oracle_paths = values_of(self.options.oracle_pairs)
        tests, twins, answers, total = [], [], [], 0
        self.test_ids: list[str] = []
        for path, store in zip(self.oracle_paths, read_pair_stores(self.oracle_paths), strict=True):
            self._require_encoder(path, store.encoder)
            self._require_test_rows_first(path, store)
            test, twin = self._answers(store.id_a, store.label_a), self._answers(store.id_b, store.label_b)
            known = test.known | twin.known
            if not known.any():
                raise InputError(
                    "no oracle pair has a label that the probe knows",
                    where=path,
                    found=f"ids such as {listing(store.id_a[:3])}",
                    expected=f"rows of {self.features.path} with a value of {probe.target!r}",
                )
            total, unlabelled = total + len(known), unlabelled + int((~known).sum())
            disagreeing += int((test.known & twin.known & (test.y != twin.y)).sum())
            tests.append(scale_like(probe, store.features_a[known]))
            twins.append(scale_like(probe, store.features_b[known]))
            answers.append(np.where(test.known, test.y, twin.y)[known])
            self.test_ids += [name for name, labelled in zip(store.id_a, known, strict=True) if labelled]
        if unlabelled:
            reporter.warn(f"{unlabelled:,} of {total:,} oracle pairs have no known label and are left out")
        if disagreeing:
            reporter.warn(
                f"{disagreeing:,} oracle pairs have members of different labels; the theorem takes them as "
                "equal, so the test row's label is used for both"
            )
        self.counts = {"disagreeing_pairs": disagreeing, "unlabelled_pairs": unlabelled}
        self.test, self.twin, self.answers = map(_together, (tests, twins, answers))
        self.oracle_kind = np.repeat(np.arange(len(answers)), [*map(len, answers)])

    def _require_test_rows_first(self, path: Path, store: PairStore) -> None:
        """Refuse pairs the wrong way round; warn of rows known to be trained on."""
        test = (self.probe.meta.get("data") or {}).get("test") or split_filter(self.features, "test")
        turned = 0 if test is None or self._among(test, store.id_a) else self._among(test, store.id_b)
        if turned:
            raise InputError(
                "oracle pairs the wrong way round",
                where=path,
                found=f"{turned:,} of {store.pairs:,} second members are rows of {test}, no first member is",
                expected="test rows as first members (a), their twins in a training domain as second (b)",
                fix="make the pairs again with the columns swapped: ncm pairs --a-col id_b --b-col id_a",
            )
        if seen := int(seen_rows(self.probe, "train", store.id_a).sum()):
            self.reporter.warn(
                f"{seen:,} of {store.pairs:,} oracle pairs have a first member that the probe was trained "
                "on, so the risk measured there isn't that of the test domain"
            )

    def _among(self, where: str, ids: Sequence[str]) -> int:
        """The number of ids among the rows of a filter; 0 if it was written for another store."""
        try:
            mask = self.features.mask(where)
        except NcmError:
            return 0
        positions = self.features.positions(ids)
        return int(mask[positions[positions >= 0]].sum())

    def _answers(self, ids: Sequence[str], labels: Sequence[str]) -> Target:
        """Targets by id in the store; for ids that it lacks, by the label in the pair store."""
        classes, target = self.probe.classes, self.target
        code = {name: index for index, name in enumerate(classes)}

        def stored(label: str) -> float:
            try:
                return code.get(label, -1) if classes else number(label)
            except ValueError:
                return float("nan")

        positions = self.features.positions(ids)
        absent = (positions < 0) | ~target.known[positions]
        kept = np.array([stored(label) for label in labels], dtype=target.y.dtype)
        return dataclasses.replace(target, y=np.where(absent, kept, target.y[positions]))

    def _fitted_problem(self, paths: PairPaths) -> Problem:
        """The problem that the probe was fitted on, read again."""
        method = self.probe.meta.get("method")
        if (self.options.ranks or self.options.pair_counts) and method != "ncm":
            raise MismatchError(
                "a probe that removes no directions can't be refitted at other ranks or numbers of pairs",
                found=f"method {method}",
                expected="method ncm: a probe of ncm fit --pairs P.h5 --method ncm",
            )
        return reread_problem(self.probe, self.options.features, paths, reporter=SILENT)

    def body(self) -> dict[str, Any]:
        """The whole result."""
        options, probe = self.options, self.probe
        differences = self.test - self.twin
        self.moment = theorem.second_moment(differences)
        dim, estimated = options.spurious_dim, options.spurious_dim is None
        if dim is None:
            dim = theorem.spurious_dimension(self.moment.values)
        if dim > self.features.dim:
            raise UsageError(
                "--spurious-dim is more than the features have dimensions",
                found=dim,
                expected=f"at most {self.features.dim}",
            )
        self.train = None if options.train is None else self._training_rows(options.train)
        probe_measured = self._measure(probe.weight, probe.bias, probe.basis, dim)
        terms, risk, train_loss = probe_measured.terms, probe_measured.test_risk, probe_measured.losses[2]
        intervals: dict[str, theorem.Interval] = {}
        if options.bootstrap:
            if probe_measured.zero_one:
                intervals |= theorem.share_intervals(*probe_measured.logits, self.answers)
            intervals |= theorem.intervals(
                loss=self.loss,
                terms=terms,
                weight=probe.weight,
                basis=probe.basis,
                moment=self.moment,
                differences=differences,
                losses=probe_measured.losses,
                replicates=options.bootstrap,
                seed=options.seed,
            )
        return {
            **dataclasses.asdict(terms),
            "noise_corollary": self._noise(terms),
            "test_risk": risk,
            "slack": terms.bound - risk,
            "holds": theorem.holds(risk, terms.bound),
            "exact": train_loss is None,
            "zero_one": probe_measured.zero_one,
            **self._by_store(probe_measured),
            "estimates": {
                "oracle_pairs": len(differences),
                "term_1_on": "twins" if train_loss is None else "training rows",
                "train_rows": None if train_loss is None else len(train_loss),
                "spurious_dim": "estimated" if estimated else "given",
                "tolerance": theorem.SPURIOUS_TOLERANCE if estimated else None,
                **self.counts,
                "eigenvalues": self.moment.values.tolist(),
            },
            "intervals": {name: list(interval) for name, interval in intervals.items()},
            "bootstrap": {
                "level": theorem.CONFIDENCE_LEVEL,
                "replicates": options.bootstrap,
                "seed": options.seed,
            },
            **self._paths(),
            "oracle": self._oracle(options.oracle_train, probe_measured) if options.oracle_train else None,
            "probe": {
                "path": str(options.probe),
                "sha256": probe.sha256,
                "method": probe.meta.get("method"),
                "rank": probe.basis.shape[1],
            },
            "options": jsonable(options),
        }

    def _training_rows(self, where: str) -> tuple[Features, NDArray]:
        """The labelled rows of ``--train``, scaled, and their targets."""
        chosen = self.features.mask(where)
        labelled = chosen & self.target.known
        rows, known, name = int(chosen.sum()), int(labelled.sum()), self.target.name
        if not known:
            found = f"{rows:,} rows, none of them with a known {name}"
            raise InputError("no rows for Term I", where=f"--train {where}", found=found)
        if known < rows:
            left_out = f"{rows - known:,} of {rows:,} rows of {where}"
            self.reporter.warn(f"{left_out} have no known {name} and are left out of Term I")
        return scale_like(self.probe, self.features.rows_of(labelled)), self.target.y[labelled]

    def _measure(self, weight: Array, bias: Array, basis: Array, spurious_dim: int = 0) -> Measured:
        """Measure weights (C, d) and a bias (C,); ``spurious_dim`` decides s (of `term_2_upper`)."""
        test, twin = (rows @ weight.T + bias for rows in (self.test, self.twin))
        test_loss, twin_loss = (self.loss.rows(logits, self.answers) for logits in (test, twin))
        train_loss = None
        if self.train is not None:
            rows, answers = self.train
            losses = [self.loss.rows(X @ weight.T + bias, answers[part]) for part, X in blocks(rows)]
            train_loss = np.concatenate(losses)
        terms = theorem.theorem(
            loss=self.loss,
            weight=weight,
            basis=basis,
            moment=self.moment,
            term_1=float(np.mean(twin_loss if train_loss is None else train_loss)),
            spurious_dim=spurious_dim,
        )
        errors = theorem.zero_one(test, twin, self.answers) if self.probe.classes else None
        return Measured(terms, (test, twin), (test_loss, twin_loss, train_loss), errors)

    def _by_store(self, measured: Measured) -> dict[str, list[dict[str, Any]]]:
        """The 0-1 terms on each of several oracle stores, and the flips of each of several fitted stores.

        Only for classifiers. The probe was fitted with the pairs of the fitted stores, so their flips are no
        estimate for other pairs.
        """
        by_store: dict[str, list[dict[str, Any]]] = {}
        if not self.probe.classes:
            return by_store
        if len(self.oracle_paths) > 1:
            by_store["oracle_stores"] = []
            for at, path in enumerate(self.oracle_paths):
                in_store = self.oracle_kind == at
                test, twin = (logits[in_store] for logits in measured.logits)
                known = theorem.zero_one(test, twin, self.answers[in_store])
                by_store["oracle_stores"].append({"path": str(path), "pairs": int(in_store.sum()), **known})
        pairs = self.problem.pairs if self.problem else None
        if pairs is not None and pairs.several is not None:
            by_store["pair_stores"] = []
            weight, bias = self.probe.weight, self.probe.bias
            a, b = (decide(scale_like(self.probe, rows) @ weight.T + bias) for rows in pairs.features)
            for at, path in enumerate(pairs.paths):
                in_store = pairs.usable & (pairs.kind == at)
                flips = float(np.mean(a[in_store] != b[in_store]))
                by_store["pair_stores"].append(
                    {"path": str(path), "pairs": int(in_store.sum()), "flip_rate": flips}
                )
        return by_store

    def _noise(self, terms: theorem.Terms) -> dict[str, Any]:
        """The noise corollary; clean pairs are matched with the fit's by their ids, store by store."""
        paths, pairs = values_of(self.options.clean_pairs), self.problem.pairs if self.problem else None
        if not paths or pairs is None:
            return theorem.no_noise_corollary("no clean pairs are given (--clean-pairs with --pairs)")
        # The fit's stores are in the order of the fit, clean ones in that of --pairs.
        clean_of = dict(zip(values_of(self.options.pairs), paths, strict=True))
        noisy, clean = [], []
        for at, (path, store) in enumerate(zip(pairs.paths, pairs.stores, strict=True)):
            used = np.flatnonzero(pairs.usable[pairs.kind == at])
            noisy.append(self._delta(store, used))
            clean.append(self._clean_delta(clean_of[path], store, used))
        return theorem.noise_corollary(
            loss=self.loss,
            terms=terms,
            moment=self.moment,
            noisy=_together(noisy, axis=1),
            clean=_together(clean, axis=1),
        )

    def _delta(self, store: PairStore, rows: Sequence[int] | Codes) -> Array:
        """(d, k) the scaled differences of some pairs of a store."""
        a, b = (scale_like(self.probe, members[rows]) for members in (store.features_a, store.features_b))
        return np.asarray((a - b).T)

    def _clean_delta(self, path: Path, noisy: PairStore, used: Codes) -> Array:
        """(d, k) the differences of the clean pairs with the ids of some noisy ones."""
        clean = read_pairs(path)
        self._require_encoder(path, clean.encoder)
        position: dict[tuple[str, str], int] = {}
        for row, ids in enumerate(zip(clean.id_a, clean.id_b, strict=True)):
            position.setdefault(ids, row)
        wanted = [(noisy.id_a[row], noisy.id_b[row]) for row in used]
        if missing := [ids for ids in wanted if ids not in position]:
            raise MismatchError(
                "the clean pairs lack the ids of some noisy pairs",
                where=path,
                found=f"no clean pair {missing[0]}; {len(missing) - 1:,} others are missing, too",
                expected="the same ids in --pairs and --clean-pairs",
            )
        return self._delta(clean, [position[ids] for ids in wanted])

    def _refit(
        self,
        problem: Problem,
        training: TrainingSet,
        ranks: Sequence[int],
        advance: Callable[[int], None] | None = None,
    ) -> list[dict[str, Any]]:
        """The rows of refits at these ranks, by the probe's method (ERM if the problem has no pairs)."""
        meta = self.probe.meta
        fits = train_path(
            training,
            dataclasses.replace(problem.options.solving, name=meta["options"]["solver"]),
            ranks=ranks,
            decays=[float(meta["hyper_parameters"]["weight_decay"])],
            advance=advance,
        )
        return [self._row(fit, training) for fit in fits]

    def _paths(self) -> dict[str, Any]:
        """``path`` along ranks, its ``summary``, and ``pair_counts``; empty where it isn't asked for."""
        path: list[dict[str, Any]] = []
        counts: list[dict[str, Any]] = []
        options, problem = self.options, self.problem
        if problem is not None and problem.pairs is not None:
            usable, scaling = problem.pairs.usable, scaling_of(self.probe)
            if options.ranks:
                training = problem.training_set(problem.rows(), usable, scaling)
                why = f"ranks above {training.rank} are skipped: the pairs' differences have that rank"
                ranks = self._possible(options.ranks, training.rank, why)
                with self.reporter.task("ranks", len(ranks), "ranks") as task:
                    path = self._refit(problem, training, ranks, task.advance) if ranks else []
            if options.pair_counts:
                most = int(usable.sum())
                why = f"counts above {most} are skipped: there are only {most} pairs"
                possible = self._possible(options.pair_counts, most, why)
                with self.reporter.task("pair counts", len(possible), "fits") as task:
                    for count in possible:
                        training = problem.training_set(problem.rows(), problem.pairs.first(count), scaling)
                        counts += self._refit(problem, training, [min(count, self.probe.rank, training.rank)])
                        task.advance()
        return {"path": path, "summary": _summary(path), "pair_counts": counts}

    def _possible(self, asked: str, most: int, why: str) -> list[int]:
        """The numbers of a grid that are at most ``most``; a note tells why others are skipped."""
        grid = parse_grid(asked)
        if max(grid) > most:
            self.reporter.note(why)
        return [number for number in grid if number <= most]

    def _row(self, fit: Fit, training: TrainingSet) -> dict[str, Any]:
        """The bound and the measurements of one refit."""
        measured = self._measure(fit.weight, fit.bias, training.basis(fit.rank))
        terms, errors = measured.terms, measured.zero_one or {}
        return {
            "rank": fit.rank,
            "pairs": training.pairs,
            "converged": fit.converged,
            **{name: getattr(terms, name) for name in ("term_1", "theta_m_theta", "term_2", "bound")},
            "test_risk": measured.test_risk,
            **{name: errors.get(name) for name in ("twin_error", "flip_rate", "test_error")},
            "zero_one_bound": errors.get("bound"),
        }

    def _oracle(self, where: str, probe_measured: Measured) -> dict[str, Any]:
        """The test risk of a probe trained on other rows of the test domain, with nothing removed."""
        positions = self.features.positions(self.test_ids)
        test_rows = positions[positions >= 0]
        shared = test_rows[self.features.mask(where)[test_rows]]
        if len(shared):
            raise InputError(
                "the oracle would be trained on the rows it is measured on",
                where=f"--oracle-train {where}",
                found=f"{len(shared):,} of the oracle pairs' test rows, such as "
                f"{self.features.ids[shared[0]]!r}",
                expected="other rows of the test domain",
            )
        problem = reread_problem(self.probe, self.options.features, None, where=where, reporter=self.reporter)
        training = problem.training_set(problem.rows(), None, scaling_of(self.probe))
        row = self._refit(problem, training, [0])[0]
        error = row["test_error"]
        # The oracle's test accuracy minus that of the bounded probe.
        gap = probe_measured.zero_one["test_error"] - error if probe_measured.zero_one else None
        facts = {"where": where, "train_rows": len(training.X), "test_risk": row["test_risk"]}
        return {**facts, "test_error": error, "gap": gap}


def _together(parts: Sequence[Array], axis: int = 0) -> Array:
    """Several arrays joined; a single one as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | int | None] | None:
    """A summary of a rank path; None without classes or ranks.

    ``bound_rank`` is the rank with the least 0-1 bound. ``in_domain_rise`` is the largest increase of the
    in-domain accuracy (on the twins) from one rank to a larger one.
    """
    if not rows or rows[0]["test_error"] is None:
        return None
    test, in_domain = (1 - np.array([row[name] for row in rows]) for name in ("test_error", "twin_error"))
    best, least = int(test.argmax()), int(np.argmin([row["zero_one_bound"] for row in rows]))
    erm = rows[0]["rank"] == 0
    return {
        "erm_test_accuracy": float(test[0]) if erm else None,
        "erm_in_domain_accuracy": float(in_domain[0]) if erm else None,
        "best_rank": rows[best]["rank"],
        "best_test_accuracy": float(test[best]),
        "bound_rank": rows[least]["rank"],
        "bound_test_accuracy": float(test[least]),
        "bound_regret": float(test[best] - test[least]),
        "in_domain_drop": float(in_domain[0] - in_domain[-1]),
        "in_domain_rise": float(np.max(in_domain - np.minimum.accumulate(in_domain))),
    }
