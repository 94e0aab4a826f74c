"""What a sweep learns from and judges by, made from its options.

Trains and judges one chunk of a sweep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.baselines.choice import METRICS
from ncm_cli.baselines.options import HYPER, METHODS, SweepOptions
from ncm_cli.baselines.plan import Cell
from ncm_cli.errors import InputError
from ncm_cli.probes import metrics
from ncm_cli.probes.apply import Scaling
from ncm_cli.probes.metrics import PairRows, Rows
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.problem import Part, Problem, read_problem, train_data
from ncm_cli.probes.selection import Fold, bound_of, log_loss_bound, worst_group_error
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import joint


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Everything that training and judging need."""

    problem: Problem
    whole: Part
    """All rows and pairs."""
    folds: dict[int, list[Fold]]
    """Of each seed; empty without pairs, or where the bound isn't asked for."""
    rank: int
    """The largest rank that every fold's pairs have, 0 without."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.problem.target.classes

    @property
    def logits(self) -> int:
        """C: one logit for two classes."""
        return 1 if len(self.classes) == 2 else len(self.classes)

    def rows(self, name: str, scaling: Scaling) -> Rows | None:
        """The ``val`` or ``test`` rows, scaled; None where the sweep has none."""
        found = getattr(self.problem, name)
        return None if found is None else found.scaled(scaling)

    def measured(self, seed: int) -> PairRows | None:
        """The pairs of all folds of a seed, scaled as all rows are; None without folds."""
        if seed not in self.folds:
            return None
        assert self.problem.pairs is not None
        which = np.any([fold.measured for fold in self.folds[seed]], axis=0)
        return self.problem.pairs.members(which, self.whole.scaling)

    def takes_rows(self, seed: int) -> bool:
        """Whether a fold of a seed takes rows away from training."""
        train = self.problem.train.node
        return any(bool(np.isin(train, fold.apart).any()) for fold in self.folds.get(seed, ()))


def read_ready(options: SweepOptions, reporter: Reporter) -> Ready:
    """Read and check everything the sweep names.

    Raises
    ------
    InputError
        Rows, columns or pairs that can't be used; no validation rows, or rows with two parts to play.
    """
    problem = read_problem(
        _as_fit(options),
        oracle=options.test is not None,
        reporter=reporter,
        columns={name: getattr(options, name) for name in ("envs", "erase", "dro_groups")},
    )
    if problem.val is None:
        raise InputError(
            "no validation rows: nothing to choose by",
            where=options.features,
            fix="--val W: any filter that shares no row with --train and --test",
        )
    whole = problem.whole()
    folds: dict[int, list[Fold]] = {}
    ranks = [whole.rank]
    if problem.pairs is not None and options.folds:
        seeds = range(options.seed, options.seed + options.seeds)
        try:
            folds = {seed: problem.folds(options.folds, seed) for seed in seeds}
            ranks += [problem.without(fold).rank for dealt in folds.values() for fold in dealt]
        except InputError as error:
            error.fix = "more pairs, or pairs of rows that are not trained on; or --folds 0: no bound"
            raise
    return Ready(problem=problem, whole=whole, folds=folds, rank=min(ranks))


def _as_fit(options: SweepOptions) -> FitOptions:
    """The options that a sweep shares with a fit: they mean the same rows, pairs and scaling."""
    shared = {field.name for field in dataclasses.fields(FitOptions)} & {
        "features",
        "pairs",
        "output",
        "train",
        "val",
        "test",
        "target",
        "groups",
        "upweight",
        "overlap",
        "scaling",
        "scale_factor",
    }
    return FitOptions(**{name: getattr(options, name) for name in shared})


if TYPE_CHECKING:
    from ncm_cli.baselines.trainer import Snapshot, Trained

Array = NDArray[np.float64]
Facts = Mapping[str, Array]
"""Of R probes, (R,) by name."""

Advance = Callable[[int], None]

FOLD = ("error", "log_loss", "flips", "shift")
"""What is kept of a fold: means over the validation rows, sums over the fold's pairs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What became of some cells."""

    history: Array
    """(cells, checkpoints, metrics), columns as in `ncm_cli.baselines.picks.METRICS`."""
    diverged: NDArray[np.bool_]
    """(cells,): a weight became NaN or infinite."""
    unconverged: NDArray[np.bool_]
    """(cells,): an exact fit stopped short of its tolerance (dfr)."""


def checkpoints(options: SweepOptions) -> NDArray[np.int64]:
    """The epochs after which configurations are judged; the last is among them."""
    every = list(range(options.evaluate_every, options.epochs + 1, options.evaluate_every))
    if not every or every[-1] != options.epochs:
        every.append(options.epochs)
    return np.asarray(every, np.int64)


