"""Which results are repetitions of one another, and what distinguishes those that aren't.

Means are over results that differ only in a declared seed and in what that seed may change. In a run of a
recipe the seed is the matrix variable ``seed``, and it may change every file that the recipe makes. Elsewhere
it is the ``--seed`` of the probe's fit, and it may change only the probe: results on other features aren't
repetitions. If a seed's result is given twice, it counts once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Generic, Protocol, TypeVar

from ncm_cli.errors import NcmError
from ncm_cli.options import fields_of, values_of
from ncm_cli.registry import STEPS, options_of
from ncm_cli.store.digests import canonical_json, digest_of
from ncm_cli.store.files import HEADER, holds_lock, read_json, read_result, relative, sha256_file
from ncm_cli.store.probe import Probe, read_probe

SEED = "seed"
"""The matrix variable and the option that declare a repetition."""

NEUTRAL = frozenset({"compare", "explain", SEED})
"""Options that change no averaged number, like the output. (A bound's seed only changes intervals.)"""

WHERE = "--where"

_FIT = "fit "
"""Prefix of facts about the probe. They separate lines even across columns: each line is about one probe."""

_ENCODER = f"{_FIT}encoder"

_STATE, _REPORT = ".ncm-run.json", "report.json"
"""A run's records of its files: one updated after each job, with files of earlier settings; and the final
one."""

_DESCRIBING = (
    *HEADER,
    *("probe", "features", "options", "comparison", "warnings", "rows", "intervals", "bootstrap"),
)
"""The fields of a result that don't hold measurements."""

M = TypeVar("M", bound="Mean")


@dataclasses.dataclass(frozen=True, slots=True)
class Mean:
    """Mean and standard deviation (of the sample; None for one value) over repetitions."""

    mean: float
    sd: float | None = None
    n: int = 1

    @classmethod
    def of(cls: type[M], values: Iterable[float | None]) -> M | None:
        """The mean over the known values; None if there are none."""
        known = [float(value) for value in values if value is not None]
        if not known:
            return None
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(mean=statistics.fmean(known), sd=sd, n=len(known))

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.sd is None else f"±{self.sd:.3f}".replace("±0.", "±."))


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A file that was read, identified by its digest or, if none is recorded, by its path."""

    path: str
    digest: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """How a result was made, as it records it: text, numbers, `Input` or None by name."""

    file: Path
    run: Path | None
    """The folder of the recipe's run that made it; None if none did."""
    seed: str | None
    """The declared seed, if any."""
    fixed: Mapping[str, Any]
    """The facts that all repetitions share."""
    seeded: Mapping[str, Any]
    """The facts that the seed may change; equal for results of one seed."""


def over(facts: Facts, names: Sequence[str]) -> Facts:
    """The facts of a result whose repetitions may differ in the facts ``names``, too.

    A name is that of an option (``features``, also of the probe's fit) or of a matrix variable. If a file may
    differ, so may the other files that were read, since they depend on it; but the encoder may not.
    """
    if not names:
        return facts
    keys_of = {name: {name, name.replace("-", "_"), f"--{name}", f"{_FIT}--{name}"} for name in names}
    known = {**facts.fixed, **facts.seeded}
    moved = {key for keys in keys_of.values() for key in keys if key in known}
    values = [_key(known[key]) for key in sorted(moved)]
    if any(isinstance(known[key], Input) for key in moved):
        moved |= {key for key, value in facts.fixed.items() if isinstance(value, Input)} - {_ENCODER}
    return dataclasses.replace(
        facts,
        run=None,
        seed=canonical_json([facts.seed, *values]) if values else facts.seed,
        fixed={key: value for key, value in facts.fixed.items() if key not in moved},
        seeded={**facts.seeded, **{key: facts.fixed[key] for key in facts.fixed if key in moved}},
    )


Made = Mapping[str, tuple[str, Mapping[str, str]]]
"""The step and matrix cell that made each file of a run; files are relative to its folder if inside it."""


