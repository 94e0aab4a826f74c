"""The rows of ``ncm bound``'s table: symbol, value, formula in words, the paper's equation, explanation.

``ncm bound``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncm_cli.theory.bound import BoundReport


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One quantity as the table shows it."""

    key: str
    """Names its explanation and, where it is estimated, its bootstrap interval."""
    symbol: str
    value: float | None
    words: str
    source: str
    """The paper's theorem, corollary, lemma or (equation)."""


def term_rows(report: BoundReport) -> list[Row]:
    """All quantities in the order of the proof."""
    return [*_theorem_rows(report), *_corollary_rows(report), *_zero_one_rows(report)]


def _theorem_rows(report: BoundReport) -> list[Row]:
    terms = report.terms
    several = terms.loss == "cross-entropy"
    where = "the twins" if report.exact else "the training rows"
    twice = "2 · " if terms.loss == "squared" else ""
    term_2 = {
        "logistic": "‖θ‖ · misalignment",
        "cross-entropy": "√2 ‖W‖ · misalignment",
        "squared": "2 ‖θ‖² · misalignment²",
    }[terms.loss]
    root = {"logistic": "√(θᵀMθ)", "cross-entropy": "√(2 tr(WMWᵀ))", "squared": "2 θᵀMθ"}[terms.loss]
    values: list[tuple[str, str, float | None, str, str]] = [
        ("term_1", "Term I", terms.term_1, f"risk on {where}", "Thm 1"),
        ("norm", "‖W‖" if several else "‖θ‖", terms.weight_norm, "norm of the weights", "Thm 1"),
        (
            "theta_m_theta",
            "tr(WMWᵀ)" if several else "θᵀMθ",
            terms.theta_m_theta,
            "mean squared shift of the logits",
            "proof",
        ),
        (
            "root_bound",
            "by θᵀMθ" if not several else "by tr(WMWᵀ)",
            terms.root_bound,
            f"{twice}Term I + {root}",
            "proof",
        ),
        ("misalignment", "‖Q̃ᵀQ‖_Λ", terms.misalignment, "largest shift left in: misalignment", "Thm 1"),
        ("term_2", "Term II", terms.term_2, term_2, "Thm 1"),
        ("lambda_1", "λ₁", terms.lambda_1, "largest eigenvalue of M", "(4)"),
        ("lambda_s_next", "λ_s+1", terms.lambda_s_next, "largest eigenvalue of M past s", "(4)"),
        ("distance", "dist", terms.distance, "sine of the angle of Q̃_s and Q_s", "(4)"),
        ("term_2_upper", "Term II ≤", terms.term_2_upper, "by λ₁ dist² + λ_s+1", "(4)"),
        ("bound", "bound", terms.bound, f"{twice}Term I + Term II", "Thm 1"),
        ("test_risk", "test risk", report.test_risk, "measured on the test rows", "Thm 1"),
        ("slack", "slack", report.slack, "bound − test risk", ""),
    ]
    return [Row(*value) for value in values]


def _corollary_rows(report: BoundReport) -> list[Row]:
    terms, noise = report.terms, report.noise
    values: list[tuple[str, str, float | None, str, str]] = [
        ("erm_bound", "ERM bound", terms.erm_bound, "nothing removed: Term II by √λ₁", "Cor. 2")
    ]
    if noise.epsilon_norm is not None:
        applies = "" if noise.applicable else " (not applicable)"
        values += [
            ("epsilon_norm", "‖ε‖", noise.epsilon_norm, "spectral norm of the pairs' noise", "Cor. 3"),
            ("sigma_s", "σ_s", noise.sigma_s, "singular value s of the clean pairs", "Cor. 3"),
            ("sigma_s_next", "σ_s+1", noise.sigma_s_next, "the next one", "Cor. 3"),
            ("condition", "limit of ‖ε‖", noise.condition_limit, "(1 − 1/√2)(σ_s − σ_s+1)", "Lem. 2"),
            ("noise", "noise term", noise.value, f"Term II by the noise{applies}", "Cor. 3"),
        ]
    return [Row(*value) for value in values]


