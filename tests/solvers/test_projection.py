"""The spectrum of pair differences and the projection: known answers and invariances."""

from __future__ import annotations

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.solvers.projection import GRAM_RATIO, complement, project, spectrum


def with_values(d: int, k: int, values: list[float], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A (d, k) matrix with planted singular values, and its left singular vectors."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(d, len(values))))[0]
    right = np.linalg.qr(rng.normal(size=(k, len(values))))[0]
    return left * values @ right.T, left


@pytest.mark.parametrize(("d", "k"), [(12, 8), (8, 12), (10, 10), (6, 6 * GRAM_RATIO + 7)])
def test_planted_values_and_directions_come_back(d: int, k: int) -> None:
    delta, left = with_values(d, k, [5.0, 3.0, 0.5], seed=d * k)
    found = spectrum(delta)
    assert found.rank == 3
    assert found.gap == 3, "what follows the third value is rounding"
    assert np.allclose(found.singular_values[:3], [5, 3, 0.5], rtol=1e-9)
    assert np.allclose(np.abs(np.sum(found.basis[:, :3] * left, axis=0)), 1, atol=1e-7)
    assert np.allclose(found.basis.T @ found.basis, np.eye(min(d, k)), atol=1e-12)


def test_gap_is_where_the_values_fall_most() -> None:
    delta, _ = with_values(6, 30, [9.0, 8.0, 7.0, 0.1, 0.09, 0.08], seed=3)
    assert spectrum(delta).gap == 3
    assert spectrum(delta).rank == 6


def test_same_bits_on_every_run_and_a_fixed_sign() -> None:
    delta = np.random.default_rng(1).normal(size=(30, 20)).astype(np.float32)
    first, second = spectrum(delta), spectrum(delta.copy())
    assert first.basis.tobytes() == second.basis.tobytes()
    assert first.singular_values.tobytes() == second.singular_values.tobytes()
    largest = np.abs(first.basis).argmax(axis=0)
    assert (first.basis[largest, np.arange(20)] > 0).all()


@pytest.mark.parametrize("k", [15, 200])
def test_order_and_sign_of_pairs_do_not_matter(k: int) -> None:
    rng = np.random.default_rng(k)
    delta = rng.normal(size=(20, k)) * np.geomspace(1, 0.05, 20)[:, None]
    changed = delta[:, rng.permutation(k)] * rng.choice([-1.0, 1.0], size=k)
    one, other = spectrum(delta), spectrum(changed)
    assert np.allclose(one.singular_values, other.singular_values, atol=1e-12)
    assert np.allclose(one.basis[:, :8], other.basis[:, :8], atol=1e-7)


def test_rotated_features_rotate_the_directions() -> None:
    rng = np.random.default_rng(5)
    delta, turn = rng.normal(size=(12, 40)), np.linalg.qr(rng.normal(size=(12, 12)))[0]
    one, other = spectrum(delta), spectrum(turn @ delta)
    X = rng.normal(size=(7, 12))
    plain, turned = project(X, one.basis[:, :4]) @ turn.T, project(X @ turn.T, other.basis[:, :4])
    assert np.allclose(plain, turned, atol=1e-10)


def test_equal_singular_values_give_one_projector() -> None:
    delta, left = with_values(16, 24, [4.0, 2.0, 2.0, 2.0, 0.3], seed=6)
    rng = np.random.default_rng(7)
    projectors = []
    for _ in range(3):
        found = spectrum(delta[:, rng.permutation(24)])
        projectors.append(found.basis[:, :4] @ found.basis[:, :4].T)
    assert np.allclose(projectors[0], left[:, :4] @ left[:, :4].T, atol=1e-10)
    assert all(np.allclose(projectors[0], other, atol=1e-10) for other in projectors[1:])


def test_gram_and_svd_agree() -> None:
    rng = np.random.default_rng(8)
    d = 10
    delta = rng.normal(size=(d, GRAM_RATIO * d + 1)) * np.geomspace(1, 1e-3, d)[:, None]
    by_gram = spectrum(delta)
    by_svd = np.linalg.svd(delta, compute_uv=False)
    assert np.allclose(by_gram.singular_values, by_svd, rtol=1e-8)


@pytest.mark.parametrize("k", [0, 1])
def test_no_pair_and_one_pair(k: int) -> None:
    delta = np.random.default_rng(9).normal(size=(6, k))
    found = spectrum(delta)
    assert (found.rank, found.gap, found.basis.shape) == (k, 0, (6, k))
    assert np.isfinite(found.singular_values).all()


def test_repeated_pairs_and_zero_differences_add_no_rank() -> None:
    one = np.random.default_rng(10).normal(size=(8, 2)).astype(np.float32)
    delta = np.hstack([one, one, one[:, :1] * 2, np.zeros((8, 5), np.float32)])
    assert spectrum(delta).rank == 2
    nothing = spectrum(np.zeros((8, 4)))
    assert (nothing.rank, nothing.gap) == (0, 0)


def test_rounding_of_float32_features_is_no_direction() -> None:
    rng = np.random.default_rng(11)
    directions = rng.normal(size=(3, 64))
    a = (1000 + rng.normal(size=(100, 64))).astype(np.float32)
    b = (a + 0.05 * rng.normal(size=(100, 3)) @ directions).astype(np.float32)
    delta = (a - b).T
    assert spectrum(delta, magnitude=1000.0).rank == 3
    assert spectrum(delta).rank > 3, "without the members' size, their rounding looks like directions"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite_is_refused_before_any_svd(bad: float) -> None:
    """numpy/numpy#5588."""
    delta = np.zeros((4, 5))
    delta[2, 3] = bad
    with pytest.raises(InputError, match="NaN or an infinity"):
        spectrum(delta)
    with pytest.raises(InputError, match="aren't a matrix"):
        spectrum(np.zeros(3))


def test_projection_removes_the_basis_and_nothing_else() -> None:
    rng = np.random.default_rng(12)
    basis = np.linalg.qr(rng.normal(size=(9, 4)))[0]
    X = rng.normal(size=(5, 9))
    left = project(X, basis)
    rest = complement(basis)
    assert np.abs(X @ basis).max() > 0.1
    assert np.allclose(left @ basis, 0, atol=1e-12)
    assert np.allclose(left @ rest, X @ rest, atol=1e-12)
    assert rest.shape == (9, 5)
    assert np.allclose(rest.T @ rest, np.eye(5), atol=1e-12)
    assert np.array_equal(project(X, basis[:, :0]), X)
    assert np.array_equal(complement(basis[:, :0]), np.eye(9))
