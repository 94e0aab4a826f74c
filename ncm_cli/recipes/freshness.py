"""Decides when a job has to run again: its options, its inputs' contents or a format version have changed.

One state file in the run's folder records what finished jobs read and wrote. Contents are compared by
SHA-256. A file isn't read again while its size, device, inode, mtime and ctime are unchanged, if both times
were at least `SETTLED_NS` old when it was read. Rewriting a file sets its ctime, which no program can set
back, and the age ensures that the new ctime differs from the old one (git's index has the same rule).
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
from ncm_cli.images.paths import archive_of, fetch, is_remote, local_path, look_up
from ncm_cli.images.samples import DecodeError
from ncm_cli.options import fields_of
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.recipes.steps import STATE, Job
from ncm_cli.store.files import RESULT_VERSION, read_document, relative, sha256_file, write_document

FORMAT = "ncm-run-state"
VERSION = 3

SETTLED_NS = 10 * 10**9
"""10 s. The coarsest file times are 2 s (FAT); the rest allows for clocks of file servers."""

NEUTRAL = {
    ("embed", name) for name in ("workers", "batch_size", "max_failures", "fresh", "cluster", "cpus")
} | {("finetune", name) for name in ("workers", "fresh")}
"""Options that don't change the result."""

NamedFile = tuple[str, str]
"""A file's name within its folder or list, and its path."""


Stamp = dict[str, Any]
"""What a job depends on: ``inputs`` has the digest of each input's contents, ``options`` the digest of
everything else. A job with the stamp of its last run is up to date."""


class State:
    """The run folder's record of what its jobs have read and written, saved before and after each job.

    Raises `InputError` for a record that can't be read, since it says which files the run has made.
    """

    def __init__(self, out: Path, reporter: Reporter = SILENT) -> None:
        self._out, self._reporter, self._path = out, reporter, out / STATE
        self._jobs: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, list[str]] = {}
        self._seen: dict[str, str] = {}
        self.is_new = not self._path.exists()
        """Whether this is the first run in this folder."""
        if not self.is_new:
            try:
                record = read_document(self._path, FORMAT, VERSION, what="the record of a run")
            except InputError as error:
                raise InputError(
                    "the record of what this run has made can't be used",
                    where=self._path,
                    found=error.what,
                    fix="another --out; or move the run's folder away, and everything is run again",
                ) from error
            self._jobs, self._digests = record["jobs"], record["digests"]

    def save(self) -> None:
        """Write the record atomically; it doesn't depend on the order in which jobs ended."""
        jobs, digests = (dict(sorted(record.items())) for record in (self._jobs, self._digests))
        write_document(self._path, FORMAT, VERSION, {"jobs": jobs, "digests": digests})

    def made(self, path: Path) -> bool:
        """Whether the run made the file at a path; outside the run's folder, it must also be unchanged."""
        name = self._name(path)
        for facts in self._jobs.values():
            if name in facts.get("claims", ()):
                return True
            if name in facts.get("outputs", {}):
                return path.is_relative_to(self._out) or facts["outputs"][name] == self.digest(path)
        return False

    def stamp(self, job: Job) -> Stamp:
        """The job's current stamp; its inputs must exist."""
        images, places = _named_images(job), ("source", "root")
        inputs = {}
        for name, paths in sorted(job.inputs.items()):
            for number, path in enumerate(paths):
                # In a folder of images, or a root of relative paths, only the images count.
                if images is None or name not in places or not path.is_dir():
                    inputs[f"{name}[{number}]"] = self.digest(path)
        if images is not None:
            named = [as_written(getattr(job.options, name, None) or "") for name in places]
            inputs["images"] = self._digest(f"images of {' from '.join(named)}", images, folder=True)
        return {"options": self._options_digest(job), "inputs": inputs}

    def why_stale(self, job: Job, stamp: Stamp) -> str | None:
        """Why the job has to run; None if it is up to date."""
        facts = self.facts(job)
        reasons = {
            "not run yet": not facts,
            "it didn't finish": facts.get("unfinished"),
            "its options changed": facts.get("options") != stamp["options"],
            "its inputs changed": facts.get("inputs") != stamp["inputs"],
        }
        outputs = facts.get("outputs", {})
        reasons |= {f"{path.name} is missing": not path.exists() for path in job.written}
        for why in (why for why, holds in reasons.items() if holds):
            return why
        changed = (path for path in job.written if outputs.get(self._name(path)) != self.digest(path))
        return next((f"{path.name} was changed" for path in changed), None)

    def starting(self, job: Job) -> None:
        """Record that a job starts: if it is killed, its outputs belong to the run, but aren't up to date."""
        claims = [self._name(path) for path in job.written]
        self._jobs.setdefault(job.key, {}).update(unfinished=True, claims=claims)
        self.save()

    def finished(self, job: Job, stamp: Stamp, **facts: Any) -> None:
        """Record a finished job, and save."""
        self._seen.clear()
        outputs = {self._name(path): self.digest(path) for path in job.written if path.exists()}
        self._jobs[job.key] = {**stamp, "outputs": outputs, **facts}
        self.save()

    def facts(self, job: Job) -> dict[str, Any]:
        """The record of a job; empty if there is none."""
        return self._jobs.get(job.key, {})

    def digest(self, path: Path) -> str:
        """Digest of a file's or folder's contents, computed once between two jobs."""
        folder = path.is_dir()
        return self._digest(str(path), list(_walk(str(path))) if folder else [("", str(path))], folder=folder)

    def _digest(self, key: str, files: list[NamedFile], *, folder: bool) -> str:
        """Digest of many files and their names; without ``folder``, of one file's contents."""
        if key in self._seen:
            return self._seen[key]
        now, versions = time.time_ns(), self._remote_versions(files)
        signature, changed = _signature(files, versions)
        cached = self._digests.pop(key, ["", ""])
        settled = True
        if cached[0] != signature:
            cached = [signature, self._contents(files, versions) if folder else _file_digest(files[0][1])]
            # On Windows ctime is the time of creation, which a change doesn't affect.
            settled = os.name == "posix" and changed <= now - SETTLED_NS
        if settled:
            self._digests[key] = cached
        self._seen[key] = cached[1]
        return cached[1]

    def _remote_versions(self, files: list[NamedFile]) -> dict[str, str]:
        """Size and version of each remote file as text; "" if its server gives no version."""
        from ncm_cli.images.rows import LOOKUPS_AT_ONCE

        remote, versions = sorted({path for _, path in files if is_remote(path)}), dict[str, str]()
        if remote:
            label = ("looking up", len(remote), "files")
            with self._reporter.task(*label) as task, ThreadPoolExecutor(LOOKUPS_AT_ONCE) as pool:
                for path, (size, version) in zip(remote, pool.map(look_up, remote), strict=True):
                    versions[path] = f"{size} {version}" if version else ""
                    task.advance()
        return versions

    def _contents(self, files: list[NamedFile], versions: dict[str, str]) -> str:
        digest, by_path = hashlib.sha256(), dict[str, str]()
        with self._reporter.task("comparing contents", len(files), "files") as task:
            for name, path in files:
                if path not in by_path:
                    by_path[path] = versions.get(path) or _file_digest(path)
                digest.update(f"{name}\0{by_path[path]}\0".encode("utf-8", "surrogateescape"))
                task.advance()
        return digest.hexdigest()

    def _options_digest(self, job: Job) -> str:
        values: dict[str, Any] = {}
        for field in fields_of(type(job.options)):
            value = None if field.name in job.inputs else getattr(job.options, field.name)
            if field.name in job.outputs:
                # Relative to the run's folder, so that a moved run stays up to date.
                value = [self._name(job.outputs[field.name])]
            if (job.kind, field.name) not in NEUTRAL:
                values[field.name] = value
        body = {"kind": job.kind, "builder": job.builder, "values": values, "formats": _formats()}
        return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()

    def _name(self, path: Path) -> str:
        return str(relative(path, self._out))


