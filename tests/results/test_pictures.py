"""Thumbnails: what the encoder saw, within a budget, and a reason for each that is missing."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path

import numpy as np
from PIL import Image

from ncm_cli.results.pictures import Thumbnails, Tile


def _opened(tile: Tile) -> Image.Image:
    assert tile.src is not None, tile.why
    return Image.open(io.BytesIO(base64.b64decode(tile.src.partition(",")[2])))


def test_pictures_are_decoded_as_the_encoder_saw_them(tmp_path: Path) -> None:
    tiny = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(tiny).save(tmp_path / "tiny.png")
    made = Thumbnails().tile("tiny", str(tmp_path / "tiny.png"))
    assert made.crisp and np.array_equal(np.asarray(_opened(made)), tiny)
    deep = np.full((300, 200), 0x80FF, dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    path = str(tmp_path / "deep.png")
    pictures = Thumbnails()
    shown = _opened(pictures.tile("deep", path)).convert("RGB")
    assert shown.size == (75, 112) and abs(np.asarray(shown).mean() - 0x80) < 3
    ranged = _opened(pictures.tile("deep", path, encoder={"intensity_range": [0, 0x80FF]}))
    assert np.asarray(ranged.convert("RGB")).mean() > 250
    view = {"view": {"augment": "invert", "seed": 0}, "intensity_range": [0, 0x80FF]}
    assert np.asarray(_opened(pictures.tile("deep", path, encoder=view)).convert("RGB")).mean() < 5


def test_a_missing_picture_says_why(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.new("RGB", (200, 200)).save(good)
    digest = hashlib.sha256(good.read_bytes()).hexdigest()
    bad.write_bytes(good.read_bytes()[:-20])
    pictures = Thumbnails()
    assert pictures.tile("a", None).why == "a row of an array has no picture"
    assert pictures.tile("a", str(tmp_path / "nothing.png")).why == "no such file"
    assert pictures.tile("a", str(good), "0" * 64).why == "changed since it was embedded"
    assert pictures.tile("a", str(bad)).why.startswith("truncated PNG")
    shown = pictures.tile("a", str(good), digest)
    assert shown.src and not shown.why
    short = Thumbnails(budget=len(shown.src) + 1)
    assert [short.tile("a", str(good)).why for _ in range(3)] == ["", "the page is full", "the page is full"]
