"""``ncm data``: one subcommand a builder."""

from __future__ import annotations

import dataclasses
from typing import Any

import typer

from ncm_cli.commands import Example, add_command
from ncm_cli.registry import COMMANDS, builder_options

ROWS_SHOWN = 40
"""Rows of a table of counts."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Builder:
    summary: str
    examples: tuple[Example, ...]
    next_step: str


_BUILDERS = {
    "folder": _Builder(
        summary="A manifest with seeded splits over a folder of your own images.",
        examples=(
            Example(
                line="ncm data folder photos --layout domain/label -o data",
                note="of each label in each domain, 20 % for the test and 20 % of the rest for validation",
            ),
            Example(
                line="ncm data folder photos --layout domain/label --test domain=sketch -o data",
                note="a whole domain kept for the test",
            ),
        ),
        next_step="ncm embed data/manifest.csv -o features.h5",
    ),
    "digits": _Builder(
        summary="Coloured digits: small, and nothing is downloaded.",
        examples=(
            Example(line="ncm data digits -o data", note="1,797 digits, 192 pairs, the protocol's defaults"),
            Example(
                line="ncm data digits -o noisy --pairs 256 --wrong-fraction 0.25 --seed 3",
                note="a quarter of the pairs match the wrong digit",
            ),
        ),
        next_step="ncm embed data/manifest.csv --model pixels:8 -o features.h5",
    ),
    "synthetic": _Builder(
        summary="The paper's linear model: stores with oracle, clean and noisy pairs, no images.",
        examples=(
            Example(line="ncm data synthetic -o data", note="100 dimensions, 20 of them spurious, 100 pairs"),
            Example(
                line="ncm data synthetic -o data --noise 0,0.1,1 --test-scale 5 --seed 3",
                note="a noisy-LEVEL.h5 for each level of the pairs' noise",
            ),
        ),
        next_step="ncm fit --features data/features.h5 --pairs data/noisy-0.1.h5 -o probe.safetensors",
    ),
    "colored-mnist": _Builder(
        summary="ColoredMNIST by IRM's protocol, from MNIST's own files.",
        examples=(
            Example(line="ncm data colored-mnist --mnist mnist -o data", note="28×28 PNG files, 256 pairs"),
            Example(
                line="ncm data colored-mnist --mnist mnist --size 14 --packed -o data",
                note="one array of pixels, for ncm embed --from-array data/pixels.npy",
            ),
        ),
        next_step="ncm embed data/manifest.csv -o features.h5",
    ),
    "waterbirds-cf": _Builder(
        summary="Waterbirds with counterfactual minority groups, or as it is.",
        examples=(
            Example(
                line="ncm data waterbirds-cf waterbirds --cub CUB_200_2011 --places places365 -o data",
                note="paste 184 landbirds and 56 waterbirds on the other background",
            ),
            Example(
                line="ncm data waterbirds-cf waterbirds -o data",
                note="a folder that has its counterfactuals (a cf column), or plain Waterbirds",
            ),
        ),
        next_step="ncm embed data/manifest.csv -o features.h5",
    ),
    "pacs": _Builder(
        summary="PACS: a manifest with splits over domain/class/file.",
        examples=(
            Example(line="ncm data pacs PACS -o data", note="80 % training, 20 % validation in each domain"),
            Example(line="ncm data pacs PACS --limit 20 -o small", note="20 images a class and domain"),
        ),
        next_step="ncm embed data/manifest.csv -o features.h5",
    ),
}


SUMMARIES = {name: builder.summary for name, builder in _BUILDERS.items()}
"""What each builder makes, in a sentence."""


def register(app: typer.Typer) -> None:
    """Add the command and its builders to the tree."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode="rich", add_completion=False, help=COMMANDS["data"]
    )
    for name, builder in _BUILDERS.items():
        add_command(
            group,
            name,
            builder_options(name),
            handle,
            summary=builder.summary,
            examples=builder.examples,
            next_step=builder.next_step,
        )
    app.add_typer(group, name="data", short_help=COMMANDS["data"])


def handle(options: Any, ui: Any) -> int | None:
    """Make the data set and show its counts."""
    from ncm_cli.datasets.base import data

    built = data(options, reporter=ui.reporter)
    for table in built.tables:
        more = len(table.rows) - ROWS_SHOWN
        footer = f"and {more:,} more: --json has all" if more > 0 else None
        names = sum(isinstance(cell, str) for cell in table.rows[0])
        ui.table(table.columns, table.rows[:ROWS_SHOWN], title=table.title, footer=footer, left=names)
    for role, path in built.files.items():
        ui.note(f"{role}: {path}")
    if ui.json:
        ui.result(built.to_json())
    return None
