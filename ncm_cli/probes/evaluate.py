"""``ncm eval``: how accurate a probe is, on average, by group, and compared with another one."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Codes, Features, Mask
from ncm_cli.errors import InputError, MismatchError, NcmError, listing
from ncm_cli.options import where_text
from ncm_cli.probes import metrics
from ncm_cli.probes.metric_names import metrics_of
from ncm_cli.probes.more_metrics import (
    Predictions,
    calibration,
    resamples_for,
    with_interval,
    worst_of,
)
from ncm_cli.probes.options import EvalOptions
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.solvers.methods import SCALINGS
from ncm_cli.solvers.projection import Scaling
from ncm_cli.store import recognise
from ncm_cli.store.columns import Column, categories_of
from ncm_cli.store.digests import require_same_encoder
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import jsonable, read_result, write_result
from ncm_cli.store.probe import Probe, read_probe, seen_rows
from ncm_cli.store.roles import Groups, make_groups, read_target, split_filter
from ncm_cli.store.rows import FeatureRows

SEEN = {"train": ("training rows", "fitted on"), "val": ("validation rows", "chosen by")}
"""For rows that a probe has seen: the mark beside its numbers, and what the rows were used for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """A probe's answers for n rows of a store."""

    probe: Probe
    rows: Codes
    """Their positions in the store."""
    truth: NDArray[Any]
    """Codes of the probe's classes, or numbers for regression; ``predicted`` likewise."""
    predicted: NDArray[Any]
    losses: Array
    """Log loss in nats, or squared errors for regression."""
    confidence: Array
    """The probability of the predicted class; for regression, the absolute error of the prediction."""
    probability: Array | None = None
    """(n, classes) the probability of each class, where it was asked for; (n, 0) for regression."""

    @property
    def right(self) -> Mask:
        """(n,) whether each prediction equals the truth."""
        return self.predicted == self.truth

    @property
    def values(self) -> NDArray[Any]:
        """(n,) hits (bool), or squared errors for regression, by which groups are compared."""
        return self.right if self.probe.classes else self.losses

    def surest(self, mask: Mask) -> Codes:
        """Positions of the answers in a mask (n,), the most confident (for regression, the worst) first."""
        return np.flatnonzero(mask)[np.argsort(-self.confidence[mask], kind="stable")]


