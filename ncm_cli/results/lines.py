"""What a report is made from, and which results are repetitions of one another.

A mean is taken over results that differ in a declared seed and in what that seed may change, and in nothing
else that they record. In a run of a recipe the seed is the matrix variable ``seed``, and it may change every
file that the recipe makes. Elsewhere it is the ``--seed`` that the probe was fitted with, and it may change
the probe alone: other features are other data. One seed's result given twice counts once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Generic, Protocol, TypeVar

from ncm_cli.baselines.choice import SweepTable, read_sweep
from ncm_cli.errors import InputError, MismatchError, NcmError, listing
from ncm_cli.options import fields_of
from ncm_cli.progress import Reporter
from ncm_cli.registry import STEPS, options_of
from ncm_cli.store import recognise
from ncm_cli.store.digests import canonical_json, digest_of
from ncm_cli.store.files import HEADER, holds, read_json, read_result, relative, sha256_file
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import Probe, read_probe

SEED = "seed"
"""The matrix variable, and the option, that declares a repetition."""

NEUTRAL = frozenset({"compare", "explain", SEED})
"""Options beside outputs that change no number that is averaged: the seed of a bound is of its intervals."""

WHERE = "--where"

ORACLE = "ORACLE"
"""Marks whatever was chosen by, or trained on, test rows."""

SUFFIXES = (".json", ".h5", ".safetensors")
"""Of the files in a folder that reports are made from."""

RESULTS = ("eval", "bound", "sweep", "finetune", "run")
"""The kinds of results that reports are made from."""

_FIT = "fit "
"""Begins the names of what is known of the probe: a line is of one probe, whatever its columns."""

_STATE, _REPORT = ".ncm-run.json", "report.json"
"""What a run's folder records of its files: after each job, with what earlier settings left; at the end."""

_DESCRIBING = (
    *HEADER,
    *("probe", "features", "options", "comparison", "warnings", "rows", "intervals", "bootstrap"),
)
"""What stands in a result beside its numbers."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")

M = TypeVar("M", bound="Mean")


@dataclasses.dataclass(frozen=True, slots=True)
class Mean:
    """Mean and standard deviation (of the sample; None for one value) over repetitions."""

    mean: float
    sd: float | None = None
    n: int = 1

    @classmethod
    def of(cls: type[M], values: Iterable[float | None]) -> M | None:
        """Over the values that are known; None when there is none."""
        known = [float(value) for value in values if value is not None]
        if not known:
            return None
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(mean=statistics.fmean(known), sd=sd, n=len(known))

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.sd is None else f"±{self.sd:.3f}".replace("±0.", "±."))


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A file that was read: known by the digest of its contents or, where none is recorded, by its path."""

    path: str
    digest: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What a result records of how it was made; values are text, numbers, `Input` or None, by name."""

    file: Path
    run: Path | None
    """The folder of the recipe's run that made it; None by hand."""
    seed: str | None
    """The declared seed, None where none is."""
    fixed: Mapping[str, Any]
    """What repetitions have in common."""
    seeded: Mapping[str, Any]
    """What the seed may have changed: equal in results of one seed."""


Made = Mapping[str, tuple[str, Mapping[str, str]]]
"""Files of a run, relative to its folder if they lie in it, to the step and the cell that made them."""


class _Origin:
    """Where a file comes from: the run that made it, if one did, and the names of files in it."""

    def __init__(self, file: Path, written: str | None, run: tuple[Path, Made] | None) -> None:
        """``written`` is the file's path as the command that wrote it was told."""
        self.folder: Path | None = run[0] if run else None
        self.made: Made = run[1] if run else {}
        self._base: str | None = None
        self.cell: Mapping[str, str] = {}
        if self.folder is not None:
            name = str(relative(file.absolute(), self.folder))
            self.cell = self.made[name][1]
            # The run may have been moved, or be looked at from elsewhere: what its command was told counts.
            if written is not None and f"{os.sep}{written}".endswith(f"{os.sep}{name}"):
                self._base = written.removesuffix(name)

    def inside(self, path: str) -> str | None:
        """The name in the run's folder of a file that the command was told of."""
        known = self._base is not None and path.startswith(self._base)
        return path.removeprefix(self._base or "") if known else None

    def maker(self, path: str) -> str | None:
        """The step, and the cell but for the seed, that made a file or the folder around it."""
        inside = self.inside(path)
        for name in () if inside is None else (inside, *map(str, PurePath(inside).parents)):
            if name in self.made:
                step, cell = self.made[name]
                return ", ".join([step, *(f"{name} {value}" for name, value in cell.items() if name != SEED)])
        return None


