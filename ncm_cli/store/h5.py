"""Reading HDF5 files of ours, and refusing those of strangers.

A file of ours has checksummed metadata (the format of HDF5 1.10), Fletcher-32 on every array, fixed-length
UTF-8 text, and digests of its own: the array ``digests`` holds a JSON object from array name to SHA-256, the
root attribute ``digests_sha256`` covers it, and ``header_sha256`` covers all other root attributes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.atomic import one_line, require_file
from ncm_cli.store.checks import (
    TEXT_ERRORS,
    array_digest,
    damaged,
    header_digest,
    require_version,
    text_digest,
)
from ncm_cli.store.h5_guard import check_attributes, check_dataset, check_tree

CHUNK_BYTES = 1 << 20
"""Size of a chunk: what is read, checked and kept in memory at a time."""

READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError)
"""What h5py raises on damaged files; HDF5 has no class of its own for that."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what h5py raises on a damaged file into one `InputError`."""
    try:
        yield
    except READ_ERRORS as error:
        raise damaged(path, one_line(error)) from error


class H5Reader(contextlib.AbstractContextManager["H5Reader"]):
    """An HDF5 file of one of our formats, opened for reading and checked before anything is believed.

    ``attrs`` holds the root attributes as text and numbers; ``digests`` is None for a file that another
    program wrote without them.
    """

    def __init__(self, path: Path | str, format_name: str, version: int, *, what: str) -> None:
        self.path = require_file(path)
        self.bytes = self.path.stat().st_size
        with self.path.open("rb") as stream:
            if stream.read(8) != b"\x89HDF\r\n\x1a\n":
                raise InputError(f"not {what}", where=self.path, found="no HDF5 file", expected=format_name)
        self._file = _opened(self.path)
        try:
            self.attrs = self._header(format_name, version, what)
            self.digests = self._digests()
        except BaseException:
            self.close()
            raise

    def _header(self, format_name: str, version: int, what: str) -> dict[str, Any]:
        with reading(self.path):
            attrs = check_attributes(self._file, self.path)
            found = attrs.get("ncm_format")
            if found != format_name:
                raise InputError(
                    f"not {what}",
                    where=self.path,
                    found="an HDF5 file without ncm_format" if found is None else f"ncm_format {found!r}",
                    expected=format_name,
                )
            require_version(attrs.get("ncm_format_version"), version, self.path)
            check_tree(self._file, self.path)
        stated = attrs.get("header_sha256")
        if stated is not None and stated != header_digest(attrs):
            raise damaged(self.path, "header attributes that don't match header_sha256")
        return attrs

    def _digests(self) -> dict[str, str] | None:
        if "header_sha256" not in self.attrs:
            return None
        raw = self._raw("digests", ndim=1, kinds="u").tobytes()
        if hashlib.sha256(raw).hexdigest() != self.attrs.get("digests_sha256"):
            raise damaged(self.path, "digests that don't match digests_sha256")
        digests: dict[str, str] = json.loads(raw)
        missing = [name for name in digests if name not in self]
        if missing:
            raise damaged(self.path, f"no array {missing[0]!r}")
        return digests

    def __contains__(self, name: str) -> bool:
        with reading(self.path):
            return name in self._file

    def members(self, group: str) -> list[str]:
        """Names in a group, in the order in which they were written; none if there is no such group."""
        with reading(self.path):
            found = self._file.get(group)
            return list(found) if isinstance(found, h5py.Group) else []

    def dataset(self, name: str, *, ndim: int, kinds: str) -> h5py.Dataset:
        """A checked array whose numpy kind is one of ``kinds``, not yet read."""
        with reading(self.path):
            found = self._file.get(name)
            if not isinstance(found, h5py.Dataset):
                raise damaged(self.path, f"no array {name!r}")
            check_dataset(found, self.path, self.bytes)
            if found.ndim != ndim or found.dtype.kind not in kinds:
                raise damaged(self.path, f"{name} of shape {found.shape} and type {found.dtype}")
            return found

    def _raw(self, name: str, *, ndim: int, kinds: str) -> np.ndarray:
        found = self.dataset(name, ndim=ndim, kinds=kinds)
        with reading(self.path):
            return np.asarray(found[()])

    def array(
        self, name: str, dtype: Any, *, shape: tuple[int | None, ...], kinds: str | None = None
    ) -> np.ndarray:
        """A whole numeric array, verified, as ``dtype``; None in ``shape`` stands for any length."""
        dtype = np.dtype(dtype)
        raw = self._raw(name, ndim=len(shape), kinds=kinds or dtype.kind)
        if any(want is not None and want != have for want, have in zip(shape, raw.shape, strict=True)):
            raise damaged(self.path, f"{name} of shape {raw.shape}, expected {shape}")
        made = np.ascontiguousarray(raw, dtype=dtype)
        self._verify(name, array_digest(made))
        return made

    def text(self, name: str, *, rows: int | None = None) -> tuple[str, ...]:
        """A whole array of text, verified."""
        found = self.dataset(name, ndim=1, kinds="S")
        if rows is not None and found.shape[0] != rows:
            raise damaged(self.path, f"{name} of {found.shape[0]:,} rows, expected {rows:,}")
        with reading(self.path):
            step = max(1, 8 * CHUNK_BYTES // found.dtype.itemsize)
            raw = [
                item
                for start in range(0, found.shape[0], step)
                for item in found[start : start + step].tolist()
            ]
            self._verify(name, text_digest(raw))
            return tuple(item.decode("utf-8", TEXT_ERRORS) for item in raw)

    def json(self, name: str) -> Any:
        """A JSON object (of "sources" a list) kept as an array of bytes, verified; empty if there is none."""
        kind: type = list if name == "sources" else dict
        if name not in self:
            return kind()
        raw = self._raw(name, ndim=1, kinds="u")
        self._verify(name, array_digest(raw))
        with reading(self.path):
            found = json.loads(raw.tobytes().decode("utf-8", TEXT_ERRORS))
        if not isinstance(found, kind):
            raise damaged(self.path, f"{name} of type {type(found).__name__}")
        return found

    def _verify(self, name: str, digest: str) -> None:
        if self.digests is not None and self.digests.get(name) != digest:
            raise damaged(self.path, f"{name} doesn't match its digest")

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with reading(self.path):
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(path: Path) -> h5py.File:
    try:
        # Never a lock: a reader must not hinder a writer, and some file systems have no locks.
        return h5py.File(path, "r", locking=False)
    except READ_ERRORS as error:
        text = one_line(error)
        if "truncated" in text:
            raise InputError(
                "a file that was cut short", where=path, found=text, fix="make it again"
            ) from error
        raise damaged(path, text) from error


def is_sealed(path: Path) -> bool:
    """Whether a file of ours has digests of its own; one that another program wrote has none."""
    with reading(path), _opened(path) as file:
        return "header_sha256" in file.attrs


def peek_format(path: Path) -> str | None:
    """The ``ncm_format`` of an HDF5 file, or None; nothing else is believed or read."""
    with reading(path), _opened(path) as file:
        found = check_attributes(file, path).get("ncm_format")
        return None if found is None else str(found)
