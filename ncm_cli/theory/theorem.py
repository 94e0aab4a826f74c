"""The test-domain bound of noisy counterfactual matching, computed term by term (paper, Theorem 1).

Notation: a pair is a test row x₊ and its twin x₋ in a training domain, δ = x₊ − x₋, M = mean δδᵀ with
eigenpairs (Q, λ) in descending order, Q̃_r the removed directions, W the probe's weights (θ for one logit).
A bias is part of the logits and cancels in every difference of logits.

How the loss on a test row is bounded by that on its twin, for each loss and a row with label y:

logistic
    ℓ(z) = log(1 + exp(−yz)) has |ℓ'| ≤ 1, so ℓ(θᵀx₊) ≤ ℓ(θᵀx₋) + |θᵀδ|; Jensen: mean |θᵀδ| ≤ √(θᵀMθ).
cross-entropy
    ℓ(z) = logsumexp(z) − z_y has the gradient p − e_y with p a distribution. ‖p − e_y‖² =
    (1 − p_y)² + Σ_{c≠y} p_c² ≤ 2(1 − p_y)² ≤ 2, so ℓ is √2-Lipschitz in the logits and
    ℓ(Wx₊) ≤ ℓ(Wx₋) + √2·‖Wδ‖; Jensen: mean ‖Wδ‖ ≤ √tr(W M Wᵀ). The constant is reached in the limit of a
    confident wrong answer between two classes.
squared
    (a + b)² ≤ 2a² + 2b² gives ℓ(θᵀx₊) ≤ 2ℓ(θᵀx₋) + 2(θᵀδ)².

For all three, W Q̃_r = 0 gives tr(W M Wᵀ) = ‖W (I − Q̃Q̃ᵀ) M^½‖²_F ≤ ‖W‖²_F · σ_max((I − Q̃Q̃ᵀ) Q Λ^½)², the
square of ‖W‖_F ‖Q̃_{r,⊥}ᵀQ‖_Λ (for one logit ‖W‖_F = ‖θ‖).

Two steps of the paper's proof are written as equalities and are inequalities in general: the squared
spectral norm of a block [A, B] is at most ‖A‖² + ‖B‖², and ‖Q̃_{r,⊥}ᵀ…‖ ≤ ‖Q̃_{s,⊥}ᵀ…‖ for s ≤ r. Nothing
here assumes either: each quantity is computed by itself. Q and Λ are all of M's eigenpairs, not only the
first |I|, so that the inequalities hold on data whose M has a tail; |I| only decides s.

The bound in terms of the pairs' noise, by Wedin's sin Θ theorem (paper, Corollary 3 and Lemma 2).

Intervals. Shares of pairs have Wilson's interval, and their sum Newcombe's: resampling would claim certainty
for 0 errors in n. All other quantities are smooth functions of means over pairs (of losses, and of δδᵀ
through M's eigenpairs). Resampling the pairs only re-weights those means. To first order (for the subspace
distance including the eigenvectors' rotation) M's quantities are then dot products:

- σ_max((I − Q̃Q̃ᵀ)M^½)² = vᵀMv and λ_j = q_jᵀMq_j, at the maximiser v and the eigenvectors q of the sample;
- dist² = 1 − σ_min(Q̃_sᵀQ_s)² with singular vectors (u, w) of σ_min, where
  dσ_min = Σ_{i≤s<j} w_i (q_jᵀQ̃_s u) q_jᵀ dM q_i / (λ_i − λ_j).

This leaves a bias. A maximum over directions is larger in a sample than in the population, and larger again
in a resample of the sample. So percentiles of resamples that decompose their own M are too high by twice the
bias, and first-order ones by the bias. The difference of the two on a few resamples (`EXACT_RESAMPLES`)
estimates the bias, which is subtracted from every resample (Efron, Tibshirani 1993, An introduction to the
bootstrap, chapter 10).

With nearly all spurious directions removed, nominal 95 % intervals of the misalignment cover the true value
in .97 to .91 of data sets of 60 to 400 pairs in 10 dimensions, and without subtracting the bias in .82 to
.94. With a clear largest shift left they do in .88 to .94 either way. With two spurious directions of size 2
and 3 in noise of .3, removed to .01, they do in .85 to .88, and without subtracting the bias in .26 to .42.

The correction removes only the first order of the bias. Where many eigenvalues nearly coincide in the
direction of the maximum, and pairs are not many more than dimensions, misalignment, λ_{s+1}, dist and the
bound stay too high, which is the safe side: by .6 of the interval's width for 128 pairs in 64 dimensions with
equal eigenvalues, where the value itself is 1.5 widths too high. Such an interval may lie below its value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Array, blocks
from ncm_cli.probes.metrics import decide, newcombe, row_log_loss, wilson
from ncm_cli.solvers.projection import spectral_norm, svd

SPURIOUS_TOLERANCE = 1e-6
"""|I| counts the λ above this share of λ₁, which is a typical shift of a thousandth of the largest."""

RELATIVE_ROUNDING = 1e-9
"""Relative slack for `holds`: both sides are sums of float64 numbers, equal for perfect pairs."""

BLOCK_ROWS = 4096
"""Differences that are processed at a time: 16 MiB for 512 dimensions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """How much a shift of the logits can change a loss."""

    name: str
    term_1_factor: float
    """The factor of Term I: 1, or 2 for squared loss."""
    constant: float
    """The Lipschitz constant in the logits; for squared loss the factor 2 of the squared shift."""
    power: int
    """1: the bound adds the root mean square shift; 2: its square."""
    rows: Callable[[Array, NDArray], Array]
    """(logits (n, C), target (n,)) -> loss of each row (n,)."""

    def penalty(self, shift: Any) -> Any:
        """The amount that a root mean square shift of the logits (a number or an array) adds to the bound."""
        return self.constant * shift**self.power