class _Warnings(Reporter):
    """Passes warnings on and keeps them for the result."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.said: list[str] = []

    def warn(self, message: str) -> None:
        self.said.append(message)
        self._reporter.warn(message)


def evaluate(
    options: EvalOptions, *, store: FeatureRows | None = None, reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Evaluate a probe on the rows of a store, open already or named, and write the result if asked to.

    Returns
    -------
    The result's body, without rows. Each group has its columns' categories and `metrics.summary`; each
    crossing of ``--groups`` its worst group and adjusted average. ``overlap`` counts the rows that the probe
    was fitted on (``train``) or chosen by (``val``). Differences in ``comparison`` are this probe minus the
    other.

    Raises
    ------
    InputError
        Columns, filters or classes that aren't there, or no row to evaluate.
    MismatchError
        Features of another encoder than the probe's, or a comparison with a result on other rows.
    """
    recorder, probe = _Warnings(reporter), read_probe(options.probe)
    with store or FeatureStore(options.features) as store:
        require_same_encoder(
            str(options.probe), probe.encoder, str(options.features), store.encoder, ignore_view=True
        )
        target = _target(options, probe, store)
        groups = make_groups(store, options.groups or (target if probe.classes else ""))
        rows, missing = _rows(store, options.where, target, recorder)
        asked = metrics_of(options.metrics, probe.task) if options.metrics else ()
        answers = answers_of(probe, options.probe.name, store, rows, target, probabilities=bool(asked))
        in_group = groups.codes[rows]
        for names, count in groups.lacking(in_group):
            if count:
                recorder.warn(f"{count:,} rows without a value of {names} are in none of its groups")
        parts = [(in_group == index).any(axis=1) for index in range(len(groups.keys))]
        table = [
            {"group": groups.key(i), **metrics.summary(answers.values[part])} for i, part in enumerate(parts)
        ]
        comparison = None
        if options.compare is not None:
            theirs = _theirs(options, store, answers, target)
            comparison = _compare(options.compare, answers.values, theirs, groups, parts)
        reference, crossings = _crossings(options, probe, store, groups, table, recorder)
        # With several crossings there are several adjusted averages, none of which is the overall one.
        scores = _scores(answers, crossings[0]["adjusted"] if len(crossings) == 1 else None)
        extra_metrics = _more_metrics(asked, answers, table, parts, recorder)
        classes = np.unique(answers.predicted)
        if probe.classes and len(classes) == 1 and len(rows) > 1:
            only = probe.classes[int(classes[0])]
            recorder.warn(f"the probe predicts {only!r} for every row")
        if reference["missing_share"] > 0:
            recorder.warn(
                f"{reference['missing_share']:.1%} of the reference rows are in groups without a row here: "
                "the adjusted average leaves these groups out"
            )
        selection = probe.meta.get("selection") or {}
        ids = store.ids[rows]
        fitted_on = (probe.meta.get("data") or {}).get("features") or {}
        same_ids = fitted_on.get("row_numbers_of") == store.row_numbers_of  # else row numbers of two tables
        seen = {part: same_ids * int(seen_rows(probe, part, ids).sum()) for part in ("train", "val")}
        # A single candidate wasn't chosen by validation rows; the fitted probe in a mixture may have been.
        if len(selection.get("path") or ()) == 1 and not probe.meta.get("mixed_with"):
            seen["val"] = 0
        body: dict[str, Any] = {
            "n": len(rows),
            **scores,
            **extra_metrics,
            "worst_group": metrics.worst(table),
            "groups": table,
            "crossings": crossings,
            "reference": reference,
            "oracle": bool(selection.get("oracle")),
            "overlap": seen,
            "task": probe.task,
            "target": target,
            "where": options.where,
            "rows_without_answer": missing,
            "predicted_classes": len(classes),
            "probe": {
                "path": str(options.probe),
                "sha256": probe.sha256,
                "method": probe.meta.get("method"),
                "rank": probe.rank,
                "selection": selection.get("rule"),
                "converged": probe.meta.get("converged"),
                "classes": list(probe.classes),
            },
            "features": {"path": str(options.features), "content_sha256": store.content_sha256},
            "comparison": comparison,
            "warnings": recorder.said,
            "options": jsonable(options),
        }
        if options.output is not None:
            # For later comparisons: which rows there are and which are predicted right, sorted by id.
            right = "".join("01"[hit] for hit in answers.values.tolist()) if probe.classes else None
            kept = {"ids_sha256": _ids_digest(store, rows), "right": right}
            write_result(options.output, "eval", body | {"rows": kept})
    return body


def scaling_of(probe: Probe) -> Scaling:
    """How the probe's features are scaled."""
    scaling = probe.meta.get("scaling") or {}
    kind = scaling.get("kind", "none")
    if kind not in SCALINGS or (kind == "standard" and (probe.mean is None or probe.scale is None)):
        raise InputError("a feature scaling that isn't known", found=kind, expected=" | ".join(SCALINGS))
    return Scaling(kind, float(scaling.get("factor") or 1.0), probe.mean, probe.scale)


def scale_like(probe: Probe, X: Features) -> Any:
    """float64 (n, d): features scaled as the probe's training rows were."""
    if X.shape[-1] != probe.dim:
        raise MismatchError(
            "features of another width than the probe's", found=int(X.shape[-1]), expected=int(probe.dim)
        )
    return scaling_of(probe).apply(X)


def logits(probe: Probe, X: np.ndarray) -> np.ndarray:
    """float64 (n, C): scaled features times weights plus bias; for regression the predictions themselves."""
    scores: np.ndarray = scale_like(probe, X) @ probe.weight.T + probe.bias
    return scores


def _target(options: EvalOptions, probe: Probe, store: FeatureRows) -> str:
    """The target column: the requested one, else the probe's; never another one in place of a missing one."""
    if options.target is not None:
        return store.column(options.target).name
    name = store.own_column(probe.target)
    if name is None:
        raise MismatchError(
            f"the store has no column {probe.target!r}, which the probe predicts",
            where=store.path,
            found=f"columns {listing(store.columns)}",
            fix=f"name the column of the true answers: --target {store.label_column or 'COLUMN'}",
        )
    return name


def _rows(store: FeatureRows, where: str | None, target: str, reporter: Reporter) -> tuple[np.ndarray, int]:
    """Positions of the rows to evaluate, sorted by id, and the number of rows left out without a target."""
    chosen = store.mask(where)
    known = categories_of(store.column(target)).codes >= 0
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
    return rows[store.ids[rows].order], missing


