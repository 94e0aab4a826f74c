"""A recipe's text as nodes with line numbers, its variables, and the list of its mistakes.

PyYAML parses the text; scalars have the types of YAML 1.2, in which ``no`` is text and ``1e-3`` a number.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ncm_cli.errors import InputError, nearest

MAX_SHOWN = 40
"""Mistakes listed before the rest are only counted."""

MAX_BYTES = 1 << 18
MAX_DEPTH = 20
MAX_VALUES = 20_000
"""Bounds of a recipe file. Values behind aliases count each time; recipes have some five levels."""

MAX_FILLED = 200_000
"""Most values, and lines of text, in all steps of all cells after their variables are filled in."""

MAX_NESTED = 40
"""Deepest nesting of variables."""

MAX_CELLS = 10_000
"""Most combinations of the matrix's values."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NUMBER = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_VARIABLE = re.compile(r"\$\{([^{}\n]*)\}")
_OPEN, _CLOSE = "\ue000", "\ue001"
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map")}


@dataclasses.dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in a recipe; ``line`` counts from 1, and is 0 for the command line."""

    line: int
    path: str
    what: str


class RecipeError(InputError):
    """The error for a recipe with mistakes, which lists them all."""

    title = "bad recipe"

    def __init__(self, file: Path, problems: Iterable[Mistake], source: str) -> None:
        self.problems = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
        self._source = source.splitlines()
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count > 1 else ''} in {file}")

    def lines(self) -> list[tuple[str, str]]:
        shown = []
        for mistake in self.problems[:MAX_SHOWN]:
            text = f"{mistake.path}: {mistake.what}" if mistake.path else mistake.what
            if 0 < mistake.line <= len(self._source):
                snippet = self._source[mistake.line - 1].strip()
                text += f"\n      | {snippet[:100]}{' ...' if len(snippet) > 100 else ''}"
            shown.append((f"line {mistake.line}" if mistake.line else "at", text))
        left = len(self.problems) - MAX_SHOWN
        return [*shown, ("and", f"{left} more")] if left > 0 else shown


class _Loader(yaml.BaseLoader):
    """A YAML loader that refuses deep or large documents before they take much time or memory."""

    depth = values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth, self.values = self.depth + 1, self.values + 1
        refuse_size(self.depth, self.values, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def refuse_size(depth: int, values: int, mark: yaml.Mark) -> None:
    """Raise `yaml.MarkedYAMLError` if a document is too deep or has too many values."""
    if depth > MAX_DEPTH + 1:
        raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=mark)
    if values > MAX_VALUES:
        raise yaml.MarkedYAMLError(problem=f"more than {MAX_VALUES:,} values", problem_mark=mark)


class Mistakes:
    """Collects the mistakes of one recipe."""

    def __init__(self, file: Path, source: str) -> None:
        self._file, self._source = file, source
        self._found: list[Mistake] = []

    def add(self, line: int, path: str, what: str) -> None:
        self._found.append(Mistake(line, path, what))

    def expected(self, node: Node, path: str, what: str) -> None:
        """Add that a value is of the wrong kind."""
        self.add(node.line, path, f"expected {what}, found {node.kind()}")

    def unknown(self, line: int, path: str, kind: str, name: str, known: Iterable[str]) -> None:
        """Add that a name is unknown, with the nearest known name, or all of them."""
        names = list(known)
        close = nearest(name, names) if len(self._found) < MAX_SHOWN else None  # slow, and not shown
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(names) or 'none'}"
        self.add(line, path, f"no {kind} named {name!r}; {hint}")

    def stop(self, line: int, path: str, what: str) -> NoReturn:
        """Add the last mistake, after which the recipe isn't read any further, and raise `RecipeError`."""
        self.add(line, path, what)
        raise RecipeError(self._file, self._found, self._source)

    def stop_if_any(self) -> None:
        """Raise `RecipeError` with the mistakes so far."""
        if self._found:
            raise RecipeError(self._file, self._found, self._source)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A value in a recipe, and its place."""

    value: Any
    """The value of a scalar, a list of nodes, or a dict of nodes by key."""
    line: int
    text: str = ""
    """A scalar as written."""
    base: Path | None = None
    """The folder from which a relative path starts; None for the recipe's."""
    keys: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The line of each key of a mapping."""

    @property
    def is_scalar(self) -> bool:
        """Whether it is a scalar that isn't null."""
        return self.value is not None and not isinstance(self.value, list | dict)

    @property
    def is_unresolved(self) -> bool:
        """Whether its variable has no value; that mistake has been added already."""
        return self.value is None and "${" in self.text

    @property
    def items(self) -> list[Node]:
        """The nodes of a list; for any other node, the node itself."""
        return self.value if isinstance(self.value, list) else [self]

    def renamed(self, name_of: Callable[[str], str]) -> Node:
        """The mapping with its keys renamed."""
        values = {name_of(key): value for key, value in self.value.items()}
        return dataclasses.replace(
            self, value=values, keys={name_of(key): line for key, line in self.keys.items()}
        )

    def kind(self) -> str:
        """The node's kind in words, for a message."""
        if isinstance(self.value, list | dict):
            return "a list" if isinstance(self.value, list) else "a mapping"
        names: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "text"}
        return "nothing" if self.value is None else f"{names[type(self.value)]} ({self.text[:60]!r})"


