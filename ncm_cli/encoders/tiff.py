"""TIFF pictures, whose tags say what a sample means (TIFF 6.0, sections 3, 8, 18 and 19).

Unsigned samples of up to 8 bits, and 16-bit colour over its full range, are Pillow's to convert. Everything
else is scaled here by the range that the file declares: its least and greatest sample value where it states
them, else what its bits hold where samples are unsigned and have at most 16. Nothing is guessed from values.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from . import colour, formats
from .formats import DecodeError

MAX_SAMPLE_BYTES = 1 << 32
"""More bytes of samples are refused; it is more than ``MAX_PIXELS`` of four channels in float32."""

_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _CHANNELS = (
    256,
    257,
    258,
    259,
    262,
    274,
    277,
)
_CHANNELS, _MIN, _MAX, _PLANAR, _EXTRA, _FORMAT, _SMIN, _SMAX = 277, 280, 281, 284, 338, 339, 340, 341
_UNSIGNED, _UNDEFINED = 1, 4
_COLOURS = frozenset({"RGB", "RGBA", "CMYK"})
_ALPHA = {1: "a", 2: "A"}
"""ExtraSamples that are alpha, premultiplied or not, and how Pillow's modes for it end."""


class UndeclaredRangeError(DecodeError):
    """Nothing says which samples are black and white; ``span`` is the least and the greatest of them."""

    def __init__(self, what: str, low: float, high: float) -> None:
        self.span = (low, high)
        super().__init__(
            f"{what} samples without a declared range, here {low:.6g} to {high:.6g}: say which are black and "
            f"white, as in ncm embed {range_advice(low, high)}"
        )


def range_advice(low: float, high: float) -> str:
    """The option that shows ``low`` as black and ``high`` as white."""
    short = f"{low:.6g}", f"{high:.6g}"
    a, b = short if float(short[0]) < float(short[1]) else (repr(low), repr(high))
    return f"--intensity-range={a}:{b}" if low < high else "--intensity-range=LOW:HIGH"


def read(data: bytes, span: tuple[float, float] | None) -> Image.Image:
    """The first page as RGB, not turned yet; ``span`` is what counts for deep samples instead of the tags.

    Its ``info`` has its ``orientation``, a ``note``, and the range that is ``declared`` where it counts.
    """
    opened: Any = None
    page: Any = None
    try:
        opened = formats.open_as("TIFF", data)
    except (OSError, SyntaxError, ValueError, OverflowError) as error:
        page = _page(data, str(error))
    tags = opened.tag_v2 if page is None else {tag.code: tag.value for tag in page.tags}
    formats.check_size(tags[_WIDTH], tags[_LENGTH])
    others = _others(tags)
    bits, kinds = max(_many(tags.get(_BITS, 1))), set(_many(tags.get(_FORMAT, _UNSIGNED)))
    deep = bits > 8 or not kinds <= {_UNSIGNED, _UNDEFINED}
    declared = _declared(tags, kinds == {_UNSIGNED}, bits) if deep else None
    if page is None and _misread(opened, deep, data[:1] == b"M", span or declared):
        page = _page(data, "Pillow would misread its samples")
    several = len(page.parent.pages) > 1 if page is not None else opened.is_animated
    if page is not None:
        image = _shown(_samples(page), tags, kinds, bits, span or declared)
    else:
        opened.load()
        if tags.get(_ORIENTATION) in (5, 6, 7, 8):  # Pillow gives a turned picture its later size
            opened = opened.copy()
        if deep and opened.mode not in _COLOURS:
            image = _shown(_pillows(opened, kinds), tags, kinds, bits, span or declared)
        else:
            image = colour.to_rgb(opened, "TIFF")
    notes = [f"{others} channels beside its colours are left out"] if others else []
    notes += ["several pages: only the first page is used"] if several else []
    image.info = {"orientation": tags.get(_ORIENTATION), "note": "; ".join(notes), "declared": declared}
    return image


def _many(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list | np.ndarray) else (value,)


def _declared(tags: Mapping[int, Any], unsigned: bool, bits: int) -> tuple[float, float] | None:
    """The least and greatest sample value that a file states; None where that is all that its bits hold."""
    names = ((_SMIN, _MIN), (_SMAX, _MAX)) if unsigned and bits <= 16 else ((_SMIN,), (_SMAX,))
    low, high = (next((_many(tags[name]) for name in pair if name in tags), None) for pair in names)
    if unsigned:
        low, high = low or (0,), high or (2**bits - 1 if bits <= 16 else math.nan,)
    if low is None or high is None:
        return None
    found = float(min(low)), float(max(high))
    usable = all(map(math.isfinite, found)) and found[0] < found[1]
    return found if usable and not (unsigned and bits <= 16 and found == (0, 2**bits - 1)) else None