def answers_of(
    probe: Probe,
    name: object,
    store: FeatureRows,
    rows: np.ndarray,
    target: str,
    *,
    probabilities: bool = False,
) -> Answers:
    """A probe's answers for ``rows``, read in blocks; ``name`` is the probe's file, for messages."""
    truth = read_target(store, target, probe.classes or None).y[rows]
    if probe.classes and (truth < 0).any():
        raise _strangers(store.categorical(target), rows[truth < 0], probe, name, store)
    predicted, (losses, confidence) = np.empty_like(truth), np.empty((2, len(rows)))
    probability = np.empty((len(rows), len(probe.classes))) if probabilities else None
    order, done = np.argsort(rows), 0
    for positions, features in store.blocks(rows[order]):
        part = order[done : done + len(positions)]
        done += len(positions)
        scores = logits(probe, features)
        if probe.classes:
            predicted[part] = metrics.decide(scores)
            losses[part] = metrics.row_log_loss(scores, truth[part])
            confidence[part] = np.exp(-metrics.row_log_loss(scores, predicted[part]))
            if probability is not None:
                probability[part] = metrics.probabilities(scores)
        else:
            predicted[part] = scores[:, 0]
            confidence[part] = np.abs(predicted[part] - truth[part])
            losses[part] = (predicted[part] - truth[part]) ** 2
    return Answers(probe, rows, truth, predicted, losses, confidence, probability)


def _strangers(
    column: Column, rows: np.ndarray, probe: Probe, name: object, store: FeatureRows
) -> InputError:
    counts = np.bincount(column.codes[rows], minlength=len(column.categories))
    unseen = {category: n for category, n in zip(column.categories, counts, strict=True) if n}
    fix = "fit with rows of these classes, or embed without them"
    if len(unseen) <= 12:
        others = where_text(column.name, *unseen, negated=True)
        fix = f"leave them out: --where {shlex.quote(others)}"
    return InputError(
        f"rows of {column.name!r} whose class {name} has never seen",
        where=store.path,
        found=listing(f"{category} ({n} rows)" for category, n in unseen.items()),
        expected=f"one of: {listing(probe.classes)}",
        fix=fix,
    )


def _scores(answers: Answers, adjusted: float | None) -> dict[str, float | None]:
    task = "classification" if answers.values.dtype == bool else "regression"
    measures = metrics.MEASURES[task].items()
    return {name: measure.of(answers) if measure.of else adjusted for name, measure in measures}


def _more_metrics(
    asked: Sequence[str],
    answers: Answers,
    table: list[dict[str, Any]],
    parts: list[Mask],
    reporter: Reporter,
) -> dict[str, Any]:
    """The metrics of ``--metrics`` over all rows, with each one's worst group; adds them to ``table``."""
    if answers.probability is None:
        return {}
    rows = Predictions(answers.truth, answers.predicted, answers.losses, answers.probability)
    resamples = {name: resamples_for(name, *rows.probability.shape) for name in asked}
    if without := [name for name, times in resamples.items() if not times]:
        reporter.warn(
            f"no intervals of {', '.join(without)}: {len(rows.truth):,} rows × {rows.probability.shape[1]:,} "
            "classes take too long to resample"
        )
    overall: dict[str, Any] = {}
    with reporter.task("metrics", len(asked) * (1 + len(parts)), "values") as task:
        for name in asked:
            overall[name] = with_interval(name, rows, resamples[name])
            task.advance(1)
            for entry, part in zip(table, parts, strict=True):
                in_group = with_interval(name, rows.take(part), resamples[name])
                entry.setdefault("metrics", {})[name] = in_group
                task.advance(1)
            overall[name]["worst_group"] = worst_of(table, name)
    bins = (
        {"calibration": [one._asdict() for one in calibration(rows.confidence, rows.right)]}
        if "ece" in asked
        else {}
    )
    return {"metrics": overall, **bins}


