"""The steps of a recipe: a job for each cell of the matrix, the files between them, and the columns in these.

Options are checked by the declarations that the command line uses, files and columns before anything runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fnmatch
import json
import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ncm_cli.baselines.options import files_of
from ncm_cli.errors import NcmError, UsageError
from ncm_cli.images.manifest import ColumnNames
from ncm_cli.images.paths import expanded, is_remote
from ncm_cli.options import Field, check_value, fields_of, parse_names, parse_where, refusals
from ncm_cli.recipes.document import NUMBER, Mistakes, Node, Variables, scalar_value
from ncm_cli.registry import BUILDERS, STEPS, options_of
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import relative
from ncm_cli.store.tables import read_header

REPORT, STATE = "report.json", ".ncm-run.json"
"""What a run writes itself: what it found, and what its steps have read and written."""

STDOUT = Path("-")
"""An output option's value for standard output, which is no file."""

Columns = tuple[str, ...]

ALIASES = ("label", "split")
"""Names that every feature store understands: its own label and split column, whatever these are called."""

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
    """Of ``data`` steps."""
    cell: dict[str, str]
    """The matrix variables that the step uses, with their values here as the recipe writes them."""
    options: Any = None
    """The options dataclass of the subcommand, with usable paths."""
    inputs: dict[str, tuple[Path, ...]] = dataclasses.field(default_factory=dict)
    """Files and folders that are read, absolute, by option."""
    outputs: dict[str, tuple[Path, ...]] = dataclasses.field(default_factory=dict)
    """Files and folders that are written, absolute, by option."""

    @property
    def read(self) -> list[Path]:
        """Every file and folder that is read."""
        return [path for paths in self.inputs.values() for path in paths]

    @property
    def named(self) -> list[Path]:
        """Every file and folder that its options name to be written."""
        return [path for paths in self.outputs.values() for path in paths]

    @property
    def written(self) -> list[Path]:
        """Every file and folder that it writes; beside the table of a sweep others of its name."""
        return [one for path in self.named for one in (files_of(path) if self.kind == "sweep" else (path,))]

    @property
    def title(self) -> str:
        """The step and its cell, for people."""
        cell = ", ".join(f"{name} {value}" for name, value in self.cell.items())
        return f"{self.step} ({cell})" if cell else self.step

    @property
    def key(self) -> str:
        """The same for machines: unique in a recipe, and stable between runs."""
        return json.dumps([self.step, self.cell], ensure_ascii=False)


def read_options(
    options: type, node: Node, path: str, path_of: Callable[[Field, Node, str], Path], mistakes: Mistakes
) -> tuple[Any | None, SimpleNamespace]:
    """The options of one step, None after a mistake; and what is right of them, for further checks.

    In the second, options that aren't right have their defaults, and required ones None.
    """
    fields = {field.name: field for field in fields_of(options)}
    written = {key.replace("-", "_"): value for key, value in node.value.items()}
    lines = {key.replace("-", "_"): line for key, line in node.keys.items()}
    values: dict[str, Any] = {}
    right = True
    for name, value in written.items():
        if (field := fields.get(name)) is None:
            key = next(key for key in node.value if key.replace("-", "_") == name)
            mistakes.unknown(lines[name], f"{path}.{key}", "option", key, fields)
            right = False
        elif value.value is not None:  # nothing written is the default, so that a variable can leave it out
            made = []
            for item in value.items if field.repeated else [value]:
                try:
                    made.append(_checked(field, item, f"{path}.{name}", path_of))
                except UsageError as error:
                    mistakes.add(item.line, f"{path}.{name}", _said(error))
                    right = False
            if right or made:
                values[name] = tuple(made) if field.repeated else made[0]
    for field in fields.values():
        if field.required and field.name not in values:
            right = False
            if field.name not in written:
                mistakes.add(node.line, path, f"{field.name} is required")
            elif written[field.name].value is None and not written[field.name].is_unresolved:
                what = "a value is required; if a variable should give it, use --set NAME=VALUE"
                mistakes.add(lines[field.name], f"{path}.{field.name}", what)
    known = {name: None if field.required else field.default for name, field in fields.items()}
    made_of = options(**values) if right else None
    for refusal in refusals(made_of):
        # The first key that a reason names has its line.
        named = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]*)", str(refusal))}
        key = next((f".{name}" for name in lines if name in named), "")
        mistakes.add(lines.get(key[1:], node.line), f"{path}{key}", _said(refusal))
        right = False
    return made_of if right else None, SimpleNamespace(**known | values)


