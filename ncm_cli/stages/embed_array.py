"""``ncm embed --from-array``: a store of features that were made elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, MismatchError, UsageError, listing
from ncm_cli.options.embed import EmbedOptions
from ncm_cli.options.spec import as_json
from ncm_cli.progress import Reporter
from ncm_cli.stages.embed_report import EmbedReport
from ncm_cli.stages.embed_settings import other_settings
from ncm_cli.store.arrays import ArraySource, open_array
from ncm_cli.store.atomic import sha256_file
from ncm_cli.store.features import FeatureStore, write_features
from ncm_cli.store.fingerprint import differing_fields
from ncm_cli.store.manifest import Choice, Manifest, read_manifest


def embed_array(options: EmbedOptions, choice: Choice, *, started: float, reporter: Reporter) -> EmbedReport:
    """Write a store from a matrix whose rows are in manifest order.

    Its fingerprint records the name given; without one, the matrix's own digest, so that stores of unknown
    origin are never taken for each other's.

    Raises
    ------
    InputError
        Other numbers of rows, rows that aren't finite, rows of zeros that are to be normalised: by id.
    MismatchError
        The output holds features of another name.
    """
    assert options.from_array is not None
    if options.source.is_dir():
        raise UsageError(
            "--from-array needs a manifest", found=f"{options.source} is a folder",
            fix="write a CSV with the ids and labels in the order of the array's rows",
        )  # fmt: skip
    source = open_array(options.from_array)
    manifest = read_manifest(options.source, choice, root=None, with_files=False)
    for note in manifest.notes:
        reporter.note(note)
    for warning in manifest.warnings:
        reporter.warn(warning)
    if source.rows != len(manifest):
        raise InputError(
            "the array and the manifest have other numbers of rows",
            where=source.path,
            found=f"{source.rows:,} rows in the array, {len(manifest):,} in {options.source}",
            expected="one row of features for each row of the manifest, in the same order",
        )
    description = _description(options, source)
    if options.encoder_name is None:
        reporter.note(f"no --encoder-name: the features are called {description['model']}")
    _require_same_name(options, description)
    columns = manifest.columns(range(len(manifest)))
    with reporter.task("writing", source.rows) as task:
        write_features(
            options.output,
            ids=manifest.ids,
            blocks=_counted(_usable_blocks(source, manifest, options), task),
            dim=source.dim,
            columns=columns,
            label_column=manifest.label_column,
            split_column=manifest.split_column,
            encoder=description,
            options=as_json(options),
            request={"encoder": description, "dtype": options.dtype},
            dtype=options.dtype,  # type: ignore[arg-type]
        )
    with FeatureStore.open(options.output) as store:
        return EmbedReport(
            path=str(options.output),
            rows=store.rows,
            dim=store.dim,
            new=store.rows,
            reused=0,
            removed=0,
            failed=(),
            max_failures=options.max_failures,
            written=True,
            seconds=time.monotonic() - started,
            images_per_second=None,
            device=None,
            model=str(description["model"]),
            fingerprint=store.fingerprint,
            content_sha256=store.content_sha256,
        )


def _description(options: EmbedOptions, source: ArraySource) -> dict[str, Any]:
    name = options.encoder_name
    return {
        "kind": "array",
        "model": name if name is not None else f"sha256-{sha256_file(source.path)[:16]}",
        "dim": source.dim,
        "normalize": options.normalize,
    }


def _require_same_name(options: EmbedOptions, description: dict[str, Any]) -> None:
    if options.fresh or not options.output.exists():
        return
    with FeatureStore.open(options.output) as old:
        fields = differing_fields(old.encoder, description)
        fields += differing_fields({"dtype": old.dtype}, {"dtype": options.dtype})
    if fields:
        error: MismatchError = other_settings(options.output, fields)
        raise error


def _usable_blocks(source: ArraySource, manifest: Manifest, options: EmbedOptions) -> Iterator[np.ndarray]:
    """The blocks, normalised if asked for; at the first bad row the rest is searched for more of them."""
    bad: dict[str, list[str]] = {}
    start = 0
    for block in source.blocks():
        ids = manifest.ids[start : start + len(block)]
        start += len(block)
        block = _checked(block, ids, options, bad)
        if not bad:
            yield block
    if not bad:
        return
    reason, ids = next(iter(bad.items()))
    more = sum(len(rows) for rows in bad.values()) - len(ids)
    raise InputError(
        f"{len(ids)} {'row' if len(ids) == 1 else 'rows'} of the array {reason}",
        where=source.path,
        found=f"ids {listing(ids)}" + (f"; {more} more rows are bad for other reasons" if more else ""),
        fix="mend these rows, or leave them out of both the array and the manifest",
    )


def _checked(
    block: np.ndarray, ids: list[str], options: EmbedOptions, bad: dict[str, list[str]]
) -> np.ndarray:
    def note(rows: np.ndarray, reason: str) -> None:
        if rows.any():
            bad.setdefault(reason, []).extend(ids[row] for row in np.flatnonzero(rows))

    finite = np.isfinite(block).all(axis=1)
    note(~finite, "aren't finite")
    if options.normalize:
        # float64: the square of a large float32 overflows, and that of a small one is lost.
        norms = np.linalg.norm(block.astype(np.float64), axis=1, keepdims=True)
        note(norms[:, 0] == 0, "are zero and can't be scaled to unit length")
        with np.errstate(invalid="ignore", divide="ignore"):
            block = (block / norms).astype(np.float32)
    if options.dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            note(finite & ~np.isfinite(block.astype(np.float16)).all(axis=1), "are too large for float16")
    return block


def _counted(blocks: Iterator[np.ndarray], task: Any) -> Iterator[np.ndarray]:
    for block in blocks:
        yield block
        task.advance(len(block))
