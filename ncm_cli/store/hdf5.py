"""HDF5 files with digests: parts are checked before use, and a full disk while writing is an error.

A file of ours has checksummed metadata (the format of HDF5 1.10), Fletcher-32 on every array, fixed-length
UTF-8 text, and further digests: the array ``digests`` holds a JSON object from array name to SHA-256, the
root attribute ``digests_sha256`` covers it, and ``header_sha256`` covers all other root attributes. A file of
another program may lack the digests. Links, unusual types, and sizes larger than the file are refused.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import math
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, get_origin

import h5py
import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError
from ncm_cli.store.digests import (
    MAKE_AGAIN,
    TEXT_ERRORS,
    Texts,
    array_digest,
    damaged,
    encode_text,
    fingerprint,
    header_digest,
    is_utf8,
    parse_json,
    require_version,
    text_digest,
)
from ncm_cli.store.files import atomic_path, now, one_line, require_file
from ncm_cli.store.schema import misfit
from ncm_cli.store.sniff import HEAD_BYTES, described, sniff

CHUNK_BYTES = 1 << 20
"""Size of a chunk, the unit in which HDF5 reads, checks and caches."""

MAX_CHUNK_BYTES = 64 << 20
"""Largest chunk or single value that is read, since HDF5 holds it in memory."""

MAX_ATTRIBUTES = 200
MAX_ATTRIBUTE_BYTES = 60_000
MAX_OBJECTS = 20_000
MAX_GROUP_DEPTH = 4

MAX_READ_RATIO = 2
"""Rows between the wanted ones are read too, if the total is at most this many times the number wanted."""

_FILTERS = (h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SHUFFLE)

READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError)
"""Exceptions that h5py raises on damaged files."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what h5py raises on a damaged file into one `InputError`."""
    try:
        yield
    except READ_ERRORS as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # too many open files, which isn't this file's fault
        text = one_line(error)
        if "truncated file" in text:
            raise InputError("a file that was cut short", where=path, found=text, fix=MAKE_AGAIN) from error
        raise damaged(path, text) from error


def _hostile(path: Path, found: str, fix: str | None = None) -> InputError:
    """The error for a file with contents that ncm never writes."""
    return InputError(
        "a file that won't be read", where=path, found=found, expected="plain arrays in one file", fix=fix
    )


def _names(file: h5py.File, path: Path) -> dict[str, None]:
    """The names of groups and arrays, within each group in the order in which they were written.

    Refuses links other than hard ones, cycles, deep or huge trees, and objects that aren't groups or plain
    arrays.
    """
    seen = {h5py.h5o.get_info(file.id).addr}
    names: dict[str, None] = {}
    pending: list[tuple[str, h5py.Group]] = [("", file)]
    while pending:
        prefix, group = pending.pop()
        for leaf in group:
            name, link = f"{prefix}{leaf}", group.get(leaf, getlink=True)
            if not is_utf8(leaf):
                raise _hostile(path, f"a name that isn't UTF-8: {ascii(name)[:100]}")
            if not isinstance(link, h5py.HardLink):  # never followed, since it may lead to another file
                kind = "an external" if isinstance(link, h5py.ExternalLink) else "a soft"
                raise _hostile(path, f"{name!r} is {kind} link")
            member = group[leaf]
            address = h5py.h5o.get_info(member.id).addr
            if fault := "is linked twice" if address in seen else _fault_of_type(member, name):
                raise _hostile(path, f"{name!r} {fault}")
            seen.add(address)
            names[name] = None
            if len(names) > MAX_OBJECTS:
                raise _hostile(path, f"over {MAX_OBJECTS:,} objects")
            if isinstance(member, h5py.Group):
                pending.append((f"{name}/", member))
    return names


def _fault_of_type(array: Any, name: str) -> str | None:
    """The fault of an object that is neither a group nor an array of numbers or text; None if it is one."""
    if isinstance(array, h5py.Group):
        return "is nested too deeply" if name.count("/") >= MAX_GROUP_DEPTH else None
    if not isinstance(array, h5py.Dataset):
        return "is neither a group nor an array"
    if array.dtype.kind not in "biufS":
        text = h5py.check_string_dtype(array.dtype) is not None
        return f"holds {'text of variable length' if text else 'a compound or reference type'}"
    size = array.dtype.itemsize
    return f"has values of {size:,} bytes" if size > MAX_CHUNK_BYTES else None


