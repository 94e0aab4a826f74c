"""Reads the results, probes and stores of a report, and groups repeated results into lines."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ncm_cli.baselines.choice import SweepTable, read_sweep
from ncm_cli.errors import InputError, MismatchError, UsageError, listing, unknown
from ncm_cli.options import values_of
from ncm_cli.progress import Reporter
from ncm_cli.results.repetitions import Facts, by, facts_of, over, repetitions
from ncm_cli.store import recognise
from ncm_cli.store.files import read_result
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import read_probe

ORACLE = "ORACLE"
"""Marks probes that were chosen by test rows or trained on them."""

SUFFIXES = (".json", ".h5", ".safetensors")
"""The suffixes of files that reports read from a folder."""

RESULTS = ("eval", "bound", "sweep", "finetune", "run")
"""The kinds of results that reports are made from."""

_LEFT_OUT = ("leave-out", "train", "val", "test", "reference")
"""The options in which probes that leave out different domains differ."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A result, or a probe with its metadata as the body."""

    path: Path
    body: dict[str, Any]
    facts: Facts
    sha256: str = ""
    """The digest of a probe."""

    @property
    def where(self) -> str:
        """The rows that were evaluated."""
        return self.body.get("where") or "all rows"

    @property
    def left_out(self) -> str | None:
        """The domain that the probe's ``--leave-out`` left out of training, such as ``domain=photo``."""
        known = {**self.facts.fixed, **self.facts.seeded}.get("fit --leave-out")
        return known if isinstance(known, str) else None

    def label(self, by: str) -> str:
        """The name of this result's line."""
        probe, options = self.body.get("probe") or {}, self.body.get("options") or {}
        if by == "method":
            return str(probe.get("method") or "probe")
        if by == "pairs" and options.get("pairs"):
            return " + ".join(Path(path).stem for path in values_of(options["pairs"]))
        return self.path.stem if by == "file" else Path(probe.get("path") or self.path).stem


@dataclasses.dataclass(slots=True)
class Sources:
    """Everything that was read: results by their kind, probes and stores."""

    evals: list[Source] = dataclasses.field(default_factory=list)
    bounds: list[Source] = dataclasses.field(default_factory=list)
    sweeps: list[Source] = dataclasses.field(default_factory=list)
    finetunes: list[Source] = dataclasses.field(default_factory=list)
    """Results of ``ncm finetune``; evaluations of their weights are among the evals."""
    runs: list[Source] = dataclasses.field(default_factory=list)
    probes: list[Source] = dataclasses.field(default_factory=list)
    pairs: list[tuple[Path, PairStore]] = dataclasses.field(default_factory=list)
    features: list[Path] = dataclasses.field(default_factory=list)
    """Feature stores, for a page's rows and pictures."""

    def histories(self) -> Iterator[tuple[Source, SweepTable]]:
        """Each sweep with its table of all checkpoints, if the table lies beside it.

        Raises `MismatchError` if a killed sweep has replaced only one of the two.
        """
        for sweep in self.sweeps:
            path = sweep.path.parent / Path(sweep.body.get("history") or "").name
            if not path.is_file():
                continue
            table = read_sweep(path)
            if sweep.body.get("options") not in (None, table.options):
                raise MismatchError(
                    "a result and a table of different sweeps",
                    where=f"{sweep.path} and {path}",
                    expected="files that one sweep wrote",
                    fix="run the sweep again: its finished work is kept",
                )
            yield sweep, table


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read files and folders; in folders, files of other programs are skipped.

    Raises `InputError` for a named file that ncm report doesn't read, and if there is nothing to report.
    """
    sources, seen = Sources(), set[Path]()
    for path in paths:
        inside = (file for file in path.rglob("*") if file.suffix in SUFFIXES)
        for file in sorted(inside) if path.is_dir() else [path]:
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file not in seen and not hidden:
                seen.add(file)
                _read_one(file, sources, named=not path.is_dir())
    if not any(
        getattr(sources, field.name) for field in dataclasses.fields(sources) if field.name != "features"
    ):
        raise InputError(
            "nothing to report",
            where=", ".join(str(path) for path in paths),
            expected="results of ncm eval, bound, sweep, finetune or run, probes or pair stores",
        )
    return sources


def _read_one(path: Path, sources: Sources, *, named: bool) -> None:
    kind: str = ""
    with contextlib.suppress(*(() if named else (InputError,))):
        kind = recognise(path)
    if kind == "probe":
        probe = read_probe(path)
        facts = facts_of(path, probe.meta, itself=probe)
        sources.probes.append(Source(path, probe.meta, facts, probe.sha256))
    elif kind == "pairs":
        sources.pairs.append((path, read_pairs(path)))
    elif kind == "features":
        sources.features.append(path)
    elif kind == "result" and (body := read_result(path)).get("kind") in RESULTS:
        getattr(sources, f"{body['kind']}s").append(Source(path, body, facts_of(path, body)))
        sources.evals += [Source(path, eval, facts_of(path, eval)) for eval in body.get("evals") or ()]
    elif named:
        raise InputError(
            f"a {'result' if kind == 'result' else 'file'} that ncm report doesn't read",
            where=path,
            found=body.get("kind") if kind == "result" else f"{kind} of ncm",
            expected="results of ncm eval, bound, sweep, finetune or run, probes or pair stores",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of a table or plot, with repetitions of one result in each column."""

    label: str
    """The name, and what distinguishes the line from others with this name."""
    rule: str
    """How the probe was chosen; empty if that isn't known."""
    oracle: bool
    sources: tuple[Source, ...]

    @property
    def selection(self) -> str:
        """The rule as tables show it."""
        return f"{self.rule} {ORACLE}" if self.oracle else self.rule


