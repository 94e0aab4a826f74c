"""Bootstrap intervals for the terms of the bound.

Every term is a smooth function of means over pairs: of losses, of errors, and of δδᵀ through M's eigenpairs.
A replicate draws pairs with replacement, which only re-weights those means. The spectral quantities follow M
to first order (in the subspace distance the eigenvectors' own turning too), so that a replicate costs a dot
product and not an eigendecomposition:

- σ_max((I − Q̃Q̃ᵀ)M^½)² = vᵀMv and λ_j = q_jᵀMq_j, at the maximiser v and the eigenvectors q of the sample;
- dist² = 1 − σ_min(Q̃_sᵀQ_s)² with singular vectors (u, w) of σ_min, where
  dσ_min = Σ_{i≤s<j} w_i (q_jᵀQ̃_s u) q_jᵀ dM q_i / (λ_i − λ_j).

A first-order interval is a little too narrow where λ_s and λ_{s+1} nearly coincide.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods.bound import Array, Loss, SecondMoment, Terms, predicted, row_blocks
from ncm_cli.methods.svd import svd

LEVEL = 0.95

CHUNK = 4_000_000
"""Weights (replicates × pairs) held at a time: 32 MiB."""

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class SpectralRows:
    """What each pair contributes to the quantities that come from M, float64 (n,) each."""

    shift: Array
    """‖Wδ‖²."""
    aligned: Array
    """(vᵀδ)²."""
    first: Array
    """(q₁ᵀδ)²."""
    following: Array
    """(q_{s+1}ᵀδ)²."""
    cosine: Array
    """The pair's influence on σ_min(Q̃_sᵀQ_s), before centring."""


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorRows:
    """Each pair's 0-1 losses and whether its two predictions differ, 0.0 or 1.0 (n,)."""

    test_error: Array
    twin_error: Array
    flip: Array


@dataclasses.dataclass(frozen=True, slots=True)
class PairRows:
    """What each pair contributes to every mean."""

    test_loss: Array
    twin_loss: Array
    spectral: SpectralRows
    errors: ErrorRows | None = None

    def columns(self) -> dict[str, Array]:
        """All of them by name."""
        columns = {"test_loss": self.test_loss, "twin_loss": self.twin_loss}
        columns |= {
            field.name: getattr(self.spectral, field.name) for field in dataclasses.fields(SpectralRows)
        }
        if self.errors is not None:
            columns |= {
                field.name: getattr(self.errors, field.name) for field in dataclasses.fields(ErrorRows)
            }
        return columns


def error_rows(test_logits: Array, twin_logits: Array, codes: NDArray) -> ErrorRows:
    """`ErrorRows` of pairs whose members have logits (n, C)."""
    test, twin = predicted(test_logits), predicted(twin_logits)
    return ErrorRows(*(wrong.astype(np.float64) for wrong in (test != codes, twin != codes, test != twin)))


def spectral_rows(
    differences: NDArray, *, weight: Array, basis: Array, moment: SecondMoment, s: int, direction: Array
) -> SpectralRows:
    """`SpectralRows` of the differences δ (n, d); ``direction`` is `misalignment`'s."""
    m = len(moment.values)
    following = moment.vectors[:, s : s + 1] if s < m else np.zeros((len(direction), 1))
    probes = np.hstack([direction[:, None], moment.vectors[:, :1], following])
    turning = _turning(basis, moment, s)
    parts: dict[str, list[Array]] = {name: [] for name in ("shift", "projected", "cosine")}
    for block in row_blocks(differences):
        parts["shift"].append(((block @ weight.T) ** 2).sum(axis=1))
        parts["projected"].append((block @ probes) ** 2)
        inner = block @ moment.vectors
        parts["cosine"].append(((inner[:, s:] @ turning) * inner[:, :s]).sum(axis=1))
    projected = np.concatenate(parts["projected"])
    return SpectralRows(
        shift=np.concatenate(parts["shift"]),
        aligned=projected[:, 0],
        first=projected[:, 1],
        following=projected[:, 2],
        cosine=np.concatenate(parts["cosine"]),
    )


