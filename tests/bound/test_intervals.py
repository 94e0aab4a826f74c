"""The first-order bootstrap against the bootstrap that decomposes every replicate's M."""

from __future__ import annotations

import numpy as np
import pytest

from ncm_cli.methods import bound, bound_intervals


def _setting(seed: int, n: int = 600) -> dict:
    rng = np.random.default_rng(seed)
    d, spurious = 10, 3
    axes = np.linalg.qr(rng.normal(size=(d, d)))[0]
    scales = np.array([4.0, 2.5, 1.5] + [0.05] * (d - spurious))
    differences = (rng.normal(size=(n, d)) * scales) @ axes.T
    noisy = axes[:, :spurious] + 0.15 * rng.normal(size=(d, spurious))
    basis = np.linalg.qr(noisy)[0]
    weight = bound.without(rng.normal(size=(d, 1)), basis).T
    twin = rng.normal(size=(n, d))
    codes = (twin @ weight[0] + rng.normal(size=n) > 0).astype(int)
    return {"twin": twin, "test": twin + differences, "weight": weight, "basis": basis, "codes": codes}


def _terms(case: dict, rows: np.ndarray) -> tuple[bound.Terms, bound.SecondMoment, float]:
    loss = bound.LOSSES["logistic"]
    test, twin, codes = case["test"][rows], case["twin"][rows], case["codes"][rows]
    moment = bound.second_moment([test - twin])
    risk = {
        name: float(np.mean(loss.rows(x @ case["weight"].T, codes))) for name, x in (("a", test), ("b", twin))
    }
    terms = bound.theorem(
        loss=loss, weight=case["weight"], basis=case["basis"], moment=moment, term_1=risk["b"], spurious_dim=3
    )
    return terms, moment, risk["a"]


def _fast(case: dict, replicates: int, seed: int) -> dict[str, tuple[float, float]]:
    loss = bound.LOSSES["logistic"]
    terms, moment, _ = _terms(case, np.arange(len(case["codes"])))
    logits = {name: case[name] @ case["weight"].T for name in ("test", "twin")}
    rows = bound_intervals.PairRows(
        test_loss=loss.rows(logits["test"], case["codes"]),
        twin_loss=loss.rows(logits["twin"], case["codes"]),
        spectral=bound_intervals.spectral_rows(
            case["test"] - case["twin"],
            weight=case["weight"],
            basis=case["basis"],
            moment=moment,
            s=terms.s,
            direction=bound.misalignment(moment, case["basis"])[1],
        ),
        errors=bound_intervals.error_rows(logits["test"], logits["twin"], case["codes"]),
    )
    return bound_intervals.intervals(
        loss=loss, terms=terms, rows=rows, train_loss=None, replicates=replicates, seed=seed
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_first_order_intervals_match_the_full_bootstrap(seed: int) -> None:
    case = _setting(seed)
    fast = _fast(case, 2000, 0)
    rng = np.random.default_rng(99)
    names = (
        "term_1",
        "theta_m_theta",
        "term_2",
        "term_2_upper",
        "bound",
        "erm_bound",
        "distance",
        "lambda_1",
    )
    drawn = []
    for _ in range(600):
        terms, _, _ = _terms(case, rng.integers(0, len(case["codes"]), size=len(case["codes"])))
        drawn.append([getattr(terms, name) for name in names])
    full = np.percentile(np.array(drawn), [2.5, 97.5], axis=0).T
    for name, (low, high) in zip(names, full, strict=True):
        width = high - low
        assert fast[name][0] == pytest.approx(low, abs=0.25 * width), name
        assert fast[name][1] == pytest.approx(high, abs=0.25 * width), name


def test_intervals_hold_the_estimate_and_follow_the_seed() -> None:
    case = _setting(4)
    terms, _, risk = _terms(case, np.arange(600))
    found = _fast(case, 200, 3)
    assert found == _fast(case, 200, 3)
    assert found != _fast(case, 200, 4)
    for name, value in {"bound": terms.bound, "term_1": terms.term_1, "test_risk": risk}.items():
        low, high = found[name]
        assert low < value < high


def test_intervals_narrow_with_more_pairs() -> None:
    few, many = _fast(_setting(5, 100), 200, 0), _fast(_setting(5, 6400), 200, 0)
    ratio = np.subtract(*few["bound"]) / np.subtract(*many["bound"])
    assert 4 < ratio < 16
