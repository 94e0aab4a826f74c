"""The options of ``ncm sweep``, and the grammar of ``--search``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ncm_cli.errors import UsageError, unknown
from ncm_cli.options import CROSSINGS, FORMS, LIST, Space, option, parse_names, parse_space
from ncm_cli.probes.options import PairPaths, TrainingOptions, refuse_same_store
from ncm_cli.solvers.methods import HYPER, METHODS, PROTOCOLS, UPWEIGHT


def lacking(method: str, options: Any) -> Iterator[UsageError]:
    """An error for each thing that a method needs and the options lack."""
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
        spaces = [search.space for search in searches if search.name == hyper and search.method == of]
        if spaces:
            return spaces[-1]
    kind = HYPER[hyper]
    return parse_space(kind.grid if grid else kind.space, whole=kind.whole)


TABLE_SUFFIXES = (".h5", ".csv", ".json")
"""The endings of ``--output``: all three files are written, whichever is named."""

_search = functools.partial(option, group="Search")
_rows = functools.partial(option, None, group="Rows")
_training = functools.partial(option, group="Training")


def table_files(output: Path) -> tuple[Path, ...]:
    """All files that a sweep writes for ``-o NAME.EXT``; for another ending only the output itself."""
    if output.suffix not in TABLE_SUFFIXES:
        return (output,)
    return tuple(output.with_suffix(suffix) for suffix in TABLE_SUFFIXES)


def parse_methods(text: str) -> tuple[tuple[str, bool], ...]:
    """``erm,ncm,ncm+upweight`` as (method, whether upweighted), each once, in order."""
    methods = []
    for name in parse_names(text):
        method = name.removesuffix(UPWEIGHT)
        if method not in METHODS:
            raise unknown("method", method, METHODS, where=f"--methods {text}", error=UsageError)
        if name != method and method == "dfr":
            raise UsageError("dfr balances its groups itself", found=name, fix="--methods dfr")
        methods.append((method, name != method))
    if not methods:
        raise UsageError("no method", found=repr(text), expected=", ".join(METHODS))
    return tuple(dict.fromkeys(methods))


def _columns(what: str, **facts: Any) -> Any:
    help_text = f"Columns whose combinations {what}"
    return _rows(help=help_text, metavar="COLUMNS", **facts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions(TrainingOptions):
    """Options of ``ncm sweep``; the fields are the long options and the recipe's keys."""

    pairs: PairPaths | None = option(
        None,
        help="Pair store for ncm, matchdg and the rule bound. May be repeated.",
        role="input",
        flags=("-p",),
    )
    output: Path = option(
        help="Table to write, .h5 or .csv; NAME.json, NAME.csv and NAME.h5 are all written.",
        role="output",
        flags=("-o",),
        files=table_files,
        writes=("sweep", "sweep-csv", "sweep-result"),
    )
    save_probes: Path | None = option(
        None,
        help="Folder for the probe that each rule picks of each method, METHOD-RULE.safetensors; with "
        "several seeds METHOD-RULE-seedN.safetensors.",
        role="output",
        metavar="DIR",
    )
    methods: str | None = option(
        None,
        help=f"Methods, such as erm,irm,ncm; NAME{UPWEIGHT} is one with --upweight. "
        "Without it, all that the other options allow.",
        names="solvers.methods:METHODS",
        parse=parse_methods,
        separator=LIST,
    )

    search: tuple[str, ...] = _search(
        (),
        help="Values of a hyper-parameter: lr=log:1e-5:1e-3, rank=2:24, irm.penalty=1,100,1e4. "
        "May be repeated.",
        metavar="NAME=SPACE",
        parse=parse_search,
    )
    trials: int = _search(16, least=1, most=100_000, help="Random configurations of each method.")
    grid: bool = _search(False, help="All combinations instead of random ones.")
    seeds: int = _search(
        5,
        least=1,
        most=10_000,
        help="Repetitions of every configuration, with seeds from --seed on; each has its own batches and "
        "folds.",
    )
    folds: int = _search(
        5,
        least=0,
        help="Folds that the pairs are cut into for the rule bound; held-out pairs replace them. "
        "0: no bound.",
    )
    seed: int = _search(0, least=0, help="First seed; also that of the random search.")

    test: str | None = _rows(
        help="Test rows: adds their accuracy, and the rules that look at them, marked ORACLE.",
        metavar="WHERE",
    )
    envs: str | None = _columns("are the environments of irm, vrex, groupdro, fish and lisa.")
    groups: str | None = _columns(
        "are the groups of the worst-group rule and of dfr, as in eval. May be repeated.", separator=CROSSINGS
    )
    dro_groups: str | None = _rows(
        help="Columns of groupdro's groups, if not the environments.", metavar="COLUMNS", parse=parse_names
    )
    upweight: str | None = _columns(
        f"count equally in training: for all methods, or for those named with {UPWEIGHT} if there are such."
    )
    erase: str | None = _rows(help="Column that leace erases.", metavar="COLUMN")

    protocol: str = _training(
        "common",
        help="The form in which methods are trained: by their papers' formulas, as in their authors' code, "
        "or as in DomainBed.",
        choices=PROTOCOLS,
    )
    batch_size: int = _training(
        256, least=0, help="Rows in a batch (of each environment with --protocol domainbed); 0 for all."
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
        if self.output.suffix not in TABLE_SUFFIXES:
            yield UsageError(
                f"a sweep's table can't be {self.output.name!r}",
                expected=f"a name ending in {', '.join(TABLE_SUFFIXES)}",
            )
        if self.folds == 1:
            yield UsageError("--folds must be at least 2", found=1, fix="--folds 0: no bound")
        yield from refuse_same_store(self.pairs)
        methods = dict.fromkeys(name for name, _ in self.chosen_methods)
        for name, upweighted in self.chosen_methods:
            yield from lacking(name, self)
            if upweighted and self.upweight is None:
                yield UsageError(f"{name}{UPWEIGHT} needs --upweight", fix="--upweight label,place")
        names = [f"{given.method}.{given.name}" if given.method else given.name for given in self.searches]
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
