"""The feature store: one embedding a row, its columns, its files, and the encoder that made it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError, unknown
from ncm_cli.options.where import parse_where
from ncm_cli.store import features_write
from ncm_cli.store.atomic import one_line
from ncm_cli.store.checks import damaged
from ncm_cli.store.columns import AnyColumn, Column, FailedRow, Files, NumericColumn, check_columns
from ncm_cli.store.features_write import FORMAT, VERSION, block_digest, column_folder, content_digest
from ncm_cli.store.fingerprint import fingerprint
from ncm_cli.store.h5 import CHUNK_BYTES, H5Reader, reading

__all__ = ["Column", "FailedRow", "FeatureStore", "Files", "NumericColumn", "write_features"]

write_features = features_write.write_features


class FeatureStore(contextlib.AbstractContextManager["FeatureStore"]):
    """A feature store opened for reading; a context manager.

    Opening reads the header alone: ids, columns and features are read, and checked against their digests,
    when they are first asked for. Whatever is damaged raises `InputError` instead of being returned.

    Attributes
    ----------
    rows, dim
        N and d.
    dtype
        ``float32`` or ``float16`` on disk; features are always returned as float32.
    encoder, fingerprint
        The encoder's description, and SHA-256 over it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._h5 = H5Reader(self.path, FORMAT, VERSION, what="a feature store")
        try:
            self._read_header()
        except BaseException:
            self._h5.close()
            raise

    @classmethod
    def open(cls, path: Path | str) -> FeatureStore:
        """Open a store; raises `InputError` for what isn't one, in one line and bounded memory."""
        return cls(path)

    def _read_header(self) -> None:
        features = self._h5.dataset("features", ndim=2, kinds="f")
        self.rows, self.dim = (int(length) for length in features.shape)
        self.dtype: str = features.dtype.name
        if self.dtype not in ("float32", "float16") or not self.rows or not self.dim:
            raise damaged(self.path, f"features of shape {features.shape} and type {self.dtype}")
        self._features = features
        attrs = self._h5.attrs
        self.label_column = self._text_or_none("label_column")
        self.split_column = self._text_or_none("split_column")
        self.created = str(attrs.get("created", ""))
        self.ncm_version = str(attrs.get("ncm_version", ""))
        try:
            self.encoder: dict[str, Any] = dict(json.loads(attrs["encoder"]))
        except (KeyError, ValueError, TypeError) as error:
            raise damaged(self.path, f"no encoder description: {one_line(error)}") from error
        self.fingerprint = fingerprint(self.encoder)
        if attrs.get("encoder_fingerprint", self.fingerprint) != self.fingerprint:
            raise damaged(self.path, "a fingerprint of another encoder")
        itemsize = features.dtype.itemsize
        self._block_rows = int(attrs.get("block_rows", 0)) or max(1, CHUNK_BYTES // (self.dim * itemsize))
        if not 0 < self._block_rows <= max(self.rows, CHUNK_BYTES):
            raise damaged(self.path, f"blocks of {self._block_rows} rows")

    def _text_or_none(self, name: str) -> str | None:
        value = self._h5.attrs.get(name)
        return None if value is None else str(value)

    @functools.cached_property
    def content_sha256(self) -> str:
        """SHA-256 over ids, features and columns: equal for equal contents, whenever they were made."""
        stated = self._h5.attrs.get("content_sha256") if self._h5.digests else None
        return str(stated) if stated else self._computed_content()

    def _computed_content(self) -> str:
        blocks = (self._block(index) for index in range(self._blocks))
        digests = features_write.computed_digests(self.ids, tuple(self.columns.values()), blocks, self.dtype)
        return content_digest(digests, self.rows, self.dim, self.dtype, self.label_column, self.split_column)

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        """The rows' ids, unique, in manifest order."""
        ids = self._h5.text("id", rows=self.rows)
        if len(set(ids)) != len(ids):
            raise damaged(self.path, "repeated ids")
        return ids

    @functools.cached_property
    def columns(self) -> Mapping[str, AnyColumn]:
        """Columns by name, in manifest order; each is read when it is asked for."""
        return _LazyColumns(self)

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The resolved options of the command that made the store."""
        return dict(self._h5.json("options"))

    @functools.cached_property
    def request(self) -> dict[str, Any]:
        """What was asked of the encoder, as ``ncm embed`` compares it before it goes on."""
        return dict(self._h5.json("request"))

    @functools.cached_property
    def files(self) -> Files | None:
        """Each row's image file; None for features that were made elsewhere."""
        if "path" not in self._h5:
            return None
        whole = (self.rows,)
        return Files(
            path=self._h5.text("path", rows=self.rows),
            size=self._h5.array("size", np.int64, shape=whole),
            mtime_ns=self._h5.array("mtime_ns", np.int64, shape=whole),
            sha256=self._h5.text("sha256", rows=self.rows),
        )

    @functools.cached_property
    def failed(self) -> tuple[FailedRow, ...]:
        """Rows that have no features, with the reasons."""
        if "failed" not in self._h5:
            return ()
        parts = [self._h5.text(f"failed/{name}") for name in ("id", "path", "reason")]
        if len({len(part) for part in parts}) != 1:
            raise damaged(self.path, "failed rows of unequal lengths")
        return tuple(FailedRow(*row) for row in zip(*parts, strict=True))

    @functools.cached_property
    def _position_of(self) -> dict[str, int]:
        return {id: position for position, id in enumerate(self.ids)}

    def positions(self, ids: Sequence[str]) -> np.ndarray:
        """int64 (n,): the row of each id, −1 where the store has no such id."""
        known = self._position_of
        return np.fromiter((known.get(id, -1) for id in ids), dtype=np.int64, count=len(ids))

    def column(self, name: str) -> AnyColumn:
        """A column by name; raises `InputError` that lists those there are.

        ``label`` and ``split`` mean the columns that play these parts, whatever they are called.
        """
        name = {"label": self.label_column, "split": self.split_column}.get(name) or name
        if name not in self.columns:
            raise unknown("column", name, self.columns, where=self.path)
        return self.columns[name]

    def categorical(self, name: str) -> Column:
        """A column that has categories; raises `InputError` for a numeric one."""
        found = self.column(name)
        if not isinstance(found, Column):
            raise InputError(
                "a numeric column where categories are needed",
                where=f"{self.path}, column {name!r}",
                found=found.span(),
            )
        return found

    def mask(self, where: str | None) -> np.ndarray:
        """bool (N,): the rows that meet a filter such as ``split=test & place=land|water``; all for None.

        A row without a value meets ``column!=value`` and never ``column=value``.
        """
        mask = np.ones(self.rows, dtype=bool)
        for term in parse_where(where or ""):
            mask &= self.column(term.column).matches(term, self.path)
        return mask

    def read(self, rows: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        """float32 (n, d): the features of ``rows`` (positions, or a bool mask), in the order asked for.

        Raises `InputError` naming the id of a row that isn't finite, or the block that is damaged.
        """
        positions = self._rows(rows)
        made = np.empty((len(positions), self.dim), dtype=np.float32)
        order = np.argsort(positions, kind="stable")
        blocks = positions[order] // self._block_rows
        edges = [*np.flatnonzero(np.diff(blocks, prepend=-1)), len(order)]
        for start, stop in itertools.pairwise(edges):
            index = int(blocks[start])
            block = self._block(index)
            wanted = order[start:stop]
            within = positions[wanted] - index * self._block_rows
            picked = block[within].astype(np.float32)
            self._require_finite(picked, positions[wanted])
            made[wanted] = picked
        return made

    def blocks(
        self, rows: np.ndarray | Sequence[int] | None = None, *, block_rows: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (positions int64 (b,), features float32 (b, d)) over ``rows``, in bounded memory.

        ``block_rows`` defaults to about 8 MiB of features.
        """
        positions = self._rows(rows)
        step = block_rows or max(1, 8 * CHUNK_BYTES // (4 * self.dim))
        if rows is None and block_rows is None:
            # Whole blocks are read once each.
            step = max(1, step // self._block_rows) * self._block_rows
        for start in range(0, len(positions), step):
            part = positions[start : start + step]
            yield part, self.read(part)

    @property
    def _blocks(self) -> int:
        return -(-self.rows // self._block_rows)

    def _rows(self, rows: np.ndarray | Sequence[int] | None) -> np.ndarray:
        if rows is None:
            return np.arange(self.rows, dtype=np.int64)
        asked = np.asarray(rows)
        if asked.dtype == bool:
            if asked.shape != (self.rows,):
                raise ValueError(f"a mask of shape {asked.shape} for {self.rows} rows")
            return np.flatnonzero(asked).astype(np.int64)
        positions = asked.reshape(-1).astype(np.int64)
        # -1 is what `positions` says of an unknown id, and must not read the last row.
        if positions.size and (positions.min() < 0 or positions.max() >= self.rows):
            raise IndexError(f"rows from {positions.min()} to {positions.max()} of {self.rows}")
        return positions

    @functools.cached_property
    def _block_digests(self) -> np.ndarray | None:
        if self._h5.digests is None:
            return None
        return self._h5.array("feature_sha256", np.uint8, shape=(self._blocks, 32))

    def _block(self, index: int) -> np.ndarray:
        """One verified block as stored, (b, d)."""
        start = index * self._block_rows
        expected = self._block_digests
        with reading(self.path):
            block = np.asarray(self._features[start : start + self._block_rows])
        if expected is not None and block_digest(block) != expected[index].tobytes():
            last = min(start + self._block_rows, self.rows) - 1
            raise damaged(self.path, f"features of rows {start} to {last} don't match their digest")
        return block

    def _require_finite(self, features: np.ndarray, positions: np.ndarray) -> None:
        if not np.isfinite(features).all():
            features_write.refuse_not_finite(features, [self.ids[p] for p in positions.tolist()], self.path)

    def verify(self, advance: Callable[[int], None] = lambda rows: None) -> None:
        """Read everything back against its digests; raises `InputError` at the first thing that is off.

        ``advance`` is told the number of rows read, block by block.
        """
        for positions, _ in self.blocks():
            advance(len(positions))
        check_columns(tuple(self.columns.values()), self.rows)
        _ = (self.ids, self.files, self.failed, self.options, self.request)
        if self.content_sha256 != self._computed_content():
            raise damaged(self.path, "contents that don't match content_sha256")

    def close(self) -> None:
        """Close the file; what has been read stays usable."""
        self._h5.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FeatureStore({str(self.path)!r}, rows={self.rows}, dim={self.dim})"


class _LazyColumns(Mapping[str, AnyColumn]):
    """The columns of a store, each read when it is first asked for."""

    def __init__(self, store: FeatureStore) -> None:
        self._store = store
        self._folders = {column_folder(folder, back=True): folder for folder in store._h5.members("columns")}
        self._loaded: dict[str, AnyColumn] = {}

    def __getitem__(self, name: str) -> AnyColumn:
        if name not in self._loaded:
            self._loaded[name] = self._load(name, f"columns/{self._folders[name]}")
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._folders

    def __iter__(self) -> Iterator[str]:
        return iter(self._folders)

    def __len__(self) -> int:
        return len(self._folders)

    def _load(self, name: str, folder: str) -> AnyColumn:
        h5, whole = self._store._h5, (self._store.rows,)
        column: AnyColumn
        if f"{folder}/values" in h5:
            column = NumericColumn(name, h5.array(f"{folder}/values", np.float64, shape=whole, kinds="fiu"))
        else:
            codes = h5.array(f"{folder}/codes", np.int32, shape=whole, kinds="iu")
            column = Column(name, codes, h5.text(f"{folder}/categories"))
        try:
            check_columns([column], self._store.rows)
        except InputError as error:
            raise damaged(self._store.path, error.what) from error
        return column
