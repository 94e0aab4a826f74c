"""Rows of features with ids and columns, in a file or in memory."""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Features
from ncm_cli.errors import InputError, unknown
from ncm_cli.options import parse_where
from ncm_cli.store.columns import AnyColumn, Column
from ncm_cli.store.digests import Texts, encode_text, fingerprint

Self = TypeVar("Self", bound="FeatureRows")

BLOCK_BYTES = 8 << 20
"""Bytes of features that are read at once, unless a caller gives a number of rows."""


class FeatureRows(abc.ABC):
    """N rows of features (N, d) with ids and columns; a context manager.

    Attributes
    ----------
    path
        The file that the rows are from, for messages.
    rows, dim
        N and d.
    label_column, split_column
        The names of the columns with labels and splits; None if there is none.
    encoder, fingerprint
        The description of the encoder that made the features, and its SHA-256.
    """

    path: Path
    rows: int
    dim: int
    label_column: str | None
    split_column: str | None
    encoder: dict[str, Any]
    fingerprint: str

    @functools.cached_property
    def ids(self) -> Texts:
        """The rows' ids, unique, in row order."""
        raise NotImplementedError

    @functools.cached_property
    def columns(self) -> Mapping[str, AnyColumn]:
        """Columns by name, in manifest order."""
        raise NotImplementedError

    @functools.cached_property
    def content_sha256(self) -> str:
        """SHA-256 over ids, features and columns: equal for equal contents, whenever they were made."""
        raise NotImplementedError

    @property
    def row_numbers_of(self) -> str | None:
        """The digest of the table whose row numbers are the ids; None if a column has the ids."""
        return None

    @property
    def has_files(self) -> bool:
        """Whether rows have image files with digests; features made elsewhere don't."""
        return False

    @abc.abstractmethod
    def read(self, rows: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        """float32 (n, d): the features of ``rows`` (positions, or a bool mask), in the order asked for."""

    def rows_of(self, rows: np.ndarray) -> Features:
        """The features of ``rows`` as `read` gives them, or in blocks if they exceed the memory budget."""
        return self.read(rows)

    def positions(self, ids: Sequence[str]) -> np.ndarray:
        """int64 (n,): the row of each id, −1 for an unknown id."""
        return self.ids.positions(ids)

    @functools.cached_property
    def content_nodes(self) -> NDArray[np.int64]:
        """int64 (N,) nodes: for each row, the first row whose features are the same bit for bit.

        A node is a number shared by rows of equal content.
        """
        keys = np.empty(self.rows, dtype="V16")
        for positions, features in self.blocks():
            keys[positions] = [hashlib.blake2b(row, digest_size=16).digest() for row in features]
        _, first, number = np.unique(keys, return_index=True, return_inverse=True)
        return np.asarray(first[number], np.int64)

    def copies_of(self, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(N,) the rows of a mask (N,), and all other rows with equal content: see `content_nodes`."""
        nodes = self.content_nodes
        return np.isin(nodes, nodes[rows])

    def own_column(self, name: str) -> str | None:
        """The column's actual name; None if there is no such column.

        ``label`` and ``split`` mean `label_column` and `split_column`, whatever these are called.
        """
        name = {"label": self.label_column, "split": self.split_column}.get(name) or name
        return name if name in self.columns else None

    def column(self, name: str) -> AnyColumn:
        """A column by name, as `own_column` takes it; an `InputError` lists the existing columns."""
        own_name = self.own_column(name)
        if own_name is None:
            raise unknown("column", name, self.columns, where=self.path)
        return self.columns[own_name]

    def categorical(self, name: str, *, fix: str | None = None) -> Column:
        """A column that has categories; raises `InputError` for a numeric one."""
        column = self.column(name)
        if not isinstance(column, Column):
            what = f"the column {column.name!r} holds numbers, not classes"
            raise InputError(what, where=self.path, found=column.span(), fix=fix)
        return column

    def mask(self, where: str | None) -> np.ndarray:
        """bool (N,): the rows that meet a filter such as ``split=test & place=land|water``; all for None.

        A row without a value meets ``column!=value`` and never ``column=value``.
        """
        mask = np.ones(self.rows, dtype=bool)
        for term in parse_where(where or ""):
            mask &= self.column(term.column).matches(term, self.path)
        return mask

    def blocks(
        self, rows: np.ndarray | Sequence[int] | None = None, *, block_rows: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (positions int64 (b,), features float32 (b, d)) over ``rows``, by default 8 MiB at a time."""
        positions = self._positions(rows)
        step = block_rows or max(1, BLOCK_BYTES // (4 * self.dim))
        for start in range(0, len(positions), step):
            part = positions[start : start + step]
            yield part, self.read(part)

    def _positions(self, rows: np.ndarray | Sequence[int] | None) -> NDArray[np.int64]:
        if rows is None:
            return np.arange(self.rows, dtype=np.int64)
        asked = np.asarray(rows)
        if asked.dtype == bool:
            if asked.shape != (self.rows,):
                raise ValueError(f"a mask of shape {asked.shape} for {self.rows} rows")
            return np.flatnonzero(asked).astype(np.int64)
        positions = asked.reshape(-1).astype(np.int64)
        # `positions` gives -1 for an unknown id, which must not read the last row.
        if positions.size and (positions.min() < 0 or positions.max() >= self.rows):
            raise IndexError(f"rows from {positions.min()} to {positions.max()} of {self.rows}")
        return positions

    def close(self) -> None:  # noqa: B027
        """Close the file, if there is one; what has been read stays usable."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InMemoryRows(FeatureRows):
    """Rows in memory, such as prompts or a manifest's images."""

    def __init__(
        self,
        path: Path,
        ids: Sequence[str],
        columns: Mapping[str, AnyColumn],
        *,
        label_column: str | None = None,
        split_column: str | None = None,
    ) -> None:
        self.path, self.rows = path, len(ids)
        self.ids = Texts(np.array(encode_text(ids, "an id"), dtype="S"))
        self.columns, self.label_column, self.split_column = columns, label_column, split_column
        self.embedded({}, np.zeros((self.rows, 1), np.float32))

    def embedded(self, encoder: dict[str, Any], features: NDArray[np.float32]) -> None:
        """Give the rows the (N, d) features that an encoder computed, and its description."""
        self.encoder, self.fingerprint = encoder, fingerprint(encoder)
        self.features, self.dim = features, features.shape[1]

    def read(self, rows: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        """float32 (n, d) of ``rows`` (positions, or a bool mask)."""
        return self.features[self._positions(rows)]
