"""What results of each kind hold, as far as other commands rely on it: foreign files are checked against it.

A shape is a type (``object`` for anything), None for null, a slice for a number from its start to its stop, a
tuple of shapes of which one fits, ``[shape]`` for a list, ``[shape, shape]`` for a list of that length, or an
object of shapes by name. There, names that end in ``?`` may be absent or null (all or none of several in one
key), those in ``!`` may be absent, and ``*`` stands for all that aren't mentioned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

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


def misfit(value: Any, shape: Any, at: str = "") -> str | None:
    """Where and how a JSON value differs from a shape; None where it fits."""
    return next(_misfits(value, shape, at), None)


def _misfits(value: Any, shape: Any, at: str) -> Iterator[str]:
    if isinstance(shape, tuple):
        if all(misfit(value, one, at) for one in shape):
            yield f"{at} is {_shown(value)}"
    elif isinstance(shape, dict) and isinstance(value, dict):
        mentioned = {name for key in shape for name in key.rstrip("?!").split()}
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
        for index, item in enumerate(value):
            yield from _misfits(item, shape[index % len(shape)], f"{at}[{index}]")
    elif not _is(value, shape):
        yield f"{at} is {_shown(value)}"


def _is(value: Any, shape: Any) -> bool:
    if isinstance(shape, slice):
        return type(value) in (int, float) and shape.start <= value <= shape.stop
    return shape is object or value is shape or type(value) is shape


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
