"""What wrong pairs cost, how many of them head the ranking, and what dropping them gives back.

    python tests/benchmarks/bench_wrong_pairs.py                      coloured digits, 20 seeds: 3 minutes
    python tests/benchmarks/bench_wrong_pairs.py --mnist DIR          ColoredMNIST's pixels as well
    python tests/benchmarks/bench_wrong_pairs.py --views F.h5 G.h5    ranking: a store and its augmented view
    python tests/benchmarks/bench_wrong_pairs.py --smoke              one seed, in seconds

``first K``: share of K wrong pairs among the K that are ranked first, by ``ncm pairs`` and, to compare, by
the share of a difference outside the leading 16 directions of the other folds. ``clean``, ``bad``,
``looked``, ``blind``: mean accuracy in the test domain with right pairs only, with the wrong ones, without
the wrong ones among those that the page shows, and without the K first. ``recovered``: the share of the loss
that comes back, with its standard error over seeds. A wrong pair's second member is another picture of the
split in the other colour; held-out pairs are wrong as often as others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

import numpy as np

from ncm_cli.main import run
from ncm_cli.pairs.diagnostics import unexplained
from ncm_cli.results.pictures import Thumbnails, look
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.tables import read_table, write_csv

KINDS = ("digits", "mnist")
MNIST = ("--train-digits", 4000, "--test-digits", 2000)


def call(*words: object) -> None:
    """One command of ncm, silently."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = run([*map(str, words), "-q"])
    assert code == 0, said.getvalue()


def by_sixteen(delta: np.ndarray) -> np.ndarray:
    """(k,) the share of each difference outside the 16 leading directions of the other folds."""
    unit = delta / np.linalg.norm(delta, axis=0)
    fold = np.random.default_rng(0).permutation(unit.shape[1]) % 5
    share = np.empty(len(fold))
    for number in range(5):
        basis = np.linalg.svd(unit[:, fold != number], full_matrices=False)[0][:, :16]
        share[fold == number] = 1 - ((basis.T @ unit[:, fold == number]) ** 2).sum(axis=0)
    return share


def first(score: np.ndarray, wrong: np.ndarray) -> float:
    """The share of the K wrong pairs among the K of the highest score."""
    return float(wrong[np.argsort(-score)[: wrong.sum()]].mean())


