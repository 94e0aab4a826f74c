"""The rows and directions that probes are fitted on, and the fitted probe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Array, Codes, Features
from ncm_cli.solvers.projection import Scaling, Spectrum


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSet:
    """Scaled rows to train on, X (n, d) and y (n,), and the spectrum of the pairs that span the basis.

    ``y`` are class codes 0..n_classes − 1, or values. ``weights`` (n,) weight every group equally in
    up-weighted training. ``codes`` are as in `RawRows`: ``envs`` for environments, and ``dro_groups`` for
    groupdro's groups if they differ. ``pairs`` is the number of pairs that span the basis; without pairs
    ``spectrum`` is None.
    """

    X: Features
    y: NDArray[Any]
    n_classes: int
    scaling: Scaling = Scaling()
    weights: Array | None = None
    codes: Mapping[str, Codes] = dataclasses.field(default_factory=dict)
    spectrum: Spectrum | None = None
    pairs: int = 0

    @property
    def logits(self) -> int:
        """C: one logit for two classes, or for values."""
        return self.n_classes if self.n_classes > 2 else 1

    @property
    def moments(self) -> Array:
        """(rank,) mean over pairs of (basisᵀδ)² = σ²/k, which matchdg penalises."""
        return (
            np.zeros(0)
            if self.spectrum is None
            else self.spectrum.singular_values[: self.rank] ** 2 / self.pairs
        )

    @property
    def rank(self) -> int:
        """The numerical rank of the pairs; 0 without pairs."""
        return self.spectrum.rank if self.spectrum else 0

    def basis(self, rank: int | None = None) -> Array:
        """(d, rank) the first ``rank`` directions of the pairs, by default all; (d, 0) without pairs."""
        return np.zeros((self.X.shape[1], 0)) if self.spectrum is None else self.spectrum.basis[:, :rank]


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """One fitted probe: part of an exact path, or trained by steps."""

    rank: int
    weight_decay: float
    weight: Array
    """float64 (C, d), orthogonal to the first ``rank`` directions; C = 1 for two classes and regression."""
    bias: Array
    """float64 (C,)."""
    converged: bool = True
    """Whether the gradient norm met the tolerance; for a probe trained by steps, whether it is finite."""
    iterations: int = 0
    gradient_norm: float = float("nan")
    """Euclidean norm of the gradient of the mean loss plus penalty; NaN if it wasn't measured."""
