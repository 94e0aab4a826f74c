"""Options of ``ncm bound``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from ncm_cli.errors import UsageError
from ncm_cli.options import LIST, argument, option, parse_ranks, values_of
from ncm_cli.probes.options import PairPaths, refuse_same_store

_paths = functools.partial(option, None, group="Paths and comparisons")
_estimates = functools.partial(option, group="Estimates")


def parse_grid(text: str) -> tuple[int, ...]:
    """``0:40`` or ``5,10,20``: like `parse_ranks`, but without ``auto``."""
    grid = parse_ranks(text)
    if grid is None:
        raise UsageError("a grid is needed here", found=repr(text), expected="0:40, or 0:64:8, or 5,10,20")
    return grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """The options of ``ncm bound``."""

    probe: Path = argument(help="The probe whose test-domain risk is bounded.", role="input")
    features: Path = option(
        help="Feature store with the labels of the oracle pairs and the training rows.",
        role="input",
        flags=("-f",),
    )
    oracle_pairs: PairPaths = option(
        help="Pair store of test rows (a) and their twins in a training domain (b). May be repeated: the "
        "terms are over the pairs of all stores.",
        role="input",
    )
    pairs: PairPaths | None = option(
        None,
        help="The pairs that the probe was fitted with, for --ranks, --pair-counts and --clean-pairs. May be "
        "repeated: the flips of each store are then shown.",
        role="input",
        flags=("-p",),
    )
    clean_pairs: PairPaths | None = option(
        None,
        help="The same pairs without noise: adds the noise corollary. One store for each of --pairs, in "
        "their order.",
        role="input",
    )
    train: str | None = option(
        None,
        help="Take Term I on these rows of --features instead of on the twins.",
        metavar="WHERE",
    )
    output: Path | None = option(
        None,
        flags=("-o",),
        help="Write the result (.json) here.",
        role="output",
        metavar="FILE",
        writes=("bound",),
    )
    explain: bool = option(False, help="Say under each term what it means and when it is small.")

    spurious_dim: int | None = _estimates(
        None, least=0, help="|I|, the number of spurious dimensions, where it is known."
    )
    bootstrap: int = _estimates(200, least=0, help="Resamples for the 95 % intervals; 0 for none.")
    seed: int = _estimates(0, least=0, help="Seed of the resampling.")

    ranks: str | None = _paths(
        help="Refit with --pairs at each of these ranks, and give the bound at each: 0:40.",
        metavar="RANKS",
        parse=parse_grid,
        separator=LIST,
    )
    pair_counts: str | None = _paths(
        help="Refit with the first K of --pairs (the same share of each store), at rank min(K, the probe's "
        "rank), for each K: 5:100:5.",
        metavar="COUNTS",
        parse=parse_grid,
        separator=LIST,
    )
    oracle_train: str | None = _paths(
        help="ORACLE: also train on these rows of the test domain, to see what could be reached.",
        metavar="WHERE",
    )

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        for name in ("oracle_pairs", "pairs", "clean_pairs"):
            yield from refuse_same_store(getattr(self, name), f"--{name.replace('_', '-')}")
        stores = [len(values_of(paths)) for paths in (self.clean_pairs, self.pairs)]
        if 0 < stores[0] != stores[1] > 0:
            yield UsageError(
                "--clean-pairs isn't given once for each of --pairs",
                found="{} and {} stores".format(*stores),
                fix="--clean-pairs for each of --pairs, in the same order",
            )
        for name in ("ranks", "pair_counts", "clean_pairs"):
            if getattr(self, name) and not self.pairs:
                yield UsageError(
                    f"--{name.replace('_', '-')} needs --pairs",
                    expected="the pair store that the probe was fitted with",
                )
