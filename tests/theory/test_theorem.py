"""Theorem 1 and its corollaries on random problems where they must hold exactly."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from ncm_cli.theory import theorem as bound

SEEDS = st.integers(0, 2**32 - 1)
LOSSES = st.sampled_from(["logistic", "cross-entropy", "squared"])


@dataclasses.dataclass
class Problem:
    """A linear spurious-correlation model with a probe that satisfies the constraint."""

    test: np.ndarray
    twin: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    basis: np.ndarray
    spurious_dim: int
    loss: bound.Loss
    noisy: np.ndarray
    clean: np.ndarray

    @property
    def moment(self) -> bound.SecondMoment:
        return bound.second_moment(self.test - self.twin, 7)

    def risk(self, rows: np.ndarray) -> float:
        return float(np.mean(self.loss.rows(rows @ self.weight.T + self.bias, self.target)))

    def terms(self) -> bound.Terms:
        return bound.theorem(
            loss=self.loss,
            weight=self.weight,
            basis=self.basis,
            moment=self.moment,
            term_1=self.risk(self.twin),
            spurious_dim=self.spurious_dim,
        )


def problem(seed: int, loss: str, *, rank: int | None = None, noise: float | None = None) -> Problem:
    """Random dimensions, shift sizes, pairs and weights; the probe need not be a good one."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(2, 24))
    spurious = int(rng.integers(1, d + 1))
    n, k = int(rng.integers(1, 60)), int(rng.integers(spurious, 50) if spurious < 49 else 49)
    n_logits = int(rng.integers(2, 6)) if loss == "cross-entropy" else 1
    mixing, _ = np.linalg.qr(rng.normal(size=(d, d)))
    scales = 10.0 ** rng.uniform(-1, 1, size=spurious)

    def shift(rows: int) -> np.ndarray:
        return (rng.normal(size=(rows, spurious)) * scales) @ mixing[:, :spurious].T

    twin = rng.normal(size=(n, d)) * 10.0 ** rng.uniform(-1, 1)
    test = twin + shift(n)
    clean = shift(k).T
    level = 10.0 ** rng.uniform(-3, 1) if noise is None else noise
    noisy = clean + level * rng.normal(size=clean.shape)
    left = np.linalg.svd(noisy, full_matrices=False)[0]
    chosen = int(rng.integers(0, left.shape[1] + 1)) if rank is None else min(rank, left.shape[1])
    basis = left[:, :chosen]
    weight = bound.without(rng.normal(size=(d, n_logits)) * 10.0 ** rng.uniform(-1, 1), basis).T
    if chosen == d:
        weight = np.zeros_like(weight)  # what is left after projecting everything out is rounding only
    codes = rng.integers(0, max(n_logits, 2), size=n)
    target = rng.normal(size=n) if loss == "squared" else codes
    return Problem(
        test,
        twin,
        target,
        weight,
        rng.normal(size=n_logits),
        basis,
        spurious,
        bound.LOSSES[loss],
        noisy,
        clean,
    )


@given(SEEDS, LOSSES)
@settings(max_examples=150, deadline=None)
def test_measured_risk_is_below_the_bound_and_the_chain_is_ordered(seed: int, loss: str) -> None:
    case = problem(seed, loss)
    terms = case.terms()
    scale = terms.weight_norm**2 * terms.lambda_1
    assert bound.holds(case.risk(case.test), terms.bound)
    assert terms.theta_m_theta <= (terms.weight_norm * terms.misalignment) ** 2 + 1e-12 * scale
    assert terms.misalignment**2 <= terms.misalignment_upper + 1e-12 * terms.lambda_1
    assert terms.root_bound <= terms.bound + 1e-9 * (1 + terms.bound)
    assert terms.bound <= terms.upper_bound + 1e-9 * (1 + terms.upper_bound)
    assert terms.bound <= terms.erm_bound + 1e-9 * (1 + terms.erm_bound)


@pytest.mark.slow
def test_the_bound_holds_in_1000_of_1000_random_exact_problems() -> None:
    held = 0
    tight = []
    for seed in range(1000):
        case = problem(seed, ("logistic", "cross-entropy", "squared")[seed % 3])
        terms, risk = case.terms(), case.risk(case.test)
        held += bound.holds(risk, terms.bound)
        tight.append(risk / terms.bound)
    print(f"the bound holds in {held:,} of 1,000; risk / bound has the median {np.median(tight):.3f}")
    assert held == 1000
    assert np.median(tight) > 0.02, "a bound far from every risk would prove nothing"


