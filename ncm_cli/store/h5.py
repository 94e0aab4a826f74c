"""Reading HDF5 files from strangers, and writing files whose every byte is accounted for.

A file of ours has checksummed metadata (the format of HDF5 1.10), Fletcher-32 on every array, fixed-length
UTF-8 text, and digests of its own: the array ``digests`` holds a JSON object from array name to SHA-256, the
root attribute ``digests_sha256`` covers it, and ``header_sha256`` covers all other root attributes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.atomic import one_line, require_file
from ncm_cli.store.fingerprint import digest_of
from ncm_cli.store.h5_guard import MAX_CHUNK_BYTES, check_attributes, check_dataset, check_tree

CHUNK_BYTES = 1 << 20
"""Size of a chunk: what is read, checked and kept in memory at a time."""

MAX_TEXT_BYTES = 4096
"""Longest id, path or category: what file systems allow a path to have."""

TEXT_ERRORS = "surrogateescape"
"""File names that aren't UTF-8 survive a round trip."""

READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError)
"""What h5py raises on damaged files; HDF5 has no class of its own for that."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what h5py raises on a damaged file into one `InputError`."""
    try:
        yield
    except READ_ERRORS as error:
        raise damaged(path, one_line(error)) from error


def damaged(path: Path, found: str) -> InputError:
    """The error for a file whose bytes aren't those that were written."""
    return InputError(
        "a damaged file",
        where=path,
        found=found,
        expected="the bytes that ncm wrote",
        fix="restore it from a copy, or make it again",
    )


class H5Reader:
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
        self._file = self._opened()
        try:
            self.attrs = self._header(format_name, version, what)
            self.digests = self._digests()
        except BaseException:
            self.close()
            raise

    def _opened(self) -> h5py.File:
        try:
            # Never a lock: a reader must not hinder a writer, and some file systems have no locks.
            return h5py.File(self.path, "r", locking=False)
        except READ_ERRORS as error:
            text = one_line(error)
            if "truncated" in text:
                raise InputError(
                    "a file that was cut short", where=self.path, found=text, fix="make it again"
                ) from error
            raise damaged(self.path, text) from error

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
        """A JSON document kept as an array of bytes, verified; an empty object if there is none."""
        if name not in self:
            return {}
        raw = self._raw(name, ndim=1, kinds="u")
        self._verify(name, array_digest(raw))
        with reading(self.path):
            return json.loads(raw.tobytes().decode("utf-8", TEXT_ERRORS))

    def _verify(self, name: str, digest: str) -> None:
        if self.digests is not None and self.digests.get(name) != digest:
            raise damaged(self.path, f"{name} doesn't match its digest")

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with reading(self.path):
            self._file.close()

    def __enter__(self) -> H5Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_version(found: object, version: int, path: Path) -> None:
    """Refuse a file of a format version that this program doesn't know."""
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= version:
        newer = isinstance(found, int) and found > version
        raise InputError(
            "a format version that can't be read",
            where=path,
            found=f"ncm_format_version {found}",
            expected=f"{version}" if version == 1 else f"1 to {version}",
            fix="install a newer ncm-cli" if newer else None,
        )


def header_digest(attrs: Mapping[str, Any]) -> str:
    """SHA-256 over all root attributes but the digest itself."""
    return digest_of({name: value for name, value in attrs.items() if name != "header_sha256"})


def array_digest(values: np.ndarray) -> str:
    """SHA-256 over type, shape and little-endian values in row-major order."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    digest = hashlib.sha256(f"{little.dtype.str}{little.shape}".encode())
    digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def text_digest(items: Sequence[bytes]) -> str:
    """SHA-256 over the UTF-8 texts, each ended by a NUL (which no text may hold)."""
    digest = hashlib.sha256(f"text({len(items)})".encode())
    for start in range(0, len(items), 1 << 16):
        digest.update(b"\0".join([*items[start : start + (1 << 16)], b""]))
    return digest.hexdigest()


def encode_text(items: Sequence[str], what: str) -> list[bytes]:
    """UTF-8 bytes of each text; refuses NUL, lone surrogates and texts over 4,096 bytes."""
    encoded = []
    for position, item in enumerate(items):
        try:
            raw = item.encode("utf-8", TEXT_ERRORS)
        except UnicodeEncodeError as error:
            raise InputError(
                f"{what} that isn't Unicode text", where=f"row {position}", found=ascii(item)
            ) from error
        if b"\0" in raw or len(raw) > MAX_TEXT_BYTES:
            raise InputError(
                f"{what} that can't be stored",
                where=f"row {position}",
                found="a NUL character" if b"\0" in raw else f"{len(raw):,} bytes: {item[:40]!r}...",
                expected=f"at most {MAX_TEXT_BYTES:,} bytes of UTF-8 without NUL",
            )
        encoded.append(raw)
    return encoded


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


def peek_format(path: Path) -> str | None:
    """The ``ncm_format`` of an HDF5 file, or None; nothing else is believed or read."""
    with reading(path), h5py.File(path, "r", locking=False) as file:
        found = check_attributes(file, path).get("ncm_format")
        return None if found is None else str(found)
