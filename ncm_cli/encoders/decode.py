"""The one function that turns a file's bytes into an RGB picture.

The policy, which has a version that is part of every encoder fingerprint:

* the content decides the format, never the extension;
* the EXIF orientation is applied; a broken EXIF block is ignored;
* palette, CMYK, 16-bit, Lab, alpha and the other modes become 8-bit RGB *before* anything is resized
  (see :mod:`ncm_cli.encoders.colour`); ICC profiles are ignored, as torchvision, timm and open_clip do;
* deep samples are scaled by what the file declares or the user says, never by the picture's own extremes
  (see :mod:`ncm_cli.encoders.tiff`);
* the first frame of an animation is used, with a note;
* whatever isn't a whole picture raises :class:`DecodeError`: a partial or grey-filled one is never returned.

Another library's ``LOAD_TRUNCATED_IMAGES`` or ``MAX_IMAGE_PIXELS`` changes nothing. The functions may be
called from several threads at once.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from . import colour, formats, tiff
from .formats import MAX_PIXELS as MAX_PIXELS
from .formats import DecodeError as DecodeError

DECODE_POLICY = 1
"""Version of the policy above, deep TIFF samples apart. A change that can move a feature raises it."""

SAMPLE_POLICY = 2
"""Version of how :mod:`ncm_cli.encoders.tiff` reads deep samples.

It is part of a request's key, not of the fingerprint: 8-bit stores are valid whatever it is, and rows of TIFF
files that were read under another one are made again.
"""

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


def decode(source: str | os.PathLike[str] | bytes, span: tuple[float, float] | None = None) -> Image.Image:
    """Decode a picture to 8-bit RGB.

    Parameters
    ----------
    source
        The path of a file, or the file's bytes.
    span
        The samples that become black and white, in grey PNG and all TIFF files of more than 8 bits; None
        takes what the file declares.

    Returns
    -------
    PIL.Image.Image
        Mode RGB, loaded, independent of the file. ``image.info`` has at most ``note``, where something was
        left out (the later frames of an animation; see :func:`note_of`), and ``declared``, the least and
        greatest sample value that the file states where these count.

    Raises
    ------
    DecodeError
        For a missing, unreadable, empty, foreign, damaged, truncated or over-limit file, and for samples
        whose meaning nobody states.
    """
    data = bytes(source) if isinstance(source, bytes | bytearray | memoryview) else read_bytes(source)
    kind = formats.sniff(data)
    if kind is None:
        raise DecodeError(formats.describe_foreign(data))
    problem = formats.damage(kind, data)
    if problem:
        raise DecodeError(problem)
    with _pillow_errors(kind), formats.whole_pictures():
        image = tiff.read(data, span) if kind == "TIFF" else _read(kind, data, span)
        info = image.info
        if info["orientation"] in _TRANSPOSE:
            image = image.transpose(_TRANSPOSE[info["orientation"]])
    image.info = {name: info[name] for name in ("note", "declared") if info.get(name)}
    return image


def _read(kind: str, data: bytes, span: tuple[float, float] | None) -> Image.Image:
    """A picture of any format but TIFF as RGB, not turned yet; ``info`` has its orientation and note."""
    with formats.open_as(kind, data) as opened:
        formats.check_size(*opened.size)
        note = _frames_note(opened)
        opened.load()
        image = colour.to_rgb(opened, kind, span)
        image.info = {"orientation": exif_orientation(_exif_block(opened.info)), "note": note}
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


def _frames_note(opened: Image.Image) -> str | None:
    """A note on frames that are left out; counts them only where the header says how many."""
    try:
        animated = getattr(opened, "is_animated", False)
    except Exception:  # a damaged later frame doesn't spoil the first
        return None
    return "an animation: only the first frame is used" if animated else None


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
