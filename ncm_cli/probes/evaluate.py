"""The rows that are evaluated, their true answers, and a probe's answers for them.

Two probes on the same rows.

``ncm eval``: a probe and rows with known answers -> accuracies, by group and on average.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, MismatchError, NcmError, listing
from ncm_cli.options import as_json
from ncm_cli.probes import metrics
from ncm_cli.probes.apply import logits, require_same_encoder
from ncm_cli.probes.metrics import MeanDifference, Paired, mean, mean_difference
from ncm_cli.probes.metrics import compare as compare_hits
from ncm_cli.probes.options import EvalOptions
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.columns import Column, Groups, make_groups, read_target, split_filter
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import Probe, read_probe, seen_rows
from ncm_cli.store.results import read_result, write_result


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """This probe against another one; every difference is this minus other."""

    other: Path
    other_value: float
    """The other's accuracy or, for regression, mean squared error."""
    overall: Paired | MeanDifference
    """Of accuracies or, for regression, of mean squared errors."""
    by_group: tuple[Paired, ...]

    def to_json(self, groups: Groups) -> dict[str, Any]:
        """As JSON values."""
        if isinstance(self.overall, MeanDifference):
            return {
                "other": str(self.other),
                "other_mse": self.other_value,
                "mse_difference": self.overall.difference,
                "ci_low": self.overall.low,
                "ci_high": self.overall.high,
            }
        return {
            "other": str(self.other),
            "other_accuracy": self.other_value,
            **_entry(self.overall),
            "p_value": self.overall.p_value,
            "only_this_right": self.overall.only_first,
            "only_other_right": self.overall.only_second,
            "groups": [
                {"group": groups.key(index), **_entry(paired)} for index, paired in enumerate(self.by_group)
            ],
        }


def _entry(paired: Paired) -> dict[str, Any]:
    known = paired.n > 0
    return {
        "n": paired.n,
        "difference": paired.difference if known else None,
        "ci_low": paired.low if known else None,
        "ci_high": paired.high if known else None,
    }


def compare(
    other: Path, this: Path, store: FeatureStore, answers: Answers, target: str, groups: Groups
) -> Comparison:
    """Compare the answers with another probe's, or with the rows of its saved result."""
    if _is_result(other):
        return _made(other, answers, _saved(other, store, answers), groups)
    probe = read_probe(other)
    require_same_encoder(str(other), probe.encoder, str(store.path), store.encoder, ignore_view=True)
    if (probe.task == "regression") != (answers.truth.dtype.kind == "f"):
        raise MismatchError("a classifier can't be compared with a regression", where=f"{this} and {other}")
    theirs = answer(probe, other.name, store, answers.rows, target)
    if probe.task == "regression":
        return Comparison(
            other=other,
            other_value=mean(theirs.losses),
            overall=mean_difference(answers.losses, theirs.losses),
            by_group=(),
        )
    return _made(other, answers, theirs.right, groups)


def _made(other: Path, answers: Answers, right: NDArray[np.bool_], groups: Groups) -> Comparison:
    in_group = groups.codes[answers.rows]
    parts = [(in_group == index).any(axis=1) for index in range(len(groups.keys))]
    return Comparison(
        other=other,
        other_value=mean(right),
        overall=compare_hits(answers.right, right),
        by_group=tuple(compare_hits(answers.right[part], right[part]) for part in parts),
    )


