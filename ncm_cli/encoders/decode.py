"""The one function that turns a file's bytes into an RGB picture.

The policy, which has a version that is part of every encoder fingerprint:

* the content decides the format, never the extension;
* the EXIF orientation is applied; a broken EXIF block is ignored;
* palette, CMYK, 16-bit, Lab, alpha and the other modes become 8-bit RGB *before* anything is resized
  (see :mod:`ncm_cli.encoders.colour`); ICC profiles are ignored, as torchvision, timm and open_clip do;
* the first frame of an animation is used, with a note;
* whatever isn't a whole picture raises :class:`DecodeError`: a partial or grey-filled one is never returned.

Nothing here reads or writes Pillow's global switches, so another library's ``LOAD_TRUNCATED_IMAGES`` or
``MAX_IMAGE_PIXELS`` changes nothing. The functions may be called from several threads at once.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

from . import colour, formats

DECODE_POLICY = 1
"""Version of the policy above. A change that can move a feature raises it."""

MAX_PIXELS = 178_956_970
"""Pictures above this many pixels are refused: the size at which Pillow itself calls a file a bomb."""

MAX_BYTES = 1 << 30
"""Files above 1 GiB are refused before they are read: no picture within ``MAX_PIXELS`` needs that much."""

# Without O_NONBLOCK, opening a named pipe would wait for a writer.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class DecodeError(Exception):
    """A file that isn't a whole picture; ``reason`` says why in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode(source: str | os.PathLike[str] | bytes) -> Image.Image:
    """Decode a picture to 8-bit RGB.

    Parameters
    ----------
    source
        The path of a file, or the file's bytes.

    Returns
    -------
    PIL.Image.Image
        Mode RGB, loaded, independent of the file. ``image.info`` is empty but for ``note``, present where
        something was left out (the later frames of an animation); see :func:`note_of`.

    Raises
    ------
    DecodeError
        For a missing, unreadable, empty, foreign, damaged, truncated or over-limit file.
    """
    data = bytes(source) if isinstance(source, bytes | bytearray | memoryview) else read_bytes(source)
    kind = formats.sniff(data)
    if kind is None:
        raise DecodeError(formats.describe_foreign(data))
    problem = formats.damage(kind, data)
    if problem:
        raise DecodeError(problem)
    with _pillow_errors(kind), _quietly(kind, data):
        opened = formats.open_as(kind, data)
    with opened:
        _check_size(opened.size)
        note = _frames_note(opened, kind)
        with _pillow_errors(kind):
            opened.load()
            orientation = _orientation(opened)
            image = colour.to_rgb(opened, kind)
            if orientation in _TRANSPOSE:
                image = image.transpose(_TRANSPOSE[orientation])
    image.info = {"note": note} if note else {}
    return image


def note_of(image: Image.Image) -> str | None:
    """What :func:`decode` left out of a picture, such as later frames, or None."""
    return image.info.get("note")


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file within the size limit, or :class:`DecodeError` with the reason."""
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
        try:
            state = os.fstat(descriptor)
            if stat.S_ISDIR(state.st_mode):
                raise DecodeError("a folder, not a file")
            if not stat.S_ISREG(state.st_mode):
                raise DecodeError("not a regular file")
            if state.st_size > MAX_BYTES:
                raise DecodeError(f"file of {state.st_size:,} bytes, over the limit of {MAX_BYTES:,}")
            with open(descriptor, "rb", closefd=False) as stream:
                return stream.read()
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise DecodeError("no such file") from None
    except PermissionError:
        raise DecodeError("no permission to read the file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise DecodeError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except MemoryError:
        raise DecodeError("not enough memory to read the file") from None


def exif_orientation(exif: bytes | None) -> int:
    """The orientation (1 to 8) in an EXIF block; 1 where there is none or the block is broken.

    Read here, because Pillow's own reader warns about broken blocks, and warnings can't be caught safely
    in threads.
    """
    if not exif:
        return 1
    block = exif[6:] if exif.startswith(b"Exif\0\0") else exif
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "L", block, 4)
        (count,) = struct.unpack_from(order + "H", block, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, length = struct.unpack_from(order + "HHL", block, entry)
            if tag == 0x0112:
                code = {1: "B", 3: "H", 4: "L"}.get(kind)
                if code is None or length != 1:
                    return 1
                (value,) = struct.unpack_from(order + code, block, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def _orientation(opened: Image.Image) -> int:
    tags: Any = getattr(opened, "tag_v2", None)
    if tags is not None:  # TIFF: the tag is the file's own
        value = tags.get(0x0112)
        return value if isinstance(value, int) and 1 <= value <= 8 else 1
    return exif_orientation(_exif_block(opened.info))


def _exif_block(info: dict) -> bytes | None:
    block = info.get("exif")
    if isinstance(block, bytes):
        return block
    raw = info.get("Raw profile type exif")  # how ImageMagick stores EXIF in PNG
    if isinstance(raw, str):
        try:
            return bytes.fromhex("".join(raw.split("\n")[3:]))
        except ValueError:
            return None
    return None


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise DecodeError(
            f"{width} x {height} is {width * height:,} pixels, over the limit of {MAX_PIXELS:,} pixels"
        )


def _frames_note(opened: Image.Image, kind: str) -> str | None:
    """A note on frames that are left out; counts them only where the header says how many."""
    try:
        if not getattr(opened, "is_animated", False):
            return None
    except Exception:  # a damaged later frame doesn't spoil the first
        return None
    what = "several pages" if kind == "TIFF" else "an animation"
    return f"{what}: only the first {'page' if kind == 'TIFF' else 'frame'} is used"


_PILLOWS_WORDS = {"not identified by this driver": "its header can't be read"}


@contextmanager
def _pillow_errors(kind: str) -> Iterator[None]:
    """Turn whatever a Pillow plugin raises on a damaged file into a DecodeError.

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
        text = " ".join(str(error).split()) or type(error).__name__
        text = _PILLOWS_WORDS.get(text, text)
        raise DecodeError(f"damaged {kind} file: {text}"[:300]) from error


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
