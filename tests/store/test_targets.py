"""What a column says is read in one way: as classes, or as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.main import run
from tests.world import MEMBERS


def _aged(world: Any) -> np.ndarray:
    return np.asarray(np.round(10 * world.X[:, 0].astype(float) + 50, 2))


@pytest.fixture
def regression(world: Any) -> Any:
    """A probe of ``age``, with pairs and oracle pairs."""
    features = world.store(age=_aged(world))
    world.pairs(features, members=MEMBERS)
    world.oracle(features)
    world.fit(features, pairs=world.folder / "pairs.h5", target="age", task="regression", rank="1")
    return world


def test_a_column_of_text_where_the_probe_needs_numbers(
    regression: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    world = regression
    text = world.store("text.h5", age=["old" if value > 50 else "young" for value in _aged(world)])
    common = f"{world.folder}/probe -f {text}"
    for line in (
        f"bound {common} --oracle-pairs {world.folder}/oracle.h5 --train split=train",
        f"bound {common} --oracle-pairs {world.folder}/oracle.h5",
        f"eval {common}",
        f"fit -f {text} --target age --task regression -o {world.folder}/other",
    ):
        assert run(line.split()) == 3, line
        said = capsys.readouterr().err
        assert "holds text where numbers are needed" in said
        assert "Traceback" not in said


def test_numbers_that_are_stored_as_text_are_numbers(regression: Any) -> None:
    world = regression
    age = _aged(world)
    numeric = world.store("n.h5", age=age)
    text = world.store("t.h5", age=[f"{value}" for value in age])
    found = [world.bound(store, train="split=train") for store in (numeric, text)]
    for one in found:
        del one["options"]
    assert found[0] == found[1]
    assert [world.eval(numeric)[name] for name in ("mse", "r2")] == [
        world.eval(text)[name] for name in ("mse", "r2")
    ]
    one, _ = world.fit(text, "one", target="age", task="regression", weight_decay="1e-2")
    other, _ = world.fit(numeric, "other", target="age", task="regression", weight_decay="1e-2")
    assert one.weight.tobytes() == other.weight.tobytes()


def test_numbers_where_classes_are_needed(world: Any) -> None:
    numeric = world.store(age=_aged(world))
    world.fit(numeric, weight_decay="1e-2")
    with pytest.raises(InputError, match="holds numbers, not classes"):
        world.fit(numeric, "other", target="age", weight_decay="1e-2")
    with pytest.raises(InputError, match="holds numbers, not classes"):
        world.eval(numeric, target="age")
