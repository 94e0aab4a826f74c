"""Shows the path, the choice and the verdict of ``ncm fit``.

The command's options are `probes.options.FitOptions`; its work is in `probes.fit`.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from ncm_cli.console import Ui
from ncm_cli.errors import listing
from ncm_cli.probes.selection import best_candidate, store_metric
from ncm_cli.probes.verdict import verdict_text

MAX_PATH_ROWS = 24
"""Longer paths are cut to the best weight decay of each rank, and then to this many evenly spaced ranks."""

COLUMNS = {
    "cell_error": "cell error",
    "cell_bound": "cell bound",
    "val_accuracy": "val accuracy",
    "val_log_loss": "val log loss",
    "val_mse": "val MSE",
    "flip_rate": "flip rate",
    "within_flip_rate": "in cells",
    "across_flip_rate": "across domains",
    "guarded_bound": "guarded bound",
    "pair_mse": "pair MSE",
    "bound_01": "error bound",
    "bound_mse": "MSE bound",
    "log_loss_bound": "log-loss bound",
    "worst_group": "worst group",
    "test_accuracy": "ORACLE test",
    "test_mse": "ORACLE test",
}

DETAILS = ("val_log_loss", "log_loss_bound")
"""Columns left out beside more informative ones, so that the table fits into 80 characters."""

DETAILS_OF_STORES = (*DETAILS, "flip_rate", "pair_mse", "within_flip_rate")
"""Columns left out beside the flips of each of several stores."""

CONTROLS = {
    "constant": "always the same answer",
    "erm": "ERM, nothing removed",
    "erm-upweighted": "ERM, groups up-weighted",
    "erm-pair-rows": "ERM, pairs' rows added",
    "erm-upweighted-pair-rows": "ERM, both",
}


def show(body: dict[str, Any], ui: Ui) -> None:
    """The path, what was chosen, and whether the pairs helped."""
    if "left_out" in body:
        _show_left_out(body, ui)
        return
    _show_path(body, ui)
    if len(body["crossings"]) > 1:
        ui.text("\n".join(map(_worst_of, body["crossings"])) + "\n")
    if body["verdict"] is not None:
        _show_judged(body, ui)
    classes = f", classes {listing(body['classes'])}" if body["classes"] else ""
    mark = "ORACLE: " if body["oracle"] else ""
    weights = f", {body['upweight']} up-weighted" if body["upweight"] else ""
    rows = ", including the pairs' rows" if body["pair_rows"] else ""
    ui.note(
        f"{mark}{body['method']}, rank {body['rank']}, weight decay {body['weight_decay']:g}{weights}: "
        f"{body['train_rows']:,} training rows{rows}{classes}"
    )
    for flag in body["flags"]:
        ui.note(flag)
    ui.note(f"wrote {body['output']}")


def _show_left_out(body: dict[str, Any], ui: Ui) -> None:
    """The test accuracy on each domain while it was left out, with the mean and the worst."""
    rows: list[tuple[Any, ...]] = []
    for value, fitted in body["left_out"].items():
        test, verdict = fitted["test"], fitted["verdict"]
        score = test.get("accuracy", test.get("mse"))
        rows.append((value, fitted["rank"], test["n"], score, verdict["code"] if verdict else None))
    scores, regression = [row[3] for row in rows], "mse" in next(iter(body["left_out"].values()))["test"]
    rows += [("mean", None, None, fmean(scores), None)]
    rows += [("worst", None, None, (max if regression else min)(scores), None)]
    measure = "test MSE" if regression else "test accuracy"
    ui.table([f"{body['leave_out']} left out", "rank", "n", measure, "verdict"], rows)
    for fitted in body["left_out"].values():
        ui.note(f"wrote {fitted['output']} and {fitted['test']['options']['output']}")


def _show_path(body: dict[str, Any], ui: Ui) -> None:
    path, chosen = body["path"], body["chosen"]
    heads = COLUMNS | of_stores(body["verdict"])
    columns = [name for name in heads if name in path[chosen]]
    if {"cell_error", "guarded_bound"} & {*columns}:
        columns = [name for name in columns if name not in DETAILS]
    if len(heads) > len(COLUMNS):
        columns = [name for name in columns if name not in DETAILS_OF_STORES]
        columns = sorted(columns, key=lambda name: name.endswith(("bound", "bound_01", "bound_mse")))
    variants = "upweighted" in path[chosen]
    shown = _thinned(body)
    unconverged = not all(path[index]["converged"] for index in shown)
    rows = [
        [
            ">" if index == chosen else "",
            path[index]["rank"],
            f"{path[index]['weight_decay']:g}",
            *([_trained_on(path[index])] if variants else []),
            *(path[index].get(name) for name in columns),
            *(["" if path[index]["converged"] else "not converged"] if unconverged else []),
        ]
        for index in shown
    ]
    titles = ["", "rank", "weight decay", *["trained on"] * variants, *(heads[name] for name in columns)]
    titles += ["note"] * unconverged
    left_out = len(path) - len(shown)
    footer = f"{left_out} of {len(path)} candidates not shown: --json has them all" if left_out else None
    title = body.get("note") or f"selection: {'ORACLE ' if body['oracle'] else ''}{body['rule']}"
    ui.table(titles, rows, title=title, footer=footer)


def of_stores(verdict: dict[str, Any] | None) -> dict[str, str]:
    """The headings of the columns of several stores' flips."""
    stores = [Path(store["path"]).stem for store in (verdict or {}).get("stores", ())]
    names = {"flip_rate": "flips", "pair_mse": "MSE"}
    return {
        store_metric(name, at): f"{word} {stem}"
        for name, word in names.items()
        for at, stem in enumerate(stores)
    }