def _walk(folder: str, prefix: str = "", above: frozenset[str] = frozenset()) -> Iterator[NamedFile]:
    """A folder's files with their names relative to it, sorted; links are followed.

    Hidden files are left out, and so are markers of data sets, which hold the time when they were made.
    """
    real_path = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)) if real_path not in above else ():  # noqa: PTH208
            path = f"{folder}/{name}"
            if name.startswith(".") or name == "dataset.json":
                continue
            if os.path.isdir(path):  # noqa: PTH112
                yield from _walk(path, f"{prefix}{name}/", above | {real_path})
            else:
                yield f"{prefix}{name}", path


def _signature(files: list[NamedFile], versions: dict[str, str]) -> tuple[str, int]:
    """(digest of the files' names, sizes, inodes, and times or ``versions``; their latest time in ns)

    A remote file without a version changes the digest each time, so that it is read again.
    """
    digest, changed = hashlib.sha256(), 0
    for name, path in files:
        if path in versions:
            text = f"{name}\0{versions[path] or os.urandom(16).hex()}\0"
            digest.update(text.encode("utf-8", "surrogateescape"))
            continue
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116
            times = (status.st_mtime_ns, status.st_ctime_ns)
            changed = max(changed, *times)
            facts = (name, status.st_size, status.st_dev, status.st_ino, *times)
            digest.update("\0".join(map(str, facts)).encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest(), changed


def _file_digest(path: str) -> str:
    """SHA-256 of a file; ``unreadable`` for one that can't be read, such as a broken link."""
    if is_remote(path):
        with contextlib.suppress(DecodeError):
            return hashlib.sha256(fetch(path)).hexdigest()
        return "unreadable"
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return sha256_file(path)
    return "unreadable"


def _named_images(job: Job) -> list[NamedFile] | None:
    """The images of a job's source, by id; None for a job without images."""
    with contextlib.suppress(NcmError):  # the step itself reports what is wrong with its source
        if job.kind in ("embed", "finetune") and job.options.from_array is None:
            from ncm_cli.images.source import is_made_elsewhere, read_source

            if is_made_elsewhere(job.options.source):
                return None
            manifest = read_source(job.options)
            assert manifest.files is not None
            return [(file.id, _source_of(file.path)) for file in manifest.files]
        if job.kind == "predict":
            from ncm_cli.probes.predict import find_images

            return [(image.id, image.path) for image in find_images(job.options.source)]
    return None


def _source_of(path: str) -> str:
    """The file that is compared for an image: for an image in a remote archive, the archive."""
    if not is_remote(path):
        return path
    path = archive_of(path)
    return local_path(path) or path


def _formats() -> dict[str, int]:
    """The version of each file format; a new one makes every job stale."""
    from ncm_cli.datasets import base
    from ncm_cli.store import features, pairs, probe

    # The names are those of earlier records.
    modules = {"data": base.FORMAT_VERSION, "ncm_cli.store.results": RESULT_VERSION}
    modules.update({module.__name__: module.VERSION for module in (features, pairs, probe)})
    return modules
