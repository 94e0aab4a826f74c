"""Declares the options of a command once, for the command line, recipes, provenance and the reference.

A command's options are a frozen, keyword-only dataclass whose fields are made by `argument` and `option`.
The field's name is the long option (``id_col`` is ``--id-col``) and the key in a recipe. Here are also the
small grammars of values: row filters, ranks, grids of numbers, lists of names, devices.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from ncm_cli.errors import NcmError, UsageError, listing, nearest


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """``column=a|b`` or, with ``negated``, ``column!=a|b``."""

    column: str
    values: tuple[str, ...]
    negated: bool = False


_QUOTED = re.compile(r'((?:^|[&|=])\s*)("(?:[^"]|"")*")(?=\s*(?:$|[&|=]|!=))')
"""A name or a value between quotation marks, and the text before it."""

_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
"""Stands for a quoted name or value while the rest is split."""


def parse_where(text: str) -> tuple[Term, ...]:
    """The terms of a row filter (``split=test & place!=land|water``), all of which a row must meet.

    Names and values with special characters stand between quotation marks (``split="train|a"``); a quotation
    mark inside them is doubled. An empty text has no terms. Raises `UsageError` for text that isn't terms
    joined by ``&``.
    """
    quoted: list[str] = []

    def hide(match: re.Match[str]) -> str:
        quoted.append(match[2])
        return f"{match[1]}\ue000{len(quoted) - 1}\ue001"

    def shown(item: str, *, as_written: bool = False) -> str:
        if not as_written and (whole := _PLACEHOLDER.fullmatch(item.strip())):
            return quoted[int(whole[1])][1:-1].replace('""', '"')
        return _PLACEHOLDER.sub(lambda match: quoted[int(match[1])], item).strip()

    terms = []
    hidden = text if "\ue000" in text else _QUOTED.sub(hide, text)
    for part in hidden.split("&") if text.strip() else ():
        column, equals, alternatives = part.partition("=")
        name = shown(column.removesuffix("!"))
        values = tuple(map(shown, alternatives.split("|")))
        if not equals or not name or not all(values):
            raise UsageError(
                "a row filter that can't be read",
                where=shown(part, as_written=True) or "an empty term",
                found=repr(text),
                expected='terms like split=test, place!=land|water or site="A&B", joined by &',
            )
        terms.append(Term(name, values, column.endswith("!")))
    return tuple(terms)


def where_text(column: str, *values: str, negated: bool = False) -> str:
    """The row filter for a column's values; names and values are quoted if need be.

    In a message that suggests it to a user, `shlex.quote` keeps its ``&`` and ``|`` from the shell.
    """
    return f"{_item(column)}{'!' * negated}={'|'.join(map(_item, values))}"


def _item(text: str) -> str:
    plain = text == text.strip() and not text.startswith('"') and not re.search("[&|=!\ue000]", text)
    return text if plain else '"' + text.replace('"', '""') + '"'


MAX_GRID = 100_000
"""The most values that a grid may have, more than any embedding has dimensions."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The values that a number may take: the list ``values``, or a range if that is empty."""

    text: str
    values: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def at(self, share: float, *, whole: bool) -> float:
        """The value at the fraction ``share`` in [0, 1) of the space, rounded if ``whole``."""
        if self.values:
            return self.values[int(share * len(self.values))]
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return float(round(value)) if whole else value


FORMS = "log:1e-5:1e-3, lin:0:1, 2:24 (whole numbers), 1e-3,1e-2 (a list) or 0.1; log:1e-4:1:5 counts a grid"


def parse_space(
    text: str, *, whole: bool = False, what: str = "a search space", expected: str = FORMS
) -> Space:
    """Parse numbers in one of the `FORMS`; raises a `UsageError` that says that ``what`` can't be read."""
    try:
        kind, _, rest = text.partition(":")
        if kind in ("log", "lin"):
            pieces = rest.split(":")
            (low, high), count = map(float, pieces[:2]), pieces[2:]
            if not math.isfinite(high - low) or (kind == "log" and min(low, high) <= 0) or len(count) > 1:
                raise ValueError
            if high < low and not count:
                raise ValueError
            space = Space(text=text, low=low, high=high, log=kind == "log")
            if not count:
                return space
            shares = [i / max(int(count[0]) - 1, 1) for i in range(min(int(count[0]), MAX_GRID + 1))]
            # Twelve digits, so that logarithms give 0.001, not 0.0010000000000000002.
            values = [float(f"{space.at(share, whole=whole):.12g}") for share in shares]
        else:
            space, values = Space(text=text), []
            for part in text.split(","):
                numbers = [float(piece) for piece in part.split(":")]
                if len(numbers) > 1:
                    start, stop, step = (int(number) for number in (*numbers, 1)[:3])
                    if [start, stop, step][: len(numbers)] != numbers or step < 1 or stop < start:
                        raise ValueError
                    last = min(stop, start + step * MAX_GRID)
                    numbers = [float(value) for value in range(start, last + 1, step)]
                values += numbers
        if not 1 <= len(values) <= MAX_GRID or not all(map(math.isfinite, values)):
            raise ValueError
    except (ValueError, OverflowError):
        raise UsageError(f"{what} that can't be read", found=repr(text), expected=expected) from None
    return dataclasses.replace(space, values=tuple(dict.fromkeys(values)))


