"""The columns that a recipe's steps name, against those of its files, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ncm_cli.errors import NcmError
from ncm_cli.options.grids import parse_names
from ncm_cli.options.spec import Field, fields_of
from ncm_cli.options.where import parse_where
from ncm_cli.recipe.document import Entries
from ncm_cli.recipe.model import Job
from ncm_cli.recipe.problems import Problems
from ncm_cli.store.manifest import Choice
from ncm_cli.store.tables import read_header

Columns = tuple[str, ...]

ALIASES = ("label", "split")
"""Names that every feature store understands: its own label and split column, whatever these are called."""

_PAIRS = ("id_a", "id_b")


def built_columns(job: Job) -> dict[str, Columns]:
    """The columns of the tables and feature stores that a builder makes, by file name."""
    from ncm_cli.datasets import coloring, pacs, waterbirds_cf

    digits = {"pairs.csv": (*_PAIRS, "holdout", "wrong"), "oracle_pairs.csv": _PAIRS}
    without_path = tuple(name for name in coloring.COLUMNS if name != "path")
    packed = getattr(job.options, "packed", False)
    layout = (getattr(job.options, "layout", None) or "label").split("/")
    return {
        "digits": {"manifest.csv": coloring.COLUMNS, **digits},
        "colored-mnist": {"manifest.csv": without_path if packed else coloring.COLUMNS, **digits},
        "folder": {"manifest.csv": ("id", "path", *layout, "split")},
        "pacs": {"manifest.csv": pacs.COLUMNS},
        "synthetic": {"features.h5": _in_store(["domain"])},
        "waterbirds-cf": {"manifest.csv": waterbirds_cf.COLUMNS, "pairs.csv": _PAIRS},
    }[job.builder or ""]


class ColumnCheck:
    """Follows columns from tables to feature stores to the steps that name them."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._known: dict[Path, Columns | None] = {}

    def look_at(self, job: Job, options: type, written: Entries, path: str) -> None:
        """Check one job, in the order of the steps, and remember what it makes.

        The job's own options may be what is right of them: see `ncm_cli.recipe.convert.to_options`.
        """
        for field in fields_of(options):
            value = getattr(job.options, field.name)
            if field.spec.columns_of and value != field.default:
                self._check(job, field, value, written, path)
        self._require_apart(job, written, path)
        for output in job.outputs.get("output", ()):
            if job.kind == "data":
                self._known.update({output / name: found for name, found in built_columns(job).items()})
            elif job.kind == "embed":
                self._known[output] = self._embedded(job)

    def _check(self, job: Job, field: Field, value: Any, written: Entries, path: str) -> None:
        lines = {name.replace("-", "_"): line for name, line in written.key_lines.items()}
        line, key = lines.get(field.name, written.line), f"{path}.{field.name}"
        known = self._columns_of(job, field.spec.columns_of or "")
        if known is None:
            return
        whose = {"features": "features", "layout": "layout"}.get(field.spec.columns_of or "", "manifest")
        for name in _names(field, value):
            if name not in known:
                self._problems.unknown(line, key, f"column of the {whose}", name, known)

    def _columns_of(self, job: Job, option: str) -> Columns | None:
        """The columns of what an option names; None where they can't be known yet."""
        if option == "layout" or (option == "source" and getattr(job.options, "layout", None)):
            return tuple(job.options.layout.split("/"))
        (file,) = job.inputs.get(option) or (None,)
        if file is not None and file not in self._known:
            self._known[file] = _read(file)
        return None if file is None else self._known[file]

    def _embedded(self, job: Job) -> Columns | None:
        """The columns of the feature store that a job makes."""
        if job.options.layout is None and any(path.is_dir() for path in job.inputs.get("source", ())):
            return ALIASES
        found = self._columns_of(job, "source")
        if found is None:
            return None
        choice = Choice.of(job.options)
        if job.options.layout is None:
            choice = choice.resolved(found, with_files=job.options.from_array is None)
        return _in_store(choice.kept(found))

    def _require_apart(self, job: Job, written: Entries, path: str) -> None:
        """Validation rows that are the test rows would make the choice look better than it is."""
        val, test = (getattr(job.options, name, None) for name in ("val", "test"))
        if job.kind in ("fit", "sweep") and val and (val or "").split() == (test or "split=test").split():
            line = written.key_lines.get("val", written.line)
            self._problems.add(line, f"{path}.val", f"the validation rows are the test rows: {val}")


def _names(field: Field, value: Any) -> Iterable[str]:
    """The columns that an option's value names."""
    if field.repeated:
        return tuple(value)
    if field.spec.metavar == "WHERE":
        return [term.column for term in parse_where(value)]
    # Crossings of --groups stand between semicolons.
    return parse_names(value.replace(";", ",")) if field.spec.metavar == "COLUMNS" else (value,)


def _in_store(columns: Iterable[str]) -> Columns:
    return tuple(dict.fromkeys((*columns, *ALIASES)))


def _read(file: Path) -> Columns | None:
    """The columns of a table or feature store; None where the step has to say what is wrong with it."""
    if not file.is_file():
        return None
    try:
        return read_header(file)
    except NcmError:
        pass
    from ncm_cli.store.features import FeatureStore

    try:
        with FeatureStore.open(file) as store:
            return _in_store(store.columns)
    except NcmError:
        return None
