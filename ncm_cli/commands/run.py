"""Runs a recipe for ``ncm run``, and shows the closing table.

The command's options are `recipes.options.RunOptions`; its work is in `recipes.run`.
"""

from __future__ import annotations

import dataclasses
from textwrap import fill, indent
from typing import Any

from ncm_cli.console import Ui, print_error
from ncm_cli.errors import listing
from ncm_cli.progress import Reporter
from ncm_cli.recipes.catalogue import catalogue, copy_recipe, find_recipe
from ncm_cli.recipes.load import Recipe, read_recipe
from ncm_cli.recipes.options import RunOptions
from ncm_cli.recipes.outcome import Summary
from ncm_cli.recipes.run import RunReport, selected_jobs, shell_lines
from ncm_cli.recipes.run import run as run_recipe
from ncm_cli.recipes.steps import REPORT
from ncm_cli.results.formats import terminal
from ncm_cli.results.tables import known_values
from ncm_cli.solvers.methods import UPWEIGHT

MISSED = 3

SCREEN, INDENT = 80, "    "
"""Most characters in a line of the list of recipes, and the blanks before details."""


def run(options: RunOptions, ui: Ui) -> int | None:
    """Run the recipe, with the closing table, or print its shell lines; or list or copy recipes."""
    if options.list:
        _show_catalogue(catalogue(), ui)
        return None
    assert options.recipe is not None
    if options.copy:
        copy = copy_recipe(options.recipe, replace=options.force)
        ui.note(f"wrote {copy}; ncm run {copy} runs it")
        return None
    recipe = _read(options, ui.reporter)
    if options.dry_run:
        lines = _shell_lines(recipe, options, ui.reporter)
        if ui.json:
            ui.result({"recipe": recipe.name, "lines": lines})
        else:
            print("\n".join(lines))
        return None
    report = _run(recipe, options, ui.reporter)
    if ui.json:
        ui.result(report)
    else:
        _show(report, ui)
    if report.failed:
        _show_failures(report, ui)
    elif options.strict and (missed := report.missed):
        ui.reporter.warn(f"{missed} expected value{'s were' if missed > 1 else ' was'} missed (--strict)")
        return MISSED
    return report.exit_code or None


def work(options: RunOptions, *, reporter: Reporter) -> RunReport | dict[str, Any]:
    """What `run` does, for Python: the report, or what ``--json`` prints.

    Raises the error of the first step that failed.
    """
    if options.list:
        return {"recipes": catalogue()}
    assert options.recipe is not None
    if options.copy:
        return {"recipe": copy_recipe(options.recipe, replace=options.force)}
    recipe = _read(options, reporter)
    if options.dry_run:
        return {"recipe": recipe.name, "lines": _shell_lines(recipe, options, reporter)}
    report = _run(recipe, options, reporter)
    if report.failed:
        raise report.failed[0].error
    return report


def _read(options: RunOptions, reporter: Reporter) -> Recipe:
    assert options.recipe is not None
    return read_recipe(
        find_recipe(options.recipe, reporter),
        out=options.out,
        sets=options.set,
        dry_run=options.dry_run,
        allow_outside=options.allow_outside,
    )


def _shell_lines(recipe: Recipe, options: RunOptions, reporter: Reporter) -> list[str]:
    for missing in recipe.missing:
        reporter.warn(missing)
    return shell_lines(recipe, selected_jobs(recipe, options.only))


def _run(recipe: Recipe, options: RunOptions, reporter: Reporter) -> RunReport:
    names = ("only", "force", "jobs", "cluster", "cpus")
    return run_recipe(recipe, **{name: getattr(options, name) for name in names}, reporter=reporter)


def _show_failures(report: RunReport, ui: Ui) -> None:
    """The errors in full, then the steps that failed and those that didn't run."""
    for failure in report.failed:
        error = failure.error
        print_error(f"{failure.step}: {error.title}", error.what, error.lines())
    failed = [failure.step for failure in report.failed]
    ui.reporter.warn(f"{len(failed)} step{'s' * (len(failed) > 1)} failed: {listing(failed)}")
    if report.stopped:
        stopped = [f"{stopped.step} (after {stopped.because})" for stopped in report.stopped]
        ui.reporter.warn(f"{len(stopped)} not run, after a failed step: {listing(stopped)}")
    ui.note("correct what failed and run the same command again: finished steps aren't repeated")


