"""Time a row and peak memory of fit, sweep, eval, pairs and bound on stores of 0.2, 0.6 and 2 million rows.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_large.py [--rows 200000 600000 2000000] [--only fit ...]

Stores are made up: float16 features of width 512 (CLIP-like: decaying spectrum, an offset, rows of norm
about 10), two classes, four domains whose mark is spurious, image digests, 80 % training rows, 10 % each of
validation and test rows. Every command is a process of its own; its time is processor time (others may use
the machine meanwhile) with the wall clock beside it, and its peak is ru_maxrss. What differs between sizes is
the number of rows alone: pairs, ranks, weight decays and epochs are the same. What a command takes on 4,000
rows is its start-up, which isn't counted as time of a row.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DIM, PAIRS, BLOCK, START = 512, 1000, 8192, 4000

COMMANDS = {
    "pairs": "pairs --match random --same label --across domain --count {pairs} {features} -o {folder}/p.h5",
    "fit": "fit {features} {with} --rank 0,4,16 --weight-decay 1e-3,1e-2 -o {folder}/p.st",
    "eval": "eval {folder}/p.st {features} --groups label,domain",
    "bound": "bound {folder}/p.st {features} {with} --oracle-pairs {folder}/o.h5 --train split=train",
    "sweep": "sweep {features} {with} --methods erm,ncm --trials 2 --epochs 2 --batch-size 1024 --folds 2 "
    "--seeds 1 -o {folder}/s.h5",
}
ORACLE = "pairs {folder}/o.csv {features} --straddling keep -o {folder}/o.h5"


def build(folder: Path, rows: int, dim: int) -> None:
    """features.h5, and a table of oracle pairs: test rows, each with a training row of its label."""
    import numpy as np

    from ncm_cli.store.columns import Column, Files
    from ncm_cli.store.features import write_features

    rng = np.random.default_rng(0)
    # Whole blocks of rows aren't of one part or class: stores are seldom in such an order.
    split, label, domain = (
        rng.choice(3, rows, p=(0.8, 0.1, 0.1)),
        rng.integers(2, size=rows),
        rng.integers(4, size=rows),
    )
    directions = np.linalg.qr(rng.normal(size=(dim, 5)))[0].T * 2
    scale, offset = np.arange(1, dim + 1) ** -0.5, 0.3 * rng.normal(size=dim)

    def blocks():
        for start in range(0, rows, BLOCK):
            own = slice(start, start + BLOCK)
            noise = rng.normal(size=(len(label[own]), dim)) * scale
            made = noise * 3 + offset + directions[1 + domain[own]]
            made += directions[0] * (label[own] - 0.5 + 0.5 * rng.normal(size=len(noise)))[:, None]
            yield made.astype(np.float16)

    ids = [f"class{label[row]}/image-{row:09d}.jpg" for row in range(rows)]
    write_features(
        folder / "features.h5",
        ids=ids,
        blocks=blocks(),
        dim=dim,
        columns=[
            Column("label", label.astype(np.int32), ("bird", "boat")),
            Column("split", split.astype(np.int32), ("train", "val", "test")),
            Column("domain", domain.astype(np.int32), tuple("abcd")),
        ],
        label_column="label",
        split_column="split",
        encoder={"kind": "array", "model": "made up"},
        files=Files(
            path=ids,
            size=np.full(rows, 100_000),
            mtime_ns=np.zeros(rows, np.int64),
            sha256=[f"{row * 0x9E3779B97F4A7C15 % 2**64:016x}" * 4 for row in range(rows)],
        ),
        options={},
        dtype="float16",
    )
    test, train = (np.flatnonzero((split == part) & (label == 0))[: PAIRS // 2] for part in (2, 0))
    count = min(len(test), len(train))
    table = [f"{ids[a]},{ids[b]}" for a, b in zip(test[:count], train[:count], strict=True)]
    (folder / "o.csv").write_text("\n".join(["id_a,id_b", *table]), encoding="utf-8")


def measured(words: list[str]) -> tuple[float, float, float]:
    """Processor seconds, wall seconds and peak MiB of a process of its own."""
    start = time.perf_counter()
    # This process imports nothing large: a child's peak counts what its parent held when it started.
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}\n{said}")
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start, usage.ru_maxrss * unit / 2**20


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 600_000, 2_000_000])
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--only", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--folder", type=Path, help="keep stores here, and use those that are here already")
    parser.add_argument("--smoke", action="store_true", help="a small store, read in blocks all the same")
    parser.add_argument("--build", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.build:
        build(args.folder, args.build, args.dim)
        return
    if args.smoke:
        args.rows, args.dim = [12_000], 32
        os.environ["NCM_MEMORY_MIB"] = "1"
    from importlib.metadata import version

    names = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "h5py", "torch"))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {names}",
        flush=True,
    )
    print("command     rows    cpu s   wall s   µs a row   to the first   peak MiB", flush=True)
    started: dict[str, float] = {}
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for rows in [START, *args.rows]:
            folder = (args.folder or Path(scratch)) / str(rows)
            folder.mkdir(parents=True, exist_ok=True)
            ncm, store = [sys.executable, "-m", "ncm_cli"], folder / "features.h5"
            if not store.exists():
                size = ["--build", str(rows), "--folder", str(folder), "--dim", str(args.dim)]
                subprocess.run([sys.executable, __file__, *size], check=True)
            names = {"folder": folder, "pairs": PAIRS, "features": f"--features {store}"}
            names["with"] = f"--pairs {folder}/p.h5"
            measured([*ncm, *ORACLE.format(**names).split()])
            for name in args.only:
                cpu, wall, peak = measured([*ncm, *COMMANDS[name].format(**names).split()])
                each = (cpu - started.setdefault(name, cpu)) / max(1, rows - START) * 1e6
                ratio = each / first.setdefault(name, each) if rows > START else 0.0
                print(
                    f"{name:8s}{rows:9,d}{cpu:9.1f}{wall:9.1f}{each:11.1f}{ratio:15.2f}{peak:11.0f}",
                    flush=True,
                )
            if args.folder is None:
                store.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
