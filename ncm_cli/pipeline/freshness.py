"""When a job has to run again: its options, the contents of its inputs, or a format version has changed.

What a finished job read and wrote is kept in one state file in the run's folder. Contents are compared by
SHA-256; a digest is kept with the file's size and time of modification, so an unchanged file is hashed once.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ncm_cli.options.spec import fields_of
from ncm_cli.recipe import Job, Recipe

STATE = ".ncm-run.json"
FORMAT = "ncm-run-state"
VERSION = 1

HASHED_BYTES = 4 << 30
"""A folder larger than this is compared by names, sizes and times: hashing it would take minutes."""

LISTED_FILES = 100_000
"""Files looked at in one folder, in the order of their names; a folder of Places365 has 1.8 million."""

NEUTRAL = {("embed", name) for name in ("workers", "batch_size", "max_failures", "verify_content", "fresh")}
"""Options that say how a result is reached and not what it is."""

_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """What decides whether a job is up to date."""

    options: str
    """Digest of everything but the inputs' contents."""
    inputs: dict[str, str]
    """Path of each input to the digest of its contents."""


class State:
    """The run folder's record of finished jobs, written anew after each."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._path = out / STATE
        self._jobs: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, tuple[str, str]] = {}
        self._seen: dict[Path, str] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if (found["ncm_format"], found["ncm_format_version"]) == (FORMAT, VERSION):
                self._jobs = dict(found["jobs"])
                self._digests = {path: (str(a), str(b)) for path, (a, b) in found["digests"].items()}

    def save(self) -> None:
        """Write the record; a reader sees the old one or the new one."""
        from ncm_cli.store.atomic import write_json

        body = {"jobs": self._jobs, "digests": self._digests}
        write_json(self._path, {"ncm_format": FORMAT, "ncm_format_version": VERSION, **body})

    def stamp(self, job: Job, recipe: Recipe) -> Stamp:
        """The job's stamp as things are now: its inputs must be there."""
        inputs = {}
        for name, paths in sorted(job.inputs.items()):
            for number, path in enumerate(paths):
                inputs[f"{name}[{number}]"] = self.digest(self._whole(path, recipe))
        inputs.update(_listed_images(job, recipe))
        return Stamp(_options_digest(job, recipe), inputs)

    def _whole(self, path: Path, recipe: Recipe) -> Path:
        """The data set folder around a manifest that this recipe made: the images count as well."""
        for other in recipe.jobs:
            for output in (item for items in other.outputs.values() for item in items):
                if path.is_relative_to(output):
                    return output
        return path

    def why_stale(self, job: Job, stamp: Stamp) -> str | None:
        """Why the job has to run; None when it is up to date."""
        known = self._jobs.get(job.key)
        if known is None:
            return "not run yet"
        if known.get("unfinished"):
            return "it was interrupted"
        if known.get("options") != stamp.options:
            return "its options changed"
        if known.get("inputs") != stamp.inputs:
            return "its inputs changed"
        outputs = known.get("outputs", {})
        for path in (item for items in job.outputs.values() for item in items):
            if not path.exists():
                return f"{path.name} is missing"
            if outputs.get(_relative(path, self._out)) != self.digest(path):
                return f"{path.name} was changed"
        return None

    def has_other_options(self, job: Job, stamp: Stamp) -> bool:
        """Whether the job was run before with other options."""
        known = self._jobs.get(job.key)
        return known is not None and known.get("options") != stamp.options

    def finished(self, job: Job, stamp: Stamp, **facts: Any) -> None:
        """Record a job that has just run, and save."""
        self._seen.clear()
        outputs = [item for items in job.outputs.values() for item in items if item.exists()]
        self._jobs[job.key] = {
            **dataclasses.asdict(stamp),
            "outputs": {_relative(path, self._out): self.digest(path) for path in outputs},
            **facts,
        }
        self.save()

    def facts(self, job: Job) -> dict[str, Any]:
        """What is recorded of a finished job; empty if nothing is."""
        return dict(self._jobs.get(job.key, {}))

    def starting(self, job: Job) -> None:
        """Before a job runs: should it be killed, what it wrote isn't taken for up to date."""
        if job.key in self._jobs:
            self._jobs[job.key]["unfinished"] = True
            self.save()

    def digest(self, path: Path) -> str:
        """Digest of a file's or folder's contents, looked at anew after each job."""
        if path not in self._seen:
            self._seen[path] = self._digest(path)
        return self._seen[path]

    def _digest(self, path: Path) -> str:
        signature, total = _signature(path)
        if path.is_dir() and total > HASHED_BYTES:
            return f"names-sizes-times:{signature}"
        known = self._digests.get(str(path))
        if known is None or known[0] != signature:
            known = (signature, _contents(path))
            self._digests[str(path)] = known
        return known[1]


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """(name relative to the folder, path) of a folder's files, in the order of their names.

    Hidden files are left out, and so are data set markers: a marker holds the time at which its data set was
    made, which isn't part of its contents.
    """
    if not path.is_dir():
        yield path.name, str(path)
        return
    count, start = 0, len(str(path)) + 1
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or name == "dataset.json":
                continue
            count += 1
            if count > LISTED_FILES:
                return
            full = os.path.join(folder, name)  # noqa: PTH118
            yield full[start:], full