class Runner:
    """Runs chunks; keeps what they share."""

    def __init__(self, ready: Ready, options: SweepOptions, device: str) -> None:
        self._ready, self._options, self._device = ready, options, device
        self._epochs = checkpoints(options)

    def run(self, cells: Sequence[Cell], advance: Advance) -> Chunk:
        """Train the cells, all of one seed and one family; ``advance`` counts configurations × epochs."""
        if cells[0].method == "dfr":
            return self._dfr(cells, advance)
        ready, seed = self._ready, cells[0].seed
        folds = ready.folds.get(seed, ())
        rows = {name: ready.rows(name, ready.whole.scaling) for name in ("val", "test")}
        # Where no fold takes a training row away, what uses no pairs is on every fold what it is on all rows.
        pairs = None if ready.takes_rows(seed) else ready.measured(seed)

        def judge(weight: Array, bias: Array) -> Facts:
            return facts(weight, bias, **rows, pairs=pairs)

        history, diverged = self._train(ready.whole, cells, judge, METRICS, advance)
        again = [i for i, cell in enumerate(cells) if pairs is None or _uses_pairs(cell)]
        if folds and again:
            bound, lost = self._folds(folds, [cells[i] for i in again], advance)
            for name, values in bound.items():
                history[again, :, METRICS.index(name)] = values
            diverged[again] |= lost
        advance((len(cells) - len(again)) * self._options.epochs * len(folds))
        return Chunk(history=history, diverged=diverged, unconverged=np.zeros_like(diverged))

    def _folds(
        self, folds: Sequence[Fold], cells: Sequence[Cell], advance: Advance
    ) -> tuple[dict[str, Array], NDArray[np.bool_]]:
        """What folds say of cells trained on what they leave, (cells, checkpoints), and diverged (cells,)."""
        problem = self._ready.problem
        seen = np.zeros((len(cells), len(self._epochs), len(FOLD)))
        diverged = np.zeros(len(cells), dtype=bool)
        for fold in folds:
            part = problem.without(fold)
            val, pairs = self._ready.rows("val", part.scaling), problem.measured(fold, part.scaling)
            assert val is not None

            def judge(weight: Array, bias: Array, val: Rows = val, pairs: PairRows = pairs) -> Facts:
                errors, losses = metrics.row_errors(weight, bias, val)
                changes, shifts = metrics.pair_shifts(weight, bias, pairs, regression=False)
                means = (errors.mean(axis=1) / len(folds), losses.mean(axis=1) / len(folds))
                return dict(zip(FOLD, (*means, changes.sum(axis=1), shifts.sum(axis=1)), strict=True))

            found, lost = self._train(part, cells, judge, FOLD, advance)
            seen += found
            diverged |= lost
        measured = sum(int(fold.measured.sum()) for fold in folds)
        error, loss, flips, shift = np.moveaxis(seen, 2, 0)
        return bound_facts(error, loss, flips / measured, shift / measured, self._ready.logits), diverged

    def _train(
        self,
        part: Part,
        cells: Sequence[Cell],
        judge: Callable[[Array, Array], Facts],
        names: Sequence[str],
        advance: Advance,
    ) -> tuple[Array, NDArray[np.bool_]]:
        """Train on a part, judge at every checkpoint: (cells, checkpoints, names) and diverged (cells,)."""
        from ncm_cli.baselines.config import Config, Schedule
        from ncm_cli.baselines.trainer import train

        options = self._options
        history = np.full((len(cells), len(self._epochs), len(names)), np.nan)
        data, eraser = train_data(part), None
        if cells[0].method == "leace":
            from ncm_cli.baselines.leace import fit_eraser

            eraser = fit_eraser(part.X, part.codes["erase"])
            data = dataclasses.replace(data, features=eraser.apply(data.features))

        def observe(snapshot: Snapshot) -> None:
            weight, bias = (values.cpu().numpy() for values in (snapshot.weight, snapshot.bias))
            if eraser is not None:
                weight, bias = eraser.fold(weight, bias)
            lost = snapshot.diverged.cpu().numpy()
            judged = judge(np.where(lost[:, None, None], 0.0, weight), np.where(lost[:, None], 0.0, bias))
            at = int(np.searchsorted(self._epochs, snapshot.epoch))
            for name, values in judged.items():
                history[snapshot.indices, at, names.index(name)] = np.where(lost, np.nan, values)

        trained: list[Trained] = train(
            [
                Config(
                    method=cell.method,
                    seed=cell.seed,
                    upweighted=cell.upweighted,
                    **_typed(cell.hyper, part.rank),
                )
                for cell in cells
            ],
            data,
            Schedule(
                epochs=options.epochs,
                batch_size=options.batch_size,
                optimizer=options.optimizer,  # type: ignore[arg-type]
                momentum=options.momentum,
                protocol=options.protocol,  # type: ignore[arg-type]
            ),
            device=self._device,
            observe=observe,
            observe_every=options.evaluate_every,
            advance=advance,
        )
        return history, np.array([one.diverged for one in trained])

    def _dfr(self, cells: Sequence[Cell], advance: Advance) -> Chunk:
        """Fit half of the validation rows and judge on the other half; fit all for the test rows.

        It trains on no row of a pair, so that flips are measured on all folds' pairs at once.
        """
        from ncm_cli.baselines.dfr import SUBSETS, fit_dfr, halves

        ready, seed = self._ready, cells[0].seed
        val, test = (ready.rows(name, ready.whole.scaling) for name in ("val", "test"))
        assert val is not None and val.group is not None
        codes = joint(val.group)
        grouped = np.flatnonzero(codes >= 0)
        X, y, group = val.X[grouped], val.y[grouped], codes[grouped]
        fit_rows, judged_rows = halves(group, seed)
        half = Rows(X=X[judged_rows], y=y[judged_rows], group=val.group[grouped][judged_rows])
        history = np.full((len(cells), len(self._epochs), len(METRICS)), np.nan)
        unconverged = np.zeros(len(cells), dtype=bool)

        def fit(rows: NDArray[np.int64], subsets: int, scale_by: Array | None, **judged: Any) -> None:
            nonlocal unconverged
            strengths = [cell.hyper["C"] for cell in cells]
            found = fit_dfr(
                X[rows],
                y[rows],
                group[rows],
                len(ready.classes),
                strengths,
                seed=seed,
                subsets=subsets,
                scale_by=scale_by,
            )
            unconverged |= np.array([not one.converged for one in found])
            weight, bias = np.stack([one.weight for one in found]), np.stack([one.bias for one in found])
            for name, values in facts(weight, bias, **judged).items():
                history[:, 0, METRICS.index(name)] = values

        fit(fit_rows, 1, None, val=half, pairs=ready.measured(seed))
        if test is not None:
            fit(np.arange(len(y)), SUBSETS, ready.whole.X, test=test)
        advance(len(cells) * self._options.epochs * (1 + len(ready.folds.get(seed, ()))))
        return Chunk(history=history, diverged=np.zeros_like(unconverged), unconverged=unconverged)


