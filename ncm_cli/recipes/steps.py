"""The columns that a recipe's steps name, against those of its files, before anything runs.

The steps of a recipe, one job for each cell of the matrix, and the files between them.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import os.path
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncm_cli.baselines.options import files_of
from ncm_cli.errors import NcmError, UsageError
from ncm_cli.images.manifest import Choice
from ncm_cli.options import Field, fields_of, parse_names, parse_where
from ncm_cli.recipes.document import REPORT, STATE, Entries, Items, Job, Node, Problems, Scalar, kind_of
from ncm_cli.recipes.variables import Variables, to_options
from ncm_cli.registry import BUILDERS, STEPS, options_of
from ncm_cli.store.tables import read_header

Columns = tuple[str, ...]

ALIASES = ("label", "split")
"""Names that every feature store understands: its own label and split column, whatever these are called."""

_PAIRS = ("id_a", "id_b")


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
        "synthetic": {"features.h5": _in_store(["domain"])},
        "waterbirds-cf": {"manifest.csv": waterbirds.COLUMNS, "pairs.csv": _PAIRS},
    }[job.builder or ""]


class ColumnCheck:
    """Follows columns from tables to feature stores to the steps that name them."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._known: dict[Path, Columns | None] = {}

    def look_at(self, job: Job, options: type, written: Entries, path: str) -> None:
        """Check one job, in the order of the steps, and remember what it makes.

        The job's own options may be what is right of them: see `ncm_cli.recipes.variables.to_options`.
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


STDOUT = Path("-")
"""An output option's value for standard output, which is no file."""


@dataclass(frozen=True, slots=True)
class _Template:
    """One step as it is written."""

    name: str
    kind: str
    options: Entries
    path: str
    line: int


@dataclass(slots=True)
class _Use:
    """A path of one job, while it is being resolved."""

    field: Field
    path: Path
    key_path: str
    line: int
    made: bool = False
    """Whether a step of the recipe writes it."""


class _Written:
    """The paths that jobs write, in order, and the first job of each."""

    def __init__(self) -> None:
        self._by: dict[Path, Job | None] = {}
        self._around: dict[Path, Job | None] = {}

    def __iter__(self) -> Iterator[Path]:
        return iter(self._by)

    def add(self, path: Path, job: Job | None) -> None:
        self._by.setdefault(path, job)
        for folder in path.parents:
            self._around.setdefault(folder, job)

    def has(self, path: Path) -> bool:
        """Whether a path is one of these, lies in one, or is a folder around some."""
        return path in self._around or any(one in self._by for one in (path, *path.parents))

    def job(self, path: Path) -> Job | None:
        """The job that writes a path, what lies in it or a folder around it."""
        return next(
            (self._by[one] for one in (path, *path.parents) if one in self._by), self._around.get(path)
        )


