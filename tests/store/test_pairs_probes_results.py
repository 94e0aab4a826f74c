"""Pair stores, probes and results: what is written comes back, and what contradicts itself isn't written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ncm_cli.baselines.choice import SweepTable, write_sweep
from ncm_cli.errors import InputError, MismatchError
from ncm_cli.main import run
from ncm_cli.results.lines import read_sources
from ncm_cli.store.files import HEADER, jsonable, read_result, write_result
from ncm_cli.store.hdf5 import writing
from ncm_cli.store.pairs import read_pairs, write_pairs
from ncm_cli.store.probe import read_probe, write_probe

from .conftest import make_probe, pair_store

LOW = np.full((12, 6), -3e38, np.float32)


def test_pairs_round_trip(pairs_path: Path) -> None:
    given, found = pair_store(), read_pairs(pairs_path)
    for field in dataclasses.fields(given):
        a, b = getattr(given, field.name), getattr(found, field.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        elif field.name != "created":
            assert a == b
    assert (found.pairs, found.dim, found.rank) == (12, 6, 6)
    assert found.content_sha256 == given.content_sha256


def test_pairs_without_a_spectrum(tmp_path: Path) -> None:
    # All pairs identical, or all held out: rank 0.
    given = dataclasses.replace(pair_store(), singular_values=np.zeros(0))
    write_pairs(tmp_path / "p.h5", given)
    assert read_pairs(tmp_path / "p.h5").rank == 0


def test_pairs_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    # They also held the differences and their left singular vectors.
    given, path = pair_store(), tmp_path / "p.h5"
    with writing(path, "ncm-pairs", 1) as writer:
        for name in ("features_a", "features_b", "delta", "holdout", "singular_values"):
            writer.array(name, getattr(given, name))
        writer.array("basis", np.eye(6))
        for name in ("id_a", "id_b", "label_a", "label_b"):
            writer.text(name, getattr(given, name), what=name)
        for name in ("options", "sources", "diagnostics"):
            writer.json(name, getattr(given, name))
        writer.attrs |= {
            "strategy": given.strategy,
            "encoder": json.dumps(given.encoder),
            "encoder_fingerprint": given.fingerprint,
            "content_sha256": given.content_sha256,
        }
    found = read_pairs(path)
    assert found.content_sha256 == given.content_sha256
    np.testing.assert_array_equal(found.delta, (given.features_a - given.features_b).T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features_b": np.zeros((6, 12), np.float32)}, "wrong shape"),
        ({"holdout": np.zeros(3, bool)}, "wrong shape"),
        ({"id_b": ("x",)}, "wrong length"),
        ({"singular_values": np.full(6, np.nan)}, "finite"),
        ({"features_a": np.full((12, 6), np.inf, np.float32)}, "features_a that aren't finite"),
        ({"features_a": np.full((12, 6), 3e38, np.float32), "features_b": LOW}, "delta that aren't finite"),
        ({"fingerprint": "0"}, "another encoder"),
    ],
)
def test_pairs_that_contradict_themselves(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        write_pairs(tmp_path / "p.h5", dataclasses.replace(pair_store(), **change))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"same": 5}}, "options.same is 5, not text"),
        ({"sources": [{"path": None}]}, r"sources\.0\.path is None, not text"),
        ({"sources": {"path": "f.h5"}}, "sources is {'path': 'f.h5'}, not a list"),
        ({"diagnostics": {"suspects": "ab"}}, "diagnostics.suspects is 'ab', not a list"),
        ({"diagnostics": {"suspects": [{"id_a": "a", "id_b": "b"}]}}, "suspects.0.residual is 'nothing'"),
        ({"diagnostics": {"repeated": [1]}}, "diagnostics.repeated is"),
        ({"diagnostics": {"matching": {"x": 10**400}}}, "diagnostics.matching.x is 1"),
    ],
)
def test_what_a_pair_store_says_of_itself_has_its_types(tmp_path: Path, change: dict, message: str) -> None:
    write_pairs(tmp_path / "p.h5", dataclasses.replace(pair_store(), **change))
    with pytest.raises(InputError, match=message):
        read_pairs(tmp_path / "p.h5")


@pytest.mark.parametrize("classes", [("cat", "dog"), ("a", "b", "é"), ()])
@pytest.mark.parametrize("rank", [0, 2])
def test_probe_round_trip(tmp_path: Path, classes: tuple[str, ...], rank: int) -> None:
    path = tmp_path / "p.safetensors"
    one = {"rank": rank, "weight_decay": 0.1, "converged": True, "risk": float("nan")}
    selection = {"rule": "bound", "chosen": 0, "path": [one]}
    given = make_probe(classes, rank=rank, selection=selection, scaling={"kind": "standard"})
    given = dataclasses.replace(given, mean=np.ones(6), scale=np.full(6, 2.0))
    write_probe(path, given)
    found = read_probe(path)
    for name, values in given.tensors().items():
        np.testing.assert_array_equal(found.tensors()[name], values)
    assert (found.classes, found.task, found.target) == (given.classes, given.task, given.target)
    assert found.meta == given.meta | {"selection": selection | {"path": [one | {"risk": None}]}}
    assert found.sha256 == given.sha256
    assert (found.dim, found.rank) == (6, rank)


def test_a_probe_needs_no_ncm_to_be_used(probe_path: Path) -> None:
    probe = make_probe()
    X = np.random.default_rng(0).standard_normal((5, 6))

    tensors = load_file(probe_path)
    rows = 10 * X / np.linalg.norm(X, axis=1, keepdims=True)
    logits = rows @ tensors["weight"].T + tensors["bias"]

    expected = (10 * X / np.linalg.norm(X, axis=1, keepdims=True)) @ probe.weight.T + probe.bias
    np.testing.assert_allclose(logits, expected)
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    same = torch.from_numpy(rows) @ load_torch(probe_path)["weight"].T + load_torch(probe_path)["bias"]
    np.testing.assert_allclose(same.numpy(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.ones((1, 6))}, "isn't folded into"),
        ({"weight": np.ones((1, 5))}, "wrong shape"),
        ({"weight": np.ones(6)}, "wrong shape"),
        ({"bias": np.zeros(2)}, "wrong shape"),
        ({"bias": np.array([np.nan])}, "finite"),
        ({"classes": ("a", "b", "c")}, "classes"),
        ({"classes": ("a", "a")}, "classes"),
        ({"task": "ranking"}, "unknown task"),
        ({"mean": np.zeros(5)}, "wrong shape"),
        ({"meta": {"encoder": {"kind": "x"}, "fingerprint": "0"}}, "another encoder"),
    ],
)
def test_probes_that_contradict_themselves(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        write_probe(tmp_path / "p.safetensors", dataclasses.replace(make_probe(), **change))
    assert list(tmp_path.iterdir()) == []


def test_a_probe_whose_numbers_were_changed_is_refused(probe_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(probe_path, framework="numpy") as file:
        metadata = file.metadata()
    tensors = load_file(probe_path)
    tensors["bias"] = tensors["bias"] + 1
    save_file(tensors, probe_path, metadata=metadata)
    with pytest.raises(InputError, match="damaged"):
        read_probe(probe_path)
    save_file(tensors, probe_path, metadata=metadata | {"ncm_format_version": "2"})
    with pytest.raises(InputError, match="format version"):
        read_probe(probe_path)


def test_results_keep_full_precision_and_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    third = float(np.float64(1) / 3)
    body = {
        "n": np.int64(3),
        "accuracy": third,
        "odd": [np.nan, np.inf, -np.inf],
        "array": np.eye(2),
        "path": path,
    }
    write_result(path, "eval", body)
    found = read_result(path, kind="eval")
    assert found["accuracy"] == third
    assert found["odd"] == [None, None, None]
    assert found["array"] == [[1.0, 0.0], [0.0, 1.0]]
    assert (found["ncm_format"], found["ncm_format_version"], found["kind"]) == ("ncm-result", 2, "eval")
    assert tuple(found)[:6] == HEADER
    with pytest.raises(InputError, match="another kind"):
        read_result(path, kind="bound")
    with pytest.raises(ValueError, match="kind"):
        write_result(path, "eval", {"kind": 1})
    path.write_text(json.dumps({**found, "ncm_format_version": 3}))
    with pytest.raises(InputError, match="format version"):
        read_result(path)


def _changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"accuracy": 0.9', '"accuracy": 0.99'),
        ('"n": 100', '"n": 101'),
        ('"note": "bird"', '"note": "bied"'),
        ('"note"', '"nota"'),
        ('"ncm_format_version": 2', '"ncm_format_version": 1'),
        ('"content_sha256"', '"content_sha255"'),
        ('"kind": "eval"', '"kind": "bound"'),
    ],
)
def test_a_result_that_was_edited_by_hand_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "r.json"
    write_result(path, "eval", {"n": 100, "accuracy": 0.9, "note": "bird"})
    _changed(path, old, new)
    with pytest.raises(InputError, match="a result that was changed after it was written") as error:
        read_result(path)
    assert error.value.where == path
    assert "make it again" in str(error.value.fix)


def test_a_result_that_another_program_wrote_in_another_form_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    body = {"n": 3, "mse": 1.0, "r2": 1e-7, "log_loss": 1e22, "note": "é\udce9", "accuracy": None}
    write_result(path, "eval", body)
    found = read_result(path)
    numbers = {"mse": 1, "r2": 0.0000001, "log_loss": 10**22}
    path.write_text(json.dumps(dict(reversed((found | numbers).items())), separators=(",", ":")))
    assert read_result(path) == found


@pytest.mark.parametrize("version", [1, 2])
def test_a_result_without_a_digest_is_refused(
    tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"ncm_format": "ncm-result", "ncm_format_version": version, "kind": "eval"}))
    for command in (["report", str(path)], ["info", str(path), "--verify"]):
        assert run(command) == 3
        assert "no command of ncm since 0.1.0 wrote it" in " ".join(capsys.readouterr().err.split())


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"ncm_format": "ncm-result", "mse": 1e400}')
    with pytest.raises(InputError, match="not a JSON file") as error:
        read_result(path)
    assert error.value.found == "1e400 is not JSON"


@pytest.mark.parametrize("history", ["", "../x.h5", "."])
def test_a_foreign_sweep_without_its_table_is_reported(tmp_path: Path, history: str) -> None:
    path = tmp_path / "r.json"
    pick = {"method": "erm", "rule": "in-domain", "trial": 0, "hyper_parameters": {"lr": 0.1}, "metrics": {}}
    write_result(path, "sweep", {"rows": [pick], "history": history})
    sources = read_sources([path])
    assert [found.path for found in sources.sweeps] == [path]
    assert list(sources.histories()) == []


def test_a_sweep_and_the_table_of_another_are_not_taken_together(tmp_path: Path) -> None:
    metrics = {"val_accuracy": np.zeros((0, 1))}
    none = np.zeros(0, np.int64)
    table = SweepTable(
        method=(),
        trial=none,
        seed=none,
        hyper={},
        diverged=none.astype(bool),
        epochs=np.ones(1, np.int64),
        metrics=metrics,
        options={"lr": 0.1},
    )
    write_sweep(tmp_path / "r.h5", table)
    for lr in (0.1, 0.2):
        write_result(tmp_path / "r.json", "sweep", {"rows": [], "options": {"lr": lr}, "history": "r.h5"})
        histories = read_sources([tmp_path / "r.json"]).histories()
        if lr == 0.1:
            assert next(histories)[1].options == {"lr": 0.1}
        else:
            with pytest.raises(MismatchError, match="of different sweeps"):
                next(histories)


def test_json_forms() -> None:
    assert jsonable((np.float32(0.5), {"b", "a"}, np.bool_(True), None)) == [0.5, ["a", "b"], True, None]
    with pytest.raises(TypeError, match="object has no JSON form"):
        jsonable(object())