def _turning(basis: Array, moment: SecondMoment, s: int) -> Array:
    """w_i (q_jᵀQ̃_s u) / (λ_i − λ_j) for j > s (rows) and i ≤ s (columns); directions with no M are rigid."""
    later = moment.vectors[:, s:]
    if s == 0 or later.shape[1] == 0:
        return np.zeros((later.shape[1], s))
    left, _, right = svd(basis[:, :s].T @ moment.vectors[:, :s], full_matrices=True)
    along = later.T @ (basis[:, :s] @ left[:, -1])
    gaps = moment.values[None, :s] - moment.values[s:, None]
    floor = np.finfo(np.float64).eps * moment.values[0]
    return np.where(gaps > floor, along[:, None] * right[-1][None, :] / np.maximum(gaps, floor), 0.0)


def _weights(rng: np.random.Generator, replicates: int, n: int) -> Iterator[Array]:
    """Blocks (b, n) of resampling weights: each row counts draws with replacement, and sums to 1."""
    step = max(1, CHUNK // max(n, 1))
    for start in range(0, replicates, step):
        count = min(step, replicates - start)
        drawn = rng.integers(0, n, size=(count, n)) + np.arange(count)[:, None] * n
        yield np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n) / n


def intervals(
    *,
    loss: Loss,
    terms: Terms,
    rows: PairRows,
    train_loss: Array | None,
    replicates: int,
    seed: int,
) -> dict[str, Interval]:
    """95 % percentile intervals of each estimated quantity, by name.

    Parameters
    ----------
    train_loss : float64 (N,) or None
        Losses of the training rows when Term I is taken on them; resampled on their own.
    """
    rng = np.random.default_rng(seed)
    columns = rows.columns()
    stacked = np.stack(list(columns.values()), axis=1)
    means = np.concatenate([w @ stacked for w in _weights(rng, replicates, len(stacked))])
    drawn = dict(zip(columns, means.T, strict=True))
    if train_loss is None:
        term_1 = drawn["twin_loss"]
    else:
        term_1 = np.concatenate([w @ train_loss for w in _weights(rng, replicates, len(train_loss))])
    values = _quantities(loss, terms, drawn, term_1, float(rows.spectral.cosine.mean()))
    tail = 100 * (1 - LEVEL) / 2
    return {
        name: (float(np.percentile(value, tail)), float(np.percentile(value, 100 - tail)))
        for name, value in values.items()
    }


def _quantities(
    loss: Loss, terms: Terms, drawn: dict[str, Array], term_1: Array, cosine_mean: float
) -> dict[str, Array]:
    """Every printed quantity in each replicate (B,)."""
    norm = terms.weight_norm
    cosine = math.sqrt(max(1 - terms.distance**2, 0.0)) + (drawn["cosine"] - cosine_mean)
    distance_squared = 1 - np.clip(cosine, 0, 1) ** 2
    upper = drawn["first"] * distance_squared + np.maximum(drawn["following"], 0)
    in_domain = loss.term_1_factor * term_1

    def penalty(shift_squared: Array) -> Array:
        return loss.constant * np.sqrt(shift_squared) ** loss.power

    bound = in_domain + penalty(norm**2 * drawn["aligned"])
    values = {
        "term_1": term_1,
        "theta_m_theta": drawn["shift"],
        "misalignment": np.sqrt(drawn["aligned"]),
        "root_bound": in_domain + penalty(drawn["shift"]),
        "term_2": bound - in_domain,
        "term_2_upper": penalty(norm**2 * upper),
        "bound": bound,
        "erm_bound": in_domain + penalty(norm**2 * drawn["first"]),
        "lambda_1": drawn["first"],
        "lambda_s_next": drawn["following"],
        "distance": np.sqrt(distance_squared),
        "test_risk": drawn["test_loss"],
        "slack": bound - drawn["test_loss"],
    }
    if "flip" in drawn:
        values |= {
            "twin_error": drawn["twin_error"],
            "flip_rate": drawn["flip"],
            "zero_one_bound": drawn["twin_error"] + drawn["flip"],
            "test_error": drawn["test_error"],
        }
    return values