class _Recorder:
    """Collects the facts that a result records; knows the run that made it, if one did."""

    def __init__(self, file: Path, written: str | None, run: tuple[Path, Made] | None) -> None:
        """``written`` is the file's path as its command was given it."""
        self.folder: Path | None = run[0] if run else None
        self._made: Made = run[1] if run else {}
        self._base: str | None = None
        self.cell: Mapping[str, str] = {}
        if self.folder is not None:
            name = str(relative(file.absolute(), self.folder))
            self.cell = self._made[name][1]
            # The run may have been moved, or be read from another folder, so the command's own paths count.
            # The output of finetune is the network's path; the result lies beside it.
            for end in (name, str(PurePath(name).with_suffix(PurePath(written or "").suffix))):
                if written is not None and f"{os.sep}{written}".endswith(f"{os.sep}{end}"):
                    self._base = written.removesuffix(end)
        self.fixed: dict[str, Any] = {name: value for name, value in self.cell.items() if name != SEED}
        self.seeded: dict[str, Any] = {}

    def result(self, body: Mapping[str, Any], options: Mapping[str, Any]) -> Probe | None:
        """Collect a result's facts, except about its probe; returns the probe if it is unchanged."""
        probe_facts = body.get("probe") or {}
        path, digest = probe_facts.get("path") or options.get("probe"), probe_facts.get("sha256")
        resolved = {name: body.get(name, options.get(name)) for name in ("where", "target")}
        resolved["reference"] = (body.get("reference") or {}).get("where", options.get("reference"))
        given = {name: value for name, value in options.items() if name != "probe"} | resolved
        data = body.get("data") or {}
        self.fixed["result of"] = body.get("kind")
        files = {"features": body.get("features") or data, "source": data.get("source")}
        self._options(str(body.get("kind")), given, files)
        self.seeded["numbers"] = digest_of({name: body[name] for name in body if name not in _DESCRIBING})
        if path is None:
            return None
        self.seeded[f"{_FIT}probe"] = Input(path, digest)
        if self.folder is not None:
            self.fixed[f"{_FIT}step"] = self._maker(path)
        inside, probe = self._inside(path), None
        with contextlib.suppress(NcmError):
            probe = read_probe(path if inside is None or self.folder is None else self.folder / inside)
        probe = probe if probe is not None and digest in (None, probe.sha256) else None
        self.fixed[f"{_FIT}options"] = "unknown" if probe is None else "known"
        return probe

    def probe(self, probe: Probe) -> str | None:
        """Collect a probe's facts; returns the seed of its fit."""
        fitted, command = _asked(probe.meta), str(probe.meta.get("command") or "fit")
        self._options(command, fitted, probe.meta.get("data") or {}, _FIT)
        # A run may make its encoder too: from synthetic data, or with random weights. finetune always does.
        facts = self.fixed if self.folder is None and command == "fit" else self.seeded
        facts[_ENCODER] = Input(str(probe.encoder.get("model")), probe.fingerprint)
        return None if fitted.get(SEED) is None else str(fitted[SEED])

    def _options(
        self, command: str, given: Mapping[str, Any], files: Mapping[str, Any], prefix: str = ""
    ) -> None:
        """Collect a command's options; ``files`` has the digests of its inputs."""
        roles = {}
        if command in STEPS:
            roles = {field.name: field.role for field in fields_of(options_of(command))}
        for name, value in given.items():
            key, role = f"{prefix}--{name.replace('_', '-')}", roles.get(name)
            if name in NEUTRAL or role == "output":
                continue
            made = role == "name-or-input" and self._maker(str(value)) is not None
            if not (role == "input" or made) or value is None:
                self.fixed[key] = value
                continue
            known = files.get(name) or {}
            stores = known.get("stores") or [known]
            for at, path in enumerate(values_of(value)):
                option = key if isinstance(value, str) else f"{key} {at + 1}"
                content = Input(path, stores[at].get("content_sha256") if at < len(stores) else None)
                if self.folder is None:
                    self.fixed[option] = content
                else:
                    self.seeded[option], self.fixed[option] = content, self._maker(path)

    def _inside(self, path: str) -> str | None:
        """A path that the command was given, relative to the run's folder."""
        is_inside = self._base is not None and path.startswith(self._base)
        return path.removeprefix(self._base or "") if is_inside else None

    def _maker(self, path: str) -> str | None:
        """The step, and the matrix cell without the seed, that made a file or a folder around it."""
        inside = self._inside(path)
        for name in () if inside is None else (inside, *map(str, PurePath(inside).parents)):
            if name in self._made:
                step, cell = self._made[name]
                return ", ".join([step, *(f"{name} {value}" for name, value in cell.items() if name != SEED)])
        return None


