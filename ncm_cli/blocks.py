"""Features of many rows: an array if they fit the memory budget, else row blocks that are read when needed.

Mathematics takes either, as `Features`, and iterates over its `blocks`. An array is one block, so sums over
blocks are bit-identical to sums over the array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import UsageError

Array = NDArray[np.float64]
Codes = NDArray[np.int64]
Mask = NDArray[np.bool_]

BUDGET = "NCM_MEMORY_MIB"
"""The environment variable that sets the memory budget of features, in MiB."""

BUDGET_MIB = 256
"""The default budget for each array, in MiB: 65,536 rows of width 512. A fit has up to five such arrays."""

BLOCK_BYTES = 4 << 20
"""A block in float64: small enough to stay in the processor's cache, large enough for matrix products."""


def fits(rows: int, dim: int) -> bool:
    """Whether the float64 copy of features (rows, dim) is within the memory budget.

    Raises `UsageError` if the budget isn't a number.
    """
    text = os.environ.get(BUDGET) or str(BUDGET_MIB)
    try:
        return rows * dim * 8 <= float(text) * 2**20
    except ValueError:
        raise UsageError("not a number of MiB", where=BUDGET, found=text, expected="such as 1024") from None


class RowBlocks:
    """Rows (n, d) that are read on access: ``X[5:9]`` and ``X[positions]`` are arrays.

    Parameters
    ----------
    read
        Returns the rows (b, d) at positions int64 (b,).
    rows
        int64 (n,): the positions of the rows.
    dim
        d, the width of a row.
    then
        Applied to the rows (b, d) that are read.
    """

    def __init__(
        self,
        read: Callable[[NDArray[np.int64]], NDArray[np.floating]],
        rows: NDArray[np.int64],
        dim: int,
        then: Callable[[NDArray[np.floating]], NDArray[np.floating]] | None = None,
    ) -> None:
        self._read, self._rows, self._then = read, rows, then
        self.shape = (len(rows), dim)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> NDArray[np.floating]:
        block = self._read(self._rows[rows])
        return block if self._then is None else self._then(block)

    def where(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> RowBlocks:
        """Some of the rows, not yet read."""
        return RowBlocks(self._read, self._rows[rows], self.shape[1], self._then)

    def then(
        self, function: Callable[[NDArray[np.floating]], NDArray[np.floating]], dim: int | None = None
    ) -> RowBlocks:
        """The rows (n, dim) that ``function`` makes of rows (b, d); without ``dim`` the width stays d."""
        first = self._then
        composed = function if first is None else lambda rows: function(first(rows))
        return RowBlocks(self._read, self._rows, dim or self.shape[1], composed)


Features = NDArray[np.floating[Any]] | RowBlocks


def chosen(X: Features, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Features:
    """The rows (m, d) of a mask bool (n,) or at positions int64 (m,)."""
    return X[rows] if isinstance(X, np.ndarray) else X.where(rows)


def applied(X: Features, function: Callable[[NDArray[np.floating]], NDArray[np.floating]]) -> Features:
    """The rows (n, d) with ``function`` applied to them."""
    return function(X) if isinstance(X, np.ndarray) else X.then(function)


def joined(X: Features, other: Features) -> Features:
    """The rows (n + m, d) of both, ``X`` first."""
    if isinstance(X, np.ndarray) and isinstance(other, np.ndarray):
        return np.concatenate([X, other])

    def read(rows: NDArray[np.int64]) -> NDArray[np.floating]:
        first, block = rows < len(X), np.empty((len(rows), X.shape[1]), np.float32)
        block[first], block[~first] = X[rows[first]], other[rows[~first] - len(X)]
        return block

    return RowBlocks(read, np.arange(len(X) + len(other)), X.shape[1])


def in_memory(X: Features) -> NDArray[np.float64] | RowBlocks:
    """The rows as a float64 array, or as row blocks if they exceed the memory budget."""
    if isinstance(X, RowBlocks):
        return X
    if fits(*X.shape):
        return np.asarray(X, np.float64)
    return RowBlocks(X.__getitem__, np.arange(len(X)), X.shape[1])


def block_rows(X: Features | NDArray[np.int64]) -> int:
    """The most rows that a block may have."""
    return max(1, len(X) if isinstance(X, np.ndarray) else BLOCK_BYTES // (8 * X.shape[1]))


def slices(X: Features | NDArray[np.int64], most: int | None = None) -> Iterator[slice]:
    """Slices of all rows, in order, of at most ``most`` rows each; without ``most`` an array is one slice."""
    step = block_rows(X) if most is None else max(1, min(most, block_rows(X)))
    for start in range(0, len(X), step):
        yield slice(start, min(start + step, len(X)))


def blocks(X: Features, most: int | None = None) -> Iterator[tuple[slice, NDArray[np.floating]]]:
    """Each slice of `slices`, and its rows (b, d)."""
    for rows in slices(X, most):
        yield rows, X[rows]


def moments(X: Features) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation (d,) of the columns, float64, in two passes."""
    mean, square = np.zeros(X.shape[1]), np.zeros(X.shape[1])
    for _, rows in blocks(X):
        mean += np.asarray(rows, np.float64).sum(axis=0)
    mean /= len(X)
    for _, rows in blocks(X):
        square += np.square(rows - mean).sum(axis=0)
    return mean, np.sqrt(square / len(X))
