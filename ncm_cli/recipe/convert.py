"""From the keys of one step to its options: the same dataclass that the command line fills."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ncm_cli.errors import UsageError
from ncm_cli.options.spec import Field, check_value, fields_of, refusals
from ncm_cli.recipe.document import NUMBER, Entries, Items, Node, Scalar, kind_of, scalar_value
from ncm_cli.recipe.problems import Problems

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
