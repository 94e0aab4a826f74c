"""The one function that turns a file's bytes into an RGB picture, through Pillow's public interface.

The policy has a version that is part of every encoder fingerprint:

* the content decides the format, never the extension; formats that need other programs (EPS, WMF), have no
  signature (TGA, PCX) or hold no picture aren't read;
* the EXIF orientation is applied; a broken EXIF block and ICC profiles are ignored, as torchvision, timm and
  open_clip do;
* every mode becomes 8-bit RGB *before* anything is resized: RGB, grey, palette, CMYK, YCbCr and HSV by
  Pillow's own ``convert("RGB")``, Lab by Little CMS (D50), alpha and transparent colours over white, 16-bit
  grey by its high byte, as Pillow reads 16-bit colour;
* deep samples are scaled by what the file declares or the user says, never by the picture's own extremes;
* the first frame of an animation is used, with a note;
* JPEG files may be decoded at a reduced size, on request (``--decode fast``);
* an incomplete picture raises `DecodeError`: a partial or grey-filled one is never returned.

TIFF files are read in `tiff`. The functions may be called from several threads at once.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.ExifTags import Base as Tag

from ncm_cli.images.samples import DecodeError, Span, check_size, open_as, to_rgb
from ncm_cli.images.tiff import decode_tiff
from ncm_cli.store.files import one_line
from ncm_cli.store.sniff import HEAD_BYTES, PICTURES, WORDS, sniff

DECODE_POLICY = 1
"""Version of the policy above, except for deep TIFF samples. A change that can alter a feature raises it."""

SAMPLE_POLICY = 2
"""Version of how deep TIFF samples are read.

It is part of a request's key, not of the fingerprint: 8-bit stores are valid whatever it is, and rows of TIFF
files that were read under another version are made again.
"""

MAX_BYTES = 1 << 30
"""Files above 1 GiB are refused before they are read: no picture within `MAX_PIXELS` needs that much."""

_NO_WAIT = getattr(os, "O_NONBLOCK", 0)

_TURNS = dict(zip(range(2, 9), (0, 3, 1, 5, 4, 6, 2), strict=True))
"""EXIF orientation to Pillow's `Image.Transpose`."""

MIN_REDUCED_SCALE = 2.5
"""Least side of a reduced JPEG, relative to the model's input. Even for detailed pictures, the cosine between
reduced and exact features is above .999; at a scale of 2 it is .998."""


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
        The side that the picture will be resized to, if a JPEG may be decoded at a reduced size.

    Returns
    -------
    PIL.Image.Image
        Mode RGB, loaded, independent of the file. ``image.info`` has at most these keys: ``note`` if
        something was left out (such as the later frames of an animation); ``declared``, the least and
        greatest sample value that the file declares, if they were used; ``box``, the part to resize if a
        picture of reduced size ends within its last column or row.

    Raises
    ------
    DecodeError
        For a missing, unreadable, empty, damaged, truncated or too large file, a file that is no picture,
        and samples whose range neither the file nor ``span`` states.
    """
    data = bytes(source) if isinstance(source, bytes | bytearray | memoryview) else read_bytes(source)
    kind = sniff(data[:HEAD_BYTES])
    if kind not in PICTURES:
        raise DecodeError(_describe_foreign(data, kind))
    assert kind is not None
    with _pillow_errors(kind), _strict_pillow():
        _require_whole(kind, data)
        image = decode_tiff(data, span) if kind == "TIFF" else _plain(kind, data, span, side)
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
            if data is None:  # a file of the kernel (such as in /proc) that has no data yet
                raise DecodeError("not a regular file")
            return data
    except FileNotFoundError:
        raise DecodeError("no such file") from None
    except IsADirectoryError:
        raise DecodeError("a folder, not a file") from None
    except PermissionError:
        raise DecodeError("no permission to read the file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise  # too many open files: the picture isn't to blame
        raise DecodeError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except MemoryError:
        raise DecodeError("not enough memory to read the file") from None


def _describe_foreign(data: bytes, kind: str | None) -> str:
    """What a file that can't be decoded is, in one line."""
    if not data:
        return "the file is empty (0 bytes)"
    if not data.strip(b"\0"):
        return f"not an image: {len(data)} zero bytes"
    if kind in ("HEIC", "DICOM", "ICO"):
        brand = f", {data[8:12].decode('latin-1')!r}" if kind == "HEIC" else ""
        return f"not an image format that is read here: {WORDS[kind]}{brand}; convert it to PNG"
    if kind is not None:
        return f"not an image: {WORDS[kind]}"
    start = data[:16].decode("ascii", "replace").encode("unicode_escape", "replace").decode("ascii")
    return f"not an image: the content starts with '{start}'"


