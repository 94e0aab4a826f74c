"""How fast the batched trainer is: against scikit-learn, against a plain torch loop, and a whole table.

    python tests/benchmarks/bench_trainer.py             the full sizes, a few minutes on two cores
    python tests/benchmarks/bench_trainer.py --smoke     small ones, in seconds
    python tests/benchmarks/bench_trainer.py --table     also the Waterbirds-size sweep

Rounds alternate between the contenders; medians over rounds are shown, of wall and of processor time (which
tells more on a machine with other work). All see the same float32 features: isotropic ones, the easiest that
there are for L-BFGS, and ones with the spectrum of image embeddings (a large mean, variances falling as 1/i).
scikit-learn has its defaults but for C, which matches the weight decays. The torch loop takes batches by
index, which is faster than a DataLoader (timed too).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ncm_cli.solvers.methods import Config
from ncm_cli.solvers.projection import Spectrum
from ncm_cli.solvers.trainer import Schedule, train
from ncm_cli.solvers.training_set import TrainingSet


def problem(n: int, d: int, rank: int, *, embedded: bool, seed: int = 0) -> TrainingSet:
    """Random features with a noisy linear label, two environments, and a random basis."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((n, d))
    score = features @ rng.standard_normal(d) / np.sqrt(d)
    if embedded:
        spread = features / np.sqrt(np.arange(1, d + 1))
        spread *= 7 / np.sqrt((spread**2).sum(1).mean())
        center = rng.standard_normal(d)
        features = spread @ np.linalg.qr(rng.standard_normal((d, d)))[0] + 7 * center / np.linalg.norm(center)
    return TrainingSet(
        X=features.astype(np.float32),
        y=(score + 0.7 * rng.standard_normal(n) > 0).astype(np.int64),
        n_classes=2,
        codes={"envs": rng.integers(0, 2, n)},
        spectrum=Spectrum(
            np.sqrt(np.linspace(1, 0.1, rank)),
            np.linalg.qr(rng.standard_normal((d, rank)))[0],
            rank,
            0.0,
            0,
        ),
        pairs=1,
    )


def configurations(count: int, ranks: int) -> list[Config]:
    """Ranks × weight decays × learning rates; rank 0 is ERM."""
    decays, rates = np.geomspace(1e-4, 1e-2, 4), np.geomspace(1e-4, 1e-2, 5)
    every = [
        Config(method="ncm" if rank else "erm", rank=rank, weight_decay=float(decay), lr=float(rate))
        for rank in range(ranks)
        for decay in decays
        for rate in rates
    ]
    return every[:count]


