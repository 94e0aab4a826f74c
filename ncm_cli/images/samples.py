"""Conversion of samples of any mode and depth to 8-bit RGB, and the errors of files that aren't pictures."""

from __future__ import annotations

import io
import logging
import re
import warnings
from typing import Any

import numpy as np
from PIL import Image

MAX_PIXELS = 178_956_970
"""Pictures above this many pixels are refused: the size at which Pillow itself calls a file a bomb."""


_NATURAL = [
    *((0, 1), (-1, 1), (0, 255), (-128, 127), (0, 65535), (-32768, 32767)),
    *((0, 2**32 - 1), (-(2**31), 2**31 - 1)),
]
"""Ranges of samples that writers use, the narrow ones first."""


Span = tuple[float, float]
"""The samples that are black and white."""


class DecodeError(Exception):
    """A file that isn't a whole picture; ``reason`` says why in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UndeclaredRangeError(DecodeError):
    """Neither file nor user states which samples are black and white; ``span`` is the least and greatest."""

    def __init__(self, what: str, low: float, high: float) -> None:
        self.span = (low, high)
        super().__init__(
            f"{what} samples without a declared range, here {_number(low)} to {_number(high)}: say which are "
            f"black and white, as in ncm embed {range_advice(low, high)}"
        )


def range_advice(low: float, high: float) -> str:
    """The option for samples ``low`` to ``high``: the first natural range of which they use over half.

    If there is none, the option has their own range. So 15-bit samples, as those of signed types from 0,
    aren't taken for 16-bit ones. A millionth beyond a range counts as rounding.
    """
    for least, most in _NATURAL:
        width = most - least
        slack = 1e-6 * width
        if least - slack <= low and high <= most + slack and high - low > width / 2:
            return f"--intensity-range={least}:{most}"
    return f"--intensity-range={_number(low)}:{_number(high)}" if low < high else "--intensity-range=LOW:HIGH"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**64 else f"{value:.9g}"


NO_LOG = logging.NullHandler()


_NO_WARNING = ("ignore", None, Warning, re.compile("PIL"), 0)
"""The entry of `warnings.filters` that keeps Pillow's off the console."""


def open_as(kind: str, data: bytes) -> Any:
    """The file opened by the plugin of its format, pixels not decoded yet.

    Pillow's remarks on odd metadata are suppressed: its warnings, and its log messages, which would go to the
    console if the application has set up no logging.
    """
    logging.getLogger("PIL").addHandler(NO_LOG)
    if _NO_WARNING not in warnings.filters:  # adding it again would show other warnings again
        warnings.filterwarnings("ignore", module="PIL")
    return Image.open(io.BytesIO(data), formats=[kind])


def check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise DecodeError(
            f"{width} x {height} is {width * height:,} pixels, over the limit of {MAX_PIXELS:,} pixels"
        )


def to_rgb(image: Image.Image, kind: str, span: Span | None = None) -> Image.Image:
    """A new picture in mode RGB from a loaded one of any mode; ``kind`` is the file's format.

    ``span`` are the samples of a grey 16-bit PNG that become black and white.
    """
    mode = image.mode
    if mode == "I" or mode.startswith("I;16"):  # both are 16-bit grey
        values = np.asarray(image).astype(np.uint16)
        grey = levels(values, *((span if kind == "PNG" else None) or (0, 65535)))
        key = image.info.get("transparency")
        grey = np.where(values == key, np.uint8(255), grey) if isinstance(key, int) else grey
        return Image.fromarray(grey).convert("RGB")
    if mode == "LAB":
        from PIL import ImageCms

        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.applyTransform(image, ImageCms.buildTransform(lab, srgb, "LAB", "RGB"))
        assert converted is not None  # since it isn't changed in place
        return converted
    # To the other modes a transparent colour means nothing.
    has_key = "transparency" in image.info and mode not in {"CMYK", "YCbCr", "HSV"}
    if has_key or mode in {"RGBA", "LA", "PA", "RGBa", "La"}:
        layer = image.convert({"RGBa": "RGBA", "La": "LA"}.get(mode, mode)).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
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
