"""Warns if batches are too small for ``lisa``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ncm_cli.baselines.options import SweepOptions
from ncm_cli.progress import Reporter
from ncm_cli.solvers.training_set import TrainingSet

FEWEST_CELL_ROWS = 4
"""Rows of each label in each environment that a batch should hold for lisa. With about one, its worst-group
accuracy was .06 to .09 below that of its authors' loop, with four .003 below
(``tests/benchmarks/bench_lisa.py``)."""


def warn_of_rare_cells(
    options: SweepOptions, training: TrainingSet, classes: Sequence[str], reporter: Reporter
) -> None:
    """Warn if a batch holds too few rows of a label in an environment for lisa to mix them."""
    if options.protocol == "papers" or all(method != "lisa" for method, _ in options.chosen_methods):
        return
    size, environments = options.batch_size, training.codes["envs"]
    cells, counts = np.unique(np.stack([training.y, environments]), axis=1, return_counts=True)
    # DomainBed's batches have the same number of rows of every environment.
    domainbed = options.protocol == "domainbed"
    shares = counts / (np.bincount(environments)[cells[1]] if domainbed else len(environments))
    rarest = int(np.argmin(shares))
    share = float(shares[rarest])
    if size and size * share < FEWEST_CELL_ROWS:
        reporter.warn(
            f"lisa mixes rows within a batch; a batch of --batch-size {size} has about {size * share:.1f} of "
            f"the {counts[rarest]:,} rows of {classes[int(cells[0, rarest])]} in one environment: "
            f"--batch-size {math.ceil(FEWEST_CELL_ROWS / share):,} suffices; --protocol papers draws all "
            "cells equally"
        )
