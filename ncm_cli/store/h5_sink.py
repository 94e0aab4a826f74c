"""The file under an HDF5 file that is being written.

HDF5 crashes the process when a write fails below it, as on a full disk. So it writes through an object that
keeps the first error to itself, goes on in memory until the file is closed, and only then lets the error out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


class Sink:
    """A file object for h5py whose methods never raise; ``error`` is what went wrong first."""

    def __init__(self, path: Path) -> None:
        self.error: BaseException | None = None
        self._descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        self._position = 0
        self._size = 0
        self._unwritten: list[tuple[int, bytes]] = []

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, as of a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def write(self, data: memoryview) -> int:
        """Write at the position; what can't be written is kept in memory."""
        raw = memoryview(data).cast("B")
        done = 0
        while self.error is None and done < len(raw):
            try:
                os.lseek(self._descriptor, self._position + done, os.SEEK_SET)
                done += os.write(self._descriptor, raw[done:])
            except BaseException as error:
                self.error = error
        if done < len(raw):
            self._unwritten.append((self._position + done, bytes(raw[done:])))
        self._position += len(raw)
        self._size = max(self._size, self._position)
        return len(raw)

    def readinto(self, buffer: memoryview) -> int:
        """Read at the position what was written there."""
        into = memoryview(buffer).cast("B")
        into[:] = bytes(len(into))
        try:
            os.lseek(self._descriptor, self._position, os.SEEK_SET)
            found = os.read(self._descriptor, len(into))
            into[: len(found)] = found
        except BaseException as error:
            self.error = self.error or error
        for start, data in self._unwritten:
            first, last = max(start, self._position), min(start + len(data), self._position + len(into))
            if first < last:
                into[first - self._position : last - self._position] = data[first - start : last - start]
        self._position += len(into)
        return len(into)

    def read(self, size: int) -> bytes:
        """Read at the position what was written there."""
        buffer = bytearray(size)
        self.readinto(memoryview(buffer))
        return bytes(buffer)

    def truncate(self, size: int) -> int:
        """Set the size."""
        try:
            os.ftruncate(self._descriptor, size)
        except BaseException as error:
            self.error = self.error or error
        self._size = size
        return size

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Let Ctrl-C act after the block: inside HDF5 it would pass for a failed write. For short blocks only."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread ever sees KeyboardInterrupt.
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came and callable(before):
            before(*came[0])