def _checked(field: Field, node: Node, path: str, path_of: Callable[[Field, Node, str], Path]) -> Any:
    """One value as the command line would have it, checked as it would check it."""
    value, expected = node.value, _EXPECTED[field.type]
    if isinstance(value, list | dict):
        several = " or a list of them" if field.repeated else ""
        raise UsageError(f"expected {expected}{several}, found {node.kind()}")
    taken: tuple[type, ...] = {int: (int,), float: (int, float), bool: (bool,)}.get(field.type, ())
    if taken and type(value) not in taken:
        raise UsageError(f"expected {expected}, found {node.kind()}{_why(field, node.text)}")
    if taken:
        value = field.type(value)
    elif field.type is Path:
        value = path_of(field, node, path)
    else:
        # Text options take numbers as they were written: rank: 16, and a label that is 1.
        value = str(path_of(field, node, path)) if field.spec.role == "name-or-input" else node.text
    check_value(field, value)
    return value


def _said(error: UsageError) -> str:
    details = "; ".join(f"{label}: {text}" for label, text in error.lines())
    return f"{error.what} ({details})" if details else error.what


def _why(field: Field, text: str) -> str:
    """Why text that looks right isn't."""
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
    """The columns of the tables and feature stores that a builder makes, by file name."""
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
    if field.spec.metavar == "WHERE":
        return [term.column for term in parse_where(value)]
    values = value if field.repeated else (value,)
    if field.spec.metavar != "COLUMNS":
        return tuple(values)
    # Crossings of --groups stand between semicolons.
    return parse_names(",".join(values).replace(";", ","))


def _columns_in(file: Path) -> Columns | None:
    """The columns of a table or feature store; None where the step has to say what is wrong with it."""
    with contextlib.suppress(NcmError):
        return read_header(file) if file.is_file() else None
    with contextlib.suppress(NcmError), FeatureStore(file) as store:
        return (*store.columns, *ALIASES)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Template:
    """One step as it is written."""

    name: str
    kind: str
    options: Node
    path: str
    line: int


@dataclasses.dataclass(frozen=True, slots=True)
class _NamedPath:
    """A path that a job's option names; ``made`` says whether a step of the recipe writes it."""

    field: Field
    path: Path
    key_path: str
    line: int
    made: bool = False


class _Writers:
    """Who writes which paths."""

    def __init__(self) -> None:
        self.by: dict[Path, Any] = {}
        self._around: dict[Path, Any] = {}

    def add(self, path: Path, writer: Any) -> None:
        self.by.setdefault(path, writer)
        for folder in path.parents:
            self._around.setdefault(folder, writer)

    def of(self, path: Path) -> Any:
        """Who writes a path, the folder it lies in, or what lies in it; None for nobody."""
        around = (self.by[one] for one in (path, *path.parents) if one in self.by)
        return next(around, self._around.get(path))


