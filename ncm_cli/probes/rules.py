"""The selection rules of ``ncm fit``, ``ncm sweep`` and ``ncm finetune``, and the metric of each."""

from __future__ import annotations

from typing import NamedTuple

SCORES = ("cell_bound", "cell_error", "guarded_bound", "bound_01")
"""The scores of the rule ``bound``, which minimises the first that is known."""


class Rule(NamedTuple):
    """The metric of a selection rule, and whether the least (1) or the greatest (-1) is best."""

    metric: str
    sign: int
    missing: str
    """The reason to give if the metric isn't known."""

    @property
    def oracle(self) -> bool:
        """Whether it looks at test rows."""
        return self.metric.startswith("test")


RULES: dict[str, Rule] = {
    "in-domain": Rule("val_accuracy", -1, "there are no validation rows"),
    "worst-group": Rule("val_worst_group", -1, "there are no --groups"),
    "bound": Rule("bound_01", 1, "there are no --pairs"),
    "oracle": Rule("test_accuracy", -1, "there are no --test rows"),
    "oracle-worst-group": Rule("test_worst_group", -1, "there are no --test rows with --groups"),
}
TIE_BREAKERS = dict.fromkeys(("cell_bound", "cell_error"), "cell_log_loss")
"""The metric that breaks ties of a score, if it isn't the validation loss."""

REGRESSION_METRICS = {"val_accuracy": "val_mse", "bound_01": "bound_mse", "test_accuracy": "test_mse"}
"""The metrics that rules use for regression, for which the least is always best."""

FINETUNE_RULES = ("bound", *(name for name in RULES if name != "bound"))
"""The rules of ``ncm finetune``, in the order of its help."""

FIT_RULES = FINETUNE_RULES[:-1]
"""The rules of ``ncm fit``."""