def _zero_one_rows(report: BoundReport) -> list[Row]:
    zero = report.zero_one
    if zero is None:
        return []
    return [
        Row("twin_error", "twins' error", zero.twin_error, "twins predicted wrong", "0-1"),
        Row("flip_rate", "flip rate", zero.flip_rate, "pairs predicted differently", "0-1"),
        Row("zero_one_bound", "0-1 bound", zero.bound, "twins' error + flip rate", "0-1"),
        Row("test_error", "test error", zero.test_error, "measured on the test rows", "0-1"),
    ]


EXPLANATIONS: dict[str, tuple[str, str]] = {
    "term_1": (
        "What the probe loses in the training domains: it grows with r, as fewer directions are left to use.",
        "On the twins the bound is a fact about these pairs; on training rows it holds up to sampling error.",
    ),
    "norm": (
        "Every shift of the features reaches the logits through the weights.",
        "A stronger weight decay makes it smaller, and Term I larger.",
    ),
    "theta_m_theta": (
        "M is the mean of δδᵀ over the oracle pairs: how far the logits move from a twin to its test row.",
        "It is 0 when the weights don't meet any direction in which the domains differ.",
    ),
    "root_bound": (
        "The bound before Term II: it knows the weights, and is the tighter one for this very probe.",
        "Term II replaces it by what holds for every probe of this norm that the removed directions allow.",
    ),
    "misalignment": (
        "The root mean square shift along the worst direction that the projection has left in.",
        "0 when the removed directions hold all that changes. Few pairs overestimate it: see its interval.",
    ),
    "term_2": (
        "The price of spurious directions that were missed. It shrinks with r, while Term I grows.",
        "It bounds the mean shift of the loss by the Lipschitz constant of the loss in the logits.",
    ),
    "lambda_1": (
        "The squared size of the largest typical shift between a twin and its test row.",
        "How far the test domain is from the training domains, in the features' own unit.",
    ),
    "lambda_s_next": (
        "What the s strongest spurious directions leave over, even when they are found perfectly.",
        "It is 0 for s = |I| when the spurious dimensions are finitely many.",
    ),
    "distance": (
        "0: the s removed directions are the s strongest of M. 1: one of these isn't removed at all.",
        "For r > |I| only the first s removed directions count here: it can be large with a small Term II.",
    ),
    "term_2_upper": (
        "What the paper's inequality (4) allows Term II to be, from the distance of the subspaces.",
        "Looser than Term II: it knows the largest angle only, not the direction in which it is.",
    ),
    "bound": (
        "No test domain that shifts like these pairs has a larger risk.",
        "Compare it over ranks (--ranks 0:40): its least is where the guarantee is best.",
    ),
    "test_risk": (
        "The mean loss on the oracle pairs' test rows, which the bound must not fall below.",
        "It uses their labels, so it isn't available where the test domain is unknown.",
    ),
    "slack": (
        "How much larger the bound is than what was measured; negative would break the theorem.",
        "A large slack means the shifts mostly miss the direction of the weights.",
    ),
    "erm_bound": (
        "The bound with nothing removed, r = 0, for the same weights.",
        "The difference to the bound is what the pairs have proved.",
    ),
    "epsilon_norm": (
        "The largest singular value of noisy minus clean differences.",
        "More pairs raise σ_s about as fast as noise, and average it out between the directions.",
    ),
    "condition": (
        "Wedin's sin Θ theorem needs the noise to stay below this share of the spectral gap.",
        "Above it the corollary says nothing; Theorem 1 holds all the same.",
    ),
    "noise": (
        "‖θ‖(2√λ₁‖ε‖/(σ_s − σ_s+1) + √λ_s+1), squared and doubled for squared loss.",
        "It needs s = |I|: only then do the clean pairs and M have the same leading subspace.",
    ),
    "twin_error": (
        "Term I counted in errors.",
        "It needs no logits, and does not change when the weights are multiplied.",
    ),
    "flip_rate": (
        "Term II counted in errors: how often a twin and its test row get different answers.",
        "On held-out training pairs the same number chooses the rank in ncm fit.",
    ),
    "zero_one_bound": (
        "A wrong answer on a test row is a wrong answer on its twin, or a changed one: true pair by pair.",
        "For any classifier and any number of classes.",
    ),
    "test_error": (
        "One minus the accuracy on the oracle pairs' test rows.",
        "It can't be above the 0-1 bound.",
    ),
}


