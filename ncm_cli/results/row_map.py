"""The map of a page: rows as dots, a probe's margins against the first removed direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ncm_cli.blocks import Array, Codes
from ncm_cli.probes import metrics
from ncm_cli.probes.evaluate import Answers, logits, scale_like
from ncm_cli.results.pictures import Thumbnails, Tile
from ncm_cli.results.tables import decimals
from ncm_cli.store.features import FeatureStore

MAX_DOTS = 400
"""Most dots in a map, equally many from each group. Their pictures take nearly all of its bytes."""

MAX_COLOURS = 8
"""Most groups with a colour and shape of their own: those with the most misses; the others share the last."""

DOT_SIDE, DOT_BUDGET = 64, 1_000_000
"""Pixels along a dot's picture, and bytes of all of them."""

WIDTH, HEIGHT = 400, 300
"""Size of a panel, in pixels on a screen as wide as a phone's."""

BOX = {"left": 46, "right": 390, "top": 22, "bottom": 260}
"""The ends of its axes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One probe's dots, in the map's order."""

    title: str
    x: Sequence[str]
    y: Sequence[str]
    """Places in the panel."""
    wrong: Sequence[bool]
    x_ticks: Sequence[tuple[str, str]]
    """Places and texts."""
    y_ticks: Sequence[tuple[str, str]]
    zero: str
    """The place of a margin of 0, which separates wrong rows from right ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowMap:
    """What the template draws."""

    panels: Sequence[Panel]
    groups: Sequence[str]
    """Names of the colours; none without groups."""
    colours: Sequence[int]
    tiles: Sequence[Tile]
    captions: Sequence[str]
    """A picture and words for each dot."""
    lead: str
    x_label: str
    y_label: str
    width: int = WIDTH
    height: int = HEIGHT
    box: Mapping[str, int] = dataclasses.field(default_factory=lambda: BOX)


def fair_sample(codes: Codes, most: int) -> Codes:
    """Ascending positions of at most ``most`` rows, given their groups (n,): equally many from each group.

    A group with fewer rows gives all of them. Rows are drawn at random with a fixed seed.
    """
    order = np.random.default_rng(0).permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    starts = np.flatnonzero(np.diff(codes[order], prepend=codes.min(initial=0) - 1))
    rank_in_group = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    return np.sort(order[np.argsort(rank_in_group, kind="stable")[:most]])


def map_of(
    shown: Sequence[tuple[Answers, str]],
    store: FeatureStore,
    group: Codes,
    *,
    say_row: Callable[[int], str],
    say_group: Callable[[int], str],
) -> RowMap | None:
    """A map of a classifier's n rows; None if no direction was removed.

    Parameters
    ----------
    shown
        Answers of the page's probe, then of others, for the same rows and classes, with their names. A probe
        that removes nothing comes first in the map, to show the rows before the removal.
    group
        (n,) each row's group, −1 for none.
    say_row, say_group
        Words for a row by its position among the n, and for a group by its code.
    """
    answers = shown[0][0]
    removing = next((probe_answers.probe for probe_answers, _ in shown if probe_answers.probe.rank), None)
    if removing is None:
        return None
    chosen = fair_sample(group, MAX_DOTS)
    rows = answers.rows[chosen]
    features = store.read(rows)
    along = scale_like(removing, features) @ removing.basis[:, 0]
    y, y_ticks = _placed(along, BOX["bottom"], BOX["top"])
    panels, margin_texts = [], []
    for probe_answers, name in sorted(shown, key=lambda named: named[0].probe.rank > 0):
        margins = metrics.true_margins(logits(probe_answers.probe, features), answers.truth[chosen])
        x, x_ticks = _placed(np.append(margins, 0.0), BOX["left"], BOX["right"])
        rank = probe_answers.probe.rank
        title = f"{name}, {rank} direction{'s' * (rank > 1)} removed" if rank else f"{name}, nothing removed"
        title += f": {metrics.mean(probe_answers.right):.3f} right"
        panels.append(
            Panel(title, x[:-1], y, (~probe_answers.right[chosen]).tolist(), x_ticks, y_ticks, x[-1])
        )
        margin_texts.append([f"{name} {decimals(margin)}" for margin in margins.tolist()])
    colours, labels = _colours(group, chosen, answers, say_group)
    captions = [
        f"{say_row(position)}; margin {', '.join(of_row)}; direction {decimals(part)}"
        for position, part, *of_row in zip(chosen.tolist(), along.tolist(), *margin_texts, strict=True)
    ]
    pictures = Thumbnails(side=DOT_SIDE, budget=DOT_BUDGET)
    lead = (
        "Each dot is a row: how clearly the probe decides for its true class, against its place along the "
        f"first direction that was removed. Filled dots are wrong. {len(chosen):,} of {len(group):,} rows"
    )
    lead += ", drawn evenly from all groups." if labels else "."
    if all(probe_answers.probe.rank for probe_answers, _ in shown):
        lead += " To see them before the removal, evaluate a probe of rank 0 on the same rows as well."
    several = len(answers.probe.classes) > 2
    what = "the true class’s logit less the highest other" if several else "the logit towards the true class"
    return RowMap(
        panels=panels,
        groups=labels,
        colours=colours,
        tiles=[pictures.row(store, store.ids[row]) for row in rows.tolist()],
        captions=captions,
        lead=lead,
        x_label=f"margin: {what}",
        y_label="first removed direction",
    )


def _colours(
    group: Codes, chosen: Codes, answers: Answers, say: Callable[[int], str]
) -> tuple[list[int], list[str]]:
    """The colour of each dot, and the colours' names."""
    codes = np.unique(group)
    misses = np.bincount(group[~answers.right] + 1, minlength=int(codes.max()) + 2)
    if len(codes) < 2:
        return [0] * len(chosen), []
    ranked = codes[np.argsort(-misses[codes + 1], kind="stable")]
    coloured = ranked if len(ranked) <= MAX_COLOURS else ranked[: MAX_COLOURS - 1]
    colour_of = np.full(int(codes.max()) + 2, MAX_COLOURS - 1)
    colour_of[coloured + 1] = np.arange(len(coloured))
    labels = [say(code) if code >= 0 else "in no group" for code in coloured.tolist()]
    labels += [f"{len(ranked) - len(coloured)} other groups"] * (len(coloured) < len(ranked))
    return colour_of[group[chosen] + 1].tolist(), labels


def _placed(values: Array, start: float, stop: float) -> tuple[list[str], list[tuple[str, str]]]:
    """Values on an axis from ``start`` to ``stop``: their places, and ticks with their texts."""
    from matplotlib.ticker import MaxNLocator

    low, high = float(values.min()), float(values.max())
    pad = 0.04 * (high - low) or 1.0
    low, high = low - pad, high + pad

    def place(value: float) -> str:
        return f"{start + (value - low) / (high - low) * (stop - start):.1f}"

    ticks = [float(tick) for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
    texts = [f"{tick:.4g}".replace("-", "−") for tick in ticks]
    return [place(value) for value in values.tolist()], list(zip(map(place, ticks), texts, strict=True))
