"""The methods and their hyper-parameters, as plain data: what they need, their ranges, what is searched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from ncm_cli.errors import UsageError

PROTOCOLS = ("papers", "domainbed")
"""Whose form of the baselines: see `ncm_cli.methods.config.Schedule`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hyper:
    """One hyper-parameter."""

    space: str
    """What is searched at random where ``--search`` doesn't say."""
    grid: str
    """What ``--grid`` tries where ``--search`` doesn't say."""
    help: str
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    """Whether ``low`` itself is excluded."""
    whole: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise `UsageError` for a value outside the range."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        inside = number and (value > self.low if self.open_low else value >= self.low) and value <= self.high
        if not inside or (self.whole and value != int(value)):
            bracket = "(" if self.open_low else "["
            kind = "a whole number" if self.whole else "a number"
            raise UsageError(
                f"{name} can't be {value!r}", expected=f"{kind} in {bracket}{self.low:g}, {self.high:g}]"
            )


HYPER: dict[str, Hyper] = {
    "lr": Hyper(space="log:1e-5:1e-2", grid="1e-3", open_low=True, help="learning rate"),
    "weight_decay": Hyper(space="log:1e-4:1e-2", grid="1e-4", help="λ of the objective's (λ/2)‖W‖²"),
    "rank": Hyper(space="2:24", grid="2:24", whole=True, help="dimensions removed"),
    "penalty": Hyper(
        space="log:1:1e5", grid="log:1:1e5:6", help="weight of the penalty of irm, vrex and matchdg"
    ),
    "anneal": Hyper(
        space="50:250", grid="100", whole=True, help="steps before the penalty of irm and vrex counts"
    ),
    "eta": Hyper(space="log:1e-4:1e-1", grid="log:1e-4:1e-1:4", help="step size of groupdro's group weights"),
    "meta_lr": Hyper(
        space="log:1e-3:1", grid="0.01,0.1,0.5", open_low=True, help="step of fish towards its inner weights"
    ),
    "p_sel": Hyper(
        space="0,0.5,1", grid="0,0.5,1", high=1.0, help="probability that lisa mixes within labels"
    ),
    "alpha": Hyper(
        space="2", grid="2", open_low=True, help="lisa mixes with weights drawn from Beta(alpha, alpha)"
    ),
    "C": Hyper(
        space="1,0.7,0.3,0.1,0.07,0.03,0.01",
        grid="1,0.7,0.3,0.1,0.07,0.03,0.01",
        open_low=True,
        help="dfr: weight of the loss, summed over the rows, beside ‖w‖₁",
    ),
}
"""Published spaces (lr 1e-5..1e-3 for ColoredMNIST, 1e-2 for PACS; fish's step 1e-4..1e-1 there, 0.05..0.5 in
DomainBed) are covered, so that no method lacks the values that suited it. dfr's C are its authors'."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """What a method is, takes and needs."""

    summary: str
    hyper: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Among ``envs``, ``pairs``, ``groups`` and ``erase``."""


METHODS: dict[str, Method] = {
    "erm": Method(summary="empirical risk minimisation", hyper=("lr", "weight_decay")),
    "ncm": Method(
        summary="noisy counterfactual matching: weights orthogonal to the pairs' top directions",
        hyper=("lr", "weight_decay", "rank"),
        needs=("pairs",),
    ),
    "irm": Method(
        summary="IRMv1 (Arjovsky et al. 2019)",
        hyper=("lr", "weight_decay", "penalty", "anneal"),
        needs=("envs",),
    ),
    "vrex": Method(
        summary="V-REx (Krueger et al. 2021)",
        hyper=("lr", "weight_decay", "penalty", "anneal"),
        needs=("envs",),
    ),
    "groupdro": Method(
        summary="group DRO (Sagawa et al. 2020)", hyper=("lr", "weight_decay", "eta"), needs=("envs",)
    ),
    "fish": Method(
        summary="Fish (Shi et al. 2022)", hyper=("lr", "weight_decay", "meta_lr"), needs=("envs",)
    ),
    "lisa": Method(
        summary="LISA (Yao et al. 2022)", hyper=("lr", "weight_decay", "p_sel", "alpha"), needs=("envs",)
    ),
    "matchdg": Method(
        summary="pair penalty on the logits, as MatchDG's (Mahajan et al. 2021)",
        hyper=("lr", "weight_decay", "penalty"),
        needs=("pairs",),
    ),
    "dfr": Method(
        summary="last layer retrained on group-balanced validation rows (Kirichenko et al. 2023)",
        hyper=("C",),
        needs=("groups",),
    ),
    "leace": Method(
        summary="a column erased from the features, then erm (Belrose et al. 2023)",
        hyper=("lr", "weight_decay"),
        needs=("erase",),
    ),
}


def lacking(method: str, options: Any) -> Iterator[UsageError]:
    """What a method needs and options don't give, one error each."""
    for need in METHODS[method].needs:
        if getattr(options, need) is None:
            value = "FILE" if need == "pairs" else "COLUMN"
            yield UsageError(f"{method} needs --{need}", fix=f"--{need} {value}")
