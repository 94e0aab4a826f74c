"""The steps of a recipe as jobs, one for each cell of the matrix.

Before anything runs, options are checked by the declarations that the command line uses, and so are the files
that steps pass on to one another and their columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import os.path
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ncm_cli.errors import NcmError, UsageError
from ncm_cli.images.manifest import ColumnNames
from ncm_cli.images.paths import expanded, is_remote
from ncm_cli.options import (
    Field,
    check_value,
    expand_home,
    fields_of,
    joined_values,
    parse_left_out,
    parse_names,
    parse_where,
    possible,
    refusals,
    values_of,
)
from ncm_cli.recipes.document import NUMBER, Mistakes, Node, Variables, scalar_value
from ncm_cli.registry import BUILDERS, STEPS, options_of
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import relative
from ncm_cli.store.outputs import STDOUT, check_place, refuse_address
from ncm_cli.store.tables import read_header

REPORT, STATE = "report.json", ".ncm-run.json"
"""Files that a run writes itself: its report, and the record of what steps have read and written."""

Columns = tuple[str, ...]

ALIASES = ("label", "split")
"""Names for a feature store's label and split columns, whatever these are called."""

MAX_JOBS = 20_000
"""Most jobs of a recipe."""

_PAIRS = ("id_a", "id_b")
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One step in one cell of the matrix: one command line."""

    step: str
    """The step's name, unique in the recipe."""
    kind: str
    """The subcommand: ``embed``, ``fit`` ..., or ``data``."""
    builder: str | None = None
    """The data set of a ``data`` step."""
    cell: dict[str, str]
    """The matrix variables that the step uses, with their values in this cell as the recipe writes them."""
    options: Any = None
    """The options of the subcommand, with paths resolved."""
    inputs: dict[str, tuple[Path, ...]] = dataclasses.field(default_factory=dict)
    """Files and folders that are read, absolute, by option."""
    outputs: dict[str, Path] = dataclasses.field(default_factory=dict)
    """Files and folders that options name as outputs, absolute, by option."""
    written: tuple[Path, ...] = ()
    """All files and folders that are written: a sweep, for example, writes more than its named table."""

    @property
    def read(self) -> list[Path]:
        """All files and folders that are read."""
        return [path for paths in self.inputs.values() for path in paths]

    @property
    def title(self) -> str:
        """The step and its cell, for messages."""
        cell = ", ".join(f"{name} {value}" for name, value in self.cell.items())
        return f"{self.step} ({cell})" if cell else self.step

    @property
    def key(self) -> str:
        """The job's key in records: unique in a recipe, and stable between runs."""
        return json.dumps([self.step, self.cell], ensure_ascii=False)


def read_options(
    options: type, node: Node, path: str, path_of: Callable[[Field, Node, str], Path], mistakes: Mistakes
) -> tuple[Any | None, SimpleNamespace]:
    """The options of one step, None if there is a mistake; and the correct ones alone, for further checks.

    In the second, an option with a mistake has its default, and None if it is required.
    """
    fields = {field.name: field for field in fields_of(options)}
    values: dict[str, Any] = {}
    right = True
    for name, value in node.value.items():
        if (field := fields.get(name)) is None:
            mistakes.unknown(node.keys[name], f"{path}.{name}", "option", name, fields)
            right = False
        elif value.value is not None:  # null means the default, so that a variable can leave an option out
            checked = []
            several = value.value if isinstance(value.value, list) else []
            if several and field.separator and all(item.is_scalar for item in several):
                text = joined_values(field, [item.text for item in several])
                value = dataclasses.replace(value, value=text, text=text)
            for item in value.items if field.repeated or field.several else [value]:
                try:
                    checked.append(_checked(field, item, f"{path}.{name}", path_of))
                except UsageError as error:
                    mistakes.add(item.line, f"{path}.{name}", _message(error))
                    right = False
            if checked or field.repeated:
                single = len(checked) == 1 and not field.repeated
                values[name] = checked[0] if single else tuple(checked)
    for name in (name for name, field in fields.items() if field.required and name not in values):
        right = False
        if name not in node.value:
            mistakes.add(node.line, path, f"{name} is required")
        elif node.value[name].value in (None, []) and not node.value[name].is_unresolved:
            what = "a value is required; if a variable should give it, use --set NAME=VALUE"
            mistakes.add(node.keys[name], f"{path}.{name}", what)
    defaults = {name: None if field.required else field.default for name, field in fields.items()}
    complete = options(**values) if right else None
    for refusal in refusals(complete):
        # Reported at the first key that the message names.
        named = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]*)", str(refusal))}
        name = next((name for name in node.keys if name in named), "")
        mistakes.add(node.keys.get(name, node.line), f"{path}.{name}".rstrip("."), _message(refusal))
    return complete, SimpleNamespace(**defaults | values)