def facts(
    weight: Array,
    bias: Array,
    *,
    val: Rows | None = None,
    test: Rows | None = None,
    pairs: PairRows | None = None,
) -> Facts:
    """What rows and pairs that R probes weren't trained on say of them, by the names of `METRICS`."""
    found: dict[str, Array] = {}
    for name, rows in (("val", val), ("test", test)):
        if rows is None:
            continue
        errors, losses = metrics.row_errors(weight, bias, rows)
        found[f"{name}_accuracy"] = 1 - errors.mean(axis=1)
        found[f"{name}_log_loss"] = losses.mean(axis=1)
        if rows.group is not None:
            found[f"{name}_worst_group"] = 1 - worst_group_error(errors, rows.group)
    if pairs is not None:
        changes, shifts = metrics.pair_shifts(weight, bias, pairs, regression=False)
        found |= bound_facts(
            1 - found["val_accuracy"],
            found["val_log_loss"],
            changes.mean(axis=1),
            shifts.mean(axis=1),
            weight.shape[1],
        )
    return found


def bound_facts(error: Array, log_loss: Array, flips: Array, shift: Array, logits: int) -> dict[str, Array]:
    """Flip rate and bounds by the names of `METRICS`, elementwise."""
    return {
        "flip_rate": flips,
        "bound_01": bound_of(error, flips, regression=False),
        "log_loss_bound": log_loss_bound(log_loss, shift, logits),
    }


def _uses_pairs(cell: Cell) -> bool:
    return "pairs" in METHODS[cell.method].needs and cell.hyper.get("rank") != 0


def _typed(hyper: Mapping[str, float], rank: int) -> dict[str, Any]:
    """Whole hyper-parameters as int, the rank at most that of the part's pairs."""
    found = {name: int(value) if HYPER[name].whole else value for name, value in hyper.items()}
    return found | ({"rank": min(int(found["rank"]), rank)} if "rank" in found else {})
