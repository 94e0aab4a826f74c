"""Which figures the sources of a report give, and what goes into each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.progress import Reporter
from ncm_cli.stages import report_figures as figures
from ncm_cli.stages.report_read import Found, Group, Sources, grouped
from ncm_cli.stages.report_repeats import Mean
from ncm_cli.stages.report_style import slug
from ncm_cli.stages.report_tables import TIE

Array = NDArray[np.float64]


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


def curves(rows: Sequence[Sequence[dict[str, Any]]], key: str) -> figures.Curves:
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
    return figures.Curves(x=np.array(x, dtype=np.float64), values=values)


def _titles(groups: Sequence[Group]) -> list[tuple[str, Sequence[Found]]]:
    """Lines by a name that each has for itself: with the selection rule where only that differs."""
    labels = [group.label for group in groups]
    return [
        (f"{group.label}, {group.selection}" if labels.count(group.label) > 1 else group.label, group.found)
        for group in groups
    ]


def _references(groups: Sequence[Group]) -> figures.References:
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
    return figures.References(
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
            yield from figures.accuracy(folder, name, lines, _references(groups), key=key)
    for group, (title, own) in zip(groups, titles, strict=True):
        paths = [one.body["path"] for one in own if one.body.get("path")]
        if paths:
            name = "bound-tradeoff" if len(groups) == 1 else f"bound-tradeoff-{slug(title)}"
            yield from figures.tradeoff(folder, name, title, curves(paths, "rank"), _references([group]))


def _probe_figures(groups: Sequence[Group], folder: Path) -> Iterator[Path]:
    for title, found in _titles(groups):
        repeated = [path for one in found if (path := _rank_path(one.body))]
        if repeated:
            yield from figures.accuracy(
                folder,
                f"rank-path-{slug(title)}",
                {title: curves(repeated, "rank")},
                figures.References(),
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
            yield from figures.group_bars(folder, f"groups-{slug(where)}", where, bars)


def _bars(found: Sequence[Found]) -> dict[str, figures.Bar]:
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
            bars[name] = figures.Bar(made.mean, made.sd, made.sd, None)
        else:
            (own,) = groups
            low, high = own.get("ci_low"), own.get("ci_high")
            below = made.mean - low if low is not None else 0.0
            above = high - made.mean if high is not None else 0.0
            bars[name] = figures.Bar(made.mean, below, above, int(own["n"]))
    return bars


def _spectrum_figure(sources: Sources, folder: Path) -> Iterator[Path]:
    spectra: dict[str, Array] = {}
    for path, store in sources.pairs:
        # Stores of one name, as from several seeds, differ by little: the first stands for them.
        spectra.setdefault(path.stem, store.singular_values)
    spectra = {label: values for label, values in spectra.items() if len(values) > 1}
    if spectra:
        yield from figures.spectrum(folder, "spectrum", spectra)


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
            yield from figures.convergence(folder, name, table.epochs.astype(np.float64), runs)
