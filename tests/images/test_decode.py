"""Decoding: every mode becomes RGB by one policy, and nothing but a whole picture comes out."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps, PngImagePlugin

from ncm_cli.images.decode import decode, exif_orientation, read_bytes
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.request import EncoderRequest
from ncm_cli.images.samples import MAX_PIXELS, DecodeError, to_rgb
from ncm_cli.progress import SILENT

from .conftest import picture

CONTAINERS: dict[str, dict] = {
    "JPEG": {},
    "JPEG progressive": {"progressive": True},
    "PNG": {},
    "GIF": {},
    "WEBP": {},
    "WEBP lossless": {"lossless": True},
    "BMP": {},
    "TIFF": {},
    "TIFF lzw": {"compression": "tiff_lzw"},
    "TIFF deflate": {"compression": "tiff_adobe_deflate"},
    "PPM": {},
    "JPEG2000": {},
}


def saved(image: Image.Image, name: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, name.split()[0], **{**CONTAINERS.get(name, {}), **options})
    return stream.getvalue()


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">L", len(body)) + name + body + struct.pack(">L", zlib.crc32(name + body))


@pytest.fixture
def load_truncated() -> Iterator[None]:
    """The process as a careless library leaves it."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    yield
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True, "decoding changed Pillow's switch"
    ImageFile.LOAD_TRUNCATED_IMAGES = before


@pytest.mark.parametrize("name", CONTAINERS)
def test_whole_files_decode_to_what_pillow_shows(name: str, tmp_path: Path) -> None:
    data = saved(picture(40, 60), name)
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(opened.convert("RGB"))
    np.testing.assert_array_equal(pixels(decode(data)), expected)
    path = tmp_path / "x.dat"
    path.write_bytes(data + b"\0trailing garbage" * 9)
    np.testing.assert_array_equal(pixels(decode(path)), expected)
    assert decode(path).info == {}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_cut_is_a_failure(name: str) -> None:
    data = saved(picture(40, 60), name)
    lengths = {0, 1, 2, len(data) // 2, *range(0, len(data), max(1, len(data) // 40))}
    for length in sorted(lengths | {len(data) - n for n in (1, 2, 3)}):
        with pytest.raises(DecodeError, match=r"truncated|damaged|empty|not an image|end marker"):
            decode(data[:length])


@pytest.mark.parametrize("name", CONTAINERS)
def test_truncated_files_fail_under_load_truncated_too(name: str, load_truncated: None) -> None:
    """python-pillow/Pillow#4414."""
    data = saved(picture(40, 60), name)
    decode(data)
    for share in (0.3, 0.5, 0.9):
        with pytest.raises(DecodeError):
            decode(data[: int(len(data) * share)])
    with pytest.raises(DecodeError):
        decode(data[:-1])


def test_positive_control_the_switch_does_fill_with_grey(load_truncated: None) -> None:
    """python-pillow/Pillow#4414."""
    data = saved(picture(200, 200), "JPEG")
    with Image.open(io.BytesIO(data[: len(data) // 2])) as opened:
        filled = np.asarray(opened)
    assert len(np.unique(filled[-20:].reshape(-1, 3), axis=0)) == 1


def test_corrupt_compressed_data_fails_under_load_truncated_too(load_truncated: None) -> None:
    raw = np.asarray(picture(64, 64)).tobytes()
    body = bytearray(zlib.compress(b"".join(b"\0" + raw[i : i + 192] for i in range(0, len(raw), 192))))
    body[len(body) // 2 : len(body) // 2 + 40] = b"\xff" * 40
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">LLBBBBB", 64, 64, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", bytes(body))
        + chunk(b"IEND", b"")
    )
    with pytest.raises(DecodeError, match="damaged PNG"):
        decode(png)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"<html>404", "an HTML page"),
        (b"\xef\xbb\xbf <!DOCTYPE html><p>", "an HTML page"),
        (b"<?xml version='1.0'?><svg/>", "an XML file"),
        (b"\0" * 4096, "4096 zero bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"%PDF-1.4", "a PDF"),
        (b"\0\0\1\0\1\0", "a Windows icon; convert it to PNG"),
        (b"PK\3\4zip", "a zip archive"),
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"hello, world", "starts with 'hello, world'"),
        (b"\xff\xd8\xff", "damaged JPEG"),
        (b"\x89PNG\r\n\x1a\n", "truncated PNG"),
        (b"BM but only text, nothing like a bitmap", "damaged BMP"),
        (b"GIF89a", "truncated GIF"),
        (b"II*\0\xff\xff\xff\xff", "damaged TIFF"),
        (b"RIFF\x04\0\0\0WEBP", "damaged WEBP"),
        (b"P6\n0 5\n255\n", "damaged PPM"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "PostScript"),
    ],
)
def test_what_is_no_picture_has_its_reason(data: bytes, reason: str) -> None:
    """rom1504/clip-retrieval#89."""
    with pytest.raises(DecodeError, match=reason):
        decode(data)


def test_paths_that_are_no_files_have_their_reasons(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match="a folder"):
        decode(tmp_path)
    with pytest.raises(DecodeError, match="no such file"):
        decode(tmp_path / "none.png")
    with pytest.raises(DecodeError, match="cannot be read"):
        decode("a\0b.png")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DecodeError, match="not a regular file"):  # and no waiting for a writer
            decode(tmp_path / "pipe")


