"""Options of the builders of ``ncm data``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ncm_cli.errors import UsageError
from ncm_cli.images.options import parse_layout
from ncm_cli.options import LIST, argument, is_file, option, parse_numbers

SPLITS = ("train", "val", "test")

SIZES = (14, 28)
"""Sides of the images of ColoredMNIST: MNIST's, and half of it."""

_OUTPUT = "Folder to make: images, manifest.csv and, where the data set has pairs, pairs.csv."
_PAIRS = "Pairs to learn from: a training digit and the same digit in the other colour."
_HOLDOUT = "Further pairs, of digits used nowhere else, held out for choosing the rank."
_ORACLE = "Test digits paired with themselves as a training domain would colour them, for ncm bound."

_output = partial(option, flags=("-o",), role="output", metavar="DIR")
_folder = partial(option, None, role="input", metavar="DIR")
_source = partial(argument, role="input", metavar="DIR")
_count, _share = partial(option, least=0), partial(option, least=0, most=1, group="Protocol")
_model, _size = partial(option, group="The model"), partial(option, least=1, group="Sizes")


def parse_shares(text: str) -> tuple[float, ...]:
    """Shares, one for each training domain, such as ``0.1,0.2``."""
    shares = parse_numbers(text)
    if not all(0 <= share <= 1 for share in shares):
        raise UsageError("--flips takes shares", found=text, expected="numbers from 0 to 1")
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class ColoringOptions:
    """IRM's colouring protocol, shared by digits and ColoredMNIST."""

    output: Path = _output(help=_OUTPUT)
    seed: int = _count(0, help="Seed of the splits, the label noise, the colours and the pairs.")
    pairs: int = _count(128, help=_PAIRS)
    holdout_pairs: int = _count(64, help=_HOLDOUT)
    oracle_pairs: int = _count(200, help=_ORACLE)
    wrong_fraction: float = _share(
        0.0, help="Share of pairs, held-out ones too, whose second member shows another digit."
    )
    label_noise: float = _share(0.25, help="Share of labels flipped.")
    flips: str = option(
        "0.1,0.2",
        group="Protocol",
        metavar="P,P",
        parse=parse_shares,
        separator=LIST,
        help="How often the colour disagrees with the label, in each training domain.",
    )
    test_flip: float = _share(0.9, help="How often the colour disagrees with the label in the test domain.")
    val_fraction: float = _share(0.2, help="Share of each training domain kept for validation.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsOptions(ColoringOptions):
    """``ncm data digits``."""

    test_fraction: float = _share(0.3, help="Share of the 1,797 digits in the test domain.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ColoredMnistOptions(ColoringOptions):
    """``ncm data colored-mnist``."""

    pairs: int = _count(256, help=_PAIRS)
    holdout_pairs: int = _count(128, help=_HOLDOUT)
    oracle_pairs: int = _count(500, help=_ORACLE)
    mnist: Path | None = _folder(help="Folder with MNIST's four IDX files, gzipped or not.")
    download: bool = option(False, help="Without --mnist: download MNIST by torchvision, beside the output.")
    size: int = option(28, help="Side of the images: 28, or 14 (means of 2 × 2 pixels).")
    packed: bool = option(
        False, help="Write pixels.npy (red and green), for ncm embed --from-array, in place of images."
    )
    train_digits: int = option(
        50000, least=1, group="Protocol", help="Digits in the training domains, validation included."
    )
    test_digits: int = option(10000, least=1, group="Protocol", help="Digits in the test domain.")

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        if self.size not in SIZES:
            yield UsageError("--size can't be read", found=self.size, expected="14 or 28")
        if self.mnist is None and not self.download:
            yield UsageError("where MNIST is must be said", fix="--mnist DIR, or --download")


@dataclass(frozen=True, kw_only=True, slots=True)
class WaterbirdsCfOptions:
    """``ncm data waterbirds-cf``."""

    waterbirds: Path = _source(help="The Waterbirds or Waterbirds-CF folder, with metadata.csv.")
    output: Path = _output(help=_OUTPUT)
    cub: Path | None = _folder(
        help="CUB's folder: its segmentations cut the birds out, from its images folder if it has one."
    )
    places: Path | None = _folder(help="Places: the folder with b/bamboo_forest, o/ocean and so on.")
    seed: int = _count(0, help="Seed of the choice of birds and of their backgrounds.")
    landbirds: int = option(184, least=0, group="Counterfactuals", help="Landbirds to put on water.")
    waterbirds_count: int = option(56, least=0, group="Counterfactuals", help="Waterbirds to put on land.")

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        if (self.cub is None) != (self.places is None):
            yield UsageError("making counterfactuals needs both --cub and --places")


@dataclass(frozen=True, kw_only=True, slots=True)
class PacsOptions:
    """``ncm data pacs``."""

    pacs: Path = _source(help="The PACS folder: domain/class/file.")
    output: Path = _output(help="Folder to make, with manifest.csv.")
    seed: int = _count(0, help="Seed of the splits.")
    val_fraction: float = option(
        0.2, above=0, below=1, help="Share of each class of each domain for validation."
    )
    limit: int | None = option(
        None, least=2, help="At most this many images of each class of each domain, at random."
    )


def parse_counts(text: str) -> dict[tuple[str, ...], dict[str, int]] | None:
    """Numbers of images for train, val and test by group: ``photo/dog=45:15:5, cartoon/dog=5:2:45``.

    None if the text names a table.
    """
    if "=" not in text or is_file(Path(text)):
        return None
    counts: dict[tuple[str, ...], dict[str, int]] = {}
    for part in text.split(","):
        # The name of a folder may contain =.
        group, _, sizes = part.rpartition("=")
        names = tuple(name.strip() for name in group.split("/"))
        try:
            numbers = dict(zip(SPLITS, map(int, sizes.split(":")), strict=True))
            if min(numbers.values()) < 0 or names in counts or not all(names):
                raise ValueError
        except ValueError:
            raise UsageError(
                "counts that can't be read",
                where=f"--counts, {part.strip()!r}",
                found=repr(text),
                expected="a table; or between commas, each group once with its whole numbers of images for "
                "train, val and test: 'photo/dog=45:15:5, cartoon/dog=5:2:45'",
            ) from None
        counts[names] = numbers
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderOptions:
    """``ncm data folder``."""

    source: Path = _source(help="The folder of images.")
    output: Path = _output(help="Folder to make, with manifest.csv.")
    layout: str = option(
        "label", parse=parse_layout, help="What the levels of the folder mean: label, domain/label ..."
    )
    where: str | None = option(
        None,
        metavar="WHERE",
        columns_of="layout",
        help="Only these images: label=dog|horse & domain!=sketch.",
    )
    test: str | None = option(
        None,
        metavar="WHERE",
        columns_of="layout",
        help="The images that are test rows, such as domain=sketch; without it, a share of each group.",
    )
    test_fraction: float = option(0.2, least=0, below=1, help="Share of each group for test, without --test.")
    val_fraction: float = option(
        0.2, least=0, below=1, help="Share of each group's other images for validation."
    )
    counts: str | None = option(
        None,
        role="name-or-input",
        metavar="COUNTS",
        parse=parse_counts,
        separator=LIST,
        help="Instead of shares, numbers of images for train, val and test: 'photo/dog=45:15:5, "
        "cartoon/dog=5:2:45'; or a table headed by the layout's levels and the splits. What is left of "
        "a group becomes split pool; groups without counts are left out.",
    )
    seed: int = _count(0, help="Seed of the splits.")

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        clash = sorted({"id", "path", "split"} & set(parse_layout(self.layout)))
        if clash:
            yield UsageError(
                "--layout names a column that the manifest has already",
                found=", ".join(clash),
                fix="ncm embed reads such a folder itself, with --layout" if clash == ["split"] else None,
            )
        if self.counts is not None and self.test is not None:
            yield UsageError(
                "--counts says which images are test rows, so --test can't", fix="one of the two"
            )
        levels = parse_layout(self.layout)
        for group in parse_counts(self.counts or "") or ():
            if len(group) != len(levels):
                yield UsageError(
                    "--counts needs a folder for each level of --layout",
                    found="/".join(group),
                    expected=f"{'/'.join(levels).upper()}=TRAIN:VAL:TEST",
                )


def parse_levels(text: str) -> tuple[float, ...]:
    """Spectral norms of noise, such as ``0,0.1,1``."""
    levels = parse_numbers(text)
    if min(levels) < 0:
        raise UsageError("--noise can't be negative", found=text)
    return levels


def parse_scales(text: str) -> tuple[float, ...]:
    """Standard deviations, one for each training domain, such as ``0.1,0.2``."""
    scales = parse_numbers(text)
    if len(scales) < 2 or min(scales) <= 0:
        raise UsageError(
            "--scales needs two or more different positive numbers", found=text, expected="0.1,0.2"
        )
    return scales


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticOptions:
    """The paper's linear generator: invariant and spurious latents, mixed by an orthonormal map."""

    output: Path = _output(
        help="Folder to make: features.h5, oracle.h5, clean.h5 and a noisy-LEVEL.h5 for each noise level."
    )
    seed: int = _count(0, help="Seed of the map, the labels' weights, the rows and the noise.")
    noise: str = option(
        "0.1",
        metavar="LEVELS",
        parse=parse_levels,
        separator=LIST,
        help="Spectral norm of the pairs' noise matrix, one or more: 0,0.1,1. The unit is the clean pairs' "
        "smallest spurious singular value, σ_|I|.",
    )

    dim: int = _model(100, help="Dimensions of the features.")
    spurious: int = _model(20, help="Spurious dimensions, |I|.")
    scales: str = _model(
        "0.1,0.2",
        metavar="S,S",
        parse=parse_scales,
        separator=LIST,
        help="Standard deviation of the spurious latents in each training domain.",
    )
    test_scale: float = _model(
        10.0, above=0, help="Standard deviation of the spurious latents in the test domain."
    )

    rows: int = _size(1000, help="Training rows of each training domain; the oracle has as many in all.")
    val_rows: int = _size(250, help="Validation rows of each training domain.")
    test_rows: int = _size(2000, help="Test rows; each has a twin in a training domain.")
    pairs: int = _size(100, help="Pairs to learn from, across two training domains.")
    holdout_pairs: int = _size(50, least=0, help="Further pairs, held out for choosing the rank.")

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        if not 1 <= self.spurious < self.dim:
            yield UsageError(
                "--spurious must leave an invariant dimension",
                found=self.spurious,
                expected=f"1 to {self.dim - 1} for --dim {self.dim}",
            )
        if self.test_scale in parse_numbers(self.scales):
            yield UsageError("--test-scale equals a training domain's scale", found=self.test_scale)
