"""A data set folder is made beside its final place and renamed when it is complete.

``ncm data``: make one of the data sets on disk.
"""

from __future__ import annotations

import json
import os.path
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ncm_cli import __version__
from ncm_cli.errors import InputError, listing
from ncm_cli.probes.projection import blas_threads
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.registry import builder_of

MARKER = "dataset.json"
"""Says that a folder is a builder's, so that the builder may replace it."""

FORMAT = "ncm-data"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What a builder wrote."""

    builder: str
    output: Path
    files: dict[str, Path]
    """Role (``manifest``, ``pairs`` ...) to file."""
    facts: dict[str, Any]
    """Counts and settings, ready for JSON."""
    tables: tuple[CountTable, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "builder": self.builder,
            "output": str(self.output),
            "files": {role: str(path) for role, path in self.files.items()},
            **self.facts,
            "counts": {table.title: table.to_json() for table in self.tables},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CountTable:
    """Rows of counts to show, such as the size of each group."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def to_json(self) -> list[dict[str, object]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@contextmanager
def building(output: Path, builder: str, options: dict[str, Any]) -> Iterator[Path]:
    """A new folder that becomes ``output`` when the block ends without an error.

    An earlier folder of any builder is replaced, unless something else was put into it; so are empty ones.
    """
    _refuse_foreign(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        made.chmod(0o755)
        yield made
        header = {
            "ncm_format": FORMAT,
            "ncm_format_version": FORMAT_VERSION,
            "ncm_version": __version__,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "builder": builder,
            "options": options,
            "entries": sorted(path.name for path in made.iterdir()),
        }
        (made / MARKER).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
        _replace(made, output)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _refuse_foreign(output: Path) -> None:
    """Refuse an output that holds anything which no builder wrote: replacing it would lose that."""
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError("a file where the data set's folder should go", where=output, fix="another --output")
    others = {path.name for path in output.iterdir()} - _entries(output)
    if others:
        raise InputError(
            "the output folder holds other files",
            where=output,
            found=listing(sorted(others)),
            expected="a new folder, an empty one, or an earlier data set and nothing else",
            fix="another --output, or move these files away",
        )


def _entries(output: Path) -> set[str]:
    """What an earlier build wrote into a folder."""
    try:
        header = json.loads((output / MARKER).read_text(encoding="utf-8"))
        return {MARKER, *header["entries"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _replace(made: Path, output: Path) -> None:
    if not output.exists():
        made.rename(output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".old", dir=output.parent))
    output.rename(old / "data")
    made.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def absolute(path: Path) -> str:
    """A path for a manifest whose images stay where they are; links are kept."""
    return os.path.normpath(path.absolute())


def data(options: Any, *, reporter: Reporter = SILENT) -> Built:
    """Make the data set to which the class of ``options`` belongs."""
    # Builders decompose small matrices at most.
    with blas_threads(0):
        built: Built = builder_of(options)(options, reporter=reporter)
    return built
