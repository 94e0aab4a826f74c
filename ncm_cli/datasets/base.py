"""``ncm data``: makes a data set's folder beside its final place, and renames it when it is complete."""

from __future__ import annotations

import json
import os.path
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path, PurePath
from typing import Any

from ncm_cli import __version__
from ncm_cli.errors import InputError, UsageError, listing
from ncm_cli.options import check, fields_of
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.registry import builder_of
from ncm_cli.solvers.projection import blas_threads
from ncm_cli.store.files import jsonable, read_json, writer_lock
from ncm_cli.store.journal import journal_folder
from ncm_cli.store.tables import read_table

MARKER = "dataset.json"
"""The file that marks a folder as made by a builder, so that a builder may replace it."""

FORMAT = "ncm-data"
FORMAT_VERSION = 1


def data(options: Any, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Make the data set to which the class of ``options`` belongs; returns what ``--json`` prints.

    An empty folder is replaced, and so is an earlier one of any builder, unless other files were put into it.
    A builder ``(options, folder, reporter)`` fills a folder; it returns the number of ``rows`` and, in
    ``counts``, the title and the rows of a table to show.
    """
    check(options)
    name, build = builder_of(options)
    output: Path = options.output
    inputs = [getattr(options, field.name) for field in fields_of(type(options)) if field.role == "input"]
    for source in filter(None, inputs):
        if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(output)):
            raise UsageError(
                "the output folder contains the source of the data set, which it would replace",
                where=output,
                found=source,
                fix="another --output",
            )
    # Builders decompose small matrices at most.
    with blas_threads(0), _complete(output, name, jsonable(options)) as folder:
        facts = build(options, folder, reporter)
    written = sorted(path for path in output.iterdir() if path.is_file() and path.name != MARKER)
    files = {path.stem: str(path) for path in written}
    return {"builder": name, "output": str(output), "files": files, "seed": options.seed, **facts}


def _unlisted(output: Path) -> set[str]:
    """Files in folders of an earlier data set that aren't in its manifest."""
    folders = [path for path in output.iterdir() if path.is_dir() and not path.is_symlink()]
    paths = {str(path.relative_to(output)) for folder in folders for path in folder.rglob("*")}
    if not paths:
        return set()
    named = {PurePath(path) for path in read_table(output / "manifest.csv").column("path")}
    known = {str(folder) for path in named for folder in (path, *path.parents)}
    return paths - known


@contextmanager
def _complete(output: Path, builder: str, options: dict[str, Any]) -> Iterator[Path]:
    """A new folder that becomes ``output`` if the block ends without an error.

    Only one builder works on ``output`` at a time; leftovers of a killed one are removed.
    """
    output = Path(os.path.realpath(output))
    if Path.cwd().is_relative_to(output):
        raise InputError("the output is the folder that you are in", where=output, fix="another --output")
    if output.is_symlink():
        raise InputError("the output is a link that leads back to itself", where=output)
    work_folder = journal_folder(output)
    with writer_lock(work_folder.with_name(f"{output.name}.partial")):
        _refuse_foreign(output)
        shutil.rmtree(work_folder, ignore_errors=True)
        try:
            new_folder = work_folder / "new"
            new_folder.mkdir(parents=True)
            yield new_folder
            header = {
                "ncm_format": FORMAT,
                "ncm_format_version": FORMAT_VERSION,
                "ncm_version": __version__,
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "builder": builder,
                "options": options,
                "entries": sorted(path.name for path in new_folder.iterdir()),
            }
            (new_folder / MARKER).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
            if output.exists():
                output.rename(work_folder / "old")
            new_folder.rename(output)
        finally:
            shutil.rmtree(work_folder, ignore_errors=True)


def _refuse_foreign(output: Path) -> None:
    """Refuse an output with anything that no builder wrote, since replacing it would lose that."""
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError("a file where the data set's folder should go", where=output, fix="another --output")
    try:
        marker = read_json(output / MARKER, limit=1 << 20)
        known = {MARKER, *marker["entries"]} if marker["ncm_format"] == FORMAT else set()
    except (InputError, KeyError, TypeError):
        known = set()
    others = {path.name for path in output.iterdir()} - known or _unlisted(output)
    if others:
        raise InputError(
            "the output folder holds other files",
            where=output,
            found=listing(sorted(others)),
            expected="a new folder, an empty one, or an earlier data set and nothing else",
            fix="another --output, or move these files away",
        )
