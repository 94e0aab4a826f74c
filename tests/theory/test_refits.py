"""A refit of ``ncm bound`` is of the problem that ``ncm fit`` recorded, and meets the probe's own numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError, MismatchError
from ncm_cli.main import run
from ncm_cli.store.probe import write_probe
from tests.world import MEMBERS

KEYS = ("theta_m_theta", "term_1", "term_2", "bound", "test_risk")
ADAM = {"solver": "adam", "epochs": 4, "lr": 0.02, "device": "cpu", "weight_decay": "1e-2"}


def _meets(world: Any, features: Any, rank: int, **options: Any) -> None:
    """The path at the probe's rank, alone and among others, and the count of all pairs, are the headline."""
    probe, report = world.fit(features, pairs=world.folder / "pairs.h5", rank=str(rank), **options)
    assert probe.rank == rank
    own = world.bound(features, pairs=world.folder / "pairs.h5", ranks=f"{rank}")
    among = world.bound(features, pairs=world.folder / "pairs.h5", ranks=f"0:{report['numerical_rank']}")
    counts = world.bound(features, pairs=world.folder / "pairs.h5", pair_counts=f"1,{report['pairs']}")
    headline = {name: own[name] for name in KEYS}
    found = {
        "alone": own["path"][0],
        "among others": among["path"][rank],
        "all pairs": counts["pair_counts"][-1],
    }
    for where, row in found.items():
        assert (row["rank"], row["pairs"]) == (rank, report["pairs"]), where
        for key in KEYS:
            assert row[key] == pytest.approx(headline[key], rel=1e-6), (where, key)
    flat = pytest.approx(headline["theta_m_theta"], rel=0.03)
    assert among["path"][0]["theta_m_theta"] != flat, "another rank is another problem"


@pytest.fixture
def made(world: Any) -> tuple[Any, Any]:
    """A world with pairs, some of which `fit` leaves out, copies of validation rows, and oracle pairs."""
    features = world.store(same_image=[(11, 100), (12, 150)], place=["a", "b", "b"] * 56 + ["a", "a"])
    leaking = [(0, 140), (95, 1), (2, 100)]
    world.pairs(features, members=[*leaking, *MEMBERS], straddling="keep")
    world.oracle(features)
    return world, features


def slow(options: dict[str, Any]) -> Any:
    return pytest.param(options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaling": "norm", "scale_factor": 3.0},
        slow({"scaling": "standard"}),
        {"upweight": "label,place"},
        {"overlap": "keep"},
        slow({"tolerance": 1e-6}),
        slow({"train": "split=train & domain=day"}),
        slow(ADAM),
        {**ADAM, "scaling": "standard", "upweight": "place", "batch_size": 16, "seed": 5},
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults",
)
def test_the_path_at_the_probes_rank_is_the_headline(made: tuple[Any, Any], options: dict[str, Any]) -> None:
    world, features = made
    _meets(world, features, 2, **{"weight_decay": "1e-2"} | options)


def test_so_it_is_where_pairs_were_held_out(world: Any) -> None:
    features = world.store()
    world.pairs(features, members=MEMBERS, holdout="0.3", seed=1)
    world.oracle(features)
    _meets(world, features, 2, weight_decay="1e-3,1e-1")


@pytest.mark.slow
def test_so_it_is_for_more_classes_and_for_regression(world: Any) -> None:
    rng = np.random.default_rng(1)
    value = world.X[:, 0] + 0.5 * world.X[:, 1] + 0.1 * rng.normal(size=len(world.X))
    cuts = np.digitize(value, [0.5, 2.0])
    world.columns["label"] = [("low", "mid", "high")[cut] for cut in cuts]
    features = world.store(age=value)
    world.pairs(features, members=MEMBERS)
    world.oracle(features)
    _meets(world, features, 1, weight_decay="1e-2")
    _meets(world, features, 1, weight_decay="1e-2", target="age", task="regression")


def test_so_it_is_where_test_rows_are_trained_on(made: tuple[Any, Any]) -> None:
    world, features = made
    _meets(world, features, 1, weight_decay="1e-2", train="split=train|test", val="split=val")


def test_another_directory_and_more_rows_are_the_same_problem(made: tuple[Any, Any]) -> None:
    world, features = made
    world.fit(features, pairs=world.folder / "pairs.h5", rank="2", weight_decay="1e-2")
    more = world.store(
        "more.h5",
        X=np.concatenate([world.X, world.X[:1]]),
        ids=[*(f"r{row}" for row in range(len(world.X))), "new"],
        same_image=[(11, 100), (12, 150)],
        **{name: [*texts, "test" if name == "split" else "dusk"] for name, texts in world.columns.items()},
    )
    report = world.bound(more, pairs=world.folder / "pairs.h5", ranks="2")
    assert report["path"][0]["theta_m_theta"] == pytest.approx(report["theta_m_theta"], rel=1e-6)


