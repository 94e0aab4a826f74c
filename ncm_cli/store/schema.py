"""Checks the types in a JSON document when it is read, so that later code can rely on them.

A schema is a type as Python writes it: ``str``, ``bool``, ``int``, ``float`` (any number), None, ``Any``, a
union, ``list[T]``, ``dict[str, T]``, or a ``TypedDict``, which allows further names.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Iterable
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that no text may hold; the others stand for bytes of file names that aren't UTF-8."""

_hints = functools.cache(get_type_hints)

_WORDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "null",
    list: "a list",
    Any: "a value of JSON",
}


def misfit(value: Any, schema: Any, name: str = "") -> tuple[str, Any, str] | None:
    """(name, found, expected) of the first value that doesn't fit; None if all do.

    Whatever the schema, numbers must be finite and within 64 bits, and text must be Unicode or a file name.
    """
    items: Iterable[tuple[Any, Any, Any]]
    if get_origin(schema) in (Union, types.UnionType):
        faults = [misfit(value, alternative, name) for alternative in get_args(schema)]
        # For a union, report the fault of the alternative that fits furthest.
        return None if None in faults else max(faults, key=lambda fault: len(fault[0]) if fault else 0)
    if isinstance(value, dict) and (schema is Any or get_origin(schema) is dict or is_typeddict(schema)):
        lacking = sorted(set(getattr(schema, "__required_keys__", ())) - value.keys())
        if lacking:
            return f"{name}.{lacking[0]}", "nothing", _words(_hints(schema)[lacking[0]])
        hints, other = (_hints(schema), Any) if is_typeddict(schema) else ({}, [Any, *get_args(schema)][-1])
        items = ((key, item, hints.get(key, other)) for key, item in value.items())
    elif isinstance(value, list) and (schema is Any or get_origin(schema) is list):
        items = ((at, item, [Any, *get_args(schema)][-1]) for at, item in enumerate(value))
    else:
        return None if _fits(value, schema) else (name, value, _words(schema))
    for key, item, item_schema in items:
        place = f"{name}.{key}" if name else str(key)
        if fault := misfit(item, item_schema, place) or (isinstance(key, str) and misfit(key, str, place)):
            return fault
    return None


def _fits(value: Any, schema: Any) -> bool:
    kind = type(value)
    if schema is not Any and kind is not schema and not (kind is int and schema is float):
        return False
    if kind is str:
        return bool(value.isascii() or not _SURROGATE.search(value))
    # Other programs write whole numbers without a point, however large.
    most = 2**63 if schema is int else sys.float_info.max
    return kind in (bool, type(None)) or (kind in (int, float) and abs(value) <= most)


def _words(schema: Any) -> str:
    if get_origin(schema) in (Union, types.UnionType):
        return " or ".join(map(_words, get_args(schema)))
    return _WORDS.get(get_origin(schema) or schema, "an object")
