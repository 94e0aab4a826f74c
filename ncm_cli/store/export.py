"""A probe in forms that other programs read without ncm. None of them is a pickle: unpickling runs code."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.atomic import write_bytes
from ncm_cli.store.probe import Probe
from ncm_cli.store.results import jsonable

_OPSET = 13
"""ONNX operator set: of 2020, read by every runtime in use."""


def export_npz(path: Path, probe: Probe) -> None:
    """The tensors and ``classes``, ``task``, ``target``, ``meta`` (JSON text), for ``numpy.load``."""
    arrays: dict[str, Any] = dict(probe.tensors())
    arrays |= {"classes": np.array(probe.classes, dtype=np.str_), "task": probe.task, "target": probe.target}
    arrays["meta"] = json.dumps(jsonable(probe.meta))
    _write_npz(path, arrays)


def export_sklearn(path: Path, probe: Probe) -> None:
    """Scikit-learn's fitted attributes: ``coef_`` (C, d), ``intercept_`` (C,), ``classes_``, as npz.

    The feature scaling is folded in, except dividing each row by its norm, which ``normalize_rows`` asks for.
    """
    weight, bias, normalize_rows = _folded(probe)
    arrays: dict[str, Any] = {"coef_": weight, "intercept_": bias, "normalize_rows": normalize_rows}
    if probe.classes:
        arrays["classes_"] = np.array(probe.classes, dtype=np.str_)
    _write_npz(path, arrays)


def export_onnx(path: Path, probe: Probe) -> None:
    """A graph from ``features`` float32 (n, d) to ``logits`` (n, C) and, for classes, ``probabilities``.

    Probabilities have a column a class. Raises `InputError` without the optional package ``onnx``.
    """
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        raise InputError(
            "the package onnx isn't installed", fix="pip install 'ncm-cli[onnx]', or --export npz"
        ) from None
    weight, bias, normalize_rows = _folded(probe)
    constants = {"weight": weight.T, "bias": bias, "tiny": np.array(np.finfo(np.float32).tiny)}
    nodes, rows = [], "features"
    if normalize_rows:
        nodes.append(helper.make_node("ReduceL2", [rows], ["norm"], axes=[1], keepdims=1))
        # A row of zeros stays one, as in ncm's own scaling.
        nodes.append(helper.make_node("Max", ["norm", "tiny"], ["positive_norm"]))
        nodes.append(helper.make_node("Div", [rows, "positive_norm"], ["unit_rows"]))
        rows = "unit_rows"
    nodes.append(helper.make_node("Gemm", [rows, "weight", "bias"], ["logits"]))
    width = len(probe.classes)
    if width == 2:
        nodes.append(helper.make_node("Neg", ["logits"], ["negative"]))
        nodes.append(helper.make_node("Sigmoid", ["negative"], ["first"]))
        nodes.append(helper.make_node("Sigmoid", ["logits"], ["second"]))
        nodes.append(helper.make_node("Concat", ["first", "second"], ["probabilities"], axis=1))
    elif width:
        nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
    outputs = {"logits": len(weight)} | ({"probabilities": width} if width else {})
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "ncm_probe",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", probe.dim])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
            for name, size in outputs.items()
        ],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in constants.items() if n in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], producer_name="ncm-cli")
    # Version 8 of the file format is read by runtimes since 2022; the newest may not be.
    model.ir_version = min(model.ir_version, 8)
    facts = {"classes": list(probe.classes), "task": probe.task, "target": probe.target}
    helper.set_model_props(model, {"ncm": json.dumps({**facts, "fingerprint": probe.fingerprint})})
    onnx.checker.check_model(model)
    write_bytes(path, model.SerializeToString())


def _folded(probe: Probe) -> tuple[np.ndarray, np.ndarray, bool]:
    """(weight, bias, whether rows are divided by their norm first), float64, for features as they are."""
    scaling = probe.meta.get("scaling") or {}
    kind, factor = scaling.get("kind", "none"), float(scaling.get("factor") or 1.0)
    if kind == "standard" and probe.mean is not None and probe.scale is not None:
        weight = probe.weight / probe.scale
        return weight, probe.bias - weight @ probe.mean, False
    return (probe.weight * factor, probe.bias, True) if kind == "norm" else (probe.weight, probe.bias, False)


def _write_npz(path: Path, arrays: dict[str, Any]) -> None:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    write_bytes(path, stream.getvalue())


EXPORTERS = {"npz": export_npz, "sklearn": export_sklearn, "onnx": export_onnx}
