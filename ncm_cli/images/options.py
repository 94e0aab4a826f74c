"""The options of ``ncm embed``, and the small grammars of their values."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from ncm_cli.errors import UsageError, listing, unknown
from ncm_cli.options import (
    LIST,
    argument,
    given_flags,
    option,
    parse_batch_size,
    parse_device,
    parse_workers,
)
from ncm_cli.ray_cluster import parse_cluster

T = TypeVar("T")


class Augmentation(NamedTuple):
    """The meaning, default and range of an augmentation's amount; it takes none if ``default`` is None."""

    summary: str
    default: float | None = None
    low: float = 0.0
    high: float = 1.0


AUGMENTATIONS: dict[str, Augmentation] = {
    "grayscale": Augmentation("luminance in all three channels"),
    "flip": Augmentation("mirrored left to right, every picture"),
    "vflip": Augmentation("mirrored top to bottom, every picture"),
    "invert": Augmentation("the negative"),
    "hue": Augmentation("largest turn of the hue, as a share of the colour circle", 0.5, 0, 0.5),
    "brightness": Augmentation("largest relative change", 0.5),
    "contrast": Augmentation("largest relative change", 0.5),
    "saturation": Augmentation("largest relative change", 0.5),
    "blur": Augmentation("largest Gaussian sigma, as a share of the shorter side", 0.02, 0, 0.5),
    "jpeg": Augmentation("quality of the recompression", 10, 0, 95),
    "noise": Augmentation("standard deviation, as a share of the range 0..255", 0.1),
    "rotate": Augmentation("largest turn either way, in degrees", 30, 0, 180),
    "crop": Augmentation("least share of the area that is kept", 0.5),
    "background": Augmentation("the object that --masks shows, on another background"),
}

BACKGROUND = "background"
"""The augmentation that needs masks: `ncm_cli.images.background`."""

FILLS = ("images", "grey", "noise")
"""What replaces a background, if no folder is given."""

Chain = tuple[tuple[str, float | None], ...]
"""Augmentations by name, each with its amount, in the order in which they are applied."""


def parse_augment(spec: str | None) -> Chain:
    """The steps of a chain ``NAME[:AMOUNT]`` joined by ``+``, such as ``hue:0.3+blur``; empty for None."""
    return () if spec is None else tuple(_parse_step(part.strip(), spec) for part in spec.split("+"))


def _parse_step(text: str, spec: str) -> tuple[str, float | None]:
    where = f"--augment {spec}"
    name, colon, amount = text.partition(":")
    if name not in AUGMENTATIONS:
        raise unknown("augmentation", name, AUGMENTATIONS, where=where, error=UsageError)
    kind = AUGMENTATIONS[name]
    if not colon:
        return name, kind.default
    if kind.default is None:
        raise UsageError(f"augmentation {name!r} takes no amount", where=where, fix=f"--augment {name}")
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not kind.low < value <= kind.high:  # NaN compares false
        raise UsageError(
            f"the amount of augmentation {name!r} is out of range",
            where=where,
            found=amount or "nothing",
            expected=f"a number above {kind.low:g}, up to {kind.high:g} ({kind.summary})",
        )
    return name, value


def canonical(chain: Chain) -> str:
    """A chain in its canonical spelling, with all amounts, so that equal augmentations have equal texts."""
    return "+".join(name if amount is None else f"{name}:{amount!r}" for name, amount in chain)


PRECISIONS = ("fp32", "bf16", "fp16")
DEFAULT_MODEL = "ViT-B-32-quickgelu"
DEFAULT_PRETRAINED = "openai"
"""The weights of the default model; any other model needs ``--pretrained``."""

_table = partial(option, group="Manifest and folders")
_encoder = partial(option, group="Encoder")
_run = partial(option, group="Running")
_view = partial(option, group="Encoder: --augment background")
_array = partial(option, group="Features made elsewhere")