def facts_of(
    file: Path, body: Mapping[str, Any], *, run: tuple[Path, Made] | None = None, itself: Probe | None = None
) -> Facts:
    """The facts of a result of eval, bound, sweep or finetune; or of a probe ``itself`` and its meta.

    ``run`` is the folder and files of the run that made it, looked for where it isn't given. What a result's
    probe was fitted with is read from the probe, if it is still the one that the result is of.
    """
    options = dict(body.get("options") or {})
    origin = _Origin(file, options.get("output"), run or _run_of(file))
    by_hand = origin.folder is None
    fixed: dict[str, Any] = {name: value for name, value in origin.cell.items() if name != SEED}
    seeded: dict[str, Any] = {}

    def take(kind: str, given: Mapping[str, Any], digests: Mapping[str, Any], prefix: str = "") -> None:
        roles = {field.name: field.role for field in fields_of(options_of(kind))} if kind in STEPS else {}
        for name, value in given.items():
            key, role = f"{prefix}--{name.replace('_', '-')}", roles.get(name)
            if name in NEUTRAL or role == "output":
                continue
            if role != "input" or value is None:
                fixed[key] = value
            else:
                (fixed if by_hand else seeded)[key] = Input(
                    value, (digests.get(name) or {}).get("content_sha256")
                )
                if not by_hand:
                    fixed[key] = origin.maker(value)

    probe, seed = itself, None
    if itself is not None:
        seeded[f"{_FIT}probe"] = Input(str(file), itself.sha256)
    else:
        kind, known = str(body.get("kind")), body.get("probe") or {}
        fixed["result of"] = body.get("kind")
        path, digest = known.get("path") or options.get("probe"), known.get("sha256")
        options.pop("probe", None)
        options |= {name: body.get(name, options.get(name)) for name in ("where", "target")}
        options["reference"] = (body.get("reference") or {}).get("where", options.get("reference"))
        data = body.get("data") or {}
        take(kind, options, {"features": body.get("features") or data, "source": data.get("source")})
        seeded["numbers"] = digest_of({name: body[name] for name in body if name not in _DESCRIBING})
        if path is not None:
            seeded[f"{_FIT}probe"] = Input(path, digest)
            if not by_hand:
                fixed[f"{_FIT}step"] = origin.maker(path)
            inside = origin.inside(path)
            with contextlib.suppress(NcmError):
                probe = read_probe(
                    path if inside is None or origin.folder is None else origin.folder / inside
                )
            probe = probe if probe is not None and digest in (None, probe.sha256) else None
            fixed[f"{_FIT}options"] = "unknown" if probe is None else "known"
    if probe is not None:
        fitted = probe.meta.get("options") or {}
        command = str(probe.meta.get("command") or "fit")
        take(command, fitted, probe.meta.get("data") or {}, _FIT)
        # A run may make its encoder as well: of synthetic data, or with random weights. finetune always does.
        encoder = Input(str(probe.encoder.get("model")), probe.fingerprint)
        (fixed if by_hand and command == "fit" else seeded)[f"{_FIT}encoder"] = encoder
        seed = None if fitted.get(SEED) is None else str(fitted[SEED])
    return Facts(file, origin.folder, seed if by_hand else origin.cell.get(SEED), fixed, seeded)


def _run_of(file: Path) -> tuple[Path, Made] | None:
    """The run that made a file, and whose record still is of that file; None if there is none."""
    file = file.absolute()
    for folder in file.parents:
        # A record that isn't there or can't be read declares nothing. Of a run that is going on, as where one
        # of its steps asks, the report isn't there yet or is an earlier run's.
        with contextlib.suppress(NcmError, OSError, ValueError, KeyError, TypeError, AttributeError):
            entries = _state(folder / _STATE) if holds(folder / _REPORT) else _report(folder / _REPORT)
            found = {name: (step, cell, digest) for name, step, cell, digest in entries}
            if found[str(relative(file, folder))][2] == sha256_file(file):
                return folder, {name: (step, cell) for name, (step, cell, _) in found.items()}
    return None


def _state(path: Path) -> Iterator[tuple[str, str, dict[str, str], str | None]]:
    for key, job in read_json(path)["jobs"].items():
        if key.startswith("["):  # keys of version 0.1 can't be read back
            step, cell = json.loads(key)
            for name, digest in job.get("outputs", {}).items():  # none of a step that is going on
                yield name, step, cell, digest


