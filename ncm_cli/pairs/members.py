"""Pairs as positions of their members in feature stores."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Mask
from ncm_cli.solvers.folds import components
from ncm_cli.store.rows import FeatureRows

Positions = NDArray[np.int64]
Stores = tuple[FeatureRows, FeatureRows]


@dataclasses.dataclass(frozen=True)
class Members:
    """Positions of both members of k pairs in their stores."""

    stores: Stores
    """The stores of the first and of the second members; the same object twice if it is one store."""
    a: Positions
    b: Positions
    holdout: Mask | None = None
    """(k,) which pairs are held out; None until that is chosen."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The strategy's report, for the diagnostics."""
    straddlers: tuple[tuple[str, str], ...] = ()
    """Ids of the pairs of a training and a test row, left out or not."""
    dropped: tuple[tuple[str, str], ...] = ()
    """Ids of the pairs that ``--drop`` left out."""
    nodes: Positions | None = None
    """(N,) for pairs in one store: rows with the same number count as one. None: each row by itself."""

    def __len__(self) -> int:
        return len(self.a)

    def ids(self, which: Any = slice(None)) -> list[tuple[str, str]]:
        """Both ids of the pairs in a mask or at positions."""
        ids_a, ids_b = (store.ids for store in self.stores)
        return [(ids_a[i], ids_b[j]) for i, j in zip(self.a[which], self.b[which], strict=True)]

    def take(self, keep: Mask) -> Members:
        """The pairs in a mask."""
        held = None if self.holdout is None else self.holdout[keep]
        return dataclasses.replace(self, a=self.a[keep], b=self.b[keep], holdout=held)

    def components(self) -> Positions:
        """(k,) a number for each set of pairs that are connected by shared ids.

        An id names the same thing in both stores: an augmented view has the ids of its originals.
        """
        first, second = self.stores
        if self.nodes is not None:
            return components(self.nodes[self.a], self.nodes[self.b])
        if first is second:
            return components(self.a, self.b)
        in_first = first.positions(second.ids[self.b])
        return components(self.a, np.where(in_first < 0, first.rows + self.b, in_first))


def repeated(a: Positions, b: Positions, *, either_way: bool) -> Mask:
    """(k,) pairs that repeat an earlier one, also the other way round with ``either_way``."""
    keys = np.stack([np.minimum(a, b), np.maximum(a, b)]) if either_way else np.stack([a, b])
    repeats = np.ones(len(a), dtype=bool)
    repeats[np.unique(keys, axis=1, return_index=True)[1]] = False
    return repeats
