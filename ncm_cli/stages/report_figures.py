"""The figures themselves: arrays in, PNG and SVG out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.stages.report_style import COLOURS, FILLS, HATCHES, figure, legend_below, line, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

HEADS = {"rank": "rank r (dimensions removed)", "pairs": "number of pairs k"}


@dataclasses.dataclass(frozen=True, slots=True)
class Curves:
    """Repetitions of quantities along one x: each value is (repetitions, points), NaN where unknown."""

    x: Array
    values: dict[str, Array]

    def known(self, name: str) -> bool:
        """Whether some repetition has the quantity everywhere it is defined."""
        return name in self.values and bool(np.isfinite(self.values[name]).any())


@dataclasses.dataclass(frozen=True, slots=True)
class References:
    """Straight lines: test accuracies, and the number of spurious dimensions where it is given."""

    oracle: float | None = None
    erm: float | None = None
    spurious_dim: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One bar's height and the lengths of its error bar; ``n`` rows where it is of a single result."""

    value: float
    below: float
    above: float
    n: int | None


def accuracy(
    folder: Path,
    name: str,
    lines: Mapping[str, Curves],
    references: References,
    *,
    key: str,
    in_domain: str = "in-domain",
) -> list[Path]:
    """Accuracy against ``key``: for one label also the 0-1 bound, for several one colour each."""
    with figure(5.6, 4.1) as (made, axes):
        several = len(lines) > 1
        if several:
            _several(axes, lines, in_domain)
        else:
            _single(axes, next(iter(lines.values())), in_domain)
        _horizontal(axes, references)
        if references.spurious_dim is not None:
            axes.axvline(references.spurious_dim, color="#555555", linestyle=(0, (2, 2)), linewidth=1)
            axes.annotate(
                f"|I| = {references.spurious_dim}",
                (references.spurious_dim, 0.015),
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=8,
            )
        axes.set(xlabel=HEADS[key], ylabel="test accuracy" if several else "accuracy")
        axes.margins(x=0.02)
        legend_below(made, axes, columns=2 if several else 3)
        return save(made, folder, name)


def _several(axes: Axes, lines: Mapping[str, Curves], in_domain: str) -> None:
    for index, (label, own) in enumerate(lines.items()):
        line(axes, own.x, 1 - own.values["test_error"], index=index, style="-", label=label)
    for index, own in enumerate(lines.values()):
        inside = 1 - own.values["twin_error"]
        text = None if index else f"the same, {in_domain}"
        line(axes, own.x, inside, index=index, style=(0, (4, 2)), marker=False, width=1.0, label=text)


def _single(axes: Axes, own: Curves, in_domain: str) -> None:
    if own.known("twin_error"):
        line(axes, own.x, 1 - own.values["twin_error"], index=2, style="--", label=in_domain)
    if own.known("test_error"):
        line(axes, own.x, 1 - own.values["test_error"], index=0, style="-", label="test domain")
    if own.known("zero_one_bound"):
        guarantee = 1 - own.values["zero_one_bound"]
        line(axes, own.x, guarantee, index=1, style=":", label="1 − (0-1 bound)")
        least = own.x[int(np.nanargmax(np.nanmean(guarantee, axis=0)))]
        axes.axvline(least, color=COLOURS[1], linestyle=(0, (1, 2)), linewidth=1)
        axes.annotate(
            f"least bound: r = {least:g}",
            (least, 0.985),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if least > own.x.mean() else 4, 0),
            textcoords="offset points",
            ha="right" if least > own.x.mean() else "left",
            va="top",
            fontsize=8,
            color=COLOURS[1],
        )


def _horizontal(axes: Axes, references: References) -> None:
    for value, label, style in (
        (references.oracle, "ORACLE: trained on the test domain", (0, (8, 3))),
        (references.erm, "ERM, test domain", (0, (1, 1.5))),
    ):
        if value is not None:
            axes.axhline(value, color="#555555", linestyle=style, linewidth=1.1, label=label)