def repeated_over(sources: Sequence[Source], names: Sequence[str]) -> list[Source]:
    """Sources whose repetitions may differ in the facts ``names``, too; see `over`.

    Raises `UsageError` for a name that none of them records.
    """
    known = dict.fromkeys(
        name.rpartition("--")[2].replace("-", "_")
        for source in sources
        for name in (*source.facts.fixed, *source.facts.seeded)
        if "--" in name or name.isidentifier()
    )
    for name in names if sources else ():
        if name.replace("-", "_") not in known:
            raise unknown("option of these results", name, known, where="--mean-over", error=UsageError)
    wanted = [name.replace("_", "-") for name in names]
    return [
        dataclasses.replace(source, facts=over(source.facts, [*wanted, *_LEFT_OUT * bool(source.left_out)]))
        for source in sources
    ]


def differing(sources: Sequence[Source], names: Sequence[str]) -> list[str]:
    """Those of ``names`` in which some of the sources differ."""

    def values(source: Source, name: str) -> str | None:
        seedless = dataclasses.replace(source.facts, seed=None)
        return over(seedless, [name.replace("_", "-")]).seed

    return [name for name in names if len({values(source, name) for source in sources}) > 1]


def lines_of(
    sources: Iterable[Source], named_by: str, reporter: Reporter, *, columns: bool = False
) -> list[Line]:
    """Results as lines, in the order in which labels occur; labels that differ only in numbers go by them.

    With ``columns``, evals of different rows are in different columns of a line. Results given twice are
    named in a note, and counted once.
    """

    def kind(source: Source) -> tuple[str, str, bool]:
        rule = (source.body.get("probe") or {}).get("selection") or ""
        return source.label(named_by), rule, source.body.get("oracle") is True

    lines, duplicates = [], []
    for of_kind in by(sources, kind):
        label, rule, oracle = kind(of_kind[0])
        for of_line in repetitions(of_kind, (lambda source: source.where) if columns else None):
            name = ", ".join([label, *(f"{what} {value}" for what, value in of_line.differs.items())])
            lines.append(Line(name, rule, oracle, tuple(of_line.members)))
            duplicates += [str(source.path) for source in of_line.again]
    if duplicates:
        reporter.note(f"the same result again, counted once: {listing(duplicates)}")
    words = [tuple(_NUMBER.split(line.label)[::2]) for line in lines]
    numbers = [[float(text) for text in _NUMBER.findall(line.label)] for line in lines]
    order = sorted(range(len(lines)), key=lambda index: (words.index(words[index]), numbers[index]))
    return [lines[index] for index in order]
