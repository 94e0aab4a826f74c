"""``ncm embed``: writes a feature store from images, or from features made elsewhere.

A run can be killed at any moment, repeated, extended, or shared between processes. Shards take whole batches,
so features are bit-identical to those of one process. Each shard has its own log in the output's journal, and
records there that it is done; no shard waits for another. The last one to finish writes the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ncm_cli.errors import InputError, MismatchError, UsageError, as_written, listing
from ncm_cli.images.background import Backgrounds, read_backgrounds
from ncm_cli.images.encoder import load_encoder, request_key, start_loading
from ncm_cli.images.manifest import Manifest
from ncm_cli.images.node_encoder import EncodingJob
from ncm_cli.images.nodes import Cluster, Reference, joined_cluster, reference_of
from ncm_cli.images.options import EmbedOptions, parse_intensity_range, parse_shard
from ncm_cli.images.paths import is_remote
from ncm_cli.images.peers import embeddings_of, features_of
from ncm_cli.images.reading import read_image
from ncm_cli.images.request import Encoder, EncoderRequest, Preprocess, unit_rows
from ncm_cli.images.rows import (
    DONE,
    OLD,
    OTHER,
    Encode,
    RowPlan,
    Tally,
    alike,
    encode_here,
    faults,
    gathered,
    make_features,
)
from ncm_cli.images.shards import ShardLog
from ncm_cli.images.source import read_source, with_encoder_of_reuse
from ncm_cli.options import check, parse_batch_size, parse_workers
from ncm_cli.progress import SILENT, Reporter, Task
from ncm_cli.store.columns import FailedRow, Files
from ncm_cli.store.digests import canonical_json, differences, digest_of, fingerprint
from ncm_cli.store.features import FeatureStore, write_features
from ncm_cli.store.files import (
    BusyError,
    jsonable,
    refuse_no_file,
    remove_leftovers,
    writer_lock,
)
from ncm_cli.store.journal import (
    Journal,
    read_parts,
    refuse_busy_parts,
)
from ncm_cli.store.outputs import refuse_replacing

if TYPE_CHECKING:
    from ncm_cli.images.arrays import ArraySource

_COMPARED_FIELDS = ("kind", "model", "precision", "normalize", "view", "intensity_range", "decode")
"""Fields of a request that are equal in all requests for the same features."""


@dataclass(frozen=True, kw_only=True)
class EmbedReport:
    """The outcome of a run.

    Attributes
    ----------
    rows, dim
        Rows and width of the store.
    new, reused, removed
        Rows encoded in this run or an interrupted one before it, rows taken from a store, and rows of the
        old store that the manifest no longer has.
    failed
        The images without features, and why.
    written
        False if the store was already up to date.
    seconds, images_per_second
        Duration of the whole run, and the rate while images were read and encoded (None if none were).
    device
        None if no model was needed.
    shard, unfinished
        For a run of one shard: that shard, and the unfinished ones. Until there are none, the new store isn't
        written, and the other fields describe the shard.
    """

    path: str
    rows: int
    dim: int
    new: int
    reused: int = 0
    removed: int = 0
    failed: tuple[FailedRow, ...]
    max_failures: int
    written: bool = False
    seconds: float
    images_per_second: float | None
    device: str | None
    model: str
    fingerprint: str
    content_sha256: str | None = None
    shard: str | None = None
    unfinished: tuple[str, ...] = ()

    @property
    def too_many_failed(self) -> bool:
        """Whether more images failed than allowed; a shard alone can't know that."""
        return self.shard is None and len(self.failed) > self.max_failures


def embed(options: EmbedOptions, *, verify: bool = False, reporter: Reporter = SILENT) -> EmbedReport:
    """Make or update the feature store ``options.output``.

    Rows that the existing store, ``--reuse`` or an interrupted run already has are taken from there; only the
    others are read and encoded. The store is replaced at the end, in one step, if it has changed. With
    ``shard`` a part of the rows is made and kept beside the output; the last shard writes the store.

    Parameters
    ----------
    verify
        Compare contents (SHA-256) even where an image's path, size and time are unchanged.

    Raises
    ------
    UsageError
        Options that don't go together.
    InputError
        A manifest, image list, array, model or output that can't be used; no image could be embedded.
    MismatchError
        The output, an unfinished run or ``--reuse`` has other settings.
    """
    started = time.monotonic()
    options = check(_completed(check(with_encoder_of_reuse(check(options), reporter))))
    with joined_cluster(options, reporter) as cluster:
        return _embed(options, cluster, verify, reporter, started)


