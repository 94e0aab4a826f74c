"""MNIST's IDX files, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ncm_cli.errors import InputError

FOLDERS = ("", "raw", "MNIST/raw")
"""Where the files may lie in the folder that is given: torchvision nests them."""

MAX_BYTES = 1 << 30
"""MNIST's largest file has 47 MB; a header that asks for more than this is damaged."""


def find_idx(folder: Path, stem: str, kind: str) -> Path:
    """The file ``stem-kind`` or ``stem.kind``, with or without .gz: ``train-images``, ``idx3-ubyte``."""
    names = [f"{stem}{joint}{kind}{suffix}" for joint in "-." for suffix in ("", ".gz")]
    for inner in FOLDERS:
        for name in names:
            if (folder / inner / name).is_file():
                return folder / inner / name
    if not folder.is_dir():
        raise InputError("no such folder of MNIST files", where=folder, fix="--mnist DIR, or --download")
    raise InputError(
        "one of MNIST's files isn't there",
        where=folder,
        expected=f"{names[0]} or {names[1]}, there or in raw or MNIST/raw",
        fix="--mnist DIR with the four IDX files, or --download",
    )


def read_idx(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """An array of unsigned bytes with ``dims`` dimensions.

    Raises `InputError` for a damaged gzip file, another type, another number of dimensions, and a length that
    differs from what the header says.
    """
    raw = _bytes(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or raw[3] != dims:
        raise InputError(
            "not one of MNIST's IDX files",
            where=path,
            found=f"it starts with {raw[:4].hex(' ') or 'nothing'}",
            expected=f"00 00 08 {dims:02x}: unsigned bytes in {dims} dimension{'s' if dims > 1 else ''}",
        )
    start = 4 + 4 * dims
    if len(raw) < start:
        raise InputError("an IDX file that ends in its header", where=path, found=f"{len(raw)} bytes")
    shape = struct.unpack(f">{dims}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        raise InputError(
            "an IDX file that is cut off or damaged",
            where=path,
            found=f"{len(raw) - start:,} bytes of values",
            expected=f"{math.prod(shape):,}, for {' × '.join(map(str, shape))}",
            fix="get the file again",
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _bytes(path: Path) -> bytes:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            raw: bytes = file.read(MAX_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            "a gzip file that is cut off or damaged", where=path, found=str(error), fix="get the file again"
        ) from None
    if len(raw) > MAX_BYTES:
        raise InputError(
            "far larger than any of MNIST's files", where=path, found=f"over {MAX_BYTES:,} bytes"
        )
    return raw


def read_split(folder: Path, stem: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (n, h, w) and digits (n,) of ``train`` or ``t10k``."""
    image_path = find_idx(folder, f"{stem}-images", "idx3-ubyte")
    label_path = find_idx(folder, f"{stem}-labels", "idx1-ubyte")
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if len(images) != len(labels):
        raise InputError(
            "images and labels of different numbers",
            where=f"{image_path.name} and {label_path.name} in {image_path.parent}",
            found=f"{len(images):,} images, {len(labels):,} labels",
        )
    if labels.size and labels.max() > 9:
        row = int(np.argmax(labels > 9))
        raise InputError("a label that is no digit", where=f"{label_path}, row {row}", found=int(labels[row]))
    return images, labels.astype(np.int64)
