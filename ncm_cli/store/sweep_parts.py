"""Finished chunks of a sweep that isn't finished, so that a killed one goes on.

The folder ``.NAME.partial`` beside the output holds ``sweep.json``, which says what is being made, and
``chunk-N.npz`` for every finished chunk. Each file appears whole or not at all; one whose bytes have changed
since is made anew.
"""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.atomic import read_json, sync_folder, write_bytes, write_json
from ncm_cli.store.fingerprint import digest_of

FORMAT = "ncm-sweep-parts"
VERSION = 1


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
            body = {"ncm_format": FORMAT, "ncm_format_version": VERSION, "key_sha256": digest, "key": key}
            write_json(self.folder / "sweep.json", body)

    def _found(self) -> object:
        """The key's digest of the folder that is there, None if it can't be read."""
        try:
            found = read_json(self.folder / "sweep.json")
        except InputError:
            return None
        known = isinstance(found, dict) and found.get("ncm_format") == FORMAT
        return found["key_sha256"] if known and found.get("ncm_format_version") == VERSION else None

    def _path(self, index: int) -> Path:
        return self.folder / f"chunk-{index}.npz"

    def read(self, index: int) -> dict[str, np.ndarray] | None:
        """The arrays of a chunk, or None if it isn't finished."""
        path = self._path(index)
        if not path.is_file():
            return None
        try:
            # Zip members carry a CRC, which is checked as they are read.
            with np.load(path, allow_pickle=False) as found:
                return {name: found[name] for name in found.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None

    def write(self, index: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Make a chunk durable."""
        buffer = io.BytesIO()
        np.savez(buffer, **dict(arrays))  # type: ignore[arg-type]
        write_bytes(self._path(index), buffer.getvalue())

    def discard(self) -> None:
        """Remove the folder, once the output is written."""
        shutil.rmtree(self.folder)
        sync_folder(self.folder.parent)
