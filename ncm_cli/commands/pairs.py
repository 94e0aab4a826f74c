"""Shows the pairs' diagnostics, their spectrum, and which to look at first.

The command's options are `pairs.options.PairsOptions`; its work is in `pairs.pairs`.
"""

from __future__ import annotations

from typing import Any

from ncm_cli.console import Ui, scree
from ncm_cli.store.pairs import TEXT

SUSPECTS_SHOWN = 5


def show(made: dict[str, Any], ui: Ui) -> None:
    """The diagnostics as tables."""
    diagnostics: dict[str, Any] = made["diagnostics"]
    gap = (
        f"after rank {diagnostics['gap']} ({diagnostics['gap_ratio']:.2f} times)"
        if diagnostics["gap"]
        else None
    )
    counted = {
        "labels differ": diagnostics["label_disagreement"],
        "straddle train and test": diagnostics["straddling"],
        "hold test rows": {"count": diagnostics["matching"].get("test_pairs")},
        "repeated": diagnostics["repeated"],
        "identical features": diagnostics["identical"],
    }
    rows: list[tuple[str, object]] = [
        ("pairs", made["pairs"]),
        ("of them held out", made["held_out"]),
        *([("dropped", made["dropped"])] if made["dropped"] else []),
        ("numerical rank", diagnostics["rank"]),
        ("largest gap", gap),
        *((name, entry and entry["count"]) for name, entry in counted.items()),
    ]
    ui.table(["pairs", made["strategy"]], rows)
    ui.text(scree(made["singular_values"], gap=diagnostics["gap"]))
    if suspects := diagnostics["suspects"]:
        ui.text("\nLook at these pairs first: the other pairs explain least of their difference.")
        shown = [
            (pair["id_a"], pair["id_b"], pair["residual"], f"{pair['times']:.1f}")
            for pair in suspects[:SUSPECTS_SHOWN]
        ]
        ui.table(["id_a", "id_b", "unexplained", "× median"], shown, left=2)
        standing = f"{diagnostics['stand_out']} of {diagnostics['pairs']} pairs stand out"
        ui.text(
            f"{standing}{'' if made['strategy'] == TEXT else ': ncm report --html shows them as pictures'}."
        )
    ui.note(f"wrote {made['output']}")
