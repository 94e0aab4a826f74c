"""What a sweep trains: cells (method, trial, seed) with their hyper-parameters, in chunks."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from ncm_cli.baselines.options import HYPER, METHODS, UPWEIGHT, Space, SweepOptions, space_of
from ncm_cli.errors import InputError, UsageError
from ncm_cli.progress import Reporter

CHUNK_LOGITS = 512
"""Most logits (configurations × C) that train side by side: enough to fill matrix products, and little work
to lose when a sweep is killed."""

MOST_CELLS = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One configuration with one seed."""

    method: str
    upweighted: bool
    trial: int
    seed: int
    hyper: Mapping[str, float]

    @property
    def label(self) -> str:
        """The method as the tables show it."""
        return self.method + (UPWEIGHT if self.upweighted else "")


def plan(options: SweepOptions, *, available_rank: int, reporter: Reporter) -> list[Cell]:
    """All cells, by method, trial and seed.

    Raises
    ------
    UsageError
        Too many configurations.
    InputError
        No rank asked for is available.
    """
    methods, searches = options.chosen_methods, options.searches
    known = {hyper for name, _ in methods for hyper in METHODS[name].hyper}
    idle = [search.name for search in searches if search.name not in known]
    if idle:
        reporter.warn(f"no effect: --search {', '.join(idle)}, which none of the methods has")
    if options.methods and options.upweight and UPWEIGHT not in options.methods:
        reporter.note(f"--upweight is for all methods, since none is named NAME{UPWEIGHT}")
    cells = []
    for name, upweighted in methods:
        spaces = {
            hyper: _capped(
                space_of(name, hyper, searches, grid=options.grid), name, hyper, available_rank, reporter
            )
            for hyper in METHODS[name].hyper
        }
        settings = _combinations(name, spaces) if options.grid else _draws(spaces, options)
        cells += [
            Cell(method=name, upweighted=upweighted, trial=trial, seed=options.seed + i, hyper=hyper)
            for trial, hyper in enumerate(settings)
            for i in range(options.seeds)
        ]
        if len(cells) > MOST_CELLS:
            raise UsageError(
                f"more than {MOST_CELLS:,} configurations", fix="a smaller grid, or --trials without --grid"
            )
    return cells


def _capped(space: Space, method: str, hyper: str, available: int, reporter: Reporter) -> Space:
    """Ranks above the pairs' numerical rank are left out, with a note."""
    if hyper != "rank":
        return space
    capped = space.capped(available)
    if capped.empty or (space.values and not capped.values):
        raise InputError(
            "a rank above the pairs' numerical rank",
            found=f"rank={space.text} for {method}",
            expected=f"at most {available}",
            fix=f"--search rank=0:{available}, or more pairs",
        )
    if capped != space:
        reporter.note(f"ranks above {available}, the pairs' numerical rank, are left out of {space.text}")
    return capped


def _combinations(method: str, spaces: Mapping[str, Space]) -> list[dict[str, float]]:
    values = [space.grid(f"{method}, {name}") for name, space in spaces.items()]
    total = np.prod([float(len(part)) for part in values])
    if total > MOST_CELLS:
        raise UsageError(f"a grid of {total:,.0f} configurations for {method}", fix="fewer values")
    return [dict(zip(spaces, combination, strict=True)) for combination in itertools.product(*values)]


def _draws(spaces: Mapping[str, Space], options: SweepOptions) -> list[dict[str, float]]:
    """Random settings, each once.

    A hyper-parameter's range is cut into as many parts as there are trials, one draw in each, in random
    order. The draws depend on the hyper-parameter's name and the seed alone: methods that share one try
    the same values of it, and no method's depend on which others are swept.
    """
    columns = {}
    for name, space in spaces.items():
        rng = np.random.default_rng([options.seed, zlib.crc32(name.encode())])
        shares = (rng.permutation(options.trials) + rng.random(options.trials)) / options.trials
        columns[name] = [space.at(float(share), whole=HYPER[name].whole) for share in shares]
    rows = (tuple(columns[name][trial] for name in columns) for trial in range(options.trials))
    return [dict(zip(columns, row, strict=True)) for row in dict.fromkeys(rows)]


def chunks(cells: Sequence[Cell], logits: int) -> list[list[int]]:
    """Positions of the cells that are trained together: of one seed and one way of training."""
    families: dict[tuple[int, str], list[int]] = {}
    for i, cell in enumerate(cells):
        kind = cell.method if cell.method in ("dfr", "leace") else "trainer"
        families.setdefault((cell.seed, kind), []).append(i)
    size = max(1, CHUNK_LOGITS // logits)
    return [
        members[start : start + size]
        for members in families.values()
        for start in range(0, len(members), size)
    ]
