"""Choosing rank and weight decay together, with or without the test domain.

The 0-1 bound needs neither test rows nor groups: for any classifier,
``P(wrong on x_e+) <= P(wrong on its training-domain twin) + P(the two predictions differ)``, so validation
error plus the share of held-out pairs whose prediction flips bounds the error on the test domain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.methods import metrics
from ncm_cli.methods.path import Fit

Array = NDArray[np.float64]
Codes = NDArray[np.int64]

SCORE_ELEMENTS = 4_000_000
"""Logits held at once while a path is scored: 32 MB."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One fit of a path and what is known of it; None where there were no rows or pairs to tell.

    Attributes
    ----------
    val_accuracy, val_log_loss
        On the validation rows; ``val_mse`` for regression.
    flip_rate
        Share of the held-out pairs whose members are predicted differently.
    bound_01
        ``1 - val_accuracy + flip_rate``. For regression ``bound_mse``: validation MSE plus ``pair_mse``, the
        mean squared difference between the predictions for a held-out pair's members.
    log_loss_bound
        ``val_log_loss + L sqrt(mean |W delta|^2)`` over held-out pairs, L = 1 for two classes and sqrt(2)
        for more (softmax cross-entropy is sqrt(2)-Lipschitz in the logits). Not used to select: shrinking
        the weights drives it to log 2.
    worst_group
        Lowest accuracy among the validation rows' groups (highest MSE for regression).
    test_accuracy, test_mse
        Only known to the oracle.
    """

    rank: int
    weight_decay: float
    converged: bool
    val_accuracy: float | None = None
    val_log_loss: float | None = None
    flip_rate: float | None = None
    bound_01: float | None = None
    log_loss_bound: float | None = None
    worst_group: float | None = None
    test_accuracy: float | None = None
    val_mse: float | None = None
    pair_mse: float | None = None
    bound_mse: float | None = None
    test_mse: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Scaled features (n, d) with what they should be predicted as.

    ``y`` (n,) holds class codes, or float targets for regression; ``group`` (n,) a group for each row.
    """

    X: Array
    y: NDArray[Any]
    group: Codes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Scaled features of held-out pairs' members, (k, d) each."""

    a: Array
    b: Array


def decide(logits: Array) -> Codes:
    """Class codes (n,) from logits (n, 1) or (n, C): class 1 where one logit is above 0, else the largest."""
    if logits.shape[1] == 1:
        return (logits[:, 0] > 0).astype(np.int64)
    return np.asarray(logits.argmax(axis=1), np.int64)


def flip_rate(predicted_a: Codes, predicted_b: Codes) -> float:
    """Share of pairs whose two members are predicted differently; both (k,)."""
    return _share(np.asarray(predicted_a != predicted_b))


