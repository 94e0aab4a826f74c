"""What pairs by ``ncm embed --augment background`` restore where backgrounds predict the label.

    export OMP_NUM_THREADS=1
    python tests/benchmarks/bench_masks.py --mnist DIR                  5 seeds, two minutes of one core
    python tests/benchmarks/bench_masks.py --mnist DIR --model timm:tf_efficientnet_lite0 --pretrained FILE
    python tests/benchmarks/bench_masks.py --smoke                      a few made-up digits, no check

Fours and nines of MNIST, enlarged to 42 × 42 pixels, each on a ground of its own: a warm or a cold colour,
lit from one side. Which of the two agrees with the label in .98 of the training and validation digits and in
.02 of the test digits. A mask is the digit as MNIST has it: 28 × 28 pixels with soft edges. ``plain`` are the
same digits on black, fitted and measured without pairs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ncm_cli.datasets.colored import read_idx
from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.pairs.options import PairsOptions
from ncm_cli.pairs.pairs import pairs
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.store.tables import write_csv

SIDE = 42
AGREES = {"train": 0.98, "val": 0.98, "test": 0.02}
"""How often the ground is that of the label."""

CLASSES = (4, 9)
INK = (235, 235, 225)


def main() -> None:
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="folder of MNIST's four IDX files")
    parser.add_argument("--model", default="pixels:14")
    parser.add_argument("--pretrained")
    parser.add_argument("--fill", default="images", choices=("images", "grey", "noise"))
    parser.add_argument("--rows", default="1000:300:500", help="training, validation and test digits")
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    if asked.smoke:
        asked.rows, asked.pairs, asked.seeds = "80:40:40", 40, 1
    elif asked.mnist is None:
        parser.error("--mnist DIR, or --smoke")
    counts = dict(zip(AGREES, map(int, asked.rows.split(":")), strict=True))
    rows = []
    for seed in range(asked.seeds):
        with tempfile.TemporaryDirectory() as folder:
            write_pictures(Path(folder), *digits(asked.mnist, sum(counts.values()), seed), counts, seed)
            rows.append(measure(Path(folder), asked.model, asked.pretrained, asked.fill, asked.pairs))
        print(seed, rows[-1], flush=True)
    for name in ("plain", "erm", "ncm"):
        values = np.array([row[name] for row in rows])
        print(f"{name:6} {values.mean():.3f} ± {values.std(ddof=1) if len(values) > 1 else 0:.3f}")
    if not asked.smoke:
        mean = {name: np.mean([row[name] for row in rows]) for name in ("plain", "erm", "ncm")}
        assert mean["erm"] < 0.6, "ERM follows the background"
        assert mean["ncm"] > mean["plain"] - 0.03, "the pairs restore what the digits alone give"
        assert all(row["verdict"].startswith("The pairs help against background") for row in rows)


def digits(mnist: Path | None, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (n, 28, 28) pictures of `CLASSES` and int (n,) labels; without ``mnist`` two made-up shapes."""
    rng = np.random.default_rng(seed)
    if mnist is None:
        labels, pictures = np.arange(count) % 2, np.zeros((count, 28, 28), np.uint8)
        for picture, label, (x, y) in zip(pictures, labels, rng.integers(6, 14, (count, 2)), strict=True):
            picture[y : y + 9, x : x + (3 if label else 9)] = 255
        return pictures, labels
    parts = [
        read_idx(next(mnist.glob(f"train-{kind}-ubyte*")), dims)
        for kind, dims in (("images-idx3", 3), ("labels-idx1", 1))
    ]
    chosen = rng.permutation(np.flatnonzero(np.isin(parts[1], CLASSES)))[:count]
    return parts[0][chosen], (parts[1][chosen] == CLASSES[1]).astype(int)


def ground(kind: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 (SIDE, SIDE, 3): a warm (0) or cold (1) colour, of random brightness, lit from a random side."""
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE - 0.5
    angle, tint = rng.uniform(0, 2 * np.pi), np.array([1.0, 0.6, 0.3][:: 1 - 2 * kind])
    light = rng.uniform(70, 140) * (1 + 0.5 * (x * np.cos(angle) + y * np.sin(angle)))
    return np.clip(light[..., None] * tint + rng.normal(0, 2, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)


def write_pictures(
    folder: Path, pictures: np.ndarray, labels: np.ndarray, counts: dict[str, int], seed: int
) -> None:
    """Write manifest.csv, plain.csv, their pictures and a folder of masks."""
    rng = np.random.default_rng((seed, 1))
    for name in ("images", "plain", "masks"):
        (folder / name).mkdir()
    splits = [split for split, count in counts.items() for _ in range(count)]
    rows = []
    for number, (picture, label, split) in enumerate(zip(pictures, labels, splits, strict=True)):
        agrees = rng.random() < AGREES[split]
        mask = Image.fromarray(picture)
        share = np.asarray(mask.resize((SIDE, SIDE), Image.Resampling.BILINEAR))[..., None] / 255
        name = f"{number:05}.png"
        mask.save(folder / "masks" / name)
        behind = ground(int(label) if agrees else 1 - int(label), rng)
        for kind, back in (("images", behind), ("plain", np.zeros_like(behind))):
            made = np.rint(np.array(INK) * share + back * (1 - share)).astype(np.uint8)
            Image.fromarray(made).save(folder / kind / name)
        rows.append((f"{number:05}", str(CLASSES[label]), split))
    for kind, table in (("images", "manifest.csv"), ("plain", "plain.csv")):
        write_csv(
            folder / table,
            ("id", "path", "label", "split"),
            [(id, f"{kind}/{id}.png", *more) for id, *more in rows],
        )


def measure(folder: Path, model: str, pretrained: str | None, fill: str, count: int) -> dict[str, Any]:
    """Test accuracies of the digits alone, of ERM and of the pairs' probe, and the verdict."""
    views: dict[str, dict[str, Any]] = {
        "f": {},
        "view": {"augment": "background", "masks": folder / "masks", "fill": fill},
        "plain": {},
    }
    for name, more in views.items():
        source = folder / ("plain.csv" if name == "plain" else "manifest.csv")
        embed(
            EmbedOptions(
                source=source, output=folder / f"{name}.h5", model=model, pretrained=pretrained, **more
            )
        )
    f, p = folder / "f.h5", folder / "p.h5"
    made = {"match": "same-id", "where": "split=train", "count": count}
    pairs(PairsOptions(features=f, features_b=folder / "view.h5", output=p, **made))
    fits = {
        "plain": {"features": folder / "plain.h5"},
        "erm": {"features": f},
        "ncm": {"features": f, "pairs": p},
    }
    found: dict[str, Any] = {}
    for name, given in fits.items():
        probe = folder / f"{name}.safetensors"
        body = fit(FitOptions(output=probe, **given))
        result = evaluate(EvalOptions(probe=probe, features=given["features"], where="split=test"))
        found[name] = round(result["accuracy"], 4)
    return found | {"rank": body["rank"], "verdict": body["verdict"]["text"]}


if __name__ == "__main__":
    main()
