"""Child processes: new interpreters that run one function of this package.

A child imports from the same paths as this process but doesn't run its main script. However this process
ends, the child ends too, because the socket between them closes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

Main = Callable[[Connection, socket.socket], None]
"""What a child runs: it receives and sends objects over the connection, and raw memory over the socket. Both
use the same underlying socket."""


class Child:
    """A child process, as its parent uses it; needs a POSIX system."""

    def __init__(self, main: Main, *, environment: Mapping[str, str]) -> None:
        self.socket, child_socket = socket.socketpair()
        self.connection = Connection(os.dup(self.socket.fileno()))
        places = [place for place in sys.path if isinstance(place, str)]
        program = (
            # An interrupt ends it without a traceback, unless `main` sets a handler.
            "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
            f"sys.path[:] = {places!r}; from ncm_cli.child import serve; "
            f"from {main.__module__} import {main.__name__}; serve({child_socket.fileno()}, {main.__name__})"
        )
        with child_socket:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[child_socket.fileno()],
                start_new_session=True,  # only the parent receives Ctrl-C
                env=os.environ | environment,
            )

    def how_it_ended(self) -> str:
        """How the process ended, as a verb phrase; waits until it has ended."""
        code = self.process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.socket.close()


def serve(descriptor: int, main: Main) -> None:
    """The main function of a child: run ``main`` until the socket closes."""
    connection, stream = Connection(descriptor), socket.socket(fileno=os.dup(descriptor))
    # This copy stays open while an exception ends this process, so that its exit code is kept.
    threading.Thread(target=_end_with, args=(os.dup(descriptor),), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        main(connection, stream)


def _end_with(descriptor: int) -> None:
    """End this process as soon as the other end of a socket is closed, even in the middle of its work."""
    waiting = select.poll()
    waiting.register(descriptor, 0)  # only that the socket was closed is reported
    waiting.poll()
    os._exit(0)
