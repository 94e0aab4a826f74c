"""Row filters: ``split=test & domain!=sketch``, ``place=land|water``.

Small grammars of option values: ranks, grids of numbers, lists of names.

Declares the options of a command once, for the command line, recipes, provenance and the reference.

A command's options are a frozen, keyword-only dataclass whose fields are made by `argument` and `option`.
The field's name is the long option (``id_col`` is ``--id-col``) and the key in a recipe.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os.path
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from ncm_cli.errors import UsageError, nearest


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """``column=a|b`` or, with ``negated``, ``column!=a|b``."""

    column: str
    values: tuple[str, ...]
    negated: bool = False


def parse_where(text: str) -> tuple[Term, ...]:
    """The terms of a filter, all of which a row must meet; an empty text is no term.

    Raises `UsageError` for text that isn't terms joined by ``&``.
    """
    if not text.strip():
        return ()
    return tuple(_term(part, text) for part in text.split("&"))


def _term(part: str, text: str) -> Term:
    column, equals, values = part.partition("=")
    negated = column.endswith("!")
    name = column.removesuffix("!").strip()
    alternatives = tuple(value.strip() for value in values.split("|"))
    if not equals or not name or not all(alternatives):
        raise UsageError(
            "a row filter that can't be read",
            where=part.strip() or "an empty term",
            found=repr(text),
            expected="terms like split=test or place!=land|water, joined by &",
        )
    return Term(name, alternatives, negated)


MOST_VALUES = 100_000
"""More than the dimensions of any embedding; a longer grid is a slip of the keyboard."""


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """``16``, ``2:24`` (both ends included), ``0:64:8``, ``0,8,56`` or a mix; None for ``auto``."""
    if text.strip() == "auto":
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        try:
            numbers = [int(piece) for piece in part.split(":")]
            if not 1 <= len(numbers) <= 3 or min(numbers) < 0:
                raise ValueError
            start, stop, step = (*numbers, numbers[0])[:2] + ((numbers[2],) if len(numbers) == 3 else (1,))
            if step < 1 or stop < start or (stop - start) // step >= MOST_VALUES:
                raise ValueError
        except ValueError:
            raise UsageError(
                "a rank grid that can't be read",
                found=repr(text),
                expected=f"16, or 2:24, or 0:64:8, or 0,8,56, or auto; at most {MOST_VALUES:,} ranks",
            ) from None
        ranks.update(range(start, stop + 1, step))
    return tuple(sorted(ranks))


def parse_numbers(text: str) -> tuple[float, ...]:
    """``1e-3``, ``1e-4,1e-2`` or ``log:1e-4:1:5`` (five values, evenly spaced in the logarithm)."""
    try:
        if text.startswith("log:"):
            low, high, count = text.removeprefix("log:").split(":")
            start, stop = math.log10(float(low)), math.log10(float(high))
            if not 1 <= int(count) <= MOST_VALUES:
                raise ValueError
            steps = max(int(count) - 1, 1)
            values = [10 ** (start + (stop - start) * i / steps) for i in range(int(count))]
        else:
            values = [float(part) for part in text.split(",")]
        if not values or any(not math.isfinite(value) for value in values):
            raise ValueError
    except ValueError:
        raise UsageError(
            "numbers that can't be read",
            found=repr(text),
            expected="1e-3, or 1e-4,1e-3,1e-2, or log:1e-4:1:5",
        ) from None
    return tuple(dict.fromkeys(values))


def parse_names(text: str) -> tuple[str, ...]:
    """``label,place``: names between commas, blanks around them dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_device(text: str) -> str:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    kind, colon, number = text.partition(":")
    if text not in ("auto", "cpu") and (kind != "cuda" or (colon and not number.isdecimal())):
        raise UsageError(f"no device named {text!r}", expected="auto, cpu, cuda or cuda:N")
    return text


Role = Literal["value", "input", "output", "name-or-input"]

COLUMN_METAVARS = ("COLUMN", "COLUMNS", "WHERE")
"""What an option shows that takes a column, columns between commas, or a row filter."""

REQUIRED: Any = dataclasses.MISSING


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What the command line and recipes need to know of one field."""

    help: str
    positional: bool = False
    flags: tuple[str, ...] = ()
    group: str = "Options"
    metavar: str | None = None
    columns_of: str | None = None
    choices: tuple[str, ...] = ()
    role: Role = "value"
    parse: Callable[[str], object] | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None


BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""What may bound a number: words, and what must hold of (number, bound)."""


