"""Decides, row by row, which features are already there and which must be made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ncm_cli.encoders.decode import SAMPLE_POLICY
from ncm_cli.encoders.feed import ReadImage
from ncm_cli.encoders.formats import sniff
from ncm_cli.progress import Reporter
from ncm_cli.store.atomic import sha256_file
from ncm_cli.store.features import FeatureStore, Files
from ncm_cli.store.image_files import FoundFiles, native
from ncm_cli.store.manifest import Manifest

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
