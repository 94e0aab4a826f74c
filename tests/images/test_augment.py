"""Augmentation: seeded by (seed, id) alone, exact where it can be, refused when malformed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import UsageError
from ncm_cli.images.augment import apply
from ncm_cli.images.encoder import load_encoder, request_key
from ncm_cli.images.options import AUGMENTATIONS as ALL
from ncm_cli.images.options import BACKGROUND, parse_augment
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import SILENT
from ncm_cli.store.digests import differing_fields, fingerprint

from .conftest import picture

AUGMENTATIONS = [name for name in ALL if name != BACKGROUND]
"""Those that need no masks."""

FIXED = {"grayscale", "flip", "vflip", "invert", "jpeg"}
"""These draw no random numbers."""


def augmented(spec: str, image: Image.Image, seed: int = 0, id: str = "a") -> np.ndarray:
    out = apply(parse_augment(spec), image, seed=seed, id=id)
    assert out.mode == "RGB"
    return np.asarray(out)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_same_seed_and_id_give_the_same_bits_and_others_do_not(name: str) -> None:
    image = picture(40, 60)
    before = np.asarray(image).copy()
    once = augmented(name, image)
    np.testing.assert_array_equal(once, augmented(name, image))
    np.testing.assert_array_equal(np.asarray(image), before)
    assert once.shape != before.shape or (once != before).any()
    others = [augmented(name, image, id=id) for id in "bcd"] + [augmented(name, image, seed=1)]
    same = [other.shape == once.shape and np.array_equal(other, once) for other in others]
    assert all(same) if name in FIXED else not any(same)


def test_flips_are_exact() -> None:
    image = picture(11, 7)
    np.testing.assert_array_equal(augmented("flip", image), np.asarray(image)[:, ::-1])
    np.testing.assert_array_equal(augmented("vflip", image), np.asarray(image)[::-1])
    np.testing.assert_array_equal(augmented("flip+flip", image), np.asarray(image))
    np.testing.assert_array_equal(augmented("invert", image), 255 - np.asarray(image))


def test_grayscale_is_luminance_in_three_channels() -> None:
    image = picture(11, 7)
    grey = augmented("grayscale", image)
    assert (grey == grey[..., :1]).all()
    np.testing.assert_array_equal(grey[..., 0], np.asarray(image.convert("L")))


def test_a_turned_hue_keeps_the_value_channel() -> None:
    image = picture(30, 30)
    turned = augmented("hue", image)
    assert np.abs(turned.max(2).astype(int) - np.asarray(image).max(2)).max() <= 1
    assert np.abs(turned.astype(int) - np.asarray(image)).mean() > 5


def test_sizes_are_kept_but_for_a_crop_which_keeps_the_shape() -> None:
    image = picture(80, 120)
    for name in AUGMENTATIONS:
        height, width, _ = augmented(name, image).shape
        if name == "crop":
            assert 80 * 120 * 0.49 < height * width < 80 * 120
            assert abs(width / height - 1.5) < 0.03
        else:
            assert (height, width) == (80, 120)


def test_noise_has_the_stated_deviation() -> None:
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    assert np.std(augmented("noise:0.05", grey).astype(float)) == pytest.approx(0.05 * 255, rel=0.02)


def test_rotation_brings_in_no_flat_corners() -> None:
    image = Image.new("RGB", (31, 50), (10, 200, 30))
    np.testing.assert_array_equal(augmented("rotate:45", image), np.asarray(image))
    tiny = augmented("rotate:180", picture(1, 40))
    assert tiny.shape == (1, 40, 3)


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (3, 2)])
def test_tiny_pictures_survive_every_augmentation(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (200, 10, 10))
    for name in AUGMENTATIONS:
        augmented(name, image)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "no augmentation named ''"),
        ("grayscal", "did you mean 'grayscale'?"),
        ("hue+", "no augmentation named ''"),
        ("flip:1", "takes no amount"),
        ("hue:", "found: nothing"),
        ("hue:0.7", "up to 0.5"),
        ("hue:nan", "out of range"),
        ("hue:-1", "out of range"),
        ("jpeg:96", "up to 95"),
        ("crop:0", "above 0"),
    ],
)
def test_malformed_chains_are_usage_errors(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_augment(spec)


def test_spellings_of_one_chain_agree_and_the_view_is_all_that_differs() -> None:
    def description(spec: str | None, seed: int = 0) -> dict:
        request = EncoderRequest(model="pixels:4", augment=spec, seed=seed)
        assert ("view" in request_key(request)) is (spec is not None)
        return load_encoder(request, device="cpu", reporter=SILENT).description

    base = description(None)
    view = description("hue + blur:2e-2")
    assert view["view"] == {"augment": "hue:0.5+blur:0.02", "seed": 0}
    assert fingerprint(view) == fingerprint(description("hue:.5+blur"))
    assert fingerprint(view) != fingerprint(description("hue:.5+blur", seed=1))
    assert differing_fields(base, view, ignore_view=True) == []
    assert differing_fields(base, view) != []
    assert fingerprint(description(None, seed=5)) == fingerprint(base)


def test_the_view_is_applied_at_full_resolution_before_preprocessing() -> None:
    image = picture(64, 48)
    plain = load_encoder(EncoderRequest(model="pixels:4"), device="cpu", reporter=SILENT)
    view = load_encoder(EncoderRequest(model="pixels:4", augment="noise:0.3"), device="cpu", reporter=SILENT)
    noisy = Image.fromarray(augmented("noise:0.3", image, id="x"))
    np.testing.assert_array_equal(view.preprocess(image, "x"), plain.preprocess(noisy, "x"))
