"""``pixels:SIZE``: the picture itself as features. No network, only numpy and Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from ncm_cli.images.options import parse_size
from ncm_cli.images.request import EncoderRequest, Preprocess, Resize

PIXELS_BATCH = 256
"""Pictures at once, unless the options say otherwise."""


class PixelsEncoder:
    """Area mean to SIZE × SIZE, RGB, flattened row by row (row, column, channel), divided by 255.

    The area mean is Pillow's BOX filter, columns then rows, each rounded to 8 bits: within 1/255 of the exact
    mean. The aspect ratio is not kept. ``dim`` = 3·SIZE².
    """

    def __init__(self, request: EncoderRequest) -> None:
        size = parse_size(request.model)
        self._request = request
        self.preprocess = Preprocess(request, (Resize((size, size), Image.Resampling.BOX),))
        self.dim, self.device, self.batch_size = 3 * size**2, "cpu", PIXELS_BATCH
        resize = {"resize": "squash", "interpolation": "box", "crop": None}
        self.description: dict[str, Any] = request.describe(
            kind="pixels",
            model=f"pixels:{size}",
            weights_sha256=None,
            activation=None,
            image_size=[size, size],
            preprocess=resize | {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]},
            projection=None,
            precision="fp32",
        )

    def encode(self, items: Sequence[np.ndarray]) -> np.ndarray:
        """(B, 3·SIZE²) float32 in 0..1, or unit rows when the request normalises."""
        rows = np.stack(items).reshape(len(items), -1).astype(np.float32) / np.float32(255)
        return self._request.finish(rows)

    def start(self, items: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
        """`encode`, at once."""
        features = self.encode(items)
        return lambda: features
