"""The rows that are evaluated, their true answers, and a probe's answers for them."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, listing
from ncm_cli.methods import metrics
from ncm_cli.progress import Reporter
from ncm_cli.stages.common import logits
from ncm_cli.store.features import Column, FeatureStore
from ncm_cli.store.probe import Probe
from ncm_cli.store.targets import read_target


@dataclasses.dataclass(frozen=True)
class Answers:
    """n rows in the order of their ids (so that nothing depends on how a store is ordered)."""

    rows: NDArray[np.int64]
    """(n,) positions in the store."""
    truth: NDArray[np.int64] | NDArray[np.float64]
    """(n,) class codes of the probe, or values for regression."""
    predicted: NDArray[np.int64] | NDArray[np.float64]
    losses: NDArray[np.float64]
    """(n,) log loss in nats, or squared errors for regression."""

    @property
    def right(self) -> NDArray[np.bool_]:
        return np.asarray(self.predicted == self.truth)


def select(store: FeatureStore, where: str | None, target: str, reporter: Reporter) -> tuple[np.ndarray, int]:
    """Positions of the rows to evaluate, in the order of their ids, and how many had no true answer.

    Raises `InputError` when none is left.
    """
    chosen = store.mask(where)
    column = store.column(target)
    known = column.codes >= 0 if isinstance(column, Column) else ~np.isnan(column.values)
    missing = int((chosen & ~known).sum())
    rows = np.flatnonzero(chosen & known)
    if not len(rows):
        raise InputError(
            "no row to evaluate",
            where=store.path,
            found=f"{missing} rows, none with a {target}" if missing else f"no row with {where}",
        )
    if missing:
        reporter.warn(f"{missing:,} of {int(chosen.sum()):,} rows have no {target} and are left out")
    ids = store.ids
    return np.array(sorted(rows.tolist(), key=ids.__getitem__), dtype=np.int64), missing


def answer(probe: Probe, name: object, store: FeatureStore, rows: np.ndarray, target: str) -> Answers:
    """A probe's answers for ``rows``, read in blocks; ``name`` is the probe's file, for messages."""
    truth = _truth(probe, name, store, rows, target)
    place = np.empty(store.rows, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    scores = np.empty((len(rows), len(probe.weight)))
    for positions, features in store.blocks(np.sort(rows)):
        scores[place[positions]] = logits(probe, features)
    if probe.task == "regression":
        predicted = scores[:, 0]
        return Answers(rows, truth, predicted, (predicted - truth) ** 2)
    codes = truth.astype(np.int64)
    return Answers(rows, codes, metrics.decide(scores), metrics.row_log_loss(scores, codes))


def _truth(probe: Probe, name: object, store: FeatureStore, rows: np.ndarray, target: str) -> np.ndarray:
    truth = read_target(store, target, None if probe.task == "regression" else probe.classes).y[rows]
    if probe.task != "regression" and (truth < 0).any():
        raise _strangers(store.categorical(target), rows[truth < 0], probe, name, store)
    return truth


def _strangers(
    column: Column, rows: np.ndarray, probe: Probe, name: object, store: FeatureStore
) -> InputError:
    counts = np.bincount(column.codes[rows], minlength=len(column.categories))
    names = [category for category, n in zip(column.categories, counts, strict=True) if n]
    found = listing(f"{name} ({n} rows)" for name, n in zip(names, counts[counts > 0], strict=True))
    return InputError(
        f"rows of {column.name!r} whose class {name} has never seen",
        where=store.path,
        found=found,
        expected=f"one of: {listing(probe.classes)}",
        fix=f"leave them out: --where '{column.name}!={'|'.join(names)}'"
        if len(names) <= 12
        else "fit with rows of these classes, or embed without them",
    )


def ids_digest(store: FeatureStore, rows: np.ndarray) -> str:
    """SHA-256 over the ids of rows, which are in the order of their ids."""
    digest = hashlib.sha256()
    for row in rows.tolist():
        text = store.ids[row].encode("utf-8")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()