def _checked(field: Field, node: Node, path: str, path_of: Callable[[Field, Node, str], Path]) -> Any:
    """One value, converted and checked as on the command line."""
    value, expected = node.value, _EXPECTED[field.type]
    if isinstance(value, list | dict):
        several = " or a list of them" if field.repeated or field.several else ""
        raise UsageError(f"expected {expected}{several}, found {node.kind()}")
    taken: tuple[type, ...] = {int: (int,), float: (int, float), bool: (bool,)}.get(field.type, ())
    if taken and type(value) not in taken:
        raise UsageError(f"expected {expected}, found {node.kind()}{_why(field, node.text)}")
    if taken:
        value = field.type(value)
    elif field.type is Path:
        value = path_of(field, node, path)
    else:
        # Text options take numbers as written: rank: 16, or a label 1. Text that names no file isn't made
        # a path, which would lose repeated slashes.
        as_path = path_of(field, node, path) if field.role == "name-or-input" else Path(node.text)
        value = node.text if as_path == Path(node.text) else str(as_path)
    check_value(field, value)
    return value


def _message(error: NcmError) -> str:
    details = "; ".join(f"{label}: {text}" for label, text in error.lines())
    return f"{error.what} ({details})" if details else error.what


def _why(field: Field, text: str) -> str:
    """The reason why a value that looks right has another type; "" if there is none to give."""
    if field.type is bool:
        return "; write true or false" if text.lower() in ("yes", "no", "on", "off") else ""
    bare = text.lstrip("+-")
    if bare.isdigit() and bare.startswith("0"):
        return "; a number has no leading zero"
    if ":" in bare and bare.replace(":", "").isdigit():
        return "; 1:30 isn't a number in YAML 1.2"
    too_large = NUMBER.fullmatch(text) and isinstance(scalar_value(text), str)
    return "; that is more than a number can hold" if too_large else ""


def built_columns(job: Job) -> dict[str, Columns]:
    """The columns of each table or feature store that a builder writes, by file name."""
    from ncm_cli.datasets import colored, image_folder, waterbirds

    digits = {"pairs.csv": (*_PAIRS, "holdout", "wrong"), "oracle_pairs.csv": _PAIRS}
    without_path = tuple(name for name in colored.COLUMNS if name != "path")
    packed = getattr(job.options, "packed", False)
    layout = (getattr(job.options, "layout", None) or "label").split("/")
    return {
        "digits": {"manifest.csv": colored.COLUMNS, **digits},
        "colored-mnist": {"manifest.csv": without_path if packed else colored.COLUMNS, **digits},
        "folder": {"manifest.csv": ("id", "path", *layout, "split")},
        "pacs": {"manifest.csv": image_folder.PACS_COLUMNS},
        "synthetic": {"features.h5": ("domain", *ALIASES)},
        "waterbirds-cf": {"manifest.csv": waterbirds.COLUMNS, "pairs.csv": _PAIRS},
    }[job.builder or ""]


def _named_columns(field: Field, value: Any) -> Iterable[str]:
    """The columns that an option's value names."""
    if field.metavar == "WHERE":
        return [term.column for term in parse_where(value)] if "=" in value else ()
    values = values_of(value)
    if field.metavar != "COLUMNS":
        return tuple(values)
    # Semicolons separate the crossings of --groups.
    return parse_names(",".join(values).replace(";", ","))


def _columns_in(file: Path) -> Columns | None:
    """The columns of a table or feature store; None if it can't be read, which the step itself reports."""
    with contextlib.suppress(NcmError):
        return read_header(file) if file.is_file() else None
    with contextlib.suppress(NcmError), FeatureStore(file) as store:
        return (*store.columns, *ALIASES)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Draft:
    """One step in one cell of the matrix, before its options are read."""

    job: Job
    kind: type | None
    """The class of its options; None for an unknown step or builder."""
    options: Node
    """With variables filled in."""
    as_written: Node
    path: str
    outputs: dict[Field, Path]