def _fault_of_storage(array: h5py.Dataset, file_bytes: int) -> str | None:
    """The fault of an array that lies in other files, is compressed or exceeds the file; None for others."""
    if array.shape in (None, ()):
        return "is a single value, not an array"
    if array.is_virtual or array.external:
        return "lies in other files"
    plist = array.id.get_create_plist()
    for code, _, _, label in map(plist.get_filter, range(plist.get_nfilters())):
        if code not in _FILTERS:
            return f"is packed with {label.decode('ascii', 'replace') or code}"
    size = array.dtype.itemsize
    claimed, chunk = size * math.prod(array.shape), size * math.prod(array.chunks or (0,))
    if claimed > file_bytes:
        return f"claims {claimed:,} bytes in a file of {file_bytes:,}"
    if claimed and chunk > MAX_CHUNK_BYTES:
        return f"has chunks of {chunk:,} bytes"
    stored = array.id.get_storage_size()
    return f"claims {claimed:,} bytes and stores {stored:,}" if claimed and stored < claimed else None


def _attributes(file: h5py.File, path: Path) -> dict[str, Any]:
    """The root attributes as text and integers, empty without ``ncm_format``; refuses other types."""
    if "ncm_format" not in file.attrs:
        return {}
    if len(file.attrs) > MAX_ATTRIBUTES:
        raise _hostile(path, f"{len(file.attrs):,} root attributes")
    attributes: dict[str, Any] = {}
    for name in file.attrs:
        kind = file.attrs.get_id(name)
        if kind.dtype.kind == "O":
            # No checksum covers these, and damage in them can make HDF5 loop for ever.
            what = f"root attribute {name!r} of variable length, which lies in a heap of text"
            raise _hostile(path, what, fix="write it with a fixed length: numpy.bytes_(TEXT)")
        plain = kind.dtype.kind in "iuS" and kind.shape in ((), (1,))
        if not plain or kind.get_storage_size() > MAX_ATTRIBUTE_BYTES:
            raise _hostile(path, f"root attribute {name!r} isn't a short text or an integer")
        value = np.asarray(file.attrs[name]).reshape(-1)[0]
        attributes[name] = value.decode("utf-8", TEXT_ERRORS) if isinstance(value, bytes) else int(value)
    return attributes


def root_attributes(path: Path) -> dict[str, Any]:
    """The root attributes of an HDF5 file as text and integers; nothing else is read."""
    # Without a lock: a reader must not block a writer, and some file systems have no locks.
    with reading(path), h5py.File(path, "r", locking=False) as file:
        return _attributes(file, path)


_WORDS = {"ncm-features": "a feature store", "ncm-pairs": "a pair store", "ncm-sweep": "the table of a sweep"}
"""The formats of HDF5 files in words."""

_MADE_BY = {
    "ncm-pairs": "ncm pairs {} -f FEATURES.h5 -o PAIRS.h5 makes a pair store of a table",
    "ncm-features": "ncm embed {} -o FEATURES.h5 makes a feature store of a manifest",
}
"""For each format, the command that makes such a file from a table."""


