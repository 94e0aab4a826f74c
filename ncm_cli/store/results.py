"""JSON documents of ours: each says what it is, and carries a digest of all that it says.

Result files are such documents, with one schema for what eval, bound, sweep and their like find out. Foreign
ones are checked against `SHAPES`, what other commands rely on in each kind.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli import __version__
from ncm_cli.errors import InputError
from ncm_cli.store.digests import digest_of, require_version
from ncm_cli.store.files import read_json, write_json


class Shown:
    """In a notebook: the tables by which `ncm info` describes the file."""

    def _repr_html_(self) -> str:
        # By address, as commands are: what shows things lies above the things.
        return str(importlib.import_module("ncm_cli.notebook").html(self))


FORMAT = "ncm-result"
VERSION = 2

DIGEST = "content_sha256"

SEALED_SINCE = 2
"""The first version of every such format that has the digest."""

HEADER = ("ncm_format", "ncm_format_version", DIGEST, "kind", "ncm_version", "created")

_NUMBER = slice(-sys.float_info.max, sys.float_info.max)
_SHARE = slice(0, 1)
_COUNT = slice(0, 2**53)
_NAN = (_NUMBER, None)
"""A number, or the null that stands for NaN."""


def _all(names: str, shape: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), shape)


_COMMON = {
    "where?": str,
    "probe?": {**_all("path? sha256? method? selection?", str), "rank?": int},
    **_all("features? data?", {"content_sha256?": str}),
    "reference?": {"where?": str},
    "options?": _all("output? probe? features? pairs? oracle_pairs? clean_pairs? compare?", str),
}

_GROUP = {"group": {"*": object}, "accuracy?": _SHARE, "mse?": _NUMBER}

_REFIT = {
    **_all("rank pairs", int),
    **_all("bound term_1 term_2 test_risk twin_error flip_rate zero_one_bound test_error", _NAN),
    "*": (_NUMBER, bool, None),
}

_PICK = {
    **_all("method rule", str),
    "trial": int,
    "hyper_parameters": {"*": _NUMBER},
    "seeds?": ([int], int),
    "metrics": {"*": _NAN},
    "sd?": {"*": _NAN},
    "values?": {"*": [_NAN]},
}

_VERDICT = {
    "expectation": {
        "metric": str,
        "source?": str,
        "filters": {"*": object},
        **_all("min? max?", _NUMBER),
        "value tolerance?": _NUMBER,
    },
    "state": str,
    "measured?": {"mean": _NUMBER, "sd?": _NUMBER, "n": int},
}

SHAPES: dict[str, Any] = {
    "eval": {
        **_COMMON,
        **_all("accuracy? adjusted_accuracy? balanced_accuracy?", _SHARE),
        **_all("log_loss? mse? adjusted_mse? r2?", _NUMBER),
        "n?": _COUNT,
        "worst_group?": _GROUP,
        "groups!": [{**_GROUP, "n": _COUNT, "ci_low ci_high?": _SHARE}],
        "rows?": {"*": object},
    },
    "bound": {
        **_COMMON,
        **_all("term_1? term_2? bound? test_risk?", _NUMBER),
        "zero_one?": _all("bound? test_error?", _NUMBER),
        "intervals?": {"*": [_NAN, _NAN]},
        "summary?": {"*": _NAN},
        **_all("path? pair_counts?", [_REFIT]),
        "oracle?": {"test_error?": _NUMBER},
        "spurious_dim estimates?": object,
        "spurious_dim?": int,
        "estimates?": {"spurious_dim?": str},
    },
    "sweep": {**_COMMON, "configurations!": int, "history?": str, "rows": [_PICK]},
    "run": {"expect?": [_VERDICT], "provenance?": {"recipe!": {"name!": str}}},
}
"""What results of each kind hold, as far as other commands rely on it.

A shape is a type (``object`` for anything), None for null, a slice for a number from its start to its stop, a
tuple of shapes of which one fits, ``[shape]`` for a list, ``[shape, shape]`` for a list of that length, or an
object of shapes by name. There, names that end in ``?`` may be absent or null (all or none of several in one
key), those in ``!`` may be absent, and ``*`` stands for all that aren't mentioned.
"""


def _misfits(value: Any, shape: Any, at: str) -> Iterator[str]:
    """Where and how a JSON value differs from a shape."""
    if isinstance(shape, tuple):
        fits = any(next(_misfits(value, one, at), None) is None for one in shape)
    elif isinstance(shape, slice):
        fits = type(value) in (int, float) and shape.start <= value <= shape.stop
    elif isinstance(shape, dict) and isinstance(value, dict):
        fits, mentioned = True, {name for key in shape for name in key.rstrip("?!").split()}
        for key, inner in shape.items():
            names = sorted(value.keys() - mentioned) if key == "*" else key.rstrip("?!").split()
            if key.endswith("?") and all(value.get(name) is None for name in names):
                continue
            for name in names:
                place = f"{at}.{name}".lstrip(".")
                if name in value:
                    yield from _misfits(value[name], inner, place)
                elif not key.endswith("!"):
                    yield f"{place} isn't there"
    elif isinstance(shape, list) and isinstance(value, list) and len(shape) in (1, len(value)):
        fits = True
        for index, item in enumerate(value):
            yield from _misfits(item, shape[index % len(shape)], f"{at}[{index}]")
    else:
        fits = shape is object or value is shape or type(value) is shape
    if not fits:
        yield f"{at} is {type(value).__name__} {str(value)[:40]!r}"


def write_document(path: Path | str, format_name: str, version: int, body: Mapping[str, Any]) -> None:
    """Write ``body`` atomically under a header with its format, version and digest."""
    header = {"ncm_format": format_name, "ncm_format_version": version}
    write_json(path, {**header, DIGEST: _digest({**header, **body}), **body})


def read_document(
    path: Path | str, format_name: str, version: int, *, what: str, fix: str = "make it again"
) -> dict[str, Any]:
    """The whole document; one that an earlier version wrote has no `DIGEST`.

    Raises `InputError` for another file or version, and for one that was changed after it was written.
    """
    path = Path(path)
    found = read_json(path)
    if not isinstance(found, dict) or found.get("ncm_format") != format_name:
        other = found.get("ncm_format") if isinstance(found, dict) else type(found).__name__
        raise InputError(
            f"not {what}", where=path, found=f"ncm_format {other!r}", expected=format_name, fix=fix
        )
    require_version(found.get("ncm_format_version"), version, path)
    stated = found.get(DIGEST)
    if (stated is not None or found["ncm_format_version"] >= SEALED_SINCE) and stated != _digest(found):
        raise InputError(
            f"{what} that was changed after it was written",
            where=path,
            found=f"contents that don't match its {DIGEST}",
            fix=fix,
        )
    return found


def _digest(document: Mapping[str, Any]) -> str:
    return digest_of({name: _plain(value) for name, value in document.items() if name != DIGEST})


def _plain(value: Any) -> Any:
    """``value`` with 1.0 as 1: other programs that write a document anew don't keep them apart."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
    if wrong := next(_misfits(found, SHAPES.get(str(found.get("kind")), {}), ""), None):
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
