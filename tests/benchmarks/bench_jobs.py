"""Times ``ncm run --jobs`` and kills it: the same files as one step after another, each time.

    python tests/benchmarks/bench_jobs.py                    seconds of digits with one job and with two
    python tests/benchmarks/bench_jobs.py kills --rounds 50  killed at random moments, then run again
    python tests/benchmarks/bench_jobs.py --smoke            both with the small variant, once

Times: the runs take turns, each into an empty folder; printed are the least of their seconds, and of the
processors' seconds, their processes included. All files of all runs are compared, apart from times.

Kills: each round starts in an empty folder, with two jobs. At a moment drawn from the seconds that a whole
run takes, the command gets SIGKILL or SIGINT, or one of its processes SIGKILL. All processes must then end,
and the same command, run again once, must make the files of the whole run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.recipes.run_folders import contents_of  # noqa: E402

VICTIMS = (("the command", signal.SIGKILL), ("the command", signal.SIGINT), ("a process", signal.SIGKILL))

MAX_DRAWS = 3
"""Rounds that may be drawn for each that hits a run, since a run may end before its moment."""

SECONDS_TO_END = 10.0
"""After the command has ended: time for its processes to be gone."""


class Runs:
    """Runs of one recipe in one folder, since files name the folder."""

    def __init__(self, folder: Path, sets: list[str]) -> None:
        self.out = folder / "run"
        self._folder, self._sets = folder, [word for text in sets for word in ("--set", text)]

    def start(self, jobs: int) -> subprocess.Popen[bytes]:
        """Start the recipe in the folder as it is."""
        words = ["run", "digits", "--out", "run", "--quiet", "--jobs", str(jobs), *self._sets]
        return subprocess.Popen(
            [sys.executable, "-m", "ncm_cli", *words],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def whole(self, jobs: int) -> tuple[float, float, dict[str, str]]:
        """Seconds, processors' seconds and files of a run into an empty folder."""
        shutil.rmtree(self.out, ignore_errors=True)
        started = time.perf_counter()
        run = self.start(jobs)
        _, status, usage = os.wait4(run.pid, 0)
        seconds = time.perf_counter() - started
        run.returncode = os.waitstatus_to_exitcode(status)
        if run.returncode:
            sys.exit(f"--jobs {jobs}: exit code {run.returncode}")
        return seconds, usage.ru_utime + usage.ru_stime, contents_of(self.out)


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """The files that aren't the same."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def times(runs: Runs, count: int) -> bool:
    """Print the seconds with one job and with two, and whether all files are the same; returns that."""
    seconds: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    expected: dict[str, str] = {}
    same = True
    for _ in range(count):
        for jobs, found in seconds.items():
            wall, processors, files = runs.whole(jobs)
            found.append((wall, processors))
            expected = expected or files
            if names := differing(expected, files):
                same = False
                print(f"--jobs {jobs}: {len(names)} files differ from the first run's: {names[:10]}")
    least = {jobs: [min(values) for values in zip(*found, strict=True)] for jobs, found in seconds.items()}
    for jobs, (wall, processors) in least.items():
        print(f"--jobs {jobs}: {wall:.2f} s, of the processors {processors:.2f} s (least of {count} runs)")
    print(f"ratio: {least[1][0] / least[2][0]:.2f}")
    print(f"{len(expected):,} files, {'all the same' if same else 'not all the same'} apart from times")
    return same


def kills(runs: Runs, rounds: int, seed: int) -> bool:
    """Print what came of killing runs at random moments; returns whether all went well."""
    (first, _, expected), (second, _, again) = runs.whole(2), runs.whole(2)
    assert not differing(expected, again)
    seconds = min(first, second)
    print(f"a whole run with two jobs: {seconds:.2f} s, {len(expected):,} files")
    rng, ended, wrong = random.Random(seed), Counter[str](), list[str]()
    number = hits = 0
    while hits < rounds and number < MAX_DRAWS * rounds:
        number += 1
        shutil.rmtree(runs.out, ignore_errors=True)
        (victim, how), moment = rng.choice(VICTIMS), rng.uniform(0, seconds)
        run = runs.start(2)
        time.sleep(moment)
        family = descendants(run.pid)
        name = f"{victim} {how.name}"
        target = run.pid if victim == "the command" else rng.choice(family) if family else None
        if run.poll() is not None or target is None:
            name += ": before its start or after its end"
        else:
            os.kill(target, how)
        hits += run.wait() != 0
        ended[f"{name} (exit code {run.returncode})"] += 1
        until = time.monotonic() + SECONDS_TO_END
        while (left := [pid for pid in family if is_running(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        code = runs.start(2).wait()
        problems = [f"{len(left)} processes are left"] if left else []
        if code:
            problems.append(f"run again: exit code {code}")
        elif names := differing(expected, contents_of(runs.out)):
            problems.append(f"{len(names)} files differ: {names[:10]}")
        for problem in problems:
            wrong.append(problem)
            print(f"round {number}, {name} after {moment:.2f} s: {problem}")
    for name, count in sorted(ended.items()):
        print(f"{count:>4} × {name}")
    print(f"{hits} of {number} rounds hit a run; each was run again once: {len(wrong)} problems")
    return not wrong and hits == rounds


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found = []
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # it has ended
        return []
    for child in map(int, text.split()):
        found += [child, *descendants(child)]
    return found


def is_running(pid: int) -> bool:
    """Whether a process hasn't ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    except OSError:
        return False


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["times", "kills"], default="times")
    parser.add_argument("--runs", type=int, default=3, help="runs with each number of jobs")
    parser.add_argument("--rounds", type=int, default=50, help="kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--set", action="append", default=[], help="as of ncm run; may be repeated")
    parser.add_argument("--smoke", action="store_true", help="the small variant, to see that it works")
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(Path(name), [*asked.set, *(["quick=true"] if asked.smoke else [])])
        if asked.smoke:
            well = times(runs, 1) and kills(runs, 3, asked.seed)
        else:
            well = times(runs, asked.runs) if asked.what == "times" else kills(runs, asked.rounds, asked.seed)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
