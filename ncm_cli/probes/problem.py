"""The pairs of a fit: which of them count, and the rows that their members are.

Everything a fit is made from: training, validation and test rows, and pairs.

`fit`, `sweep` and `bound` read one `Problem` and take `Part`s of it: all rows and pairs for a final fit, or
what a fold leaves. So a refit is of the very problem that the fit recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, MismatchError
from ncm_cli.options import parse_names, parse_ranks
from ncm_cli.probes import selection
from ncm_cli.probes.apply import Scaling, fit_scaling, require_same_encoder
from ncm_cli.probes.metrics import PairRows, Rows
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.projection import Spectrum, spectrum
from ncm_cli.probes.rows import (
    Filters,
    column_codes,
    content_nodes,
    drop_copies,
    fit_target,
    known_rows,
    select_rows,
    training_only,
    valued_rows,
)
from ncm_cli.probes.selection import Fold
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import Target, group_weights, make_groups, read_target
from ncm_cli.store.digests import array_digest, digest_of, fingerprint, without_view
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import Probe, record_ids

Codes = NDArray[np.int64]
Mask = NDArray[np.bool_]

AUTO_DENSE = 32
"""``--rank auto`` tries every rank up to this one, then ever wider steps."""

AUTO_MOST = 64
"""The most ranks that ``--rank auto`` tries."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """The k pairs of a store, and which of them a fit may use.

    Attributes
    ----------
    usable : bool (k,)
        Those whose members are no validation or test rows.
    held_out : bool (k,)
        The usable ones that the user holds out.
    node_a, node_b : int64 (k,)
        The row of each member: equal where it is one row, or one image by its bytes. Rows of the feature
        store come first, as `content_nodes` numbers them.
    overlapping
        How many pairs have a member among the validation or test rows.
    """

    store: PairStore
    usable: Mask
    held_out: Mask
    node_a: Codes
    node_b: Codes
    overlapping: int

    @property
    def excluded(self) -> int:
        return int((~self.usable).sum())

    def members(self, which: Mask, scaling: Scaling) -> PairRows:
        """Scaled members of some of the pairs."""
        return PairRows(
            a=scaling.apply(self.store.features_a[which]), b=scaling.apply(self.store.features_b[which])
        )

    def spectrum(self, which: Mask, scaling: Scaling) -> Spectrum:
        """The singular spectrum of the scaled differences of some of the pairs."""
        rows = self.members(which, scaling)
        raw = np.concatenate([self.store.features_a[which], self.store.features_b[which]])
        return spectrum((rows.a - rows.b).T, magnitude=scaling.magnitude(raw))


def load_pairs(
    options: FitOptions, features: FeatureStore, filters: Filters, reporter: Reporter
) -> Pairs | None:
    """Read the pair store, check that it belongs to the features, and leave leaking pairs out.

    Members are looked up by id in the feature store that is used now, whenever the pairs were made.

    Raises
    ------
    MismatchError
        The pairs were embedded by another encoder.
    InputError
        Pairs that leak under ``--overlap error``, or no pair left.
    """
    if options.pairs is None:
        return None
    store = read_pairs(options.pairs)
    require_same_encoder(
        str(features.path), features.encoder, str(options.pairs), store.encoder, ignore_view=True
    )
    node_a, node_b = member_nodes(store, features)
    strange = int((node_a >= features.rows).sum() + (node_b >= features.rows).sum())
    if strange:
        reporter.note(
            f"{strange:,} of {2 * len(node_a):,} members of pairs are no rows of {features.path.name}: that "
            "they are no validation or test rows can't be checked"
        )
    apart = content_nodes(features)[filters.apart()]
    leaking = np.isin(node_a, apart) | np.isin(node_b, apart)
    usable = np.ones(len(store.id_a), dtype=bool)
    if leaking.any():
        first = int(np.flatnonzero(leaking)[0])
        what = (
            f"{int(leaking.sum()):,} pairs have a member among the validation or test rows, "
            f"such as ({store.id_a[first]!r}, {store.id_b[first]!r})"
        )
        if options.overlap == "error":
            raise InputError(what, where=options.pairs, fix="--overlap exclude leaves them out")
        if options.overlap == "keep":
            reporter.warn(f"{what}; they are kept, as --overlap keep says")
        else:
            usable = ~leaking
            reporter.warn(f"{what}; they are left out (--overlap keep would use them)")
    if not (usable & ~store.holdout).any():
        raise InputError(
            "no pair is left to find directions with",
            where=options.pairs,
            found=f"{len(usable):,} pairs, {int(store.holdout.sum()):,} held out, "
            f"{int((~usable).sum()):,} barred",
            fix="a smaller --holdout in ncm pairs, or pairs of training rows",
        )
    return Pairs(
        store=store,
        usable=usable,
        held_out=store.holdout & usable,
        node_a=node_a,
        node_b=node_b,
        overlapping=int(leaking.sum()),
    )


def member_nodes(store: PairStore, features: FeatureStore) -> tuple[Codes, Codes]:
    """(k,) each: the rows that the members of pairs are; ids that ``features`` lacks get numbers beyond."""
    nodes = content_nodes(features)
    strange: dict[str, int] = {}

    def node(id: str, row: int) -> int:
        return features.rows + strange.setdefault(id, len(strange)) if row < 0 else int(nodes[row])

    found = [
        np.array([node(*member) for member in zip(ids, features.positions(ids).tolist(), strict=True)])
        for ids in (store.id_a, store.id_b)
    ]
    return found[0], found[1]


def resolve_ranks(text: str, method: str, available: int, reporter: Reporter) -> tuple[int, ...]:
    """The ranks to try, of at most ``available``.

    Raises
    ------
    InputError
        No rank of those asked for is available.
    """
    asked = parse_ranks(text)
    if method != "ncm":
        return (0,)
    if asked is None:
        return auto_ranks(available)
    possible = tuple(rank for rank in asked if rank <= available)
    if not possible:
        raise InputError(
            "a rank above the pairs' numerical rank",
            found=f"--rank {text}",
            expected=f"at most {available}",
            fix=f"--rank {available}, or a grid such as 0:{available}, or more pairs",
        )
    if len(possible) < len(asked):
        reporter.note(
            f"ranks above {available}, the numerical rank of the pairs that a fold leaves to fit on, are "
            f"skipped ({len(asked) - len(possible)} of {len(asked)})"
        )
    return possible


def auto_ranks(available: int) -> tuple[int, ...]:
    """0 to ``available``: each up to `AUTO_DENSE`, then geometric steps, at most `AUTO_MOST` ranks."""
    if available < AUTO_MOST:
        return tuple(range(available + 1))
    sparse = np.geomspace(AUTO_DENSE, available, AUTO_MOST - AUTO_DENSE)
    return tuple(sorted({*range(AUTO_DENSE + 1), *(round(float(rank)) for rank in sparse)}))


Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What is remembered of the feature store in the probe."""

    path: str
    content_sha256: str
    encoder: dict[str, Any]
    fingerprint: str
    dim: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RawRows:
    """Some rows of the store, features as stored (n, d) float32.

    ``y`` (n,) holds class codes or values; ``group`` (n, crossings), ``upweight``, ``environment``, ``erase``
    and ``dro_group`` (n,) codes of the columns that play these parts, where named; ``node`` (n,) which rows
    are one image.
    """

    ids: tuple[str, ...]
    X: NDArray[np.float32]
    y: NDArray[Any]
    node: Codes
    group: Codes | None = None
    upweight: Codes | None = None
    environment: Codes | None = None
    erase: Codes | None = None
    dro_group: Codes | None = None

    def scaled(self, scaling: Scaling) -> Rows:
        return Rows(X=scaling.apply(self.X), y=self.y, group=self.group)

    def take(self, mask: Mask) -> RawRows:
        """The rows of a mask (n,)."""
        parts = {
            field.name: value[mask]
            for field in dataclasses.fields(self)
            if field.name != "ids" and (value := getattr(self, field.name)) is not None
        }
        return RawRows(ids=tuple(np.array(self.ids, dtype=object)[mask]), **parts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Scaled rows to train on and the spectrum of the pairs that span the basis.

    Attributes
    ----------
    X : float64 (n, d)
    y : (n,)
    weights : float64 (n,) or None
        Of up-weighted training: every group of the part counts alike.
    environments, erase, dro_groups : int64 (n,) or None
    spectrum
        None without pairs.
    pairs
        How many span it.
    """

    scaling: Scaling
    X: Array
    y: NDArray[Any]
    n_classes: int
    weights: Array | None
    environments: Codes | None
    erase: Codes | None
    dro_groups: Codes | None
    spectrum: Spectrum | None
    pairs: int

    @property
    def rank(self) -> int:
        """The numerical rank of the pairs, 0 without."""
        return self.spectrum.rank if self.spectrum else 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The rows and pairs of a fit."""

    origin: Origin
    options: FitOptions
    filters: Filters
    target: Target
    train: RawRows
    val: RawRows | None
    test: RawRows | None
    pairs: Pairs | None
    extra: RawRows | None
    """Labelled rows of the pairs' members that are neither training, validation nor test rows."""
    copies: int

    @property
    def regression(self) -> bool:
        return not self.target.classes

    def whole(self, scaling: Scaling | None = None) -> Part:
        """All rows and all usable pairs."""
        return self.part(self.train, None if self.pairs is None else self.pairs.usable, scaling)

    def without(self, fold: Fold, rows: RawRows | None = None) -> Part:
        """What a fold leaves to fit on, of the training rows or of others."""
        assert self.pairs is not None
        rows = rows or self.train
        left = rows.take(~np.isin(rows.node, fold.apart))
        if not len(left.ids) or (not self.regression and len(np.unique(left.y)) < 2):
            raise InputError(
                "a fold of the pairs leaves fewer than two classes to train on",
                where=self.origin.path,
                found=f"{len(left.ids):,} of {len(rows.ids):,} training rows",
                fix="pairs of fewer training rows, or rows that are not trained on; or --select in-domain",
            )
        return self.part(left, fold.basis & self.pairs.usable)

    def part(self, rows: RawRows, pairs: Mask | None, scaling: Scaling | None = None) -> Part:
        """Some training rows, and some of the pairs (k,); ``scaling`` only where it must not be fitted."""
        scaling = scaling or fit_scaling(self.options.scaling, self.options.scale_factor, rows.X)
        used = self.pairs if pairs is not None else None
        return Part(
            scaling=scaling,
            X=scaling.apply(rows.X),
            y=rows.y,
            n_classes=len(self.target.classes),
            weights=None if rows.upweight is None else group_weights(rows.upweight),
            environments=rows.environment,
            erase=rows.erase,
            dro_groups=rows.dro_group,
            spectrum=None if used is None or pairs is None else used.spectrum(pairs, scaling),
            pairs=0 if pairs is None else int(pairs.sum()),
        )

    def folds(self, count: int, seed: int) -> list[Fold]:
        """The user's held-out pairs as one fold, or the usable pairs cut into ``count``.

        Raises
        ------
        InputError
            Too few pairs that share no row.
        """
        assert self.pairs is not None
        pairs, where = self.pairs, np.flatnonzero(self.pairs.usable)
        a, b = pairs.node_a[where], pairs.node_b[where]
        if pairs.held_out.any():
            found = selection.set_aside(a, b, pairs.held_out[where])
        else:
            found = selection.deal(a, b, count, seed)

        def over_all(mask: Mask) -> Mask:
            every = np.zeros_like(pairs.usable)
            every[where] = mask
            return every

        return [Fold(over_all(fold.measured), over_all(fold.basis), fold.apart) for fold in found]

    def fold_rank(self, fold: Fold) -> int:
        """The numerical rank of the pairs that a fold leaves."""
        assert self.pairs is not None
        rows = self.train.take(~np.isin(self.train.node, fold.apart))
        scaling = fit_scaling(self.options.scaling, self.options.scale_factor, rows.X)
        return self.pairs.spectrum(fold.basis & self.pairs.usable, scaling).rank

    def measured(self, fold: Fold, scaling: Scaling) -> PairRows:
        """The pairs whose members a fold compares."""
        assert self.pairs is not None
        return self.pairs.members(fold.measured, scaling)


def read_problem(
    options: FitOptions,
    *,
    oracle: bool,
    reporter: Reporter,
    dro_groups: str | None = None,
    beside: Probe | None = None,
) -> Problem:
    """Read what the options name, and refuse what doesn't belong together.

    Parameters
    ----------
    dro_groups
        The columns of groupdro's groups, where a sweep names them.
    beside
        A probe that this problem's stands beside: its classes count, and nothing is kept apart.
    """
    with FeatureStore.open(options.features) as store:
        if beside is None:
            filters = select_rows(store, options, oracle=oracle, reporter=reporter)
        else:
            filters = training_only(store, options)
        filters, copies = drop_copies(store, filters, options.overlap, reporter)
        if beside is None or options.task == "regression":
            target = fit_target(store, options, filters.train_rows)
        else:
            target = read_target(store, beside.target, beside.classes)
        pairs = load_pairs(options, store, filters, reporter)
        columns = {name: getattr(options, name, dro_groups) for name in PARTS}
        codes = {name: column_codes(store, names) for name, names in columns.items() if name != "groups"}
        codes["groups"] = make_groups(store, options.groups).codes if options.groups else None
        nodes = content_nodes(store)

        def rows(mask: Mask) -> RawRows:
            where = np.flatnonzero(mask)
            parts = {PARTS[name]: None if code is None else code[where] for name, code in codes.items()}
            ids = tuple(store.ids[row] for row in where)
            return RawRows(ids=ids, X=store.read(where), y=target.y[where], node=nodes[where], **parts)

        train = known_rows(store, target, filters.train_rows, "training", reporter)
        for name in ("upweight", "envs", "erase", "dro_groups"):
            train = valued_rows(store, codes[name], train, name, columns[name], reporter)
        judged = {"validation": filters.val_rows, "test": filters.test_rows if oracle else None}
        val, test = (
            None if mask is None else rows(known_rows(store, target, mask, name, reporter))
            for name, mask in judged.items()
        )
        _tell_groupless(val, "validation", options.groups, reporter)
        _tell_groupless(test, "test", options.groups, reporter)
        return Problem(
            origin=Origin(
                path=str(options.features),
                content_sha256=store.content_sha256,
                encoder=without_view(store.encoder),
                fingerprint=fingerprint(without_view(store.encoder)),
                dim=store.dim,
            ),
            options=options,
            filters=filters,
            target=target,
            train=rows(train),
            val=val,
            test=test,
            pairs=pairs,
            extra=_extra(store, filters, target, pairs, rows),
            copies=copies,
        )


PARTS = {
    "groups": "group",
    "upweight": "upweight",
    "envs": "environment",
    "erase": "erase",
    "dro_groups": "dro_group",
}
"""The options that name columns of the rows, and what their codes are called here."""


def _tell_groupless(rows: RawRows | None, name: str, columns: str | None, reporter: Reporter) -> None:
    if rows is None or rows.group is None:
        return
    missing = int((rows.group < 0).any(axis=1).sum())
    if not (rows.group >= 0).any():
        raise InputError(f"no {name} row has a value of {columns!r}", found="--groups")
    if missing:
        reporter.warn(f"{missing:,} {name} rows without a value of {columns} (--groups) are in no group")


def _extra(
    store: FeatureStore,
    filters: Filters,
    target: Target,
    pairs: Pairs | None,
    rows: Callable[[Mask], RawRows],
) -> RawRows | None:
    """The pairs' own labelled rows, where making the pairs took labels of rows outside training."""
    if pairs is None:
        return None
    same = parse_names(str(pairs.store.options.get("same") or ""))
    if target.name not in {store.label_column if name == "label" else name for name in same}:
        return None
    chosen = np.zeros(store.rows, dtype=bool)
    members = np.concatenate([pairs.node_a[pairs.usable], pairs.node_b[pairs.usable]])
    chosen[members[members < store.rows]] = True
    chosen &= target.known & ~filters.train_rows & ~filters.apart()
    return rows(chosen) if chosen.any() else None


def rows_record(problem: Problem) -> dict[str, str]:
    """The ids of the training and validation rows, for `ncm_cli.store.probe.seen_rows`."""
    parts = {"train": problem.train, "val": problem.val}
    return {name: record_ids(rows.ids) for name, rows in parts.items() if rows is not None}


def rows_digest(problem: Problem) -> str:
    """SHA-256 over the training rows in the order of their ids: ids, features, answers and weights."""
    rows = problem.train
    order = np.argsort(np.array(rows.ids))
    values = [rows.X, rows.y] + ([] if rows.upweight is None else [group_weights(rows.upweight)])
    # By blocks, so that a large store isn't copied.
    blocks = np.array_split(order, len(order) // 8192 + 1)
    digests = [array_digest(value[block]) for value in values for block in blocks]
    return digest_of([record_ids(rows.ids), *problem.target.classes, *digests])


def reread_problem(
    probe: Probe, features: Path, pairs: Path | None, *, where: str | None = None, reporter: Reporter
) -> Problem:
    """The problem that a probe was fitted on, read again; or with ``where``, that of other training rows.

    Raises
    ------
    MismatchError
        The probe doesn't say what it was fitted on, or rows or pairs are not those it was fitted on.
    """
    options = _recorded_options(probe, features, pairs)
    if where is not None:
        options = dataclasses.replace(options, train=where, pairs=None, method="erm")
        return read_problem(options, oracle=False, reporter=reporter, beside=probe)
    problem = read_problem(options, oracle=False, reporter=reporter)
    data = probe.meta["data"]
    fitted = data.get("pairs") or {}
    used = 0 if problem.pairs is None else int(problem.pairs.usable.sum())
    fix = "name the stores that the probe was fitted on, or fit it again on these"
    if data["features"]["train_sha256"] != rows_digest(problem):
        raise MismatchError(
            "the training rows aren't those that the probe was fitted on",
            where=features,
            found=f"{len(problem.train.ids):,} rows of {data['train']}",
            expected=f"the {data['train_rows']:,} rows of then, with the same features, answers and weights",
            fix=fix,
        )
    if fitted.get("used_sha256") != pairs_digest(problem):
        raise MismatchError(
            "the pairs aren't those that the probe was fitted on",
            where=pairs,
            found=f"{used:,} pairs without a validation or test row",
            expected=f"the {fitted.get('used', 0):,} of then, with the features of then",
            fix=fix,
        )
    return problem


def pairs_digest(problem: Problem) -> str | None:
    """SHA-256 over the members of the pairs that span the final basis; None without pairs."""
    if problem.pairs is None:
        return None
    store, which = problem.pairs.store, problem.pairs.usable
    return digest_of([array_digest(members[which]) for members in (store.features_a, store.features_b)])


def _recorded_options(probe: Probe, features: Path, pairs: Path | None) -> FitOptions:
    recorded: Mapping[str, Any] = probe.meta.get("options") or {}
    names = {field.name for field in dataclasses.fields(FitOptions)}
    known = (probe.meta.get("data") or {}).get("features") or {}
    if not {"features", "method", "solver", "train"} <= set(recorded) or "train_sha256" not in known:
        raise MismatchError(
            "the probe doesn't record what it was fitted on, so it can't be fitted again",
            found=f"a probe of ncm {probe.ncm_version}",
            fix="fit it again with ncm fit",
        )
    values = {name: value for name, value in recorded.items() if name in names}
    values |= {"features": features, "pairs": pairs, "output": Path(str(values["output"])), "select": None}
    return FitOptions(**values)
