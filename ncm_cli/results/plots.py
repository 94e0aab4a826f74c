"""Draws figures, as files and for a page. Lines differ in grey level, marker and dashes as well as colour."""

from __future__ import annotations

import base64
import io
import logging
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncm_cli.results.lines import ORACLE
from ncm_cli.results.tables import Spread
from ncm_cli.store.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

Curves = dict[str, Array]
"""Quantities along one axis: ``x`` (points,), the others (repetitions, points), NaN where unknown."""

COLOURS = ("#000000", "#D55E00", "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#7F7F7F", "#CC79A7", "#8C510A")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; neighbours differ in grey level."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ((0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (4, 2, 1, 2, 1, 2)))
LINES = ("-", "--", "-.", ":", *DASHES)
GREY, GRID, PAPER = "#555555", "#E6E6E6", "#FFFFFF"

MAX_MARKERS = 12
"""Markers on one line: more would hide its dashes."""

MAX_POINTS = 500
"""Points of one line: more can't be told apart in print."""

MAX_END_LABELS, MAX_END_LABEL = 4, 32
"""Most lines that are named at their ends, and most characters of such a name; beyond, there is a legend."""

MAX_GROUPS = 40
"""Groups in one figure: the worst ones."""

STYLE: dict[str, Any] = {
    "font.size": 9,
    # The later fonts have glyphs that the first lacks.
    "font.sans-serif": [
        "DejaVu Sans",
        "Noto Sans CJK SC",
        "Noto Sans CJK JP",
        "Hiragino Sans",
        "Microsoft YaHei",
    ],
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.2,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 3.2,
    "figure.constrained_layout.wspace": 0.06,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "ncm",
    # TrueType: publishers refuse matplotlib's default, Type 3, and text stays text.
    "pdf.fonttype": 42,
}

FORMATS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 180, "metadata": {"Software": None}},
    "svg": {"metadata": {"Date": None}},
    "pdf": {"metadata": {"CreationDate": None}},
}
"""Metadata without dates, so that the same data give the same bytes."""


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
"""Characters that can't be drawn, or that change the direction of the text beside them."""


class Plot(NamedTuple):
    """One figure of a report."""

    name: str
    """The file's name without suffix: the kind of figure, and what distinguishes it from others."""
    title: str
    text: str
    """A description for readers who can't see the figure."""
    figure: Figure

    def files(self, folder: Path) -> list[Path]:
        """``NAME.png``, ``NAME.svg`` and ``NAME.pdf``."""
        return [folder / f"{self.name}.{suffix}" for suffix in FORMATS]


@contextmanager
def _style(**settings: Any) -> Iterator[None]:
    # Without a home folder, matplotlib warns that its font cache is in a temporary folder.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    # The defaults come first, so that a user's matplotlibrc can't change the files.
    rc = {**matplotlib.rcParamsDefault, **STYLE, "backend": "agg", **settings}
    with matplotlib.rc_context(rc), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


@contextmanager
def styled_figure(width: float, height: float, **grid: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure in the common style, drawn without a display, and its axes."""
    with _style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        canvas = FigureCanvasAgg(Figure(figsize=(width, height)))
        yield canvas.figure, canvas.figure.subplots(**grid)


def load_matplotlib() -> None:
    """Draw an empty figure: all that figures need is then imported, which takes a second."""
    with styled_figure(1, 1) as (figure, _):
        for suffix in FORMATS:
            figure.savefig(io.BytesIO(), format=suffix)


def save(plot: Plot, folder: Path) -> list[Path]:
    """Write `Plot.files`."""
    written = plot.files(folder)
    with _style():
        for path, (suffix, options) in zip(written, FORMATS.items(), strict=True):
            with atomic_path(path) as temporary:
                plot.figure.savefig(temporary, format=suffix, **options)
    return written


def image_url(plot: Plot) -> str:
    """A ``data:`` URL of the figure as SVG, transparent; text stays text, in the reader's own font."""
    file = io.StringIO()
    with _style(**{"svg.fonttype": "none"}):
        plot.figure.savefig(file, format="svg", transparent=True, metadata=FORMATS["svg"]["metadata"])
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", file.getvalue())
    return f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode('ascii')}"


