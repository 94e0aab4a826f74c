"""Which jobs may run at once: a job waits for earlier ones that write what it uses or use what it writes."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from ncm_cli.recipes.steps import Job


class _Paths:
    """The jobs that use each path, to find those that use a path, a folder around it or something in it."""

    def __init__(self) -> None:
        self._at: dict[Path, list[int]] = defaultdict(list)
        self._below: dict[Path, list[int]] = defaultdict(list)

    def add(self, number: int, paths: Iterable[Path]) -> None:
        for path in paths:
            self._at[path].append(number)
            for folder in path.parents:
                self._below[folder].append(number)

    def users(self, paths: Iterable[Path]) -> set[int]:
        numbers = set[int]()
        for path in paths:
            for place in (path, *path.parents):
                numbers.update(self._at.get(place, ()))
            numbers.update(self._below.get(path, ()))
        return numbers


def dependencies(jobs: Sequence[Job]) -> list[set[int]]:
    """For each job, the indices of the earlier jobs that must have ended before it starts.

    Those jobs write what it reads or writes, or read what it writes. A folder counts as everything in it. A
    job that reads a user's own table of images waits for every data step, which may make some of the images.
    """
    writers, readers, before, data = _Paths(), _Paths(), list[set[int]](), set[int]()
    for number, job in enumerate(jobs):
        earlier = writers.users((*job.read, *job.written)) | readers.users(job.written)
        sources = job.inputs.get("source", ())
        if job.kind in ("embed", "finetune", "predict") and not writers.users(sources):
            earlier |= data if any(path.is_file() for path in sources) else set()
        before.append(earlier)
        writers.add(number, job.written)
        readers.add(number, job.read)
        data.update({number} if job.kind == "data" else ())
    return before


class Plan:
    """The jobs of a run, each by its index: which may start, and which are still to come.

    Of the jobs that may start, the one with the longest chain of jobs that wait for it is first; among equals
    the recipe's order decides.
    """

    def __init__(self, before: Sequence[set[int]]) -> None:
        self._waits_for = [set(earlier) for earlier in before]
        self._after: list[list[int]] = [[] for _ in before]
        heights = [0] * len(before)
        for number in reversed(range(len(before))):
            for earlier in before[number]:
                self._after[earlier].append(number)
                heights[earlier] = max(heights[earlier], heights[number] + 1)
        self._rank = [(-height, number) for number, height in enumerate(heights)]
        self.open = set(range(len(before)))
        """The jobs that haven't ended."""
        self._failed: list[int] = []
        self.ready = [number for number, earlier in enumerate(before) if not earlier]
        """The jobs that may start, in order."""
        self.ready.sort(key=self._rank.__getitem__)

    def start(self, number: int) -> None:
        """A job starts."""
        self.ready.remove(number)

    def end(self, number: int) -> None:
        """A job that was started has ended."""
        self.open.remove(number)
        for later in self._after[number]:
            self._waits_for[later].discard(number)
            if not self._waits_for[later] and later in self.open:
                bisect.insort(self.ready, later, key=self._rank.__getitem__)

    def fail(self, number: int) -> list[int]:
        """A job that was started has failed; returns the jobs that depend on it, which don't run."""
        self.open.remove(number)
        self._failed.append(number)
        stopped = [other for other in self._reached(number) if other in self.open]
        self.open.difference_update(stopped)
        return stopped

    def stopped(self) -> dict[int, int]:
        """The jobs that don't run, each with the first failed job that it depends on."""
        reasons: dict[int, int] = {}
        for number in sorted(self._failed):
            reasons = dict.fromkeys(self._reached(number), number) | reasons
        return reasons

    def _reached(self, number: int) -> list[int]:
        """The jobs that depend on a job."""
        reached = {number: None}
        for job in (order := [number]):
            later = [other for other in self._after[job] if other not in reached]
            reached |= dict.fromkeys(later)
            order += later
        return order[1:]
