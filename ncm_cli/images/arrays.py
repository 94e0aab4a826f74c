"""Reads feature matrices made elsewhere: ``.npy``, ``.npz`` and ``.pt``, without unpickling."""

from __future__ import annotations

import errno
import itertools
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from ncm_cli.errors import InputError, listing, unknown
from ncm_cli.images.weights import pickled_object, refuse_bomb, require_stored
from ncm_cli.store.digests import digest_of
from ncm_cli.store.features import MAX_DIM
from ncm_cli.store.files import one_line, require_file, sha256_file
from ncm_cli.store.memory import GivenArray
from ncm_cli.store.sniff import HEAD_BYTES, sniff

BLOCK_BYTES = 4 << 20
"""Bytes of one read."""

PREFERRED = "features"
"""The matrix that is read if a file holds several."""


class _Rows(Protocol):
    """A matrix whose rows are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def parts(self, step: int) -> Iterator[Any]:
        """``step`` rows at a time, in order."""


@dataclass(frozen=True)
class _Loaded:
    """A matrix of numpy's or torch's, in memory or mapped from its file."""

    matrix: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    @property
    def dtype(self) -> Any:
        return self.matrix.dtype

    def parts(self, step: int) -> Iterator[Any]:
        return (self.matrix[start : start + step] for start in range(0, self.shape[0], step))


@dataclass(frozen=True)
class _Packed:
    """A matrix in an ``.npz``, unpacked block by block."""

    path: Path
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def parts(self, step: int) -> Iterator[np.ndarray]:
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as stream:
            _header(stream)
            for start in range(0, self.shape[0], step):
                shape = (min(step, self.shape[0] - start), *self.shape[1:])
                data = stream.read(math.prod(shape) * self.dtype.itemsize)
                yield np.frombuffer(data, self.dtype).reshape(shape)


@dataclass(frozen=True)
class ArraySource:
    """A feature matrix (rows, dim) in a file, in the files of a folder, or in memory."""

    path: Path | GivenArray
    matrix: _Rows

    def sha256(self) -> str:
        """The digest of the file, or what stands for it."""
        if isinstance(self.path, GivenArray):
            return self.path.sha256
        if isinstance(self.matrix, _Parts):
            return digest_of([[path.name, sha256_file(path)] for path in self.matrix.paths])
        return sha256_file(self.path)

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
        parts = self.matrix.parts(max(1, BLOCK_BYTES // (4 * self.dim)))
        while (block := self._next(parts)) is not None:
            yield block

    def _next(self, parts: Iterator[Any]) -> np.ndarray | None:
        with _readable(self.path), np.errstate(over="ignore", invalid="ignore"):
            for part in parts:
                block = part if isinstance(part, np.ndarray) else part.float().numpy()
                return np.ascontiguousarray(block, dtype=np.float32)
        return None


@dataclass(frozen=True)
class _Parts:
    """The matrices of several files, one below the other."""

    paths: tuple[Path, ...]
    matrices: tuple[_Rows, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(matrix.shape[0] for matrix in self.matrices), *self.matrices[0].shape[1:]

    @property
    def dtype(self) -> Any:
        return self.matrices[0].dtype

    def parts(self, step: int) -> Iterator[Any]:
        return itertools.chain.from_iterable(matrix.parts(step) for matrix in self.matrices)


def open_arrays(paths: Sequence[Path], folder: Path) -> ArraySource:
    """The matrices of a folder's files as one, in order; `InputError` also if their widths differ."""
    sources = [open_array(path) for path in paths]
    widths = {source.dim for source in sources}
    if len(widths) > 1:
        found = listing(f"{source.dim} in {path.name}" for source, path in zip(sources, paths, strict=True))
        raise InputError("arrays of different widths in one folder", where=folder, found=found)
    return ArraySource(folder, _Parts(tuple(paths), tuple(source.matrix for source in sources)))


