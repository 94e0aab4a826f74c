"""The encoder fingerprint: a digest of everything that changes a feature."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = "(absent)"
"""Stands for a field that only the other description has."""


def canonical_json(value: Any) -> str:
    """JSON in one form only: sorted keys, no blanks, shortest floats, no NaN.

    Raises ValueError or TypeError for what JSON can't say.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_of(value: Any) -> str:
    """SHA-256 over the canonical JSON of ``value``, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def fingerprint(description: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of an encoder's description, as 64 hex digits."""
    return digest_of(dict(description))


def without_view(description: Mapping[str, Any]) -> dict[str, Any]:
    """The description of the encoder alone, without the augmentation of one view."""
    return {name: value for name, value in description.items() if name != "view"}


def differing_fields(
    a: Mapping[str, Any], b: Mapping[str, Any], *, ignore_view: bool = False
) -> list[tuple[str, Any, Any]]:
    """The fields in which two encoder descriptions differ, as (dotted name, value in a, value in b).

    A field that one of them lacks has the value `ABSENT` there. With ``ignore_view`` the augmentation of a
    view doesn't count.
    """
    if ignore_view:
        a, b = without_view(a), without_view(b)
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    names = [*flat_a, *(name for name in flat_b if name not in flat_a)]
    pairs = ((name, flat_a.get(name, ABSENT), flat_b.get(name, ABSENT)) for name in names)
    return [(name, x, y) for name, x, y in pairs if canonical_json(x) != canonical_json(y)]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item
