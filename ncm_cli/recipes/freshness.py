"""When a job has to run again: its options, the contents of its inputs, or a format version has changed.

What a finished job read and wrote is kept in one state file in the run's folder. Contents are compared by
SHA-256. A file isn't read again where size, device, inode, mtime and ctime are those at which it was read
before, and both times were at least `SETTLED_NS` past then: a rewritten file gets a new ctime, which no
program can set back, and the age makes sure that it differs from the old one (git's index has the same rule).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, NcmError, as_written
from ncm_cli.images.decode import DecodeError
from ncm_cli.images.paths import archive_of, fetch, is_remote, local_path, look_up
from ncm_cli.options import fields_of
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.recipes.steps import STATE, Job
from ncm_cli.store.files import RESULT_VERSION, read_document, relative, sha256_file, write_document

FORMAT = "ncm-run-state"
VERSION = 3

SETTLED_NS = 10 * 10**9
"""The coarsest file times are 2 s (FAT); the rest is for clocks of file servers that differ a little."""

NEUTRAL = {("embed", name) for name in ("workers", "batch_size", "max_failures", "fresh")} | {
    ("finetune", name) for name in ("workers", "fresh")
}
"""Options that say how a result is reached and not what it is."""

NamedFile = tuple[str, str]
"""What a file is called among those it is compared with, and its path."""


Stamp = dict[str, Any]
"""What decides whether a job is up to date: ``inputs``, the digest of the contents of each; ``options``, the
digest of everything else."""


class State:
    """The run folder's record of what its jobs have read and written, written anew before and after each.

    Raises `InputError` for a record that can't be read: without it nobody knows which files are the run's.
    """

    def __init__(self, out: Path, reporter: Reporter = SILENT) -> None:
        self._out, self._reporter, self._path = out, reporter, out / STATE
        self._jobs: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, list[str]] = {}
        self._seen: dict[str, str] = {}
        self.is_new = not self._path.exists()
        """Whether nothing was run into this folder before."""
        if not self.is_new:
            try:
                found = read_document(self._path, FORMAT, VERSION, what="the record of a run")
            except InputError as error:
                raise InputError(
                    "the record of what this run has made can't be used",
                    where=self._path,
                    found=error.what,
                    fix="another --out; or move the run's folder away, and everything is run again",
                ) from error
            self._jobs, self._digests = found["jobs"], found["digests"]

    def save(self) -> None:
        """Write the record; a reader sees the old one or the new one."""
        write_document(self._path, FORMAT, VERSION, {"jobs": self._jobs, "digests": self._digests})

    def made(self, path: Path) -> bool:
        """Whether the run made what is at a path, and outside its folder nobody has changed it since."""
        name = self._name(path)
        for known in self._jobs.values():
            if name in known.get("claims", ()):
                return True
            if name in known.get("outputs", {}):
                return path.is_relative_to(self._out) or known["outputs"][name] == self.digest(path)
        return False

    def stamp(self, job: Job) -> Stamp:
        """The job's stamp as things are now: its inputs must be there."""
        images = _named_images(job)
        inputs = {}
        for name, paths in sorted(job.inputs.items()):
            for number, path in enumerate(paths):
                # Of a folder of images, or that relative paths start from, only the images count.
                if images is None or not path.is_dir():
                    inputs[f"{name}[{number}]"] = self.digest(path)
        if images is not None:
            given = [as_written(getattr(job.options, name, None) or "") for name in ("source", "root")]
            inputs["images"] = self._digest(f"images of {' from '.join(given)}", images, folder=True)
        return {"options": self._options_digest(job), "inputs": inputs}

    def why_stale(self, job: Job, stamp: Stamp) -> str | None:
        """Why the job has to run; None when it is up to date."""
        known = self.facts(job)
        reasons = {
            "not run yet": not known,
            "it was interrupted": known.get("unfinished"),
            "its options changed": known.get("options") != stamp["options"],
            "its inputs changed": known.get("inputs") != stamp["inputs"],
        }
        outputs = known.get("outputs", {})
        reasons |= {f"{path.name} is missing": not path.exists() for path in job.written}
        for why in (why for why, holds in reasons.items() if holds):
            return why
        changed = (path for path in job.written if outputs.get(self._name(path)) != self.digest(path))
        return next((f"{path.name} was changed" for path in changed), None)

    def starting(self, job: Job) -> None:
        """Before a job runs: should it be killed, what it wrote is its own, but not taken for up to date."""
        claims = [self._name(path) for path in job.written]
        self._jobs.setdefault(job.key, {}).update(unfinished=True, claims=claims)
        self.save()

    def finished(self, job: Job, stamp: Stamp, **facts: Any) -> None:
        """Record a job that has just run, and save."""
        self._seen.clear()
        outputs = {self._name(path): self.digest(path) for path in job.written if path.exists()}
        self._jobs[job.key] = {**stamp, "outputs": outputs, **facts}
        self.save()

    def facts(self, job: Job) -> dict[str, Any]:
        """What is recorded of a job; empty if nothing is."""
        return self._jobs.get(job.key, {})

    def digest(self, path: Path) -> str:
        """Digest of a file's or folder's contents, looked at anew after each job."""
        folder = path.is_dir()
        return self._digest(str(path), list(_walk(str(path))) if folder else [("", str(path))], folder=folder)

    def _digest(self, key: str, files: list[NamedFile], *, folder: bool) -> str:
        """Digest of many files and their names; without ``folder``, of one file alone."""
        if key in self._seen:
            return self._seen[key]
        now, told = time.time_ns(), self._told(files)
        signature, changed = _signature(files, told)
        known = self._digests.pop(key, ["", ""])
        settled = True
        if known[0] != signature:
            known = [signature, self._contents(files, told) if folder else _file_digest(files[0][1])]
            # On Windows ctime is the time of creation, which says nothing of a change.
            settled = os.name == "posix" and changed <= now - SETTLED_NS
        if settled:
            self._digests[key] = known
        self._seen[key] = known[1]
        return known[1]

    def _told(self, files: list[NamedFile]) -> dict[str, str]:
        """What the file systems of remote files tell of them now; blank where that can't show a change."""
        from ncm_cli.images.rows import LOOKING

        remote, told = sorted({path for _, path in files if is_remote(path)}), dict[str, str]()
        if remote:
            label = ("looking up", len(remote), "files")
            with self._reporter.task(*label) as task, ThreadPoolExecutor(LOOKING) as pool:
                for path, (size, version) in zip(remote, pool.map(look_up, remote), strict=True):
                    told[path] = f"{size} {version}" if version else ""
                    task.advance()
        return told

    def _contents(self, files: list[NamedFile], told: dict[str, str]) -> str:
        digest, known = hashlib.sha256(), dict[str, str]()
        with self._reporter.task("comparing contents", len(files), "files") as task:
            for name, path in files:
                if path not in known:
                    known[path] = told.get(path) or _file_digest(path)
                digest.update(f"{name}\0{known[path]}\0".encode("utf-8", "surrogateescape"))
                task.advance()
        return digest.hexdigest()

    def _options_digest(self, job: Job) -> str:
        values: dict[str, Any] = {}
        for field in fields_of(type(job.options)):
            value = None if field.name in job.inputs else getattr(job.options, field.name)
            if field.name in job.outputs:
                # Relative to the run's folder: a run that is moved stays up to date.
                value = [self._name(job.outputs[field.name])]
            if (job.kind, field.name) not in NEUTRAL:
                values[field.name] = value
        body = {"kind": job.kind, "builder": job.builder, "values": values, "formats": _formats()}
        return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()

    def _name(self, path: Path) -> str:
        return str(relative(path, self._out))


