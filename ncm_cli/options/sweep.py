"""The options of ``ncm sweep``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from ncm_cli.errors import UsageError, unknown
from ncm_cli.options.catalog import METHODS, PROTOCOLS, lacking
from ncm_cli.options.grids import parse_device, parse_names
from ncm_cli.options.search import Search, parse_search, space_of
from ncm_cli.options.spec import option

OPTIMIZERS = ("adam", "sgd")
SCALINGS = ("none", "norm", "standard")
OVERLAPS = ("exclude", "error", "keep")
TABLES = (".h5", ".csv", ".parquet", ".json")
"""What ``--output`` may end in: see `ncm_cli.stages.sweep`."""

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
