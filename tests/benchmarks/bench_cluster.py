"""Prints what a cluster costs on one machine, and how many GPUs one driver of a cluster can feed.

    python tests/benchmarks/bench_cluster.py                      both parts (PACS, EfficientNet-Lite0)
    python tests/benchmarks/bench_cluster.py one --rounds 3       plain ncm embed against --cluster local
    python tests/benchmarks/bench_cluster.py driver               encoders that cost nothing
    python tests/benchmarks/bench_cluster.py driver --rows 200000 --dims 512 --actors 1,4 --rates 0
    python tests/benchmarks/bench_cluster.py --smoke              both, small, in a minute

`one`: the same images by ``ncm embed`` and by ``ncm embed --cluster local`` with one encoder of all cores:
images a second once the encoder is loaded, and what Ray takes to start. The best of ``--rounds`` counts.

`driver`: actors that give rows at once, or (``--rates``) as many a second as a GPU would, in batches of 256,
through the same hands as real ones: the driver takes the rows in, journals them and writes the store. Printed
are rows a second of each stage, the driver's processor time for a row (which is what bounds it where the
actors have cores of their own), the share of their time that actors wait for a batch, and bytes of journal,
store and driver's memory for a row. Actors share this machine's cores with the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from ncm_cli.images import embed as embedding  # noqa: E402
from ncm_cli.images import nodes  # noqa: E402
from ncm_cli.images.manifest import Manifest  # noqa: E402
from ncm_cli.images.node_encoder import Encoded, Loaded  # noqa: E402
from ncm_cli.images.options import EmbedOptions  # noqa: E402
from ncm_cli.images.reading import ReadImage, cores  # noqa: E402
from ncm_cli.progress import Reporter, Task  # noqa: E402
from ncm_cli.store.columns import ImageFile  # noqa: E402
from ncm_cli.store.features import FeatureStore  # noqa: E402
from ncm_cli.store.journal import log_path  # noqa: E402

BATCH = 256
"""As on a GPU."""


def timed(source: Path, output: Path, *options: str) -> tuple[dict[str, Any], float, str]:
    """The report of one ``ncm embed``, its seconds from start to end, and what it said."""
    command = [sys.executable, "-m", "ncm_cli", "embed", str(source), "-o", str(output), "--json", *options]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), time.perf_counter() - started, done.stderr


def one(asked: argparse.Namespace) -> None:
    """Plain ``ncm embed`` against ``--cluster local``."""
    import bench_embed

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.smoke:
            paths, model = bench_embed.generated(folder, 64), ["--model", "timm:test_vit", "--random-init"]
        else:
            paths = sorted(path for path in (asked.images or bench_embed.pacs()).rglob("*") if path.is_file())
            weights = str(bench_embed.checkpoint(folder))
            model = ["--model", "timm:tf_efficientnet_lite0", "--pretrained", weights]
        source = bench_embed.manifest(folder, paths)
        print(f"{bench_embed.machine('cpu')}\n{len(paths):,} images, {model[1]}", flush=True)
        ways = {
            "ncm embed": ["--device", "cpu"],
            "--cluster local": ["--device", "cpu", "--cluster", "local", "--cpus", str(cores())],
        }
        best: dict[str, tuple[float, float]] = dict.fromkeys(ways, (0.0, float("inf")))
        digests, starts = set(), []
        for at in range(asked.rounds):
            for way, options in ways.items():
                report, seconds, said = timed(source, folder / f"{at}{len(way)}.h5", *model, *options)
                rate, least = best[way]
                best[way] = max(rate, report["images_per_second"]), min(least, seconds)
                digests.add(report["content_sha256"])
                starts += [float(text) for text in re.findall(r"started in ([\d.]+) s", said)]
        for way, (rate, seconds) in best.items():
            encoding = len(paths) / rate
            rest = seconds - encoding
            print(
                f"{way:<16} {rate:8.1f} images/s  {encoding:7.2f} s encoding  {rest:6.2f} s before and after"
            )
        plain, cluster = (rate for rate, _ in best.values())
        print(f"time after start-up, --cluster local / ncm embed: {plain / cluster:.3f}")
        print(f"Ray starts in {min(starts):.1f} s; same content_sha256: {len(digests) == 1}")


class FreeEncoder:
    """Gives rows at once, or so many a second; the first number of a batch is how long it waited for it."""

    def __init__(self, job: Any, *_: Any) -> None:
        self._dim, self._rate, self._key, self._description = job
        self._lock, self._ended = threading.Lock(), 0.0

    def load(self) -> Loaded:
        """As a real one that fits."""
        return Loaded(self._key, self._description, [])

    def encode(self, images: Sequence[ImageFile]) -> Encoded:
        """Rows that aren't made of the images."""
        read = [
            ReadImage(image._replace(size=20_000, sha256=f"{hash(image.id) & (1 << 64) - 1:064x}"), True)
            for image in images
        ]
        features = np.random.default_rng(0).random((len(images), self._dim), np.float32)
        with self._lock:
            began = time.monotonic()
            if self._rate:
                time.sleep(len(images) / self._rate)
            features[0, 0] = began - self._ended if self._ended else 0.0
            self._ended = time.monotonic()
        return Encoded(read, features, [])