def option(
    default: Any = REQUIRED,
    *,
    help: str,
    flags: Sequence[str] = (),
    group: str = "Options",
    metavar: str | None = None,
    columns_of: str = "features",
    choices: Sequence[str] = (),
    role: Role = "value",
    parse: Callable[[str], object] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field that is a long option.

    Parameters
    ----------
    default
        Left out: the option is required.
    flags
        Short forms beside the long one, such as ``("-o",)``.
    group
        The heading under which ``--help`` lists it.
    metavar
        What ``--help`` shows for the value. `COLUMN_METAVARS` say that the option names columns, and recipes
        check them before anything runs.
    columns_of
        The option whose file has these columns.
    choices
        The values allowed, checked on the command line and in recipes alike.
    role
        ``input`` for a file or folder that is read, ``output`` for one that is written: recipes resolve
        the paths by it and know from it when a step is up to date. ``name-or-input``: text that is either a
        name (of weights) or a file that is read.
    parse
        For text with a small grammar (ranks, filters): called once to check it before any work starts.
        The field keeps the text. Row filters have theirs by their metavar.
    least, above, most, below
        Bounds of a number; the first and the third belong to what is allowed.
    """
    spec = Spec(
        help=help,
        flags=tuple(flags),
        group=group,
        metavar=metavar,
        columns_of=columns_of if metavar in COLUMN_METAVARS else None,
        choices=tuple(choices),
        role=role,
        parse=parse_where if metavar == "WHERE" else parse,
        least=least,
        above=above,
        most=most,
        below=below,
    )
    return dataclasses.field(default=default, metadata={"spec": spec})


def argument(default: Any = REQUIRED, *, help: str, metavar: str | None = None, role: Role = "value") -> Any:
    """A field that is a positional argument on the command line and a plain key in a recipe."""
    spec = Spec(help=help, positional=True, metavar=metavar, role=role)
    return dataclasses.field(default=default, metadata={"spec": spec})


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One resolved field of an options class."""

    name: str
    spec: Spec
    type: type
    """``str``, ``int``, ``float``, ``bool`` or ``Path``: of each item where ``repeated``."""
    optional: bool
    repeated: bool
    default: Any

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def flag(self) -> str:
        return "--" + self.name.rstrip("_").replace("_", "-")


def _plain(annotation: Any) -> tuple[type, bool, bool]:
    """(item type, optional, repeated) of ``T``, ``T | None`` or ``tuple[T, ...]``."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        kind, _, repeated = _plain(inner[0])
        return kind, True, repeated
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], False, True
    return annotation, False, False


def fields_of(options: type) -> list[Field]:
    """The fields of an options class, in order."""
    hints = typing.get_type_hints(options)
    found = []
    for field in dataclasses.fields(options):
        kind, optional, repeated = _plain(hints[field.name])
        found.append(Field(field.name, field.metadata["spec"], kind, optional, repeated, field.default))
    return found


def at_home(field: Field, value: Any) -> Any:
    """What an option is given, its paths with ``~`` and ``~user`` at their start as a shell expands them.

    Shells leave ``--output=~/x`` and ``"~/x"`` as they are.
    """
    if field.spec.role == "value" and field.type is not Path:
        return value
    if isinstance(value, str | Path):
        return type(value)(os.path.expanduser(value))  # noqa: PTH111 (leaves an unknown user's as it is)
    return [at_home(field, item) for item in value] if isinstance(value, list | tuple) else value


def check_value(field: Field, item: Any) -> None:
    """Raise `UsageError` for a value, or one of several, that the option never takes."""
    spec = field.spec
    if spec.choices and item not in spec.choices:
        close = nearest(str(item), spec.choices)
        raise UsageError(
            f"{field.flag} doesn't take {str(item)!r}",
            expected=" | ".join(spec.choices),
            fix=f"did you mean {close!r}?" if close else None,
        )
    if field.type is float and not math.isfinite(item):
        raise UsageError(f"{field.flag} must be finite", found=item)
    for name, (words, holds) in BOUNDS.items():
        bound = getattr(spec, name)
        if bound is not None and not holds(item, bound):
            raise UsageError(f"{field.flag} must be {words} {bound:g}", found=item)
    if spec.parse:
        spec.parse(item)


def refusals(options: Any) -> Iterator[UsageError]:
    """Why options can't be used together, whatever files hold: what their class says of it, if anything."""
    if hasattr(options, "refusals"):
        yield from options.refusals()


def check(options: Any) -> Any:
    """The options unchanged, once it is known that each value and all together are right.

    A class whose options depend on one another has a method ``refusals`` that yields a `UsageError` for each
    thing wrong, and looks at no file: recipes are checked by it before their first step.
    """
    for field in fields_of(type(options)):
        value = getattr(options, field.name)
        if value is not None:
            for item in value if field.repeated else (value,):
                check_value(field, item)
    for error in refusals(options):
        raise error
    return options


def refuse_replacing(options: Any) -> None:
    """A `UsageError` if a file that is to be written is one that is read."""
    fields = fields_of(type(options))
    inputs = [
        (field, path) for field in fields if field.spec.role != "output" for path in _files(options, field)
    ]
    for output in (
        path for field in fields if field.spec.role == "output" for path in _files(options, field)
    ):
        for field, path in inputs:
            if path.samefile(output):
                name = field.spec.metavar or field.name.upper() if field.spec.positional else field.flag
                raise UsageError(f"the output would replace {name}", where=output, fix="name another file")


def _files(options: Any, field: Field) -> list[Path]:
    """The files there are among the paths in one field."""
    if field.spec.role == "value":
        return []
    value = getattr(options, field.name)
    paths = [Path(item) for item in (value if field.repeated else (value,)) if item]
    return [path for path in paths if path.is_file()]


def given_flags(options: Any, names: Iterable[str]) -> list[str]:
    """The flags among ``names`` whose values aren't the defaults: for warnings that they have no effect."""
    wanted = set(names)
    fields = (field for field in fields_of(type(options)) if field.name in wanted)
    return [field.flag for field in fields if getattr(options, field.name) != field.default]


def as_json(options: Any) -> dict[str, Any]:
    """The resolved options of a command, ready for JSON (paths as text)."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {name: _jsonable(value) for name, value in values.items()}


def _jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return value
