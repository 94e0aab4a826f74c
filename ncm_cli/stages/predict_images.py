"""Images to predict: where they are, and the features of the encoder that a probe names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.encoders.base import EncoderRequest, load_encoder
from ncm_cli.encoders.feed import Job, default_workers, encode_batches
from ncm_cli.encoders.formats import sniff
from ncm_cli.errors import InputError, MismatchError, NcmError
from ncm_cli.options.embed import parse_batch_size, parse_workers
from ncm_cli.options.predict import PredictOptions
from ncm_cli.progress import Reporter
from ncm_cli.stages.common import require_same_encoder
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.image_files import IMAGE_SUFFIXES, absolute_text, find_files, printable, walk_images
from ncm_cli.store.manifest import check_ids
from ncm_cli.store.probe import Probe
from ncm_cli.store.tables import read_table


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


def find_images(options: PredictOptions) -> list[Job]:
    """The images of a folder (at any depth), of a manifest, or the single one.

    Raises `InputError` for a folder without images, and for ids or files of a manifest that are missing,
    repeated or blank.
    """
    source = options.source
    if source.is_dir():
        return _folder(source)
    if is_image(source):
        return [Job(0, source.name, absolute_text(source))]
    table = read_table(source)
    paths = table.column(options.path_col, option="--path-col")
    id_col = options.id_col or ("id" if "id" in table.columns else options.path_col)
    ids = table.column(id_col, option="--id-col")
    check_ids(ids, table, id_col)
    base = absolute_text(options.root if options.root is not None else source.parent)
    found = find_files(paths, base, table.row_name, source)
    return [Job(i, name, path) for i, (name, path) in enumerate(zip(ids, found.path, strict=True))]


def _folder(folder: Path) -> list[Job]:
    base = absolute_text(folder)
    return [Job(i, printable(name), f"{base}/{name}") for i, name in enumerate(walk_images(folder)[0])]


def encode(options: PredictOptions, probe: Probe, jobs: list[Job], reporter: Reporter) -> Iterator[Batch]:
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
    threads = default_workers() if workers is None else workers
    for batch in encode_batches(encoder, batches, workers=threads):
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
