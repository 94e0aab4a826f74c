"""TIFF files, whose samples are scaled as their tags say (TIFF 6.0, sections 3, 8, 18 and 19).

Pillow converts unsigned samples of up to 8 bits, and 16-bit colour over its full range. Other samples are
scaled here, by the least and greatest value that the file declares; without these, unsigned samples of up to
16 bits are scaled by the range of their type.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base as Tag

from ncm_cli.images.samples import (
    MAX_PIXELS,
    NO_LOG,
    DecodeError,
    Span,
    UndeclaredRangeError,
    check_size,
    levels,
    open_as,
    to_rgb,
)

_UNSIGNED, _UNDEFINED = 1, 4
"""Values of TIFF's SampleFormat."""

_EXTRA_ALPHA = {1: "a", 2: "A"}
"""Values of ExtraSamples for alpha, premultiplied or not, each with the last letter of Pillow's mode."""

_COLOURS = frozenset({"RGB", "RGBA", "CMYK"})

_NUMBERS = {"u": "unsigned", "i": "signed", "f": "floating-point"}


def decode_tiff(data: bytes, span: Span | None) -> Image.Image:
    """The first page as RGB; deep samples are scaled by ``span`` instead of the tags, if it is given.

    The image's ``info`` has the ``orientation`` that must still be applied, a ``note``, and the ``declared``
    range.
    """
    opened: Any = None
    page: Any = None
    try:
        opened = open_as("TIFF", data)
    except (OSError, SyntaxError, ValueError, OverflowError) as error:
        unread = isinstance(error, UnidentifiedImageError)
        page = _page(data, "its header can't be read" if unread else str(error))
    tags: Mapping[int, Any] = opened.tag_v2 if page is None else {tag.code: tag.value for tag in page.tags}
    check_size(tags[Tag.ImageWidth], tags[Tag.ImageLength])
    extra_channels = _extra_channels(tags)
    bits = max(_values(tags, Tag.BitsPerSample, 1))
    kinds = set(_values(tags, Tag.SampleFormat, _UNSIGNED))
    deep = bits > 8 or not kinds <= {_UNSIGNED, _UNDEFINED}
    full = 2**bits - 1 if kinds == {_UNSIGNED} and bits <= 16 else None
    declared = _declared(tags, kinds == {_UNSIGNED}, full) if deep else None
    wanted = span or declared if deep else None
    if page is None and _needs_tifffile(opened, deep, data[:1] == b"M", wanted):
        page = _page(data, "Pillow would misread its samples")
    several = len(page.parent.pages) > 1 if page is not None else opened.is_animated
    if page is not None:
        image = _scaled_rgb(_samples(page), tags, bits, full, wanted)
    else:
        opened.info.pop("xmp", None)  # otherwise load() turns an untagged image by XMP's orientation
        opened.load()
        if deep and opened.mode not in _COLOURS:
            image = _scaled_rgb(_pillow_samples(opened, kinds), tags, bits, full, wanted)
        else:
            image = to_rgb(opened, "TIFF")
    notes = [f"{extra_channels} channels beside its colours are left out"] if extra_channels else []
    notes += ["several pages: only the first page is used"] if several else []
    image.info = {
        "orientation": None if page is None else tags.get(Tag.Orientation),
        "note": "; ".join(notes),
    }
    image.info["declared"] = declared if span is None else None
    return image


def _values(tags: Mapping[int, Any], tag: int, *default: Any) -> tuple[Any, ...]:
    value = tags.get(tag, default)
    return tuple(value) if isinstance(value, tuple | list | np.ndarray) else (value,)


def _declared(tags: Mapping[int, Any], unsigned: bool, full: int | None) -> Span | None:
    """The least and greatest sample value that a file declares; None for the full range of its bits."""
    low = (
        _values(tags, Tag.SMinSampleValue) or _values(tags, Tag.MinSampleValue) or ((0,) if unsigned else ())
    )
    high = (
        _values(tags, Tag.SMaxSampleValue) or _values(tags, Tag.MaxSampleValue) or ((full,) if full else ())
    )
    span = (float(min(low)), float(max(high))) if low and high else (0.0, 0.0)
    usable = span[0] < span[1] and math.isfinite(span[1] - span[0])
    return span if usable and span != (0, full) else None


