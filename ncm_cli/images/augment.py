"""Seeded augmentation of decoded pictures, so that anyone gets invariant pairs without taking new pictures.

A chain is applied from left to right to the decoded RGB picture at its full resolution, before the model's
own preprocessing. The random numbers of a picture come from (seed, id) alone: the same picture gets the same
augmentation in any order, batch or process, and another id gets another one.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from ncm_cli.images.options import BACKGROUND, Chain

Random = np.random.Generator
Transform = Callable[[Image.Image, float, Random], Image.Image]


def apply(chain: Chain, image: Image.Image, *, seed: int, id: str) -> Image.Image:
    """The picture after every step of the chain."""
    digest = hashlib.sha256(f"{seed}\0{id}".encode("utf-8", "surrogatepass")).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
    for name, amount in chain:
        if name == BACKGROUND:  # done before, since it needs further files
            continue
        image = _TRANSFORMS[name](image, amount or 0.0, rng)
    return image


def _hue(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    shift = round(rng.uniform(-amount, amount) * 256)
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(level + shift) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def _enhanced_by(enhancer: Callable[[Image.Image], Any]) -> Transform:
    return lambda image, amount, rng: enhancer(image).enhance(rng.uniform(1 - amount, 1 + amount))


def _blur(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(amount * min(image.size) * rng.uniform(0.5, 1.0)))


def _jpeg(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=round(amount))
    with Image.open(stream) as opened:
        return opened.convert("RGB")


def _noise(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    pixels = np.asarray(image, dtype=np.float32)
    noisy = pixels + rng.standard_normal(pixels.shape, dtype=np.float32) * np.float32(255 * amount)
    return Image.fromarray(np.clip(np.rint(noisy), 0, 255).astype(np.uint8))


def _rotate(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    """The picture turned about its centre; the corners are filled with it, mirrored at its edges."""
    angle = rng.uniform(-amount, amount)
    width, height = image.size
    reach = math.ceil((math.hypot(width, height) - min(width, height)) / 2) + 1
    pixels = np.pad(np.asarray(image), ((reach, reach), (reach, reach), (0, 0)), mode="symmetric")
    turned = Image.fromarray(pixels).rotate(angle, Image.Resampling.BILINEAR)
    return turned.crop((reach, reach, reach + width, reach + height))


def _crop(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    """A part of the picture with its aspect ratio, of ``amount`` or more of its area."""
    scale = math.sqrt(rng.uniform(amount, 1.0))
    width, height = (max(1, round(side * scale)) for side in image.size)
    left = int(rng.integers(0, image.width - width, endpoint=True))
    top = int(rng.integers(0, image.height - height, endpoint=True))
    return image.crop((left, top, left + width, top + height))


_TRANSFORMS: dict[str, Transform] = {
    "grayscale": lambda image, amount, rng: image.convert("L").convert("RGB"),
    "flip": lambda image, amount, rng: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "vflip": lambda image, amount, rng: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    "invert": lambda image, amount, rng: ImageOps.invert(image),
    "hue": _hue,
    "brightness": _enhanced_by(ImageEnhance.Brightness),
    "contrast": _enhanced_by(ImageEnhance.Contrast),
    "saturation": _enhanced_by(ImageEnhance.Color),
    "blur": _blur,
    "jpeg": _jpeg,
    "noise": _noise,
    "rotate": _rotate,
    "crop": _crop,
}
"""The function of each of `ncm_cli.images.options.AUGMENTATIONS` but background, which `background` makes."""