LOSSES: dict[str, Loss] = {
    "logistic": Loss("logistic", 1.0, 1.0, 1, row_log_loss),
    "cross-entropy": Loss("cross-entropy", 1.0, math.sqrt(2), 1, row_log_loss),
    "squared": Loss("squared", 2.0, 2.0, 2, lambda logits, target: (logits[:, 0] - target) ** 2),
}


@dataclasses.dataclass(frozen=True, slots=True)
class SecondMoment:
    """Eigenpairs of M = mean δδᵀ (paper, definition before Theorem 1)."""

    values: Array
    """λ (m,), descending, not negative; m = min(n, d)."""
    vectors: Array
    """Q (d, m), orthonormal."""

    def value(self, index: int) -> float:
        """λ_{index+1}; 0 beyond the last."""
        return float(self.values[index]) if index < len(self.values) else 0.0


def second_moment(rows: NDArray, size: int = BLOCK_ROWS) -> SecondMoment:
    """M's eigenpairs from differences (n, d), ``size`` of them at a time.

    A triangular R (at most d × d) with RᵀR = Σ δδᵀ is kept, not the sum itself: the singular values of R are
    √(nλ) to full precision, where the eigenvalues of the sum would lose √λ below 1e-8 of the largest.
    """
    factor = np.empty((0, rows.shape[1]))
    for _, block in blocks(rows, size):
        factor = np.asarray(np.linalg.qr(np.vstack([factor, block]), mode="r"))
    _, singular, vectors = svd(factor)
    return SecondMoment(values=singular**2 / len(rows), vectors=vectors.T)


def spurious_dimension(values: Array, tolerance: float = SPURIOUS_TOLERANCE) -> int:
    """|I| as the number of eigenvalues above ``tolerance`` · λ₁."""
    return int(np.sum(values > tolerance * values[0]))


def without(vectors: Array, basis: Array) -> Array:
    """(I − Q̃Q̃ᵀ) applied to columns (d, m); twice, so that what is left is orthogonal to rounding."""
    for _ in range(2):
        vectors = vectors - basis @ (basis.T @ vectors)
    return vectors


