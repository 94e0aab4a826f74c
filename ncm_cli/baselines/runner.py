"""Trains and measures the configurations of ``ncm sweep``, on all rows and on the folds of the pairs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.baselines.choice import metric_names
from ncm_cli.baselines.options import SweepOptions
from ncm_cli.baselines.rare_cells import warn_of_rare_cells
from ncm_cli.blocks import Array, Codes, Mask, chosen
from ncm_cli.errors import InputError
from ncm_cli.probes import metrics
from ncm_cli.probes.choose import untrained_rows
from ncm_cli.probes.metrics import PairRows, Rows, joint
from ncm_cli.probes.problem import Problem, Variant
from ncm_cli.probes.reading import read_method_problem
from ncm_cli.probes.record import flags_of, origin_of, probe_of
from ncm_cli.probes.selection import cell_bound_facts, facts, pair_facts, stacked, store_metric
from ncm_cli.progress import Reporter
from ncm_cli.solvers.folds import Fold
from ncm_cli.solvers.methods import METHODS, Config
from ncm_cli.solvers.projection import Scaling
from ncm_cli.solvers.training_set import Fit, TrainingSet
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.files import jsonable
from ncm_cli.store.probe import Probe, record_ids

Facts = Mapping[str, Array]
"""Metrics of R probes, (R,) by name."""
Judge = Callable[[Array, Array], Facts]
"""Computes metrics of R probes from weights (R, C, d) and biases (R, C)."""
Advance = Callable[[int], None]
"""Called with the number of configurations × epochs just finished."""

FOLD_SUMS = ("error", "log_loss", "flips", "shift")
"""The measurements on a fold: means over the validation rows, sums over the fold's pairs."""


class _CellSums:
    """Errors and log losses in each label × domain cell, summed fold by fold.

    The rows are each fold's members of pairs that it isn't trained on and, as means over the folds, the
    validation rows.
    """

    def __init__(self, problem: Problem, folds: Sequence[Fold]) -> None:
        self.share, self.codes = 1 / max(len(folds), 1), np.zeros(0, np.int64)
        self.val, sizes = np.zeros(0, np.int64), self.codes
        if problem.cells and problem.members is not None and problem.val is not None:
            self.val = problem.val.codes["cell"]
            untrained = np.isin(
                problem.members.node, np.concatenate([fold.untrained_nodes for fold in folds])
            )
            cells = np.concatenate([problem.members.codes["cell"][untrained], self.val[self.val >= 0]])
            self.codes, sizes = np.unique(cells, return_counts=True)
        self.sizes = sizes
        self.names = tuple(f"{what} {code}" for what in ("error", "loss") for code in self.codes)

    def of(
        self, errors: Array, losses: Array, member_errors: Array, member_losses: Array, members: Rows
    ) -> dict[str, Array]:
        """Sums (R,) by name, from errors and losses on validation rows (R, n) and a fold's members (R, q)."""
        assert members.group is not None
        by_val, by_member = (
            (cell[:, None] == self.codes).astype(np.float64) for cell in (self.val, members.group[:, 0])
        )
        sums = [
            self.share * of_rows @ by_val + of_members @ by_member
            for of_rows, of_members in ((errors, member_errors), (losses, member_losses))
        ]
        return dict(zip(self.names, np.concatenate(sums, axis=1).T, strict=True))

    def facts(self, sums: Facts) -> dict[str, Array]:
        """Means over the cells of each cell's mean; empty without cells."""
        if not len(self.codes):
            return {}
        means_of_cells: dict[str, Array] = {}
        for what, name in (("error", "cell_error"), ("loss", "cell_log_loss")):
            means = [sums[f"{what} {code}"] / n for code, n in zip(self.codes, self.sizes, strict=True)]
            means_of_cells[name] = np.mean(means, axis=0)
        return means_of_cells


