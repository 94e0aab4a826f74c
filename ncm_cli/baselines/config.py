"""One configuration of the batched trainer, how it is trained, and on what.

The training rows as the trainer holds them.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncm_cli.baselines.options import HYPER, METHODS, PROTOCOLS
from ncm_cli.errors import InputError, UsageError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A method and its hyper-parameters; those that the method doesn't have are ignored.

    A value outside the range that `ncm_cli.baselines.options.HYPER` gives raises `UsageError`.
    """

    method: str = "erm"
    seed: int = 0
    """Decides the order of the rows and every draw."""
    lr: float = 1e-3
    weight_decay: float = 1e-4
    """λ of mean loss + (λ/2)‖W‖²."""
    rank: int = 0
    """Leading columns of the basis that the weights of ``ncm`` may not use."""
    penalty: float = 1.0
    anneal: int = 0
    """Steps before ``penalty`` replaces 1."""
    eta: float = 1e-2
    meta_lr: float = 0.5
    p_sel: float = 0.5
    alpha: float = 2.0
    upweighted: bool = False
    """Whether rows count by ``TrainData.row_weights``."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"no method named {self.method!r}", expected=" | ".join(METHODS))
        for name, hyper in HYPER.items():
            if name in self.__slots__:
                hyper.check(name, getattr(self, name))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How all configurations of a run are trained.

    Notes
    -----
    The protocol says in whose form the methods are trained, and so what a published setting means.

    - ``papers``: each method's objective and steps as its own authors wrote them. irm (Arjovsky et al. 2019)
      and vrex (Krueger et al. 2021) divide their objective by a penalty above 1; irm squares the slope on the
      whole batch; fish (Shi et al. 2022) visits environments in random order. For all methods alike, as in
      ``ncm fit``: two classes have one logit (as in irm's code; settings of two convert, see below), the bias
      isn't decayed (irm's code decays it), and an epoch passes over every row once, each batch holding the
      environments in proportion.
    - ``domainbed``: DomainBed's form of erm, irm, vrex, groupdro and fish (Gulrajani and Lopez-Paz 2021).
      Two classes have two logits and softmax. The bias is decayed as the weights are. Nothing is divided: a
      configuration's optimiser starts anew at the step where its penalty begins. irm multiplies the slopes on
      the even and on the odd rows of each environment. fish visits environments in order. A batch holds
      ``batch_size`` rows of *each* environment, drawn with replacement; an epoch is as many batches as hold n
      rows. What DomainBed doesn't have (ncm, lisa, matchdg, leace) takes its logits, optimiser and batches.
      Weights start at zero here, at random there.

    Two logits with (lr, λ) equal one logit with (2·lr, λ/2): from zero, w₁ = −w₀ = w/2 all along, and w₁ has
    the gradient, decay included, that w has with λ/2; so w moves twice as far, by SGD and by Adam alike (a
    penalty on pairs halves as λ does). ``domainbed`` is computed so, and probes have one logit either way. A
    setting published for two logits is converted so for ``papers``.
    """

    epochs: int = 100
    batch_size: int = 256
    """0: the full batch."""
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: float = 0.0
    """Of ``sgd``."""
    protocol: Literal["papers", "domainbed"] = "papers"

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UsageError(f"{self.epochs} epochs", expected="at least 1")
        if self.batch_size < 0:
            raise UsageError(f"a batch size of {self.batch_size}", expected="1 or more, or 0 for all rows")
        if self.protocol not in PROTOCOLS:
            raise UsageError(f"no protocol named {self.protocol!r}", expected=" | ".join(PROTOCOLS))

    @property
    def domainbed(self) -> bool:
        """Whether the form is DomainBed's."""
        return self.protocol == "domainbed"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainData:
    """The training rows, as numpy arrays."""

    features: Any
    """(n, d) floats."""
    targets: Any
    """(n,) class codes 0..n_classes − 1."""
    n_classes: int
    environments: Any = None
    """(n,) codes 0..E − 1, needed by irm, vrex, groupdro, fish and lisa."""
    dro_groups: Any = None
    """(n,) codes of the groups of groupdro; the environments where left out."""
    row_weights: Any = None
    """(n,) weights of upweighted configurations."""
    basis: Any = None
    """(d, m) orthonormal columns: left singular vectors of the pairs' differences, strongest first."""
    pair_moments: Any = None
    """(m,) mean over pairs of (basisᵀδ)² = σ²/k: what matchdg penalises."""

    def __post_init__(self) -> None:
        n = len(self.features)
        for name in ("targets", "environments", "dro_groups", "row_weights"):
            value = getattr(self, name)
            if value is not None and len(value) != n:
                raise InputError(f"{name} has {len(value):,} entries for {n:,} rows")
        if not n:
            raise InputError("no training rows")
        if self.n_classes < 2:
            raise InputError("the training rows hold one class only", expected="at least two classes")
        if self.environments is not None and len(np.unique(self.environments)) < 2:
            raise InputError("the training rows hold one environment only", expected="at least two")

    @property
    def logits(self) -> int:
        """C: one logit for two classes."""
        return 1 if self.n_classes == 2 else self.n_classes