def _embed(
    options: EmbedOptions, cluster: Cluster | None, verify: bool, reporter: Reporter, started: float
) -> EmbedReport:
    output = options.output
    root = options.root
    if not (root is None or is_remote(as_written(root)) or root.is_dir()):
        raise InputError("no such folder", where=f"--root {root}")
    refuse_no_file(output)
    refuse_replacing(options)
    with reporter.task(f"reading {as_written(options.source)}", unit="images"):
        manifest = read_source(options)
        backgrounds, notes = read_backgrounds(options, manifest)
    shard, part, encoder = parse_shard(options.shard), None, None
    for note in (*manifest.notes, *notes):
        reporter.note(note)
    for warning in manifest.warnings if shard is None or shard.index == 0 else ():
        reporter.warn(warning)
    if shard is not None:
        with contextlib.ExitStack() as stack:
            run = _ImageRun(options, manifest, backgrounds, cluster, verify, reporter, stack)
            part, encoder = run.run_part(started), run.encoder
        if part.unfinished:
            return part
    options = dataclasses.replace(options, shard=None)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(writer_lock(output))
            refuse_busy_parts(output)
        except BusyError:
            if part is None:
                raise
            return part  # the process that has the lock joins the shards
        remove_leftovers(output)
        if options.from_array is not None:
            outcome = _from_array(options, features_of(options.from_array), manifest, reporter)
        else:
            run = _ImageRun(options, manifest, backgrounds, cluster, verify, reporter, stack, encoder)
            outcome = run.run()
    with FeatureStore(output) as store:
        return EmbedReport(
            path=str(output),
            rows=store.rows,
            dim=store.dim,
            failed=store.failed,
            max_failures=options.max_failures,
            seconds=time.monotonic() - started,
            model=str(store.encoder.get("model")),
            fingerprint=store.fingerprint,
            content_sha256=store.content_sha256,
            **outcome,
        )


def _completed(options: EmbedOptions) -> EmbedOptions:
    """The options with the array, if the source is what clip-retrieval wrote; ``NAME,TAG`` taken apart.

    Raises `UsageError` for the name of an encoder where no features made elsewhere are read.
    """
    model, comma, tag = options.model.partition(",")
    if comma and options.pretrained is None:
        options = dataclasses.replace(options, model=model, pretrained=tag)
    if options.from_array is None and isinstance(options.source, Path):
        options = dataclasses.replace(options, from_array=embeddings_of(options.source))
    if options.from_array is None and options.encoder_name is not None:
        fix = "leave it out, or add --from-array"
        raise UsageError("--encoder-name names what made --from-array", fix=fix)
    return options


