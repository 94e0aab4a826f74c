"""What ``--search`` says: ``lr=log:1e-5:1e-3``, ``rank=2:24``, ``irm.penalty=1,100,1e4``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ncm_cli.errors import UsageError, unknown
from ncm_cli.options.catalog import HYPER, METHODS
from ncm_cli.options.grids import MOST_VALUES

FORMS = "log:1e-5:1e-3, lin:0:1, 2:24 (whole numbers), 1e-3,1e-2 (a list) or 0.1; log:1e-4:1:5 counts a grid"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The values that one hyper-parameter may take."""

    text: str
    values: tuple[float, ...] = ()
    """The values of a list or a range of whole numbers, or of a range with a count; else none."""
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def at(self, share: float, *, whole: bool) -> float:
        """The value at ``share`` in [0, 1) of the space; whole numbers are rounded."""
        if self.values:
            return self.values[int(share * len(self.values))]
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return float(round(value)) if whole else value

    def capped(self, most: float) -> Space:
        """The part of the space that is at most ``most``; no values are left if there is none."""
        values = tuple(value for value in self.values if value <= most)
        return dataclasses.replace(self, values=values, high=min(self.high, most))

    @property
    def empty(self) -> bool:
        return not self.values and self.low > self.high

    def grid(self, where: str) -> tuple[float, ...]:
        """All values, which a range must count for."""
        if not self.values:
            raise UsageError(
                "a grid needs values, not a range",
                where=where,
                found=self.text,
                fix=f"say how many: {self.text}:5, or list them",
            )
        return self.values


def parse_space(text: str, *, whole: bool = False) -> Space:
    """A space from its text; raises `UsageError` for what isn't one of `FORMS`."""
    try:
        kind, _, rest = text.partition(":")
        if kind in ("log", "lin"):
            return _range(text, rest.split(":"), log=kind == "log", whole=whole)
        values: list[float] = []
        for part in text.split(","):
            numbers = [float(piece) for piece in part.split(":")]
            values += _whole_range(part, numbers) if ":" in part else numbers
        if not values or any(not math.isfinite(value) for value in values):
            raise ValueError
    except (ValueError, OverflowError):
        raise UsageError("a search space that can't be read", found=repr(text), expected=FORMS) from None
    return Space(text=text, values=tuple(dict.fromkeys(values)))


def _range(text: str, parts: list[str], *, log: bool, whole: bool) -> Space:
    if not 2 <= len(parts) <= 3:
        raise ValueError
    low, high = float(parts[0]), float(parts[1])
    if not (math.isfinite(low) and math.isfinite(high)) or high < low or (log and low <= 0):
        raise ValueError
    space = Space(text=text, low=low, high=high, log=log)
    if len(parts) == 2:
        return space
    count = int(parts[2])
    if not 1 <= count <= MOST_VALUES:
        raise ValueError
    shares = [i / max(count - 1, 1) for i in range(count)]
    # Twelve digits: 0.001 rather than the 0.0010000000000000002 that logarithms make of it.
    values = [float(f"{space.at(share, whole=whole):.12g}") for share in shares]
    return dataclasses.replace(space, values=tuple(dict.fromkeys(values)))


def _whole_range(part: str, numbers: list[float]) -> list[float]:
    if any(number != int(number) for number in numbers) or not 2 <= len(numbers) <= 3:
        raise ValueError
    start, stop, step = (int(number) for number in (*numbers, 1)[:3])
    if step < 1 or stop < start or (stop - start) // step >= MOST_VALUES:
        raise ValueError
    return [float(value) for value in range(start, stop + 1, step)]


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """One ``--search``: the space of a hyper-parameter, for one method or for all that have it."""

    name: str
    space: Space
    method: str | None = None


def parse_search(text: str) -> Search:
    """Read ``NAME=SPACE`` or ``METHOD.NAME=SPACE``.

    Raises
    ------
    UsageError
        No such hyper-parameter or method, a space that can't be read, or a value out of range.
    """
    left, equals, right = text.partition("=")
    method, dot, name = left.strip().rpartition(".")
    if not equals or not name:
        raise UsageError("a search that can't be read", found=repr(text), expected="NAME=SPACE, " + FORMS)
    if dot and method not in METHODS:
        raise unknown("method", method, METHODS, where=f"--search {text}", error=UsageError)
    if name not in HYPER:
        raise unknown("hyper-parameter", name, HYPER, where=f"--search {text}", error=UsageError)
    if dot and name not in METHODS[method].hyper:
        raise unknown(
            f"hyper-parameter of {method}",
            name,
            METHODS[method].hyper,
            where=f"--search {text}",
            error=UsageError,
        )
    hyper = HYPER[name]
    space = parse_space(right.strip(), whole=hyper.whole)
    for value in space.values or (space.low, space.high):
        # The ends of a range of whole numbers are rounded when drawn.
        hyper.check(name, float(round(value)) if hyper.whole and not space.values else value)
    return Search(name, space, method or None)


def space_of(method: str, hyper: str, searches: Sequence[Search], *, grid: bool) -> Space:
    """The last space given for this method, else for all, else the default."""
    for of in (method, None):
        found = [search.space for search in searches if search.name == hyper and search.method == of]
        if found:
            return found[-1]
    kind = HYPER[hyper]
    return parse_space(kind.grid if grid else kind.space, whole=kind.whole)
