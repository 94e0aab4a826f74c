"""Images to predict: where they are, and the features of the encoder that a probe names.

``ncm predict``: images or features -> class, probability and margin, one CSV row each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError
from ncm_cli.images.decode import sniff
from ncm_cli.images.encoder import EncoderRequest, load_encoder
from ncm_cli.images.manifest import (
    IMAGE_SUFFIXES,
    absolute_text,
    check_ids,
    find_files,
    printable,
    walk_images,
)
from ncm_cli.images.options import parse_batch_size, parse_workers
from ncm_cli.images.rows import ImageJob, encode_batches
from ncm_cli.probes import metrics
from ncm_cli.probes.apply import logits, require_same_encoder
from ncm_cli.probes.options import PredictOptions
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import atomic_path, require_file
from ncm_cli.store.probe import Probe, read_probe
from ncm_cli.store.tables import CsvWriter, read_table


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some of the images, in order: ids, a reason for each that failed, and the features of the rest."""

    ids: list[str]
    reasons: list[str]
    """'' for an image that has features."""
    features: np.ndarray
    """float32 (b, d), of the images without a reason."""


def is_image(path: Path) -> bool:
    """Whether a file is meant as an image: by content or, for a damaged one, by name."""
    with path.open("rb") as stream:
        head = stream.read(64)
    return sniff(head) is not None or path.suffix.lower() in IMAGE_SUFFIXES


def find_images(options: PredictOptions) -> list[ImageJob]:
    """The images of a folder (at any depth), of a manifest, or the single one.

    Raises `InputError` for a folder without images, and for ids or files of a manifest that are missing,
    repeated or blank.
    """
    source = options.source
    if source.is_dir():
        return _folder(source)
    if is_image(source):
        return [ImageJob(0, source.name, absolute_text(source))]
    table = read_table(source)
    paths = table.column(options.path_col, option="--path-col")
    id_col = options.id_col or ("id" if "id" in table.columns else options.path_col)
    ids = table.column(id_col, option="--id-col")
    check_ids(ids, table, id_col)
    base = absolute_text(options.root if options.root is not None else source.parent)
    found = find_files(paths, base, table.row_name, source)
    return [ImageJob(i, name, path) for i, (name, path) in enumerate(zip(ids, found.path, strict=True))]


def _folder(folder: Path) -> list[ImageJob]:
    base = absolute_text(folder)
    return [ImageJob(i, printable(name), f"{base}/{name}") for i, name in enumerate(walk_images(folder)[0])]


def encode(
    options: PredictOptions, probe: Probe, jobs: list[ImageJob], reporter: Reporter
) -> Iterator[Batch]:
    """Features of the images by the probe's encoder, batch by batch; the first item loads the encoder.

    Raises `MismatchError` where the encoder that loads isn't the one whose features the probe was
    fitted on, and `InputError` where it can't be loaded.
    """
    encoder = load_encoder(_request(options, probe), device=options.device, reporter=reporter)
    try:
        require_same_encoder(str(options.probe), probe.encoder, "the encoder loaded", encoder.description)
    except MismatchError as error:
        error.fix = "--pretrained FILE names the weights that the features were made with"
        raise
    size = parse_batch_size(options.batch_size) or encoder.batch_size
    workers = parse_workers(options.workers)
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    for batch in encode_batches(encoder, batches, workers=workers):
        for image in batch.images:
            if image.note:
                reporter.warn(f"{image.job.id}: {image.note}")
        yield Batch(
            [image.job.id for image in batch.images],
            ["" if image.item is not None else image.reason or "unreadable" for image in batch.images],
            batch.features,
        )


def _request(options: PredictOptions, probe: Probe) -> EncoderRequest:
    """What to load, from the probe's description and, for the weights, the store it was fitted on."""
    described = probe.encoder
    if described.get("kind") not in ("pixels", "timm", "open_clip"):
        raise InputError(
            "the probe's features were made elsewhere, so images can't be predicted directly",
            where=options.probe,
            found=f"encoder {described.get('model')!r}",
            fix="make the images' features the same way, ncm embed MANIFEST.csv --from-array X.npy "
            "--encoder-name NAME -o F.h5, then ncm predict PROBE F.h5",
        )
    made_with = {} if options.pretrained else _embed_options(probe)
    return EncoderRequest(
        model=made_with.get("model") or described["model"],
        pretrained=options.pretrained or made_with.get("pretrained"),
        precision=described.get("precision") or "fp32",
        normalize=bool(described.get("normalize")),
        random_init=bool(made_with.get("random_init")),
        seed=int(made_with.get("seed") or 0),
        intensity_range=described.get("intensity_range"),
    )


def _embed_options(probe: Probe) -> dict[str, Any]:
    """The options of the embedding that the probe was fitted on, if its store is still where it was."""
    path = ((probe.meta.get("data") or {}).get("features") or {}).get("path")
    if not path or not Path(path).is_file():
        return {}
    try:
        with FeatureStore.open(path) as store:
            return dict(store.options) if store.fingerprint == probe.fingerprint else {}
    except NcmError:
        return {}


STDOUT = Path("-")

SCORES_AT_ONCE = 1 << 20
"""Rows times classes: with thousands of classes the scores are much larger than the features."""

_HDF5 = b"\x89HDF\r\n\x1a\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictReport:
    """What was written."""

    output: Path
    rows: int
    """Rows predicted, failed ones not counted."""
    failed: tuple[tuple[str, str], ...]
    """(id, reason) of images that couldn't be used."""
    classes: dict[str, int]
    """Rows predicted as each class; empty for regression."""