@contextmanager
def _pillow_errors(kind: str) -> Iterator[None]:
    """Turn whatever a Pillow plugin raises on a damaged file into a `DecodeError`.

    Plugins raise OSError, SyntaxError, ValueError, EOFError, struct.error, OverflowError, IndexError and
    more on hostile bytes, so every `Exception` is caught; the block holds only calls of plugins.
    """
    try:
        yield
    except DecodeError:
        raise
    except MemoryError:
        raise DecodeError(f"not enough memory to decode this {kind} file") from None
    except Exception as error:
        text = one_line(error, 280) or type(error).__name__
        # Pillow's message would name the stream in memory.
        text = "its header can't be read" if isinstance(error, UnidentifiedImageError) else text
        raise DecodeError(f"damaged {kind} file: {text}") from error


_SWITCHES_LOCK = threading.Lock()
_saved_switches: list[tuple[bool, int | None]] = []
"""One entry for each picture being decoded: Pillow's switches as they were before the first of them."""


@contextmanager
def _strict_pillow() -> Iterator[None]:
    """Set Pillow's global switches while any picture is decoded, and restore them afterwards.

    Another library may have set them so that missing rows are filled with grey, or changed the pixel limit.
    """
    with _SWITCHES_LOCK:
        now = (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)
        _saved_switches.append(_saved_switches[0] if _saved_switches else now)
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = False, None
    try:
        yield
    finally:
        with _SWITCHES_LOCK:
            before = _saved_switches.pop()
            if not _saved_switches:
                ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = before


def _plain(kind: str, data: bytes, span: Span | None, side: int | None) -> Image.Image:
    """A picture of any format but TIFF as RGB, not yet turned; ``info`` has orientation, note and box."""
    with open_as(kind, data) as opened:
        check_size(*opened.size)
        try:  # further pictures in a JPEG are previews, or the second half of a stereo pair
            animated = kind != "JPEG" and getattr(opened, "is_animated", False)
        except Exception:  # a damaged later frame: the first one can be used
            animated = False
        orientation = exif_orientation(_exif_block(opened.info))
        box = _reduce(opened, side, orientation) if kind == "JPEG" and side else None
        opened.load()
        image = to_rgb(opened, kind, span)
        note = "an animation: only the first frame is used" if animated else None
        image.info = {"orientation": orientation, "note": note, "box": box}
    return image


def _reduce(opened: Any, side: int, orientation: int) -> tuple[float, ...] | None:
    """Have a JPEG decoded at a half, a quarter or an eighth of its sides, if `MIN_REDUCED_SCALE` allows it.

    Returns the box of the picture if it ends within the last column or row. A picture that will be turned
    is reduced only if its sides are divisible, since a box couldn't be turned with it.
    """
    width, height = opened.size
    for factor in (8, 4, 2):
        whole = width % factor == height % factor == 0
        if min(width, height) >= MIN_REDUCED_SCALE * side * factor and (whole or orientation == 1):
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


def _require_whole(kind: str, data: bytes) -> None:
    """Refuse damage in a file's structure that its decoder may overlook."""
    try:
        _CHECKS.get(kind, lambda data: None)(data)
    except struct.error:
        raise DecodeError(f"truncated {kind} file: its structure ends early") from None


def _check_png(data: bytes) -> None:
    """Check that chunks are complete, checksums right and IEND there (PNG specification, 5.3 to 5.6)."""
    position, seen_data = 8, False
    while position + 8 <= len(data):
        (length,) = struct.unpack_from(">L", data, position)
        name = data[position + 4 : position + 8]
        end = position + 8 + length
        if end + 4 > len(data):
            break
        (stored,) = struct.unpack_from(">L", data, end)
        critical = not name[0] & 0x20
        # After the pixels only critical chunks matter; before them Pillow and libpng check every chunk.
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
    """Check that the blocks reach the trailer (GIF89a, section 27), even if only a later frame is cut."""

    def table(flags_at: int) -> int:  # bytes of the colour table that the flags announce
        flags = data[flags_at] if flags_at < len(data) else 0
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    position = 13 + table(10)
    while position < len(data):
        block = data[position]
        if block not in (0x21, 0x2C):
            return  # the trailer, or stray bytes, which the decoder checks
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
