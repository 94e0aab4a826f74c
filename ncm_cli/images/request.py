"""The kinds of encoder, a user's request for one, and the preprocessing of its pictures.

No torch is imported: processes that read images have copies of what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from ncm_cli.errors import InputError
from ncm_cli.images.background import Backgrounds
from ncm_cli.images.decode import DECODE_POLICY, decode
from ncm_cli.images.options import DEFAULT_MODEL, DEFAULT_PRETRAINED, PRECISIONS, canonical, parse_augment
from ncm_cli.images.samples import MAX_PIXELS, DecodeError


class EncoderKind(NamedTuple):
    """The distributions whose version may move a feature, and the library of its networks, if it has any."""

    distributions: tuple[str, ...]
    library: str | None = None


ENCODER_KINDS = {
    "pixels": EncoderKind(("pillow",)),
    "timm": EncoderKind(("timm", "torchvision", "pillow"), "timm"),
    "domainbed": EncoderKind(("torchvision", "pillow"), "torchvision"),
    "open_clip": EncoderKind(("open_clip_torch", "timm", "torchvision", "pillow"), "open_clip"),
}
"""The kinds of encoder. A kind is the prefix of a model's name (``timm:NAME``); names with any other prefix,
or none, are open_clip's. `ncm_cli.images.network._LOADERS` has the loader of each kind that has networks."""


@dataclass(frozen=True, kw_only=True)
class EncoderRequest:
    """The encoder that a user asks for.

    ``model`` is ``pixels:SIZE``, ``timm:NAME``, ``domainbed:NAME``, an open_clip name, ``local-dir:FOLDER``,
    ``hf-hub:ORG/REPO``, or the path of an open_clip model configuration (``.json``). ``pretrained`` is an
    open_clip tag, a checkpoint file, ``default`` for timm, or None; pixels have no weights, and folders and
    repositories bring their own. ``precision`` (fp32, bf16, fp16) is how the network computes; features are
    float32 whatever it is. ``normalize`` divides each row by its Euclidean norm. ``seed`` is used by
    ``augment`` and ``random_init``. ``intensity_range`` are the samples that are black and white in images of
    more than 8 bits; None takes what files declare. ``decode`` is ``exact``, or ``fast`` where large JPEG
    files may be decoded at a reduced size. ``image_size`` is the side of the pictures that a model of timm or
    DomainBed sees, if not its own. ``backgrounds`` is what replaces the background (`fill_of`), if
    it is replaced.
    """

    model: str = DEFAULT_MODEL
    pretrained: str | None = None
    precision: str = "fp32"
    normalize: bool = False
    random_init: bool = False
    augment: str | None = None
    seed: int = 0
    intensity_range: tuple[float, float] | None = None
    decode: str = "exact"
    image_size: int | None = None
    backgrounds: str | None = None

    @property
    def kind(self) -> str:
        """A key of `ENCODER_KINDS`: the prefix of the model's name, or ``open_clip``."""
        prefix, colon, _ = self.model.partition(":")
        return prefix if colon and prefix in ENCODER_KINDS else "open_clip"

    @property
    def has_network(self) -> bool:
        """Whether the encoder is a network, which runs on torch."""
        return ENCODER_KINDS[self.kind].library is not None

    @property
    def weights(self) -> str | None:
        """The weights to load: for the default model its default tag; None if no weights apply."""
        none_apply = not self.has_network or self.model.startswith(("local-dir:", "hf-hub:"))
        if none_apply or self.random_init:
            return None
        return (
            DEFAULT_PRETRAINED if (self.pretrained, self.model) == (None, DEFAULT_MODEL) else self.pretrained
        )

    def describe(self, **facts: Any) -> dict[str, Any]:
        """An encoder's description: ``facts`` and the fields that all kinds share."""
        shared = {"decode_policy": DECODE_POLICY, "normalize": self.normalize}
        return {"precision": self.precision, **facts, **shared} | self.views()

    def views(self) -> dict[str, Any]:
        """The options about pictures that were given: an augmentation, a range of samples, fast decoding."""
        chain, span = parse_augment(self.augment), self.intensity_range
        backgrounds = {"backgrounds": self.backgrounds} if self.backgrounds else {}
        view = {"view": {"augment": canonical(chain), "seed": self.seed} | backgrounds} if chain else {}
        fast = {"decode": self.decode} if self.decode != "exact" else {}
        return view | ({"intensity_range": list(span)} if span is not None else {}) | fast

    def augmented(self, image: Image.Image, id: str) -> Image.Image:
        """The picture with the requested augmentation."""
        chain = parse_augment(self.augment)
        if not chain:
            return image
        from ncm_cli.images.augment import apply

        return apply(chain, image, seed=self.seed, id=id)

    def finish(self, features: np.ndarray) -> np.ndarray:
        """float32 rows, normalised if the request says so."""
        return unit_rows(features) if self.normalize else np.ascontiguousarray(features, dtype=np.float32)


