"""The columns that a recipe's steps name, against those that its manifests have, before anything runs."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from ncm_cli.errors import NcmError
from ncm_cli.options.grids import parse_names
from ncm_cli.recipe.document import Entries
from ncm_cli.recipe.model import Job
from ncm_cli.recipe.problems import Problems
from ncm_cli.store.where import parse_where

FILTERS = ("where", "train", "val", "test", "reference", "oracle_train")
LISTS = ("groups", "same", "across", "envs", "dro_groups", "upweight", "erase", "target")
"""Options that name columns of a feature store: in row filters, and in lists."""

MANIFEST = ("id_col", "path_col", "label_col", "split_col", "col", "numeric")
"""Options of embed that name columns of its manifest."""

Columns = tuple[str, ...]


def built_columns(builder: str) -> Columns | None:
    """The columns of a builder's manifest; None where it has none or they depend on its options."""
    from ncm_cli.datasets import coloring, pacs, waterbirds_cf

    return {
        "digits": coloring.COLUMNS,
        "colored-mnist": coloring.COLUMNS,
        "pacs": pacs.COLUMNS,
        "waterbirds-cf": waterbirds_cf.COLUMNS,
    }.get(builder)


class ColumnCheck:
    """Follows columns from manifests to feature stores to the steps that name them."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._folders: dict[Path, Columns | None] = {}
        self._stores: dict[Path, Columns | None] = {}

    def look_at(self, job: Job, written: Entries, path: str) -> None:
        """Check one job, in the order of the steps, and remember what it makes."""
        if job.kind == "data":
            for folder in job.outputs.get("output", ()):
                self._folders[folder] = built_columns(job.builder or "")
            return
        if job.kind == "embed":
            known = self._manifest_columns(job)
            self._require(job, written, path, MANIFEST, known, "of the manifest")
            for store in job.outputs.get("output", ()):
                self._stores[store] = known
            return
        (features,) = job.inputs.get("features", (None,))[:1]
        known = None if features is None else self._stores.get(features)
        self._require(job, written, path, FILTERS + LISTS, known, "of the features")
        self._require_apart(job, written, path)

    def _require_apart(self, job: Job, written: Entries, path: str) -> None:
        """Validation rows that are the test rows would make the choice look better than it is."""
        val, test = (getattr(job.options, name, None) for name in ("val", "test"))
        if job.kind in ("fit", "sweep") and val and (val or "").split() == (test or "split=test").split():
            line = written.key_lines.get("val", written.line)
            self._problems.add(line, f"{path}.val", f"the validation rows are the test rows: {val}")

    def _manifest_columns(self, job: Job) -> Columns | None:
        (source,) = job.inputs["source"]
        if job.options.layout:
            return tuple(job.options.layout.split("/"))
        for folder, columns in self._folders.items():
            if source.is_relative_to(folder):
                return columns
        return _header(source) if source.is_file() else None

    def _require(
        self, job: Job, written: Entries, path: str, options: Columns, known: Columns | None, whose: str
    ) -> None:
        if known is None:
            return
        for option in options:
            for name in _names(job, option):
                if name not in known:
                    line = written.key_lines.get(option, written.line)
                    self._problems.unknown(line, f"{path}.{option}", f"column {whose}", name, known)


def _names(job: Job, option: str) -> Iterator[str]:
    value = getattr(job.options, option, None)
    if value is None:
        return
    if option in FILTERS:
        try:
            yield from (term.column for term in parse_where(value))
        except NcmError:
            # A filter that can't be read is reported with the option's own check, or by the step.
            return
    elif isinstance(value, tuple):
        yield from value
    else:
        yield from parse_names(value)


def _header(file: Path) -> Columns | None:
    """The first line of a CSV or TSV file; None where the step itself has to say what is wrong with it."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            first = next(csv.reader(stream, delimiter="\t" if file.suffix == ".tsv" else ","), None)
    except (OSError, UnicodeDecodeError, csv.Error):
        return None
    return tuple(name.strip() for name in first) if first else None
