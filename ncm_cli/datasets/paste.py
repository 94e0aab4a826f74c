"""Paste a bird on a place as the authors of Waterbirds did.

Sagawa et al., Distributionally Robust Neural Networks for Group Shifts (2020), appendix C.1: the bird is cut
out by CUB's segmentation and laid over a picture of Places, resized and cropped to the bird picture's size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image


def cover(place: Image.Image, size: tuple[int, int]) -> Image.Image:
    """``place`` resized and centrally cropped so that it fills ``size`` (width, height) exactly.

    A place smaller than the bird's picture in either direction is enlarged first.
    """
    width, height = size
    if place.width < width or place.height < height:
        enlarge = max(width / place.width, height / place.height)
        larger = (max(width, int(place.width * enlarge)), max(height, int(place.height * enlarge)))
        place = place.resize(larger, Image.Resampling.LANCZOS)
    if place.width / place.height > width / height:
        kept = int(width / height * place.height)
        offset = (place.width - kept) // 2
        box = (offset, 0, place.width - offset, place.height)
    else:
        kept = int(place.width / (width / height))
        offset = (place.height - kept) // 2
        box = (0, offset, place.width, place.height - offset)
    return place.crop(box).resize(size, Image.Resampling.LANCZOS)


def paste(bird: Image.Image, mask: npt.NDArray[np.float64], place: Image.Image) -> Image.Image:
    """The bird (RGB) where ``mask`` (h, w, values in [0, 1]) is 1, the place (RGB) where it is 0."""
    share = mask[..., None]
    front = np.around(np.asarray(bird) * share)
    back = np.around(np.asarray(cover(place, bird.size)) * (1 - share))
    # Both parts are rounded, as the authors do; the sum may pass 255 by one on a soft edge.
    return Image.fromarray(np.minimum(front + back, 255).astype(np.uint8))