@pytest.mark.parametrize("loss", ["logistic", "cross-entropy", "squared"])
def test_the_bound_fails_when_a_term_is_left_out(loss: str) -> None:
    """The positive control: without Term II the test risk is above Term I on most problems."""
    cases = [problem(seed, loss, rank=0) for seed in range(60)]
    above = sum(case.risk(case.test) > case.loss.term_1_factor * case.terms().term_1 for case in cases)
    assert above > 15


@given(SEEDS, LOSSES)
@settings(max_examples=60, deadline=None)
def test_rank_0_is_the_erm_corollary(seed: int, loss: str) -> None:
    terms = problem(seed, loss, rank=0).terms()
    assert terms.s == 0 and terms.distance == 0
    assert terms.bound == pytest.approx(terms.erm_bound)
    assert terms.upper_bound == pytest.approx(terms.erm_bound)


@given(SEEDS, LOSSES)
@settings(max_examples=60, deadline=None)
def test_perfect_pairs_make_term_2_zero_and_test_risk_equal_to_the_twins(seed: int, loss: str) -> None:
    case = problem(seed, loss, noise=0.0)
    case.basis = np.linalg.svd(case.clean, full_matrices=False)[0][:, : case.spurious_dim]
    case.weight = bound.without(case.weight.T, case.basis).T
    terms = case.terms()
    assert terms.rank >= case.spurious_dim
    assert terms.term_2 <= 1e-9 * (1 + terms.erm_bound)
    assert case.risk(case.test) == pytest.approx(case.risk(case.twin), rel=1e-9, abs=1e-9)


@given(SEEDS)
@settings(max_examples=80, deadline=None)
def test_distance_is_the_sine_of_the_largest_principal_angle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    d = int(rng.integers(2, 20))
    s = int(rng.integers(1, d + 1))
    a = np.linalg.qr(rng.normal(size=(d, s)))[0]
    near = a + 10.0 ** rng.uniform(-7, 1) * rng.normal(size=(d, s))
    b = np.linalg.qr(near)[0]
    sine = math.sin(float(scipy.linalg.subspace_angles(a, b)[0]))
    distance = bound.subspace_distance(a, b)
    assert distance == pytest.approx(sine, rel=1e-6, abs=1e-12)
    assert distance == pytest.approx(np.linalg.norm(a @ a.T - b @ b.T, 2), rel=1e-6, abs=1e-9)


@given(SEEDS)
@settings(max_examples=150, deadline=None)
def test_wedin_holds_whenever_its_condition_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    d, k = (int(v) for v in rng.integers(3, 20, size=2))
    s = int(rng.integers(1, min(d, k)))
    clean = rng.normal(size=(d, k))
    left, sigma, _ = np.linalg.svd(clean)
    gap = sigma[s - 1] - sigma[s]
    noise = rng.normal(size=(d, k))
    noise *= rng.uniform(0, 1) * bound.WEDIN * gap / np.linalg.norm(noise, 2)
    turned = np.linalg.svd(clean + noise)[0]
    epsilon = np.linalg.norm(noise, 2)
    assert bound.subspace_distance(turned[:, :s], left[:, :s]) <= 2 * epsilon / gap + 1e-12