def _is_result(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(64).lstrip()[:1] == b"{"


def _saved(path: Path, store: FeatureStore, answers: Answers) -> NDArray[np.bool_]:
    saved = read_result(path, kind="eval")
    rows = saved.get("rows") or {}
    right = rows.get("right")
    if not isinstance(right, str):
        raise InputError(
            "the result doesn't say which rows were right",
            where=path,
            fix="compare with the probe itself, or write the result again with ncm eval -o",
        )
    if rows.get("ids_sha256") != ids_digest(store, answers.rows) or len(right) != len(answers.rows):
        raise MismatchError(
            "the two results are of different rows",
            where=path,
            found=f"{len(right)} rows with --where {saved.get('where')!r}",
            expected=f"the same {len(answers.rows)} rows",
            fix="evaluate both with the same --where",
        )
    return np.frombuffer(right.encode("ascii", "replace"), dtype=np.uint8) == ord("1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Everything that was measured."""

    n: int
    scores: dict[str, float | None]
    """Overall numbers by name, in the order in which they are shown."""
    worst_group: metrics.Group | None
    table: tuple[metrics.Group, ...]
    groups: Groups
    adjusted: tuple[float | None, ...]
    """The adjusted average of each crossing; empty without reference rows."""
    reference: str | None
    """The rows whose group sizes weight the adjusted average, as a filter."""
    reference_missing: float
    """Share of the reference rows that lie in groups without an evaluated row."""
    without_answer: int
    predicted_classes: int
    overlap: dict[str, int]
    """Evaluated rows that are training or validation rows of the probe."""
    oracle: bool
    probe: dict[str, Any]
    features: dict[str, Any]
    task: str
    target: str
    where: str | None
    comparison: Comparison | None
    warnings: tuple[str, ...]
    options: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The body of the result, without the rows."""
        return {
            "n": self.n,
            **self.scores,
            "worst_group": self._entry(self.worst_group, interval=False) if self.worst_group else None,
            "groups": [self._entry(group) for group in self.table],
            "crossings": self._crossings(),
            "reference": {"where": self.reference, "missing_share": self.reference_missing},
            "oracle": self.oracle,
            "overlap": self.overlap,
            "task": self.task,
            "target": self.target,
            "where": self.where,
            "rows_without_answer": self.without_answer,
            "predicted_classes": self.predicted_classes,
            "probe": self.probe,
            "features": self.features,
            "comparison": self.comparison.to_json(self.groups) if self.comparison else None,
            "warnings": list(self.warnings),
            "options": self.options,
        }

    def _crossings(self) -> list[dict[str, Any]]:
        """Of each crossing of ``--groups``: its columns, worst group and adjusted average."""
        found = []
        for number, columns in enumerate(self.groups.crossings):
            own = [group for group in self.table if self.groups.crossing[group.index] == number]
            worst = metrics.worst(own, highest=self.task != "classification")
            found.append(
                {
                    "columns": list(columns),
                    "worst_group": self._entry(worst, interval=False) if worst else None,
                    "adjusted": self.adjusted[number] if self.adjusted else None,
                }
            )
        return found

    def _entry(self, group: metrics.Group, *, interval: bool = True) -> dict[str, Any]:
        value = "accuracy" if self.task == "classification" else "mse"
        entry: dict[str, Any] = {"group": self.groups.key(group.index), "n": group.n, value: group.value}
        if interval and self.task == "classification":
            entry |= {"ci_low": group.low, "ci_high": group.high}
        return entry


class _Warnings(Reporter):
    """Passes warnings on and keeps them, so that they stand in the result too."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self._reporter.note(message)

    def warn(self, message: str) -> None:
        self.said.append(message)
        self._reporter.warn(message)


def evaluate(options: EvalOptions, *, reporter: Reporter = SILENT) -> EvalReport:
    """Evaluate a probe on the rows of a store, and write the result if asked to.

    Raises
    ------
    InputError
        Columns, filters or classes that aren't there, or no row.
    MismatchError
        Features of another encoder than the probe's, or a result to compare with that is of other rows.
    """
    probe = read_probe(options.probe)
    said = _Warnings(reporter)
    with FeatureStore.open(options.features) as store:
        require_same_encoder(
            str(options.probe), probe.encoder, str(options.features), store.encoder, ignore_view=True
        )
        target = _target(options, probe, store)
        by_class = target if probe.task == "classification" else ""
        groups = make_groups(store, by_class if options.groups is None else options.groups)
        rows, missing = select(store, options.where, target, said)
        answers = answer(probe, options.probe.name, store, rows, target)
        comparison = None
        if options.compare is not None:
            comparison = compare(options.compare, options.probe, store, answers, target, groups)
        report = _report(options, probe, store, answers, groups, comparison, missing, target, said)
        if options.output is not None:
            body = report.to_json() | {"rows": _rows_json(store, answers, probe.task)}
            write_result(options.output, "eval", body)
    return report


def _target(options: EvalOptions, probe: Probe, store: FeatureStore) -> str:
    """The column of true answers: as asked, as when fitted, or the store's label."""
    if options.target is not None:
        return store.column(options.target).name
    if probe.target not in store.columns and store.label_column is not None:
        return store.label_column
    return probe.target


def _rows_json(store: FeatureStore, answers: Answers, task: str) -> dict[str, Any]:
    """What a later comparison needs: which rows, and which of them are right (in the order of their ids)."""
    right = None
    if task == "classification":
        right = "".join("1" if hit else "0" for hit in answers.right)
    return {"ids_sha256": ids_digest(store, answers.rows), "right": right}


def _report(
    options: EvalOptions,
    probe: Probe,
    store: FeatureStore,
    answers: Answers,
    groups: Groups,
    comparison: Comparison | None,
    missing: int,
    target: str,
    said: _Warnings,
) -> EvalReport:
    in_group = groups.codes[answers.rows]
    if (in_group < 0).any():
        missing_group = int((in_group < 0).any(axis=1).sum())
        said.warn(f"{missing_group} rows without a value of {', '.join(groups.columns)} are in no group")
    classification = probe.task == "classification"
    if classification:
        table = metrics.group_table(in_group, len(groups.keys), answers.right)
    else:
        table = metrics.error_table(in_group, len(groups.keys), answers.losses)
    reference, mask = _reference(options, probe, store)
    adjusted: list[float | None] = []
    absent = 0.0
    if mask is not None:
        sizes = groups.sizes(mask)
        for number in range(len(groups.crossings)):
            own = [group for group in table if groups.crossing[group.index] == number]
            average, lacking = metrics.adjusted_average(own, np.where(groups.crossing == number, sizes, 0))
            adjusted.append(average)
            absent = max(absent, lacking)
    predicted = len(np.unique(answers.predicted))
    if classification and predicted == 1 and len(answers.rows) > 1:
        only = probe.classes[int(answers.predicted[0])]
        said.warn(f"every row is predicted as {only!r}: one predicted class only")
    if absent > 0:
        said.warn(
            f"{absent:.1%} of the reference rows lie in groups without a row here: "
            "the adjusted average leaves these groups out"
        )
    overlap = _overlap(probe, store, answers.rows)
    oracle = bool((probe.meta.get("selection") or {}).get("oracle"))
    return EvalReport(
        n=len(answers.rows),
        # With several crossings there are as many adjusted averages, and none of them is the one.
        scores=_scores(probe.task, answers, adjusted[0] if len(adjusted) == 1 else None),
        worst_group=metrics.worst(table, highest=not classification),
        table=tuple(table),
        groups=groups,
        adjusted=tuple(adjusted),
        reference=reference,
        reference_missing=absent,
        without_answer=missing,
        predicted_classes=predicted,
        overlap=overlap,
        oracle=oracle,
        probe=_probe_json(options.probe, probe),
        features={"path": str(options.features), "content_sha256": store.content_sha256},
        task=probe.task,
        target=target,
        where=options.where,
        comparison=comparison,
        warnings=tuple(said.said),
        options=as_json(options),
    )


def _scores(task: str, answers: Answers, adjusted: float | None) -> dict[str, float | None]:
    if task == "regression":
        values = answers.truth.astype(np.float64)
        return {
            "mse": metrics.mean(answers.losses),
            "r2": metrics.r2(answers.predicted.astype(np.float64), values),
            "adjusted_mse": adjusted,
        }
    codes = answers.predicted.astype(np.int64)
    return {
        "accuracy": metrics.mean(answers.right),
        "adjusted_accuracy": adjusted,
        "balanced_accuracy": metrics.balanced_accuracy(codes, answers.truth.astype(np.int64)),
        "log_loss": metrics.mean(answers.losses),
    }


def _reference(
    options: EvalOptions, probe: Probe, store: FeatureStore
) -> tuple[str | None, NDArray[np.bool_] | None]:
    """The filter of the reference rows, and the rows as a mask; None where this store has none.

    In order: ``--reference``, the rows that the probe was trained on, the training rows of the split column.
    """
    if options.reference is not None:
        return options.reference, store.mask(options.reference)
    trained = (probe.meta.get("data") or {}).get("train")
    for where in (trained, split_filter(store, "train")):
        mask = None if where is None else _mask(store, where)
        if mask is not None and mask.any():
            return where, mask
    return None, None


def _mask(store: FeatureStore, where: str) -> NDArray[np.bool_] | None:
    """The rows of a filter that was written for another store perhaps; None if it doesn't fit this one."""
    try:
        return store.mask(where)
    except NcmError:
        return None


def _overlap(probe: Probe, store: FeatureStore, rows: NDArray[np.int64]) -> dict[str, int]:
    """How many evaluated rows the probe was fitted on, and how many it was chosen by, by their ids.

    Validation rows count only if there was a choice.
    """
    ids = [store.ids[row] for row in rows.tolist()]
    path = (probe.meta.get("selection") or {}).get("path")
    chosen = path is None or len(path) != 1
    return {
        "train": int(seen_rows(probe, "train", ids).sum()),
        "val": int(seen_rows(probe, "val", ids).sum()) if chosen else 0,
    }


def _probe_json(path: Path, probe: Probe) -> dict[str, Any]:
    selection = probe.meta.get("selection") or {}
    return {
        "path": str(path),
        "sha256": probe.sha256,
        "method": probe.meta.get("method"),
        "rank": probe.rank,
        "selection": selection.get("rule"),
        "converged": probe.meta.get("converged"),
        "classes": list(probe.classes),
    }
