"""Files that appear whole or not at all, one writer at a time; JSON without NaN, and documents of ours in it.

A file is written under a temporary name beside it, synced and renamed. The lock of an output is a file
``.NAME.lock`` beside it, whose exclusive creation every file system has. It says which process holds it: one
that a killed process left is told by its id, or by the system's lock of the file where it was in another
container of this host, and moved away.

A document says what it is, and carries a digest of all that it says. A result is one with a schema for what
eval, bound, sweep and their like find out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import json
import math
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ncm_cli import __version__
from ncm_cli.errors import InputError
from ncm_cli.registry import at_address
from ncm_cli.store.digests import MAKE_AGAIN, digest_of, parse_json, require_version
from ncm_cli.store.result_record import SCHEMAS, Head
from ncm_cli.store.schema import misfit

FULL_DISK_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than this system allows (ulimit -f, or the file system's own limit)",
}
"""The reason of a refused write, by errno."""

_ABANDONED_AFTER = 24 * 3600
"""Seconds without a write after which a temporary file of another host is taken for a left-over."""

_LOCK_WAIT = 1.0
"""Seconds that a lock is waited for which another process is letting go of."""

_MAX_LOCK_BYTES = 1 << 16
"""Most bytes that are read of a lock file; none has as many."""

_NAMELESS_AFTER = 30.0
"""Age in seconds from which a lock file without a name was left by a process killed while it wrote it."""

RESULT_FORMAT = "ncm-result"
RESULT_VERSION = 2

DIGEST = "content_sha256"

HEADER = ("ncm_format", "ncm_format_version", DIGEST, "kind", "ncm_version", "created")
"""Names of a result that aren't its body's."""


def pid_namespace() -> str:
    """8 hex digits that stand for this host and this container on it, within which process ids are unique."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.blake2b(f"{socket.gethostname()} {namespace}".encode(), digest_size=4).hexdigest()


def start_time(pid: int) -> str:
    """The kernel's start time of a process, by which a reused id is noticed; "" where it isn't known."""
    return _state_and_start(pid)[1]


def is_dead(pid: int, started: str) -> bool:
    """Whether a process of this `pid_namespace`, which began at ``started``, has certainly ended."""
    if sys.platform == "win32":
        # Signal 0 would end the process there.
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # another user's
        pass
    state, now = _state_and_start(pid)
    # Z: killed, and not yet asked about by its parent, which in some containers never does.
    return state in ("Z", "X") or bool(started and now and started != now)


