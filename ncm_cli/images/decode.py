"""The one function that turns a file's bytes into an RGB picture, through Pillow's public interface.

The policy has a version that is part of every encoder fingerprint:

* the content decides the format, never the extension; formats that other programs must help to draw (EPS,
  WMF), that have no signature (TGA, PCX) or that hold no picture are left out;
* the EXIF orientation is applied; a broken EXIF block and ICC profiles are ignored, as torchvision, timm and
  open_clip do;
* every mode becomes 8-bit RGB *before* anything is resized: RGB, grey, palette, CMYK, YCbCr and HSV by
  Pillow's own ``convert("RGB")``, Lab by Little CMS (D50), alpha and transparent colours over white, 16-bit
  grey by its high byte, as Pillow reads 16-bit colour;
* deep samples are scaled by what the file declares or the user says, never by the picture's own extremes;
* the first frame of an animation is used, with a note;
* JPEG files may be decoded at a reduced size, where that is asked for (``--decode fast``);
* whatever isn't a whole picture raises `DecodeError`: a partial or grey-filled one is never returned.

TIFF tags say what a sample means (TIFF 6.0, sections 3, 8, 18 and 19). Unsigned samples of up to 8 bits, and
16-bit colour over its full range, are Pillow's to convert; everything else is scaled here by the least and
greatest sample value that the file states, else by what its bits hold where samples are unsigned and have at
most 16. The functions may be called from several threads at once.
"""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import re
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.ExifTags import Base as Tag

from ncm_cli.store.files import one_line

DECODE_POLICY = 1
"""Version of the policy above, deep TIFF samples apart. A change that can move a feature raises it."""

SAMPLE_POLICY = 2
"""Version of how deep TIFF samples are read.

It is part of a request's key, not of the fingerprint: 8-bit stores are valid whatever it is, and rows of TIFF
files that were read under another one are made again.
"""

MAX_PIXELS = 178_956_970
"""Pictures above this many pixels are refused: the size at which Pillow itself calls a file a bomb."""

MAX_BYTES = 1 << 30
"""Files above 1 GiB are refused before they are read: no picture within `MAX_PIXELS` needs that much."""

_NO_WAIT = getattr(os, "O_NONBLOCK", 0)

_SIGNATURES = {
    kind: re.compile(pattern, re.DOTALL)
    for kind, pattern in {
        "JPEG": rb"\xff\xd8\xff",
        "PNG": rb"\x89PNG\r\n\x1a\n",
        "GIF": rb"GIF8[79]a",
        "BMP": rb"BM",
        "TIFF": rb"II[*+]\x00|MM\x00[*+]",
        "JPEG2000": rb"\xff\x4f\xff\x51|\x00\x00\x00\x0cjP  \r\n\x87\n",
        "WEBP": rb"RIFF.{4}WEBP",
        "AVIF": rb".{4}ftypavi[fs]",
        "PPM": rb"P[1-6]\s",
    }.items()
}
"""The formats that are decoded, by Pillow's name, and what their files begin with."""

_FOREIGN = {
    b"%PDF": "a PDF document",
    b"\0\0\1\0": "a Windows icon; convert it to PNG",
    b"PK\3\4": "a zip archive",
    b"\x1f\x8b": "a gzip file",
    b"\x89HDF": "an HDF5 file",
    b"version https://git-lfs": "a Git LFS pointer: the picture itself was not fetched",
    b"<svg": "an SVG drawing",
    b"<!DOCTYPE html": "an HTML page",
    b"<html": "an HTML page",
    b"<?xml": "an XML file",
    b"%!PS": "a PostScript file",
}

_TURNS = dict(zip(range(2, 9), (0, 3, 1, 5, 4, 6, 2), strict=True))
"""EXIF orientation to Pillow's `Image.Transpose`."""

_NATURAL = [(0, 1), (-1, 1), (0, 255), (-128, 127), (0, 65535), (-32768, 32767)]
_NATURAL += [(0, 2**32 - 1), (-(2**31), 2**31 - 1)]
"""Ranges of samples that writers use, the narrow ones first."""

ENOUGH = 2.5
"""Times the side that is needed at which a JPEG may be decoded: features then have a cosine above .999 to the
exact ones even of pictures full of detail, at twice the side .998."""

Span = tuple[float, float]
"""The samples that are black and white."""


