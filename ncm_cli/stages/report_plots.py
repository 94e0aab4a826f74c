"""Which figures the sources of a report give, and what goes into each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.progress import Reporter
from ncm_cli.stages import report_figures as figures
from ncm_cli.stages.report_read import Found, Sources, grouped
from ncm_cli.stages.report_style import slug
from ncm_cli.store.probe import Probe

Array = NDArray[np.float64]


def draw(sources: Sources, folder: Path, by: str, reporter: Reporter) -> Iterator[Path]:
    """Draw every figure that the sources have data for; yields the files."""
    count = 0
    for paths in (
        _bound_figures(sources.bounds, folder, by),
        _probe_figures(sources.probes, folder),
        _group_figures(sources.evals, folder, by),
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


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _references(found: Sequence[Found]) -> figures.References:
    """The horizontal and vertical lines that results share."""
    oracle = [
        1 - own["test_error"]
        for one in found
        if (own := one.body.get("oracle")) and own["test_error"] is not None
    ]
    erm = [own.get("erm_test_accuracy") for one in found if (own := one.body.get("summary"))]
    given = {
        one.body["spurious_dim"]
        for one in found
        if (one.body.get("estimates") or {}).get("spurious_dim") == "given"
    }
    return figures.References(
        oracle=_mean(oracle), erm=_mean(erm), spurious_dim=given.pop() if len(given) == 1 else None
    )


def _bound_figures(found: Sequence[Found], folder: Path, by: str) -> Iterator[Path]:
    groups = grouped(found, by)
    for key, field, name in (("rank", "path", "accuracy-rank"), ("pairs", "pair_counts", "accuracy-pairs")):
        lines = {
            label: curves(paths, key)
            for label, own in groups.items()
            if (paths := [one.body[field] for one in own if one.body.get(field)])
        }
        lines = {label: line for label, line in lines.items() if line.known("test_error")}
        if not lines:
            continue
        references = _references(found)
        yield from figures.accuracy(folder, name, lines, references, key=key)
    for label, own in groups.items():
        paths = [one.body["path"] for one in own if one.body.get("path")]
        if paths:
            name = "bound-tradeoff" if len(groups) == 1 else f"bound-tradeoff-{slug(label)}"
            yield from figures.tradeoff(folder, name, label, curves(paths, "rank"), _references(own))


def _probe_figures(probes: Sequence[tuple[Path, Probe]], folder: Path) -> Iterator[Path]:
    paths: dict[str, list[list[dict[str, Any]]]] = {}
    for file, probe in probes:
        selection = probe.meta.get("selection") or {}
        rows = selection.get("path") or []
        if len({row.get("rank") for row in rows}) < 2:
            continue
        decay = rows[selection["chosen"]]["weight_decay"]
        own = [
            {
                "rank": row["rank"],
                "twin_error": _complement(row.get("val_accuracy")),
                "test_error": _complement(row.get("test_accuracy")),
                "zero_one_bound": row.get("bound_01"),
            }
            for row in rows
            if row["weight_decay"] == decay
        ]
        paths.setdefault(file.stem, []).append(own)
    for label, repeated in paths.items():
        yield from figures.accuracy(
            folder,
            f"rank-path-{slug(label)}",
            {label: curves(repeated, "rank")},
            figures.References(),
            key="rank",
            in_domain="validation",
        )


def _complement(value: float | None) -> float | None:
    return None if value is None else 1 - value


def _group_figures(found: Sequence[Found], folder: Path, by: str) -> Iterator[Path]:
    wheres = list(dict.fromkeys(one.body.get("where") or "all rows" for one in found))
    for where in wheres:
        here = [one for one in found if (one.body.get("where") or "all rows") == where]
        bars = {label: _bars(own) for label, own in grouped(here, by).items()}
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
        accuracy = np.array([group["accuracy"] for group in groups])
        if len(groups) > 1:
            deviation = float(accuracy.std(ddof=1))
            bars[name] = figures.Bar(float(accuracy.mean()), deviation, deviation, None)
        else:
            (own,) = groups
            low, high = own.get("ci_low"), own.get("ci_high")
            below = accuracy[0] - low if low is not None else 0.0
            above = high - accuracy[0] if high is not None else 0.0
            bars[name] = figures.Bar(float(accuracy[0]), below, above, int(own["n"]))
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