def _crossings(
    options: EvalOptions,
    probe: Probe,
    store: FeatureRows,
    groups: Groups,
    table: list[dict[str, Any]],
    reporter: Reporter,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The reference rows of the adjusted averages, and each crossing's worst group and adjusted average.

    The reference is ``--reference``, else the rows that the probe was trained on, else the training rows of
    the split column, as far as this store has them.
    """
    where, mask = options.reference, None
    if where is not None:
        mask = store.mask(where)
    else:
        trained = (probe.meta.get("data") or {}).get("train")
        for where in filter(None, (trained, split_filter(store, "train"))):
            with contextlib.suppress(NcmError):  # it was written for another store
                mask = store.mask(where)
                if mask.any():
                    break
            mask = None
        if trained and where != trained and mask is not None and groups.keys:
            reporter.warn(
                f"the store has no rows of {trained}, which the probe was trained on: the adjusted average "
                f"weights groups as in {where}; --reference names other rows"
            )
    crossings, absent = [], 0.0
    for number, columns in enumerate(groups.crossings):
        members = np.flatnonzero(groups.crossing == number)
        entries, average = [table[i] for i in members], None
        if mask is not None:
            average, lacking = metrics.adjusted_average(entries, groups.sizes(mask)[members])
            absent = max(absent, lacking)
        crossing = {"columns": list(columns), "worst_group": metrics.worst(entries), "adjusted": average}
        crossings.append(crossing)
    return {"where": None if mask is None else where, "missing_share": absent}, crossings


def _theirs(options: EvalOptions, store: FeatureRows, answers: Answers, target: str) -> Mask | Array:
    """Another probe's hits or squared errors on the same rows, computed or from its saved result."""
    hits, other = answers.values.dtype == bool, options.compare
    assert other is not None
    if recognise(other) == "result":
        values = _saved(other, store, answers.rows, target)
    else:
        probe = read_probe(other)
        require_same_encoder(str(other), probe.encoder, str(store.path), store.encoder, ignore_view=True)
        if bool(probe.classes) == hits:
            if options.target is None and store.own_column(probe.target) != target:
                raise MismatchError(
                    "the two probes predict different columns",
                    where=other,
                    found=probe.target,
                    expected=target,
                    fix=f"name the column of the true answers of both: --target {target}",
                )
            return answers_of(probe, other.name, store, answers.rows, target).values
        values = None
    if values is None or not hits:
        probes = f"{options.probe} and {other}"
        raise MismatchError("a classifier can't be compared with a regression", where=probes)
    return values


def _compare(
    other: Path, values: NDArray[Any], theirs: NDArray[Any], groups: Groups, parts: list[Mask]
) -> dict[str, Any]:
    named, average = {"other": str(other)}, metrics.mean(theirs)
    if values.dtype != bool:
        difference, low, high = metrics.mean_difference(values, theirs)
        interval = {"ci_low": low, "ci_high": high}
        return {**named, "other_mse": average, "mse_difference": difference, **interval}
    by_group = []
    for index, part in enumerate(parts):
        paired = metrics.compare(values[part], theirs[part])
        differences = {
            name: getattr(paired, name) if paired.n else None for name in ("difference", "ci_low", "ci_high")
        }
        by_group.append({"group": groups.key(index), "n": paired.n, **differences})
    overall = dataclasses.asdict(metrics.compare(values, theirs))
    return {**named, "other_accuracy": average, **overall, "groups": by_group}


def _saved(path: Path, store: FeatureRows, rows: Codes, target: str) -> Mask:
    """Which of the rows a saved result counts as right."""
    saved = read_result(path, kind="eval")
    saved_rows = saved.get("rows") or {}
    right = saved_rows.get("right")
    if not isinstance(right, str) or set(right) - {"0", "1"}:
        raise InputError(
            "the result doesn't say which rows were right",
            where=path,
            fix="compare with the probe itself, or write the result again with ncm eval -o",
        )
    if saved_rows.get("ids_sha256") != _ids_digest(store, rows) or len(right) != len(rows):
        raise MismatchError(
            "the two results are of different rows",
            where=path,
            found=f"{len(right)} rows with --where {saved.get('where')!r}",
            expected=f"the same {len(rows)} rows",
            fix="evaluate both with the same --where",
        )
    if saved.get("target") != target:
        raise MismatchError(
            "the two results are of different columns",
            where=path,
            found=saved.get("target"),
            expected=target,
            fix=f"evaluate both with --target {target}",
        )
    return np.frombuffer(right.encode("ascii"), dtype=np.uint8) == ord("1")


def _ids_digest(store: FeatureRows, rows: np.ndarray) -> str:
    """SHA-256 over the ids of rows; the rows are sorted by id."""
    digest = hashlib.sha256()
    for text in map(str.encode, store.ids[rows]):
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()
