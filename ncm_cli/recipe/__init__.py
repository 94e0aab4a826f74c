"""Recipes: YAML files that are read strictly into frozen dataclasses."""

from ncm_cli.recipe.load import load
from ncm_cli.recipe.model import Expectation, Job, Recipe

__all__ = ["Expectation", "Job", "Recipe", "load"]