def _walk(folder: str, prefix: str = "", above: frozenset[str] = frozenset()) -> Iterator[NamedFile]:
    """A folder's files by their names relative to it, in the order of these; links are followed.

    Hidden files are left out, and so are data set markers: a marker holds the time at which its data set was
    made, which isn't part of its contents.
    """
    here = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)) if here not in above else ():  # noqa: PTH208
            path = f"{folder}/{name}"
            if name.startswith(".") or name == "dataset.json":
                continue
            if os.path.isdir(path):  # noqa: PTH112
                yield from _walk(path, f"{prefix}{name}/", above | {here})
            else:
                yield f"{prefix}{name}", path


def _signature(files: list[NamedFile], told: dict[str, str]) -> tuple[str, int]:
    """(digest of names and of what tells a changed file without reading it, latest time among them in ns)

    ``told`` has the remote files; those of which it says nothing are read each time.
    """
    digest, changed = hashlib.sha256(), 0
    for name, path in files:
        if path in told:
            said = f"{name}\0{told[path] or os.urandom(16).hex()}\0"
            digest.update(said.encode("utf-8", "surrogateescape"))
            continue
        with contextlib.suppress(OSError):
            found = os.stat(path)  # noqa: PTH116
            times = (found.st_mtime_ns, found.st_ctime_ns)
            changed = max(changed, *times)
            facts = (name, found.st_size, found.st_dev, found.st_ino, *times)
            digest.update("\0".join(map(str, facts)).encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest(), changed


def _file_digest(path: str) -> str:
    """SHA-256 of a file; a word for what can't be read, such as a link to nothing."""
    if is_remote(path):
        with contextlib.suppress(DecodeError):
            return hashlib.sha256(fetch(path)).hexdigest()
        return "unreadable"
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return sha256_file(path)
    return "unreadable"


def _named_images(job: Job) -> list[NamedFile] | None:
    """The images, by id, that a job reads because its source names them or is their folder; else None."""
    with contextlib.suppress(NcmError):  # the step itself will say what is wrong with its source
        if job.kind in ("embed", "finetune") and job.options.from_array is None:
            from ncm_cli.images.source import read_source

            manifest = read_source(job.options)
            assert manifest.files is not None
            return [(file.id, _source_of(file.path)) for file in manifest.files]
        if job.kind == "predict":
            from ncm_cli.probes.predict import find_images

            return [(image.id, image.path) for image in find_images(job.options.source)]
    return None


def _source_of(path: str) -> str:
    """The file by which a change of an image is told: of what lies in a remote archive, the archive."""
    if not is_remote(path):
        return path
    path = archive_of(path)
    return local_path(path) or path


def _formats() -> dict[str, int]:
    """The version of each file format: a new one makes everything stale."""
    from ncm_cli.datasets import base
    from ncm_cli.store import features, pairs, probe

    # The names are those of earlier records.
    modules = {"data": base.FORMAT_VERSION, "ncm_cli.store.results": RESULT_VERSION}
    modules.update({module.__name__: module.VERSION for module in (features, pairs, probe)})
    return modules
