"""Whether pairs helped, in words, from validation rows and pairs only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncm_cli.probes.crossfit import CrossFit, Estimate

LEAST_UNITS = 32
"""Below this many independent pairs neither directions nor flips can be distinguished from chance."""

LOW_FLIP_RATE = 0.05
"""A flip rate below this leaves little to gain."""

LEAST_GAIN = 0.01
"""A gain of the score below this, one prediction in a hundred, is too small to matter."""

LEAST_GAIN_SHARE = 0.05
"""For regression: a gain below this share of the bound at rank 0 counts as none."""

NO_GAIN_FACTOR = 2.0
"""A possible gain below this multiple of the least gain counts as none."""

VERDICTS = {
    "helps": "The pairs help",
    "no-gain": "The pairs don't help",
    "constant": "The pairs don't help",
    **dict.fromkeys(("too-few", "undecided", "unmeasured"), "It can't be told whether the pairs help"),
}
"""The heading of each code of a verdict."""

CONTROL_WORDS = {
    "erm": "nothing removed",
    "erm-upweighted": "group weights alone",
    "erm-pair-rows": "training on the pairs' rows alone",
    "erm-upweighted-pair-rows": "group weights and training on the pairs' rows alone",
}
"""The candidates of rank 0 in words."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the pairs helped.

    Attributes
    ----------
    code
        ``helps``; ``no-gain``: hardly anything can be gained; ``constant``: no better than always giving
        the same answer; ``too-few``: too few independent pairs; ``undecided``: the interval is wider than the
        gain; ``unmeasured``: no validation rows, or pairs that can't be divided into folds.
    text
        The verdict in a sentence, with the measurements at rank 0 and of the pick.
    reasons
        Why the pairs don't help, or may not, judged by all candidates; part of ``text``.
    about
        The shift that the verdict applies to.
    score
        The name of the score that candidates were compared by: see `ncm_cli.probes.rules.SCORES`.
    bound, erm_bound
        The bound of the pick and of ERM, with intervals.
    cell_error, erm_cell_error
        The error of the pick and of ERM on held-out rows, with every label × domain cell weighted equally and
        with intervals; only for matched pairs.
    worst_cell_error
        The error of the pick in its worst cell.
    within_flip_rate, across_flip_rate
        The pick's flip rate on random pairs: within a cell (matched pairs), or within a class and across
        domains (augmented pairs). With ``erm_``: ERM's.
    gain
        How much lower the pick's score is than ERM's, paired.
    stores
        With several pair stores, the verdict on the pairs of each.
    control, control_gain
        The best candidate that removes nothing, and how much lower the pick's score is than its score.
    constant_error
        The score of a probe that always gives the same answer.
    """

    code: str
    text: str
    reasons: tuple[str, ...]
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
    score: str | None = None
    cell_error: Estimate | None = None
    erm_cell_error: Estimate | None = None
    worst_cell_error: float | None = None
    within_flip_rate: Estimate | None = None
    erm_within_flip_rate: Estimate | None = None
    across_flip_rate: Estimate | None = None
    erm_across_flip_rate: Estimate | None = None
    control: str | None = None
    control_gain: Estimate | None = None
    stores: tuple[StoreVerdict, ...] = ()

    def record(self) -> dict[str, Any]:
        """The verdict as files and ``--json`` have it; ``stores`` only if there are several."""
        known = dataclasses.asdict(self)
        stores = known.pop("stores")
        return known | ({"stores": stores} if stores else {})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreVerdict:
    """Whether the pairs helped against the shift that the pairs of one of several stores show.

    ``path`` is the store's file; the others are those of a `Verdict` on its pairs alone.
    """

    path: str
    code: str
    text: str
    reasons: tuple[str, ...]
    pairs: int
    units: int
    flip_rate: Estimate | None
    erm_flip_rate: Estimate | None
    bound: Estimate | None
    erm_bound: Estimate | None
    gain: Estimate | None
    score: str | None

    @classmethod
    def of(cls, path: str, verdict: Verdict) -> StoreVerdict:
        """From the verdict on the pairs of the store at a path."""
        names = {field.name for field in dataclasses.fields(cls)} - {"path"}
        return cls(path=path, **{name: getattr(verdict, name) for name in names})


def verdict_text(record: Mapping[str, Any]) -> str:
    """A recorded verdict, those on the pairs of several stores, and what they are about, a line each."""
    of_stores = (store["text"] for store in record.get("stores", ()))
    return "\n".join([record["text"], *of_stores, record["about"]])


def control_name(upweighted: bool, pair_rows: bool) -> str:
    """The name of a candidate that removes nothing, as in `CONTROL_WORDS`."""
    return "erm" + "-upweighted" * upweighted + "-pair-rows" * pair_rows


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What a verdict depends on besides the measurements.

    Attributes
    ----------
    answer
        The constant's answer in words.
    about
        The shift that the verdict applies to, in sentences.
    against
        The augmentations of the pairs, such as ``blur:0.05``.
    least_score
        Whether the pick has the least score of all ranks that were tried.
    one_answer
        Whether the final fit predicts the same class for all validation rows.
    unlike
        (number of pairs whose members have different labels, number of all pairs).
    by_score
        The option that selects by the score.
    advice
        What to do about too few pairs.
    store
        The store whose pairs the verdict is on, if there are several stores.
    """

    answer: str
    about: str
    against: str = ""
    least_score: bool = True
    one_answer: bool = False
    unlike: tuple[int, int] = (0, 0)
    by_score: str = "--select bound"
    advice: str = ""
    store: str = ""


