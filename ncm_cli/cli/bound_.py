"""``ncm bound``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from ncm_cli.cli.command import Example, add_command

if TYPE_CHECKING:
    from ncm_cli.options.bound import BoundOptions
    from ncm_cli.render import Ui
    from ncm_cli.stages.bound import BoundReport


def register(app: typer.Typer) -> None:
    """Add the command to the tree."""
    from ncm_cli.options.bound import BoundOptions

    add_command(
        app,
        "bound",
        BoundOptions,
        handler,
        examples=[
            Example(
                line="ncm bound probe.safetensors --features F.h5 --oracle-pairs oracle.h5 --explain",
                note="every term of Theorem 1, with what it means",
            ),
            Example(
                line="ncm bound probe.safetensors --features F.h5 --oracle-pairs oracle.h5 --pairs P.h5 "
                "--ranks 0:40 -o bound.json",
                note="the trade-off along ranks, for ncm report --plots",
            ),
        ],
        next_step="ncm report bound.json --plots DIR",
    )


def handler(options: BoundOptions, ui: Ui) -> None:
    """Compute the bound and show it."""
    from ncm_cli.cli.bound_text import EXPLANATIONS, term_rows
    from ncm_cli.stages.bound import bound

    report = bound(options, reporter=ui.reporter)
    if ui.json:
        ui.result(report.to_json())
        return
    rows = term_rows(report)
    ui.table(
        ("Term", "What it is", "Paper", "Value", "95 % interval"),
        [(row.symbol, row.words, row.source, row.value, _interval(report, row.key)) for row in rows],
        title=f"Bound on the test-domain risk: {report.terms.loss} loss, rank {report.terms.rank}",
        left=3,
    )
    if options.explain:
        for row in rows:
            if text := EXPLANATIONS.get(row.key):
                ui.text(f"{row.symbol}: {row.words}\n  {text[0]}\n  {text[1]}\n")
    for line in _verdicts(report):
        ui.text(line)
    if report.paths.ranks:
        _path_table(ui, "Along the ranks", "rank", report.paths.ranks)
    if report.paths.pair_counts:
        _path_table(ui, "Along the number of pairs", "pairs", report.paths.pair_counts)
    if options.output:
        ui.note(f"written: {options.output}")


def _interval(report: BoundReport, name: str) -> str:
    if name not in report.intervals:
        return ""
    low, high = report.intervals[name]
    return f"{low:.3g} – {high:.3g}"


def _verdicts(report: BoundReport) -> list[str]:
    terms = report.terms
    sign, word = ("≤", "holds") if report.holds else (">", "does NOT hold")
    how = (
        "exact: Term I is taken on the twins, so the inequality is deterministic"
        if report.exact
        else f"up to sampling error: Term I is taken on {report.train_rows:,} training rows"
    )
    known = (
        "given"
        if report.spurious_dim_given
        else f"estimated: eigenvalues of M above {report.tolerance:g} of the largest"
    )
    noise = report.noise
    applies = "applies" if noise.applicable else f"not applicable: {'; '.join(noise.reasons)}"
    lines = [
        f"The bound {word}: test risk {report.test_risk:.4f} {sign} {terms.bound:.4f}, "
        f"slack {report.slack:.4f}",
        f"  {how}",
        f"|I| = {terms.spurious_dim} ({known}); r = {terms.rank}, s = min(r, |I|) = {terms.s}; "
        f"{report.oracle_pairs:,} oracle pairs",
        f"Noise corollary: {applies}",
    ]
    if report.zero_one:
        zero = report.zero_one
        lines.append(
            f"0-1 bound: test error {zero.test_error:.4f} ≤ {zero.bound:.4f} = "
            f"twins' error {zero.twin_error:.4f} + flip rate {zero.flip_rate:.4f}"
        )
    if oracle := report.paths.oracle:
        reached = "" if oracle["test_error"] is None else f", test error {oracle['test_error']:.4f}"
        lines.append(
            f"ORACLE, trained on {oracle['train_rows']:,} rows of {oracle['where']}: "
            f"test risk {oracle['test_risk']:.4f}{reached}"
        )
    if found := report.paths.summary:
        lines.append(
            f"Least 0-1 bound at rank {found['bound_rank']}: test accuracy "
            f"{found['bound_test_accuracy']:.4f}; best on the path (ORACLE) "
            f"{found['best_test_accuracy']:.4f} at rank {found['best_rank']}"
        )
    return lines


def _path_table(ui: Ui, title: str, key: str, rows: tuple[dict[str, Any], ...]) -> None:
    columns = ("term_1", "term_2", "bound", "test_risk", "zero_one_bound", "test_error")
    heads = (key, "Term I", "Term II", "bound", "test risk", "0-1 bound", "test error")
    ui.table(heads, [(row[key], *(row[name] for name in columns)) for row in rows], title=title, left=0)
