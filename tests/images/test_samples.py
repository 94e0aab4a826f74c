"""Deep samples: the same ramp is the same picture however it is stored, or it is refused by name."""

from __future__ import annotations

import io
import itertools
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.images.decode import decode
from ncm_cli.images.encoder import load_encoder, request_key
from ncm_cli.images.request import EncoderRequest
from ncm_cli.images.samples import DecodeError, UndeclaredRangeError, range_advice
from ncm_cli.progress import SILENT

from .conftest import picture

tifffile = pytest.importorskip("tifffile")

RAMP = np.arange(256).reshape(16, 16)
SMIN, SMAX, MIN, MAX = 340, 341, 280, 281
TIFF_TYPES = {
    "u1": 1,
    "u2": 3,
    "u4": 4,
    "u8": 16,
    "i1": 6,
    "i2": 8,
    "i4": 9,
    "i8": 17,
    "f2": 11,
    "f4": 11,
    "f8": 12,
}


def tiff(values: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, values, metadata=None, **options)
    return stream.getvalue()


def ramp(kind: str, low: float, high: float, *, falling: bool = False) -> np.ndarray:
    """(16, 16): evenly from ``low`` to ``high``, exactly so for integers."""
    steps = 255 - RAMP if falling else RAMP
    if kind[0] == "f":
        return (low + (high - low) * (steps / 255)).astype(kind)
    exact = [int(low) + (int(high) - int(low)) * int(step) // 255 for step in steps.ravel()]
    return np.array(exact, dtype=object).astype(kind).reshape(16, 16)


def tags_of(kind: str, low: float, high: float, count: int) -> list[tuple[int, int, int, Any, bool]]:
    """SMinSampleValue and SMaxSampleValue, one value a channel."""
    cast = float if kind[0] == "f" else int
    values = [cast(low), cast(high)]
    return [
        (tag, TIFF_TYPES[kind], count, (value,) * count if count > 1 else value, True)
        for tag, value in zip((SMIN, SMAX), values, strict=True)
    ]


def feature(data: bytes, span: tuple[float, float] | None = None) -> np.ndarray:
    """(256,) levels of the picture by the pixels encoder, after all channels are found alike."""
    request = EncoderRequest(model="pixels:16", intensity_range=span)
    encoder = load_encoder(request, device="cpu", reporter=SILENT)
    row = encoder.encode([encoder.preprocess(decode(data, span), "")])[0].reshape(256, 3) * 255
    np.testing.assert_array_equal(row, row[:, :1].repeat(3, axis=1))
    return row[:, 0]


CHANNELS: dict[str, tuple[int, dict[str, Any]]] = {
    "minisblack": (1, {}),
    "miniswhite": (1, {}),
    "rgb": (3, {}),
    "rgba": (4, {"photometric": "rgb", "extrasamples": ["unassalpha"]}),
    "rgbx": (4, {"photometric": "rgb", "extrasamples": ["unspecified"]}),
    "la": (2, {"photometric": "minisblack", "extrasamples": ["unassalpha"]}),
}


PACKINGS = ((None, None), ("zlib", None), ("zlib", (16, 16)))
"""Compression, and the size of a tile."""


def stored(kind: str, declared: bool) -> Iterator[tuple[str, bytes, tuple[float, float]]]:
    """The ramp in every layout of channels, byte order, planes, compression, tiles, small and big files."""
    low, high = (-2.0, 6.0) if kind[0] == "f" else (np.iinfo(kind).min, np.iinfo(kind).max)
    if declared and kind == "u2":
        high = 4095
    layouts = itertools.product(CHANNELS, "<>", ("contig", "separate"), PACKINGS, (False, True))
    for name, order, planes, (compression, tile), big in layouts:
        count, options = CHANNELS[name]
        if (count == 1 and planes == "separate") or (declared and not big and kind in {"u8", "i8"}):
            continue  # 64-bit tags are for big files
        grey = ramp(kind, low, high, falling=name == "miniswhite")
        opaque = np.full_like(grey, high)
        values = np.stack([*[grey] * min(count, 3), opaque][:count] if count != 2 else [grey, opaque], -1)
        values = values[..., 0] if count == 1 else values
        data = tiff(
            np.moveaxis(values, -1, 0) if planes == "separate" else values,
            **{"photometric": name, "byteorder": order, "compression": compression, "tile": tile} | options,
            **({"planarconfig": planes} if count > 1 else {}),
            bigtiff=big,
            extratags=tags_of(kind, low, high, count) if declared else [],
        )
        yield f"{name} {order} {planes} {compression} {tile} {big}", data, (low, high)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("u2", "f4") else pytest.param(kind, marks=pytest.mark.slow) for kind in TIFF_TYPES],
)
def test_a_ramp_is_one_picture_in_every_tiff_or_refused_by_name(kind: str) -> None:
    outcomes: Counter[str] = Counter()
    for declared in (False, True):
        for name, data, span in stored(kind, declared):
            for said in (None, span):
                known = declared or said is not None or kind in {"u1", "u2"}
                try:
                    np.testing.assert_allclose(feature(data, said), RAMP.ravel(), atol=1e-4, err_msg=name)
                    assert known
                    outcomes["picture"] += 1
                except UndeclaredRangeError as error:
                    assert not known and error.span == pytest.approx(span)
                    outcomes["no range"] += 1
                except DecodeError as error:
                    assert name.startswith(("la", "rgba")) and "with alpha" in error.reason
                    outcomes["alpha"] += 1
    assert outcomes["picture"] > 100
    assert bool(outcomes["no range"]) is (kind not in {"u1", "u2"})