def judge(
    estimates: CrossFit,
    pick: int,
    erm: int,
    case: Circumstances,
    *,
    control: int | None = None,
    written: int | None = None,
) -> Verdict:
    """The verdict on candidate ``pick``, compared with candidate ``erm``: plain training, nothing removed.

    ``control`` is the best candidate of rank 0: it may be another, trained on other rows or with group
    weights. ``written`` is the candidate that is written to the probe file; it may differ from the pick.
    """
    if estimates.errors is None or estimates.constant is None:
        return unmeasured(estimates, "no validation rows", case.about)
    control = erm if control is None else control
    code, why = verdict_code(estimates, pick, erm, case, control)
    if written is not None and written != pick:
        why, pick = "; ".join(filter(None, (why, "so the probe removes nothing"))), written
    gain, constant = estimates.gain(pick, erm), estimates.constant.value
    reasons = () if code == "helps" else _reasons(estimates, erm, code, case)
    alternative = CONTROL_WORDS[_control(estimates, control)]
    heading = _heading(code, case.store) + (f" against {case.against}" if case.against else "")
    if code == "no-gain" and pick == control != erm and estimates.gain(control, erm).low > 0:
        verb = "does" if alternative.startswith("training") else "do"
        heading = f"Removing what the pairs differ in doesn't help, but {alternative} {verb}"
    beside = _beside(estimates, pick, control) if control != erm else ""
    if code == "helps" and beside and estimates.gain(pick, control).low <= 0:
        heading += f", but {alternative} may do as well"
    parts = (why, _change(estimates, pick, erm), *reasons)
    text = ". ".join(filter(None, (f"{heading}: {'; '.join(filter(None, parts))}", beside))) + "."
    measured: dict[str, Any] = {
        name: (of(pick), of(erm))
        for name, of in (
            ("bound", estimates.bound),
            ("flip_rate", estimates.change),
            ("val_error", estimates.error),
            *([("cell_error", estimates.cell_error)] if estimates.cell is not None else []),
        )
    }
    if estimates.random is not None:
        name = "across_flip_rate" if estimates.cell is None else "within_flip_rate"
        measured[name] = (estimates.random_change(pick), estimates.random_change(erm))
    known: dict[str, Any] = {name: of_pick for name, (of_pick, _) in measured.items()}
    known |= {f"erm_{name}": of_erm for name, (_, of_erm) in measured.items()}
    return dataclasses.replace(
        unmeasured(estimates, "", case.about),
        code=code,
        text=text,
        reasons=reasons,
        gain=gain,
        constant_error=constant,
        score=estimates.score,
        worst_cell_error=estimates.candidates[pick].get("worst_cell_error"),
        control=_control(estimates, control),
        control_gain=estimates.gain(pick, control),
        **known,
    )


def _heading(code: str, store: str = "") -> str:
    """The heading of a code, of a store's pairs if it is named."""
    return VERDICTS[code].replace("he pairs", f"he pairs of {store}") if store else VERDICTS[code]


