"""The options of a command from what a command line or Python gives, checked before any work.

Recipes read theirs with lines and all mistakes at once, by the same checks (`recipes.steps`).
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ncm_cli.errors import UsageError
from ncm_cli.options import Field, at_home, check, fields_of, possible
from ncm_cli.store.outputs import check_outputs

TAKES: dict[type, tuple[Any, str]] = {
    float: (numbers.Real, "a number"),
    int: (numbers.Integral, "a whole number"),
    bool: (bool, "True or False"),
    Path: (str | os.PathLike, "the path of a file or folder"),
}


def options_from(options: type, given: Mapping[str, Any]) -> Any:
    """The options of a command with what a command line or Python gives; None is what isn't given.

    Raises `UsageError` for values that they don't take, alone or together, and what `check_outputs` raises.
    """
    fields = [field for field in fields_of(options) if given.get(field.name) not in (None, [])]
    checked = check(options(**{field.name: _taken(field, given[field.name]) for field in fields}))
    check_outputs(checked)
    return checked


def _taken(field: Field, value: Any) -> Any:
    """A value as the option's field has it; of several where it takes one, the text between commas."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    wanted, words = TAKES.get(field.type, (object, ""))
    if not all(isinstance(item, wanted) for item in items):
        raise UsageError(f"{field.name} takes {words}", found=repr(value))
    typed = [at_home(field, field.type(item)) for item in items]
    for path in typed if field.type is Path else ():
        possible(path)
    if field.repeated:
        return tuple(typed)
    return typed[0] if len(typed) == 1 else (";" if field.joined else ",").join(map(str, typed))
