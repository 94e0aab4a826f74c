"""A store that is read in blocks gives what it gives in memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import ncm_cli.blocks
import ncm_cli.solvers.batches
from ncm_cli.baselines.options import SweepOptions
from ncm_cli.baselines.sweep import sweep
from ncm_cli.blocks import RowBlocks, in_memory, joined
from ncm_cli.errors import InputError, UsageError
from ncm_cli.store.digests import Texts
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.hdf5 import RowReader
from ncm_cli.store.probe import read_probe
from tests.world import MEMBERS


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCM_MEMORY_MIB", "0.001")
    monkeypatch.setattr(ncm_cli.blocks, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(ncm_cli.solvers.batches, "MOST_READ", 20)


def same(one: Any, other: Any, where: str = "") -> None:
    """Equal to 1e-5; digests and texts to the letter."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one.keys() - {"output", "options", "probe", "history", "table"}:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for at, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}[{at}]")
    elif isinstance(one, float) and isinstance(other, float):
        assert math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7), (where, one, other)
    else:
        assert one == other, where


def everything(world: Any, name: str, features: Path, **options: Any) -> list[Any]:
    pairs, made = world.folder / "pairs.h5", world.folder / name
    _, report = world.fit(features, f"{name}.st", pairs=pairs, rank="0:3", weight_decay="0.01,0.1", **options)
    probe = read_probe(world.folder / f"{name}.st")
    known = {"weight": probe.weight.tolist(), "bias": probe.bias.tolist(), "data": probe.meta["data"]}
    found = [report, known, world.eval(features, f"{name}.st")]
    found.append(world.bound(features, f"{name}.st", pairs=pairs, train="split=train", ranks="0:2"))
    for batch in (0, 32) if not options else ():
        swept = SweepOptions(
            features=features,
            pairs=pairs,
            output=made.with_suffix(".json"),
            methods="erm,ncm,irm,fish,leace",
            envs="domain",
            erase="domain",
            trials=2,
            epochs=2,
            batch_size=batch,
            folds=2,
            seeds=1,
        )
        found.append(sweep(swept))
    return found


@pytest.mark.parametrize("task", [pytest.param("classification", marks=pytest.mark.slow), "regression"])
def test_commands_say_the_same_of_a_store_in_blocks(
    world: Any, request: pytest.FixtureRequest, task: str
) -> None:
    values = world.X @ np.linspace(-1, 1, world.X.shape[1])
    features = world.store(**({"label": values} if task == "regression" else {}))
    world.pairs(features, members=MEMBERS)
    world.oracle(features)
    scaling = {"classification": {}, "regression": {"task": "regression", "scaling": "standard"}}[task]
    whole = everything(world, "whole", features, **scaling)
    request.getfixturevalue("in_blocks")
    with FeatureStore(features) as store:
        assert isinstance(store.rows_of(np.arange(90)), RowBlocks)
    same(whole, everything(world, "blocks", features, **scaling))


def test_rows_in_blocks_are_the_stores_rows(world: Any, in_blocks: None) -> None:
    rng = np.random.default_rng(0)
    with FeatureStore(world.store()) as store:
        rows = rng.permutation(store.rows)[:50]
        expected, found = store.read(rows), store.rows_of(rows)
    # The file is closed by now.
    assert isinstance(found, RowBlocks) and np.array_equal(found[:], expected)
    for some in (rng.integers(50, size=200), np.array([], np.int64)):
        assert np.array_equal(found[some], expected[some])
    mask = np.arange(50) % 3 == 0
    both = np.concatenate([expected[mask], expected])
    assert np.array_equal(joined(found.where(mask), found)[3:30], both[3:30])


@pytest.mark.parametrize(
    "layout", [{"chunks": (7, 10)}, {"chunks": (9, 5)}, {"chunks": (9, 10), "shuffle": True}]
)
def test_rows_are_read_from_the_file_where_they_lie_one_after_another(tmp_path: Path, layout: Any) -> None:
    values = np.random.default_rng(0).normal(size=(50, 10)).astype(np.float16)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=values, **layout)
    with h5py.File(tmp_path / "a.h5") as file:
        assert RowReader.can(file["a"]) == (layout["chunks"][0] == 7)
        reader = RowReader(tmp_path / "a.h5", file["a"])
    for rows in ([49, 0, 49], [*range(3, 40)], [5, 4, 7, 6], [7]) if layout["chunks"][0] == 7 else ():
        assert np.array_equal(reader(np.array(rows)), values[rows])


def test_a_damaged_block_is_told_before_anything_is_fitted(world: Any, in_blocks: None) -> None:
    path = world.store()
    raw = bytearray(path.read_bytes())
    at = raw.index(world.X[50].tobytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with FeatureStore(path) as store, pytest.raises(InputError, match="a damaged file"):
        store.rows_of(np.arange(90))


def test_the_memory_budget_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCM_MEMORY_MIB", "lots")
    with pytest.raises(UsageError, match="not a number of MiB"):
        in_memory(np.zeros((2, 2)))


def test_texts_are_a_tuple_of_them() -> None:
    words = ("b", "", "é\udcff", "a", "b", "")
    texts = Texts(np.array([word.encode("utf-8", "surrogateescape") for word in words], dtype="S"))
    assert texts == words and texts[2] == words[2] and texts[1:4] == words[1:4] and texts.repeat
    assert texts.positions(["b", "é\udcff", "\ud800", "none such", ""]).tolist() == [0, 2, -1, -1, 1]
    assert texts.same().tolist() == [0, 1, 2, 3, 0, 5] and not texts[:4].repeat
