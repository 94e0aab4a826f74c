"""Every problem of a recipe is collected, so that one run shows them all.

YAML text to a small tree with line numbers: safe, bounded, with YAML 1.2's scalars.

PyYAML's own resolver follows YAML 1.1, where ``no`` is false, ``1:30`` is 90, ``0123`` is octal and ``1e-3``
is text. Only its parser is used here; the tree is built from its events, so that duplicate keys are seen, and
neither deep nesting nor a chain of aliases can use much memory.

What a recipe is once it has been read and found right.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ncm_cli.baselines.options import files_of
from ncm_cli.errors import InputError, nearest

SHOWN = 40
"""Problems listed before the rest are only counted."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong at one place; ``line`` is 1-based, 0 where there is none."""

    line: int
    path: str
    what: str


class RecipeError(InputError):
    """A recipe that can't be run, with all that is wrong with it."""

    title = "bad recipe"

    def __init__(self, file: Path, problems: Iterable[Problem], source: list[str]) -> None:
        self.file = file
        self.problems = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
        self._source = source
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count > 1 else ''} in {file}")

    def lines(self) -> list[tuple[str, str]]:
        shown = [self._shown(problem) for problem in self.problems[:SHOWN]]
        left = len(self.problems) - SHOWN
        return [*shown, ("and", f"{left} more")] if left > 0 else shown

    def _shown(self, problem: Problem) -> tuple[str, str]:
        label = f"line {problem.line}" if problem.line else "at"
        text = f"{problem.path}: {problem.what}" if problem.path else problem.what
        if 0 < problem.line <= len(self._source):
            snippet = self._source[problem.line - 1].strip()
            # A snippet says which line is meant; a longer one would bury the message.
            text += f"\n      | {snippet[:100]}{' ...' if len(snippet) > 100 else ''}"
        return label, text


class Problems:
    """Collects problems of one recipe file."""

    def __init__(self, file: Path, source: str = "") -> None:
        self.file = file
        self._source = source.splitlines()
        self._found: list[Problem] = []

    def add(self, line: int, path: str, what: str) -> None:
        self._found.append(Problem(line, path, what))

    def unknown(self, line: int, path: str, kind: str, name: str, known: Iterable[str]) -> None:
        """A name that isn't there, with the nearest that is, or all of them."""
        every = list(known)
        close = nearest(name, every)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(every) or 'none'}"
        self.add(line, path, f"no {kind} named {name!r}; {hint}")

    def stop_if_any(self) -> None:
        """Raise `RecipeError` with everything found so far."""
        if self._found:
            raise RecipeError(self.file, self._found, self._source)


MAX_BYTES = 1 << 20
"""A recipe is written by hand; a larger file is something else."""

MAX_DEPTH = 20
"""Nesting of the deepest recipe is 5."""

MAX_NODES = 50_000
"""Nodes with every alias counted as a copy: stops alias chains, which grow exponentially."""

Value = str | int | float | bool | None

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
NUMBER = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_VARIABLE = re.compile(r"\$\{([^{}\n]*)\}")
_OPEN, _CLOSE = "\ue000", "\ue001"


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value: what it means, and the text it was written as."""

    value: Value
    text: str
    line: int
    base: Path | None = field(default=None, compare=False)
    """The folder that a relative path is meant from; None: the recipe's own."""


@dataclass(frozen=True, slots=True)
class Items:
    """A sequence."""

    items: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping, with the line of each key."""

    entries: dict[str, Node]
    key_lines: dict[str, int]
    line: int


Node = Scalar | Items | Entries


def scalar_value(text: str) -> Value:
    """The value of a plain scalar by YAML 1.2's core schema, without octal and hexadecimal.

    A number too large to be held stays text: ``6e1234`` isn't infinity.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) < 20 else text
    if NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def kind_of(node: Node) -> str:
    """What a node is, in words for a message."""
    if isinstance(node, Entries):
        return "a mapping"
    if isinstance(node, Items):
        return "a list"
    names: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    return "nothing" if node.value is None else f"{names[type(node.value)]} ({node.text[:60]!r})"


