"""Published transforms, split between reading and the device, give the bits they always gave."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.images.request import EncoderRequest, Preprocess

SIDES = [(224, 224), (1, 5), (224, 300), (301, 224), (37, 53), (640, 231), (90, 640)]


def timm_transform(crop_mode: str, side: int = 224) -> Any:
    from timm.data import create_transform

    return create_transform((3, side, side), crop_mode=crop_mode, crop_pct=0.9, interpolation="bicubic")


def clip_transform(mode: str, size: Any = 224) -> Any:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    return image_transform_v2(PreprocessCfg(size=size, resize_mode=mode), is_train=False)


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: clip_transform("shortest"), True),
        (lambda: clip_transform("squash"), True),
        (lambda: clip_transform("longest"), False),
        (lambda: clip_transform("shortest", (32, 64)), False),
        (lambda: timm_transform("center"), True),
        (lambda: timm_transform("squash", 97), True),
        (lambda: timm_transform("border"), False),
    ],
)
def test_a_batch_is_what_the_published_transform_gives(make: Any, plain: bool) -> None:
    import torch

    from ncm_cli.images.network import TorchEncoder, picture_steps

    transform = make()
    encoder = object.__new__(TorchEncoder)
    steps, scale = picture_steps(transform)
    encoder.device, encoder._copies = "cpu", None
    encoder._scale = [torch.as_tensor(value).view(-1, 1, 1) for value in scale]
    assert plain == all(type(step).__module__ == "ncm_cli.images.request" for step in steps)
    preprocess = pickle.loads(pickle.dumps(Preprocess(EncoderRequest(), steps)))
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (*sides, 3), dtype=np.uint8)) for sides in SIDES]
    items = [preprocess(picture, "") for picture in pictures]
    wanted = torch.stack([transform(picture) for picture in pictures])
    made = encoder.batch(items)
    assert {item.dtype.name for item in items} == {"uint8"}
    assert torch.equal(made, wanted)
    assert made.stride() == wanted.stride()  # kernels of another layout round otherwise


def test_a_transform_that_ends_otherwise_is_kept_whole() -> None:
    import torch
    from torchvision import transforms

    from ncm_cli.images.network import TorchEncoder, picture_steps

    transform = transforms.Compose([transforms.Resize((5, 7)), transforms.ToTensor()])
    steps, scale = picture_steps(transform)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8))
    encoder = object.__new__(TorchEncoder)
    encoder.device, encoder._copies, encoder._scale = "cpu", None, scale
    items = [Preprocess(EncoderRequest(), steps)(picture, "")] * 2
    assert torch.equal(encoder.batch(items), torch.stack([transform(picture)] * 2))


def test_a_preprocess_of_plain_steps_needs_no_torch(tmp_path: Path) -> None:
    from ncm_cli.images.network import picture_steps

    steps, _ = picture_steps(clip_transform("shortest"))
    (tmp_path / "made").write_bytes(pickle.dumps(Preprocess(EncoderRequest(augment="flip"), steps)))
    program = (
        "import pickle, sys\nfrom PIL import Image\n"
        f"made = pickle.loads(open({str(tmp_path / 'made')!r}, 'rb').read())\n"
        "assert made(Image.new('RGB', (300, 400)), 'x').shape == (224, 224, 3)\n"
        "assert not {'torch', 'torchvision', 'h5py', 'typer'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
