"""The probe file: weights with the projection folded in, as safetensors with JSON metadata."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError
from ncm_cli.store.atomic import atomic_path, one_line, require_file
from ncm_cli.store.checks import array_digest, damaged, require_version
from ncm_cli.store.fingerprint import digest_of, fingerprint
from ncm_cli.store.results import jsonable, now

FORMAT = "ncm-probe"
VERSION = 1

FOLD_TOLERANCE = 1e-6
"""Largest ‖weight @ basis‖ over ‖weight‖: float64 rounding stays far below, a forgotten fold far above."""

_TENSORS = ("weight", "bias", "basis", "singular_values")
_SCALING = ("mean", "scale")
_MAX_HEADER_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """A linear probe: logits = scaled(x) @ weight.T + bias, for features x of one encoder."""

    weight: np.ndarray
    """float64 (C, d), with ``weight @ basis == 0``; C = 1 for two classes and for regression."""
    bias: np.ndarray
    """float64 (C,)."""
    basis: np.ndarray
    """float64 (d, r): the directions removed; r = 0 is ERM."""
    singular_values: np.ndarray
    """float64 (m,): of the pairs that made the basis; empty without pairs."""
    mean: np.ndarray | None = None
    """float64 (d,), of standard scaling only."""
    scale: np.ndarray | None = None
    """float64 (d,), of standard scaling only."""
    classes: tuple[str, ...]
    """In the order of the logits; with two, the logit speaks for the second. Empty for regression."""
    task: str
    """``classification`` or ``regression``."""
    target: str
    """The column that it predicts."""
    meta: dict[str, Any]
    """Encoder, fingerprint, scaling, method, hyper-parameters, selection, data: see the README."""
    created: str = ""
    ncm_version: str = __version__

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
        """SHA-256 over what decides its predictions: equal for equal probes, whenever and wherever made."""
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
    """Ids as text for a probe's ``meta["rows"]``: eight bytes of each one's digest, in ascending order."""
    return base64.b64encode(np.sort(_keys(ids)).tobytes()).decode("ascii")


def seen_rows(probe: Probe, part: str, ids: Iterable[str]) -> np.ndarray:
    """bool (n,): ids among the rows that a probe was trained on (``train``) or chosen by (``val``)."""
    recorded = base64.b64decode(str((probe.meta.get("rows") or {}).get(part, "")))
    return np.isin(_keys(ids), np.frombuffer(recorded, dtype="<u8"))


def _keys(ids: Iterable[str]) -> np.ndarray:
    digests = (hashlib.blake2b(id.encode("utf-8"), digest_size=8).digest() for id in ids)
    return np.frombuffer(b"".join(digests), dtype="<u8")


def write_probe(path: Path | str, probe: Probe) -> None:
    """Write a probe atomically.

    Raises `InputError` for shapes that don't agree, numbers that aren't finite, and weights that the
    projection isn't folded into.
    """
    from safetensors.numpy import save

    _check(probe, path)
    tensors = probe.tensors()
    metadata = {
        "ncm_format": FORMAT,
        "ncm_format_version": str(VERSION),
        "ncm_version": __version__,
        "created": probe.created or now(),
        "task": probe.task,
        "target": probe.target,
        "classes": json.dumps(list(probe.classes)),
        "meta": json.dumps(jsonable(probe.meta), allow_nan=False),
    }
    metadata["sha256"] = _file_digest(tensors, metadata)
    with atomic_path(path) as temporary:
        temporary.write_bytes(save(tensors, metadata=metadata))


def read_probe(path: Path | str) -> Probe:
    """Read a probe, every byte checked; raises `InputError` for what isn't one or is damaged."""
    path = require_file(path)
    tensors, metadata = _read_safetensors(path)
    if metadata.get("ncm_format") != FORMAT:
        raise InputError(
            "not a probe",
            where=path,
            found=f"safetensors with ncm_format {metadata.get('ncm_format')!r}",
            expected=FORMAT,
        )
    version = metadata.get("ncm_format_version", "")
    require_version(int(version) if version.isdecimal() and len(version) < 9 else version, VERSION, path)
    if metadata.get("sha256") != _file_digest(tensors, metadata):
        raise damaged(path, "contents that don't match their sha256")
    try:
        probe = Probe(
            weight=tensors["weight"],
            bias=tensors["bias"],
            basis=tensors["basis"],
            singular_values=tensors["singular_values"],
            mean=tensors.get("mean"),
            scale=tensors.get("scale"),
            classes=tuple(json.loads(metadata["classes"])),
            task=metadata["task"],
            target=metadata["target"],
            meta=dict(json.loads(metadata["meta"])),
            created=metadata["created"],
            ncm_version=metadata["ncm_version"],
        )
        _check(probe, path)
    except InputError as error:
        raise damaged(path, f"{error.what}: {error.found}") from error
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__} {one_line(error)}") from error
    return probe


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as stream:
        head = stream.read(9)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 9 or head[8:] != b"{" or length > _MAX_HEADER_BYTES:
        raise InputError("not a probe", where=path, found="no safetensors file", expected=FORMAT)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            names = list(file.keys())
            if not set(_TENSORS) <= set(names) <= {*_TENSORS, *_SCALING}:
                metadata.setdefault("ncm_format", "")
                return {}, metadata
            return {name: file.get_tensor(name) for name in names}, metadata
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, UnicodeError) as error:
        raise damaged(path, one_line(error)) from error


