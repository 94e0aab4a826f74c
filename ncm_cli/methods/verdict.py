"""Whether the pairs helped, in words, from validation rows and pairs only."""

from __future__ import annotations

import dataclasses

from ncm_cli.methods.crossfit import CrossFit, Estimate

FEWEST = 32
"""Below this many independent pairs neither directions nor flips can be told from chance."""

HARDLY = 0.01
"""A gain of the error bound below this, one answer in a hundred, is none that anybody would notice."""

HARDLY_SHARE = 0.05
"""For regression, the same as a share of the bound at rank 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What ``ncm fit`` says after a fit with pairs.

    Attributes
    ----------
    code
        ``helps``; ``no-gain``: the bound is hardly lower than ERM's; ``constant``: no better than always the
        same answer; ``too-few``: too few independent pairs; ``undecided``: the interval is wider than the
        gain; ``unmeasured``: no validation rows, or pairs that can't be divided into folds.
    text
        The same in a sentence.
    about
        Which shift it is about.
    bound, erm_bound
        With their intervals, of the pick and of rank 0.
    gain
        How much lower the pick's bound is than ERM's, paired.
    """

    code: str
    text: str
    about: str
    pairs: int
    units: int
    bound: Estimate | None = None
    erm_bound: Estimate | None = None
    flip_rate: Estimate | None = None
    erm_flip_rate: Estimate | None = None
    val_error: Estimate | None = None
    erm_val_error: Estimate | None = None
    gain: Estimate | None = None
    constant_error: float | None = None


def judge(
    found: CrossFit,
    pick: int,
    erm: int,
    constant: float | None,
    answer: str,
    shift: str,
    *,
    least_bound: bool = True,
) -> Verdict:
    """The verdict on candidate ``pick`` beside candidate ``erm``, which removes nothing.

    Parameters
    ----------
    constant
        Validation error (or MSE) of always the same answer, which no shift can change.
    answer
        That answer, for the text.
    shift
        What the pairs differ in, for the text.
    least_bound
        The pick was chosen as the least bound of all ranks, so that what it doesn't reach no rank does.
    """
    bound, before = found.bound(pick), found.bound(erm)
    change, change_before = found.change(pick), found.change(erm)
    error, error_before = found.error(pick), found.error(erm)
    gain = found.gain(pick, erm)
    if (
        bound is None
        or before is None
        or gain is None
        or error is None
        or error_before is None
        or constant is None
    ):
        return unmeasured(found.pairs, found.units, "no validation rows", shift)
    word, what = ("MSE", "mean squared change") if found.regression else ("error", "flip rate")
    least = HARDLY_SHARE * before.value if found.regression else HARDLY
    if found.units < FEWEST:
        code = "too-few"
        text = f"It can't be told whether the pairs help: {found.units} independent pairs of {FEWEST} needed."
        if bound.value >= constant:
            text += f" The bound is no lower than that of always answering {answer} ({constant:.3g})."
    elif bound.value >= constant:
        code = "constant"
        text = (
            f"The pairs don't help: no rank beats always answering {answer} ({word} {constant:.3g}): "
            "these pairs differ in the label's own directions, or the label can't be told without them."
            if least_bound
            else f"The pairs don't help this probe: its bound, {bound.value:.3g}, is no lower than that of "
            f"always answering {answer} ({constant:.3g}). --select bound looks for a rank whose bound is."
        )
    elif min(gain.value, before.value - error_before.value - (bound.value - error.value)) < least:
        code = "no-gain"
        text = (
            f"The pairs don't help: no rank has a lower bound than {before.value:.3g}, with nothing removed."
            if pick == erm and least_bound
            else f"The pairs don't help: the bound went from {before.value:.3g} with nothing removed to "
            f"{bound.value:.3g}, the {what} from {change_before.value:.3g} to {change.value:.3g}."
        )
    elif gain.low <= 0:
        code = "undecided"
        text = (
            f"It can't be told whether the pairs help: the bound fell by {gain.value:.3g}, "
            f"95 % interval {gain.low:.3g} to {gain.high:.3g}."
        )
    else:
        code = "helps"
        text = (
            f"The pairs help: {what} fell from {change_before.value:.3g} to {change.value:.3g}, validation "
            f"{word} went from {error_before.value:.3g} to {error.value:.3g}, and the bound fell by "
            f"{gain.value:.3g} ({gain.low:.3g} to {gain.high:.3g})."
        )
    return Verdict(
        code=code,
        text=text,
        about=_about(shift),
        pairs=found.pairs,
        units=found.units,
        bound=bound,
        erm_bound=before,
        flip_rate=change,
        erm_flip_rate=change_before,
        val_error=error,
        erm_val_error=error_before,
        gain=gain,
        constant_error=constant,
    )


def unmeasured(pairs: int, units: int, why: str, shift: str) -> Verdict:
    """The verdict where the bound can't be measured."""
    text = f"It can't be told whether the pairs help: {why}."
    return Verdict(code="unmeasured", text=text, about=_about(shift), pairs=pairs, units=units)


def _about(shift: str) -> str:
    return f"This is about rows that differ from training rows as {shift} do, and about no other shift."