def _report(path: Path) -> Iterator[tuple[str, str, dict[str, str], str | None]]:
    for entry in read_result(path, kind="run")["provenance"]["files"]:
        cell = {name: str(value) for name, value in entry["cell"].items()}
        yield entry["file"], entry["step"], cell, entry["sha256"]


class HasFacts(Protocol):
    """Anything made from a result."""

    @property
    def facts(self) -> Facts: ...


T = TypeVar("T", bound=HasFacts)


@dataclasses.dataclass(frozen=True, slots=True)
class Repetitions(Generic[T]):
    """Results that are repetitions of one another, at most one of each seed in a column."""

    differs: dict[str, str]
    """What tells them from others, in as few words as do; empty where there are no others."""
    members: list[T]
    again: list[T]
    """Results that are there already, left out."""


def repetitions(found: Sequence[T], column: Callable[[T], Hashable] | None = None) -> list[Repetitions[T]]:
    """Results apart, so that no column of a line mixes anything but declared seeds.

    Parameters
    ----------
    column
        The column of a table that a result stands in: what differs between columns, the row filters first of
        all, is no reason for another line unless it is the probe. Left out, all results are in one column.
    """
    skipped = set() if column is None else {WHERE}
    place = column or (lambda one: None)

    def split(some: list[T], part: str, seed: Callable[[T], str | None]) -> list[list[T]]:
        """Apart by each of a part of their facts that differs for one seed and in one column."""

        def key(one: T, name: str) -> Hashable:
            return _key(getattr(one.facts, part).get(name))

        def differs(name: str) -> bool:
            scopes: dict[Hashable, Hashable] = {}
            for one in some:
                scope = (seed(one), None if name.startswith(_FIT) else place(one))
                if scopes.setdefault(scope, key(one, name)) != key(one, name):
                    return True
            return False

        names = dict.fromkeys(
            name for one in some for name in getattr(one.facts, part) if name not in skipped
        )
        differing = [name for name in names if differs(name)]
        return by(some, lambda one: tuple(key(one, name) for name in differing))

    # A seed of one run says nothing of another run, nor of what was made by hand or declares none.
    sets = [
        own
        for some in by(found, lambda one: (one.facts.run, one.facts.seed is None))
        for part in split(some, "fixed", lambda one: None)
        for own in split(part, "seeded", lambda one: one.facts.seed)
    ]
    made = []
    for differs, own in zip(_differences(sets, skipped), sets, strict=True):
        each = by(own, lambda one: (place(one), one.facts.seed))
        again = [one for same in each for one in same[1:]]
        made.append(Repetitions(differs, [same[0] for same in each], again))
    return made


def by(found: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Results of equal keys together, in the order in which the keys occur."""
    groups: dict[Hashable, list[T]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return list(groups.values())


def _key(value: Any) -> Hashable:
    return (value.digest or value.path) if isinstance(value, Input) else canonical_json(value)


def _differences(sets: Sequence[Sequence[HasFacts]], skipped: set[str]) -> list[dict[str, str]]:
    """For each set, what tells it from the others: the first names that do, and no more than needed."""
    found: list[dict[str, str]] = [{} for _ in sets]
    keys: list[tuple[Hashable, ...]] = [() for _ in sets]
    for name, values in _candidates(sets, skipped):
        finer = [(*key, _key(value)) for key, value in zip(keys, values, strict=True)]
        for index, text in enumerate(_texts(values)):
            told = len({own for own, same in zip(finer, keys, strict=True) if same == keys[index]}) > 1
            # An option that isn't given has to be said; a cell without the variable goes without.
            if told and (values[index] is not None or not name.isidentifier()):
                found[index][name] = text
        keys = finer
    return found


def _candidates(sets: Sequence[Sequence[HasFacts]], skipped: set[str]) -> Iterator[tuple[str, list[Any]]]:
    """Names with one value for each set: the cell's, the run, what else is fixed or seeded, the file."""

    def single(part: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, list[Any]]]:
        facts = [[getattr(one.facts, part) for one in own] for own in sets]
        for name in dict.fromkeys(name for own in facts for one in own for name in one if wanted(name)):
            if all(len({_key(one.get(name)) for one in own}) == 1 for own in facts):
                yield name, [own[0].get(name) for own in facts]

    firsts = [own[0].facts for own in sets]
    yield from single("fixed", str.isidentifier)
    yield "run folder", [None if one.run is None else Input(str(one.run)) for one in firsts]
    yield from single("fixed", lambda name: not name.isidentifier() and name not in skipped)
    yield from single("seeded", lambda name: name != "numbers")
    yield "result file", [Input(str(one.file)) for one in firsts]


