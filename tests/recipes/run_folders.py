"""Compares the folders of two runs: every file byte for byte, apart from times and what follows from them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from safetensors.numpy import load as load_tensors

from ncm_cli.recipes import freshness

TIMES = {"created", "seconds", "mtime_ns", "digests", "digests_sha256", "header_sha256"}
"""Times, digests that cover them, and the run's record of when files were last changed."""

_DIGEST = re.compile(rb"\b[0-9a-f]{64}\b")


def contents_of(folder: Path) -> dict[str, str]:
    """For every file in a run's folder the SHA-256 of what it says, which times don't change.

    The paths in files are absolute: compare runs that were made in the same place.

    Files without times count byte for byte. In documents, stores and probes the `TIMES` are left out, and a
    digest of another file or folder is replaced by its name.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    files = {name: path for name, path in paths.items() if path.is_file()}
    names = {
        (_folder_digest(path) if path.is_dir() else _sha256(path.read_bytes())).encode(): name.encode()
        for name, path in paths.items()
    }
    said = {name: _said(path) for name, path in files.items()}
    return {
        name: _sha256(_DIGEST.sub(lambda found: names.get(found[0], found[0]), text))
        for name, text in said.items()
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _folder_digest(folder: Path) -> str:
    """The digest by which a run's record knows a folder."""
    digest = hashlib.sha256()
    for name, path in freshness._walk(str(folder)):
        digest.update(f"{name}\0{_sha256(Path(path).read_bytes())}\0".encode())
    return digest.hexdigest()


def _said(path: Path) -> bytes:
    if path.suffix == ".h5":
        said: Any = _store(path)
    elif path.suffix == ".safetensors":
        said = _probe(path.read_bytes())
    elif path.suffix == ".json":
        said = json.loads(path.read_text("utf-8"))
        said.pop("content_sha256", None)  # covers the time
    else:
        return path.read_bytes()
    return json.dumps(_without_times(said), indent=1, default=lambda number: number.item()).encode()


def _without_times(value: Any) -> Any:
    """A document without the `TIMES`; texts that are documents too are read."""
    if isinstance(value, dict):
        return {name: _without_times(item) for name, item in value.items() if name not in TIMES}
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return _without_times(json.loads(value))
        except ValueError:
            return value
    return value


def _array(array: np.ndarray) -> str:
    raw = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return f"{array.dtype} {array.shape} {_sha256(raw)}"


def _store(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(name: str, node: Any) -> None:
        attributes = {key: _attribute(value) for key, value in sorted(node.attrs.items())}
        data = isinstance(node, h5py.Dataset) and name.rpartition("/")[2] not in TIMES
        found[name] = {"attributes": attributes, "data": _array(node[()]) if data else None}

    with h5py.File(path) as file:
        visit("", file)
        file.visititems(visit)
    return found


def _attribute(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _array(value)
    return value.decode() if isinstance(value, bytes) else value


def _probe(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    arrays = {name: _array(array) for name, array in sorted(load_tensors(data).items())}
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    metadata.pop("sha256", None)  # covers the time
    header["__metadata__"] = dict(sorted(metadata.items()))  # safetensors writes them in any order
    return {"header": header, "arrays": arrays}
