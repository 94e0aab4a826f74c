"""Writing HDF5 files whose every byte is accounted for."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.checks import TEXT_ERRORS, array_digest, encode_text, header_digest, text_digest
from ncm_cli.store.h5 import CHUNK_BYTES
from ncm_cli.store.h5_guard import MAX_CHUNK_BYTES
from ncm_cli.store.h5_sink import Sink, interrupts_later

_MAX_ATTRIBUTE_BYTES = 60_000


class H5Writer(contextlib.AbstractContextManager["H5Writer"]):
    """Writes the arrays of one file and, last, its header and digests; a context manager.

    ``path`` is an empty temporary file. A full disk raises OSError, with the file closed properly.
    """

    def __init__(self, path: Path) -> None:
        self.digests: dict[str, str] = {}
        self._sink = Sink(path)
        with self._careful():
            # The format of HDF5 1.10 checksums all metadata, and is read by everything since 2016.
            self._file = h5py.File(self._sink, "w", libver=("v110", "v110"), track_order=True)

    @contextlib.contextmanager
    def _careful(self) -> Iterator[None]:
        """HDF5 calls that nothing may interrupt; raises what went wrong with the file meanwhile."""
        with interrupts_later():
            yield
        if self._sink.error is not None:
            raise self._sink.error

    def create(
        self, name: str, shape: tuple[int, ...], dtype: Any, chunk_rows: int | None = None
    ) -> h5py.Dataset:
        """An empty checksummed array, to be filled by `put`; its group is made if need be."""
        group, _, leaf = name.rpartition("/")
        with self._careful():
            parent = self._file
            if group:
                known = group in self._file
                parent = self._file[group] if known else self._file.create_group(group, track_order=True)
            if 0 in shape:
                return parent.create_dataset(leaf, shape=shape, dtype=dtype)
            chunks = _chunks(shape, np.dtype(dtype).itemsize, chunk_rows)
            return parent.create_dataset(leaf, shape=shape, dtype=dtype, chunks=chunks, fletcher32=True)

    def put(self, dataset: h5py.Dataset, start: int, values: np.ndarray) -> None:
        """Fill the rows of an array from ``start`` on."""
        with self._careful():
            dataset[start : start + len(values)] = values

    def array(self, name: str, values: np.ndarray) -> None:
        """A numeric array (booleans included)."""
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        self.put(self.create(name, little.shape, little.dtype), 0, little)
        self.digests[name] = array_digest(little)

    def text(self, name: str, items: Sequence[str], *, what: str) -> None:
        """Texts as fixed-length UTF-8, padded with NUL."""
        encoded = encode_text(items, what)
        width = max(map(len, encoded), default=1) or 1
        dtype = h5py.string_dtype("utf-8", width)
        made = self.create(name, (len(encoded),), dtype)
        step = max(1, 8 * CHUNK_BYTES // width)
        for start in range(0, len(encoded), step):
            self.put(made, start, np.array(encoded[start : start + step], dtype=dtype))
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
        self.put(self.create("digests", (len(raw),), np.uint8), 0, np.frombuffer(raw, dtype=np.uint8))
        with self._careful():
            for name, value in whole.items():
                self._attribute(name, value)
        self.close()
        if self._sink.error is not None:
            raise self._sink.error

    def _attribute(self, name: str, value: str | int) -> None:
        if not isinstance(value, str):
            self._file.attrs.create(name, np.int64(value))
            return
        encoded = value.encode("utf-8", TEXT_ERRORS)
        if b"\0" in encoded or len(encoded) > _MAX_ATTRIBUTE_BYTES:
            raise InputError(
                f"{name} that can't be stored",
                found=f"{len(encoded):,} bytes",
                expected=f"at most {_MAX_ATTRIBUTE_BYTES:,} bytes without NUL",
            )
        dtype = h5py.string_dtype("utf-8", max(1, len(encoded)))
        self._file.attrs.create(name, np.bytes_(encoded), dtype=dtype)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with interrupts_later():
            self._file.close()
            self._sink.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _chunks(shape: tuple[int, ...], itemsize: int, rows: int | None) -> tuple[int, ...]:
    row_bytes = itemsize * int(np.prod(shape[1:], dtype=np.int64))
    if row_bytes > MAX_CHUNK_BYTES:
        return (1, *(min(size, CHUNK_BYTES // itemsize) for size in shape[1:]))
    return (min(shape[0], rows or max(1, CHUNK_BYTES // row_bytes)), *shape[1:])
