"""The training rows as the trainer holds them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncm_cli.errors import InputError
from ncm_cli.methods.config import TrainData

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
        from ncm_cli.methods.projection import complement

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
