"""The options of ``ncm eval``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ncm_cli.options.spec import argument, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of ``ncm eval``; the fields are the long options and the recipe's keys."""

    probe: Path = argument(help="Probe to evaluate.", role="input")
    features: Path = option(help="Feature store with the rows.", role="input", flags=("-f",))
    where: str | None = option(None, help="Rows to evaluate, such as split=test.", metavar="WHERE")
    groups: str | None = option(
        None,
        help="Columns whose combinations are the groups; the target if left out. Several crossings: "
        "'label,male;label,black'.",
        metavar="COLUMNS",
    )
    reference: str | None = option(
        None,
        help="Rows whose group sizes weight the adjusted average; the probe's training rows.",
        metavar="WHERE",
    )
    target: str | None = option(
        None, help="Column of the true answer, if not named as when fitted.", metavar="COLUMN"
    )
    compare: Path | None = option(
        None, help="Another probe, or its saved result, to compare with on the same rows.", role="input"
    )
    output: Path | None = option(None, help="Result to write, as JSON.", role="output", flags=("-o",))