def ink(colour: str) -> str:
    """A colour for text: dark enough to be read on white."""
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * 0.7):02x}" for i in (1, 3, 5))


def drawable(text: str, most: int = 60) -> str:
    """A user's text for matplotlib: no formula, no control characters, not too long."""
    text = _CONTROL.sub(" ", text)
    # matplotlib omits names that begin with an underscore from legends, so a zero-width space goes first.
    text = "\u200b" + text if text.startswith("_") else text
    if len(text) > most:
        text = f"{text[: most * 2 // 3]}…{text[len(text) - most // 3 + 1 :]}"
    return text.replace("$", r"\$")


def _marker(index: int) -> str:
    """The marker of a line; lines of the same colour have different ones."""
    return MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]


def line(
    axes: Axes, x: Array, runs: Array, *, index: int, label: str, style: Any = None, thin: bool = False
) -> None:
    """The mean of ``runs`` (repetitions, points) over ``x``, shaded by one standard deviation.

    ``index`` picks colour and marker, and the line style unless ``style`` is given. Points that some run
    lacks are left out, since the mean would jump there.
    """
    known = np.flatnonzero(np.isfinite(runs).all(axis=0))
    if not len(known):
        return
    if len(known) > MAX_POINTS:
        known = known[np.linspace(0, len(known) - 1, MAX_POINTS).round().astype(int)]
    x, runs = x[known], runs[:, known]
    mean = runs.mean(axis=0)
    colour = COLOURS[index % len(COLOURS)]
    axes.plot(
        x,
        mean,
        color=colour,
        linestyle=LINES[index % len(LINES)] if style is None else style,
        marker=None if thin else _marker(index),
        markevery=max(1, -(-len(x) // MAX_MARKERS)),
        markerfacecolor=PAPER,
        linewidth=1.0 if thin else 1.5,
        label=label,
        clip_on=False,
    )
    if len(runs) > 1:
        deviation = runs.std(axis=0, ddof=1)
        axes.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)


def name_lines(figure: Figure, panels: Iterable[Axes], columns: int = 3) -> None:
    """Name up to `MAX_END_LABELS` curves at their ends, and more in one legend under the figure."""
    panels = list(panels)
    named = _named(panels[0])
    longest = max((len(curve.get_label()) for curve in named), default=0)
    if sum(curve.get_color() != GREY for curve in named) <= MAX_END_LABELS and longest <= MAX_END_LABEL:
        for axes in panels:
            _name_ends(axes, figure.get_figheight())
    else:
        _legend(figure, panels[0], columns)


def _named(axes: Axes) -> list[Any]:
    return [curve for curve in axes.lines if str(curve.get_label())[:1] != "_"]


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        room = figure.get_figwidth() * 72 / (max(map(len, labels)) * 4.6 + 45)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=max(1, min(columns, len(handles), int(room)))
        )


def _name_ends(axes: Axes, inches: float) -> None:
    """Each line's label beside its right end, moved up or down just enough to keep labels apart."""
    lines = _named(axes)
    axes.set_ylim(axes.get_ylim())
    to_axes = axes.transScale + axes.transLimits
    heights = [to_axes.transform(np.transpose([[0.5] * len(y), y]))[:, 1] for y in map(_y, lines)]
    # Labels of lines that end in one point are in the order of the lines before it.
    order = sorted(range(len(lines)), key=lambda i: (round(heights[i][-1], 2), heights[i].mean()))
    gap = 12 / (72 * (inches - 0.9))
    # The nearest places in this order that are a gap apart: labels that would overlap share their mean.
    blocks: list[list[float]] = []
    for place, i in enumerate(order):
        blocks.append([heights[i][-1] - place * gap])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    most = 1 - gap * (len(lines) - 1)
    places = [min(max(float(np.mean(block)), 0), most) for block in blocks for _ in block]
    for place, i in enumerate(order):
        axes.annotate(
            lines[i].get_label(),
            (1, places[place] + place * gap),
            xycoords="axes fraction",
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=ink(lines[i].get_color()),
            annotation_clip=False,
        )


