"""Decides, row by row, which features are already there and which must be made.

The settings that decide features, and what to say when a store was made with others.

What an embedding run says at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, MismatchError, listing
from ncm_cli.images.decode import SAMPLE_POLICY
from ncm_cli.images.feed import ReadImage
from ncm_cli.images.files import FoundFiles, native
from ncm_cli.images.formats import sniff
from ncm_cli.images.manifest import Manifest
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import Column, FailedRow, Files, NumericColumn
from ncm_cli.store.digests import canonical_json, differing_fields
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import sha256_file

NEW, OLD, OTHER, DONE = 0, 1, 2, 3
"""Where a row's features come from: nowhere yet, the existing output, ``--reuse``, this run or one before."""


@dataclass
class Plan:
    """Where each of the N rows of a manifest comes from, and the state of its file.

    Attributes
    ----------
    source
        int8 (N,): `NEW`, `OLD`, `OTHER` or `DONE`.
    position
        int64 (N,): the row within that store; −1 for `DONE`, whose rows are found by id.
    size, mtime_ns, sha256
        Of the file's bytes that the features belong to; blank digests where they aren't known yet.
    """

    source: np.ndarray
    position: np.ndarray
    path: list[str]
    size: np.ndarray
    mtime_ns: np.ndarray
    sha256: list[str]
    _hashed: dict[int, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, files: FoundFiles) -> Plan:
        """Nothing is there yet."""
        n = len(files.path)
        return cls(
            source=np.zeros(n, np.int8),
            position=np.full(n, -1, np.int64),
            path=files.path,
            size=files.size.copy(),
            mtime_ns=files.mtime_ns.copy(),
            sha256=[""] * n,
        )

    def take(self, row: int, source: int, position: int, sha256: str) -> None:
        """Row ``row`` has the features of row ``position`` of ``source``."""
        self.source[row], self.position[row], self.sha256[row] = source, position, sha256

    def take_read(self, image: ReadImage) -> None:
        """An image of this run is in the journal, as it was when it was read."""
        row = image.job.row
        self.size[row], self.mtime_ns[row] = image.size, image.mtime_ns
        self.take(row, DONE, -1, image.sha256)

    def pending(self) -> list[int]:
        """The rows whose features must be made, in manifest order."""
        return [int(row) for row in np.flatnonzero(self.source == NEW)]

    def leave_deep(self, source: int) -> None:
        """Make the rows of TIFF files anew that come from a store of another sample policy."""
        for row in np.flatnonzero(self.source == source):
            with contextlib.suppress(OSError), open(native(self.path[row]), "rb") as stream:  # noqa: PTH123
                if sniff(stream.read(8)) == "TIFF":
                    self.source[row], self.position[row], self.sha256[row] = NEW, -1, ""

    def digest(self, row: int) -> str:
        """SHA-256 of a row's file now; blank when it can't be read (reading it later says why)."""
        if row not in self._hashed:
            try:
                self._hashed[row] = sha256_file(native(self.path[row]))  # type: ignore[arg-type]
            except OSError:
                self._hashed[row] = ""
        return self._hashed[row]

    def files(self, rows: list[int]) -> Files:
        """The file records of some rows."""
        return Files(
            path=tuple(self.path[row] for row in rows),
            size=self.size[rows],
            mtime_ns=self.mtime_ns[rows],
            sha256=tuple(self.sha256[row] for row in rows),
        )

    def take_unchanged(
        self, ids: list[str], old: FeatureStore, files: Files, *, verify_content: bool, reporter: Reporter
    ) -> None:
        """Take the rows whose file is the one that the old store's row was made from.

        Path, size and time decide; where they differ, or with ``verify_content``, the content does.
        """
        known = {id: at for at, id in enumerate(old.ids)}
        doubtful = []
        for row in self.pending():
            at = known.get(ids[row], -1)
            if at < 0 or files.size[at] != self.size[row]:
                continue
            same = files.path[at] == self.path[row] and files.mtime_ns[at] == self.mtime_ns[row]
            if same and not verify_content:
                self.take(row, OLD, at, files.sha256[at])
            else:
                doubtful.append((row, at))
        with reporter.task("comparing contents", len(doubtful), "images") as task:
            for row, at in doubtful:
                if self.digest(row) == files.sha256[at]:
                    self.take(row, OLD, at, files.sha256[at])
                task.advance()


def plan_from_stores(
    manifest: Manifest,
    files: FoundFiles,
    old: FeatureStore | None,
    other: FeatureStore | None,
    *,
    verify_content: bool,
    reporter: Reporter,
) -> Plan:
    """The plan before any image is decoded: rows of the existing output, then rows of ``--reuse``."""
    plan = Plan.empty(files)
    if old is not None and old.files is not None:
        plan.take_unchanged(manifest.ids, old, old.files, verify_content=verify_content, reporter=reporter)
    if other is not None and other.files is not None:
        _take_equal_content(plan, manifest.ids, other, other.files, reporter)
    for kind, store in ((OLD, old), (OTHER, other)):
        if store is not None and store.request.get("encoder", {}).get("sample_policy") != SAMPLE_POLICY:
            plan.leave_deep(kind)
    return plan