def score_path(
    fits: Sequence[Fit],
    *,
    task: str,
    val: Rows | None = None,
    held_out: HeldOut | None = None,
    test: Rows | None = None,
) -> list[Candidate]:
    """What validation rows, held-out pairs and (oracle only) test rows say of every fit, in its order."""
    parts = {
        "val": val.X if val else None,
        "a": held_out.a if held_out else None,
        "b": held_out.b if held_out else None,
        "test": test.X if test else None,
    }
    known = {name: X for name, X in parts.items() if X is not None}
    judge = _judge_regression if task == "regression" else _judge_classification
    width = max((len(X) for X in known.values()), default=1)
    step = max(1, SCORE_ELEMENTS // (width * len(fits[0].bias)))
    found: list[Candidate] = []
    for start in range(0, len(fits), step):
        some = fits[start : start + step]
        scores = {name: _logits(some, X) for name, X in known.items()}
        for j, fit in enumerate(some):
            facts = judge({name: part[:, j] for name, part in scores.items()}, val, test)
            found.append(
                Candidate(rank=fit.rank, weight_decay=fit.weight_decay, converged=fit.converged, **facts)
            )
    return found


def _logits(fits: Sequence[Fit], X: Array) -> Array:
    """Logits (n, fits, C)."""
    weight = np.concatenate([fit.weight for fit in fits])
    bias = np.concatenate([fit.bias for fit in fits])
    return (X @ weight.T + bias).reshape(len(X), len(fits), -1)


def _judge_classification(
    logits: Mapping[str, Array], val: Rows | None, test: Rows | None
) -> dict[str, float | None]:
    facts: dict[str, float | None] = {}
    if val is not None:
        right = decide(logits["val"]) == val.y
        facts["val_accuracy"] = _share(right)
        facts["val_log_loss"] = metrics.log_loss(logits["val"], val.y)
        if val.group is not None:
            facts["worst_group"] = min(_share(right[val.group == g]) for g in np.unique(val.group))
    if "a" in logits:
        a, b = logits["a"], logits["b"]
        facts["flip_rate"] = flip_rate(decide(a), decide(b))
        if val is not None:
            lipschitz = 1.0 if a.shape[1] == 1 else float(np.sqrt(2.0))
            drift = float(np.sqrt(np.mean(((a - b) ** 2).sum(axis=1))))
            facts["bound_01"] = 1 - _known(facts["val_accuracy"]) + _known(facts["flip_rate"])
            facts["log_loss_bound"] = _known(facts["val_log_loss"]) + lipschitz * drift
    if test is not None:
        facts["test_accuracy"] = _share(decide(logits["test"]) == test.y)
    return facts


def _judge_regression(
    values: Mapping[str, Array], val: Rows | None, test: Rows | None
) -> dict[str, float | None]:
    facts: dict[str, float | None] = {}
    if val is not None:
        squared = (values["val"][:, 0] - val.y) ** 2
        facts["val_mse"] = metrics.mean(squared)
        if val.group is not None:
            facts["worst_group"] = max(metrics.mean(squared[val.group == g]) for g in np.unique(val.group))
    if "a" in values:
        facts["pair_mse"] = float(np.mean((values["a"] - values["b"]) ** 2))
        if val is not None:
            facts["bound_mse"] = _known(facts["val_mse"]) + _known(facts["pair_mse"])
    if test is not None:
        facts["test_mse"] = metrics.mse(values["test"][:, 0], test.y)
    return facts


def _share(right: NDArray[np.bool_]) -> float:
    return int(np.count_nonzero(right)) / len(right)


def _known(value: float | None) -> float:
    if value is None:
        raise TypeError("a number that should have been computed is missing")
    return value


RULES: dict[str, dict[str, tuple[str, int]]] = {
    "bound": {"classification": ("bound_01", 1), "regression": ("bound_mse", 1)},
    "in-domain": {"classification": ("val_accuracy", -1), "regression": ("val_mse", 1)},
    "worst-group": {"classification": ("worst_group", -1), "regression": ("worst_group", 1)},
    "oracle": {"classification": ("test_accuracy", -1), "regression": ("test_mse", 1)},
}
"""What each rule looks at, and whether the least (1) or the greatest (-1) is best."""


def choose(candidates: Sequence[Candidate], rule: str, task: str) -> int:
    """The index of the best candidate; ties go to the lower validation loss, then the lower rank.

    Raises
    ------
    InputError
        The rule's quantity is not known (no validation rows, held-out pairs, groups or test rows).
    """
    name, sign = RULES[rule][task]
    loss = "val_log_loss" if task == "classification" else "val_mse"

    def key(index: int) -> tuple[float, float, int, int]:
        candidate = candidates[index]
        value = getattr(candidate, name)
        if value is None:
            raise InputError(f"the rule {rule!r} needs {name}, which is not known here")
        known = getattr(candidate, loss)
        # Accuracies are shares of counts: differences below 1e-12 are rounding of sums, not of rows.
        return round(sign * value, 12), np.inf if known is None else known, candidate.rank, index

    return min(range(len(candidates)), key=key)


def group_weights(groups: Codes) -> Array:
    """Row weights (n,), mean 1, that make every group count equally: inverse group frequency."""
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return np.asarray(len(groups) / (len(counts) * counts[inverse]), np.float64)