def rankings(delta: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """Both rankings' share of wrong pairs among the first."""
    ours = unexplained(delta, np.arange(len(wrong))) * np.linalg.norm(delta, axis=0)
    return {"first K": first(ours, wrong), "first K by 16": first(by_sixteen(delta), wrong)}


def build(folder: Path, kind: str, mnist: Path | None, seed: int, fraction: float) -> None:
    """The data set and its features."""
    data, store = folder / "data", folder / "f.h5"
    common = ("-o", data, "--seed", seed, "--wrong-fraction", fraction)
    if kind == "digits":
        call("data", "digits", *common)
        call("embed", data / "manifest.csv", "--model", "pixels:8", "-o", store)
    else:
        call("data", "colored-mnist", "--mnist", mnist, "--size", 14, "--packed", *common, *MNIST)
        source = ("--from-array", data / "pixels.npy", "--encoder-name", "pixels")
        call("embed", data / "manifest.csv", *source, "-o", store)


def accuracy(folder: Path, drop: list[tuple[str, str]] | None = None) -> tuple[float, PairStore]:
    """The test accuracy of ``ncm fit`` with the pairs, or those left of them, and the pair store."""
    more: tuple[object, ...] = ()
    if drop is not None:
        write_csv(folder / "drop.csv", ("id_a", "id_b"), drop)
        more = ("--drop", folder / "drop.csv")
    store, pairs, probe, result = (folder / name for name in ("f.h5", "p.h5", "p.safetensors", "p.json"))
    call("pairs", folder / "data/pairs.csv", "-f", store, "--holdout-col", "holdout", "-o", pairs, *more)
    call("fit", "-f", store, "-p", pairs, "-o", probe)
    call("eval", probe, "-f", store, "--where", "split=test", "-o", result)
    return float(json.loads(result.read_text())["accuracy"]), read_pairs(pairs)


def experiment(kind: str, mnist: Path | None, seed: int, fraction: float) -> dict[str, float]:
    """One seed."""
    with tempfile.TemporaryDirectory() as name:
        right, folder = Path(name) / "right", Path(name) / "wrong"
        build(right, kind, mnist, seed, 0.0)
        build(folder, kind, mnist, seed, fraction)
        clean = accuracy(right)[0]
        bad, store = accuracy(folder)
        rows = read_table(folder / "data" / "pairs.csv").rows
        wrong = {(row["id_a"], row["id_b"]) for row in rows if row["wrong"] == "1"}
        shown = [
            tuple(tile.id for tile in pair["tiles"])
            for pair in look(Path(), store, [], Thumbnails())["pairs"]
        ]
        flags = np.array([ids in wrong for ids in zip(store.id_a, store.id_b, strict=True)])
        suspects = [(one["id_a"], one["id_b"]) for one in store.diagnostics["suspects"]]
        looked = accuracy(folder, [ids for ids in shown if ids in wrong])[0]
        blind = accuracy(folder, suspects[: len(wrong)])[0]
    found = {"wrong": len(wrong), "shown": len(shown), "wrong shown": len(wrong & set(shown))}
    found |= {"stand out": store.diagnostics["stand_out"], **rankings(store.delta, flags)}
    return found | {"clean": clean, "bad": bad, "looked": looked, "blind": blind}


def summary(rows: list[dict[str, float]]) -> dict[str, object]:
    """Means over seeds, and the shares of the loss that came back."""
    value = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    made: dict[str, object] = {name: round(float(one.mean()), 3) for name, one in value.items()}
    cost = value["clean"] - value["bad"]
    for name in ("looked", "blind"):
        gain = value[name] - value["bad"]
        ratio = gain.mean() / cost.mean() if cost.mean() else float("nan")
        error = (gain - ratio * cost).std(ddof=1) / np.sqrt(len(rows)) / cost.mean() if len(rows) > 1 else 0
        made[f"recovered, {name}"] = f"{ratio:.0%} ± {abs(error):.0%}"
    return made


def views(paths: list[Path], seed: int, fraction: float, count: int = 200) -> dict[str, float]:
    """Rankings of pictures and their augmented view, some of them another picture's of the same label."""
    rng = np.random.default_rng(seed)
    with FeatureStore(paths[0]) as a, FeatureStore(paths[1]) as b:
        chosen = rng.choice(a.rows, count, replace=False)
        wrong = np.arange(count) < round(fraction * count)
        label, twin = a.categorical("label").codes, chosen.copy()
        for i in np.flatnonzero(wrong):
            others = np.flatnonzero((label == label[chosen[i]]) & (np.arange(a.rows) != chosen[i]))
            twin[i] = rng.choice(others)
        delta = (a.read(chosen) - b.read(b.positions([a.ids[i] for i in twin]))).T
    live = delta.any(axis=0)
    return rankings(delta[:, live], wrong[live])


def main() -> None:
    """Run the benchmark; one line of JSON for each setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="one seed, to see that it runs")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--fractions", default="0.1,0.25")
    parser.add_argument("--mnist", type=Path, help="folder of MNIST's files")
    parser.add_argument("--views", type=Path, nargs=2, metavar="STORE")
    given = parser.parse_args()
    seeds = range(1 if given.smoke else given.seeds)
    for fraction in map(float, ["0.1"] if given.smoke else given.fractions.split(",")):
        for kind in KINDS[: 2 if given.mnist else 1] if not given.views else ():
            rows = [experiment(kind, given.mnist, seed, fraction) for seed in seeds]
            print(
                json.dumps(
                    {"data": kind, "seeds": len(rows), "fraction": fraction, **summary(rows)},
                    ensure_ascii=False,
                ),
                flush=True,
            )
        if given.views:
            rows = [views(given.views, seed, fraction) for seed in seeds]
            means = {name: round(float(np.mean([row[name] for row in rows])), 3) for name in rows[0]}
            print(
                json.dumps({"data": str(given.views[1]), "seeds": len(rows), "fraction": fraction, **means})
            )


if __name__ == "__main__":
    main()
