"""The figures of a report: which ones are drawn from its sources, and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.baselines.choice import METRICS
from ncm_cli.progress import Reporter
from ncm_cli.results.lines import ORACLE, Line, Source, Sources, lines_of
from ncm_cli.results.plots import (
    MAX_GROUPS,
    Array,
    Curves,
    Plot,
    References,
    accuracy_plot,
    calibration_plot,
    convergence_plot,
    dot_plot,
    save,
    spectrum_plot,
    tradeoff_plot,
)
from ncm_cli.results.repetitions import Mean
from ncm_cli.results.tables import SWEEP, TIE, Spread, spread
from ncm_cli.store.files import part_of_name
from ncm_cli.store.outputs import refuse_other

Group = tuple[tuple[str, str], ...]
"""Columns and their values."""


def figures(
    sources: Sources, evals: Sequence[Line], bounds: Sequence[Line], reporter: Reporter
) -> Iterator[Plot]:
    """All figures that the sources have data for, one at a time; names differ in more than case."""
    taken: dict[str, int] = {}
    for plots in (
        _bound_figures(bounds),
        _probe_figures(lines_of(sources.probes, "file", reporter)),
        _group_figures(evals),
        _calibration_figures(evals),
        _spectrum_figure(sources),
        _sweep_figures(sources),
        _convergence_figures(sources),
        _finetune_figure(lines_of(sources.finetunes, "method", reporter)),
    ):
        for plot in plots:
            taken[key] = number = taken.get(key := plot.name.lower(), 0) + 1
            yield plot if number == 1 else plot._replace(name=f"{plot.name}-{number}")


def draw(
    sources: Sources, evals: Sequence[Line], bounds: Sequence[Line], folder: Path, reporter: Reporter
) -> Iterator[Path]:
    """Draw all figures that the sources have data for; yields the files.

    Raises `UsageError`, before any file is written, if one would replace another program's file.
    """
    plots = list(figures(sources, evals, bounds, reporter))
    for path in (path for plot in plots for path in plot.files(folder)):
        refuse_other(path, "plot")
    for plot in plots:
        yield from save(plot, folder)
    if not plots:
        reporter.warn("nothing to draw: plots need paths (ncm bound --ranks), groups, sweeps or pair stores")


def _curves(paths: Sequence[Sequence[dict[str, Any]]], key: str) -> Curves:
    """Repetitions of a path as arrays over all of their x values."""
    x = sorted({int(row[key]) for path in paths for row in path})
    names = [name for name in paths[0][0] if name not in (key, "converged")]
    curves = {name: np.full((len(paths), len(x)), np.nan) for name in names}
    for run, path in enumerate(paths):
        for row in path:
            for name in names:
                if row.get(name) is not None:
                    curves[name][run, x.index(int(row[key]))] = row[name]
    return {**curves, "x": np.array(x, dtype=np.float64)}


def _titles(lines: Sequence[Line]) -> list[str]:
    """The lines' labels, with the selection rule if only the rule differs."""
    labels = [line.label for line in lines]
    return [
        f"{line.label}, {line.selection}" if labels.count(line.label) > 1 else line.label for line in lines
    ]


def references_of(lines: Sequence[Line]) -> References:
    """The reference lines, for those values that all lines share."""

    def shared(value: Callable[[Source], float | None]) -> float | None:
        means = [mean.mean for line in lines if (mean := Mean.of(map(value, line.sources)))]
        return means[0] if means and all(abs(mean - means[0]) < TIE for mean in means) else None

    bodies = [source.body for line in lines for source in line.sources]
    given = {
        body["spurious_dim"]
        for body in bodies
        if (body.get("estimates") or {}).get("spurious_dim") == "given"
    }
    return References(
        oracle=shared(lambda bound: _complement((bound.body.get("oracle") or {}).get("test_error"))),
        erm=shared(lambda bound: (bound.body.get("summary") or {}).get("erm_test_accuracy")),
        spurious_dim=given.pop() if len(given) == 1 else None,
    )


