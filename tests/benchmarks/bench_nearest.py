"""Time and peak memory of ``ncm pairs --match nearest`` on many rows.

    python tests/benchmarks/bench_nearest.py                  100,000 x 512, 10 classes, 4 domains
    python tests/benchmarks/bench_nearest.py --smoke          a few thousand rows, in seconds

Prints one line of JSON. The rows are random, which is the worst case: no block can be skipped.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def write_store(path: Path, rows: int, dim: int, classes: int, domains: int) -> None:
    """Random features with a label and a domain column, written block by block."""
    from ncm_cli.store.columns import Column
    from ncm_cli.store.features import write_features

    rng = np.random.default_rng(0)
    columns = {
        name: Column(
            name, rng.integers(0, n, rows).astype(np.int32), tuple(f"{name}{i:03d}" for i in range(n))
        )
        for name, n in (("label", classes), ("domain", domains))
    }
    step = 4096
    write_features(
        path,
        ids=[f"row-{i:06d}" for i in range(rows)],
        blocks=(rng.normal(size=(min(step, rows - i), dim)).astype(np.float32) for i in range(0, rows, step)),
        dim=dim,
        columns=columns,
        label_column="label",
        split_column=None,
        encoder={"kind": "array", "model": "random"},
        options={},
    )


def measure(command: list[str]) -> dict[str, float]:
    """Seconds and peak resident memory (MiB) of one command, in a process of its own."""
    program = (
        "import resource, sys\n"
        "from ncm_cli.main import run\n"
        "code = run(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *command], check=True, capture_output=True, text=True
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Linux counts in KiB, macOS in bytes.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return {
        "seconds": round(time.monotonic() - start, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_rss_mib": round(int(done.stderr.split()[-1]) / unit),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="few rows, to see that it runs")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--domains", type=int, default=4)
    given = parser.parse_args()
    rows = given.rows or (3000 if given.smoke else 100_000)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "f.h5"
        write_store(store, rows, given.dim, given.classes, given.domains)
        command = ["pairs", "--match", "nearest", "--same", "label", "--across", "domain"]
        command += ["-f", str(store), "-o", f"{folder}/p.h5", "--json"]
        setting = {name: getattr(given, name) for name in ("dim", "classes", "domains")}
        print(json.dumps({"rows": rows, **setting, **measure(command)}))


if __name__ == "__main__":
    main()
