"""Files that aren't ours, are cut short, or mean harm: one line, bounded memory, no other file touched."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.store import recognise
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import read_result
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import read_probe

READERS = {"features": FeatureStore, "pairs": read_pairs, "probe": read_probe, "result": read_result}

BYTES = {
    "empty": b"",
    "one byte": b"\x89",
    "text": b"id,label\n1,cat\n",
    "html": b"<html>404</html>",
    "only a signature": b"\x89HDF\r\n\x1a\n",
    "zeros": bytes(4096),
    "pickle": pickle.dumps({"features": [1.0]}),
    "zip": b"PK\x03\x04" + bytes(200),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "json of another kind": b'{"n": 1}',
    "half a json": b'{"n": ',
    "deep json": b'{"ncm_format": ' + b"[" * 100_000,
    "nan json": b'{"ncm_format": "ncm-result", "ncm_format_version": 1, "x": NaN}',
    "a list": b"[]",
    "a huge safetensors header": (10**12).to_bytes(8, "little") + b"{" + bytes(50),
    "foreign safetensors": (2).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", BYTES)
def test_what_is_not_ours_is_refused_in_one_line(tmp_path: Path, reader: str, content: str) -> None:
    """h5py/h5py#879, TE_Density#149."""
    path = tmp_path / "file"
    path.write_bytes(BYTES[content])
    for read in (READERS[reader], recognise):
        if read is recognise and content == "foreign safetensors":
            continue
        with pytest.raises(InputError, match=r"\w") as error:
            read(path)
        assert error.value.where == path
        assert "\n" not in error.value.what + str(error.value.found)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_a_file_cut_short_is_refused(
    write_store: Callable[..., Path], pairs_path: Path, probe_path: Path, share: float
) -> None:
    """h5py/h5py#879, TE_Density#149."""
    for path, reader in ((write_store(), "features"), (pairs_path, "pairs"), (probe_path, "probe")):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(InputError, match=r"cut short|damaged|not a"):
            READERS[reader](path)


@pytest.mark.parametrize("reader", READERS)
def test_folders_devices_and_missing_files(tmp_path: Path, reader: str) -> None:
    with pytest.raises(InputError, match="a folder where a file"):
        READERS[reader](tmp_path)
    with pytest.raises(InputError, match="no such file"):
        READERS[reader](tmp_path / "nobody")
    with pytest.raises(InputError, match="not a regular file"):
        READERS[reader](Path("/dev/null"))


def test_one_kind_of_file_is_not_taken_for_another(
    write_store: Callable[..., Path], pairs_path: Path, probe_path: Path
) -> None:
    with pytest.raises(InputError, match="not a pair store") as error:
        read_pairs(write_store())
    assert (error.value.found, error.value.expected) == (
        "a feature store, ncm_format 'ncm-features'",
        "ncm-pairs",
    )
    with pytest.raises(InputError, match="not a feature store"):
        FeatureStore(probe_path)
    with pytest.raises(InputError, match="not a probe"):
        read_probe(pairs_path)


def _replace(file: h5py.File, name: str, **arguments: object) -> None:
    del file[name]
    file.create_dataset(name, **arguments)


def _external_link(file: h5py.File) -> None:
    del file["features"]
    file["features"] = h5py.ExternalLink("/etc/passwd", "/features")


def _soft_link(file: h5py.File) -> None:
    del file["features"]
    file["features"] = h5py.SoftLink("/columns/../id")


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(40, 8), dtype="f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", shape=(40, 8))
    del file["features"]
    file.create_virtual_dataset("features", layout)


def _many_groups(file: h5py.File) -> None:
    for index in range(201):
        file.create_group(f"g{index}")


def _cycle(file: h5py.File) -> None:
    file["columns/loop"] = file["/"]


def _named_type(file: h5py.File) -> None:
    file["type"] = np.dtype("f4")


def _format(**values: object) -> Callable[[h5py.File], None]:
    return lambda file: file.attrs.update(values)


