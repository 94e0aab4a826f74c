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
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.roles import make_groups
from tests.world import write_store

ATTRIBUTES = ("male", "black", "lgbt")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    n = 400
    y = rng.integers(2, size=n)
    X = rng.normal(size=(n, 6)) + 1.2 * y[:, None] * np.eye(6)[0]
    columns = {
        "toxic": [("no", "yes")[code] for code in y],
        "split": [("train", "val", "test")[i % 3] for i in range(n)],
    }
    for name in ATTRIBUTES:
        codes = rng.integers(2, size=n)
        codes[rng.random(n) < 0.1] = -1
        columns[name] = ["01"[code] if code >= 0 else "" for code in codes]
    return write_store(tmp_path / "f.h5", X, columns, label_column="toxic")


@pytest.fixture
def probe(store: Path, tmp_path: Path) -> Path:
    fit(FitOptions(features=store, output=tmp_path / "p.safetensors", weight_decay="1e-2"))
    return tmp_path / "p.safetensors"


def test_one_run_gives_each_crossing_and_the_overall_worst(store: Path, probe: Path) -> None:
    where = {"probe": probe, "features": store, "where": "split=test"}
    together = evaluate(EvalOptions(**where, groups=";".join(f"label,{name}" for name in ATTRIBUTES)))
    alone = [evaluate(EvalOptions(**where, groups=f"label,{name}")) for name in ATTRIBUTES]
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


def test_fit_records_the_worst_group_of_each_crossing(store: Path, tmp_path: Path) -> None:
    report = fit(
        FitOptions(
            features=store,
            output=tmp_path / "p.safetensors",
            select="worst-group",
            groups="label,male;label,black",
            weight_decay="1e-3,1",
        )
    )
    judged = evaluate(
        EvalOptions(
            probe=tmp_path / "p.safetensors",
            features=store,
            where="split=val",
            groups="label,male;label,black",
        )
    )
    assert [one["worst_group"] for one in report["crossings"]] == [
        one["worst_group"] for one in judged["crossings"]
    ]
    worst = min(one["worst_group"]["accuracy"] for one in report["crossings"])
    assert report["path"][report["chosen"]]["worst_group"] == pytest.approx(worst, abs=1e-12)


@pytest.mark.parametrize("groups", [["label,male;label,black"], ["label,male", "label,black"]])
def test_a_sweep_records_the_worst_group_of_each_crossing(
    store: Path, tmp_path: Path, groups: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [part for text in groups for part in ("--groups", text)]
    out = tmp_path / "s.h5"
    shared = [
        "-f",
        str(store),
        "--methods",
        "erm,dfr",
        "--trials",
        "2",
        "--seeds",
        "1",
        "--epochs",
        "3",
        "-o",
        str(out),
    ]
    assert run(["sweep", *shared, *given, "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        found = row["metrics"]
        each = [found[f"val_worst_group_{number}"] for number in (1, 2)]
        assert found["val_worst_group"] == pytest.approx(min(each), abs=1e-12)
    assert {"val_worst_group_1", "val_worst_group_2"} <= set(
        out.with_suffix(".csv").read_text().split("\n")[0].split(",")
    )


def test_fit_takes_groups_given_twice_as_two_crossings(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ["-f", str(store), "--select", "worst-group", "-o", str(tmp_path / "p.safetensors"), "--json"]
    found = []
    for groups in (["label,male;label,black"], ["label,male", "label,black"]):
        assert run(["fit", *shared, *(part for text in groups for part in ("--groups", text))]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert [one["columns"] for one in found[1]["crossings"]] == [["toxic", "male"], ["toxic", "black"]]


@pytest.mark.parametrize("command", ["fit", "sweep"])
def test_groups_without_a_name_are_refused(
    command: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "-f", str(store), "--groups", " ;,", "-o", str(tmp_path / "o.h5")]) == 2
    assert "no column is named" in capsys.readouterr().err


def test_rows_outside_one_crossing_are_said_of_that_one(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--select", "worst-group", "--groups", "label", "--groups", "label,black"]
    assert run(["fit", "-f", str(store), *given, "-o", str(tmp_path / "p.safetensors")]) == 0
    said = capsys.readouterr().err
    assert "validation rows without a value of toxic,black (--groups) are in none of its groups" in said
    assert said.count("in none of its groups") == 1


def test_an_unknown_column_of_a_crossing_is_named(store: Path, probe: Path) -> None:
    with pytest.raises(InputError, match="no column named 'femal'"):
        evaluate(EvalOptions(probe=probe, features=store, groups="label,male;label,femal"))


def test_crossings_are_for_groups_alone(store: Path, tmp_path: Path) -> None:
    """Not silently the first of them."""
    with pytest.raises(InputError, match="several crossings where one is expected"):
        fit(FitOptions(features=store, output=tmp_path / "p.safetensors", upweight="male;black"))
