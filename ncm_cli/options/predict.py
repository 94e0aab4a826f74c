"""The options of ``ncm predict``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ncm_cli.options.embed import parse_batch_size, parse_workers
from ncm_cli.options.grids import parse_device
from ncm_cli.options.spec import argument, option

_TABLE = "Manifest"
_ENCODER = "Encoder"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of ``ncm predict``; the fields are the long options and the recipe's keys."""

    probe: Path = argument(help="Probe to predict with.", role="input")
    source: Path = argument(
        help="What to predict: a feature store, an image, a folder of images or a manifest.", role="input"
    )
    output: Path = option(Path("-"), help="CSV to write; - is standard output.", role="output", flags=("-o",))
    where: str | None = option(
        None, help="Rows of the store, such as split=test.", metavar="WHERE", columns_of="source"
    )
    probabilities: bool = option(False, help="Add one column of probability a class.")

    root: Path | None = option(
        None,
        help="Folder that relative paths start from (the manifest's folder).",
        group=_TABLE,
        role="input",
    )
    id_col: str | None = option(
        None,
        help="Column of ids (id, if there is one; otherwise the path is the id).",
        group=_TABLE,
        metavar="COLUMN",
        columns_of="source",
    )
    path_col: str = option(
        "path", help="Column of image paths.", group=_TABLE, metavar="COLUMN", columns_of="source"
    )

    pretrained: str | None = option(
        None,
        help="Weights of the probe's encoder: a file or a tag (those the features were made with).",
        group=_ENCODER,
        role="name-or-input",
    )
    device: str = option("auto", help="auto, cpu, cuda or cuda:N.", group=_ENCODER, parse=parse_device)
    batch_size: str = option("auto", help="Images at once.", group=_ENCODER, parse=parse_batch_size)
    workers: str = option("auto", help="Threads that read images.", group=_ENCODER, parse=parse_workers)