def _take_equal_content(
    plan: Plan, ids: list[str], other: FeatureStore, files: Files, reporter: Reporter
) -> None:
    find: Callable[[str, str], int]
    if "view" in other.encoder:
        # An augmented view is drawn from the id, so equal content isn't enough.
        by_both = {(id, sha): at for at, (id, sha) in enumerate(zip(other.ids, files.sha256, strict=True))}
        find = lambda id, sha: by_both.get((id, sha), -1)  # noqa: E731
    else:
        by_content = {sha: at for at, sha in enumerate(files.sha256)}
        find = lambda id, sha: by_content.get(sha, -1)  # noqa: E731
    sizes = set(files.size.tolist())
    pending = [row for row in plan.pending() if int(plan.size[row]) in sizes]
    with reporter.task("comparing contents", len(pending), "images") as task:
        for row in pending:
            digest = plan.digest(row)
            at = find(ids[row], digest) if digest else -1
            if at >= 0:
                plan.take(row, OTHER, at, digest)
            task.advance()


_TELLING = ("kind", "model", "precision", "normalize", "view", "intensity_range")
"""Fields of a request that can't differ between two requests for the same features."""


@dataclass(frozen=True)
class Settings:
    """What a run asks for: the encoder's request key, and the type on disk."""

    key: dict[str, Any]
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        """As stored with the features."""
        return {"encoder": json.loads(canonical_json(self.key)), "dtype": self.dtype}

    def journal_key(self) -> dict[str, Any]:
        """As kept with an unfinished run: the type on disk plays no part in its float32 rows."""
        return {"encoder": self.as_dict()["encoder"]}

    def made(self, store: FeatureStore) -> bool:
        """Whether the very same request made a store: its rows are then valid without a look at the model."""
        return bool(store.request.get("encoder") == self.as_dict()["encoder"])

    def require_same(self, store: FeatureStore, description: dict[str, Any]) -> None:
        """Raise `MismatchError` unless a store's encoder is the one described."""
        if self.made(store):
            return
        fields = differing_fields(store.encoder, description)
        if fields:
            raise other_settings(store.path, fields)

    def require_unmoved(self, loaded: dict[str, Any], stored: dict[str, Any], output: Path) -> None:
        """Raise `MismatchError` if the loaded model isn't what an equal request gave before."""
        fields = differing_fields(stored, loaded)
        if fields:
            raise other_settings(output, fields)


def other_settings(path: Path, fields: list[tuple[str, Any, Any]]) -> MismatchError:
    """The error that names the fields in which a store differs from what is asked."""
    lines = [f"{name}: {_short(there)} there, {_short(asked)} asked for" for name, there, asked in fields]
    return MismatchError(
        "the store was made with other settings",
        where=path,
        found="\n    ".join(["", *lines]),
        expected="one encoder in one store; nothing was changed",
        fix="name another output with -o, use the store's settings, or replace the store with --fresh",
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def open_old(output: Path, settings: Settings) -> FeatureStore | None:
    """The store that is to be brought up to date, if there is one.

    Settings that can be compared without loading a model are compared here, so that a wrong model name
    costs no download.
    """
    if not output.exists():
        return None
    store = _opened(output, "the output is there and isn't a feature store that can be brought up to date")
    try:
        fields = differing_fields({"dtype": store.dtype}, {"dtype": settings.dtype})
        asked = settings.as_dict()["encoder"]
        there = store.request.get("encoder") or {"kind": store.encoder.get("kind")}
        fields += [field for field in differing_fields(there, asked) if field[0].split(".")[0] in _TELLING]
        if fields:
            raise other_settings(output, fields)
    except BaseException:
        store.close()
        raise
    return store


def open_reuse(path: Path, dtype: str) -> FeatureStore:
    """The store named by ``--reuse``; float16 rows can't become float32 ones again."""
    store = _opened(path, "--reuse names something else than a feature store")
    if store.files is None or (store.dtype, dtype) == ("float16", "float32"):
        problem = "no image files" if store.files is None else "float16 rows, where float32 is asked for"
        store.close()
        raise MismatchError("the rows can't be reused", where=path, found=problem)
    return store


def _opened(path: Path, what: str) -> FeatureStore:
    try:
        return FeatureStore.open(path)
    except InputError as error:
        found = "; ".join([error.what, *(text for label, text in error.lines() if label == "found")])
        raise InputError(
            what, where=path, found=found, fix="name another file, delete it, or replace it with --fresh"
        ) from error


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