def _bound_figures(lines: Sequence[Line]) -> Iterator[Plot]:
    titles = _titles(lines)

    def paths(line: Line, field: str) -> list[Any]:
        return [bound.body[field] for bound in line.sources if bound.body.get(field)]

    for key, field, name in (("rank", "path", "accuracy-rank"), ("pairs", "pair_counts", "accuracy-pairs")):
        repeated = {title: paths(line, field) for title, line in zip(titles, lines, strict=True)}
        curves = {title: _curves(runs, key) for title, runs in repeated.items() if runs}
        curves = {title: curve for title, curve in curves.items() if np.isfinite(curve["test_error"]).any()}
        if curves:
            yield accuracy_plot(name, curves, references_of(lines), key=key)
    for line, title in zip(lines, titles, strict=True):
        if runs := paths(line, "path"):
            name = "bound-tradeoff" if len(lines) == 1 else f"bound-tradeoff-{part_of_name(title)}"
            yield tradeoff_plot(name, title, _curves(runs, "rank"), references_of([line]))


def _probe_figures(lines: Sequence[Line]) -> Iterator[Plot]:
    for title, line in zip(_titles(lines), lines, strict=True):
        bodies = [probe.body for probe in line.sources]
        if paths := [path for body in bodies if (path := _rank_path(body))]:
            picks = {(body["rank"], body["selection"]["rule"]) for body in bodies}
            rank, rule = picks.pop()
            mark = f"{rule}, {ORACLE}" if bodies[0]["selection"].get("oracle") else rule
            # If the seeds chose different ranks, the rank with the least mean bound is marked.
            chosen = None if picks else (rank, f"chosen ({mark}): r = {rank}")
            plot = accuracy_plot(
                f"rank-path-{part_of_name(title)}",
                {title: _curves(paths, "rank")},
                References(chosen=chosen),
                key="rank",
                words=("validation", f"{ORACLE}: test rows"),
                regression="val_mse" in bodies[0]["selection"]["path"][0],
            )
            yield plot._replace(title=f"{plot.title}: {title}", text=f"{title}: {plot.text}")


def _rank_path(meta: dict[str, Any]) -> list[dict[str, Any]] | None:
    """A probe's selection path at the chosen weight decay, weights and rows; None if it has one rank."""
    selection = meta.get("selection") or {}
    rows = selection.get("path") or []
    if len({row.get("rank") for row in rows}) < 2:
        return None
    fixed = ("weight_decay", "upweighted", "pair_rows")
    chosen = rows[selection["chosen"]]
    return [
        {
            "rank": row["rank"],
            "twin_error": row.get("val_mse", _complement(row.get("val_accuracy"))),
            "test_error": row.get("test_mse", _complement(row.get("test_accuracy"))),
            "zero_one_bound": row.get("bound_mse", row.get("bound_01")),
        }
        for row in rows
        if all(row.get(name) == chosen.get(name) for name in fixed)
    ]


def _complement(value: Any) -> Any:
    return None if value is None else 1 - value


def _group_figures(lines: Sequence[Line]) -> Iterator[Plot]:
    for where in dict.fromkeys(source.where for line in lines for source in line.sources):
        entries = {
            title: groups_of(source for source in line.sources if source.where == where)
            for title, line in zip(_titles(lines), lines, strict=True)
        }
        entries = {title: by_group for title, by_group in entries.items() if len(by_group) > 1}
        if not entries:
            continue
        series = {
            title: {group: _dot(runs) for group, runs in by_group.items()}
            for title, by_group in entries.items()
        }
        groups = dict.fromkeys(group for by_group in entries.values() for group in by_group)
        least = {
            group: min(dots[group].mean for dots in series.values() if group in dots) for group in groups
        }
        order = sorted(least, key=least.__getitem__)
        columns = {tuple(column for column, _ in group) for group in groups}
        rows = {}
        for group in order[:MAX_GROUPS]:
            words = (value if len(columns) == 1 else f"{column}={value}" for column, value in group)
            of_group = [by_group[group] for by_group in entries.values() if group in by_group]
            sizes = {int(runs[0]["n"]) if len(runs) == 1 else None for runs in of_group}
            size_text = f"  n = {sizes.pop():,}" if len(sizes) == 1 and None not in sizes else ""
            rows[group] = ", ".join(words) + size_text
        repeated = any(len(runs) > 1 for by_group in entries.values() for runs in by_group.values())
        kind = "standard deviations over repetitions" if repeated else "95 % Wilson intervals"
        worst = f"the {MAX_GROUPS} worst of {len(order)} groups, " if len(order) > MAX_GROUPS else ""
        head = " × ".join(columns.pop()) if len(columns) == 1 else ""
        yield dot_plot(
            f"groups-{part_of_name(where)}", f"{where} ({worst}{kind})", {"accuracy": series}, rows, head
        )


