"""What ``ncm bound`` reads: oracle pairs with labels, training rows, and the pairs of the fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, MismatchError, NcmError, listing
from ncm_cli.probes.apply import logits, require_same_encoder, scale_like
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import Target, number, read_target, split_filter
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import Probe, seen_rows
from ncm_cli.theory import theorem as theory

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class OraclePairs:
    """Test rows and their twins, scaled as the probe says, with the label that both share."""

    test: Array
    """x₊ (n, d)."""
    twin: Array
    """x₋ (n, d)."""
    target: NDArray
    """Class codes in the probe's order (n,), or targets for regression."""
    ids: tuple[str, ...]
    """Of the test rows."""
    disagreeing: int
    """Pairs whose members have different labels; the test row's is used."""
    unlabelled: int
    """Pairs left out because neither member's label is known."""

    @property
    def differences(self) -> Array:
        return self.test - self.twin


def read_matching_pairs(path: Path, probe_path: Path, probe: Probe) -> PairStore:
    """A pair store of the probe's encoder; raises `MismatchError` for any other."""
    store = read_pairs(path)
    require_same_encoder(str(probe_path), probe.meta["encoder"], str(path), store.encoder)
    return store


def oracle_pairs(
    path: Path, store: PairStore, probe: Probe, features: FeatureStore, reporter: Reporter
) -> OraclePairs:
    """The oracle pairs with labels by the test row's id in ``features``, else as the pair store has them."""
    if not store.id_a:
        raise InputError("no oracle pairs", where=path)
    _require_test_rows_first(path, store, probe, features, reporter)
    target, known, disagreeing = _targets(store, probe, features)
    if not known.any():
        raise InputError(
            "no oracle pair has a label that the probe knows",
            where=path,
            found=f"ids such as {listing(store.id_a[:3])}",
            expected=f"rows of {features.path} with a value of {probe.target!r}",
        )
    unlabelled = int(np.sum(~known))
    if unlabelled:
        reporter.warn(f"{unlabelled:,} of {len(known):,} oracle pairs have no known label and are left out")
    if disagreeing:
        reporter.warn(
            f"{disagreeing:,} oracle pairs have members of different labels; the theorem takes them as "
            "equal, so the test row's label is used for both"
        )
    return OraclePairs(
        test=scale_like(probe, store.features_a[known]),
        twin=scale_like(probe, store.features_b[known]),
        target=target[known],
        ids=tuple(id for id, is_labelled in zip(store.id_a, known, strict=True) if is_labelled),
        disagreeing=disagreeing,
        unlabelled=unlabelled,
    )


def _require_test_rows_first(
    path: Path, store: PairStore, probe: Probe, features: FeatureStore, reporter: Reporter
) -> None:
    """Refuse pairs the wrong way round; warn of rows the probe was trained on, as far as that is known."""
    data = probe.meta.get("data") or {}
    test = data.get("test") or split_filter(features, "test")
    if test and not _among(features, test, store.id_a) and (turned := _among(features, test, store.id_b)):
        raise InputError(
            "oracle pairs the wrong way round",
            where=path,
            found=f"{turned:,} of {len(store.id_b):,} second members are rows of {test}, no first member is",
            expected="test rows as first members (a), their twins in a training domain as second ones (b)",
            fix="make the pairs again with the columns swapped: ncm pairs --a-col id_b --b-col id_a",
        )
    if seen := int(seen_rows(probe, "train", store.id_a).sum()):
        reporter.warn(
            f"{seen:,} of {len(store.id_a):,} oracle pairs have a first member that the probe was trained "
            "on: the risk measured there isn't that of the test domain"
        )


def _among(features: FeatureStore, where: str, ids: tuple[str, ...]) -> int:
    """How many of the ids are rows of the filter; 0 if it was written for another store."""
    try:
        mask = features.mask(where)
    except NcmError:
        return 0
    positions = features.positions(list(ids))
    return int(mask[positions[positions >= 0]].sum())


def _targets(
    store: PairStore, probe: Probe, features: FeatureStore
) -> tuple[NDArray, NDArray[np.bool_], int]:
    """(target, known, how many pairs disagree) of each pair: the test row's answer, else its twin's."""
    found = []
    for ids, labels in ((store.id_a, store.label_a), (store.id_b, store.label_b)):
        found.append(_answers(ids, labels, probe, features))
    (own, known), (twin, twin_known) = found
    different = int((known & twin_known & (own != twin)).sum())
    return np.where(known, own, twin), known | twin_known, different


