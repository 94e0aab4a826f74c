"""What an embedding run says at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, listing
from ncm_cli.stages.embed_plan import OLD, Plan
from ncm_cli.store.features import Column, FailedRow, FeatureStore, Files, NumericColumn


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedReport:
    """What a run made.

    Attributes
    ----------
    rows, dim
        Of the store.
    new, reused, removed
        Rows encoded in this run or the interrupted one before it, rows taken from a store, and rows of the
        old store that the manifest no longer has.
    failed
        The images without features, and why.
    written
        False when the store already was what it should be.
    seconds, images_per_second
        Of the whole run, and while images were read and encoded (None when none were).
    device
        None when no model was needed.
    """

    path: str
    rows: int
    dim: int
    new: int
    reused: int
    removed: int
    failed: tuple[FailedRow, ...]
    max_failures: int
    written: bool
    seconds: float
    images_per_second: float | None
    device: str | None
    model: str
    fingerprint: str
    content_sha256: str

    @property
    def too_many_failed(self) -> bool:
        """Whether more images failed than were allowed."""
        return len(self.failed) > self.max_failures

    def to_json(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return dataclasses.asdict(self)


def all_failed(failed: Sequence[FailedRow], source: Path, range_advice: str | None) -> InputError:
    """The error when not one image could be embedded; ``range_advice`` is for samples without a range."""
    return InputError(
        f"none of the {len(failed)} images could be embedded",
        where=source,
        found=listing(f"{row.id}: {row.reason}" for row in failed),
        fix=range_advice or "mend the images or the paths, and run the same command again",
    )


def is_unchanged(
    old: FeatureStore,
    plan: Plan,
    ids: Sequence[str],
    columns: Mapping[str, Column | NumericColumn],
    labels: tuple[str | None, str | None],
    files: Files,
    failed: Sequence[FailedRow],
) -> bool:
    """Whether writing would give the store that is there, but for its time and options."""
    rows = len(ids)
    return (
        rows == old.rows
        and bool((plan.source == OLD).sum() == rows)
        and old.ids == tuple(ids)
        and old.failed == tuple(failed)
        and (old.label_column, old.split_column) == labels
        and list(old.columns) == list(columns)
        and all(_equal(old.columns[name], columns[name]) for name in columns)
        and _equal_files(old.files, files)
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Column) and isinstance(b, Column):
        return a.categories == b.categories and np.array_equal(a.codes, b.codes)
    if isinstance(a, NumericColumn) and isinstance(b, NumericColumn):
        return np.array_equal(a.values, b.values, equal_nan=True)
    return False


def _equal_files(a: Files | None, b: Files) -> bool:
    return (
        a is not None
        and a.path == b.path
        and a.sha256 == b.sha256
        and np.array_equal(a.size, b.size)
        and np.array_equal(a.mtime_ns, b.mtime_ns)
    )
