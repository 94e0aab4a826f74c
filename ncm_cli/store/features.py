"""The feature store: an embedding for each row, with columns, image files, and the encoder."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Features, RowBlocks, fits
from ncm_cli.errors import InputError, listing
from ncm_cli.store.columns import (
    AnyColumn,
    Column,
    FailedRow,
    Files,
    NumericColumn,
    check_columns,
)
from ncm_cli.store.digests import (
    Texts,
    array_digest,
    canonical_json,
    damaged,
    digest_of,
    fingerprint,
    require_few_columns,
)
from ncm_cli.store.files import Shown, jsonable
from ncm_cli.store.hdf5 import CHUNK_BYTES, H5Reader, H5Writer, RowReader, reading, writing
from ncm_cli.store.rows import BLOCK_BYTES, FeatureRows

FORMAT = "ncm-features"
VERSION = 1

MAX_DIM = 4 << 20
"""Widest features: a row has to fit into an HDF5 chunk."""

_MAX_REASON_CHARACTERS = 500


def write_features(
    path: Path | str,
    *,
    ids: Sequence[str],
    blocks: Iterable[np.ndarray],
    dim: int,
    columns: Sequence[AnyColumn] | Mapping[str, AnyColumn],
    label_column: str | None,
    split_column: str | None,
    encoder: Mapping[str, Any],
    files: Files | None = None,
    failed: Sequence[FailedRow] = (),
    options: Mapping[str, Any],
    request: Mapping[str, Any] | None = None,
    dtype: Literal["float32", "float16"] = "float32",
) -> None:
    """Write a feature store atomically, in one pass over ``blocks``.

    Parameters
    ----------
    ids
        N unique texts, in row order.
    blocks
        Arrays (b, d) of numbers, N rows in all; each is released before the next is requested.
    columns
        Each of N rows; ``label_column`` and ``split_column`` are among them.
    files
        The image file of each row.
    dtype
        The type on disk. A number too large for it is refused, not stored as infinity.

    Raises
    ------
    InputError
        For ids that are blank or repeated, shapes that don't agree, and a row that isn't finite, which is
        named by its id. No file is left behind.
    """
    ids = [str(id) for id in ids]
    columns = list(columns.values()) if isinstance(columns, Mapping) else list(columns)
    _check(path, ids, dim, columns, {"label": label_column, "split": split_column}, files, dtype)
    block_rows = max(1, CHUNK_BYTES // (dim * np.dtype(dtype).itemsize))
    with writing(path, FORMAT, VERSION) as writer:
        features = writer.create("features", (len(ids), dim), np.dtype(dtype), block_rows)
        hashes: list[np.ndarray] = []
        for block in _rechunked(_checked(blocks, ids, dim, np.dtype(dtype), path), block_rows):
            writer.put(features, len(hashes) * block_rows, block)
            hashes.append(_block_digest(block))
        writer.array("feature_sha256", np.stack(hashes))
        _write_rows(writer, ids, columns, files, failed)
        writer.json("options", jsonable(options))
        writer.json("request", jsonable(request or {}))
        writer.attrs |= {
            "label_column": label_column,
            "split_column": split_column,
            "encoder": canonical_json(dict(encoder)),
            "encoder_fingerprint": fingerprint(encoder),
            "block_rows": block_rows,
            "content_sha256": _content_digest(
                writer.digests, len(ids), dim, dtype, label_column, split_column
            ),
        }


def _check(
    path: Path | str,
    ids: Sequence[str],
    dim: int,
    columns: Sequence[AnyColumn],
    roles: Mapping[str, str | None],
    files: Files | None,
    dtype: str,
) -> None:
    if dtype not in ("float32", "float16"):
        raise InputError("features can't be stored in this type", found=dtype, expected="float32 or float16")
    if not ids:
        raise InputError("no rows to store", where=path)
    if not 1 <= dim <= MAX_DIM:
        expected = f"1 to {MAX_DIM:,}"
        raise InputError("features of a width that can't be stored", where=path, found=dim, expected=expected)
    if len(set(ids)) != len(ids):
        repeated = [id for id, count in Counter(ids).items() if count > 1]
        raise InputError("repeated ids", where=path, found=listing(repeated), expected="unique ids")
    if "" in ids:
        raise InputError("a blank id", where=f"{path}, row {list(ids).index('')}")
    require_few_columns(len(columns), path)
    check_columns(columns, len(ids))
    names = [column.name for column in columns]
    if len(set(names)) != len(names):
        raise InputError("two columns with the same name", where=path, found=listing(names))
    for role, name in roles.items():
        if name not in (None, *names):
            what = f"the {role} column isn't among the columns"
            raise InputError(what, found=name, expected=listing(names))
    lengths = [len(files.path), len(files.size), len(files.mtime_ns), len(files.sha256)] if files else []
    lengths += [len(files.beside)] if files and len(files.beside) else []
    if any(length != len(ids) for length in lengths):
        raise InputError("file records of the wrong length", where=path, found=lengths, expected=len(ids))


def _checked(
    blocks: Iterable[np.ndarray], ids: Sequence[str], dim: int, dtype: np.dtype, path: Path | str
) -> Iterator[np.ndarray]:
    """The blocks in the stored type, with shape, count and values checked."""
    start = 0
    for block in blocks:
        raw = np.asarray(block)
        if raw.ndim != 2 or raw.shape[1] != dim or raw.dtype.kind not in "fiub":
            raise InputError(
                "features of the wrong shape or type",
                where=f"{path}, from row {start}",
                found=f"{raw.shape} {raw.dtype}",
                expected=f"(rows, {dim}) of real numbers",
            )
        stop = start + len(raw)
        if stop > len(ids):
            raise InputError(
                "more features than ids", where=path, found=f"at least {stop:,}", expected=f"{len(ids):,}"
            )
        with np.errstate(over="ignore"):
            cast = raw.astype(dtype)
        if not np.isfinite(cast).all():
            refuse_not_finite(cast, ids[start:stop], path, original=raw)
        yield cast
        start = stop
    if start != len(ids):
        raise InputError("fewer features than ids", where=path, found=f"{start:,}", expected=f"{len(ids):,}")


def refuse_not_finite(
    features: np.ndarray, ids: Sequence[str], path: Path | str, original: np.ndarray | None = None
) -> None:
    """Raise the `InputError` that names the rows of (b, d) features that hold NaN or an infinity."""
    bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
    first = int(bad[0])
    column = int(np.flatnonzero(~np.isfinite(features[first]))[0])
    value = (features if original is None else original)[first, column]
    fits = f"; too large for {features.dtype}" if np.isfinite(value) else ""
    others = f" (and {len(bad) - 1} more here)" if len(bad) > 1 else ""
    raise InputError(
        "features that aren't finite numbers",
        where=f"{path}, id {ids[first]!r}{others}",
        found=f"{value:g} at position {column}{fits}",
        expected="finite numbers",
        fix="--dtype float32" if fits and features.dtype == np.float16 else "mend or leave out that row",
    )


def _rechunked(blocks: Iterator[np.ndarray], rows: int) -> Iterator[np.ndarray]:
    """The rows of ``blocks`` in blocks of exactly ``rows`` rows, except the last."""
    kept: list[np.ndarray] = []
    held = 0
    for block in blocks:
        while held + len(block) >= rows:
            take = rows - held
            yield np.concatenate([*kept, block[:take]])
            block, kept, held = block[take:], [], 0
        if len(block):
            kept.append(block)
            held += len(block)
    if kept:
        yield np.concatenate(kept)


def _write_rows(
    writer: H5Writer,
    ids: Sequence[str],
    columns: Sequence[AnyColumn],
    files: Files | None,
    failed: Sequence[FailedRow],
) -> None:
    writer.text("id", ids, what="an id")
    for column in columns:
        folder = f"columns/{_column_folder(column.name)}"
        if isinstance(column, Column):
            writer.array(f"{folder}/codes", np.asarray(column.codes, dtype=np.int32))
            writer.text(
                f"{folder}/categories", column.categories, what=f"a category of column {column.name!r}"
            )
        else:
            writer.array(f"{folder}/values", np.asarray(column.values, dtype=np.float64))
    if files is not None:
        writer.text("path", files.path, what="a path", any_bytes=True)
        writer.array("size", np.asarray(files.size, dtype=np.int64))
        writer.array("mtime_ns", np.asarray(files.mtime_ns, dtype=np.int64))
        writer.text("sha256", files.sha256, what="a digest")
        if len(files.beside):
            writer.text("beside", files.beside, what="a record of a view", any_bytes=True)
    writer.text("failed/id", [row.id for row in failed], what="an id")
    writer.text("failed/path", [row.path for row in failed], what="a path", any_bytes=True)
    reasons = [row.reason.replace("\0", " ")[:_MAX_REASON_CHARACTERS] for row in failed]
    writer.text("failed/reason", reasons, what="a reason", any_bytes=True)


def _column_folder(name: str) -> str:
    """The HDF5 name of a column. HDF5 takes ``/`` for a path and ``.`` for the group itself."""
    name = name.replace("%", "%25").replace("/", "%2F")
    return name.replace(".", "%2E") if set(name) == {"."} else name


def _block_digest(block: np.ndarray) -> np.ndarray:
    """SHA-256 of a block's values, little-endian in row-major order, as 32 bytes."""
    little_endian = np.ascontiguousarray(block, dtype=block.dtype.newbyteorder("<"))
    return np.frombuffer(
        hashlib.sha256(little_endian.reshape(-1).view(np.uint8).data).digest(), dtype=np.uint8
    )


