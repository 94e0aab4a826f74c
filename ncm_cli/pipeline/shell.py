"""A recipe as the shell script that it stands for."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ncm_cli.options.spec import Field, fields_of
from ncm_cli.recipe import Job, Recipe


def shell_lines(recipe: Recipe, jobs: tuple[Job, ...], *, cwd: Path | None = None) -> list[str]:
    """Lines for bash that do what the jobs do, and write the same files."""
    here = Path.cwd() if cwd is None else cwd
    lines = [f"cd {shlex.quote(str(here))}", f"mkdir -p {shlex.quote(str(_shown(recipe.out, here)))}"]
    return [*lines, *(shlex.join(command_line(job)) for job in jobs)]


def _shown(path: Path, here: Path) -> Path:
    return path.relative_to(here) if path.is_relative_to(here) else path


def command_line(job: Job) -> list[str]:
    """The command line of one job: options that have their default are left out."""
    command = ["ncm", job.kind, *([job.builder] if job.builder else [])]
    fields = fields_of(type(job.options))
    positional: list[str] = []
    flagged: list[str] = []
    for field in fields:
        value = getattr(job.options, field.name)
        if field.spec.positional:
            positional += _texts(field, value)
        elif field.required or value != field.default:
            flagged += _flagged(field, value)
    if any(text.startswith("-") for text in positional):
        # After -- nothing is taken for an option.
        return [*command, *flagged, "--", *positional]
    return [*command, *positional, *flagged]


def _flagged(field: Field, value: Any) -> list[str]:
    if value is None:
        return []
    if field.type is bool:
        return [field.flag if value else f"--no-{field.flag[2:]}"]
    return [word for text in _texts(field, value) for word in (field.flag, text)]


def _texts(field: Field, value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if field.repeated else [str(value)]
