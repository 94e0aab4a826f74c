"""``--groups "label,male;label,black"``: crossings that overlap; a worst group each and the overall worst."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.main import run
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.fit import fit
from ncm_cli.probes.metrics import joint
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.store.columns import Column, make_groups
from ncm_cli.store.features import FeatureStore, write_features

ENCODER = {"kind": "array", "model": "made"}
ATTRIBUTES = ("male", "black", "lgbt")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    n = 400
    y = rng.integers(2, size=n)
    X = rng.normal(size=(n, 6)) + 1.2 * y[:, None] * np.eye(6)[0]
    columns = [
        Column("toxic", y.astype(np.int32), ("no", "yes")),
        Column("split", (np.arange(n) % 3).astype(np.int32), ("train", "val", "test")),
    ]
    for name in ATTRIBUTES:
        codes = rng.integers(2, size=n).astype(np.int32)
        codes[rng.random(n) < 0.1] = -1
        columns.append(Column(name, codes, ("0", "1")))
    path = tmp_path / "f.h5"
    write_features(
        path,
        ids=[f"r{i}" for i in range(n)],
        blocks=[X.astype(np.float32)],
        dim=6,
        columns=columns,
        label_column="toxic",
        split_column="split",
        encoder=ENCODER,
        options={},
    )
    return path


@pytest.fixture
def probe(store: Path, tmp_path: Path) -> Path:
    fit(FitOptions(features=store, output=tmp_path / "p.safetensors", weight_decay="1e-2"))
    return tmp_path / "p.safetensors"


def test_one_run_gives_each_crossing_and_the_overall_worst(store: Path, probe: Path) -> None:
    where = {"probe": probe, "features": store, "where": "split=test"}
    together = evaluate(EvalOptions(**where, groups=tuple(f"label,{name}" for name in ATTRIBUTES)))
    alone = [evaluate(EvalOptions(**where, groups=(f"label,{name}",))) for name in ATTRIBUTES]
    assert [one["worst_group"] for one in together["crossings"]] == [one["worst_group"] for one in alone]
    assert [one["adjusted"] for one in together["crossings"]] == [one["adjusted_accuracy"] for one in alone]
    assert together["groups"] == [group for one in alone for group in one["groups"]]
    assert together["worst_group"]["accuracy"] == min(one["worst_group"]["accuracy"] for one in alone)
    assert together["adjusted_accuracy"] is None, "there is one for each crossing"
    assert set(together["groups"][0]["group"]) == {"toxic", "male"}


def test_groups_given_twice_are_two_crossings(
    store: Path, probe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not silently the last of them."""
    shown = []
    for groups in (["label,male", "label,black"], ["label,male;label,black"]):
        given = [text for one in groups for text in ("--groups", one)]
        assert run(["eval", str(probe), "-f", str(store), *given, "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[1]
    assert [one["columns"] for one in shown[0]["crossings"]] == [["toxic", "male"], ["toxic", "black"]]


def test_worst_group_selection_takes_the_worst_of_all_crossings(store: Path, tmp_path: Path) -> None:
    common = {"features": store, "select": "worst-group", "weight_decay": "1e-3,1,100"}
    found = {}
    for name in ("label,male", "label,black", "label,male;label,black"):
        report = fit(FitOptions(**common, groups=name, output=tmp_path / "p.safetensors"))
        found[name] = [candidate["worst_group"] for candidate in report["path"]]
    one, other, both = found.values()
    assert both == [min(pair) for pair in zip(one, other, strict=True)]


def test_joint_groups_are_those_of_all_columns(store: Path) -> None:
    with FeatureStore(store) as opened:
        crossed = joint(make_groups(opened, "label,male;label,black").codes)
        plain = make_groups(opened, "label,male,black").codes[:, 0]
    assert ((crossed < 0) == (plain < 0)).all()
    known = plain >= 0
    assert len(np.unique(crossed[known])) == len(np.unique(plain[known]))
    assert len(np.unique(np.stack([crossed[known], plain[known]]), axis=1)[0]) == len(np.unique(plain[known]))


def test_an_unknown_column_of_a_crossing_is_named(store: Path, probe: Path) -> None:
    with pytest.raises(InputError, match="no column named 'femal'"):
        evaluate(EvalOptions(probe=probe, features=store, groups=("label,male;label,femal",)))


def test_crossings_are_for_groups_alone(store: Path, tmp_path: Path) -> None:
    """Not silently the first of them."""
    with pytest.raises(InputError, match="several crossings where one is meant"):
        fit(FitOptions(features=store, output=tmp_path / "p.safetensors", upweight="male;black"))
