"""Prints what a re-run of ``ncm embed`` costs, and whether its memory grows with the number of images.

    python tests/benchmarks/bench_embed.py            PACS and EfficientNet-Lite0
    python tests/benchmarks/bench_embed.py --smoke    generated pictures and pixels, in seconds

Every run is a process of its own, start and imports included. The first run embeds all images, the second
finds nothing to do. Then the same images are listed ten times under new ids, and the peaks are compared.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 10


def run(*arguments: object) -> tuple[float, float]:
    """(wall seconds, peak resident MiB) of one ``ncm`` process."""
    command = [sys.executable, "-m", "ncm_cli", *map(str, arguments), "--quiet"]
    started = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    # Linux counts in KiB, macOS in bytes.
    return seconds, usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def generated(folder: Path, count: int) -> list[Path]:
    """Random pictures."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{i}.png" for i in range(count)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return paths


def pacs() -> list[Path]:
    """The sample of PACS."""
    folder = Path(os.environ.get("NCM_TEST_DATA", ROOT.parent / "shared" / "data")) / "pacs100"
    if not folder.is_dir():
        sys.exit(f"no test data at {folder}: set NCM_TEST_DATA, or use --smoke")
    return sorted(path for path in folder.rglob("*") if path.is_file())


def checkpoint(folder: Path) -> Path:
    """EfficientNet-Lite0's ImageNet weights under timm's names."""
    found = importlib.util.spec_from_file_location("fixtures_effnet", ROOT / "tests" / "fixtures_effnet.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    made: Path = module.save_checkpoint(folder / "tf_efficientnet_lite0.safetensors")
    return made


def manifest(folder: Path, paths: list[Path], repeats: int) -> Path:
    """A manifest that lists the paths ``repeats`` times, each time under new ids."""
    written = folder / f"manifest-{repeats}.csv"
    with written.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "path", "label", "domain"])
        for copy in range(repeats):
            for i, path in enumerate(paths):
                writer.writerow([f"{copy}-{i:05d}", path, path.parent.name, path.parent.parent.name])
    return written


def main() -> None:
    """Run, and print one line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="small generated pictures and the pixels encoder"
    )
    parser.add_argument(
        "--memory-model",
        default="",
        help="compare memory with this model and random weights, if time is short",
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = generated(folder, 200) if asked.smoke else pacs()
        model = ["--model", "pixels:8"]
        if not asked.smoke:
            model = ["--model", "timm:tf_efficientnet_lite0", "--pretrained", str(checkpoint(folder))]
        once = manifest(folder, paths, 1)
        small = None
        if not asked.memory_model:
            small = compare_times(once, folder / "features.h5", model, len(paths))
        else:
            model = ["--model", asked.memory_model, "--random-init"]
        if small is None:
            _, small = run("embed", once, "-o", folder / "few.h5", *model)
        _, large = run("embed", manifest(folder, paths, REPEATS), "-o", folder / "many.h5", *model)
        growth = 100 * (large / small - 1)
        print(
            f"{model[1]}, peak memory: {small:,.0f} MiB for {len(paths):,} images, {large:,.0f} MiB for "
            f"{REPEATS * len(paths):,}: {growth:+.1f} %"
        )


def compare_times(source: Path, output: Path, model: list[str], count: int) -> float:
    """Print the first run beside the unchanged one; returns the first one's peak memory in MiB."""
    first, peak = run("embed", source, "-o", output, *model)
    again = min(run("embed", source, "-o", output, *model)[0] for _ in range(3))
    print(f"{model[1]}, {count:,} images: first run {first:.2f} s, {count / first:,.0f} images/s")
    print(f"unchanged re-run {again:.2f} s: {first / again:.0f} times faster", flush=True)
    return peak


if __name__ == "__main__":
    main()