def _content_digest(
    digests: Mapping[str, str], rows: int, dim: int, dtype: str, label: str | None, split: str | None
) -> str:
    """SHA-256 over ids, features, columns and their roles; not over times, paths or options."""
    held = {
        name: digest
        for name, digest in digests.items()
        if name in ("id", "feature_sha256") or name.startswith("columns/")
    }
    return digest_of(
        {"arrays": held, "rows": rows, "dim": dim, "dtype": dtype, "label": label or "", "split": split or ""}
    )


class FeatureStore(Shown, FeatureRows):
    """A feature store opened for reading; a context manager.

    Opening reads only the header, in bounded memory. Ids, columns and features are read, and checked against
    their digests, when they are first asked for. A file that isn't a store or is damaged raises `InputError`.

    Attributes
    ----------
    rows, dim
        N and d.
    dtype
        ``float32`` or ``float16`` on disk; features are always returned as float32.
    encoder, fingerprint
        The encoder's description, and its SHA-256.

    Examples
    --------
    >>> from ncm_cli import FeatureStore
    >>> with FeatureStore.open("features.h5") as store:
    ...     X, label = store.read(store.mask("split=train")), store.column("label")
    >>> X.shape, label.categories
    ((400, 8), ('-1', '1'))
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
        """Open a store for reading."""
        return cls(path)

    def _read_header(self) -> None:
        features = self._h5.dataset("features", ndim=2, kinds="f")
        self.rows, self.dim = (int(length) for length in features.shape)
        self.dtype: str = features.dtype.name
        if self.dtype not in ("float32", "float16") or not self.rows or not self.dim:
            raise damaged(self.path, f"features of shape {features.shape} and type {self.dtype}")
        self._features = features
        self._checked: set[int] = set()
        attrs = self._h5.attrs
        self.label_column, self.split_column = (
            str(attrs[name]) if name in attrs else None for name in ("label_column", "split_column")
        )
        self.created = str(attrs.get("created", ""))
        self.ncm_version = str(attrs.get("ncm_version", ""))
        self.encoder = self._h5.encoder
        self.fingerprint = fingerprint(self.encoder)
        usual = max(1, CHUNK_BYTES // (self.dim * features.dtype.itemsize))
        self._block_rows = int(attrs.get("block_rows", 0)) or usual
        if not 0 < self._block_rows <= max(self.rows, CHUNK_BYTES):
            raise damaged(self.path, f"blocks of {self._block_rows} rows")

    @functools.cached_property
    def content_sha256(self) -> str:
        """SHA-256 over ids, features and columns: equal for equal contents, whenever they were made."""
        stated = self._h5.attrs.get("content_sha256") if self._h5.digests else None
        return str(stated) if stated else self._computed_content()

    def _computed_content(self) -> str:
        digests = self._h5.digests
        if digests is None:  # written by another program: read everything to compute the digests
            _ = self.ids, *self.columns.values()
            hashes = np.stack([_block_digest(self._block(index)) for index in range(self._blocks)])
            digests = {**self._h5.found, "feature_sha256": array_digest(hashes)}
        return _content_digest(digests, self.rows, self.dim, self.dtype, self.label_column, self.split_column)

    @functools.cached_property
    def ids(self) -> Texts:
        """The rows' ids, unique, in manifest order."""
        ids = self._h5.texts("id", rows=self.rows)
        if ids.repeat:
            raise damaged(self.path, "repeated ids")
        return ids

    @functools.cached_property
    def columns(self) -> Mapping[str, AnyColumn]:
        """Columns by name, in manifest order; each is read when it is asked for."""
        return _LazyColumns(self._h5, self.rows)

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The resolved options of the command that made the store."""
        return dict(self._h5.json("options"))

    @functools.cached_property
    def request(self) -> dict[str, Any]:
        """The request to the encoder, which ``ncm embed`` compares before it resumes."""
        return dict(self._h5.json("request"))

    @property
    def row_numbers_of(self) -> str | None:
        """The digest of the table whose row numbers are the ids; None if a column has the ids."""
        return self.request.get("row_numbers_of")

    @functools.cached_property
    def files(self) -> Files | None:
        """Each row's image file; None for features that were made elsewhere."""
        if "path" not in self._h5:
            return None
        whole = (self.rows,)
        return Files(
            path=self._h5.texts("path", rows=self.rows, any_bytes=True),
            size=self._h5.array("size", np.int64, shape=whole),
            mtime_ns=self._h5.array("mtime_ns", np.int64, shape=whole),
            sha256=self._h5.texts("sha256", rows=self.rows),
            beside=self._h5.texts("beside", rows=self.rows, any_bytes=True) if "beside" in self._h5 else (),
        )

    @functools.cached_property
    def failed(self) -> tuple[FailedRow, ...]:
        """Rows that have no features, with the reasons."""
        if "failed" not in self._h5:
            return ()
        names = ("id", "path", "reason")
        parts = [tuple(self._h5.texts(f"failed/{name}", any_bytes=name != "id")) for name in names]
        if len({len(part) for part in parts}) != 1:
            raise damaged(self.path, "failed rows of unequal lengths")
        return tuple(FailedRow(*row) for row in zip(*parts, strict=True))

    @functools.cached_property
    def content_nodes(self) -> NDArray[np.int64]:
        """int64 (N,) nodes: for each row, the first row whose image file is the same byte for byte.

        Features made elsewhere have no files: for them it is the first row with identical features.
        """
        if self.has_files:
            return self._h5.texts("sha256", rows=self.rows).same()
        return super().content_nodes

    @property
    def has_files(self) -> bool:
        """Whether rows have image files with digests; features made elsewhere don't."""
        return "sha256" in self._h5

    def read(self, rows: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        """float32 (n, d): the features of ``rows`` (positions, or a bool mask), in the order asked for.

        Raises `InputError` naming the id of a row that isn't finite, or the block that is damaged.
        """
        positions = self._positions(rows)
        features = np.empty((len(positions), self.dim), dtype=np.float32)
        order = np.argsort(positions, kind="stable")
        blocks = positions[order] // self._block_rows
        edges = [*np.flatnonzero(np.diff(blocks, prepend=-1)), len(order)]
        for start, stop in itertools.pairwise(edges):
            index = int(blocks[start])
            block = self._block(index)
            wanted = order[start:stop]
            in_block = positions[wanted] - index * self._block_rows
            picked = block[in_block].astype(np.float32)
            if not np.isfinite(picked).all():
                refuse_not_finite(picked, [self.ids[p] for p in positions[wanted].tolist()], self.path)
            features[wanted] = picked
        return features

    def rows_of(self, rows: np.ndarray) -> Features:
        """The features of ``rows`` as `read` gives them, or as row blocks if they exceed the memory budget.

        Blocks are checked now, and are read from this file even after it was closed or replaced.
        """
        positions = self._positions(rows)
        if fits(len(positions), self.dim) or not RowReader.can(self._features):
            return self.read(positions)
        for index in {*(positions // self._block_rows).tolist()} - self._checked:
            self.read(np.arange(index * self._block_rows, min((index + 1) * self._block_rows, self.rows)))
            self._checked.add(index)
        return RowBlocks(self._reader, positions, self.dim)

    @functools.cached_property
    def _reader(self) -> RowReader:
        with reading(self.path):
            return RowReader(self.path, self._features)

    def blocks(
        self, rows: np.ndarray | Sequence[int] | None = None, *, block_rows: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (positions int64 (b,), features float32 (b, d)) over ``rows``, by default 8 MiB at a time."""
        if rows is None and block_rows is None:  # whole blocks are read once each
            step = max(1, BLOCK_BYTES // (4 * self.dim))
            block_rows = max(1, step // self._block_rows) * self._block_rows
        return super().blocks(rows, block_rows=block_rows)

    @property
    def _blocks(self) -> int:
        return -(-self.rows // self._block_rows)

    @functools.cached_property
    def _block_digests(self) -> np.ndarray | None:
        if self._h5.digests is None:
            return None
        return self._h5.array("feature_sha256", np.uint8, shape=(self._blocks, 32))

    def _block(self, index: int) -> np.ndarray:
        """One block (b, d) as stored, verified."""
        start = index * self._block_rows
        expected = self._block_digests
        with reading(self.path):
            block = np.asarray(self._features[start : start + self._block_rows])
        if expected is not None and not np.array_equal(_block_digest(block), expected[index]):
            last = min(start + self._block_rows, self.rows) - 1
            raise damaged(self.path, f"features of rows {start} to {last} don't match their digest")
        return block

    def verify(self, advance: Callable[[int], None] = lambda rows: None) -> None:
        """Read everything back against its digests; raises `InputError` for the first fault.

        ``advance`` is called with the number of rows read, block by block.
        """
        for positions, _ in self.blocks():
            advance(len(positions))
        _ = (self.ids, *self.columns.values(), self.files, self.failed, self.options, self.request)
        if self.content_sha256 != self._computed_content():
            raise damaged(self.path, "contents that don't match content_sha256")

    def close(self) -> None:
        """Close the file; what has been read stays usable."""
        self._h5.close()

    def __repr__(self) -> str:
        return f"FeatureStore({str(self.path)!r}, rows={self.rows}, dim={self.dim})"


class _LazyColumns(Mapping[str, AnyColumn]):
    """The columns of a store, each read when it is first asked for."""

    def __init__(self, h5: H5Reader, rows: int) -> None:
        self._folders = {unquote(folder): f"columns/{folder}" for folder in h5.members("columns")}
        self._read = functools.cache(functools.partial(_read_column, h5, rows))

    def __getitem__(self, name: str) -> AnyColumn:
        return self._read(name, self._folders[name])

    def __contains__(self, name: object) -> bool:
        return name in self._folders

    def __iter__(self) -> Iterator[str]:
        return iter(self._folders)

    def __len__(self) -> int:
        return len(self._folders)


def _read_column(h5: H5Reader, rows: int, name: str, folder: str) -> AnyColumn:
    column: AnyColumn
    if f"{folder}/values" in h5:
        column = NumericColumn(name, h5.array(f"{folder}/values", np.float64, shape=(rows,), kinds="fiu"))
    else:
        codes = h5.array(f"{folder}/codes", np.int32, shape=(rows,), kinds="iu")
        column = Column(name, codes, tuple(h5.texts(f"{folder}/categories")))
    try:
        check_columns([column], rows)
    except InputError as error:
        raise damaged(h5.path, error.what) from error
    return column
