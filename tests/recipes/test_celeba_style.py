"""A table of attributes in {-1, 1} needs no builder: column options are enough."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ncm_cli.recipes.load import read_recipe
from ncm_cli.recipes.run import run

RECIPE = """
name: celeba-style
steps:
  - embed:
      source: list_attr.csv
      root: pictures
      model: "pixels:2"
      path_col: image_id
      label_col: Blond_Hair
      split_col: partition
      output: features.h5
  - pairs: {features: features.h5, match: nearest, same: Blond_Hair, across: Male, where: partition=0, holdout: "0.25", output: pairs.h5}
  - name: NCM
    fit: {features: features.h5, pairs: pairs.h5, rank: "0:3", train: partition=0, val: partition=1, test: partition=2, output: ncm.safetensors}
  - eval: {probe: ncm.safetensors, features: features.h5, where: partition=2, groups: "Blond_Hair,Male", output: test.json}
table: {test: partition=2}
"""  # noqa: E501


@pytest.mark.slow
def test_two_attributes_make_four_groups(tmp_path: Path) -> None:
    """face-attribute-prediction#5."""
    rng = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    rows = []
    for i in range(160):
        blond, male = rng.choice([-1, 1], 2)
        picture = rng.integers(90, 110, (4, 4, 3))
        picture[..., 0] += 60 * blond
        picture[..., 2] += 60 * male
        Image.fromarray(picture.astype(np.uint8)).save(tmp_path / "pictures" / f"{i:06d}.png")
        rows.append([f"{i:06d}.png", blond, male, (0, 0, 1, 2)[i % 4]])
    with (tmp_path / "list_attr.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["image_id", "Blond_Hair", "Male", "partition"], *rows])
    (tmp_path / "r.yaml").write_text(RECIPE)
    report = run(read_recipe(tmp_path / "r.yaml", out=Path("out")))
    found = json.loads((tmp_path / "out" / "test.json").read_text())
    groups = [group["group"] for group in found["groups"]]
    expected = [{"Blond_Hair": blond, "Male": male} for blond in ("-1", "1") for male in ("-1", "1")]
    assert sorted(groups, key=str) == sorted(expected, key=str)
    assert sum(group["n"] for group in found["groups"]) == found["n"] == 40
    assert report.rows[0].worst_group is not None
    assert found["accuracy"] > 0.95
