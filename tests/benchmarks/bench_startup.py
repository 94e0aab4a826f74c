"""Times what a short run waits for: from the first keystroke to the first line, and to the end.

    python tests/benchmarks/bench_startup.py [--runs 5] [--smoke]

The model is the default one with random weights in a local file. Each run is a process of its own; the
commands take turns, and the least of each is printed. The yardstick does nothing but import open_clip and
create the model, as `open_clip.create_model` does, and ends at once, without what Python does at its end.
Runs of `ncm embed` are of 32 pictures: the first with an empty cache of digests, the others as later runs
are. `--smoke` takes a small model, once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

MODEL = "ViT-B-32-quickgelu"
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 100, "width": 16, "heads": 2, "layers": 1},
}
CREATE = """
import logging, os, sys
logging.disable(logging.WARNING)
import open_clip
model = open_clip.create_model(sys.argv[1], load_weights=False)
if len(sys.argv) > 2:
    from safetensors.torch import save_file
    save_file(model.state_dict(), sys.argv[2])
os._exit(0)
"""
IMAGES = 32


def timed(command: list[str], cache: Path) -> tuple[float, float, float]:
    """Seconds until a process' first line on stderr, until it has ended, and of the processors' time."""
    started = time.perf_counter()
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
    with run:
        assert run.stderr is not None
        said = run.stderr.readline()
        first = time.perf_counter() - started
        said += run.stderr.read()
        _, status, usage = os.wait4(run.pid, 0)
        seconds = time.perf_counter() - started
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        sys.exit(f"{' '.join(command)}: exit code {run.returncode}\n{said.decode()}")
    return first, seconds, usage.ru_utime + usage.ru_stime


def pictures(folder: Path) -> Path:
    """A manifest of small photographs, as smooth as those are, of two labels."""
    rng = np.random.default_rng(0)
    lines = ["id,path,label,split"]
    for i in range(IMAGES):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((320, 240), Image.Resampling.BICUBIC).save(folder / f"{i}.jpg")
        lines.append(f"{i},{i}.jpg,{'ab'[i % 2]},{('train', 'val')[i // 2 % 2]}")
    manifest = folder / "manifest.csv"
    manifest.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return manifest


def main() -> None:
    """Run, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a small model, one run")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest, weights, store = pictures(folder), folder / "weights.safetensors", folder / "features.h5"
        registered, model = MODEL, MODEL
        if asked.smoke:
            (folder / "open_clip_config.json").write_text(
                json.dumps({"model_cfg": TINY, "preprocess_cfg": {}}), encoding="utf-8"
            )
            (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
            registered, model = f"local-dir:{folder}", str(folder / "tiny.json")
        subprocess.run([sys.executable, "-c", CREATE, registered, str(weights)], check=True)
        ncm = [sys.executable, "-m", "ncm_cli"]
        own = ["--model", model, "--pretrained", str(weights)]
        embed = [*ncm, "embed", str(manifest), "-o", str(store), "--fresh", *own]
        first = timed(embed, folder / "cache")
        probe = [str(folder / "probe.safetensors")]
        subprocess.run([*ncm, "fit", "--features", str(store), "-o", *probe, "--quiet"], check=True)
        commands = {
            "import open_clip, create the model": [sys.executable, "-c", CREATE, registered],
            f"ncm embed, {IMAGES} images": embed,
            "ncm predict, 1 image": [*ncm, "predict", *probe, str(folder / "0.jpg")],
            "ncm embed, nothing to do": [argument for argument in embed if argument != "--fresh"],
        }
        runs: dict[str, list[tuple[float, float, float]]] = {what: [] for what in commands}
        for _ in range(1 if asked.smoke else asked.runs):
            for what, command in commands.items():
                runs[what].append(timed(command, folder / "cache"))
    runs[f"ncm embed, {IMAGES} images, first time"] = [first]
    yardstick = min(end for _, end, _ in runs["import open_clip, create the model"])
    print(f"{'':36}  first line      all   ratio  processor")
    for what, times in runs.items():
        line, end, processor = (min(figures) for figures in zip(*times, strict=True))
        said = f"{line:8.2f} s" if what.startswith("ncm") else " " * 10
        print(f"{what:36}  {said}  {end:5.1f} s  {end / yardstick:6.2f}  {processor:7.1f} s")


if __name__ == "__main__":
    main()
