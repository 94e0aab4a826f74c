"""``label`` and ``split`` are the store's own columns in every option, whatever they are called."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.reading import read_problem
from ncm_cli.progress import SILENT
from tests.world import MEMBERS

ONE = {"rank": "1", "weight_decay": "1e-2"}


@pytest.fixture
def plain(world: Any) -> Any:
    return world.store("plain.h5")


@pytest.fixture
def renamed(world: Any) -> Any:
    """The same rows; the label column is ``y``, the split column ``fold``."""
    return world.store("renamed.h5", label_column="y", split_column="fold")


def test_fit_takes_them_everywhere(world: Any, plain: Any, renamed: Any) -> None:
    world.pairs(plain, members=MEMBERS)
    options = {
        "pairs": world.folder / "pairs.h5",
        "train": "split=train & label=cat|dog",
        "val": "split=val",
        "test": "split=test",
        "target": "label",
        "groups": "label,domain",
        "upweight": "label,domain",
        "select": "worst-group",
        "weight_decay": "1e-2",
    }
    one, report = world.fit(plain, "one", **options)
    other, again = world.fit(renamed, "other", **options)
    assert other.weight.tobytes() == one.weight.tobytes()
    assert [c["worst_group"] for c in report["path"]] == [c["worst_group"] for c in again["path"]]
    assert (one.target, other.target) == ("label", "y")
    by_name, _ = world.fit(
        renamed, "by_name", **options | {"target": "y", "groups": "y,domain", "upweight": "y,domain"}
    )
    assert by_name.weight.tobytes() == one.weight.tobytes()
    default, _ = world.fit(
        renamed, "default", pairs=world.folder / "pairs.h5", upweight="label,domain", **ONE
    )
    same, _ = world.fit(plain, "same", pairs=world.folder / "pairs.h5", upweight="label,domain", **ONE)
    assert default.weight.tobytes() == same.weight.tobytes(), "also without any filter"


def test_columns_of_other_methods_take_them(world: Any, plain: Any, renamed: Any) -> None:
    one, other = (
        read_problem(
            FitOptions(features=store, output=world.folder / "p"),
            oracle=False,
            reporter=SILENT,
            columns={"envs": "label", "erase": "label,domain"},
        ).train.codes
        for store in (plain, renamed)
    )
    assert sorted(one) == ["envs", "erase"]
    assert all((one[name] == other[name]).all() for name in one)


def test_eval_takes_them(world: Any, plain: Any, renamed: Any) -> None:
    world.fit(plain, weight_decay="1e-2")
    reports = [
        world.eval(store, where="split=test", groups="label,domain", reference="split=train & label=cat|dog")
        for store in (plain, renamed)
    ]
    for name in ("accuracy", "adjusted_accuracy", "balanced_accuracy", "log_loss"):
        assert reports[0][name] == reports[1][name]
    accuracies = [[group["accuracy"] for group in one["groups"]] for one in reports]
    assert accuracies[0] == accuracies[1]
    assert reports[1]["crossings"][0]["columns"] == ["y", "domain"]
    assert world.eval(renamed, where="split=test", target="label")["accuracy"] == pytest.approx(
        reports[0]["accuracy"]
    )
    twice = world.eval(renamed, groups="label,y,domain")
    assert twice["crossings"][0]["columns"] == ["y", "domain"], "one column named twice is one"


@pytest.mark.parametrize("match", ["random", "nearest", "iterative"])
def test_pairs_takes_them(world: Any, plain: Any, renamed: Any, match: str) -> None:
    options = {"match": match, "same": "label", "across": "domain"}
    filtered = {"where": "split=train|val & label=cat", "straddling": "keep", "test": "split=test"}
    for more in ({}, filtered):
        made = [world.pairs(store, f"{store.stem}-pairs.h5", **options, **more) for store in (plain, renamed)]
        assert made[0].id_a == made[1].id_a
        assert made[0].id_b == made[1].id_b
    assert made[1].pairs > 5


@pytest.mark.slow
def test_bound_and_the_control_on_the_pairs_rows_take_them(world: Any, plain: Any, renamed: Any) -> None:
    spare = ["pool" if 60 <= row < 90 else name for row, name in enumerate(world.columns["split"])]
    found = []
    for name, columns in (("a.h5", {}), ("b.h5", {"label_column": "y", "split_column": "fold"})):
        features = world.store(name, split=spare, **columns)
        world.pairs(features, match="random", same="label", across="domain", where="split=train|pool")
        world.oracle(features)
        _, report = world.fit(features, pairs=world.folder / "pairs.h5", **ONE)
        bounded = world.bound(
            features, pairs=world.folder / "pairs.h5", train="split=train & label=cat", ranks="0:2"
        )
        measured = {name: value for name, value in bounded.items() if name not in ("probe", "options")}
        verdict = {name: value for name, value in report["verdict"].items() if name not in ("text", "about")}
        found.append((report["controls"], verdict, measured))
    assert found[0] == found[1]
    names = ["constant", "erm", "erm-pair-rows", "erm-upweighted", "erm-upweighted-pair-rows"]
    assert [control["name"] for control in found[0][0]] == names


def test_a_column_that_is_called_label_is_not_the_label(world: Any) -> None:
    rng = np.random.default_rng(0)
    other = [("x", "z")[code] for code in rng.integers(2, size=len(world.X))]
    world.columns = {"y": world.columns["label"], **world.columns, "label": other}
    made = world.store(label_column="label")
    probe, _ = world.fit(made, target="y", weight_decay="1e-2")
    assert probe.classes == ("cat", "dog")