def _y(curve: Any) -> Array:
    return np.asarray(curve.get_ydata(), dtype=np.float64)


HEADS = {"rank": "rank r (dimensions removed)", "pairs": "number of pairs k"}


class References(NamedTuple):
    """Straight lines: test accuracies, the given number of spurious dimensions, the chosen rank."""

    oracle: float | None = None
    erm: float | None = None
    spurious_dim: int | None = None
    chosen: tuple[float, str] | None = None
    """The x and the label of the chosen rank; None for the rank with the least 0-1 bound."""


def _upright(axes: Axes, x: float, text: str, *, colour: str = GREY, level: int = 0) -> None:
    """A vertical line at ``x`` with a text above the axes, where nothing else is drawn."""
    axes.axvline(x, color=colour, linestyle=(0, (1, 2)), linewidth=1)
    low, high = axes.get_xlim()
    place = (x - low) / (high - low)
    axes.annotate(
        text,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3 + 11 * level),
        textcoords="offset points",
        ha="left" if place < 0.2 else "right" if place > 0.8 else "center",
        fontsize=8,
        color=ink(colour) if colour in COLOURS else colour,
        annotation_clip=False,
    )


def _lines(
    axes: Axes, curves: Curves, looks: dict[str, tuple[str, int, str]], of: Callable[[Array], Array]
) -> None:
    """Draw ``of`` each quantity in ``looks``, which has its (label, index, style)."""
    for name, (label, index, style) in looks.items():
        line(axes, curves["x"], of(curves[name]), index=index, style=style, label=label)


def accuracy_plot(
    name: str,
    lines: Mapping[str, Curves],
    references: References,
    *,
    key: str,
    words: tuple[str, str] = ("in-domain", "test domain"),
    regression: bool = False,
) -> Plot:
    """Accuracy (or MSE) against ``key``: of one label with its 0-1 bound, or of several, each in a colour."""
    several, of = len(lines) > 1, np.asarray if regression else _accuracy
    measure = "MSE" if regression else "accuracy"
    notes = []
    with styled_figure(5.9, 4.1 if several else 3.7) as (figure, axes):
        for index, (label, curves) in enumerate(lines.items() if several else ()):
            _lines(axes, curves, {"test_error": (drawable(label), index, "-")}, of)
        for index, curves in enumerate(lines.values() if several else ()):
            text, dashed = f"_{index}" if index else f"the same, {words[0]}", (0, (4, 2))
            line(
                axes, curves["x"], of(curves["twin_error"]), index=index, style=dashed, thin=True, label=text
            )
        for curves in () if several else lines.values():
            looks = {"twin_error": (words[0], 2, "--"), "test_error": (words[1], 0, "-")}
            bound_name = "MSE bound" if regression else "1 − (0-1 bound)"
            _lines(axes, curves, looks | {"zero_one_bound": (bound_name, 1, ":")}, of)
            chosen = references.chosen
            if chosen is None and np.isfinite(bound := curves["zero_one_bound"]).any():
                least = curves["x"][int(np.nanargmin(np.nanmean(bound, axis=0)))]
                chosen = least, f"least bound: r = {least:g}"
            if chosen is not None:
                _upright(axes, *chosen, colour=COLOURS[1])
                notes.append(chosen[1])
        for value, label, style in (
            (references.oracle, f"{ORACLE}: trained on the test domain", (0, (8, 3))),
            (references.erm, "ERM, test domain", (0, (1, 1.5))),
        ):
            if value is not None:
                axes.axhline(value, color=GREY, linestyle=style, linewidth=1.1, label=label)
                notes.append(f"{label} {value:.3f}")
        if references.spurious_dim is not None:
            _upright(axes, references.spurious_dim, f"|I| = {references.spurious_dim}", level=len(lines) == 1)
        axes.set(xlabel=HEADS[key], ylabel=f"test {measure}" if several else measure)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 0))
        name_lines(figure, [axes], columns=2 if several else 3)
    title = f"{measure.capitalize() if measure != 'MSE' else measure} against {HEADS[key]}"
    of_line = ", ".join(lines) if several else "; ".join(_ends(axes))
    return Plot(name, title, "; ".join([f"{title}: {of_line}", *notes]), figure)


