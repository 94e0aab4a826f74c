"""open_clip: features and preprocessing are its own; devices and precisions are what was asked for."""

from __future__ import annotations

import json
import logging
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError, UsageError
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.request import EncoderRequest
from ncm_cli.images.samples import DecodeError
from ncm_cli.progress import SILENT
from ncm_cli.store.digests import differing_fields, fingerprint

from .conftest import picture, reference


def test_features_are_encode_image_on_its_own_preprocess(tiny_clip, heard, images) -> None:
    import torch

    model, transform = reference(f"local-dir:{tiny_clip.folder}")
    encoder = load_encoder(
        EncoderRequest(model=f"local-dir:{tiny_clip.folder}"), device="auto", reporter=heard
    )
    items = [encoder.preprocess(image, str(i)) for i, image in enumerate(images)]
    assert {item.dtype.name for item in items} == {"uint8"}
    wanted = torch.stack([transform(image) for image in images])
    assert torch.equal(encoder.batch(items), wanted)  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = torch.cat([model.encode_image(one[None]) for one in wanted]).numpy()
    for batch in (1, 2, 5):
        features = np.concatenate([encoder.encode(items[i : i + batch]) for i in range(0, 5, batch)])
        np.testing.assert_allclose(features, expected, atol=1e-5)
    assert features.dtype == np.float32
    assert encoder.dim == 16
    assert any("device: " in note for note in heard.notes)
    assert heard.warnings == []


@pytest.mark.parametrize("name", ["checkpoint", "safetensors", "training"])
def test_every_container_gives_the_same_features(name: str, tiny_clip) -> None:
    model, _ = reference(f"local-dir:{tiny_clip.folder}")
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(getattr(tiny_clip, name)))
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    item = encoder.preprocess(picture(32, 32), "a")
    batch = encoder.batch([item])  # type: ignore[attr-defined]
    np.testing.assert_allclose(encoder.encode([item]), model.encode_image(batch).detach().numpy(), atol=1e-5)


def test_a_model_added_to_open_clips_registry_works_by_name(
    tiny_clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", json.loads(tiny_clip.config.read_text()))
    model, transform = reference("tiny", tiny_clip.checkpoint)
    request = EncoderRequest(model="tiny", pretrained=str(tiny_clip.checkpoint))
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    item = encoder.preprocess(picture(50, 70), "a")
    wanted = transform(picture(50, 70))[None]
    np.testing.assert_array_equal(encoder.batch([item]), wanted)  # type: ignore[attr-defined]
    np.testing.assert_allclose(encoder.encode([item]), model.encode_image(wanted).detach().numpy(), atol=1e-5)


def test_a_models_own_preprocessing_is_used_and_stored(tiny_clip) -> None:
    """mlfoundations/open_clip#1068."""
    own = load_encoder(EncoderRequest(model=f"local-dir:{tiny_clip.folder}"), device="cpu", reporter=SILENT)
    default = load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.safetensors)),
        device="cpu",
        reporter=SILENT,
    )
    assert own.description["preprocess"] == {
        "resize": "squash",
        "interpolation": "bilinear",
        "crop": None,
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.4],
    }
    wide = picture(40, 120)
    assert not np.allclose(own.preprocess(wide, ""), default.preprocess(wide, ""), atol=10)
    fields = {name for name, _, _ in differing_fields(own.description, default.description)}
    assert {"preprocess.resize", "preprocess.mean", "preprocess.interpolation"} <= fields
    assert fingerprint(own.description) != fingerprint(default.description)


def test_default_preprocessing_on_a_model_with_another_is_warned_about(heard) -> None:
    """mlfoundations/open_clip#1068."""
    import open_clip

    from ncm_cli.images.clip_model import ClipSource, warn_on_preprocess

    used = vars(open_clip.transform.PreprocessCfg())
    warn_on_preprocess(ClipSource("ViT-B-16-SigLIP", checkpoint=Path("w.safetensors")), used, heard)
    assert re.search(
        "w.safetensors gets CLIP's default .* differ in: mean, std, resize_mode", heard.warnings[0]
    )
    warn_on_preprocess(ClipSource("ViT-B-32", checkpoint=Path("w.safetensors")), used, heard)
    assert len(heard.warnings) == 1


def test_low_precision_on_a_cpu_works_or_is_one_line_before_loading(tiny_clip, images) -> None:
    """AUTOMATIC1111/stable-diffusion-webui#15779."""
    weights = str(tiny_clip.checkpoint)
    full, half = (
        load_encoder(
            EncoderRequest(model=str(tiny_clip.config), pretrained=weights, precision=precision),
            device="cpu",
            reporter=SILENT,
        )
        for precision in ("fp32", "bf16")
    )
    items = [full.preprocess(image, "") for image in images]
    difference = np.abs(full.encode(items) - half.encode(items)).max()
    assert 0 < difference < 0.05
    assert half.encode(items).dtype == np.float32
    assert fingerprint(full.description) != fingerprint(half.description)
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=weights, precision="fp16")
    with pytest.raises(InputError, match="fp16 needs CUDA"):
        load_encoder(request, device="cpu", reporter=SILENT)


def test_a_cuda_request_without_cuda_is_an_error(tiny_clip, monkeypatch: pytest.MonkeyPatch, heard) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    for device in ("cuda", "cuda:3"):
        with pytest.raises(InputError, match=f"--device {device} asks for a CUDA device that isn't there"):
            load_encoder(request, device=device, reporter=SILENT)
    with pytest.raises(UsageError, match="no device named 'gpu'"):
        load_encoder(request, device="gpu", reporter=SILENT)
    with pytest.raises(UsageError, match="no device named 'cuda:x'"):
        load_encoder(request, device="cuda:x", reporter=SILENT)
    assert load_encoder(request, device="auto", reporter=heard).device == "cpu"
    assert heard.notes == ["device: cpu, fp32"]


