"""The rows of an exact path, rotated so that every rank is a slice of leading columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Features, Mask, RowBlocks, blocks, slices

BLOCK_SCORES = 1 << 18
"""Scores that are processed at a time: 2 MB, so that intermediate results stay in the cache."""


def score_slices(rows: Features, scores: int) -> Iterator[slice]:
    """All rows in blocks of at most `BLOCK_SCORES` scores, if each row has ``scores`` of them."""
    return slices(rows, BLOCK_SCORES // scores)


@dataclasses.dataclass(frozen=True, slots=True)
class Design:
    """Rows in rotated, centred coordinates, with their targets.

    Rows that don't fit into memory are centred as they are read, and coefficients are rotated in their
    place.
    """

    A: Features
    """(n, p): [ones (for classes),] complement, basis reversed. For row blocks (n, q): [ones,] centred."""
    turn: Array | None
    """(q, p): the matrix that coefficients are multiplied by for row blocks; None for an array."""
    rotation: Array | None
    """(d, q): complement, basis reversed; None means the identity."""
    mean: Array
    """(d,)"""
    targets: Mask | Array
    """bool (n, C), C = 1 for two classes; for regression float64 (n, 1), centred."""
    offset: Array | None
    """(1,) the mean of a regression's targets."""
    weights: Array
    """(n,) the rows' weights, of mean 1."""

    @classmethod
    def rotate(
        cls,
        X: Features,
        y: NDArray[np.generic],
        n_classes: int,
        basis: Array,
        weights: Array,
        regression: bool,
    ) -> Design:
        """Centre and rotate X (n, d) once; ``basis`` (d, m) are the directions that the path removes.

        When there are fewer rows than dimensions, coefficients lie in the span of the rows and the basis,
        so the complement is cut to that span.
        """
        n, d = X.shape
        m = basis.shape[1]
        mean = np.zeros(d)
        for part, rows in blocks(X):
            mean += weights[part] @ rows
        mean /= n
        Z: Features = X if isinstance(X, RowBlocks) else X - mean
        rotation: Array | None = None
        if n < d - m and not isinstance(Z, RowBlocks):
            outside = Z - (Z @ basis) @ basis.T
            span = scipy.linalg.qr(outside.T, mode="economic", check_finite=False)[0]
            span -= basis @ (basis.T @ span)
            rotation = np.hstack([span, basis[:, ::-1]])
        elif m:
            full = scipy.linalg.qr(basis, mode="full", check_finite=False)[0]
            rotation = np.hstack([full[:, m:], basis[:, ::-1]])
        turn: Array | None = None
        ones = 0 if regression else 1

        def centred(rows: NDArray[np.floating]) -> Array:
            shifted = np.ones((len(rows), ones + d))
            np.subtract(rows, mean, out=shifted[:, ones:])
            return shifted

        if isinstance(Z, RowBlocks):
            turn = scipy.linalg.block_diag(np.eye(ones), np.eye(d) if rotation is None else rotation)
            Z = Z.then(centred, ones + d)
        else:
            Z = Z if rotation is None else Z @ rotation
            Z = Z if regression else np.hstack([np.ones((n, 1)), Z])
        if regression:
            values = np.asarray(y, np.float64)
            offset = np.array([float(weights @ values / n)])
            return cls(Z, turn, rotation, mean, (values - offset)[:, None], offset, weights)
        codes = np.array([1]) if n_classes == 2 else np.arange(n_classes)
        targets = np.asarray(y, np.int64)[:, None] == codes[None, :]
        return cls(Z, turn, rotation, mean, targets, None, weights)

    @property
    def shape(self) -> tuple[int, int]:
        """n and p."""
        return len(self.A), self.A.shape[1] if self.turn is None else self.turn.shape[1]

    def leading(self, p: int) -> tuple[Features, Array | None]:
        """The rows, and ``turn``, for the first p coefficients."""
        if self.turn is None:
            return self.A[:, :p], None  # type: ignore[index]
        return self.A, self.turn[:, :p]

    def times(self, B: Array) -> Array:
        """Scores (n, ...) of the first coefficients B (p', ...)."""
        A, turn = self.leading(len(B))
        flat = B.reshape(len(B), -1)
        flat = flat if turn is None else turn @ flat
        scores = np.empty((len(A), flat.shape[1]))
        for part, rows in blocks(A):
            np.matmul(rows, flat, out=scores[part])
        return scores.reshape(len(A), *B.shape[1:])

    def back(self, p: int, size: int, residual: Callable[[slice], Array]) -> Array:
        """``A^T r`` (p, size) for residuals r, which are computed for a block of rows at a time."""
        A, turn = self.leading(p)
        product = np.zeros((A.shape[1], size))
        for part in score_slices(A, size):
            product += A[part].T @ residual(part)
        return product if turn is None else turn.T @ product

    def fold(self, B: Array, removed: Array) -> tuple[Array, Array]:
        """Coefficients B (p, C) as weight (C, d) and bias (C,) on the features themselves."""
        bias, B = (B[0], B[1:]) if self.offset is None else (self.offset, B)
        weight = (B if self.rotation is None else self.rotation @ B).T
        weight = weight - (weight @ removed) @ removed.T
        return np.ascontiguousarray(weight), bias - weight @ self.mean