def _accuracy(errors: Array) -> Array:
    """Accuracies of errors; a bound on the error above 1 gives no accuracy below 0."""
    return np.maximum(1 - errors, 0)


def _ends(axes: Axes) -> list[str]:
    """Where the curves start and end, in words."""
    curves = [curve for curve in _named(axes) if curve.get_color() != GREY]
    return [f"{curve.get_label()} from {_y(curve)[0]:.3g} to {_y(curve)[-1]:.3g}" for curve in curves]


_LOSSES = {
    "bound": ("Term I + Term II", 1, "-"),
    "term_1": ("Term I", 2, "--"),
    "term_2": ("Term II", 4, "-."),
    "test_risk": ("test risk, measured", 0, "-"),
}
_SHARES = {
    "zero_one_bound": ("0-1 bound", 1, "-"),
    "twin_error": ("twins' error", 2, "--"),
    "flip_rate": ("flip rate", 4, "-."),
    "test_error": ("test error, measured", 0, "-"),
}


def tradeoff_plot(name: str, label: str, curves: Curves, references: References) -> Plot:
    """Term I + Term II against the measured test risk, and the 0-1 bound against the measured test error."""
    panels = 2 if np.isfinite(curves["zero_one_bound"]).any() else 1
    with styled_figure(1 + 4.1 * panels, 3.4, ncols=panels, squeeze=False) as (figure, grid):
        axes = grid[0]
        _lines(axes[0], curves, _LOSSES, _positive)
        axes[0].set(ylabel="loss", yscale="log", title="Theorem 1")
        if panels > 1:
            _lines(axes[1], curves, _SHARES, np.asarray)
            axes[1].set(ylabel="share of rows", ylim=(0, None), title="0-1 bound")
        for panel in axes:
            panel.set_xlabel(HEADS["rank"])
            if references.spurious_dim is not None:
                _upright(panel, references.spurious_dim, "")
        name_lines(figure, axes)
        figure.suptitle(drawable(label), fontsize=9.5)
    title = f"Bound on the test-domain risk along the ranks: {label}"
    return Plot(name, title, "; ".join([title, *(ends for panel in axes for ends in _ends(panel))]), figure)


def _positive(values: Array) -> Array:
    """The positive values; NaN for others, which a logarithmic axis can't show."""
    return np.where(values > 0, values, np.nan)


def spectrum_plot(name: str, spectra: Mapping[str, Array]) -> Plot:
    """Singular values of pair differences on a logarithmic axis."""
    with styled_figure(5.6, 3.4) as (figure, axes):
        for index, (label, values) in enumerate(spectra.items()):
            position = np.arange(1, len(values) + 1, dtype=np.float64)
            line(axes, position, _positive(values)[None, :], index=index, label=drawable(label))
        axes.set(xlabel="index", ylabel="singular value of the pairs' differences", yscale="log")
        name_lines(figure, [axes])
    title = "Spectrum of the pairs' differences"
    return Plot(name, title, "; ".join([title, *_ends(axes)]), figure)