def misalignment(moment: SecondMoment, basis: Array) -> tuple[float, Array]:
    """‖Q̃_{r,⊥}ᵀQ‖_Λ = σ_max((I − Q̃Q̃ᵀ) Q Λ^½) of Term II, and the unit direction (d,) that attains it."""
    left = without(moment.vectors * np.sqrt(moment.values), basis)
    directions, singular, _ = svd(left)
    return float(singular[0]), directions[:, 0]


def subspace_distance(a: Array, b: Array) -> float:
    """dist(A, B) = ‖AAᵀ − BBᵀ‖ for orthonormal A, B (d, s): the sine of the largest principal angle.

    Computed as ‖(I − AAᵀ)B‖, which is accurate for small angles; 0 for no columns.
    """
    return min(spectral_norm(without(b, a)), 1.0) if a.shape[1] else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """The quantities of Theorem 1 and its ERM corollary for one probe."""

    loss: str
    rank: int
    spurious_dim: int
    s: int
    """min(r, |I|)."""
    weight_norm: float
    """‖θ‖, or ‖W‖_F."""
    term_1: float
    theta_m_theta: float
    """θᵀMθ, or tr(W M Wᵀ)."""
    root_bound: float
    """Term I plus the penalty of the shift √(θᵀMθ): the proof's step before Term II."""
    misalignment: float
    term_2: float
    distance: float
    """dist(Q̃_s, Q_s)."""
    lambda_1: float
    lambda_s_next: float
    misalignment_upper: float
    """λ₁ dist² + λ_{s+1}, an upper bound of misalignment²."""
    term_2_upper: float
    """Term II computed from ``misalignment_upper``."""
    bound: float
    upper_bound: float
    erm_bound: float


def theorem(
    *,
    loss: Loss,
    weight: Array,
    basis: Array,
    moment: SecondMoment,
    term_1: float,
    spurious_dim: int,
) -> Terms:
    """All terms of Theorem 1 for weights (C, d) with ``weight @ basis == 0``, basis (d, r) orthonormal."""
    rank = basis.shape[1]
    s = min(rank, spurious_dim, len(moment.values))
    norm = float(np.linalg.norm(weight))
    quadratic = float(np.sum(((weight @ moment.vectors) ** 2) @ moment.values))
    aligned, _ = misalignment(moment, basis)
    distance = subspace_distance(basis[:, :s], moment.vectors[:, :s])
    lambda_1, lambda_next = moment.value(0), moment.value(s)
    upper = lambda_1 * distance**2 + lambda_next
    in_domain = loss.term_1_factor * term_1
    term_2 = loss.penalty(norm * aligned)
    term_2_upper = loss.penalty(norm * math.sqrt(upper))
    return Terms(
        loss=loss.name,
        rank=rank,
        spurious_dim=spurious_dim,
        s=s,
        weight_norm=norm,
        term_1=term_1,
        theta_m_theta=quadratic,
        root_bound=in_domain + loss.penalty(math.sqrt(quadratic)),
        misalignment=aligned,
        term_2=term_2,
        distance=distance,
        lambda_1=lambda_1,
        lambda_s_next=lambda_next,
        misalignment_upper=upper,
        term_2_upper=term_2_upper,
        bound=in_domain + term_2,
        upper_bound=in_domain + term_2_upper,
        erm_bound=in_domain + loss.penalty(norm * math.sqrt(lambda_1)),
    )


def holds(risk: float, bound: float) -> bool:
    """Whether risk ≤ bound, up to rounding of the two sums."""
    return risk <= bound + RELATIVE_ROUNDING * (1 + abs(bound))


def zero_one(test_logits: Array, twin_logits: Array, codes: NDArray) -> dict[str, float]:
    """The 0-1 analogue: P(ŷ(x₊) ≠ y) ≤ P(ŷ(x₋) ≠ y) + P(ŷ(x₊) ≠ ŷ(x₋)), true row by row.

    The pairs' members have logits (n, C) and share the label ``codes`` (n,).
    """
    test, twin = decide(test_logits), decide(twin_logits)
    twin_error, flip_rate = float(np.mean(twin != codes)), float(np.mean(test != twin))
    return {
        "twin_error": twin_error,
        "flip_rate": flip_rate,
        "bound": twin_error + flip_rate,
        "test_error": float(np.mean(test != codes)),
    }