def parse_numbers(
    text: str, *, what: str = "numbers", expected: str = "1e-3, or 1e-4,1e-3,1e-2, or log:1e-4:1:5"
) -> tuple[float, ...]:
    """Numbers or a grid: ``1e-3``, ``1e-4,1e-2`` or ``log:1e-4:1:5``; `UsageError` for a range."""
    space = parse_space(text, what=what, expected=expected)
    if not space.values:
        raise UsageError(f"{what} that can't be read", found=repr(text), expected=expected)
    return space.values


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """``16``, ``2:24`` (both ends included), ``0:64:8``, ``0,8,56`` or a mix; None for ``auto``."""
    if text.strip() == "auto":
        return None
    what = "a rank grid"
    expected = f"16, or 2:24, or 0:64:8, or 0,8,56, or auto; at most {MAX_GRID:,} ranks"
    ranks = parse_numbers(text, what=what, expected=expected)
    if not all(rank >= 0 and rank.is_integer() for rank in ranks):
        raise UsageError(f"{what} that can't be read", found=repr(text), expected=expected)
    return tuple(sorted(map(int, ranks)))


def parse_names(text: str) -> tuple[str, ...]:
    """Names separated by commas, such as ``label,place``, without the blanks around them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_left_out(text: str) -> tuple[str, str | None]:
    """``domain`` as (column, None), all values in turn; ``domain=photo`` as (column, value)."""
    if "=" not in text:
        return text.strip(), None
    terms = parse_where(text)
    if len(terms) != 1 or terms[0].negated or len(terms[0].values) != 1:
        raise UsageError(
            "--leave-out takes a column or one of its values",
            found=repr(text),
            expected="domain, or domain=photo",
        )
    return terms[0].column, terms[0].values[0]


def parse_columns(text: str) -> tuple[str, ...]:
    """At least one column, as `parse_names` reads them; `UsageError` for none."""
    columns = parse_names(text)
    if not columns:
        raise UsageError("no column is named", found=repr(text), expected="one or more, such as label,place")
    return columns


def parse_crossings(text: str) -> tuple[tuple[str, ...], ...]:
    """Crossings separated by semicolons, their names by commas, such as ``label,male;label,black``."""
    crossings = tuple(names for part in text.split(";") if (names := parse_names(part)))
    if not crossings:
        raise UsageError(
            "no column is named", found=repr(text), expected="label,place, or label,male;label,black"
        )
    return crossings


def _parse_auto(text: str, *, least: int, what: str) -> int | None:
    """``auto`` as None, otherwise a whole number of at least ``least``."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise UsageError(f"{what} can't be {text!r}", expected=f"auto, or a whole number from {least}")
    return int(text)


parse_batch_size = partial(_parse_auto, least=1, what="--batch-size")
"""Images in a batch; None for ``auto``."""

parse_workers = partial(_parse_auto, least=0, what="--workers")
"""Number of threads or processes that read images; None for ``auto``."""


def parse_device(text: str) -> str:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    kind, colon, number = text.partition(":")
    if text not in ("auto", "cpu") and (kind != "cuda" or (colon and not number.isdecimal())):
        raise UsageError(f"no device named {text!r}", expected="auto, cpu, cuda or cuda:N")
    return text


COLUMN_METAVARS = ("COLUMN", "COLUMNS", "WHERE")
"""Metavars of options that take a column, columns separated by commas, or a row filter."""

TERMS, CROSSINGS, LIST = " & ", ";", ","
"""What joins row filters, crossings of columns, and other lists."""

REQUIRED: Any = dataclasses.MISSING

