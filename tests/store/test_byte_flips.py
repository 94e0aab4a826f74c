"""One wrong byte in a file is either without effect or refused; it never changes an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import read_probe


def flips(path: Path, answer: Callable[[Path], Any], count: int, seed: int) -> dict[str, int]:
    """How many of ``count`` random changes of one byte had no effect, were refused, or changed the answer."""
    rng = np.random.default_rng(seed)
    good, expected = path.read_bytes(), answer(path)
    found = {"same": 0, "refused": 0, "changed": 0}
    for position in rng.integers(0, len(good), count).tolist():
        bad = bytearray(good)
        bad[position] ^= int(rng.integers(1, 256))
        path.write_bytes(bad)
        try:
            outcome = "same" if answer(path) == expected else "changed"
        except InputError as error:
            assert "\n" not in error.what + str(error.found)
            outcome = "refused"
        found[outcome] += 1
    path.write_bytes(good)
    return found


def pairs_answer(path: Path) -> Any:
    store = read_pairs(path)
    arrays = (
        store.features_a,
        store.features_b,
        store.delta,
        store.holdout,
        store.singular_values,
        store.basis,
    )
    texts = (store.id_a, store.id_b, store.label_a, store.label_b, store.strategy, store.created)
    facts = (
        store.options,
        store.encoder,
        store.fingerprint,
        store.sources,
        store.diagnostics,
        store.ncm_version,
    )
    return [array.tobytes() for array in arrays], texts, facts


def probe_answer(path: Path) -> Any:
    probe = read_probe(path)
    tensors = {name: (values.shape, values.tobytes()) for name, values in probe.tensors().items()}
    return tensors, probe.classes, probe.task, probe.target, probe.meta, probe.created, probe.ncm_version


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_feature_store(write_store: Callable[..., Path], samples: SimpleNamespace, count: int) -> None:
    found = flips(write_store(), samples.everything, count, seed=count)
    assert found["changed"] == 0
    assert found["refused"] > count / 2


def test_feature_store_of_many_blocks(write_store: Callable[..., Path], samples: SimpleNamespace) -> None:
    features = np.random.default_rng(0).standard_normal((9, 100_000)).astype(np.float32)
    found = flips(
        write_store(features=features, columns=[], label_column=None), samples.everything, 15, seed=1
    )
    assert found["changed"] == 0
    assert found["refused"] > 10


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_pair_store(pairs_path: Path, count: int) -> None:
    found = flips(pairs_path, pairs_answer, count, seed=count)
    assert found["changed"] == 0
    assert found["refused"] > count / 2


def test_probe(probe_path: Path) -> None:
    found = flips(probe_path, probe_answer, 500, seed=3)
    assert found["changed"] == 0
    assert found["refused"] > 450


@pytest.mark.slow
def test_old_hdf5_without_checksums(
    write_store: Callable[..., Path], samples: SimpleNamespace, tmp_path: Path
) -> None:
    # What a program of another author makes of our arrays: no checksums of HDF5's, text of variable length.
    old = tmp_path / "old.h5"
    with h5py.File(write_store()) as ours, h5py.File(old, "w", libver="earliest") as file:
        for name in ours:
            file.create_group("columns") if name == "columns" else None
            ours.copy(name, file) if name != "columns" else None
        for name in ours["columns"]:
            ours.copy(f"columns/{name}", file["columns"])
        for name, value in ours.attrs.items():
            file.attrs[name] = value.decode() if isinstance(value, bytes) else value
    found = flips(old, samples.everything, 60, seed=4)
    assert found["changed"] == 0
    assert found["refused"] > 20


def test_digests_alone_detect_changed_features(
    write_store: Callable[..., Path], samples: SimpleNamespace
) -> None:
    # A program that rewrites values also rewrites HDF5's own checksums.
    path = write_store()
    with h5py.File(path, "r+") as file:
        file["features"][3, 2] += 1
    with pytest.raises(InputError, match="a damaged file") as error:
        samples.everything(path)
    assert "features of rows 0 to 39" in str(error.value)


@pytest.mark.parametrize(
    "name", ["id", "columns/label/codes", "columns/place/categories", "path", "failed/reason"]
)
def test_digests_alone_detect_changed_rows(
    write_store: Callable[..., Path], samples: SimpleNamespace, name: str
) -> None:
    path = write_store()
    with h5py.File(path, "r+") as file:
        value = file[name][0]
        file[name][0] = b"x" if file[name].dtype.kind == "S" else (value + 1) % 2
    with pytest.raises(InputError, match="a damaged file") as error:
        samples.everything(path)
    assert f"{name} doesn't match its digest" in str(error.value)
