"""Pair stores, probes and results: what is written comes back, and what contradicts itself isn't written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ncm_cli.errors import InputError
from ncm_cli.store.pairs import read_pairs, write_pairs
from ncm_cli.store.probe import read_probe, write_probe
from ncm_cli.store.results import jsonable, read_result, write_result


def test_pairs_round_trip(pairs_path: Path, samples: SimpleNamespace) -> None:
    given, found = samples.pair_store(), read_pairs(pairs_path)
    for field in dataclasses.fields(given):
        a, b = getattr(given, field.name), getattr(found, field.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        elif field.name != "created":
            assert a == b
    assert (found.pairs, found.dim, found.rank) == (12, 6, 6)
    assert found.content_sha256 == given.content_sha256


def test_pairs_without_a_spectrum(tmp_path: Path, samples: SimpleNamespace) -> None:
    # All pairs identical, or all held out: rank 0.
    given = dataclasses.replace(samples.pair_store(), singular_values=np.zeros(0), basis=np.zeros((6, 0)))
    write_pairs(tmp_path / "p.h5", given)
    assert read_pairs(tmp_path / "p.h5").basis.shape == (6, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": np.zeros((6, 12), np.float32)}, "delta isn't"),
        ({"delta": np.zeros((12, 6), np.float32)}, "another shape"),
        ({"holdout": np.zeros(3, bool)}, "another shape"),
        ({"id_b": ("x",)}, "another length"),
        ({"basis": np.full((6, 6), np.nan)}, "finite"),
        ({"features_a": np.full((12, 6), np.inf, np.float32)}, "finite"),
        ({"fingerprint": "0"}, "another encoder"),
    ],
)
def test_pairs_that_contradict_themselves(
    tmp_path: Path, samples: SimpleNamespace, change: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        write_pairs(tmp_path / "p.h5", dataclasses.replace(samples.pair_store(), **change))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("classes", [("cat", "dog"), ("a", "b", "é"), ()])
@pytest.mark.parametrize("rank", [0, 2])
def test_probe_round_trip(
    tmp_path: Path, samples: SimpleNamespace, classes: tuple[str, ...], rank: int
) -> None:
    path = tmp_path / "p.safetensors"
    given = samples.make_probe(
        classes, rank=rank, selection={"rule": "bound", "path": [{"risk": float("nan")}]}
    )
    given = dataclasses.replace(given, mean=np.ones(6), scale=np.full(6, 2.0))
    write_probe(path, given)
    found = read_probe(path)
    for name, values in given.tensors().items():
        np.testing.assert_array_equal(found.tensors()[name], values)
    assert (found.classes, found.task, found.target) == (given.classes, given.task, given.target)
    assert found.meta == given.meta | {"selection": {"rule": "bound", "path": [{"risk": None}]}}
    assert found.sha256 == given.sha256
    assert (found.dim, found.rank) == (6, rank)


def test_a_probe_needs_no_ncm_to_be_used(probe_path: Path, samples: SimpleNamespace) -> None:
    probe = samples.make_probe()
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
        ({"weight": np.ones((1, 5))}, "another shape"),
        ({"weight": np.ones(6)}, "another shape"),
        ({"bias": np.zeros(2)}, "another shape"),
        ({"bias": np.array([np.nan])}, "finite"),
        ({"classes": ("a", "b", "c")}, "classes"),
        ({"classes": ("a", "a")}, "classes"),
        ({"task": "ranking"}, "unknown task"),
        ({"mean": np.zeros(5)}, "another shape"),
        ({"meta": {"encoder": {"kind": "x"}, "fingerprint": "0"}}, "another encoder"),
    ],
)
def test_probes_that_contradict_themselves(
    tmp_path: Path, samples: SimpleNamespace, change: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        write_probe(tmp_path / "p.safetensors", dataclasses.replace(samples.make_probe(), **change))
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
    assert (found["ncm_format"], found["ncm_format_version"], found["kind"]) == ("ncm-result", 1, "eval")
    assert list(found)[:5] == ["ncm_format", "ncm_format_version", "kind", "ncm_version", "created"]
    with pytest.raises(InputError, match="another kind"):
        read_result(path, kind="bound")
    with pytest.raises(ValueError, match="kind"):
        write_result(path, "eval", {"kind": 1})
    path.write_text(json.dumps({**found, "ncm_format_version": 2}))
    with pytest.raises(InputError, match="format version"):
        read_result(path)


def test_json_forms() -> None:
    assert jsonable((np.float32(0.5), {"b", "a"}, np.bool_(True), None)) == [0.5, ["a", "b"], True, None]
    with pytest.raises(TypeError, match="object has no JSON form"):
        jsonable(object())