WEDIN = 1 - 1 / math.sqrt(2)
"""The constant in the condition of Wedin's sin Θ theorem, as the paper uses it (Lemma 2)."""

LARGEST_SAME_DISTANCE = 1e-3
"""Largest distance at which the clean pairs and M count as spanning one subspace. Features on disk are
float32, so a difference of two rows of norm 10 is off by about 1e-6: a direction that the pairs move along by
more than 1e-3 turns by less than this."""


def no_noise_corollary(reason: str) -> dict[str, Any]:
    """`noise_corollary` without clean pairs."""
    names = ("value", "bound", "epsilon_norm", "sigma_s", "sigma_s_next", "condition_limit", "clean_rank")
    return {"applicable": False, **dict.fromkeys((*names, "clean_distance")), "reasons": [reason]}


def noise_corollary(
    *, loss: Loss, terms: Terms, moment: SecondMoment, noisy: Array, clean: Array
) -> dict[str, Any]:
    """The bound in terms of the pairs' noise ε = Δ̃ − Δ (paper, Corollary 3), with its conditions evaluated.

    It equates the top-s left subspaces of Δ and of M. Both span the spurious subspace when rank(Δ) = |I|, but
    their order inside it may differ, so only s = |I| justifies that; for a smaller s it is not applicable.

    Parameters
    ----------
    noisy, clean : float64 (d, k)
        Differences; column j of both is of the same pair.

    Returns
    -------
    ``applicable``, and ``reasons`` when it isn't; ``value``, with κ = 2‖ε‖/(σ_s − σ_{s+1}) the factor of the
    loss times ‖θ‖(κ√λ₁ + √λ_{s+1}), for squared loss 2‖θ‖²(κ²λ₁ + λ_{s+1}), and ``bound``, which adds Term I
    (None for s = 0); ``condition_limit``, the largest σ₁(ε) for which it holds; ``clean_distance``, dist of
    the clean pairs' top-s subspace and M's.
    """
    directions, sigma, _ = svd(clean)
    clean_rank = int(np.sum(sigma > math.sqrt(SPURIOUS_TOLERANCE) * sigma[0]))
    s, dim = terms.s, terms.spurious_dim
    epsilon = spectral_norm(noisy - clean)
    sigma_s = float(sigma[s - 1]) if 0 < s <= len(sigma) else 0.0
    sigma_next = float(sigma[s]) if s < len(sigma) else 0.0
    gap = sigma_s - sigma_next
    limit = WEDIN * gap
    reasons = []
    if s < dim:
        reasons.append(f"s = {s} is below |I| = {dim}: the top-s subspaces of the pairs and of M can differ")
    if clean_rank != dim:
        reasons.append(f"the clean pairs have rank {clean_rank}, not |I| = {dim}")
    if s == 0:
        reasons.append("s = 0: no direction is removed")
    if epsilon > limit:
        reasons.append(f"σ₁(ε) = {epsilon:.4g} is above the limit (1 − 1/√2)(σ_s − σ_s+1) = {limit:.4g}")
    distance = None
    if 0 < s <= directions.shape[1]:
        distance = subspace_distance(directions[:, :s], moment.vectors[:, :s])
        if s == dim == clean_rank and distance > LARGEST_SAME_DISTANCE:
            reasons.append(f"the clean pairs and M span different subspaces (distance {distance:.3g})")
    value = bound = None
    if s > 0 and gap > 0:
        ratio = 2 * epsilon / gap
        if loss.power == 1:
            shift = math.sqrt(terms.lambda_1) * ratio + math.sqrt(terms.lambda_s_next)
        else:
            shift = math.sqrt(terms.lambda_1 * ratio**2 + terms.lambda_s_next)
        value = loss.penalty(terms.weight_norm * shift)
        bound = loss.term_1_factor * terms.term_1 + value
    return {
        "applicable": not reasons,
        "value": value,
        "bound": bound,
        "epsilon_norm": epsilon,
        "sigma_s": sigma_s if s else None,
        "sigma_s_next": sigma_next,
        "condition_limit": limit if s else None,
        "clean_rank": clean_rank,
        "clean_distance": distance,
        "reasons": reasons,
    }


