"""Checks `ncm embed` on a GPU, in some five minutes by reckoning, and prints what it measures.

    python tests/benchmarks/gpu_check.py [--smoke]

ViT-B/32 with random weights, generated photographs. Exits with 1 where a check fails:

* features on CUDA against fp32 on the CPU, by precision: least cosine, largest difference relative to the
  largest feature;
* two runs give the same bits, and so does one that is interrupted and goes on;
* where memory is short, a batch is halved, said, and the features are those of the smaller batch;
* images per second of the forward pass alone by precision, and of `ncm embed` by precision and workers, with
  the peak of CUDA's memory. These are measured, and fail only where they can't be had.

`--smoke` takes a small model and few pictures, also without a GPU. Without one the same steps run on the CPU
that can, small, and it exits with 0 having said so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ncm_cli.images.embed import EmbedReport, embed
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.options import EmbedOptions
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import Reporter, Task
from ncm_cli.store.features import FeatureStore

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 100, "width": 16, "heads": 2, "layers": 1},
}
LEAST_COSINE = {"fp32": 0.999999, "bf16": 0.999, "fp16": 0.9999}


@dataclass
class Heard(Reporter):
    """Keeps warnings; stops a run as Ctrl-C does after so many images, if told to."""

    warnings: list[str] = field(default_factory=list)
    stop_after: int | None = None

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Any:
        return _Counted(self, label)


class _Counted(Task):
    def __init__(self, heard: Heard, label: str) -> None:
        self.heard, self.label, self.done = heard, label, 0

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, n: int = 1) -> None:
        self.done += n
        if self.label == "embedding" and self.heard.stop_after and self.done >= self.heard.stop_after:
            raise KeyboardInterrupt


@dataclass
class Check:
    """What is checked with, and how it went."""

    folder: Path
    device: str
    model: str
    distinct: int
    rows: int
    batch: int
    failed: list[str] = field(default_factory=list)

    def say(self, what: str, figure: str, wanted: str = "", good: bool = True) -> None:
        """A line of the table."""
        verdict = "" if not wanted else "ok" if good else "FAILED"
        print(f"{what:44} {figure:>30}  {wanted:24} {verdict}", flush=True)
        self.failed += [] if good else [what]

    def request(self, precision: str) -> EncoderRequest:
        """The encoder with the same random weights each time."""
        return EncoderRequest(model=self.model, random_init=True, precision=precision)

    def pictures(self) -> None:
        """Smooth photographs with some grain."""
        rng = np.random.default_rng(0)
        for i in range(self.distinct):
            coarse = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8))
            grain = rng.normal(0, 6, (375, 500, 3))
            smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)) + grain
            Image.fromarray(smooth.clip(0, 255).astype(np.uint8)).save(self.folder / f"{i}.jpg", quality=90)

    def embed(
        self, name: str, rows: int, heard: Heard | None = None, **options: Any
    ) -> tuple[EmbedReport, np.ndarray]:
        """A run of `ncm embed` on the pictures, listed under as many ids as wanted, and its features."""
        manifest, output = self.folder / f"{rows}.csv", self.folder / f"{name}.h5"
        lines = ["id,path", *(f"{row},{row % self.distinct}.jpg" for row in range(rows))]
        manifest.write_text("\n".join(lines) + "\n", encoding="utf-8")
        asked: dict[str, Any] = {"batch_size": str(self.batch), "device": self.device} | options
        made = EmbedOptions(source=manifest, output=output, model=self.model, random_init=True, **asked)
        report = embed(made, reporter=heard or Heard())
        with FeatureStore(output) as store:
            return report, store.read()

    def items(self) -> list[np.ndarray]:
        """The distinct pictures, prepared."""
        preprocess = load_encoder(self.request("fp32"), device="cpu", reporter=Heard()).preprocess
        images = [Image.open(self.folder / f"{i}.jpg").convert("RGB") for i in range(self.distinct)]
        return [preprocess(image, "") for image in images]


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def check_equality(check: Check, items: Sequence[np.ndarray], precisions: Sequence[str]) -> None:
    """Features of the device against those of fp32 on the CPU, and the rate of the forward pass alone."""
    some = items[:128]
    cpu = load_encoder(check.request("fp32"), device="cpu", reporter=Heard())
    wanted = np.concatenate([cpu.encode(some[at : at + 32]) for at in range(0, len(some), 32)])
    batch = [items[at % len(items)] for at in range(check.batch)]
    for precision in precisions:
        encoder = load_encoder(check.request(precision), device=check.device, reporter=Heard())
        found = encoder.encode(some)
        cosine = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
        least, most = float(cosine.min()), float(np.abs(found - wanted).max() / np.abs(wanted).max())
        good = least >= LEAST_COSINE[precision] and (precision != "fp32" or most < 1e-4)
        figure = f"cosine {least:.7f}, {most:.1e}"
        check.say(f"{precision} against fp32 on the CPU", figure, f"cosine {LEAST_COSINE[precision]}", good)
        rates, runs = [], 3 if check.device == "cpu" else 8
        for _ in range(3):
            synchronize(check.device)
            began, waiting = time.perf_counter(), [encoder.start(batch) for _ in range(runs)]
            for wait in waiting:
                wait()
            rates.append(runs * len(batch) / (time.perf_counter() - began))
        check.say(f"{precision} forward alone, batches of {len(batch)}", f"{max(rates):,.0f} images/s")


def check_bits(check: Check, precision: str) -> None:
    """The same bits twice, and of a run that goes on after an interruption."""
    rows, names = check.rows // 4, [f"{precision}-{name}" for name in ("one", "two", "resumed")]
    first, second = (check.embed(name, rows, precision=precision)[1] for name in names[:2])
    same = first.tobytes() == second.tobytes()
    check.say(f"{precision} twice", "the same bits" if same else "other bits", "the same bits", same)
    try:
        check.embed(names[2], rows, Heard(stop_after=rows // 2), precision=precision)
        check.say(f"{precision} interrupted", "ran to its end", "an interruption", False)
    except KeyboardInterrupt:
        pass
    same = check.embed(names[2], rows, precision=precision)[1].tobytes() == first.tobytes()
    check.say(f"{precision} gone on with", "the same bits" if same else "other bits", "the same bits", same)


def check_memory(check: Check, items: Sequence[np.ndarray]) -> None:
    """Memory for some of a batch only: it is halved, said, and gives the smaller batch's features."""
    heard = Heard()
    encoder: Any = load_encoder(check.request("fp32"), device=check.device, reporter=heard)
    batch = [items[at % len(items)] for at in range(check.batch)]
    if check.device == "cpu":
        plain, least = encoder.model.encode, check.batch // 2

        def short(pictures: torch.Tensor) -> torch.Tensor:
            if len(pictures) > least:
                raise MemoryError
            made: torch.Tensor = plain(pictures)
            return made

        encoder.model = replace(encoder.model, encode=short)
        found = encoder.encode(batch)
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        encoder.encode(batch)
        peak, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
        check.say(f"fp32 peak memory, batches of {len(batch)}", f"{peak / 2**20:,.0f} MiB")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((held + 0.6 * (peak - held)) / total)
        try:
            found = encoder.encode(batch)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    size = encoder._most
    said = [text for text in heard.warnings if "not enough memory" in text]
    good = size < len(batch) and len(said) == 1
    check.say("memory for part of a batch", f"goes on with {size}", "a smaller batch, said", good)
    other = load_encoder(check.request("fp32"), device=check.device, reporter=Heard())
    step = min(size, len(batch))
    wanted = np.concatenate([other.encode(batch[at : at + step]) for at in range(0, len(batch), step)])
    same = wanted.tobytes() == found.tobytes()
    what = "the same bits" if same else "other bits"
    check.say(f"features, as with --batch-size {step}", what, "the same bits", same)


