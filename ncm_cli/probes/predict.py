"""``ncm predict``: images or features -> class, probability and margin, one CSV row each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError
from ncm_cli.images.arrays import ARRAY_SUFFIXES, ArraySource, open_array
from ncm_cli.images.encoder import load_encoder, start_loading
from ncm_cli.images.folder import IMAGE_SUFFIXES, walk_images
from ncm_cli.images.manifest import ColumnNames, absolute_text, read_manifest
from ncm_cli.images.reading import encode_batches
from ncm_cli.images.request import ENCODER_KINDS, EncoderRequest, request_of
from ncm_cli.images.weights import looks_like_a_path, relocated
from ncm_cli.options import parse_batch_size, parse_workers
from ncm_cli.probes import metrics
from ncm_cli.probes.evaluate import logits
from ncm_cli.probes.options import PredictOptions
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.digests import OTHER_WEIGHTS, printable, require_same_encoder
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import atomic_path, require_file
from ncm_cli.store.outputs import STDOUT
from ncm_cli.store.probe import Probe, read_probe
from ncm_cli.store.sniff import HEAD_BYTES, PICTURES, sniff
from ncm_cli.store.tables import CsvWriter

SCORES_AT_ONCE = 1 << 20
"""Rows times classes: with thousands of classes the scores are much larger than the features."""

_Part = tuple[Sequence[str], list[str], np.ndarray]
"""Some rows in order: their ids, the reasons of failures (blank for the others), and the features of those
that didn't fail."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictReport:
    """Counts of the rows written."""

    output: Path
    rows: int
    """Rows predicted, without failed ones."""
    failed: list[tuple[str, str]]
    """(id, reason) of images that couldn't be used."""
    classes: dict[str, int]
    """Rows predicted as each class; empty for regression."""


def predict(
    options: PredictOptions, *, reporter: Reporter = SILENT, stdout: IO[str] | None = None
) -> PredictReport:
    """Predict the rows of a store or images, and write them as CSV, in order, as they come.

    A file appears whole or not at all. An image that can't be used gets a row with nothing but its id and the
    reason.

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
    names = ["class", "probability", "margin"] if probe.classes else ["value"]
    if options.probabilities:
        names += [f"p_{name}" for name in probe.classes]
    failed: list[tuple[str, str]] = []
    classes, count = dict.fromkeys(probe.classes, 0), 0
    with contextlib.ExitStack() as stack:
        parts, total, unit = _parts(options, probe, reporter, stack)
        stream = stdout or sys.stdout
        if options.output != STDOUT:
            unfinished = stack.enter_context(atomic_path(options.output))
            stream = stack.enter_context(unfinished.open("w", encoding="utf-8", newline=""))
        task = stack.enter_context(reporter.task("predicting", total, unit))
        table = CsvWriter(stream, ["id", *names, "reason"])
        for ids, reasons, features in parts:
            cells = _cells(probe, features, options.probabilities)
            for name, reason in zip(ids, reasons, strict=True):
                if reason:
                    failed.append((name, reason))
                    table.row([name, *[None] * len(names), reason])
                    continue
                row, count = next(cells), count + 1
                if probe.classes:
                    classes[str(row[0])] += 1
                table.row([name, *row, None])
            stream.flush()
            task.advance(len(ids))
    return PredictReport(output=options.output, rows=count, failed=failed, classes=classes)


def _parts(
    options: PredictOptions, probe: Probe, reporter: Reporter, stack: contextlib.ExitStack
) -> tuple[Iterable[_Part], int, str]:
    """The rows to predict, their number and their unit; raises errors before anything is written."""
    source, *further = options.source
    kind = None if source.is_dir() or further else _kind(source)
    if kind == "HDF5":
        store = stack.enter_context(FeatureStore(source))
        require_same_encoder(str(options.probe), probe.encoder, str(source), store.encoder, ignore_view=True)
        rows = np.flatnonzero(store.mask(options.where))
        if not len(rows):
            raise InputError("no row to predict", where=source, found=options.where)
        if store.failed:
            reporter.note(f"{len(store.failed)} images failed when they were embedded and have no row")
        return (
            (
                (store.ids[positions], [""] * len(positions), features)
                for positions, features in store.blocks(rows)
            ),
            len(rows),
            "rows",
        )
    if options.where is not None:
        raise UsageError("--where needs a feature store", found=source)
    if not further and source.suffix.lower() in ARRAY_SUFFIXES:
        array = open_array(source)
        if array.dim != probe.dim:
            raise MismatchError(
                "features of another length than the probe's",
                where=source,
                found=f"{array.dim} numbers in a row",
                expected=f"{probe.dim}, made by {probe.encoder.get('model')}",
            )
        reporter.note(f"{source.name}: ncm can't check that the probe's encoder made these features")
        return _array_parts(array), array.rows, "rows"
    images = find_images(options.source)
    encoded = _encoded(options, probe, images, reporter)
    return itertools.chain([next(encoded)], encoded), len(images), "images"


def _kind(path: Path) -> str | None:
    """What a file is, by its first bytes."""
    with require_file(path).open("rb") as stream:
        return sniff(stream.read(HEAD_BYTES))


def _array_parts(array: ArraySource) -> Iterator[_Part]:
    """The rows of an array; their ids are their numbers, from 0."""
    start = 0
    for block in array.blocks():
        finite = np.isfinite(block).all(axis=1)
        ids = [str(start + i) for i in range(len(block))]
        yield ids, ["" if is_finite else "numbers that aren't finite" for is_finite in finite], block[finite]
        start += len(block)


def _cells(probe: Probe, features: np.ndarray, every: bool) -> Iterator[list[str | float]]:
    """The columns of each row between id and reason, with the probabilities of all classes if ``every``."""
    step = max(1, SCORES_AT_ONCE // max(len(probe.classes), 1))
    for start in range(0, len(features), step):
        scores = logits(probe, features[start : start + step])
        if not probe.classes:
            yield from ([value] for value in scores[:, 0].tolist())
            continue
        shares, margins = metrics.probabilities(scores), metrics.margins(scores)
        for row, code, margin in zip(shares, metrics.decide(scores).tolist(), margins, strict=True):
            # Nine digits: the precision of float32 features.
            yield [
                probe.classes[code],
                *(f"{value:.9g}" for value in (row[code], margin, *(row if every else ()))),
            ]


def find_images(sources: Sequence[Path]) -> list[ImageFile]:
    """The images of a folder (at any depth), of a manifest, or the ones named.

    The id of a named image is its file's name; if two would have the same id, the ids are the paths.
    Raises `InputError` for a folder without images, and for ids or files of a manifest that are missing,
    repeated or blank; `UsageError` if one of several sources isn't an image.
    """
    source, *further = sources
    if source.is_dir() and not further:
        base = absolute_text(source)
        return [ImageFile(printable(name), f"{base}/{name}") for name in walk_images(source)[0]]
    # Recognised by content, or by name if it is damaged.
    others = [
        path
        for path in sources
        if path.is_dir() or not (_kind(path) in PICTURES or path.suffix.lower() in IMAGE_SUFFIXES)
    ]
    if not others:
        names = [printable(path.name) for path in sources]
        if len(set(names)) < len(names):
            names = [printable(str(path)) for path in sources]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError("an image is named twice", found=twice)
        return [ImageFile(name, absolute_text(path)) for name, path in zip(names, sources, strict=True)]
    if further:
        raise UsageError(
            "if there are several sources, all must be images",
            found=f"{others[0]} among {len(sources)}",
            fix="give a folder, a manifest, a feature store or an array alone",
        )
    manifest = read_manifest(source, ColumnNames(), root=None, images_only=True)
    assert manifest.files is not None
    return manifest.files


def _encoded(
    options: PredictOptions, probe: Probe, files: list[ImageFile], reporter: Reporter
) -> Iterator[_Part]:
    """Features of the images, batch by batch, from the probe's encoder, which the first item loads."""
    request = _request(options, probe)
    start_loading(request, reporter)
    encoder = load_encoder(request, device=options.device, reporter=reporter)
    require_same_encoder(
        str(options.probe), probe.encoder, "the encoder loaded", encoder.description, fix=OTHER_WEIGHTS
    )
    size, workers = parse_batch_size(options.batch_size) or encoder.batch_size, parse_workers(options.workers)
    batches = [files[start : start + size] for start in range(0, len(files), size)]
    for images, features in encode_batches(encoder, batches, workers=workers):
        for image in images:
            if image.note:
                reporter.warn(f"{image.file.id}: {image.note}")
        reasons = ["" if image.item is not None else image.reason or "unreadable" for image in images]
        yield [image.file.id for image in images], reasons, features