CONFIDENCE_LEVEL = 0.95

MOST_WEIGHTS = 4_000_000
"""Weights (replicates × pairs) in memory at a time: 32 MiB."""

EXACT_RESAMPLES = 5
"""Resamples whose M is decomposed. The bias is their mean difference between the exact and the first-order
value, which varies little: with 32 resamples, coverage changes by at most .03."""

Interval = tuple[float, float]


def share_intervals(test_logits: Array, twin_logits: Array, codes: NDArray) -> dict[str, Interval]:
    """95 % intervals of the shares of pairs in the 0-1 bound, and of their sum.

    The bound is 1 plus the difference of two shares of the same pairs: twin wrong, and not flipped.
    """
    n, test, twin = len(codes), decide(test_logits), decide(twin_logits)
    wrong, agrees = twin != codes, test == twin
    cells = (wrong & agrees, wrong & ~agrees, ~wrong & agrees, ~wrong & ~agrees)
    low, high = newcombe(*(int(cell.sum()) for cell in cells))
    return {
        "twin_error": wilson(int(wrong.sum()), n),
        "flip_rate": wilson(int((~agrees).sum()), n),
        "zero_one_bound": (1 + low, 1 + high),
        "test_error": wilson(int((test != codes).sum()), n),
    }


def intervals(
    *,
    loss: Loss,
    terms: Terms,
    weight: Array,
    basis: Array,
    moment: SecondMoment,
    differences: NDArray,
    losses: tuple[Array, Array, Array | None],
    replicates: int,
    seed: int,
) -> dict[str, Interval]:
    """95 % intervals, by name, of each quantity that is estimated from n pairs; none for a single pair.

    Parameters
    ----------
    terms
        The result of `theorem` for weight, basis and moment, the second moment of ``differences`` (n, d).
    losses
        Losses on the test rows (n,), their twins (n,) and, if Term I is on training rows, these (N,), which
        are resampled by themselves.
    """
    if len(differences) < 2:
        return {}
    test_loss, twin_loss, train_loss = losses
    influence = _influence(differences, weight, basis, moment, terms.s)
    stacked = np.column_stack([influence, test_loss, twin_loss])
    rng = np.random.default_rng(seed)
    means: list[Array] = []
    exact: list[Array] = []
    for weights in _weights(rng, replicates, len(stacked)):
        means.append(weights @ stacked)
        exact += [
            _exact(differences, resample, basis, terms.s)
            for resample in weights[: EXACT_RESAMPLES - len(exact)]
        ]
    drawn, decomposed = np.concatenate(means), np.array(exact)
    if train_loss is None:
        term_1 = drawn[:, 6]
    else:
        term_1 = np.concatenate([w @ train_loss for w in _weights(rng, replicates, len(train_loss))])
    cosine = math.sqrt(max(1 - terms.distance**2, 0.0)) + drawn[:, 3] - float(influence[:, 3].mean())
    roots = np.column_stack([np.sqrt(drawn[:, :3]), np.sqrt(1 - np.clip(cosine, 0, 1) ** 2)])
    estimate = [terms.misalignment, math.sqrt(terms.lambda_1), math.sqrt(terms.lambda_s_next), terms.distance]
    if terms.misalignment <= RELATIVE_ROUNDING * math.sqrt(terms.lambda_1):
        # The basis removes the pairs' differences, and those of any resample, up to rounding.
        roots[:, 0] = decomposed[:, 0] = 0.0
    bias = (decomposed - roots[: len(exact)]).mean(axis=0) + roots.mean(axis=0) - estimate
    roots, (shift, test_risk) = np.maximum(roots - bias, 0), drawn[:, 4:6].T
    values = _quantities(loss, terms.weight_norm, roots, shift, test_risk, term_1)
    tail = 100 * (1 - CONFIDENCE_LEVEL) / 2
    return {
        name: (float(np.percentile(value, tail)), float(np.percentile(value, 100 - tail)))
        for name, value in values.items()
    }


