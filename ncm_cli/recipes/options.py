"""Options of ``ncm run``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ncm_cli.options import argument, option


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """``ncm run``."""

    recipe: Path = argument(help="The recipe, a YAML file.", metavar="RECIPE.yaml", role="input")
    out: Path | None = option(
        None, role="output", metavar="DIR", help="Folder of everything the run makes (runs/NAME if left out)."
    )
    set: tuple[str, ...] = option(
        (), metavar="KEY=VALUE", help="Another value for a variable of the recipe; may be repeated."
    )
    only: tuple[str, ...] = option(
        (), metavar="STEP", help="Run only the steps of this name or kind; may be repeated."
    )
    allow_outside: bool = option(
        False, help="Let steps write outside the run's folder; never over files that the run didn't make."
    )
    force: bool = option(False, help="Run steps that are up to date, too.")
    dry_run: bool = option(False, help="Print the shell lines that the recipe stands for; run nothing.")
    strict: bool = option(False, help="Exit with code 3 if an expected value is missed.")
