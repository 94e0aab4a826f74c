"""Mini-batches in an order that a seed decides, and the draws that LISA makes on them.

The order depends on the seed and the data alone, never on a configuration: configurations of one seed
see the same rows at the same step, and so share their matrix products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def generator_of(seed: int, stream: int) -> torch.Generator:
    """A generator of its own for each (seed, stream), so that one use never shifts another."""
    made = torch.Generator()
    made.manual_seed(int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> 1))
    return made


def epoch_order(strata: Tensor | None, n: int, generator: torch.Generator) -> Tensor:
    """A random order of ``n`` rows in which every stratum is spread evenly.

    Each stratum is shuffled and its rows are laid out at even distances with a random offset each, so
    that any stretch of the order holds every environment in proportion (to one row or so). A plain
    shuffle would leave steps with no row of a small environment, and its risk undefined there.

    Parameters
    ----------
    strata
        (n,) int64 codes from 0, or None for a plain shuffle.

    Returns
    -------
    Tensor
        (n,) int64 positions.
    """
    shuffled = torch.randperm(n, generator=generator)
    if strata is None:
        return shuffled
    codes = strata[shuffled]
    by_stratum = torch.argsort(codes, stable=True)
    counts = torch.bincount(codes)
    starts = torch.cumsum(counts, 0) - counts
    sorted_codes = codes[by_stratum]
    place = torch.arange(n) - starts[sorted_codes]
    jitter = torch.rand(n, generator=generator, dtype=torch.float64)
    position = (place + jitter) / counts[sorted_codes]
    return shuffled[by_stratum[torch.argsort(position, stable=True)]]


def epoch_batches(
    strata: Tensor | None, n: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """The rows of each batch of an epoch that passes over every row once."""
    order = epoch_order(strata, n, generator)
    for start, end in batch_bounds(n, batch_size):
        yield order[start:end]


def drawn_batches(
    strata: Tensor | None, n: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """DomainBed's: ``batch_size`` rows of each stratum, drawn with replacement, one stratum after another.

    As many batches as hold ``n`` rows. ``batch_size`` 0 is all rows in their order.
    """
    if batch_size <= 0:
        yield torch.arange(n)
        return
    members = (
        [torch.arange(n)] if strata is None else [(strata == e).nonzero()[:, 0] for e in strata.unique()]
    )
    for _ in range(math.ceil(n / (len(members) * batch_size))):
        yield torch.cat([own[torch.randint(len(own), (batch_size,), generator=generator)] for own in members])


def batch_bounds(n: int, batch_size: int) -> list[tuple[int, int]]:
    """Start and end of the batches of an epoch: at most ``batch_size`` rows, sizes equal to one row.

    ``batch_size`` 0 is the full batch.
    """
    count = 1 if batch_size <= 0 else math.ceil(n / batch_size)
    return [(i * n // count, (i + 1) * n // count) for i in range(count)]


def partners(primary: Tensor, secondary: Tensor, draws: Tensor) -> Tensor:
    """For each row, a random row with the same ``primary`` code and another ``secondary`` code.

    Rows that have no such partner are their own.

    Parameters
    ----------
    primary, secondary
        (B,) int64 codes.
    draws
        (B,) uniform in [0, 1).

    Returns
    -------
    Tensor
        (B,) int64 row numbers.
    """
    width = int(secondary.max()) + 1
    cells = primary * width + secondary
    order = torch.argsort(cells, stable=True)
    cell_counts = torch.bincount(cells, minlength=(int(primary.max()) + 1) * width)
    cell_starts = torch.cumsum(cell_counts, 0) - cell_counts
    own = cell_counts[cells]
    block = cell_counts.view(-1, width).sum(1)[primary]
    block_start = cell_starts.view(-1, width)[:, 0][primary]
    others = block - own
    pick = block_start + torch.minimum((draws * others).long(), (others - 1).clamp_min(0))
    pick = torch.where(pick >= cell_starts[cells], pick + own, pick)
    found = order[pick.clamp_max(len(order) - 1)]
    return torch.where(others > 0, found, torch.arange(len(order)))


@dataclasses.dataclass(slots=True)
class Mixing:
    """One step's draws for LISA: strategy and partners, and a way to draw mixing weights."""

    strategy: float
    """Uniform in [0, 1): a configuration mixes within labels where it is below its ``p_sel``."""
    intra_label: Tensor
    """(B,) rows of the same label in another domain."""
    intra_domain: Tensor
    """(B,) rows of the same domain with another label."""
