"""The rows and pairs of a fit: training, validation and test rows, and pairs.

`fit`, `sweep` and `bound` take a `TrainingSet` from one `Problem`: all rows and pairs for a final fit, or a
fold's training part.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Codes, Features, Mask, chosen, joined
from ncm_cli.errors import InputError
from ncm_cli.probes.metrics import PairRows, Rows
from ncm_cli.probes.options import FitOptions
from ncm_cli.solvers.folds import Fold, components, deal, set_aside
from ncm_cli.solvers.projection import Scaling, Spectrum, fit_scaling, spectrum
from ncm_cli.solvers.training_set import TrainingSet
from ncm_cli.store.digests import Texts, array_digest, digest_of
from ncm_cli.store.pairs import PairStore
from ncm_cli.store.probe import record_ids
from ncm_cli.store.roles import (
    Groups,
    Role,
    Target,
    group_weights,
)

ROLE_NAMES: dict[Role, str] = {"train": "training", "val": "validation", "test": "test"}
"""The roles of rows, in words for messages."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The training, validation and test rows of a store."""

    where: dict[Role, str | None]
    """The row filters; None for a role without rows."""
    rows: dict[Role, Mask]
    """(N,) the rows that each filter selects."""
    unused: str = ""
    """A filter for rows without a role, quoted for a shell; for hints."""

    @property
    def val_or_test(self) -> Mask:
        """(N,) the validation and test rows."""
        return self.rows["val"] | self.rows["test"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """The k pairs of one or several stores, one store after the other, and which of them a fit may use.

    ``paths`` are the stores' files, ``kind`` (k,) is the position of each pair's store. ``overlapping``
    counts the pairs with a validation or test row; ``usable`` (k,) are the pairs that ``--overlap`` leaves,
    and ``held_out`` (k,) the usable ones that the user holds out. ``row_a`` and ``row_b`` (k,) are the
    members' rows in the feature store, −1 for those that it lacks. ``node_a`` and ``node_b`` (k,) are the
    members' nodes: a node is a number shared by rows of equal content, as in `FeatureRows.content_nodes`;
    members that the store lacks have numbers above these.
    """

    stores: tuple[PairStore, ...]
    paths: tuple[Path, ...]
    kind: Codes
    usable: Mask
    held_out: Mask
    row_a: Codes
    row_b: Codes
    node_a: Codes
    node_b: Codes
    overlapping: int

    @classmethod
    def joined(cls, parts: Sequence[Pairs]) -> Pairs:
        """The pairs of several stores, of which each part has one."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            stores=tuple(part.stores[0] for part in parts),
            paths=tuple(part.paths[0] for part in parts),
            overlapping=sum(part.overlapping for part in parts),
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in ("kind", "usable", "held_out", "row_a", "row_b", "node_a", "node_b")
            },
        )

    def of(self, stores: Iterable[bool]) -> Mask:
        """(k,) the pairs of some stores, given by a truth value for each."""
        return np.array(list(stores), dtype=bool)[self.kind]

    def first(self, count: int) -> Mask:
        """(k,) the first ``count`` usable pairs; of several stores, the same share of each."""
        usable = np.flatnonzero(self.usable)
        share = np.empty(len(usable))
        for at in range(len(self.stores)):
            in_store = self.kind[usable] == at
            share[in_store] = np.arange(1, in_store.sum() + 1) / in_store.sum()
        mask = np.zeros_like(self.usable)
        mask[usable[np.argsort(share, kind="stable")[:count]]] = True
        return mask

    @functools.cached_property
    def features(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Two arrays (k, d): the first and the second members as stored."""
        parts = [(store.features_a, store.features_b) for store in self.stores]
        if len(parts) == 1:
            return parts[0]
        a, b = (np.concatenate(members) for members in zip(*parts, strict=True))
        return a, b

    @functools.cached_property
    def ids(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The ids of the k first and of the k second members."""
        a, b = zip(*((store.id_a, store.id_b) for store in self.stores), strict=True)
        return tuple(itertools.chain(*a)), tuple(itertools.chain(*b))

    def measured_kinds(self, folds: Sequence[Fold]) -> Codes:
        """(m,) the position of the store of each measured pair, fold by fold."""
        return np.concatenate([self.kind[fold.measured] for fold in folds])

    @property
    def several(self) -> Codes | None:
        """``kind`` if there are several stores."""
        return self.kind if len(self.stores) > 1 else None

    def members(self, which: Mask, scaling: Scaling) -> PairRows:
        """The scaled members of the pairs in a mask."""
        a, b = (scaling.apply(members[which]) for members in self.features)
        return PairRows(a=a, b=b)

    def spectrum(self, which: Mask, scaling: Scaling) -> Spectrum:
        """The singular spectrum of the scaled differences of the pairs in a mask."""
        rows = self.members(which, scaling)
        raw = np.concatenate([members[which] for members in self.features])
        return spectrum((rows.a - rows.b).T, magnitude=scaling.magnitude(raw))

    def folds(self, count: int, seed: int) -> list[Fold]:
        """The user's held-out pairs as one fold, or the usable pairs cut into ``count`` folds.

        Each fold has its share of every store's pairs.

        Raises
        ------
        InputError
            Too few pairs that share no row, in all stores together or in one; or held-out pairs in some
            stores only.
        """
        usable = np.flatnonzero(self.usable)
        a, b = self.node_a[usable], self.node_b[usable]
        held_out, kind = self.held_out[usable], self.kind[usable]
        self._require_all_held_out()
        folds = set_aside(a, b, held_out) if held_out.any() else deal(a, b, count, seed, kind)
        for number, path in enumerate(self.paths if self.several is not None else ()):
            in_store = kind == number
            measured = any(fold.measured[in_store].any() for fold in folds)
            if not measured or not all(fold.basis[in_store].any() for fold in folds):
                raise InputError(
                    "too few pairs of one store to be cut into folds",
                    where=path,
                    found=f"{int(in_store.sum()):,} pairs in {len(np.unique(components(a, b)[in_store])):,} "
                    "sets that share no row",
                    expected="pairs to measure, and in every fold other pairs for the basis",
                    fix="more pairs of this store, or leave it out; or one --rank and one --weight-decay",
                )

        def of_all_pairs(mask: Mask) -> Mask:
            spread = np.zeros_like(self.usable)
            spread[usable] = mask
            return spread

        return [
            Fold(of_all_pairs(fold.measured), of_all_pairs(fold.basis), fold.untrained_nodes)
            for fold in folds
        ]

    def _require_all_held_out(self) -> None:
        """Refuse held-out pairs in some stores and none in others, whose pairs no fold would measure."""
        counts = np.bincount(self.kind[self.held_out], minlength=len(self.stores))
        if counts.any() and not counts.all():
            raise InputError(
                "held-out pairs in some pair stores, and none in others",
                where=self.paths[int(counts.argmin())],
                found="no held-out pair",
                expected=f"some, as in {self.paths[int(counts.argmax())]}, or none in any store",
                fix="make this one again with ncm pairs --holdout 0.25, or the others with --holdout 0",
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RawRows:
    """Some rows of the store, features as stored (n, d).

    ``y`` (n,) holds class codes or values, ``node`` (n,) the rows' nodes (see `Pairs`), ``group``
    (n, crossings) the groups of ``--groups``. ``codes`` has codes (n,) by the option that names their
    columns, such as ``upweight``, and, if domains are known, by ``domain`` and ``cell`` (label × domain);
    −1 is unknown.
    """

    ids: Texts
    X: Features
    y: NDArray[Any]
    node: Codes
    group: Codes | None = None
    codes: Mapping[str, Codes] = dataclasses.field(default_factory=dict)

    def scaled(self, scaling: Scaling) -> Rows:
        return Rows(X=scaling.apply(self.X), y=self.y, group=self.group)

    def take(self, mask: Mask) -> RawRows:
        """The rows of a mask (n,)."""
        return RawRows(
            ids=self.ids[mask],
            X=chosen(self.X, mask),
            y=self.y[mask],
            node=self.node[mask],
            group=None if self.group is None else self.group[mask],
            codes={name: codes[mask] for name, codes in self.codes.items()},
        )

    def with_rows(self, others: RawRows) -> RawRows:
        """These rows and others."""
        shared = self.codes.keys() & others.codes.keys()
        return RawRows(
            ids=self.ids.joined(others.ids),
            X=joined(self.X, others.X),
            y=np.concatenate([self.y, others.y]),
            node=np.concatenate([self.node, others.node]),
            codes={name: np.concatenate([self.codes[name], others.codes[name]]) for name in shared},
        )


class Variant(NamedTuple):
    """Which rows a candidate is trained on, and how they are weighted."""

    upweighted: bool = False
    """Whether every group of ``--upweight``, or every label × domain cell, is weighted equally."""
    pair_rows: bool = False
    """Whether the labelled rows of the pairs' members are trained on, too."""


PLAIN = Variant()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The rows and pairs of a fit."""

    content_sha256: str
    """The digest of the feature store."""
    row_numbers_of: str | None = None
    """As in `FeatureRows`: the digest of the table whose row numbers are the ids; None for other ids."""
    encoder: dict[str, Any]
    options: FitOptions
    roles: Roles
    target: Target
    train: RawRows
    """Training rows, with group codes even where no variant uses them; a fit is on `rows`."""
    val: RawRows | None
    test: RawRows | None
    pairs: Pairs | None
    extra: RawRows | None
    """Labelled rows of the pairs' members that are neither training, validation nor test rows."""
    copies: int
    groups: Groups | None = None
    """The groups of ``--groups``."""
    members: RawRows | None = None
    """Members of usable pairs whose label and domain are known."""
    cells: tuple[str, ...] = ()
    """The columns that make label × domain cells, if pairs were matched by label across domains."""
    matched: tuple[bool, ...] = ()
    """For each pair store, whether its pairs were matched by label across domains."""
    upweight: str | None = None
    """Columns whose combinations are weighted equally in an up-weighted `Variant`: those of ``--upweight``,
    else of the cells, else of ``--groups``; None without any."""
    variants: tuple[Variant, ...] = (PLAIN,)
    """The variants to try; a single one if the options leave no choice."""
    label_column: str | None = None
    """The store's label column."""
    spectra: dict[Fold, Spectrum] = dataclasses.field(default_factory=dict)
    """For each fold, the spectrum of the pairs that it fits on; kept so that it is computed once."""
    latest: dict[Variant, TrainingSet] = dataclasses.field(default_factory=dict)
    """The training set that `whole` made last."""

    @property
    def regression(self) -> bool:
        return not self.target.classes

    @property
    def constant(self) -> float:
        """What a constant probe answers: the code of the training rows' commonest class, or their mean."""
        y = self.train.y
        return float(y.mean() if self.regression else np.bincount(y).argmax())

    def rows(self, variant: Variant | None = None) -> RawRows:
        """The rows that a variant (default: the first) is trained on, if up-weighted, those in a group."""
        variant, rows = variant or self.variants[0], self.train
        if variant.pair_rows and self.extra is not None:
            rows = rows.with_rows(self.extra)
        codes = rows.codes.get("upweight")
        if variant.upweighted and codes is not None:
            return rows.take(codes >= 0)
        return dataclasses.replace(
            rows, codes={name: codes for name, codes in rows.codes.items() if name != "upweight"}
        )

    def whole(self, variant: Variant | None = None) -> TrainingSet:
        """The training set of a variant (default: the first): all of its rows and all usable pairs."""
        variant = variant or self.variants[0]
        if variant not in self.latest:
            self.latest.clear()
            usable = None if self.pairs is None else self.pairs.usable
            self.latest[variant] = self.training_set(self.rows(variant), usable)
        return self.latest[variant]

    def without(self, fold: Fold, variant: Variant | None = None) -> TrainingSet:
        """The training set of a variant (default: the first) without a fold's rows and pairs."""
        rows = self.rows(variant)
        remaining = rows.take(~np.isin(rows.node, fold.untrained_nodes))
        if not len(remaining.ids) or (not self.regression and len(np.unique(remaining.y)) < 2):
            raise InputError(
                "a fold of the pairs leaves fewer than two classes to train on",
                where=self.options.features,
                found=f"{len(remaining.ids):,} of {len(rows.ids):,} training rows",
                fix="pairs of fewer training rows, or pairs of other rows; or --select in-domain",
            )
        training = self.training_set(remaining, None, self.fold_scaling(fold))
        if self.pairs is None:
            return training
        basis = fold.basis & self.pairs.usable
        if fold not in self.spectra:
            self.spectra[fold] = self.pairs.spectrum(basis, training.scaling)
        return dataclasses.replace(training, spectrum=self.spectra[fold], pairs=int(basis.sum()))

    def fold_scaling(self, fold: Fold) -> Scaling:
        """The scaling fitted on a fold's training rows; all variants share it, and thus the spectrum."""
        remaining = self.train.take(~np.isin(self.train.node, fold.untrained_nodes))
        return fit_scaling(self.options.scaling, self.options.scale_factor, remaining.X)

    def training_set(self, rows: RawRows, pairs: Mask | None, scaling: Scaling | None = None) -> TrainingSet:
        """A training set of some rows and the pairs in a mask (k,); ``scaling`` is fitted unless given."""
        scaling = scaling or fit_scaling(self.options.scaling, self.options.scale_factor, rows.X)
        return TrainingSet(
            scaling=scaling,
            X=scaling.apply(rows.X),
            y=rows.y,
            n_classes=len(self.target.classes),
            weights=group_weights(rows.codes["upweight"]) if "upweight" in rows.codes else None,
            codes=rows.codes,
            spectrum=None if self.pairs is None or pairs is None else self.pairs.spectrum(pairs, scaling),
            pairs=0 if pairs is None else int(pairs.sum()),
        )


def rows_digest(problem: Problem, variant: Variant | None = None) -> str:
    """SHA-256 over a variant's rows, sorted by id: ids, features, targets and weights."""
    rows = problem.rows(variant)
    codes = rows.codes.get("upweight")
    order = rows.ids.order
    # By blocks, so that a large store isn't copied.
    parts = np.array_split(order, len(order) // 8192 + 1)
    digests = [array_digest(np.asarray(rows.X[part], np.float32)) for part in parts]
    values = [rows.y, *([] if codes is None else [group_weights(codes)])]
    digests += [array_digest(value[part]) for value in values for part in parts]
    return digest_of([record_ids(rows.ids), *problem.target.classes, *digests])


def pairs_digest(problem: Problem) -> str | None:
    """SHA-256 over the members of the pairs that span the final basis; None without pairs."""
    if problem.pairs is None:
        return None
    return digest_of([array_digest(members[problem.pairs.usable]) for members in problem.pairs.features])
