"""Options of ``ncm run``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ncm_cli.errors import UsageError, listing
from ncm_cli.options import argument, given_flags, option
from ncm_cli.ray_cluster import parse_cluster

_MANY = "Many steps at once"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """``ncm run``."""

    recipe: Path | None = argument(
        None,
        help="The recipe: a YAML file, or the name of one that comes with ncm (--list).",
        metavar="RECIPE",
        names="recipes.catalogue:shipped_recipes",
        role="input",
    )
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
        False, help="Let steps write outside the run's folder, but not over files that the run didn't make."
    )
    force: bool = option(False, help="Run steps that are up to date, too; with --copy, replace the file.")
    dry_run: bool = option(False, help="Print the shell lines that the recipe stands for; run nothing.")
    strict: bool = option(False, help="Exit with code 3 if an expected value is missed.")
    jobs: int | None = option(
        None,
        least=1,
        metavar="N",
        group=_MANY,
        help="Steps that run at once, each in a process with its share of the cores (1, or as many as the "
        "cluster has room for).",
    )
    cluster: str | None = option(
        None,
        parse=parse_cluster,
        metavar="ADDRESS",
        group=_MANY,
        help="Run steps on a cluster of Ray: auto, HOST:PORT, ray://HOST:PORT, or local, this machine alone. "
        "All nodes must see the run's folder.",
    )
    cpus: int | None = option(
        None, least=1, metavar="N", group=_MANY, help="Cores of a step on the cluster (1 if left out)."
    )
    list: bool = option(
        False,
        help="List the recipes that come with ncm, with the data they need and the time they take.",
    )
    copy: bool = option(
        False,
        help="Write a recipe that comes with ncm into this folder, to be changed; run nothing.",
    )

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        running = ("out", "set", "only", "allow_outside", "dry_run", "strict", "jobs", "cluster", "cpus")
        if self.list and (given := given_flags(self, ("copy", "force", *running))):
            yield UsageError(f"--list lists all recipes and runs none: leave out {listing(given)}")
        elif self.list and self.recipe is not None:
            yield UsageError("--list lists all recipes", found=self.recipe, fix="leave the name out")
        elif self.copy and (given := given_flags(self, running)):
            yield UsageError(f"--copy writes a recipe and runs nothing: leave out {listing(given)}")
        elif self.recipe is None and not self.list:
            yield UsageError("no recipe is named", fix="ncm run --list shows those that come with ncm")
        if self.cpus is not None and self.cluster is None:
            yield UsageError("--cpus is for steps on a cluster", fix="--cluster ADDRESS, or leave it out")
        if (self.jobs or 1) > 1 and self.cluster is None and os.name != "posix":
            yield UsageError("--jobs needs Linux or macOS", found=f"--jobs {self.jobs}", fix="leave it out")
