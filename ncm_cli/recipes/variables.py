"""``${name}``: variables, the matrix, and what ``--set`` says of them.

From the keys of one step to its options: the same dataclass that the command line fills.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ncm_cli.errors import UsageError
from ncm_cli.options import Field, check_value, fields_of, refusals
from ncm_cli.recipes.document import (
    NUMBER,
    Entries,
    Items,
    Node,
    Problems,
    Scalar,
    kind_of,
    parse,
    scalar_value,
)

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MAX_TEXT = 10_000
"""Characters of a value after substitution: variables that double each other would grow exponentially."""

MAX_SUBSTITUTIONS = 200_000
"""Values handled while variables are replaced, for the same reason."""

MAX_CELLS = 10_000
"""Cells of the matrix that one step may run in."""

_USE = re.compile(r"\$\{([^{}\n]*)\}")


def texts(node: Node) -> Iterable[Scalar]:
    """Every scalar of a tree, in order."""
    if isinstance(node, Scalar):
        yield node
        return
    for child in node.items if isinstance(node, Items) else node.entries.values():
        yield from texts(child)


def names_in(node: Node) -> list[str]:
    """The variables that a tree uses, in order of first use."""
    found = (name.strip() for scalar in texts(node) for name in _USE.findall(scalar.text))
    return list(dict.fromkeys(found))


class Variables:
    """The variables of a recipe, expanded once, and its matrix."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self.plain: dict[str, Node] = {}
        self.matrix: dict[str, tuple[Scalar, ...]] = {}
        self._handled = 0
        self._done: dict[str, Node] = {}

    def read(
        self,
        vars_node: Node | None,
        matrix_node: Node | None,
        variants_node: Node | None,
        sets: Iterable[str],
        cwd: Path,
    ) -> None:
        """Take the recipe's values, then a variant's, then those of ``--set``."""
        self.plain = self._mapping(vars_node, "vars")
        matrix = self._mapping(matrix_node, "matrix")
        for name in matrix:
            if name in self.plain and isinstance(matrix_node, Entries):
                self._problems.add(
                    matrix_node.key_lines[name], f"matrix.{name}", "this name is also in vars; choose another"
                )
        variants = self._mapping(variants_node, "variants")
        chosen = self._parse_sets(sets, matrix, variants, cwd)
        for name, node in variants.items():
            self._apply_variant(name, node, matrix, active=_is_true(chosen.pop(name, None)))
        for name, node in chosen.items():
            (matrix if name in matrix else self.plain)[name] = node
        self.matrix = {name: self._values(name, node) for name, node in matrix.items()}
        self.plain = {name: self._expanded(name, ()) for name in self.plain}

    def _mapping(self, node: Node | None, path: str) -> dict[str, Node]:
        if node is None or (isinstance(node, Scalar) and node.value is None):
            return {}
        if not isinstance(node, Entries):
            self._problems.add(
                node.line, path, f"expected a mapping of names to values, found {kind_of(node)}"
            )
            return {}
        for name in node.entries:
            if not NAME.fullmatch(name):
                self._problems.add(
                    node.key_lines[name], f"{path}.{name}", "a name is letters, digits and _, no digit first"
                )
        return dict(node.entries)

    def _parse_sets(
        self, sets: Iterable[str], matrix: Mapping[str, Node], variants: Mapping[str, Node], cwd: Path
    ) -> dict[str, Node]:
        chosen: dict[str, Node] = {}
        known = [*self.plain, *matrix, *variants]
        for text in sets:
            name, equals, value = text.partition("=")
            where = f"--set {text}"
            if not equals:
                self._problems.add(0, where, "expected --set name=value")
            elif name not in known:
                self._problems.unknown(0, where, "variable", name, known)
            else:
                node = parse(value, self._problems, base=cwd, first_line=0)
                chosen[name] = Scalar(None, "", 0) if node is None else node
                if name in variants and not _is_bool(node):
                    self._problems.add(0, where, "a variant is switched on by true or off by false")
        return chosen

    def _apply_variant(self, name: str, node: Node, matrix: dict[str, Node], *, active: bool) -> None:
        path = f"variants.{name}"
        for inner, value in self._mapping(node, path).items():
            if inner not in self.plain and inner not in matrix:
                assert isinstance(node, Entries)
                known = [*self.plain, *matrix]
                self._problems.unknown(node.key_lines[inner], f"{path}.{inner}", "variable", inner, known)
            elif active:
                (matrix if inner in matrix else self.plain)[inner] = value

    def _values(self, name: str, node: Node) -> tuple[Scalar, ...]:
        node = self._substituted(node, f"matrix.{name}", ("matrix",), {})
        items = node.items if isinstance(node, Items) else (node,)
        values: list[Scalar] = []
        for item in items:
            if not isinstance(item, Scalar) or item.value is None:
                self._problems.add(
                    item.line, f"matrix.{name}", f"expected a list of values, found {kind_of(item)} in it"
                )
            elif any(item.text == other.text for other in values):
                self._problems.add(item.line, f"matrix.{name}", f"the value {item.text!r} twice")
            else:
                values.append(item)
        if not items:
            self._problems.add(node.line, f"matrix.{name}", "no value")
        return tuple(values)

    def _expanded(self, name: str, within: tuple[str, ...]) -> Node:
        if name not in self._done:
            self._done[name] = self._expanded_anew(name, within)
        return self._done[name]

    def _expanded_anew(self, name: str, within: tuple[str, ...]) -> Node:
        node = self.plain[name]
        if name in within:
            chain = " -> ".join([*within[within.index(name) :], name])
            self._problems.add(node.line, f"vars.{name}", f"defined by itself: {chain}")
            return Scalar(None, "", node.line)
        return self._substituted(node, f"vars.{name}", (*within, name), {})

    def _substituted(
        self, node: Node, path: str, within: tuple[str, ...], cell: Mapping[str, Scalar]
    ) -> Node:
        self._count(node.line)
        if isinstance(node, Items):
            return Items(
                tuple(
                    self._substituted(item, f"{path}[{i}]", within, cell)
                    for i, item in enumerate(node.items, 1)
                ),
                node.line,
            )
        if isinstance(node, Entries):
            entries = {
                name: self._substituted(value, f"{path}.{name}", within, cell)
                for name, value in node.entries.items()
            }
            return Entries(entries, node.key_lines, node.line)
        return self._scalar(node, path, within, cell)

    def _scalar(self, node: Scalar, path: str, within: tuple[str, ...], cell: Mapping[str, Scalar]) -> Node:
        uses = list(_USE.finditer(node.text))
        if not uses:
            return node
        text, last, base = "", 0, node.base
        for use in uses:
            value = self._look_up(use[1].strip(), node.line, path, within, cell)
            if value is None:
                return Scalar(None, node.text, node.line)
            if use[0] == node.text.strip():
                return self._moved(value, node.line)
            if isinstance(value, Scalar) and value.value is None and "${" in value.text:
                return Scalar(None, node.text, node.line)
            if not isinstance(value, Scalar) or value.value is None:
                self._problems.add(
                    node.line, path, f"{use[0]} is {kind_of(value)}, which can't stand inside text"
                )
                return Scalar(None, node.text, node.line)
            if use.start() == 0:
                base = value.base
            text += node.text[last : use.start()] + value.text
            last = use.end()
        text += node.text[last:]
        if len(text) > MAX_TEXT:
            self._problems.add(
                node.line, path, f"longer than {MAX_TEXT:,} characters once variables are replaced"
            )
            return Scalar(None, "${...}", node.line)
        return Scalar(text, text, node.line, base)

    def _moved(self, node: Node, line: int) -> Node:
        """A variable's value at the place of its use, where its problems are reported."""
        self._count(line)
        if isinstance(node, Scalar):
            return Scalar(node.value, node.text, line, node.base)
        if isinstance(node, Items):
            return Items(tuple(self._moved(item, line) for item in node.items), line)
        return node

    def _count(self, line: int) -> None:
        self._handled += 1
        if self._handled > MAX_SUBSTITUTIONS:
            self._problems.add(line, "", "too many values once variables are replaced")
            self._problems.stop_if_any()

    def _look_up(
        self, name: str, line: int, path: str, within: tuple[str, ...], cell: Mapping[str, Scalar]
    ) -> Node | None:
        if name in cell:
            return cell[name]
        if name in self.matrix:
            # Kept as it is: the variable is expanded again for each cell.
            text = f"${{{name}}}"
            return Scalar(text, text, line)
        if name in self.plain:
            return self._expanded(name, within) if within else self._final(self.plain[name], path, cell)
        self._problems.unknown(line, path, "variable", name, [*self.plain, *self.matrix])
        return None

    def _final(self, node: Node, path: str, cell: Mapping[str, Scalar]) -> Node:
        """A variable that may still name matrix variables, for one cell."""
        return self._substituted(node, path, (), cell) if cell else node

    def uses(self, node: Node) -> tuple[str, ...]:
        """The matrix variables that a tree depends on, in the matrix's order."""
        found, waiting = set(), names_in(node)
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.add(name)
            if name in self.plain:
                waiting += names_in(self.plain[name])
        return tuple(name for name in self.matrix if name in found)

    def cells(self, names: Iterable[str]) -> list[dict[str, Scalar]]:
        """One dict for each combination of the values of some matrix variables."""
        chosen = list(names)
        count = math.prod(len(self.matrix[name]) for name in chosen)
        if count > MAX_CELLS:
            self._problems.add(0, "matrix", f"{count:,} cells; at most {MAX_CELLS:,} can be run")
            self._problems.stop_if_any()
        combinations = product(*(self.matrix[name] for name in chosen))
        return [dict(zip(chosen, values, strict=True)) for values in combinations]

    def fill(self, node: Node, path: str, cell: Mapping[str, Scalar]) -> Node:
        """A tree with every variable replaced, in one cell of the matrix."""
        return self._substituted(node, path, (), cell)