def _show_catalogue(recipes: list[dict[str, Any]], ui: Ui) -> None:
    if ui.json:
        ui.result(recipes)
    for recipe in recipes:
        ui.text(recipe["name"])
        for line in (recipe["what"], f"data: {recipe['data']}", f"time: {recipe['time']}"):
            ui.text(indent(fill(line, SCREEN - len(INDENT), break_on_hyphens=False), INDENT))
    ui.text("\nncm run NAME runs one, into runs/; ncm run NAME --copy writes it here, for changes.")


def _show(report: RunReport, ui: Ui) -> None:
    recipe = report.recipe
    if report.rows:
        _show_rows(recipe, report.rows, ui)
    for row in report.rows:
        if row.seen:
            last = list(recipe.columns)[-1]
            ui.reporter.warn(f"{_label(row)}: rows of {last!r} were also used in training or for choosing")
    if report.comparisons:
        ui.table(**terminal(known_values(recipe.name, map(dataclasses.asdict, report.comparisons))))
    ui.text(_where_files_are(report))


def _show_rows(recipe: Recipe, rows: list[Summary], ui: Ui) -> None:
    """The closing table, without empty columns."""
    named = [(_label(row).removesuffix(UPWEIGHT), row) for row in rows]
    # A variable whose value is always the method's name is left out.
    cells = list(dict.fromkeys(cell for name, row in named for cell in row.cell if row.cell[cell] != name))
    headings = list(recipe.columns)
    columns: dict[str, list[object]] = {"method": [_label(row) for row in rows]}
    columns.update({name: [row.cell.get(name) for row in rows] for name in cells})
    columns["rule"] = [_rule(row) for row in rows]
    columns.update({heading: [row.columns[heading] for row in rows] for heading in headings})
    columns["worst group"] = [row.worst_group for row in rows]
    columns["rank"] = [None if row.rank is None else f"{row.rank.mean:.3g}" for row in rows]
    shown = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    seeds = {row.seeds for row in rows}
    counted = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    spread = f"; mean ± standard deviation over {counted} seeds" if max(seeds) > 1 else "; one seed"
    worst = f"; worst group of {headings[-1]!r}" if "worst group" in shown else ""
    ui.table(
        tuple(shown),
        list(zip(*shown.values(), strict=True)),
        title=recipe.name,
        footer=f"accuracy{worst}{spread}",
        left=2 + len(cells),
    )


def _label(row: Summary) -> str:
    """The step's name; for a sweep, which has many methods, the method's name."""
    return row.method if row.swept else row.step


def _rule(row: Summary) -> str | None:
    """The selection rule; in capitals where it uses test rows."""
    if row.rule is None or not row.oracle:
        return row.rule
    return {"oracle": "ORACLE", "oracle-worst-group": "ORACLE WG"}.get(row.rule, f"ORACLE {row.rule}")


def _where_files_are(report: RunReport) -> str:
    """The files of each step; for a matrix, the first, the last and their number."""
    recipe = report.recipe
    lines = [f"files in {recipe.out}:"]
    steps: dict[str, list[str]] = {}
    left_out = {failure.step for failure in report.failed} | {stopped.step for stopped in report.stopped}
    for job in recipe.jobs:
        if job.title in left_out:  # what is there is of an earlier run
            continue
        written = (path for path in job.outputs.values() if path.exists())  # --only leaves steps out
        steps.setdefault(job.step, []).extend(map(recipe.name_of, written))
    for step, names in ((step, names) for step, names in steps.items() if names):
        last = f" ... {names[-1]} ({len(names)})" if len(names) > 1 else ""
        lines.append(f"  {step}: {names[0]}{last}")
    lines.append(f"  everything above, for programs: {REPORT}")
    return "\n".join(lines)
