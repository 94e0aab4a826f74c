"""Every command: its sentence, its options, and the function that does its work, loaded when needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

COMMANDS = {
    "data": "Make a data set, with its manifest and pairs.",
    "embed": "Embed images into a feature store; again, to resume or update it.",
    "pairs": "Match rows that differ only in what should not matter.",
    "fit": "Fit a linear probe that ignores what the pairs differ in.",
    "eval": "Measure a probe: on average, by group, for the worst group.",
    "bound": "Bound a probe's risk in a test domain, term by term.",
    "predict": "Predict images, or the rows of a feature store, with a probe.",
    "sweep": "Train many methods and settings at once; choose by every rule.",
    "report": "Turn results into tables and plots.",
    "info": "Describe any file of ncm, and whether it is intact.",
    "run": "Run a recipe: all of the above in one YAML file.",
}
"""The commands, in the order in which people meet them, each with its sentence."""

_STEPS = {
    "embed": ("images.options:EmbedOptions", "images.embed:embed"),
    "pairs": ("pairs.options:PairsOptions", "pairs.pairs:pairs"),
    "fit": ("probes.options:FitOptions", "probes.fit:fit"),
    "eval": ("probes.options:EvalOptions", "probes.evaluate:evaluate"),
    "bound": ("theory.options:BoundOptions", "theory.bound:bound"),
    "sweep": ("baselines.options:SweepOptions", "baselines.sweep:sweep"),
    "predict": ("probes.options:PredictOptions", "probes.predict:predict"),
    "report": ("results.options:ReportOptions", "results.report:report"),
}
"""A recipe's step: its options class, and ``work(options, *, reporter)``."""

_BUILDERS = {
    "folder": ("datasets.options:FolderOptions", "datasets.image_folder:build"),
    "digits": ("datasets.options:DigitsOptions", "datasets.colored:build_digits"),
    "synthetic": ("datasets.options:SyntheticOptions", "datasets.synthetic:build"),
    "colored-mnist": ("datasets.options:ColoredMnistOptions", "datasets.colored:build_colored_mnist"),
    "waterbirds-cf": ("datasets.options:WaterbirdsCfOptions", "datasets.waterbirds:build"),
    "pacs": ("datasets.options:PacsOptions", "datasets.pacs:build"),
}
"""A builder of ``ncm data``: its options class, and ``build(options, reporter)``."""

STEPS: tuple[str, ...] = (*_STEPS, "data")
"""The steps that a recipe may hold."""

BUILDERS: tuple[str, ...] = tuple(_BUILDERS)
"""The builders of ``ncm data``."""


def step_options(name: str) -> type:
    """The options class of a step other than ``data``."""
    return _load(_STEPS[name][0])


def builder_options(name: str) -> type:
    """The options class of one builder of ``ncm data``."""
    return _load(_BUILDERS[name][0])


def step_work(name: str) -> Callable[..., Any]:
    """The function that does a step, ``work(options, *, reporter)``."""
    return _load("datasets.base:data" if name == "data" else _STEPS[name][1])


def builder_of(options: Any) -> Callable[..., Any]:
    """The function ``build(options, reporter)`` to which the class of ``options`` belongs."""
    return next(_load(build) for made, build in _BUILDERS.values() if type(options) is _load(made))


def _load(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(f"ncm_cli.{module}"), name)
