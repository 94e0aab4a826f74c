"""Atomic writes and locks of outputs; JSON without NaN, and the JSON documents of ncm.

A file is written under a temporary name beside it, synced and renamed. The lock of an output is a file
``.NAME.lock`` beside it, made by exclusive creation, which every file system has. It names the process that
holds it, so that the lock of a killed process is recognised and removed: by the process id, or in another
container of this host by the system's lock on the file.

A document states its format and carries a digest of its contents. A result is a document of eval, bound,
sweep or another command, with a schema.
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
from collections.abc import Collection, Iterator, Mapping
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
"""Why a write failed, by errno."""

_ABANDONED_AFTER = 24 * 3600
"""Seconds without a write after which a temporary file of another host is removed."""

_LOCK_WAIT = 1.0
"""Seconds to wait for a lock that another process may be about to release."""

_MAX_LOCK_BYTES = 1 << 16
"""Most bytes read from a lock file; every lock file is smaller."""

_NAMELESS_AFTER = 30.0
"""Seconds after which a lock file that names no process counts as left by a process killed in writing it."""

RESULT_FORMAT = "ncm-result"
RESULT_VERSION = 2

DIGEST = "content_sha256"

HEADER = ("ncm_format", "ncm_format_version", DIGEST, "kind", "ncm_version", "created")
"""Names in a result that belong to the header, not to the body."""


def pid_namespace() -> str:
    """8 hex digits that identify this host and container, within which process ids are unique."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.blake2b(f"{socket.gethostname()} {namespace}".encode(), digest_size=4).hexdigest()


def start_time(pid: int) -> str:
    """The kernel's start time of a process, which reveals a reused id; "" if it isn't known."""
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
    state, start = _state_and_start(pid)
    # Z: ended, but its parent hasn't waited for it, which some containers never do.
    return state in ("Z", "X") or bool(started and start and started != start)