def verdict_code(
    estimates: CrossFit, pick: int, erm: int, case: Circumstances, control: int | None = None
) -> tuple[str, str]:
    """The code of a verdict, and why; see `judge`."""
    assert estimates.constant is not None
    constant, gain = estimates.constant.value, estimates.gain(pick, erm)
    over_constant = estimates.gain(pick, estimates.constant)
    least = LEAST_GAIN_SHARE * estimates.bound(erm).value if estimates.regression else LEAST_GAIN
    least_over_constant = LEAST_GAIN_SHARE * constant if estimates.regression else LEAST_GAIN
    alone = estimates.units == estimates.pairs
    word, score = ("MSE" if estimates.regression else "error"), SCORE_WORDS[estimates.score]
    unweighted = score.replace(" (every cell weighted equally)", "")
    always = f"always answering {case.answer} ({word} {constant:.3g})"
    if estimates.units < LEAST_UNITS:
        pairs = "1 pair that shares" if estimates.pairs == 1 else f"{estimates.pairs} pairs that share"
        sets = f"{'' if alone else f'{estimates.units} sets of '}{pairs} no row"
        why = f"{sets}, where {LEAST_UNITS} are needed"
        why += f"; the {score} is no lower than that of {always}" * (over_constant.value <= 0)
        return "too-few", why + f"; {case.advice}" * bool(case.advice)
    constant_like = case.one_answer or over_constant.value <= least_over_constant
    tried = any(candidate["rank"] > 0 for candidate in estimates.candidates)
    if not tried and (case.least_score or not constant_like):
        return "undecided", "no rank above 0 was measured"
    if constant_like:
        if case.least_score:
            return "constant", f"no rank that was tried beats {always}"
        if case.one_answer:
            same = "this probe predicts the same class for every validation row"
            return "constant", f"{same}; {case.by_score} may choose one that doesn't"
        lower = "no lower" if over_constant.value <= 0 else "hardly lower"
        why = f"this probe's {score}, {estimates.estimate(pick)}, is {lower} than that of {always}"
        return "constant", f"{why}; {case.by_score} chooses by this {score}"
    removing = estimates.candidates[pick]["rank"] > 0
    fall = gain.value if removing else 0.0
    if estimates.score == "bound_01" and estimates.errors is not None:
        # The gain apart from validation error comes from the pairs.
        fall = min(fall, gain.value - (estimates.error(erm).value - estimates.error(pick).value))
    if removing and fall >= least and gain.low > 0 and over_constant.low > 0:
        frequent = estimates.frequent_gain(pick, erm)
        if frequent is None or frequent.low > 0:
            return "helps", ""
        change = f"{0 - frequent.high:+.2g} to {0 - frequent.low:+.2g}"
        return "undecided", f"with classes as frequent as in training, the {unweighted} changes by {change}"
    control = erm if control is None else control
    most = _most(estimates, control)
    if fall < least and most < NO_GAIN_FACTOR * least:
        weighted = estimates.frequent_gain(erm, control)
        if weighted is not None and weighted.high >= NO_GAIN_FACTOR * least:
            lower = f"{weighted.high:.2g} below that of {CONTROL_WORDS[_control(estimates, control)]}"
            plain = f"plain training's {unweighted} may be up to {lower}"
            return "undecided", f"with classes as frequent as in training, {plain}"
        if estimates.gain(control, estimates.constant).value > least_over_constant:
            lowered = f"no rank that was tried lowers the {score} by {least:.2g} or more"
            return "no-gain", lowered if case.least_score else ""
        most = max(most, estimates.gain(pick, control).high)
    if over_constant.low <= 0 and fall >= least:
        return "undecided", f"the {score}, {estimates.estimate(pick)}, can't be told from that of {always}"
    if fall < least and not case.least_score:
        return "undecided", f"other ranks may gain at most {most:.2g}"
    if not removing and estimates.cell is not None:
        return "undecided", f"removing directions may lower the {score} by at most {most:.2g}"
    return "undecided", f"if they do, the {score} falls by at most {most:.2g}"


def _most(estimates: CrossFit, unprojected: int) -> float:
    """The most by which removing directions could lower the score of candidate ``unprojected``, of rank 0.

    This is the highest upper limit of the gain among all candidates that remove directions, and at least
    `CrossFit.undetected_limit`. For the 0-1 bound it is at most the upper limit of the flip rate: only the
    flips can fall.
    """
    removing = [i for i, candidate in enumerate(estimates.candidates) if candidate["rank"] > 0]
    most = max((estimates.gain(index, unprojected).high for index in removing), default=0.0)
    if not estimates.regression:
        most = max(most, estimates.undetected_limit)
    return min(most, estimates.changes_of_all(unprojected).high) if estimates.score == "bound_01" else most


SCORE_WORDS = {
    "bound_01": "bound",
    "bound_mse": "bound",
    "guarded_bound": "bound",
    "cell_error": "error on held-out rows (every cell weighted equally)",
    "cell_bound": "error on held-out rows (every cell weighted equally) + flip rates of other pairs",
}
"""The scores in words."""


def _measured(estimates: CrossFit, index: int) -> tuple[str, str]:
    """Flip rate and validation accuracy of a candidate in words; for regression, squared change and MSE."""
    what, val = ("mean squared change", "MSE") if estimates.regression else ("flip rate", "accuracy")
    error = estimates.error(index).value
    right = error if estimates.regression else 1 - error
    return f"{what} {estimates.change(index)}", f"validation {val} {right:.3g}"


