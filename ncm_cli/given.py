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


def options_from(options: type, given: Mapping[str, Any]) -> Any:
    """The options of a command with the ``given`` values; None and [] stand for the default.

    Raises `UsageError` for values that can't be used, alone or together, and what `check_outputs` raises.
    """
    fields = [field for field in fields_of(options) if given.get(field.name) not in (None, [])]
    checked = check(options(**{field.name: _converted(field, given[field.name]) for field in fields}))
    check_outputs(checked)
    return checked


def _converted(field: Field, value: Any) -> Any:
    """A value converted to the type of its field; several values of a list or filter become one text."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    wanted, words = _ACCEPTED.get(field.type, (object, ""))
    if not all(isinstance(item, wanted) for item in items):
        raise UsageError(f"{field.name} takes {words}", found=repr(value))
    typed = [at_home(field, field.type(item)) for item in items]
    for path in typed if field.type is Path else ():
        possible(path)
    if field.repeated:
        return tuple(typed)
    return typed[0] if len(typed) == 1 else joined_values(field, map(str, typed))
