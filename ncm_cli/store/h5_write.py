"""Writing HDF5 files whose every byte is accounted for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.checks import TEXT_ERRORS, array_digest, encode_text, header_digest, text_digest
from ncm_cli.store.h5 import CHUNK_BYTES
from ncm_cli.store.h5_guard import MAX_CHUNK_BYTES


class H5Writer:
    """Writes the arrays of one file and, last, its header and digests. ``path`` is a temporary file's."""

    def __init__(self, path: Path) -> None:
        # The format of HDF5 1.10 checksums all metadata, and is read by everything since 2016.
        self.file = h5py.File(path, "w", libver=("v110", "v110"), locking=False, track_order=True)
        self.digests: dict[str, str] = {}

    def create(
        self, name: str, shape: tuple[int, ...], dtype: Any, chunk_rows: int | None = None
    ) -> h5py.Dataset:
        """An empty checksummed array; its group is made if need be."""
        group, _, leaf = name.rpartition("/")
        parent = self.file.require_group(group) if group in self.file else self._group(group)
        if 0 in shape:
            return parent.create_dataset(leaf, shape=shape, dtype=dtype)
        chunks = _chunks(shape, np.dtype(dtype).itemsize, chunk_rows)
        return parent.create_dataset(leaf, shape=shape, dtype=dtype, chunks=chunks, fletcher32=True)

    def _group(self, name: str) -> h5py.Group:
        return self.file.create_group(name, track_order=True) if name else self.file

    def array(self, name: str, values: np.ndarray) -> None:
        """A numeric array (booleans included)."""
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        self.create(name, little.shape, little.dtype)[...] = little
        self.digests[name] = array_digest(little)

    def text(self, name: str, items: Sequence[str], *, what: str) -> None:
        """Texts as fixed-length UTF-8, padded with NUL."""
        encoded = encode_text(items, what)
        width = max(map(len, encoded), default=1) or 1
        dtype = h5py.string_dtype("utf-8", width)
        made = self.create(name, (len(encoded),), dtype)
        step = max(1, 8 * CHUNK_BYTES // width)
        for start in range(0, len(encoded), step):
            made[start : start + step] = np.array(encoded[start : start + step], dtype=dtype)
        self.digests[name] = text_digest(encoded)

    def json(self, name: str, value: Any) -> None:
        """A JSON document, as bytes."""
        text = json.dumps(value, allow_nan=False, ensure_ascii=True)
        self.array(name, np.frombuffer(text.encode("ascii"), dtype=np.uint8))

    def finish(self, attrs: Mapping[str, Any]) -> None:
        """Write digests and root attributes, and close. Values are text or integers; None is left out."""
        raw = json.dumps(self.digests, ensure_ascii=True).encode("ascii")
        whole = {name: value for name, value in attrs.items() if value is not None}
        whole["digests_sha256"] = hashlib.sha256(raw).hexdigest()
        whole["header_sha256"] = header_digest(whole)
        made = self.create("digests", (len(raw),), np.uint8)
        made[...] = np.frombuffer(raw, dtype=np.uint8)
        for name, value in whole.items():
            if isinstance(value, str):
                (encoded,) = encode_attribute(name, value)
                dtype = h5py.string_dtype("utf-8", max(1, len(encoded)))
                self.file.attrs.create(name, np.bytes_(encoded), dtype=dtype)
            else:
                self.file.attrs.create(name, np.int64(value))
        self.file.close()


def encode_attribute(name: str, value: str) -> tuple[bytes]:
    """UTF-8 bytes of a root attribute; refuses what HDF5 can't keep in one."""
    encoded = value.encode("utf-8", TEXT_ERRORS)
    if b"\0" in encoded or len(encoded) > 60_000:
        raise InputError(
            f"{name} that can't be stored", found=f"{len(encoded):,} bytes", expected="at most 60,000"
        )
    return (encoded,)


def _chunks(shape: tuple[int, ...], itemsize: int, rows: int | None) -> tuple[int, ...]:
    row_bytes = itemsize * int(np.prod(shape[1:], dtype=np.int64))
    if row_bytes > MAX_CHUNK_BYTES:
        return (1, *(min(size, CHUNK_BYTES // itemsize) for size in shape[1:]))
    return (min(shape[0], rows or max(1, CHUNK_BYTES // row_bytes)), *shape[1:])
