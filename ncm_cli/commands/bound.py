"""``ncm bound``: every term with its symbol, its equation and what it means, verdicts, and the paths."""

from __future__ import annotations

import re
from typing import Any

from ncm_cli.console import Ui

TERMS = """\
term_1 | Term I | risk on {where} | Thm 1
  What the probe loses in the training domains: it grows with r, as fewer directions are left to use.
  On the twins the bound is a fact about these pairs; on training rows it holds up to sampling error.
weight_norm | {theta} | norm of the weights | Thm 1
  Every shift of the features reaches the logits through the weights.
  A stronger weight decay makes it smaller, and Term I larger.
theta_m_theta | {quadratic} | mean squared shift of the logits | proof
  M is the mean of δδᵀ over the oracle pairs: how far the logits move from a twin to its test row.
  It is 0 when the weights don't meet any direction in which the domains differ.
root_bound | by {quadratic} | {twice}Term I + {root} | proof
  The bound before Term II: it knows the weights, and is the tighter one for this very probe.
  Term II replaces it by what holds for every probe of this norm that the removed directions allow.
misalignment | ‖Q̃ᵀQ‖_Λ | largest shift left in: misalignment | Thm 1
  The root mean square shift along the worst direction that the projection has left in.
  0 when the removed directions hold all that changes. Few pairs overestimate it: see its interval.
term_2 | Term II | {term_2} | Thm 1
  The price of spurious directions that were missed. It shrinks with r, while Term I grows.
  It bounds the mean shift of the loss by the Lipschitz constant of the loss in the logits.
lambda_1 | λ₁ | largest eigenvalue of M | (4)
  The squared size of the largest typical shift between a twin and its test row.
  How far the test domain is from the training domains, in the features' own unit.
lambda_s_next | λ_s+1 | largest eigenvalue of M past s | (4)
  What the s strongest spurious directions leave over, even when they are found perfectly.
  It is 0 for s = |I| when the spurious dimensions are finitely many.
distance | dist | sine of the angle of Q̃_s and Q_s | (4)
  0: the s removed directions are the s strongest of M. 1: one of these isn't removed at all.
  For r > |I| only the first s removed directions count here: it can be large with a small Term II.
term_2_upper | Term II ≤ | by λ₁ dist² + λ_s+1 | (4)
  What the paper's inequality (4) allows Term II to be, from the distance of the subspaces.
  Looser than Term II: it knows the largest angle only, not the direction in which it is.
bound | bound | {twice}Term I + Term II | Thm 1
  No test domain that shifts like these pairs has a larger risk.
  Compare it over ranks (--ranks 0:40): its least is where the guarantee is best.
test_risk | test risk | measured on the test rows | Thm 1
  The mean loss on the oracle pairs' test rows, which the bound must not fall below.
  It uses their labels, so it isn't available where the test domain is unknown.
slack | slack | bound − test risk |
  How much larger the bound is than what was measured; negative would break the theorem.
  A large slack means the shifts mostly miss the direction of the weights.
erm_bound | ERM bound | nothing removed: Term II by √λ₁ | Cor. 2
  The bound with nothing removed, r = 0, for the same weights.
  The difference to the bound is what the pairs have proved.
epsilon_norm | ‖ε‖ | spectral norm of the pairs' noise | Cor. 3
  The largest singular value of noisy minus clean differences.
  More pairs raise σ_s about as fast as noise, and average it out between the directions.
sigma_s | σ_s | singular value s of the clean pairs | Cor. 3
sigma_s_next | σ_s+1 | the next one | Cor. 3
condition_limit | limit of ‖ε‖ | (1 − 1/√2)(σ_s − σ_s+1) | Lem. 2
  Wedin's sin Θ theorem needs the noise to stay below this share of the spectral gap.
  Above it the corollary says nothing; Theorem 1 holds all the same.
noise | noise term | Term II by the noise{applies} | Cor. 3
  ‖θ‖(2√λ₁‖ε‖/(σ_s − σ_s+1) + √λ_s+1), squared and doubled for squared loss.
  It needs s = |I|: only then do the clean pairs and M have the same leading subspace.
twin_error | twins' error | twins predicted wrong | 0-1
  Term I counted in errors.
  It needs no logits, and does not change when the weights are multiplied.
flip_rate | flip rate | pairs predicted differently | 0-1
  Term II counted in errors: how often a twin and its test row get different answers.
  On held-out training pairs the same number chooses the rank in ncm fit.
zero_one_bound | 0-1 bound | twins' error + flip rate | 0-1
  A wrong answer on a test row is a wrong answer on its twin, or a changed one: true pair by pair.
  For any classifier and any number of classes.
test_error | test error | measured on the test rows | 0-1
  One minus the accuracy on the oracle pairs' test rows.
  It can't be above the 0-1 bound.
"""
"""In the order of the proof: name | symbol | in words | the paper's theorem, corollary, lemma or (equation),
and below it what --explain says."""

