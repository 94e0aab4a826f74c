"""``ncm embed``: images to a feature store; kill it at any moment, repeat it, extend it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from ncm_cli.errors import InputError
from ncm_cli.images.arrays import embed_array
from ncm_cli.images.encoder import Encoder, EncoderRequest, load_encoder, request_key
from ncm_cli.images.manifest import Choice, Manifest, read_source
from ncm_cli.images.options import EmbedOptions, parse_batch_size, parse_intensity_range, parse_workers
from ncm_cli.images.plan import (
    EmbedReport,
    Plan,
    Settings,
    all_failed,
    is_unchanged,
    open_old,
    open_reuse,
    plan_from_stores,
)
from ncm_cli.images.rows import (
    Outcome,
    Sources,
    any_decodes,
    batches_of,
    gathered,
    make_features,
    open_journal,
    remove_other_journal,
    take_finished,
)
from ncm_cli.options import as_json, check, refuse_replacing
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.columns import FailedRow
from ncm_cli.store.features import FeatureStore, write_features
from ncm_cli.store.files import remove_leftovers, writer_lock
from ncm_cli.store.journal import Journal


def embed(options: EmbedOptions, *, reporter: Reporter = SILENT) -> EmbedReport:
    """Make or bring up to date the feature store ``options.output``.

    Rows that the existing store, ``--reuse`` or an interrupted run already has are taken as they are; only
    the others are read and encoded. The store is replaced at the end, in one step. An unchanged store stays.

    Raises
    ------
    UsageError
        Options that don't go together.
    InputError
        A manifest, image list, model or output that can't be used; no image that could be embedded.
    MismatchError
        The output, an unfinished run or ``--reuse`` has other settings.
    """
    started = time.monotonic()
    _check(options)
    if options.from_array is not None:
        with _writing(options):
            return embed_array(options, Choice.of(options), started=started, reporter=reporter)
    manifest = read_source(options)
    for note in manifest.notes:
        reporter.note(note)
    for warning in manifest.warnings:
        reporter.warn(warning)
    with _writing(options), contextlib.ExitStack() as stack:
        return _Embedding(options, manifest, reporter, stack, started).run()


@contextlib.contextmanager
def _writing(options: EmbedOptions) -> Iterator[None]:
    with writer_lock(options.output):
        remove_leftovers(options.output)
        yield


def _check(options: EmbedOptions) -> None:
    check(options)
    output = options.output
    if options.root is not None and not options.root.is_dir():
        raise InputError("no such folder", where=f"--root {options.root}")
    if output.is_dir():
        raise InputError("the output is a folder", where=output, fix=f"-o {output / 'features.h5'}")
    refuse_replacing(options)


def encoder_request(options: EmbedOptions) -> EncoderRequest:
    """What the options ask of the encoder."""
    return EncoderRequest(
        model=options.model,
        pretrained=options.pretrained,
        precision=options.precision,
        normalize=options.normalize,
        random_init=options.random_init,
        augment=options.augment,
        seed=options.seed,
        intensity_range=parse_intensity_range(options.intensity_range) if options.intensity_range else None,
    )


class _Embedding:
    """One run: what is there, what is missing, making it, and writing the store."""

    def __init__(
        self,
        options: EmbedOptions,
        manifest: Manifest,
        reporter: Reporter,
        stack: contextlib.ExitStack,
        started: float,
    ) -> None:
        self.options, self.manifest, self.reporter, self.started = options, manifest, reporter, started
        self.request = encoder_request(options)
        self.settings = Settings(request_key(self.request), options.dtype)
        old = None if options.fresh else open_old(options.output, self.settings)
        other = None if options.reuse is None else open_reuse(options.reuse, options.dtype)
        self.old = stack.enter_context(old) if old is not None else None
        self.other = stack.enter_context(other) if other is not None else None
        self.encoder: Encoder | None = None

    def run(self) -> EmbedReport:
        output, key = self.options.output, self.settings.journal_key()
        if self.options.fresh:
            remove_other_journal(output, key)
        with contextlib.ExitStack() as stack:
            # An unfinished run of other settings is refused before a model is loaded.
            journal = stack.enter_context(open_journal(output, key, create=False))
            self._settle()
            plan = self._plan()
            pending = plan.pending()
            if pending and journal is None:
                journal = stack.enter_context(open_journal(output, key, create=True))
            outcome = Outcome()
            if journal is not None and pending and not self._all_still_bad(pending, plan, outcome):
                outcome = self._make(pending, plan, journal)
            written = self._write(plan, journal, outcome)
            outcome.say(self.reporter)
            if journal is not None:
                journal.discard()
        return self._report(plan, outcome, pending, written)

    def _plan(self) -> Plan:
        assert self.manifest.files is not None
        return plan_from_stores(
            self.manifest,
            self.manifest.files,
            self.old,
            self.other,
            verify_content=self.options.verify_content,
            reporter=self.reporter,
        )

    def _settle(self) -> None:
        """Find the encoder's description, loading the model only where no store tells it."""
        known = [store for store in (self.old, self.other) if store and self.settings.made(store)]
        if known:
            self.description: dict[str, Any] = known[0].encoder
        else:
            self.description = self._load().description
        for store in (self.old, self.other):
            if store is not None:
                self.settings.require_same(store, self.description)

    def _load(self) -> Encoder:
        if self.encoder is None:
            self.encoder = load_encoder(self.request, device=self.options.device, reporter=self.reporter)
        return self.encoder

    def _all_still_bad(self, pending: list[int], plan: Plan, outcome: Outcome) -> bool:
        """Whether all that is missing had failed before and still doesn't decode."""
        failed_before = {row.id for row in self.old.failed} if self.old is not None else set()
        ids = self.manifest.ids
        if self.encoder is not None or not all(ids[row] in failed_before for row in pending):
            return False
        workers = parse_workers(self.options.workers)
        ranged = self.request.intensity_range is not None
        return not any_decodes(pending, ids, plan, outcome, 1 if workers is None else workers, ranged=ranged)

    def _make(self, pending: list[int], plan: Plan, journal: Journal) -> Outcome:
        encoder = self._load()
        self.settings.require_unmoved(encoder.description, self.description, self.options.output)
        batches = batches_of(pending, parse_batch_size(self.options.batch_size) or encoder.batch_size)
        take_finished(plan, self.manifest.ids, journal, verify_content=self.options.verify_content)
        if journal.damaged:
            self.reporter.warn(f"{journal.damaged:,} finished rows are damaged, and are embedded anew")
        resumed = len(pending) - len(plan.pending())
        if resumed:
            self.reporter.note(f"going on after an interrupted run: {resumed:,} of {len(pending):,} are done")
        return make_features(
            plan,
            self.manifest.ids,
            batches,
            encoder,
            journal,
            workers=parse_workers(self.options.workers),
            dtype=self.options.dtype,
            reporter=self.reporter,
        )

    def _write(self, plan: Plan, journal: Journal | None, outcome: Outcome) -> bool:
        """Write the store; False where it would hold what it already holds."""
        manifest = self.manifest
        rows = [row for row in range(len(manifest)) if row not in outcome.failed]
        failed = self._failed(outcome)
        if not rows:
            raise all_failed(failed, manifest.source, outcome.range_advice())
        columns = manifest.columns(rows)
        files = plan.files(rows)
        ids = [manifest.ids[row] for row in rows]
        if self.old is not None and self.settings.made(self.old):
            labels = (manifest.label_column, manifest.split_column)
            if is_unchanged(self.old, plan, ids, columns, labels, files, failed):
                os.utime(self.options.output)  # make knows what is up to date by its time alone
                return False
        dim = next(s.dim for s in (self.encoder, self.old, self.other) if s is not None)
        sources = Sources(self.old, self.other, journal)
        with self.reporter.task("writing", len(rows)) as task:
            write_features(
                self.options.output,
                ids=ids,
                blocks=gathered(plan, rows, manifest.ids, sources, dim, task),
                dim=dim,
                columns=columns,
                label_column=manifest.label_column,
                split_column=manifest.split_column,
                encoder=self.description,
                files=files,
                failed=failed,
                options=as_json(self.options),
                request=self.settings.as_dict(),
                dtype=self.options.dtype,  # type: ignore[arg-type]
            )
        return True

    def _failed(self, outcome: Outcome) -> list[FailedRow]:
        return [outcome.failed[row] for row in sorted(outcome.failed)]

    def _report(self, plan: Plan, outcome: Outcome, pending: list[int], written: bool) -> EmbedReport:
        failed = self._failed(outcome)
        with FeatureStore.open(self.options.output) as store:
            kept = set(self.manifest.ids)
            return EmbedReport(
                path=str(self.options.output),
                rows=store.rows,
                dim=store.dim,
                new=len(pending) - len(failed),
                reused=len(self.manifest) - len(pending),
                removed=sum(id not in kept for id in self.old.ids) if self.old is not None else 0,
                failed=tuple(failed),
                max_failures=self.options.max_failures,
                written=written,
                seconds=time.monotonic() - self.started,
                images_per_second=outcome.encoded / outcome.seconds if outcome.seconds else None,
                device=self.encoder.device if self.encoder is not None else None,
                model=str(store.encoder.get("model")),
                fingerprint=store.fingerprint,
                content_sha256=store.content_sha256,
            )
