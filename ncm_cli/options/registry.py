"""Which options class belongs to which command, recipe step and data builder."""

from __future__ import annotations

import importlib

_STEPS = {
    "embed": "embed:EmbedOptions",
    "pairs": "pairs:PairsOptions",
    "fit": "fit:FitOptions",
    "eval": "evaluate:EvalOptions",
    "bound": "bound:BoundOptions",
    "sweep": "sweep:SweepOptions",
    "predict": "predict:PredictOptions",
    "report": "report:ReportOptions",
}

_BUILDERS = {
    "folder": "data:FolderOptions",
    "digits": "data:DigitsOptions",
    "synthetic": "synthetic:SyntheticOptions",
    "colored-mnist": "data:ColoredMnistOptions",
    "waterbirds-cf": "data:WaterbirdsCfOptions",
    "pacs": "data:PacsOptions",
}

STEPS: tuple[str, ...] = (*_STEPS, "data")
"""The steps that a recipe may hold."""

BUILDERS: tuple[str, ...] = tuple(_BUILDERS)
"""The builders of ``ncm data``."""


def step_options(name: str) -> type:
    """The options class of a step other than ``data``."""
    return _load(_STEPS[name])


def builder_options(name: str) -> type:
    """The options class of one builder of ``ncm data``."""
    return _load(_BUILDERS[name])


def _load(address: str) -> type:
    module, _, name = address.partition(":")
    found: type = getattr(importlib.import_module(f"ncm_cli.options.{module}"), name)
    return found
