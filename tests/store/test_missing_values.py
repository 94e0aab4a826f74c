"""Rows without a value of a column that plays a part take no part in it; they are counted, and it is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.reading import read_problem
from tests.world import MEMBERS

ADAM = {"epochs": 3, "device": "cpu"}
MISSING = {3, 8, 20, 95, 96, 97, 140, 150}
"""Three training, three validation and two test rows."""


def _place(world: Any, lost: str = "") -> list[str]:
    rows = range(len(world.X))
    return [lost if row in MISSING else ("a", "b", "b")[row % 3] for row in rows]


@pytest.mark.parametrize(
    "options",
    [
        {"upweight": "place"},
        {"upweight": "label,place"},
        pytest.param({"upweight": "place", "solver": "adam", **ADAM}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_rows_without_a_value_are_left_out(world: Any, options: dict[str, Any]) -> None:
    features = world.store(place=_place(world))
    probe, report = world.fit(features, "with", weight_decay="1e-2", **options)
    assert report["train_rows"] == 87
    said = f"3 training rows without a value of {options['upweight']} (--upweight) are left out, such as 'r3'"
    assert said in world.heard.warnings
    split = ["" if row in MISSING and name == "train" else name for row, name in enumerate(_split(world))]
    without = world.store("without.h5", place=_place(world), split=split)
    same, _ = world.fit(without, "without", weight_decay="1e-2", **options)
    assert same.weight.tobytes() == probe.weight.tobytes(), "as if they weren't in the store"
    lost = world.store("lost.h5", place=_place(world, "lost"))
    own, _ = world.fit(lost, "lost", weight_decay="1e-2", **options)
    assert not np.allclose(own.weight, probe.weight, rtol=1e-3), "a group of their own would count"


@pytest.mark.parametrize("option", ["envs", "dro_groups"])
def test_so_are_those_without_a_value_of_another_methods_columns(world: Any, option: str) -> None:
    given = FitOptions(features=world.store(place=_place(world)), output=world.folder / "p")
    columns = {option: "domain,place", "erase": None}
    problem = read_problem(given, oracle=False, reporter=world.heard, columns=columns)
    flag = f"--{option.replace('_', '-')}"
    said = f"3 training rows without a value of domain,place ({flag}) are left out, such as 'r3'"
    assert said in world.heard.warnings
    assert list(problem.train.codes) == [option]
    assert len(problem.train.codes[option]) == len(problem.train.ids) == 87


def _split(world: Any) -> list[str]:
    return list(world.columns["split"])


def test_rows_without_a_value_of_groups_are_in_no_group(world: Any) -> None:
    features = world.store(place=_place(world))
    world.pairs(features, members=MEMBERS)
    _, report = world.fit(
        features,
        pairs=world.folder / "pairs.h5",
        select="worst-group",
        groups="label,place",
        weight_decay="1e-2",
    )
    assert any("3 validation rows without a value of label,place" in text for text in world.heard.warnings)
    assert (report["train_rows"], report["val_rows"]) == (90, 40), "they still train, and count for accuracy"
    evaluated = world.eval(features, where="split=val", groups="label,place")
    assert any("3 rows without a value" in text for text in world.heard.warnings)
    assert sum(group["n"] for group in evaluated["groups"]) == 37
    assert evaluated["n"] == 40
    pick = report["path"][report["chosen"]]
    assert evaluated["worst_group"]["accuracy"] == pytest.approx(pick["worst_group"])
    assert evaluated["accuracy"] == pytest.approx(pick["val_accuracy"])
    control = next(one for one in report["controls"] if one["name"] == "erm-upweighted")
    assert control["weight_decay"] == 1e-2
    world.fit(
        features,
        pairs=world.folder / "pairs.h5",
        groups="label,place",
        rank="1",
        weight_decay="1e-2",
        save_controls=world.folder / "controls",
    )
    world.fit(features, "upweighted", upweight="label,place", weight_decay="1e-2")
    two = [world.eval(features, name) for name in ("upweighted", "controls/erm-upweighted.safetensors")]
    scores = [(one["accuracy"], one["balanced_accuracy"], one["log_loss"]) for one in two]
    assert scores[0] == pytest.approx(scores[1]), "the control is ERM as --upweight fits it"


def test_a_column_without_any_value_is_refused(world: Any) -> None:
    features = world.store(place=["" if row < 90 else "a" for row in range(len(world.X))])
    with pytest.raises(InputError, match="no training row has a value of 'place'"):
        world.fit(features, weight_decay="1e-2", upweight="place")
    empty = world.store("empty.h5", place=["a" if row < 90 else "" for row in range(len(world.X))])
    with pytest.raises(InputError, match="no validation row has a value of 'place'"):
        world.fit(empty, groups="place", weight_decay="1e-2")


def test_rows_without_a_label_take_no_part_anywhere(world: Any) -> None:
    label = ["" if row in MISSING else text for row, text in enumerate(world.columns["label"])]
    features = world.store(label=label)
    world.pairs(features, members=MEMBERS)
    _, report = world.fit(features, pairs=world.folder / "pairs.h5", rank="1", weight_decay="1e-2")
    assert (report["train_rows"], report["val_rows"]) == (87, 37)
    assert any("3 training rows without a label are left out" in text for text in world.heard.warnings)
    assert any("3 validation rows without a label are left out" in text for text in world.heard.warnings)
    assert world.eval(features, where="split=test")["n"] == 38
    assert any("2 of 40 rows have no label" in text for text in world.heard.warnings)
    world.oracle(features)
    found = world.bound(features, train="split=train")
    estimates = found["estimates"]
    assert (estimates["train_rows"], estimates["oracle_pairs"]) == (87, 40)
    assert any("3 of 90 rows of split=train have no known label" in t for t in world.heard.warnings)


def test_matching_leaves_rows_without_a_value_out(world: Any) -> None:
    made = world.pairs(world.store(place=_place(world)), match="random", same="label", across="place")
    assert not {f"r{row}" for row in MISSING} & {*made.id_a, *made.id_b}
    assert any("3 rows without a value of --same or --across" in text for text in world.heard.notes)
