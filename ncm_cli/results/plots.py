"""How every figure looks: readable in grey, with line styles, markers and hatches beside colours.

The figures themselves: arrays in, PNG and SVG out.

Which figures the sources of a report give, and what goes into each.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.progress import Reporter
from ncm_cli.results.lines import Found, Group, Mean, Sources, grouped
from ncm_cli.results.tables import TIE
from ncm_cli.store.files import atomic_path

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


if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def draw(
    sources: Sources, evals: Sequence[Group], bounds: Sequence[Group], folder: Path, reporter: Reporter
) -> Iterator[Path]:
    """Draw every figure that the sources have data for; yields the files."""
    count = 0
    for paths in (
        _bound_figures(bounds, folder),
        _probe_figures(grouped(sources.probes, "file", reporter), folder),
        _group_figures(evals, folder),
        _spectrum_figure(sources, folder),
        _convergence_figures(sources, folder),
    ):
        for path in paths:
            count += 1
            yield path
    if not count:
        reporter.warn("nothing to draw: plots need paths (ncm bound --ranks), groups, sweeps or pair stores")


def curves(rows: Sequence[Sequence[dict[str, Any]]], key: str) -> Curves:
    """Repetitions of a path as arrays over the union of their x values, NaN where a repetition lacks one."""
    x = sorted({int(row[key]) for path in rows for row in path})
    at = {value: index for index, value in enumerate(x)}
    names = [name for name in rows[0][0] if name not in (key, "converged")]
    values = {name: np.full((len(rows), len(x)), np.nan) for name in names}
    for run, path in enumerate(rows):
        for row in path:
            for name in names:
                if row.get(name) is not None:
                    values[name][run, at[int(row[key])]] = row[name]
    return Curves(x=np.array(x, dtype=np.float64), values=values)


def _titles(groups: Sequence[Group]) -> list[tuple[str, Sequence[Found]]]:
    """Lines by a name that each has for itself: with the selection rule where only that differs."""
    labels = [group.label for group in groups]
    return [
        (f"{group.label}, {group.selection}" if labels.count(group.label) > 1 else group.label, group.found)
        for group in groups
    ]


def _references(groups: Sequence[Group]) -> References:
    """The straight lines, each where all groups have the same: no mean is taken over what isn't repeated."""

    def shared(value: Callable[[Found], float | None]) -> float | None:
        means = [mean for group in groups if (mean := Mean.of(map(value, group.found)))]
        same = means and all(abs(one.mean - means[0].mean) < TIE for one in means)
        return means[0].mean if same else None

    given = {
        one.body["spurious_dim"]
        for group in groups
        for one in group.found
        if (one.body.get("estimates") or {}).get("spurious_dim") == "given"
    }
    return References(
        oracle=shared(lambda one: _complement((one.body.get("oracle") or {}).get("test_error"))),
        erm=shared(lambda one: (one.body.get("summary") or {}).get("erm_test_accuracy")),
        spurious_dim=given.pop() if len(given) == 1 else None,
    )


def _bound_figures(groups: Sequence[Group], folder: Path) -> Iterator[Path]:
    titles = _titles(groups)
    for key, field, name in (("rank", "path", "accuracy-rank"), ("pairs", "pair_counts", "accuracy-pairs")):
        lines = {
            title: curves(paths, key)
            for title, own in titles
            if (paths := [one.body[field] for one in own if one.body.get(field)])
        }
        lines = {title: line for title, line in lines.items() if line.known("test_error")}
        if lines:
            yield from accuracy(folder, name, lines, _references(groups), key=key)
    for group, (title, own) in zip(groups, titles, strict=True):
        paths = [one.body["path"] for one in own if one.body.get("path")]
        if paths:
            name = "bound-tradeoff" if len(groups) == 1 else f"bound-tradeoff-{slug(title)}"
            yield from tradeoff(folder, name, title, curves(paths, "rank"), _references([group]))


def _probe_figures(groups: Sequence[Group], folder: Path) -> Iterator[Path]:
    for title, found in _titles(groups):
        repeated = [path for one in found if (path := _rank_path(one.body))]
        if repeated:
            yield from accuracy(
                folder,
                f"rank-path-{slug(title)}",
                {title: curves(repeated, "rank")},
                References(),
                key="rank",
                in_domain="validation",
            )


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


def _complement(value: float | None) -> float | None:
    return None if value is None else 1 - value


def _group_figures(groups: Sequence[Group], folder: Path) -> Iterator[Path]:
    for where in dict.fromkeys(one.where for group in groups for one in group.found):
        bars = {title: _bars([one for one in own if one.where == where]) for title, own in _titles(groups)}
        bars = {label: own for label, own in bars.items() if len(own) > 1}
        if bars:
            yield from group_bars(folder, f"groups-{slug(where)}", where, bars)


def _bars(found: Sequence[Found]) -> dict[str, Bar]:
    """Each group's accuracy: mean and deviation over repetitions, or the interval of a single result."""
    values: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        for group in one.body.get("groups") or []:
            if group.get("accuracy") is not None:
                name = "\n".join(f"{column} {value}" for column, value in group["group"].items())
                values.setdefault(name, []).append(group)
    bars = {}
    for name, groups in values.items():
        made = Mean.of(group["accuracy"] for group in groups)
        assert made is not None
        if made.sd is not None:
            bars[name] = Bar(made.mean, made.sd, made.sd, None)
        else:
            (own,) = groups
            low, high = own.get("ci_low"), own.get("ci_high")
            below = made.mean - low if low is not None else 0.0
            above = high - made.mean if high is not None else 0.0
            bars[name] = Bar(made.mean, below, above, int(own["n"]))
    return bars


def _spectrum_figure(sources: Sources, folder: Path) -> Iterator[Path]:
    spectra: dict[str, Array] = {}
    for path, store in sources.pairs:
        # Stores of one name, as from several seeds, differ by little: the first stands for them.
        spectra.setdefault(path.stem, store.singular_values)
    spectra = {label: values for label, values in spectra.items() if len(values) > 1}
    if spectra:
        yield from spectrum(folder, "spectrum", spectra)


def _convergence_figures(sources: Sources, folder: Path) -> Iterator[Path]:
    for found, table in sources.histories():
        if len(table.epochs) < 2:
            continue
        method = np.array(table.method)
        picks = [pick for pick in found.body.get("rows") or [] if pick["rule"] == "in-domain"]
        runs: dict[str, dict[str, Array]] = {}
        for pick in picks:
            rows = (method == pick["method"]) & (table.trial == pick["trial"]) & ~table.diverged
            if rows.any():
                runs[pick["method"]] = {name: values[rows] for name, values in table.metrics.items()}
        if runs:
            name = f"convergence-{slug(found.path.stem)}"
            yield from convergence(folder, name, table.epochs.astype(np.float64), runs)
