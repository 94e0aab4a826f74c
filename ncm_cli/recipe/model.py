"""What a recipe is once it has been read and found right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncm_cli.options.sweep import files_of

REPORT, STATE = "report.json", ".ncm-run.json"
"""What a run writes itself: what it found, and what its steps have read and written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One step in one cell of the matrix: one command line."""

    step: str
    """The step's name, unique in the recipe."""
    kind: str
    """The subcommand: ``embed``, ``fit`` ..., or ``data``."""
    builder: str | None
    """Of ``data`` steps."""
    cell: dict[str, str]
    """The matrix variables that the step uses, with their values here as the recipe writes them."""
    options: Any
    """The options dataclass of the subcommand, with usable paths."""
    inputs: dict[str, tuple[Path, ...]]
    """Files and folders that are read, absolute, by option."""
    outputs: dict[str, tuple[Path, ...]]
    """Files and folders that are written, absolute, by option."""
    line: int

    @property
    def written(self) -> tuple[Path, ...]:
        """Every file and folder that it writes; beside the table of a sweep others of its name."""
        found = [path for paths in self.outputs.values() for path in paths]
        return tuple(one for path in found for one in (files_of(path) if self.kind == "sweep" else (path,)))

    @property
    def title(self) -> str:
        """The step and its cell, for people."""
        cell = ", ".join(f"{name} {value}" for name, value in self.cell.items())
        return f"{self.step} ({cell})" if cell else self.step

    @property
    def key(self) -> str:
        """The same for machines: unique in a recipe, and stable between runs."""
        return json.dumps([self.step, self.cell], ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """A published or known value, and where to find ours."""

    metric: str
    """A name in an eval or bound result, dotted for inner ones; ``worst_group`` is its accuracy."""
    filters: dict[str, str]
    """``where``, ``method``, ``rule``, ``step`` or matrix variables that pick the results to average."""
    applies: bool
    """Whether the run's variables are those that the value is for, such as the model."""
    value: float | None
    tolerance: float | None
    min: float | None
    max: float | None
    source: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe, ready to run into one folder."""

    name: str
    file: Path
    sha256: str
    out: Path
    """The run's folder, absolute."""
    vars: dict[str, Any]
    """Variables without a matrix, as written; None for an empty one."""
    matrix: dict[str, tuple[str, ...]]
    jobs: tuple[Job, ...]
    """In the order in which they run."""
    columns: dict[str, str]
    """Columns of the closing table: heading to row filter."""
    expect: tuple[Expectation, ...]
    missing: tuple[str, ...] = ()
    """Inputs that aren't there, each with its line; only of a recipe that was read for its shell lines."""
