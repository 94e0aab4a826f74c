"""Reads feature matrices made elsewhere: ``.npy``, ``.npz`` and ``.pt``, without unpickling."""

from __future__ import annotations

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
    """A feature matrix (rows, dim): numpy's, mapped from its file where the format allows it, or torch's."""

    path: Path
    matrix: Any

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self.matrix.shape[0])

    @property
    def dim(self) -> int:
        """Length of a row."""
        return int(self.matrix.shape[1])

    def blocks(self) -> Iterator[np.ndarray]:
        """The rows in order, as float32 (b, dim); numbers too large for that are infinite."""
        step = max(1, BLOCK_BYTES // (4 * self.dim))
        for start in range(0, self.rows, step):
            part = self.matrix[start : start + step]
            with np.errstate(over="ignore", invalid="ignore"):
                block = part if isinstance(part, np.ndarray) else part.float().numpy()
                block = np.ascontiguousarray(block, dtype=np.float32)
            yield block


def open_array(path: Path) -> ArraySource:
    """Look into a matrix file; of ``.npy`` and ``.pt`` its header alone is read.

    Raises `InputError` for another kind of file, one that needs unpickling, a matrix that isn't
    two-dimensional and real, and several matrices of which none is called ``features``.
    """
    opener = _OPENERS.get(require_file(path).suffix.lower())
    if opener is None:
        raise InputError(
            "an array in a format that isn't known",
            where=path,
            expected=f"one of: {listing(_OPENERS)}",
            fix="numpy.save(FILE.npy, X)",
        )
    with _readable(path):
        matrix = opener(path)
        shape = tuple(matrix.shape)
    if len(shape) != 2 or not all(shape):
        expected = "(rows, dimensions), at least one of each"
        raise InputError("an array of another shape", where=path, found=f"shape {shape}", expected=expected)
    if isinstance(matrix, np.ndarray) and matrix.dtype.kind not in "fiu":
        what = "an array that doesn't hold real numbers"
        raise InputError(what, where=path, found=f"dtype {matrix.dtype}")
    return ArraySource(path, matrix)


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
        # numpy and torch promise nothing about what they raise on bytes that aren't theirs.
        raise InputError(
            "the array can't be read",
            where=path,
            found=one_line(error, 300) or type(error).__name__,
            expected="a numeric matrix saved without pickled objects",
        ) from error


def _only(path: Path, names: list[str]) -> str:
    if len(names) != 1 and PREFERRED not in names:
        raise unknown("array", PREFERRED, names, where=path)
    return names[0] if len(names) == 1 else PREFERRED


def _npy(path: Path) -> np.ndarray:
    with path.open("rb") as stream:
        # What is none would be taken for a pickle, which numpy advises to load all the same.
        if stream.read(6) != b"\x93NUMPY":
            raise ValueError("content that doesn't begin as .npy files do")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        told = {
            "Python objects": "an array of Python objects",
            "mmap length": "fewer bytes than its header says",
        }
        words = [mine for theirs, mine in told.items() if theirs in str(error)]
        raise ValueError(*(words or error.args)) from error


def _npz(path: Path) -> np.ndarray:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        return archive[_only(path, archive.files)]


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


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".pt": _pt,
    ".pth": _pt,
}
