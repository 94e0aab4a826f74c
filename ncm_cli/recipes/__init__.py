"""Recipes: YAML files that are read strictly into frozen dataclasses."""