def _trained_on(candidate: dict[str, Any]) -> str:
    """The variant of a candidate, in words."""
    weights, rows = candidate["upweighted"], candidate["pair_rows"]
    return " ".join(["+ weights"] * weights + ["+ rows"] * rows)


def _worst_of(crossing: dict[str, Any]) -> str:
    worst = crossing["worst_group"]
    named = ", ".join(f"{column}={value}" for column, value in worst["group"].items())
    value = worst.get("accuracy", worst.get("mse"))
    return f"worst of {' × '.join(crossing['columns'])}: {value:.3f} ({named})"


def _thinned(body: dict[str, Any]) -> list[int]:
    """The best candidate of each rank when the path is long, and evenly spaced ranks when it still is."""
    path = body["path"]
    if len(path) <= MAX_PATH_ROWS or body["rule"] == "only-candidate":
        return list(range(len(path)))
    by_rank: dict[int, list[int]] = {}
    for index, candidate in enumerate(path):
        by_rank.setdefault(candidate["rank"], []).append(index)
    best = [
        indices[best_candidate([path[i] for i in indices], body["rule"], body["task"])]
        for indices in by_rank.values()
    ]
    best = sorted({*best, body["chosen"]}, key=lambda index: (path[index]["rank"], index))
    if len(best) <= MAX_PATH_ROWS + 1:
        return best
    step = (len(best) - 1) / (MAX_PATH_ROWS - 1)
    picked = {round(i * step) for i in range(MAX_PATH_ROWS)}
    return [index for i, index in enumerate(best) if i in picked or index == body["chosen"]]


def _show_judged(body: dict[str, Any], ui: Ui) -> None:
    """The controls beside the pick, and the verdict."""
    verdict = body["verdict"]
    if body["controls"]:
        heads = {"cell_error": "cell error", "val_error": "val error"}
        heads |= {"flip_rate": "flip rate", "bound": "bound"}
        if not body["classes"]:
            heads |= {"val_error": "val MSE", "flip_rate": "pair MSE", "bound": "MSE bound"}
        if not verdict.get("cell_error"):
            del heads["cell_error"]
        named = {"this probe": verdict} | {CONTROLS[control["name"]]: control for control in body["controls"]}
        # With four columns, only the intervals of the two scores fit into 80 characters.
        plain = ("val_error", "flip_rate") if len(heads) > 3 else ()
        rows = [
            (name, *("" if not facts.get(head) else _shown(facts[head], head not in plain) for head in heads))
            for name, facts in named.items()
        ]
        ui.table(["", *heads.values()], rows, title="beside the controls, with 95 % intervals")
    ui.prose(verdict_text(verdict))


def _shown(estimate: dict[str, float], interval: bool) -> str:
    return f"{estimate['value']:.3f}" + f" ({estimate['low']:.2f}–{estimate['high']:.2f})" * interval
