"""Which formats are decoded, how each is recognised and opened, and what shows that a file is cut or damaged.

Formats that other programs must help to draw (EPS, WMF), that have no signature (TGA, PCX) or that hold no
picture are left out.

From any Pillow mode to 8-bit RGB.

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
other TIFF samples          see :mod:`ncm_cli.images.decode`
==========================  ===================================================================
"""

from __future__ import annotations

import importlib
import io
import logging
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageFile

MAX_PIXELS = 178_956_970
"""Pictures above this many pixels are refused: the size at which Pillow itself calls a file a bomb."""

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\1\0", "ICO"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
)

_PLUGINS = {
    "JPEG": "JpegImagePlugin:JpegImageFile",
    "PNG": "PngImagePlugin:PngImageFile",
    "GIF": "GifImagePlugin:GifImageFile",
    "BMP": "BmpImagePlugin:BmpImageFile",
    "TIFF": "TiffImagePlugin:TiffImageFile",
    "ICO": "IcoImagePlugin:IcoImageFile",
    "JPEG2000": "Jpeg2KImagePlugin:Jpeg2KImageFile",
    "WEBP": "WebPImagePlugin:WebPImageFile",
    "AVIF": "AvifImagePlugin:AvifImageFile",
    "PPM": "PpmImagePlugin:PpmImageFile",
}

_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"%PDF", "a PDF document"),
    (b"PK\3\4", "a zip archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"version https://git-lfs", "a Git LFS pointer: the picture itself was not fetched"),
    (b"<svg", "an SVG drawing"),
    (b"<!DOCTYPE html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<?xml", "an XML file"),
    (b"%!PS", "a PostScript file"),
)


def sniff(data: bytes) -> str | None:
    """The format that a file's first bytes show, or None."""
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp" and data[8:12] in {b"avif", b"avis"}:
        return "AVIF"
    if data[:1] == b"P" and data[1:2] in b"123456" and data[2:3].isspace():
        return "PPM"
    return None


def describe_foreign(data: bytes) -> str:
    """One line on what a file is that is no picture we decode."""
    if not data:
        return "the file is empty (0 bytes)"
    if not data.strip(b"\0"):
        return f"not an image: {len(data)} zero bytes"
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for signature, what in _FOREIGN:
        if head.startswith(signature.lower()):
            return f"not an image: {what}"
    if data[128:132] == b"DICM":
        return "not an image format that is read here: DICOM; convert it to TIFF or PNG"
    if data[4:8] == b"ftyp":
        brand = data[8:12].decode("latin-1")
        return f"not an image format that is read here: {brand!r} (HEIC or video); convert it to JPEG or PNG"
    start = data[:16].decode("ascii", "replace").encode("unicode_escape", "replace").decode("ascii")
    return f"not an image: the content starts with '{start}'"


def damage(kind: str, data: bytes) -> str | None:
    """What a look at a file's structure finds wrong that its decoder may pass over, or None."""
    check = _CHECKS.get(kind)
    try:
        return check(data) if check else None
    except struct.error:
        return f"truncated {kind} file: its structure ends early"


class DecodeError(Exception):
    """A file that isn't a whole picture; ``reason`` says why in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def check_size(width: int, height: int) -> None:
    """Refuse a picture of more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise DecodeError(
            f"{width} x {height} is {width * height:,} pixels, over the limit of {MAX_PIXELS:,} pixels"
        )


_SWITCH = threading.Lock()
_inside: list[bool] = []
"""One entry for each picture that is being decoded: the switch as it was before the first of them."""


@contextmanager
def whole_pictures() -> Iterator[None]:
    """Pillow's ``LOAD_TRUNCATED_IMAGES`` off while any picture is decoded, and then as it was.

    The switch is a global of Pillow's, and any library may set it, so that missing rows come out grey.
    """
    with _SWITCH:
        _inside.append(_inside[0] if _inside else ImageFile.LOAD_TRUNCATED_IMAGES)
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        with _SWITCH:
            before = _inside.pop()
            if not _inside:
                ImageFile.LOAD_TRUNCATED_IMAGES = before


def open_as(kind: str, data: bytes) -> ImageFile.ImageFile:
    """The file opened by the plugin of its format; pixels are not decoded yet (but for ICO)."""
    plugin = _plugin(kind)
    with _quietly(kind, data):
        opened: ImageFile.ImageFile = plugin(io.BytesIO(data))
    return opened


_WARNINGS_LOCK = threading.Lock()


