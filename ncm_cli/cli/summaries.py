"""The commands, in the order in which people meet them, each with its sentence."""

from __future__ import annotations

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
