"""The rows that a command reads: of a table, a folder of images, tar archives, or what other tools write."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

from ncm_cli.errors import UsageError, as_written
from ncm_cli.images import dataset, peers
from ncm_cli.images.archives import read_archives
from ncm_cli.images.folder import IMAGE_SUFFIXES, read_folder
from ncm_cli.images.manifest import ColumnNames, Manifest, absolute_text, manifest_of, read_manifest
from ncm_cli.images.options import DEFAULT_MODEL, EmbedOptions, SourceChoice, parse_layout
from ncm_cli.images.paths import is_remote
from ncm_cli.images.request import ENCODER_KINDS
from ncm_cli.images.weights import relocated
from ncm_cli.options import fields_of
from ncm_cli.progress import Reporter
from ncm_cli.store.arrow import parquet_columns
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.memory import GivenTable


def read_source(options: SourceChoice) -> Manifest:
    """The rows that a command reads with these options."""
    source, names, with_files = options.source, ColumnNames.of(options), options.from_array is None
    if isinstance(source, GivenTable):
        base = absolute_text(options.root or Path()) if with_files else None
        return manifest_of(source, names, base=base)
    text = as_written(source)
    archives = re.search(r"\.tar\W*$", text) and not source.is_dir()
    if archives and with_files and not (options.root or options.layout):
        return read_archives(text, names)
    if not is_remote(text) and options.layout is None and (read := _special(options, names)):
        if options.root is not None:
            raise UsageError("--root is for manifests", found=f"{text} holds its pictures or rows itself")
        return read
    if not (is_remote(text) or source.is_dir()):
        if options.layout is not None:
            raise UsageError("--layout is for folders", found=f"{text} isn't a folder")
        return read_manifest(source, names, root=options.root, with_files=with_files)
    if not with_files:
        fix = "write a CSV with the ids and labels in the order of the array's rows"
        raise UsageError("--from-array needs a manifest", found=f"{text} is a folder", fix=fix)
    if options.root is not None:
        raise UsageError("--root is for manifests", found=f"{text} is a folder")
    return read_folder(source, parse_layout(options.layout) if options.layout else None, names)


def _special(options: SourceChoice, names: ColumnNames) -> Manifest | None:
    """The rows of what another tool wrote; None for a table of paths, and for a folder of images."""
    source, array = options.source, options.from_array
    if array is not None:
        if not source.is_dir():
            return None
        if peers.embeddings_of(source) or (isinstance(array, Path) and array.is_dir()):
            return peers.read_embeddings(source, array, names)
        parts = dataset.data_files(source)
        return dataset.read_dataset(source, parts, names, with_files=False) if parts else None
    reader = _reader_of(source, names)
    return reader(names) if reader else None


def is_made_elsewhere(source: Path) -> bool:
    """Whether a folder holds another tool's output, in which more than the pictures matters."""
    return source.is_dir() and bool(peers.embeddings_of(source) or _reader_of(source, ColumnNames()))


def _reader_of(source: Path, names: ColumnNames) -> Callable[[ColumnNames], Manifest] | None:
    """What reads the pictures of another tool's output."""
    if source.is_file():
        if source.suffix.lower() not in dataset.SUFFIXES:
            return None
        texts = parquet_columns(source, "manifest", empty=True) if source.suffix.lower() == ".parquet" else ()
        if (names.path_col or "path") in texts:
            return None
    elif tables := peers.downloads_of(source):
        return functools.partial(peers.read_downloads, source, tables)
    elif _has_images(source):
        return None
    elif tars := sorted(source.glob("*.tar")):
        return lambda names: read_archives(as_written(source), names, tars)
    parts = dataset.data_files(source)
    return functools.partial(dataset.read_dataset, source, parts) if parts else None


def _has_images(folder: Path) -> bool:
    """Whether a folder holds a file that is named like an image."""
    return any(
        os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122
        for _, _, files in os.walk(folder)
        for name in files
    )


def with_encoder_of_reuse(options: EmbedOptions, reporter: Reporter) -> EmbedOptions:
    """The options with the encoder of ``--reuse``, if none is named."""
    unnamed = (options.model, options.pretrained, options.random_init) == (DEFAULT_MODEL, None, False)
    if options.reuse is None or not unnamed:
        return options
    with FeatureStore(options.reuse) as store:
        if store.encoder.get("kind") not in ENCODER_KINDS:
            return options
        made_with = relocated(store.options, options.reuse.absolute().parent)
    defaults = {field.name: field.default for field in fields_of(EmbedOptions)}
    names = ("model", "pretrained", "random_init", "precision", "normalize", "intensity_range", "decode")
    taken = {
        name: made_with[name]
        for name in names
        if name in made_with and getattr(options, name) == defaults[name]
    }
    if taken.get("model", DEFAULT_MODEL) != DEFAULT_MODEL:
        reporter.note(f"--model {taken['model']}, as in {options.reuse}")
    return dataclasses.replace(options, **taken)
