"""Prints what ``ncm embed`` reaches beside what limits it, on the same images in one run.

    python tests/benchmarks/bench_embed.py                        PACS and EfficientNet-Lite0
    python tests/benchmarks/bench_embed.py --model ViT-B-32 --random-init --precision bf16 --repeat 20
    python tests/benchmarks/bench_embed.py --enlarge 3000x2000 --count 60     large JPEG files
    python tests/benchmarks/bench_embed.py --smoke                generated pictures, in seconds

Reading is decoding and preparing, by processes as ``ncm embed`` has them; the forward pass is on prepared
images and includes what brings them to the device. The ceiling is the smaller of the two on a GPU. Where the
same cores do both, it is 1/(1/reading + 1/forward): what is left if neither ever waits. Rates of reading
leave out the first quarter of the images, in which processes start. Figures of a busy machine are worth
little: the load is printed, and the best of ``--rounds`` counts.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, features

from ncm_cli.errors import NcmError
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.reading import IMAGES_PER_REQUEST, cores, read_ahead
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import SILENT
from ncm_cli.solvers.device import exact
from ncm_cli.store.columns import ImageFile

ROOT = Path(__file__).resolve().parents[2]
CORES = cores()
SECONDS = 4.0
"""The least time that the forward pass is measured for."""


def generated(folder: Path, count: int) -> list[Path]:
    """Random pictures."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{i}.png" for i in range(count)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return paths


def pacs() -> Path:
    """The sample of PACS."""
    folder = Path(os.environ.get("NCM_TEST_DATA", ROOT.parent / "shared" / "data")) / "pacs100"
    if not folder.is_dir():
        sys.exit(f"no test data at {folder}: set NCM_TEST_DATA, or use --images FOLDER or --smoke")
    return folder


def enlarged(paths: list[Path], folder: Path, size: str) -> list[Path]:
    """JPEG files of ``WIDTHxHEIGHT`` pixels, each of one picture with a little noise, as of a sensor."""
    width, height = map(int, size.split("x"))
    rng, made = np.random.default_rng(0), []
    for i, path in enumerate(paths):
        with Image.open(path) as opened:
            large = opened.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        noise = rng.normal(0, 4, (height, width, 1)).astype(np.float32)
        made.append(folder / f"large-{i}.jpg")
        pixels = (np.asarray(large, np.float32) + noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(made[-1], quality=90)
    return made


def checkpoint(folder: Path) -> Path:
    """EfficientNet-Lite0's ImageNet weights under timm's names."""
    found = importlib.util.spec_from_file_location("fixtures_effnet", ROOT / "tests" / "fixtures_effnet.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    made: Path = module.save_checkpoint(folder / "tf_efficientnet_lite0.safetensors")
    return made


def manifest(folder: Path, paths: list[Path]) -> Path:
    """A manifest that lists the paths."""
    written = folder / "manifest.csv"
    with written.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "path"])
        writer.writerows(enumerate(paths))
    return written


def reading_rate(paths: list[Path], preprocess: Any, workers: int, processes: bool = True) -> float:
    """Images decoded and prepared each second, after the first quarter of them."""
    files = [ImageFile(str(path), str(path)) for path in paths]
    images = read_ahead(
        files,
        preprocess,
        workers=workers,
        window=2 * workers * IMAGES_PER_REQUEST,
        processes=processes and workers > 0,
    )
    with contextlib.closing(images):  # type: ignore[type-var]
        skipped = len(files) // 4
        for _ in range(skipped):
            next(images)
        started = time.perf_counter()
        read = sum(image.item is not None for image in images)
    return read / (time.perf_counter() - started)


def forward_rate(encoder: Any, items: list[np.ndarray], seconds: float) -> float:
    """Prepared images encoded each second in the best of five stretches.

    The next batch is begun before the last is fetched, as `ncm embed` does on a GPU.
    """
    encoder.encode(items)
    encoder.encode(items)
    best = 0.0
    for _ in range(5):
        count, started, before = 0, time.perf_counter(), encoder.start(items)
        while time.perf_counter() - started < seconds / 5:
            following = encoder.start(items)
            before()
            before, count = following, count + 1
        before()
        best = max(best, (count + 1) * len(items) / (time.perf_counter() - started))
    return best


