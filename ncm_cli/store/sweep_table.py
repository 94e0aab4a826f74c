"""The table of a sweep: every configuration with its metrics at every checkpoint (HDF5, CSV, Parquet)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.files import atomic_path
from ncm_cli.store.hdf5 import H5Reader, reading, writing

FORMAT = "ncm-sweep"
VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SweepTable:
    """n configurations, in the order in which they were planned."""

    method: tuple[str, ...]
    """(n) names, with ``+upweight`` where it was."""
    trial: np.ndarray
    """int64 (n,)."""
    seed: np.ndarray
    """int64 (n,)."""
    hyper: dict[str, np.ndarray]
    """float64 (n,) for each hyper-parameter, NaN where the method has none of that name."""
    diverged: np.ndarray
    """bool (n,): a weight became NaN or infinite."""
    epochs: np.ndarray
    """int64 (E,): the checkpoints. Methods that aren't trained by steps have their numbers at the first."""
    metrics: dict[str, np.ndarray]
    """float64 (n, E) for each metric, NaN where not known."""
    options: dict[str, Any]


def write_sweep(path: Path | str, table: SweepTable) -> None:
    """Write the HDF5 file atomically."""
    with writing(path, FORMAT, VERSION) as writer:
        writer.text("method", table.method, what="methods")
        for name in ("trial", "seed", "diverged", "epochs"):
            writer.array(name, getattr(table, name))
        for folder, columns in (("hyper", table.hyper), ("metrics", table.metrics)):
            for name, values in columns.items():
                writer.array(f"{folder}/{name}", values)
        writer.json("options", table.options)


def read_sweep(path: Path | str) -> SweepTable:
    """Read the HDF5 file; refuses another format, a newer version and changed bytes."""
    with H5Reader(path, FORMAT, VERSION, what="a sweep's table") as h5, reading(h5.path):
        method, epochs = h5.text("method"), h5.array("epochs", np.int64, shape=(None,))
        rows, wide = (len(method),), (len(method), len(epochs))
        hyper = {name: h5.array(f"hyper/{name}", np.float64, shape=rows) for name in h5.members("hyper")}
        return SweepTable(
            method=method,
            trial=h5.array("trial", np.int64, shape=rows),
            seed=h5.array("seed", np.int64, shape=rows),
            hyper=hyper,
            diverged=h5.array("diverged", np.bool_, shape=rows),
            epochs=epochs,
            metrics={
                name: h5.array(f"metrics/{name}", np.float64, shape=wide) for name in h5.members("metrics")
            },
            options=h5.json("options"),
        )


def write_parquet(path: Path | str, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns of equal length atomically; needs pyarrow."""
    arrow, parquet = require_pyarrow()
    table = arrow.table({name: _arrow(values) for name, values in columns.items()})
    with atomic_path(path) as temporary:
        parquet.write_table(table, str(temporary))


def _arrow(values: Sequence[Any]) -> list[Any]:
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values]


def require_pyarrow() -> tuple[Any, Any]:
    """pyarrow and its parquet module; `InputError` where it isn't installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            "a Parquet table needs the package pyarrow",
            fix="pip install 'ncm-cli[parquet]', or -o NAME.h5 or NAME.csv",
        ) from None
    return pyarrow, pyarrow.parquet
