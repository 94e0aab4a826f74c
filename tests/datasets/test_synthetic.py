"""``ncm data synthetic``: the stores agree with the generator, and the theorem with the stores."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.datasets import synthetic
from ncm_cli.datasets.base import data as data_set
from ncm_cli.datasets.options import SyntheticOptions
from ncm_cli.errors import UsageError
from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import FitOptions
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from ncm_cli.theory.bound import bound
from ncm_cli.theory.options import BoundOptions

SMALL = {
    "dim": 20,
    "spurious": 4,
    "rows": 300,
    "val_rows": 60,
    "test_rows": 300,
    "pairs": 40,
    "holdout_pairs": 10,
}


def _build(folder: Path, **changes: object) -> Path:
    options = SyntheticOptions(output=folder / "data", **{**SMALL, **changes})  # type: ignore[arg-type]
    data_set(options)
    return folder / "data"


def test_features_have_splits_domains_and_labels(tmp_path: Path) -> None:
    data = _build(tmp_path)
    with FeatureStore(data / "features.h5") as store:
        assert store.categorical("split").counts() == {
            "oracle": 600,
            "test": 300,
            "train": 600,
            "twin": 300,
            "val": 120,
        }
        assert store.categorical("domain").counts()["10"] == 900
        assert store.label_column == "label" and store.categorical("label").categories == ("-1", "1")
        assert store.dim == 20


def test_oracle_pairs_are_test_rows_and_their_twins(tmp_path: Path) -> None:
    data = _build(tmp_path)
    pairs = read_pairs(data / "oracle.h5")
    with FeatureStore(data / "features.h5") as store:
        for ids, features, split in (
            (pairs.id_a, pairs.features_a, "test"),
            (pairs.id_b, pairs.features_b, "twin"),
        ):
            rows = store.positions(ids)
            assert (rows >= 0).all() and store.mask(f"split={split}")[rows].all()
            np.testing.assert_array_equal(store.read(rows), features)
            text = store.categorical("label").text()
            assert [text[row] for row in rows] == list(pairs.label_a)
    assert pairs.rank == 4 and pairs.pairs == 300


def test_pairs_span_the_spurious_subspace_and_noise_has_its_norm(tmp_path: Path) -> None:
    data = _build(tmp_path, noise="0,0.5,2")
    clean = read_pairs(data / "clean.h5")
    assert clean.rank == 4 and clean.pairs == 50 and int(clean.holdout.sum()) == 10
    sigma = clean.singular_values[3]
    for level in (0.5, 2.0):
        noisy = read_pairs(data / f"noisy-{level:g}.h5")
        epsilon = (noisy.delta - clean.delta)[:, ~noisy.holdout]
        assert np.linalg.norm(epsilon, 2) == pytest.approx(level * sigma, rel=1e-3)
        assert noisy.id_a == clean.id_a and noisy.rank == 20
        held = (noisy.delta - clean.delta)[:, noisy.holdout]
        assert held.std() == pytest.approx(epsilon.std(), rel=0.15)
    np.testing.assert_array_equal(read_pairs(data / "noisy-0.h5").delta, clean.delta)


def test_seeds_decide_everything(tmp_path: Path) -> None:
    content = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        with FeatureStore(_build(tmp_path / name, seed=seed) / "features.h5") as store:
            content.append(store.content_sha256)
    assert content[0] == content[1] != content[2]


def test_latents_have_the_stated_spread() -> None:
    options = SyntheticOptions(output=Path("x"), dim=40, spurious=10)
    model = synthetic.Model(options, np.random.default_rng(0))
    rows = model.draw(20_000)
    near, far = (model.observe(rows, scale).astype(np.float64) for scale in (0.5, 3.0))
    difference = far - near
    values = np.linalg.svd(difference, compute_uv=False) / np.sqrt(len(rows))
    np.testing.assert_allclose(values[:10], 2.5, rtol=0.05)
    assert values[10] < 1e-5
    assert np.trace(np.cov(near.T)) == pytest.approx(30 + 10 * 0.25, rel=0.03)
    assert 0.4 < rows.label.mean() < 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spurious": 20}, "must leave an invariant dimension"),
        ({"scales": "0.1"}, "two or more different positive numbers"),
        ({"test_scale": 0.2}, "equals a training domain's scale"),
        ({"pairs": 0}, "--pairs must be at least 1"),
        ({"noise": "-1"}, "can't be negative"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _build(tmp_path, **change)
    assert not (tmp_path / "data").exists()


def _bound(data: Path, pairs: str, rank: int, **changes: object) -> dict[str, Any]:
    probe = data.parent / f"{pairs}-{rank}.safetensors"
    fit(
        FitOptions(
            features=data / "features.h5",
            pairs=data / f"{pairs}.h5",
            rank=str(rank),
            weight_decay="1e-4",
            output=probe,
        )
    )
    options = BoundOptions(
        probe=probe,
        features=data / "features.h5",
        oracle_pairs=data / "oracle.h5",
        pairs=data / f"{pairs}.h5",
        clean_pairs=data / "clean.h5",
    )
    return bound(dataclasses.replace(options, **changes))  # type: ignore[arg-type]


def test_perfect_pairs_give_the_twins_risk(tmp_path: Path) -> None:
    report = _bound(_build(tmp_path), "clean", 4)
    assert report["spurious_dim"] == 4
    assert report["term_2"] < 1e-4 * report["erm_bound"]
    assert report["test_risk"] == pytest.approx(report["term_1"], rel=1e-3)
    assert report["noise_corollary"]["applicable"], report["noise_corollary"]["reasons"]


def test_noise_corollary_follows_its_condition(tmp_path: Path) -> None:
    data = _build(tmp_path, noise="0.1,0.28,0.31")

    def applies(level: str, rank: int) -> bool:
        return bool(_bound(data, f"noisy-{level}", rank)["noise_corollary"]["applicable"])

    assert [applies(level, 4) for level in ("0.1", "0.28", "0.31")] == [True, True, False]
    assert not applies("0.1", 3) and applies("0.1", 6)


@pytest.mark.slow
def test_paper_figures_on_three_seeds(tmp_path: Path) -> None:
    """The whole figures are recipes/synthetic.yaml's; here is their shape."""
    found: dict[str, list[float]] = {}
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        options = SyntheticOptions(output=tmp_path / str(seed) / "data", seed=seed, noise="0,0.01,0.1,1")
        data_set(options)
        for level in ("0", "0.01", "0.1", "1"):
            paths = _bound(
                options.output,
                f"noisy-{level}",
                20,
                ranks="0:40",
                pair_counts="10,20,100",
                oracle_train="split=oracle",
            )
            test = [1 - row["test_error"] for row in paths["path"]]
            assert paths["oracle"] is not None and paths["summary"] is not None
            values = {
                "erm": test[0],
                "15": test[15],
                "20": test[20],
                "25": test[25] if len(test) > 25 else np.nan,
                "gap": paths["oracle"]["gap"],
                "best": paths["summary"]["best_rank"],
                "10 pairs": 1 - paths["pair_counts"][0]["test_error"],
                "20 pairs": 1 - paths["pair_counts"][1]["test_error"],
            }
            for name, value in values.items():
                found.setdefault(f"{level}: {name}", []).append(value)
    mean = {name: float(np.mean(values)) for name, values in found.items()}
    print("\n".join(f"{name}: {value:.3f}" for name, value in mean.items()))
    assert mean["0.01: erm"] == pytest.approx(0.55, abs=0.03)
    assert mean["0.01: gap"] < 0.02
    assert abs(mean["0.01: best"] - 20) <= 1 and abs(mean["0.1: best"] - 20) <= 2
    assert mean["0.01: 25"] == pytest.approx(0.92, abs=0.03)
    assert mean["0.01: 15"] == pytest.approx(0.58, abs=0.08)
    assert mean["0.1: 20"] == pytest.approx(0.94, abs=0.03)
    assert mean["1: 20"] == pytest.approx(0.674, abs=0.05)
    assert mean["0: 10 pairs"] < 0.65 < 0.95 < mean["0: 20 pairs"], "20 clean pairs are enough, 10 aren't"
    assert mean["0: gap"] < 0.02
