"""What an HDF5 file may hold, checked before it is read: no links elsewhere, odd types or huge claims.

Reading HDF5 files of ours, and refusing those of strangers.

A file of ours has checksummed metadata (the format of HDF5 1.10), Fletcher-32 on every array, fixed-length
UTF-8 text, and digests of its own: the array ``digests`` holds a JSON object from array name to SHA-256, the
root attribute ``digests_sha256`` covers it, and ``header_sha256`` covers all other root attributes.

The file under an HDF5 file that is being written.

HDF5 crashes the process when a write fails below it, as on a full disk. So it writes through an object that
keeps the first error to itself, goes on in memory until the file is closed, and only then lets the error out.

Writing HDF5 files whose every byte is accounted for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import h5py
import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.digests import (
    TEXT_ERRORS,
    array_digest,
    damaged,
    encode_text,
    header_digest,
    require_version,
    text_digest,
)
from ncm_cli.store.files import one_line, require_file

MAX_CHUNK_BYTES = 64 << 20
"""Largest chunk or single value: HDF5 holds a whole one in memory."""

MAX_ATTRIBUTES = 200
MAX_ATTRIBUTE_BYTES = 64 << 10
MAX_OBJECTS = 20_000
MAX_HEAP_BYTES = 4 << 20
MAX_DEPTH = 4

_HEAP = b"GCOL"
_FILTERS = {h5py.h5z.FILTER_FLETCHER32: "fletcher32", h5py.h5z.FILTER_SHUFFLE: "shuffle"}
_CLASSES = {h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.STRING, h5py.h5t.ENUM}
_LINKS = {h5py.h5l.TYPE_SOFT: "a soft link", h5py.h5l.TYPE_EXTERNAL: "an external link"}


def hostile(path: Path, found: str) -> InputError:
    """The error for a file that holds what no file of ours holds."""
    return InputError(
        "a file that won't be read", where=path, found=found, expected="plain arrays in one file"
    )


def check_tree(file: h5py.File, path: Path) -> None:
    """Refuse links other than hard ones, cycles, deep or endless trees, and anything but groups and arrays.

    Nothing is opened through a link before its kind is known.
    """
    pending: list[tuple[h5py.h5g.GroupID, str, int]] = [(file.id, "", 0)]
    seen: set[Any] = {_address(file.id)}
    while pending:
        group, prefix, depth = pending.pop()
        names: list[bytes] = []
        group.links.iterate(names.append)
        for raw in names:
            name = f"{prefix}{raw.decode('utf-8', 'backslashreplace')}"
            kind = group.links.get_info(raw).type
            if kind != h5py.h5l.TYPE_HARD:
                raise hostile(path, f"{name!r} is {_LINKS.get(kind, 'a link of an unknown kind')}")
            opened = h5py.h5o.open(group, raw)
            address = _address(opened)
            if address in seen or len(seen) > MAX_OBJECTS:
                raise hostile(
                    path, f"{name!r} is linked twice" if address in seen else f"over {MAX_OBJECTS:,} objects"
                )
            seen.add(address)
            if isinstance(opened, h5py.h5g.GroupID):
                if depth >= MAX_DEPTH:
                    raise hostile(path, f"{name!r} is nested too deeply")
                pending.append((opened, f"{name}/", depth + 1))
            elif not isinstance(opened, h5py.h5d.DatasetID):
                raise hostile(path, f"{name!r} is neither a group nor an array")
            else:
                _check_type(opened.get_type(), name, path)


def _address(opened: Any) -> Any:
    return h5py.h5o.get_info(opened).addr


def _check_type(kind: Any, name: str, path: Path) -> None:
    if kind.get_class() not in _CLASSES or (kind.get_class() == h5py.h5t.STRING and kind.is_variable_str()):
        variable = kind.get_class() == h5py.h5t.STRING
        raise hostile(
            path,
            f"{name!r} holds {'text of variable length' if variable else 'a compound or reference type'}",
        )
    if kind.get_size() > MAX_CHUNK_BYTES:
        raise hostile(path, f"{name!r} has values of {kind.get_size():,} bytes")


def check_dataset(dataset: h5py.Dataset, path: Path, file_bytes: int) -> None:
    """Refuse an array that lies elsewhere, is compressed, or claims more than the file holds."""
    name = dataset.name.lstrip("/")
    _check_type(dataset.id.get_type(), name, path)
    space = dataset.id.get_space()
    if space.get_simple_extent_type() != h5py.h5s.SIMPLE:
        raise hostile(path, f"{name!r} is a single value, not an array")
    plist = dataset.id.get_create_plist()
    if plist.get_layout() == h5py.h5d.VIRTUAL or plist.get_external_count():
        raise hostile(path, f"{name!r} lies in other files")
    for index in range(plist.get_nfilters()):
        code, _, _, label = plist.get_filter(index)
        if code not in _FILTERS:
            raise hostile(path, f"{name!r} is packed with {label.decode('ascii', 'replace') or code}")
    size = dataset.id.get_type().get_size()
    claimed = size
    for length in dataset.shape:
        claimed *= length
    if claimed > file_bytes:
        raise hostile(path, f"{name!r} claims {claimed:,} bytes in a file of {file_bytes:,}")
    if plist.get_layout() == h5py.h5d.CHUNKED and claimed:
        chunk = size
        for length in plist.get_chunk():
            chunk *= length
        if chunk > MAX_CHUNK_BYTES:
            raise hostile(path, f"{name!r} has chunks of {chunk:,} bytes")
    if claimed and not claimed <= dataset.id.get_storage_size() <= file_bytes:
        raise hostile(path, f"{name!r} claims {claimed:,} bytes and stores {dataset.id.get_storage_size():,}")


def check_attributes(file: h5py.File, path: Path) -> dict[str, Any]:
    """The root attributes as text and integers; refuses other types and large ones."""
    count = h5py.h5a.get_num_attrs(file.id)
    if count > MAX_ATTRIBUTES:
        raise hostile(path, f"{count:,} root attributes")
    found: dict[str, Any] = {}
    heaps_checked = False
    for index in range(count):
        attribute = h5py.h5a.open(file.id, index=index)
        name = attribute.name.decode("utf-8", "backslashreplace")
        kind = attribute.get_type()
        scalar = attribute.get_space().get_simple_extent_npoints() == 1
        plain = kind.get_class() in {h5py.h5t.INTEGER, h5py.h5t.STRING}
        if not plain or not scalar or attribute.get_storage_size() > MAX_ATTRIBUTE_BYTES:
            raise hostile(path, f"root attribute {name!r} isn't a short text or an integer")
        if kind.get_class() == h5py.h5t.STRING and kind.is_variable_str() and not heaps_checked:
            # Programs other than ours write such text, which lies in a heap without checksums.
            _check_heaps(path)
            heaps_checked = True
        found[name] = _plain(file.attrs[name], name, path)
    return found


def _check_heaps(path: Path) -> None:
    """Refuse heaps of variable-length text that are large, or whose damage would keep HDF5 busy for ever."""
    with path.open("rb") as stream:
        kept, offset = b"", 0
        while block := stream.read(1 << 20):
            window = kept + block
            at = window.find(_HEAP)
            while at >= 0:
                place = offset - len(kept) + at
                _check_heap(stream, place, path)
                stream.seek(offset + len(block))
                at = window.find(_HEAP, at + 1)
            kept, offset = window[-len(_HEAP) + 1 :], offset + len(block)


def _check_heap(stream: BinaryIO, place: int, path: Path) -> None:
    stream.seek(place)
    _, version, size = struct.unpack("<4sB3xQ", stream.read(16).ljust(16, b"\0"))
    body = stream.read(min(size, MAX_HEAP_BYTES) - 16) if size > 16 else b""
    at, whole = 0, version == 1 and len(body) == size - 16
    while whole and len(body) - at >= 16:
        index, length = struct.unpack_from("<H6xQ", body, at)
        # Object 0 is what is free, its own head included; the others are padded to eight bytes.
        step = length if index == 0 else 16 + (length + 7) // 8 * 8
        whole, at = 16 <= step <= len(body) - at, at + step
    if not whole:
        raise hostile(path, f"a damaged or large heap of text at byte {place:,}")


def _plain(value: Any, name: str, path: Path) -> Any:
    if isinstance(value, np.ndarray):
        value = value.reshape(-1)[0]
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        if len(value) > MAX_ATTRIBUTE_BYTES:
            raise hostile(path, f"root attribute {name!r} of {len(value):,} characters")
        return str(value)
    return int(value)


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


class Sink:
    """A file object for h5py whose methods never raise; ``error`` is what went wrong first."""

    def __init__(self, path: Path) -> None:
        self.error: BaseException | None = None
        self._descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        self._position = 0
        self._size = 0
        self._unwritten: list[tuple[int, bytes]] = []

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, as of a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def write(self, data: memoryview) -> int:
        """Write at the position; what can't be written is kept in memory."""
        raw = memoryview(data).cast("B")
        done = 0
        while self.error is None and done < len(raw):
            try:
                os.lseek(self._descriptor, self._position + done, os.SEEK_SET)
                done += os.write(self._descriptor, raw[done:])
            except BaseException as error:
                self.error = error
        if done < len(raw):
            self._unwritten.append((self._position + done, bytes(raw[done:])))
        self._position += len(raw)
        self._size = max(self._size, self._position)
        return len(raw)

    def readinto(self, buffer: memoryview) -> int:
        """Read at the position what was written there."""
        into = memoryview(buffer).cast("B")
        into[:] = bytes(len(into))
        try:
            os.lseek(self._descriptor, self._position, os.SEEK_SET)
            found = os.read(self._descriptor, len(into))
            into[: len(found)] = found
        except BaseException as error:
            self.error = self.error or error
        for start, data in self._unwritten:
            first, last = max(start, self._position), min(start + len(data), self._position + len(into))
            if first < last:
                into[first - self._position : last - self._position] = data[first - start : last - start]
        self._position += len(into)
        return len(into)

    def read(self, size: int) -> bytes:
        """Read at the position what was written there."""
        buffer = bytearray(size)
        self.readinto(memoryview(buffer))
        return bytes(buffer)

    def truncate(self, size: int) -> int:
        """Set the size."""
        try:
            os.ftruncate(self._descriptor, size)
        except BaseException as error:
            self.error = self.error or error
        self._size = size
        return size

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Let Ctrl-C act after the block: inside HDF5 it would pass for a failed write. For short blocks only."""
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
