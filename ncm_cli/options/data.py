"""Options of the builders of ``ncm data``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ncm_cli.options.grids import parse_numbers
from ncm_cli.options.spec import option

_OUTPUT = "Folder to make: images, manifest.csv and, where the data set has pairs, pairs.csv."


@dataclass(frozen=True, kw_only=True, slots=True)
class ColoringOptions:
    """IRM's colouring protocol, shared by digits and ColoredMNIST."""

    output: Path = option(flags=("-o",), role="output", metavar="DIR", help=_OUTPUT)
    seed: int = option(0, help="Seed of the splits, the label noise, the colours and the pairs.")
    pairs: int = option(
        128, help="Pairs to learn from: a training digit and the same digit in the other colour."
    )
    holdout_pairs: int = option(
        64, help="Further pairs, of validation digits, held out for choosing the rank."
    )
    oracle_pairs: int = option(
        200, help="Test digits paired with themselves as a training domain would colour them, for ncm bound."
    )
    wrong_fraction: float = option(
        0.0, group="Protocol", help="Share of pairs, held-out ones too, whose twin is another digit's."
    )
    label_noise: float = option(0.25, group="Protocol", help="Share of labels flipped.")
    flips: str = option(
        "0.1,0.2",
        group="Protocol",
        metavar="P,P",
        parse=parse_numbers,
        help="How often the colour disagrees with the label, in each training domain.",
    )
    test_flip: float = option(
        0.9, group="Protocol", help="How often the colour disagrees with the label in the test domain."
    )
    val_fraction: float = option(
        0.2, group="Protocol", help="Share of each training domain kept for validation."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsOptions(ColoringOptions):
    """``ncm data digits``."""

    test_fraction: float = option(0.3, group="Protocol", help="Share of the 1,797 digits in the test domain.")
