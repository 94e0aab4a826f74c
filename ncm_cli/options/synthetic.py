"""Options of ``ncm data synthetic``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ncm_cli.errors import UsageError
from ncm_cli.options.grids import parse_numbers
from ncm_cli.options.spec import option

_MODEL = "The model"
_SIZES = "Sizes"

NOISE_UNITS = ("sigma", "absolute")


def parse_levels(text: str) -> tuple[float, ...]:
    """``0,0.1,1``: spectral norms of noise."""
    levels = parse_numbers(text)
    if min(levels) < 0:
        raise UsageError("--noise can't be negative", found=text)
    return levels


def parse_scales(text: str) -> tuple[float, ...]:
    """``0.1,0.2``: standard deviations, one of each training domain."""
    scales = parse_numbers(text)
    if len(scales) < 2 or min(scales) <= 0:
        raise UsageError(
            "--scales needs two or more different positive numbers", found=text, expected="0.1,0.2"
        )
    return scales


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticOptions:
    """The paper's linear generator: invariant and spurious latents, mixed by an orthonormal map."""

    output: Path = option(
        flags=("-o",),
        role="output",
        metavar="DIR",
        help="Folder to make: features.h5, oracle.h5, clean.h5 and a noisy-LEVEL.h5 for each noise level.",
    )
    seed: int = option(0, least=0, help="Seed of the map, the labels' weights, the rows and the noise.")
    noise: str = option(
        "0.1",
        metavar="LEVELS",
        parse=parse_levels,
        help="Spectral norm of the pairs' noise matrix, one or more: 0,0.1,1.",
    )
    noise_unit: str = option(
        "sigma",
        choices=NOISE_UNITS,
        help="Unit of --noise: sigma is the clean pairs' smallest spurious singular value, σ_|I|.",
    )

    dim: int = option(100, group=_MODEL, help="Dimensions of the features.")
    spurious: int = option(20, group=_MODEL, help="Spurious dimensions, |I|.")
    scales: str = option(
        "0.1,0.2",
        group=_MODEL,
        metavar="S,S",
        parse=parse_scales,
        help="Standard deviation of the spurious latents in each training domain.",
    )
    test_scale: float = option(10.0, above=0, group=_MODEL, help="The same in the test domain.")

    rows: int = option(
        1000, least=1, group=_SIZES, help="Training rows of each training domain; the oracle has as many."
    )
    val_rows: int = option(250, least=1, group=_SIZES, help="Validation rows of each training domain.")
    test_rows: int = option(
        2000, least=1, group=_SIZES, help="Test rows; each has a twin in a training domain."
    )
    pairs: int = option(100, least=1, group=_SIZES, help="Pairs to learn from, across two training domains.")
    holdout_pairs: int = option(
        50, least=0, group=_SIZES, help="Further pairs, held out for choosing the rank."
    )

    def refusals(self) -> Iterator[UsageError]:
        """Why these options can't be used together."""
        if not 1 <= self.spurious < self.dim:
            yield UsageError(
                "--spurious must leave an invariant dimension",
                found=self.spurious,
                expected=f"1 to {self.dim - 1} for --dim {self.dim}",
            )
        if self.test_scale in parse_numbers(self.scales):
            yield UsageError("--test-scale is a training domain's scale", found=self.test_scale)
