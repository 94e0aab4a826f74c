"""The methods and their hyper-parameters, as plain data: what they need, their ranges, what is searched.

What ``--search`` says: ``lr=log:1e-5:1e-3``, ``rank=2:24``, ``irm.penalty=1,100,1e4``.

The options of ``ncm sweep``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ncm_cli.errors import UsageError, unknown
from ncm_cli.options import MOST_VALUES, option, parse_device, parse_names

PROTOCOLS = ("papers", "domainbed")
"""Whose form of the baselines: see `ncm_cli.baselines.config.Schedule`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hyper:
    """One hyper-parameter."""

    space: str
    """What is searched at random where ``--search`` doesn't say."""
    grid: str
    """What ``--grid`` tries where ``--search`` doesn't say."""
    help: str
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    """Whether ``low`` itself is excluded."""
    whole: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise `UsageError` for a value outside the range."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        inside = number and (value > self.low if self.open_low else value >= self.low) and value <= self.high
        if not inside or (self.whole and value != int(value)):
            bracket = "(" if self.open_low else "["
            kind = "a whole number" if self.whole else "a number"
            raise UsageError(
                f"{name} can't be {value!r}", expected=f"{kind} in {bracket}{self.low:g}, {self.high:g}]"
            )


HYPER: dict[str, Hyper] = {
    "lr": Hyper(space="log:1e-5:1e-2", grid="1e-3", open_low=True, help="learning rate"),
    "weight_decay": Hyper(space="log:1e-4:1e-2", grid="1e-4", help="λ of the objective's (λ/2)‖W‖²"),
    "rank": Hyper(space="2:24", grid="2:24", whole=True, help="dimensions removed"),
    "penalty": Hyper(
        space="log:1:1e5", grid="log:1:1e5:6", help="weight of the penalty of irm, vrex and matchdg"
    ),
    "anneal": Hyper(
        space="50:250", grid="100", whole=True, help="steps before the penalty of irm and vrex counts"
    ),
    "eta": Hyper(space="log:1e-4:1e-1", grid="log:1e-4:1e-1:4", help="step size of groupdro's group weights"),
    "meta_lr": Hyper(
        space="log:1e-3:1", grid="0.01,0.1,0.5", open_low=True, help="step of fish towards its inner weights"
    ),
    "p_sel": Hyper(
        space="0,0.5,1", grid="0,0.5,1", high=1.0, help="probability that lisa mixes within labels"
    ),
    "alpha": Hyper(
        space="2", grid="2", open_low=True, help="lisa mixes with weights drawn from Beta(alpha, alpha)"
    ),
    "C": Hyper(
        space="1,0.7,0.3,0.1,0.07,0.03,0.01",
        grid="1,0.7,0.3,0.1,0.07,0.03,0.01",
        open_low=True,
        help="dfr: weight of the loss, summed over the rows, beside ‖w‖₁",
    ),
}
"""Published spaces (lr 1e-5..1e-3 for ColoredMNIST, 1e-2 for PACS; fish's step 1e-4..1e-1 there, 0.05..0.5 in
DomainBed) are covered, so that no method lacks the values that suited it. dfr's C are its authors'."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """What a method is, takes and needs."""

    summary: str
    hyper: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Among ``envs``, ``pairs``, ``groups`` and ``erase``."""


METHODS: dict[str, Method] = {
    "erm": Method(summary="empirical risk minimisation", hyper=("lr", "weight_decay")),
    "ncm": Method(
        summary="noisy counterfactual matching: weights orthogonal to the pairs' top directions",
        hyper=("lr", "weight_decay", "rank"),
        needs=("pairs",),
    ),
    "irm": Method(
        summary="IRMv1 (Arjovsky et al. 2019)",
        hyper=("lr", "weight_decay", "penalty", "anneal"),
        needs=("envs",),
    ),
    "vrex": Method(
        summary="V-REx (Krueger et al. 2021)",
        hyper=("lr", "weight_decay", "penalty", "anneal"),
        needs=("envs",),
    ),
    "groupdro": Method(
        summary="group DRO (Sagawa et al. 2020)", hyper=("lr", "weight_decay", "eta"), needs=("envs",)
    ),
    "fish": Method(
        summary="Fish (Shi et al. 2022)", hyper=("lr", "weight_decay", "meta_lr"), needs=("envs",)
    ),
    "lisa": Method(
        summary="LISA (Yao et al. 2022)", hyper=("lr", "weight_decay", "p_sel", "alpha"), needs=("envs",)
    ),
    "matchdg": Method(
        summary="pair penalty on the logits, as MatchDG's (Mahajan et al. 2021)",
        hyper=("lr", "weight_decay", "penalty"),
        needs=("pairs",),
    ),
    "dfr": Method(
        summary="last layer retrained on group-balanced validation rows (Kirichenko et al. 2023)",
        hyper=("C",),
        needs=("groups",),
    ),
    "leace": Method(
        summary="a column erased from the features, then erm (Belrose et al. 2023)",
        hyper=("lr", "weight_decay"),
        needs=("erase",),
    ),
}


