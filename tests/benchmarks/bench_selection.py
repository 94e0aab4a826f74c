"""What the rule `bound` picks, how far that is from the best of the path, and whether its bound holds.

    python tests/benchmarks/bench_selection.py [--seeds 5] [--first-seed 0] [--dogs RUN] [--data DIR]

Every setting is fitted by ncm's own functions from stores on disk: cross-fitted on 5 folds of pairs, ranks
by `--rank auto`, weight decays 1e-4 to 1. "Best" is the best test accuracy of any candidate fitted on all
rows and pairs, which only an oracle can choose. Settings: scikit-learn's digits and MNIST (14×14), coloured
by IRM's protocol, with clean, noisy and wrong pairs; with --dogs the stores of a run of recipes/dogs.yaml.

Rules compared: the least bound; the largest or smallest rank whose bound is within one standard error of the
least (paired on the same rows and pairs; Breiman et al. 1984, section 3.4.3); the least log-loss bound;
validation accuracy.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from ncm_cli.probes.choose import Choice, crossfit, resolve_ranks
from ncm_cli.probes.controls import judge_choice
from ncm_cli.probes.crossfit import CrossFit
from ncm_cli.probes.metrics import Z95, row_errors
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.reading import read_problem
from ncm_cli.probes.selection import best_candidate, stacked
from ncm_cli.progress import SILENT
from ncm_cli.solvers.solve import train_path
from ncm_cli.store.columns import Column
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.features import write_features
from ncm_cli.store.pairs import PairStore, write_pairs

ROOT = Path(__file__).resolve().parents[2]
DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
ENCODER = {"kind": "array", "model": "coloured digits"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits:
    """Grey digits (n, p) in [0, 1] and which are below 5."""

    images: np.ndarray
    small: np.ndarray


def read_mnist(folder: Path) -> Digits:
    """The 60,000 training digits of MNIST, mean-pooled to 14×14."""
    images, labels = (read_idx(folder, f"train-{name}-ubyte") for name in ("images-idx3", "labels-idx1"))
    pooled = images.reshape(-1, 14, 2, 14, 2).astype(np.float32).mean(axis=(2, 4)) / 255
    return Digits(images=pooled.reshape(len(pooled), -1), small=labels < 5)


def read_idx(folder: Path, name: str) -> np.ndarray:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            shape = np.frombuffer(raw, ">i4", raw[3], 4)
            return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    raise SystemExit(f"no {name} in {folder}: --data DIR or NCM_TEST_DATA")


def colour(images: np.ndarray, green: np.ndarray) -> np.ndarray:
    """(n, 2p) float32: each image in channel 0, or in channel 1 where ``green``."""
    made = np.zeros((len(images), 2, images.shape[1]), np.float32)
    made[np.arange(len(images)), green.astype(int)] = images
    return made.reshape(len(images), -1)


def write_setting(
    folder: Path,
    digits: Digits,
    sizes: tuple[int, int, int],
    pairs: int,
    seed: int,
    noise: float,
    wrong: float,
) -> None:
    """features.h5 and pairs.h5: IRM's protocol, pairs of training digits in both colours."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.images))[: sum(sizes)]
    split = np.repeat([0, 1, 2], sizes)
    domain = np.arange(len(order)) % 2
    flips = np.where(split == 2, 0.9, np.where(domain == 0, 0.1, 0.2))
    label = digits.small[order] ^ (rng.random(len(order)) < 0.25)
    green = label ^ (rng.random(len(order)) < flips)
    rows = colour(digits.images[order], green)
    twin = np.arange(pairs)
    spoiled = rng.choice(pairs, size=round(wrong * pairs), replace=False)
    twin[spoiled] = twin[np.roll(spoiled, 1)]
    a, b = rows[:pairs], colour(digits.images[order[twin]], ~green[:pairs])
    a, b = ((x + noise * rng.normal(size=x.shape)).astype(np.float32) for x in (a, b))
    ids = [f"r{i}" for i in range(len(order))]
    write_features(
        folder / "features.h5",
        ids=ids,
        blocks=[rows],
        dim=rows.shape[1],
        columns=[
            Column("label", label.astype(np.int32), ("large", "small")),
            Column("split", split.astype(np.int32), ("train", "val", "test")),
        ],
        label_column="label",
        split_column="split",
        encoder=ENCODER,
        options={},
    )
    write_pairs(
        folder / "pairs.h5",
        PairStore(
            features_a=a,
            features_b=b,
            id_a=tuple(ids[:pairs]),
            id_b=tuple(f"{id}-other" for id in ids[:pairs]),
            label_a=("",) * pairs,
            label_b=("",) * pairs,
            holdout=np.zeros(pairs, bool),
            singular_values=np.zeros(0),
            strategy="table",
            options={},
            encoder=ENCODER,
            fingerprint=fingerprint(ENCODER),
            sources=[],
            diagnostics={},
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One setting and seed: test errors of each rule's pick, and the bound of the rule in force."""

    errors: dict[str, float]
    best: float
    bound: float
    upper: float
    verdict: str


def outcome(features: Path, pairs: Path, scaling: str, seed: int) -> Outcome:
    """Cross-fit, pick by every rule, and see what every candidate, fitted on all, does in the test."""
    options = FitOptions(
        features=features,
        pairs=pairs,
        output=Path("unused"),
        select="oracle",
        test="split=test",
        scaling=scaling,
        seed=seed,
    )
    problem = read_problem(options, oracle=True, reporter=SILENT)
    whole, folds = problem.whole(), problem.pairs.folds(options.folds, seed)
    available = min(whole.rank, *(problem.without(fold).rank for fold in folds))
    ranks = resolve_ranks("auto", "ncm", available, SILENT)
    settings = {"ranks": ranks, "decays": DECAYS}
    found = crossfit(problem, folds, **settings)
    fits = train_path(whole, dataclasses.replace(options.solving, tolerance=1e-6), **settings)
    assert problem.test is not None
    errors = row_errors(*stacked(fits), problem.test.scaled(whole.scaling))[0].mean(axis=1)
    picks = {name: rule(found) for name, rule in RULES.items()}
    pick = picks["least bound"]
    bound = found.bound(pick)
    choice = Choice(
        rule="bound",
        note="",
        ranks=ranks,
        available=available,
        folds=tuple(folds),
        candidates=list(found.candidates),
        chosen=pick,
        variant=problem.variants[0],
        best=fits[pick],
        estimates=found,
    )
    _, verdict, _ = judge_choice(problem, choice, choice.folds, found, SILENT)
    return Outcome(
        errors={name: float(errors[index]) for name, index in picks.items()},
        best=float(errors.min()),
        bound=bound.value,
        upper=bound.high,
        verdict=verdict.code,
    )


def _within(found: CrossFit, sign: int) -> int:
    """The largest (or smallest) rank within a standard error of the least bound, at its least bound."""
    least = best_candidate(found.candidates, "bound", "classification")

    def close(index: int) -> bool:
        gain = found.gain(least, index)
        return gain.value <= (gain.high - gain.low) / 2 / Z95 + 1e-12

    near = [index for index in range(len(found.candidates)) if close(index)]
    return min(near, key=lambda i: (-sign * found.candidates[i]["rank"], found.candidates[i]["bound_01"]))


RULES: dict[str, Callable[[CrossFit], int]] = {
    "least bound": lambda found: best_candidate(found.candidates, "bound", "classification"),
    "1 SE, larger rank": lambda found: _within(found, 1),
    "1 SE, smaller rank": lambda found: _within(found, -1),
    "log-loss bound": lambda found: int(np.argmin([c["log_loss_bound"] for c in found.candidates])),
    "in-domain": lambda found: best_candidate(found.candidates, "in-domain", "classification"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=6000, help="training digits of MNIST")
    parser.add_argument("--dogs", type=Path, help="the folder of a run of recipes/dogs.yaml")
    parser.add_argument("--data", type=Path, help="folder that holds mnist/ with the IDX files")
    parser.add_argument("--smoke", action="store_true", help="one small draw, to see that it runs")
    args = parser.parse_args(arguments)
    data = args.data or Path(os.environ.get("NCM_TEST_DATA", ROOT.parent / "shared" / "data"))
    images, digit = load_digits(return_X_y=True)
    small = Digits(images=(images / 16).astype(np.float32), small=digit < 5)
    made: dict[str, tuple[Digits, tuple[int, int, int], int, float, float]] = {
        "digits, 96 pairs": (small, (1000, 250, 547), 96, 0.0, 0.0),
        "digits, 32 pairs": (small, (1000, 250, 547), 32, 0.0, 0.0),
    }
    if args.smoke:
        args.seeds = 1
    elif (data / "mnist").is_dir():
        mnist, sizes = read_mnist(data / "mnist"), (args.rows, 2000, 10000)
        made |= {
            "pixels, clean": (mnist, sizes, 256, 0.0, 0.0),
            "pixels, 64 pairs": (mnist, sizes, 64, 0.0, 0.0),
            "pixels, noise .02": (mnist, sizes, 256, 0.02, 0.0),
            "pixels, noise .1": (mnist, sizes, 256, 0.1, 0.0),
            "pixels, 10 % wrong": (mnist, sizes, 256, 0.0, 0.1),
        }
    else:
        print(f"no mnist in {data}: the pixel settings are left out", file=sys.stderr)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    table: dict[str, list[Outcome]] = {}
    for name, setting in made.items():
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                write_setting(Path(folder), *setting[:3], seed, *setting[3:])
                stores = Path(folder, "features.h5"), Path(folder, "pairs.h5")
                table.setdefault(name, []).append(outcome(*stores, "none", seed))
    for kind in ("random", "nearest", "pool", "grayscale") if args.dogs else ():
        for folder in sorted(args.dogs.glob("seed*")):
            stores = folder / "features.h5", folder / f"{kind}.h5"
            table.setdefault(f"dogs, {kind}", []).append(outcome(*stores, "norm", int(folder.name[4:])))
    show(table)


def show(table: dict[str, list[Outcome]]) -> None:
    """Two Markdown tables: accuracy by rule, and whether the bounds hold."""
    print("test accuracy of what each rule picks, mean over seeds")
    print("| setting | best (ORACLE) | " + " | ".join(RULES) + " |")
    print("|---" * (len(RULES) + 2) + "|")
    for name, found in table.items():
        picks = [1 - np.mean([one.errors[rule] for one in found]) for rule in RULES]
        best = 1 - np.mean([one.best for one in found])
        print(f"| {name} | {best:.3f} | " + " | ".join(f"{value:.3f}" for value in picks) + " |")
    behind = [
        np.mean([one.errors[rule] - one.best for found in table.values() for one in found]) for rule in RULES
    ]
    print("| mean behind the best | | " + " | ".join(f"{value:.4f}" for value in behind) + " |")
    print("\nthe bound of the pick and its true test error")
    print("| setting | bound | true error | estimate holds | upper limit holds | verdicts |")
    print("|---" * 6 + "|")
    every = [one for found in table.values() for one in found]
    for name, found in [*table.items(), ("all", every)]:
        true = [one.errors["least bound"] for one in found]
        holds = sum(one.bound >= error for one, error in zip(found, true, strict=True))
        upper = sum(one.upper >= error for one, error in zip(found, true, strict=True))
        codes = [one.verdict for one in found]
        said = ", ".join(f"{code} {codes.count(code)}" for code in dict.fromkeys(codes))
        print(
            f"| {name} | {np.mean([one.bound for one in found]):.3f} | {np.mean(true):.3f} | "
            f"{holds} of {len(found)} | {upper} of {len(found)} | {said} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