@dataclass
class _ImageRun:
    """A run over images: finds which rows are missing, encodes them, and writes the store."""

    options: EmbedOptions
    manifest: Manifest
    backgrounds: Backgrounds | None
    cluster: Cluster | None
    verify: bool
    reporter: Reporter
    stack: contextlib.ExitStack
    encoder: Encoder | Reference | None = None

    def __post_init__(self) -> None:
        options, span = self.options, self.options.intensity_range
        names = {field.name for field in dataclasses.fields(EncoderRequest)}
        asked = {name: value for name, value in vars(options).items() if name in names}
        asked["intensity_range"] = parse_intensity_range(span) if span else None
        asked["backgrounds"] = self.backgrounds.fill if self.backgrounds is not None else None
        self.request = EncoderRequest(**asked)
        # A new store nearly always needs the model.
        may_reuse = options.output.exists() or options.reuse
        self.loading = self.encoder is None and bool(options.fresh or not may_reuse)
        if self.loading:
            start_loading(self.request, self.reporter)
        self.key = json.loads(canonical_json(request_key(self.request)))
        self.journal_key = {"encoder": self.key}  # without dtype: the journal's rows are float32
        self.part = None
        if shard := parse_shard(options.shard):
            replace = options.fresh
            self.part = ShardLog(options.output, shard, self.journal_key, self.stack, replace=replace)
        self.old = None if options.fresh or not options.output.exists() else self._open_old(options.output)
        self.other = None if options.reuse is None else self._open_reuse(options.reuse)

    def _opened(self, path: Path, what: str) -> FeatureStore:
        try:
            return self.stack.enter_context(FeatureStore(path))
        except InputError as error:
            found = "; ".join([error.what, *(text for label, text in error.lines() if label == "found")])
            fix = "name another file, delete it, or replace it with --fresh"
            raise InputError(what, where=path, found=found, fix=fix) from error

    def _open_old(self, path: Path) -> FeatureStore:
        """The store to update.

        Settings that need no model are compared here, so that a wrong model name causes no download.
        """
        store = self._opened(
            path, "the output is there and isn't a feature store that can be brought up to date"
        )
        stored = store.request.get("encoder") or {"kind": store.encoder.get("kind")}
        compared = [
            {name: facts[name] for name in _COMPARED_FIELDS if name in facts} for facts in (stored, self.key)
        ]
        require_same(path, {"dtype": store.dtype} | compared[0], {"dtype": self.options.dtype} | compared[1])
        return store

    def _open_reuse(self, path: Path) -> FeatureStore:
        """The store named by ``--reuse``; float16 rows can't become float32 ones again."""
        store = self._opened(path, "--reuse names something else than a feature store")
        narrow = (store.dtype, self.options.dtype) == ("float16", "float32")
        if store.files is None or narrow:
            problem = "float16 rows, where float32 is asked for" if narrow else "no image files"
            raise MismatchError("the rows can't be reused", where=path, found=problem)
        return store

    def run(self) -> dict[str, Any]:
        """Update the store; returns the facts for the report."""
        # An unfinished run of other settings is refused before a model is loaded.
        journal = self._journal()
        plan = self._plan()
        pending = plan.pending()
        tally = self._still_bad(plan)
        if len(tally.failed) < len(pending):
            tally = self._make(plan, journal)
        written = self._write(plan, journal, tally)
        tally.say(self.reporter)
        journal.discard()
        kept = set(self.manifest.ids)
        return {
            "new": len(pending) - len(tally.failed),
            "reused": len(self.manifest) - len(pending),
            "removed": sum(id not in kept for id in self.old.ids) if self.old is not None else 0,
            "written": written,
            "images_per_second": tally.rate,
            "device": self._device(),
        }

    def run_part(self, started: float) -> EmbedReport:
        """Make the missing rows of one shard."""
        assert self.part is not None
        plan, tally = self._plan(), Tally()
        unfinished: tuple[str, ...] = ()
        if plan.pending():
            with Journal(self.options.output, self.part.shard.part) as journal:
                tally = self._make(plan, journal)
            tally.say(self.reporter)
            failed = [file for file in plan.files if file.id in tally.failed]
            unfinished = self.part.end([[*file[:4], tally.failed[file.id].reason] for file in failed])
        return EmbedReport(
            path=str(self.options.output),
            rows=int((plan.source == DONE).sum()),
            dim=self._dim,
            new=tally.encoded - len(tally.failed),
            failed=tuple(tally.failed.values()),
            max_failures=self.options.max_failures,
            seconds=time.monotonic() - started,
            images_per_second=tally.rate,
            device=self._device(),
            model=str(self.description.get("model")),
            fingerprint=fingerprint(self.description),
            shard=str(self.part.shard),
            unfinished=unfinished,
        )

    def _plan(self) -> RowPlan:
        """The plan of which rows the existing stores have, and which are missing."""
        assert self.manifest.files is not None
        self.description = self._describe()
        plan = RowPlan(self.manifest.files, self.backgrounds)
        if self.old is not None:
            plan.take_unchanged(self.old, verify=self.verify, reporter=self.reporter)
        if self.other is not None:
            plan.take_equal(self.other, self.reporter)
        return plan

    def _journal(self) -> Journal:
        """The journal, with rows that an interrupted run has finished; removed at the end if it is empty."""
        journal = Journal.open(self.options.output, self.journal_key, replace=self.options.fresh)
        self.stack.enter_context(journal)
        self.stack.callback(lambda: None if journal.rows else journal.discard())
        return journal

    def _made_by_us(self, store: FeatureStore | None) -> bool:
        """Whether a store was made by an equal request, so that its rows can be used without the model."""
        return store is not None and store.request.get("encoder") == self.key

    def _describe(self) -> dict[str, Any]:
        """The encoder's description, from a store made by an equal request, else from the model."""
        stores = [store for store in (self.old, self.other) if store is not None]
        known = [store.encoder for store in stores if self._made_by_us(store)]
        description = known[0] if known else self._load().description
        for store in stores:
            if not self._made_by_us(store):
                require_same(store.path, store.encoder, description)
        return description

    def _load(self) -> Encoder | Reference:
        """The encoder, or with a cluster what the encoders there are compared with."""
        if self.encoder is None:
            if not self.loading:
                start_loading(self.request, self.reporter)
            if self.cluster is not None:
                self.encoder = reference_of(self.request, self.reporter)
            else:
                self.encoder = load_encoder(self.request, device=self.options.device, reporter=self.reporter)
                self.encoder.preprocess = dataclasses.replace(
                    self.encoder.preprocess, backgrounds=self.backgrounds
                )
        return self.encoder

    @property
    def _dim(self) -> int:
        return next(source.dim for source in (self.encoder, self.old, self.other) if source is not None)

    def _device(self) -> str | None:
        if self.cluster is not None:
            return self.cluster.devices
        return self.encoder.device if self.encoder is not None else None

    def _encoding(self) -> tuple[int, Encode]:
        """The ``auto`` number of images at once, and what encodes them."""
        workers = parse_workers(self.options.workers)
        if self.cluster is not None:
            job = EncodingJob(
                request=self.request,
                backgrounds=self.backgrounds,
                device=self.cluster.device,
                workers=workers,
                folder=os.getcwd(),  # noqa: PTH109
                key=self.key,
                description=self.description,
            )
            encode = partial(self.cluster.encode, job=job, reporter=self.reporter)
            return self.cluster.batch_size(self.request), encode
        encoder = self._load()
        assert not isinstance(encoder, Reference)
        # The description may come from a store, and the model that is loaded now may differ.
        require_same(self.options.output, self.description, encoder.description)
        return encoder.batch_size, encode_here(encoder, workers)

    def _still_bad(self, plan: RowPlan) -> Tally:
        """The failures, if all missing rows failed before and still can't be decoded; needs no model."""
        tally, failed = Tally(), {row.id for row in self.old.failed} if self.old is not None else set()
        preprocess = Preprocess(self.request, (np.asarray,), backgrounds=self.backgrounds)
        if self.encoder is None and failed.issuperset(plan.files[row].id for row in plan.pending()):
            for row in plan.pending():
                image = read_image(plan.files[row], preprocess)
                if image.item is not None:
                    break
                tally.fail(image, image.reason)
        return tally

    def _make(self, plan: RowPlan, journal: Journal) -> Tally:
        rows, (auto, encode) = plan.pending(), self._encoding()
        size = parse_batch_size(self.options.batch_size) or auto
        batches: Sequence[list[int]] = [rows[start : start + size] for start in range(0, len(rows), size)]
        what = "going on after an interrupted run"
        known: dict[str, FailedRow] = {}
        if self.part is not None:
            shard, ids = self.part.shard, [plan.files[row].id for row in rows]
            self.part.begin(digest_of([shard.count, size, self.options.dtype, ids]))
            batches = shard.of(batches)
            rows = [row for batch in batches for row in batch]
        elif parts := read_parts(journal.folder):
            what = "joining the shards"
            known = plan.take_failed(failed for log in parts.values() for failed in log.get("failed", ()))
        plan.take_finished(journal, rows, verify=self.verify)
        if journal.damaged:
            self.reporter.warn(f"{journal.damaged:,} finished rows are damaged, and are embedded anew")
        if resumed := int((plan.source[rows] == DONE).sum()):
            self.reporter.note(f"{what}: {resumed:,} of {len(rows):,} are done")
        unit, dtype = bool(self.description.get("normalize")), self.options.dtype
        tally = make_features(plan, batches, encode, journal, unit=unit, dtype=dtype, reporter=self.reporter)
        tally.failed |= known
        return tally

    def _write(self, plan: RowPlan, journal: Journal, tally: Tally) -> bool:
        """Write the store; returns False if it is up to date."""
        ids = self.manifest.ids
        rows = [row for row, id in enumerate(ids) if id not in tally.failed]
        failed = tuple(tally.failed[id] for id in ids if id in tally.failed)
        if not rows:
            raise InputError(
                f"none of the {len(failed)} images could be embedded",
                where=self.manifest.source,
                found=listing(f"{row.id}: {row.reason}" for row in failed),
                fix=tally.range_advice() or "mend the images or the paths, and run the same command again",
            )
        files = Files.of([plan.files[row] for row in rows])
        if self._made_by_us(self.old) and self._is_unchanged(plan, rows, files, failed):
            os.utime(self.options.output)  # make compares times
            return False
        dim = self._dim
        with self.reporter.task("writing", len(rows)) as task:
            blocks = gathered(plan, rows, {OLD: self.old, OTHER: self.other}, journal, dim, task)
            facts = _provenance(self.options, self.description, self.key, self.manifest)
            kept = self.manifest.kept(rows)
            write_features(
                self.options.output, blocks=blocks, dim=dim, files=files, failed=failed, **kept, **facts
            )
        return True

    def _is_unchanged(
        self, plan: RowPlan, rows: list[int], files: Files, failed: Sequence[FailedRow]
    ) -> bool:
        """Whether a new store would equal the existing one, apart from its time and options."""
        old, kept = self.old, self.manifest.kept(rows)
        assert old is not None
        columns, roles = kept["columns"], (kept["label_column"], kept["split_column"])
        return (
            bool((plan.source[rows] == OLD).all())
            and (list(old.ids), old.failed) == (kept["ids"], failed)
            and (old.label_column, old.split_column, list(old.columns)) == (*roles, list(columns))
            and old.row_numbers_of == self.manifest.row_numbers_of
            and all(alike(old.columns[name], columns[name]) for name in columns)
            and alike(old.files, files)
        )