def lacking(method: str, options: Any) -> Iterator[UsageError]:
    """What a method needs and options don't give, one error each."""
    for need in METHODS[method].needs:
        if getattr(options, need) is None:
            value = "FILE" if need == "pairs" else "COLUMN"
            yield UsageError(f"{method} needs --{need}", fix=f"--{need} {value}")


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


OPTIMIZERS = ("adam", "sgd")
SCALINGS = ("none", "norm", "standard")
OVERLAPS = ("exclude", "error", "keep")
TABLES = (".h5", ".csv", ".parquet", ".json")
"""What ``--output`` may end in: see `ncm_cli.baselines.sweep`."""

ALWAYS = (".h5", ".csv", ".json")
"""Those of them that are written whichever is named."""

UPWEIGHT = "+upweight"

_ROWS = "Rows"
_SEARCH = "Search"
_TRAINING = "Training"


def files_of(output: Path) -> tuple[Path, ...]:
    """All files that a sweep writes of ``-o NAME.EXT``."""
    suffixes = [suffix for suffix in TABLES if suffix in (*ALWAYS, output.suffix)]
    return tuple(output.parent / f"{output.stem}{suffix}" for suffix in suffixes)


def parse_methods(text: str) -> tuple[tuple[str, bool], ...]:
    """``erm,ncm,ncm+upweight`` as (method, whether upweighted), each once, in order."""
    found = []
    for name in parse_names(text):
        method = name.removesuffix(UPWEIGHT)
        if method not in METHODS:
            raise unknown("method", method, METHODS, where=f"--methods {text}", error=UsageError)
        if name != method and method == "dfr":
            raise UsageError("dfr balances its groups itself", found=name, fix="--methods dfr")
        found.append((method, name != method))
    if not found:
        raise UsageError("no method", found=repr(text), expected=", ".join(METHODS))
    return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of ``ncm sweep``; the fields are the long options and the recipe's keys."""

    features: Path = option(help="Feature store with the rows.", role="input", flags=("-f",))
    pairs: Path | None = option(
        None,
        help="Pair store of ncm and matchdg, and of the rule bound.",
        role="input",
        flags=("-p",),
    )
    output: Path = option(
        help="Table to write, .h5, .csv or .parquet; NAME.json, NAME.csv and NAME.h5 are all written.",
        role="output",
        flags=("-o",),
    )
    methods: str | None = option(
        None,
        help=f"Methods, such as erm,irm,ncm; NAME{UPWEIGHT} is one with --upweight. "
        "Without it, all that the other options allow.",
        parse=parse_methods,
    )

    search: tuple[str, ...] = option(
        (),
        help="Values of a hyper-parameter: lr=log:1e-5:1e-3, rank=2:24, irm.penalty=1,100,1e4. "
        "May be repeated.",
        metavar="NAME=SPACE",
        parse=parse_search,
        group=_SEARCH,
    )
    trials: int = option(16, least=1, help="Random configurations of each method.", group=_SEARCH)
    grid: bool = option(False, help="All combinations instead of random ones.", group=_SEARCH)
    seeds: int = option(
        5,
        least=1,
        help="Repetitions of every configuration, with seeds from --seed on: other batches, other folds.",
        group=_SEARCH,
    )
    folds: int = option(
        5,
        least=0,
        help="Parts that the pairs are cut into for the rule bound; held-out pairs take their place. "
        "0: no bound.",
        group=_SEARCH,
    )
    seed: int = option(0, least=0, help="First seed; also that of the random search.", group=_SEARCH)

    train: str | None = option(
        None, help="Training rows; without it, those of a split named train.", group=_ROWS, metavar="WHERE"
    )
    val: str | None = option(
        None, help="Validation rows; without it, those of a split named val.", group=_ROWS, metavar="WHERE"
    )
    test: str | None = option(
        None,
        help="Test rows: adds their accuracy, and the rules that look at them, marked ORACLE.",
        group=_ROWS,
        metavar="WHERE",
    )
    target: str | None = option(
        None, help="Column to predict; without it, the store's label.", group=_ROWS, metavar="COLUMN"
    )
    envs: str | None = option(
        None,
        help="Columns whose combinations are the environments of irm, vrex, groupdro, fish and lisa.",
        group=_ROWS,
        metavar="COLUMNS",
        parse=parse_names,
    )
    groups: str | None = option(
        None,
        help="Columns whose combinations are the groups of the worst-group rule and of dfr, as in eval.",
        group=_ROWS,
        metavar="COLUMNS",
        parse=parse_names,
    )
    dro_groups: str | None = option(
        None,
        help="Columns of groupdro's groups, if not the environments.",
        group=_ROWS,
        metavar="COLUMNS",
        parse=parse_names,
    )
    upweight: str | None = option(
        None,
        help="Columns whose combinations count equally in training: for all methods, "
        f"or for those named with {UPWEIGHT} if there are such.",
        group=_ROWS,
        metavar="COLUMNS",
        parse=parse_names,
    )
    erase: str | None = option(None, help="Column that leace erases.", group=_ROWS, metavar="COLUMN")
    overlap: str = option(
        "exclude",
        help="What to do with pairs and byte-identical images that also occur among validation or test rows.",
        choices=OVERLAPS,
        group=_ROWS,
    )

    scaling: str = option("none", help="How features are scaled first.", choices=SCALINGS, group=_TRAINING)
    scale_factor: float = option(10.0, above=0, help="The rows' norm under --scaling norm.", group=_TRAINING)
    protocol: str = option(
        "papers",
        help="In whose form the methods are trained: as their own papers' code does, or as DomainBed does.",
        choices=PROTOCOLS,
        group=_TRAINING,
    )
    optimizer: str = option("adam", help="Optimiser.", choices=OPTIMIZERS, group=_TRAINING)
    momentum: float = option(0.0, least=0, below=1, help="Momentum of sgd.", group=_TRAINING)
    epochs: int = option(100, least=1, help="Passes over the training rows.", group=_TRAINING)
    batch_size: int = option(
        256,
        least=0,
        help="Rows in a batch, with --protocol domainbed of each environment; 0 for all.",
        group=_TRAINING,
    )
    evaluate_every: int = option(
        1, least=1, help="Epochs between two checkpoints; every rule picks its own.", group=_TRAINING
    )
    device: str = option("auto", help="auto, cpu or cuda.", group=_TRAINING, parse=parse_device)

    @property
    def chosen_methods(self) -> tuple[tuple[str, bool], ...]:
        """(method, upweighted) in order: ``--methods``, else all whose needs are given."""
        if self.methods is None:
            named = tuple((name, False) for name in METHODS if not list(lacking(name, self)))
        else:
            named = parse_methods(self.methods)
        if self.upweight is not None and not any(upweighted for _, upweighted in named):
            named = tuple((name, name != "dfr") for name, _ in named)
        return named

    @property
    def searches(self) -> tuple[Search, ...]:
        """``--search``, read."""
        return tuple(map(parse_search, self.search))

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        if self.output.suffix not in TABLES:
            yield UsageError(
                f"a sweep's table can't be {self.output.name!r}",
                expected=f"a name ending in {', '.join(TABLES)}",
            )
        if self.folds == 1:
            yield UsageError("--folds must be at least 2", found=1, fix="--folds 0: no bound")
        for name, upweighted in self.chosen_methods:
            yield from lacking(name, self)
            if upweighted and self.upweight is None:
                yield UsageError(f"{name}{UPWEIGHT} needs --upweight", fix="--upweight label,place")
        yield from self._idle_searches()
        if self.grid:
            yield from self._endless_grids()

    def _idle_searches(self) -> Iterator[UsageError]:
        """Searches that another one overrules, or of a method that isn't swept."""
        methods = [name for name, _ in self.chosen_methods]
        given: set[str] = set()
        for search in self.searches:
            full = f"{search.method}.{search.name}" if search.method else search.name
            if full in given:
                yield UsageError(
                    f"--search {full} is given twice", fix=f"one list of values: --search {full}=1e-3,1e-2"
                )
            given.add(full)
            if search.method is not None and search.method not in methods:
                yield UsageError(
                    f"--search {full} is for a method that isn't swept", expected=", ".join(methods)
                )

    def _endless_grids(self) -> Iterator[UsageError]:
        """Spaces without a count of values, of which there is no grid."""
        for method in dict.fromkeys(name for name, _ in self.chosen_methods):
            for hyper in METHODS[method].hyper:
                try:
                    space_of(method, hyper, self.searches, grid=True).grid(f"{method}, {hyper}")
                except UsageError as error:
                    yield error