@given(SEEDS, LOSSES)
@settings(max_examples=150, deadline=None)
def test_noise_corollary_is_a_bound_where_it_applies(seed: int, loss: str) -> None:
    case = problem(seed, loss, noise=10.0 ** np.random.default_rng(seed).uniform(-5, 0))
    case.basis = np.linalg.svd(case.noisy, full_matrices=False)[0][:, : case.spurious_dim]
    case.weight = bound.without(case.weight.T, case.basis).T
    terms, moment = case.terms(), case.moment
    found = bound.noise_corollary(
        loss=case.loss, terms=terms, moment=moment, noisy=case.noisy, clean=case.clean
    )
    if found["applicable"]:
        assert found["bound"] is not None and found["value"] is not None
        assert terms.term_2 <= found["value"] * (1 + 1e-9) + 1e-9
        assert bound.holds(case.risk(case.test), found["bound"])
    else:
        assert found["reasons"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss", ["logistic", "cross-entropy", "squared"])
def test_noise_corollary_is_the_formula_of_the_help(seed: int, loss: str) -> None:
    """‖θ‖(κ√λ₁ + √λ_{s+1}), κ = 2‖ε‖/(σ_s − σ_{s+1}); squared loss: 2‖θ‖²(κ²λ₁ + λ_{s+1})."""
    case = problem(seed, loss, noise=0.01)
    case.basis = np.linalg.svd(case.noisy, full_matrices=False)[0][:, : case.spurious_dim]
    s = case.spurious_dim
    found = bound.noise_corollary(
        loss=case.loss, terms=case.terms(), moment=case.moment, noisy=case.noisy, clean=case.clean
    )
    sigma = [*np.linalg.svd(case.clean, compute_uv=False), 0.0]
    kappa = 2 * np.linalg.norm(case.noisy - case.clean, 2) / (sigma[s - 1] - sigma[s])
    values = [*case.moment.values, 0.0]
    norm = np.linalg.norm(case.weight)
    linear = norm * (kappa * np.sqrt(values[0]) + np.sqrt(values[s]))
    expected = {
        "logistic": linear,
        "cross-entropy": np.sqrt(2) * linear,
        "squared": 2 * norm**2 * (kappa**2 * values[0] + values[s]),
    }
    assert found["value"] == pytest.approx(expected[loss], rel=1e-9)


def _corollary(seed: int, *, rank: int, noise: float) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    d, spurious, k = 12, 4, 30
    axes = np.linalg.qr(rng.normal(size=(d, spurious)))[0]
    clean = axes @ rng.normal(size=(spurious, k))
    epsilon = rng.normal(size=(d, k))
    noisy = clean + noise * epsilon / np.linalg.norm(epsilon, 2)
    moment = bound.second_moment(rng.normal(size=(200, spurious)) @ axes.T)
    basis = np.linalg.svd(noisy, full_matrices=False)[0][:, :rank]
    weight = bound.without(rng.normal(size=(d, 1)), basis).T
    loss = bound.LOSSES["logistic"]
    terms = bound.theorem(
        loss=loss, weight=weight, basis=basis, moment=moment, term_1=0.5, spurious_dim=spurious
    )
    return bound.noise_corollary(loss=loss, terms=terms, moment=moment, noisy=noisy, clean=clean)


def test_noise_corollary_by_its_conditions() -> None:
    good = _corollary(1, rank=4, noise=0.1)
    assert good["applicable"] and good["value"] and not good["reasons"]
    assert good["epsilon_norm"] == pytest.approx(0.1)
    more = _corollary(1, rank=9, noise=0.1)
    assert more["applicable"]
    fewer = _corollary(1, rank=3, noise=0.1)
    assert not fewer["applicable"] and "below |I| = 4" in fewer["reasons"][0] and fewer["value"] is not None
    loud = _corollary(1, rank=4, noise=20.0)
    assert not loud["applicable"] and "above the limit" in loud["reasons"][0]
    assert not _corollary(1, rank=0, noise=0.1)["applicable"]


def test_second_moment_does_not_depend_on_the_blocks() -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(50, 8)) * np.logspace(0, -7, 8)
    whole = bound.second_moment(rows)
    for size in (1, 3, 49):
        parts = bound.second_moment(rows, size)
        np.testing.assert_allclose(parts.values, whole.values, rtol=1e-8)
    direct = np.sort(np.linalg.eigvalsh(rows.T @ rows / 50))[::-1]
    np.testing.assert_allclose(whole.values[:4], direct[:4], rtol=1e-8)


def test_spurious_dimension_counts_planted_directions() -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(200, 5)) @ rng.normal(size=(5, 30))
    tiny = 1e-5 * rng.normal(size=(200, 30))
    assert bound.spurious_dimension(bound.second_moment(rows + tiny).values) == 5
    assert bound.spurious_dimension(bound.second_moment(rows + tiny).values, 1e-14) == 30
    assert bound.spurious_dimension(bound.second_moment(np.zeros((3, 2))).values) == 0


def test_cross_entropy_is_root_2_lipschitz_and_the_constant_is_reached() -> None:
    rng = np.random.default_rng(8)
    rows = bound.LOSSES["cross-entropy"].rows
    a = rng.normal(size=(5000, 4)) * 5
    b = a + rng.normal(size=a.shape) * 10.0 ** rng.uniform(-3, 1, size=(5000, 1))
    code = rng.integers(0, 4, size=5000)
    ratio = np.abs(rows(a, code) - rows(b, code)) / np.linalg.norm(a - b, axis=1)
    assert ratio.max() <= math.sqrt(2) + 1e-6
    wrong, worse = np.array([[0.0, 50.0, 0.0]]), np.array([[-1.0, 51.0, 0.0]])
    zero = np.array([0])
    step = (rows(worse, zero) - rows(wrong, zero)) / np.linalg.norm(worse - wrong)
    assert step[0] == pytest.approx(math.sqrt(2))


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_zero_one_bound_is_deterministic(seed: int, n_logits: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 40, n_logits))
    found = bound.zero_one(a, b, rng.integers(0, max(2, n_logits), size=40))
    assert found["test_error"] <= found["bound"] + 1e-12
    assert found["bound"] == found["twin_error"] + found["flip_rate"]