def _others(tags: Mapping[int, Any]) -> int:
    """How many channels are neither colours nor alpha; beside grey they are refused."""
    extra = _many(tags.get(_EXTRA, ()))
    if tags.get(_PHOTOMETRIC, 0) not in (0, 1):
        return extra.count(0)
    others = int(tags.get(_CHANNELS, 1)) - 1 - sum(kind in _ALPHA for kind in extra)
    if others > 0:
        raise DecodeError(f"{others + 1} channels without a colour: save the one to use, or three as RGB")
    return 0


def _loaded(opened: Any, tags: Mapping[int, Any]) -> Image.Image:
    opened.load()
    # Pillow gives a picture that is to be turned the size that it has afterwards.
    return opened.copy() if tags.get(_ORIENTATION) in (5, 6, 7, 8) else opened


def _misread(opened: Any, deep: bool, big_endian: bool, span: tuple[float, float] | None) -> bool:
    """Whether Pillow opens a file of which it then gives other samples, or fewer bits than a range needs."""
    if opened.tag_v2.get(_PLANAR, 1) == 2 and (deep or opened.mode in {"LA", "La", "PA"}):
        return True
    if opened.mode in _COLOURS:
        return deep and span is not None
    # libtiff has put the bytes of compressed samples in order; Pillow does it again.
    return big_endian and opened.mode in {"I", "F"} and opened.tag_v2.get(_COMPRESSION, 1) != 1


def _pillows(image: Image.Image, kinds: set[int]) -> np.ndarray:
    """(H, W, 1) samples of a grey picture as the file has them: Pillow's types forget the sign."""
    values = np.asarray(image)
    if image.mode == "L":
        values = values.view(np.int8)
    elif image.mode == "I" and kinds == {_UNSIGNED}:
        values = values.view(np.uint32)
    return values[..., None]


def _page(data: bytes, problem: str) -> Any:
    """The first page by tifffile, for what Pillow doesn't open or would cut to 8 bits."""
    try:
        import tifffile
    except ImportError:
        raise DecodeError(
            f"damaged TIFF file, or of a kind that needs tifffile (pip install 'ncm-cli[tiff]'): {problem}"
        ) from None
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    return tifffile.TiffFile(io.BytesIO(data)).pages[0]


def _samples(page: Any) -> np.ndarray:
    """(H, W, C) samples of tifffile's page; missing strips, which it would fill, are refused."""
    if 0 in page.databytecounts or len(page.dataoffsets) < math.prod(page.chunked):
        raise DecodeError("truncated TIFF file: some of its strips or tiles are missing")
    if page.nbytes > MAX_SAMPLE_BYTES:
        raise DecodeError(f"{page.nbytes:,} bytes of samples, over the limit of {MAX_SAMPLE_BYTES:,}")
    values = page.asarray()
    if page.axes not in {"YX", "YXS", "SYX"} or values.dtype.kind not in "biuf":
        raise DecodeError(f"TIFF samples of a kind that isn't read: {page.axes}, {values.dtype}")
    return np.moveaxis(values, 0, -1) if page.axes == "SYX" else values.reshape(*values.shape[:2], -1)


def _shown(
    values: np.ndarray, tags: Mapping[int, Any], kinds: set[int], bits: int, span: tuple[float, float] | None
) -> Image.Image:
    """(H, W, C) samples as RGB: colours and alpha scaled by ``span``, or by all that their bits hold."""
    photometric, extra = tags.get(_PHOTOMETRIC), _many(tags.get(_EXTRA, ()))
    colours = 1 if photometric in (0, 1) else 3 if photometric == 2 else 0
    if not 0 < colours <= values.shape[2]:
        raise DecodeError(
            f"TIFF samples of {bits} bits of photometric interpretation {photometric}: only grey and RGB "
            "are read so; save it as 8-bit RGB"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DecodeError("it holds values that are not finite")
    if not extra and values.shape[2] == 4:  # left out by many writers, and taken for alpha by Pillow too
        extra = (2,)
    alpha = [at for at, kind in enumerate(extra) if kind in _ALPHA][:1]
    values = values[..., [*range(colours), *(colours + at for at in alpha)]]
    if span is None and not (kinds == {_UNSIGNED} and bits <= 16):
        what = {"u": "unsigned", "i": "signed", "f": "floating-point"}[values.dtype.kind]
        raise UndeclaredRangeError(f"{bits}-bit {what}", float(values.min()), float(values.max()))
    levels = colour.levels(values, *(span or (0, 2**bits - 1)))
    if photometric == 0:
        levels[..., 0] = 255 - levels[..., 0]
    mode = {1: "L", 3: "RGB"}[colours] + "".join(_ALPHA[extra[at]] for at in alpha)
    image = Image.frombytes(mode, values.shape[1::-1], levels.tobytes())
    return colour.to_rgb(image, "TIFF")