@dataclasses.dataclass(slots=True)
class Steps:
    """Reads the ``steps`` of a recipe."""

    _variables: Variables
    _mistakes: Mistakes
    _recipe_folder: Path
    _out: Path
    _dry_run: bool
    _allow_outside: bool
    names: dict[str, int] = dataclasses.field(default_factory=dict)
    """The line of every step by name, those with mistakes included."""
    missing: dict[str, None] = dataclasses.field(default_factory=dict)
    """Missing inputs in a dry run, in which they aren't mistakes."""
    _drafts: list[_Draft] = dataclasses.field(default_factory=list)
    _writers: dict[Path, int] = dataclasses.field(default_factory=dict)
    """For each written path, the index of the first draft that writes it."""
    _around: dict[Path, int] = dataclasses.field(default_factory=dict)
    """For each folder, the index of the first draft that writes something in it."""
    _known: dict[Path, Columns | None] = dataclasses.field(default_factory=dict)
    """The columns of each table and feature store, as far as they have been read or derived."""

    def read(self, node: Node | None, line: int) -> list[Job]:
        """All jobs, in the order of the steps; within one step, in the order of the matrix."""
        if node is None or not isinstance(node.value, list) or not node.value:
            found = "nothing" if node is None else "an empty list" if node.value == [] else node.kind()
            what = f"expected a list with one entry for each step, found {found}"
            self._mistakes.add(node.line if node else line, "steps", what)
            return []
        for number, item in enumerate(node.value, 1):
            self._draft(item, f"steps[{number}]")
        for number, draft in enumerate(self._drafts):
            self._claim(number, draft)
        return [
            self._job(number, draft, draft.kind)
            for number, draft in enumerate(self._drafts)
            if draft.kind is not None
        ]

    def _draft(self, item: Node, path: str) -> None:
        """Draft the jobs of one step, one for each cell of the matrix variables that it uses."""
        if not isinstance(item.value, dict):
            self._mistakes.expected(item, path, "a step such as  - fit: {features: features.h5, ...}")
            return
        kinds = [key for key in item.value if key in STEPS]
        strange = [key for key in item.value if key not in STEPS and key != "name"]
        for key in strange:
            self._mistakes.unknown(item.keys[key], f"{path}.{key}", "step", key, [*STEPS, "name"])
        if len(kinds) != 1 and not strange:
            what = f"expected one step, found {', '.join(kinds) or 'none'}"
            self._mistakes.add(item.line, path, what)
        if len(kinds or strange) != 1:
            return
        # An unknown step is drafted for its outputs, so that steps that read them aren't reported.
        (kind,) = kinds or strange
        options = item.value[kind]
        if not isinstance(options.value, dict):
            self._mistakes.expected(options, f"{path}.{kind}", "a mapping of options")
            return
        options = options.renamed(lambda key: key.replace("-", "_"))
        name = self._step_name(item.value.get("name"), kind, path)
        self.names[name] = item.keys[kind]
        cells = self._variables.cells(options)
        if len(self._drafts) + len(cells) > MAX_JOBS:
            self._mistakes.stop(item.line, path, f"over {MAX_JOBS:,} steps, each cell counted")
        for cell in cells:
            filled = self._variables.fill(options, f"{path}.{kind}", cell)
            builder, taken = None, options_of(kind) if kind in STEPS and kind != "data" else None
            if kind == "data":
                node = filled.value.pop("builder", Node(None, item.keys[kind]))
                builder = node.text
                if builder in BUILDERS:
                    taken = options_of(f"data {builder}")
                else:
                    line = filled.keys.get("builder", node.line)
                    self._mistakes.unknown(line, f"{path}.data.builder", "builder", builder, BUILDERS)
            fields = fields_of(taken or options_of("eval"))  # eval: for the output of an unknown step
            output_nodes = (
                (field, filled.value.get(field.name)) for field in fields if field.role == "output"
            )
            outputs = {
                field: self._in_out(node)
                for field, node in output_nodes
                if node is not None and node.is_scalar and Path(node.text) != STDOUT
            }
            job = Job(
                step=name,
                kind=kind,
                builder=builder,
                cell={name: value.text for name, value in cell.items()},
                outputs={field.name: path for field, path in outputs.items()},
                written=tuple(file for field, path in outputs.items() for file in field.all_files(path)),
            )
            self._drafts.append(_Draft(job, taken, filled, options, f"{path}.{kind}", outputs))

    def _step_name(self, node: Node | None, kind: str, path: str) -> str:
        if node is None:
            numbered = (f"{kind}-{number}" for number in range(2, len(self.names) + 3))
            return next(name for name in (kind, *numbered) if name not in self.names)
        if not node.text.strip() or "|" in node.text:
            self._mistakes.add(node.line, f"{path}.name", "expected a short text without |")
            return f"{kind}-at-{path}"
        if "${" in node.text:
            what = "a step's name can't hold variables: cells are added to it"
            self._mistakes.add(node.line, f"{path}.name", what)
        if node.text in self.names:
            what = f"line {self.names[node.text]} has a step of this name"
            self._mistakes.add(node.line, f"{path}.name", what)
        return node.text

    def _claim(self, number: int, draft: _Draft) -> None:
        """Register the outputs of a draft, which no earlier draft may write."""
        for field, output in draft.outputs.items() if draft.kind else ():
            writers = ((path, self._writer(path)) for path in field.all_files(output))
            taken = [(path, self._drafts[other]) for path, other in writers if other is not None]
            what = self._misplaced(field, output)
            if taken and not what:
                path, other = taken[0]
                what = f"{self._shown(path)} is {self._why_taken(draft, field.name, other)}"
            if what:
                line = draft.options.value[field.name].line
                self._mistakes.add(line, f"{draft.path}.{field.name}", what)
        for path in draft.job.written:
            self._writers.setdefault(path, number)
            for folder in path.parents:
                self._around.setdefault(folder, number)

    def _writer(self, path: Path) -> int | None:
        """The index of the first draft that writes a path, a folder around it, or something in it."""
        around = (self._writers[place] for place in (path, *path.parents) if place in self._writers)
        return next(around, self._around.get(path))

    def _misplaced(self, field: Field, path: Path) -> str:
        """Why nothing may be written to a path; "" if it may."""
        reserved = [self._out / name for name in (REPORT, STATE)]
        if self._out.is_relative_to(path) or any(path.is_relative_to(file) for file in reserved):
            return f"{self._shown(path)} is reserved for the run itself"
        if not (self._allow_outside or path.is_relative_to(self._out)):
            return f"{self._shown(path)} is outside the run's folder; ncm run --allow-outside writes there"
        try:
            refuse_address(path.relative_to(self._out) if path.is_relative_to(self._out) else path)
            check_place(field, possible(path))
        except NcmError as error:
            return _message(error)
        return ""

    def _why_taken(self, draft: _Draft, name: str, other: _Draft) -> str:
        """Why an option's path collides with that of another draft."""
        job = draft.job
        if other.job.step != job.step:
            return f"also written by {other.job.title}"
        (used,) = self._variables.cells(draft.as_written.value[name])[:1]
        differing = [variable for variable in job.cell if job.cell[variable] != other.job.cell[variable]]
        if lacking := [f"${{{variable}}}" for variable in differing if variable not in used]:
            return f"the same in several cells; put {', '.join(lacking)} in it"
        cells = " and ".join(titled.title.removeprefix(f"{job.step} ") for titled in (other.job, job))
        return f"written in the cells {cells}: choose values that give different paths"

    def _job(self, number: int, draft: _Draft, kind: type) -> Job:
        fields, entries = fields_of(kind), dict(draft.options.value)
        for field in fields:
            if (field.repeated or field.several) and field.role == "input" and field.name in entries:
                # A pattern such as ``seed*/result.json`` stands for the matching outputs of earlier steps.
                patterns = entries[field.name]
                matches = [match for item in patterns.items for match in self._matches(item, number)]
                entries[field.name] = dataclasses.replace(patterns, value=matches)
        inputs: dict[str, tuple[Path, ...]] = {}

        def path_of(field: Field, node: Node, key_path: str) -> Path:
            if field.role == "output":
                path = Path(node.text)
                return path if path == STDOUT else self._shown(possible(self._in_out(node)))
            try:
                path, files = self._located(field, node, key_path, number)
            except UsageError:
                if field.role != "name-or-input":
                    raise
                return Path(node.text)  # text too long for a path, such as a prompt
            if files:
                inputs[field.name] = (*inputs.get(field.name, ()), *files)
            return path

        options = dataclasses.replace(draft.options, value=entries)
        complete, partial = read_options(kind, options, draft.path, path_of, self._mistakes)
        left_out = getattr(complete, "leave_out", None)
        if left_out is not None and parse_left_out(left_out)[1] is None:
            fix = f"one value for each cell: leave_out: {left_out}=${{heldout}}, with heldout in the matrix"
            self._mistakes.add(entries["leave_out"].line, f"{draft.path}.leave_out", f"expected {fix}")
        job = dataclasses.replace(draft.job, options=complete, inputs=inputs)
        self._check_columns(dataclasses.replace(job, options=partial), fields, draft)
        return job

    def _located(self, field: Field, node: Node, key_path: str, number: int) -> tuple[Path, list[Path]]:
        """The path of an input as a command line would give it, and its files."""
        if is_remote(node.text):
            return Path(node.text), []
        path = possible(self._in_out(node))
        outside = _clean((node.base or self._recipe_folder) / expand_home(node.text))
        # A path from --set is relative to the current folder if it exists there.
        by_set = node.base is not None and possible(outside).exists()
        writer = None if by_set else self._writer(path)
        if writer is None:
            path = possible(outside)
            if field.role == "name-or-input" and not path.is_file():
                return Path(node.text), []
        files = [path] if path.exists() else [Path(name) for name in expanded(str(path))]  # archives
        for file in files:
            if writer is not None and writer >= number:
                what = f"{self._shown(file)} is read here, but only a later step writes it"
                self._mistakes.add(node.line, key_path, what)
            elif writer is None and not file.exists():
                what = f"no such file or folder: {self._shown(file)}, and no step writes it"
                if self._dry_run:
                    self.missing[f"line {node.line}: {what}"] = None
                else:
                    self._mistakes.add(node.line, key_path, what)
        return self._shown(path), files

    def _shown(self, path: Path) -> Path:
        """A path relative to the current folder if it lies in it, else absolute."""
        return relative(path, Path.cwd())

    def _in_out(self, node: Node) -> Path:
        return _clean(self._out / expand_home(node.text))

    def _matches(self, item: Node, number: int) -> list[Node]:
        if not item.is_scalar or not any(mark in item.text for mark in "*?["):
            return [item]
        pattern = str(self._in_out(item))
        paths = [path for path, writer in self._writers.items() if writer < number]
        names = [str(relative(path, self._out)) for path in paths if fnmatch.fnmatchcase(str(path), pattern)]
        return [Node(name, item.line, name) for name in names] or [item]

    def _check_columns(self, job: Job, fields: Iterable[Field], draft: _Draft) -> None:
        """Check the columns that a job's options name, and remember those that the job makes.

        Options with a mistake have their defaults.
        """

        def place(name: str) -> tuple[int, str]:
            return draft.options.keys.get(name, draft.options.line), f"{draft.path}.{name}"

        for field in fields:
            value, source = getattr(job.options, field.name), field.columns_of
            if not source or value == field.default or (known := self._columns_of(job, source)) is None:
                continue
            whose = source if source in ("features", "layout") else "manifest"
            for name in _named_columns(field, value):
                if name not in known:
                    self._mistakes.unknown(*place(field.name), f"column of the {whose}", name, known)
        val, test = (getattr(job.options, name, None) for name in ("val", "test"))
        if job.kind in ("fit", "sweep", "finetune") and val and val.split() == (test or "split=test").split():
            self._mistakes.add(*place("val"), f"the validation rows are the test rows: {val}")
        if output := job.outputs.get("output"):
            if job.kind == "data":
                self._known |= {output / name: columns for name, columns in built_columns(job).items()}
            elif job.kind == "embed":
                self._known[output] = self._embedded(job)

    def _columns_of(self, job: Job, option: str) -> Columns | None:
        """The columns of the file that an option names; None if they aren't known yet."""
        if option == "layout" or (option == "source" and getattr(job.options, "layout", None)):
            return tuple(job.options.layout.split("/"))
        file, *further = job.inputs.get(option) or (None,)
        if further:  # archives
            return None
        if file is not None and file not in self._known:
            self._known[file] = _columns_in(file)
        return None if file is None else self._known[file]

    def _embedded(self, job: Job) -> Columns | None:
        """The columns of the feature store that a job makes."""
        if job.options.layout is None and any(path.is_dir() for path in job.inputs.get("source", ())):
            return ALIASES
        columns = self._columns_of(job, "source")
        if columns is None:
            return None
        names = ColumnNames.of(job.options)
        if job.options.layout is None:
            names = names.resolved(columns, with_files=job.options.from_array is None)
        return (*names.kept(columns), *ALIASES)


def _clean(path: Path) -> Path:
    """The path without ``..`` and ``.``, removed by text alone so that links aren't followed."""
    return Path(os.path.normpath(path))