def _change(estimates: CrossFit, pick: int, erm: int) -> str:
    """The change from plain training to the pick, in words."""
    flips, right = _measured(estimates, erm)
    now, still = (part.rsplit(" ", 1)[1] for part in _measured(estimates, pick))
    random = estimates.random_change(erm), estimates.random_change(pick)
    beside = (
        "random pairs of a class across domains" if estimates.cell is None else "random pairs of one cell"
    )
    if pick == erm:
        random_text = f"; {beside} {random[0]}" if random[0] is not None else ""
        return f"{flips} and {right} with nothing removed{random_text}"
    gain, setting = estimates.gain(pick, erm), _setting(estimates, pick)
    change = f"(95 % interval of the change: {0 - gain.high:+.2g} to {0 - gain.low:+.2g})"
    random_text = f" ({beside}: {random[0]}, now {random[1]})" if random[0] is not None else ""
    which = "" if estimates.kind is None else " with the flip rates of all stores added"
    bound = f"bound{which} {estimates.bound(erm)}, now {estimates.bound(pick)}"
    if estimates.score == "guarded_bound":
        larger = f"{estimates.estimate(erm)}, now {estimates.estimate(pick)}"
        bound = f"bound with the larger of the two flip rates {larger}"
    if estimates.cell is None:
        now = f"{flips} with nothing removed, {now} with {setting}{random_text}"
        return f"{now}; {right}, now {still}; {bound} {change}"
    score, was, is_now = SCORE_WORDS[estimates.score], estimates.estimate(erm), estimates.estimate(pick)
    return (
        f"{score} {was} with nothing removed, {is_now} with {setting} {change}; {flips}, now {now}; "
        f"{right}, now {still}"
    )


def _setting(estimates: CrossFit, index: int) -> str:
    """A candidate's rank and variant in words."""
    candidate = estimates.candidates[index]
    added = ["group weights"] * bool(candidate.get("upweighted"))
    added += ["the pairs' rows"] * bool(candidate.get("pair_rows"))
    return " and ".join([", ".join([f"rank {candidate['rank']}", *added[:-1]]), *added[-1:]])


def _control(estimates: CrossFit, index: int) -> str:
    candidate = estimates.candidates[index]
    return control_name(bool(candidate.get("upweighted")), bool(candidate.get("pair_rows")))


def _beside(estimates: CrossFit, pick: int, control: int) -> str:
    """The score of the best candidate that removes nothing, in a sentence."""
    name, score = CONTROL_WORDS[_control(estimates, control)], SCORE_WORDS[estimates.score]
    if pick == control:
        return f"The least {score}, {estimates.estimate(control)}, is that of {name}"
    gain = estimates.gain(pick, control)
    return (
        f"With {name} and nothing removed, the {score} is {estimates.estimate(control)} "
        f"(the chosen probe's differs from it by {0 - gain.high:+.2g} to {0 - gain.low:+.2g})"
    )


def _reasons(estimates: CrossFit, erm: int, code: str, case: Circumstances) -> tuple[str, ...]:
    """Why the pairs don't help, judged by the candidates of all ranks."""
    flips, reasons = estimates.changes.mean(axis=1), []
    whole_path, by_flips = case.least_score, estimates.cell is None
    fewest = int(flips.argmin())
    at = f"least {', '.join(_measured(estimates, fewest))}, at rank {estimates.candidates[fewest]['rank']}"
    several = len({candidate["rank"] for candidate in estimates.candidates} - {0}) > 1
    if code == "constant" and whole_path and several:
        reasons.append("what they differ in also predicts the label, or the label can't be told without it")
    elif code == "no-gain" and not estimates.regression and flips[erm] < LOW_FLIP_RATE:
        reasons.append("a probe with nothing removed seldom flips them: it hardly uses what they differ in")
    elif code == "no-gain" and by_flips and whole_path and flips[fewest] > flips[erm] / 2:
        reasons.append(f"no rank helps much ({at}): different pairs differ in different directions")
    elif code == "no-gain" and by_flips and whole_path:
        reasons.append(f"fewer flips cost too much ({at}): what they differ in also predicts the label")
    if case.unlike[0]:
        reasons.append("the members of {:,} of {:,} pairs have different labels".format(*case.unlike))
    return tuple(reasons)


def unmeasured(estimates: CrossFit | tuple[int, int], why: str, about: str) -> Verdict:
    """The verdict if the score can't be measured; ``estimates`` may be (number of pairs, number of units)."""
    pairs, units = estimates if isinstance(estimates, tuple) else (estimates.pairs, estimates.units)
    return Verdict(
        code="unmeasured",
        text=f"{VERDICTS['unmeasured']}: {why}.",
        reasons=(),
        about=about,
        pairs=pairs,
        units=units,
    )