def _calibration_figures(lines: Sequence[Line]) -> Iterator[Plot]:
    """One figure for the rows of each filter; the bins of repetitions are put together."""
    for where in dict.fromkeys(source.where for line in lines for source in line.sources):
        curves: dict[str, Curves] = {}
        for title, line in zip(_titles(lines), lines, strict=True):
            bins = [
                entry
                for source in line.sources
                if source.where == where
                for entry in source.body.get("calibration") or ()
            ]
            if bins:
                low, n, sure, right = (
                    np.array([entry[name] for entry in bins])
                    for name in ("low", "n", "confidence", "accuracy")
                )
                number = np.unique(low, return_inverse=True)[1]
                count = np.bincount(number, n)
                curves[title] = {
                    "x": np.bincount(number, n * sure) / count,
                    "accuracy": (np.bincount(number, n * right) / count)[None],
                }
        if curves:
            yield calibration_plot(f"calibration-{part_of_name(where)}", where, curves)


def groups_of(sources: Iterable[Source]) -> dict[Group, list[dict[str, Any]]]:
    """The entries of each group with an accuracy, one for each repetition."""
    entries: dict[Group, list[dict[str, Any]]] = {}
    for source in sources:
        for group in source.body.get("groups") or []:
            if group.get("accuracy") is not None:
                entries.setdefault(tuple(group["group"].items()), []).append(group)
    return entries


def _dot(entries: Sequence[Mapping[str, Any]]) -> Spread:
    ends = entries[0].get("ci_low"), entries[0].get("ci_high")
    dot = spread([group["accuracy"] for group in entries], ends)
    assert dot is not None
    return dot


def _spectrum_figure(sources: Sources) -> Iterator[Plot]:
    spectra: dict[str, Array] = {}
    for path, store in sources.pairs:
        # Stores with the same name, as from several seeds, differ little, so only the first is drawn.
        if len(store.singular_values) > 1:
            spectra.setdefault(path.stem, store.singular_values)
    if spectra:
        yield spectrum_plot("spectrum", spectra)


def _sweep_figures(sources: Sources) -> Iterator[Plot]:
    for sweep in sources.sweeps:
        panels: dict[str, dict[str, dict[str, Spread]]] = {words: {} for words in SWEEP.values()}
        methods, has_deviation = {}, False
        for pick in sweep.body.get("rows") or []:
            methods[pick["method"]] = pick["method"]
            rule = f"{pick['rule']} ({ORACLE})" if pick.get("oracle") else pick["rule"]
            for name, words in SWEEP.items():
                if (value := pick["metrics"].get(name)) is not None:
                    sd = (pick.get("sd") or {}).get(name) or 0.0
                    has_deviation |= sd > 0
                    panels[words].setdefault(rule, {})[pick["method"]] = Spread(value, sd)
        if panels[SWEEP["test_worst_group"]]:
            del panels[SWEEP["val_worst_group"]]
        panels = {words: series for words, series in panels.items() if series}
        if panels and len(methods) > 1:
            title = f"{sweep.path.stem}: methods by rule{', standard deviations over seeds' * has_deviation}"
            yield dot_plot(f"sweep-{part_of_name(sweep.path.stem)}", title, panels, methods, "")


def _convergence_figures(sources: Sources) -> Iterator[Plot]:
    for sweep, table in sources.histories():
        method, runs = np.array(table.method), {}
        for pick in sweep.body.get("rows") or []:
            rows = (method == pick["method"]) & (table.trial == pick["trial"]) & ~table.diverged
            if pick["rule"] == "in-domain" and rows.any():
                runs[pick["method"]] = {name: values[rows] for name, values in table.metrics.items()}
        if runs and len(table.epochs) > 1:
            name = f"convergence-{part_of_name(sweep.path.stem)}"
            yield convergence_plot(name, table.epochs.astype(np.float64), runs, "method's in-domain pick")


def _finetune_figure(lines: Sequence[Line]) -> Iterator[Plot]:
    histories = {line.label: [source.body.get("history") or {} for source in line.sources] for line in lines}
    lengths = (len(values) for runs in histories.values() for run in runs for values in run.values())
    longest = max(lengths, default=0)
    curves = {
        label: {
            name: np.array(
                [[*run.get(name, []), *[np.nan] * (longest - len(run.get(name, [])))] for run in runs],
                np.float64,
            )
            for name in METRICS
        }
        for label, runs in histories.items()
    }
    if longest > 1:
        yield convergence_plot("convergence", np.arange(1.0, longest + 1), curves, "method")