class H5Reader(contextlib.AbstractContextManager["H5Reader"]):
    """An HDF5 file of ncm, opened for reading; every part is checked before it is used.

    ``attrs`` holds the root attributes as text and integers, ``digests`` the recorded digests of the arrays
    (None if another program wrote none), and ``found`` the digests of the arrays read so far.
    """

    def __init__(self, path: Path | str, format_name: str, version: int, *, what: str) -> None:
        self.path = require_file(path)
        self._bytes = self.path.stat().st_size
        self.digests: dict[str, str] | None = None
        self.found: dict[str, str] = {}
        with self.path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        if sniff(head) != "HDF5":
            fix = None
            if sniff(head) in (None, "Parquet"):
                fix = _MADE_BY.get(format_name, "").format(self.path) or None
            found = f"not an HDF5 file but {described(head)}"
            raise InputError(f"not {what}", where=self.path, found=found, expected=format_name, fix=fix)
        with reading(self.path):
            self._file = h5py.File(self.path, "r", locking=False)
        try:
            with reading(self.path):
                self.attrs = _attributes(self._file, self.path)
                self._check_header(format_name, version, what)
                self._names = _names(self._file, self.path)
            if "header_sha256" in self.attrs:
                self.digests = self._read_digests()
        except BaseException:
            self.close()
            raise

    def _check_header(self, format_name: str, version: int, what: str) -> None:
        actual = self.attrs.get("ncm_format")
        if actual != format_name:
            stated_format = "an HDF5 file without ncm_format" if actual is None else f"ncm_format {actual!r}"
            if actual in _WORDS:
                stated_format = f"{_WORDS[actual]}, {stated_format}"
            raise InputError(f"not {what}", where=self.path, found=stated_format, expected=format_name)
        require_version(self.attrs.get("ncm_format_version"), version, self.path)
        stated = self.attrs.get("header_sha256")
        if stated is not None and stated != header_digest(self.attrs):
            raise damaged(self.path, "header attributes that don't match header_sha256")

    def _read_digests(self) -> dict[str, str]:
        raw = self.array("digests", np.uint8, shape=(None,)).tobytes()
        if hashlib.sha256(raw).hexdigest() != self.attrs.get("digests_sha256"):
            raise damaged(self.path, "digests that don't match digests_sha256")
        with reading(self.path):
            digests: dict[str, str] = dict(parse_json(raw))
        if missing := [name for name in digests if name not in self]:
            raise damaged(self.path, f"no array {missing[0]!r}")
        return digests

    @functools.cached_property
    def encoder(self) -> dict[str, Any]:
        """The description of the encoder that made the features."""
        try:
            description = dict(parse_json(self.attrs["encoder"]))
        except (KeyError, ValueError, TypeError) as error:
            raise damaged(self.path, f"no encoder description: {one_line(error)}") from error
        if self.attrs.get("encoder_fingerprint", computed := fingerprint(description)) != computed:
            raise damaged(self.path, "a fingerprint of another encoder")
        return description

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def members(self, group: str) -> list[str]:
        """Names in a group, in the order in which they were written; empty if there is no such group."""
        inside = (name.rpartition("/") for name in self._names)
        return [leaf for parent, _, leaf in inside if parent == group]

    def dataset(self, name: str, *, ndim: int, kinds: str) -> h5py.Dataset:
        """An array that is checked but not yet read; its numpy kind is one of ``kinds``."""
        with reading(self.path):
            dataset = self._file.get(name)
            if not isinstance(dataset, h5py.Dataset):
                raise damaged(self.path, f"no array {name!r}")
            if fault := _fault_of_storage(dataset, self._bytes):
                raise _hostile(self.path, f"{name!r} {fault}")
            if dataset.ndim != ndim or dataset.dtype.kind not in kinds:
                raise damaged(self.path, f"{name} of shape {dataset.shape} and type {dataset.dtype}")
            return dataset

    def array(
        self, name: str, dtype: Any, *, shape: tuple[int | None, ...], kinds: str | None = None
    ) -> np.ndarray:
        """A numeric array, read and verified, as ``dtype``; None in ``shape`` stands for any length."""
        dtype = np.dtype(dtype)
        dataset = self.dataset(name, ndim=len(shape), kinds=kinds or dtype.kind)
        if any(want not in (None, have) for want, have in zip(shape, dataset.shape, strict=True)):
            raise damaged(self.path, f"{name} of shape {dataset.shape}, expected {shape}")
        with reading(self.path):
            values = np.ascontiguousarray(dataset[()], dtype=dtype)
        self._verify(name, array_digest(values))
        return values

    def texts(self, name: str, *, rows: int | None = None, any_bytes: bool = False) -> Texts:
        """A column of texts, read and verified; UTF-8 unless ``any_bytes`` is set, as for paths."""
        dataset = self.dataset(name, ndim=1, kinds="S")
        if rows not in (None, dataset.shape[0]):
            raise damaged(self.path, f"{name} of {dataset.shape[0]:,} rows, expected {rows:,}")
        with reading(self.path):
            raw = np.asarray(dataset[()], dtype=f"S{dataset.dtype.itemsize}")
            self._verify(name, text_digest(raw))
            texts = Texts(raw)
            if not any_bytes and (row := texts.not_utf8) is not None:
                raise damaged(self.path, f"{name} of row {row} isn't UTF-8: {bytes(raw[row])!r:.100}")
            return texts

    def json(self, name: str, schema: Any = dict[str, Any]) -> Any:
        """A JSON document stored as an array of bytes, verified; an empty list or object if there is none.

        ``schema`` is its type, in the form that `misfit` takes.
        """
        if name not in self:
            return [] if get_origin(schema) is list else {}
        raw = self.array(name, np.uint8, shape=(None,))
        with reading(self.path):
            document = parse_json(raw.tobytes().decode("utf-8", TEXT_ERRORS))
        if wrong := misfit(document, schema, name):
            raise damaged(self.path, "{} is {!r:.200}, not {}".format(*wrong))
        return document

    def _verify(self, name: str, digest: str) -> None:
        self.found[name] = digest
        if self.digests is not None and self.digests.get(name) != digest:
            raise damaged(self.path, f"{name} doesn't match its digest")

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with reading(self.path):
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class RowReader:
    """Reads rows (b, d) of an array at positions (b,) directly from the file, without a cache.

    HDF5 would read and check a whole chunk for each row. Rows near each other are read together.
    """

    def __init__(self, path: Path, array: h5py.Dataset) -> None:
        self._path, self._dtype, self._step = path, array.dtype, array.chunks[0]
        rows, self._dim = array.shape
        self._bytes = self._dim * self._dtype.itemsize
        starts = range(0, rows, self._step)
        self._offsets = np.array(
            [array.id.get_chunk_info_by_coord((start, 0)).byte_offset for start in starts]
        )
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._descriptor)

    @staticmethod
    def can(array: h5py.Dataset) -> bool:
        """Whether the array is stored row by row, as `H5Writer` does."""
        return bool(array.chunks) and array.chunks[1] == array.shape[1] and not array.shuffle

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        first, last = (int(positions.min()), int(positions.max()) + 1) if len(positions) else (0, 0)
        if last - first > MAX_READ_RATIO * len(positions):
            return self._rows(positions, np.ones(len(positions), np.int64))
        edges = np.array([first, *range(first - first % self._step + self._step, last, self._step)])
        rows = self._rows(edges, np.diff([*edges, last]))
        whole = len(positions) == len(rows) and (np.diff(positions) == 1).all()
        return rows if whole else rows[positions - first]

    def _rows(self, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The rows of runs of ``counts`` rows from ``starts`` on, each within one chunk."""
        offsets = self._offsets[starts // self._step] + starts % self._step * self._bytes
        sizes = counts * self._bytes
        raw = b"".join(map(self._read, sizes.tolist(), offsets.tolist()))
        if len(raw) != sizes.sum():
            raise InputError("a file that was cut short", where=self._path, fix=MAKE_AGAIN)
        return np.frombuffer(raw, self._dtype).reshape(-1, self._dim)

    def _read(self, size: int, offset: int) -> bytes:
        if hasattr(os, "pread"):  # all but Windows
            return os.pread(self._descriptor, size, offset)
        os.lseek(self._descriptor, offset, os.SEEK_SET)
        return os.read(self._descriptor, size)


class Sink(io.FileIO):
    """A file for h5py whose methods never raise; ``error`` holds the first error.

    HDF5 crashes the process if a write fails, as on a full disk. So writing continues in memory until HDF5
    has closed the file; only then is the error raised.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "r+")
        self.error: BaseException | None = None
        self._unwritten: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        """Write at the position; bytes that can't be written are kept in memory."""
        raw, position, done = memoryview(data).cast("B"), self.tell(), 0
        while self.error is None and done < len(raw):
            try:
                done += os.write(self.fileno(), raw[done:])
            except BaseException as error:
                self.error = error
        if done < len(raw):
            self._unwritten.append((position + done, bytes(raw[done:])))
        return len(raw)

    def readinto(self, buffer: Any) -> int:
        """Read at the position: what was written there, or zeros."""
        into, position = memoryview(buffer).cast("B"), self.tell()
        into[:] = bytes(len(into))
        with self._recorded_error():
            super().readinto(into)
        for start, data in self._unwritten:
            first, last = max(start, position), min(start + len(data), position + len(into))
            if first < last:
                into[first - position : last - position] = data[first - start : last - start]
        return len(into)

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file."""
        with self._recorded_error():
            super().truncate(size)
        return size or 0

    @contextlib.contextmanager
    def _recorded_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C to the end of a short block, since inside HDF5 it would look like a failed write."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread ever sees KeyboardInterrupt.
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came and callable(before):
            before(*came[0])


@contextlib.contextmanager
def writing(path: Path | str, format_name: str, version: int) -> Iterator[H5Writer]:
    """Write an HDF5 file of ncm atomically; header and digests are written at the end of the block."""
    with atomic_path(path) as temporary, contextlib.closing(H5Writer(temporary)) as writer:
        writer.attrs |= {"ncm_format": format_name, "ncm_format_version": version}
        writer.attrs |= {"ncm_version": __version__, "created": now()}
        yield writer
        writer.finish()


class H5Writer:
    """Writes the arrays of a file and, last, its header and digests.

    The caller adds root attributes to ``attrs``: text and integers; None is left out. A full disk raises
    OSError, and the file can still be closed.
    """

    def __init__(self, path: Path) -> None:
        self.attrs: dict[str, str | int | None] = {}
        self.digests: dict[str, str] = {}
        self._sink = Sink(path)
        with self._careful():
            # The format of HDF5 1.10 has checksums for all metadata; libraries since 2016 read it.
            self._file = h5py.File(self._sink, "w", libver=("v110", "v110"), track_order=True)

    @contextlib.contextmanager
    def _careful(self) -> Iterator[None]:
        """Run HDF5 calls without interruption by Ctrl-C; raises the file's error afterwards."""
        with _interrupts_later():
            yield
        if self._sink.error is not None:
            raise self._sink.error

    def create(
        self, name: str, shape: tuple[int, ...], dtype: Any, chunk_rows: int | None = None
    ) -> h5py.Dataset:
        """An empty array with checksums, to be filled by `put`; its group is made if need be."""
        group, _, leaf = name.rpartition("/")
        facts: dict[str, Any] = {}
        if 0 not in shape:
            rows = chunk_rows or max(1, CHUNK_BYTES // (np.dtype(dtype).itemsize * math.prod(shape[1:])))
            facts = {"chunks": (min(shape[0], rows), *shape[1:]), "fletcher32": True}
        with self._careful():
            parent = self._file
            if group:
                known = group in parent
                parent = parent[group] if known else parent.create_group(group, track_order=True)
            return parent.create_dataset(leaf, shape=shape, dtype=dtype, **facts)

    def put(self, dataset: h5py.Dataset, start: int, values: np.ndarray) -> None:
        """Write rows of an array from ``start`` on."""
        with self._careful():
            dataset[start : start + len(values)] = values

    def array(self, name: str, values: np.ndarray) -> None:
        """Write a numeric array (booleans included)."""
        little_endian = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        self.put(self.create(name, little_endian.shape, little_endian.dtype), 0, little_endian)
        self.digests[name] = array_digest(little_endian)

    def text(self, name: str, items: Sequence[str], *, what: str, any_bytes: bool = False) -> None:
        """Write texts as fixed-length UTF-8, padded with NUL; ``any_bytes`` allows text that isn't UTF-8."""
        encoded = encode_text(items, what, any_bytes=any_bytes)
        width = max(map(len, encoded), default=1) or 1
        dtype = h5py.string_dtype("utf-8", width)
        dataset = self.create(name, (len(encoded),), dtype)
        step = max(1, 8 * CHUNK_BYTES // width)
        for start in range(0, len(encoded), step):
            self.put(dataset, start, np.array(encoded[start : start + step], dtype=dtype))
        self.digests[name] = text_digest(encoded)

    def json(self, name: str, value: Any) -> None:
        """Write a JSON document, as bytes."""
        text = json.dumps(value, allow_nan=False, ensure_ascii=True)
        self.array(name, np.frombuffer(text.encode("ascii"), dtype=np.uint8))

    def finish(self) -> None:
        """Write digests and root attributes, and close."""
        raw = json.dumps(self.digests, ensure_ascii=True).encode("ascii")
        attrs = {name: value for name, value in self.attrs.items() if value is not None}
        attrs["digests_sha256"] = hashlib.sha256(raw).hexdigest()
        attrs["header_sha256"] = header_digest(attrs)
        self.array("digests", np.frombuffer(raw, dtype=np.uint8))
        with self._careful():
            for name, value in attrs.items():
                self._attribute(name, value)
        self.close()
        if self._sink.error is not None:
            raise self._sink.error

    def _attribute(self, name: str, value: str | int) -> None:
        if not isinstance(value, str):
            self._file.attrs.create(name, np.int64(value))
            return
        encoded = value.encode("utf-8", TEXT_ERRORS)
        if b"\0" in encoded or len(encoded) > MAX_ATTRIBUTE_BYTES:
            raise InputError(
                f"{name} that can't be stored",
                found=f"{len(encoded):,} bytes",
                expected=f"at most {MAX_ATTRIBUTE_BYTES:,} bytes without NUL",
            )
        dtype = h5py.string_dtype("utf-8", max(1, len(encoded)))
        self._file.attrs.create(name, np.bytes_(encoded), dtype=dtype)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with _interrupts_later():
            self._file.close()
            self._sink.close()
