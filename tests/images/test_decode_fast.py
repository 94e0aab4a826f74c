"""``--decode fast``: JPEG files read at a reduced size, nearly the exact features, never mixed with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import MismatchError, UsageError
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import SILENT
from ncm_cli.store.features import FeatureStore


def save_jpeg(path: Path, width: int, height: int, orientation: int = 1) -> Path:
    """Red from left to right, green from top to bottom: a picture that is shifted or stretched shows."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    exif = Image.Exif()
    exif[0x0112] = orientation
    values = np.stack([red, green, np.full_like(red, 99)], axis=-1).astype(np.uint8)
    Image.fromarray(values).save(path, "JPEG", quality=95, exif=exif)
    return path


@pytest.mark.parametrize(
    ("sides", "orientation", "read"),
    [
        ((400, 320), 1, (50, 40)),
        ((399, 321), 1, (50, 41)),
        ((324, 332), 6, (83, 81)),
        ((321, 399), 3, (321, 399)),  # turned, it would begin within its first column
        ((85, 400), 1, (43, 200)),
        ((79, 400), 1, (79, 400)),
    ],
)
def test_a_reduced_picture_is_where_the_whole_one_is(
    tmp_path: Path, sides: tuple[int, int], orientation: int, read: tuple[int, int]
) -> None:
    data = save_jpeg(tmp_path / "a.jpg", *sides, orientation=orientation).read_bytes()
    exact, fast = (
        load_encoder(EncoderRequest(model="pixels:16", decode=how), reporter=SILENT)
        for how in ("exact", "fast")
    )
    picture = fast.preprocess.decode(data)
    assert picture.size == read
    wanted, made = (one.encode([one.preprocess(one.preprocess.decode(data), "")]) for one in (exact, fast))
    assert np.abs(made - wanted).max() < (0.015 if read[0] < sides[0] else 1e-9)


def test_exact_and_fast_rows_are_never_mixed(pictures: Any) -> None:
    folder = pictures.folder / "images"
    folder.mkdir()
    save_jpeg(folder / "a.jpg", 300, 200)
    pictures.embed(source=folder, decode="fast")
    with FeatureStore(pictures.output) as store:
        assert store.encoder["decode"] == "fast"
        fast = store.fingerprint
    with pytest.raises(MismatchError) as caught:
        pictures.embed(source=folder)
    assert "decode: fast there" in str(caught.value.found)
    pictures.embed(source=folder, fresh=True)
    with FeatureStore(pictures.output) as store:
        assert "decode" not in store.encoder and store.fingerprint != fast
    with pytest.raises(UsageError, match="full size"):
        pictures.embed(source=folder, decode="fast", augment="noise", fresh=True)


@pytest.mark.slow
def test_features_of_fast_decoding_have_a_cosine_above_999(
    effnet_checkpoint: Path, pacs_dir: Path, tmp_path: Path
) -> None:
    files = sorted(path for name in ("photo", "art_painting") for path in (pacs_dir / name).rglob("*.jpg"))
    rng = np.random.default_rng(0)
    request = {"model": "timm:tf_efficientnet_lite0", "pretrained": str(effnet_checkpoint)}
    exact, fast = (
        load_encoder(EncoderRequest(decode=how, **request), device="cpu", reporter=SILENT)
        for how in ("exact", "fast")
    )
    # From one picture enlarged to a hundred side by side, which have detail down to the last pixel.
    for columns, rows, side in [(1, 1, 2999), (1, 1, 1300), (2, 1, 1500), (9, 6, 229), (12, 9, 301)]:
        whole = Image.new("RGB", (columns * side, rows * side))
        for at in range(columns * rows):
            one = Image.open(files[rng.integers(len(files))]).resize((side, side), Image.Resampling.BICUBIC)
            whole.paste(one, (at % columns * side, at // columns * side))
        whole.save(tmp_path / "a.jpg", quality=90)
        data = (tmp_path / "a.jpg").read_bytes()
        rows_made = []
        for encoder in (exact, fast):
            picture = encoder.preprocess.decode(data)
            rows_made.append(encoder.encode([encoder.preprocess(picture, "")])[0])
        assert picture.size[0] < whole.size[0]
        a, b = rows_made
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.999, (columns, rows, side)
    # Pictures of the model's own size are read as they are.
    for path in files[::100]:
        assert fast.preprocess.decode(path.read_bytes()) == exact.preprocess.decode(path.read_bytes())
