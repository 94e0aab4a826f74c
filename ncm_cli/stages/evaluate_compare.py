"""Two probes on the same rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, MismatchError
from ncm_cli.methods.comparison import MeanDifference, Paired, mean_difference
from ncm_cli.methods.comparison import compare as compare_hits
from ncm_cli.methods.metrics import mean
from ncm_cli.stages.common import require_same_encoder
from ncm_cli.stages.evaluate_rows import Answers, answer, ids_digest
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.groups import Groups
from ncm_cli.store.probe import read_probe
from ncm_cli.store.results import read_result


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
