"""Which figures a report has: what is drawn of the results, and under which names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.baselines.choice import METRICS
from ncm_cli.progress import Reporter
from ncm_cli.results.lines import ORACLE, Found, Line, Mean, Sources, lines_of
from ncm_cli.results.plots import (
    ROWS,
    Array,
    Curves,
    Plot,
    References,
    accuracy_plot,
    convergence_plot,
    dot_plot,
    save,
    spectrum_plot,
    tradeoff_plot,
)
from ncm_cli.results.tables import SWEEP, TIE, Spread, spread
from ncm_cli.store.outputs import refuse_other

Group = tuple[tuple[str, str], ...]
"""Columns and their values."""


def figures(
    sources: Sources, evals: Sequence[Line], bounds: Sequence[Line], reporter: Reporter
) -> Iterator[Plot]:
    """Every figure that the sources have data for, one at a time; names differ in more than their case."""
    taken: dict[str, int] = {}
    for plots in (
        _bound_figures(bounds),
        _probe_figures(lines_of(sources.probes, "file", reporter)),
        _group_figures(evals),
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
    """Draw every figure that the sources have data for; yields the files.

    Raises `UsageError`, before any is written, if there is a picture of another program.
    """
    plots = list(figures(sources, evals, bounds, reporter))
    for path in (path for plot in plots for path in plot.files(folder)):
        refuse_other(path, "plot")
    for plot in plots:
        yield from save(plot, folder)
    if not plots:
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


def _bound_figures(lines: Sequence[Line]) -> Iterator[Plot]:
    titles = _titles(lines)

    def paths(of: Line, field: str) -> list[Any]:
        return [one.body[field] for one in of.found if one.body.get(field)]

    for key, field, name in (("rank", "path", "accuracy-rank"), ("pairs", "pair_counts", "accuracy-pairs")):
        every = {title: paths(own, field) for title, own in zip(titles, lines, strict=True)}
        curves = {title: _curves(found, key) for title, found in every.items() if found}
        curves = {title: own for title, own in curves.items() if np.isfinite(own["test_error"]).any()}
        if curves:
            yield accuracy_plot(name, curves, references_of(lines), key=key)
    for own, title in zip(lines, titles, strict=True):
        if found := paths(own, "path"):
            name = "bound-tradeoff" if len(lines) == 1 else f"bound-tradeoff-{_slug(title)}"
            yield tradeoff_plot(name, title, _curves(found, "rank"), references_of([own]))


def _probe_figures(lines: Sequence[Line]) -> Iterator[Plot]:
    for title, own in zip(_titles(lines), lines, strict=True):
        if paths := [path for one in own.found if (path := _rank_path(one.body))]:
            picks = {(one.body["rank"], one.body["selection"]["rule"]) for one in own.found}
            rank, rule = picks.pop()
            mark = f"{rule}, {ORACLE}" if own.found[0].body["selection"].get("oracle") else rule
            # Where the seeds differ in their choice, the least mean bound is marked.
            chosen = None if picks else (rank, f"chosen ({mark}): r = {rank}")
            plot = accuracy_plot(
                f"rank-path-{_slug(title)}",
                {title: _curves(paths, "rank")},
                References(chosen=chosen),
                key="rank",
                words=("validation", f"{ORACLE}: test rows"),
                regression="val_mse" in own.found[0].body["selection"]["path"][0],
            )
            yield plot._replace(title=f"{plot.title}: {title}", text=f"{title}: {plot.text}")


def _rank_path(meta: dict[str, Any]) -> list[dict[str, Any]] | None:
    """A probe's selection path at the weight decay, group weights and rows that were chosen.

    None where it has one rank.
    """
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
    for where in dict.fromkeys(one.where for own in lines for one in own.found):
        entries = {
            title: groups_of(one for one in own.found if one.where == where)
            for title, own in zip(_titles(lines), lines, strict=True)
        }
        entries = {label: own for label, own in entries.items() if len(own) > 1}
        if not entries:
            continue
        found = {label: {group: _dot(same) for group, same in own.items()} for label, own in entries.items()}
        groups = dict.fromkeys(group for own in entries.values() for group in own)
        least = {group: min(own[group].mean for own in found.values() if group in own) for group in groups}
        order = sorted(least, key=least.__getitem__)
        columns = {tuple(column for column, _ in group) for group in groups}
        rows = {}
        for group in order[:ROWS]:
            words = (value if len(columns) == 1 else f"{column}={value}" for column, value in group)
            same = [own[group] for own in entries.values() if group in own]
            sizes = {int(one[0]["n"]) if len(one) == 1 else None for one in same}
            known = f"  n = {sizes.pop():,}" if len(sizes) == 1 and None not in sizes else ""
            rows[group] = ", ".join(words) + known
        repeated = any(len(same) > 1 for own in entries.values() for same in own.values())
        kind = "standard deviations over repetitions" if repeated else "95 % Wilson intervals"
        worst = f"the {ROWS} worst of {len(order)} groups, " if len(order) > ROWS else ""
        head = " × ".join(columns.pop()) if len(columns) == 1 else ""
        yield dot_plot(f"groups-{_slug(where)}", f"{where} ({worst}{kind})", {"accuracy": found}, rows, head)


def groups_of(found: Iterable[Found]) -> dict[Group, list[dict[str, Any]]]:
    """The entries of each group that has an accuracy, one for each repetition."""
    entries: dict[Group, list[dict[str, Any]]] = {}
    for one in found:
        for group in one.body.get("groups") or []:
            if group.get("accuracy") is not None:
                entries.setdefault(tuple(group["group"].items()), []).append(group)
    return entries


def _dot(same: Sequence[Mapping[str, Any]]) -> Spread:
    ends = same[0].get("ci_low"), same[0].get("ci_high")
    made = spread([one["accuracy"] for one in same], ends)
    assert made is not None
    return made


def _spectrum_figure(sources: Sources) -> Iterator[Plot]:
    spectra: dict[str, Array] = {}
    for path, store in sources.pairs:
        # Stores of one name, as from several seeds, differ by little: the first stands for them.
        if len(store.singular_values) > 1:
            spectra.setdefault(path.stem, store.singular_values)
    if spectra:
        yield spectrum_plot("spectrum", spectra)


def _sweep_figures(sources: Sources) -> Iterator[Plot]:
    for found in sources.sweeps:
        panels: dict[str, dict[str, dict[str, Spread]]] = {words: {} for words in SWEEP.values()}
        methods, deviates = {}, False
        for pick in found.body.get("rows") or []:
            methods[pick["method"]] = pick["method"]
            rule = f"{pick['rule']} ({ORACLE})" if pick.get("oracle") else pick["rule"]
            for name, words in SWEEP.items():
                if (value := pick["metrics"].get(name)) is not None:
                    sd = (pick.get("sd") or {}).get(name) or 0.0
                    deviates |= sd > 0
                    own = panels[words].setdefault(rule, {})
                    own[pick["method"]] = Spread(value, sd)
        if panels[SWEEP["test_worst_group"]]:
            del panels[SWEEP["val_worst_group"]]
        panels = {words: own for words, own in panels.items() if own}
        if panels and len(methods) > 1:
            title = f"{found.path.stem}: methods by rule{', standard deviations over seeds' * deviates}"
            yield dot_plot(f"sweep-{_slug(found.path.stem)}", title, panels, methods, "")


def _convergence_figures(sources: Sources) -> Iterator[Plot]:
    for found, table in sources.histories():
        method, runs = np.array(table.method), {}
        for pick in found.body.get("rows") or []:
            rows = (method == pick["method"]) & (table.trial == pick["trial"]) & ~table.diverged
            if pick["rule"] == "in-domain" and rows.any():
                runs[pick["method"]] = {name: values[rows] for name, values in table.metrics.items()}
        if runs and len(table.epochs) > 1:
            name = f"convergence-{_slug(found.path.stem)}"
            yield convergence_plot(name, table.epochs.astype(np.float64), runs, "method's in-domain pick")


def _finetune_figure(lines: Sequence[Line]) -> Iterator[Plot]:
    every = {id(one): one.body.get("history") or {} for own in lines for one in own.found}
    longest = max((len(values) for one in every.values() for values in one.values()), default=0)
    runs = {}
    for own in lines:
        histories = [every[id(one)] for one in own.found]
        runs[own.label] = {
            name: np.array([[*known, *[np.nan] * (longest - len(known))] for known in values], np.float64)
            for name in METRICS
            if (values := [one.get(name, []) for one in histories])
        }
    if longest > 1:
        yield convergence_plot("convergence", np.arange(1.0, longest + 1), runs, "method")