def _signature(path: Path) -> tuple[str, int]:
    """(digest of names, sizes and times, total bytes)"""
    digest, total = hashlib.sha256(), 0
    for name, full in _files(path):
        with contextlib.suppress(OSError):
            stat = os.stat(full)  # noqa: PTH116
            total += stat.st_size
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest(), total


def _contents(path: Path) -> str:
    if not path.is_dir():
        return _sha256(str(path))
    digest = hashlib.sha256()
    for name, full in _files(path):
        digest.update(f"{name}\0{_sha256(full)}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _sha256(file: str) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:  # noqa: PTH123
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _options_digest(job: Job, recipe: Recipe) -> str:
    values: dict[str, Any] = {}
    for field in fields_of(type(job.options)):
        value = getattr(job.options, field.name)
        if field.name in job.outputs:
            # Relative to the run's folder: a run that is moved stays up to date.
            value = [_relative(path, recipe.out) for path in job.outputs[field.name]]
        elif field.name in job.inputs:
            value = None
        if (job.kind, field.name) not in NEUTRAL:
            values[field.name] = value
    body = {"kind": job.kind, "builder": job.builder, "values": values, "formats": _formats()}
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()


def _relative(path: Path, out: Path) -> str:
    return str(path.relative_to(out)) if path.is_relative_to(out) else str(path)


def _formats() -> dict[str, int]:
    """The version of each file format: a new one makes everything stale."""
    from ncm_cli.datasets import folder
    from ncm_cli.store import features_write, pairs, probe, results

    modules = {"data": folder.FORMAT_VERSION}
    modules.update({module.__name__: module.VERSION for module in (features_write, pairs, probe, results)})
    return modules


def _listed_images(job: Job, recipe: Recipe) -> dict[str, str]:
    """For a manifest that the recipe didn't make: a digest of its images' names, sizes and times."""
    if job.kind != "embed" or "from_array" in job.inputs:
        return {}
    (source,) = job.inputs["source"]
    if source.is_dir() or source.is_relative_to(recipe.out):
        return {}
    root = job.inputs.get("root", (source.parent,))[0]
    digest = hashlib.sha256()
    for name in _image_names(source, job.options.path_col or "path"):
        with contextlib.suppress(OSError, ValueError):
            stat = (root / name).stat()
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return {"images": f"names-sizes-times:{digest.hexdigest()}"}


def _image_names(manifest: Path, column: str) -> Iterator[str]:
    """The paths in a manifest; nothing where it can't be read, which the embed step will report."""
    with (
        contextlib.suppress(OSError, UnicodeDecodeError, csv.Error),
        manifest.open(encoding="utf-8-sig", newline="") as file,
    ):
        delimiter = "\t" if manifest.suffix == ".tsv" else ","
        for row in csv.DictReader(file, delimiter=delimiter):
            if row.get(column):
                yield row[column]