def test_content_decides_the_format(tmp_path: Path) -> None:
    """visual-layer/fastdup#322."""
    for name in ("GIF", "PNG", "BMP", "WEBP"):
        path = tmp_path / f"{name}.jpg"
        path.write_bytes(saved(picture(20, 30), name))
        assert decode(path).size == (30, 20)


def test_sixteen_bit_grey_is_scaled_never_constant() -> None:
    """python-pillow/Pillow#3011."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    eight = (ramp >> 8).astype(np.uint8)
    for name in ("PNG", "TIFF", "TIFF lzw"):
        grey = pixels(decode(saved(Image.fromarray(ramp), name)))
        np.testing.assert_array_equal(grey, np.repeat(eight[..., None], 3, axis=2), err_msg=name)
    big_endian = Image.frombytes("I;16B", (256, 256), ramp.astype(">u2").tobytes())
    np.testing.assert_array_equal(pixels(decode(saved(big_endian, "TIFF")))[..., 0], eight)


def test_sixteen_bit_colour_png_agrees_with_sixteen_bit_grey() -> None:
    """python-pillow/Pillow#3011."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    rows = np.repeat(ramp[..., None], 3, axis=2).astype(">u2")
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">LLBBBBB", 256, 256, 16, 2, 0, 0, 0))
        + chunk(b"IDAT", body)
        + chunk(b"IEND", b"")
    )
    np.testing.assert_array_equal(pixels(decode(png)), pixels(decode(saved(Image.fromarray(ramp), "PNG"))))


@pytest.mark.parametrize(
    ("values", "span", "expected"),
    [
        (np.linspace(0, 1, 64, dtype=np.float32), (0, 1), np.rint(np.linspace(0, 255, 64))),
        (np.arange(64, dtype=np.float32) * 4, (0, 255), np.arange(64) * 4),
        (np.arange(64, dtype=np.int32) * 4, (0, 255), np.arange(64) * 4),
        (np.arange(64, dtype=np.int32) * 1024, (0, 65280), np.arange(64) * 4),
        (np.arange(64, dtype=np.float32) - 32, (-32, 31), np.rint(np.arange(64) * 255 / 63)),
        (np.arange(64, dtype=np.int32) * 10**7, (0, 63 * 10**7), np.rint(np.arange(64) * 255 / 63)),
        (np.arange(64, dtype=np.int32) * 8 - 128, (0, 255), np.clip(np.arange(64) * 8 - 128, 0, 255)),
    ],
)
def test_float_and_integer_tiffs_are_scaled_by_the_range_that_is_said(
    values: np.ndarray, span: tuple[float, float], expected: np.ndarray
) -> None:
    data = saved(Image.fromarray(values.reshape(8, 8)), "TIFF")
    np.testing.assert_array_equal(pixels(decode(data, span))[..., 0].ravel(), expected)
    with pytest.raises(DecodeError, match=r"without a declared range.* ncm embed --intensity-range="):
        decode(data)


def test_values_that_are_not_finite_are_a_failure() -> None:
    values = np.ones((4, 4), np.float32)
    values[1, 2] = np.nan
    with pytest.raises(DecodeError, match="not finite"):
        decode(saved(Image.fromarray(values), "TIFF"))


def test_cmyk_jpegs_look_like_the_rgb_original() -> None:
    """pytorch/vision#3012."""
    original = picture(64, 64)
    cmyk = saved(original.convert("CMYK"), "JPEG", quality=95, subsampling=0)
    assert b"Adobe" in cmyk  # stored inverted, as Adobe's programs do
    ycck = _as_ycck(cmyk)
    encoder = load_encoder(EncoderRequest(model="pixels:8"), device="cpu", reporter=SILENT)
    rgb = saved(original, "JPEG", quality=95, subsampling=0)
    wanted, found = encoder.encode([encoder.preprocess(decode(data), "") for data in (rgb, cmyk)])
    assert np.abs(wanted - found).max() < 0.03
    assert decode(ycck).mode == "RGB"