HOSTILE: dict[str, tuple[Callable[[h5py.File], object], str]] = {
    "external link": (_external_link, "'features' is an external link"),
    "soft link": (_soft_link, "'features' is a soft link"),
    "dangling link": (
        lambda f: f.update(x=h5py.SoftLink("/no")) or f.__setitem__("y", h5py.SoftLink("/no")),
        "link",
    ),
    "external storage": (
        lambda f: _replace(f, "features", shape=(40, 8), dtype="f4", external=[("/etc/passwd", 0, 1280)]),
        "lies in other files",
    ),
    "virtual": (_virtual, "lies in other files"),
    "huge chunked shape": (
        lambda f: _replace(f, "features", shape=(10**9, 10**6), dtype="f4", chunks=(1, 512)),
        "claims 4,000,000,000,000,000 bytes",
    ),
    "huge plain shape": (
        lambda f: _replace(f, "features", shape=(10**6, 512), dtype="f4"),
        "claims 2,048,000,000",
    ),
    "unwritten": (lambda f: _replace(f, "features", shape=(40, 8), dtype="f4", chunks=(40, 8)), "stores 0"),
    "huge chunks": (
        lambda f: _replace(f, "features", shape=(40, 8), maxshape=(None, 8), dtype="f4", chunks=(10**7, 8)),
        "chunks of 320,000,000 bytes",
    ),
    "huge values": (
        lambda f: _replace(f, "id", shape=(40,), dtype="S100000000", chunks=(1,)),
        "values of 100,000,000 bytes",
    ),
    "compressed": (
        lambda f: _replace(f, "features", data=np.zeros((40, 8), "f4"), compression="gzip"),
        "packed with deflate",
    ),
    "compound": (
        lambda f: _replace(f, "features", data=np.zeros(40, [("a", "f4"), ("b", "i4")])),
        "a compound or reference type",
    ),
    "reference": (lambda f: f.create_dataset("x", data=np.array([f.ref], h5py.ref_dtype)), "reference type"),
    "variable-length numbers": (
        lambda f: f.create_dataset("x", shape=(3,), dtype=h5py.vlen_dtype("f4")),
        "a compound or reference type",
    ),
    "variable-length text": (
        lambda f: _replace(f, "id", data=["a"] * 40, dtype=h5py.string_dtype()),
        "text of variable length",
    ),
    "named type": (_named_type, "neither a group nor an array"),
    "scalar": (lambda f: _replace(f, "features", data=np.float32(3)), "a single value"),
    "null": (lambda f: _replace(f, "features", data=h5py.Empty("f4")), "a single value"),
    "other width": (lambda f: _replace(f, "features", data=np.zeros((40, 8), "f8")), "type float64"),
    "flat": (lambda f: _replace(f, "features", data=np.zeros(40, "f4")), r"shape \(40,\)"),
    "cycle": (_cycle, "linked twice"),
    "deep": (lambda f: f.create_group("a/b/c/d/e/f/g"), "nested too deeply"),
    "large attribute": (lambda f: f.attrs.create("x", np.zeros(7000)), "root attribute 'x'"),
    "huge text attribute": (lambda f: f.attrs.update(x="y" * (5 << 20)), "heap of text"),
    "many attributes": (lambda f: [f.attrs.create(f"a{i}", i) for i in range(300)], "root attributes"),
    "future": (_format(ncm_format_version=2), "ncm_format_version 2"),
    "no version": (lambda f: f.attrs.pop("ncm_format_version"), "ncm_format_version None"),
    "another format": (_format(ncm_format=np.bytes_("their-features")), "their-features"),
    "no format": (lambda f: f.attrs.pop("ncm_format"), "without ncm_format"),
    "another header": (lambda f: f.attrs.create("label_column", np.bytes_(b"place")), "header_sha256"),
    "a column that was added": (
        lambda f: f.create_dataset("columns/new/codes", data=np.zeros(40, "i4")),
        "columns/new",
    ),
    "a column that was removed": (lambda f: f.__delitem__("columns/place"), "columns/place"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_hdf5_is_refused(write_store: Callable[..., Path], case: str) -> None:
    change, message = HOSTILE[case]
    path = write_store()
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(InputError, match=message) as error, FeatureStore(path) as store:
        store.verify()
    assert "\n" not in error.value.what + str(error.value.found)


@pytest.mark.parametrize("name", ["options", "request"])
@pytest.mark.parametrize("content", [b"[1]", b"3", b"null", b"{", b"[" * 100_000])
def test_documents_of_another_kind_are_refused(
    write_store: Callable[..., Path], pairs_path: Path, name: str, content: bytes
) -> None:
    foreign = {write_store(): lambda path: getattr(FeatureStore(path), name), pairs_path: read_pairs}
    for path, read in foreign.items():
        with h5py.File(path, "r+") as file:
            del file.attrs["header_sha256"]
            if name in file:
                _replace(file, name, data=np.frombuffer(content, np.uint8))
        if name == "options" or path != pairs_path:
            with pytest.raises(InputError, match="a damaged file"):
                read(path)


def test_endless_trees_are_refused(write_store: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncm_cli.store.hdf5.MAX_OBJECTS", 200)
    path = write_store()
    with h5py.File(path, "r+") as file:
        _many_groups(file)
    with pytest.raises(InputError, match="over 200 objects"):
        FeatureStore(path)


def test_a_heap_that_would_keep_hdf5_busy_for_ever(write_store: Callable[..., Path]) -> None:
    path = write_store()
    with h5py.File(path, "r+") as file:
        file.attrs["note"] = "text of variable length lies in a heap"
    raw = bytearray(path.read_bytes())
    heap = raw.index(b"GCOL")
    size = int.from_bytes(raw[heap + 8 : heap + 16], "little")
    at = heap + 16
    while int.from_bytes(raw[at : at + 2], "little"):
        at += 16 + (int.from_bytes(raw[at + 8 : at + 16], "little") + 7) // 8 * 8
    assert at < heap + size
    # A free object of no length: HDF5 2.0 goes around it without end.
    raw[at + 8 : at + 16] = bytes(8)
    path.write_bytes(raw)
    with pytest.raises(InputError, match="heap of text"):
        FeatureStore(path)


def test_refusing_takes_little_memory(write_store: Callable[..., Path]) -> None:
    path = write_store()
    with h5py.File(path, "r+") as file:
        HOSTILE["huge chunked shape"][0](file)
    program = (
        "import resource, sys\n"
        "from ncm_cli.errors import InputError\n"
        "from ncm_cli.store.features import FeatureStore\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    FeatureStore(sys.argv[1])\nexcept InputError:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 20_000  # kilobytes