ALIGNMENT = 16
"""Columns are padded to a multiple of this with zeros, which matrix products like."""


class Problem:
    """The training rows on the device, in float64, with what batches need.

    In float32 the rounding of a gradient that should be zero (the bias's first one, where classes are
    balanced) is noise of which Adam makes full steps; in float64 it drowns in Adam's ε.
    """

    def __init__(self, data: TrainData, device: str) -> None:
        self.data, self.device = data, torch.device(device)
        self._features = np.asarray(data.features, np.float64)
        if not np.isfinite(self._features).all():
            raise InputError("the training features hold NaN or infinite values")
        self.n, self.dim = self._features.shape
        self.width = -(-(self.dim + 1) // ALIGNMENT) * ALIGNMENT
        self.targets = torch.as_tensor(np.asarray(data.targets), dtype=torch.int64)
        hot = (
            self.targets[:, None]
            if data.logits == 1
            else torch.nn.functional.one_hot(self.targets, data.n_classes)
        )
        self.targets_hot = hot[:, None, :].to(self.device, torch.float64)
        groupings = {
            "environments": data.environments,
            "dro": data.environments if data.dro_groups is None else data.dro_groups,
        }
        self.codes = {
            name: torch.from_numpy(np.unique(np.asarray(codes), return_inverse=True)[1].astype(np.int64))
            for name, codes in groupings.items()
            if codes is not None
        }
        self.parts = {"pooled": 1, **{name: int(codes.max()) + 1 for name, codes in self.codes.items()}}
        self._members = {
            name: torch.nn.functional.one_hot(codes).to(self.device, torch.float64)
            for name, codes in self.codes.items()
        }
        self._members["pooled"] = torch.ones(self.n, 1, device=self.device, dtype=torch.float64)
        self._weights = (
            None
            if data.row_weights is None
            else torch.as_tensor(np.asarray(data.row_weights, np.float64)).to(self.device)[:, None]
        )
        self.strata = self._strata()

    @cached_property
    def given(self) -> Tensor:
        """(n, width) rows in the given coordinates, then 1 for the bias, then zeros."""
        return self._padded(self._features)

    @cached_property
    def rotated(self) -> Tensor:
        """(n, width) the same with the coordinates [basis, complement]."""
        return self._padded(self._features @ self.rotation)

    @cached_property
    def rotation(self) -> NDArray[np.float64]:
        """(d, d) orthogonal: the basis, and a complement."""
        from ncm_cli.probes.projection import complement

        basis = np.asarray(self.data.basis, np.float64)
        return np.concatenate([basis, complement(basis)], axis=1)

    def _padded(self, features: NDArray[np.float64]) -> Tensor:
        padded = torch.zeros(self.n, self.width, dtype=torch.float64)
        padded[:, : self.dim] = torch.from_numpy(features)
        padded[:, self.dim] = 1
        return padded.to(self.device)

    def _strata(self) -> Tensor | None:
        """(n,) codes of the environment; None without.

        Classes and groups are not spread: batches with every class in its exact share take away the sampling
        noise of irm's and vrex's penalties. On ColoredMNIST's pixels irm's best test accuracy was then .52,
        and .70 without, where .68 is published.
        """
        return self.codes.get("environments")

    def shares(self, rows: Tensor, grouping: str, upweighted: bool) -> Tensor:
        """(B, E): each row's share in its part's risk.

        ``halves`` are (B, 2E): each environment's first, third, ... row in the batch, then the others.
        """
        halved = grouping == "halves"
        members = self._members["environments" if halved else grouping].index_select(0, rows)
        if halved:
            first = members * (members.cumsum(0) % 2)
            members = torch.cat([first, members - first], 1)
        if upweighted:
            if self._weights is None:
                raise InputError("no row weights to upweight by")
            members = members * self._weights.index_select(0, rows)
        total = members.sum(0)
        return members / torch.where(total > 0, total, torch.ones_like(total))

    def unrotate(self, weight: Tensor) -> Tensor:
        """(..., d) weights of rotated rows in the given coordinates."""
        return weight @ torch.from_numpy(self.rotation).T.to(weight.device)