if TYPE_CHECKING:
    from ncm_cli.console import Ui
    from ncm_cli.theory.bound import BoundReport
    from ncm_cli.theory.options import BoundOptions


def run(options: BoundOptions, ui: Ui) -> None:
    """Compute the bound and show it."""
    from ncm_cli.theory.bound import bound

    report = bound(options, reporter=ui.reporter)
    if ui.json:
        ui.result(report.to_json())
        return
    rows = term_rows(report)
    ui.table(
        ("Term", "What it is", "Paper", "Value", "95 % interval"),
        [(row.symbol, row.words, row.source, row.value, _interval(report, row.key)) for row in rows],
        title=f"Bound on the test-domain risk: {report.terms.loss} loss, rank {report.terms.rank}",
        left=3,
    )
    if options.explain:
        for row in rows:
            if text := EXPLANATIONS.get(row.key):
                ui.text(f"{row.symbol}: {row.words}\n  {text[0]}\n  {text[1]}\n")
    for line in _verdicts(report):
        ui.text(line)
    if report.paths.ranks:
        _path_table(ui, "Along the ranks", "rank", report.paths.ranks)
    if report.paths.pair_counts:
        _path_table(ui, "Along the number of pairs", "pairs", report.paths.pair_counts)
    if options.output:
        ui.note(f"written: {options.output}")


def _interval(report: BoundReport, name: str) -> str:
    if name not in report.intervals:
        return ""
    low, high = report.intervals[name]
    return f"{low:.3g} – {high:.3g}"


def _verdicts(report: BoundReport) -> list[str]:
    terms = report.terms
    sign, word = ("≤", "holds") if report.holds else (">", "does NOT hold")
    how = (
        "exact: Term I is taken on the twins, so the inequality is deterministic"
        if report.exact
        else f"up to sampling error: Term I is taken on {report.train_rows:,} training rows"
    )
    known = (
        "given"
        if report.spurious_dim_given
        else f"estimated: eigenvalues of M above {report.tolerance:g} of the largest"
    )
    noise = report.noise
    applies = "applies" if noise.applicable else f"not applicable: {'; '.join(noise.reasons)}"
    lines = [
        f"The bound {word}: test risk {report.test_risk:.4f} {sign} {terms.bound:.4f}, "
        f"slack {report.slack:.4f}",
        f"  {how}",
        f"|I| = {terms.spurious_dim} ({known}); r = {terms.rank}, s = min(r, |I|) = {terms.s}; "
        f"{report.oracle_pairs:,} oracle pairs",
        f"Noise corollary: {applies}",
    ]
    if report.zero_one:
        zero = report.zero_one
        lines.append(
            f"0-1 bound: test error {zero.test_error:.4f} ≤ {zero.bound:.4f} = "
            f"twins' error {zero.twin_error:.4f} + flip rate {zero.flip_rate:.4f}"
        )
    if oracle := report.paths.oracle:
        reached = "" if oracle["test_error"] is None else f", test error {oracle['test_error']:.4f}"
        lines.append(
            f"ORACLE, trained on {oracle['train_rows']:,} rows of {oracle['where']}: "
            f"test risk {oracle['test_risk']:.4f}{reached}"
        )
    if found := report.paths.summary:
        lines.append(
            f"Least 0-1 bound at rank {found['bound_rank']}: test accuracy "
            f"{found['bound_test_accuracy']:.4f}; best on the path (ORACLE) "
            f"{found['best_test_accuracy']:.4f} at rank {found['best_rank']}"
        )
    return lines


def _path_table(ui: Ui, title: str, key: str, rows: tuple[dict[str, Any], ...]) -> None:
    columns = ("term_1", "term_2", "bound", "test_risk", "zero_one_bound", "test_error")
    heads = (key, "Term I", "Term II", "bound", "test risk", "0-1 bound", "test error")
    ui.table(heads, [(row[key], *(row[name] for name in columns)) for row in rows], title=title, left=0)