class DecodeError(Exception):
    """A file that isn't a whole picture; ``reason`` says why in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UndeclaredRangeError(DecodeError):
    """Nothing says which samples are black and white; ``span`` is the least and the greatest of them."""

    def __init__(self, what: str, low: float, high: float) -> None:
        self.span = (low, high)
        super().__init__(
            f"{what} samples without a declared range, here {_number(low)} to {_number(high)}: say which are "
            f"black and white, as in ncm embed {range_advice(low, high)}"
        )


def range_advice(low: float, high: float) -> str:
    """The option for samples ``low`` to ``high``: a natural range of which they use a good part, or this.

    More than half is a good part: samples of 15 bits, as those of signed types from 0, are not taken for 16.
    A millionth beyond it is a rounding.
    """
    for least, most in _NATURAL:
        width = most - least
        slack = 1e-6 * width
        if least - slack <= low and high <= most + slack and high - low > width / 2:
            return f"--intensity-range={least}:{most}"
    return f"--intensity-range={_number(low)}:{_number(high)}" if low < high else "--intensity-range=LOW:HIGH"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**64 else f"{value:.9g}"


def sniff(data: bytes) -> str | None:
    """The format that a file's first bytes show, or None."""
    return next((kind for kind, pattern in _SIGNATURES.items() if pattern.match(data)), None)


def decode(
    source: str | os.PathLike[str] | bytes, span: Span | None = None, side: int | None = None
) -> Image.Image:
    """Decode a picture to 8-bit RGB.

    Parameters
    ----------
    source
        The path of a file, or the file's bytes.
    span
        The samples that become black and white, in grey PNG and all TIFF files of more than 8 bits; None
        takes what the file declares.
    side
        The side that the picture is going to be resized to, where a JPEG may be decoded at a reduced size.

    Returns
    -------
    PIL.Image.Image
        Mode RGB, loaded, independent of the file. ``image.info`` has at most ``note``, where something was
        left out (such as the later frames of an animation), ``declared``, the least and greatest sample
        value that the file states where these count, and ``box``, which is to be resized where a picture
        of a reduced size ends within its last column or row.

    Raises
    ------
    DecodeError
        For a missing, unreadable, empty, foreign, damaged, truncated or over-limit file, and for samples
        whose meaning nobody states.
    """
    data = bytes(source) if isinstance(source, bytes | bytearray | memoryview) else read_bytes(source)
    kind = sniff(data)
    if kind is None:
        raise DecodeError(_describe_foreign(data))
    with _pillow_errors(kind), _own_rules():
        _require_whole(kind, data)
        image = _tiff(data, span) if kind == "TIFF" else _plain(kind, data, span, side)
        info = image.info
        if info["orientation"] in _TURNS:
            image = image.transpose(Image.Transpose(_TURNS[info["orientation"]]))
    image.info = {name: info[name] for name in ("note", "declared", "box") if info.get(name)}
    return image