def tradeoff(folder: Path, name: str, label: str, own: Curves, references: References) -> list[Path]:
    """Term I + Term II against the measured test risk, and the 0-1 bound against the measured test error."""
    classes = own.known("zero_one_bound")
    with figure(7.4 if classes else 4.2, 3.7, ncols=2 if classes else 1, squeeze=False) as (made, axes):
        left = axes[0, 0]
        for index, (key, text, style) in enumerate(
            (
                ("bound", "Term I + Term II", "-"),
                ("term_1", "Term I", "--"),
                ("term_2", "Term II", "-."),
                ("test_risk", "test risk, measured", "-"),
            )
        ):
            line(left, own.x, _positive(own.values[key]), index=(1, 2, 4, 0)[index], style=style, label=text)
        left.set(xlabel=HEADS["rank"], ylabel="loss", yscale="log", title=f"Theorem 1: {label}")
        panels = [left]
        if classes:
            right = axes[0, 1]
            panels.append(right)
            for index, (key, text, style) in enumerate(
                (
                    ("zero_one_bound", "0-1 bound", "-"),
                    ("twin_error", "twins' error", "--"),
                    ("flip_rate", "flip rate", "-."),
                    ("test_error", "test error, measured", "-"),
                )
            ):
                line(right, own.x, own.values[key], index=(1, 2, 4, 0)[index], style=style, label=text)
            right.set(xlabel=HEADS["rank"], ylabel="share of rows", title=f"0-1 bound: {label}")
            right.set_ylim(bottom=0)
        for panel in panels:
            panel.margins(x=0.02)
            if references.spurious_dim is not None:
                panel.axvline(references.spurious_dim, color="#555555", linestyle=(0, (2, 2)), linewidth=1)
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        return save(made, folder, name)


def _positive(values: Array) -> Array:
    """For a logarithmic axis: zeros have no place on it."""
    return np.where(values > 0, values, np.nan)


def spectrum(folder: Path, name: str, spectra: Mapping[str, Array]) -> list[Path]:
    """Singular values of pair differences on a logarithmic axis."""
    with figure(5.2, 3.7) as (made, axes):
        for index, (label, values) in enumerate(spectra.items()):
            position = np.arange(1, len(values) + 1, dtype=np.float64)
            line(axes, position, _positive(values)[None, :], index=index, label=label)
        axes.set(xlabel="index", ylabel="singular value of the pairs' differences", yscale="log")
        axes.margins(x=0.02)
        legend_below(made, axes)
        return save(made, folder, name)


def group_bars(folder: Path, name: str, where: str, bars: Mapping[str, Mapping[str, Bar]]) -> list[Path]:
    """Accuracy of each group, one hatched bar for each label, with its error bar."""
    groups = list(dict.fromkeys(group for own in bars.values() for group in own))
    width = 0.82 / len(bars)
    inches = min(14.0, max(4.6, 1.2 + len(groups) * (0.35 + 0.3 * len(bars))))
    with figure(inches, 3.8) as (made, axes):
        for index, (label, own) in enumerate(bars.items()):
            known = [(position, own[group]) for position, group in enumerate(groups) if group in own]
            axes.bar(
                [position + (index - (len(bars) - 1) / 2) * width for position, _ in known],
                [bar.value for _, bar in known],
                width * 0.94,
                yerr=np.array([[bar.below for _, bar in known], [bar.above for _, bar in known]]),
                label=label,
                facecolor=FILLS[index % len(FILLS)],
                edgecolor="black",
                hatch=HATCHES[index % len(HATCHES)],
                linewidth=0.8,
                error_kw={"elinewidth": 1, "capsize": 2.5},
            )
        single = all(bar.n is not None for own in bars.values() for bar in own.values())
        axes.set_xticks(range(len(groups)), [_tick(group, bars) for group in groups])
        kind = "95 % Wilson intervals" if single else "standard deviation over repetitions"
        axes.set(ylabel="accuracy", title=f"{where} ({kind})")
        axes.set_ylim(0, 1.02)
        axes.grid(axis="x", visible=False)
        legend_below(made, axes, columns=4)
        return save(made, folder, name)


def _tick(group: str, bars: Mapping[str, Mapping[str, Bar]]) -> str:
    sizes = {own[group].n for own in bars.values() if group in own}
    size = sizes.pop() if len(sizes) == 1 else None
    return group if size is None else f"{group}\nn = {size:,}"


def convergence(folder: Path, name: str, epochs: Array, runs: Mapping[str, dict[str, Any]]) -> list[Path]:
    """Validation and, where known, test accuracy of each method's in-domain pick along training."""
    known = [
        (key, title)
        for key, title in (("val_accuracy", "validation"), ("test_accuracy", "test domain"))
        if any(np.isfinite(own[key]).any() for own in runs.values())
    ]
    with figure(1.2 + 3.3 * len(known), 3.9, ncols=len(known), squeeze=False) as (made, axes):
        for panel, (key, title) in zip(axes[0], known, strict=True):
            for index, (label, own) in enumerate(runs.items()):
                line(panel, epochs, own[key], index=index, label=label)
            panel.set(xlabel="epoch", ylabel="accuracy", title=title)
            panel.margins(x=0.02)
        legend_below(made, axes[0, 0], columns=4)
        return save(made, folder, name)
