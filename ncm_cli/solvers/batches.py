"""The rows that training steps use: batches of an epoch, and the training rows on the device.

Shapes: ``be`` is (rows of the batch, environments).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ncm_cli.blocks import Array, blocks, in_memory
from ncm_cli.errors import InputError
from ncm_cli.solvers.projection import complement
from ncm_cli.solvers.training_set import TrainingSet

MOST_READ = 8192
"""Rows that are read at once if features aren't in memory: 35 MB at width 512."""


Mixed = tuple[Tensor | None, Tensor]
"""Positions in a batch of the first (None: all, in order) and the second member of each mixed row."""


def generator_of(seed: int, stream: int) -> torch.Generator:
    """A separate generator for each (seed, stream), so that one use never shifts another."""
    generator = torch.Generator()
    generator.manual_seed(int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0]) >> 1)
    return generator


def epoch_order(strata: Tensor | None, n: int, generator: torch.Generator) -> Tensor:
    """A random order of ``n`` rows in which every stratum, by the codes ``strata`` (n,), is spread evenly.

    Each stratum is shuffled and its rows are laid out at even distances with a random offset each, so
    that any stretch of the order holds every environment in proportion (to one row or so). A plain
    shuffle would leave steps with no row of a small environment, and its risk undefined there.
    """
    shuffled = torch.randperm(n, generator=generator)
    if strata is None:
        return shuffled
    codes = strata[shuffled]
    by_stratum = torch.argsort(codes, stable=True)
    counts = torch.bincount(codes)
    starts = torch.cumsum(counts, 0) - counts
    sorted_codes = codes[by_stratum]
    rank_in_stratum = torch.arange(n) - starts[sorted_codes]
    jitter = torch.rand(n, generator=generator, dtype=torch.float64)
    position = (rank_in_stratum + jitter) / counts[sorted_codes]
    return shuffled[by_stratum[torch.argsort(position, stable=True)]]


