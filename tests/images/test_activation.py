"""QuickGELU or GELU: recorded, told from what a checkpoint says, doubted where it says nothing."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.images.clip_model import OPENAI_SETTINGS, evidence_in
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import SILENT
from ncm_cli.store.digests import fingerprint

from .conftest import copied, picture, reference


def test_activations_are_recorded_and_are_not_interchangeable(tiny_clip) -> None:
    """mlfoundations/open_clip#771."""
    plain, quick = (
        load_encoder(
            EncoderRequest(model=str(config), pretrained=str(tiny_clip.checkpoint)),
            device="cpu",
            reporter=SILENT,
        )
        for config in (tiny_clip.config, tiny_clip.quick_config)
    )
    assert plain.description["activation"] == "GELU"
    assert quick.description["activation"] == "QuickGELU"
    assert fingerprint(plain.description) != fingerprint(quick.description)
    item = plain.preprocess(picture(32, 32), "")
    assert np.abs(plain.encode([item]) - quick.encode([item])).max() > 1e-4


def test_a_quickgelu_checkpoint_under_a_plain_name_is_warned_about(tiny_clip, heard, tmp_path: Path) -> None:
    """mlfoundations/open_clip#771."""
    named = copied(tiny_clip.safetensors, tmp_path / "ViT-tiny-quickgelu.safetensors")
    load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(named)), device="cpu", reporter=heard
    )
    assert re.search(
        r'QuickGELU mismatch: the model tiny uses GELU.*Set "quick_gelu": true in the configuration',
        heard.warnings[0],
    )
    heard.warnings.clear()
    load_encoder(
        EncoderRequest(model=str(tiny_clip.quick_config), pretrained=str(named)), device="cpu", reporter=heard
    )
    assert heard.warnings == []


def test_a_configuration_beside_the_checkpoint_tells_its_activation(tiny_clip, heard, tmp_path: Path) -> None:
    """mlfoundations/open_clip#771."""
    path = copied(tiny_clip.safetensors, tmp_path / "x.safetensors")
    config = {"model_cfg": json.loads(tiny_clip.quick_config.read_text())}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(path)), device="cpu", reporter=heard
    )
    assert "open_clip_config.json beside it says so" in heard.warnings[0]


def test_openais_own_archives_are_known(tiny_clip, heard, tmp_path: Path) -> None:
    """A TorchScript archive of half-precision tensors with OpenAI's three settings in it.

    mlfoundations/open_clip#771.
    """
    import torch

    model, _ = reference(f"local-dir:{tiny_clip.folder}")

    class Archive(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in OPENAI_SETTINGS:
                self.register_buffer(name, torch.tensor(3))
            self.visual = torch.nn.Module()

        def forward(self) -> int:
            return 1

    archive = Archive()
    for name, value in model.state_dict().items():
        *parents, last = name.split(".")
        place: Any = archive
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, torch.nn.Module())
            place = getattr(place, parent)
        place.register_buffer(last, value.half())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what OpenAI's files are made with
        torch.jit.save(torch.jit.script(archive), str(tmp_path / "tiny.pt"))
    encoder = load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(tmp_path / "tiny.pt")),
        device="cpu",
        reporter=heard,
    )
    assert "TorchScript archive, as OpenAI's are" in heard.warnings[0]
    item = encoder.preprocess(picture(32, 32), "")
    expected = model.encode_image(encoder.batch([item])).detach().numpy()  # type: ignore[attr-defined]
    np.testing.assert_allclose(encoder.encode([item]), expected, atol=5e-3)  # half-precision weights


def test_a_doubtful_activation_is_warned_about_and_a_said_one_is_not(
    tiny_clip, heard, tmp_path: Path
) -> None:
    """mlfoundations/open_clip#771."""
    unsaid = json.loads(tiny_clip.config.read_text())
    del unsaid["quick_gelu"]
    (tmp_path / "unsaid.json").write_text(json.dumps(unsaid))
    load_encoder(
        EncoderRequest(model=str(tmp_path / "unsaid.json"), pretrained=str(tiny_clip.checkpoint)),
        device="cpu",
        reporter=heard,
    )
    assert "doesn't say whether it was trained with GELU or QuickGELU; GELU is used" in heard.warnings[0]
    heard.warnings.clear()
    load_encoder(
        EncoderRequest(model=str(tiny_clip.config), pretrained=str(tiny_clip.checkpoint)),
        device="cpu",
        reporter=heard,
    )
    assert heard.warnings == []


@pytest.mark.parametrize(
    ("name", "quick"),
    [
        ("ViT-B-32-openai.pt", True),
        ("ViT-B-32-quickgelu.pt", True),
        ("vit_b_32-laion2b_s34b_b79k.pt", False),
        ("epoch_10.pt", None),
    ],
)
def test_names_of_files_tell_what_open_clip_knows_of_them(
    name: str, quick: bool | None, tiny_clip, tmp_path: Path
) -> None:
    """mlfoundations/open_clip#771."""
    assert evidence_in(copied(tiny_clip.checkpoint, tmp_path / name))[0] is quick


def test_only_the_image_towers_activation_counts(tiny_clip, tmp_path: Path) -> None:
    config = json.loads(tiny_clip.config.read_text())
    config["vision_cfg"] |= {"layers": [1, 1, 1, 1], "width": 8, "patch_size": None, "image_size": 32}
    (tmp_path / "resnet.json").write_text(json.dumps(config))
    request = EncoderRequest(model=str(tmp_path / "resnet.json"), random_init=True)
    assert load_encoder(request, device="cpu", reporter=SILENT).description["activation"] == "ReLU"


@pytest.mark.parametrize(
    ("model", "used"), [("convnext_atto", "GELU"), ("resnet10t", "ReLU"), ("tf_efficientnet_lite0", "ReLU6")]
)
def test_activations_of_timm_models_are_recorded(model: str, used: str) -> None:
    encoder = load_encoder(
        EncoderRequest(model=f"timm:{model}", random_init=True), device="cpu", reporter=SILENT
    )
    assert encoder.description["activation"] == used
