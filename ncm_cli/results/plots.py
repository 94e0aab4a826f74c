"""The figures of a report: readable in grey, with line styles, markers and hatches beside colours."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.progress import Reporter
from ncm_cli.results.lines import Found, Line, Mean, Sources, lines_of
from ncm_cli.results.report import TIE
from ncm_cli.store.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

Curves = dict[str, Array]
"""Quantities along one axis: ``x`` (points), each other (repetitions, points), NaN where unknown."""

COLOURS = ("#000000", "#D55E00", "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#7F7F7F", "#CC79A7", "#8C510A")
"""Okabe and Ito's, which colour-blind readers tell apart; neighbours differ in grey as well."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ((0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (4, 2, 1, 2, 1, 2)))
LINES = ("-", "--", "-.", ":", *DASHES)
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "+++", "|||", "---")
FILLS = ("#FFFFFF", "#BDBDBD", "#E3E3E3", "#8F8F8F", "#D0D0D0", "#F2F2F2", "#A8A8A8", "#C6C6C6", "#DADADA")
GREY = "#555555"

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
    "axes.xmargin": 0.02,
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

FORMATS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 180, "metadata": {"Software": None}},
    "svg": {"metadata": {"Date": None}},
}
"""Written without a date, so that the same data give the same bytes."""


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
    """Write ``name.png`` and ``name.svg``."""
    written = [folder / f"{name}.{suffix}" for suffix in FORMATS]
    for path, (suffix, options) in zip(written, FORMATS.items(), strict=True):
        with atomic_path(path) as temporary:
            made.savefig(temporary, format=suffix, **options)
    return written


