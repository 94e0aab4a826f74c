"""Shows what ``ncm predict`` counted.

The command's options are `probes.options.PredictOptions`; its work is in `probes.predict`.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from ncm_cli.probes.options import PredictOptions

if TYPE_CHECKING:
    from ncm_cli.console import Ui

FAILURES_SHOWN = 10
CLASSES_SHOWN = 20
SOME_FAILED = 5
"""The exit code if some rows failed and the others are done."""


def run(options: PredictOptions, ui: Ui) -> int | None:
    """Predict, and say what could not be predicted."""
    from ncm_cli.console import Escaped
    from ncm_cli.probes.predict import predict
    from ncm_cli.store.outputs import STDOUT

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # data, whatever the terminal's encoding
    stdout: Any = Escaped() if sys.stdout.isatty() else sys.stdout
    report = predict(options, reporter=ui.reporter, stdout=stdout)
    for name, reason in report.failed[:FAILURES_SHOWN]:
        ui.reporter.warn(f"{name}: {reason}")
    if len(report.failed) > FAILURES_SHOWN:
        ui.reporter.warn(
            f"and {len(report.failed) - FAILURES_SHOWN} more images failed: see the column reason"
        )
    if report.output != STDOUT:
        shown, footer = list(report.classes.items()), None
        if len(shown) > CLASSES_SHOWN:
            shown = sorted(shown, key=lambda item: -item[1])[:CLASSES_SHOWN]
            other_rows = report.rows - sum(n for _, n in shown)
            footer = f"and {other_rows:,} rows of the {len(report.classes) - CLASSES_SHOWN:,} other classes"
        if shown:
            ui.table(["class", "rows"], shown, footer=footer)
        ui.note(f"wrote {report.output}: {report.rows:,} predicted, {len(report.failed):,} failed")
    return SOME_FAILED if report.failed else None