def calibration_plot(name: str, where: str, curves: Mapping[str, Curves]) -> Plot:
    """Accuracy against confidence, by bins, with the line of a calibrated probe; Guo et al. (2017)."""
    with styled_figure(4.6, 4.0) as (figure, axes):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (1, 2)), label="calibrated")
        for index, (label, curve) in enumerate(curves.items()):
            line(axes, curve["x"], curve["accuracy"], index=index, label=drawable(label))
        axes.set(xlabel="confidence (mean of the bin)", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        _legend(figure, axes, 2)
    title = f"Calibration on {where}"
    return Plot(name, title, "; ".join([title, *_ends(axes)]), figure)


Dots = Mapping[str, Mapping[Any, Spread]]
"""Values by series, and then by group or method."""


def dot_plot(name: str, title: str, panels: Mapping[str, Dots], rows: Mapping[Any, str], head: str) -> Plot:
    """Values with their intervals: ``rows`` (names and labels) from the top, a marker for each series."""
    series = list(dict.fromkeys(label for dots in panels.values() for label in dots))
    step = 0.8 / len(series) if len(series) > 1 else 0
    names = [drawable(label, 40) for label in rows.values()]
    wide = 1 + 0.07 * max(map(len, names)) + 2.8 * len(panels)
    head_lines = textwrap.wrap(drawable(title, 200), int(wide * 12))
    inches = 1 + 0.15 * len(head_lines) + len(rows) * max(0.22, 0.13 * len(series))
    with styled_figure(wide, inches, ncols=len(panels), sharey=True, squeeze=False) as (
        figure,
        grid,
    ):
        for axes, (what, dots) in zip(grid[0], panels.items(), strict=True):
            for index, label in enumerate(series):
                known = [(i, dots[label][row]) for i, row in enumerate(rows) if row in dots.get(label, {})]
                axes.errorbar(
                    [dot.mean for _, dot in known],
                    [i + (index - (len(series) - 1) / 2) * step for i, _ in known],
                    xerr=np.transpose([_reach(dot) for _, dot in known]) if known else None,
                    fmt=_marker(index),
                    label=drawable(label),
                    color=COLOURS[index % len(COLOURS)],
                    markerfacecolor=PAPER,
                    elinewidth=1.1,
                    clip_on=False,
                )
            axes.set(xlabel=what)
            axes.locator_params(axis="x", nbins=5)
        grid[0, 0].set_yticks(range(len(rows)), names)
        grid[0, 0].set(ylim=(len(rows) - 0.5, -0.5), ylabel=drawable(head))
        figure.suptitle("\n".join(head_lines), fontsize=9.5)
        if len(series) > 1:
            _legend(figure, grid[0, 0], 4)
    dot_texts = [
        f"{what} of {label}, {text}: {dots[label][row].mean:.3f}"
        for what, dots in panels.items()
        for row, text in rows.items()
        for label in series
        if row in dots.get(label, {})
    ]
    rest = f" and {len(dot_texts) - MAX_GROUPS} more" if len(dot_texts) > MAX_GROUPS else ""
    return Plot(name, title, f"{title}. {'; '.join(dot_texts[:MAX_GROUPS])}{rest}", figure)


def _reach(dot: Spread) -> tuple[float, float]:
    """The extent of a share's deviation or interval below and above it, within 0 and 1."""
    low, high = dot.low, dot.high
    if dot.sd is not None:
        low, high = max(dot.mean - dot.sd, 0), min(dot.mean + dot.sd, 1)
    # In a result written elsewhere the value may lie outside its interval.
    down = 0.0 if low is None else max(dot.mean - low, 0.0)
    return down, 0.0 if high is None else max(high - dot.mean, 0.0)


def convergence_plot(name: str, epochs: Array, runs: Mapping[str, Mapping[str, Array]], what: str) -> Plot:
    """Accuracy of each method during training: validation and, if known, test and its worst group."""
    titles = {"val_accuracy": "validation", "test_accuracy": "test", "test_worst_group": "test, worst group"}
    known = [key for key in titles if any(np.isfinite(run.get(key, np.nan)).any() for run in runs.values())]
    with styled_figure(1.2 + 3.6 * len(known), 3.6, ncols=len(known), squeeze=False) as (figure, grid):
        for panel, key in zip(grid[0], known, strict=True):
            for index, (label, run) in enumerate(runs.items()):
                line(panel, epochs, run[key], index=index, label=drawable(label))
            panel.set(xlabel="epoch", ylabel="accuracy", title=titles[key])
        name_lines(figure, grid[0], columns=4)
    title = f"Accuracy of each {what} along training"
    return Plot(name, title, "; ".join([title, *_ends(grid[0][-1])]), figure)
