"""Options of ``ncm embed`` that stand for others."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from ncm_cli.errors import InputError, UsageError
from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.images.request import EncoderRequest
from ncm_cli.options import check


def test_a_model_names_its_weights_behind_a_comma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    source, output = tmp_path / "m.csv", tmp_path / "f.h5"
    source.write_text("path\na.png\n")
    asked = []

    def stop(request: EncoderRequest, reporter: object) -> None:
        asked.append((request.model, request.pretrained))
        raise InputError("stop")

    monkeypatch.setattr("ncm_cli.images.embed.start_loading", stop)
    for model, pretrained in (("ViT-B-16,openai", None), ("ViT-B-16", "openai")):
        with pytest.raises(InputError, match="stop"):
            embed(EmbedOptions(source=source, output=output, model=model, pretrained=pretrained))
    assert asked == [("ViT-B-16", "openai")] * 2


def test_weights_are_named_once() -> None:
    where = {"source": Path("m.csv"), "output": Path("f.h5")}
    with pytest.raises(UsageError, match="the weights are named twice"):
        check(EmbedOptions(model="a,b", pretrained="c", **where))
    with pytest.raises(UsageError, match="no valid size"):
        check(EmbedOptions(model="pixels:4,b", **where))
