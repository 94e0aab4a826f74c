"""``ncm pairs``: matched rows -> differences, their spectrum, and what speaks for and against them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.options import as_json, check, given_flags
from ncm_cli.pairs.diagnostics import diagnose
from ncm_cli.pairs.match import match
from ncm_cli.pairs.options import PairsOptions, parse_holdout
from ncm_cli.pairs.table import Members, Side, hold_out, pairs_from_table, shared_ids, straddling
from ncm_cli.probes.apply import require_same_encoder
from ncm_cli.probes.projection import Spectrum, spectrum
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.columns import NumericColumn
from ncm_cli.store.digests import fingerprint, without_view
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import PairStore, write_pairs
from ncm_cli.store.tables import read_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsReport:
    """What was written, for the summary."""

    output: Path
    pairs: int
    held_out: int
    strategy: str
    singular_values: NDArray[np.float64]
    diagnostics: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "output": str(self.output),
            "strategy": self.strategy,
            "pairs": self.pairs,
            "held_out": self.held_out,
            "singular_values": self.singular_values.tolist(),
            "diagnostics": self.diagnostics,
        }


STRATEGY_OPTIONS = {"nearest": {"metric"}, "iterative": {"metric", "rounds", "dims"}}
"""The options that only some strategies read."""


def pairs(options: PairsOptions, *, reporter: Reporter = SILENT) -> PairsReport:
    """Make pairs, describe them, and write the pair store.

    Raises
    ------
    UsageError
        Neither or both of a table and ``--match``, or options that don't fit the strategy.
    InputError
        Ids, columns or filters that aren't there, or no pair left.
    MismatchError
        Two stores of different encoders.
    """
    check(options)
    idle = given_flags(
        options, {"metric", "rounds", "dims"} - STRATEGY_OPTIONS.get(options.match or "", set())
    )
    if idle:
        source = "a table" if options.match is None else f"--match {options.match}"
        reporter.warn(f"no effect with {source}: {', '.join(idle)}")
    with FeatureStore.open(options.features) as store_a:
        if options.features_b is None or _same_file(options.features, options.features_b):
            check(dataclasses.replace(options, features_b=None))
            return _pairs(options, store_a, store_a, reporter)
        with FeatureStore.open(options.features_b) as store_b:
            require_same_encoder(
                str(options.features),
                store_a.encoder,
                str(options.features_b),
                store_b.encoder,
                ignore_view=True,
            )
            return _pairs(options, store_a, store_b, reporter)


def _same_file(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def _pairs(
    options: PairsOptions, store_a: FeatureStore, store_b: FeatureStore, reporter: Reporter
) -> PairsReport:
    members = _members(options, store_a, store_b, reporter)
    members, straddlers = straddling(store_a, store_b, members, options.test, options.straddling, reporter)
    together = shared_ids(store_a, store_b, members)
    members = hold_out(members, together, parse_holdout(options.holdout), options.seed, reporter)
    assert members.holdout is not None
    if members.holdout.all():
        raise InputError("every pair is held out, so none is left for the basis")
    features_a, features_b = store_a.read(members.a), store_b.read(members.b)
    with np.errstate(over="ignore"):  # an infinite difference is refused just below
        delta = np.ascontiguousarray((features_a - features_b).T)
    found = _spectrum(delta, features_a, ~members.holdout)
    diagnostics = diagnose(
        store_a, store_b, members, delta, together, found, straddlers, seed=options.seed, reporter=reporter
    )
    base = without_view(store_a.encoder)
    written = PairStore(
        features_a=features_a,
        features_b=features_b,
        id_a=tuple(store_a.ids[i] for i in members.a),
        id_b=tuple(store_b.ids[i] for i in members.b),
        label_a=_labels(store_a, members.a),
        label_b=_labels(store_b, members.b),
        holdout=members.holdout,
        singular_values=found.singular_values[: found.rank],
        strategy=options.match or "table",
        options=as_json(options),
        encoder=base,
        fingerprint=fingerprint(base),
        sources=[
            {"path": str(store.path), "content_sha256": store.content_sha256}
            for store in ([store_a] if store_a is store_b else [store_a, store_b])
        ],
        diagnostics=diagnostics,
    )
    write_pairs(options.output, written)
    return PairsReport(
        output=options.output,
        pairs=len(members),
        held_out=int(members.holdout.sum()),
        strategy=written.strategy,
        singular_values=written.singular_values,
        diagnostics=diagnostics,
    )


def _spectrum(
    delta: NDArray[np.float32], features_a: NDArray[np.float32], fitted: NDArray[np.bool_]
) -> Spectrum:
    # The size of the members bounds how exactly their differences can be known in float32.
    square = np.einsum("kd,kd->", features_a, features_a, dtype=np.float64) / max(features_a.size, 1)
    return spectrum(delta if fitted.all() else delta[:, fitted], magnitude=float(np.sqrt(square)))


def _members(
    options: PairsOptions, store_a: FeatureStore, store_b: FeatureStore, reporter: Reporter
) -> Members:
    if options.source is None:
        return match(options, store_a, store_b, reporter)
    table = read_table(options.source, what="table of pairs")
    if options.holdout_col is None and "holdout" in table.columns:
        reporter.warn("the table's column 'holdout' isn't used: --holdout-col holdout uses it")
    a = Side(column=options.a_col, option="--a-col", store=store_a)
    b = Side(column=options.b_col, option="--b-col", store=store_b)
    return pairs_from_table(table, a, b, holdout_col=options.holdout_col)


def _labels(store: FeatureStore, rows: NDArray[np.int64]) -> tuple[str, ...]:
    """Labels of the rows; '' where the store has none."""
    if store.label_column is None:
        return ("",) * len(rows)
    column = store.columns[store.label_column]
    if isinstance(column, NumericColumn):
        return tuple("" if value != value else repr(value) for value in column.values[rows].tolist())
    names = [*column.categories, ""]
    return tuple(names[code] for code in column.codes[rows])