IMAGE_OPTIONS = (
    "model", "pretrained", "root", "layout", "precision", "random_init", "intensity_range", "augment",
    "masks", "backgrounds", "fill", "shard", "cluster", "cpus", "reuse",
)  # fmt: skip
"""Options that have no meaning if no image is read."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count``, from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def part(self) -> str:
        """The shard's name in file names."""
        return f"{self.index}-of-{self.count}"

    def of(self, batches: Sequence[T]) -> Sequence[T]:
        """The shard's batches: consecutive ones, since their files are probably stored together."""
        start, stop = (len(batches) * index // self.count for index in (self.index, self.index + 1))
        return batches[start:stop]


def parse_shard(text: str | None) -> Shard | None:
    """The part ``I/N`` of a run; None for a whole run, including N = 1."""
    if text is None:
        return None
    numbers = [int(part) for part in text.split("/") if re.fullmatch("[0-9]{1,5}", part)]
    if len(numbers) != 2 or text.count("/") != 1 or numbers[0] >= numbers[1]:
        raise UsageError(
            "a shard that can't be read",
            where=f"--shard {text}",
            expected="I/N, with I from 0 to N-1, and N at most 99999",
            fix="--shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT in a job array with --array=0-7",
        )
    return Shard(*numbers) if numbers[1] > 1 else None


def parse_layout(text: str) -> tuple[str, ...]:
    """The names of the folder levels, outermost first: ``domain/label``."""
    names = tuple(text.split("/"))
    if not all(name.strip() == name and name for name in names) or len(set(names)) < len(names):
        raise UsageError(
            "a layout that can't be read",
            found=repr(text),
            expected="one name for each level of folders, such as label or domain/label",
        )
    return names


MAX_PIXELS_SIDE = 512
"""Beyond this side a row has 786,432 numbers, more than any linear probe is meant for."""


def parse_size(model: str) -> int:
    """The side of ``pixels:SIZE``, or a UsageError that says what is expected."""
    text = model.partition(":")[2]
    size = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= size <= MAX_PIXELS_SIDE:
        raise UsageError(
            f"--model {model!r} has no valid size",
            expected=f"pixels:SIZE with a whole SIZE from 1 to {MAX_PIXELS_SIDE}",
            fix="--model pixels:14",
        )
    return size


def parse_model(text: str) -> str:
    """A model's name; the size of ``pixels:SIZE`` is checked here, other names by their libraries."""
    if not text.strip():
        raise UsageError("--model is empty", fix=f"--model {DEFAULT_MODEL}")
    if text.startswith("pixels:"):
        parse_size(text)
    return text


def refuse_device(model: str, device: str) -> Iterator[UsageError]:
    """Refuse a GPU for ``pixels``, which run only on the CPU."""
    if model.startswith("pixels:") and device not in ("auto", "cpu"):
        yield UsageError(
            "pixels runs on the CPU only", found=f"--device {device}", fix="--device cpu, or leave it out"
        )


def parse_intensity_range(text: str) -> tuple[float, float]:
    """The samples that are black and white, such as ``0:4095``."""
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low = high = 0
    if not (low < high and math.isfinite(high - low)):
        raise UsageError(
            "a range of intensities that can't be read",
            found=repr(text),
            expected="LOW:HIGH, the sample that is black and the greater one that is white, such as 0:4095",
        )
    return low, high


_column = partial(_table, None, metavar="COLUMN", columns_of="source")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options of commands that read images from a manifest, a folder or archives."""

    source: Path = argument(
        help="A CSV, TSV or Parquet manifest, a folder of images, tar archives of samples, a data set of "
        "Hugging Face, or what clip-retrieval and img2dataset write.",
        role="input",
        held="table",
    )
    root: Path | None = _table(
        None, help="Folder that relative image paths start from (the manifest's folder).", role="input"
    )
    id_col: str | None = _column(help="Column of ids (id, if there is one; otherwise the path is the id).")
    path_col: str | None = _column(help="Column of image paths (path).")
    label_col: str | None = _column(help="Column of labels (label, if there is one).")
    split_col: str | None = _column(help="Column of splits (split, if there is one).")
    layout: str | None = _table(
        None, help="What the levels of an image folder mean: label, domain/label ...", parse=parse_layout
    )


class SourceChoice(Protocol):
    """`SourceOptions` and two more options, which only some commands have: ``numeric``, ``from_array``."""

    @property
    def source(self) -> Path: ...
    @property
    def root(self) -> Path | None: ...
    @property
    def layout(self) -> str | None: ...
    @property
    def numeric(self) -> tuple[str, ...]: ...
    @property
    def from_array(self) -> Path | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedOptions(SourceOptions):
    """Options of ``ncm embed``; the fields are the long options and the recipe's keys."""

    output: Path = option(
        help="Feature store to write (.h5).", role="output", flags=("-o",), writes=("features",)
    )
    model: str = option(
        DEFAULT_MODEL,
        help="An open_clip model, timm:NAME, domainbed:MNIST_CNN, or pixels:SIZE; NAME,TAG names its "
        "weights, too.",
        parse=parse_model,
    )
    pretrained: str | None = option(
        None,
        help="Weights: an open_clip tag, a local file, or default for timm. The default model takes "
        f"{DEFAULT_PRETRAINED}.",
        role="name-or-input",
    )
    device: str = option("auto", help="auto, cpu, cuda or cuda:N.", parse=parse_device)

    numeric: tuple[str, ...] = _table(
        (),
        help="Column of numbers rather than categories, such as a regression target; may be repeated.",
        metavar="COLUMN",
        columns_of="source",
    )

    precision: str = _encoder("fp32", help="Arithmetic of the encoder.", choices=PRECISIONS)
    normalize: bool = _encoder(False, help="Scale each row to unit length.")
    random_init: bool = _encoder(False, help="Use random weights, for tests.")
    intensity_range: str | None = _encoder(
        None,
        help="Samples that are black and white in TIFF and grey PNG images of more than 8 bits.",
        metavar="LOW:HIGH",
        parse=parse_intensity_range,
    )
    decode: str = _encoder(
        "exact",
        help="fast reads large JPEG files at a reduced size, which changes features (cosine above .999).",
        choices=("exact", "fast"),
    )
    augment: str | None = _encoder(
        None,
        help=f"Change each image before it is embedded, to pair it with itself: {', '.join(AUGMENTATIONS)}; "
        "NAME:AMOUNT, and + between several.",
        names="images.options:AUGMENTATIONS",
        parse=parse_augment,
    )
    masks: Path | None = _view(
        None, help="Folder with a PNG mask for each id; white is the object.", role="input", metavar="DIR"
    )
    backgrounds: Path | None = _view(
        None, help="Folder of pictures that replace the background.", role="input", metavar="DIR"
    )
    fill: str = _view(
        "images",
        help="What replaces the background without --backgrounds: that of another image of the split, "
        "grey or noise.",
        choices=FILLS,
    )
    seed: int = _encoder(0, least=0, help="Seed of the augmentation and of random weights.")
    dtype: str = _encoder("float32", help="How features are stored.", choices=("float32", "float16"))

    batch_size: str = _run("auto", help="Images at once.", parse=parse_batch_size)
    workers: str = _run(
        "auto",
        help="Images read at once: a few by threads, many by processes; 0 reads between batches.",
        parse=parse_workers,
    )
    shard: str | None = _run(
        None,
        help="Make only part I of N, counted from 0, for job arrays. The last part to end joins all.",
        metavar="I/N",
        parse=parse_shard,
    )
    cluster: str | None = _run(
        None,
        help="Encode on all GPUs of a cluster of Ray, or on its cores: local (this machine alone), auto (the "
        "cluster that it is part of), HOST:PORT or ray://HOST:PORT.",
        metavar="ADDRESS",
        parse=parse_cluster,
    )
    cpus: int | None = _run(
        None,
        least=1,
        help="Cores for each encoder that runs on a cluster's CPUs (4, or all of a smaller node).",
    )
    max_failures: int = _run(0, least=0, help="Images that may fail before the exit code is 5.")
    reuse: Path | None = _run(
        None, help="Take rows of equal content and encoder from this store.", role="input"
    )
    fresh: bool = _run(False, help="Start over: replace a store or an unfinished run of other settings.")

    from_array: Path | None = _array(
        None,
        help="Features as .npy, .npz or .pt, rows in manifest order; or a folder of them.",
        role="input",
        held="array",
    )
    encoder_name: str | None = _array(
        None, help="What made them; stores with the same name may be used together."
    )

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        if self.from_array is None:
            yield from self._refuse_cluster()
            if self.augment is not None and self.decode == "fast":
                yield UsageError(
                    "--augment changes pictures at their full size, which --decode fast may not read",
                    fix="--decode exact",
                )
            if "," in self.model and self.pretrained is not None:
                found = f"--model {self.model} --pretrained {self.pretrained}"
                yield UsageError("the weights are named twice", found=found, fix="leave out one of them")
            yield from refuse_device(self.model, self.device)
            yield from self._refuse_masks()
            return
        given = [flag for name in IMAGE_OPTIONS for flag in given_flags(self, (name,))]
        if given:
            yield UsageError(f"{listing(given)} can't be combined with --from-array: no image is read")
        if self.encoder_name is not None and not self.encoder_name.strip():
            yield UsageError("--encoder-name is blank")

    def _refuse_cluster(self) -> Iterator[UsageError]:
        if self.cluster is None:
            if self.cpus is not None:
                yield UsageError("--cpus needs --cluster", fix="--cluster local, or OMP_NUM_THREADS")
        elif self.shard is not None:
            yield UsageError("--cluster and --shard both share out the work", fix="leave out one of them")
        elif self.device.startswith("cuda:"):
            yield UsageError(
                "the cluster chooses which GPU an encoder has",
                found=f"--device {self.device}",
                fix="--device cuda",
            )
        elif self.device == "cuda" and self.cpus is not None:
            yield UsageError("--cpus is for encoders on the CPU", fix="--device cpu, or leave out --cpus")

    def _refuse_masks(self) -> Iterator[UsageError]:
        names = [name for name, _ in parse_augment(self.augment)]
        if BACKGROUND not in names:
            if given := given_flags(self, ("masks", "backgrounds", "fill")):
                yield UsageError(f"{listing(given)} needs --augment {BACKGROUND}")
        elif self.masks is None:
            yield UsageError(f"--augment {BACKGROUND} needs masks", fix="--masks DIR, with a PNG for each id")
        elif BACKGROUND in names[1:]:
            yield UsageError(
                f"{BACKGROUND} comes first, since masks fit the unchanged pictures",
                found=f"--augment {self.augment}",
            )
        elif self.backgrounds is not None and self.fill != FILLS[0]:
            yield UsageError("--backgrounds and --fill both say what replaces the background")


OPENAI_TEMPLATES = "openai"
"""Stands for the 80 templates that CLIP's authors published for ImageNet."""


def parse_prompt(text: str) -> str:
    """A text whose only braces are ``{}`` or ``{class}``, a file of such texts, or ``openai``."""
    left = text.replace("{class}", "").replace("{}", "")
    if not text.strip() or "{" in left or "}" in left:
        raise UsageError(
            "a prompt that can't be read",
            found=repr(text),
            expected="text in which {} or {class} stands for a class, such as 'a photo of a {}'",
        )
    return text


def parse_classes(text: str) -> dict[str, str]:
    """Classes in order, each with its words: ``cat,polar_bear`` or ``0=landbird,1=waterbird``."""
    pairs = [part.partition("=") for part in text.split(",")]
    classes = {name.strip(): (words if equals else words_for(name)).strip() for name, equals, words in pairs}
    if len(classes) < len(pairs) or not all(classes) or not all(classes.values()):
        raise UsageError(
            "classes that can't be read",
            found=repr(text),
            expected="different ones between commas: cat,dog, or with the words for prompts 0=cat,1=dog",
            fix="a class with a comma in its name: --class-map FILE",
        )
    return classes


def words_for(name: str) -> str:
    """The words for a class in prompts, unless others are given."""
    return name.replace("_", " ")


_text = partial(option, None, group="Classes and text encoder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of commands that turn prompts into features."""

    classes: str | None = _text(
        help="Classes in order, with their words in prompts if these aren't the names: cat,dog or "
        "0=cat,1=dog; without it, the classes of the store's label. _ in a name becomes a blank.",
        metavar="CLASSES",
        parse=parse_classes,
        separator=LIST,
    )
    class_map: Path | None = _text(
        help="Table of the classes, with the columns class and, if words aren't the names, text.",
        role="input",
        metavar="FILE",
    )
    pretrained: str | None = _text(
        help="Weights of the store's encoder: a file or a tag (those the features were made with).",
        role="name-or-input",
    )
    device: str = option(
        "auto", help="auto, cpu, cuda or cuda:N.", group="Classes and text encoder", parse=parse_device
    )

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        if self.classes and self.class_map:
            yield UsageError("--classes and --class-map both name the classes", fix="give one of them")
