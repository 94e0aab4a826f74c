"""``ncm fit``."""

from __future__ import annotations

from typing import Any

from ncm_cli.console import Ui
from ncm_cli.errors import listing
from ncm_cli.probes.selection import choose

SHOWN = 24
"""Longer paths are cut to the best weight decay of each rank, and then to this many ranks around it."""

COLUMNS = {
    "val_accuracy": "val accuracy",
    "val_log_loss": "val log loss",
    "val_mse": "val MSE",
    "flip_rate": "flip rate",
    "pair_mse": "pair MSE",
    "bound_01": "error bound",
    "bound_mse": "MSE bound",
    "log_loss_bound": "log-loss bound",
    "worst_group": "worst group",
    "test_accuracy": "ORACLE test",
    "test_mse": "ORACLE test",
}

CONTROLS = {
    "constant": "always the same answer",
    "erm": "ERM, nothing removed",
    "erm-upweighted": "ERM, groups up-weighted",
    "erm-pair-rows": "ERM, pairs' rows added",
}


def show(body: dict[str, Any], ui: Ui) -> None:
    """The path, what was chosen, and whether the pairs helped."""
    _show_path(body, ui)
    if len(body["crossings"]) > 1:
        ui.text("\n".join(map(_worst_of, body["crossings"])) + "\n")
    if body["verdict"] is not None:
        _show_judged(body, ui)
    classes = f", classes {listing(body['classes'])}" if body["classes"] else ""
    mark = "ORACLE: " if body["oracle"] else ""
    ui.note(
        f"{mark}{body['method']}, rank {body['rank']}, weight decay {body['weight_decay']:g}: "
        f"{body['train_rows']:,} training rows{classes}"
    )
    for flag in body["flags"]:
        ui.note(flag)
    ui.note(f"wrote {body['output']}")


def _show_path(body: dict[str, Any], ui: Ui) -> None:
    path, chosen = body["path"], body["chosen"]
    columns = [name for name in COLUMNS if name in path[chosen]]
    shown = _thinned(body)
    unconverged = not all(path[index]["converged"] for index in shown)
    rows = [
        [
            ">" if index == chosen else "",
            path[index]["rank"],
            f"{path[index]['weight_decay']:g}",
            *(path[index].get(name) for name in columns),
            *(["" if path[index]["converged"] else "not converged"] if unconverged else []),
        ]
        for index in shown
    ]
    titles = ["", "rank", "weight decay", *(COLUMNS[name] for name in columns), *["note"] * unconverged]
    left_out = len(path) - len(shown)
    footer = f"{left_out} of {len(path)} candidates not shown: --json has them all" if left_out else None
    title = f"selection: {'ORACLE ' if body['oracle'] else ''}{body['rule']}"
    ui.table(titles, rows, title=title, footer=footer)


def _worst_of(crossing: dict[str, Any]) -> str:
    worst = crossing["worst_group"]
    named = ", ".join(f"{column}={value}" for column, value in worst["group"].items())
    value = worst.get("accuracy", worst.get("mse"))
    return f"worst of {' × '.join(crossing['columns'])}: {value:.3f} ({named})"


def _thinned(body: dict[str, Any]) -> list[int]:
    """The best candidate of each rank when the path is long, and evenly spaced ranks when it still is."""
    path = body["path"]
    if len(path) <= SHOWN or body["rule"] == "only-candidate":
        return list(range(len(path)))
    by_rank: dict[int, list[int]] = {}
    for index, candidate in enumerate(path):
        by_rank.setdefault(candidate["rank"], []).append(index)
    best = [own[choose([path[i] for i in own], body["rule"], body["task"])] for own in by_rank.values()]
    if len(best) <= SHOWN:
        return best
    step = (len(best) - 1) / (SHOWN - 1)
    picked = {round(i * step) for i in range(SHOWN)}
    return [index for i, index in enumerate(best) if i in picked or index == body["chosen"]]


def _show_judged(body: dict[str, Any], ui: Ui) -> None:
    """The controls beside the pick, and the verdict."""
    verdict = body["verdict"]
    if body["controls"]:
        heads = (
            ("val error", "flip rate", "bound") if body["classes"] else ("val MSE", "pair MSE", "MSE bound")
        )
        named = {"this probe": verdict} | {CONTROLS[one["name"]]: one for one in body["controls"]}
        rows = [
            (name, *(_with_interval(one[measure]) for measure in ("val_error", "flip_rate", "bound")))
            for name, one in named.items()
        ]
        ui.table(["", *heads], rows, title="beside the controls, with 95 % intervals")
    ui.text(f"{verdict['text']}\n{verdict['about']}")


def _with_interval(found: dict[str, float]) -> str:
    return f"{found['value']:.3f} ({found['low']:.2f}–{found['high']:.2f})"
