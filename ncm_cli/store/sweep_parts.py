"""Finished chunks of a sweep that isn't finished, so that a killed one goes on.

The folder ``.NAME.partial`` beside the output holds ``sweep.json``, which says what is being made, and
``chunk-N.npz`` for every finished chunk, with its SHA-256 at the end. Each file appears whole or not at all;
one whose bytes have changed since is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.atomic import sync_folder, write_bytes
from ncm_cli.store.documents import read_document, write_document
from ncm_cli.store.fingerprint import digest_of

FORMAT = "ncm-sweep-parts"
VERSION = 2


class SweepParts:
    """Durable chunks of one output. The caller holds the output's writer lock.

    ``stale`` says whether chunks of another sweep were found, and removed.
    """

    def __init__(self, output: Path | str, key: Mapping[str, Any]) -> None:
        path = Path(os.path.realpath(output))
        self.folder = path.with_name(f".{path.name}.partial")
        digest = digest_of(key)
        self.stale = False
        if self.folder.exists() and self._found() != digest:
            self.stale = any(self.folder.glob("chunk-*.npz"))
            shutil.rmtree(self.folder)
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            body = {"key_sha256": digest, "key": key}
            write_document(self.folder / "sweep.json", FORMAT, VERSION, body)

    def _found(self) -> object:
        """The key's digest of the folder that is there, None if it can't be read."""
        with contextlib.suppress(InputError):
            found = read_document(self.folder / "sweep.json", FORMAT, VERSION, what="a part of a sweep")
            return found.get("key_sha256")
        return None

    def _path(self, index: int) -> Path:
        return self.folder / f"chunk-{index}.npz"

    def read(self, index: int) -> dict[str, np.ndarray] | None:
        """The arrays of a chunk, or None if it isn't finished."""
        try:
            raw = self._path(index).read_bytes()
        except OSError:
            return None
        if hashlib.sha256(raw[:-32]).digest() != raw[-32:]:
            return None
        with np.load(io.BytesIO(raw[:-32]), allow_pickle=False) as found:
            return {name: found[name] for name in found.files}

    def write(self, index: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Make a chunk durable."""
        buffer = io.BytesIO()
        np.savez(buffer, **dict(arrays))  # type: ignore[arg-type]
        raw = buffer.getvalue()
        write_bytes(self._path(index), raw + hashlib.sha256(raw).digest())

    def discard(self) -> None:
        """Remove the folder, once the output is written."""
        shutil.rmtree(self.folder)
        sync_folder(self.folder.parent)
