"""Reads feature matrices made elsewhere: ``.npy``, ``.npz``, ``.pt`` and ``.parquet``, without unpickling."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, listing, unknown
from ncm_cli.images.weights import pickled_object
from ncm_cli.store.files import one_line, require_file

BLOCK_BYTES = 4 << 20
"""Bytes read at once: large enough for the disk, small beside everything else."""

PREFERRED = "features"
"""The name looked for where a file holds several matrices."""


@dataclass(frozen=True)
class ArraySource:
    """A feature matrix (rows, dim) on disk; ``blocks()`` reads it once, in order, as float32 (b, dim)."""

    path: Path
    rows: int
    dim: int
    blocks: Callable[[], Iterator[np.ndarray]]


def open_array(path: Path) -> ArraySource:
    """Look into a matrix file; of ``.npy``, ``.pt`` and ``.parquet`` its header alone is read.

    Raises `InputError` for another kind of file, one that needs unpickling, a matrix that isn't
    two-dimensional and real, and several matrices of which none is called ``features``.
    """
    opener = _OPENERS.get(require_file(path).suffix.lower())
    if opener is None:
        raise InputError(
            "an array in a format that isn't known", where=path, expected=f"one of: {listing(_OPENERS)}"
        )
    with _readable(path):
        found = opener(path)
        return found if isinstance(found, ArraySource) else _sliced(path, found)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Whatever a reader makes of a damaged or foreign file becomes one line."""
    try:
        yield
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(
            "the file needs unpickling, which could run any code",
            where=path,
            found=pickled_object(error),
            expected="a tensor, or a dictionary of tensors",
            fix="save the tensor alone: torch.save(x, ...)",
        ) from None
    except Exception as error:
        # numpy, torch and pyarrow promise nothing about what they raise on bytes that aren't theirs.
        raise InputError(
            "the array can't be read",
            where=path,
            found=one_line(error, 300) or type(error).__name__,
            expected="a numeric matrix saved without pickled objects",
        ) from error


def _checked(path: Path, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2 or not all(shape):
        expected = "(rows, dimensions), at least one of each"
        raise InputError("an array of another shape", where=path, found=f"shape {shape}", expected=expected)
    return int(shape[0]), int(shape[1])


def _block_rows(dim: int) -> int:
    return max(1, BLOCK_BYTES // (4 * dim))


def _float32(block: np.ndarray) -> np.ndarray:
    # What doesn't fit becomes infinite, and is then refused by id.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(block, dtype=np.float32)


def _only(path: Path, names: list[str]) -> str:
    if len(names) != 1 and PREFERRED not in names:
        raise unknown("array", PREFERRED, names, where=path)
    return names[0] if len(names) == 1 else PREFERRED


def _npy(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _npz(path: Path) -> np.ndarray:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        return archive[_only(path, archive.files)]


def _sliced(path: Path, matrix: Any) -> ArraySource:
    """Rows of a (rows, dim) matrix of numpy's or torch's."""
    rows, dim = _checked(path, tuple(matrix.shape))
    if isinstance(matrix, np.ndarray) and matrix.dtype.kind not in "fiu":
        what = "an array that doesn't hold real numbers"
        raise InputError(what, where=path, found=f"dtype {matrix.dtype}")

    def blocks() -> Iterator[np.ndarray]:
        step = _block_rows(dim)
        for start in range(0, rows, step):
            part = matrix[start : start + step]
            yield _float32(part if isinstance(part, np.ndarray) else part.float().numpy())

    return ArraySource(path, rows, dim, blocks)


def _pt(path: Path) -> Any:
    import torch

    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        # Files older than torch 1.6 can't be mapped.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    tensor = loaded
    if isinstance(loaded, dict):
        matrices = {str(k): v for k, v in loaded.items() if isinstance(v, torch.Tensor) and v.ndim == 2}
        tensor = matrices[_only(path, list(matrices))] if matrices else loaded
    if not isinstance(tensor, torch.Tensor):
        kind = type(loaded).__name__
        if isinstance(loaded, dict):
            kind += " with " + listing(f"{name!r}: {type(value).__name__}" for name, value in loaded.items())
        raise InputError(
            "no matrix in the file",
            where=path,
            found=f"a {kind}",
            expected="a tensor (rows, dimensions), or a dictionary of tensors",
            fix="save the tensor alone: torch.save(x, ...)",
        )
    if tensor.is_complex() or tensor.dtype == torch.bool or tensor.layout != torch.strided:
        raise InputError("a tensor that doesn't hold real numbers", where=path, found=str(tensor.dtype))
    return tensor.detach()


def _parquet(path: Path) -> ArraySource:
    try:
        import pyarrow.parquet as parquet
        import pyarrow.types as types
    except ImportError:
        fix = "pip install 'ncm-cli[parquet]'"
        raise InputError("Parquet files need pyarrow", where=path, fix=fix) from None
    file = parquet.ParquetFile(path)
    schema = file.schema_arrow
    lists = [f.name for f in schema if types.is_list(f.type) or types.is_fixed_size_list(f.type)]
    names = [_only(path, lists)] if lists else list(schema.names)
    first = next(file.iter_batches(batch_size=1, columns=names), None)
    if first is None:
        raise InputError("no rows in the file", where=path)
    rows, dim = _checked(path, (file.metadata.num_rows, _matrix(first, bool(lists)).shape[1]))

    def blocks() -> Iterator[np.ndarray]:
        with _readable(path):
            for batch in file.iter_batches(batch_size=_block_rows(dim), columns=names):
                block = _matrix(batch, bool(lists))
                if block.shape[1:] != (dim,):
                    raise ValueError(f"rows of {block.shape[1:]} numbers where the first has {dim}")
                yield _float32(block)

    return ArraySource(path, rows, dim, blocks)


def _matrix(batch: Any, is_list: bool) -> np.ndarray:
    columns = batch.column(0).to_pylist() if is_list else [column.to_pylist() for column in batch.columns]
    matrix = np.stack([np.asarray(values) for values in columns], axis=0 if is_list else 1)
    if matrix.dtype == object:
        matrix = np.array([[math.nan if x is None else x for x in row] for row in matrix], dtype=np.float64)
    if matrix.dtype.kind not in "fiu":
        raise ValueError(f"columns of {matrix.dtype} where numbers are expected")
    return matrix


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".pt": _pt,
    ".pth": _pt,
    ".parquet": _parquet,
}
