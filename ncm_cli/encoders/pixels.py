"""``pixels:SIZE``: the picture itself as features, without a network; needs only numpy and Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ncm_cli.options.embed import parse_size, refuse_device

from . import augment
from .base import EncoderRequest, describe, finish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ncm_cli.progress import Reporter


class PixelsEncoder:
    """Area mean to SIZE × SIZE, RGB, flattened row by row (row, column, channel), divided by 255.

    The area mean is Pillow's BOX filter, columns then rows, each rounded to 8 bits: within 1/255 of the exact
    mean. The aspect ratio is not kept. ``dim`` = 3·SIZE².
    """

    def __init__(self, request: EncoderRequest) -> None:
        self._size = parse_size(request.model)
        self._request = request
        self._augment = augment.parse(request.augment)
        self.dim = 3 * self._size**2
        self.device = "cpu"
        self.batch_size = 256
        self.description: dict[str, Any] = describe(
            request,
            kind="pixels",
            model=f"pixels:{self._size}",
            weights_sha256=None,
            activation=None,
            image_size=[self._size, self._size],
            preprocess={
                "resize": "squash",
                "interpolation": "box",
                "crop": None,
                "mean": [0.0, 0.0, 0.0],
                "std": [1.0, 1.0, 1.0],
            },
            projection=None,
            precision="fp32",
        )

    def preprocess(self, image: Image.Image, id: str) -> np.ndarray:
        """(SIZE, SIZE, 3) uint8 from a decoded picture of any size; ``id`` seeds an augmentation."""
        image = augment.apply(self._augment, image, seed=self._request.seed, id=id)
        return np.asarray(image.resize((self._size, self._size), Image.Resampling.BOX))

    def encode(self, items: Sequence[np.ndarray]) -> np.ndarray:
        """(B, 3·SIZE²) float32 in 0..1, or unit rows when the request normalises."""
        rows = np.stack(items).reshape(len(items), -1).astype(np.float32) / np.float32(255)
        return finish(rows, self._request)


def load(request: EncoderRequest, *, device: str, reporter: Reporter) -> PixelsEncoder:
    """The encoder of a ``pixels:SIZE`` request.

    Raises `UsageError` for a device other than the CPU.
    """
    for error in refuse_device(request.model, device):
        raise error
    return PixelsEncoder(request)
