"""The configurations of a sweep, and the picks: each rule chooses a checkpoint of each configuration, then
hyper-parameters."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.baselines.options import SweepOptions, space_of
from ncm_cli.blocks import Array, Codes, Mask
from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import Space, parse_space
from ncm_cli.probes.rules import RULES, TIE_BREAKERS, Rule
from ncm_cli.probes.selection import score_name, store_metric
from ncm_cli.progress import Reporter
from ncm_cli.solvers.methods import HYPER, METHODS, UPWEIGHT, Config
from ncm_cli.store.files import Shown, jsonable
from ncm_cli.store.hdf5 import H5Reader, reading, writing

MOST_CHUNK_LOGITS = 512
"""Most logits (configurations × C) that train side by side: enough for efficient matrix products, and few
enough that a killed sweep loses little work."""

MOST_CONFIGS = 1_000_000

History = Mapping[str, Array]
"""(..., checkpoints) by metric, NaN where not known."""

TABLE_FORMAT, TABLE_VERSION = "ncm-sweep", 1


def plan_configs(
    options: SweepOptions, *, available_rank: int, reporter: Reporter, steps: int | None = None
) -> list[Config]:
    """All configurations, by method, trial and seed.

    ``steps`` is the number of training steps, if known: ``anneal`` is drawn below it.

    Raises
    ------
    UsageError
        Too many configurations.
    InputError
        No requested rank is available.
    """
    methods, searches = options.chosen_methods, options.searches
    known = {hyper for name, _ in methods for hyper in METHODS[name].hyper}
    idle = [search.name for search in searches if search.name not in known]
    if idle:
        reporter.warn(f"no effect: --search {', '.join(idle)}, which none of the methods has")
    if options.methods and options.upweight and UPWEIGHT not in options.methods:
        reporter.note(f"--upweight applies to all methods, since none is named NAME{UPWEIGHT}")
    if steps is not None:
        _warn_of_few(steps, options, reporter)
    configs: list[Config] = []
    for name, upweighted in methods:
        spaces = {hyper: space_of(name, hyper, searches, grid=options.grid) for hyper in METHODS[name].hyper}
        if "anneal" in spaces and steps is not None and _late(spaces["anneal"], steps):
            spaces["anneal"] = _annealed(name, options, steps)
        if "rank" in spaces:
            spaces["rank"] = _capped(spaces["rank"], name, available_rank, reporter)
        if options.grid:
            total = np.prod([float(len(space.values)) for space in spaces.values()])
            if total > MOST_CONFIGS:
                raise UsageError(f"a grid of {total:,.0f} configurations for {name}", fix="fewer values")
            settings = list(itertools.product(*(space.values for space in spaces.values())))
        else:
            settings = list(
                dict.fromkeys(zip(*(_draws(*item, options) for item in spaces.items()), strict=True))
            )
        hypers: list[dict[str, Any]] = [dict(zip(spaces, values, strict=True)) for values in settings]
        configs += [
            Config(method=name, upweighted=upweighted, trial=trial, seed=options.seed + i, **hyper)
            for trial, hyper in enumerate(hypers)
            for i in range(options.seeds)
        ]
        if len(configs) > MOST_CONFIGS:
            raise UsageError(
                f"more than {MOST_CONFIGS:,} configurations", fix="a smaller grid, or --trials without --grid"
            )
    return configs


def _capped(space: Space, method: str, most: int, reporter: Reporter) -> Space:
    """The space without ranks above the pairs' numerical rank; a note tells if some are left out."""
    values = tuple(value for value in space.values if value <= most)
    capped = dataclasses.replace(space, values=values, high=min(space.high, most))
    if not values and (space.values or capped.low > capped.high):
        raise InputError(
            "a rank above the pairs' numerical rank",
            found=f"rank={space.text} for {method}",
            expected=f"at most {most}",
            fix=f"--search rank=0:{most}, or more pairs",
        )
    if capped != space:
        reporter.note(f"ranks above {most}, the pairs' numerical rank, are left out of {space.text}")
    return capped


def _late(space: Space, steps: int) -> bool:
    """Whether a value of ``anneal`` is so large that the penalty never begins."""
    return max(space.values, default=space.high) >= steps


