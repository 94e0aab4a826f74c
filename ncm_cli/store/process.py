"""Whether the process that left a name somewhere is still at work."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
from pathlib import Path


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


def place() -> str:
    """Where process ids mean what they mean here, as 8 hex digits: this host, and this container on it."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.blake2b(f"{host()} {namespace}".encode(), digest_size=4).hexdigest()


def start_time(pid: int) -> str:
    """The kernel's start time of a process, which tells an id that was given out again; "" where not told."""
    return _state_and_start(pid)[1]


def is_dead(pid: int, started: str) -> bool:
    """Whether a process of this place, which began at ``started``, certainly is no more."""
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
