"""``ncm run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from ncm_cli.cli.command import Example, add_command
from ncm_cli.options.run import RunOptions

if TYPE_CHECKING:
    from ncm_cli.pipeline import RunReport

MISSED = 3


def register(app: typer.Typer) -> None:
    """Add the command to the tree."""
    add_command(
        app,
        "run",
        RunOptions,
        handle,
        examples=(
            Example(line="ncm run recipes/digits.yaml", note="everything, into runs/colored-digits"),
            Example(
                line="ncm run recipes/digits.yaml --set seed=[0] --dry-run",
                note="the shell lines for one seed, to read or to paste",
            ),
        ),
        next_step="run it again after a change: only the steps that the change touches run",
    )


def handle(options: RunOptions, ui: Any) -> int | None:
    """Run the recipe, or print its shell lines; then the closing table."""
    from ncm_cli.pipeline import run, shell_lines
    from ncm_cli.recipe import load

    recipe = load(options.recipe, out=options.out, sets=options.set)
    if options.dry_run:
        from ncm_cli.pipeline import chosen

        lines = shell_lines(recipe, chosen(recipe, options.only))
        if ui.json:
            ui.result({"recipe": recipe.name, "lines": lines})
        else:
            typer.echo("\n".join(lines))
        return None
    report = run(recipe, only=options.only, force=options.force, reporter=ui.reporter)
    if ui.json:
        ui.result(report.to_json())
    else:
        _show(report, ui)
    if options.strict and report.outcome.missed:
        missed = report.outcome.missed
        ui.reporter.warn(f"{missed} expected value{'s were' if missed > 1 else ' was'} missed (--strict)")
        return MISSED
    return report.exit_code or None


def _show(report: RunReport, ui: Any) -> None:
    recipe, found = report.recipe, report.outcome
    if found.rows:
        cells = list(dict.fromkeys(name for row in found.rows for name in row.cell))
        headings = list(recipe.columns)
        ui.table(
            ("method", *cells, "rule", *headings, "worst group", "rank", "seeds"),
            [
                (
                    _label(row),
                    *(row.cell.get(name) for name in cells),
                    _rule(row),
                    *(row.columns[heading] for heading in headings),
                    row.worst_group,
                    None if row.rank is None else f"{row.rank.mean:g}",
                    row.seeds,
                )
                for row in found.rows
            ],
            title=recipe.name,
            footer=f"accuracy; worst group: of {headings[-1]!r}; ± is the standard deviation over seeds",
            left=2 + len(cells),
        )
    for row in found.rows:
        if row.seen:
            ui.reporter.warn(
                f"{row.step}: rows of {headings[-1]!r} were also used in training or for choosing"
            )
    if found.verdicts:
        ui.table(
            ("expected", "value", "measured", "", "source"),
            [
                (
                    _what(verdict.expectation),
                    verdict.expected(),
                    verdict.measured,
                    verdict.state,
                    verdict.expectation.source,
                )
                for verdict in found.verdicts
            ],
            title="known values",
        )
    ui.text(_where_files_are(report))


def _label(row: Any) -> str:
    """The step's name; a sweep has many methods, so theirs."""
    return row.method if row.swept else row.step


def _rule(row: Any) -> str | None:
    """The selection rule; in capitals where it looks at test rows."""
    if row.rule is None or not row.oracle:
        return row.rule
    return {"oracle": "ORACLE", "oracle-worst-group": "ORACLE WG"}.get(row.rule, f"ORACLE {row.rule}")


def _what(expectation: Any) -> str:
    filters = ", ".join(f"{name} {value}" for name, value in expectation.filters.items())
    return f"{expectation.metric}: {filters}" if filters else expectation.metric


def _where_files_are(report: RunReport) -> str:
    """The files by step; the ones of a matrix are counted."""
    recipe = report.recipe
    lines = [f"files in {recipe.out}:"]
    steps: dict[str, list[str]] = {}
    for job in recipe.jobs:
        for path in (item for items in job.outputs.values() for item in items):
            name = str(path.relative_to(recipe.out)) if path.is_relative_to(recipe.out) else str(path)
            steps.setdefault(job.step, []).append(name)
    for step, names in steps.items():
        more = f" ... {names[-1]} ({len(names)})" if len(names) > 1 else ""
        lines.append(f"  {step}: {names[0]}{more}")
    lines.append(f"  everything above, for programs: {report.report.name}")
    return "\n".join(lines)
