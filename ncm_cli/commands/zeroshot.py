"""Shows the classes and their words, and what was removed.

The command's options are `probes.options.ZeroshotOptions`; its work is in `probes.zeroshot`.
"""

from __future__ import annotations

from typing import Any

from ncm_cli.console import Ui
from ncm_cli.probes.verdict import verdict_text

CLASSES_SHOWN = 20

COLUMNS = {"val_accuracy": "val accuracy", "flip_rate": "flip rate", "bound_01": "error bound"}


def show(made: dict[str, Any], ui: Ui) -> None:
    """The classes, and the ranks if there are pairs."""
    words, prompts = list(made["words"].items()), made["prompts"]
    omitted = len(words) - CLASSES_SHOWN
    ui.table(
        ["class", "in prompts"],
        words[:CLASSES_SHOWN],
        title=prompts[0] + (f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""),
        footer=f"and {omitted:,} more classes" if omitted > 0 else None,
        left=2,
    )
    if made["verdict"] is not None:
        path, chosen = made["path"], made["chosen"]
        columns = [name for name in COLUMNS if name in path[chosen]]
        rows = [
            [">" if index == chosen else "", candidate["rank"], *(candidate[name] for name in columns)]
            for index, candidate in enumerate(path)
        ]
        ui.table(["", "rank", *(COLUMNS[name] for name in columns)], rows, title=f"selection: {made['rule']}")
        ui.prose(verdict_text(made["verdict"]))
    mixed = f", mixed with {made['mixed_with']['path']} (share {made['mix']:g})" if made["mixed_with"] else ""
    ui.note(f"{made['method']}, rank {made['rank']}, {len(words)} classes{mixed}")
    ui.note(f"wrote {made['output']}")
