"""Everything a fit is made from, read and scaled: training, validation and test rows, pairs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.methods.projection import Spectrum
from ncm_cli.methods.scaling import Scaling, fit_scaling
from ncm_cli.methods.selection import HeldOut, Rows, group_weights
from ncm_cli.options.fit import FitOptions
from ncm_cli.progress import Reporter
from ncm_cli.stages.common_pairs import Pairs, load_pairs
from ncm_cli.stages.common_rows import (
    Filters,
    Target,
    combine,
    drop_copies,
    known_rows,
    read_target,
    select_rows,
)
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.fingerprint import fingerprint, without_view

Codes = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What is remembered of the feature store in the probe."""

    path: str
    content_sha256: str
    encoder: dict[str, Any]
    fingerprint: str
    dim: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The rows and pairs of a fit; features are scaled, float64."""

    source: Source
    filters: Filters
    target: Target
    scaling: Scaling
    train: Rows
    weights: NDArray[np.float64] | None
    environments: Codes | None
    val: Rows | None
    test: Rows | None
    pairs: Pairs | None
    spectrum: Spectrum | None
    held_out: HeldOut | None
    copies: int


def read_problem(options: FitOptions, *, oracle: bool, reporter: Reporter) -> Problem:
    """Read what the options name, and refuse what doesn't belong together."""
    with FeatureStore.open(options.features) as store:
        filters = select_rows(store, options, oracle=oracle, reporter=reporter)
        filters, copies = drop_copies(store, filters, options.overlap, reporter)
        target = read_target(store, options, filters.train_rows)
        pairs = load_pairs(options, store, filters, reporter)
        train = known_rows(store, target, filters.train_rows, "training", reporter)
        groups = combine(store, options.groups)
        if options.select == "worst-group" and groups is None:
            raise InputError(
                "--select worst-group needs groups",
                fix="--groups label,place: columns whose combinations count",
            )
        upweight, environments = combine(store, options.upweight), combine(store, options.envs)
        raw = store.read(train)
        scaling = fit_scaling(options.scaling, options.scale_factor, raw)
        X = scaling.apply(raw)
        del raw

        def rows(mask: NDArray[np.bool_] | None, name: str) -> Rows | None:
            if mask is None:
                return None
            where = known_rows(store, target, mask, name, reporter)
            return Rows(
                X=scaling.apply(store.read(where)),
                y=target.y[where],
                group=None if groups is None else groups[where],
            )

        return Problem(
            source=Source(
                path=str(options.features),
                content_sha256=store.content_sha256,
                encoder=without_view(store.encoder),
                fingerprint=fingerprint(without_view(store.encoder)),
                dim=store.dim,
            ),
            filters=filters,
            target=target,
            scaling=scaling,
            train=Rows(X=X, y=target.y[train]),
            weights=None if upweight is None else group_weights(upweight[train]),
            environments=None if environments is None else environments[train],
            val=rows(filters.val_rows, "validation"),
            test=rows(filters.test_rows, "test") if oracle else None,
            pairs=pairs,
            spectrum=None if pairs is None else pairs.members(scaling, pairs.used).spectrum(),
            held_out=None if pairs is None else pairs.held_out_members(scaling),
            copies=copies,
        )