def scalar_value(text: str) -> str | int | float | bool | None:
    """The value of a plain scalar by YAML 1.2's core schema, without octal and hexadecimal numbers.

    Numbers beyond float64, and whole numbers of 20 characters or more, stay text: ``6e1234`` isn't infinity.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) < 20 else text
    return float(text) if NUMBER.fullmatch(text) and math.isfinite(float(text)) else text


def parse(text: str, mistakes: Mistakes, *, base: Path | None = None) -> Node | None:
    """The document in ``text``; None if there is a syntax error, which is added to ``mistakes``.

    Text with a ``base`` is from the command line: paths are relative to ``base``, and all nodes have line 0.
    """
    # In a flow mapping a plain ${name} would end at its brace, so braces are replaced for the parser.
    hidden = _VARIABLE.sub(lambda match: f"${_OPEN}{match[1]}{_CLOSE}", text)
    values = 0

    def line_of(mark: yaml.Mark | None) -> int:
        return mark.line + 1 if mark and base is None else 0

    def built(node: yaml.Node, path: str, depth: int) -> Node:
        nonlocal values
        values, line = values + 1, line_of(node.start_mark)
        refuse_size(depth, values, node.start_mark)
        if node.tag not in _TAGS:
            mistakes.add(line, path, f"the tag {node.tag!r} isn't allowed; write the value without it")
        if isinstance(node, yaml.ScalarNode):
            shown = node.value.replace(_OPEN, "{").replace(_CLOSE, "}")
            return Node(scalar_value(shown) if node.style is None else shown, line, shown, base)
        if isinstance(node, yaml.SequenceNode):
            return Node(
                [built(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(node.value, 1)], line
            )
        entries: dict[str, Node] = {}
        keys: dict[str, int] = {}
        for key_node, value in node.value:
            key, key_line = built(key_node, path, depth + 1), line_of(key_node.start_mark)
            inner = f"{path}.{key.text}" if path else key.text
            if isinstance(key.value, list | dict):
                mistakes.add(key_line, path, f"a key must be text, not {key.kind()}")
            elif key.text in entries:
                mistakes.add(key_line, inner, f"this key is already on line {keys[key.text]}")
            else:
                entries[key.text], keys[key.text] = built(value, inner, depth + 1), key_line
        return Node(entries, line, keys=keys)

    try:
        root = yaml.compose(hidden, Loader=_Loader)
        return None if root is None else built(root, "", 1)
    except yaml.MarkedYAMLError as error:
        mark, lines = error.problem_mark, text.splitlines()
        what = f"not YAML: {error.problem}{f' {error.context}' if error.context else ''}"
        if mark and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
            what = "a tab; YAML wants spaces for indentation"
        mistakes.add(line_of(mark), "", what)
    except yaml.YAMLError as error:  # a character that YAML doesn't take
        line = hidden.count("\n", 0, getattr(error, "position", 0)) + 1 if base is None else 0
        mistakes.add(line, "", f"not YAML: {str(error).splitlines()[0]}")
    return None


class Variables:
    """The variables of a recipe, expanded once, and its matrix."""

    def __init__(self, mistakes: Mistakes, root: Mapping[str, Node], sets: Iterable[str]) -> None:
        """Values of a variant override the recipe's, and those of ``--set`` override both."""
        self._mistakes = mistakes
        self._left = MAX_FILLED
        self.plain = self._mapping(root.get("vars"), "vars")
        matrix = self._mapping(root.get("matrix"), "matrix")
        variants = self._mapping(root.get("variants"), "variants")
        for name in matrix.keys() & self.plain.keys():
            line = root["matrix"].keys[name]
            mistakes.add(line, f"matrix.{name}", "this name is also in vars; choose another")
        chosen = self._chosen(sets, [*self.plain, *matrix, *variants], variants)
        for name, node in variants.items():
            active = (switch := chosen.pop(name, None)) is not None and switch.value is True
            for inner, value in self._mapping(node, f"variants.{name}").items():
                if inner not in self.plain and inner not in matrix:
                    place = (node.keys[inner], f"variants.{name}.{inner}")
                    mistakes.unknown(*place, "variable", inner, [*self.plain, *matrix])
                elif active:
                    (matrix if inner in matrix else self.plain)[inner] = value
        for name, node in chosen.items():
            (matrix if name in matrix else self.plain)[name] = node
        self.matrix: dict[str, list[Node]] = {}
        self.matrix = {name: self._values(name, node) for name, node in matrix.items()}
        self.plain = {name: self.fill(node, f"vars.{name}", {}, (name,)) for name, node in self.plain.items()}

    def _mapping(self, node: Node | None, path: str) -> dict[str, Node]:
        if node is None or node.value is None:
            return {}
        if not isinstance(node.value, dict):
            self._mistakes.expected(node, path, "a mapping of names to values")
            return {}
        for name in node.value:
            if not NAME.fullmatch(name):
                what = "a name is letters, digits and _, no digit first"
                self._mistakes.add(node.keys[name], f"{path}.{name}", what)
        return dict(node.value)

    def _chosen(self, sets: Iterable[str], known: list[str], variants: Mapping[str, Node]) -> dict[str, Node]:
        chosen: dict[str, Node] = {}
        for text in sets:
            name, equals, value = text.partition("=")
            if not equals:
                self._mistakes.add(0, f"--set {text}", "expected --set name=value")
            elif name not in known:
                self._mistakes.unknown(0, f"--set {text}", "variable", name, known)
            elif name in chosen:
                self._mistakes.add(0, f"--set {text}", f"{name} is set twice")
            else:
                chosen[name] = parse(value, self._mistakes, base=Path.cwd()) or Node(None, 0)
                if name in variants and not isinstance(chosen[name].value, bool):
                    what = "a variant is switched on by true or off by false"
                    self._mistakes.add(0, f"--set {text}", what)
        return chosen

    def _values(self, name: str, node: Node) -> list[Node]:
        path, values = f"matrix.{name}", dict[str, Node]()
        node = self.fill(node, path, {})
        for item in node.items:
            if not item.is_scalar:
                what = f"expected a list of values, found {item.kind()} in it"
                self._mistakes.add(item.line, path, what)
            elif item.text in values:
                self._mistakes.add(item.line, path, f"the value {item.text!r} twice")
            else:
                values[item.text] = item
        if not node.items:
            self._mistakes.add(node.line, path, "no value")
        return list(values.values())

    def fill(self, node: Node, path: str, cell: Mapping[str, Node], within: tuple[str, ...] = ()) -> Node:
        """A node with its variables replaced, except for matrix variables that ``cell`` doesn't have.

        ``within`` names the variables that are being filled. Raises `RecipeError` at once if more than
        `MAX_FILLED` values are filled in.
        """
        self._spend(1, node, path)
        if isinstance(node.value, dict):
            entries = {
                key: self.fill(value, f"{path}.{key}", cell, within) for key, value in node.value.items()
            }
            return dataclasses.replace(node, value=entries)
        if isinstance(node.value, list):
            items = [self.fill(item, f"{path}[{i}]", cell, within) for i, item in enumerate(node.value, 1)]
            return dataclasses.replace(node, value=items)
        uses = [] if node.is_unresolved else list(_VARIABLE.finditer(node.text))
        if not uses:
            return node
        values = {use[0]: self._looked_up(use[1].strip(), node.line, path, cell, within) for use in uses}
        if node.text.strip() in values:
            return _moved(values[node.text.strip()], node.line)
        for use, value in values.items():
            if not (value.is_scalar or value.is_unresolved):
                what = f"{use} is {value.kind()}, which can't stand inside text"
                self._mistakes.add(node.line, path, what)
        if not all(value.is_scalar for value in values.values()):
            return Node(None, node.line, node.text)
        self._spend(sum(len(values[use[0]].text) // 80 for use in uses), node, path)
        text = _VARIABLE.sub(lambda use: values[use[0]].text, node.text)
        base = node.base if uses[0].start() else values[uses[0][0]].base
        return Node(text, node.line, text, base)

    def _spend(self, cost: int, node: Node, path: str) -> None:
        self._left -= cost
        if self._left < 0:
            what = f"over {MAX_FILLED:,} values where variables are filled in"
            self._mistakes.stop(node.line, path, what)

    def _looked_up(
        self, name: str, line: int, path: str, cell: Mapping[str, Node], within: tuple[str, ...]
    ) -> Node:
        """The value of a variable; an unresolved node (null) if it has none, and the mistake is added."""
        if name in cell:
            return cell[name]
        unfilled = f"${{{name}}}"
        if name in self.matrix:
            return Node(unfilled, line, unfilled)
        if name not in self.plain:
            self._mistakes.unknown(line, path, "variable", name, [*self.plain, *self.matrix])
            return Node(None, line, unfilled)
        node = self.plain[name]
        if name in within:
            chain = " -> ".join([*within[within.index(name) :], name])
            self._mistakes.add(node.line, f"vars.{name}", f"defined by itself: {chain}")
            return Node(None, node.line, unfilled)
        if len(within) > MAX_NESTED:
            what = f"over {MAX_NESTED} variables nested in one another"
            self._mistakes.stop(node.line, f"vars.{name}", what)
        return self.fill(node, f"vars.{name}", cell, (*within, name))

    def cells(self, node: Node) -> list[dict[str, Node]]:
        """One dict for each combination of the values of the matrix variables that a node depends on."""
        used = _names_in(node)
        used |= {inner for name in used & self.plain.keys() for inner in _names_in(self.plain[name])}
        names = [name for name in self.matrix if name in used]
        count = math.prod(len(self.matrix[name]) for name in names)
        if count > MAX_CELLS:
            self._mistakes.stop(0, "matrix", f"{count:,} cells; at most {MAX_CELLS:,} can be run")
        combinations = itertools.product(*(self.matrix[name] for name in names))
        return [dict(zip(names, values, strict=True)) for values in combinations]


def _moved(node: Node, line: int) -> Node:
    """A variable's value with the line of its use, on which mistakes in it are reported."""
    if isinstance(node.value, list):
        return Node([_moved(item, line) for item in node.value], line)
    return node if isinstance(node.value, dict) else dataclasses.replace(node, line=line)


def _names_in(node: Node) -> set[str]:
    """The variables that a node uses."""
    if isinstance(node.value, list | dict):
        inner = node.value.values() if isinstance(node.value, dict) else node.value
        return set[str]().union(*map(_names_in, inner))
    return {name.strip() for name in _VARIABLE.findall(node.text)}