def _influence(differences: NDArray, weight: Array, basis: Array, moment: SecondMoment, s: int) -> Array:
    """(n, 5) each pair's contribution to n times (vᵀMv, λ₁, λ_{s+1}, σ_min before centring,
    tr(WMWᵀ))."""
    _, direction = misalignment(moment, basis)
    following = moment.vectors[:, s : s + 1] if s < len(moment.values) else np.zeros((len(direction), 1))
    probes = np.hstack([direction[:, None], moment.vectors[:, :1], following])
    turning = _turning(basis, moment, s)
    parts = []
    for _, block in blocks(differences, BLOCK_ROWS):
        inner = block @ moment.vectors
        cosine = ((inner[:, s:] @ turning) * inner[:, :s]).sum(axis=1)
        parts.append(np.column_stack([(block @ probes) ** 2, cosine, ((block @ weight.T) ** 2).sum(axis=1)]))
    return np.concatenate(parts)


def _turning(basis: Array, moment: SecondMoment, s: int) -> Array:
    """w_i (q_jᵀQ̃_s u) / (λ_i − λ_j) for j > s (rows) and i ≤ s (columns); 0 where M has no gap."""
    trailing = moment.vectors[:, s:]
    if s == 0 or trailing.shape[1] == 0:
        return np.zeros((trailing.shape[1], s))
    left, _, right = svd(basis[:, :s].T @ moment.vectors[:, :s], full_matrices=True)
    along = trailing.T @ (basis[:, :s] @ left[:, -1])
    gaps = moment.values[None, :s] - moment.values[s:, None]
    floor = np.finfo(np.float64).eps * moment.values[0]
    return np.where(gaps > floor, along[:, None] * right[-1][None, :] / np.maximum(gaps, floor), 0.0)


def _weights(rng: np.random.Generator, replicates: int, n: int) -> Iterator[Array]:
    """Blocks (b, n) of resampling weights: each row counts draws with replacement, and sums to 1."""
    step = max(1, MOST_WEIGHTS // n)
    for start in range(0, replicates, step):
        count = min(step, replicates - start)
        drawn = rng.integers(0, n, size=(count, n)) + np.arange(count)[:, None] * n
        yield np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n) / n


def _exact(differences: NDArray, weights: Array, basis: Array, s: int) -> Array:
    """(4,) misalignment, √λ₁, √λ_{s+1} and dist for pairs weighted by ``weights`` (n,), which sum to 1."""
    drawn = np.flatnonzero(weights)
    scale = np.sqrt(weights[drawn] * len(drawn))
    moment = second_moment(differences[drawn] * scale[:, None])
    roots = [misalignment(moment, basis)[0], math.sqrt(moment.value(0)), math.sqrt(moment.value(s))]
    # A resample of few pairs can have fewer directions than s.
    s = min(s, len(moment.values))
    return np.array([*roots, subspace_distance(basis[:, :s], moment.vectors[:, :s])])


def _quantities(
    loss: Loss, norm: float, roots: Array, shift: Array, test_risk: Array, term_1: Array
) -> dict[str, Array]:
    """Every quantity in each of B resamples; ``roots`` (B, 4) as from `_exact`, ``shift`` from tr(WMWᵀ)."""
    aligned, first, following, distance = roots.T
    distance = np.minimum(distance, 1)
    in_domain = loss.term_1_factor * term_1
    bound = in_domain + loss.penalty(norm * aligned)
    return {
        "term_1": term_1,
        "theta_m_theta": shift,
        "misalignment": aligned,
        "root_bound": in_domain + loss.penalty(np.sqrt(shift)),
        "term_2": bound - in_domain,
        "term_2_upper": loss.penalty(norm * np.hypot(first * distance, following)),
        "bound": bound,
        "erm_bound": in_domain + loss.penalty(norm * first),
        "lambda_1": first**2,
        "lambda_s_next": following**2,
        "distance": distance,
        "test_risk": test_risk,
        "slack": bound - test_risk,
    }
