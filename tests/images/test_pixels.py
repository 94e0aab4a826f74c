"""``pixels:SIZE`` and what decides a request's key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import UsageError
from ncm_cli.images.encoder import load_encoder, request_key
from ncm_cli.images.options import DEFAULT_MODEL, EmbedOptions
from ncm_cli.images.request import EncoderRequest, unit_rows
from ncm_cli.options import check
from ncm_cli.progress import SILENT
from ncm_cli.store.digests import fingerprint
from tests.world import HEAVY, run_light

from .conftest import picture


def test_pixels_are_block_means_in_row_column_channel_order() -> None:
    values = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    encoder = load_encoder(EncoderRequest(model="pixels:4"), device="auto", reporter=SILENT)
    features = encoder.encode([encoder.preprocess(Image.fromarray(values), "a")])
    means = values.reshape(4, 3, 4, 5, 3).mean(axis=(1, 3))
    assert features.dtype == np.float32
    assert features.shape == (1, 48) == (1, encoder.dim)
    np.testing.assert_allclose(
        features[0] * 255, means.ravel(), atol=1.01
    )  # two passes, each rounded to 8 bits


def test_a_picture_of_that_size_is_itself() -> None:
    values = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    encoder = load_encoder(EncoderRequest(model="pixels:8"), device="cpu", reporter=SILENT)
    features = encoder.encode([encoder.preprocess(Image.fromarray(values), "a")])
    np.testing.assert_array_equal(features[0], values.ravel().astype(np.float32) / np.float32(255))


def test_pixels_and_keys_import_no_torch() -> None:
    program = (
        "from ncm_cli.images.encoder import EncoderRequest, load_encoder, request_key\n"
        "from ncm_cli.progress import SILENT\n"
        "load_encoder(EncoderRequest(model='pixels:8'), device='auto', reporter=SILENT)\n"
        "request_key(EncoderRequest())\n"
        "request_key(EncoderRequest(model='timm:resnet18', pretrained='default'))\n"
    )
    run_light(program, heavy=HEAVY | {"scipy"})


@pytest.mark.parametrize(
    "model", ["pixels:", "pixels:0", "pixels:-3", "pixels:8.5", "pixels:x", "pixels:513"]
)
def test_a_bad_size_is_a_usage_error(model: str) -> None:
    with pytest.raises(UsageError, match="no valid size"):
        load_encoder(EncoderRequest(model=model), device="cpu", reporter=SILENT)


def test_every_part_of_a_request_that_moves_a_feature_is_in_its_key() -> None:
    base = EncoderRequest(model="ViT-B-32", pretrained="openai")
    others = [
        replace(base, model="ViT-B-16"),
        replace(base, pretrained="laion2b_e16"),
        replace(base, precision="bf16"),
        replace(base, normalize=True),
        replace(base, random_init=True),
        replace(base, augment="flip"),
        replace(base, augment="flip", seed=1),
        replace(base, random_init=True, seed=1),
    ]
    keys = [json.dumps(request_key(request), sort_keys=True) for request in [base, *others]]
    assert len(set(keys)) == len(keys)
    assert request_key(replace(base, seed=9)) == request_key(base)  # nothing random is asked for
    pixels = EncoderRequest(model="pixels:8")
    assert request_key(replace(pixels, pretrained="openai")) == request_key(pixels)


def test_the_default_model_has_its_default_weights() -> None:
    assert EncoderRequest().weights == "openai"
    assert request_key(EncoderRequest()) == request_key(
        EncoderRequest(model=DEFAULT_MODEL, pretrained="openai")
    )
    assert EncoderRequest(model="ViT-B-32").weights is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"precision": "fp8"}, "--precision doesn't take 'fp8'"), ({"model": " "}, "--model is empty")],
)
def test_unknown_precisions_and_empty_models_are_usage_errors(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(EmbedOptions(source=Path("i"), output=Path("f.h5"), **asked))


def test_normalisation_is_part_of_the_fingerprint() -> None:
    """openai/CLIP#85."""
    raw, unit = (
        load_encoder(EncoderRequest(model="pixels:4", normalize=flag), device="cpu", reporter=SILENT)
        for flag in (False, True)
    )
    assert fingerprint(raw.description) != fingerprint(unit.description)
    items = [raw.preprocess(picture(20, 20, seed), "") for seed in range(3)]
    np.testing.assert_allclose(np.linalg.norm(unit.encode(items), axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(unit.encode(items), unit_rows(raw.encode(items)), atol=1e-7)


def test_norms_do_not_overflow_and_zero_rows_can_be_named() -> None:
    """numpy/numpy#8775."""
    rows = np.full((4, 512), 20, np.float16)  # the squares sum to 204,800, beyond float16
    rows[1] = 60000
    rows[2] = 0
    unit = unit_rows(rows)
    assert unit.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), [1, 1, 0, 1], atol=1e-6)
    assert np.flatnonzero(~unit.any(axis=1)).tolist() == [2]
    black = load_encoder(EncoderRequest(model="pixels:2", normalize=True), device="cpu", reporter=SILENT)
    features = black.encode([black.preprocess(Image.new("RGB", (5, 5)), "a")])
    assert not features.any()
    huge = unit_rows(np.array([[70000.0, np.inf]], np.float32))
    assert not np.isfinite(huge).all()


def test_a_gpu_request_is_refused() -> None:
    with pytest.raises(UsageError, match="CPU only"):
        load_encoder(EncoderRequest(model="pixels:4"), device="cuda", reporter=SILENT)
