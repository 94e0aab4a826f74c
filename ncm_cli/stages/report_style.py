"""How every figure looks: readable in grey, with line styles, markers and hatches beside colours."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.store.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

COLOURS = ("#000000", "#D55E00", "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#7F7F7F", "#CC79A7", "#8C510A")
"""Okabe and Ito's, which colour-blind readers tell apart; neighbours differ in grey as well."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ((0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (4, 2, 1, 2, 1, 2)))
LINES = ("-", "--", "-.", ":", *DASHES)
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "+++", "|||", "---")
FILLS = ("#FFFFFF", "#BDBDBD", "#E3E3E3", "#8F8F8F", "#D0D0D0", "#F2F2F2", "#A8A8A8", "#C6C6C6", "#DADADA")

MARKS = 12
"""Markers on one line at most: a denser line would hide its style."""

STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.2,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 3.2,
    "figure.constrained_layout.wspace": 0.06,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "ncm",
    "figure.constrained_layout.use": True,
}

PNG_DPI = 180


@contextmanager
def figure(width: float, height: float, **grid: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure in the common style, drawn without a display, and its axes."""
    # It warns where it has no home folder for its fonts' cache, and makes a temporary one.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The defaults first, so that a reader's own matplotlibrc can't change the files.
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "agg"}):
        made = Figure(figsize=(width, height))
        FigureCanvasAgg(made)
        yield made, made.subplots(**grid)


def save(made: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.svg``: the same bytes for the same data."""
    written = []
    formats: dict[str, dict[str, Any]] = {
        "png": {"dpi": PNG_DPI, "metadata": {"Software": None}},
        "svg": {"metadata": {"Date": None}},
    }
    for suffix, options in formats.items():
        path = folder / f"{name}.{suffix}"
        with atomic_path(path) as temporary:
            made.savefig(temporary, format=suffix, **options)
        written.append(path)
    return written


def slug(text: str) -> str:
    """``text`` as a part of a file name."""
    return re.sub(r"[^\w.=-]+", "-", text).strip("-.") or "plot"


def line(
    axes: Axes,
    x: Array,
    runs: Array,
    *,
    index: int,
    label: str | None,
    style: Any = None,
    marker: bool = True,
    width: float = 1.5,
) -> None:
    """The mean of ``runs`` (repetitions, points) over ``x``, shaded by one standard deviation.

    ``index`` picks colour and marker, and the line style unless ``style`` is given. Points that not every run
    has are left out: the mean would jump there.
    """
    known = np.isfinite(runs).all(axis=0)
    x, runs = x[known], runs[:, known]
    if not len(x):
        return
    mean = runs.mean(axis=0)
    colour = COLOURS[index % len(COLOURS)]
    axes.plot(
        x,
        mean,
        color=colour,
        linestyle=LINES[index % len(LINES)] if style is None else style,
        marker=MARKERS[index % len(MARKERS)] if marker else None,
        markevery=max(1, -(-len(x) // MARKS)),
        markerfacecolor="white",
        linewidth=width,
        label=label,
    )
    if len(runs) > 1:
        deviation = runs.std(axis=0, ddof=1)
        axes.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)


def legend_below(made: Figure, axes: Axes, columns: int = 3) -> None:
    """One legend under the figure, where it can't cover a line."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        made.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(handles)))
