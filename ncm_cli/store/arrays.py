"""Reads feature matrices made elsewhere: ``.npy``, ``.npz``, ``.pt`` and ``.parquet``, without unpickling."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ncm_cli.errors import InputError, listing, unknown

BLOCK_BYTES = 4 << 20
"""Bytes read at once: large enough for the disk, small beside everything else."""

PREFERRED = "features"
"""The name looked for where a file holds several matrices."""

HEADER_LIMIT = 10_000
"""Bytes of an array's header; numpy's own limit against hostile ones."""


@dataclass(frozen=True)
class ArraySource:
    """A feature matrix (rows, dim) on disk; ``blocks()`` reads it once, in order, as float32 (b, dim)."""

    path: Path
    rows: int
    dim: int
    blocks: Callable[[], Iterator[np.ndarray]]


def open_array(path: Path) -> ArraySource:
    """Look into a matrix file; nothing but its header is read where the format allows that.

    Raises `InputError` for another kind of file, one that needs unpickling, a matrix that isn't
    two-dimensional and real, and several matrices of which none is called ``features``.
    """
    if not path.is_file():
        what = "a folder where a file is expected" if path.is_dir() else "no such file"
        raise InputError(what, where=path)
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        raise InputError(
            "an array in a format that isn't known", where=path, expected=f"one of: {listing(_OPENERS)}"
        )
    with _readable(path):
        return opener(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Whatever a reader makes of a damaged or foreign file becomes one line."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        # numpy, torch and pyarrow promise nothing about what they raise on bytes that aren't theirs.
        text = " ".join(str(error).split())
        raise InputError(
            "the array can't be read",
            where=path,
            found=text[:300] or type(error).__name__,
            expected="a numeric matrix saved without pickled objects",
        ) from error


def _checked(path: Path, shape: tuple[int, ...], dtype: np.dtype | None, name: str = "") -> tuple[int, int]:
    where = f"{path}, {name}" if name else path
    if dtype is not None and dtype.kind not in "fiu":
        raise InputError("an array that doesn't hold real numbers", where=where, found=f"dtype {dtype}")
    if len(shape) != 2 or not all(shape):
        raise InputError(
            "an array of another shape", where=where, found=f"shape {tuple(shape)}",
            expected="(rows, dimensions), at least one of each",
        )  # fmt: skip
    return int(shape[0]), int(shape[1])


def _block_rows(dim: int, itemsize: int = 4) -> int:
    return max(1, BLOCK_BYTES // (dim * itemsize))


def _float32(block: np.ndarray) -> np.ndarray:
    # What doesn't fit becomes infinite, and is then refused by id.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(block, dtype=np.float32)


def _npy(path: Path) -> ArraySource:
    return _streamed(path, lambda: path.open("rb"))


def _npz(path: Path) -> ArraySource:
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    name = _only(path, names)

    def opened() -> IO[bytes]:
        return zipfile.ZipFile(path).open(f"{name}.npy")

    return _streamed(path, opened, name)


def _only(path: Path, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    if PREFERRED not in names:
        raise unknown("array", PREFERRED, names, where=path)
    return PREFERRED


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"version {version} of the npy format")
    shape, fortran, dtype = read(stream, max_header_size=HEADER_LIMIT)
    return shape, fortran, dtype


def _streamed(path: Path, opened: Callable[[], IO[bytes]], name: str = "") -> ArraySource:
    """Rows read one block after another: a memory map would count as this process's memory."""
    with opened() as stream:
        shape, fortran, dtype = _header(stream)
    if dtype.hasobject:
        raise InputError("an array of Python objects would need unpickling", where=path)
    rows, dim = _checked(path, shape, dtype, name)
    if fortran and rows > 1 and dim > 1:
        return _column_major(path, opened, (rows, dim), name)

    def blocks() -> Iterator[np.ndarray]:
        step = _block_rows(dim, dtype.itemsize)
        with _readable(path), opened() as stream:
            _header(stream)
            for start in range(0, rows, step):
                count = min(step, rows - start)
                data = stream.read(count * dim * dtype.itemsize)
                if len(data) < count * dim * dtype.itemsize:
                    raise ValueError(f"the file ends at row {start + len(data) // (dim * dtype.itemsize)}")
                yield _float32(np.frombuffer(data, dtype).reshape(count, dim))

    return ArraySource(path, rows, dim, blocks)


