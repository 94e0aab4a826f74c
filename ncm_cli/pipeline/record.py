"""report.json: what a run was made of and what it found, for other programs and for the record."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from ncm_cli.options.spec import as_json
from ncm_cli.pipeline.freshness import State
from ncm_cli.pipeline.outcome import Outcome
from ncm_cli.recipe import Job, Recipe

PACKAGES = ("ncm-cli", "numpy", "scipy", "scikit-learn", "torch", "open_clip_torch", "timm", "h5py", "pillow")


def write_report(path: Path, recipe: Recipe, state: State, found: Outcome) -> None:
    """Write the outcome, and for every file the recipe, step, options, seed and input digests behind it."""
    from ncm_cli.store.results import write_result

    provenance = {
        "recipe": {"name": recipe.name, "file": str(recipe.file), "sha256": recipe.sha256},
        "vars": recipe.vars,
        "matrix": {name: list(values) for name, values in recipe.matrix.items()},
        "versions": versions(),
        "files": [entry for job in recipe.jobs for entry in _files(job, recipe, state)],
    }
    write_result(path, "run", {**found.to_json(), "provenance": provenance})


def versions() -> dict[str, str | None]:
    """Python's and the packages' versions."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _files(job: Job, recipe: Recipe, state: State) -> list[dict[str, Any]]:
    facts = state.facts(job)
    entries = []
    for path in (item for items in job.outputs.values() for item in items):
        name = str(path.relative_to(recipe.out)) if path.is_relative_to(recipe.out) else str(path)
        entries.append(
            {
                "file": name,
                "step": job.step,
                "kind": job.builder or job.kind,
                "cell": job.cell,
                "seed": getattr(job.options, "seed", None),
                "options": as_json(job.options),
                "inputs": facts.get("inputs"),
                "sha256": (facts.get("outputs") or {}).get(name),
                "seconds": facts.get("seconds"),
            }
        )
    return entries