@pytest.mark.parametrize(
    "error",
    [
        lambda torch: torch.cuda.OutOfMemoryError("CUDA out of memory"),
        lambda torch: RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        lambda torch: RuntimeError(
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        ),
        lambda torch: MemoryError(),
    ],
    ids=["cuda", "cpu", "cublas", "python"],
)
def test_where_memory_is_short_batches_are_halved_and_it_is_said_once(
    error: Callable[[Any], Exception], tiny_clip, heard
) -> None:
    import torch

    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    encoder: Any = load_encoder(request, device="cpu", reporter=heard)
    items = [encoder.preprocess(picture(32, 32, i), "") for i in range(11)]
    halves = [encoder.encode(items[start : start + 2]) for start in range(0, 11, 2)]
    held, sizes, plain, heard.notes = [3], [], encoder.model.encode, []

    def fails(batch: Any) -> Any:
        if len(batch) > held[0]:
            raise error(torch)
        sizes.append(len(batch))
        return plain(batch)

    encoder.model = replace(encoder.model, encode=fails)
    # 11, 5, 2: the features are those of batches of 2, to the last bit.
    np.testing.assert_array_equal(encoder.encode(items), np.concatenate(halves))
    np.testing.assert_array_equal(encoder.encode(items[:4]), np.concatenate(halves[:2]))
    assert sizes == [2, 2, 2, 2, 2, 1, 2, 2]
    assert len(heard.warnings) == 1
    assert re.search(
        r"not enough memory on cpu for 11 pictures .*going on with 2\..*--batch-size 2 ", heard.warnings[0]
    )
    held[0] = 0
    with pytest.raises(InputError, match="not enough memory on cpu for one picture"):
        encoder.encode(items)


def test_another_error_of_the_network_is_none_of_memory(tiny_clip) -> None:
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    encoder: Any = load_encoder(request, device="cpu", reporter=SILENT)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        encoder.encode([encoder.preprocess(picture(32, 32), "")[:5]])


@pytest.mark.parametrize(("rates", "said"), [((1.7, 14.0), 1), ((10.0, 10.5), 0), ((30.0, 10.0), 0)])
def test_a_precision_that_is_slower_than_fp32_is_warned_about(
    rates: tuple[float, float], said: int, tiny_clip, heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from ncm_cli.images import network

    now, rate, runs = [0.0], dict(zip(("bf16", "fp32"), rates, strict=True)), []
    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    request = EncoderRequest(
        model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint), precision="bf16"
    )
    encoder: Any = load_encoder(request, device="cpu", reporter=heard)
    plain = encoder._run

    def run(items: Any, precision: str) -> Any:
        runs.append((len(items), precision))
        now[0] += len(items) / rate[precision]
        return plain(items, precision)

    monkeypatch.setattr(encoder, "_run", run)
    items = [encoder.preprocess(picture(32, 32, i), "") for i in range(8)]
    first, second, third = (encoder.encode(items) for _ in range(3))
    # The second batch is measured, and fp32 by a quarter of it; the features are bf16 all along.
    assert runs == [(8, "bf16"), (8, "bf16"), (2, "fp32"), (2, "fp32"), (8, "bf16")]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)
    assert len(heard.warnings) == said
    if said:
        assert "bf16 is slower than fp32 on cpu: 1.7 against 14 pictures/s" in heard.warnings[0]
        assert "--precision fp32" in heard.warnings[0]


def test_a_picture_too_narrow_to_resize_is_a_decode_error(tiny_clip) -> None:
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    assert encoder.preprocess(Image.new("RGB", (20000, 2)), "").shape == (32, 32, 3)
    with pytest.raises(DecodeError, match="500000 x 1 is too narrow"):
        encoder.preprocess(Image.new("RGB", (500_000, 1)), "")


def test_loading_leaves_logging_alone(tiny_clip) -> None:
    root = logging.getLogger()
    before = list(root.handlers), list(root.filters), root.level
    load_encoder(EncoderRequest(model=str(tiny_clip.config), random_init=True), device="cpu", reporter=SILENT)
    assert (list(root.handlers), list(root.filters), root.level) == before


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu(tiny_clip, images) -> None:
    import torch

    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    cpu, cuda = (load_encoder(request, device=device, reporter=SILENT) for device in ("cpu", "cuda"))
    assert cpu.description == cuda.description
    items = [cpu.preprocess(image, "") for image in images]
    precision = torch.get_float32_matmul_precision()
    np.testing.assert_allclose(cuda.encode(items), cpu.encode(items), atol=1e-5)
    one = np.concatenate([cuda.encode([item]) for item in items])
    np.testing.assert_allclose(one, cuda.encode(items), atol=1e-5)
    assert torch.get_float32_matmul_precision() == precision
    for low in ("bf16", "fp16"):
        half = load_encoder(
            EncoderRequest(model=request.model, pretrained=request.pretrained, precision=low),
            device="cuda",
            reporter=SILENT,
        )
        assert 0 < np.abs(half.encode(items) - cpu.encode(items)).max() < 0.05


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_check.py"
    assert runpy.run_path(str(path))["main"](["--smoke"]) == 0
    assert "the same bits" in capsys.readouterr().out
