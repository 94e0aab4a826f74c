"""``ncm fit``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncm_cli.errors import listing
from ncm_cli.probes.options import FitOptions

if TYPE_CHECKING:
    from ncm_cli.console import Ui
    from ncm_cli.probes.fit import FitReport
    from ncm_cli.probes.selection import Candidate, Estimate

SHOWN = 24
"""Longer paths are cut to the best weight decay of each rank, and then to this many ranks around it."""

COLUMNS = {
    "classification": (
        ("val_accuracy", "val accuracy"),
        ("val_log_loss", "val log loss"),
        ("flip_rate", "flip rate"),
        ("bound_01", "error bound"),
        ("log_loss_bound", "log-loss bound"),
        ("worst_group", "worst group"),
        ("test_accuracy", "ORACLE test"),
    ),
    "regression": (
        ("val_mse", "val MSE"),
        ("pair_mse", "pair MSE"),
        ("bound_mse", "MSE bound"),
        ("worst_group", "worst group"),
        ("test_mse", "ORACLE test"),
    ),
}


def run(options: FitOptions, ui: Ui) -> None:
    """Fit, then show the path and what was chosen."""
    from ncm_cli.probes.fit import fit

    report = fit(options, reporter=ui.reporter)
    if ui.json:
        ui.result(report.to_json())
        return
    _show_path(report, ui)
    _show_judged(report, ui)
    classes = f", classes {listing(report.classes)}" if report.classes else ""
    mark = "ORACLE: " if report.oracle else ""
    ui.note(
        f"{mark}{report.method}, rank {report.rank}, weight decay {report.weight_decay:g}: "
        f"{report.train_rows:,} training rows{classes}"
    )
    for flag in report.flags:
        ui.note(flag)
    ui.note(f"wrote {report.output}")


def _show_path(report: FitReport, ui: Ui) -> None:
    columns = [
        (name, title) for name, title in COLUMNS[report.task] if getattr(report.pick, name) is not None
    ]
    shown = _thinned(report)
    rows = [
        [
            ">" if index == report.chosen else "",
            candidate.rank,
            f"{candidate.weight_decay:g}",
            *(getattr(candidate, name) for name, _ in columns),
            *([] if candidate.converged else ["not converged"]),
        ]
        for index, candidate in shown
    ]
    titles = ["", "rank", "weight decay", *(title for _, title in columns)]
    if any(len(row) > len(titles) for row in rows):
        titles.append("note")
        rows = [row + [""] * (len(titles) - len(row)) for row in rows]
    left_out = len(report.candidates) - len(shown)
    footer = (
        f"{left_out} of {len(report.candidates)} candidates not shown: --json has them all"
        if left_out
        else None
    )
    ui.table(
        titles, rows, title=f"selection: {'ORACLE ' if report.oracle else ''}{report.rule}", footer=footer
    )


CONTROLS = {
    "constant": "always the same answer",
    "erm": "ERM, nothing removed",
    "erm-upweighted": "ERM, groups up-weighted",
    "erm-pair-rows": "ERM, pairs' rows added",
}


def _with_interval(found: Estimate) -> str:
    return f"{found.value:.3f} ({found.low:.2f}–{found.high:.2f})"


def _show_judged(report: FitReport, ui: Ui) -> None:
    """The controls beside the pick, and the verdict."""
    verdict = report.verdict
    if verdict is None:
        return
    if report.controls and verdict.bound and verdict.val_error and verdict.flip_rate:
        rows = [("this probe", verdict.val_error, verdict.flip_rate, verdict.bound)] + [
            (CONTROLS[control.name], control.val_error, control.flip_rate, control.bound)
            for control in report.controls
        ]
        heads = (
            ("val error", "flip rate", "bound") if report.classes else ("val MSE", "pair MSE", "MSE bound")
        )
        ui.table(
            ["", *heads],
            [(name, *map(_with_interval, estimates)) for name, *estimates in rows],
            title="beside the controls, with 95 % intervals",
        )
    ui.text(f"{verdict.text}\n{verdict.about}")


def _thinned(report: FitReport) -> list[tuple[int, Candidate]]:
    """The best candidate of each rank when the path is long, and evenly spaced ranks when it still is."""
    every = list(enumerate(report.candidates))
    if len(every) <= SHOWN or report.rule == "only-candidate":
        return every
    from ncm_cli.probes.selection import choose

    best = []
    for rank in dict.fromkeys(candidate.rank for candidate in report.candidates):
        own = [(index, candidate) for index, candidate in every if candidate.rank == rank]
        best.append(own[choose([candidate for _, candidate in own], report.rule, report.task)])
    if len(best) <= SHOWN:
        return best
    step = (len(best) - 1) / (SHOWN - 1)
    picked = {round(i * step) for i in range(SHOWN)}
    return [item for i, item in enumerate(best) if i in picked or item[0] == report.chosen]