def _as_ycck(cmyk: bytes) -> bytes:
    """The same stream declared YCCK in its Adobe segment (its colours change, its mode doesn't)."""
    at = cmyk.index(b"Adobe") + 11
    return cmyk[:at] + b"\x02" + cmyk[at + 1 :]


def test_palette_is_converted_before_anything_is_resized() -> None:
    """python-pillow/Pillow#9270."""
    palette = picture(60, 80).quantize(16)
    encoder = load_encoder(EncoderRequest(model="pixels:7"), device="cpu", reporter=SILENT)
    a, b = (decode(saved(image, "PNG")) for image in (palette, palette.convert("RGB")))
    np.testing.assert_array_equal(pixels(a), pixels(b))
    items = [encoder.preprocess(image, "") for image in (a, b)]
    np.testing.assert_array_equal(*encoder.encode(items))


def test_transparency_is_over_white_whatever_its_form() -> None:
    """NVIDIA/DIGITS#85."""
    rgba = np.zeros((30, 30, 4), np.uint8)
    rgba[...] = [255, 0, 0, 0]
    rgba[10:20, 10:20] = [0, 200, 0, 255]
    wanted = np.full((30, 30, 3), 255, np.uint8)
    wanted[10:20, 10:20] = [0, 200, 0]
    indexes = np.zeros((30, 30), np.uint8)
    indexes[10:20, 10:20] = 1
    palette = Image.fromarray(indexes, "L").convert("P")
    palette.putpalette([255, 0, 0, 0, 200, 0])
    key = Image.fromarray(rgba[..., :3].copy())
    forms = {
        "RGBA": saved(Image.fromarray(rgba), "PNG"),
        "RGBA webp": saved(Image.fromarray(rgba), "WEBP lossless"),
        "RGBA tiff": saved(Image.fromarray(rgba), "TIFF"),
        "P + tRNS bytes": saved(palette, "PNG", transparency=b"\0\xff"),
        "P + tRNS index": saved(palette, "PNG", transparency=0),
        "GIF": saved(palette, "GIF", transparency=0),
        "RGB + tRNS": saved(key, "PNG", transparency=(255, 0, 0)),
    }
    for name, data in forms.items():
        np.testing.assert_array_equal(pixels(decode(data)), wanted, err_msg=name)


def test_partial_alpha_and_transparent_grey() -> None:
    """NVIDIA/DIGITS#85."""
    half = Image.new("RGBA", (3, 3), (0, 0, 0, 128))
    assert pixels(decode(saved(half, "PNG")))[1, 1].tolist() == [127, 127, 127]
    grey = Image.new("LA", (3, 3), (10, 0))
    assert pixels(decode(saved(grey, "PNG")))[1, 1].tolist() == [255, 255, 255]
    wide = Image.fromarray(np.array([[0, 40000], [40000, 0]], np.uint16))
    data = saved(wide, "PNG")
    at = data.index(b"IDAT") - 4
    keyed = data[:at] + chunk(b"tRNS", struct.pack(">H", 40000)) + data[at:]
    assert pixels(decode(keyed))[..., 0].tolist() == [[0, 255], [255, 0]]


ORIENTATIONS = range(1, 9)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP lossless", "TIFF"])
def test_orientation_is_applied(name: str, orientation: int) -> None:
    """pytorch/vision#7977."""
    image = picture(24, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(image, name, exif=exif.tobytes())
    plain = decode(saved(image, name))
    upright = Image.Image.copy(plain)
    upright.getexif()[0x0112] = orientation
    wanted = ImageOps.exif_transpose(upright)
    np.testing.assert_array_equal(pixels(decode(data)), pixels(wanted))
    assert (decode(data).size == plain.size) is (orientation < 5)


def test_orientation_in_a_profile_as_imagemagick_writes_it() -> None:
    """pytorch/vision#7977."""
    exif = Image.Exif()
    exif[0x0112] = 6
    block = exif.tobytes()
    info = PngImagePlugin.PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n{len(block):8}\n{block.hex()}\n", zip=True)
    assert decode(saved(picture(24, 40), "PNG", pnginfo=info)).size == (24, 40)


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0garbage and more garbage",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x09\0\0",  # 9
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x02\0\x06\0\0",  # two values
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x01\x06\0\0\0",  # text
    ],
)
def test_a_broken_exif_block_is_ignored(exif: bytes) -> None:
    """pytorch/vision#7977."""
    assert exif_orientation(exif) == 1
    image = picture(24, 40)
    data = saved(image, "JPEG", exif=exif) if exif else saved(image, "JPEG")
    np.testing.assert_array_equal(pixels(decode(data)), pixels(decode(saved(image, "JPEG"))))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "code"), [(1, "B"), (3, "H"), (4, "L")])