class Runner:
    """Trains and measures configurations, on one problem and on the training parts of its folds.

    Raises
    ------
    InputError
        Rows, columns or pairs that can't be used; no validation rows, or rows with two roles.
    """

    def __init__(self, options: SweepOptions, reporter: Reporter) -> None:
        from ncm_cli.solvers.device import choose_device

        self.options = options
        columns = ("envs", "erase", "dro_groups")
        self.problem = read_method_problem(options, columns, reporter, features=options.features)
        self.whole = self.problem.whole()
        self.folds: dict[int, list[Fold]] = {}
        """The folds of each seed; empty without pairs, or if the bound isn't asked for."""
        ranks = [self.whole.rank]
        if self.problem.pairs is not None and options.folds:
            try:
                for seed in range(options.seed, options.seed + options.seeds):
                    self.folds[seed] = self.problem.pairs.folds(options.folds, seed)
                    ranks += [self.problem.without(fold).rank for fold in self.folds[seed]]
            except InputError as error:
                error.fix = "more pairs, or pairs of rows that are not trained on; or --folds 0: no bound"
                raise
        self.rank = min(ranks)
        """The largest rank that every fold's pairs have; 0 without pairs."""
        groups, pairs = self.problem.groups, self.problem.pairs
        crossings = 0 if groups is None else len(groups.crossings)
        self.metrics = metric_names(crossings, 1 if pairs is None else len(pairs.stores))
        self.device = choose_device(options.device, "fp64", reporter)
        warn_of_rare_cells(options, self.whole, self.problem.target.classes, reporter)
        self._origins: dict[bool, dict[str, Any]] = {}
        """The record of the rows, by whether they are up-weighted; kept because making it reads every row."""

    @property
    def steps(self) -> int:
        """The number of steps of training on all rows; on folds, which have fewer rows, it may be smaller."""
        rows, size, envs = len(self.whole.X), self.options.batch_size, self.whole.codes.get("envs")
        if self.options.protocol == "domainbed" and envs is not None:
            size *= len(np.unique(envs))
        return self.options.epochs * (math.ceil(rows / size) if size else 1)

    def data(self) -> dict[str, Any]:
        """The record of the rows and pairs that the result was made from."""
        options, problem, where = self.options, self.problem, self.problem.roles.where
        return {
            "features": str(options.features),
            "content_sha256": problem.content_sha256,
            "fingerprint": fingerprint(problem.encoder),
            "target": problem.target.name,
            "train": where["train"],
            "val": where["val"],
            "test": None if problem.test is None else where["test"],
            "train_rows": len(self.whole.X),
            "val_rows": 0 if problem.val is None else len(problem.val.ids),
            "test_rows": 0 if problem.test is None else len(problem.test.ids),
            "pairs": None if options.pairs is None else jsonable(options.pairs),
            "pairs_used": self.whole.pairs,
            "pairs_held_out": 0 if problem.pairs is None else int(problem.pairs.held_out.sum()),
            "numerical_rank": self.rank,
        }

    def run(self, configs: Sequence[Config], advance: Advance) -> dict[str, NDArray[Any]]:
        """Train configurations of one seed and one family.

        Returns
        -------
        dict
            (R, epochs) for each of `metric_names`; ``diverged`` (R,): a weight became
            NaN or infinite; ``unconverged`` (R,): an exact fit stopped short of its tolerance (dfr).
        """
        seed = configs[0].seed
        folds = self.folds.get(seed, [])
        if configs[0].method == "dfr":
            history, converged = self._judge_dfr(configs)
            advance(len(configs) * self.options.epochs * (1 + len(folds)))
            return history | {"diverged": np.zeros_like(converged), "unconverged": ~converged}
        rows = {name: self._rows(name, self.whole.scaling) for name in ("val", "test")}
        # If no fold leaves out a training row, a method without pairs has the same fit on every fold.
        taken = any(np.isin(self.problem.train.node, fold.untrained_nodes).any() for fold in folds)
        taken |= bool(folds and self.problem.cells)  # the cells' error is measured fold by fold
        pairs, kind = (None, None) if taken else self._measured(seed)

        def judge(weight: Array, bias: Array) -> Facts:
            return facts(weight, bias, val=rows["val"], test=rows["test"], pairs=pairs, kind=kind)

        history, diverged = self._judge(self.whole, configs, judge, self.metrics, advance)
        on_folds = [
            i
            for i, config in enumerate(configs)
            if pairs is None or ("pairs" in METHODS[config.method].needs and config.hyper.get("rank") != 0)
        ]
        if folds and on_folds:
            fold_metrics, fold_diverged = self._judge_folds(folds, [configs[i] for i in on_folds], advance)
            for name, values in fold_metrics.items():
                history[name][on_folds] = values
            diverged[on_folds] |= fold_diverged
        advance((len(configs) - len(on_folds)) * self.options.epochs * len(folds))
        return history | {"diverged": diverged, "unconverged": np.zeros_like(diverged)}

    def _rows(self, name: str, scaling: Scaling) -> Rows | None:
        """The ``val`` or ``test`` rows, scaled; None if the sweep has none."""
        rows = getattr(self.problem, name)
        return None if rows is None else rows.scaled(scaling)

    def _measured(self, seed: int) -> tuple[PairRows | None, Codes | None]:
        """The measured pairs of all folds of a seed, scaled as the rows of the whole problem are, and, for
        several stores, the store of each pair; None without folds."""
        if seed not in self.folds:
            return None, None
        paired = self.problem.pairs
        assert paired is not None
        which = np.any([fold.measured for fold in self.folds[seed]], axis=0)
        kind = None if paired.several is None else paired.kind[which]
        return paired.members(which, self.whole.scaling), kind

    def _judge_folds(
        self, folds: Sequence[Fold], configs: Sequence[Config], advance: Advance
    ) -> tuple[dict[str, Array], Mask]:
        """Metrics (R, epochs) of configurations trained on each fold's training part, and diverged (R,)."""
        paired = self.problem.pairs
        assert paired is not None
        cells = _CellSums(self.problem, folds)
        stores = range(len(paired.stores) if paired.several is not None else 0)
        of_stores = [(store_metric("flips", at), store_metric("shift", at)) for at in stores]
        names = (*FOLD_SUMS, *itertools.chain(*of_stores), *cells.names)
        totals = {name: np.zeros((len(configs), self.options.epochs)) for name in names}
        diverged = np.zeros(len(configs), dtype=bool)
        for fold in folds:
            training = self.problem.without(fold)
            val, pairs = self._rows("val", training.scaling), paired.members(fold.measured, training.scaling)
            members, _ = untrained_rows(self.problem, fold, training)
            kind = paired.kind[fold.measured]

            def judge(
                weight: Array,
                bias: Array,
                val: Any = val,
                pairs: PairRows = pairs,
                members: Rows | None = members,
                kind: Codes = kind,
            ) -> Facts:
                errors, losses = metrics.row_errors(weight, bias, val)
                changes, shifts = metrics.pair_shifts(weight, bias, pairs, regression=False)
                means = (errors.mean(axis=1) / len(folds), losses.mean(axis=1) / len(folds))
                sums = dict(zip(FOLD_SUMS, (*means, changes.sum(axis=1), shifts.sum(axis=1)), strict=True))
                for at, (flips, shift) in zip(stores, of_stores, strict=True):
                    sums[flips] = changes[:, kind == at].sum(axis=1)
                    sums[shift] = shifts[:, kind == at].sum(axis=1)
                if members is None:
                    return sums
                return sums | cells.of(errors, losses, *metrics.row_errors(weight, bias, members), members)

            sums, fold_diverged = self._judge(training, configs, judge, names, advance)
            totals = {name: totals[name] + sums[name] for name in names}
            diverged |= fold_diverged
        measured = sum(int(fold.measured.sum()) for fold in folds)
        error, loss, flips, shift = (totals[name] for name in FOLD_SUMS)
        counts = np.bincount(paired.measured_kinds(folds), minlength=len(paired.stores))
        by_store = [(totals[a] / counts[at], totals[b] / counts[at]) for at, (a, b) in enumerate(of_stores)]
        made = pair_facts(error, loss, flips / measured, shift / measured, self.whole.logits, by_store)
        made |= cells.facts(totals)
        if "cell_error" in made:
            changes = [change for change, _ in by_store]
            made |= cell_bound_facts(made["cell_error"], changes, self.problem.matched)
        return made, diverged

    def _judge(
        self,
        training: TrainingSet,
        configs: Sequence[Config],
        judge: Judge,
        names: Sequence[str],
        advance: Advance,
    ) -> tuple[dict[str, NDArray[Any]], Mask]:
        """Train on a training set and measure after every epoch: (R, epochs) by name, and diverged (R,)."""
        history = {name: np.full((len(configs), self.options.epochs), np.nan) for name in names}
        diverged = np.zeros(len(configs), dtype=bool)

        def observe(epoch: int, indices: list[int], weight: Array, bias: Array) -> None:
            finite = np.isfinite(weight).all(axis=(1, 2)) & np.isfinite(bias).all(axis=1)
            not_finite = np.asarray(~finite)
            judged = judge(
                np.where(not_finite[:, None, None], 0.0, weight), np.where(not_finite[:, None], 0.0, bias)
            )
            for name, values in judged.items():
                history[name][indices, epoch - 1] = np.where(not_finite, np.nan, values)
            diverged[indices] = not_finite

        self._train(training, configs, self.options.epochs, observe, advance)
        return history, diverged

    def _train(
        self, training: TrainingSet, configs: Sequence[Config], epochs: int, observe: Any, advance: Advance
    ) -> None:
        """Train on a training set, passing on the weights (for features as given) after every epoch."""
        from ncm_cli.solvers.trainer import Schedule, train

        observer = observe
        if configs[0].method == "leace":
            from ncm_cli.solvers.leace import fit_eraser

            eraser = fit_eraser(training.X, training.codes["erase"])
            training = dataclasses.replace(training, X=eraser.apply(training.X))

            def observer(epoch: int, indices: list[int], weight: Array, bias: Array) -> None:
                observe(epoch, indices, *eraser.fold(weight, bias))

        train(
            # The rank is at most the rank of this training set's pairs.
            [dataclasses.replace(config, rank=min(config.rank, training.rank)) for config in configs],
            training,
            Schedule(
                epochs=self.options.epochs,
                batch_size=self.options.batch_size,
                protocol=self.options.protocol,  # type: ignore[arg-type]
                last=epochs,
            ),
            device=self.device,
            observe=observer,
            advance=advance,
        )

    def _judge_dfr(self, configs: Sequence[Config]) -> tuple[dict[str, NDArray[Any]], Mask]:
        """Fit dfr on half of the validation rows and measure on the other half; fit all rows for the test
        rows.

        No row of a pair is trained on, so flips are measured on the pairs of all folds at once.
        """
        from ncm_cli.solvers.dfr import halves

        val, codes = self._grouped()
        first, second = halves(codes, configs[0].seed)
        half = Rows(X=val.X[second], y=val.y[second], group=val.group[second])  # type: ignore[index]
        fits = self._dfr(configs, first)
        pairs, kind = self._measured(configs[0].seed)
        judged = facts(*stacked(fits), val=half, pairs=pairs, kind=kind)
        if test := self._rows("test", self.whole.scaling):
            final = self._dfr(configs)
            judged |= facts(*stacked(final), test=test)
            fits = [*fits, *final]
        history = {name: np.full((len(configs), self.options.epochs), np.nan) for name in self.metrics}
        for name, values in judged.items():
            history[name][:, 0] = values
        converged = np.array([fit.converged for fit in fits]).reshape(-1, len(configs))
        return history, np.asarray(converged.all(axis=0))

    def _dfr(self, configs: Sequence[Config], half: Codes | None = None) -> list[Fit]:
        """The probes for the test rows or, with ``half``, those fitted on that half to choose C."""
        from ncm_cli.solvers.dfr import SUBSETS, fit_dfr

        val, codes = self._grouped()
        rows = np.arange(len(codes)) if half is None else half
        settings: dict[str, Any] = (
            {"subsets": SUBSETS, "scale_by": self.whole.X} if half is None else {"subsets": 1}
        )
        Cs, seed = [config.C for config in configs], configs[0].seed
        n_classes = len(self.problem.target.classes)
        return fit_dfr(val.X[rows], val.y[rows], codes[rows], n_classes, Cs, seed=seed, **settings)

    def _grouped(self) -> tuple[Rows, Codes]:
        """The validation rows that are in a group, and the codes of their groups."""
        val = self._rows("val", self.whole.scaling)
        assert val is not None and val.group is not None
        codes = joint(val.group)
        known = codes >= 0
        return Rows(X=chosen(val.X, known), y=val.y[known], group=val.group[known]), codes[known]

    def probes(
        self, configs: Sequence[Config], wanted: Sequence[tuple[int, int | None]]
    ) -> dict[tuple[int, int | None], Fit]:
        """Some of the probes that `run` measured, by position and epoch, trained again with identical bits.

        The whole chunk is trained, since the last bits depend on the width of a matrix product.
        """
        if configs[0].method == "dfr":
            fits = self._dfr([configs[i] for i, _ in wanted])
            return dict(zip(wanted, fits, strict=True))
        trained: dict[tuple[int, int | None], Fit] = {}

        def observe(epoch: int, indices: list[int], weight: Array, bias: Array) -> None:
            for row, i in enumerate(indices):
                if (i, epoch) in wanted:
                    rank, decay = int(configs[i].rank), configs[i].weight_decay
                    trained[i, epoch] = Fit(rank, decay, weight[row], bias[row], iterations=epoch)

        last = max(epoch for _, epoch in wanted if epoch is not None)
        self._train(self.whole, configs, last, observe, lambda done: None)
        return trained

    def probe(self, config: Config, fit: Fit, selection: dict[str, Any]) -> Probe:
        """The probe of a pick with its record, as ``ncm fit`` writes them."""
        options, problem = self.options, self.problem
        upweight = options.upweight if config.upweighted else None
        if config.upweighted not in self._origins:
            self._origins[config.upweighted] = origin_of(problem, self.whole, Variant(config.upweighted))
        where, dfr = problem.roles.where, config.method == "dfr"
        shared: dict[str, Any] = {"upweight": upweight, "seed": config.seed}
        resolved = {"method": config.method, **shared} | {
            "train": where["train"],
            "val": where["val"],
            "target": problem.target.name,
        }
        hyper: dict[str, Any] = config.hyper | {"solver": "liblinear" if dfr else "adam", **shared}
        if not dfr:
            hyper |= {
                "epochs": fit.iterations,
                "batch_size": options.batch_size,
                "protocol": options.protocol,
            }
        if config.method in ("erm", "ncm") and options.protocol != "domainbed":
            # The options that ncm fit would have, so that ncm bound can fit the probe again.
            numbers = {"weight_decay": repr(config.weight_decay), "rank": str(fit.rank), "lr": config.lr}
            resolved |= {"solver": "adam", "epochs": fit.iterations, **numbers}
        record = {
            "method": config.method,
            "hyper_parameters": hyper,
            "selection": selection,
            "flags": flags_of(problem, selection["oracle"]),
            "envs": options.envs,
            "options": jsonable(options) | resolved,
        }
        origin = self._origins[config.upweighted]
        if dfr and problem.val is not None:
            # Trained on the validation rows, on the scale of the training rows.
            train_ids = record_ids(problem.train.ids.joined(problem.val.ids))
            origin = origin | {"rows": origin["rows"] | {"train": train_ids}}
        return probe_of(problem, self.whole, fit, record, origin)
