"""open_clip: features and preprocessing are its own; devices and precisions are what was asked for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError, UsageError
from ncm_cli.images.decode import DecodeError
from ncm_cli.images.encoder import EncoderRequest, load_encoder
from ncm_cli.progress import SILENT
from ncm_cli.store.digests import differing_fields, fingerprint

Picture = Callable[..., Image.Image]


def test_features_are_encode_image_on_its_own_preprocess(tiny_clip, heard, reference, images) -> None:
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
def test_every_container_gives_the_same_features(name: str, tiny_clip, picture: Picture, reference) -> None:
    model, _ = reference(f"local-dir:{tiny_clip.folder}")
    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(getattr(tiny_clip, name)))
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    item = encoder.preprocess(picture(32, 32), "a")
    batch = encoder.batch([item])  # type: ignore[attr-defined]
    np.testing.assert_allclose(encoder.encode([item]), model.encode_image(batch).detach().numpy(), atol=1e-5)


def test_a_model_added_to_open_clips_registry_works_by_name(
    tiny_clip, picture: Picture, monkeypatch: pytest.MonkeyPatch, reference
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


def test_c44_a_models_own_preprocessing_is_used_and_stored(tiny_clip, picture: Picture) -> None:
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


def test_c44_default_preprocessing_on_a_model_with_another_is_warned_about(heard) -> None:
    import open_clip

    from ncm_cli.images.network import ClipSource, warn_on_preprocess

    used = vars(open_clip.transform.PreprocessCfg())
    warn_on_preprocess(ClipSource("ViT-B-16-SigLIP", checkpoint=Path("w.safetensors")), used, heard)
    assert re.search(
        "w.safetensors gets CLIP's default .* differ in: mean, std, resize_mode", heard.warnings[0]
    )
    warn_on_preprocess(ClipSource("ViT-B-32", checkpoint=Path("w.safetensors")), used, heard)
    assert len(heard.warnings) == 1


def test_c49_low_precision_on_a_cpu_works_or_is_one_line_before_loading(tiny_clip, images) -> None:
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


def test_running_out_of_memory_names_the_batch_size(tiny_clip, picture: Picture) -> None:
    import torch

    request = EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint))
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    items = [encoder.preprocess(picture(32, 32), "")] * 6
    for error in (
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ):

        def fail(batch: Any, error: Exception = error) -> Any:
            raise error

        model = encoder._model  # type: ignore[attr-defined]
        encoder._model = replace(model, encode=fail)  # type: ignore[attr-defined]
        with pytest.raises(InputError, match=r"batch of 6[\s\S]*--batch-size 3"):
            encoder.encode(items)


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
