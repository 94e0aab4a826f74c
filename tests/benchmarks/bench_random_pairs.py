"""Time of making random pairs among many rows: of few large domains, of many small ones, of one row each.

    python tests/benchmarks/bench_random_pairs.py             20,000 rows in 2, 2,000 and 20,000 domains
    python tests/benchmarks/bench_random_pairs.py --smoke     a few hundred rows

Prints one line of JSON for each number of domains.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from ncm_cli.pairs.matching import Pool, random_pairs


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="few rows, to see that it runs")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--classes", type=int, default=1)
    given = parser.parse_args()
    rows = given.rows or (400 if given.smoke else 20_000)
    rng = np.random.default_rng(0)
    label = rng.integers(0, given.classes, rows)
    for domains in (2, rows // 10, rows):
        pool = Pool(label, rng.permutation(rows) % domains, np.zeros(rows, dtype=np.int64))
        start = time.monotonic()
        a, _ = random_pairs(pool, rng)
        seconds = round(time.monotonic() - start, 3)
        setting = {"rows": rows, "classes": given.classes, "domains": domains}
        print(json.dumps({**setting, "pairs": len(a), "seconds": seconds}))


if __name__ == "__main__":
    main()
