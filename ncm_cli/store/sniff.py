"""Tells the kind of a file by its first bytes."""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

HEAD_BYTES = 512
"""The number of bytes that is enough to tell every kind."""


class _Kind(NamedTuple):
    words: str
    pattern: str
    """Matches the first bytes, as Latin-1. The first kind that fits is taken."""


_KINDS = {
    "JPEG": _Kind("a JPEG picture", r"\xff\xd8\xff"),
    "PNG": _Kind("a PNG picture", r"\x89PNG\r\n\x1a\n"),
    "HDF5": _Kind("an HDF5 file", r"\x89HDF\r\n\x1a\n"),
    "safetensors": _Kind("a safetensors file", r".{4}\0\0\0\0\{"),
    "zip": _Kind("a zip archive or an Excel workbook", r"PK\x03\x04"),
    "npy": _Kind("a NumPy array", r"\x93NUMPY"),
    "pickle": _Kind("a pickle, such as of torch.save", r"\x80\x02"),
    "GIF": _Kind("a GIF picture", r"GIF8[79]a"),
    "BMP": _Kind("a BMP picture", r"BM"),
    "TIFF": _Kind("a TIFF picture", r"II[*+]\0|MM\0[*+]"),
    "JPEG2000": _Kind("a JPEG 2000 picture", r"\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n"),
    "WEBP": _Kind("a WebP picture", r"RIFF.{4}WEBP"),
    "AVIF": _Kind("an AVIF picture", r".{4}ftypavi[fs]"),
    "PPM": _Kind("a picture of the PPM family", r"P[1-6]\s"),
    "ICO": _Kind("a Windows icon", r"\0\0\x01\0"),
    "HEIC": _Kind("a HEIC picture or a video", r".{4}ftyp"),
    "DICOM": _Kind("a DICOM picture", r".{128}DICM"),
    "gzip": _Kind("a gzip file", r"\x1f\x8b"),
    "Parquet": _Kind("a Parquet file", "PAR1"),
    "Excel": _Kind("an old Excel workbook", r"\xd0\xcf\x11\xe0"),
    "LFS": _Kind("a Git LFS pointer: the file itself was not fetched", "version https://git-lfs"),
    "PDF": _Kind("a PDF document", "%PDF"),
    "SVG": _Kind("an SVG drawing", "<svg"),
    "HTML": _Kind("an HTML page", "<!DOCTYPE html|<html"),
    "XML": _Kind("an XML file", r"<\?xml"),
    "PostScript": _Kind("a PostScript file", "%!PS"),
}

_TEXT = ("LFS", "PDF", "SVG", "HTML", "XML", "PostScript")
"""Kinds that blanks and a byte order mark may precede, and whose case doesn't matter."""

TEXT = "text, such as a table"

PICTURES = frozenset({"JPEG", "PNG", "GIF", "BMP", "TIFF", "JPEG2000", "WEBP", "AVIF", "PPM"})
"""The pictures that are decoded, by Pillow's names of the formats."""

WORDS = {name: kind.words for name, kind in _KINDS.items()}
"""Each kind in words."""

_PATTERN = re.compile(
    "|".join(
        f"(?P<{name}>"
        + (rf"[\xef\xbb\xbf \t\r\n]*(?i:{kind.pattern})" if name in _TEXT else kind.pattern)
        + ")"
        for name, kind in _KINDS.items()
    ).encode("latin-1"),
    re.DOTALL,
)


def described(head: bytes) -> str:
    """The kind of a file that begins with these bytes, in words."""
    kind = sniff(head)
    if kind is not None:
        known = {"HDF5": ", as feature and pair stores are", "safetensors": ", as probes are"}
        return WORDS[kind] + known.get(kind, "")
    with contextlib.suppress(UnicodeDecodeError):
        text = head.decode("utf-8")
        if head and "\0" not in text:
            return TEXT
    return "a file of another kind" if head else "an empty file"


def sniff(head: bytes) -> str | None:
    """A file's kind, a key of `WORDS`, by its first `HEAD_BYTES` bytes, or all of them; None if unknown."""
    match = _PATTERN.match(head)
    return match.lastgroup if match else None