AnyPath = TypeVar("AnyPath", str, Path)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One option, as declared for the command line, recipes and Python."""

    name: str
    type: type
    """``str``, ``int``, ``float``, ``bool`` or ``Path``; of each item if ``repeated`` or ``several``."""
    optional: bool
    repeated: bool
    several: bool = False
    """Whether it takes one value or several: one stays as it is, several are a tuple."""
    default: Any
    help: str
    positional: bool = False
    flags: tuple[str, ...] = ()
    """Short forms of the option, such as ``("-o",)``."""
    group: str = "Options"
    """The heading under which ``--help`` lists it."""
    metavar: str | None = None
    """The value's name in ``--help``. With one of `COLUMN_METAVARS` the option names columns, which recipes
    check before anything runs."""
    columns_of: str | None = None
    """The option whose file has these columns; by default ``features``, or ``source`` without that option."""
    separator: str = ""
    """What joins several values into one text: `TERMS`, `CROSSINGS` or `LIST`; "" if it takes one value."""
    choices: tuple[str, ...] = ()
    """The allowed values; any if empty."""
    role: Literal["value", "input", "output", "name-or-input"] = "value"
    """``input`` for a file or folder that is read, ``output`` for one that is written. Recipes resolve these
    paths and compare their contents to decide whether a step is up to date. ``name-or-input`` is text that is
    either a name (of weights) or a file that is read."""
    writes: tuple[str, ...] = ()
    """The kinds of files of an output, as named in `ncm_cli.store.outputs`; none for a folder."""
    files: Callable[[Path], tuple[Path, ...]] | None = None
    """Maps an output to all files that are written, if there are several."""
    names: str | None = None
    """Address of the names that a shell completes, or of a function that returns these names."""
    parse: Callable[[str], object] | None = None
    """Checks text with a grammar of its own before any work; the field keeps the text. `option` sets it for
    row filters and crossings."""
    held: Literal["", "table", "array"] = ""
    """What Python may give in place of an input's file: a data frame, or an array."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def repeatable(self) -> bool:
        """Whether the option may be repeated on a command line."""
        return self.repeated or self.several or self.separator in (TERMS, CROSSINGS)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_folder(self) -> bool:
        """Whether it is an output that is a folder."""
        return self.role == "output" and not self.writes

    def all_files(self, output: Path) -> tuple[Path, ...]:
        """All files that are written for an ``output``."""
        return self.files(output) if self.files else (output,)


MAX_WHOLE_NUMBER = 2**63 - 1
"""The largest whole number that is accepted, since files can't hold larger ones."""

BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Bounds of a number, each in words and as the comparison of number and bound that must hold."""


def option(default: Any = REQUIRED, **facts: Any) -> Any:
    """A dataclass field for a long option, required if it has no default; ``facts`` are fields of `Field`."""
    if facts.get("separator") == CROSSINGS:
        facts["parse"] = parse_crossings
    if facts.get("metavar") == "WHERE":
        facts = {"parse": parse_where, "separator": TERMS} | facts
    if facts.get("metavar") == "COLUMNS":
        facts.setdefault("separator", LIST)
        if facts.get("parse") in (None, parse_names):
            facts["parse"] = parse_columns
    return dataclasses.field(default=default, metadata=facts)


def argument(default: Any = REQUIRED, **facts: Any) -> Any:
    """A dataclass field for a positional argument, which in a recipe is a key like any other."""
    return option(default, positional=True, **facts)


def fields_of(options: type) -> tuple[Field, ...]:
    """The fields of an options class, in order."""
    return _fields_of(options)


@functools.cache
def _fields_of(options: Any) -> tuple[Field, ...]:
    hints = typing.get_type_hints(options)
    fields = []
    for field in dataclasses.fields(options):
        # T, T | None, tuple[T, ...] or T | tuple[T, ...] | None
        hint, arguments = hints[field.name], typing.get_args(hints[field.name])
        facts = dict(field.metadata)
        kind = arguments[0] if arguments else hint
        if kind is int:
            facts.setdefault("most", MAX_WHOLE_NUMBER)
        if facts.get("metavar") in COLUMN_METAVARS:
            facts.setdefault("columns_of", "features" if "features" in hints else "source")
        fields.append(
            Field(
                name=field.name,
                type=kind,
                optional=typing.get_origin(hint) in (Union, types.UnionType),
                repeated=typing.get_origin(hint) is tuple,
                several=any(typing.get_origin(kind) is tuple for kind in arguments),
                default=field.default,
                **facts,
            )
        )
    return tuple(fields)


def possible(path: Path | str, error: type[NcmError] = UsageError) -> Path:
    """The path; raises ``error`` if no file system can have it: it is too long, or holds a zero byte."""
    try:
        Path(path).lstat()
    except (OSError, ValueError) as why:
        if isinstance(why, ValueError) or why.errno == errno.ENAMETOOLONG:
            found = "the file name is too long" if isinstance(why, OSError) else str(why)
            raise error("not the path of a file", found=found) from None
    return Path(path)


def at_home(field: Field, value: Any) -> Any:
    """The value of an option; if it is a path, ``~`` and ``~user`` are expanded.

    Shells don't do that in ``--output=~/x`` and ``"~/x"``.
    """
    return value if field.role == "value" and field.type is not Path else expand_home(value)


def expand_home(path: AnyPath) -> AnyPath:
    """A path with ``~`` or ``~user`` at its start expanded; it stays unchanged for an unknown user."""
    return type(path)(os.path.expanduser(path))  # noqa: PTH111 (pathlib raises for an unknown user)


def values_of(value: Any) -> tuple[Any, ...]:
    """The values that an option was given: none for None, several for a tuple, or a list that was read."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def check_value(field: Field, item: Any) -> None:
    """Raise `UsageError` if an option doesn't take ``item``, its value or one of its repeated values."""
    if field.role == "output" and str(item) == "-" != str(field.default):
        raise UsageError(f"{field.flag} can't be standard output", found="-", fix=f"{field.flag} NAME")
    if field.choices and item not in field.choices:
        close = nearest(str(item), field.choices)
        raise UsageError(
            f"{field.flag} doesn't take {str(item)!r}",
            expected=" | ".join(field.choices),
            fix=f"did you mean {close!r}?" if close else None,
        )
    if field.type is float and not math.isfinite(item):
        raise UsageError(f"{field.flag} must be finite", found=item)
    for name, (words, holds) in BOUNDS.items():
        bound = getattr(field, name)
        if bound is not None and not holds(item, bound):
            raise UsageError(f"{field.flag} must be {words} {bound:g}", found=item)
    if field.parse:
        field.parse(item)


def joined_values(field: Field, texts: Iterable[str]) -> str:
    """Several values of an option as one text; empty row filters are left out.

    Raises `UsageError` if the option takes one value.
    """
    values = list(texts)
    if not field.separator:
        raise UsageError(f"{field.flag} takes one value", found=f"{len(values)}: {listing(values)}")
    return field.separator.join(text for text in values if field.separator != TERMS or text.strip())


def refusals(options: Any) -> Iterator[UsageError]:
    """Why these options can't be used together, by their ``refusals`` if they have it; reads no files."""
    if hasattr(options, "refusals"):
        yield from options.refusals()


def check(options: Any) -> Any:
    """The options unchanged; a `UsageError` if a value or a combination of values is wrong.

    A class whose options depend on one another has a method ``refusals`` that yields a `UsageError` for each
    mistake. It reads no file: recipes are checked by it before their first step.
    """
    for field in fields_of(type(options)):
        value = getattr(options, field.name)
        for item in values_of(value):
            check_value(field, item)
    for error in refusals(options):
        raise error
    return options


def is_file(path: Path) -> bool:
    """Whether a file exists; False for text that is too long for a name, such as a prompt."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def given_flags(options: Any, names: Iterable[str]) -> list[str]:
    """The flags of ``names`` whose values aren't the default, for warnings that they have no effect."""
    wanted = set(names)
    fields = (field for field in fields_of(type(options)) if field.name in wanted)
    return [field.flag for field in fields if getattr(options, field.name) != field.default]


def command_words(options: type, values: Mapping[str, Any]) -> list[str]:
    """Arguments of a command line for these values; defaults, and names that aren't options, are left out."""
    positional: list[str] = []
    flagged: list[str] = []
    for field in fields_of(options):
        value = values.get(field.name)
        if field.positional:
            positional += _texts(value)
        elif value is not None and _texts(value) != _texts(field.default):
            if field.type is bool:
                flagged.append(field.flag if value else f"--no-{field.flag[2:]}")
            else:
                flagged += [word for text in _texts(value) for word in (field.flag, text)]
    if any(text.startswith("-") for text in positional):
        # Arguments after -- aren't options.
        return [*flagged, "--", *positional]
    return [*positional, *flagged]


def _texts(value: Any) -> list[str]:
    """The words of a value on a command line, one for each value of a repeated option."""
    return [] if value is REQUIRED else [str(item) for item in values_of(value)]