def _asked(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a probe's fit; ``auto`` for those it chose itself, in which repetitions may differ."""
    options, path = dict(meta.get("options") or {}), (meta.get("selection") or {}).get("path") or ()
    for name, of_candidate in (("upweight", "upweighted"), ("pair_rows", "pair_rows")):
        if len({candidate.get(of_candidate) for candidate in path}) > 1:
            options[name] = "auto"
    return options


def facts_of(
    file: Path, body: Mapping[str, Any], *, run: tuple[Path, Made] | None = None, itself: Probe | None = None
) -> Facts:
    """The facts of a result of eval, bound, sweep or finetune, or of a probe (``itself``) and its metadata.

    ``run`` is the folder and files of the run that made it, searched for if not given. How a result's probe
    was fitted is read from the probe, as long as its digest is the one in the result.
    """
    options = body.get("options") or {}
    recorder = _Recorder(file, options.get("output"), run or _run_of(file))
    if itself is not None:
        recorder.seeded[f"{_FIT}probe"] = Input(str(file), itself.sha256)
    probe = recorder.result(body, options) if itself is None else itself
    seed = None if probe is None else recorder.probe(probe)
    if recorder.folder is not None:
        seed = recorder.cell.get(SEED)
    return Facts(file, recorder.folder, seed, recorder.fixed, recorder.seeded)


def _run_of(file: Path) -> tuple[Path, Made] | None:
    """The run that made a file and whose record still matches it; None if there is none."""
    file = file.absolute()
    for folder in file.parents:
        # A missing or unreadable record declares nothing. While a run is going on, and one of its steps may
        # ask, the report is missing or that of an earlier run.
        with contextlib.suppress(NcmError, OSError, ValueError, KeyError, TypeError, AttributeError):
            entries = _state(folder / _STATE) if holds_lock(folder / _REPORT) else _report(folder / _REPORT)
            files = {name: (step, cell, digest) for name, step, cell, digest in entries}
            if files[str(relative(file, folder))][2] == sha256_file(file):
                return folder, {name: (step, cell) for name, (step, cell, _) in files.items()}
    return None


def _state(path: Path) -> Iterator[tuple[str, str, dict[str, str], str | None]]:
    for key, job in read_json(path)["jobs"].items():
        if key.startswith("["):  # unlike the keys of version 0.1
            step, cell = json.loads(key)
            for name, digest in job.get("outputs", {}).items():  # absent while a step is running
                yield name, step, cell, digest


def _report(path: Path) -> Iterator[tuple[str, str, dict[str, str], str | None]]:
    for entry in read_result(path, kind="run")["provenance"]["files"]:
        cell = {name: str(value) for name, value in entry["cell"].items()}
        yield entry["file"], entry["step"], cell, entry["sha256"]


class HasFacts(Protocol):
    """Anything that comes from a result."""

    @property
    def facts(self) -> Facts: ...


T = TypeVar("T", bound=HasFacts)


@dataclasses.dataclass(frozen=True, slots=True)
class Repetitions(Generic[T]):
    """Repetitions of one result, at most one for each seed in a column."""

    differs: dict[str, str]
    """The fewest facts that distinguish them from the others; empty if there are no others."""
    members: list[T]
    again: list[T]
    """Results left out because another has the same seed and column."""


def repetitions(results: Sequence[T], column: Callable[[T], Hashable] | None = None) -> list[Repetitions[T]]:
    """Split results into lines, so that no column of a line mixes anything but declared seeds.

    Parameters
    ----------
    column
        The table column of a result. What differs only between columns, such as the row filter, doesn't split
        a line, unless it is about the probe. By default all results are in one column.
    """
    skipped = set() if column is None else {WHERE}
    place = column or (lambda result: None)

    def split(group: list[T], part: str, seed: Callable[[T], str | None]) -> list[list[T]]:
        """Split by each fact of a part that differs for one seed and in one column."""

        def key(result: T, name: str) -> Hashable:
            return _key(getattr(result.facts, part).get(name))

        def differs(name: str) -> bool:
            scopes = by(
                group, lambda result: (seed(result), None if name.startswith(_FIT) else place(result))
            )
            return any(len({key(result, name) for result in scope}) > 1 for scope in scopes)

        names = dict.fromkeys(
            name for result in group for name in getattr(result.facts, part) if name not in skipped
        )
        differing = [name for name in names if differs(name)]
        return by(group, lambda result: tuple(key(result, name) for name in differing))

    # Seeds are only comparable within one run, or among results made by hand that declare one.
    sets = [
        members
        for of_run in by(results, lambda result: (result.facts.run, result.facts.seed is None))
        for of_facts in split(of_run, "fixed", lambda result: None)
        for members in split(of_facts, "seeded", lambda result: result.facts.seed)
    ]
    lines = []
    for differs, members in zip(_differences(sets, skipped), sets, strict=True):
        of_seeds = by(members, lambda result: (place(result), result.facts.seed))
        duplicates = [result for of_seed in of_seeds for result in of_seed[1:]]
        lines.append(Repetitions(differs, [of_seed[0] for of_seed in of_seeds], duplicates))
    return lines


def by(results: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Results grouped by key, in the order in which the keys occur."""
    groups: dict[Hashable, list[T]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return list(groups.values())


def _key(value: Any) -> Hashable:
    return (value.digest or value.path) if isinstance(value, Input) else canonical_json(value)


def _differences(sets: Sequence[Sequence[HasFacts]], skipped: set[str]) -> list[dict[str, str]]:
    """For each set, the facts that distinguish it from the others, no more than needed."""
    differences: list[dict[str, str]] = [{} for _ in sets]
    keys: list[tuple[Hashable, ...]] = [() for _ in sets]
    for name, values in _candidates(sets, skipped):
        finer = [(*key, _key(value)) for key, value in zip(keys, values, strict=True)]
        for index, text in enumerate(_texts(values)):
            split = len({new for new, old in zip(finer, keys, strict=True) if old == keys[index]}) > 1
            # Options that aren't given are named; matrix variables that a cell doesn't have aren't.
            if split and (values[index] is not None or not name.isidentifier()):
                differences[index][name] = text
        keys = finer
    return differences


def _candidates(sets: Sequence[Sequence[HasFacts]], skipped: set[str]) -> Iterator[tuple[str, list[Any]]]:
    """Facts with one value for each set: the cell, the run, other fixed and seeded facts, then the file."""

    def single(part: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, list[Any]]]:
        facts = [[getattr(result.facts, part) for result in members] for members in sets]
        for name in dict.fromkeys(
            name for of_set in facts for known in of_set for name in known if wanted(name)
        ):
            if all(len({_key(known.get(name)) for known in of_set}) == 1 for of_set in facts):
                yield name, [of_set[0].get(name) for of_set in facts]

    firsts = [members[0].facts for members in sets]
    yield from single("fixed", str.isidentifier)
    yield "run folder", [None if first.run is None else Input(str(first.run)) for first in firsts]
    yield from single("fixed", lambda name: not name.isidentifier() and name not in skipped)
    yield from single("seeded", lambda name: name != "numbers")
    yield "result file", [Input(str(first.file)) for first in firsts]


def _texts(values: Sequence[Any]) -> list[str]:
    """Values as short texts that differ if the values do: paths without their common folder, or digests."""
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
