"""Builds a command's options from the values that a command line or Python gives, and checks them.

Recipes use the same checks, but report all mistakes at once, with their lines (`recipes.steps`).
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ncm_cli.errors import UsageError
from ncm_cli.options import Field, at_home, check, fields_of, joined_values, possible
from ncm_cli.store.outputs import check_outputs

_ACCEPTED: dict[type, tuple[Any, str]] = {
    float: (numbers.Real, "a number"),
    int: (numbers.Integral, "a whole number"),
    bool: (bool, "True or False"),
    Path: (str | os.PathLike, "the path of a file or folder"),
}

_HELD = {
    "": "",
    "table": ", or a data frame of pandas or polars",
    "array": ", or an array (rows, dimensions)",
}
"""What Python may give in place of a file, in words."""


def options_from(options: type, given: Mapping[str, Any]) -> Any:
    """The options of a command with the ``given`` values; None and [] stand for the default.

    Arrays and scalars of numpy stand for lists and numbers. Where a field says so, a data frame or an array
    stands for its file.

    Raises `UsageError` for values that can't be used, alone or together, and what `check_outputs` raises.
    """
    values = {name: _plain(value) for name, value in given.items()}
    fields = [field for field in fields_of(options) if not _is_default(values.get(field.name))]
    checked = check(options(**{field.name: _converted(field, values[field.name]) for field in fields}))
    check_outputs(checked)
    return checked


def _plain(value: Any) -> Any:
    """Python's own numbers and lists for those of numpy; what may stand for a file stays as it is."""
    if getattr(value, "ndim", None) in (0, 1) and hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _is_default(value: Any) -> bool:
    return value is None or (isinstance(value, list) and not value)


def _converted(field: Field, value: Any) -> Any:
    """A value converted to the type of its field; several values of a list or filter become one text."""
    if field.held and not isinstance(value, str | os.PathLike | list | tuple):
        from ncm_cli.store.memory import given_array, given_table

        return (given_table if field.held == "table" else given_array)(field.name, value)
    items = list(value) if isinstance(value, list | tuple) else [value]
    wanted, words = _ACCEPTED.get(field.type, (object, ""))
    if hasattr(value, "shape"):  # a matrix or a data frame, whose text says little
        raise UsageError(
            f"{field.name} takes {words or 'text, a number or a list'}", found=type(value).__name__
        )
    if not all(isinstance(item, wanted) for item in items):
        raise UsageError(f"{field.name} takes {words}{_HELD[field.held]}", found=repr(value)[:200])
    typed = [at_home(field, field.type(item)) for item in items]
    for item, path in zip(items, typed, strict=True) if field.type is Path else ():
        if item == "":
            raise UsageError(f"{field.name} is empty", expected=words)
        possible(path)
    if field.repeated or (field.several and len(typed) > 1):
        return tuple(typed)
    return typed[0] if len(typed) == 1 else joined_values(field, map(str, typed))
