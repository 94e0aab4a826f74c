"""DomainBed's network for MNIST against one that is written from its description alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ncm_cli.errors import InputError
from ncm_cli.images.encoder import load_encoder, request_key
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import SILENT

MODEL = "domainbed:MNIST_CNN"


def reference() -> nn.Sequential:
    """Convolution, ReLU and group normalisation, four times; the mean over the picture."""
    layers: list[nn.Module] = []
    for before, after, stride in ((2, 64, 1), (64, 128, 2), (128, 128, 1), (128, 128, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.ReLU(), nn.GroupNorm(8, after)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def carried(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DomainBed's tensors, convolutions and then normalisations, under the reference's names."""
    names = reference().state_dict()
    order = [*(name for name in names if int(name[0]) % 3 == 0), *(n for n in names if int(n[0]) % 3)]
    return dict(zip(order, state.values(), strict=True))


def encoder_of(**more: Any) -> Any:
    return load_encoder(
        EncoderRequest(model=MODEL, **{"random_init": True} | more), device="cpu", reporter=SILENT
    )


def test_outputs_are_the_references() -> None:
    encoder, plain = encoder_of(seed=3), reference()
    plain.load_state_dict(carried(encoder.model.module.state_dict()))
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (28, 28, 3), np.uint8)) for _ in range(9)]
    features = encoder.encode([encoder.preprocess(picture, "") for picture in pictures])
    red_green = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])[..., :2] / 255)
    with torch.no_grad():
        expected = plain(red_green.float().permute(0, 3, 1, 2)).numpy()
    assert features.shape == (9, 128)
    assert np.abs(features - expected).max() < 5e-6
    assert np.abs(features - features[0]).max() > 0.01
    blue = [np.asarray(picture) * np.array([1, 1, 0], np.uint8) for picture in pictures]
    assert np.array_equal(encoder.encode(blue), features)


def test_random_weights_follow_the_seed() -> None:
    first, again, other = (encoder_of(seed=seed).description for seed in (3, 3, 4))
    assert first == again
    assert first["weights_sha256"] != other["weights_sha256"]
    assert first["image_size"] == [28, 28]


def test_a_checkpoint_in_domainbeds_names_is_loaded(tmp_path: Path) -> None:
    file, made = tmp_path / "mnist_cnn.pt", encoder_of(seed=5)
    names = {f"conv{i}.{part}" for i in range(1, 5) for part in ("weight", "bias")}
    names |= {f"bn{i}.{part}" for i in range(4) for part in ("weight", "bias")}
    assert set(made.model.module.state_dict()) == names
    torch.save(made.model.module.state_dict(), file)
    loaded = encoder_of(random_init=False, pretrained=str(file))
    picture = np.random.default_rng(1).integers(0, 256, (28, 28, 3), np.uint8)
    assert np.array_equal(loaded.encode([picture]), made.encode([picture]))
    torch.save({"conv1.weight": torch.zeros(64, 2, 3, 3)}, file)
    with pytest.raises(InputError, match="doesn't fit the model"):
        encoder_of(random_init=False, pretrained=str(file))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "domainbed:MNIST_CN"}, "did you mean 'MNIST_CNN'"),
        ({"random_init": False, "pretrained": "default"}, "has no weights for MNIST_CNN"),
        ({"random_init": False}, "no weights given"),
    ],
)
def test_what_can_not_be_loaded_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        load_encoder(
            EncoderRequest(**{"model": MODEL, "random_init": True} | given), device="cpu", reporter=SILENT
        )
    assert said in str(refused.value)


def test_the_key_is_known_without_loading() -> None:
    key = request_key(EncoderRequest(model=MODEL, random_init=True, seed=2))
    assert key["kind"] == "domainbed"
    assert set(key["libraries"]) == {"torchvision", "pillow"}
