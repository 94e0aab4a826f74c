"""What an encoder is, what decides its features, and how one is loaded.

``pixels:SIZE``: the picture itself as features, without a network; needs only numpy and Pillow.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from ncm_cli.errors import UsageError
from ncm_cli.images import augment
from ncm_cli.images.decode import DECODE_POLICY, SAMPLE_POLICY
from ncm_cli.images.formats import MAX_PIXELS, DecodeError
from ncm_cli.images.options import DEFAULT_MODEL as DEFAULT_MODEL
from ncm_cli.images.options import DEFAULT_PRETRAINED as DEFAULT_PRETRAINED
from ncm_cli.images.options import parse_model, parse_size, refuse_device
from ncm_cli.progress import Reporter

PRECISIONS = ("fp32", "bf16", "fp16")

_LIBRARIES = {
    "pixels": ("pillow",),
    "timm": ("timm", "torchvision", "pillow"),
    "open_clip": ("open_clip_torch", "timm", "torchvision", "pillow"),
}
"""The distributions whose version may move a feature, for each kind of encoder."""


@dataclass(frozen=True, kw_only=True)
class EncoderRequest:
    """What a user asks for.

    Attributes
    ----------
    model
        ``pixels:SIZE``, ``timm:NAME``, an open_clip name, ``local-dir:FOLDER``, ``hf-hub:ORG/REPO``, or the
        path of an open_clip model configuration (``.json``).
    pretrained
        An open_clip tag, a checkpoint file, ``default`` for timm, or None. Pixels have no weights and ignore
        it; ``local-dir:`` and ``hf-hub:`` bring their own.
    precision
        ``fp32``, ``bf16`` or ``fp16``: how the network computes. Features are float32 whatever it is.
    normalize
        Divide each row by its Euclidean norm.
    random_init
        Random weights from ``seed`` instead of ``pretrained``, for tests.
    augment
        Augmentation of the decoded picture, such as ``grayscale`` or ``hue:0.3+blur``
        (:mod:`ncm_cli.images.augment`); None for none.
    seed
        Of the augmentation and of random weights.
    intensity_range
        The samples that are black and white in images of more than 8 bits; None takes what files declare.
    """

    model: str = DEFAULT_MODEL
    pretrained: str | None = None
    precision: str = "fp32"
    normalize: bool = False
    random_init: bool = False
    augment: str | None = None
    seed: int = 0
    intensity_range: tuple[float, float] | None = None


class Encoder(Protocol):
    """A loaded encoder. ``preprocess`` may be called from several threads, ``encode`` from one."""

    description: dict[str, Any]
    """All that decides a feature; its canonical JSON is what a fingerprint hashes."""

    dim: int
    device: str
    batch_size: int
    """The ``auto`` choice; constant for a device, so that it never depends on what else runs."""

    def preprocess(self, image: Image.Image, id: str) -> Any:
        """One decoded RGB picture as an item of a batch; ``id`` seeds the augmentation.

        Raises :class:`~ncm_cli.images.decode.DecodeError` for a picture so narrow that the model's resize
        would need an over-limit one.
        """

    def encode(self, items: Sequence[Any]) -> np.ndarray:
        """(B, dim) float32 features of ``items``, in order.

        With ``normalize`` rows have norm 1, except that an all-zero row stays zero: the caller knows the ids
        and names it (:func:`ncm_cli.images.encoder.zero_rows`). Non-finite values are passed on, for the
        same reason.
        """


def kind_of(model: str) -> str:
    """``pixels``, ``timm`` or ``open_clip``."""
    prefix, colon, _ = model.partition(":")
    return prefix if colon and prefix in {"pixels", "timm"} else "open_clip"


def effective_pretrained(request: EncoderRequest) -> str | None:
    """The weights that a request means: the default model's default tag, and none where none apply."""
    if request.random_init or kind_of(request.model) == "pixels":
        return None
    if request.model.startswith(("local-dir:", "hf-hub:")):
        return None
    if request.pretrained is None and request.model == DEFAULT_MODEL:
        return DEFAULT_PRETRAINED
    return request.pretrained


