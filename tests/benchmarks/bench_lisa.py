"""LISA where a label × environment cell is rare, beside a loop written after its authors' code.

    python tests/benchmarks/bench_lisa.py            five seeds, a minute
    python tests/benchmarks/bench_lisa.py --smoke    one seed and few steps

800 training rows in cells of 359, 14, 14 and 413 (two labels, two environments); worst group of 20,000 test
rows, mean and standard deviation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from ncm_cli.solvers.methods import Config, Protocol
from ncm_cli.solvers.trainer import Schedule, train
from ncm_cli.solvers.training_set import TrainingSet

CELLS = (359, 14, 14, 413)
BATCH, EPOCHS = 64, 100
STEPS = -(-sum(CELLS) // BATCH)
"""Steps of an epoch."""


class Rows(NamedTuple):
    """X (n, d), labels and environments (n,), 0 or 1."""

    X: np.ndarray
    y: np.ndarray
    environment: np.ndarray


def draw(seed: int, sizes: Sequence[int], d: int, shift: float) -> Rows:
    """The first column tells the label, the second, by ``shift``, the environment; d − 2 are noise."""
    rng = np.random.default_rng(seed)
    y, environment = (np.repeat(codes, sizes) for codes in ([0, 0, 1, 1], [0, 1, 0, 1]))
    X = rng.standard_normal((len(y), d))
    X[:, 0] += 2 * y - 1
    X[:, 1] += shift * (2 * environment - 1)
    return Rows(X, y, environment)


def worst_group(weight: np.ndarray, bias: float, test: Rows) -> float:
    right = ((test.X @ weight + bias) > 0) == test.y
    cells = 2 * test.y + test.environment
    return min(float(right[cells == cell].mean()) for cell in range(4))


def authors_loop(rows: Rows, config: Config, epochs: int) -> tuple[np.ndarray, float]:
    """LISA/subpopulation_shifts: a loader for each cell, its draws and its ``mix_forward``; with Adam."""
    rng = np.random.default_rng([config.seed, 99])
    X, hot = torch.tensor(rows.X), functional.one_hot(torch.tensor(rows.y), 2).double()
    layer = torch.nn.Linear(X.shape[1], 2, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = torch.optim.Adam(layer.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    groups = [np.flatnonzero(2 * rows.y + rows.environment == group) for group in range(4)]
    left = [group[:0] for group in groups]
    for _ in range(epochs * STEPS):
        loaded = []
        for number, group in enumerate(groups):
            if not len(left[number]):
                left[number] = rng.permutation(group)
            loaded.append(left[number][: BATCH // 4])
            left[number] = left[number][BATCH // 4 :]
        pairs = [(0, 1), (2, 3)] if rng.random() < config.p_sel else [(0, 2), (1, 3)]
        losses = []
        for a, b in pairs:
            length = min(len(loaded[a]), len(loaded[b]))
            first, second = loaded[a][:length], loaded[b][:length]
            mix = torch.tensor(rng.beta(config.alpha, config.alpha, (length, 1)))
            logits = layer(mix * X[first] + (1 - mix) * X[second])
            mixed_y = mix * hot[first] + (1 - mix) * hot[second]
            losses.append(-(functional.log_softmax(logits, -1) * mixed_y).sum(-1))
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        optimizer.step()
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    return weight[1] - weight[0], float(bias[1] - bias[0])


def setting(seed: int, *, upweighted: bool = False) -> Config:
    return Config(method="lisa", lr=0.01, weight_decay=1e-4, upweighted=upweighted, seed=seed)


def lisa(
    rows: Rows, seed: int, protocol: Protocol, batch_size: int, epochs: int
) -> list[tuple[np.ndarray, float]]:
    """ncm's, plain and up-weighted, after as many steps as the authors' loop takes in ``epochs``."""
    cells = 2 * rows.y + rows.environment
    weights = len(cells) / (4 * np.bincount(cells)[cells])
    data = TrainingSet(X=rows.X, y=rows.y, n_classes=2, codes={"envs": rows.environment}, weights=weights)
    configs = [setting(seed, upweighted=upweighted) for upweighted in (False, True)]
    passes = epochs * STEPS * batch_size // (BATCH * STEPS)
    fits = train(configs, data, Schedule(epochs=passes, batch_size=batch_size, protocol=protocol))
    return [(fit.weight[0], float(fit.bias[0])) for fit in fits]


def worst_groups(seed: int, d: int, shift: float, sizes: Sequence[int], epochs: int) -> dict[str, float]:
    """Worst-group accuracy of each way to train."""
    rows, test = draw(seed, CELLS, d, shift), draw(1000 + seed, (5000,) * 4, d, shift)
    found = {}
    for batch_size in sizes:
        plain, upweighted = lisa(rows, seed, "common", batch_size, epochs)
        found[f"common, batch {batch_size}"] = worst_group(*plain, test)
        found[f"common, batch {batch_size}, upweighted"] = worst_group(*upweighted, test)
    found[f"papers, batch {BATCH}"] = worst_group(*lisa(rows, seed, "papers", BATCH, epochs)[0], test)
    found[f"the authors' loop, batch {BATCH}"] = worst_group(*authors_loop(rows, setting(seed), epochs), test)
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="one seed, few steps")
    given = parser.parse_args(words)
    seeds, epochs, sizes = (1, 5, (BATCH,)) if given.smoke else (5, EPOCHS, (64, 256))
    settings = ((16, 1.0), (32, 2.0))
    tables = [[worst_groups(seed, *made, sizes, epochs) for seed in range(seeds)] for made in settings]
    print(
        "| lisa | "
        + " | ".join(f"{d} columns, shift {shift:g}" for d, shift in settings)
        + " |\n|---|---|---|"
    )
    for name in tables[0][0]:
        columns = [np.array([found[name] for found in table]) for table in tables]
        cells = (f"{values.mean():.3f} ± {values.std(ddof=1) if seeds > 1 else 0:.3f}" for values in columns)
        print(f"| {name} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