PILLOWS = {
    "1 L LA P PA RGB RGBX RGBA CMYK YCbCr F I I;16 I;16B": ("TIFF", {}),
    "1 L LA P RGB RGBA CMYK F I I;16": ("TIFF", {"compression": "tiff_lzw"}),
    "1 L LA P RGB RGBA I;16": ("PNG", {}),
    "1 L RGB I;16 I F": ("PPM", {}),
    "L LA RGB RGBA YCbCr I;16": ("JPEG2000", {"irreversible": False}),
    "L RGB CMYK YCbCr": ("JPEG", {"quality": 100, "subsampling": 0}),
    "L LA P RGB RGBA": ("WEBP", {"lossless": True}),
    "1 L P RGB RGBA": ("BMP", {}),
    "L P": ("GIF", {}),
    "L RGB": ("TGA", {}),
    "F": ("SPIDER", {}),
}


def pillow_reads(data: bytes) -> bool:
    """Whether Pillow reads a file: before version 13 not every TIFF that it writes."""
    try:
        Image.open(io.BytesIO(data)).load()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("modes", PILLOWS)
def test_a_ramp_is_one_picture_in_every_mode_that_pillow_writes_or_refused_by_name(modes: str) -> None:
    kind, options = PILLOWS[modes]
    grey = Image.fromarray(RAMP.astype(np.uint8))
    deep = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}
    for mode in modes.split():
        if mode in deep:
            image = Image.frombytes(mode, (16, 16), (RAMP * 257).astype(deep[mode]).tobytes())
        elif mode == "F":
            image = Image.fromarray(RAMP.astype(np.float32))
        else:
            image = grey.convert({"PA": "P"}.get(mode, mode)).convert(mode)
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        span = {"I": (0, 65535), "F": (0, 255)}.get(mode) if kind == "TIFF" else None
        try:
            found = np.asarray(decode(stream.getvalue(), span)).astype(int)
        except DecodeError as error:
            if (mode, kind) == ("YCbCr", "TIFF") and not pillow_reads(stream.getvalue()):
                continue
            assert (mode, kind) in {("F", "PPM"), ("L", "TGA"), ("RGB", "TGA"), ("F", "SPIDER")}, error.reason
            assert "not an image" in error.reason
            continue
        wanted = np.asarray(image.convert("L")) if mode == "1" else RAMP  # dithered
        assert np.abs(found - wanted[..., None]).max() <= (3 if kind == "JPEG" else 1), (mode, kind)


def test_white_is_zero_in_16_bits_is_no_negative() -> None:
    """InsightSoftwareConsortium/ITK#6636."""
    data = tiff(ramp("u2", 0, 65535, falling=True), photometric="miniswhite")
    np.testing.assert_array_equal(feature(data), RAMP.ravel())


def test_one_pixel_over_one_changes_nothing_else() -> None:
    """fossasia/visdom#1368."""
    values = ramp("f4", 0, 1)
    values[15, 15] = 1.000001
    data = tiff(values)
    with pytest.raises(
        UndeclaredRangeError, match=r"here 0 to 1\.00000095: .* ncm embed --intensity-range=0:1$"
    ):
        decode(data)
    np.testing.assert_array_equal(feature(data, (0, 1)), RAMP.ravel())
    values[15, 15] = 1e30
    np.testing.assert_array_equal(feature(tiff(values), (0, 1)), RAMP.ravel())


