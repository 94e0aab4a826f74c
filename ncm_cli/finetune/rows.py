"""The rows on which a network is trained, read like those of a feature store, and their pictures."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import BUDGET, Codes, Mask, fits
from ncm_cli.errors import InputError, as_written, listing
from ncm_cli.finetune.options import FinetuneOptions
from ncm_cli.images.manifest import Manifest
from ncm_cli.images.paths import fetch
from ncm_cli.images.reading import IMAGES_PER_REQUEST, ReadImage, choose_readers, read_ahead
from ncm_cli.images.request import Encoder, Preprocess
from ncm_cli.images.samples import DecodeError
from ncm_cli.images.source import read_source
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.digests import Texts, digest_of, printable
from ncm_cli.store.rows import InMemoryRows

HASHED_AT_ONCE = 8
"""Number of files whose digests are computed concurrently."""


class ManifestRows(InMemoryRows):
    """The N rows of a manifest with the interface of a feature store made from it.

    So splits, filters, groups, pairs and leaks between rows are handled by the same code as in ``ncm fit``.
    Features are added once a network has computed them.
    """

    has_files = True

    def __init__(self, manifest: Manifest, sha256: Sequence[str]) -> None:
        assert manifest.files is not None
        columns = manifest.columns(range(len(manifest)))
        roles = {"label_column": manifest.label_column, "split_column": manifest.split_column}
        super().__init__(manifest.source, manifest.ids, columns, **roles)
        self.image_files, self._row_numbers_of = manifest.files, manifest.row_numbers_of
        self.content_nodes = Texts(np.array([digest.encode() for digest in sha256], dtype="S")).same()
        text = {name: list(values) for name, values in manifest.text.items()}
        self.content_sha256 = digest_of([manifest.ids, text, list(sha256)])

    @property
    def row_numbers_of(self) -> str | None:
        """The digest of the table whose rows' numbers are the ids; None for ids of a column."""
        return self._row_numbers_of

    def forget_others(self, target: str, known: Mask) -> None:
        """Remove a column's values from rows that aren't ``known``: their class wasn't trained on."""
        column = self.categorical(target)
        codes = np.where(known, column.codes, -1).astype(np.int32)
        self.columns = {**self.columns, column.name: dataclasses.replace(column, codes=codes)}


def read_rows(options: FinetuneOptions, reporter: Reporter) -> ManifestRows:
    """The rows of the source; every file is read once for its digest."""
    with reporter.task(f"reading {as_written(options.source)}", unit="images"):
        manifest = read_source(options)
    for note in manifest.notes:
        reporter.note(note)
    for warning in manifest.warnings:
        reporter.warn(warning)
    assert manifest.files is not None
    digests = []
    with (
        reporter.task("comparing contents", len(manifest), "images") as task,
        ThreadPoolExecutor(HASHED_AT_ONCE) as pool,
    ):
        for digest in pool.map(_digest, [file.path for file in manifest.files]):
            digests.append(digest)
            task.advance()
    return ManifestRows(manifest, digests)


def _digest(path: str) -> str:
    """SHA-256 of a file; "" if it can't be read, which reading its picture will report."""
    with contextlib.suppress(DecodeError):
        return hashlib.sha256(fetch(path)).hexdigest()
    return ""


class TrainingPictures:
    """The preprocessed pictures of some rows.

    If they fit the memory budget (8 bits a sample) they are decoded once and kept, otherwise they are decoded
    each time.

    Raises
    ------
    InputError
        Some pictures can't be used; all are listed, with the reasons.
    """

    def __init__(
        self,
        files: Sequence[ImageFile],
        rows: Codes,
        preprocess: Preprocess,
        workers: int | None,
        reporter: Reporter,
    ) -> None:
        self._files, self._preprocess, self._workers = files, preprocess, workers
        self._kept: np.ndarray | None = None
        self._place = np.full(len(files), -1, np.int64)
        self._place[rows] = np.arange(len(rows))
        bad, notes, large = [], [], 0
        with reporter.task("reading pictures", len(rows), "images") as task:
            for at, image in enumerate(self._read([files[row] for row in rows.tolist()], preprocess)):
                if image.item is None:
                    bad.append(image)
                elif self._kept is None and not large:
                    large = 0 if fits(len(rows), -(-image.item.nbytes // 8)) else image.item.nbytes
                    self._kept = None if large else np.empty((len(rows), *image.item.shape), image.item.dtype)
                if self._kept is not None and image.item is not None:
                    self._kept[at] = image.item
                notes += [f"{image.file.id}: {image.note}"] if image.note else []
                task.advance()
        if bad:
            raise InputError(
                f"{len(bad):,} of {len(rows):,} images can't be used",
                found=listing(
                    f"{image.file.id} ({printable(image.file.path)}): {image.reason}" for image in bad
                ),
                fix="repair them, or leave their rows out with --train, --val and --test",
            )
        if notes:
            reporter.warn(f"{len(notes)} images are used in part: {listing(notes)}")
        if large:
            mib = -(-len(rows) * large // 2**20)
            reporter.note(f"the pictures are read at every epoch; {BUDGET}={mib} would keep them in memory")

    def _read(self, files: Sequence[ImageFile], preprocess: Preprocess) -> Iterator[ReadImage]:
        count, processes = choose_readers(self._workers, files)
        window = 4 * count * (IMAGES_PER_REQUEST if processes else 1)
        return read_ahead(files, preprocess, workers=count, window=window, processes=processes)

    def batches(
        self, parts: Sequence[Codes], preprocess: Preprocess | None = None
    ) -> Iterator[list[np.ndarray]]:
        """The pictures of each part, in order; read again if ``preprocess`` has another augmentation."""
        if self._kept is not None and preprocess is None:
            yield from (list(self._kept[self._place[part]]) for part in parts)
            return
        files = [self._files[row] for part in parts for row in part.tolist()]
        images = self._read(files, preprocess or self._preprocess)
        with contextlib.closing(images):  # type: ignore[type-var]
            for part in parts:
                yield [_item(next(images)) for _ in part]

    def features(self, encoder: Encoder, rows: Codes) -> NDArray[np.float32]:
        """float32 (n, d) features of ``rows``, in order."""
        size = encoder.batch_size
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        return np.concatenate([encoder.encode(items) for items in self.batches(parts)])


def _item(image: ReadImage) -> np.ndarray:
    if image.item is None:
        what = "an image can't be read any more"
        raise InputError(what, where=printable(image.file.path), found=image.reason, fix="run the same again")
    return np.asarray(image.item)
