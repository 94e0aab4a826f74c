"""The bound in terms of the pairs' noise, by Wedin's sin Θ theorem (paper, Corollary 3 and Lemma 2)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ncm_cli.methods.bound import SPURIOUS_TOLERANCE, Array, Loss, SecondMoment, Terms, subspace_distance
from ncm_cli.methods.svd import spectral_norm, svd

WEDIN = 1 - 1 / math.sqrt(2)
"""The constant in the condition of Wedin's sin Θ theorem, as the paper uses it (Lemma 2)."""

SAME_SUBSPACE = 1e-3
"""Largest distance at which the clean pairs and M count as spanning one subspace. Features on disk are
float32, so a difference of two rows of norm 10 is off by about 1e-6: a direction that the pairs move along by
more than 1e-3 turns by less than this."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoiseCorollary:
    """The bound in terms of the pairs' noise ε = Δ̃ − Δ (paper, Corollary 3)."""

    applicable: bool
    value: float | None
    """‖θ‖(2√λ₁‖ε‖/(σ_s − σ_{s+1}) + √λ_{s+1}), in the loss's units; None without clean pairs or for s = 0."""
    bound: float | None
    """Term I and ``value``."""
    epsilon_norm: float | None
    sigma_s: float | None
    sigma_s_next: float | None
    condition_limit: float | None
    """(1 − 1/√2)(σ_s − σ_{s+1}): σ₁(ε) must not be above it."""
    clean_rank: int | None
    clean_distance: float | None
    """dist of the clean pairs' top-s subspace and M's."""
    reasons: tuple[str, ...]
    """Why it doesn't apply; empty when it does."""


def no_noise_corollary(reason: str) -> NoiseCorollary:
    """The corollary where nothing is known of the clean pairs."""
    return NoiseCorollary(False, None, None, None, None, None, None, None, None, (reason,))


def noise_corollary(
    *, loss: Loss, terms: Terms, moment: SecondMoment, noisy: Array, clean: Array
) -> NoiseCorollary:
    """Corollary 3 with its conditions evaluated, from noisy and clean differences (d, k), column by column.

    It equates the top-s left subspaces of Δ and of M. Both span the spurious subspace when rank(Δ) = |I|, but
    their order inside it may differ, so only s = |I| justifies that: a smaller s is not applicable.
    """
    directions, sigma, _ = svd(clean)
    clean_rank = int(np.sum(sigma > math.sqrt(SPURIOUS_TOLERANCE) * sigma[0])) if sigma[0] > 0 else 0
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
        if s == dim == clean_rank and distance > SAME_SUBSPACE:
            reasons.append(f"the clean pairs and M span different subspaces (distance {distance:.3g})")
    value = bound = None
    if s > 0 and gap > 0:
        ratio = 2 * epsilon / gap
        if loss.power == 1:
            inner = math.sqrt(terms.lambda_1) * ratio + math.sqrt(terms.lambda_s_next)
            value = loss.penalty(terms.weight_norm * inner)
        else:
            value = loss.penalty(
                terms.weight_norm * math.sqrt(terms.lambda_1 * ratio**2 + terms.lambda_s_next)
            )
        bound = loss.term_1_factor * terms.term_1 + value
    return NoiseCorollary(
        applicable=not reasons,
        value=value,
        bound=bound,
        epsilon_norm=epsilon,
        sigma_s=sigma_s if s else None,
        sigma_s_next=sigma_next,
        condition_limit=limit if s else None,
        clean_rank=clean_rank,
        clean_distance=distance,
        reasons=tuple(reasons),
    )