def _request(options: PredictOptions, probe: Probe) -> EncoderRequest:
    """The encoder to load, by the probe's description; its store or network says where the weights are."""
    described = probe.encoder
    if described.get("kind") not in ENCODER_KINDS:
        raise InputError(
            "the probe's features were made elsewhere, so images can't be predicted directly",
            where=options.probe,
            found=f"encoder {described.get('model')!r}",
            fix="make the images' features the same way, ncm embed MANIFEST.csv --from-array X.npy "
            "--encoder-name NAME -o F.h5, then ncm predict PROBE F.h5",
        )
    data: dict[str, Any] = probe.meta.get("data") or {}
    probe_folder = options.probe.absolute().parent
    made_with: dict[str, Any] = {"pretrained": data.get("checkpoint")}
    store_path, home = Path((data.get("features") or {}).get("path") or ""), probe_folder
    # The path is that of the command that fitted the probe, which may have run in another folder.
    places = (
        store_path,
        *(folder / store_path for folder in (probe_folder, *probe_folder.parents)),
        probe_folder / store_path.name,
    )
    for path in (place for place in places if place.is_file()):
        # The store may have been replaced.
        with contextlib.suppress(NcmError), FeatureStore(path) as store:
            if store.fingerprint == probe.fingerprint:
                made_with, home = dict(store.options), path.absolute().parent
                break
    request = request_of(
        described,
        relocated(made_with, home, probe_folder),
        pretrained=options.pretrained,
        where=options.probe,
    )
    if options.pretrained is None:
        _require_weights(request, options.probe, store_path, home)
    return request


def _require_weights(request: EncoderRequest, probe: Path, store: Path, home: Path) -> None:
    """Refuse a request whose weights nothing names, or whose file isn't there."""
    weights, probe_folder = request.weights, probe.absolute().parent
    if request.model.startswith("local-dir:"):
        weights = request.model.removeprefix("local-dir:")
    elif not request.has_network or request.random_init or request.model.startswith("hf-hub:"):
        return
    fix = f"--pretrained FILE; or ncm embed the images, and ncm predict {probe.name} F.h5"
    if not weights:
        raise InputError(
            f"nothing says which weights {request.model}, the probe's encoder, has",
            where=probe,
            found=f"no feature store {store} with its features, here or beside the probe in {probe_folder}"
            if store.name
            else "a probe that doesn't name its feature store",
            fix=fix,
        )
    if request.model.startswith("local-dir:") or looks_like_a_path(weights):
        if Path(weights).expanduser().exists():
            return
        raise InputError(
            f"the weights of {request.model}, the probe's encoder, aren't there",
            where=probe,
            found=f"no {weights}, where its feature store says, and no {Path(weights).name} in "
            + " or ".join(dict.fromkeys((str(home), str(probe_folder)))),
            fix=fix,
        )