def open_array(path: Path | GivenArray) -> ArraySource:
    """Open a matrix file; only its header is read. An array given in Python is checked likewise.

    Raises `InputError` for another kind of file, one that needs unpickling, a matrix that isn't
    two-dimensional and real or has wider rows than a store, and several matrices of which none is called
    ``features``.
    """
    if isinstance(path, GivenArray):
        value = path.value
        with _readable(path):
            matrix: _Rows = _Loaded(value) if isinstance(value, np.ndarray) else _plain_tensor(value, path)
    else:
        opener = _OPENERS.get(require_file(path).suffix.lower())
        if opener is None:
            raise InputError(
                "an array in an unknown format",
                where=path,
                expected=f"one of: {listing(_OPENERS)}",
                fix="numpy.save(FILE.npy, X)",
            )
        with _readable(path):
            matrix = opener(path)
    shape = matrix.shape
    if len(shape) != 2 or min(shape) < 1 or shape[1] > MAX_DIM:
        expected = f"(rows, dimensions), at least one of each, and at most {MAX_DIM:,} dimensions"
        raise InputError("an array of the wrong shape", where=path, found=f"shape {shape}", expected=expected)
    if isinstance(matrix.dtype, np.dtype) and matrix.dtype.kind not in "fiu":
        what = "an array that doesn't hold real numbers"
        raise InputError(what, where=path, found=f"dtype {matrix.dtype}")
    return ArraySource(path, matrix)


@contextmanager
def _readable(path: object) -> Iterator[None]:
    """Turn what readers raise on damaged or foreign files into one `InputError`."""
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
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # no fault of the file
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


def _npy(path: Path) -> _Rows:
    with path.open("rb") as stream:
        # numpy takes any other file for a pickle, and advises to load it anyway.
        if sniff(stream.read(HEAD_BYTES)) != "npy":
            raise ValueError("content that doesn't begin as .npy files do")
    try:
        return _Loaded(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as error:
        our_words = {
            "Python objects": "an array of Python objects",
            "mmap length": "fewer bytes than its header says",
        }
        words = [ours for phrase, ours in our_words.items() if phrase in str(error)]
        raise ValueError(*(words or error.args)) from error


def _npz(path: Path) -> _Rows:
    with zipfile.ZipFile(path) as archive:
        name = _only(path, [name.removesuffix(".npy") for name in archive.namelist()])
        member = archive.getinfo(f"{name}.npy" if f"{name}.npy" in archive.NameToInfo else name)
        with archive.open(member) as stream:
            shape, columns_first, dtype = _header(stream)
            rest = member.file_size - stream.tell()
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    if math.prod(shape) * dtype.itemsize != rest:
        raise ValueError(f"{rest:,} bytes for shape {shape} of {dtype}")
    if not columns_first:
        return _Packed(path, member.filename, shape, dtype)
    refuse_bomb(path, [member])
    with np.load(path, allow_pickle=False) as loaded:
        return _Loaded(loaded[name])


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and dtype of an ``.npy``; the stream then gives its values."""
    npy = np.lib.format
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    read = readers.get(npy.read_magic(stream))
    if read is None:
        raise ValueError("an .npy of an unsupported version, such as one with structures")
    header: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(stream)
    return header


def _pt(path: Path) -> _Rows:
    import torch

    with path.open("rb") as stream:
        packed = sniff(stream.read(HEAD_BYTES)) == "zip"
    if packed:
        require_stored(path)
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
    return _plain_tensor(tensor, path)


def _plain_tensor(tensor: Any, path: Path | GivenArray) -> _Loaded:
    """A tensor of real numbers on the CPU; `InputError` for any other."""
    import torch

    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    if not plain or tensor.device.type != "cpu":
        raise InputError(
            "not a plain tensor on the CPU",
            where=path,
            found=f"{tensor.dtype}, layout {tensor.layout}, device {tensor.device}",
            fix="save x.dequantize(), x.to_dense() or x.cpu(), with its values",
        )
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError("a tensor that doesn't hold real numbers", where=path, found=str(tensor.dtype))
    tensor = tensor.detach().resolve_neg()
    tensor[:1].float().numpy()  # raises, before anything is written, if it can't become float32
    return _Loaded(tensor)


_OPENERS: dict[str, Callable[[Path], _Rows]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".pt": _pt,
    ".pth": _pt,
}

ARRAY_SUFFIXES = tuple(_OPENERS)
"""The endings of files that `open_array` reads."""
