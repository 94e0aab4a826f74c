"""Shows every term with its symbol, its equation and what it means, verdicts, and the paths.

The command's options are `theory.options.BoundOptions`; its work is in `theory.bound`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ncm_cli.console import Ui
from ncm_cli.registry import topic_text

TERMS = """\
term_1 | Term I | risk on {where} | Thm 1
weight_norm | {theta} | norm of the weights | Thm 1
theta_m_theta | {quadratic} | mean squared shift of the logits | proof
root_bound | by {quadratic} | {twice}Term I + {root} | proof
misalignment | ‖Q̃ᵀQ‖_Λ | largest shift not removed: misalignment | Thm 1
term_2 | Term II | {term_2} | Thm 1
lambda_1 | λ₁ | largest eigenvalue of M | (4)
lambda_s_next | λ_s+1 | largest eigenvalue of M past s | (4)
distance | dist | sine of the angle of Q̃_s and Q_s | (4)
term_2_upper | Term II ≤ | by λ₁ dist² + λ_s+1 | (4)
bound | bound | {twice}Term I + Term II | Thm 1
test_risk | test risk | measured on the test rows | Thm 1
slack | slack | bound − test risk |
erm_bound | ERM bound | nothing removed: Term II by √λ₁ | Cor. 2
epsilon_norm | ‖ε‖ | spectral norm of the pairs' noise | Cor. 3
sigma_s | σ_s | singular value s of the clean pairs | Cor. 3
sigma_s_next | σ_s+1 | the next one | Cor. 3
condition_limit | limit of ‖ε‖ | (1 − 1/√2)(σ_s − σ_s+1) | Lem. 2
noise | noise term | Term II by the noise{applies} | Cor. 3
twin_error | twins' error | twins predicted wrong | 0-1
flip_rate | flip rate | pairs predicted differently | 0-1
zero_one_bound | 0-1 bound | twins' error + flip rate | 0-1
test_error | test error | measured on the test rows | 0-1
"""
"""In the order of the proof: name | symbol | in words | the paper's theorem, corollary, lemma or (equation).
The topic ``bound`` of ``ncm help`` says what each means; ``--explain`` shows these explanations."""

WORDS_NAMES = ("theta", "quadratic", "twice", "root", "term_2")
WORDS = {
    "logistic": ("‖θ‖", "θᵀMθ", "", "√(θᵀMθ)", "‖θ‖ · misalignment"),
    "cross-entropy": ("‖W‖", "tr(WMWᵀ)", "", "√(2 tr(WMWᵀ))", "√2 ‖W‖ · misalignment"),
    "squared": ("‖θ‖", "θᵀMθ", "2 · ", "2 θᵀMθ", "2 ‖θ‖² · misalignment²"),
}
"""For each loss, the texts that replace these names in `TERMS`."""


STORES = {
    "oracle_stores": "The oracle pairs of each store",
    "pair_stores": "The pairs of each store that the probe was fitted with",
}
STORE_COLUMNS = {
    "pairs": "pairs",
    "twin_error": "twins' error",
    "flip_rate": "flip rate",
    "bound": "0-1 bound",
    "test_error": "test error",
}


def show(found: dict[str, Any], ui: Ui) -> None:
    """The terms, whether the bound holds, and the paths."""
    rows = _rows(found)
    ui.table(
        ("Term", "What it is", "Paper", "Value", "95 % interval"),
        list(rows.values()),
        title=f"Bound on the test-domain risk: {found['loss']} loss, rank {found['rank']}",
        left=3,
    )
    if found["options"]["explain"]:
        # As a list in the topic: - `name`: what it means, in two lines.
        for name, meaning in re.findall(r"^- `(\w+)`: (.*\n  .*)$", topic_text("bound"), re.MULTILINE):
            if name in rows:
                symbol, words, *_ = rows[name]
                ui.text(f"{symbol}: {words}\n  {meaning}\n")
    for line in _verdicts(found):
        ui.prose(line)
    for name, title in STORES.items():
        if stores := found.get(name):
            known = [key for key in STORE_COLUMNS if key in stores[0]]
            lines = [(Path(store["path"]).name, *(store[key] for key in known)) for store in stores]
            ui.table(("store", *(STORE_COLUMNS[key] for key in known)), lines, title=title, left=1)
    columns = ("term_1", "term_2", "bound", "test_risk", "zero_one_bound", "test_error")
    heads = ("Term I", "Term II", "bound", "test risk", "0-1 bound", "test error")
    for name, key, what in (("path", "rank", "ranks"), ("pair_counts", "pairs", "number of pairs")):
        if found[name]:
            path = [(row[key], *(row[column] for column in columns)) for row in found[name]]
            ui.table((key, *heads), path, title=f"Along the {what}", left=0)
    if found["options"]["output"]:
        ui.note(f"written: {found['options']['output']}")


def _rows(result: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """(symbol, words, source, value, interval) of each term that the result has."""
    noise, zero = result["noise_corollary"], result["zero_one"]
    values = {**zero, "zero_one_bound": zero["bound"]} if zero else {}
    if noise["epsilon_norm"] is not None:
        values |= {**noise, "noise": noise["value"]}
    values |= result
    words = dict(zip(WORDS_NAMES, WORDS[result["loss"]], strict=True))
    words["where"] = "the twins" if result["exact"] else "the training rows"
    words["applies"] = "" if noise["applicable"] else " (not applicable)"
    rows = {}
    for head in TERMS.splitlines():
        name, *shown = (part.strip().format(**words) for part in head.split("|"))
        if name in values:
            low_high = result["intervals"].get(name)
            interval = f"{low_high[0]:.3g} – {low_high[1]:.3g}" if low_high else ""
            rows[name] = (*shown, values[name], interval)
    return rows


def _verdicts(result: dict[str, Any]) -> list[str]:
    estimates, noise = result["estimates"], result["noise_corollary"]
    sign, word = ("≤", "holds") if result["holds"] else (">", "does NOT hold")
    how = "exact: Term I is taken on the twins, so the inequality is deterministic"
    if not result["exact"]:
        how = f"up to sampling error: Term I is taken on {estimates['train_rows']:,} training rows"
    known = estimates["spurious_dim"]
    if known == "estimated":
        known += f": eigenvalues of M above {estimates['tolerance']:g} of the largest"
    applies = "applies" if noise["applicable"] else f"not applicable: {'; '.join(noise['reasons'])}"
    lines = [
        f"The bound {word}: test risk {result['test_risk']:.4f} {sign} {result['bound']:.4f}, "
        f"slack {result['slack']:.4f}",
        f"  {how}",
        f"|I| = {result['spurious_dim']} ({known}); r = {result['rank']}, s = min(r, |I|) = {result['s']}; "
        f"{estimates['oracle_pairs']:,} oracle pairs",
        f"Noise corollary: {applies}",
    ]
    if zero := result["zero_one"]:
        lines.append(
            f"0-1 bound: test error {zero['test_error']:.4f} ≤ {zero['bound']:.4f} = "
            f"twins' error {zero['twin_error']:.4f} + flip rate {zero['flip_rate']:.4f}"
        )
    if oracle := result["oracle"]:
        reached = "" if oracle["test_error"] is None else f", test error {oracle['test_error']:.4f}"
        lines.append(
            f"ORACLE, trained on {oracle['train_rows']:,} rows of {oracle['where']}: "
            f"test risk {oracle['test_risk']:.4f}{reached}"
        )
    if path := result["summary"]:
        lines.append(
            f"Least 0-1 bound at rank {path['bound_rank']}: test accuracy "
            f"{path['bound_test_accuracy']:.4f}; best on the path (ORACLE) "
            f"{path['best_test_accuracy']:.4f} at rank {path['best_rank']}"
        )
    return lines