def epoch_batches(
    strata: Tensor | None, n: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """The rows of each batch of an epoch that passes over every row once.

    A batch has at most ``batch_size`` rows (0: all rows); sizes differ by at most one.
    """
    order = epoch_order(strata, n, generator)
    count = 1 if batch_size <= 0 else math.ceil(n / batch_size)
    for i in range(count):
        yield order[i * n // count : (i + 1) * n // count]


def drawn_batches(
    strata: Tensor | None, n: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """DomainBed's batches: ``batch_size`` rows of each stratum, drawn with replacement, stratum by stratum.

    There are as many batches as are needed for ``n`` rows. ``batch_size`` 0: all rows, in order.
    """
    if batch_size <= 0:
        yield torch.arange(n)
        return
    members = (
        [torch.arange(n)] if strata is None else [(strata == e).nonzero()[:, 0] for e in strata.unique()]
    )
    for _ in range(math.ceil(n / (len(members) * batch_size))):
        yield torch.cat(
            [rows[torch.randint(len(rows), (batch_size,), generator=generator)] for rows in members]
        )


def partners(primary: Tensor, secondary: Tensor, draws: Tensor) -> Tensor:
    """(B,) for each row a random partner with the same ``primary`` and another ``secondary`` code (B,).

    ``draws`` (B,) are uniform in [0, 1). A row for which there is no such row is its own partner.
    """
    width = int(secondary.max()) + 1
    cells = primary * width + secondary
    order = torch.argsort(cells, stable=True)
    cell_counts = torch.bincount(cells, minlength=(int(primary.max()) + 1) * width)
    cell_starts = torch.cumsum(cell_counts, 0) - cell_counts
    own_size = cell_counts[cells]
    block = cell_counts.view(-1, width).sum(1)[primary]
    block_start = cell_starts.view(-1, width)[:, 0][primary]
    others = block - own_size
    pick = block_start + torch.minimum((draws * others).long(), (others - 1).clamp_min(0))
    pick = torch.where(pick >= cell_starts[cells], pick + own_size, pick)
    partner = order[pick.clamp_max(len(order) - 1)]
    return torch.where(others > 0, partner, torch.arange(len(order)))


class DeviceRows:
    """The training rows on the device, in float64, with what batches need.

    In float32 a gradient that should be zero (the bias's first one if classes are balanced) is rounding
    noise, which Adam turns into full steps; in float64 the noise is far below Adam's ε.
    """

    def __init__(self, training: TrainingSet, device: str) -> None:
        self.training, self.device = training, torch.device(device)
        self._features = in_memory(training.X)
        if not all(np.isfinite(rows).all() for _, rows in blocks(self._features)):
            raise InputError("the training features hold NaN or infinite values")
        self.n, self.dim = self._features.shape
        # Padded with zeros to a multiple of 16, with which matrix products are faster.
        self.width = -(-(self.dim + 1) // 16) * 16
        self.labels = torch.as_tensor(np.asarray(training.y), dtype=torch.int64)
        targets = (
            self._hot(self.labels, training.n_classes) if training.logits > 1 else self._column(training.y)
        )
        self.targets = targets[:, None, :]
        """(n, 1, C): 0 or 1 for a binary problem, else one-hot."""
        groupings = {
            "environments": training.codes.get("envs"),
            "dro": training.codes.get("dro_groups", training.codes.get("envs")),
        }
        self.codes = {
            name: torch.from_numpy(np.unique(codes, return_inverse=True)[1].reshape(-1))
            for name, codes in groupings.items()
            if codes is not None
        }
        if "environments" in self.codes and not self.codes["environments"].any():
            raise InputError("the training rows hold one environment only", expected="at least two")
        self.members = {name: self._hot(codes) for name, codes in self.codes.items()}
        """For each grouping, its parts (n, E), one-hot."""
        self.members["pooled"] = self._column(np.ones(self.n))
        self.weights = None if training.weights is None else self._column(training.weights)

    def _hot(self, codes: Tensor, width: int = -1) -> Tensor:
        return torch.nn.functional.one_hot(codes, width).to(self.device, torch.float64)

    def _column(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.float64)).to(self.device)[:, None]

    @property
    def strata(self) -> Tensor | None:
        """(n,) codes of the environments, which each batch holds in proportion; None without environments.

        Classes and groups are not spread: batches with every class in its exact share would remove the
        sampling noise of irm's and vrex's penalties. On ColoredMNIST's pixels irm's best test accuracy was
        .52 with classes spread and .70 without (published: .68).
        """
        return self.codes.get("environments")

    @cached_property
    def turn(self) -> Tensor | None:
        """(width, width) the rotation of weights, if rows aren't in memory and so aren't rotated."""
        if isinstance(self._features, np.ndarray):
            return None
        turn = torch.eye(self.width, dtype=torch.float64)
        turn[: self.dim, : self.dim] = torch.from_numpy(self.rotation)
        return turn.to(self.device)

    def read(self, chosen: Tensor, rotated: bool) -> Tensor:
        """(b, width) rows, as given or in coordinates [basis, complement], a 1 for the bias, and zeros."""
        if isinstance(self._features, np.ndarray):
            return (self._rotated if rotated else self._given).index_select(0, chosen.to(self.device))
        return self._padded(np.asarray(self._features[chosen.numpy()], np.float64))

    @cached_property
    def _given(self) -> Tensor:
        return self._padded(np.asarray(self._features[:], np.float64))

    @cached_property
    def _rotated(self) -> Tensor:
        return self._padded(self._features[:] @ self.rotation)

    @cached_property
    def rotation(self) -> Array:
        """(d, d) orthogonal: the basis, and a complement."""
        basis = self.training.basis(self.training.rank)
        return np.concatenate([basis, complement(basis)], axis=1)

    def _padded(self, features: Array) -> Tensor:
        padded = torch.zeros(len(features), self.width, dtype=torch.float64)
        padded[:, : self.dim] = torch.from_numpy(features)
        padded[:, self.dim] = 1
        return padded.to(self.device)


class Batch:
    """One step's rows, shared by all configurations of a seed; each part is computed when first used.

    Parameters
    ----------
    chosen
        (B,) int64 positions of the rows.
    mix, visit
        Generators for LISA's partners and for Fish's order of environments (None: in order).
    """

    def __init__(
        self, rows: DeviceRows, chosen: Tensor, mix: torch.Generator, visit: torch.Generator | None
    ) -> None:
        self._rows, self._chosen, self._mix, self._visit = rows, chosen, mix, visit
        self._on_device = chosen.to(rows.device)
        self._shares: dict[tuple[str, bool], Tensor] = {}
        self._whole: dict[bool, Tensor] = {}
        self.targets = rows.targets.index_select(0, self._on_device)
        """(B, 1, C), as in `DeviceRows`."""

    def features(self, rotated: bool = False, within: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Features of the batch, or of the rows ``within`` it; in parts if they aren't in memory."""
        rotated = rotated and self._rows.turn is None
        if self._rows.turn is None or len(self._chosen) <= MOST_READ:
            if rotated not in self._whole:
                self._whole[rotated] = self._rows.read(self._chosen, rotated)
            whole = self._whole[rotated]
            yield slice(0, None), whole if within is None else whole.index_select(0, within)
            return
        chosen = self._chosen if within is None else self._chosen[within.cpu()]
        for start in range(0, len(chosen), MOST_READ):
            part = slice(start, start + MOST_READ)
            yield part, self._rows.read(chosen[part], rotated)

    def shares(self, grouping: str, upweighted: bool) -> Tensor:
        """(B, E): each row's share in its part's risk; columns sum to 1, or to 0 for a part without rows in
        the batch.

        Groupings: ``pooled``, ``environments``, ``dro``, and ``halves`` (B, 2E): each environment's first,
        third, ... row in the batch, then the others.
        """
        key = grouping, upweighted
        if key not in self._shares:
            halved = grouping == "halves"
            members = self._rows.members["environments" if halved else grouping]
            members = members.index_select(0, self._on_device)
            if halved:
                first = members * (members.cumsum(0) % 2)
                members = torch.cat([first, members - first], 1)
            if upweighted:
                if self._rows.weights is None:
                    raise InputError("no row weights to upweight by")
                members = members * self._rows.weights.index_select(0, self._on_device)
            total = members.sum(0)
            self._shares[key] = members / torch.where(total > 0, total, torch.ones_like(total))
        return self._shares[key]

    @cached_property
    def mixing(self) -> tuple[float, Mixed, Mixed]:
        """LISA's draws: a number in [0, 1), each row's partner of the same label in another domain, and each
        row's partner of another label in the same domain.

        A configuration mixes within labels if the number is below its ``p_sel``, else within domains.
        """
        n, labels = len(self._chosen), self._rows.labels[self._chosen]
        draws, domains = (
            torch.rand(2 * n + 1, generator=self._mix),
            self._rows.codes["environments"][self._chosen],
        )
        return (
            float(draws[-1]),
            (None, partners(labels, domains, draws[:n])),
            (None, partners(domains, labels, draws[n:-1])),
        )

    @cached_property
    def visits(self) -> list[tuple[int, Tensor]]:
        """The environments in the order in which Fish visits them, each with its rows of the batch."""
        codes = self._rows.codes["environments"][self._chosen]
        count, generator = self._rows.members["environments"].shape[1], self._visit
        order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        visits = [(e, (codes == e).nonzero()[:, 0].to(self._rows.device)) for e in order.tolist()]
        return [(environment, members) for environment, members in visits if len(members)]


class CellBatch(Batch):
    """One step of LISA as its authors train it for subpopulation shifts: rows of every label × domain cell.

    Their code has two labels and two domains. It mixes the first row of a label's cell in one domain with the
    first row of its cell in the other domain (or of a domain's cells of both labels), the second row with the
    second, and so on, as long as both cells have rows in the batch. With more than two such cells, which
    their code doesn't allow for, cells are paired at random; if their number is odd, one is paired twice.

    Parameters
    ----------
    parts
        For each cell, the positions of its rows.
    labels, domains
        (cells,) codes of the cells.
    """

    def __init__(
        self, rows: DeviceRows, parts: list[Tensor], labels: Tensor, domains: Tensor, mix: torch.Generator
    ) -> None:
        super().__init__(rows, torch.cat(parts), mix, None)
        self._labels, self._domains = labels, domains
        ends = torch.tensor([len(part) for part in parts]).cumsum(0)
        self._positions = [
            torch.arange(int(end) - len(part), int(end)) for part, end in zip(parts, ends, strict=True)
        ]

    @cached_property
    def mixing(self) -> tuple[float, Mixed, Mixed]:
        """As in `Batch`, for the rows that are mixed; a cell without a counterpart is left out."""
        strategy = float(torch.rand(1, generator=self._mix))
        return strategy, self._pair(self._labels, "label"), self._pair(self._domains, "domain")

    def _pair(self, codes: Tensor, what: str) -> Mixed:
        """Pair the cells of equal codes."""
        firsts, seconds = [], []
        for code in codes.unique():
            cells = (codes == code).nonzero()[:, 0]
            if len(cells) > 2:
                cells = cells[torch.randperm(len(cells), generator=self._mix)]
            for a, b in zip(cells[0::2], [*cells[1::2], cells[0]], strict=False):
                if a != b:
                    first, second = self._positions[int(a)], self._positions[int(b)]
                    count = min(len(first), len(second))
                    firsts.append(first[:count])
                    seconds.append(second[:count])
        if not firsts:
            raise InputError(f"lisa finds no two label × environment cells with the same {what}")
        return torch.cat(firsts), torch.cat(seconds)


class CellDraws:
    """Draws the batches of LISA: ``batch_size`` / cells rows of each cell (0: all).

    Each cell's rows are drawn in random order without replacement, pass after pass; the last draw of a pass
    may have fewer rows.
    """

    def __init__(
        self, rows: DeviceRows, batch_size: int, draw: torch.Generator, mix: torch.Generator
    ) -> None:
        domains = rows.codes["environments"]
        cells, code = torch.stack([rows.labels, domains]).unique(dim=1, return_inverse=True)
        self._rows, self._draw, self._mix, self._cells = rows, draw, mix, cells
        self._members = [(code == cell).nonzero()[:, 0] for cell in range(cells.shape[1])]
        self._size = max(1, batch_size // len(self._members)) if batch_size > 0 else rows.n
        self._left = [members[:0] for members in self._members]

    def next(self) -> CellBatch:
        """The next batch."""
        parts = []
        for cell, members in enumerate(self._members):
            if not len(self._left[cell]):
                self._left[cell] = members[torch.randperm(len(members), generator=self._draw)]
            parts.append(self._left[cell][: self._size])
            self._left[cell] = self._left[cell][self._size :]
        labels, domains = self._cells
        return CellBatch(self._rows, parts, labels, domains, self._mix)
