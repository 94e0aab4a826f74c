"""The methods, their hyper-parameters and what ``--search`` says of them; the options of ``ncm sweep``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ncm_cli.errors import UsageError, unknown
from ncm_cli.options import FORMS, Space, option, parse_names, parse_space
from ncm_cli.probes.options import TrainingOptions

PROTOCOLS = ("papers", "domainbed")
"""Whose form of the methods: see `ncm_cli.baselines.trainer.Schedule`."""


class Hyper(NamedTuple):
    """One hyper-parameter."""

    space: str
    """What is searched at random where ``--search`` doesn't say."""
    grid: str
    """What ``--grid`` tries where ``--search`` doesn't say."""
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    """Whether ``low`` itself is excluded."""
    whole: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise `UsageError` for a value outside the range."""
        inside = (value > self.low if self.open_low else value >= self.low) and value <= self.high
        if not (inside and math.isfinite(value)) or (self.whole and value != int(value)):
            kind, bracket = "a whole number" if self.whole else "a number", "(" if self.open_low else "["
            raise UsageError(
                f"{name} can't be {value!r}", expected=f"{kind} in {bracket}{self.low:g}, {self.high:g}]"
            )


_DFR_C = "1,0.7,0.3,0.1,0.07,0.03,0.01"

HYPER: dict[str, Hyper] = {
    "lr": Hyper("log:1e-5:1e-2", "1e-3", open_low=True),
    "weight_decay": Hyper("log:1e-4:1e-2", "1e-4"),
    "rank": Hyper("2:24", "2:24", whole=True),
    "penalty": Hyper("log:1:1e5", "log:1:1e5:6"),
    "anneal": Hyper("50:250", "100", whole=True),
    "eta": Hyper("log:1e-4:1e-1", "log:1e-4:1e-1:4"),
    "meta_lr": Hyper("log:1e-3:1", "0.01,0.1,0.5", open_low=True),
    "p_sel": Hyper("0,0.5,1", "0,0.5,1", high=1.0),
    "alpha": Hyper("2", "2", open_low=True),
    "C": Hyper(_DFR_C, _DFR_C, open_low=True),
}
"""What each is: see `Config`. Published spaces are covered (lr 1e-5..1e-3 for ColoredMNIST, 1e-2 for PACS;
fish's step 1e-4..1e-1 there, 0.05..0.5 in DomainBed), so that no method lacks the values that suited it.
dfr's C are its authors'."""


class Method(NamedTuple):
    """The hyper-parameters that a method takes, and what it needs among envs, pairs, groups and erase."""

    hyper: tuple[str, ...]
    needs: tuple[str, ...] = ()


METHODS: dict[str, Method] = {
    "erm": Method(("lr", "weight_decay")),
    "ncm": Method(("lr", "weight_decay", "rank"), ("pairs",)),
    "irm": Method(("lr", "weight_decay", "penalty", "anneal"), ("envs",)),
    "vrex": Method(("lr", "weight_decay", "penalty", "anneal"), ("envs",)),
    "groupdro": Method(("lr", "weight_decay", "eta"), ("envs",)),
    "fish": Method(("lr", "weight_decay", "meta_lr"), ("envs",)),
    "lisa": Method(("lr", "weight_decay", "p_sel", "alpha"), ("envs",)),
    "matchdg": Method(("lr", "weight_decay", "penalty"), ("pairs",)),
    "dfr": Method(("C",), ("groups",)),
    "leace": Method(("lr", "weight_decay"), ("erase",)),
}
"""ncm: noisy counterfactual matching, weights orthogonal to the pairs' top directions. matchdg: a penalty on
the pairs' logits. leace: a column erased from the features, then erm. The others, with their papers: see
`ncm_cli.baselines.objectives`."""

UPWEIGHT = "+upweight"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One configuration: a method, its hyper-parameters and a seed; those that it doesn't have are ignored.

    A value outside the range that `HYPER` gives raises `UsageError`.
    """

    method: str = "erm"
    upweighted: bool = False
    """Whether rows count by the groups of ``--upweight``."""
    trial: int = 0
    """Its number in a sweep; the same hyper-parameters with another seed are the same trial."""
    seed: int = 0
    """Decides the order of the rows and every draw."""
    lr: float = 1e-3
    weight_decay: float = 1e-4
    """λ of mean loss + (λ/2)‖W‖²."""
    rank: int = 0
    """Leading columns of the basis that the weights of ncm may not use."""
    penalty: float = 1.0
    """Weight of the penalty of irm, vrex and matchdg."""
    anneal: int = 0
    """Steps before ``penalty`` replaces 1 in irm and vrex."""
    eta: float = 1e-2
    """Step size of groupdro's group weights."""
    meta_lr: float = 0.5
    """Step of fish towards its inner weights."""
    p_sel: float = 0.5
    """Probability that lisa mixes within labels."""
    alpha: float = 2.0
    """lisa mixes with weights drawn from Beta(alpha, alpha)."""
    C: float = 1.0
    """dfr: weight of the loss, summed over the rows, beside ‖w‖₁."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"no method named {self.method!r}", expected=" | ".join(METHODS))
        for name, kind in HYPER.items():
            kind.check(name, getattr(self, name))

    @property
    def label(self) -> str:
        """The method as the tables show it."""
        return self.method + (UPWEIGHT if self.upweighted else "")

    @property
    def hyper(self) -> dict[str, float]:
        """The hyper-parameters that its method has."""
        return {name: getattr(self, name) for name in METHODS[self.method].hyper}


def lacking(method: str, options: Any) -> Iterator[UsageError]:
    """What a method needs and options don't give, one error each."""
    for need in METHODS[method].needs:
        if getattr(options, need) is None:
            value = "FILE" if need == "pairs" else "COLUMN"
            yield UsageError(f"{method} needs --{need}", fix=f"--{need} {value}")


class Search(NamedTuple):
    """One ``--search``: the space of a hyper-parameter, for one method or for all that have it."""

    name: str
    space: Space
    method: str | None = None


def parse_search(text: str) -> Search:
    """Read ``NAME=SPACE`` or ``METHOD.NAME=SPACE``.

    Raises `UsageError` for no such hyper-parameter or method, a space that can't be read, or a value out of
    range.
    """
    left, equals, right = text.partition("=")
    method, dot, name = left.strip().rpartition(".")
    if not equals or not name:
        raise UsageError("a search that can't be read", found=repr(text), expected="NAME=SPACE, " + FORMS)
    if dot and method not in METHODS:
        raise unknown("method", method, METHODS, where=f"--search {text}", error=UsageError)
    kind, known = (
        (f"hyper-parameter of {method}", METHODS[method].hyper) if dot else ("hyper-parameter", HYPER)
    )
    if name not in known:
        raise unknown(kind, name, known, where=f"--search {text}", error=UsageError)
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


TABLES = (".h5", ".csv", ".json")
"""What ``--output`` may end in; all are written whichever is named."""

_search = functools.partial(option, group="Search")
_rows = functools.partial(option, None, group="Rows")
_training = functools.partial(option, group="Training")


def files_of(output: Path) -> tuple[Path, ...]:
    """All files that a sweep writes of ``-o NAME.EXT``; another output is itself."""
    if output.suffix not in TABLES:
        return (output,)
    return tuple(output.with_suffix(suffix) for suffix in TABLES)


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


def _columns(what: str, **facts: Any) -> Any:
    help_text = f"Columns whose combinations {what}"
    return _rows(help=help_text, metavar="COLUMNS", **facts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions(TrainingOptions):
    """Options of ``ncm sweep``; the fields are the long options and the recipe's keys."""

    pairs: Path | None = option(
        None, help="Pair store of ncm and matchdg, and of the rule bound.", role="input", flags=("-p",)
    )
    output: Path = option(
        help="Table to write, .h5 or .csv; NAME.json, NAME.csv and NAME.h5 are all written.",
        role="output",
        flags=("-o",),
        files=files_of,
        writes=("sweep", "sweep-csv", "sweep-result"),
    )
    save_probes: Path | None = option(
        None,
        help="Folder for what each rule picks of each method as a probe, METHOD-RULE.safetensors; with "
        "several seeds METHOD-RULE-seedN.safetensors.",
        role="output",
        metavar="DIR",
    )
    methods: str | None = option(
        None,
        help=f"Methods, such as erm,irm,ncm; NAME{UPWEIGHT} is one with --upweight. "
        "Without it, all that the other options allow.",
        parse=parse_methods,
    )

    search: tuple[str, ...] = _search(
        (),
        help="Values of a hyper-parameter: lr=log:1e-5:1e-3, rank=2:24, irm.penalty=1,100,1e4. "
        "May be repeated.",
        metavar="NAME=SPACE",
        parse=parse_search,
    )
    trials: int = _search(16, least=1, help="Random configurations of each method.")
    grid: bool = _search(False, help="All combinations instead of random ones.")
    seeds: int = _search(
        5,
        least=1,
        help="Repetitions of every configuration, with seeds from --seed on: other batches, other folds.",
    )
    folds: int = _search(
        5,
        least=0,
        help="Parts that the pairs are cut into for the rule bound; held-out pairs take their place. "
        "0: no bound.",
    )
    seed: int = _search(0, least=0, help="First seed; also that of the random search.")

    test: str | None = _rows(
        help="Test rows: adds their accuracy, and the rules that look at them, marked ORACLE.",
        metavar="WHERE",
    )
    envs: str | None = _columns("are the environments of irm, vrex, groupdro, fish and lisa.")
    groups: str | None = _columns(
        "are the groups of the worst-group rule and of dfr, as in eval. May be repeated.", joined=True
    )
    dro_groups: str | None = _rows(
        help="Columns of groupdro's groups, if not the environments.", metavar="COLUMNS", parse=parse_names
    )
    upweight: str | None = _columns(
        f"count equally in training: for all methods, or for those named with {UPWEIGHT} if there are such."
    )
    erase: str | None = _rows(help="Column that leace erases.", metavar="COLUMN")

    protocol: str = _training(
        "papers",
        help="In whose form the methods are trained: as their own papers' code does, or as DomainBed does.",
        choices=PROTOCOLS,
    )
    batch_size: int = _training(
        256, least=0, help="Rows in a batch, with --protocol domainbed of each environment; 0 for all."
    )

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
        methods = dict.fromkeys(name for name, _ in self.chosen_methods)
        for name, upweighted in self.chosen_methods:
            yield from lacking(name, self)
            if upweighted and self.upweight is None:
                yield UsageError(f"{name}{UPWEIGHT} needs --upweight", fix="--upweight label,place")
        names = [f"{one.method}.{one.name}" if one.method else one.name for one in self.searches]
        for i, search in enumerate(self.searches):
            if names[i] in names[:i]:
                yield UsageError(
                    f"--search {names[i]} is given twice",
                    fix=f"one list of values: --search {names[i]}=1e-3,1e-2",
                )
            if search.method not in (None, *methods):
                yield UsageError(
                    f"--search {names[i]} is for a method that isn't swept", expected=", ".join(methods)
                )
        for method in methods if self.grid else ():
            for hyper in METHODS[method].hyper:
                space = space_of(method, hyper, self.searches, grid=True)
                if not space.values:
                    yield UsageError(
                        "a grid needs values, not a range",
                        where=f"{method}, {hyper}",
                        found=space.text,
                        fix=f"say how many: {space.text}:5, or list them",
                    )