def _provenance(
    options: EmbedOptions, description: dict[str, Any], key: dict[str, Any], manifest: Manifest
) -> dict[str, Any]:
    """How a store was made, as `write_features` records it."""
    request: dict[str, Any] = {"encoder": key, "dtype": options.dtype}
    request |= {"row_numbers_of": manifest.row_numbers_of} if manifest.numbered else {}
    return {"encoder": description, "options": jsonable(options), "request": request, "dtype": options.dtype}


def require_same(path: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raise `MismatchError` with the fields in which a store differs from what is asked for, if any."""
    if found := differences(there, asked):
        raise MismatchError(
            "the store was made with other settings",
            where=path,
            found=found,
            expected="one encoder in one store; nothing was changed",
            fix="name another output with -o, use the store's settings, or replace the store with --fresh",
        )


def _from_array(
    options: EmbedOptions, source: ArraySource, manifest: Manifest, reporter: Reporter
) -> dict[str, Any]:
    """Write a store from a matrix with rows in manifest order; returns the facts for the report.

    The fingerprint covers the given name of the encoder, or else the matrix's digest, so that features of
    unknown origin never pass for those of the same encoder.
    """
    if source.rows != len(manifest):
        raise InputError(
            "the array and the manifest have other numbers of rows",
            where=source.path,
            found=f"{source.rows:,} rows in the array, {len(manifest):,} in {options.source}",
            expected="one row of features for each row of the manifest, in the same order",
        )
    name = options.encoder_name
    if name is None:
        name = f"sha256-{source.sha256()[:16]}"
        reporter.note(f"no --encoder-name: the features are called {name}")
    description = {"kind": "array", "model": name, "dim": source.dim, "normalize": options.normalize}
    if options.output.exists() and not options.fresh:
        with FeatureStore(options.output) as old:
            stored, asked = {"dtype": old.dtype}, {"dtype": options.dtype}
            require_same(options.output, dict(old.encoder) | stored, description | asked)
    with reporter.task("writing", source.rows) as task:
        blocks = _usable_blocks(source, manifest, options, task)
        kept = manifest.kept(range(source.rows))
        facts = _provenance(options, description, description, manifest)
        write_features(options.output, blocks=blocks, dim=source.dim, **kept, **facts)
    outcome = {"new": source.rows, "reused": 0, "removed": 0, "written": True}
    return outcome | {"images_per_second": None, "device": None}


def _usable_blocks(
    source: ArraySource, manifest: Manifest, options: EmbedOptions, task: Task
) -> Iterator[np.ndarray]:
    """The blocks, normalised if asked for; after a bad row the rest is only checked for others."""
    bad: dict[str, list[str]] = {}
    start = 0
    for block in source.blocks():
        if options.normalize:
            block = unit_rows(block)
        for row, fault in enumerate(faults(block, np.dtype(options.dtype), options.normalize)):
            if fault:
                bad.setdefault(fault, []).append(manifest.ids[start + row])
        start += len(block)
        if not bad:
            yield block
            task.advance(len(block))
    if bad:
        reason, ids = next(iter(bad.items()))
        rest = sum(map(len, bad.values())) - len(ids)
        raise InputError(
            f"{len(ids)} {'row of the array is' if len(ids) == 1 else 'rows of the array are'} {reason}",
            where=source.path,
            found=f"ids {listing(ids)}" + (f"; {rest} more are bad for other reasons" if rest else ""),
            fix="mend these rows, or leave them out of both the array and the manifest",
        )
