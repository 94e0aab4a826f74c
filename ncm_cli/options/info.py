"""The options of ``ncm info``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ncm_cli.errors import UsageError
from ncm_cli.options.spec import argument, option

EXPORTS = ("npz", "sklearn", "onnx")

_EXPORT_EXAMPLE = "ncm info probe.safetensors --export npz -o probe.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """What to describe, and how thoroughly."""

    file: Path | None = argument(
        None,
        help="A feature store, pair store, probe, result, or the .partial folder of an unfinished embedding.",
        metavar="FILE",
        role="input",
    )
    verify: bool = option(False, help="Read everything back and check every byte.")
    system: bool = option(False, help="Show versions and devices instead of a file.")
    export: str | None = option(
        None,
        help="Write a probe in another form: arrays for numpy, or for scikit-learn, or an ONNX graph.",
        choices=EXPORTS,
        group="Export",
    )
    output: Path | None = option(
        None, help="The file that --export writes.", flags=("-o",), role="output", group="Export"
    )

    def __post_init__(self) -> None:
        if self.file is None and not self.system:
            raise UsageError("nothing to describe", fix="ncm info FILE, or ncm info --system")
        if (self.export is None) != (self.output is None):
            raise UsageError("--export and --output go together", fix=_EXPORT_EXAMPLE)
        if self.export is not None and self.file is None:
            raise UsageError("--export needs a probe", fix=_EXPORT_EXAMPLE)
