"""The probe file: weights with the projection folded in, as safetensors with JSON metadata.

It is also written in forms that other programs read. None of them is a pickle: unpickling runs code.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError, listing
from ncm_cli.store.digests import array_digest, damaged, digest_of, fingerprint, parse_json, require_version
from ncm_cli.store.files import Shown, jsonable, now, one_line, require_file, write_bytes
from ncm_cli.store.outputs import MAX_HEADER_BYTES, refuse_other
from ncm_cli.store.probe_record import Record
from ncm_cli.store.schema import misfit
from ncm_cli.store.sniff import HEAD_BYTES, described, sniff

FORMAT = "ncm-probe"
VERSION = 1

TUNED = "ncm-finetuned"
"""The format of checkpoints of `ncm finetune`: the state of a timm model, ``representation`` wide."""

LARGEST_SKEW = 1e-6
"""Largest ‖weight @ basis‖ / ‖weight‖: rounding is far below it, an unfolded projection far above."""

_TENSORS = ("weight", "bias", "basis", "singular_values")
_SCALING = ("mean", "scale")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Probe(Shown):
    """A linear probe: logits = scaled(x) @ weight.T + bias, for features x of one encoder."""

    weight: np.ndarray
    """float64 (C, d), with ``weight @ basis == 0``; C = 1 for two classes and for regression."""
    bias: np.ndarray
    """float64 (C,)."""
    basis: np.ndarray
    """float64 (d, r): the directions removed; r = 0 is ERM."""
    singular_values: np.ndarray
    """float64 (m,): singular values of the pairs that made the basis; empty without pairs."""
    mean: np.ndarray | None = None
    """float64 (d,), with standard scaling only."""
    scale: np.ndarray | None = None
    """float64 (d,), with standard scaling only."""
    classes: tuple[str, ...]
    """In the order of the logits; with two, the single logit is that of the second. Empty for regression."""
    task: str
    """``classification`` or ``regression``."""
    target: str
    """The column that it predicts."""
    meta: dict[str, Any]
    """Encoder, fingerprint, scaling, method, hyper-parameters, selection, data: see the topic files."""
    created: str = ""
    ncm_version: str = __version__

    def __repr__(self) -> str:
        method = self.meta.get("method")
        return f"Probe(method={method!r}, rank={self.rank}, target={self.target!r}, dim={self.dim})"

    @property
    def dim(self) -> int:
        """d."""
        return int(self.weight.shape[1])

    @property
    def rank(self) -> int:
        """r."""
        return int(self.basis.shape[1])

    @property
    def encoder(self) -> dict[str, Any]:
        """The description of the encoder whose features it takes."""
        return dict(self.meta.get("encoder", {}))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of that encoder."""
        return str(self.meta.get("fingerprint", ""))

    def tensors(self) -> dict[str, np.ndarray]:
        """The arrays of the file, float64, by name."""
        names = (*_TENSORS, *(name for name in _SCALING if getattr(self, name) is not None))
        return {name: np.ascontiguousarray(getattr(self, name), dtype=np.float64) for name in names}

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 over all that decides predictions: equal for equal probes, whenever and wherever made."""
        return digest_of(
            {
                "tensors": {name: array_digest(values) for name, values in self.tensors().items()},
                "classes": list(self.classes),
                "task": self.task,
                "target": self.target,
                "scaling": jsonable(self.meta.get("scaling")),
                "fingerprint": self.fingerprint,
            }
        )


def record_ids(ids: Iterable[str]) -> str:
    """Ids as text for a probe's ``meta["rows"]``: eight bytes of each id's digest, in ascending order."""
    return base64.b64encode(np.sort(_keys(ids)).tobytes()).decode("ascii")


def seen_rows(probe: Probe, part: str, ids: Iterable[str]) -> np.ndarray:
    """bool (n,): ids among the rows that a probe was trained on (``train``) or chosen by (``val``)."""
    return np.isin(_keys(ids), _recorded((probe.meta.get("rows") or {}).get(part, "")))


def _recorded(text: str) -> np.ndarray:
    """The digests in a text by `record_ids`; raises `ValueError` for any other text."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<u8")


