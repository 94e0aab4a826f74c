"""What rows and pairs say of many linear probes at once, in float64.

Everything that is known of a candidate, wherever it was trained, comes from here: errors and losses of
labelled rows, and what a pair's two members are told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.methods import metrics

Array = NDArray[np.float64]
Codes = NDArray[np.int64]

BLOCK_ELEMENTS = 4_000_000
"""Logits held at once: 32 MB."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Scaled features (n, d) with what they should be predicted as.

    ``y`` (n,) holds class codes, or float targets for regression; ``group`` (n, crossings) a group of each
    crossing for each row, −1 for none.
    """

    X: Array
    y: NDArray[Any]
    group: Codes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairRows:
    """Scaled features of both members of m pairs, (m, d) each."""

    a: Array
    b: Array


def row_errors(weight: Array, bias: Array, rows: Rows) -> tuple[Array, Array]:
    """(errors (R, n), losses (R, n)) of R probes.

    Errors are 0 or 1, losses log losses in nats; for regression both are squared errors.

    Parameters
    ----------
    weight : float64 (R, C, d)
    bias : float64 (R, C)
    """
    errors, losses = (np.empty((len(weight), len(rows.X))) for _ in range(2))
    regression = rows.y.dtype.kind == "f"
    for own, logits in _logits(weight, bias, rows.X):
        if regression:
            losses[own] = errors[own] = ((logits[..., 0] - rows.y[:, None]) ** 2).T
        else:
            losses[own] = metrics.row_log_loss(logits, rows.y).T
            errors[own] = (metrics.decide(logits) != rows.y[:, None]).T
    return errors, losses


def pair_shifts(weight: Array, bias: Array, pairs: PairRows, *, regression: bool) -> tuple[Array, Array]:
    """(changes (R, m), shifts (R, m)) of R probes over m pairs.

    A change is 1 where the two members are predicted differently, for regression the squared difference of
    the predictions. A shift is ``|W delta|^2``, the squared distance of the members' logits.
    """
    changes, shifts = (np.empty((len(weight), len(pairs.a))) for _ in range(2))
    both = np.concatenate([pairs.a, pairs.b])
    for own, logits in _logits(weight, bias, both):
        a, b = logits[: len(pairs.a)], logits[len(pairs.a) :]
        with np.errstate(over="ignore"):  # a probe that is about to diverge has infinite shifts
            shifts[own] = ((a - b) ** 2).sum(axis=2).T
        changes[own] = shifts[own] if regression else (metrics.decide(a) != metrics.decide(b)).T
    return changes, shifts


def _logits(weight: Array, bias: Array, X: Array) -> Iterator[tuple[slice, Array]]:
    """Logits (n, r, C) of blocks of probes."""
    count, logits, dim = weight.shape
    step = max(1, BLOCK_ELEMENTS // max(1, len(X) * logits))
    for start in range(0, count, step):
        own = slice(start, min(start + step, count))
        flat = X @ weight[own].reshape(-1, dim).T + bias[own].reshape(-1)
        yield own, flat.reshape(len(X), -1, logits)
