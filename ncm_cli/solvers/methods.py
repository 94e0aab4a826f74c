"""The methods and their hyper-parameters, with the defaults of weight decay, tolerance and the rest."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

from ncm_cli.errors import UsageError

SCALINGS = ("none", "norm", "standard")
"""How features may be scaled: see `ncm_cli.solvers.projection.Scaling`."""

TASKS = ("classification", "regression")

SOLVERS = ("lbfgs", "adam")

WEIGHT_DECAYS = {"lbfgs": "1e-4,1e-3,1e-2,1e-1,1", "adam": "1e-4"}
"""The weight decays that are tried when none are given, by solver."""

WEIGHT_DECAY = 1e-4
"""The default of a single weight decay: in `Config`, the estimators and ``ncm finetune``. What ``ncm sweep``
searches is in `HYPER`."""

SOLVER_OPTIONS = {"lbfgs": ("tolerance", "max_iter"), "adam": ("lr", "epochs", "batch_size", "device")}
"""The options that only one solver reads."""

TOLERANCE = 1e-8
"""Gradient norm to reach, relative to the rows' root mean square norm. Probabilities are then within about
2e-6 of exact ones."""

FOLD_TOLERANCE = 1e-5
"""`TOLERANCE` for fits on folds, unless ``--tolerance`` is given. Only their decisions count; probabilities
are then within about 2e-3 of exact ones."""

MAX_ITER = 1000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Solver:
    """How a probe's weights are found: exactly by ``lbfgs``, or by steps of ``adam`` on mini-batches."""

    name: str = "lbfgs"
    tolerance: float = TOLERANCE
    max_iter: int = MAX_ITER
    lr: float = 1e-3
    epochs: int = 100
    batch_size: int = 256
    seed: int = 0
    device: str = "auto"


class Hyper(NamedTuple):
    """One hyper-parameter."""

    space: str
    """The default space of the random search."""
    grid: str
    """The default values of ``--grid``."""
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    """Whether ``low`` itself is excluded."""
    whole: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise `UsageError` for a value outside the range."""
        inside = (value > self.low if self.open_low else value >= self.low) and value <= self.high
        if not (inside and math.isfinite(value)) or (self.whole and value != int(value)):
            kind, bracket = "a whole number" if self.whole else "a number", "(" if self.open_low else "["
            raise UsageError(
                f"{name} can't be {value!r}", expected=f"{kind} in {bracket}{self.low:g}, {self.high:g}]"
            )


_DFR_C = "1,0.7,0.3,0.1,0.07,0.03,0.01"

HYPER: dict[str, Hyper] = {
    "lr": Hyper("log:1e-5:1e-2", "1e-3", open_low=True),
    "weight_decay": Hyper("log:1e-4:1e-2", "1e-4"),
    "rank": Hyper("2:24", "2:24", whole=True),
    "penalty": Hyper("log:1:1e5", "log:1:1e5:6"),
    "anneal": Hyper("50:250", "100", whole=True),
    "eta": Hyper("log:1e-4:1e-1", "log:1e-4:1e-1:4"),
    "meta_lr": Hyper("log:1e-3:1", "0.01,0.1,0.5", open_low=True),
    "p_sel": Hyper("0,0.5,1", "0,0.5,1", high=1.0),
    "alpha": Hyper("2", "2", open_low=True),
    "C": Hyper(_DFR_C, _DFR_C, open_low=True),
}
"""The ranges, search spaces and grids of hyper-parameters; `Config` says what each one is. The spaces cover
published ones (lr 1e-5..1e-3 for ColoredMNIST, 1e-2 for PACS; fish's step 1e-4..1e-1 there, 0.05..0.5 in
DomainBed). dfr's values of C are those of its authors."""


class Method(NamedTuple):
    """The hyper-parameters that a method takes, and what it needs among envs, pairs, groups and erase."""

    hyper: tuple[str, ...]
    needs: tuple[str, ...] = ()