def request_of(
    encoder: Mapping[str, Any], options: Mapping[str, Any], *, pretrained: str | None, where: object
) -> EncoderRequest:
    """The request that loads the encoder with this description, to make more features like its own.

    ``options`` are those with which the features were made, if known. They say where the weights are, unless
    ``pretrained`` does: a file, a tag, or the folder of a ``local-dir:`` model. Raises
    `InputError`, about ``where``, if no model is named.
    """
    model, precision = options.get("model") or encoder.get("model"), encoder.get("precision") or "fp32"
    if not isinstance(model, str) or precision not in PRECISIONS:
        raise InputError(
            "nothing says which encoder made the features",
            where=where,
            found=f"model {model!r}, precision {precision!r}",
            fix="embed the images again; a probe is then to be fitted again",
        )
    if pretrained and model.startswith("local-dir:"):
        model, pretrained = f"local-dir:{pretrained}", None
    return EncoderRequest(
        model=model,
        pretrained=pretrained or options.get("pretrained"),
        precision=precision,
        normalize=bool(encoder.get("normalize")),
        random_init=bool(options.get("random_init")),
        seed=int(options.get("seed") or 0),
        intensity_range=encoder.get("intensity_range"),
        decode=encoder.get("decode") or "exact",
    )


@dataclass(frozen=True)
class Resize:
    """A picture at another size, as torchvision's ``Resize`` makes it, without importing torchvision.

    ``size`` is the shorter side, the aspect ratio kept and the longer side rounded down, or (height, width).
    """

    size: int | tuple[int, int]
    resample: int

    def __call__(self, image: Image.Image) -> Image.Image:
        """The picture resized, or the box of it that is one."""
        box = image.info.get("box") or (0, 0, *image.size)
        width, height = box[2:]
        if isinstance(self.size, int):
            longer = int(self.size * max(width, height) / min(width, height))
            size = (self.size, longer) if width <= height else (longer, self.size)
        else:
            size = self.size[::-1]
        return image if size == (width, height) else image.resize(size, Image.Resampling(self.resample), box)


@dataclass(frozen=True)
class CentreCrop:
    """The middle of a picture, as by torchvision's ``CenterCrop``, with black margins if it is too small."""

    height: int
    width: int

    def __call__(self, image: Image.Image) -> Image.Image:
        """The picture cropped."""

        def start(whole: int, part: int) -> int:
            return -((part - whole) // 2) if part > whole else round((whole - part) / 2)

        left, top = start(image.width, self.width), start(image.height, self.height)
        return image.crop((left, top, left + self.width, top + self.height))


@dataclass(frozen=True)
class Preprocess:
    """Turns a decoded picture into an item of a batch. It holds no model: reader processes have a copy.

    ``steps`` are applied one after another to the augmented picture; ``shortest`` is the side that they give
    its shorter edge, or None where they can't enlarge much. ``backgrounds`` replace those of the pictures.
    """

    request: EncoderRequest
    steps: tuple[Callable[[Any], Any], ...]
    shortest: int | None = None
    backgrounds: Backgrounds | None = None

    def decode(self, data: bytes) -> Image.Image:
        """The picture in a file's bytes, decoded by the request's options; raises `DecodeError`."""
        first, side = self.steps[0], None
        if self.request.decode == "fast" and isinstance(first, Resize):
            side = int(np.max(first.size))
        return decode(data, self.request.intensity_range, side)

    def __call__(self, image: Image.Image, id: str) -> np.ndarray:
        """(H, W, 3) uint8 of one decoded RGB picture; ``id`` seeds the augmentation.

        Where a model's own transform ends in another way than with scaling and normalising, which `encode`
        does for a whole batch, it is what the transform gives: (3, H, W) float32.

        Raises `DecodeError` for a picture so narrow that the model's resize would need an over-limit one.
        """
        image = self.request.augmented(image, id)
        if self.shortest is not None:
            check_resize(image, self.shortest)
        for step in self.steps:
            image = step(image)
        return np.asarray(image)


def unit_rows(features: np.ndarray) -> np.ndarray:
    """Rows of (N, d) ``features`` divided by their Euclidean norm, as float32; zero rows stay zero.

    Norms are taken in float64: the squares of half-precision values above 255 overflow in their own type.
    """
    wide = np.asarray(features, dtype=np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinite rows: whoever stores them refuses them by id
        return np.divide(wide, norms, out=np.zeros_like(wide), where=norms != 0).astype(np.float32)


def check_resize(image: Image.Image, shortest: int) -> None:
    """Refuse a picture that would be over the pixel limit once its shorter side is ``shortest``."""
    width, height = image.size
    pixels = shortest * shortest * max(width, height) / min(width, height)
    if pixels > MAX_PIXELS:
        raise DecodeError(
            f"{width} x {height} is too narrow: with its shorter side at {shortest} it has {pixels:,.0f} "
            f"pixels, over the limit of {MAX_PIXELS:,}"
        )


class Encoder(Protocol):
    """A loaded encoder. ``preprocess`` may be called from several threads, ``encode`` from one."""

    preprocess: Preprocess

    description: dict[str, Any]
    """Everything that determines a feature; the fingerprint is the digest of its canonical JSON."""

    device: str
    batch_size: int
    """The ``auto`` choice; constant for a device, whatever else runs on it."""

    @property
    def dim(self) -> int:
        """Length of a feature."""

    def encode(self, items: Sequence[np.ndarray]) -> np.ndarray:
        """(B, dim) float32 features of ``items``, in order.

        With ``normalize`` rows have norm 1, except that an all-zero row stays zero, and non-finite values are
        passed on: the caller knows the ids, and names such rows.
        """

    def start(self, items: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
        """Start `encode`, on a GPU in the background; calling the result waits for the features."""