def predict(
    options: PredictOptions, *, reporter: Reporter = SILENT, stdout: IO[str] | None = None
) -> PredictReport:
    """Predict the rows of a store or images, and write them as CSV, in order, as they come.

    A file appears whole or not at all. An image that can't be used gets a row with the reason, and
    nothing else.

    Parameters
    ----------
    stdout
        Where rows go when the output is ``-``; `sys.stdout` if left out.

    Raises
    ------
    InputError
        A source that is neither store, image, folder nor manifest, or images that aren't there.
    MismatchError
        Features of another encoder than the probe's.
    """
    probe = read_probe(options.probe)
    if _is_store(options.source):
        return _from_store(options, probe, reporter, stdout)
    if options.where is not None:
        raise UsageError("--where needs a feature store", found=options.source)
    return _from_images(options, probe, reporter, stdout)


def _is_store(path: Path) -> bool:
    if path.is_dir():
        return False
    with require_file(path).open("rb") as stream:
        return stream.read(8) == _HDF5


def _from_store(
    options: PredictOptions, probe: Probe, reporter: Reporter, stdout: IO[str] | None
) -> PredictReport:
    with FeatureStore.open(options.source) as store:
        require_same_encoder(
            str(options.probe), probe.encoder, str(options.source), store.encoder, ignore_view=True
        )
        rows = np.flatnonzero(store.mask(options.where))
        if not len(rows):
            raise InputError("no row to predict", where=options.source, found=options.where)
        if store.failed:
            reporter.note(f"{len(store.failed)} images failed when they were embedded and have no row")
        with (
            _open(options.output, stdout) as stream,
            reporter.task("predicting", len(rows)) as task,
        ):
            writer = _Writer(stream, probe, options.probabilities)
            for positions, features in store.blocks(rows):
                writer.write([store.ids[i] for i in positions], [""] * len(positions), features)
                task.advance(len(positions))
    return writer.report(options.output)


def _from_images(
    options: PredictOptions, probe: Probe, reporter: Reporter, stdout: IO[str] | None
) -> PredictReport:
    # Imported here: a store needs no image library.

    jobs = find_images(options)
    # The encoder loads with the first batch: what is wrong with it is said before anything is written.
    batches = encode(options, probe, jobs, reporter)
    batches = itertools.chain([next(batches)], batches)
    with (
        _open(options.output, stdout) as stream,
        reporter.task("predicting", len(jobs), "images") as task,
    ):
        writer = _Writer(stream, probe, options.probabilities)
        for batch in batches:
            writer.write(batch.ids, batch.reasons, batch.features)
            task.advance(len(batch.ids))
    return writer.report(options.output)


@contextlib.contextmanager
def _open(output: Path, stdout: IO[str] | None) -> Iterator[IO[str]]:
    if output == STDOUT:
        stream = stdout or sys.stdout
        yield stream
        stream.flush()
        return
    with atomic_path(output) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        yield stream


class _Writer:
    """Writes predictions and counts them."""

    def __init__(self, stream: IO[str], probe: Probe, probabilities: bool) -> None:
        self._stream, self._probe, self._all = stream, probe, probabilities
        self._counts = np.zeros(len(probe.classes), dtype=np.int64)
        self._rows = 0
        self._failed: list[tuple[str, str]] = []
        if probe.task == "regression":
            self._names = ["value"]
        else:
            self._names = ["class", "probability", "margin"]
            self._names += [f"p_{name}" for name in probe.classes] if probabilities else []
        self._csv = CsvWriter(stream, ["id", *self._names, "reason"])

    def write(self, ids: list[str], reasons: list[str], features: np.ndarray) -> None:
        """Write some rows; ``features`` are of those without a reason."""
        cells = iter(self._cells(features) if len(features) else [])
        for name, reason in zip(ids, reasons, strict=True):
            if reason:
                self._failed.append((name, reason))
                self._csv.row([name, *[None] * len(self._names), reason])
            else:
                self._rows += 1
                self._csv.row([name, *next(cells), None])
        self._stream.flush()

    def _cells(self, features: np.ndarray) -> Iterator[list[str | float]]:
        step = max(1, SCORES_AT_ONCE // max(len(self._probe.classes), 1))
        for start in range(0, len(features), step):
            yield from self._cells_of(features[start : start + step])

    def _cells_of(self, features: np.ndarray) -> Iterator[list[str | float]]:
        scores = logits(self._probe, features)
        if self._probe.task == "regression":
            yield from ([value] for value in scores[:, 0].tolist())
            return
        codes = metrics.decide(scores)
        self._counts += np.bincount(codes, minlength=len(self._counts))
        shares, margins = metrics.probabilities(scores), metrics.margins(scores)
        for i, code in enumerate(codes.tolist()):
            row = [self._probe.classes[code], _short(shares[i, code]), _short(margins[i])]
            yield [*row, *map(_short, shares[i])] if self._all else row

    def report(self, output: Path) -> PredictReport:
        """What has been written."""
        counts = dict(zip(self._probe.classes, self._counts.tolist(), strict=True))
        return PredictReport(output=output, rows=self._rows, failed=tuple(self._failed), classes=counts)


def _short(value: float) -> str:
    """Nine digits: all that float32 features can mean."""
    return f"{value:.9g}"