def _texts(values: Sequence[Any]) -> list[str]:
    """Values as short texts that differ where the values do: paths from where they part, else digests."""
    inputs = [value for value in values if isinstance(value, Input)]
    folders = {str(PurePath(value.path).parent) for value in inputs}
    by_path = len({value.path for value in inputs}) == len({_key(value) for value in inputs})
    base = os.path.commonpath(folders) if len({os.path.isabs(folder) for folder in folders}) == 1 else ""  # noqa: PTH117

    def text(value: Any) -> str:
        if isinstance(value, Input):
            return str(
                relative(Path(value.path), Path(base)) if by_path else (value.digest or value.path)[:8]
            )
        if value is None or isinstance(value, bool):
            return {None: "none", True: "yes", False: "no"}[value]
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    return [text(value) for value in values]


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
        probe, options = self.body.get("probe") or {}, self.body.get("options") or {}
        if by == "method":
            return str(probe.get("method") or "probe")
        if by == "pairs" and options.get("pairs"):
            return Path(options["pairs"]).stem
        return self.path.stem if by == "file" else Path(probe.get("path") or self.path).stem


@dataclasses.dataclass(slots=True)
class Sources:
    """Everything that was read: results by their kind, probes and stores."""

    evals: list[Found] = dataclasses.field(default_factory=list)
    bounds: list[Found] = dataclasses.field(default_factory=list)
    sweeps: list[Found] = dataclasses.field(default_factory=list)
    finetunes: list[Found] = dataclasses.field(default_factory=list)
    """What ``ncm eval`` says of their weights is among the evals."""
    runs: list[Found] = dataclasses.field(default_factory=list)
    probes: list[Found] = dataclasses.field(default_factory=list)
    pairs: list[tuple[Path, PairStore]] = dataclasses.field(default_factory=list)
    features: list[Path] = dataclasses.field(default_factory=list)
    """Where a page may find rows and pictures."""

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
    """Read files and folders; of a folder, every file of ours by its suffix is read, the rest passed over.

    Raises `InputError` for a file that isn't ours or that no report is made from, and for nothing to report.
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
        sources.probes.append(Found(path, probe.meta, facts_of(path, probe.meta, itself=probe)))
    elif kind == "pairs":
        sources.pairs.append((path, read_pairs(path)))
    elif kind == "features":
        sources.features.append(path)
    elif kind == "result" and (body := read_result(path)).get("kind") in RESULTS:
        getattr(sources, f"{body['kind']}s").append(Found(path, body, facts_of(path, body)))
        sources.evals += [Found(path, one, facts_of(path, one)) for one in body.get("evals") or ()]
    elif named:
        raise InputError(
            f"a {'result' if kind == 'result' else 'file'} that no report is made from",
            where=path,
            found=body.get("kind") if kind == "result" else f"{kind} of ncm",
            expected="results of ncm eval, bound, sweep, finetune or run, probes or pair stores",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
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


def lines_of(
    found: Iterable[Found], named_by: str, reporter: Reporter, *, columns: bool = False
) -> list[Line]:
    """Results as lines, in the order in which labels occur; what differs in a number alone by that number.

    With ``columns``, evals of other rows stand in other columns of a line. Results that are given twice are
    said, and counted once.
    """

    def kind(one: Found) -> tuple[str, str, bool]:
        rule = (one.body.get("probe") or {}).get("selection") or ""
        return one.label(named_by), rule, one.body.get("oracle") is True

    lines, again = [], []
    for own in by(found, kind):
        label, rule, oracle = kind(own[0])
        for same in repetitions(own, (lambda one: one.where) if columns else None):
            name = ", ".join([label, *(f"{what} {value}" for what, value in same.differs.items())])
            lines.append(Line(name, rule, oracle, tuple(same.members)))
            again += [str(one.path) for one in same.again]
    if again:
        reporter.note(f"the same result again, counted once: {listing(again)}")
    words = [tuple(_NUMBER.split(line.label)[::2]) for line in lines]
    numbers = [[float(text) for text in _NUMBER.findall(line.label)] for line in lines]
    order = sorted(range(len(lines)), key=lambda index: (words.index(words[index]), numbers[index]))
    return [lines[index] for index in order]
