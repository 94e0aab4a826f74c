"""Result files: one JSON schema for what eval, bound, sweep and their like find out."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError
from ncm_cli.store.documents import DIGEST, read_document, write_document
from ncm_cli.store.shapes import SHAPES, misfit

FORMAT = "ncm-result"
VERSION = 2

HEADER = ("ncm_format", "ncm_format_version", DIGEST, "kind", "ncm_version", "created")


def write_result(path: Path | str, kind: str, body: Mapping[str, Any]) -> None:
    """Write ``body`` atomically under a header that says what it is.

    Floats keep full precision; NaN and infinities become null. Raises ValueError if the body has a name that
    the header needs.
    """
    clash = [name for name in HEADER if name in body]
    if clash:
        raise ValueError(f"a result body can't have {clash}")
    facts = {"kind": kind, "ncm_version": __version__, "created": now()}
    write_document(path, FORMAT, VERSION, {**facts, **jsonable(body)})


def read_result(path: Path | str, *, kind: str | None = None) -> dict[str, Any]:
    """A result file's header and body as one object; refuses another kind and what `read_document` does.

    What other commands rely on is there, and of the right type.
    """
    found = read_document(path, FORMAT, VERSION, what="a result", fix="make it again with ncm")
    if kind is not None and found.get("kind") != kind:
        raise InputError("a result of another kind", where=path, found=found.get("kind"), expected=kind)
    wrong = misfit(found, SHAPES.get(str(found.get("kind")), {}))
    if wrong:
        raise InputError("a result that no command of ncm wrote", where=path, found=wrong)
    return found


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat()


def jsonable(value: Any) -> Any:
    """``value`` in JSON's own types: arrays as lists, dataclasses as objects, NaN and infinities as null.

    Raises TypeError for what has no such form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")