def _is_bool(node: Node | None) -> bool:
    return isinstance(node, Scalar) and isinstance(node.value, bool)


def _is_true(node: Node | None) -> bool:
    return isinstance(node, Scalar) and node.value is True


PathOf = Callable[[Field, Scalar, str], Path]
"""Where a path option points: (field, value as written, key path) -> path to use.

Raises `UsageError` for what can't be a path.
"""

_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def to_options(
    options: type, node: Entries, path: str, path_of: PathOf, problems: Problems, *, skip: frozenset[str]
) -> tuple[Any | None, SimpleNamespace]:
    """The options of one step, None after a problem, all of which are reported; and what is right of them.

    ``skip`` names keys that belong to the step itself and not to its options. In the second, options that
    aren't right have their defaults, and required ones None.
    """
    fields = {field.name: field for field in fields_of(options)}
    values: dict[str, Any] = {}
    right = True
    for key, value in node.entries.items():
        if key in skip:
            continue
        inner = f"{path}.{key}"
        field = fields.get(key.replace("-", "_"))
        if field is None:
            problems.unknown(node.key_lines[key], inner, "option", key, fields)
            right = False
        elif isinstance(value, Scalar) and value.value is None:
            # Nothing written means the default, so that a variable can leave an option out.
            pass
        else:
            try:
                values[field.name] = _value(field, value, inner, path_of)
            except _WrongError as wrong:
                problems.add(wrong.line or node.key_lines[key], inner, str(wrong))
                right = False
    for field in fields.values():
        if field.required and field.name not in values and field.name not in _written(node):
            problems.add(node.line, path, f"{field.name} is required")
            right = False
        elif field.required and field.name not in values and right:
            right = False
            if _unresolved(node, field.name):
                continue
            problems.add(node.key_lines.get(field.name, node.line), f"{path}.{field.name}", _NOTHING)
    known = {name: None if field.required else field.default for name, field in fields.items()}
    built = _built(options, values, node, path, problems) if right else None
    return built, SimpleNamespace(**known | values)