def _keys(ids: Iterable[str]) -> np.ndarray:
    digests = (hashlib.blake2b(id.encode("utf-8"), digest_size=8).digest() for id in ids)
    return np.frombuffer(b"".join(digests), dtype="<u8")


def write_probe(path: Path | str, probe: Probe) -> None:
    """Write a probe atomically.

    Raises `InputError` for shapes that don't agree, numbers that aren't finite, and weights that the
    projection isn't folded into; `UsageError` if the path is a file that isn't a probe.
    """
    from safetensors.numpy import save

    refuse_other(path, "probe")
    if fault := _fault(probe):
        what, found, expected = fault
        raise InputError(what, where=path, found=found, expected=expected)
    tensors, meta = probe.tensors(), jsonable(probe.meta)
    if wrong := misfit(meta, Record, "meta"):
        raise InputError(f"{wrong[0]} of the wrong type", where=path, found=wrong[1], expected=wrong[2])
    metadata = {
        "ncm_format": FORMAT,
        "ncm_format_version": str(VERSION),
        "ncm_version": __version__,
        "created": probe.created or now(),
        "task": probe.task,
        "target": probe.target,
        "classes": json.dumps(list(probe.classes)),
        "meta": json.dumps(meta, allow_nan=False),
    }
    metadata["sha256"] = _file_digest(tensors, metadata)
    write_bytes(path, save(tensors, metadata=metadata))


def read_probe(path: Path | str) -> Probe:
    """Read a probe and check all its bytes; raises `InputError` for another or a damaged file."""
    path = require_file(path)
    tensors, metadata = _read_safetensors(path)
    if metadata.get("ncm_format") != FORMAT:
        found = f"safetensors with ncm_format {metadata.get('ncm_format')!r}"
        raise InputError("not a probe", where=path, found=found, expected=FORMAT)
    version = metadata.get("ncm_format_version", "")
    require_version(int(version) if version.isdecimal() and len(version) < 9 else version, VERSION, path)
    if metadata.get("sha256") != _file_digest(tensors, metadata):
        raise damaged(path, "contents that don't match their sha256")
    try:
        texts: Any = {name: metadata[name] for name in ("task", "target", "created", "ncm_version")}
        classes, meta = parse_json(metadata["classes"]), parse_json(metadata["meta"])
        if other := [name for name, values in tensors.items() if values.dtype != np.float64]:
            raise TypeError(f"{other[0]} is {tensors[other[0]].dtype}, not float64")
        if wrong := misfit(classes, list[str], "classes") or misfit(meta, Record, "meta"):
            raise TypeError("{} is {!r:.200}, not {}".format(*wrong))
        "".join([texts["target"], *classes]).encode("utf-8")
        probe = Probe(**tensors, **texts, classes=tuple(classes), meta=meta)
        fault = _fault(probe)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise damaged(path, f"{type(error).__name__} {one_line(error)}") from error
    if fault:
        raise damaged(path, f"{fault[0]}: {fault[1]}")
    return probe


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if sniff(head) != "safetensors" or int.from_bytes(head[:8], "little") > MAX_HEADER_BYTES:
        found = f"not a safetensors file but {described(head)}"
        raise InputError("not a probe", where=path, found=found, expected=FORMAT)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            ours = metadata.get("ncm_format") == FORMAT
            return {name: file.get_tensor(name) for name in file.keys() if ours}, metadata  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, UnicodeError) as error:
        raise damaged(path, one_line(error)) from error


