"""What a report is made from: result files, probes and pair stores, sorted by kind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import Probe, read_probe
from ncm_cli.store.recognise import recognise
from ncm_cli.store.results import read_result
from ncm_cli.store.sweep_table import SweepTable, read_sweep

RESULTS = ("eval", "bound", "sweep", "run")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One result file."""

    path: Path
    body: dict[str, Any]

    def label(self, by: str) -> str:
        """What names this result's line: results of one label are repetitions."""
        probe = self.body.get("probe") or {}
        if by == "method":
            return str(probe.get("method") or "probe")
        options = self.body.get("options") or {}
        if by == "pairs" and options.get("pairs"):
            return Path(options["pairs"]).stem
        by = "probe" if by == "pairs" else by
        return Path(probe.get("path") or self.path).stem if by == "probe" else self.path.stem


@dataclasses.dataclass(slots=True)
class Sources:
    """Everything that was read."""

    evals: list[Found] = dataclasses.field(default_factory=list)
    bounds: list[Found] = dataclasses.field(default_factory=list)
    sweeps: list[Found] = dataclasses.field(default_factory=list)
    runs: list[Found] = dataclasses.field(default_factory=list)
    probes: list[tuple[Path, Probe]] = dataclasses.field(default_factory=list)
    pairs: list[tuple[Path, PairStore]] = dataclasses.field(default_factory=list)

    def histories(self) -> Iterator[tuple[Found, SweepTable]]:
        """Each sweep with its table of all checkpoints, where that lies beside it."""
        for found in self.sweeps:
            path = found.path.with_name(str(found.body.get("history") or ""))
            if path.is_file():
                yield found, read_sweep(path)


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read files and folders; of a folder, every result of ours in it is read and the rest passed over.

    Raises
    ------
    InputError
        A file that isn't ours or that no report is made from, or nothing to report.
    """
    sources = Sources()
    for path, named in _files(paths):
        _read_one(path, sources, named=named)
    if not any(getattr(sources, field.name) for field in dataclasses.fields(sources)):
        raise InputError(
            "nothing to report",
            where=", ".join(str(path) for path in paths),
            expected="results of ncm eval, bound, sweep or run, probes or pair stores",
        )
    return sources


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """(file, whether it was named itself), each once."""
    seen = set()
    for path in paths:
        inside = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        for file in inside:
            if file not in seen and not any(part.startswith(".") for part in file.relative_to(path).parts):
                seen.add(file)
                yield file, not path.is_dir()


def _read_one(path: Path, sources: Sources, *, named: bool) -> None:
    try:
        kind = recognise(path)
    except InputError:
        if named:
            raise
        return
    if kind == "probe":
        sources.probes.append((path, read_probe(path)))
    elif kind == "pairs":
        sources.pairs.append((path, read_pairs(path)))
    elif kind == "result":
        body = read_result(path)
        target = f"{body.get('kind')}s"
        if body.get("kind") in RESULTS:
            getattr(sources, target).append(Found(path, body))
        elif named:
            raise InputError(
                "a result that no report is made from",
                where=path,
                found=body.get("kind"),
                expected=", ".join(RESULTS),
            )
    elif named:
        raise InputError(
            "a file that no report is made from",
            where=path,
            found=f"{kind} of ncm",
            expected="results (.json), probes or pair stores",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation of the sample over repetitions, or one value with its interval."""

    mean: float
    sd: float | None = None
    n: int = 1
    low: float | None = None
    high: float | None = None


def spread(values: Iterable[float | None], interval: tuple[float, float] | None = None) -> Spread | None:
    """The spread of the values that are known; ``interval`` is used for a single one."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    if len(known) == 1:
        low, high = interval or (None, None)
        return Spread(known[0], low=low, high=high)
    return Spread(float(np.mean(known)), float(np.std(known, ddof=1)), len(known))


def grouped(found: Iterable[Found], by: str) -> dict[str, list[Found]]:
    """Results by label, in the order in which labels occur; labels that differ in a number by that number."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        groups.setdefault(one.label(by), []).append(one)
    parts = {label: _NUMBER.split(label) for label in groups}
    if len({tuple(split[::2]) for split in parts.values()}) == 1:
        return {label: groups[label] for label in sorted(groups, key=lambda one: _numbers(parts[one]))}
    return groups


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def _numbers(split: list[str]) -> list[float]:
    return [float(text) for text in split[1::2]]
