"""EfficientNet-Lite0 with real ImageNet weights: names map, features are timm's own, dogs are dogs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError
from ncm_cli.images.decode import decode
from ncm_cli.images.encoder import load_encoder
from ncm_cli.images.request import EncoderRequest
from ncm_cli.progress import SILENT

DOGS = range(151, 269)
"""ImageNet's classes of dogs, from Chihuahua to Mexican hairless."""


def _request(checkpoint: Path) -> EncoderRequest:
    return EncoderRequest(model="timm:tf_efficientnet_lite0", pretrained=str(checkpoint))


def _classifier(checkpoint: Path):
    import timm

    return timm.create_model(
        "tf_efficientnet_lite0", pretrained=False, checkpoint_path=str(checkpoint)
    ).eval()


def test_features_are_timms_own_pooled_ones(effnet_checkpoint: Path) -> None:
    import torch
    from timm.data import create_transform, resolve_data_config

    encoder = load_encoder(_request(effnet_checkpoint), device="cpu", reporter=SILENT)
    model = _classifier(effnet_checkpoint)
    transform = create_transform(**resolve_data_config({}, model=model), is_training=False)
    rng = np.random.default_rng(3)
    images = [
        Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in [(300, 240), (64, 200)]
    ]
    items = [encoder.preprocess(image, str(i)) for i, image in enumerate(images)]
    wanted = torch.stack([transform(image) for image in images])
    assert torch.equal(encoder.batch(items), wanted)  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(wanted), pre_logits=True).numpy()
    features = encoder.encode(items)
    assert features.shape == (2, 1280) == (2, encoder.dim)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected, atol=1e-5)
    assert encoder.description["weights_sha256"] is not None
    assert encoder.description["preprocess"]["crop"] == 0.875


@pytest.mark.slow
def test_dogs_fall_into_the_dog_classes(effnet_checkpoint: Path, pacs_dir: Path) -> None:
    import torch

    encoder = load_encoder(_request(effnet_checkpoint), device="cpu", reporter=SILENT)
    head = _classifier(effnet_checkpoint).get_classifier()
    shares = {}
    for name in ("dog", "guitar"):
        paths = sorted((pacs_dir / "photo" / name).iterdir())
        items = [encoder.preprocess(decode(path), path.name) for path in paths]
        features = np.concatenate([encoder.encode(items[i : i + 20]) for i in range(0, len(items), 20)])
        with torch.no_grad():
            classes = head(torch.from_numpy(features)).argmax(1).tolist()
        shares[name] = sum(index in DOGS for index in classes) / len(paths)
    print(f"share of photos in the dog classes: {shares}")
    assert shares["dog"] > 0.85
    assert shares["guitar"] < 0.05


def test_checkpoints_may_hold_the_classifier_or_not_and_wrappers_come_off(
    effnet_checkpoint: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    state = load_file(effnet_checkpoint)
    backbone = {name: value for name, value in state.items() if not name.startswith("classifier.")}
    assert len(state) - len(backbone) == 2
    torch.save(backbone, tmp_path / "backbone.pth")
    wrapped = {"epoch": 1, "state_dict": {f"module.{name}": value for name, value in state.items()}}
    torch.save(wrapped, tmp_path / "training.pth.tar")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8))
    features = []
    for path in (effnet_checkpoint, tmp_path / "backbone.pth", tmp_path / "training.pth.tar"):
        encoder = load_encoder(_request(path), device="cpu", reporter=SILENT)
        features.append(encoder.encode([encoder.preprocess(image, "")]))
    np.testing.assert_array_equal(features[0], features[1])
    np.testing.assert_array_equal(features[0], features[2])


def test_missing_and_unexpected_tensors_are_listed(effnet_checkpoint: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    state = load_file(effnet_checkpoint)
    state["stray.weight"] = state.pop("conv_head.weight")
    torch.save(state, tmp_path / "odd.pth")
    with pytest.raises(InputError, match=r"doesn't fit the model timm:tf_efficientnet_lite0") as caught:
        load_encoder(_request(tmp_path / "odd.pth"), device="cpu", reporter=SILENT)
    assert "conv_head.weight" in str(caught.value)
    assert "stray.weight" in str(caught.value)
    state = load_file(effnet_checkpoint)
    state["conv_head.weight"] = state["conv_head.weight"][:5]
    torch.save(state, tmp_path / "small.pth")
    with pytest.raises(InputError, match=r"can't be loaded into the model[\s\S]*conv_head\.weight"):
        load_encoder(_request(tmp_path / "small.pth"), device="cpu", reporter=SILENT)