@contextmanager
def _quietly(kind: str, data: bytes) -> Iterator[None]:
    """Silence Pillow's warnings on odd metadata, for the few formats that give them while they are opened.

    ``catch_warnings`` swaps process-wide filters, so files of these formats are opened one at a time (their
    pixels are decoded afterwards); JPEG, WebP and plain PNG never come here.
    """
    if kind not in {"TIFF", "ICO"} and not (kind == "PNG" and b"acTL" in data[:4096]):
        yield
        return
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def _plugin(kind: str) -> type:
    """The Pillow plugin of a format, without what it does beside decoding."""
    module, _, name = _PLUGINS[kind].partition(":")
    base = getattr(importlib.import_module(f"PIL.{module}"), name)
    # Pillow logs to the console where an application has set up no logging.
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    return type(name, (base,), _OVERRIDES.get(kind, {}))


_OVERRIDES: dict[str, dict[str, Any]] = {
    # Only the resolution is read from it, and a broken EXIF block would warn.
    "JPEG": {"getexif": lambda _: Image.Exif()},
    # The orientation is applied with every other format's; Pillow's own reads all EXIF blocks again.
    "TIFF": {"load_end": lambda _: None},
}


def _check_png(data: bytes) -> str | None:
    """Chunks in order and whole, checksums right, IEND there (PNG specification, sections 5.3 to 5.6)."""
    position, seen_data = 8, False
    while position + 8 <= len(data):
        (length,) = struct.unpack_from(">L", data, position)
        name = data[position + 4 : position + 8]
        end = position + 8 + length
        if end + 4 > len(data):
            break
        (stored,) = struct.unpack_from(">L", data, end)
        critical = not name[0] & 0x20
        # After the pixels only critical chunks matter; before them Pillow and libpng look at all.
        if (critical or not seen_data) and zlib.crc32(memoryview(data)[position + 4 : end]) != stored:
            return f"damaged PNG file: wrong checksum in chunk {name.decode('latin-1')!r}"
        if name == b"IEND":
            return None if seen_data else "damaged PNG file: no image data"
        seen_data = seen_data or name == b"IDAT"
        position = end + 4
    return f"truncated PNG file: it ends after {len(data)} bytes without its end chunk"


def _check_gif(data: bytes) -> str | None:
    """Blocks up to the trailer (GIF89a, section 27); a cut animation is a cut file."""
    cut = f"truncated GIF file: it ends after {len(data)} bytes without its trailer"
    position = 13 + _gif_table(data, 10)
    while position < len(data):
        block = data[position]
        if block == 0x3B:
            return None
        if block == 0x21:
            position += 2
        elif block == 0x2C:
            position += 11 + _gif_table(data, position + 9)
        else:
            return None  # bytes between blocks: the decoder's business
        while position < len(data) and data[position]:
            position += 1 + data[position]
        position += 1
    return cut


def _gif_table(data: bytes, flags_at: int) -> int:
    """Bytes of the colour table that the flags at a position announce."""
    flags = data[flags_at] if flags_at < len(data) else 0
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _check_webp(data: bytes) -> str | None:
    (declared,) = struct.unpack_from("<L", data, 4)
    if declared + 8 > len(data):
        return f"truncated WEBP file: {len(data)} of {declared + 8} bytes"
    return None


def _check_ico(data: bytes) -> str | None:
    """Every picture of an icon lies within the file and within the limits of an icon."""
    (count,) = struct.unpack_from("<H", data, 4)
    if not count:
        return "damaged ICO file: no picture in it"
    for entry in range(count):
        size, offset = struct.unpack_from("<LL", data, 6 + 16 * entry + 8)
        if offset + size > len(data) or size < 40:
            return f"truncated ICO file: picture {entry + 1} of {count} is not all there"
        picture = data[offset : offset + size]
        if sniff(picture) == "PNG":
            problem = _check_png(picture)
            if problem:
                return f"damaged ICO file: {problem}"
            width, height = struct.unpack_from(">LL", picture, 16)
        else:
            width, height = struct.unpack_from("<LL", picture, 4)
            height //= 2
        if width > 4096 or height > 4096:
            return f"damaged ICO file: a picture of {width} x {height}, over the limit of 4096 x 4096"
    return None


_CHECKS: dict[str, Callable[[bytes], str | None]] = {
    "PNG": _check_png,
    "GIF": _check_gif,
    "WEBP": _check_webp,
    "ICO": _check_ico,
}


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
