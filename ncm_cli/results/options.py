"""Options of ``ncm report`` and ``ncm info``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ncm_cli.errors import UsageError
from ncm_cli.options import LIST, argument, option, parse_names

FORMATS = ("table", "markdown", "latex", "csv")
BY = ("method", "probe", "pairs", "file")


def parse_mean_over(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once; `UsageError` for none, and for ``seed``, which needs no name."""
    names = tuple(dict.fromkeys(parse_names(text)))
    if not names:
        raise UsageError("--mean-over names nothing", found=repr(text), expected="options, such as features")
    if "seed" in names or "seeds" in names:
        raise UsageError("means are over seeds anyway", found=f"--mean-over {text}", fix="leave seed out")
    return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of ``ncm report``: what it reads and how it shows it."""

    results: tuple[Path, ...] = argument(
        help="Results (.json) of eval, bound, sweep and run, probes, pair stores, or folders of them;"
        " for a page also feature stores, whose pictures it shows.",
        metavar="RESULTS...",
        role="input",
    )
    format: str = option("table", choices=FORMATS, help="How tables are written.")
    output: Path | None = option(
        None,
        flags=("-o",),
        role="output",
        metavar="FILE",
        help="Write the tables to this file instead of stdout.",
        writes=("tables",),
    )
    plots: Path | None = option(
        None, role="output", metavar="DIR", help="Folder for plots of the results, as PNG, SVG and PDF."
    )
    html: Path | None = option(
        None,
        role="output",
        metavar="FILE",
        help="Write a page with pictures and plots: one file, to open in a browser.",
        writes=("page",),
    )
    by: str = option(
        "method",
        choices=BY,
        help="What lines are named by. Means are over seeds; results that differ in anything else have "
        "lines of their own.",
    )
    mean_over: str | None = option(
        None,
        help="What else repetitions may differ in: options or matrix variables, such as features "
        "for several splits of your data.",
        metavar="NAMES",
        parse=parse_mean_over,
        separator=LIST,
    )


EXPORTS = ("npz", "sklearn", "onnx")

_EXPORT_EXAMPLE = "ncm info probe.safetensors --export npz -o probe.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """The file to describe, and what to do with it."""

    file: Path | None = argument(
        None,
        help="A feature store, pair store, probe, result, or the .partial folder of unfinished work.",
        metavar="FILE",
        role="input",
    )
    verify: bool = option(False, help="Read everything back and check it against its digests.")
    system: bool = option(False, help="Show versions and devices instead of a file.")
    export: str | None = option(
        None,
        help="Write a probe in another form: arrays for numpy, or for scikit-learn, or an ONNX graph.",
        choices=EXPORTS,
        group="Export",
    )
    output: Path | None = option(
        None,
        help="The file that --export writes.",
        flags=("-o",),
        role="output",
        group="Export",
        writes=("export",),
    )

    def __post_init__(self) -> None:
        if self.file is None and not self.system:
            raise UsageError("nothing to describe", fix="ncm info FILE, or ncm info --system")
        if (self.export is None) != (self.output is None):
            raise UsageError("--export and --output go together", fix=_EXPORT_EXAMPLE)
        if self.export is not None and self.file is None:
            raise UsageError("--export needs a probe", fix=_EXPORT_EXAMPLE)
