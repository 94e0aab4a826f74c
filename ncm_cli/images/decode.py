"""TIFF pictures, whose tags say what a sample means (TIFF 6.0, sections 3, 8, 18 and 19).

Unsigned samples of up to 8 bits, and 16-bit colour over its full range, are Pillow's to convert. Everything
else is scaled here by the range that the file declares: its least and greatest sample value where it states
them, else what its bits hold where samples are unsigned and have at most 16. Nothing is guessed from values.

The one function that turns a file's bytes into an RGB picture.

The policy, which has a version that is part of every encoder fingerprint:

* the content decides the format, never the extension;
* the EXIF orientation is applied; a broken EXIF block is ignored;
* palette, CMYK, 16-bit, Lab, alpha and the other modes become 8-bit RGB *before* anything is resized
  (see :mod:`ncm_cli.images.formats`); ICC profiles are ignored, as torchvision, timm and open_clip do;
* deep samples are scaled by what the file declares or the user says, never by the picture's own extremes
  (see :mod:`ncm_cli.images.decode`);
* the first frame of an animation is used, with a note;
* whatever isn't a whole picture raises :class:`DecodeError`: a partial or grey-filled one is never returned.

Another library's ``LOAD_TRUNCATED_IMAGES`` or ``MAX_IMAGE_PIXELS`` changes nothing. The functions may be
called from several threads at once.
"""

from __future__ import annotations

import io
import logging
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image
from PIL.ExifTags import Base as Tag

from ncm_cli.images import formats
from ncm_cli.images.formats import MAX_PIXELS as MAX_PIXELS
from ncm_cli.images.formats import DecodeError

_UNSIGNED, _UNDEFINED = 1, 4
"""Values of SampleFormat."""

_ALPHA = {1: "a", 2: "A"}
"""Values of ExtraSamples for alpha, premultiplied or not, and how Pillow's modes for it end."""

_COLOURS = frozenset({"RGB", "RGBA", "CMYK"})
_NUMBERS = {"u": "unsigned", "i": "signed", "f": "floating-point"}


class UndeclaredRangeError(DecodeError):
    """Nothing says which samples are black and white; ``span`` is the least and the greatest of them."""

    def __init__(self, what: str, low: float, high: float) -> None:
        self.span = (low, high)
        super().__init__(
            f"{what} samples without a declared range, here {low:.9g} to {high:.9g}: say which are black and "
            f"white, as in ncm embed {range_advice(low, high)}"
        )


def range_advice(low: float, high: float) -> str:
    """The option that shows ``low`` as black and ``high`` as white."""
    return f"--intensity-range={low:.9g}:{high:.9g}" if low < high else "--intensity-range=LOW:HIGH"


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
    formats.check_size(tags[Tag.ImageWidth], tags[Tag.ImageLength])
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
        image = _shown(_samples(page), tags, full, wanted)
    else:
        opened.load()
        if tags.get(Tag.Orientation) in (5, 6, 7, 8):  # Pillow gives a turned picture its later size
            opened = opened.copy()
        if deep and opened.mode not in _COLOURS:
            image = _shown(_pillows(opened, kinds), tags, full, wanted)
        else:
            image = formats.to_rgb(opened, "TIFF")
    notes = [f"{others} channels beside its colours are left out"] if others else []
    notes += ["several pages: only the first page is used"] if several else []
    image.info = {"orientation": tags.get(Tag.Orientation), "note": "; ".join(notes)}
    image.info["declared"] = declared if span is None else None
    return image


def _many(tags: Mapping[int, Any], tag: int, *default: Any) -> tuple[Any, ...]:
    value = tags.get(tag, default)
    return tuple(value) if isinstance(value, tuple | list | np.ndarray) else (value,)


def _declared(tags: Mapping[int, Any], unsigned: bool, full: int | None) -> tuple[float, float] | None:
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
    others = int(tags.get(Tag.SamplesPerPixel, 1)) - 1 - sum(kind in _ALPHA for kind in extra)
    if others > 0:
        raise DecodeError(f"{others + 1} channels without a colour: save the one to use, or three as RGB")
    return 0


def _misread(opened: Any, deep: bool, big_endian: bool, wanted: tuple[float, float] | None) -> bool:
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
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    return tifffile.TiffFile(io.BytesIO(data)).pages[0]


def _samples(page: Any) -> np.ndarray:
    """(H, W, C) samples of tifffile's page; missing strips, which it would fill, are refused."""
    if 0 in page.databytecounts or len(page.dataoffsets) < math.prod(page.chunked):
        raise DecodeError("truncated TIFF file: some of its strips or tiles are missing")
    if page.nbytes > 16 * formats.MAX_PIXELS:
        raise DecodeError(f"{page.nbytes:,} bytes of samples, over the limit of {16 * formats.MAX_PIXELS:,}")
    values = page.asarray()
    if page.axes not in {"YX", "YXS", "SYX"} or values.dtype.kind not in _NUMBERS:
        raise DecodeError(f"TIFF samples of a kind that isn't read: {page.axes}, {values.dtype}")
    return np.moveaxis(values, 0, -1) if page.axes == "SYX" else values.reshape(*values.shape[:2], -1)


def _shown(
    values: np.ndarray, tags: Mapping[int, Any], full: int | None, wanted: tuple[float, float] | None
) -> Image.Image:
    """(H, W, C) samples as RGB: scaled by the range that is ``wanted``, or else from 0 to ``full``."""
    photometric, extra = tags.get(Tag.PhotometricInterpretation), _many(tags, Tag.ExtraSamples)
    colours = 1 if photometric in (0, 1) else 3
    what = f"{8 * values.itemsize}-bit {_NUMBERS[values.dtype.kind]}"
    if photometric not in (0, 1, 2) or values.shape[2] < colours:
        raise DecodeError(f"{what} samples, read as grey and RGB only: its photometric code is {photometric}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DecodeError("it holds values that are not finite")
    if not extra and values.shape[2] == 4:  # left out by many writers, and taken for alpha by Pillow too
        extra = (2,)
    alpha = [colours + at for at, kind in enumerate(extra) if kind in _ALPHA][:1]
    if alpha and (wanted or not full):
        raise DecodeError(f"{what} samples in a range of their own, with alpha: save it without alpha")
    values = values[..., [*range(colours), *alpha]]
    if not wanted and not full:
        raise UndeclaredRangeError(what, float(values.min()), float(values.max()))
    levels = formats.levels(values, *(wanted or (0, full)))
    if photometric == 0:
        levels[..., 0] = 255 - levels[..., 0]
    mode = ("L" if colours == 1 else "RGB") + "".join(_ALPHA[extra[at - colours]] for at in alpha)
    return formats.to_rgb(Image.frombytes(mode, values.shape[1::-1], levels.tobytes()), "TIFF")


DECODE_POLICY = 1
"""Version of the policy above, deep TIFF samples apart. A change that can move a feature raises it."""

SAMPLE_POLICY = 2
"""Version of how :mod:`ncm_cli.images.decode` reads deep samples.

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
        image = read(data, span) if kind == "TIFF" else _read(kind, data, span)
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
        image = formats.to_rgb(opened, kind, span)
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
