"""Shows what each rule picks, and what is kept.

The command's options are `finetune.options.FinetuneOptions`; its work is in `finetune.finetune`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ncm_cli.console import Ui
from ncm_cli.finetune.options import checkpoint_files

COLUMNS = {
    "val_accuracy": "val accuracy",
    "val_worst_group": "val worst group",
    "flip_rate": "flip rate",
    "bound_01": "error bound",
    "test_accuracy": "test accuracy",
    "test_worst_group": "test worst group",
}


def show(body: dict[str, Any], ui: Ui) -> None:
    """A line for each rule; the one whose weights are kept is marked."""
    picks = {name: pick for name, pick in body["rules"].items() if pick}
    columns = [name for name in COLUMNS if any(name in pick["metrics"] for pick in picks.values())]
    rows = [
        [
            ">" if name == body["rule"] else "",
            f"ORACLE {name.removeprefix('oracle').lstrip('-')}".strip() if pick["oracle"] else name,
            pick["epoch"],
            *(pick["metrics"].get(column) for column in columns),
        ]
        for name, pick in picks.items()
    ]
    titles = ["", "rule", "epoch", *(COLUMNS[name] for name in columns)]
    ui.table(titles, rows, title=f"{body['method']}, seed {body['seed']}: what each rule picks", left=2)
    data = body["data"]
    pairs = (
        f", {data['pairs']['used']:,} pairs ({data['pairs']['held_out']:,} held out)" if data["pairs"] else ""
    )
    ui.note(f"{data['train_rows']:,} training rows{pairs}; {body['epochs']:,} epochs")
    for path in checkpoint_files(Path(body["output"])) if body["written"] else ():
        ui.note(f"wrote {path}")
