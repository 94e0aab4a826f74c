"""What validation rows, held-out pairs and test rows say of many probes at once, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncm_cli.methods.objectives import log_losses

Array = NDArray[np.float64]

METRICS = (
    "val_accuracy",
    "val_log_loss",
    "val_worst_group",
    "flip_rate",
    "bound_01",
    "log_loss_bound",
    "test_accuracy",
    "test_log_loss",
    "test_worst_group",
)
"""In the order of the tables; those that can't be known are NaN."""

BLOCK_ELEMENTS = 4_000_000
"""Logits held at once: 32 MB."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelledRows:
    """Rows with what they should be predicted as, and a group each if known."""

    features: Array
    """(n, d) float64, scaled."""
    targets: NDArray[np.int64]
    """(n,) class codes."""
    groups: NDArray[np.int64] | None = None
    """(n,) codes, gaps allowed."""


class Judge:
    """Computes `METRICS` for R probes.

    Parameters
    ----------
    n_classes
        2 means one logit.
    val, test
        Rows, or None.
    pairs
        Held-out pairs' members, (k, d) each, or None.
    """

    def __init__(
        self,
        n_classes: int,
        *,
        val: LabelledRows | None,
        pairs: tuple[Array, Array] | None = None,
        test: LabelledRows | None = None,
        device: str = "cpu",
    ) -> None:
        self._classes, self._device = n_classes, torch.device(device)
        self._val, self._test = (None if rows is None else self._held(rows) for rows in (val, test))
        self._pairs = None if pairs is None else tuple(self._tensor(member) for member in pairs)

    def _tensor(self, values: Array) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values, np.float64)).to(self._device)

    def _held(self, rows: LabelledRows) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features, targets (n, 1, C), and (n, G) one-hot groups."""
        codes = torch.from_numpy(np.asarray(rows.targets, np.int64))
        hot = codes[:, None] if self._classes == 2 else torch.nn.functional.one_hot(codes, self._classes)
        groups = None
        if rows.groups is not None:
            inverse = np.unique(rows.groups, return_inverse=True)[1].reshape(-1)
            groups = torch.nn.functional.one_hot(torch.from_numpy(inverse)).to(self._device, torch.float64)
        return (
            self._tensor(rows.features),
            hot[:, None].to(self._device, torch.float64),
            groups,
        )

    def judge(self, weight: Tensor, bias: Tensor) -> dict[str, Array]:
        """Each of `METRICS` as float64 (R,).

        Parameters
        ----------
        weight, bias
            float64 (R, C, d) and (R, C) on the judge's device.
        """
        found = dict.fromkeys(METRICS, torch.full((len(weight),), torch.nan, dtype=torch.float64))
        for name, rows in (("val", self._val), ("test", self._test)):
            if rows is not None:
                for part, values in zip(
                    ("accuracy", "log_loss", "worst_group"), self._rows(weight, bias, rows), strict=True
                ):
                    if values is not None:
                        found[f"{name}_{part}"] = values
        if self._pairs is not None:
            flips, drift = self._flips(weight, bias)
            lipschitz = 1.0 if weight.shape[1] == 1 else 2**0.5
            found["flip_rate"] = flips
            found["bound_01"] = 1 - found["val_accuracy"].to(flips.device) + flips
            found["log_loss_bound"] = found["val_log_loss"].to(flips.device) + lipschitz * drift
        return {name: values.cpu().numpy().copy() for name, values in found.items()}

    def _blocks(self, rows: int, weight: Tensor) -> Iterator[slice]:
        size = max(1, BLOCK_ELEMENTS // (weight.shape[0] * weight.shape[1]))
        return (slice(start, start + size) for start in range(0, rows, size))

    def _rows(
        self, weight: Tensor, bias: Tensor, rows: tuple[Tensor, Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        features, targets, groups = rows
        right = torch.zeros(len(weight), dtype=torch.float64, device=self._device)
        loss = torch.zeros_like(right)
        by_group = None if groups is None else right.new_zeros(groups.shape[1], len(weight))
        for block in self._blocks(len(features), weight):
            z = _logits(features[block], weight, bias)
            correct = _correct(z, targets[block]).to(torch.float64)
            right += correct.sum(0)
            loss += log_losses(z, targets[block]).sum(0)
            if by_group is not None and groups is not None:
                by_group += groups[block].T @ correct
        worst = None
        if by_group is not None and groups is not None:
            worst = (by_group / groups.sum(0)[:, None]).amin(0)
        return right / len(features), loss / len(features), worst

    def _flips(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Flip rate (R,), and the root mean square of ‖Wδ‖ (R,)."""
        assert self._pairs is not None
        a, b = self._pairs
        flips = torch.zeros(len(weight), dtype=torch.float64, device=self._device)
        squares = torch.zeros_like(flips)
        for block in self._blocks(len(a), weight):
            z_a, z_b = _logits(a[block], weight, bias), _logits(b[block], weight, bias)
            flips += (_decided(z_a) != _decided(z_b)).to(torch.float64).sum(0)
            squares += (z_a - z_b).pow_(2).sum((0, 2))
        return flips / len(a), (squares / len(a)).sqrt()


def _logits(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(n, R, C)."""
    count, logits, dim = weight.shape
    flat = torch.addmm(bias.reshape(-1), features, weight.reshape(-1, dim).T)
    return flat.view(len(features), count, logits)


def _decided(logits: Tensor) -> Tensor:
    """(n, R) class codes: class 1 where one logit is above 0, else the largest."""
    return (logits[..., 0] > 0).long() if logits.shape[-1] == 1 else logits.argmax(-1)


def _correct(logits: Tensor, targets: Tensor) -> Tensor:
    codes = targets[..., 0].long() if logits.shape[-1] == 1 else targets.argmax(-1)
    return _decided(logits) == codes