def check_request(request: EncoderRequest) -> None:
    """Raise a UsageError for values that no encoder takes."""
    parse_model(request.model)
    if request.precision not in PRECISIONS:
        raise UsageError(
            f"no precision named {request.precision!r}", expected=f"one of: {', '.join(PRECISIONS)}"
        )
    augment.parse(request.augment)


def request_key(request: EncoderRequest) -> dict[str, Any]:
    """JSON facts that decide the features, gathered without importing torch.

    Two requests with equal keys give the same features, so stored rows stay valid and no model needs to be
    loaded to know that. Local checkpoints and configurations count by content, not by path.
    """
    from ncm_cli.images import weights

    check_request(request)
    kind = kind_of(request.model)
    key: dict[str, Any] = {
        "kind": kind,
        "model": request.model,
        "precision": request.precision if kind != "pixels" else "fp32",
        "normalize": request.normalize,
        "decode_policy": DECODE_POLICY,
        "sample_policy": SAMPLE_POLICY,
        "libraries": {name: _version(name) for name in _LIBRARIES[kind]},
    }
    if kind != "pixels":
        key |= weights.facts(request)
    return key | views_of(request)


def load_encoder(request: EncoderRequest, *, device: str = "auto", reporter: Reporter) -> Encoder:
    """Load what a request asks for; every error of model, weights and device comes from here.

    Parameters
    ----------
    device
        ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``. ``pixels`` needs none.
    reporter
        Is told the device in use, and warned about an activation that doesn't fit the weights.

    Raises
    ------
    UsageError
        A malformed request.
    InputError
        An unknown model or tag, missing or foreign weights, CUDA asked for where there is none.
    """
    check_request(request)
    module = {"pixels": "encoder", "timm": "timm", "open_clip": "open_clip"}[kind_of(request.model)]
    load = importlib.import_module(f"ncm_cli.images.{module}").load
    encoder: Encoder = load(request, device=device, reporter=reporter)
    return encoder


def views_of(request: EncoderRequest) -> dict[str, Any]:
    """What a description says of the pictures, where it is asked for: an augmentation, a range of samples."""
    chain = augment.parse(request.augment)
    view = {"view": {"augment": augment.canonical(chain), "seed": request.seed}} if chain else {}
    span = request.intensity_range
    return view | ({"intensity_range": list(span)} if span is not None else {})


def describe(request: EncoderRequest, **facts: Any) -> dict[str, Any]:
    """An encoder's description: ``facts`` and what every kind shares."""
    return {
        "precision": request.precision,
        **facts,
        "decode_policy": DECODE_POLICY,
        "normalize": request.normalize,
    } | views_of(request)


def unit_rows(features: np.ndarray) -> np.ndarray:
    """Rows of (N, d) ``features`` divided by their Euclidean norm, as float32; zero rows stay zero.

    Norms are taken in float64: the squares of half-precision values above 255 overflow in their own type.
    """
    wide = np.asarray(features, dtype=np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    with np.errstate(
        invalid="ignore"
    ):  # infinite rows stay not finite: whoever stores them refuses them by id
        return np.divide(wide, norms, out=np.zeros_like(wide), where=norms != 0).astype(np.float32)


def zero_rows(features: np.ndarray) -> np.ndarray:
    """Positions (int64) of the all-zero rows of (N, d) ``features``: they have no direction to normalise."""
    return np.flatnonzero(~np.any(features, axis=1))


def finish(features: np.ndarray, request: EncoderRequest) -> np.ndarray:
    """Float32 rows as a request wants them: normalised, or as they are."""
    return unit_rows(features) if request.normalize else np.ascontiguousarray(features, dtype=np.float32)


def check_resize(image: Image.Image, shortest: int) -> None:
    """Refuse a picture that would be over the pixel limit once its shorter side is ``shortest``."""
    width, height = image.size
    pixels = shortest * shortest * max(width, height) / min(width, height)
    if pixels > MAX_PIXELS:
        raise DecodeError(
            f"{width} x {height} is too narrow: with its shorter side at {shortest} it has {pixels:,.0f} "
            f"pixels, over the limit of {MAX_PIXELS:,}"
        )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