def _column_major(
    path: Path, opened: Callable[[], IO[bytes]], shape: tuple[int, int], name: str
) -> ArraySource:
    if not name:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    else:
        # Rows of a compressed column-major matrix can't be had without all of it.
        with opened() as stream:
            matrix = np.lib.format.read_array(stream, allow_pickle=False)
    return _sliced(path, shape, lambda start, stop: matrix[start:stop])


def _sliced(path: Path, shape: tuple[int, int], take: Callable[[int, int], np.ndarray]) -> ArraySource:
    def blocks() -> Iterator[np.ndarray]:
        step = _block_rows(shape[1])
        for start in range(0, shape[0], step):
            yield _float32(take(start, min(start + step, shape[0])))

    return ArraySource(path, *shape, blocks)


def _pt(path: Path) -> ArraySource:
    import pickle

    import torch

    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files older than torch 1.6 can't be mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            "the file needs unpickling, which could run any code", where=path,
            expected="a tensor, or a dictionary of tensors", fix="save the tensor alone: torch.save(x, ...)",
        ) from None  # fmt: skip
    tensor: Any = loaded
    if isinstance(loaded, dict):
        matrices = {str(k): v for k, v in loaded.items() if isinstance(v, torch.Tensor) and v.ndim == 2}
        tensor = matrices[_only(path, list(matrices))]
    if not isinstance(tensor, torch.Tensor):
        raise InputError("no tensor in the file", where=path, found=type(tensor).__name__)
    if tensor.is_complex() or tensor.dtype == torch.bool or tensor.layout != torch.strided:
        raise InputError("a tensor that doesn't hold real numbers", where=path, found=str(tensor.dtype))
    shape = _checked(path, tuple(tensor.shape), None)
    plain = tensor.detach()
    return _sliced(path, shape, lambda start, stop: plain[start:stop].to(torch.float32).numpy())


def _parquet(path: Path) -> ArraySource:
    try:
        import pyarrow.parquet as parquet
        import pyarrow.types as types
    except ImportError:
        raise InputError(
            "Parquet files need pyarrow", where=path, fix="pip install 'ncm-cli[parquet]'"
        ) from None
    file = parquet.ParquetFile(path)
    schema = file.schema_arrow
    lists = [f.name for f in schema if types.is_list(f.type) or types.is_fixed_size_list(f.type)]
    names = [_only(path, lists)] if lists else list(schema.names)
    rows = file.metadata.num_rows
    first = next(file.iter_batches(batch_size=1, columns=names), None)
    if first is None:
        raise InputError("no rows in the file", where=path)
    dim = _matrix(first, bool(lists)).shape[1]
    _checked(path, (rows, dim), None)

    def blocks() -> Iterator[np.ndarray]:
        with _readable(path):
            for batch in file.iter_batches(batch_size=_block_rows(dim), columns=names):
                block = _matrix(batch, bool(lists))
                if block.shape[1:] != (dim,):
                    raise ValueError(f"rows of {block.shape[1:]} numbers where the first has {dim}")
                yield _float32(block)

    return ArraySource(path, rows, dim, blocks)


def _matrix(batch: Any, is_list: bool) -> np.ndarray:
    if is_list:
        rows = [np.asarray(row) for row in batch.column(0).to_pylist()]
        matrix = np.stack(rows)
    else:
        matrix = np.stack([np.asarray(column.to_pylist()) for column in batch.columns], axis=1)
    if matrix.dtype == object:
        matrix = np.array([[math.nan if x is None else x for x in row] for row in matrix], dtype=np.float64)
    if matrix.dtype.kind not in "fiu":
        raise ValueError(f"columns of {matrix.dtype} where numbers are expected")
    return matrix


_OPENERS: dict[str, Callable[[Path], ArraySource]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".pt": _pt,
    ".pth": _pt,
    ".parquet": _parquet,
}