def _extra_channels(tags: Mapping[int, Any]) -> int:
    """The number of channels that are neither colours nor alpha; `DecodeError` if a grey picture has any."""
    extra = _values(tags, Tag.ExtraSamples)
    if tags.get(Tag.PhotometricInterpretation, 0) not in (0, 1):
        return extra.count(0)
    others = int(tags.get(Tag.SamplesPerPixel, 1)) - 1 - sum(kind in _EXTRA_ALPHA for kind in extra)
    if others > 0:
        raise DecodeError(f"{others + 1} channels without a colour: save the one to use, or three as RGB")
    return 0


def _needs_tifffile(opened: Any, deep: bool, big_endian: bool, wanted: Span | None) -> bool:
    """Whether Pillow would return wrong samples, or fewer bits than scaling by ``wanted`` needs."""
    if opened.tag_v2.get(Tag.PlanarConfiguration, 1) == 2 and (deep or opened.mode in {"LA", "La", "PA"}):
        return True
    if opened.mode in _COLOURS:
        return wanted is not None
    # libtiff swaps the bytes of compressed samples, and Pillow swaps them again.
    return big_endian and opened.mode in {"I", "F"} and opened.tag_v2.get(Tag.Compression, 1) != 1


def _pillow_samples(image: Image.Image, kinds: set[int]) -> np.ndarray:
    """(H, W, 1) samples of a grey picture, with the sign of the file's type, which Pillow's modes lose."""
    values = np.asarray(image)
    if image.mode == "L":
        values = values.view(np.int8)
    elif image.mode == "I" and kinds == {_UNSIGNED}:
        values = values.view(np.uint32)
    return values[..., None]


def _page(data: bytes, problem: str) -> Any:
    """The first page by tifffile, for files that Pillow can't open, misreads or reduces to 8 bits."""
    try:
        import tifffile
    except ImportError:
        raise DecodeError(
            f"damaged TIFF file, or of a kind that needs tifffile (pip install 'ncm-cli[tiff]'): {problem}"
        ) from None
    logging.getLogger("tifffile").addHandler(NO_LOG)
    return tifffile.TiffFile(io.BytesIO(data)).pages[0]


def _samples(page: Any) -> np.ndarray:
    """(H, W, C) samples of tifffile's page; `DecodeError` for missing strips, which tifffile would fill."""
    if 0 in page.databytecounts or len(page.dataoffsets) < math.prod(page.chunked):
        raise DecodeError("truncated TIFF file: some of its strips or tiles are missing")
    if page.nbytes > 16 * MAX_PIXELS:
        raise DecodeError(f"{page.nbytes:,} bytes of samples, over the limit of {16 * MAX_PIXELS:,}")
    values = page.asarray()
    if page.axes not in {"YX", "YXS", "SYX"} or values.dtype.kind not in _NUMBERS:
        raise DecodeError(f"TIFF samples of a kind that isn't read: {page.axes}, {values.dtype}")
    return np.moveaxis(values, 0, -1) if page.axes == "SYX" else values.reshape(*values.shape[:2], -1)


def _scaled_rgb(
    values: np.ndarray, tags: Mapping[int, Any], bits: int, full: int | None, wanted: Span | None
) -> Image.Image:
    """(H, W, C) samples as RGB: scaled by the range that is ``wanted``, or else from 0 to ``full``."""
    photometric, extra = tags.get(Tag.PhotometricInterpretation), _values(tags, Tag.ExtraSamples)
    colours = 1 if photometric in (0, 1) else 3
    what = f"{bits}-bit {_NUMBERS[values.dtype.kind]}"
    if photometric not in (0, 1, 2) or values.shape[2] < colours:
        raise DecodeError(f"{what} samples, read as grey and RGB only: its photometric code is {photometric}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DecodeError("it holds values that are not finite")
    if not extra and values.shape[2] == 4:  # many writers leave the tag out; Pillow assumes alpha, too
        extra = (2,)
    alpha = [colours + at for at, kind in enumerate(extra) if kind in _EXTRA_ALPHA][:1]
    if alpha and (wanted or not full):
        raise DecodeError(f"{what} samples in a range of their own, with alpha: save it without alpha")
    values = values[..., [*range(colours), *alpha]]
    if not wanted and not full:
        raise UndeclaredRangeError(what, float(values.min()), float(values.max()))
    pixels = levels(values, *(wanted or (0, full)))
    if photometric == 0:
        pixels[..., 0] = 255 - pixels[..., 0]
    mode = ("L" if colours == 1 else "RGB") + "".join(_EXTRA_ALPHA[extra[at - colours]] for at in alpha)
    return to_rgb(Image.frombytes(mode, values.shape[1::-1], pixels.tobytes()), "TIFF")
