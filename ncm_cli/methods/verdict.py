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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Measures:
    """What a verdict is passed on; as in `Verdict`."""

    bound: Estimate
    erm_bound: Estimate
    flip_rate: Estimate
    erm_flip_rate: Estimate
    val_error: Estimate
    erm_val_error: Estimate
    gain: Estimate
    constant_error: float

    @property
    def fewer_flips(self) -> float:
        """The part of the gain that isn't validation error."""
        return self.gain.value - (self.erm_val_error.value - self.val_error.value)


def judge(
    found: CrossFit,
    pick: int,
    erm: int,
    constant: float | None,
    answer: str,
    shift: str,
    *,
    least_bound: bool = True,
    one_answer: bool = False,
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
    one_answer
        The pick gives every validation row the same answer.
    """
    bound, erm_bound = found.bound(pick), found.bound(erm)
    error, erm_error = found.error(pick), found.error(erm)
    gain = found.gain(pick, erm)
    if not (bound and erm_bound and error and erm_error and gain) or constant is None:
        return unmeasured(found.pairs, found.units, "no validation rows", shift)
    measures = _Measures(
        bound=bound,
        erm_bound=erm_bound,
        flip_rate=found.change(pick),
        erm_flip_rate=found.change(erm),
        val_error=error,
        erm_val_error=erm_error,
        gain=gain,
        constant_error=constant,
    )
    if found.units < FEWEST:
        code, text = _too_few(measures, found, answer)
    else:
        code, text = _compared(measures, found.regression, answer, least_bound, pick == erm, one_answer)
    known = {field.name: getattr(measures, field.name) for field in dataclasses.fields(measures)}
    return Verdict(code=code, text=text, about=_about(shift), pairs=found.pairs, units=found.units, **known)


def _too_few(measures: _Measures, found: CrossFit, answer: str) -> tuple[str, str]:
    apart = (
        f"{found.units} pairs" if found.units == found.pairs else f"{found.units} sets of {found.pairs} pairs"
    )
    text = f"It can't be told whether the pairs help: {apart} that share no row, where {FEWEST} are needed."
    if measures.bound.value >= measures.constant_error:
        text += (
            f" The bound is no lower than that of always answering {answer} ({measures.constant_error:.3g})."
        )
    return "too-few", text


def _compared(
    at: _Measures, regression: bool, answer: str, least_bound: bool, unchanged: bool, one_answer: bool
) -> tuple[str, str]:
    """Code and text where there are pairs enough; ``unchanged``: the pick is ERM itself."""
    # Probes of folds that are nearly constant come out a hair below the constant itself.
    hair = HARDLY_SHARE * at.constant_error if regression else HARDLY
    useless = one_answer or at.bound.value > at.constant_error - hair
    word, what = ("MSE", "mean squared change") if regression else ("error", "flip rate")
    least = HARDLY_SHARE * at.erm_bound.value if regression else HARDLY
    gain, before = at.gain, at.erm_bound.value
    if useless and least_bound:
        return "constant", (
            f"The pairs don't help: no rank that was tried beats always answering {answer} ({word} "
            f"{at.constant_error:.3g}): these pairs differ in the label's own directions, or the label "
            "can't be told without them."
        )
    if useless:
        return "constant", (
            f"The pairs don't help this probe: its bound, {at.bound.value:.3g}, is hardly lower than that of "
            f"always answering {answer} ({at.constant_error:.3g}). --select bound chooses by the bound."
        )
    if min(gain.value, at.fewer_flips) < least and unchanged and least_bound:
        return "no-gain", (
            f"The pairs don't help: no rank that was tried has a lower bound than {before:.3g}, with nothing "
            "removed."
        )
    if min(gain.value, at.fewer_flips) < least:
        return "no-gain", (
            f"The pairs don't help: the bound went from {before:.3g} with nothing removed to "
            f"{at.bound.value:.3g}, the {what} from {at.erm_flip_rate.value:.3g} to {at.flip_rate.value:.3g}."
        )
    if gain.low <= 0:
        return "undecided", (
            f"It can't be told whether the pairs help: the bound fell by {gain.value:.3g}, 95 % interval "
            f"{gain.low:.3g} to {gain.high:.3g}."
        )
    return "helps", (
        f"The pairs help: {what} fell from {at.erm_flip_rate.value:.3g} to {at.flip_rate.value:.3g}, "
        f"validation {word} went from {at.erm_val_error.value:.3g} to {at.val_error.value:.3g}, and the "
        f"bound fell by {gain.value:.3g} ({gain.low:.3g} to {gain.high:.3g})."
    )


def unmeasured(pairs: int, units: int, why: str, shift: str) -> Verdict:
    """The verdict where the bound can't be measured."""
    text = f"It can't be told whether the pairs help: {why}."
    return Verdict(code="unmeasured", text=text, about=_about(shift), pairs=pairs, units=units)


def _about(shift: str) -> str:
    return f"This is about rows that differ from training rows as {shift} do, and about no other shift."
