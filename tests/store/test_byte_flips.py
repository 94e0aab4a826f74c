"""One wrong byte in a file is either without effect or refused; it never changes an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ncm_cli.baselines.choice import SweepTable, read_sweep, write_sweep
from ncm_cli.errors import InputError
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.files import read_result, write_result
from ncm_cli.store.journal import Journal, journal_folder
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import read_probe

from .conftest import everything


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
        store.holdout,
        store.singular_values,
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


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_feature_store(write_store: Callable[..., Path], count: int) -> None:
    found = flips(write_store(), everything, count, seed=count)
    assert found["changed"] == 0
    assert found["refused"] > count / 2


@pytest.mark.slow
def test_feature_store_of_many_blocks(write_store: Callable[..., Path]) -> None:
    features = np.random.default_rng(0).standard_normal((9, 100_000)).astype(np.float32)
    found = flips(write_store(features=features, columns=[], label_column=None), everything, 15, seed=1)
    assert found["changed"] == 0
    assert found["refused"] > 10


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_pair_store(pairs_path: Path, count: int) -> None:
    found = flips(pairs_path, pairs_answer, count, seed=count)
    assert found["changed"] == 0
    assert found["refused"] > count / 2


def test_probe(probe_path: Path) -> None:
    found = flips(probe_path, probe_answer, 500, seed=3)
    assert found["changed"] == 0
    assert found["refused"] > 450


def sweep_table() -> SweepTable:
    rng = np.random.default_rng(0)
    return SweepTable(
        method=("erm", "ncm+upweight", "irm"),
        trial=np.arange(3),
        seed=np.zeros(3, np.int64),
        hyper={"lr": rng.random(3)},
        diverged=np.array([False, True, False]),
        epochs=np.arange(1, 5),
        metrics={"val_accuracy": rng.random((3, 4)), "test_accuracy": rng.random((3, 4))},
        options={"methods": "erm,irm"},
    )


def sweep_answer(path: Path) -> Any:
    table = read_sweep(path)
    arrays = (table.trial, table.seed, table.diverged, table.epochs, *table.hyper.values())
    metrics = {name: values.tobytes() for name, values in table.metrics.items()}
    return table.method, [array.tobytes() for array in arrays], list(table.hyper), metrics, table.options


@pytest.mark.slow
def test_table_of_a_sweep(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s.h5", sweep_table())
    found = flips(tmp_path / "s.h5", sweep_answer, 60, seed=5)
    assert found["changed"] == 0
    assert found["refused"] > 30


@pytest.mark.parametrize(
    "kind", ["eval", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bound", "sweep", "run"))]
)
def test_result(tmp_path: Path, kind: str) -> None:
    pick = {"method": "erm", "rule": "in-domain", "trial": 3, "hyper_parameters": {"lr": 0.1}}
    body = {
        "n": 1000,
        "accuracy": 0.8125,
        "groups": [{"group": {"label": "bird", "place": "é"}, "n": 40, "accuracy": 0.5}],
        "rows": {"sweep": [{**pick, "metrics": {"val_accuracy": 1 / 3}}], "run": []}.get(kind),
        "probe": {"path": "probe.safetensors", "sha256": "ab" * 32, "rank": 8},
    }
    write_result(tmp_path / "r.json", kind, body)
    found = flips(tmp_path / "r.json", read_result, 400, seed=6)
    assert found["changed"] == 0
    # Blanks between the parts of a document may be of several kinds.
    assert found["refused"] > 380


def test_journal(tmp_path: Path) -> None:
    rows = [ImageFile(f"{i} é", f"/{i}.png", i, 10**18 + i, f"{i:064x}") for i in range(20)]
    with Journal.open(tmp_path / "f.h5", {"model": "pixels:8"}) as journal:
        journal.append(rows, np.random.default_rng(0).random((20, 5)))
    folder = journal_folder(tmp_path / "f.h5")
    whole = (folder / "rows.log").read_bytes()

    def answer(path: Path) -> Any:
        with Journal.open(tmp_path / "f.h5", {"model": "pixels:8"}) as journal:
            kept = {row.id: journal.take([row.id]).tobytes() for row in rows if journal.lookup(row.id)}
            known = all(journal.lookup(id) in rows for id in kept)
            count = journal.damaged
        (folder / "rows.log").write_bytes(whole)
        if count:
            raise InputError(f"{count} damaged")
        return kept if known and len(kept) == len(rows) else len(kept)

    assert flips(folder / "journal.json", answer, 200, seed=7)["changed"] == 0
    found = flips(folder / "rows.log", answer, 200, seed=8)
    # The last row's length makes it look half-written: it is made anew like one.
    assert found["refused"] >= 198 and found["same"] == 0


def test_chunk_of_a_sweep(tmp_path: Path) -> None:
    arrays = {"history": np.random.default_rng(0).random((3, 4)), "diverged": np.zeros(3, bool)}
    with Journal.open(tmp_path / "s.csv", {"methods": "erm"}) as journal:
        journal.put("0", arrays)
    log = journal.folder / "rows.log"
    whole = log.read_bytes()

    def answer(path: Path) -> Any:
        with Journal.open(tmp_path / "s.csv", {"methods": "erm"}) as journal:
            found = journal.get("0")
        log.write_bytes(whole)
        if found is None:
            raise InputError("made anew")
        return {name: values.tobytes() for name, values in found.items()}

    assert flips(log, answer, 200, seed=9) == {"same": 0, "refused": 200, "changed": 0}


@pytest.mark.slow
def test_old_hdf5_without_checksums(write_store: Callable[..., Path], tmp_path: Path) -> None:
    # What a program of another author makes of our arrays: no checksums of HDF5's.
    old = tmp_path / "old.h5"
    with h5py.File(write_store()) as ours, h5py.File(old, "w", libver="earliest") as file:
        for name in ours:
            file.create_group("columns") if name == "columns" else None
            ours.copy(name, file) if name != "columns" else None
        for name in ours["columns"]:
            ours.copy(f"columns/{name}", file["columns"])
        for name, value in ours.attrs.items():
            file.attrs[name] = value
    found = flips(old, everything, 60, seed=4)
    assert found["changed"] == 0
    assert found["refused"] > 20


def test_digests_alone_detect_changed_features(write_store: Callable[..., Path]) -> None:
    # A program that rewrites values also rewrites HDF5's own checksums.
    path = write_store()
    with h5py.File(path, "r+") as file:
        file["features"][3, 2] += 1
    with pytest.raises(InputError, match="a damaged file") as error:
        everything(path)
    assert "features of rows 0 to 39" in str(error.value)


@pytest.mark.parametrize(
    "name", ["id", "columns/label/codes", "columns/place/categories", "path", "failed/reason"]
)
def test_digests_alone_detect_changed_rows(write_store: Callable[..., Path], name: str) -> None:
    path = write_store()
    with h5py.File(path, "r+") as file:
        value = file[name][0]
        file[name][0] = b"x" if file[name].dtype.kind == "S" else (value + 1) % 2
    with pytest.raises(InputError, match="a damaged file") as error:
        everything(path)
    assert f"{name} doesn't match its digest" in str(error.value)