def test_orientation_is_read_in_both_byte_orders_and_widths(order: str, kind: int, code: str) -> None:
    """pytorch/vision#7977."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    value = struct.pack(order + code, 6).ljust(4, b"\0")
    block = mark + struct.pack(order + "LHHHL", 8, 1, 0x0112, kind, 1) + value
    assert exif_orientation(block) == exif_orientation(b"Exif\0\0" + block) == 6


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "F"])
def test_every_mode_embeds(mode: str) -> None:
    """openai/CLIP#244."""
    image = picture(16, 24)
    if mode == "LAB":
        from PIL import ImageCms

        image = ImageCms.profileToProfile(
            image, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
        )
    elif mode == "LA":
        image = image.convert("L").convert("LA")
    elif mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    else:
        image = image.convert(mode)
    data = saved(image, "PNG" if mode == "LA" else "TIFF")
    if mode == "YCbCr":
        try:
            Image.open(io.BytesIO(data)).load()
        except OSError:
            pytest.skip("Pillow before version 13 can't read the TIFF in YCbCr that it writes")
    decoded = decode(data, (0, 255) if mode == "F" else None)
    assert decoded.size == (24, 16)
    assert pixels(decoded).std() > 5
    if mode == "LAB":
        assert np.abs(pixels(decoded).astype(int) - np.asarray(picture(16, 24))).mean() < 3
    if mode == "L":
        np.testing.assert_array_equal(pixels(decoded), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["PA", "La", "RGBa", "RGBX", "HSV"])
def test_modes_that_no_file_of_ours_holds_become_rgb_too(mode: str) -> None:
    image = picture(16, 24)
    steps = {"PA": ["P", "PA"], "La": ["L", "LA", "La"], "RGBa": ["RGBA", "RGBa"]}.get(mode, [mode])
    wanted = image.convert("P").convert("RGB") if mode == "PA" else image
    for step in steps:
        image = image.convert(step)
    found = pixels(to_rgb(image, "TIFF"))
    wanted = wanted.convert("L").convert("RGB") if mode == "La" else wanted
    assert np.abs(found.astype(int) - np.asarray(wanted)).mean() < 3


def test_an_over_limit_picture_states_the_limit_and_allocates_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """huggingface/dataset-viewer#1192."""
    import tracemalloc

    row = b"\0" + b"\xff" * 2500
    packed = zlib.compressobj(9)
    body = b"".join(packed.compress(row) for _ in range(20000)) + packed.flush()
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">LLBBBBB", 20000, 20000, 1, 0, 0, 0, 0))
        + chunk(b"IDAT", body)
        + chunk(b"IEND", b"")
    )
    assert len(png) < 100_000
    for limit in (None, 10, Image.MAX_IMAGE_PIXELS):  # Pillow's own limit plays no part
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        tracemalloc.start()
        with pytest.raises(DecodeError, match=f"20000 x 20000 .* over the limit of {MAX_PIXELS:,} pixels"):
            decode(png)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
        tracemalloc.stop()


def test_pillows_own_limit_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for name in ("JPEG", "PNG", "BMP"):
        assert decode(saved(picture(40, 60), name)).size == (60, 40)


def test_a_file_over_the_byte_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncm_cli.images.decode.MAX_BYTES", 100)
    (tmp_path / "x.jpg").write_bytes(b"\xff\xd8\xff" + b"\0" * 200)
    with pytest.raises(DecodeError, match="file of 203 bytes, over the limit of 100"):
        decode(tmp_path / "x.jpg")


@pytest.mark.parametrize("name", ["GIF", "PNG", "WEBP lossless", "TIFF"])
def test_the_first_frame_is_used_with_a_note(name: str) -> None:
    frames = [picture(20, 30, seed) for seed in range(3)]
    data = saved(frames[0], name, save_all=True, append_images=frames[1:])
    image = decode(data)
    assert "only the first" in image.info["note"]
    np.testing.assert_array_equal(pixels(image), pixels(decode(saved(frames[0], name))))
    assert decode(saved(frames[0], name)).info == {}
    if name != "TIFF":
        with pytest.raises(DecodeError, match="truncated"):
            decode(data[: int(len(data) * 0.9)])


