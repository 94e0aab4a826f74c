"""Shows the result of ``ncm embed``.

The command's options are `images.options.EmbedOptions`; its work is in `images.embed`.
"""

from __future__ import annotations

import dataclasses

from ncm_cli.console import Ui
from ncm_cli.errors import listing
from ncm_cli.images.embed import EmbedReport, embed
from ncm_cli.images.options import EmbedOptions

MAX_SHOWN_FAILURES = 12


def run(options: EmbedOptions, ui: Ui) -> int | None:
    """Run the stage and say what it made; returns 5 if more images failed than were allowed."""
    report = embed(options, reporter=ui.reporter)
    if report.failed and not report.shard:  # the shard that joins all of them reports their failures
        _warn_failures(report, ui)
    ui.text(_summary(report))
    if ui.json:
        ui.result(dataclasses.asdict(report))
    return 5 if report.too_many_failed else None


def _summary(report: EmbedReport) -> str:
    size = f"{report.path}: {report.rows:,} × {report.dim:,}, {report.model}"
    if not (report.written or report.shard):
        return f"{size}; already up to date"
    if report.shard:
        size = f"shard {report.shard} of {size}"
    counts = [f"{report.new:,} new"]
    counts += [f"{n:,} {what}" for n, what in ((report.reused, "kept"), (report.removed, "removed")) if n]
    counts += [f"{len(report.failed):,} failed"] if report.failed else []
    rate = report.images_per_second if report.new else None
    speed = f", {rate:,.0f} images/s while encoding" if rate else ""
    device = f" on {report.device}" if report.device else ""
    unfinished = f"; not done yet: {listing(report.unfinished)}" if report.unfinished else ""
    return f"{size}; {', '.join(counts)} in {report.seconds:.1f} s{speed}{device}{unfinished}"


def _warn_failures(report: EmbedReport, ui: Ui) -> None:
    shown = [f"{row.id}: {row.reason}" for row in report.failed[:MAX_SHOWN_FAILURES]]
    omitted = len(report.failed) - len(shown)
    lines = [*shown, *([f"and {omitted} more: ncm info {report.path} --json"] if omitted else [])]
    ui.reporter.warn(
        f"{len(report.failed)} of {report.rows + len(report.failed)} images failed and are not in the store; "
        "mend them and run the same command again\n  " + "\n  ".join(lines)
    )
