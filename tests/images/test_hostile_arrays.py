"""``--from-array`` with files that lie about their size, or hold tensors that aren't plain numbers."""

from __future__ import annotations

import io
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ncm_cli.errors import InputError
from ncm_cli.images.arrays import open_array

from .test_embed_array import make


def header(shape: tuple[int, ...], dtype: str = "<f4", *, fortran: bool = False) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": fortran, "shape": shape})
    return stream.getvalue()


def packed(path: Path, head: bytes, count: int) -> Path:
    """An ``.npz`` of a few MB, whose one member has ``count`` zero bytes after its header."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("features.npy", "w", force_zip64=True) as member,
    ):
        member.write(head)
        for _ in range(count >> 24):
            member.write(bytes(1 << 24))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("fortran", [False, True])
def test_an_npz_is_refused_by_its_header(tmp_path: Path, fortran: bool) -> None:
    """8 MB unpacked to 7 GiB before their width was looked at."""
    size = 1 << 30
    path = packed(tmp_path / "x.npz", header((16, size // 64), fortran=fortran), size)
    tracemalloc.start()
    began = time.monotonic()
    message = "unpacks to far more than its size" if fortran else "an array of the wrong shape"
    with pytest.raises(InputError, match=message):
        make(tmp_path, path)
    assert time.monotonic() - began < 5
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    rows = packed(tmp_path / "y.npz", header((size // 32, 8)), size)
    with pytest.raises(InputError, match="other numbers of rows"):
        make(tmp_path, rows)


def test_rows_of_an_npz_are_unpacked_as_they_are_needed(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.npz", header((40, 1 << 20)), 40 << 22)
    tracemalloc.start()
    assert sum(len(block) for block in open_array(path).blocks()) == 40
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["npy", "npz"])
@pytest.mark.parametrize(
    "shape", [(41, 7), (39, 7), (40, 7, 1), (10**18, 10**18), (2**62, 4), (-1, 7), (40, 0), (), (40, 1 << 23)]
)
def test_headers_that_lie_are_refused(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    data, path = np.zeros((40, 7), "f4").tobytes(), tmp_path / f"x.{kind}"
    if kind == "npy":
        path.write_bytes(header(shape) + data)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("features.npy", header(shape) + data)
    with pytest.raises(InputError):
        make(tmp_path, path)
    assert not (tmp_path / "f.h5").exists()


def test_random_headers_are_refused_or_read(tmp_path: Path) -> None:
    rng, refused = np.random.default_rng(0), 0
    whole = header((40, 7)) + np.zeros((40, 7), "f4").tobytes()
    for at in range(200):
        bad, path = bytearray(whole), tmp_path / ("x.npy" if at % 2 else "x.npz")
        for place in rng.integers(128, size=2):
            bad[place] = int(rng.integers(32, 127))
        if at % 2:
            path.write_bytes(bad)
        else:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("features.npy", bytes(bad))
        try:
            list(open_array(path).blocks())
        except InputError:
            refused += 1
    assert refused > 100


def odd(name: str) -> Any:
    x = torch.arange(280.0).reshape(40, 7)
    made = {
        "quantised": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "sparse": lambda: x.to_sparse(),
        "rows": lambda: x.to_sparse_csr(),
        "meta": lambda: x.to("meta"),
        "nested": lambda: torch.nested.nested_tensor([x[0], x[1]]),
        "complex": lambda: x.to(torch.complex64),
        "bool": lambda: x > 3,
        "bits": lambda: x.to(torch.uint8).view(torch.bits8),
    }
    return made[name]()


@pytest.mark.filterwarnings("ignore")  # torch's, of the kinds of tensors made here
@pytest.mark.parametrize("name", ["quantised", "sparse", "rows", "meta", "nested", "complex", "bool", "bits"])
def test_tensors_without_plain_numbers_are_refused(tmp_path: Path, name: str) -> None:
    torch.save({"features": odd(name)}, tmp_path / "x.pt")
    with pytest.raises(InputError) as refused:
        make(tmp_path, tmp_path / "x.pt")
    assert f"where: {tmp_path / 'x.pt'}" in str(refused.value)
    assert not (tmp_path / "f.h5").exists()


@pytest.mark.parametrize(
    "kind", ["float16", "bfloat16", "float64", "int64", "uint8", "uint16", "float8_e5m2"]
)
def test_plain_numbers_of_any_width_are_read(tmp_path: Path, kind: str) -> None:
    x = torch.arange(40 * 7).reshape(40, 7) % 4
    torch.save(x.to(getattr(torch, kind)), tmp_path / "x.pt")
    with make(tmp_path, tmp_path / "x.pt") as store:
        np.testing.assert_array_equal(store.read(), x.float().numpy())


def test_turned_and_negated_tensors_are_read(tmp_path: Path) -> None:
    x = torch.arange(280.0).reshape(7, 40).t()
    torch.save(torch._neg_view(x), tmp_path / "x.pt")
    with make(tmp_path, tmp_path / "x.pt") as store:
        np.testing.assert_array_equal(store.read(), -x.numpy())


def test_a_packed_pt_is_refused(tmp_path: Path) -> None:
    """Mapped, its bytes would be taken for numbers."""
    torch.save(torch.zeros(40, 7), tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as old,
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.namelist():
            new.writestr(member, old.read(member))
    with pytest.raises(InputError, match="packed by another program"):
        make(tmp_path, tmp_path / "x.pt")
