"""Prints what each selection rule picks on ColoredMNIST, and how far it is from the best of the path.

    python tests/benchmarks/selection_table.py [--rows 14000] [--seeds 3] [--data DIR] [--smoke]

IRM's protocol on 14×14 mean-pooled digits with two colour channels: label digit < 5 with 25 % noise; the
colour agrees with the label but for 10 % and 20 % of the two training domains and 90 % of the test domain.
Pairs are the same digit in the other colour. Every rank in the grid and every weight decay is fitted exactly.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from ncm_cli.methods.path import fit_path
from ncm_cli.methods.projection import spectrum
from ncm_cli.methods.selection import Candidate, HeldOut, Rows, choose, score_path

ROOT = Path(__file__).resolve().parents[2]
WEIGHT_DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
VALIDATION, TEST, PAIRS, HELD_OUT = 4000, 10000, 256, 128
KINDS = ("clean", "noise .02", "noise .1", "10 % wrong")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One draw of the protocol: rows and pairs of digits (n, 14·14·2)."""

    train: Rows
    val: Rows
    test: Rows
    a: np.ndarray
    b: np.ndarray


def read_mnist(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Training images (60000, 14, 14) in [0, 1], mean-pooled, and digits (60000,)."""
    images, digits = (_idx(folder, f"train-{name}") for name in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    pooled = images.reshape(-1, 14, 2, 14, 2).astype(np.float32).mean(axis=(2, 4)) / 255
    return pooled, digits.astype(np.int64)


def _idx(folder: Path, name: str) -> np.ndarray:
    for path in (folder / name, folder / f"{name}.gz", folder / name.replace("-idx", ".idx")):
        if path.exists():
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            shape = np.frombuffer(raw, ">i4", raw[3], 4)
            return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    raise SystemExit(f"no {name} in {folder}: --data DIR or NCM_TEST_DATA")


def colour(images: np.ndarray, green: np.ndarray) -> np.ndarray:
    """(n, 392) float32: each image in channel 0, or in channel 1 where ``green``."""
    made = np.zeros((len(images), 2, images.shape[1] * images.shape[2]), np.float32)
    made[np.arange(len(images)), green.astype(int)] = images.reshape(len(images), -1)
    return made.reshape(len(images), -1)


def draw(images: np.ndarray, digits: np.ndarray, seed: int, rows: int) -> Sample:
    """The protocol with ``rows`` training digits; the pairs are training digits."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(images))
    parts = np.split(order[: rows + VALIDATION + TEST], [rows, rows + VALIDATION])
    made = []
    for part, domains in zip(parts, ((0.1, 0.2), (0.1, 0.2), (0.9, 0.9)), strict=True):
        flip = np.where(np.arange(len(part)) % 2 == 0, *domains)
        y = (digits[part] < 5) ^ (rng.random(len(part)) < 0.25)
        green = y ^ (rng.random(len(part)) < flip)
        made.append((Rows(X=colour(images[part], green).astype(np.float64), y=y.astype(np.int64)), green))
    some = parts[0][: PAIRS + HELD_OUT]
    green = made[0][1][: len(some)]
    a, b = colour(images[some], green), colour(images[some], ~green)
    return Sample(train=made[0][0], val=made[1][0], test=made[2][0], a=a, b=b)


def spoil(sample: Sample, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs with pixel noise on both members, or with a tenth of them matched wrongly."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    a, b = sample.a.copy(), sample.b.copy()
    if kind.startswith("noise"):
        scale = float(kind.split()[1])
        return tuple((x + scale * rng.normal(size=x.shape)).astype(np.float32) for x in (a, b))
    if kind == "10 % wrong":
        for part in (np.arange(PAIRS), np.arange(PAIRS, len(a))):
            wrong = rng.choice(part, size=round(0.1 * len(part)), replace=False)
            b[wrong] = b[np.roll(wrong, 1)]
    return a, b


def path_of(sample: Sample, kind: str, seed: int, step: int) -> list[Candidate]:
    """Every candidate of the path, scored."""
    a, b = spoil(sample, kind, seed)
    found = spectrum((a - b)[:PAIRS].T)
    ranks = range(0, min(found.rank, 200) + 1, step)
    fits = fit_path(sample.train.X, sample.train.y, 2, found.basis, ranks, WEIGHT_DECAYS)
    held_out = HeldOut(a=a[PAIRS:].astype(np.float64), b=b[PAIRS:].astype(np.float64))
    return score_path(fits, task="classification", val=sample.val, held_out=held_out, test=sample.test)


def picks(candidates: list[Candidate]) -> dict[str, Candidate]:
    """What each rule picks, and ERM's best weight decay by validation accuracy."""
    erm = [candidate for candidate in candidates if candidate.rank == 0]
    chosen = {
        rule: candidates[choose(candidates, rule, "classification")]
        for rule in ("in-domain", "bound", "oracle")
    }
    by_log_loss = min(candidates, key=lambda candidate: candidate.log_loss_bound or np.inf)
    return {"ERM": erm[choose(erm, "in-domain", "classification")], **chosen, "log-loss bound": by_log_loss}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=14000, help="training digits, at most 46000")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank-step", type=int, default=4)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which pairs")
    parser.add_argument("--data", type=Path, help="folder that holds mnist/ with the IDX files")
    parser.add_argument("--smoke", action="store_true", help="one small draw, to see that it runs")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.rows, args.seeds, args.rank_step = 2000, 1, 40
    data = args.data or Path(os.environ.get("NCM_TEST_DATA", ROOT.parent / "shared" / "data"))
    images, digits = read_mnist(data / "mnist")
    rules = ("ERM", "in-domain", "log-loss bound", "bound", "oracle")
    print(
        f"{args.rows:,} training digits, {PAIRS} pairs and {HELD_OUT} held out, mean of {args.seeds} seeds;"
    )
    print("in-domain (validation) / test accuracy of what each rule picks over ranks × weight decays")
    print("| pairs | " + " | ".join(rules[:-1]) + " | best on the path (ORACLE) | seconds a path |")
    print("|---" * (len(rules) + 2) + "|")
    for kind in args.kinds.split(","):
        found: dict[str, list[Candidate]] = {rule: [] for rule in rules}
        start = time.perf_counter()
        for seed in range(args.seeds):
            for rule, candidate in picks(
                path_of(draw(images, digits, seed, args.rows), kind, seed, args.rank_step)
            ).items():
                found[rule].append(candidate)
        cells = [_cell(found[rule]) for rule in rules]
        print(
            f"| {kind} | " + " | ".join(cells) + f" | {(time.perf_counter() - start) / args.seeds:.0f} |",
            flush=True,
        )


def _cell(candidates: list[Candidate]) -> str:
    val = statistics.mean(candidate.val_accuracy or 0.0 for candidate in candidates)
    test = statistics.mean(candidate.test_accuracy or 0.0 for candidate in candidates)
    ranks = ", ".join(str(candidate.rank) for candidate in candidates)
    return f"{val:.3f} / {test:.3f} (rank {ranks})"


if __name__ == "__main__":
    main(sys.argv[1:])
