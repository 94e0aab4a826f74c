"""From any Pillow mode to 8-bit RGB.

==========================  ===================================================================
mode                        becomes
==========================  ===================================================================
RGB, L, 1                   Pillow's own ``convert("RGB")``: bit for bit what the models' transforms see
P, PA                       the palette's colours
alpha, a transparent colour composited over white
CMYK, YCbCr, HSV            Pillow's formulas, no ICC profile
LAB                         sRGB through Little CMS (D50)
16-bit grey                 the high byte, ``value >> 8``, which is what 16-bit colour PNGs get; grey PNGs by
                            ``--intensity-range`` where it is given
other TIFF samples          see :mod:`ncm_cli.encoders.tiff`
==========================  ===================================================================
"""

from __future__ import annotations

import numpy as np
from PIL import Image

_ALPHA = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})


def to_rgb(image: Image.Image, kind: str, span: tuple[float, float] | None = None) -> Image.Image:
    """A new picture in mode RGB from a loaded one of any mode; ``kind`` is the file's format.

    ``span`` are the samples of a grey 16-bit PNG that become black and white.
    """
    mode = image.mode
    if mode == "I" or mode.startswith("I;16"):
        return _grey(image, span if kind == "PNG" else None)
    if mode in _ALPHA or "transparency" in image.info:
        return _over_white(image)
    if mode == "LAB":
        return _lab(image)
    return image.convert("RGB")


def levels(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Samples as uint8, from 0 at ``low`` to 255 at ``high``; what lies beyond is cut off.

    Integers of 8 to 16 bits over their full range keep their high byte.
    """
    bits = int(high + 1).bit_length() - 1
    if values.dtype.kind == "u" and low == 0 and high == 2**bits - 1 and 8 <= bits <= 16:
        return np.minimum(values, 2**bits - 1).__rshift__(bits - 8).astype(np.uint8)
    with np.errstate(over="ignore"):  # infinity is cut off as well
        scaled = (values.astype(np.float64) - low) * (255 / (high - low))
    return np.rint(scaled).clip(0, 255).astype(np.uint8)


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


def _grey(image: Image.Image, span: tuple[float, float] | None) -> Image.Image:
    """16-bit grey as RGB; Pillow gives it as "I" in some versions."""
    values = np.asarray(image).astype(np.uint16)
    grey = levels(values, *(span or (0, 65535)))
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey = np.where(values == key, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB")
