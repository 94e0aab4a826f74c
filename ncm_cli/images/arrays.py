"""Reads feature matrices made elsewhere: ``.npy``, ``.npz``, ``.pt`` and ``.parquet``, without unpickling.

``ncm embed --from-array``: a store of features that were made elsewhere.
"""

from __future__ import annotations

import math
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ncm_cli.errors import InputError, MismatchError, UsageError, listing, unknown
from ncm_cli.images.manifest import Choice, Manifest, read_manifest
from ncm_cli.images.options import EmbedOptions
from ncm_cli.images.plan import EmbedReport, other_settings
from ncm_cli.options import as_json
from ncm_cli.progress import Reporter
from ncm_cli.store.digests import differing_fields
from ncm_cli.store.features import FeatureStore, write_features
from ncm_cli.store.files import sha256_file

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


def embed_array(options: EmbedOptions, choice: Choice, *, started: float, reporter: Reporter) -> EmbedReport:
    """Write a store from a matrix whose rows are in manifest order.

    Its fingerprint records the name given; without one, the matrix's own digest, so that stores of unknown
    origin are never taken for each other's.

    Raises
    ------
    InputError
        Other numbers of rows, rows that aren't finite, rows of zeros that are to be normalised: by id.
    MismatchError
        The output holds features of another name.
    """
    assert options.from_array is not None
    if options.source.is_dir():
        raise UsageError(
            "--from-array needs a manifest", found=f"{options.source} is a folder",
            fix="write a CSV with the ids and labels in the order of the array's rows",
        )  # fmt: skip
    source = open_array(options.from_array)
    manifest = read_manifest(options.source, choice, root=None, with_files=False)
    for note in manifest.notes:
        reporter.note(note)
    for warning in manifest.warnings:
        reporter.warn(warning)
    if source.rows != len(manifest):
        raise InputError(
            "the array and the manifest have other numbers of rows",
            where=source.path,
            found=f"{source.rows:,} rows in the array, {len(manifest):,} in {options.source}",
            expected="one row of features for each row of the manifest, in the same order",
        )
    description = _description(options, source)
    if options.encoder_name is None:
        reporter.note(f"no --encoder-name: the features are called {description['model']}")
    _require_same_name(options, description)
    columns = manifest.columns(range(len(manifest)))
    with reporter.task("writing", source.rows) as task:
        write_features(
            options.output,
            ids=manifest.ids,
            blocks=_counted(_usable_blocks(source, manifest, options), task),
            dim=source.dim,
            columns=columns,
            label_column=manifest.label_column,
            split_column=manifest.split_column,
            encoder=description,
            options=as_json(options),
            request={"encoder": description, "dtype": options.dtype},
            dtype=options.dtype,  # type: ignore[arg-type]
        )
    with FeatureStore.open(options.output) as store:
        return EmbedReport(
            path=str(options.output),
            rows=store.rows,
            dim=store.dim,
            new=store.rows,
            reused=0,
            removed=0,
            failed=(),
            max_failures=options.max_failures,
            written=True,
            seconds=time.monotonic() - started,
            images_per_second=None,
            device=None,
            model=str(description["model"]),
            fingerprint=store.fingerprint,
            content_sha256=store.content_sha256,
        )


def _description(options: EmbedOptions, source: ArraySource) -> dict[str, Any]:
    name = options.encoder_name
    return {
        "kind": "array",
        "model": name if name is not None else f"sha256-{sha256_file(source.path)[:16]}",
        "dim": source.dim,
        "normalize": options.normalize,
    }


def _require_same_name(options: EmbedOptions, description: dict[str, Any]) -> None:
    if options.fresh or not options.output.exists():
        return
    with FeatureStore.open(options.output) as old:
        fields = differing_fields(old.encoder, description)
        fields += differing_fields({"dtype": old.dtype}, {"dtype": options.dtype})
    if fields:
        error: MismatchError = other_settings(options.output, fields)
        raise error


def _usable_blocks(source: ArraySource, manifest: Manifest, options: EmbedOptions) -> Iterator[np.ndarray]:
    """The blocks, normalised if asked for; at the first bad row the rest is searched for more of them."""
    bad: dict[str, list[str]] = {}
    start = 0
    for block in source.blocks():
        ids = manifest.ids[start : start + len(block)]
        start += len(block)
        block = _checked_rows(block, ids, options, bad)
        if not bad:
            yield block
    if not bad:
        return
    reason, ids = next(iter(bad.items()))
    more = sum(len(rows) for rows in bad.values()) - len(ids)
    raise InputError(
        f"{len(ids)} {'row' if len(ids) == 1 else 'rows'} of the array {reason}",
        where=source.path,
        found=f"ids {listing(ids)}" + (f"; {more} more rows are bad for other reasons" if more else ""),
        fix="mend these rows, or leave them out of both the array and the manifest",
    )


def _checked_rows(
    block: np.ndarray, ids: list[str], options: EmbedOptions, bad: dict[str, list[str]]
) -> np.ndarray:
    def note(rows: np.ndarray, reason: str) -> None:
        if rows.any():
            bad.setdefault(reason, []).extend(ids[row] for row in np.flatnonzero(rows))

    finite = np.isfinite(block).all(axis=1)
    note(~finite, "aren't finite")
    if options.normalize:
        # float64: the square of a large float32 overflows, and that of a small one is lost.
        norms = np.linalg.norm(block.astype(np.float64), axis=1, keepdims=True)
        note(norms[:, 0] == 0, "are zero and can't be scaled to unit length")
        with np.errstate(invalid="ignore", divide="ignore"):
            block = (block / norms).astype(np.float32)
    if options.dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            note(finite & ~np.isfinite(block.astype(np.float16)).all(axis=1), "are too large for float16")
    return block


def _counted(blocks: Iterator[np.ndarray], task: Any) -> Iterator[np.ndarray]:
    for block in blocks:
        yield block
        task.advance(len(block))