def _annealed(method: str, options: SweepOptions, steps: int) -> Space:
    """The space of ``anneal``, unless given cut so that the penalty acts in at least one of the ``steps``."""
    space = space_of(method, "anneal", options.searches, grid=options.grid)
    if any(search.name == "anneal" and search.method in (None, method) for search in options.searches):
        return space
    if options.grid:
        return parse_space(str(steps // 2), whole=True)
    least = min(int(min(space.values)), steps // 2)
    return parse_space(f"{least}:{max(least, min(int(max(space.values)), steps - 1))}", whole=True)


def _warn_of_few(steps: int, options: SweepOptions, reporter: Reporter) -> None:
    """Warn if training has so few steps that ``anneal`` would lie beyond them."""
    methods: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name, _ in options.chosen_methods if "anneal" in METHODS[name].hyper):
        space = space_of(name, "anneal", options.searches, grid=options.grid)
        if _late(space, steps):
            drawn = _annealed(name, options, steps)
            what = f"anneal, the step at which the penalty begins, is {drawn.text} instead of {space.text}"
            if _late(drawn, steps):
                what = f"the penalty never begins where anneal, {space.text}, is {steps:,} or more"
            methods.setdefault(what, []).append(name)
    for what, names in methods.items():
        reporter.warn(
            f"{', '.join(names)}: training has {steps:,} steps ({options.epochs:,} epochs), so {what}; "
            "--epochs gives more"
        )


def _draws(name: str, space: Space, options: SweepOptions) -> list[float]:
    """Random values of a hyper-parameter, one for each trial.

    A range is cut into as many parts as there are trials, one draw in each, in random order. The draws depend
    on the hyper-parameter's name and the seed alone, so methods that share a hyper-parameter try the same
    values of it, and a method's values don't depend on which other methods are swept.
    """
    rng = np.random.default_rng([options.seed, zlib.crc32(name.encode())])
    shares = (rng.permutation(options.trials) + rng.random(options.trials)) / options.trials
    return [space.at(float(share), whole=HYPER[name].whole) for share in shares]


def chunks(configs: Sequence[Config], logits: int) -> list[list[int]]:
    """Positions of the configurations that train together: those of one seed and one kind of weights."""
    families: dict[tuple[int, str], list[int]] = {}
    for i, config in enumerate(configs):
        kind = config.method if config.method in ("dfr", "leace") else ""
        families.setdefault((config.seed, kind), []).append(i)
    size = max(1, MOST_CHUNK_LOGITS // logits)
    return [
        members[start : start + size]
        for members in families.values()
        for start in range(0, len(members), size)
    ]


METRICS = (
    "val_accuracy",
    "val_log_loss",
    "val_worst_group",
    "flip_rate",
    "bound_01",
    "log_loss_bound",
    "cell_error",
    "cell_log_loss",
    "test_accuracy",
    "test_log_loss",
    "test_worst_group",
)
"""The metrics in the order of the tables; NaN if not known. Bounds, flip rate, cell error and cell log loss
are measured on the folds of pairs, the others on the fit to all rows and pairs."""


def metric_names(crossings: int, stores: int = 1) -> tuple[str, ...]:
    """`METRICS`; with several crossings of ``--groups`` also the worst group of each one, numbered; with
    several pair stores also the flip rate of each one, and ``cell_bound``."""
    numbers = range(1, crossings + 1) if crossings > 1 else ()
    of_stores = [store_metric("flip_rate", at) for at in range(stores)] if stores > 1 else []
    worst = (f"{part}_worst_group_{number}" for part in ("val", "test") for number in numbers)
    return (*METRICS, *worst, *of_stores, *(["cell_bound"] if of_stores else []))


def _keys(history: History, rule: Rule) -> tuple[Array, Array]:
    """The rule's metric, the least being best, and the loss that breaks ties; infinite if not known."""
    known = {name for name, epochs in history.items() if np.isfinite(epochs).any()}
    metric = score_name(known) if rule == RULES["bound"] else rule.metric
    values, losses = rule.sign * history[metric], history[TIE_BREAKERS.get(metric, "val_log_loss")]
    # Differences below 1e-12 are rounding.
    scores = np.where(np.isfinite(values), np.round(values, 12), np.inf)
    return scores, np.where(np.isfinite(losses), losses, np.inf)


def best_checkpoints(history: History, rule: Rule) -> Codes:
    """For each configuration its best checkpoint; ties go to the lower validation log loss, then the earlier.

    Parameters
    ----------
    history
        (..., checkpoints) by metric; NaN where not known.

    Returns
    -------
    NDArray
        (...) checkpoint, −1 if the rule's metric isn't known.
    """
    scores, losses = _keys(history, rule)
    first = np.lexsort((losses, scores))[..., 0]
    return np.where(np.isfinite(scores.min(axis=-1)), first, -1).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Pick:
    """The trial that a rule chose for one method."""

    row: int
    """The trial's position among the trials."""
    checkpoints: tuple[int, ...]
    """The best checkpoint of each seed."""
    values: Array
    """(seeds, metrics) at these checkpoints."""

    @property
    def mean(self) -> Array:
        """(metrics,) mean over seeds."""
        return np.asarray(self.values.mean(axis=0), np.float64)

    @property
    def sd(self) -> Array:
        """(metrics,) standard deviation over seeds (n − 1); NaN with one seed."""
        if len(self.values) < 2:
            return np.full(self.values.shape[1], np.nan)
        sd = np.asarray(self.values.std(axis=0, ddof=1), np.float64)
        # Equal values may differ from their mean by rounding.
        return np.where(sd < 1e-12, 0.0, sd)


def pick_trial(history: History, diverged: Mask, rule: Rule) -> Pick | None:
    """The trial whose best checkpoints are best on average over the seeds.

    Parameters
    ----------
    history
        (trials, seeds, checkpoints) by metric.
    diverged
        (trials, seeds): a trial that diverged for any seed is never chosen.

    Returns
    -------
    Pick or None
        None if the rule's metric isn't known for any trial. Ties go to the lower validation log loss, then
        the earlier trial.
    """
    chosen = best_checkpoints(history, rule)
    usable = np.flatnonzero(~diverged.any(axis=1) & (chosen >= 0).all(axis=1))
    seeds = np.arange(chosen.shape[1])
    picks = [
        Pick(
            int(row),
            tuple(chosen[row].tolist()),
            np.stack([epochs[row][seeds, chosen[row]] for epochs in history.values()], axis=1),
        )
        for row in usable
    ]

    def key(pick: Pick) -> tuple[float, float]:
        values = dict(zip(history, pick.values.T, strict=True))
        score, loss = (float(part.mean()) for part in _keys(values, rule))
        return round(score, 12), loss

    return min(picks, key=key, default=None)


LARGEST_ROUNDING = 1e-9
"""In nats. The order of the rows in a full batch changes losses by far less, another batch by far more."""


def choose_by_rules(
    options: SweepOptions, configs: Sequence[Config], table: SweepTable
) -> tuple[list[dict[str, Any]], dict[str, str | None], list[str]]:
    """Each rule's picks for each method, why a rule was left out, and the methods that seeds don't change.

    Configurations of these methods have the same results for all seeds, except on the folds of pairs.
    """
    rows: list[dict[str, Any]] = []
    rules = {name: _why_not(rule, table, options) for name, rule in RULES.items()}
    names, seedless = tuple(table.metrics), []
    for label in dict.fromkeys(config.label for config in configs):
        rows_of = [i for i, config in enumerate(configs) if config.label == label]
        shape = (-1, options.seeds)
        history = {
            name: values[rows_of].reshape(*shape, values.shape[1]) for name, values in table.metrics.items()
        }
        diverged = table.diverged[rows_of].reshape(shape)
        val_metrics = [np.nan_to_num(history[name]) for name in ("val_log_loss", "val_accuracy")]
        if all(np.abs(values - values[:, :1]).max() <= LARGEST_ROUNDING for values in val_metrics):
            seedless.append(label)
        for name, rule in RULES.items():
            pick = pick_trial(history, diverged, rule) if rules[name] is None else None
            if pick is None:
                continue
            of_seeds = [configs[i] for i in rows_of[pick.row * options.seeds :][: options.seeds]]
            first = of_seeds[0]
            rows.append(
                {
                    "method": label,
                    "rule": name,
                    "oracle": rule.oracle,
                    "trial": first.trial,
                    "hyper_parameters": first.hyper,
                    "seeds": [config.seed for config in of_seeds],
                    "epochs": [_epoch(first, at) for at in pick.checkpoints],
                    "metrics": dict(zip(names, pick.mean.tolist(), strict=True)),
                    "sd": dict(zip(names, pick.sd.tolist(), strict=True)),
                    "values": dict(zip(names, pick.values.T.tolist(), strict=True)),
                }
            )
    return rows, rules, seedless if options.seeds > 1 else []


def _epoch(config: Config, checkpoint: int) -> int | None:
    """The epoch of a checkpoint; None for a method that isn't trained by steps."""
    return None if config.method == "dfr" else int(checkpoint) + 1


def told_epochs(pick: Mapping[str, Any], picks: Iterable[Mapping[str, Any]]) -> str:
    """Words for the epochs of a pick, if another of ``picks`` has its setting at other epochs; else empty.

    A pick is a row of a sweep's result.
    """
    setting = ("method", "hyper_parameters")
    same_setting = [other for other in picks if all(other[name] == pick[name] for name in setting)]
    epochs = sorted({epoch for epoch in pick.get("epochs") or () if epoch is not None})
    if not epochs or all(other.get("epochs") == pick["epochs"] for other in same_setting):
        return ""
    return f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"


def _why_not(rule: Rule, table: SweepTable, options: SweepOptions) -> str | None:
    """Why a rule can't be applied; None if it can."""
    if table.diverged.all():
        return "every configuration diverged"
    if np.isfinite(table.metrics[rule.metric]).any():
        return None
    if rule.metric == "bound_01" and options.pairs is not None:
        return "with --folds 0 no pair is measured"
    return rule.missing


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SweepTable(Shown):
    """n configurations, in the order in which they were planned."""

    method: tuple[str, ...]
    """(n) names, with ``+upweight`` if up-weighted."""
    trial: np.ndarray
    """int64 (n,)."""
    seed: np.ndarray
    """int64 (n,)."""
    hyper: dict[str, np.ndarray]
    """float64 (n,) for each hyper-parameter, NaN if the method doesn't have it."""
    diverged: np.ndarray
    """bool (n,): a weight became NaN or infinite."""
    epochs: np.ndarray
    """int64 (E,): the checkpoints. Methods that aren't trained by steps have their values at the first."""
    metrics: dict[str, np.ndarray]
    """float64 (n, E) for each metric, NaN if not known."""
    options: dict[str, Any]


def write_sweep(path: Path | str, table: SweepTable) -> None:
    """Write the HDF5 file atomically."""
    with writing(path, TABLE_FORMAT, TABLE_VERSION) as writer:
        writer.text("method", table.method, what="methods")
        for name in ("trial", "seed", "diverged", "epochs"):
            writer.array(name, getattr(table, name))
        for folder, columns in (("hyper", table.hyper), ("metrics", table.metrics)):
            for name, values in columns.items():
                writer.array(f"{folder}/{name}", values)
        writer.json("options", table.options)


def read_sweep(path: Path | str) -> SweepTable:
    """Read the HDF5 file; refuses another format, a newer version and changed bytes."""
    with H5Reader(path, TABLE_FORMAT, TABLE_VERSION, what="a sweep's table") as h5, reading(h5.path):
        method, epochs = tuple(h5.texts("method")), h5.array("epochs", np.int64, shape=(None,))
        rows, wide = (len(method),), (len(method), len(epochs))
        hyper = {name: h5.array(f"hyper/{name}", np.float64, shape=rows) for name in h5.members("hyper")}
        return SweepTable(
            method=method,
            trial=h5.array("trial", np.int64, shape=rows),
            seed=h5.array("seed", np.int64, shape=rows),
            hyper=hyper,
            diverged=h5.array("diverged", np.bool_, shape=rows),
            epochs=epochs,
            metrics={
                name: h5.array(f"metrics/{name}", np.float64, shape=wide) for name in h5.members("metrics")
            },
            options=h5.json("options"),
        )


def table_of(
    options: SweepOptions, configs: Sequence[Config], history: History, diverged: Mask
) -> SweepTable:
    """The whole history, for the HDF5 file."""
    hyper = {name: [config.hyper.get(name, np.nan) for config in configs] for name in HYPER}
    return SweepTable(
        method=tuple(config.label for config in configs),
        trial=np.array([config.trial for config in configs], np.int64),
        seed=np.array([config.seed for config in configs], np.int64),
        hyper={name: np.array(values) for name, values in hyper.items() if not np.isnan(values).all()},
        diverged=diverged,
        epochs=np.arange(1, options.epochs + 1),
        metrics=dict(history),
        options=jsonable(options),
    )


def columns_of(
    configs: Sequence[Config], table: SweepTable, rules: Mapping[str, str | None]
) -> dict[str, list[Any]]:
    """The columns of the CSV: for each configuration, one row for each rule that applies.

    A diverged configuration has one row, without rule, epoch and metrics.
    """
    applied = [rule for rule, why in rules.items() if why is None]
    chosen = {rule: best_checkpoints(table.metrics, RULES[rule]) for rule in applied}
    rows = []
    for i, config in enumerate(configs):
        known = {} if table.diverged[i] else {rule: int(at[i]) for rule, at in chosen.items() if at[i] >= 0}
        for rule, at in known.items() or [(None, -1)]:
            values = [None if rule is None else float(epochs[i, at]) for epochs in table.metrics.values()]
            rows.append(
                {
                    "method": config.label,
                    "trial": config.trial,
                    "seed": config.seed,
                    **{name: config.hyper.get(name) for name in table.hyper},
                    "diverged": bool(table.diverged[i]),
                    "rule": rule,
                    "oracle": None if rule is None else RULES[rule].oracle,
                    "epoch": None if rule is None else _epoch(config, at),
                    **dict(zip(table.metrics, values, strict=True)),
                }
            )
    return {name: [row[name] for row in rows] for name in rows[0]}
