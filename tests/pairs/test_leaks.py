"""Pairs of validation and test rows are barred by what the store that is used now says of their members."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.world import MEMBERS

LEAKING = [(0, 140), (95, 1), (2, 100), (145, 3)]
"""A test, a validation, a validation and a test row, each with a training row."""
ONE = {"rank": "1", "weight_decay": "1e-2"}


def _one_more(world: Any, row: str = "train") -> dict[str, Any]:
    """The world's store with one more row: another digest, the same rows."""
    columns = {
        name: [*texts, {"label": "cat", "domain": "day", "split": row}[name]]
        for name, texts in world.columns.items()
    }
    return {
        "X": np.concatenate([world.X, np.zeros((1, world.X.shape[1]), np.float32)]),
        "ids": [*(f"r{i}" for i in range(len(world.X))), "new"],
        **columns,
    }


def test_pairs_made_before_a_row_was_added_are_barred_as_before(world: Any) -> None:
    before = world.store("before.h5")
    world.pairs(before, members=[*MEMBERS, *LEAKING], straddling="keep")
    pairs = world.folder / "pairs.h5"
    old, _ = world.fit(before, pairs=pairs, **ONE)
    after = world.store("after.h5", **_one_more(world))
    new, _ = world.fit(after, pairs=pairs, **ONE)
    assert old.meta["data"]["pairs"]["left_out"] == new.meta["data"]["pairs"]["left_out"] == 4
    assert any("4 pairs have a member among the validation or test rows" in t for t in world.heard.warnings)
    assert new.meta["data"]["pairs"]["used_sha256"] == old.meta["data"]["pairs"]["used_sha256"]
    assert old.meta["data"]["features"] != new.meta["data"]["features"], "the stores differ"


def test_a_row_that_moved_to_the_test_rows_bars_its_pairs_now(world: Any) -> None:
    world.pairs(world.store("before.h5"), members=MEMBERS)
    split = ["test" if row == 7 else name for row, name in enumerate(world.columns["split"])]
    probe, _ = world.fit(world.store("after.h5", split=split), pairs=world.folder / "pairs.h5", **ONE)
    assert probe.meta["data"]["pairs"]["left_out"] == 1


@pytest.mark.parametrize("other", [100, 140], ids=["validation", "test"])
def test_a_member_that_is_byte_for_byte_a_row_kept_apart_is_barred(world: Any, other: int) -> None:
    features = world.store(same_image=[(7, other)])
    world.pairs(features, members=MEMBERS, straddling="keep")
    probe, report = world.fit(features, pairs=world.folder / "pairs.h5", **ONE)
    assert probe.meta["data"]["pairs"]["left_out"] == 1
    assert report["train_rows"] == 89, "nor is the copy trained on"
    assert any("('r7', 'r52')" in text for text in world.heard.warnings)
    kept, report = world.fit(features, pairs=world.folder / "pairs.h5", overlap="keep", **ONE)
    assert (kept.meta["data"]["pairs"]["left_out"], report["train_rows"]) == (0, 90)
    assert sum(flag.startswith("OVERLAP") for flag in kept.meta["flags"]) == 2


def test_pairs_bars_a_copy_of_a_test_image_too(world: Any) -> None:
    left = world.pairs(world.store(same_image=[(7, 140)]), members=[(0, 1), (7, 2), (141, 142)])
    assert list(zip(left.id_a, left.id_b, strict=True)) == [("r0", "r1"), ("r141", "r142")]


def test_views_of_rows_kept_apart_are_barred_by_their_ids(world: Any) -> None:
    features = world.store()
    view = world.store("view.h5", X=world.X + 0.1)
    world.pairs(features, match="same-id", features_b=view)
    probe, _ = world.fit(features, pairs=world.folder / "pairs.h5", **ONE)
    assert (probe.meta["data"]["pairs"]["used"], probe.meta["data"]["pairs"]["left_out"]) == (90, 80)


def test_eval_marks_rows_by_their_ids_after_a_re_embedding(world: Any) -> None:
    world.fit(world.store("before.h5"), rank="0", weight_decay="1e-2,1e-1")
    after = world.store("after.h5", **_one_more(world, "test"))
    assert world.eval(after, where="split=train")["overlap"] == {"train": 90, "val": 0}
    assert world.eval(after, where="split=val")["overlap"] == {"train": 0, "val": 40}
    assert world.eval(after, where="split=test")["overlap"] == {"train": 0, "val": 0}