def _file_digest(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    return digest_of(
        {
            "tensors": {name: array_digest(values) for name, values in tensors.items()},
            "metadata": {name: text for name, text in metadata.items() if name != "sha256"},
        }
    )


def _check(probe: Probe, path: Path | str) -> None:
    if np.ndim(probe.weight) != 2 or np.ndim(probe.basis) != 2 or 0 in np.shape(probe.weight):
        raise InputError(
            "weights of another shape", where=path, found=np.shape(probe.weight), expected="(C, d)"
        )
    C, d = np.shape(probe.weight)
    shapes: dict[str, tuple[int, ...]] = {"bias": (C,), "basis": (d, np.shape(probe.basis)[1])}
    shapes |= {name: (d,) for name in _SCALING if getattr(probe, name) is not None}
    for name, shape in shapes.items():
        if np.shape(getattr(probe, name)) != shape:
            raise InputError(
                f"{name} of another shape", where=path, found=np.shape(getattr(probe, name)), expected=shape
            )
    if probe.task not in ("classification", "regression"):
        raise InputError(
            "an unknown task", where=path, found=probe.task, expected="classification or regression"
        )
    wanted = 0 if probe.task == "regression" else 2 if C == 1 else C
    if len(probe.classes) != wanted or len(set(probe.classes)) != wanted:
        raise InputError(
            "classes that don't fit the weights",
            where=path,
            found=f"{len(set(probe.classes))} classes for {C} rows of weights",
            expected=f"{wanted} different ones",
        )
    for name, values in probe.tensors().items():
        if not np.isfinite(values).all():
            raise InputError(f"{name} that isn't finite", where=path, found="NaN or an infinity")
    left = float(np.linalg.norm(probe.weight @ probe.basis))
    size = float(np.linalg.norm(probe.weight))
    if left > FOLD_TOLERANCE * size:
        raise InputError(
            "weights that the projection isn't folded into",
            where=path,
            found=f"‖weight @ basis‖ = {left:.3g}",
            expected=f"at most {FOLD_TOLERANCE:g} of ‖weight‖ = {size:.3g}",
        )
    if probe.meta.get("encoder") is not None and fingerprint(probe.encoder) != probe.fingerprint:
        raise InputError("a fingerprint of another encoder", where=path, found=probe.fingerprint)
