"""Writing a feature store: one pass over the blocks, bounded memory, nothing that isn't finite."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError, listing
from ncm_cli.store.atomic import atomic_path
from ncm_cli.store.checks import array_digest, encode_text, require_few_columns, text_digest
from ncm_cli.store.columns import AnyColumn, Column, FailedRow, Files, check_columns
from ncm_cli.store.fingerprint import canonical_json, digest_of, fingerprint
from ncm_cli.store.h5 import CHUNK_BYTES
from ncm_cli.store.h5_write import H5Writer
from ncm_cli.store.results import jsonable, now

FORMAT = "ncm-features"
VERSION = 1

_REASON_CHARACTERS = 500


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
        Arrays (b, d) of numbers, N rows in all; each is let go before the next is asked for.
    columns
        Each of N rows; ``label_column`` and ``split_column`` are among them.
    files
        The image file of each row.
    dtype
        The type on disk. A number too large for it is refused, not stored as infinity.

    Raises
    ------
    InputError
        For ids that are blank or repeated, shapes that don't agree, and any row that isn't finite, by id.
        No file is left then.
    """
    ids = [str(id) for id in ids]
    listed = list(columns.values()) if isinstance(columns, Mapping) else list(columns)
    _check(path, ids, dim, listed, label_column, split_column, files, dtype)
    stored = np.dtype(dtype)
    block_rows = max(1, CHUNK_BYTES // (dim * stored.itemsize))
    with atomic_path(path) as temporary, H5Writer(temporary) as writer:
        features = writer.create("features", (len(ids), dim), stored, block_rows)
        hashes = []
        start = 0
        for block in _rechunked(_checked(blocks, ids, dim, stored, path), block_rows):
            writer.put(features, start, block)
            hashes.append(np.frombuffer(block_digest(block), dtype=np.uint8))
            start += len(block)
        writer.array("feature_sha256", np.stack(hashes))
        _write_rows(writer, ids, listed, files, failed)
        writer.json("options", jsonable(options))
        writer.json("request", jsonable(request or {}))
        content = content_digest(writer.digests, len(ids), dim, dtype, label_column, split_column)
        writer.finish(
            {
                "ncm_format": FORMAT,
                "ncm_format_version": VERSION,
                "ncm_version": __version__,
                "created": now(),
                "label_column": label_column,
                "split_column": split_column,
                "encoder": canonical_json(dict(encoder)),
                "encoder_fingerprint": fingerprint(encoder),
                "block_rows": block_rows,
                "content_sha256": content,
            }
        )


def _check(
    path: Path | str,
    ids: Sequence[str],
    dim: int,
    columns: Sequence[AnyColumn],
    label: str | None,
    split: str | None,
    files: Files | None,
    dtype: str,
) -> None:
    if dtype not in ("float32", "float16"):
        raise InputError("a type that features aren't stored in", found=dtype, expected="float32 or float16")
    if not ids:
        raise InputError("no rows to store", where=path)
    if dim < 1 or dim * 4 > (16 << 20):
        raise InputError(
            "features of a width that can't be stored", where=path, found=dim, expected="1 to 4,194,304"
        )
    if len(set(ids)) != len(ids):
        repeated = [id for id, count in Counter(ids).items() if count > 1]
        raise InputError("repeated ids", where=path, found=listing(repeated), expected="unique ids")
    if "" in ids:
        raise InputError("a blank id", where=f"{path}, row {list(ids).index('')}")
    require_few_columns(len(columns), path)
    check_columns(columns, len(ids))
    names = [column.name for column in columns]
    if len(set(names)) != len(names):
        raise InputError("two columns of one name", where=path, found=listing(names))
    for role, name in (("label", label), ("split", split)):
        if name is not None and name not in names:
            raise InputError(
                f"the {role} column isn't among the columns", found=name, expected=listing(names)
            )
    lengths = [len(files.path), len(files.size), len(files.mtime_ns), len(files.sha256)] if files else []
    if any(length != len(ids) for length in lengths):
        raise InputError("file records of another length", where=path, found=lengths, expected=len(ids))


def _checked(
    blocks: Iterable[np.ndarray], ids: Sequence[str], dim: int, dtype: np.dtype, path: Path | str
) -> Iterator[np.ndarray]:
    """The blocks in the stored type, once shape, count and values are known to be right."""
    start = 0
    for block in blocks:
        raw = np.asarray(block)
        if raw.ndim != 2 or raw.shape[1] != dim or raw.dtype.kind not in "fiub":
            raise InputError(
                "features of another shape or type",
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
    more = f" (and {len(bad) - 1} more rows here)" if len(bad) > 1 else ""
    raise InputError(
        "features that aren't finite numbers",
        where=f"{path}, id {ids[first]!r}{more}",
        found=f"{value:g} at position {column}{fits}",
        expected="finite numbers",
        fix="--dtype float32" if fits and features.dtype == np.float16 else "mend or leave out that row",
    )


def _rechunked(blocks: Iterator[np.ndarray], rows: int) -> Iterator[np.ndarray]:
    """The same rows in blocks of exactly ``rows``, but for the last."""
    kept: list[np.ndarray] = []
    have = 0
    for block in blocks:
        while have + len(block) >= rows:
            take = rows - have
            yield np.concatenate([*kept, block[:take]])
            block, kept, have = block[take:], [], 0
        if len(block):
            kept.append(block)
            have += len(block)
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
        folder = f"columns/{column_folder(column.name)}"
        if isinstance(column, Column):
            writer.array(f"{folder}/codes", np.asarray(column.codes, dtype=np.int32))
            writer.text(
                f"{folder}/categories", column.categories, what=f"a category of column {column.name!r}"
            )
        else:
            writer.array(f"{folder}/values", np.asarray(column.values, dtype=np.float64))
    if files is not None:
        writer.text("path", files.path, what="a path")
        writer.array("size", np.asarray(files.size, dtype=np.int64))
        writer.array("mtime_ns", np.asarray(files.mtime_ns, dtype=np.int64))
        writer.text("sha256", files.sha256, what="a digest")
    writer.text("failed/id", [row.id for row in failed], what="an id")
    writer.text("failed/path", [row.path for row in failed], what="a path")
    reasons = [row.reason.replace("\0", " ")[:_REASON_CHARACTERS] for row in failed]
    writer.text("failed/reason", reasons, what="a reason")


def column_folder(name: str, *, back: bool = False) -> str:
    """The HDF5 name of a column, or with ``back`` the column of such a name.

    HDF5 takes ``/`` for a path and ``.`` for the group itself, so both are written as %XX, and so is ``%``.
    """
    if back:
        for code, character in (("%2F", "/"), ("%2E", "."), ("%25", "%")):
            name = name.replace(code, character)
        return name
    name = name.replace("%", "%25").replace("/", "%2F")
    return name.replace(".", "%2E") if set(name) == {"."} else name


def block_digest(block: np.ndarray) -> bytes:
    """SHA-256 of a block's values, little-endian in row-major order, as 32 bytes."""
    little = np.ascontiguousarray(block, dtype=block.dtype.newbyteorder("<"))
    return hashlib.sha256(little.reshape(-1).view(np.uint8).data).digest()


def content_digest(
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


def computed_digests(
    ids: Sequence[str], columns: Sequence[AnyColumn], blocks: Iterable[np.ndarray], dtype: str
) -> dict[str, str]:
    """The digests that `content_digest` needs, from contents (blocks of the stored size and type)."""
    hashes = np.stack([np.frombuffer(block_digest(block), dtype=np.uint8) for block in blocks])
    digests = {"id": text_digest(encode_text(ids, "an id")), "feature_sha256": array_digest(hashes)}
    for column in columns:
        folder = f"columns/{column_folder(column.name)}"
        if isinstance(column, Column):
            digests[f"{folder}/codes"] = array_digest(np.asarray(column.codes, dtype=np.int32))
            digests[f"{folder}/categories"] = text_digest(encode_text(column.categories, "a category"))
        else:
            digests[f"{folder}/values"] = array_digest(np.asarray(column.values, dtype=np.float64))
    return digests
