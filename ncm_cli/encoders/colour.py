"""From any Pillow mode to 8-bit RGB.

==========================  ===================================================================
mode                        becomes
==========================  ===================================================================
RGB, L, 1                   Pillow's own ``convert("RGB")``: bit for bit what the models' transforms see
P, PA                       the palette's colours
alpha, a transparent colour composited over white
CMYK, YCbCr, HSV            Pillow's formulas, no ICC profile
LAB                         sRGB through Little CMS (D50)
16-bit grey                 the high byte, ``value >> 8``, which is what 16-bit colour PNGs get
12-bit grey TIFF            ``value >> 4``
32-bit integer and float    scaled by the smallest range that holds all values: 0..1 (float), 0..255,
                            0..65535; otherwise from the least to the greatest value
==========================  ===================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

_ALPHA = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
_SIXTEEN = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})


def to_rgb(image: Image.Image, kind: str) -> Image.Image:
    """A new picture in mode RGB from a loaded one of any mode; ``kind`` is the file's format."""
    mode = image.mode
    if mode in _SIXTEEN or mode in {"I", "F"}:
        return _grey(image, kind)
    if mode in _ALPHA or "transparency" in image.info:
        return _over_white(image)
    if mode == "LAB":
        return _lab(image)
    return image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    premultiplied = {"RGBa": "RGBA", "La": "LA"}.get(image.mode)
    if premultiplied:
        image = image.convert(premultiplied)
    if image.mode in {"CMYK", "YCbCr", "HSV", "LAB"}:  # transparency means nothing here
        return image.convert("RGB") if image.mode != "LAB" else _lab(image)
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layer).convert("RGB")


def _lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    transform = ImageCms.buildTransform(
        ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB"
    )
    converted = ImageCms.applyTransform(image, transform)
    if converted is None:
        raise ValueError("Lab colours could not be converted")
    return converted


def _grey(image: Image.Image, kind: str) -> Image.Image:
    """Grey pictures of more than 8 bits, as RGB."""
    values = np.asarray(image)
    if image.mode in _SIXTEEN or kind in {"PNG", "PPM"}:
        # Pillow gives 16-bit grey of these two as "I" in some versions, scaled to 0..65535.
        levels = values.astype(np.int64) >> (4 if _bits(image) == 12 else 8)
    else:
        levels = _scaled(values.astype(np.float64))
    grey = np.clip(levels, 0, 255).astype(np.uint8)
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey = np.where(values == key, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB")


def _bits(image: Image.Image) -> int | None:
    tags: Any = getattr(image, "tag_v2", None)
    found = tags.get(258) if tags is not None else None
    return int(found[0]) if isinstance(found, tuple) and found else None


def _scaled(values: np.ndarray) -> np.ndarray:
    """Levels 0..255 (float64) of values whose range the file doesn't state."""
    if not np.isfinite(values).all():
        raise ValueError("it holds values that are not finite")
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 1:
        return np.rint(values * 255)
    if low >= 0 and high <= 255:
        return np.rint(values)
    if low >= 0 and high <= 65535:
        return np.floor(values / 256)
    if high == low:
        return np.full_like(values, 128.0)
    return np.rint((values - low) * (255.0 / (high - low)))