def _answers(
    ids: tuple[str, ...], labels: tuple[str, ...], probe: Probe, features: FeatureStore
) -> tuple[NDArray, NDArray[np.bool_]]:
    """(targets, known) by id in the store; of ids that it lacks, by the label that the pair store keeps."""
    target = targets_of(probe, features)
    positions = features.positions(ids)
    code = {name: index for index, name in enumerate(probe.classes)}

    def of(label: str) -> float:
        try:
            return code.get(label, -1) if probe.classes else number(label)
        except ValueError:
            return float("nan")

    stored = np.array([of(label) for label in labels], dtype=target.y.dtype)
    absent = (positions < 0) | ~target.known[positions]
    values = np.where(absent, stored, target.y[positions])
    return values, dataclasses.replace(target, y=values).known


def training_losses(
    probe: Probe, features: FeatureStore, where: str, loss: theory.Loss, reporter: Reporter
) -> Array:
    """Loss of each labelled row of ``where`` (N,), streamed."""
    mask = features.mask(where)
    if not mask.any():
        raise InputError("no rows for Term I", where=f"--train {where}", found="0 rows")
    target = targets_of(probe, features)
    losses = []
    with reporter.task("Term I", int(mask.sum())) as task:
        for positions, block in features.blocks(mask):
            known = target.known[positions]
            z = logits(probe, block[known])
            losses.append(loss.rows(z, target.y[positions][known]))
            task.advance(len(positions))
    found = np.concatenate(losses)
    if not len(found):
        raise InputError("no labelled rows for Term I", where=f"--train {where}")
    rows = int(mask.sum())
    if len(found) < rows:
        left_out = f"{rows - len(found):,} of {rows:,} rows of {where}"
        reporter.warn(f"{left_out} have no known {target.name} and are left out of Term I")
    return found


def targets_of(probe: Probe, features: FeatureStore) -> Target:
    """The column that the probe predicts, in the order of its classes."""
    return read_target(features, probe.target, None if probe.task == "regression" else probe.classes)


@dataclasses.dataclass(frozen=True, slots=True)
class FitPairs:
    """The pairs that span a probe's basis; members scaled, (k, d) each."""

    a: Array
    b: Array
    ids: tuple[tuple[str, str], ...]

    @property
    def delta(self) -> Array:
        """Differences as columns (d, k)."""
        return (self.a - self.b).T


def require_ncm(probe: Probe) -> None:
    """Refuse probes that can't be refitted along ranks."""
    method = probe.meta.get("method")
    if method != "ncm":
        raise MismatchError(
            "a probe that removes no directions can't be fitted again along ranks or pairs",
            found=f"method {method}",
            expected="method ncm: a probe of ncm fit --pairs P.h5 --method ncm",
        )


def require_pairs_of_the_fit(path: Path, store: PairStore, probe: Probe) -> None:
    """A `MismatchError` if the probe was fitted with other pairs; without pairs, any will do."""
    fitted = (probe.meta.get("data") or {}).get("pairs") or {}
    expected = fitted.get("content_sha256")
    if expected is not None and expected != store.content_sha256:
        raise MismatchError(
            "not the pairs that the probe was fitted with",
            where=path,
            found=f"content {str(store.content_sha256)[:12]}",
            expected=f"content {expected[:12]}, which was {fitted.get('path')}",
            fix="name that pair store, or fit the probe again with these pairs",
        )


def fit_pairs(store: PairStore, used: NDArray[np.bool_], probe: Probe) -> FitPairs:
    """The pairs that span the probe's basis."""
    rows = np.flatnonzero(used)
    return FitPairs(
        a=scale_like(probe, store.features_a[rows]),
        b=scale_like(probe, store.features_b[rows]),
        ids=tuple((store.id_a[row], store.id_b[row]) for row in rows),
    )


def clean_differences(path: Path, store: PairStore, noisy: FitPairs, probe: Probe) -> Array:
    """Differences (d, k) of the clean pairs in the order of the noisy ones, matched by their ids."""
    position: dict[Any, int] = {}
    for row, ids in enumerate(zip(store.id_a, store.id_b, strict=True)):
        position.setdefault(ids, row)
    missing = [ids for ids in noisy.ids if ids not in position]
    if missing:
        raise MismatchError(
            "the clean pairs aren't those of the noisy pairs",
            where=path,
            found=f"no clean pair {missing[0]}, and {len(missing) - 1:,} more missing",
            expected="the same ids in --pairs and --clean-pairs",
        )
    rows = [position[ids] for ids in noisy.ids]
    difference = scale_like(probe, store.features_a[rows]) - scale_like(probe, store.features_b[rows])
    return difference.T