def _state_and_start(pid: int) -> tuple[str, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """A temporary path in the folder of ``path``, renamed onto it when the block ends well.

    What is at ``path`` stays as it was until the rename, and for good when the block raises (then the
    temporary file is removed). What killed writers of ``path`` left is removed. Missing parent folders are
    made. A link is followed: the file that it names is replaced, not the link.

    Raises `InputError` when the disk is full, and when ``path`` is a folder, a device or a circle of links.
    """
    target = _writable_target(Path(path))
    remove_leftovers(target)
    temporary = _temporary(target)
    try:
        with full_disk_is_an_input_error(target):
            # Created by this process, so that the name is its own and the umask applies.
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            yield temporary
            with contextlib.suppress(OSError):
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            _sync(temporary, os.O_RDWR)
            temporary.replace(target)
            sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(target: Path) -> Path:
    """A name beside a file that `remove_leftovers` knows again, and that says who made it."""
    pid = os.getpid()
    made_by = f"{pid_namespace()}-{pid}-{start_time(pid)}-{secrets.token_hex(4)}"
    return target.with_name(f".{_short(target.name)}.{made_by}.tmp")


@contextlib.contextmanager
def full_disk_is_an_input_error(path: Path) -> Iterator[None]:
    """Turn the operating system's "no space left" into an `InputError` that names ``path``."""
    try:
        yield
    except OSError as error:
        # HDF5 mentions the number in its message instead of setting it.
        numbers = [number for number in FULL_DISK_WORDS if f"errno = {number}" in str(error)]
        number = error.errno if error.errno in FULL_DISK_WORDS else next(iter(numbers), None)
        if number is None:
            raise
        raise InputError(
            FULL_DISK_WORDS[number],
            where=path,
            expected="the old file, if there was one, is as it was",
            fix="free some space and run the same command again",
        ) from error


def _writable_target(path: Path) -> Path:
    """The file that writing ``path`` replaces, parent folders made; refuses folders and devices."""
    refuse_no_file(path)
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def refuse_no_file(path: Path) -> None:
    """Refuse to write where a folder, a device or a circle of links is; commands ask before they work."""
    with contextlib.suppress(FileNotFoundError):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            what = "the output is a link that leads back to itself"
            raise InputError(what, where=path, fix="remove it, or name another file") from None
        if stat.S_ISDIR(mode):
            what = "the output is a folder"
            raise InputError(what, where=path, expected="a file name", fix=f"{path / 'NAME'}")
        if not stat.S_ISREG(mode):
            raise InputError("the output isn't a regular file", where=path, expected="a file name")


def _short(name: str) -> str:
    # A name may have 255 bytes on most file systems, and the target's may have all of them.
    raw = os.fsencode(name)
    return name if len(raw) <= 180 else raw[:180].decode(sys.getfilesystemencoding(), "ignore")


def remove_leftovers(path: Path | str) -> None:
    """Delete the temporary files that killed writers of ``path`` or its lock left; none that may be at work.

    Whether a process of this host or container is still there can be asked. One of another, or of an earlier
    version, which didn't say where it ran, counts as ended after a day without a write.
    """
    target = Path(os.path.realpath(path))
    names = "|".join(re.escape(_short(path.name)) for path in (target, lock_path(target)))
    made_by = r"(?:([0-9a-f]{8})-(\d+)-(\d*)|\d+)-[0-9a-f]{8}\.tmp"
    # Versions before 0.6 moved a lock away under a name that doesn't say who did.
    moved = re.escape(lock_path(target).name) + r"\.[0-9a-f]{8}"
    pattern = re.compile(rf"\.(?:{names})\.{made_by}|{moved}")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if name := pattern.fullmatch(entry.name):
                where, pid, started = name.groups()
                with contextlib.suppress(FileNotFoundError):
                    age = time.time() - entry.stat().st_mtime
                    if is_dead(int(pid), started) if where == pid_namespace() else age > _ABANDONED_AFTER:
                        Path(entry.path).unlink()


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, where the system can."""
    # Windows and some network file systems can't open or sync a folder; the rename is atomic even there.
    with contextlib.suppress(OSError):
        _sync(folder, os.O_RDONLY)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON atomically; NaN and infinities are a ValueError (see `jsonable`)."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    # File names that aren't UTF-8 hold lone surrogates, which JSON escapes like Python.
    write_bytes(path, (text + "\n").encode("utf-8", "backslashreplace"))


def read_json(path: Path | str, *, limit: int = 1 << 30) -> Any:
    """The value in a JSON file of at most ``limit`` bytes, without NaN tokens.

    Raises `InputError` for a file that isn't there, is too large, or isn't JSON.
    """
    path = require_file(path)
    if (size := path.stat().st_size) > limit:
        raise InputError("a JSON file too large to be ours", where=path, found=f"{size:,} bytes")
    try:
        return parse_json(path.read_bytes().decode("utf-8"), parse_constant=_finite, parse_float=_finite)
    except ValueError as error:
        raise InputError("not a JSON file that can be read", where=path, found=one_line(error)) from None


def _finite(token: str) -> float:
    if not math.isfinite(value := float(token)):
        raise ValueError(f"{token} is not JSON")
    return value


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat()


def jsonable(value: Any) -> Any:
    """``value`` in JSON's own types: arrays as lists, dataclasses as objects, NaN and infinities as null.

    An object with a method ``to_json`` is what that says. Raises TypeError for what has no such form.
    """
    if hasattr(value, "to_json"):
        return jsonable(value.to_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def write_document(path: Path | str, format_name: str, version: int, body: Mapping[str, Any]) -> None:
    """Write ``body`` atomically under a header with its format, version and digest."""
    header = {"ncm_format": format_name, "ncm_format_version": version}
    write_json(path, {**header, DIGEST: _digest({**header, **body}), **body})


def read_document(
    path: Path | str, format_name: str, version: int, *, what: str, fix: str = MAKE_AGAIN
) -> dict[str, Any]:
    """The whole document.

    Raises `InputError` for another file or version, and for one whose `DIGEST` isn't that of its contents.
    """
    path = Path(path)
    found = read_json(path)
    if not isinstance(found, dict) or found.get("ncm_format") != format_name:
        other = found.get("ncm_format") if isinstance(found, dict) else type(found).__name__
        raise InputError(
            f"not {what}", where=path, found=f"ncm_format {other!r}", expected=format_name, fix=fix
        )
    require_version(found.get("ncm_format_version"), version, path)
    if found.get(DIGEST) != _digest(found):
        off = f"no {DIGEST}, so that no command of ncm since 0.1.0 wrote it"
        raise InputError(
            f"{what} that was changed after it was written",
            where=path,
            found=f"contents that don't match its {DIGEST}" if DIGEST in found else off,
            fix=fix,
        )
    return found


def _digest(document: Mapping[str, Any]) -> str:
    return digest_of({name: _plain(value) for name, value in document.items() if name != DIGEST})


def _plain(value: Any) -> Any:
    """``value`` with 1.0 as 1: other programs that rewrite a document may turn one into the other."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def write_result(path: Path | str, kind: str, body: Mapping[str, Any]) -> None:
    """Write ``body`` atomically under a header that says what it is.

    Floats keep full precision; NaN and infinities become null. Raises ValueError if the body has a name that
    the header needs.
    """
    clash = [name for name in HEADER if name in body]
    if clash:
        raise ValueError(f"a result body can't have {clash}")
    facts = {"kind": kind, "ncm_version": __version__, "created": now()}
    write_document(path, RESULT_FORMAT, RESULT_VERSION, {**facts, **jsonable(body)})


def read_result(path: Path | str, *, kind: str | None = None, fix: str = MAKE_AGAIN) -> dict[str, Any]:
    """A result file's header and body as one object; refuses another kind and what `read_document` does."""
    found = read_document(path, RESULT_FORMAT, RESULT_VERSION, what="a result", fix=fix)
    if wrong := misfit(found, Head) or misfit(found, SCHEMAS.get(found["kind"], Any)):
        name, value, words = wrong
        raise InputError(
            "a result with a value that ncm doesn't write",
            where=f"{path}, {name}",
            found=one_line(repr(value)),
            expected=words,
            fix=fix,
        )
    if kind is not None and found.get("kind") != kind:
        raise InputError("a result of another kind", where=path, found=found.get("kind"), expected=kind)
    return found


class Shown:
    """In a notebook: the tables by which `ncm info` describes the file."""

    def _repr_html_(self) -> str:
        # By address, as commands are: what shows things lies above the things.
        return str(at_address("notebook:html")(self))


def require_file(path: Path | str) -> Path:
    """``path``, checked to be a regular file that isn't empty."""
    path = Path(path)
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("no such file", where=path) from None
    except (OSError, ValueError) as error:
        raise InputError("a file that can't be read", where=path, found=one_line(error)) from None
    if stat.S_ISDIR(facts.st_mode):
        raise InputError("a folder where a file is expected", where=path)
    if not stat.S_ISREG(facts.st_mode):
        raise InputError("not a regular file", where=path)
    if facts.st_size == 0:
        raise InputError("an empty file", where=path, found="0 bytes")
    return path


def relative(path: Path, folder: Path) -> Path:
    """A path relative to a folder if it lies in it, else as it is."""
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def one_line(error: object, limit: int = 200) -> str:
    """An exception's text on one line, cut to a length that a person reads."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def sha256_file(path: Path | str) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits, in bounded memory."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def lock_path(output: Path | str) -> Path:
    """Where the lock of an output is."""
    output = Path(output)
    return output.with_name(f".{output.name}.lock")


class BusyError(InputError):
    """Another process is writing an output."""


@contextlib.contextmanager
def writer_lock(output: Path | str, *, wait: float | None = None) -> Iterator[None]:
    """Hold the right to write ``output`` while the block runs.

    Raises `BusyError`, naming process and host, when another process has it for longer than ``wait`` seconds
    (None: as long as it takes to change hands). The lock of a process that is no more is taken over.
    """
    path = lock_path(_writable_target(Path(output)))
    deadline = time.monotonic() + (_LOCK_WAIT if wait is None else wait)
    with full_disk_is_an_input_error(path):
        while (held := _created(path)) is None:
            with contextlib.suppress(FileNotFoundError):  # it is released in between
                content = _said(path)
                if _is_left(path, content, time.time() - path.stat().st_mtime):
                    _remove_left(path, content)
                elif time.monotonic() > deadline:
                    raise _refused(path, output, content)
                else:
                    time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        held.close()


def holds_lock(output: Path | str) -> bool:
    """Whether this process is writing ``output``."""
    with contextlib.suppress(OSError, InputError):
        holder = _holder(_said(lock_path(os.path.realpath(output))))
        return holder is not None and (holder["pid"], holder["place"]) == (os.getpid(), pid_namespace())
    return False


def _created(path: Path) -> BinaryIO | None:
    """Make a lock file that names this process, and keep it open; None if there is one."""
    pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z")
    me = {
        "pid": pid,
        "place": pid_namespace(),
        "host": socket.gethostname(),
        "started": start_time(pid),
        "since": since,
    }
    try:
        file = path.open("xb")
    except FileExistsError:
        return None
    try:
        kept = _system_lock(file)
        os.write(file.fileno(), json.dumps({**me, "kept": kept}).encode("ascii", "replace"))
    except BaseException:
        path.unlink()
        file.close()
        raise
    if not kept:
        file.close()  # where there are no such locks, an open file may not be removed
    return file


def _said(path: Path) -> bytes:
    """The contents of a lock file; an `InputError` for a pipe or device, which must not be opened."""
    if not stat.S_ISREG(path.lstat().st_mode):
        what = "something that isn't a lock file is where an output's lock goes"
        raise InputError(what, where=path, expected="a regular file", fix=f"delete {path}")
    with path.open("rb") as file:
        return file.read(_MAX_LOCK_BYTES)


def _system_lock(file: BinaryIO) -> bool:
    """Take the system's lock of a file, which lasts as long as this process keeps the file open."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _holder(content: bytes) -> dict[str, Any] | None:
    """The holder that a lock file names; None where it can't be read."""
    try:
        found = {"place": "", "kept": False, **parse_json(content)}
        texts = {name: str(found[name]) for name in ("place", "host", "started", "since")}
        return {"pid": int(found["pid"]), "kept": found["kept"] is True, **texts}
    except (ValueError, KeyError, TypeError):
        return None


def _is_left(path: Path, content: bytes, age: float) -> bool:
    """Whether a lock file was left by a process that has ended."""
    holder = _holder(content)
    if holder is None:
        return age > _NAMELESS_AFTER
    if holder["place"] == pid_namespace():
        return is_dead(holder["pid"], holder["started"])
    # A container that was killed and began again can't ask for the processes that it had.
    if not holder["kept"] or holder["host"] != socket.gethostname():
        return False
    with path.open("r+b") as file:
        return _system_lock(file)


def _remove_left(path: Path, content: bytes) -> None:
    """Remove a lock file that a dead process left."""
    # The move is atomic, so of two processes that found it one gets it. Should the file have been replaced in
    # between by a living process's, it is put back.
    aside = _temporary(path)
    path.rename(aside)
    if _said(aside) != content:
        with contextlib.suppress(OSError):
            os.link(aside, path)
    aside.unlink()


def _refused(path: Path, output: Path | str, content: bytes) -> BusyError:
    holder = _holder(content)
    who = "process {pid} on host {host}, since {since}".format(**holder) if holder else "another process"
    here = holder is not None and holder["place"] == pid_namespace()
    fix = "wait for it, or stop it" if here else f"wait for it; if it is no more, delete {path}"
    return BusyError("another process is writing this output", where=output, found=who, fix=fix)
