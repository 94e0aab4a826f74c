"""One short flag for one thing, in every command."""

from __future__ import annotations

import pytest

from ncm_cli.options import fields_of
from ncm_cli.recipes.options import RunOptions
from ncm_cli.registry import BUILDERS, STEPS, options_of
from ncm_cli.results.options import InfoOptions

SHORT = {"features": ("-f",), "pairs": ("-p",), "output": ("-o",)}

CLASSES = [
    *(options_of(step) for step in STEPS if step != "data"),
    *(options_of(f"data {builder}") for builder in BUILDERS),
    InfoOptions,
    RunOptions,
]


@pytest.mark.parametrize("options", CLASSES, ids=lambda options: options.__name__)
def test_files_of_features_pairs_and_output_have_their_short_flag(options: type) -> None:
    for field in fields_of(options):
        # A builder's --pairs is a number, not a file.
        if not field.positional and field.role != "value":
            assert field.flags == SHORT.get(field.name, ()), field.flag