@dataclasses.dataclass(slots=True)
class Steps:
    """Reads the ``steps`` of a recipe."""

    _variables: Variables
    _mistakes: Mistakes
    _recipe_folder: Path
    _out: Path
    _dry_run: bool
    _allow_outside: bool
    names: tuple[str, ...] = ()
    """Of all steps, also of those with mistakes."""
    missing: dict[str, None] = dataclasses.field(default_factory=dict)
    """Inputs that aren't there, where that is no mistake."""
    _known: dict[Path, Columns | None] = dataclasses.field(default_factory=dict)
    """The columns of tables and feature stores that were looked at."""
    _paths: list[_NamedPath] = dataclasses.field(default_factory=list)
    """What the options of the job at hand name."""
    _written: _Writers = dataclasses.field(default_factory=_Writers)
    _later: _Writers = dataclasses.field(default_factory=_Writers)

    def read(self, node: Node | None, line: int) -> list[Job]:
        """Every job, in the order of the steps; within one step, in the matrix's order."""
        templates = list(self._templates(node, line))
        self.names = tuple(template.name for template in templates)
        every = []
        for template in templates:
            for cell in self._variables.cells(template.options):
                options = self._variables.fill(template.options, template.path, cell)
                kind = self._class_of(template, options)
                every.append((template, cell, options, kind))
                for path in self._outputs_of(template, options, kind):
                    self._later.add(path, template)
        jobs = [self._job(*one) for one in every]
        return [job for job in jobs if job is not None]

    def _templates(self, node: Node | None, line: int) -> Iterator[_Template]:
        if node is None or not isinstance(node.value, list) or not node.value:
            found = "nothing" if node is None else "an empty list" if node.value == [] else node.kind()
            what = f"expected a list with one entry for each step, found {found}"
            self._mistakes.add(node.line if node else line, "steps", what)
            return
        names: dict[str, int] = {}
        for number, item in enumerate(node.value, 1):
            template = self._template(item, f"steps[{number}]", names)
            if template is not None:
                names[template.name] = template.line
                yield template

    def _template(self, item: Node, path: str, names: dict[str, int]) -> _Template | None:
        if not isinstance(item.value, dict):
            what = f"expected a step such as  - fit: {{features: features.h5, ...}}, found {item.kind()}"
            self._mistakes.add(item.line, path, what)
            return None
        kinds = [key for key in item.value if key in STEPS]
        strange = [key for key in item.value if key not in STEPS and key != "name"]
        for key in strange:
            self._mistakes.unknown(item.keys[key], f"{path}.{key}", "step", key, [*STEPS, "name"])
        if len(kinds) != 1 and not strange:
            what = f"expected one step, found {', '.join(kinds) or 'none'}"
            self._mistakes.add(item.line, path, what)
        if len(kinds or strange) != 1:
            return None
        # Of a step with an unknown name the outputs count: those who read them are right.
        (kind,) = kinds or strange
        options = item.value[kind]
        if not isinstance(options.value, dict):
            what = f"expected a mapping of options, found {options.kind()}"
            self._mistakes.add(options.line, f"{path}.{kind}", what)
            return None
        name = self._step_name(item.value.get("name"), kind, path, names)
        return _Template(name, kind, options, f"{path}.{kind}", item.keys[kind])

    def _step_name(self, node: Node | None, kind: str, path: str, names: dict[str, int]) -> str:
        if node is None:
            numbered = (f"{kind}-{number}" for number in range(2, len(names) + 3))
            return next(name for name in (kind, *numbered) if name not in names)
        if not node.text.strip() or "|" in node.text:
            self._mistakes.add(node.line, f"{path}.name", "expected a short text without |")
            return f"{kind}-at-{path}"
        if "${" in node.text:
            what = "a step's name takes no variables: its cells add them"
            self._mistakes.add(node.line, f"{path}.name", what)
        if node.text in names:
            what = f"line {names[node.text]} has a step of this name"
            self._mistakes.add(node.line, f"{path}.name", what)
        return node.text

    def _class_of(self, template: _Template, options: Node) -> type | None:
        """The class of a step's options; None where the step or its builder isn't known."""
        if template.kind != "data":
            return options_of(template.kind) if template.kind in STEPS else None
        node = options.value.get("builder", Node(None, template.line))
        if node.text in BUILDERS:
            return options_of(f"data {node.text}")
        line = options.keys.get("builder", template.line)
        self._mistakes.unknown(line, f"{template.path}.builder", "builder", node.text, BUILDERS)
        return None

    def _outputs_of(self, template: _Template, options: Node, kind: type | None) -> Iterator[Path]:
        """The files that a job will write."""
        fields = fields_of(kind) if kind else ()
        names = [field.name for field in fields if field.spec.role == "output"] if kind else ["output"]
        for name in names:
            node = options.value.get(name, options.value.get(name.replace("_", "-")))
            if node is not None and node.is_scalar and Path(node.text) != STDOUT:
                path = self._in_out(node)
                yield from files_of(path) if template.kind == "sweep" else (path,)

    def _job(self, template: _Template, cell: dict[str, Node], node: Node, kind: type | None) -> Job | None:
        texts = {name: value.text for name, value in cell.items()}
        job = Job(step=template.name, kind=template.kind, cell=texts)
        if kind is None:
            for path in self._outputs_of(template, node, kind):
                self._written.add(path, job)
            return None
        self._paths = []
        fields = fields_of(kind)
        entries = {
            key: value for key, value in node.value.items() if (template.kind, key) != ("data", "builder")
        }
        for field in fields:
            if field.repeated and field.spec.role == "input" and field.name in entries:
                # ``seed*/result.json``: the outputs it fits, one by one.
                own = entries[field.name]
                matches = [one for item in own.items for one in self._matches(item)]
                entries[field.name] = dataclasses.replace(own, value=matches)
        written = dataclasses.replace(node, value=entries)
        options, known = read_options(kind, written, template.path, self._path_of, self._mistakes)
        found: tuple[dict[str, tuple[Path, ...]], ...] = ({}, {})
        for one in self._paths:
            by_option = found[one.field.spec.role == "output"]
            by_option[one.field.name] = (*by_option.get(one.field.name, ()), one.path)
        builder = node.value["builder"].text if template.kind == "data" else None
        job = dataclasses.replace(job, builder=builder, options=options, inputs=found[0], outputs=found[1])
        for one in self._paths:
            if one.field.spec.role == "output":
                self._check_output(one, job, template)
            else:
                self._check_input(one)
        for path in job.written:
            self._written.add(path, job)
        place = (node.line, template.path)
        self._check_columns(dataclasses.replace(job, options=known), fields, node.keys, place)
        return job if options is not None else None

    def _path_of(self, field: Field, node: Node, key_path: str) -> Path:
        """The path that an option names, as a command line would give it."""
        if Path(node.text) == STDOUT if field.spec.role == "output" else is_remote(node.text):
            return Path(node.text)
        path, made = _possible(self._in_out(node)), False
        if field.spec.role != "output":
            outside = _clean((node.base or self._recipe_folder) / _at_home(node.text))
            # What --set names is meant from the current folder, if it is there.
            given = node.base is not None and _possible(outside).exists()
            made = not given and self._later.of(path) is not None
            if not made:
                path = _possible(outside)
                if field.spec.role == "name-or-input" and not path.is_file():
                    return Path(node.text)
        for one in [str(path)] if path.exists() else expanded(str(path)):  # a pattern of archives
            self._paths.append(_NamedPath(field, Path(one), key_path, node.line, made))
        return self._shown(path)

    def _shown(self, path: Path) -> Path:
        """A path relative to the current folder if it lies in it, else absolute."""
        return relative(path, Path.cwd())

    def _in_out(self, node: Node) -> Path:
        return _clean(self._out / _at_home(node.text))

    def _matches(self, item: Node) -> list[Node]:
        if not item.is_scalar or not any(mark in item.text for mark in "*?["):
            return [item]
        pattern = str(self._in_out(item))
        paths = [path for path in self._written.by if fnmatch.fnmatchcase(str(path), pattern)]
        texts = [str(relative(path, self._out)) for path in paths]
        return [Node(text, item.line, text) for text in texts] or [item]

    def _check_input(self, one: _NamedPath) -> None:
        shown = self._shown(one.path)
        if one.made and self._written.of(one.path) is None:
            what = f"{shown} is read here, but only a later step writes it"
            self._mistakes.add(one.line, one.key_path, what)
        elif not one.made and not one.path.exists():
            what = f"no such file or folder: {shown}, and no step writes it"
            if self._dry_run:
                self.missing[f"line {one.line}: {what}"] = None
            else:
                self._mistakes.add(one.line, one.key_path, what)

    def _check_output(self, one: _NamedPath, job: Job, template: _Template) -> None:
        shown = self._shown(one.path)
        own = [self._out / name for name in (REPORT, STATE)]
        if self._out.is_relative_to(one.path) or any(one.path.is_relative_to(file) for file in own):
            self._mistakes.add(one.line, one.key_path, f"{shown} is the run's own")
        elif not self._allow_outside and not one.path.is_relative_to(self._out):
            what = f"{shown} is outside the run's folder; ncm run --allow-outside writes there"
            self._mistakes.add(one.line, one.key_path, what)
        for path in files_of(one.path) if job.kind == "sweep" else (one.path,):
            if (other := self._written.of(path)) is not None:
                what = f"{self._shown(path)} is also written by {other.title}"
                if other.step == job.step:
                    what = f"{shown} is {self._why_the_same(one, job, other, template)}"
                self._mistakes.add(one.line, one.key_path, what)
                break

    def _check_columns(
        self, job: Job, fields: Iterable[Field], keys: Mapping[str, int], place: tuple[int, str]
    ) -> None:
        """Check one job, in the order of the steps, and remember what it makes.

        The job's own options may be what is right of them.
        """
        lines = {name.replace("-", "_"): line for name, line in keys.items()}
        for field in fields:
            value, source = getattr(job.options, field.name), field.spec.columns_of
            if not source or value == field.default or (known := self._columns_of(job, source)) is None:
                continue
            whose = source if source in ("features", "layout") else "manifest"
            at = (lines.get(field.name, place[0]), f"{place[1]}.{field.name}")
            for name in _named_columns(field, value):
                if name not in known:
                    self._mistakes.unknown(*at, f"column of the {whose}", name, known)
        val, test = (getattr(job.options, name, None) for name in ("val", "test"))
        if job.kind in ("fit", "sweep") and val and val.split() == (test or "split=test").split():
            what = f"the validation rows are the test rows: {val}"
            self._mistakes.add(lines.get("val", place[0]), f"{place[1]}.val", what)
        for output in job.outputs.get("output", ()):
            if job.kind == "data":
                self._known.update({output / name: found for name, found in built_columns(job).items()})
            elif job.kind == "embed":
                self._known[output] = self._embedded(job)

    def _columns_of(self, job: Job, option: str) -> Columns | None:
        """The columns of what an option names; None where they can't be known yet."""
        if option == "layout" or (option == "source" and getattr(job.options, "layout", None)):
            return tuple(job.options.layout.split("/"))
        file, *more = job.inputs.get(option) or (None,)
        if more:  # archives
            return None
        if file is not None and file not in self._known:
            self._known[file] = _columns_in(file)
        return None if file is None else self._known[file]

    def _embedded(self, job: Job) -> Columns | None:
        """The columns of the feature store that a job makes."""
        if job.options.layout is None and any(path.is_dir() for path in job.inputs.get("source", ())):
            return ALIASES
        found = self._columns_of(job, "source")
        if found is None:
            return None
        names = ColumnNames.of(job.options)
        if job.options.layout is None:
            names = names.resolved(found, with_files=job.options.from_array is None)
        return (*names.kept(found), *ALIASES)

    def _why_the_same(self, one: _NamedPath, job: Job, other: Job, template: _Template) -> str:
        """What is wrong where two cells of one step write one file."""
        (written,) = self._variables.cells(template.options.value[one.key_path.rpartition(".")[2]])[:1]
        lacking = [name for name in job.cell if job.cell[name] != other.cell[name] and name not in written]
        if lacking:
            return f"the same in several cells; put {', '.join(f'${{{name}}}' for name in lacking)} in it"
        cells = " and ".join(two.title.removeprefix(f"{job.step} ") for two in (other, job))
        return f"written in the cells {cells}: choose values that give different paths"


def _at_home(text: str) -> Path:
    """A path with ``~`` and ``~user`` expanded; an unknown user's stays as it is."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def _possible(path: Path) -> Path:
    """The path, unless no file system takes it."""
    try:
        path.lstat()
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            why = "the file name is too long" if isinstance(error, OSError) else str(error)
            raise UsageError("a path that can't be", found=why) from error
    return path


def _clean(path: Path) -> Path:
    """``..`` and ``.`` taken out by name alone, so that links stay links."""
    return Path(os.path.normpath(path))
