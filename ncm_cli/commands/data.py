"""Shows what ``ncm data`` made, the same for every builder.

The command's options are in `datasets.options`; its work is in `datasets.base`.
"""

from __future__ import annotations

from typing import Any

from ncm_cli.console import Ui

MAX_SHOWN_ROWS = 40
"""Rows of a table of counts."""


def show(made: dict[str, Any], ui: Ui) -> None:
    """The data set's counts and files."""
    ((title, counts),) = made["counts"].items()
    rows = [list(row.values()) for row in counts]
    names = sum(isinstance(cell, str) for cell in rows[0])
    ui.table(list(counts[0]), rows, title=title, left=names, most=MAX_SHOWN_ROWS)
    for role, path in made["files"].items():
        ui.note(f"{role}: {path}")