def test_an_mpo_is_its_first_picture() -> None:
    frames = [picture(20, 30, seed) for seed in range(2)]
    data = saved(frames[0], "MPO", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(pixels(decode(data)), pixels(decode(saved(frames[0], "JPEG"))))


def test_a_png_with_a_wrong_checksum_or_a_text_bomb_fails() -> None:
    data = bytearray(saved(picture(40, 60), "PNG"))
    data[data.index(b"IDAT") + 30] ^= 1
    with pytest.raises(DecodeError, match="wrong checksum in chunk 'IDAT'"):
        decode(bytes(data))
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * (PngImagePlugin.MAX_TEXT_CHUNK + 1), zip=True)
    with pytest.raises(DecodeError, match=r"damaged PNG file: .*too large"):
        decode(saved(picture(4, 4), "PNG", pnginfo=info))


def test_an_icc_profile_changes_nothing() -> None:
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    plain = saved(picture(20, 20), "PNG")
    np.testing.assert_array_equal(
        pixels(decode(saved(picture(20, 20), "PNG", icc_profile=profile))), pixels(decode(plain))
    )


@pytest.mark.parametrize("name", CONTAINERS)
def test_random_damage_is_a_picture_or_a_decode_error(name: str) -> None:
    """Never another exception, a warning or a wrong mode, whatever bytes are flipped."""
    data = saved(picture(40, 60), name)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for _ in range(120):
        broken = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 6)):
            broken[at] = rng.integers(256)
        try:
            assert decode(bytes(broken)).mode == "RGB"
        except DecodeError as error:
            assert error.reason
            assert "\n" not in error.reason


def test_threads_decode_alike() -> None:
    files = [saved(picture(50, 40, seed), name) for seed in range(4) for name in CONTAINERS]
    alone = [pixels(decode(data)) for data in files]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda data: pixels(decode(data)), files * 3))
    for index, found in enumerate(together):
        np.testing.assert_array_equal(found, alone[index % len(files)])


def test_threads_leave_the_switch_and_no_partial_picture(load_truncated: None) -> None:
    cut = [saved(picture(200, 200, seed), name)[:-3000] for seed in range(8) for name in ("JPEG", "PNG")]

    def refused(data: bytes) -> bool:
        with pytest.raises(DecodeError, match=r"truncated|damaged"):
            decode(data)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(refused, cut * 4))


def test_real_pictures_decode_as_pillow_does(pacs_dir: Path) -> None:
    paths = [next(iter(sorted(folder.iterdir()))) for folder in sorted(pacs_dir.glob("*/*"))]
    assert len(paths) >= 20
    for path in paths:
        with Image.open(path) as opened:
            if "transparency" in opened.info or opened.mode not in {"RGB", "L"}:
                continue
            np.testing.assert_array_equal(pixels(decode(path)), np.asarray(opened.convert("RGB")))


def test_odd_tiff_metadata_is_quiet_and_a_turned_tiff_of_several_bits_is_right() -> None:
    ramp = np.arange(600, dtype=np.uint16).reshape(20, 30) * 100
    exif = Image.Exif()
    exif[0x0112] = 8
    for name in ("TIFF", "TIFF lzw"):
        turned = pixels(decode(saved(Image.fromarray(ramp), name, exif=exif.tobytes())))
        np.testing.assert_array_equal(turned[..., 0], np.rot90(ramp >> 8))
    data = bytearray(saved(picture(20, 30), "TIFF", software="x" * 40))
    at = data.index(struct.pack("<HHL", 305, 2, 41)) + 8
    data[at : at + 4] = struct.pack("<L", len(data) + 100)  # the text lies beyond the end of the file
    assert decode(bytes(data)).size == (30, 20)


def test_a_header_that_cannot_be_read_is_said_in_plain_words() -> None:
    with pytest.raises(DecodeError, match="damaged JPEG file: its header can't be read"):
        decode(b"\xff\xd8\xff")


def test_a_file_that_gives_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``/proc/kmsg`` does, which is a regular file by its mode."""
    read, _ = os.pipe()
    os.set_blocking(read, False)
    monkeypatch.setattr("ncm_cli.images.decode.open_regular", lambda path: os.fdopen(read, "rb", buffering=0))
    with pytest.raises(DecodeError, match="not a regular file"):
        read_bytes(tmp_path)