def held() -> float:
    """Bytes of this process's own memory; what it shares with Ray's store of objects doesn't count."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024.0 if found else float("nan")


class Stages(Reporter):
    """Wall and processor seconds of the stages, and the most memory at the end of a batch or block."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        self.log_bytes, self.most = 0, 0.0
        self.log = Path()

    @contextlib.contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        """Time a stage."""
        task = Task()
        wall, processor = time.perf_counter(), time.process_time()
        first: list[float] = []

        def advance(n: int = 1) -> None:
            self.most = max(self.most, held())
            if not first:
                first.extend((time.perf_counter(), time.process_time()))

        task.advance = advance  # type: ignore[method-assign]
        yield task
        if label == "embedding":  # until the first rows an encoder is loaded
            wall, processor = first
            self.log_bytes = self.log.stat().st_size
        self.seconds[label] = time.perf_counter() - wall, time.process_time() - processor


def driven(rows: int, dim: int, actors: int, rate: float) -> dict[str, float]:
    """The figures of one run of the driver."""
    import ray

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        output = Path(name) / "features.h5"
        description = {"kind": "free", "model": "free", "dim": dim}
        ray.init(
            "local", num_cpus=actors, include_dashboard=False, logging_level="ERROR", log_to_driver=False
        )
        stack.callback(ray.shutdown)
        options = EmbedOptions(source=Path(name), output=output, model="pixels:1", batch_size=str(BATCH))
        cluster = nodes.Cluster(ray, "local", "cpu", 1)
        cluster.check()
        before = held()
        ids = [f"train/n{row % 1000:08d}/picture_{row:09d}" for row in range(rows)]
        files = [
            ImageFile(id, f"/data/pictures/{id}.jpg", 20_000, 10**18 + row) for row, id in enumerate(ids)
        ]
        text = {"label": [f"n{row % 1000:08d}" for row in range(rows)], "split": ["train"] * rows}
        manifest = Manifest(Path(name), ids, files, text, (), "label", "split")
        listed, said = held(), Stages()
        said.log = log_path(output)
        run = embedding._ImageRun(options, manifest, None, cluster, False, said, stack)
        reference = nodes.Reference(description, dim, "cpu")
        embedding.reference_of = lambda *_: reference  # type: ignore[assignment]
        nodes.NodeEncoder = FreeEncoder  # type: ignore[assignment, misc]
        key, put = run.key, ray.put
        ray.put = lambda job: put((dim, rate, key, description))
        run.run()
        ray.put = put
        with FeatureStore(output) as store:
            waits = store.read(np.arange(0, rows, BATCH))[:, 0]
            stored = output.stat().st_size
        loop, write = said.seconds["embedding"], said.seconds["writing"]
        took = rows - BATCH
        return {
            "rows/s taken in": took / loop[0],
            "driver µs/row": loop[1] / took * 1e6,
            "rows/s written": rows / write[0],
            "actors wait": float(waits.sum() / (actors * loop[0])),
            "ms/batch": float(waits.sum() / max(1, (waits > 0).sum()) * 1e3),
            "journal B/row": said.log_bytes / rows,
            "store B/row": stored / rows,
            "manifest B/row": (listed - before) / rows,
            "driver B/row": (said.most - before) / rows,
        }


def driver(asked: argparse.Namespace) -> None:
    """A table of runs, each in a process of its own so that its memory is its own."""
    print(f"{cores()} cores, load {os.getloadavg()[0]:.1f}; batches of {BATCH}")
    runs = itertools.product(asked.rows, asked.dims, asked.actors, asked.rates)
    for at, run in enumerate(runs):
        command = [sys.executable, __file__, "--run", json.dumps(run)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        if not at:
            in_columns("rows", "dim", "actors", "rows/s each", *figures)
        in_columns(*run[:3], run[3] or "at once", *(f"{value:,.3g}" for value in figures.values()))


def in_columns(*values: object) -> None:
    """Print a line of the table."""
    print("".join(f"{value:>16}" for value in values), flush=True)


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return [int(float(part)) for part in text.split(",")]


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("one", "driver"))
    parser.add_argument("--smoke", action="store_true", help="small, to see that it works")
    parser.add_argument("--images", type=Path, help="folder of images (the sample of PACS)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=numbers, default=[100_000, 1_000_000])
    parser.add_argument("--dims", type=numbers, default=[512, 1024])
    parser.add_argument("--actors", type=numbers, default=[1, 4])
    parser.add_argument(
        "--rates", type=numbers, default=[0, 1000, 4000], help="rows a second of an actor; 0: at once"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        print(json.dumps(driven(*json.loads(asked.run))))
        return
    if asked.smoke:
        asked.rounds, asked.rows, asked.dims, asked.actors, asked.rates = 1, [20_000], [512], [2], [0, 4000]
    if asked.part in (None, "one"):
        one(asked)
    if asked.part in (None, "driver"):
        driver(asked)


if __name__ == "__main__":
    main()
