"""Seeded augmentation of decoded pictures, so that anyone gets invariant pairs without taking new pictures.

A chain is written ``NAME[:AMOUNT]`` joined by ``+``, such as ``grayscale`` or ``hue:0.3+blur``, and applied
from left to right to the decoded RGB picture at its full resolution, before the model's own preprocessing.
The random numbers of a picture come from (seed, id) alone: the same picture gets the same augmentation in any
order, batch or process, and another id gets another one.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from ncm_cli.errors import UsageError, unknown

Random = np.random.Generator
Transform = Callable[[Image.Image, float, Random], Image.Image]


@dataclass(frozen=True)
class Kind:
    """One augmentation: what it does, and the meaning, default and range of its amount (None: takes none)."""

    apply: Transform
    summary: str
    default: float | None = None
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Step:
    """One augmentation of a chain with its amount."""

    name: str
    amount: float | None


def parse(spec: str | None) -> tuple[Step, ...]:
    """The steps of a chain such as ``hue:0.3+blur``; empty for None. Raises UsageError on a malformed one."""
    if spec is None:
        return ()
    return tuple(_parse_step(part.strip(), spec) for part in spec.split("+"))


def canonical(chain: tuple[Step, ...]) -> str:
    """A chain in one spelling, with every amount said: two spellings of one augmentation agree."""
    return "+".join(step.name if step.amount is None else f"{step.name}:{step.amount!r}" for step in chain)


def apply(chain: tuple[Step, ...], image: Image.Image, *, seed: int, id: str) -> Image.Image:
    """The picture after every step of the chain; the same object for an empty chain."""
    if not chain:
        return image
    rng = _generator(seed, id)
    for step in chain:
        image = KINDS[step.name].apply(image, 0.0 if step.amount is None else step.amount, rng)
    return image


def _parse_step(text: str, spec: str) -> Step:
    name, colon, amount = text.partition(":")
    if name not in KINDS:
        raise unknown("augmentation", name, KINDS, where=f"--augment {spec}", error=UsageError)
    kind = KINDS[name]
    if kind.default is None:
        if colon:
            raise UsageError(
                f"augmentation {name!r} takes no amount", where=f"--augment {spec}", fix=f"--augment {name}"
            )
        return Step(name, None)
    if not colon:
        return Step(name, kind.default)
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not kind.low < value <= kind.high:  # NaN compares false
        raise UsageError(
            f"the amount of augmentation {name!r} is out of range",
            where=f"--augment {spec}",
            found=amount or "nothing",
            expected=f"a number above {kind.low:g}, up to {kind.high:g} ({kind.summary})",
        )
    return Step(name, value)


def _generator(seed: int, id: str) -> Random:
    digest = hashlib.sha256(f"{seed}\0{id}".encode("utf-8", "surrogatepass")).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


def _grayscale(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    return image.convert("L").convert("RGB")


def _flip(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _vflip(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)


def _invert(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    return ImageOps.invert(image)


def _hue(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    shift = round(rng.uniform(-amount, amount) * 256)
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(level + shift) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Transform:
    def enhance(image: Image.Image, amount: float, rng: Random) -> Image.Image:
        return enhancer(image).enhance(rng.uniform(1 - amount, 1 + amount))

    return enhance


def _blur(image: Image.Image, amount: float, rng: Random) -> Image.Image:
    sigma = amount * min(image.size) * rng.uniform(0.5, 1.0)
    return image.filter(ImageFilter.GaussianBlur(sigma))


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
    """Turned about the centre; what comes in at the corners is the picture mirrored at its edges."""
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


KINDS: dict[str, Kind] = {
    "grayscale": Kind(_grayscale, "luminance in all three channels"),
    "flip": Kind(_flip, "mirrored left to right, every picture"),
    "vflip": Kind(_vflip, "mirrored top to bottom, every picture"),
    "invert": Kind(_invert, "the negative"),
    "hue": Kind(_hue, "largest turn of the hue, as a share of the colour circle", 0.5, 0, 0.5),
    "brightness": Kind(_enhance(ImageEnhance.Brightness), "largest relative change", 0.5),
    "contrast": Kind(_enhance(ImageEnhance.Contrast), "largest relative change", 0.5),
    "saturation": Kind(_enhance(ImageEnhance.Color), "largest relative change", 0.5),
    "blur": Kind(_blur, "largest Gaussian sigma, as a share of the shorter side", 0.02, 0, 0.5),
    "jpeg": Kind(_jpeg, "quality of the recompression", 10, 0, 95),
    "noise": Kind(_noise, "standard deviation, as a share of the range 0..255", 0.1),
    "rotate": Kind(_rotate, "largest turn either way, in degrees", 30, 0, 180),
    "crop": Kind(_crop, "least share of the area that is kept", 0.5),
}
"""Every augmentation by name."""