def _state_and_start(pid: int) -> tuple[str, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """A temporary path in the folder of ``path``, renamed to ``path`` at the end of the block.

    The file at ``path`` is unchanged until the rename. If the block raises, it stays and the temporary file
    is removed. Temporary files of killed writers are removed. Missing parent folders are made. A link is
    followed: its target is replaced, not the link.

    Raises `InputError` if the disk is full, or if ``path`` is a folder, a device or a circle of links.
    """
    target = _writable_target(Path(path))
    remove_leftovers(target)
    temporary = _temporary(target)
    try:
        with full_disk_is_an_input_error(target):
            # Created here, so that no other process has the name and the umask applies.
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
    """A temporary name beside a file that names this process and that `remove_leftovers` recognises."""
    pid = os.getpid()
    made_by = f"{pid_namespace()}-{pid}-{start_time(pid)}-{secrets.token_hex(4)}"
    return target.with_name(f".{_short(target.name)}.{made_by}.tmp")


@contextlib.contextmanager
def full_disk_is_an_input_error(path: Path) -> Iterator[None]:
    """Turn the operating system's "no space left" into an `InputError` that names ``path``."""
    try:
        yield
    except OSError as error:
        # HDF5 puts errno into its message instead of setting the attribute.
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
    """Refuse an output that is a folder, a device or a circle of links; called before any work."""
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
    # Most file systems limit a name to 255 bytes, and the target's may be that long.
    raw = os.fsencode(name)
    return name if len(raw) <= 180 else raw[:180].decode(sys.getfilesystemencoding(), "ignore")


def remove_leftovers(path: Path | str) -> None:
    """Delete temporary files that killed writers of ``path`` or its lock left; none of a running writer.

    The system knows whether a process of this host and container still runs. Files of other hosts, and of
    earlier versions, which don't record the host, are deleted after a day without a write.
    """
    target = Path(os.path.realpath(path))
    names = "|".join(re.escape(_short(path.name)) for path in (target, lock_path(target)))
    made_by = r"(?:([0-9a-f]{8})-(\d+)-(\d*)|\d+)-[0-9a-f]{8}\.tmp"
    # Versions before 0.6 moved a lock to a name without the process.
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
    """Sync a folder's entries to the disk, if the system can."""
    # Windows and some network file systems can't; renames are atomic even there.
    with contextlib.suppress(OSError):
        _sync(folder, os.O_RDONLY)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON atomically; NaN and infinities are a ValueError (see `jsonable`)."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    # File names that aren't UTF-8 hold lone surrogates; JSON and Python escape them in the same way.
    write_bytes(path, (text + "\n").encode("utf-8", "backslashreplace"))


def read_json(path: Path | str, *, limit: int = 1 << 30) -> Any:
    """The value in a JSON file of at most ``limit`` bytes, without NaN tokens.

    Raises `InputError` if the file is missing, too large or not JSON.
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
    """The time in UTC as ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat()


def jsonable(value: Any) -> Any:
    """``value`` in JSON's own types: arrays as lists, dataclasses as objects, NaN and infinities as null.

    An object's method ``to_json`` is used if it has one. Raises TypeError for any other type.
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
    """The document in a file, header included.

    Raises `InputError` for another format or version, and for contents that don't match their `DIGEST`.
    """
    path = Path(path)
    document = read_json(path)
    if not isinstance(document, dict) or document.get("ncm_format") != format_name:
        other = document.get("ncm_format") if isinstance(document, dict) else type(document).__name__
        raise InputError(
            f"not {what}", where=path, found=f"ncm_format {other!r}", expected=format_name, fix=fix
        )
    require_version(document.get("ncm_format_version"), version, path)
    if document.get(DIGEST) != _digest(document):
        off = f"no {DIGEST}, so no command of ncm since 0.1.0 wrote it"
        raise InputError(
            f"{what} that was changed after it was written",
            where=path,
            found=f"contents that don't match its {DIGEST}" if DIGEST in document else off,
            fix=fix,
        )
    return document


def _digest(document: Mapping[str, Any]) -> str:
    return digest_of({name: _plain(value) for name, value in document.items() if name != DIGEST})


def _plain(value: Any) -> Any:
    """``value`` with 1 for 1.0, since other programs that rewrite a document may exchange them."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def write_result(path: Path | str, kind: str, body: Mapping[str, Any]) -> None:
    """Write a result atomically: a header with its kind, version and time, and ``body``.

    Floats keep full precision; NaN and infinities become null. Raises ValueError if the body uses a name of
    the header.
    """
    clash = [name for name in HEADER if name in body]
    if clash:
        raise ValueError(f"a result body can't have {clash}")
    facts = {"kind": kind, "ncm_version": __version__, "created": now()}
    write_document(path, RESULT_FORMAT, RESULT_VERSION, {**facts, **jsonable(body)})


def read_result(path: Path | str, *, kind: str | None = None, fix: str = MAKE_AGAIN) -> dict[str, Any]:
    """Header and body of a result file as one object.

    Raises `InputError` for another kind, a value that misfits the schema, and what `read_document` refuses.
    """
    result = read_document(path, RESULT_FORMAT, RESULT_VERSION, what="a result", fix=fix)
    if wrong := misfit(result, Head) or misfit(result, SCHEMAS.get(result["kind"], Any)):
        name, value, words = wrong
        raise InputError(
            "a result with a value that ncm doesn't write",
            where=f"{path}, {name}",
            found=one_line(repr(value)),
            expected=words,
            fix=fix,
        )
    if kind is not None and result.get("kind") != kind:
        raise InputError("a result of another kind", where=path, found=result.get("kind"), expected=kind)
    return result


class Shown:
    """A base class: a notebook shows the object as the tables by which `ncm info` describes the file."""

    def _repr_html_(self) -> str:
        # Imported by address, since the store can't import the module that shows it.
        return str(at_address("notebook:html")(self))


def require_file(path: Path | str) -> Path:
    """``path``; `InputError` if it isn't a regular file or is empty."""
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


def part_of_name(text: str, otherwise: str = "plot") -> str:
    """A text as part of a file name; ``otherwise`` if none of its characters can be used."""
    return re.sub(r"[^\w.=-]+", "-", text).strip("-.") or otherwise


def relative(path: Path, folder: Path) -> Path:
    """A path relative to a folder if it lies in it, else as it is."""
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def one_line(error: object, limit: int = 200) -> str:
    """An exception's text on one line, cut to ``limit`` characters."""
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
    """The path of an output's lock."""
    output = Path(output)
    return output.with_name(f".{output.name}.lock")


class BusyError(InputError):
    """Another process is writing an output."""


@contextlib.contextmanager
def writer_lock(output: Path | str, *, wait: float | None = None) -> Iterator[None]:
    """Hold the lock of ``output`` while the block runs.

    Raises `BusyError`, naming process and host, if another process holds it for longer than ``wait`` seconds
    (None: `_LOCK_WAIT`). The lock of a process that has ended is taken over.
    """
    path = lock_path(_writable_target(Path(output)))
    deadline = time.monotonic() + (_LOCK_WAIT if wait is None else wait)
    with full_disk_is_an_input_error(path):
        while (held := _created(path)) is None:
            with contextlib.suppress(FileNotFoundError):  # it was released in the meantime
                content = _lock_content(path)
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


_LENT: set[str] = set()
"""Outputs whose locks are held by the process on whose behalf this one works."""


@contextlib.contextmanager
def lent_lock(output: Path | str) -> Iterator[None]:
    """Treat the lock of ``output`` as held by this process, which works for the process that holds it."""
    name = os.path.realpath(output)
    _LENT.add(name)
    try:
        yield
    finally:
        _LENT.discard(name)


def holds_lock(output: Path | str) -> bool:
    """Whether this process, or the one for which it works, is writing ``output``."""
    if os.path.realpath(output) in _LENT:
        return True
    with contextlib.suppress(OSError, InputError):
        holder = _holder(_lock_content(lock_path(os.path.realpath(output))))
        return holder is not None and (holder["pid"], holder["place"]) == (os.getpid(), pid_namespace())
    return False


def remove_lock_of(output: Path | str, hosts: Collection[str]) -> None:
    """Remove an output's lock if its holder ran on one of ``hosts``, which no longer exist."""
    path = lock_path(os.path.realpath(output))
    with contextlib.suppress(FileNotFoundError):
        content = _lock_content(path)
        holder = _holder(content)
        if holder is not None and holder["host"] in hosts:
            _remove_left(path, content)


def _created(path: Path) -> BinaryIO | None:
    """Make a lock file that names this process, and keep it open; None if the file exists."""
    pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z")
    holder = {
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
        locked = _system_lock(file)
        os.write(file.fileno(), json.dumps({**holder, "kept": locked}).encode("ascii", "replace"))
    except BaseException:
        path.unlink()
        file.close()
        raise
    if not locked:
        file.close()  # a system without such locks (Windows) can't remove a file that is open
    return file


def _lock_content(path: Path) -> bytes:
    """The contents of a lock file; an `InputError` for a pipe or device, which must not be opened."""
    if not stat.S_ISREG(path.lstat().st_mode):
        what = "something that isn't a lock file is where an output's lock goes"
        raise InputError(what, where=path, expected="a regular file", fix=f"delete {path}")
    with path.open("rb") as file:
        return file.read(_MAX_LOCK_BYTES)


def _system_lock(file: BinaryIO) -> bool:
    """Take the system's lock on a file, held until this process closes the file; False if that fails."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _holder(content: bytes) -> dict[str, Any] | None:
    """The process that a lock file names; None if it can't be read."""
    try:
        holder = {"place": "", "kept": False, **parse_json(content)}
        texts = {name: str(holder[name]) for name in ("place", "host", "started", "since")}
        return {"pid": int(holder["pid"]), "kept": holder["kept"] is True, **texts}
    except (ValueError, KeyError, TypeError):
        return None


def _is_left(path: Path, content: bytes, age: float) -> bool:
    """Whether a lock file was left by a process that has ended."""
    holder = _holder(content)
    if holder is None:
        return age > _NAMELESS_AFTER
    if holder["place"] == pid_namespace():
        return is_dead(holder["pid"], holder["started"])
    # A restarted container doesn't see its former processes, but the system has freed their locks.
    if not holder["kept"] or holder["host"] != socket.gethostname():
        return False
    with path.open("r+b") as file:
        return _system_lock(file)


def _remove_left(path: Path, content: bytes) -> None:
    """Remove a lock file that a dead process left."""
    # The move is atomic: of two processes only one succeeds. If a running process has replaced the file in
    # the meantime, it is put back.
    aside = _temporary(path)
    path.rename(aside)
    if _lock_content(aside) != content:
        with contextlib.suppress(OSError):
            os.link(aside, path)
    aside.unlink()


def _refused(path: Path, output: Path | str, content: bytes) -> BusyError:
    holder = _holder(content)
    who = "process {pid} on host {host}, since {since}".format(**holder) if holder else "another process"
    is_local = holder is not None and holder["place"] == pid_namespace()
    fix = "wait for it, or stop it" if is_local else f"wait for it; if it no longer runs, delete {path}"
    return BusyError("another process is writing this output", where=output, found=who, fix=fix)
