"""Times a rank path against one scikit-learn LogisticRegression a rank, to the same gradient norm.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_path.py [--rows 4795] [--dim 512] [--ranks 24] [--smoke]

scikit-learn gets what suits it: features already rotated and cut to the rank's columns (no time is counted
for that), and the faster of its lbfgs and newton-cholesky solvers on this data. Both sides are asked for, and
afterwards measured to have, a gradient of the mean loss plus penalty below the same largest entry. Runs
alternate; medians are compared. Threads are what the environment gives to both.

Then a whole path (`--rank auto`, five weight decays) against the five folds that the rule `bound` fits of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings

import numpy as np
import scipy.special

from ncm_cli.probes.choose import auto_ranks
from ncm_cli.solvers.folds import deal
from ncm_cli.solvers.methods import FOLD_TOLERANCE
from ncm_cli.solvers.path import fit_path
from ncm_cli.solvers.projection import complement, spectrum
from ncm_cli.solvers.training_set import Fit

PAIRS = 240
DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def problem(n: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CLIP-like features (decaying spectrum, an offset, rows of norm about 10), labels, and a basis."""
    rng = np.random.default_rng(seed)
    mixing = np.linalg.qr(rng.normal(size=(d, d)))[0] * np.arange(1, d + 1) ** -0.5
    X = rng.normal(size=(n, d)) @ mixing.T + 0.3 * rng.normal(size=d)
    X *= 10 / np.sqrt(np.mean((X**2).sum(axis=1)))
    theta = rng.normal(size=d)
    scores = (X - X.mean(axis=0)) @ theta
    y = (scores / scores.std() + rng.logistic(size=n) > 0).astype(np.int64)
    delta = (X[rng.integers(n, size=PAIRS)] - X[rng.integers(n, size=PAIRS)]).T
    return X.astype(np.float32).astype(np.float64), y, spectrum(delta).basis


def gradient_entry(X: np.ndarray, y: np.ndarray, weight: np.ndarray, bias: float, decay: float) -> float:
    """Largest entry, in absolute value, of the objective's gradient."""
    residual = scipy.special.expit(X @ weight + bias) - y
    return float(max(np.abs(X.T @ residual / len(X) + decay * weight).max(), abs(residual.mean())))


def sklearn_fits(
    parts: list[np.ndarray], y: np.ndarray, decay: float, tol: float, solver: str
) -> tuple[float, float]:
    """Seconds for all fits, and the largest gradient entry among them."""
    from sklearn.linear_model import LogisticRegression

    worst, seconds = 0.0, 0.0
    for Z in parts:
        model = LogisticRegression(C=1 / (len(Z) * decay), tol=tol, solver=solver, max_iter=10_000)
        start = time.perf_counter()
        model.fit(Z, y)
        seconds += time.perf_counter() - start
        worst = max(worst, gradient_entry(Z, y, model.coef_[0], float(model.intercept_[0]), decay))
    return seconds, worst


def path_fits(
    X: np.ndarray, y: np.ndarray, basis: np.ndarray, ranks: list[int], decay: float, tol: float
) -> tuple[float, list[Fit]]:
    """Seconds for the path, rotation included, and its fits."""
    start = time.perf_counter()
    fits = fit_path(X, y, 2, basis, ranks, [decay], tolerance=tol)
    return time.perf_counter() - start, fits


def folds_against_path(n: int, d: int, runs: int) -> float:
    """Processor time of fitting a path on five folds of pairs of training rows, over that of one path."""
    rng = np.random.default_rng(1)
    X, y, _ = problem(n, d, seed=1)
    a, b = rng.permutation(n)[: 2 * PAIRS].reshape(2, -1)
    dealt = deal(a, b, 5, seed=0)
    ranks = auto_ranks(min(spectrum((X[a] - X[b])[fold.basis].T).rank for fold in dealt))
    ratios = []
    for _ in range(runs):
        start = time.process_time()
        fit_path(X, y, 2, spectrum((X[a] - X[b]).T).basis, ranks, DECAYS)
        middle = time.process_time()
        for fold in dealt:
            left = ~np.isin(np.arange(n), fold.untrained_nodes)
            basis = spectrum((X[a] - X[b])[fold.basis].T).basis
            fit_path(X[left], y[left], 2, basis, ranks, DECAYS, tolerance=FOLD_TOLERANCE)
        ratios.append((time.process_time() - middle) / (middle - start))
        print(
            f"path of {len(ranks)} ranks x {len(DECAYS)}: {middle - start:.2f} s, folds: {ratios[-1]:.2f} x"
        )
    return statistics.median(ratios)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4795)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=24)
    parser.add_argument("--decay", type=float, default=1e-4)
    parser.add_argument("--gradient", type=float, default=1e-7, help="largest entry of the gradient to reach")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a small problem, one run")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.rows, args.dim, args.ranks, args.runs = 600, 64, 6, 1
    warnings.simplefilter("ignore")
    X, y, basis = problem(args.rows, args.dim, seed=0)
    ranks = list(range(1, args.ranks + 1))
    parts = [np.ascontiguousarray(X @ complement(basis[:, :rank])) for rank in ranks]
    # The path's criterion is relative to the rows' norm and on the whole gradient, so it is the stricter one
    # at a tolerance divided by that norm.
    relative = args.gradient / float(np.sqrt(1 + np.mean(((X - X.mean(axis=0)) ** 2).sum(axis=1))))
    few = parts[: max(1, len(parts) // 8)]
    trial = {
        solver: sklearn_fits(few, y, args.decay, args.gradient, solver)
        for solver in ("lbfgs", "newton-cholesky")
    }
    solver = min(trial, key=lambda name: (trial[name][1] > 2 * args.gradient, trial[name][0]))
    for name, (seconds, worst) in trial.items():
        print(f"scikit-learn {name}: {seconds / len(few):.3f} s a fit, gradient {worst:.1e}")
    theirs, ours, reached = [], [], 0.0
    for _ in range(args.runs):
        seconds, fits = path_fits(X, y, basis, ranks, args.decay, relative)
        ours.append(seconds)
        seconds, reached = sklearn_fits(parts, y, args.decay, args.gradient, solver)
        theirs.append(seconds)
    # Along the removed directions the gradient isn't zero, and shouldn't be: look at the others.
    worst = max(
        gradient_entry(
            Z, y, complement(basis[:, : fit.rank]).T @ fit.weight[0], float(fit.bias[0]), args.decay
        )
        for Z, fit in zip(parts, fits, strict=True)
    )
    ratio = statistics.median(theirs) / statistics.median(ours)
    print(f"{args.ranks} ranks on {args.rows:,} x {args.dim}, weight decay {args.decay:g}, {args.runs} runs")
    print(f"scikit-learn ({solver}): {statistics.median(theirs):.2f} s, largest gradient entry {reached:.1e}")
    print(
        f"rank path: {statistics.median(ours):.2f} s, largest gradient entry {worst:.1e}, "
        f"iterations {statistics.mean(fit.iterations for fit in fits):.1f} a fit"
    )
    print(f"ratio: {ratio:.1f}")
    print(f"five folds cost {folds_against_path(args.rows, args.dim, args.runs):.2f} times one path")
    return ratio


if __name__ == "__main__":
    main(sys.argv[1:])
