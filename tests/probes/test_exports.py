"""Every form that a probe is exported in answers as ``ncm predict`` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.main import run
from ncm_cli.store.features import FeatureStore
from tests.world import rows_of, write_store

TASKS = {"two": ("cat", "dog"), "three": ("cat", "dog", "owl"), "regression": ()}
SCALINGS = ("none", "norm", "standard")
ROWS = 240


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the last feature the mean is a million deviations: float32 keeps sixteen steps of one."""
    folder = tmp_path_factory.mktemp("exports")
    rng = np.random.default_rng(0)
    label = rng.integers(3, size=ROWS)
    X = rng.normal(size=(ROWS, 6)) * [1, 10, 0.1, 1, 1, 1] + label[:, None] * [1, 0, 0.1, 0, 0, 0]
    place = rng.integers(2, size=ROWS)
    X[:, 3] += 3 * place
    X[:, 5] = 1000 + 0.001 * (X[:, 5] + 2 * label)
    columns = {
        "three": [TASKS["three"][code] for code in label],
        "two": [TASKS["two"][min(code, 1)] for code in label],
        "place": [("land", "water")[code] for code in place],
        "split": [("train", "val")[code] for code in rng.integers(2, size=ROWS)],
        "regression": label + rng.normal(size=ROWS),
    }
    write_store(folder / "f.h5", X, columns, label_column="three")
    line = f"pairs --match random --same three --across place -f {folder}/f.h5 -o {folder}/p.h5 --quiet"
    assert run(line.split()) == 0
    return folder / "f.h5"


@pytest.fixture(params=SCALINGS)
def scaling(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fitted(store: Path, scaling: str, task: str, tmp_path: Path) -> Path:
    """A probe with these settings."""
    kind = "classification" if TASKS[task] else "regression"
    line = f"fit -f {store} -o {tmp_path}/p --target {task} --task {kind} --scaling {scaling} --quiet"
    assert (
        run([*line.split(), "--rank", "2", "--pairs", f"{store.parent}/p.h5", "--weight-decay", "1e-4"]) == 0
    )
    return tmp_path / "p"


def _features(store: Path) -> np.ndarray:
    with FeatureStore(store) as opened:
        return opened.read()


def _predicted(probe: Path, store: Path, task: str) -> np.ndarray:
    """(n, classes) probabilities, or (n,) values, as ``ncm predict`` writes them."""
    output = probe.with_suffix(".csv")
    assert run(["predict", str(probe), str(store), "--probabilities", "-o", str(output), "--quiet"]) == 0
    rows = rows_of(output)
    names = [f"p_{name}" for name in TASKS[task]]
    return np.array([[float(row[name]) for name in names] if names else float(row["value"]) for row in rows])


def _exported(probe: Path, form: str) -> Path:
    output = probe.with_suffix(f".{form}")
    assert run(["info", str(probe), "--export", form, "-o", str(output), "--quiet"]) == 0
    return output


def test_scikit_learn(fitted: Path, store: Path, task: str) -> None:
    """py-why/EconML#420, mne-tools/mne-python#4333: the shapes are those of scikit-learn's own fit."""
    from sklearn.linear_model import LogisticRegression, Ridge

    X, expected = _features(store), _predicted(fitted, store, task)
    made = np.load(_exported(fitted, "sklearn"), allow_pickle=False)
    if made["normalize_rows"]:
        X = X / np.linalg.norm(X.astype(float), axis=1, keepdims=True)
    names = ("coef_", "intercept_", "classes_") if TASKS[task] else ("coef_", "intercept_")
    model = LogisticRegression() if TASKS[task] else Ridge()
    values = np.arange(ROWS) % max(len(TASKS[task]), 2)
    model.fit(np.random.default_rng(0).normal(size=X.shape), values)
    shapes = {name: np.shape(getattr(model, name)) for name in names}
    assert {name: made[name].shape for name in names} == shapes
    for name in names:
        setattr(model, name, made[name])
    found = model.predict_proba(X) if TASKS[task] else model.predict(X)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_numpy(fitted: Path, store: Path, task: str, scaling: str) -> None:
    made = np.load(_exported(fitted, "npz"), allow_pickle=False)
    X = _features(store).astype(np.float64)
    if scaling == "norm":
        X /= np.linalg.norm(X, axis=1, keepdims=True)
        X *= json.loads(str(made["meta"]))["scaling"]["factor"]
    elif scaling == "standard":
        X = (X - made["mean"]) / made["scale"]
    scores = X @ made["weight"].T + made["bias"]
    expected = _predicted(fitted, store, task)
    if not TASKS[task]:
        found = scores[:, 0]
    elif task == "two":
        found = np.hstack([1 / (1 + np.exp(scores)), 1 / (1 + np.exp(-scores))])
    else:
        found = np.exp(scores - scores.max(axis=1, keepdims=True))
        found /= found.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def _run_onnx(path: Path, X: np.ndarray) -> dict[str, Any]:
    import onnx

    try:
        from onnxruntime import InferenceSession
    except ImportError:
        from onnx.reference import ReferenceEvaluator as InferenceSession
    names = [one.name for one in onnx.load(path).graph.output]
    return dict(zip(names, InferenceSession(str(path)).run(names, {"features": X}), strict=True))


def test_onnx(fitted: Path, store: Path, task: str) -> None:
    """microsoft/onnxruntime#4883, #1720: float32 lost a feature whose mean is far above its deviation."""
    pytest.importorskip("onnx")
    X, expected = _features(store), _predicted(fitted, store, task)
    made = _run_onnx(_exported(fitted, "onnx"), X)
    found = made["probabilities"] if TASKS[task] else made["logits"][:, 0]
    assert {values.dtype for values in made.values()} == {np.dtype(np.float32)}
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