@pytest.mark.parametrize("tags", [(SMIN, SMAX), (MIN, MAX), (MAX,), (SMAX,)])
def test_12_bits_in_16_are_scaled_by_what_the_file_or_the_user_says(tags: tuple[int, ...]) -> None:
    values = ramp("u2", 0, 4095)
    extra = [(tag, 3, 1, 0 if tag in (SMIN, MIN) else 4095, True) for tag in tags]
    declared = decode(tiff(values, photometric="minisblack", extratags=extra))
    np.testing.assert_array_equal(np.asarray(declared)[..., 0], RAMP)
    assert declared.info["declared"] == (0, 4095)
    silent = tiff(values, photometric="minisblack")
    assert np.asarray(decode(silent)).max() == 15
    np.testing.assert_array_equal(feature(silent, (0, 4095)), RAMP.ravel())
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "PNG")
    np.testing.assert_array_equal(feature(stream.getvalue(), (0, 4095)), RAMP.ravel())


def test_a_declared_range_that_is_none_does_not_count() -> None:
    for low, high in ((5.0, 5.0), (float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(UndeclaredRangeError, match="32-bit floating-point samples"):
            decode(tiff(ramp("f4", 0, 1), extratags=tags_of("f4", low, high, 1)))


def test_pictures_of_8_bits_do_not_know_a_range() -> None:
    for kind in ("PNG", "JPEG", "TIFF"):
        stream = io.BytesIO()
        picture(20, 30).save(stream, kind)
        plain, ranged = (np.asarray(decode(stream.getvalue(), span)) for span in (None, (0, 4095)))
        np.testing.assert_array_equal(plain, ranged)


@pytest.mark.parametrize("kind", ["u1", "u2", "f4"])
@pytest.mark.parametrize("count", [2, 5, 7])
def test_channels_without_a_colour_are_refused_and_others_beside_colours_noted(kind: str, count: int) -> None:
    span = (0, 255) if kind == "f4" else None
    values = np.stack([(RAMP * (257 if kind == "u2" else 1)).astype(kind)] * count, -1)
    with pytest.raises(DecodeError, match=f"{count} channels without a colour"):
        decode(tiff(values, photometric="minisblack", planarconfig="contig"), span)
    if count > 3:
        data = tiff(values, photometric="rgb", planarconfig="contig")
        np.testing.assert_array_equal(feature(data, span), RAMP.ravel())
        assert decode(data, span).info["note"] == f"{count - 3} channels beside its colours are left out"


def test_premultiplied_alpha_is_over_white() -> None:
    for kind, top in (("u1", 255), ("u2", 65535)):
        alpha = np.full((16, 16), top // 2, kind)
        grey = ramp(kind, 0, top // 2)
        data = tiff(
            np.stack([grey, alpha], -1), photometric="minisblack", planarconfig="contig",
            extrasamples=["assocalpha"],
        )  # fmt: skip
        assert np.abs(np.asarray(decode(data))[..., 0] - (RAMP * 127 / 255 + 128)).max() <= 1


def test_what_is_neither_grey_nor_colour_is_named() -> None:
    four = np.stack([ramp("f4", 0, 1)] * 4, -1)
    with pytest.raises(DecodeError, match=r"32-bit floating-point samples, .* photometric code is 5"):
        decode(tiff(four, photometric="separated"))
    with pytest.raises(DecodeError, match="complex64"):
        decode(tiff(RAMP.astype(np.complex64), photometric="minisblack"))
    data = tiff(ramp("u2", 0, 65535), photometric="minisblack")
    at = data.index(struct.pack("<HHL", 262, 3, 1))
    unsaid = data[:at] + struct.pack("<HHL", 65000, 3, 1) + data[at + 8 :]
    with pytest.raises(DecodeError, match="photometric code is None"):
        decode(unsaid)


def test_without_tifffile_grey_is_read_and_the_rest_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    falling = tiff(ramp("u2", 0, 65535, falling=True), photometric="miniswhite")
    signed = tiff(ramp("i2", -32768, 32767), photometric="minisblack")
    colour = tiff(np.stack([ramp("f4", 0, 1)] * 3, -1), photometric="rgb")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    np.testing.assert_array_equal(feature(falling), RAMP.ravel())
    np.testing.assert_array_equal(feature(signed, (-32768, 32767)), RAMP.ravel())
    with pytest.raises(DecodeError, match=r"needs tifffile \(pip install 'ncm-cli\[tiff\]'\)"):
        decode(colour, (0, 1))


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}, {"compression": "zlib", "tile": (16, 16)}])
def test_a_cut_or_damaged_deep_tiff_is_never_a_partial_picture(options: dict[str, Any]) -> None:
    values = np.random.default_rng(0).random((48, 48, 3)).astype(np.float32)
    data = tiff(values, photometric="rgb", rowsperstrip=16, **options)
    decode(data, (0, 1))
    for length in range(8, len(data), len(data) // 37):
        with pytest.raises(DecodeError, match=r"damaged|truncated"):
            decode(data[:length], (0, 1))
    rng = np.random.default_rng(1)
    for _ in range(150):
        broken = bytearray(data)
        for at in rng.integers(0, 400, 3):
            broken[at] = rng.integers(256)
        try:
            assert decode(bytes(broken), (0, 1)).mode == "RGB"
        except DecodeError as error:
            assert error.reason and "\n" not in error.reason


@pytest.mark.parametrize(
    ("low", "high", "advice"),
    [
        (0, 1.000001, "0:1"),
        (0.1, 0.8, "0:1"),
        (0, 0.2, "0:0.2"),
        (-1, 0.9, "-1:1"),
        (0, 250, "0:255"),
        (0, 60000, "0:65535"),
        (0, 16383, "0:16383"),
        (0, 32767, "0:32767"),
        (0, 127, "0:127"),
        (0, 2**32 - 1, "0:4294967295"),
        (5, 2**32 - 1, "0:4294967295"),
        (-(2**15), 2**15 - 1, "-32768:32767"),
        (-(2**31), 2**31 - 1, "-2147483648:2147483647"),
        (0, 2**33, "0:8589934592"),
        (-32, 31, "-32:31"),
        (1e6 + 1, 1e6 + 2, "1000001:1000002"),
        (3, 3, "LOW:HIGH"),
    ],
)
def test_the_advice_is_an_option_that_can_be_given(low: float, high: float, advice: str) -> None:
    from ncm_cli.images.options import parse_intensity_range

    assert range_advice(low, high) == f"--intensity-range={advice}"
    if low < high:
        first, second = parse_intensity_range(advice)
        assert first <= low and high <= second * 1.0001
        assert high - low > (second - first) / 4


@pytest.mark.parametrize("order", "<>")
def test_a_refusal_names_the_bits_of_the_file_and_the_natural_range(order: str) -> None:
    wide = {"i2": "16-bit signed", "i4": "32-bit signed", "u4": "32-bit unsigned", "f8": "64-bit floating"}
    for kind, words in wide.items():
        low, high = (0, 1) if kind == "f8" else (np.iinfo(kind).min, np.iinfo(kind).max)
        data = tiff(ramp(kind, low, high), photometric="minisblack", byteorder=order)
        with pytest.raises(UndeclaredRangeError, match=f"^{words}.*, here {low} to {high}: .*={low}:{high}$"):
            decode(data)


def two_tones(photometric: str) -> np.ndarray:
    """(16, 24) booleans as they are stored: a white disc left of the middle, on black."""
    rows, columns = np.mgrid[:16, :24]
    shown = (rows - 8) ** 2 + (columns - 7) ** 2 < 30
    return shown if photometric == "minisblack" else ~shown


@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
@pytest.mark.parametrize("compression", [None, "zlib", "packbits", "group3", "group4", "tiff_ccitt"])
def test_two_tones_come_out_as_a_viewer_shows_them(photometric: str, compression: str | None) -> None:
    bits = two_tones(photometric)
    if compression in (None, "zlib"):
        data = tiff(bits, photometric=photometric, compression=compression)
    else:  # tifffile writes none of these; Pillow writes what is shown
        stream = io.BytesIO()
        tags = {262: int(photometric == "minisblack")}
        Image.fromarray(two_tones("minisblack")).save(stream, "TIFF", compression=compression, tiffinfo=tags)
        data = stream.getvalue()
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages[0]
        assert page.bitspersample == 1
        if compression in (None, "zlib"):
            stored = page.asarray().astype(bool)
            meant = ~stored if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE else stored
            np.testing.assert_array_equal(meant, two_tones("minisblack"))
    shown = np.asarray(decode(data))
    assert set(np.unique(shown)) == {0, 255}
    with Image.open(io.BytesIO(data)) as opened:
        np.testing.assert_array_equal(shown, np.asarray(opened.convert("RGB")))
    np.testing.assert_array_equal(shown[..., 0] == 255, two_tones("minisblack"))


def test_a_range_is_part_of_the_fingerprint_and_its_absence_is_not() -> None:
    plain, ranged = (
        EncoderRequest(model="pixels:4"),
        EncoderRequest(model="pixels:4", intensity_range=(0, 4095)),
    )
    assert "intensity_range" not in plain.describe() and ranged.describe()["intensity_range"] == [0, 4095]
    assert request_key(plain) != request_key(ranged)
