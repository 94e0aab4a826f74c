"""The logs of the shards of one embedding, beside its output."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ncm_cli.errors import MismatchError
from ncm_cli.images.options import Shard
from ncm_cli.store.files import BusyError, writer_lock
from ncm_cli.store.journal import (
    journal_folder,
    log_path,
    prepare,
    read_parts,
    refuse_busy_parts,
    write_part,
)

MAX_WAIT_SECONDS = 60.0
"""Longest time that a starting shard waits for other starting shards, or for one that writes the store."""


class ShardLog:
    """The log of one shard in the journal of an output; its lock is held until ``stack`` is closed."""

    def __init__(
        self, output: Path, shard: Shard, key: dict[str, Any], stack: contextlib.ExitStack, *, replace: bool
    ) -> None:
        self.output, self.shard, self._plan = output, shard, ""
        with writer_lock(output, wait=MAX_WAIT_SECONDS):
            prepare(output, key, replace=replace)
            log = log_path(output, shard.part)
            stack.enter_context(writer_lock(log))
            log.touch()
            write_part(output, shard.part, plan="", done=False)

    def begin(self, plan: str) -> None:
        """Record the ``plan`` (a digest) of this shard; `MismatchError` if a running shard has another."""
        self._plan = plan
        with writer_lock(self.output, wait=MAX_WAIT_SECONDS):
            write_part(self.output, self.shard.part, plan=plan, done=False)
            for part, log in read_parts(journal_folder(self.output)).items():
                try:
                    if log["plan"] not in ("", plan):
                        refuse_busy_parts(self.output, part)
                except BusyError as error:
                    raise MismatchError(
                        "shards of one output with different rows, batches or N",
                        where=self.output,
                        found=f"shard {part.replace('-of-', '/')} is at work: {error.found}",
                        fix="the same manifest, --batch-size, --dtype, device and N for all of them",
                    ) from None

    def end(self, failed: Sequence[Sequence[Any]]) -> tuple[str, ...]:
        """Record that this shard is done, except for ``failed`` images; returns the unfinished shards."""
        write_part(self.output, self.shard.part, plan=self._plan, done=True, failed=failed)
        logs = read_parts(journal_folder(self.output))
        done = {part for part, log in logs.items() if log["done"] and log["plan"] == self._plan}
        shards = (Shard(index, self.shard.count) for index in range(self.shard.count))
        return tuple(str(shard) for shard in shards if shard.part not in done)