def parse(text: str, problems: Problems, *, base: Path | None = None, first_line: int = 1) -> Node | None:
    """The one document of ``text``; None after a problem that leaves nothing to look at.

    ``first_line`` 0 marks text from the command line: all its nodes then have line 0.
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        problems.add(0, "", f"larger than {MAX_BYTES >> 20} MiB: not a recipe")
        return None
    # In a flow mapping a plain ${name} would end at its brace: hide variables' braces from the parser.
    hidden = _VARIABLE.sub(lambda match: f"${_OPEN}{match[1]}{_CLOSE}", text)
    builder = _Builder(yaml.parse(hidden, Loader=yaml.SafeLoader), problems, base, first_line)
    try:
        return builder.document()
    except yaml.MarkedYAMLError as error:
        problems.add(_line(error.problem_mark, first_line), "", _yaml_problem(error, text))
    except yaml.YAMLError as error:
        problems.add(0, "", f"not YAML: {str(error).splitlines()[0]}")
    except _TooMuchError as error:
        problems.add(error.line, "", str(error))
    return None


class _TooMuchError(Exception):
    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def _line(mark: Any, first_line: int) -> int:
    return mark.line + 1 if mark and first_line else 0


def _yaml_problem(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark
    lines = text.splitlines()
    if mark and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        return "a tab; YAML wants spaces for indentation"
    return f"not YAML: {error.problem}{f' {error.context}' if error.context else ''}"


class _Builder:
    """Builds the tree from parser events."""

    def __init__(
        self, events: Iterator[yaml.Event], problems: Problems, base: Path | None, first_line: int
    ) -> None:
        self._events: Iterator[Any] = events
        self._problems = problems
        self._base = base
        self._first_line = first_line
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._nodes = 0

    def document(self) -> Node | None:
        root: Node | None = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    line = _line(event.start_mark, self._first_line)
                    raise _TooMuchError(line, "a second document; a recipe is one YAML document")
            elif isinstance(event, yaml.NodeEvent):
                root = self._node(event, "", 0)
        return root

    def _node(self, event: yaml.NodeEvent, path: str, depth: int) -> Node:
        line = _line(event.start_mark, self._first_line)
        if depth > MAX_DEPTH:
            raise _TooMuchError(line, f"nested more than {MAX_DEPTH} deep")
        before = self._nodes
        node = self._made(event, path, depth, line)
        if self._nodes > MAX_NODES:
            raise _TooMuchError(line, f"more than {MAX_NODES:,} values once aliases are copied")
        if event.anchor and not isinstance(event, yaml.AliasEvent):
            self._anchors[event.anchor] = (node, self._nodes - before)
        return node

    def _made(self, event: yaml.NodeEvent, path: str, depth: int, line: int) -> Node:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise _TooMuchError(line, f"no anchor named {event.anchor!r} before this alias")
            node, size = self._anchors[event.anchor]
            self._nodes += size
            return node
        self._nodes += 1
        tag = getattr(event, "tag", None)
        if tag and tag not in ("!", "tag:yaml.org,2002:str"):
            self._problems.add(line, path, f"the tag {tag!r} isn't allowed; write the value without it")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, line)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._items(path, depth, line)
        return self._entries(path, depth, line)

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> Scalar:
        text = event.value.replace(_OPEN, "{").replace(_CLOSE, "}")
        plain = event.implicit[0] and not event.tag
        return Scalar(scalar_value(text) if plain else text, text, line, self._base)

    def _items(self, path: str, depth: int, line: int) -> Items:
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, f"{path}[{len(items) + 1}]", depth + 1))
        return Items(tuple(items), line)

    def _entries(self, path: str, depth: int, line: int) -> Entries:
        entries: dict[str, Node] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, path, depth + 1)
            key_line = _line(event.start_mark, self._first_line)
            name = key.text if isinstance(key, Scalar) else "?"
            inner = f"{path}.{name}" if path else name
            value = self._node(next(self._events), inner, depth + 1)
            if not isinstance(key, Scalar):
                self._problems.add(key_line, path, f"a key must be text, not {kind_of(key)}")
            elif name in entries:
                self._problems.add(key_line, inner, f"this key is already on line {lines[name]}")
            else:
                entries[name], lines[name] = value, key_line
        return Entries(entries, lines, line)


REPORT, STATE = "report.json", ".ncm-run.json"
"""What a run writes itself: what it found, and what its steps have read and written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One step in one cell of the matrix: one command line."""

    step: str
    """The step's name, unique in the recipe."""
    kind: str
    """The subcommand: ``embed``, ``fit`` ..., or ``data``."""
    builder: str | None
    """Of ``data`` steps."""
    cell: dict[str, str]
    """The matrix variables that the step uses, with their values here as the recipe writes them."""
    options: Any
    """The options dataclass of the subcommand, with usable paths."""
    inputs: dict[str, tuple[Path, ...]]
    """Files and folders that are read, absolute, by option."""
    outputs: dict[str, tuple[Path, ...]]
    """Files and folders that are written, absolute, by option."""
    line: int

    @property
    def written(self) -> tuple[Path, ...]:
        """Every file and folder that it writes; beside the table of a sweep others of its name."""
        found = [path for paths in self.outputs.values() for path in paths]
        return tuple(one for path in found for one in (files_of(path) if self.kind == "sweep" else (path,)))

    @property
    def title(self) -> str:
        """The step and its cell, for people."""
        cell = ", ".join(f"{name} {value}" for name, value in self.cell.items())
        return f"{self.step} ({cell})" if cell else self.step

    @property
    def key(self) -> str:
        """The same for machines: unique in a recipe, and stable between runs."""
        return json.dumps([self.step, self.cell], ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """A published or known value, and where to find ours."""

    metric: str
    """A name in an eval or bound result, dotted for inner ones; ``worst_group`` is its accuracy."""
    filters: dict[str, str]
    """``where``, ``method``, ``rule``, ``step`` or matrix variables that pick the results to average."""
    applies: bool
    """Whether the run's variables are those that the value is for, such as the model."""
    value: float | None
    tolerance: float | None
    min: float | None
    max: float | None
    source: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe, ready to run into one folder."""

    name: str
    file: Path
    sha256: str
    out: Path
    """The run's folder, absolute."""
    vars: dict[str, Any]
    """Variables without a matrix, as written; None for an empty one."""
    matrix: dict[str, tuple[str, ...]]
    jobs: tuple[Job, ...]
    """In the order in which they run."""
    columns: dict[str, str]
    """Columns of the closing table: heading to row filter."""
    expect: tuple[Expectation, ...]
    missing: tuple[str, ...] = ()
    """Inputs that aren't there, each with its line; only of a recipe that was read for its shell lines."""