def open_regular(path: str | bytes | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened to be read, or `DecodeError`."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    stream = open(  # noqa: SIM115
        path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAIT)
    )
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise DecodeError("not a regular file")
    return stream


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file within the size limit, or `DecodeError` with the reason."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > MAX_BYTES:
                raise DecodeError(f"file of {size:,} bytes, over the limit of {MAX_BYTES:,}")
            data: bytes | None = stream.read()
            if data is None:  # what the kernel makes up, and has nothing of now
                raise DecodeError("no regular file")
            return data
    except FileNotFoundError:
        raise DecodeError("no such file") from None
    except IsADirectoryError:
        raise DecodeError("a folder, not a file") from None
    except PermissionError:
        raise DecodeError("no permission to read the file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise  # no fault of the picture
        raise DecodeError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except MemoryError:
        raise DecodeError("not enough memory to read the file") from None


def _describe_foreign(data: bytes) -> str:
    """One line on what a file is that is no picture we decode."""
    if not data:
        return "the file is empty (0 bytes)"
    if not data.strip(b"\0"):
        return f"not an image: {len(data)} zero bytes"
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for signature, what in _FOREIGN.items():
        if head.startswith(signature.lower()):
            return f"not an image: {what}"
    if data[128:132] == b"DICM":
        return "not an image format that is read here: DICOM; convert it to TIFF or PNG"
    if data[4:8] == b"ftyp":
        brand = data[8:12].decode("latin-1")
        return f"not an image format that is read here: {brand!r} (HEIC or video); convert it to JPEG or PNG"
    start = data[:16].decode("ascii", "replace").encode("unicode_escape", "replace").decode("ascii")
    return f"not an image: the content starts with '{start}'"


@contextmanager
def _pillow_errors(kind: str) -> Iterator[None]:
    """Turn whatever a Pillow plugin raises on a damaged file into a `DecodeError`.

    Plugins raise OSError, SyntaxError, ValueError, EOFError, struct.error, OverflowError, IndexError and
    more on hostile bytes, so the net is wide; it spans their calls only.
    """
    try:
        yield
    except DecodeError:
        raise
    except MemoryError:
        raise DecodeError(f"not enough memory to decode this {kind} file") from None
    except Exception as error:
        text = one_line(error, 280) or type(error).__name__
        # Pillow's own words for that name the stream in memory.
        text = "its header can't be read" if isinstance(error, UnidentifiedImageError) else text
        raise DecodeError(f"damaged {kind} file: {text}") from error


_SWITCH = threading.Lock()
_inside: list[tuple[bool, int | None]] = []
"""One entry for each picture that is being decoded: Pillow's switches as they were before the first."""

_NO_LOG = logging.NullHandler()
_NO_WARNING = ("ignore", None, Warning, re.compile("PIL"), 0)
"""The entry of `warnings.filters` that keeps Pillow's off the console."""


@contextmanager
def _own_rules() -> Iterator[None]:
    """Pillow's global switches out of the way while any picture is decoded, and then as they were.

    Any library may set them: missing rows would come out grey, and the limit of pixels be another one.
    """
    with _SWITCH:
        now = (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)
        _inside.append(_inside[0] if _inside else now)
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = False, None
    try:
        yield
    finally:
        with _SWITCH:
            before = _inside.pop()
            if not _inside:
                ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = before


def _open(kind: str, data: bytes) -> Any:
    """The file opened by the plugin of its format, pixels not decoded yet.

    What Pillow thinks of odd metadata is nobody's concern here: it warns of that, and logs it to the console
    where an application has set up no logging.
    """
    logging.getLogger("PIL").addHandler(_NO_LOG)
    if _NO_WARNING not in warnings.filters:  # adding it again would have all others made anew
        warnings.filterwarnings("ignore", module="PIL")
    return Image.open(io.BytesIO(data), formats=[kind])


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise DecodeError(
            f"{width} x {height} is {width * height:,} pixels, over the limit of {MAX_PIXELS:,} pixels"
        )


def _plain(kind: str, data: bytes, span: Span | None, side: int | None) -> Image.Image:
    """A picture of any format but TIFF as RGB, not turned yet; ``info`` has its orientation, note and box."""
    with _open(kind, data) as opened:
        _check_size(*opened.size)
        try:  # the further pictures of a JPEG are previews, or the other eye's
            animated = kind != "JPEG" and getattr(opened, "is_animated", False)
        except Exception:  # a damaged later frame doesn't spoil the first
            animated = False
        orientation = exif_orientation(_exif_block(opened.info))
        box = _reduce(opened, side, orientation) if kind == "JPEG" and side else None
        opened.load()
        image = to_rgb(opened, kind, span)
        note = "an animation: only the first frame is used" if animated else None
        image.info = {"orientation": orientation, "note": note, "box": box}
    return image


def _reduce(opened: Any, side: int, orientation: int) -> tuple[float, ...] | None:
    """Have a JPEG decoded at a half, a quarter or an eighth of its sides, as far as that is `ENOUGH`.

    Returns the box that is the picture, where it ends within the last column or row. A picture that will be
    turned has no such box: it is reduced only where the sides can be divided.
    """
    width, height = opened.size
    for factor in (8, 4, 2):
        whole = width % factor == height % factor == 0
        if min(width, height) >= ENOUGH * side * factor and (whole or orientation == 1):
            opened.draft(None, (width // factor, height // factor))
            return None if whole else (0, 0, width / factor, height / factor)
    return None


def _exif_block(info: dict[Any, Any]) -> bytes | None:
    raw = info.get("Raw profile type exif", "")  # how ImageMagick stores EXIF in PNG
    try:
        return info.get("exif") or bytes.fromhex("".join(raw.split("\n")[3:]))
    except ValueError:
        return None


def exif_orientation(exif: bytes | None) -> int:
    """The orientation (1 to 8) in an EXIF block; 1 where there is none or the block is broken.

    Pillow's own reader takes the first of several values, and warns about broken blocks.
    """
    block = (exif or b"").removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4], "")
    try:
        (start,) = struct.unpack_from(order + "L", block, 4) if order else (len(block),)
        (count,) = struct.unpack_from(order + "H", block, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, length = struct.unpack_from(order + "HHL", block, entry)
            if tag == Tag.Orientation and kind in (1, 3, 4) and length == 1:
                (value,) = struct.unpack_from(order + " B HL"[kind], block, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


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
    has_key = "transparency" in image.info and mode not in {
        "CMYK",
        "YCbCr",
        "HSV",
    }  # to which it means nothing
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


def _require_whole(kind: str, data: bytes) -> None:
    """Refuse what a look at a file's structure finds wrong that its decoder may pass over."""
    try:
        _CHECKS.get(kind, lambda data: None)(data)
    except struct.error:
        raise DecodeError(f"truncated {kind} file: its structure ends early") from None


def _check_png(data: bytes) -> None:
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
            raise DecodeError(f"damaged PNG file: wrong checksum in chunk {name.decode('latin-1')!r}")
        if name == b"IEND" and not seen_data:
            raise DecodeError("damaged PNG file: no image data")
        if name == b"IEND":
            return
        seen_data = seen_data or name == b"IDAT"
        position = end + 4
    raise DecodeError(f"truncated PNG file: it ends after {len(data)} bytes without its end chunk")


def _check_gif(data: bytes) -> None:
    """Blocks up to the trailer (GIF89a, section 27); a cut animation is a cut file."""

    def table(flags_at: int) -> int:  # bytes of the colour table that these flags announce
        flags = data[flags_at] if flags_at < len(data) else 0
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    position = 13 + table(10)
    while position < len(data):
        block = data[position]
        if block not in (0x21, 0x2C):
            return  # the trailer, or bytes between blocks: the decoder's business
        position += 2 if block == 0x21 else 11 + table(position + 9)
        while position < len(data) and data[position]:
            position += 1 + data[position]
        position += 1
    raise DecodeError(f"truncated GIF file: it ends after {len(data)} bytes without its trailer")


def _check_webp(data: bytes) -> None:
    (declared,) = struct.unpack_from("<L", data, 4)
    if declared + 8 > len(data):
        raise DecodeError(f"truncated WEBP file: {len(data)} of {declared + 8} bytes")


_CHECKS: dict[str, Callable[[bytes], None]] = {
    "PNG": _check_png,
    "GIF": _check_gif,
    "WEBP": _check_webp,
}

_UNSIGNED, _UNDEFINED = 1, 4
"""Values of TIFF's SampleFormat."""

_EXTRA_ALPHA = {1: "a", 2: "A"}
"""Values of ExtraSamples for alpha, premultiplied or not, and how Pillow's modes for it end."""

_COLOURS = frozenset({"RGB", "RGBA", "CMYK"})
_NUMBERS = {"u": "unsigned", "i": "signed", "f": "floating-point"}


def _tiff(data: bytes, span: Span | None) -> Image.Image:
    """The first page as RGB; ``span`` is what counts for deep samples instead of the tags.

    Its ``info`` has the ``orientation`` that is left to apply, a ``note``, and the ``declared`` range.
    """
    opened: Any = None
    page: Any = None
    try:
        opened = _open("TIFF", data)
    except (OSError, SyntaxError, ValueError, OverflowError) as error:
        unread = isinstance(error, UnidentifiedImageError)
        page = _page(data, "its header can't be read" if unread else str(error))
    tags: Mapping[int, Any] = opened.tag_v2 if page is None else {tag.code: tag.value for tag in page.tags}
    _check_size(tags[Tag.ImageWidth], tags[Tag.ImageLength])
    others = _others(tags)
    bits, kinds = max(_many(tags, Tag.BitsPerSample, 1)), set(_many(tags, Tag.SampleFormat, _UNSIGNED))
    deep = bits > 8 or not kinds <= {_UNSIGNED, _UNDEFINED}
    full = 2**bits - 1 if kinds == {_UNSIGNED} and bits <= 16 else None
    declared = _declared(tags, kinds == {_UNSIGNED}, full) if deep else None
    wanted = span or declared if deep else None
    if page is None and _misread(opened, deep, data[:1] == b"M", wanted):
        page = _page(data, "Pillow would misread its samples")
    several = len(page.parent.pages) > 1 if page is not None else opened.is_animated
    if page is not None:
        image = _shown(_samples(page), tags, bits, full, wanted)
    else:
        opened.info.pop("xmp", None)  # its orientation doesn't count
        opened.load()  # and turn it
        if deep and opened.mode not in _COLOURS:
            image = _shown(_pillows(opened, kinds), tags, bits, full, wanted)
        else:
            image = to_rgb(opened, "TIFF")
    notes = [f"{others} channels beside its colours are left out"] if others else []
    notes += ["several pages: only the first page is used"] if several else []
    image.info = {
        "orientation": None if page is None else tags.get(Tag.Orientation),
        "note": "; ".join(notes),
    }
    image.info["declared"] = declared if span is None else None
    return image


def _many(tags: Mapping[int, Any], tag: int, *default: Any) -> tuple[Any, ...]:
    value = tags.get(tag, default)
    return tuple(value) if isinstance(value, tuple | list | np.ndarray) else (value,)


def _declared(tags: Mapping[int, Any], unsigned: bool, full: int | None) -> Span | None:
    """The least and greatest sample value that a file states; None where that is all that its bits hold."""
    low = _many(tags, Tag.SMinSampleValue) or _many(tags, Tag.MinSampleValue) or ((0,) if unsigned else ())
    high = _many(tags, Tag.SMaxSampleValue) or _many(tags, Tag.MaxSampleValue) or ((full,) if full else ())
    found = (float(min(low)), float(max(high))) if low and high else (0.0, 0.0)
    usable = found[0] < found[1] and math.isfinite(found[1] - found[0])
    return found if usable and found != (0, full) else None


def _others(tags: Mapping[int, Any]) -> int:
    """How many channels are neither colours nor alpha; beside grey they are refused."""
    extra = _many(tags, Tag.ExtraSamples)
    if tags.get(Tag.PhotometricInterpretation, 0) not in (0, 1):
        return extra.count(0)
    others = int(tags.get(Tag.SamplesPerPixel, 1)) - 1 - sum(kind in _EXTRA_ALPHA for kind in extra)
    if others > 0:
        raise DecodeError(f"{others + 1} channels without a colour: save the one to use, or three as RGB")
    return 0


def _misread(opened: Any, deep: bool, big_endian: bool, wanted: Span | None) -> bool:
    """Whether Pillow opens a file of which it then gives other samples, or fewer bits than a range needs."""
    if opened.tag_v2.get(Tag.PlanarConfiguration, 1) == 2 and (deep or opened.mode in {"LA", "La", "PA"}):
        return True
    if opened.mode in _COLOURS:
        return wanted is not None
    # libtiff has put the bytes of compressed samples in order; Pillow does it again.
    return big_endian and opened.mode in {"I", "F"} and opened.tag_v2.get(Tag.Compression, 1) != 1


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
    logging.getLogger("tifffile").addHandler(_NO_LOG)
    return tifffile.TiffFile(io.BytesIO(data)).pages[0]


def _samples(page: Any) -> np.ndarray:
    """(H, W, C) samples of tifffile's page; missing strips, which it would fill, are refused."""
    if 0 in page.databytecounts or len(page.dataoffsets) < math.prod(page.chunked):
        raise DecodeError("truncated TIFF file: some of its strips or tiles are missing")
    if page.nbytes > 16 * MAX_PIXELS:
        raise DecodeError(f"{page.nbytes:,} bytes of samples, over the limit of {16 * MAX_PIXELS:,}")
    values = page.asarray()
    if page.axes not in {"YX", "YXS", "SYX"} or values.dtype.kind not in _NUMBERS:
        raise DecodeError(f"TIFF samples of a kind that isn't read: {page.axes}, {values.dtype}")
    return np.moveaxis(values, 0, -1) if page.axes == "SYX" else values.reshape(*values.shape[:2], -1)


def _shown(
    values: np.ndarray, tags: Mapping[int, Any], bits: int, full: int | None, wanted: Span | None
) -> Image.Image:
    """(H, W, C) samples as RGB: scaled by the range that is ``wanted``, or else from 0 to ``full``."""
    photometric, extra = tags.get(Tag.PhotometricInterpretation), _many(tags, Tag.ExtraSamples)
    colours = 1 if photometric in (0, 1) else 3
    what = f"{bits}-bit {_NUMBERS[values.dtype.kind]}"
    if photometric not in (0, 1, 2) or values.shape[2] < colours:
        raise DecodeError(f"{what} samples, read as grey and RGB only: its photometric code is {photometric}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DecodeError("it holds values that are not finite")
    if not extra and values.shape[2] == 4:  # left out by many writers, and taken for alpha by Pillow too
        extra = (2,)
    alpha = [colours + at for at, kind in enumerate(extra) if kind in _EXTRA_ALPHA][:1]
    if alpha and (wanted or not full):
        raise DecodeError(f"{what} samples in a range of their own, with alpha: save it without alpha")
    values = values[..., [*range(colours), *alpha]]
    if not wanted and not full:
        raise UndeclaredRangeError(what, float(values.min()), float(values.max()))
    shown = levels(values, *(wanted or (0, full)))
    if photometric == 0:
        shown[..., 0] = 255 - shown[..., 0]
    mode = ("L" if colours == 1 else "RGB") + "".join(_EXTRA_ALPHA[extra[at - colours]] for at in alpha)
    return to_rgb(Image.frombytes(mode, values.shape[1::-1], shown.tobytes()), "TIFF")