class Pictures(torch.utils.data.Dataset[torch.Tensor]):
    """Pictures under a model's own transform, as most people write it."""

    def __init__(self, paths: list[Path], transform: Any) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        made: torch.Tensor = self.transform(Image.open(self.paths[index]).convert("RGB"))
        return made


def loop_rate(paths: list[Path], encoder: Any, precision: str) -> float:
    """Images each second of a plain loop, from its first line to its last; the model is there already."""
    started, rows = time.perf_counter(), []
    data = Pictures(paths, encoder.model.transform)
    loader = torch.utils.data.DataLoader(data, batch_size=encoder.batch_size, num_workers=CORES)
    with torch.inference_mode(), exact(encoder.device, precision):
        for batch in loader:
            rows.append(encoder.model.encode(batch.to(encoder.device)).float().cpu().numpy())
    assert len(np.concatenate(rows)) == len(paths)
    return len(paths) / (time.perf_counter() - started)


def embed(source: Path, output: Path, *options: str) -> tuple[dict[str, Any], float, float]:
    """The report, wall seconds and peak MiB of one ``ncm embed``, start and imports included."""
    command = [sys.executable, "-m", "ncm_cli", "embed", str(source), "-o", str(output), *options]
    started = time.perf_counter()
    with subprocess.Popen([*command, "--quiet", "--json"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        report = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    # Linux counts in KiB, macOS in bytes.
    return report, seconds, usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def machine(device: str) -> str:
    """What the figures are of."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        name = models[0].partition(": ")[2] if models else name
    gpu = f", {torch.cuda.get_device_name(device)}" if device != "cpu" else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Pillow {Image.__version__}"
    jpeg = f"libjpeg {features.version('jpg')}, turbo: {features.check('libjpeg_turbo')}"
    return f"{name}, {CORES} cores (load {os.getloadavg()[0]:.1f}){gpu}; {versions}, {jpeg}"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="small generated pictures and a tiny model")
    parser.add_argument("--images", type=Path, help="folder of images (the sample of PACS)")
    parser.add_argument("--count", type=int, help="so many of them")
    parser.add_argument("--repeat", type=int, default=1, help="each listed so many times")
    parser.add_argument("--enlarge", metavar="WIDTHxHEIGHT", help="as JPEG files of this size")
    parser.add_argument("--model", help="as of ncm embed (EfficientNet-Lite0)")
    parser.add_argument("--pretrained")
    parser.add_argument("--random-init", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32", help="of the loop and of ncm embed")
    parser.add_argument("--decode", default="exact")
    parser.add_argument("--rounds", type=int, default=1, help="repeat all, and keep the best of each")
    return parser.parse_args()


def main() -> None:
    """Run, and print the table."""
    asked = parsed()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.smoke:
            paths, asked.model, asked.random_init = generated(folder, 64), "timm:test_vit", True
        else:
            found = sorted(path for path in (asked.images or pacs()).rglob("*") if path.is_file())
            # Across the folder, so that a few are of every kind.
            paths = found[:: max(1, len(found) // asked.count)][: asked.count] if asked.count else found
        if asked.model is None:
            asked.model, asked.pretrained = "timm:tf_efficientnet_lite0", str(checkpoint(folder))
        if asked.enlarge:
            paths = enlarged(paths, folder, asked.enlarge)
        measure(asked, paths, folder)


def measure(asked: argparse.Namespace, paths: list[Path], folder: Path) -> None:
    """All figures, the best of the rounds each, as a table."""
    model = {"model": asked.model, "pretrained": asked.pretrained, "random_init": asked.random_init}

    def loaded(precision: str, decode: str) -> Any:
        request = EncoderRequest(**model, precision=precision, decode=decode)
        return load_encoder(request, device=asked.device, reporter=SILENT)

    encoders = {asked.precision: loaded(asked.precision, asked.decode)}
    for precision in {"fp32", "bf16", "fp16"} - set(encoders):
        with contextlib.suppress(NcmError):  # no fp16 on a CPU
            encoders[precision] = loaded(precision, asked.decode)
    encoder = encoders[asked.precision]
    how = {decode: loaded("fp32", decode).preprocess for decode in ("exact", "fast")}
    pictures = [Image.open(paths[at % len(paths)]).convert("RGB") for at in range(encoder.batch_size)]
    items = [encoder.preprocess(picture, "") for picture in pictures]
    listed = paths * asked.repeat
    kilobytes = sum(path.stat().st_size for path in paths) / len(paths) / 1000
    print(machine(encoder.device))
    print(
        f"{asked.model} on {encoder.device}, batches of {encoder.batch_size}; {len(listed):,} images, the "
        f"first of {pictures[0].width} x {pictures[0].height}, {kilobytes:,.0f} kB on average",
        flush=True,
    )
    counts = sorted({1 << i for i in range(CORES.bit_length()) if 1 << i <= CORES} | {CORES})
    figures: dict[str, Callable[[], float]] = {
        f"reading, {count} process{'es' * (count > 1)}": lambda count=count: reading_rate(
            paths, how["exact"], count
        )
        for count in counts
    }
    figures |= {
        f"reading, {CORES} processes, --decode fast": lambda: reading_rate(paths, how["fast"], CORES),
        "reading, 8 threads": lambda: reading_rate(paths, how["exact"], 8, processes=False),
    }
    seconds = 0.2 if asked.smoke else SECONDS
    figures |= {
        f"forward, {precision}": lambda one=one: forward_rate(one, items, seconds)
        for precision, one in sorted(encoders.items())
    }
    figures["plain loop"] = lambda: loop_rate(listed, encoder, asked.precision)
    options = ["--model", asked.model, "--device", asked.device, "--precision", asked.precision]
    options += ["--decode", asked.decode, *(["--random-init"] if asked.random_init else [])]
    options += ["--pretrained", asked.pretrained] if asked.pretrained else []
    source, output = manifest(folder, listed), folder / "features.h5"
    best, peak, again = dict.fromkeys([*figures, "ncm embed, steady", "ncm embed, all of it"], 0.0), 0.0, 0.0
    for _ in range(asked.rounds):
        for what, figure in figures.items():
            best[what] = max(best[what], figure())
        report, wall, peak = embed(source, output, *options, "--fresh")
        rates = {"steady": report["images_per_second"], "all of it": len(listed) / wall}
        best |= {f"ncm embed, {what}": max(best[f"ncm embed, {what}"], rate) for what, rate in rates.items()}
        again = embed(source, output, *options)[1]
    for line in table(best, asked, encoder.device):
        print(line)
    print(f"peak memory {peak:,.0f} MiB without the processes that read; unchanged re-run {again:.2f} s")


def table(best: dict[str, float], asked: argparse.Namespace, device: str) -> Iterator[str]:
    """The lines: images each second, and the share of the ceiling."""
    decode = ", --decode fast" * (asked.decode == "fast")
    reading = best[f"reading, {CORES} process{'es' * (CORES > 1)}{decode}"]
    forward = best[f"forward, {asked.precision}"]
    shared = device == "cpu"
    ceiling = 1 / (1 / reading + 1 / forward) if shared else min(reading, forward)
    name = "ceiling, as the same cores do both" if shared else "ceiling, the smaller of the two"
    yield f"{'':<42}{'images/s':>9}  of the ceiling"
    for what, rate in (best | {name: ceiling}).items():
        share = f"{rate / ceiling:.2f}" if what.startswith(("plain", "ncm", "ceiling")) else ""
        yield f"{what:<42}{rate:>9,.0f}  {share}"


if __name__ == "__main__":
    main()