def line(
    axes: Axes, x: Array, runs: Array, *, index: int, label: str | None, style: Any = None, thin: bool = False
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
        marker=None if thin else MARKERS[index % len(MARKERS)],
        markevery=max(1, -(-len(x) // MARKS)),
        markerfacecolor="white",
        linewidth=1.0 if thin else 1.5,
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


HEADS = {"rank": "rank r (dimensions removed)", "pairs": "number of pairs k"}


@dataclasses.dataclass(frozen=True, slots=True)
class References:
    """Straight lines: test accuracies, and the number of spurious dimensions where it is given."""

    oracle: float | None = None
    erm: float | None = None
    spurious_dim: int | None = None


def _upright(axes: Axes, x: float, text: str, *, colour: str = GREY, top: bool = False) -> None:
    """A line up at ``x``, and a text beside it."""
    axes.axvline(x, color=colour, linestyle=(0, (1, 2) if top else (2, 2)), linewidth=1)
    right = top and x > np.mean(axes.get_xlim())
    axes.annotate(
        text,
        (x, 0.985 if top else 0.015),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if right else 4, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top" if top else "baseline",
        fontsize=8,
        color=colour,
    )


def _lines(
    axes: Axes, own: Curves, looks: dict[str, tuple[str, int, str]], of: Callable[[Array], Array]
) -> None:
    """Quantities, by (label, index, style), each after ``of``."""
    for name, (label, index, style) in looks.items():
        line(axes, own["x"], of(own[name]), index=index, style=style, label=label)


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
    several = len(lines) > 1
    with figure(5.6, 4.1) as (made, axes):
        for index, (label, own) in enumerate(lines.items() if several else ()):
            _lines(axes, own, {"test_error": (label, index, "-")}, _complement)
        for index, own in enumerate(lines.values() if several else ()):
            text = None if index else f"the same, {in_domain}"
            dashed = (0, (4, 2))
            line(axes, own["x"], 1 - own["twin_error"], index=index, style=dashed, thin=True, label=text)
        for own in () if several else lines.values():
            looks = {"twin_error": (in_domain, 2, "--"), "test_error": ("test domain", 0, "-")}
            _lines(axes, own, looks | {"zero_one_bound": ("1 − (0-1 bound)", 1, ":")}, _complement)
            if np.isfinite(bound := own["zero_one_bound"]).any():
                least = own["x"][int(np.nanargmin(np.nanmean(bound, axis=0)))]
                _upright(axes, least, f"least bound: r = {least:g}", colour=COLOURS[1], top=True)
        for value, label, style in (
            (references.oracle, "ORACLE: trained on the test domain", (0, (8, 3))),
            (references.erm, "ERM, test domain", (0, (1, 1.5))),
        ):
            if value is not None:
                axes.axhline(value, color=GREY, linestyle=style, linewidth=1.1, label=label)
        if references.spurious_dim is not None:
            _upright(axes, references.spurious_dim, f"|I| = {references.spurious_dim}")
        axes.set(xlabel=HEADS[key], ylabel="test accuracy" if several else "accuracy")
        legend_below(made, axes, columns=2 if several else 3)
        return save(made, folder, name)


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


def tradeoff(folder: Path, name: str, label: str, own: Curves, references: References) -> list[Path]:
    """Term I + Term II against the measured test risk, and the 0-1 bound against the measured test error."""
    panels = 2 if np.isfinite(own["zero_one_bound"]).any() else 1
    with figure(1 + 3.2 * panels, 3.7, ncols=panels, squeeze=False) as (made, axes):
        _lines(axes[0, 0], own, _LOSSES, _positive)
        axes[0, 0].set(ylabel="loss", yscale="log", title=f"Theorem 1: {label}")
        if panels > 1:
            _lines(axes[0, 1], own, _SHARES, np.asarray)
            axes[0, 1].set(ylabel="share of rows", ylim=(0, None), title=f"0-1 bound: {label}")
        for panel in axes[0]:
            panel.set_xlabel(HEADS["rank"])
            if references.spurious_dim is not None:
                _upright(panel, references.spurious_dim, "")
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
        legend_below(made, axes)
        return save(made, folder, name)


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One bar's height and the ends of its error bar; ``n`` rows where it is of a single result."""

    value: float
    low: float
    high: float
    n: int | None


def group_bars(folder: Path, name: str, where: str, bars: Mapping[str, Mapping[str, Bar]]) -> list[Path]:
    """Accuracy of each group, one hatched bar for each label, with its error bar."""
    groups = list(dict.fromkeys(group for own in bars.values() for group in own))
    width = 0.82 / len(bars)
    inches = min(14.0, max(4.6, 1.2 + len(groups) * (0.35 + 0.3 * len(bars))))
    with figure(inches, 3.8) as (made, axes):
        for index, (label, own) in enumerate(bars.items()):
            known = [own[group] for group in groups if group in own]
            # A foreign result may have an interval beside its value.
            errors = [[max(bar.value - bar.low, 0), max(bar.high - bar.value, 0)] for bar in known]
            axes.bar(
                [i + (index - (len(bars) - 1) / 2) * width for i, group in enumerate(groups) if group in own],
                [bar.value for bar in known],
                width * 0.94,
                yerr=np.transpose(errors),
                label=label,
                facecolor=FILLS[index % len(FILLS)],
                edgecolor="black",
                hatch=HATCHES[index % len(HATCHES)],
                linewidth=0.8,
                error_kw={"elinewidth": 1, "capsize": 2.5},
            )
        sizes = {group: {own[group].n for own in bars.values() if group in own} for group in groups}
        shown = {group: next(iter(found)) if len(found) == 1 else None for group, found in sizes.items()}
        ticks = [group if size is None else f"{group}\nn = {size:,}" for group, size in shown.items()]
        axes.set_xticks(range(len(groups)), ticks)
        repeated = any(None in found for found in sizes.values())
        kind = "standard deviation over repetitions" if repeated else "95 % Wilson intervals"
        axes.set(ylabel="accuracy", title=f"{where} ({kind})", ylim=(0, 1.02))
        axes.grid(axis="x", visible=False)
        legend_below(made, axes, columns=4)
        return save(made, folder, name)


def convergence(
    folder: Path, name: str, epochs: Array, runs: Mapping[str, Mapping[str, Array]]
) -> list[Path]:
    """Validation and, where known, test accuracy of each method's in-domain pick along training."""
    titles = {"val_accuracy": "validation", "test_accuracy": "test domain"}
    known = [key for key in titles if any(np.isfinite(own[key]).any() for own in runs.values())]
    with figure(1.2 + 3.3 * len(known), 3.9, ncols=len(known), squeeze=False) as (made, axes):
        for panel, key in zip(axes[0], known, strict=True):
            for index, (label, own) in enumerate(runs.items()):
                line(panel, epochs, own[key], index=index, label=label)
            panel.set(xlabel="epoch", ylabel="accuracy", title=titles[key])
        legend_below(made, axes[0, 0], columns=4)
        return save(made, folder, name)


def draw(
    sources: Sources, evals: Sequence[Line], bounds: Sequence[Line], folder: Path, reporter: Reporter
) -> Iterator[Path]:
    """Draw every figure that the sources have data for; yields the files."""
    count = 0
    for paths in (
        _bound_figures(bounds, folder),
        _probe_figures(lines_of(sources.probes, "file", reporter), folder),
        _group_figures(evals, folder),
        _spectrum_figure(sources, folder),
        _convergence_figures(sources, folder),
    ):
        for path in paths:
            count += 1
            yield path
    if not count:
        reporter.warn("nothing to draw: plots need paths (ncm bound --ranks), groups, sweeps or pair stores")


def _slug(text: str) -> str:
    """``text`` as a part of a file name."""
    return re.sub(r"[^\w.=-]+", "-", text).strip("-.") or "plot"


def _curves(paths: Sequence[Sequence[dict[str, Any]]], key: str) -> Curves:
    """Repetitions of a path as arrays over the union of their x values."""
    x = sorted({int(row[key]) for path in paths for row in path})
    names = [name for name in paths[0][0] if name not in (key, "converged")]
    found = {name: np.full((len(paths), len(x)), np.nan) for name in names}
    for run, path in enumerate(paths):
        for row in path:
            for name in names:
                if row.get(name) is not None:
                    found[name][run, x.index(int(row[key]))] = row[name]
    return {**found, "x": np.array(x, dtype=np.float64)}


def _titles(lines: Sequence[Line]) -> list[str]:
    """A name that each line has for itself: with the selection rule where only that differs."""
    labels = [one.label for one in lines]
    return [f"{one.label}, {one.selection}" if labels.count(one.label) > 1 else one.label for one in lines]


def references_of(lines: Sequence[Line]) -> References:
    """The straight lines, each where all have the same: no mean is taken over what isn't repeated."""

    def shared(value: Callable[[Found], float | None]) -> float | None:
        means = [mean.mean for one in lines if (mean := Mean.of(map(value, one.found)))]
        return means[0] if means and all(abs(mean - means[0]) < TIE for mean in means) else None

    found = [one.body for own in lines for one in own.found]
    given = {
        body["spurious_dim"] for body in found if (body.get("estimates") or {}).get("spurious_dim") == "given"
    }
    return References(
        oracle=shared(lambda one: _complement((one.body.get("oracle") or {}).get("test_error"))),
        erm=shared(lambda one: (one.body.get("summary") or {}).get("erm_test_accuracy")),
        spurious_dim=given.pop() if len(given) == 1 else None,
    )


def _bound_figures(lines: Sequence[Line], folder: Path) -> Iterator[Path]:
    titles = _titles(lines)

    def paths(of: Line, field: str) -> list[Any]:
        return [one.body[field] for one in of.found if one.body.get(field)]

    for key, field, name in (("rank", "path", "accuracy-rank"), ("pairs", "pair_counts", "accuracy-pairs")):
        every = {title: paths(own, field) for title, own in zip(titles, lines, strict=True)}
        curves = {title: _curves(found, key) for title, found in every.items() if found}
        curves = {title: own for title, own in curves.items() if np.isfinite(own["test_error"]).any()}
        if curves:
            yield from accuracy(folder, name, curves, references_of(lines), key=key)
    for own, title in zip(lines, titles, strict=True):
        if found := paths(own, "path"):
            name = "bound-tradeoff" if len(lines) == 1 else f"bound-tradeoff-{_slug(title)}"
            yield from tradeoff(folder, name, title, _curves(found, "rank"), references_of([own]))


def _probe_figures(lines: Sequence[Line], folder: Path) -> Iterator[Path]:
    for title, own in zip(_titles(lines), lines, strict=True):
        if paths := [path for one in own.found if (path := _rank_path(one.body))]:
            curves = {title: _curves(paths, "rank")}
            name = f"rank-path-{_slug(title)}"
            yield from accuracy(folder, name, curves, References(), key="rank", in_domain="validation")


def _rank_path(meta: dict[str, Any]) -> list[dict[str, Any]] | None:
    """A probe's selection path at the weight decay that was chosen; None where it has one rank."""
    selection = meta.get("selection") or {}
    rows = selection.get("path") or []
    if len({row.get("rank") for row in rows}) < 2:
        return None
    decay = rows[selection["chosen"]]["weight_decay"]
    return [
        {
            "rank": row["rank"],
            "twin_error": _complement(row.get("val_accuracy")),
            "test_error": _complement(row.get("test_accuracy")),
            "zero_one_bound": row.get("bound_01"),
        }
        for row in rows
        if row["weight_decay"] == decay
    ]


def _complement(value: Any) -> Any:
    return None if value is None else 1 - value


def _group_figures(lines: Sequence[Line], folder: Path) -> Iterator[Path]:
    for where in dict.fromkeys(one.where for own in lines for one in own.found):
        bars = {
            title: bars_of(one for one in own.found if one.where == where)
            for title, own in zip(_titles(lines), lines, strict=True)
        }
        bars = {label: own for label, own in bars.items() if len(own) > 1}
        if bars:
            yield from group_bars(folder, f"groups-{_slug(where)}", where, bars)


def bars_of(found: Iterable[Found]) -> dict[str, Bar]:
    """Each group's accuracy: mean and deviation over repetitions, or the interval of a single result."""
    values: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        for group in one.body.get("groups") or []:
            if group.get("accuracy") is not None:
                name = "\n".join(f"{column} {value}" for column, value in group["group"].items())
                values.setdefault(name, []).append(group)
    bars = {}
    for name, groups in values.items():
        mean = Mean.of(group["accuracy"] for group in groups)
        assert mean is not None
        if mean.sd is not None:
            bars[name] = Bar(mean.mean, mean.mean - mean.sd, mean.mean + mean.sd, None)
        else:
            (own,) = groups
            ends = own.get("ci_low"), own.get("ci_high")
            low, high = (mean.mean if end is None else float(end) for end in ends)
            bars[name] = Bar(mean.mean, low, high, int(own["n"]))
    return bars


def _spectrum_figure(sources: Sources, folder: Path) -> Iterator[Path]:
    spectra: dict[str, Array] = {}
    for path, store in sources.pairs:
        # Stores of one name, as from several seeds, differ by little: the first stands for them.
        if len(store.singular_values) > 1:
            spectra.setdefault(path.stem, store.singular_values)
    if spectra:
        yield from spectrum(folder, "spectrum", spectra)


def _convergence_figures(sources: Sources, folder: Path) -> Iterator[Path]:
    for found, table in sources.histories():
        method, runs = np.array(table.method), {}
        for pick in found.body.get("rows") or []:
            rows = (method == pick["method"]) & (table.trial == pick["trial"]) & ~table.diverged
            if pick["rule"] == "in-domain" and rows.any():
                runs[pick["method"]] = {name: values[rows] for name, values in table.metrics.items()}
        if runs and len(table.epochs) > 1:
            name = f"convergence-{_slug(found.path.stem)}"
            yield from convergence(folder, name, table.epochs.astype(np.float64), runs)
