"""The one registry of commands: data only; options and work are named by address and loaded when needed."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A command, or a builder of ``ncm data``. How its result is shown: ``commands/NAME.py``.

    Its examples and what comes next are in ``help/examples.md``.
    """

    sentence: str
    options: str = ""
    """Module and class, below ``ncm_cli``."""
    work: str | None = None
    """Module and function ``work(options, *, reporter)``; None if Python has another way to do the same."""
    json: bool = True
    """Whether it has ``--json``."""


COMMANDS = {
    "data": Command("Make a data set, with its manifest and pairs.", work="datasets.base:data"),
    "embed": Command(
        "Embed images into a feature store; run it again to resume or update.",
        "images.options:EmbedOptions",
        "images.embed:embed",
    ),
    "pairs": Command(
        "Match rows that differ only in what should not matter.",
        "pairs.options:PairsOptions",
        "pairs.pairs:pairs",
    ),
    "fit": Command(
        "Fit a linear probe that ignores what the pairs differ in.",
        "probes.options:FitOptions",
        "probes.fit:fit",
    ),
    "zeroshot": Command(
        "Make a probe from prompts: what CLIP says without training.",
        "probes.options:ZeroshotOptions",
        "probes.zeroshot:zeroshot",
    ),
    "eval": Command(
        "Measure a probe: on average, by group, for the worst group.",
        "probes.options:EvalOptions",
        "probes.evaluate:evaluate",
    ),
    "bound": Command(
        "Bound a probe's risk in a test domain, term by term.",
        "theory.options:BoundOptions",
        "theory.bound:bound",
    ),
    "predict": Command(
        "Predict images, or the rows of a feature store, with a probe.",
        "probes.options:PredictOptions",
        "probes.predict:predict",
        json=False,
    ),
    "sweep": Command(
        "Train many methods and settings at once; choose by every rule.",
        "baselines.options:SweepOptions",
        "baselines.sweep:sweep",
    ),
    "finetune": Command(
        "Train a network end to end, with pairs as a penalty.",
        "finetune.options:FinetuneOptions",
        "finetune.finetune:finetune",
    ),
    "report": Command(
        "Turn results into tables and plots.",
        "results.options:ReportOptions",
        "results.report:report",
    ),
    "info": Command(
        "Describe any file of ncm, and say whether it is intact.",
        "results.options:InfoOptions",
        None,
    ),
    "run": Command(
        "Run a recipe: commands and the values that vary, in one YAML file.",
        "recipes.options:RunOptions",
        "commands.run:work",
    ),
    "help": Command(
        "Read about a topic.",
        "commands.help:HelpOptions",
        None,
        json=False,
    ),
}
"""The commands, in the order in which people meet them."""

BUILDERS = {
    "folder": Command(
        "A manifest with seeded splits over a folder of your own images.",
        "datasets.options:FolderOptions",
        "datasets.image_folder:build_folder",
    ),
    "digits": Command(
        "Coloured digits: small, and nothing is downloaded.",
        "datasets.options:DigitsOptions",
        "datasets.colored:build_digits",
    ),
    "synthetic": Command(
        "The paper's linear model: stores with oracle, clean and noisy pairs, no images.",
        "datasets.options:SyntheticOptions",
        "datasets.synthetic:build_synthetic",
    ),
    "colored-mnist": Command(
        "ColoredMNIST by IRM's protocol, from MNIST's own files.",
        "datasets.options:ColoredMnistOptions",
        "datasets.colored:build_colored_mnist",
    ),
    "waterbirds-cf": Command(
        "Waterbirds with counterfactual minority groups, or as it is.",
        "datasets.options:WaterbirdsCfOptions",
        "datasets.waterbirds:build_waterbirds",
    ),
    "pacs": Command(
        "PACS: a manifest with splits over domain/class/file.",
        "datasets.options:PacsOptions",
        "datasets.image_folder:build_pacs",
    ),
}
"""The builders of ``ncm data``: their ``work``, ``build(options, folder, reporter)``, is called by data's."""

HELP = Path(__file__).with_name("help")

TOPICS = {
    "start": "the first ten minutes: your own images to a page",
    "examples": "every command by example",
    "pairs": "how to get pairs, look at them and drop wrong ones",
    "rank": "how to choose r, what fit does, and its verdict",
    "zeroshot": "classifiers and pairs from texts, for features of CLIP",
    "metrics": "what the numbers of eval, predict and report mean; the page",
    "bound": "what a test domain can cost, term by term",
    "methods": "comparing methods, hyper-parameters and selection rules",
    "finetune": "training a network end to end, with pairs",
    "recipes": "the whole path in one YAML file",
    "where": "filters of rows: --where, --train, --val, --test",
    "files": "tables that are read, and the formats of what is written",
    "images": "encoders, image files, archives and buckets, augmentations",
    "api": "commands, files and estimators in Python and notebooks",
    "performance": "how long things take; using one GPU or many",
    "paper": "results measured, and reproducing the paper",
    "troubleshooting": "what happens when ..., exit codes, when not to use it",
    "contributing": "how the code is laid out, and how to add to it",
    "reference": "every option of every command",
}
"""The topics of ``ncm help NAME``, which shows the file ``help/NAME.md``; in the order in which people need
them."""

WORKING = tuple(name for name, command in COMMANDS.items() if command.work)
"""The commands that Python can run."""

STEPS = tuple(name for name in WORKING if name != "run")
"""The steps that a recipe may hold."""


def options_of(words: str) -> type:
    """The options class of a command line's first words: ``fit``, ``data digits``."""
    name, _, builder = words.partition(" ")
    options: type = at_address((BUILDERS[builder] if builder else COMMANDS[name]).options)
    return options


def topic_text(name: str) -> str:
    """A topic's Markdown."""
    return (HELP / f"{name}.md").read_text(encoding="utf-8")


def examples_of(words: str) -> str:
    """The shell lines in a command's help, each with its purpose, and what comes next."""
    pattern = rf"^## `ncm {words}`\n\n```text\n(.*?)^```"
    block = re.search(pattern, topic_text("examples"), flags=re.DOTALL | re.MULTILINE)
    return block[1] if block else ""


def work_of(name: str) -> Callable[..., Any]:
    """The function of a step, ``work(options, *, reporter)``."""
    return at_address(COMMANDS[name].work)


def screen_of(name: str) -> ModuleType:
    """The module that shows a command: ``show(result, ui)``, or ``run(options, ui)`` in place of its work."""
    return importlib.import_module(f"ncm_cli.commands.{name}")


def builder_of(options: Any) -> tuple[str, Callable[..., Any]]:
    """The name and the function ``build(options, folder, reporter)`` of the builder with these options."""
    every = BUILDERS.items()
    return next(
        (name, at_address(builder.work))
        for name, builder in every
        if type(options) is at_address(builder.options)
    )


def at_address(address: str | None) -> Any:
    """The object at an address ``module:name``, with the module below ``ncm_cli``."""
    module, _, name = (address or "").partition(":")
    return getattr(importlib.import_module(f"ncm_cli.{module}"), name)
