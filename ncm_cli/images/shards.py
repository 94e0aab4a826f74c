"""One embedding done by several processes: which part is whose, and when all are there.

A shard is a run of whole batches of the plan that one process alone would have, so that the features are the
same bits. It adds to a log of its own in the output's journal, and says there when it is done; nobody waits.
Whoever finds that all are done goes on like one process after an interruption, with nothing left to make.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ncm_cli.errors import MismatchError
from ncm_cli.images.options import EmbedOptions, Shard
from ncm_cli.store.files import BusyError, writer_lock
from ncm_cli.store.journal import journal_folder, log_path, prepare, read_parts, refuse_busy_parts, write_part

WAIT_SECONDS = 60.0
"""How long a shard that begins waits for others that do, and for one that joins."""


def of_rank(options: EmbedOptions) -> EmbedOptions:
    """The options of this process if torchrun, or what sets the same variables, started it with others."""
    told = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if options.shard is not None or not all(map(str.isdecimal, told)) or int(told[1]) == 1:
        return options
    return dataclasses.replace(options, shard=f"{told[0]}/{told[1]}")


class Part:
    """One shard's place in the journal of an output, whose lock is held until ``stack`` is closed."""

    def __init__(
        self, output: Path, shard: Shard, key: dict[str, Any], stack: contextlib.ExitStack, *, replace: bool
    ) -> None:
        self.output, self.shard, self._plan = output, shard, ""
        with writer_lock(output, wait=WAIT_SECONDS):
            prepare(output, key, replace=replace)
            log = log_path(output, shard.part)
            stack.enter_context(writer_lock(log))
            log.touch()
            write_part(output, shard.part, plan="", done=False)

    def begin(self, plan: str) -> None:
        """Say what all shards are of: ``plan``, a digest; a `MismatchError` if one at work says otherwise."""
        self._plan = plan
        with writer_lock(self.output, wait=WAIT_SECONDS):
            write_part(self.output, self.shard.part, plan=plan, done=False)
            for part, said in read_parts(journal_folder(self.output)).items():
                try:
                    if said["plan"] not in ("", plan):
                        refuse_busy_parts(self.output, part)
                except BusyError as error:
                    raise MismatchError(
                        "shards of one output with different rows, batches or numbers",
                        where=self.output,
                        found=f"shard {part.replace('-of-', '/')} is at work: {error.found}",
                        fix="the same manifest, --batch-size, --dtype, device and N for all of them",
                    ) from None

    def end(self, failed: Sequence[Sequence[Any]]) -> tuple[str, ...]:
        """Say that this shard is done but for the ``failed`` images; returns the shards that aren't."""
        write_part(self.output, self.shard.part, plan=self._plan, done=True, failed=failed)
        said = read_parts(journal_folder(self.output))
        done = {part for part, told in said.items() if told["done"] and told["plan"] == self._plan}
        every = (Shard(index, self.shard.count) for index in range(self.shard.count))
        return tuple(str(shard) for shard in every if shard.part not in done)