_NOTHING = "a value is required; if a variable should give it, use --set NAME=VALUE"


def _unresolved(node: Entries, name: str) -> bool:
    """Whether a variable in the value isn't known, which has been reported."""
    value = node.entries.get(name, node.entries.get(name.replace("_", "-")))
    return isinstance(value, Scalar) and "${" in value.text


def _written(node: Entries) -> set[str]:
    return {key.replace("-", "_") for key in node.entries}


class _WrongError(Exception):
    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def _value(field: Field, node: Node, path: str, path_of: PathOf) -> Any:
    if field.repeated:
        items = node.items if isinstance(node, Items) else (node,)
        return tuple(_item(field, item, path, path_of) for item in items)
    return _item(field, node, path, path_of)


def _item(field: Field, node: Node, path: str, path_of: PathOf) -> Any:
    """One value as the command line would have it, checked as it would check it."""
    expected = _EXPECTED[field.type]
    if not isinstance(node, Scalar):
        several = " or a list of them" if field.repeated else ""
        raise _WrongError(node.line, f"expected {expected}{several}, found {kind_of(node)}")
    value: Any = node.value
    fits = {
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, int | float) and not isinstance(value, bool),
        bool: isinstance(value, bool),
    }
    if not fits.get(field.type, True):
        raise _WrongError(node.line, f"expected {expected}, found {kind_of(node)}{_why(field, node)}")
    try:
        if field.type in fits:
            value = field.type(value)
        elif field.type is Path:
            value = path_of(field, node, path)
        else:
            # Text options take numbers as they were written: rank: 16, and a label that is 1.
            is_text = field.spec.role != "name-or-input"
            value = node.text if is_text else str(path_of(field, node, path))
        check_value(field, value)
    except UsageError as error:
        raise _WrongError(node.line, _said(error)) from error
    return value


def _said(error: UsageError) -> str:
    details = "; ".join(f"{label}: {text}" for label, text in error.lines())
    return f"{error.what} ({details})" if details else error.what


def _why(field: Field, node: Scalar) -> str:
    """Why text that looks right isn't."""
    text = node.text.lstrip("+-")
    if field.type is bool:
        return "; write true or false" if text.lower() in ("yes", "no", "on", "off") else ""
    if text.isdigit() and text.startswith("0"):
        return "; a number has no leading zero"
    if ":" in text and text.replace(":", "").isdigit():
        return "; 1:30 isn't a number in YAML 1.2"
    if NUMBER.fullmatch(node.text) and isinstance(scalar_value(node.text), str):
        return "; that is more than a number can hold"
    return ""


def _built(options: type, values: dict[str, Any], node: Entries, path: str, problems: Problems) -> Any | None:
    """The options, unless they can't be used together: the first key that a reason names has its line."""
    made = options(**values)
    found = list(refusals(made))
    for error in found:
        named = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]*)", str(error))}
        key = next((name for name in node.key_lines if name.replace("-", "_") in named), None)
        line = node.key_lines[key] if key else node.line
        problems.add(line, f"{path}.{key}" if key else path, _said(error))
    return None if found else made
