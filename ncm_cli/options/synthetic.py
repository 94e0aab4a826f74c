"""Options of ``ncm data synthetic``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ncm_cli.options.grids import parse_numbers
from ncm_cli.options.spec import option

_MODEL = "The model"
_SIZES = "Sizes"

NOISE_UNITS = ("sigma", "absolute")


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
        parse=parse_numbers,
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
        parse=parse_numbers,
        help="Standard deviation of the spurious latents in each training domain.",
    )
    test_scale: float = option(10.0, group=_MODEL, help="The same in the test domain.")

    rows: int = option(
        1000, group=_SIZES, help="Training rows of each training domain; the oracle has as many."
    )
    val_rows: int = option(250, group=_SIZES, help="Validation rows of each training domain.")
    test_rows: int = option(2000, group=_SIZES, help="Test rows; each has a twin in a training domain.")
    pairs: int = option(100, group=_SIZES, help="Pairs to learn from, across two training domains.")
    holdout_pairs: int = option(50, group=_SIZES, help="Further pairs, held out for choosing the rank.")