WORDS_NAMES = ("theta", "quadratic", "twice", "root", "term_2")
WORDS = {
    "logistic": ("‖θ‖", "θᵀMθ", "", "√(θᵀMθ)", "‖θ‖ · misalignment"),
    "cross-entropy": ("‖W‖", "tr(WMWᵀ)", "", "√(2 tr(WMWᵀ))", "√2 ‖W‖ · misalignment"),
    "squared": ("‖θ‖", "θᵀMθ", "2 · ", "2 θᵀMθ", "2 ‖θ‖² · misalignment²"),
}
"""For each loss what stands in `TERMS` for these names."""


def show(found: dict[str, Any], ui: Ui) -> None:
    """The terms, whether the bound holds, and the paths."""
    rows = _rows(found)
    ui.table(
        ("Term", "What it is", "Paper", "Value", "95 % interval"),
        [row for row, _ in rows],
        title=f"Bound on the test-domain risk: {found['loss']} loss, rank {found['rank']}",
        left=3,
    )
    if found["options"]["explain"]:
        for (symbol, words, *_), meaning in rows:
            if meaning:
                ui.text("\n".join([f"{symbol}: {words}", *meaning, ""]))
    for line in _verdicts(found):
        ui.text(line)
    columns = ("term_1", "term_2", "bound", "test_risk", "zero_one_bound", "test_error")
    heads = ("Term I", "Term II", "bound", "test risk", "0-1 bound", "test error")
    for name, key, what in (("path", "rank", "ranks"), ("pair_counts", "pairs", "number of pairs")):
        if found[name]:
            path = [(row[key], *(row[column] for column in columns)) for row in found[name]]
            ui.table((key, *heads), path, title=f"Along the {what}", left=0)
    if found["options"]["output"]:
        ui.note(f"written: {found['options']['output']}")


def _rows(found: dict[str, Any]) -> list[tuple[tuple[Any, ...], list[str]]]:
    """(symbol, words, source, value, interval) of each term that is known here, and what it means."""
    noise, zero = found["noise_corollary"], found["zero_one"]
    values = {**zero, "zero_one_bound": zero["bound"]} if zero else {}
    if noise["epsilon_norm"] is not None:
        values |= {**noise, "noise": noise["value"]}
    values |= found
    words = dict(zip(WORDS_NAMES, WORDS[found["loss"]], strict=True))
    words["where"] = "the twins" if found["exact"] else "the training rows"
    words["applies"] = "" if noise["applicable"] else " (not applicable)"
    rows = []
    for head, *meaning in (entry.split("\n") for entry in re.split(r"\n(?! )", TERMS.strip())):
        name, *shown = (part.strip().format(**words) for part in head.split("|"))
        if name in values:
            low_high = found["intervals"].get(name)
            interval = f"{low_high[0]:.3g} – {low_high[1]:.3g}" if low_high else ""
            rows.append(((*shown, values[name], interval), meaning))
    return rows


def _verdicts(found: dict[str, Any]) -> list[str]:
    estimates, noise = found["estimates"], found["noise_corollary"]
    sign, word = ("≤", "holds") if found["holds"] else (">", "does NOT hold")
    how = "exact: Term I is taken on the twins, so the inequality is deterministic"
    if not found["exact"]:
        how = f"up to sampling error: Term I is taken on {estimates['train_rows']:,} training rows"
    known = estimates["spurious_dim"]
    if known == "estimated":
        known += f": eigenvalues of M above {estimates['tolerance']:g} of the largest"
    applies = "applies" if noise["applicable"] else f"not applicable: {'; '.join(noise['reasons'])}"
    lines = [
        f"The bound {word}: test risk {found['test_risk']:.4f} {sign} {found['bound']:.4f}, "
        f"slack {found['slack']:.4f}",
        f"  {how}",
        f"|I| = {found['spurious_dim']} ({known}); r = {found['rank']}, s = min(r, |I|) = {found['s']}; "
        f"{estimates['oracle_pairs']:,} oracle pairs",
        f"Noise corollary: {applies}",
    ]
    if zero := found["zero_one"]:
        lines.append(
            f"0-1 bound: test error {zero['test_error']:.4f} ≤ {zero['bound']:.4f} = "
            f"twins' error {zero['twin_error']:.4f} + flip rate {zero['flip_rate']:.4f}"
        )
    if oracle := found["oracle"]:
        reached = "" if oracle["test_error"] is None else f", test error {oracle['test_error']:.4f}"
        lines.append(
            f"ORACLE, trained on {oracle['train_rows']:,} rows of {oracle['where']}: "
            f"test risk {oracle['test_risk']:.4f}{reached}"
        )
    if path := found["summary"]:
        lines.append(
            f"Least 0-1 bound at rank {path['bound_rank']}: test accuracy "
            f"{path['bound_test_accuracy']:.4f}; best on the path (ORACLE) "
            f"{path['best_test_accuracy']:.4f} at rank {path['best_rank']}"
        )
    return lines