def safetensors_metadata(path: Path | str) -> dict[str, str]:
    """The metadata in a safetensors file by any program; empty if it can't be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError, UnicodeError):
        return {}


def _file_digest(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    arrays = {name: array_digest(values) for name, values in tensors.items()}
    texts = {name: text for name, text in metadata.items() if name != "sha256"}
    return digest_of({"tensors": arrays, "metadata": texts})


def _fault(probe: Probe) -> tuple[str, object, object] | None:
    """(what, found, expected) of a probe that contradicts itself; None for any other."""
    if np.ndim(probe.weight) != 2 or np.ndim(probe.basis) != 2 or 0 in np.shape(probe.weight):
        return "weights of the wrong shape", np.shape(probe.weight), "(C, d)"
    C, d = np.shape(probe.weight)
    shapes: dict[str, tuple[int, ...]] = {"bias": (C,), "basis": (d, np.shape(probe.basis)[1])}
    shapes["singular_values"] = (np.size(probe.singular_values),)
    shapes |= {name: (d,) for name in _SCALING if getattr(probe, name) is not None}
    for name, shape in shapes.items():
        if np.shape(getattr(probe, name)) != shape:
            return f"{name} of the wrong shape", np.shape(getattr(probe, name)), shape
    if probe.task not in ("classification", "regression"):
        return "an unknown task", probe.task, "classification or regression"
    wanted, have = 0 if probe.task == "regression" else 2 if C == 1 else C, len(set(probe.classes))
    if not len(probe.classes) == have == wanted or "" in probe.classes:
        found = f"{have} classes for {C} rows of weights"
        return "classes that don't fit the weights", found, f"{wanted} different ones"
    for name, values in probe.tensors().items():
        if not np.isfinite(values).all():
            return f"{name} that isn't finite", "NaN or an infinity", None
    if fault := _scaling_fault(probe):
        return fault
    skew = float(np.abs(probe.basis.T @ probe.basis - np.eye(probe.rank)).max(initial=0))
    if skew > LARGEST_SKEW:
        return "a basis that isn't orthonormal", f"|basis.T @ basis - 1| = {skew:.3g}", None
    left, size = float(np.linalg.norm(probe.weight @ probe.basis)), float(np.linalg.norm(probe.weight))
    if left > LARGEST_SKEW * size:
        expected = f"at most {LARGEST_SKEW:g} of ‖weight‖ = {size:.3g}"
        return "weights that the projection isn't folded into", f"‖weight @ basis‖ = {left:.3g}", expected
    selection = probe.meta.get("selection") or {}
    candidates = len(selection.get("path") or ())
    if candidates and not 0 <= selection.get("chosen", -1) < candidates:
        return "a chosen candidate that isn't in the path", selection.get("chosen"), f"one of {candidates}"
    for part, text in (probe.meta.get("rows") or {}).items():
        try:
            _recorded(text)
        except ValueError as error:
            return f"ids of the {part} rows that can't be read", error, None
    hyper = probe.meta.get("hyper_parameters") or {}
    fitted_on = (probe.meta.get("data") or {}).get("features") or {}
    again = "train_sha256" in fitted_on and "solver" in (probe.meta.get("options") or {})
    if again and not isinstance(hyper.get("weight_decay"), float | int):
        return "a fit without its weight decay", f"hyper-parameters {listing(hyper)}", None
    if fingerprint(probe.encoder) != probe.fingerprint:
        return "a fingerprint of another encoder", probe.fingerprint, None
    return None


def _scaling_fault(probe: Probe) -> tuple[str, object, object] | None:
    scaling = probe.meta.get("scaling") or {}
    kind, factor = scaling.get("kind", "none"), scaling.get("factor")
    if kind not in ("none", "norm", "standard"):
        return "a feature scaling that isn't known", kind, "none, norm or standard"
    present = [name for name in _SCALING if getattr(probe, name) is not None]
    if present != (list(_SCALING) if kind == "standard" else []):
        return f"the feature scaling {kind}", listing(present), "mean and scale, for standard alone"
    if probe.scale is not None and (probe.scale <= 0).any():
        return "a scale that isn't positive", float(probe.scale.min()), None
    if kind == "norm" and factor is not None and factor <= 0:
        return "a norm of the rows that isn't positive", factor, None
    return None


_OPSET = 13
"""The ONNX operator set of 2020, which every runtime in use reads."""


def export_npz(path: Path, probe: Probe) -> None:
    """The tensors and ``classes``, ``task``, ``target``, ``meta`` (JSON text), for ``numpy.load``."""
    arrays: dict[str, Any] = dict(probe.tensors())
    arrays |= {"classes": np.array(probe.classes, dtype=np.str_), "task": probe.task, "target": probe.target}
    arrays["meta"] = json.dumps(jsonable(probe.meta))
    _write_npz(path, arrays)


def export_sklearn(path: Path, probe: Probe) -> None:
    """Scikit-learn's fitted attributes, as npz.

    ``coef_`` (C, d), ``intercept_`` (C,) and ``classes_`` for a classifier; ``coef_`` (d,) and ``intercept_``
    () for a regression. The feature scaling is folded in, except dividing each row by its
    norm, which ``normalize_rows`` asks for.
    """
    weight, bias, normalize_rows = folded(probe)
    if probe.classes:
        arrays = {"coef_": weight, "intercept_": bias, "classes_": np.array(probe.classes, dtype=np.str_)}
    else:
        arrays = {"coef_": weight[0], "intercept_": bias[0]}
    _write_npz(path, {**arrays, "normalize_rows": normalize_rows})


def export_onnx(path: Path, probe: Probe) -> None:
    """A graph from ``features`` float32 (n, d) to ``logits`` (n, C) and, for classes, ``probabilities``.

    Probabilities have one column a class. Inside the graph everything is float64, as in ncm, because float32
    would lose the differences of a feature whose mean is far above its deviation. Raises `InputError` without
    the optional package ``onnx``.
    """
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        raise InputError(
            "the package onnx isn't installed", fix="pip install 'ncm-cli[onnx]', or --export npz"
        ) from None
    weight, bias, normalize_rows = folded(probe)
    constants = {"weight": weight.T, "bias": bias, "tiny": np.array(np.finfo(np.float64).tiny)}
    nodes, rows = [helper.make_node("Cast", ["features"], ["rows"], to=TensorProto.DOUBLE)], "rows"
    if normalize_rows:
        nodes.append(helper.make_node("ReduceL2", [rows], ["norm"], axes=[1], keepdims=1))
        # A row of zeros stays zero, as in ncm's own scaling.
        nodes.append(helper.make_node("Max", ["norm", "tiny"], ["positive_norm"]))
        nodes.append(helper.make_node("Div", [rows, "positive_norm"], ["unit_rows"]))
        rows = "unit_rows"
    nodes.append(helper.make_node("Gemm", [rows, "weight", "bias"], ["scores"]))
    width = len(probe.classes)
    if width == 2:
        nodes.append(helper.make_node("Neg", ["scores"], ["negative"]))
        nodes.append(helper.make_node("Sigmoid", ["negative"], ["first"]))
        nodes.append(helper.make_node("Sigmoid", ["scores"], ["second"]))
        nodes.append(helper.make_node("Concat", ["first", "second"], ["shares"], axis=1))
    elif width:
        nodes.append(helper.make_node("Softmax", ["scores"], ["shares"], axis=1))
    casts = {"logits": "scores"} | ({"probabilities": "shares"} if width else {})
    for name, wide in casts.items():
        nodes.append(helper.make_node("Cast", [wide], [name], to=TensorProto.FLOAT))
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
        [numpy_helper.from_array(np.asarray(a, np.float64), n) for n, a in constants.items() if n in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], producer_name="ncm-cli")
    # Runtimes since 2022 read version 8 of the file format, but perhaps not the newest one.
    model.ir_version = min(model.ir_version, 8)
    facts = {"classes": list(probe.classes), "task": probe.task, "target": probe.target}
    helper.set_model_props(model, {"ncm": json.dumps({**facts, "fingerprint": probe.fingerprint})})
    onnx.checker.check_model(model)
    write_bytes(path, model.SerializeToString())


def folded(probe: Probe) -> tuple[np.ndarray, np.ndarray, bool]:
    """(weight, bias, whether rows are divided by their norm first), float64, for unscaled features."""
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
