"""One writer at a time on each output.

The lock is a file ``.NAME.lock`` beside the output that says which process holds it. Where the file system
has locks, the holder also has an ``flock`` on it, which ends with the process however it ends. Where it has
none, the file's exclusive creation is the lock, and one left behind by a killed process is told by its id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ncm_cli.errors import InputError
from ncm_cli.store.atomic import full_disk_is_an_input_error, writable_target

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_TRIES = 20
_PAUSE_SECONDS = 0.05
_UNNAMED_SECONDS = 30.0
"""Age from which a lock file without a holder's name was left by a process killed while it wrote the name."""

_open_locks: set[int] = set()
"""Descriptors that a forked child must let go, or a worker would keep the lock of a killed parent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock."""

    pid: int
    host: str
    started: str
    """Start time of the process in the system's own units, "" where the system doesn't tell."""
    since: str

    def is_dead(self) -> bool:
        """Whether the process certainly is no more; another host's can't be asked."""
        return self.host == _host() and not _is_alive(self.pid, self.started)


def lock_path(output: Path | str) -> Path:
    """Where the lock of an output is."""
    output = Path(output)
    return output.with_name(f".{output.name}.lock")


@contextlib.contextmanager
def writer_lock(output: Path | str) -> Iterator[None]:
    """Hold the right to write ``output`` while the block runs.

    Raises `InputError` at once, naming process and host, when another process has it. The lock of a process
    that is no more is taken over.
    """
    path = lock_path(writable_target(Path(output)))
    with full_disk_is_an_input_error(path):
        descriptor = _acquire(path, Path(output))
    try:
        yield
    finally:
        _open_locks.discard(descriptor)
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _acquire(path: Path, output: Path) -> int:
    for _ in range(_TRIES):
        descriptor, created = _opened(path)
        if descriptor is None:
            continue
        taken = False
        try:
            taken = _take(descriptor, created, path, output)
        finally:
            if not taken:
                os.close(descriptor)
        if taken:
            _forget_in_children(descriptor)
            return descriptor
        time.sleep(_PAUSE_SECONDS)
    raise _held(path, output)


def _opened(path: Path) -> tuple[int | None, bool]:
    """(descriptor, whether this call made the file); None when it vanished in between."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        try:
            return os.open(path, os.O_RDWR), False
        except FileNotFoundError:
            return None, False


def _take(descriptor: int, created: bool, path: Path, output: Path) -> bool:
    """Whether the lock is now ours; False means that it changed hands and is worth another try."""
    locked = _flock(descriptor)
    if locked is False:
        raise _held(path, output)
    if not _is_same_file(descriptor, path):
        return False
    if not created:
        holder = _holder(descriptor)
        if holder is None:
            # With the system's lock in hand nobody can be about to write a name here.
            if locked is None and time.time() - os.fstat(descriptor).st_mtime < _UNNAMED_SECONDS:
                return False
        elif holder.host != _host() or (locked is None and not holder.is_dead()):
            raise _held(path, output)
        if locked is None:
            return _remove_stale(descriptor, path)
    _write_holder(descriptor)
    return True


def _flock(descriptor: int) -> bool | None:
    """True: got the system's lock; False: another process has it; None: this file system has none."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_stale(descriptor: int, path: Path) -> bool:
    """Move a dead process's lock file away, so that the next try can make its own; always False.

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
    return False


def _write_holder(descriptor: int) -> None:
    text = json.dumps(
        {
            "pid": os.getpid(),
            "host": _host(),
            "started": _start_time(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
    )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode("ascii", "replace"), 0)
    os.fsync(descriptor)


def _holder(descriptor: int) -> Holder | None:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(int(found["pid"]), str(found["host"]), str(found["started"]), str(found["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _held(path: Path, output: Path) -> InputError:
    holder = None
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        holder = _holder(descriptor)
        os.close(descriptor)
    who = f"process {holder.pid} on host {holder.host}, since {holder.since}" if holder else "another process"
    far = holder is not None and holder.host != _host()
    return InputError(
        "another process is writing this output",
        where=output,
        found=who,
        fix=f"wait for it; if it is no more, delete {path}"
        if far or not holder
        else "wait for it, or stop it",
    )


def _host() -> str:
    return socket.gethostname()


def _start_time(pid: int) -> str:
    """The kernel's start time of a process, which tells a process id that was given out again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return stat.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_alive(pid: int, started: str) -> bool:
    if sys.platform == "win32":
        # Signal 0 would end the process there.
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    now = _start_time(pid)
    return not (started and now and started != now)


def _forget_in_children(descriptor: int) -> None:
    global _close_at_fork
    if not _close_at_fork and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)
        _close_at_fork = True
    _open_locks.add(descriptor)


_close_at_fork = False


def _close_all() -> None:
    while _open_locks:
        with contextlib.suppress(OSError):
            os.close(_open_locks.pop())