METHODS: dict[str, Method] = {
    "erm": Method(("lr", "weight_decay")),
    "ncm": Method(("lr", "weight_decay", "rank"), ("pairs",)),
    "irm": Method(("lr", "weight_decay", "penalty", "anneal"), ("envs",)),
    "vrex": Method(("lr", "weight_decay", "penalty", "anneal"), ("envs",)),
    "groupdro": Method(("lr", "weight_decay", "eta"), ("envs",)),
    "fish": Method(("lr", "weight_decay", "meta_lr"), ("envs",)),
    "lisa": Method(("lr", "weight_decay", "p_sel", "alpha"), ("envs",)),
    "matchdg": Method(("lr", "weight_decay", "penalty"), ("pairs",)),
    "dfr": Method(("C",), ("groups",)),
    "leace": Method(("lr", "weight_decay"), ("erase",)),
}
"""ncm: noisy counterfactual matching, weights orthogonal to the pairs' top directions. matchdg: a penalty on
the pairs' logits. leace: a column erased from the features, then erm. The others, with their papers: see
`ncm_cli.solvers.objectives`."""

FIT_METHODS = ("ncm", "erm")
"""The methods of ``ncm fit``."""

FINETUNE_METHODS = ("ncm", "erm", "irm", "vrex", "groupdro", "fish", "matchdg")
"""The methods of ``ncm finetune``."""

FINETUNE_PROTOCOLS = ("common", "domainbed")
"""The forms of the methods in ``ncm finetune``: see `PROTOCOLS`."""

UPWEIGHT = "+upweight"

Protocol = Literal["common", "papers", "domainbed"]
PROTOCOLS: tuple[Protocol, ...] = ("common", "papers", "domainbed")
"""The forms in which methods are trained; `ncm_cli.solvers.trainer.Schedule` says how they differ."""


class Form(NamedTuple):
    """How a method's code writes its model and its weight decay λ."""

    two_logits: bool = False
    """Two classes have two logits; else one."""
    decay: float = 1.0
    """1: (λ/2)‖W‖². 2: λ‖W‖²."""
    bias_decays: bool = False


_PAPERS = {
    "irm": Form(decay=2, bias_decays=True),
    "vrex": Form(decay=2, bias_decays=True),
    **dict.fromkeys(("groupdro", "fish", "lisa", "matchdg"), Form(two_logits=True, bias_decays=True)),
}


def form_of(method: str, protocol: Protocol) -> Form:
    """The form of a method; erm, ncm and leace have ``ncm fit``'s unless ``protocol`` is ``domainbed``."""
    if protocol == "domainbed":
        return Form(two_logits=True, bias_decays=True)
    return _PAPERS.get(method, Form()) if protocol == "papers" else Form()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One configuration: a method, its hyper-parameters and a seed. Hyper-parameters of other methods are
    ignored.

    A value outside its range in `HYPER` raises `UsageError`.
    """

    method: str = "erm"
    upweighted: bool = False
    """Whether the groups of ``--upweight`` are weighted equally."""
    trial: int = 0
    """The configuration's number in a sweep; the same for equal hyper-parameters with other seeds."""
    seed: int = 0
    """The seed of the rows' order and of every random draw."""
    lr: float = 1e-3
    weight_decay: float = WEIGHT_DECAY
    """λ of mean loss + (λ/2)‖W‖²."""
    rank: int = 0
    """Number of leading directions that ncm removes."""
    penalty: float = 1.0
    """Weight β of the penalty of irm, vrex and matchdg, as the protocol writes it."""
    anneal: int = 0
    """irm and vrex: steps with a penalty weight of 1, before ``penalty`` takes its place."""
    eta: float = 1e-2
    """Step size of groupdro's group weights."""
    meta_lr: float = 0.5
    """Step size of fish towards its inner weights."""
    p_sel: float = 0.5
    """Probability that lisa mixes within labels."""
    alpha: float = 2.0
    """lisa mixes with weights drawn from Beta(alpha, alpha)."""
    C: float = 1.0
    """dfr: weight of the loss, summed over the rows, beside ‖w‖₁."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"no method named {self.method!r}", expected=" | ".join(METHODS))
        for name, kind in HYPER.items():
            kind.check(name, getattr(self, name))

    @property
    def label(self) -> str:
        """The method as the tables show it."""
        return self.method + (UPWEIGHT if self.upweighted else "")

    @property
    def hyper(self) -> dict[str, float]:
        """The hyper-parameters that its method has."""
        return {name: getattr(self, name) for name in METHODS[self.method].hyper}