def measure_embed(check: Check, precisions: Sequence[str]) -> None:
    """Images per second of `ncm embed` end to end, by precision and workers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    few = sorted({1, 4, 8, cores} & set(range(1, cores + 1)))
    for precision, workers in [(precision, "auto") for precision in precisions] + [
        (precisions[-1], str(count)) for count in few
    ]:
        if check.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        report, _ = check.embed(
            "timed", check.rows, precision=precision, workers=workers, batch_size="auto", fresh=True
        )
        peak = f", {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB" if check.device != "cpu" else ""
        rate = report.images_per_second or 0.0
        check.say(
            f"ncm embed, {precision}, --workers {workers}", f"{rate:,.0f} images/s{peak}", good=rate > 0
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, and say how it went."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a small model and few pictures")
    asked = parser.parse_args(argv)
    cuda, began = torch.cuda.is_available(), time.monotonic()
    where = f"cuda:0, {torch.cuda.get_device_name(0)}" if cuda else "cpu"
    print(f"{where}; {os.cpu_count()} cores; torch {torch.__version__}; Pillow {Image.__version__}")
    if not cuda:
        print("no CUDA device here: only what a CPU can show is run, with a small model")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check = Check(folder, "cuda:0" if cuda else "cpu", "ViT-B-32-quickgelu", 512, 16384, 256)
        if asked.smoke or not cuda:
            (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
            check = replace(check, model=str(folder / "tiny.json"), distinct=16, rows=96, batch=8)
        check.pictures()
        items = check.items()
        precisions = ("fp32", "fp16", "bf16") if cuda else ("fp32", "bf16")
        check_equality(check, items, precisions)
        check_memory(check, items)
        for precision in ("fp32", "bf16"):
            check_bits(check, precision)
        measure_embed(check, precisions)
    print(f"{time.monotonic() - began:.0f} s")
    if check.failed:
        print(f"FAILED: {', '.join(check.failed)}")
    elif not cuda:
        print("all that a CPU can show is well; nothing was checked on CUDA")
    return int(bool(check.failed))


if __name__ == "__main__":
    sys.exit(main())
