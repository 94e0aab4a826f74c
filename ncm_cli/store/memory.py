"""Data frames and arrays that Python gives in place of files; their digests are recorded."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import UsageError
from ncm_cli.store.arrow import frame_texts, is_frame
from ncm_cli.store.digests import digest_of
from ncm_cli.store.table import NumberedRows


class GivenTable(NumberedRows):
    """A data frame, as text."""

    @cached_property
    def sha256(self) -> str:
        """The digest of the names and texts of all columns."""
        return digest_of([list(self.columns), list(self.values.values())])

    def to_json(self) -> str:
        """What is recorded in place of a path."""
        return f"data frame sha256-{self.sha256}"

    def __str__(self) -> str:
        return str(self.path)


class GivenArray:
    """A numpy array or a torch tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @cached_property
    def sha256(self) -> str:
        """The digest of the file that `numpy.save` would write."""
        value = self.value
        if hasattr(value, "detach"):
            value = value.float().numpy() if "bfloat16" in str(value.dtype) else value.numpy()
        hasher = _Hasher()
        np.lib.format.write_array(hasher, np.asarray(value), allow_pickle=False)
        return hasher.digest.hexdigest()

    def to_json(self) -> str:
        """What is recorded in place of a path."""
        return f"array sha256-{self.sha256}"

    def __str__(self) -> str:
        return "the array"


class _Hasher:
    """A file that keeps nothing but the digest of what is written to it."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.digest.update(data)


def given_table(name: str, value: object) -> GivenTable:
    """The table of a data frame; `UsageError` for any other value of the option ``name``."""
    if not is_frame(value):
        what = f"{name} takes the path of a file or folder, or a data frame of pandas or polars"
        raise UsageError(what, found=type(value).__name__)
    return GivenTable.of(Path("the data frame"), *frame_texts(value))


def given_array(name: str, value: Any) -> GivenArray:
    """The array of a value that has a shape; `UsageError` for any other value of the option ``name``."""
    if not hasattr(value, "shape"):
        what = f"{name} takes the path of a file, or an array (rows, dimensions)"
        raise UsageError(what, found=type(value).__name__)
    return GivenArray(value.detach() if hasattr(value, "detach") else np.asarray(value))
