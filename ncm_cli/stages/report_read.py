"""What a report is made from: result files, probes and pair stores, sorted by kind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, MismatchError, listing
from ncm_cli.progress import Reporter
from ncm_cli.stages.report_repeats import Facts, Mean, facts_of, facts_of_probe, lines
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import read_probe
from ncm_cli.store.recognise import recognise
from ncm_cli.store.results import read_result
from ncm_cli.store.sweep_table import SweepTable, read_sweep

ORACLE = "ORACLE"
"""Marks whatever was chosen by, or trained on, test rows."""

RESULTS = ("eval", "bound", "sweep", "run")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One result file, or a probe with its metadata for a body."""

    path: Path
    body: dict[str, Any]
    facts: Facts

    @property
    def where(self) -> str:
        """The rows that an eval is of."""
        return self.body.get("where") or "all rows"

    def label(self, by: str) -> str:
        """What names this result's line."""
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
    probes: list[Found] = dataclasses.field(default_factory=list)
    pairs: list[tuple[Path, PairStore]] = dataclasses.field(default_factory=list)

    def histories(self) -> Iterator[tuple[Found, SweepTable]]:
        """Each sweep with its table of all checkpoints, where that lies beside it.

        Raises `MismatchError` where a killed sweep has replaced one of the two.
        """
        for found in self.sweeps:
            path = found.path.parent / Path(found.body.get("history") or "").name
            if not path.is_file():
                continue
            table = read_sweep(path)
            if found.body.get("options") not in (None, table.options):
                raise MismatchError(
                    "a result and a table of two sweeps",
                    where=f"{found.path} and {path}",
                    expected="files that one sweep wrote",
                    fix="run the sweep again: what it had finished is kept",
                )
            yield found, table


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
        probe = read_probe(path)
        sources.probes.append(Found(path, probe.meta, facts_of_probe(path, probe)))
    elif kind == "pairs":
        sources.pairs.append((path, read_pairs(path)))
    elif kind == "result":
        body = read_result(path)
        target = f"{body.get('kind')}s"
        if body.get("kind") in RESULTS:
            getattr(sources, target).append(Found(path, body, facts_of(path, body)))
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
class Spread(Mean):
    """A mean over repetitions, or one value with its interval."""

    low: float | None = None
    high: float | None = None


def spread(values: Iterable[float | None], interval: tuple[float, float] | None = None) -> Spread | None:
    """The spread of the values that are known; ``interval`` is used for a single one."""
    found = Spread.of(values)
    if found is None or found.n > 1 or interval is None:
        return found
    return dataclasses.replace(found, low=interval[0], high=interval[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """One line of a table or plot: results that are repetitions of one another in each of its columns."""

    label: str
    """With what tells it from other lines of this name."""
    rule: str
    """How the probe was chosen; empty where that isn't known."""
    oracle: bool
    found: tuple[Found, ...]

    @property
    def selection(self) -> str:
        """The rule as tables show it."""
        return f"{self.rule} {ORACLE}" if self.oracle else self.rule


def grouped(found: Iterable[Found], by: str, reporter: Reporter, *, columns: bool = False) -> list[Group]:
    """Results as lines, in the order in which labels occur; what differs in a number alone by that number.

    With ``columns``, evals of other rows stand in other columns of a line. Results that are given twice are
    said, and counted once.
    """
    kinds: dict[tuple[str, str, bool], list[Found]] = {}
    for one in found:
        rule = (one.body.get("probe") or {}).get("selection") or ""
        kinds.setdefault((one.label(by), rule, one.body.get("oracle") is True), []).append(one)
    groups, again = [], []
    for (label, rule, oracle), own in kinds.items():
        for line in lines(own, (lambda one: one.where) if columns else None):
            name = ", ".join([label, *(f"{what} {value}" for what, value in line.differs.items())])
            groups.append(Group(name, rule, oracle, tuple(line.members)))
            again += [str(one.path) for one in line.again]
    if again:
        reporter.note(f"the same result again, counted once: {listing(again)}")
    places: dict[tuple[str, ...], int] = {}
    for group in groups:
        places.setdefault(_words(group), len(places))
    return sorted(groups, key=lambda group: (places[_words(group)], _numbers(group)))


def _words(group: Group) -> tuple[str, ...]:
    return tuple(_NUMBER.split(group.label)[::2])


def _numbers(group: Group) -> list[float]:
    return [float(text) for text in _NUMBER.findall(group.label)]


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
