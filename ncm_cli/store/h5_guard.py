"""What an HDF5 file may hold, checked before it is read: no links elsewhere, odd types or huge claims."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from ncm_cli.errors import InputError

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
