"""MatchDG's alternation on frozen features: match, fit a representation, match again.

Mahajan, Tople, Sharma (2021), Domain generalization using causal matching, Algorithm 1, phase I.
There a network is trained with a contrastive loss on the matches and the matches are renewed by
nearest neighbours in it. Here the features stay frozen and the representation is linear, so each
fit has a closed form:

1. Within each class the domain with the most rows is the base. Every row of it gets one match in each other
   domain, at random at first (as there).
2. The representation f(x) = Bᵀ Σ^{-1/2} (x − mean) minimises the spectral contrastive loss
   −2 E[f(x)ᵀ f(x⁺)] + E[(f(x)ᵀ f(x'))²] (HaoChen et al. 2021, Provable guarantees for self-supervised deep
   learning with spectral contrastive loss, eq. 6) over matched (x, x⁺) and unrelated (x, x'): B Bᵀ
   is the best positive approximation, of rank ``dims``, of Σ^{-1/2} C Σ^{-1/2}, where Σ is the
   covariance of the matched rows and C the symmetrised cross-covariance of the matches. Directions
   in which matched rows are alike are kept, and those that differ between domains have negative
   eigenvalues and drop out.
3. Every base row is matched with the nearest row of its class in each other domain, in f. Back to 2, until at
   most `CHANGED` of the matches change or ``rounds`` is reached.

No step is random but the first matching.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods.matching import Pool, Positions
from ncm_cli.methods.neighbours import Float32, nearest_rows, prepare

Array = NDArray[np.float64]

CHANGED = 0.01
"""Share of matches that may still change when the alternation counts as converged."""

RIDGE = 1e-3
"""Added to Σ as a share of its mean eigenvalue: with fewer rows than dimensions Σ has no inverse,
and in directions of next to no variance two rows agree by chance."""

BLOCK = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternation:
    """Settings: the distance in the representation, the most rounds, and its dimensions.

    Few dimensions are better: random matches within a class can only show what the class decides (one
    direction fewer than classes). Any further direction starts as chance, and matching by it confirms it.
    """

    metric: str = "euclidean"
    rounds: int = 10
    dims: int = 2


@dataclasses.dataclass(frozen=True)
class Matched:
    """The last matches, and how the alternation went."""

    a: Positions
    b: Positions
    changed: tuple[float, ...]
    """Share of the matches that changed in each round."""
    converged: bool
    mean: Array
    weight: Array
    """(d, m): the representation is (x − mean) @ weight."""
    settings: Alternation

    def match(self, features: Float32, pool: Pool) -> tuple[Positions, Positions]:
        """Match other rows in the representation found, base rows with each other domain as before."""
        a, b = _nearest(embed(features, self.mean, self.weight), pool, self.settings.metric)
        return _oriented(a, b, pool)


def alternate(
    features: Float32,
    pool: Pool,
    settings: Alternation,
    rng: np.random.Generator,
    advance: Callable[[int], None] | None = None,
) -> Matched:
    """Run the alternation on (n, d) features; ``pool`` says which rows may be matched.

    ``advance`` is called with 1 after each round.
    """
    a, b = _at_random(pool, rng)
    changed: list[float] = []
    mean, weight = fit(features, a, b, settings.dims)
    for _ in range(settings.rounds if len(a) else 0):
        new_a, new_b = _nearest(embed(features, mean, weight), pool, settings.metric)
        # Both list the same base rows and domains in the same order.
        changed.append(float((new_b != b).mean()))
        a, b = new_a, new_b
        if advance:
            advance(1)
        if changed[-1] <= CHANGED:
            break
        mean, weight = fit(features, a, b, settings.dims)
    converged = not changed or changed[-1] <= CHANGED
    a, b = _oriented(a, b, pool)
    return Matched(a, b, tuple(changed), converged, mean, weight, settings)


def _bases(pool: Pool) -> Iterator[tuple[Positions, list[Positions]]]:
    """For each class, its largest cell that can be matched, and the cells it is matched with."""
    matchable = pool.most_pairs() > 0
    for group in itertools.compress(pool.cells(), matchable):
        for base in sorted(group, key=len, reverse=True):
            others = [cell for cell in group if (cell is not base) and pool.compatible(base, cell)]
            if others:
                yield base, others
                break


def _at_random(pool: Pool, rng: np.random.Generator) -> tuple[Positions, Positions]:
    left, right = [], []
    for base, others in _bases(pool):
        for other in others:
            left.append(base)
            right.append(other[rng.integers(len(other), size=len(base))])
    return _joined(left), _joined(right)


def _nearest(embedded: Float32, pool: Pool, metric: str) -> tuple[Positions, Positions]:
    rows = prepare(embedded, metric)
    left, right = [], []
    for base, others in _bases(pool):
        for other in others:
            left.append(base)
            right.append(nearest_rows(rows, base, other, metric)[0])
    return _joined(left), _joined(right)


def _oriented(a: Positions, b: Positions, pool: Pool) -> tuple[Positions, Positions]:
    """With two stores, members of the first store first."""
    if not pool.two_sided or not len(a):
        return a, b
    swap = pool.side[a] == 1
    return np.where(swap, b, a), np.where(swap, a, b)


def fit(features: Float32, a: Positions, b: Positions, dims: int) -> tuple[Array, Array]:
    """The linear representation of the matches: mean (d,) and weight (d, m), m at most ``dims``.

    m is 1 at least, even if no direction is alike in matched rows.
    """
    d = features.shape[1]
    if not len(a):
        return np.zeros(d), np.eye(d)[:, : min(dims, d)]
    mean = np.zeros(d)
    for start in range(0, len(a), BLOCK):
        block = slice(start, start + BLOCK)
        mean += features[a[block]].sum(axis=0, dtype=np.float64)
        mean += features[b[block]].sum(axis=0, dtype=np.float64)
    mean /= 2 * len(a)
    total, cross = np.zeros((d, d)), np.zeros((d, d))
    for start in range(0, len(a), BLOCK):
        x = features[a[start : start + BLOCK]] - mean
        y = features[b[start : start + BLOCK]] - mean
        total += x.T @ x + y.T @ y
        cross += x.T @ y
    total /= 2 * len(a)
    cross = (cross + cross.T) / (2 * len(a))
    ridge = RIDGE * np.trace(total) / d
    values, vectors = np.linalg.eigh(total)
    # All rows equal: any scale does, and 1 avoids dividing by zero.
    root = vectors / np.sqrt(np.maximum(values, 0) + (ridge or 1.0)) @ vectors.T
    alike, directions = np.linalg.eigh(root @ cross @ root)
    kept = max(1, min(dims, int((alike > 0).sum())))
    top = directions[:, ::-1][:, :kept]
    return mean, root @ top * np.sqrt(np.maximum(alike[::-1][:kept], 0))


def embed(features: Float32, mean: Array, weight: Array) -> Float32:
    """(n, m) float32 representation of (n, d) features, block by block."""
    out = np.empty((len(features), weight.shape[1]), dtype=np.float32)
    for start in range(0, len(features), BLOCK):
        out[start : start + BLOCK] = (features[start : start + BLOCK] - mean) @ weight
    return out


def _joined(parts: list[Positions]) -> Positions:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