@pytest.mark.parametrize("changed", ["left out", "answers", "features", "weights"])
def test_rows_that_changed_are_refused(
    made: tuple[Any, Any], changed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world, _ = made
    place = ["a", "b"] * 85
    features = world.store(place=place)
    pairs = world.folder / "pairs.h5"
    world.fit(features, pairs=pairs, rank="2", weight_decay="1e-2", upweight="place")
    X, label, split = world.X.copy(), list(world.columns["label"]), list(world.columns["split"])
    if changed == "left out":
        split[3] = "unused"
    elif changed == "answers":
        label[3] = {"cat": "dog", "dog": "cat"}[label[3]]
    elif changed == "features":
        X[3, 2] += 1
    else:
        place = ["a", "b"] * 40 + ["b", "b"] * 45
    other = world.store("other.h5", X=X, label=label, split=split, place=place)
    with pytest.raises(MismatchError, match="the training rows aren't those that the probe was fitted on"):
        world.bound(other, pairs=pairs, ranks="2")
    line = f"bound {world.folder}/probe -f {other} --oracle-pairs {world.folder}/oracle.h5 -p {pairs}"
    assert run([*line.split(), "--ranks", "0:2"]) == 4
    assert "fit it again" in capsys.readouterr().err


def test_pairs_that_changed_are_refused(made: tuple[Any, Any]) -> None:
    world, features = made
    pairs = world.folder / "pairs.h5"
    world.fit(features, pairs=pairs, rank="2", weight_decay="1e-2")
    world.pairs(features, "others.h5", MEMBERS[1:])
    with pytest.raises(MismatchError, match="not the pairs that the probe was fitted with"):
        world.bound(features, pairs=world.folder / "others.h5", ranks="2")
    # The same pair store, of which another pair is barred now.
    split = ["test" if row == 20 else name for row, name in enumerate(world.columns["split"])]
    other = world.store("other.h5", split=split)
    with pytest.raises(MismatchError, match="aren't those that the probe was fitted on"):
        world.bound(other, pairs=pairs, ranks="2")


def test_methods_that_remove_no_directions_are_refused(made: tuple[Any, Any]) -> None:
    world, features = made
    pairs = world.folder / "pairs.h5"
    for name in ("erm", "irm"):
        made_by_fit, _ = world.fit(features, pairs=pairs, weight_decay="1e-2", method="erm")
        options = made_by_fit.meta["options"] | {"method": name, "envs": "domain"}
        meta = made_by_fit.meta | {"method": name, "options": options}
        write_probe(world.folder / "probe", dataclasses.replace(made_by_fit, meta=meta))
        if name == "irm":
            with pytest.raises(MismatchError, match="a method that ncm fit doesn't train") as refused:
                world.bound(features, pairs=pairs)
            assert refused.value.found == "method irm"
        else:
            assert np.isfinite(world.bound(features, pairs=pairs)["bound"])
        for asked in ({"ranks": "0:2"}, {"pair_counts": "3"}):
            with pytest.raises(MismatchError, match="removes no directions") as refused:
                world.bound(features, pairs=pairs, **asked)
            assert f"method {name}" in str(refused.value)
    world.fit(features, weight_decay="1e-2")
    with pytest.raises(MismatchError, match="removes no directions"):
        world.bound(features, pairs=pairs, ranks="0:2")


def test_groups_alone_weight_no_refit(world: Any) -> None:
    """Neither the path nor an oracle is up-weighted because --groups names columns."""
    part = ["oracle" if 130 <= row < 150 else "rest" for row in range(len(world.X))]
    features = world.store(part=part)
    world.pairs(features, members=MEMBERS)
    label = world.columns["label"]
    twins = [(row, label.index(label[row])) for row in range(150, 170)]
    world.pairs(features, "oracle.h5", twins, straddling="keep")
    found = []
    for groups in (None, "label,domain"):
        more = {"rank": "1", "weight_decay": "1e-2", "groups": groups}
        world.fit(features, pairs=world.folder / "pairs.h5", **more)
        found.append(
            world.bound(
                features,
                oracle_train="part=oracle",
                pairs=world.folder / "pairs.h5",
                ranks="1",
                pair_counts="9",
            )
        )
    for name in ("oracle", "path", "pair_counts"):
        assert found[0][name] == found[1][name], name


def test_an_oracle_beside_the_probe_knows_the_probes_classes(world: Any) -> None:
    cut = np.digitize(world.X[:, 0], [0.0, 1.5])
    # The rows of the oracle lack the first class.
    cut[130:150] = np.maximum(cut[130:150], 1)
    world.columns["label"] = [("low", "mid", "tall")[code] for code in cut]
    features = world.store(part=["oracle" if 130 <= row < 150 else "rest" for row in range(len(world.X))])
    world.pairs(features, members=MEMBERS)
    label = world.columns["label"]
    twins = [(row, label.index(label[row])) for row in range(150, 170)]
    world.pairs(features, "oracle.h5", twins, straddling="keep")
    world.fit(features, pairs=world.folder / "pairs.h5", rank="1", weight_decay="1e-2")
    oracle = world.bound(features, oracle_train="part=oracle")["oracle"]
    assert (oracle["train_rows"], oracle["where"]) == (20, "part=oracle")
    assert np.isfinite(oracle["test_risk"])
    with pytest.raises(InputError, match="trained on the rows it is measured on"):
        world.bound(features, oracle_train="split=test")