class Steps:
    """Reads the ``steps`` of a recipe."""

    def __init__(
        self,
        variables: Variables,
        problems: Problems,
        *,
        recipe_folder: Path,
        out: Path,
        cwd: Path,
        dry_run: bool,
        allow_outside: bool,
    ) -> None:
        self._variables = variables
        self._problems = problems
        self._recipe_folder = recipe_folder
        self._out = out
        self._cwd = cwd
        self._dry_run = dry_run
        self._allow_outside = allow_outside
        self.names: tuple[str, ...] = ()
        """Of all steps, also of those with problems."""
        self.missing: dict[str, None] = {}
        """Inputs that aren't there, where that is no problem."""
        self._columns = ColumnCheck(problems)
        self._uses: list[_Use] = []
        self._written = _Written()
        self._later = _Written()

    def read(self, node: Node | None, line: int) -> list[Job]:
        """Every job, in the order of the steps; within one step, in the matrix's order."""
        templates = list(self._templates(node, line))
        self.names = tuple(template.name for template in templates)
        every = [(template, cell) for template in templates for cell in self._cells(template)]
        for template, cell in every:
            for path in self._outputs_of(template, cell):
                self._later.add(path, None)
        jobs = [self._job(template, cell) for template, cell in every]
        return [job for job in jobs if job is not None]

    def _templates(self, node: Node | None, line: int) -> Iterator[_Template]:
        if not isinstance(node, Items) or not node.items:
            found = "nothing" if node is None else kind_of(node)
            found = "an empty list" if isinstance(node, Items) else found
            expected = "expected a list with one entry for each step"
            self._problems.add(node.line if node else line, "steps", f"{expected}, found {found}")
            return
        names: dict[str, int] = {}
        for number, item in enumerate(node.items, 1):
            template = self._template(item, f"steps[{number}]", names)
            if template is not None:
                names[template.name] = template.line
                yield template

    def _template(self, item: Node, path: str, names: dict[str, int]) -> _Template | None:
        if not isinstance(item, Entries):
            expected = "expected a step such as  - fit: {features: features.h5, ...}"
            self._problems.add(item.line, path, f"{expected}, found {kind_of(item)}")
            return None
        kinds = [key for key in item.entries if key in STEPS]
        strange = [key for key in item.entries if key not in STEPS and key != "name"]
        for key in strange:
            self._problems.unknown(item.key_lines[key], f"{path}.{key}", "step", key, [*STEPS, "name"])
        if len(kinds) != 1 and not strange:
            self._problems.add(item.line, path, f"expected one step, found {', '.join(kinds) or 'none'}")
        if len(kinds) + len(strange) != 1:
            return None
        # Of a step with an unknown name the outputs count: those who read them are right.
        (kind,) = kinds or strange
        options = item.entries[kind]
        if not isinstance(options, Entries):
            self._problems.add(
                options.line, f"{path}.{kind}", f"expected a mapping of options, found {kind_of(options)}"
            )
            return None
        name = self._step_name(item.entries.get("name"), kind, path, names)
        return _Template(name, kind, options, f"{path}.{kind}", item.key_lines[kind])

    def _step_name(self, node: Node | None, kind: str, path: str, names: dict[str, int]) -> str:
        if node is None:
            number = 2
            name = kind
            while name in names:
                name, number = f"{kind}-{number}", number + 1
            return name
        if not isinstance(node, Scalar) or not node.text.strip() or "|" in node.text:
            self._problems.add(node.line, f"{path}.name", "expected a short text without |")
            return f"{kind}-at-{path}"
        if "${" in node.text:
            self._problems.add(
                node.line, f"{path}.name", "a step's name takes no variables: its cells add them"
            )
        if node.text in names:
            self._problems.add(node.line, f"{path}.name", f"line {names[node.text]} has a step of this name")
        return node.text

    def _cells(self, template: _Template) -> list[dict[str, Scalar]]:
        return self._variables.cells(self._variables.uses(template.options))

    def _class_of(self, template: _Template, options: Entries) -> type | None:
        """The class of a step's options; None where the step or its builder isn't known."""
        if template.kind != "data":
            return options_of(template.kind) if template.kind in STEPS else None
        node = options.entries.get("builder")
        if not isinstance(node, Scalar) or node.text not in BUILDERS:
            line = options.key_lines.get("builder", template.line)
            name = node.text if isinstance(node, Scalar) else ""
            self._problems.unknown(line, f"{template.path}.builder", "builder", name, BUILDERS)
            return None
        return options_of(f"data {node.text}")

    def _outputs_of(self, template: _Template, cell: dict[str, Scalar]) -> Iterator[Path]:
        """The files that a job will write; problems found here are found again, and shown once."""
        options = self._variables.fill(template.options, template.path, cell)
        assert isinstance(options, Entries)
        kind = self._class_of(template, options)
        names = ["output"]
        if kind is not None:
            names = [field.name for field in fields_of(kind) if field.spec.role == "output"]
        for name in names:
            node = options.entries.get(name, options.entries.get(name.replace("_", "-")))
            if isinstance(node, Scalar) and node.value is not None and Path(node.text) != STDOUT:
                path = self._in_out(node)
                yield from files_of(path) if template.kind == "sweep" else (path,)

    def _job(self, template: _Template, cell: dict[str, Scalar]) -> Job | None:
        filled = self._variables.fill(template.options, template.path, cell)
        assert isinstance(filled, Entries)
        job = Job(
            step=template.name,
            kind=template.kind,
            builder=None,
            cell={name: scalar.text for name, scalar in cell.items()},
            options=None,
            inputs={},
            outputs={},
            line=template.line,
        )
        kind = self._class_of(template, filled)
        if kind is None:
            for path in self._outputs_of(template, cell):
                self._written.add(path, job)
            return None
        self._uses = []
        expanded = self._globbed(kind, filled)
        skip = frozenset({"builder"} if template.kind == "data" else ())
        options, known = to_options(kind, expanded, template.path, self._path_of, self._problems, skip=skip)
        builder = filled.entries["builder"] if template.kind == "data" else None
        job = dataclasses.replace(
            job,
            builder=builder.text if isinstance(builder, Scalar) else None,
            options=options,
            inputs=self._by_option("input"),
            outputs=self._by_option("output"),
        )
        self._check_inputs()
        self._check_outputs(job, template)
        self._columns.look_at(dataclasses.replace(job, options=known), kind, filled, template.path)
        return job if options is not None else None

    def _by_option(self, role: str) -> dict[str, tuple[Path, ...]]:
        found: dict[str, tuple[Path, ...]] = {}
        for use in self._uses:
            if (use.field.spec.role == "output") == (role == "output"):
                found[use.field.name] = (*found.get(use.field.name, ()), use.path)
        return found

    def _path_of(self, field: Field, node: Scalar, key_path: str) -> Path:
        made = False
        if field.spec.role == "output":
            if Path(node.text) == STDOUT:
                return STDOUT
            path = _possible(self._in_out(node))
        else:
            path = _possible(self._in_out(node))
            # What --set names is meant from the current folder, if it is there.
            given = node.base is not None and _possible(self._outside(node)).exists()
            made = not given and self._later.has(path)
            if not made:
                path = _possible(self._outside(node))
                if field.spec.role == "name-or-input" and not path.is_file():
                    return Path(node.text)
        self._uses.append(_Use(field, path, key_path, node.line, made))
        return self.shown(path)

    def shown(self, path: Path) -> Path:
        """A path as a command line would give it: relative inside the current folder, else absolute."""
        return path.relative_to(self._cwd) if path.is_relative_to(self._cwd) else path

    def _in_out(self, node: Scalar) -> Path:
        return _clean(self._out / _at_home(node.text))

    def _outside(self, node: Scalar) -> Path:
        return _clean((self._recipe_folder if node.base is None else node.base) / _at_home(node.text))

    def _globbed(self, kind: type, options: Entries) -> Entries:
        """``seed*/result.json`` in an option that takes several inputs: the outputs it fits, one by one."""
        entries = dict(options.entries)
        for field in fields_of(kind):
            node = entries.get(field.name)
            if not field.repeated or field.spec.role != "input" or node is None:
                continue
            items = node.items if isinstance(node, Items) else (node,)
            entries[field.name] = Items(
                tuple(one for item in items for one in self._matches(item)), node.line
            )
        return Entries(entries, options.key_lines, options.line)

    def _matches(self, item: Node) -> Iterator[Node]:
        if not isinstance(item, Scalar) or not any(mark in item.text for mark in "*?["):
            yield item
            return
        pattern = str(self._in_out(item))
        found = [path for path in self._written if fnmatch.fnmatchcase(str(path), pattern)]
        if not found:
            yield item
        for path in found:
            text = str(path.relative_to(self._out)) if path.is_relative_to(self._out) else str(path)
            yield Scalar(text, text, item.line)

    def _check_inputs(self) -> None:
        for use in self._uses:
            if use.field.spec.role == "output" or (use.made and self._written.has(use.path)):
                continue
            if use.made:
                what = f"{self.shown(use.path)} is read here, but only a later step writes it"
                self._problems.add(use.line, use.key_path, what)
            elif not use.path.exists():
                what = f"no such file or folder: {self.shown(use.path)}, and no step writes it"
                if self._dry_run:
                    self.missing[f"line {use.line}: {what}"] = None
                else:
                    self._problems.add(use.line, use.key_path, what)

    def _check_outputs(self, job: Job, template: _Template) -> None:
        for use in self._uses:
            if use.field.spec.role != "output":
                continue
            what = self._why_not_there(use.path)
            if what is not None:
                self._problems.add(use.line, use.key_path, what)
            for path in files_of(use.path) if job.kind == "sweep" else (use.path,):
                other = self._written.job(path)
                if other is not None:
                    what = f"{self.shown(path)} is also written by {other.title}"
                    if other.step == job.step:
                        what = self._why_the_same(use, job, other, template)
                    self._problems.add(use.line, use.key_path, what)
                    break
        for path in job.written:
            self._written.add(path, job)

    def _why_not_there(self, path: Path) -> str | None:
        """Why a step must not write to a path, whoever else does."""
        own = [self._out / name for name in (REPORT, STATE)]
        if self._out.is_relative_to(path) or any(path.is_relative_to(file) for file in own):
            return f"{self.shown(path)} is the run's own"
        if not self._allow_outside and not path.is_relative_to(self._out):
            return f"{self.shown(path)} is outside the run's folder; ncm run --allow-outside writes there"
        return None

    def _why_the_same(self, use: _Use, job: Job, other: Job, template: _Template) -> str:
        """What is wrong where two cells of one step write one file."""
        written = self._variables.uses(template.options.entries[use.key_path.rpartition(".")[2]])
        lacking = [name for name in job.cell if job.cell[name] != other.cell[name] and name not in written]
        if lacking:
            needed = ", ".join(f"${{{name}}}" for name in lacking)
            return f"{self.shown(use.path)} is the same in several cells; put {needed} in it"
        cells = " and ".join(one.title.removeprefix(f"{job.step} ") for one in (other, job))
        return (
            f"{self.shown(use.path)} is written in the cells {cells}: choose values that give different paths"
        )


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
