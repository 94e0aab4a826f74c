"""One reading of split names for every command: whatever they are called, the same rows are protected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncm_cli.errors import InputError
from ncm_cli.main import run
from ncm_cli.store.probe import Probe
from ncm_cli.store.roles import role_of
from tests.world import MEMBERS

NAMES = {
    "train": ["train", "training"],
    "val": ["val", "valid", "validation", "dev", "eval"],
    "test": ["test", "testing", "heldout", "held-out", "held out", "Held_Out", "hold-out"],
}
ACROSS = [(0, 140), (95, 1), (145, 100), (3, 150)]
"""Training and test, validation and training, test and validation, training and test."""


def _cases(name: str) -> st.SearchStrategy[str]:
    return st.lists(st.booleans(), min_size=len(name), max_size=len(name)).map(
        lambda upper: "".join(c.upper() if up else c for c, up in zip(name, upper, strict=True))
    )


def spelled(role: str) -> st.SearchStrategy[list[str]]:
    """One or two names of a role, each in any case."""
    return st.lists(st.sampled_from(NAMES[role]).flatmap(_cases), min_size=1, max_size=2)


def made_with(world: Any, split: list[str], members: list[tuple[int, int]]) -> tuple[Probe, list[str]]:
    """The probe and the ids of the pairs left, with these split values."""
    features = world.store(split=split)
    left = world.pairs(features, members=[*members, *ACROSS])
    probe, _ = world.fit(features, pairs=world.folder / "pairs.h5", rank="0:3", weight_decay="1e-2")
    return probe, [*left.id_a, *left.id_b]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_spelling_of_the_splits_gives_the_same_probe(
    data: st.DataObject, worlds: Callable[..., Any]
) -> None:
    """rungalileo/dataquality#557."""
    world = worlds()
    plain = world.columns["split"]
    probe, left = made_with(world, plain, MEMBERS)
    assert probe.meta["data"]["pairs"]["left_out"] == 1, "fit bars the pair of a validation row"
    names = {role: data.draw(spelled(role), label=role) for role in NAMES}
    renamed = [names[role][row % len(names[role])] for row, role in enumerate(plain)]
    other, other_left = made_with(world, renamed, MEMBERS)
    assert other.weight.tobytes() == probe.weight.tobytes()
    assert other.bias.tobytes() == probe.bias.tobytes()
    assert other_left == left
    fields = ("used", "left_out", "used_sha256")
    assert [other.meta["data"]["pairs"][field] for field in fields] == [
        probe.meta["data"]["pairs"][field] for field in fields
    ]


@pytest.mark.parametrize(
    "names",
    [
        ("training", "validation", "testing"),
        ("train", "dev", "held-out"),
        ("Training", "VAL", "HELDOUT"),
    ],
)
def test_pairs_of_a_training_and_a_test_row_are_barred(world: Any, names: tuple[str, str, str]) -> None:
    """rungalileo/dataquality#557."""
    called = dict(zip(("train", "val", "test"), names, strict=True))
    features = world.store(split=[called[role] for role in world.columns["split"]])
    left = world.pairs(features, members=[(0, 1), *ACROSS])
    assert [*zip(left.id_a, left.id_b, strict=True)] == [("r0", "r1"), ("r95", "r1")]
    assert any("3 pairs of a training and a test row are left out" in text for text in world.heard.warnings)
    kept = world.pairs(features, members=[(0, 1), *ACROSS], straddling="keep")
    assert kept.pairs == 5
    probe, _ = world.fit(features, pairs=world.folder / "pairs.h5", rank="1", weight_decay="1e-2")
    assert probe.meta["data"]["pairs"]["used"] == 1
    assert any("4 pairs have a member among the validation or test rows" in t for t in world.heard.warnings)
    assert world.eval(features, where=f"split={names[2]}")["overlap"] == {"train": 0, "val": 0}


def test_a_split_of_digits_is_said_by_pairs_and_refused_by_fit(world: Any) -> None:
    features = world.store(split=[{"train": "0", "val": "1", "test": "2"}[s] for s in world.columns["split"]])
    world.pairs(features, members=[(0, 1), (2, 140)])
    said = next(text for text in world.heard.warnings if "can be recognised" in text)
    assert "'0', '1', '2'" in said
    assert "--test" in said
    with pytest.raises(InputError, match="which rows to train on") as refused:
        world.fit(features, pairs=world.folder / "pairs.h5")
    assert "'0', '1', '2'" in str(refused.value)
    assert "--train split=0;" in str(refused.value), "a hint names a value of this store"
    _, report = world.fit(features, train="split=0", val="split=1", pairs=world.folder / "pairs.h5", rank="1")
    assert report["train_rows"] == 90
    said = next(text for text in world.heard.warnings if "can be recognised" in text)
    assert "--test split=2" in said, "of the rows that are neither training nor validation rows"
    probe, _ = world.fit(
        features,
        train="split=0",
        val="split=1",
        test="split=2",
        pairs=world.folder / "pairs.h5",
        rank="1",
        weight_decay="1e-2",
    )
    assert probe.meta["data"]["pairs"]["left_out"] == 1


def test_a_split_of_numbers_is_read_as_its_digits_are(world: Any) -> None:
    codes = np.array([{"train": 0.0, "val": 1.0, "test": 2.0}[split] for split in world.columns["split"]])
    features = world.store(split=codes)
    world.pairs(features, members=[(0, 1), (2, 140)])
    assert any("'0', '1', '2'" in text for text in world.heard.warnings)
    with pytest.raises(InputError, match="which rows to train on") as refused:
        world.fit(features)
    assert "'0', '1', '2'" in str(refused.value)


def test_one_name_that_is_not_known_is_said(world: Any) -> None:
    features = world.store(split=["final" if s == "test" else s for s in world.columns["split"]])
    world.pairs(features, members=[(0, 1), (2, 140)])
    assert any("no test rows can be recognised" in t and "'final'" in t for t in world.heard.warnings)
    world.fit(features, pairs=world.folder / "pairs.h5", rank="1", weight_decay="1e-2")
    assert any("no test rows can be recognised" in t and "split=final" in t for t in world.heard.warnings)


def test_missing_validation_rows_are_asked_for_by_a_name_that_is_there(
    world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    features = world.store(split=["check" if s == "val" else s for s in world.columns["split"]])
    assert run(["fit", "-f", str(features), "-o", str(world.folder / "p")]) == 3
    assert "--val split=check," in capsys.readouterr().err


def test_a_store_whose_splits_are_all_known_warns_of_nothing(world: Any) -> None:
    features = world.store(split=["train" if s != "val" else s for s in world.columns["split"]])
    label = np.array(world.columns["label"])
    members = [tuple(np.flatnonzero(label == name)[at : at + 2]) for name in ("cat", "dog") for at in (0, 2)]
    world.pairs(features, members=members)
    world.fit(features, pairs=world.folder / "pairs.h5", rank="1", weight_decay="1e-2")
    assert not world.heard.warnings
    assert any("no test rows" in text for text in world.heard.notes)


@pytest.mark.parametrize(
    ("value", "role"),
    [
        ("train", "train"),
        ("Trn", "train"),
        ("ood_val", "val"),
        ("Held-Out", "test"),
        ("id test", "test"),
        ("train+val", None),
        ("test/train", None),
        ("0", None),
        ("", None),
        ("contrain", None),
        ("attest", None),
    ],
)
def test_roles_of_split_values(value: str, role: str | None) -> None:
    assert role_of(value) == role
