"""One writer at a time on each output.

The lock is a file ``.NAME.lock`` beside the output that says which process holds it. Where the file system
has locks, the holder also has a record lock on it: that ends with the process however it ends, and no child
inherits it. Where it has none, the file's exclusive creation is the lock, and one left behind by a killed
process is told by its id.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError
from ncm_cli.store.atomic import full_disk_is_an_input_error, writable_target
from ncm_cli.store.process import host, is_dead, start_time

_TRY_SECONDS = 1.0
"""How long a lock that is changing hands is waited for."""

_UNNAMED_SECONDS = 30.0
"""Age from which a lock file without a holder's name was left by a process killed while it wrote the name."""

_ours: dict[tuple[int, str], dict[str, Any]] = {}
"""What this process holds, by its id and the lock file: to the system its threads are one holder, which loses
a record lock when it closes any descriptor of the file. So none of these files may be opened again."""


def lock_path(output: Path | str) -> Path:
    """Where the lock of an output is."""
    output = Path(output)
    return output.with_name(f".{output.name}.lock")


def holds(output: Path | str) -> bool:
    """Whether this process is writing ``output``."""
    return (os.getpid(), str(lock_path(os.path.realpath(output)))) in _ours


@contextlib.contextmanager
def writer_lock(output: Path | str) -> Iterator[None]:
    """Hold the right to write ``output`` while the block runs.

    Raises `InputError`, naming process and host, when another process has it. The lock of a process that is
    no more is taken over.
    """
    path = lock_path(writable_target(Path(output)))
    key, me = (os.getpid(), str(path)), _me()
    first = _ours.setdefault(key, me)
    if first is not me:
        raise _refused(path, output, first)
    try:
        with full_disk_is_an_input_error(path):
            descriptor = _acquire(path, output)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)
    finally:
        del _ours[key]


def _acquire(path: Path, output: Path | str) -> int:
    deadline = time.monotonic() + _TRY_SECONDS
    while True:
        descriptor, created = _opened(path)
        holder, taken = _holder(descriptor), False
        try:
            taken = _take(descriptor, created, holder, path)
        finally:
            if not taken:
                os.close(descriptor)
        if taken:
            return descriptor
        if time.monotonic() > deadline:
            raise _refused(path, output, holder)
        time.sleep(0.05)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor of the lock file, and whether this call made it."""
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        with contextlib.suppress(FileNotFoundError):  # it has been released in between
            return os.open(path, os.O_RDWR), False


def _take(descriptor: int, created: bool, holder: dict[str, Any] | None, path: Path) -> bool:
    """Whether the lock is ours now."""
    locked = _record_lock(descriptor)
    if locked is False or not _is_same_file(descriptor, path):
        return False
    if holder is not None and holder["host"] != host():  # whose locks may not be seen here
        return False
    if locked is None and not created:
        age = time.time() - os.fstat(descriptor).st_mtime
        if is_dead(holder["pid"], holder["started"]) if holder else age > _UNNAMED_SECONDS:
            _remove_stale(descriptor, path)
        return False
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_me()).encode("ascii", "replace"), 0)
    os.fsync(descriptor)
    return True


def _record_lock(descriptor: int) -> bool | None:
    """True: got the system's lock; False: another process has it; None: this file system has none."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _remove_stale(descriptor: int, path: Path) -> None:
    """Move a dead process's lock file away, so that the next try can make its own.

    The move is atomic, so of two processes that found it stale one gets it. Should the file have been
    replaced in between by a living process's, it is put back.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if not _is_same_file(descriptor, aside):
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink()


def _me() -> dict[str, Any]:
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"pid": pid, "host": host(), "started": start_time(pid), "since": since}


def _holder(descriptor: int) -> dict[str, Any] | None:
    """What the lock file says of its holder; None where it says nothing that can be read."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return {"pid": int(found["pid"]), **{name: str(found[name]) for name in ("host", "started", "since")}}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refused(path: Path, output: Path | str, holder: dict[str, Any] | None) -> InputError:
    here = holder is not None and holder["host"] == host()
    who = "process {pid} on host {host}, since {since}".format(**holder) if holder else "another process"
    fix = "wait for it, or stop it" if here else f"wait for it; if it is no more, delete {path}"
    return InputError("another process is writing this output", where=output, found=who, fix=fix)