def torch_loop(data: TrainingSet, config: Config, epochs: int, batch: int, loader: bool) -> None:
    """One configuration as anyone writes it."""
    features, targets = torch.from_numpy(data.X), torch.from_numpy(data.y).float()
    model = torch.nn.Linear(features.shape[1], 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    loss_of = torch.nn.BCEWithLogitsLoss()
    batches: object
    if loader:
        rows = torch.utils.data.TensorDataset(features, targets)
        batches = torch.utils.data.DataLoader(rows, batch_size=batch, shuffle=True)
    for _ in range(epochs):
        if not loader:
            batches = ((features[own], targets[own]) for own in torch.randperm(len(features)).split(batch))
        for x, y in batches:  # type: ignore[attr-defined]
            optimizer.zero_grad()
            loss_of(model(x)[:, 0], y).backward()
            optimizer.step()


def scikit(data: TrainingSet, config: Config) -> int:
    """One fit; returns its iterations."""
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LogisticRegression(C=1 / (len(data.X) * config.weight_decay))
        return int(model.fit(data.X, data.y).n_iter_[0])


def one_thread(work: Callable[[], object]) -> object:
    """Matrix-vector products are bound by memory: one BLAS thread is often the faster."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        return work()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def compare(count: int, n: int, d: int, epochs: int, rounds: int, *, embedded: bool, device: str) -> None:
    data, configs = problem(n, d, 24, embedded=embedded), configurations(count, 24)
    schedule = Schedule(epochs=epochs, batch_size=256)
    contenders: dict[str, tuple[int, Callable[[int], object]]] = {
        "ncm trainer": (len(configs), lambda i: train(configs, data, schedule, device=device)),
        "scikit-learn lbfgs": (4, lambda i: [scikit(data, configs[j * 5]) for j in range(4)]),
        "the same, one thread": (
            4,
            lambda i: one_thread(lambda: [scikit(data, configs[j * 5]) for j in range(4)]),
        ),
        "torch loop": (1, lambda i: torch_loop(data, configs[i], epochs, 256, False)),
        "torch loop, DataLoader": (1, lambda i: torch_loop(data, configs[i], epochs, 256, True)),
    }
    train(configs[:8], data, Schedule(epochs=1, batch_size=256), device=device)
    iterations = [scikit(data, configs[j * 5]) for j in range(4)]
    torch_loop(data, configs[0], 1, 256, True)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for i in range(rounds):
        for name, (parts, work) in contenders.items():
            wall, processor = timed(lambda work=work, i=i: work(i))
            seconds[name].append((wall / parts, processor / parts))
    kind = "embedding-like" if embedded else "isotropic"
    print(f"{len(configs)} configurations, {n:,} x {d} {kind}, batch 256, {epochs} epochs, {rounds} rounds")
    print(f"  (scikit-learn takes {min(iterations)} to {max(iterations)} iterations)")
    middles = {
        name: [statistics.median(part) for part in zip(*seconds[name], strict=True)] for name in seconds
    }
    for name, (wall, processor) in middles.items():
        own_wall, own_processor = middles["ncm trainer"]
        print(
            f"  {name:24s} wall {wall * 1e3:9.2f} ms a configuration, x{wall / own_wall:.1f}"
            f"    processor {processor * 1e3:9.2f} ms, x{processor / own_processor:.1f}"
        )


def table(n: int, n_val: int, n_test: int, d: int, trials: int, seeds: int, epochs: int) -> None:
    """Nine methods through ``ncm sweep`` itself: reading, training, judging every epoch, writing."""
    from ncm_cli.baselines.options import SweepOptions
    from ncm_cli.baselines.sweep import sweep
    from ncm_cli.store.columns import Column
    from ncm_cli.store.digests import fingerprint
    from ncm_cli.store.features import write_features
    from ncm_cli.store.pairs import PairStore, write_pairs

    rng = np.random.default_rng(0)
    total = n + n_val + n_test
    features = rng.standard_normal((total, d)).astype(np.float32)
    codes = {
        "label": (features[:, 0] + rng.standard_normal(total) > 0).astype(np.int32),
        "place": rng.integers(0, 2, total).astype(np.int32),
        "split": np.repeat(np.arange(3, dtype=np.int32), (n, n_val, n_test)),
    }
    names = {"label": ("land", "water"), "place": ("land", "water"), "split": ("train", "val", "test")}
    a, b = (rng.standard_normal((240, d)).astype(np.float32) for _ in range(2))
    values = np.linalg.svd((a - b)[:180].T.astype(np.float64), compute_uv=False)
    encoder = {"kind": "array"}
    with tempfile.TemporaryDirectory() as folder:
        store, pairs = Path(folder, "f.h5"), Path(folder, "p.h5")
        write_features(
            store,
            ids=[str(i) for i in range(total)],
            blocks=[features],
            dim=d,
            columns=[Column(name, codes[name], names[name]) for name in codes],
            label_column="label",
            split_column="split",
            encoder=encoder,
            options={},
        )
        write_pairs(
            pairs,
            PairStore(
                features_a=a,
                features_b=b,
                id_a=tuple(f"a{i}" for i in range(240)),
                id_b=tuple(f"b{i}" for i in range(240)),
                label_a=("",) * 240,
                label_b=("",) * 240,
                holdout=np.arange(240) >= 180,
                singular_values=values,
                strategy="table",
                options={},
                encoder=encoder,
                fingerprint=fingerprint(encoder),
                sources=[],
                diagnostics={},
            ),
        )
        options = SweepOptions(
            features=store,
            pairs=pairs,
            output=Path(folder, "s.h5"),
            methods="erm,irm,vrex,groupdro,fish,lisa,matchdg,ncm,ncm+upweight",
            envs="place",
            groups="label,place",
            dro_groups="label,place",
            upweight="label,place",
            test="split=test",
            trials=trials,
            seeds=seeds,
            epochs=epochs,
            device="cpu",
        )
        wall, processor = timed(lambda: sweep(options))
    print(f"table: 9 methods x {trials} configurations x {seeds} seeds, {n:,} x {d}, {epochs} epochs")
    print(f"  wall {wall:.1f} s, processor {processor:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="of the ncm trainer; the others stay on the CPU")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, trainer on {asked.device}")
    if asked.smoke:
        for embedded in (False, True):
            compare(40, 600, 64, 3, 1, embedded=embedded, device=asked.device)
        table(300, 100, 100, 32, 2, 2, 2)
        return
    for embedded in (False, True):
        compare(460, 4795, 512, 100, asked.rounds, embedded=embedded, device=asked.device)
    if asked.table:
        table(4795, 1199, 5794, 512, 16, 5, 100)


if __name__ == "__main__":
    main()
