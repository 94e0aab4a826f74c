"""Time and memory of the search for training rows that nearly equal others.

    python tests/benchmarks/bench_near_copies.py                     1,000,000 x 512 against 100,000
    python tests/benchmarks/bench_near_copies.py --rows 5000 --queries 2000

The rows are random and in memory, and one in a hundred queries nearly equals a row. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np

from ncm_cli.solvers.neighbours import near_copies, normalized_rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--smoke", action="store_true", help="a few rows")
    given = parser.parse_args()
    if given.smoke:
        given.rows, given.queries, given.dim = 2_000, 200, 32
    rng = np.random.default_rng(0)
    x = rng.standard_normal((given.rows + given.queries, given.dim), dtype=np.float32)
    classes = rng.integers(10, size=len(x))
    twins = given.rows + np.arange(0, given.queries, 100)
    x[twins] = x[: len(twins)] + 0.1 * x[twins]
    rows = normalized_rows(x, "cosine")
    start = time.monotonic()
    found = near_copies(rows, np.arange(given.rows, len(x)), np.arange(given.rows), classes)
    told = {
        "rows": given.rows,
        "queries": given.queries,
        "compared": found.compared,
        "found": len(found.queries),
        "among_compared": round(found.compared * len(twins) / given.queries, 1),
        "seconds": round(time.monotonic() - start, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
