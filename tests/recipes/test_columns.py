"""No option that names a column can be mistyped: each is checked before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.options import COLUMN_METAVARS, Field, fields_of
from ncm_cli.recipes.document import RecipeError
from ncm_cli.recipes.load import read_recipe
from ncm_cli.recipes.run import run, shell_lines
from ncm_cli.recipes.steps import built_columns
from ncm_cli.registry import BUILDERS, STEPS, options_of
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.tables import read_header
from tests.world import write_store

BEFORE = """
name: x
steps:
  - data: {builder: digits, output: data}
  - embed: {source: data/manifest.csv, model: "pixels:8", output: f.h5}
  - pairs: {source: data/pairs.csv, features: f.h5, output: p.h5}
  - fit: {features: f.h5, output: p.safetensors}
"""

NEEDED = {
    "folder": "builder: folder, source: ., layout: domain/label, output: more",
    "embed": "source: data/manifest.csv, output: g.h5",
    "pairs": "source: data/pairs.csv, features: f.h5, output: q.h5",
    "fit": "features: f.h5, output: q.safetensors",
    "zeroshot": "features: f.h5, prompts: ['a {class}'], pairs: p.h5, output: z.safetensors",
    "eval": "probe: p.safetensors, features: f.h5, output: e.json",
    "bound": "probe: p.safetensors, features: f.h5, oracle_pairs: p.h5, output: b.json",
    "sweep": "features: f.h5, output: s.json",
    "finetune": "source: data/manifest.csv, output: m.safetensors",
    "predict": "probe: p.safetensors, source: data/manifest.csv, output: g.csv",
}
"""What each step needs besides."""

NAMING = [
    (name, field)
    for name in (*BUILDERS, *STEPS)
    if name != "data"
    for field in fields_of(options_of(f"data {name}") if name in BUILDERS else options_of(name))
    if field.metavar in COLUMN_METAVARS
]


def _write(folder: Path, step: str, field: Field, column: str) -> Path:
    value = f"{column}=1" if field.metavar == "WHERE" else f"[{column}]" if field.repeated else column
    kind = "data" if step in BUILDERS else step
    needed = NEEDED[step]
    if step == "pairs" and field.group == "Matching":
        needed = needed.replace("source: data/pairs.csv", "match: random")
        needed += "" if field.name == "across" else ", across: domain"
    (folder / "r.yaml").write_text(f"{BEFORE}  - {kind}: {{{needed}, {field.name}: {value}}}\n")
    return folder / "r.yaml"


@pytest.mark.parametrize(("step", "field"), NAMING, ids=lambda value: getattr(value, "name", value))
def test_every_option_that_names_columns_is_checked(tmp_path: Path, step: str, field: Field) -> None:
    file = _write(tmp_path, step, field, "nonsense")
    with pytest.raises(RecipeError) as caught:
        read_recipe(file)
    ((problem),) = caught.value.problems
    assert problem.line == 8
    assert re.search(rf"\.{field.name}$", problem.path)
    assert re.match(r"no column of the \w+ named 'nonsense'; known: .*", problem.what)


def test_the_right_names_pass(tmp_path: Path) -> None:
    for step, field in NAMING:
        if field.columns_of == "features":
            for column in ("label", "split", "domain"):
                read_recipe(_write(tmp_path, step, field, column))


def test_a_filter_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    more = "  - eval: {probe: p.safetensors, features: f.h5, where: split, output: e.json}\n"
    (tmp_path / "r.yaml").write_text(BEFORE + more)
    with pytest.raises(RecipeError, match=r"where: a row filter that can't be read \(where: split;"):
        read_recipe(tmp_path / "r.yaml")


def test_the_columns_that_a_store_will_have(tmp_path: Path) -> None:
    """The label by its own name or as ``label``; not the ids and paths."""
    (tmp_path / "birds.csv").write_text("name;file;species;place;set;weight\n1;a.png;crow;land;train;3\n")
    embed = (
        "  - embed: {{source: birds.csv, id_col: name, path_col: file, label_col: species, split_col: set, "
        "{more} model: 'pixels:2', output: {out}}}\n"
    )
    text = "name: x\nsteps:\n" + embed.format(more="", out="all.h5")
    text += embed.format(more="numeric: [weight],", out="some.h5")
    fit = "  - fit: {{features: {store}, groups: '{columns}', output: {number}.safetensors}}\n"
    (tmp_path / "r.yaml").write_text(
        text
        + fit.format(store="all.h5", columns="label,split,species,place,set,weight", number=1)
        + fit.format(store="some.h5", columns="label,split,species,place,set,weight", number=2)
    )
    read_recipe(tmp_path / "r.yaml")
    wrong = [("all.h5", "file"), ("all.h5", "name"), ("all.h5", "nonsense"), ("some.h5", "file")]
    for store, column in wrong:
        (tmp_path / "r.yaml").write_text(text + fit.format(store=store, columns=column, number=3))
        with pytest.raises(RecipeError, match=f"no column of the features named '{column}'"):
            read_recipe(tmp_path / "r.yaml")


def test_columns_of_stores_that_are_there(tmp_path: Path) -> None:
    columns = {"y": ["1", "1"], "age": np.array([1.0, 2.0])}
    write_store(tmp_path / "made.h5", np.ones((2, 3)), columns, label_column="y")
    text = "name: x\nsteps:\n  - fit: {features: made.h5, groups: '%s', output: p.safetensors}\n"
    (tmp_path / "r.yaml").write_text(text % "y,age,label")
    read_recipe(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text(text % "y,ages")
    with pytest.raises(RecipeError, match="no column of the features named 'ages'; did you mean 'age'"):
        read_recipe(tmp_path / "r.yaml")


RECIPE = """
name: x
steps:
  - data: {builder: digits, pairs: 4, holdout_pairs: 4, oracle_pairs: 4, output: digits}
  - data: {builder: synthetic, dim: 6, spurious: 2, rows: 20, val_rows: 10, test_rows: 10, pairs: 4, holdout_pairs: 4, output: synthetic}
  - data: {builder: folder, source: photos, layout: domain/label, output: folder}
  - data: {builder: pacs, pacs: photos, output: pacs}
"""  # noqa: E501


def test_builders_make_the_columns_that_are_assumed(tmp_path: Path) -> None:
    from PIL import Image

    for i in range(20):
        file = tmp_path / "photos" / f"d{i % 2}" / f"c{i // 10}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (i, i, i)).save(file)
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = read_recipe(tmp_path / "r.yaml")
    run(recipe)
    for job in recipe.jobs:
        folder = job.outputs["output"]
        assumed = built_columns(job)
        for name, columns in assumed.items():
            if name.endswith(".csv"):
                assert read_header(folder / name) == columns
            else:
                with FeatureStore(folder / name) as store:
                    assert {*store.columns, "label", "split"} == set(columns)
        assert {path.name for path in folder.glob("*.csv")} <= set(assumed)


@pytest.mark.parametrize("name", ["photos", "no such folder/photos"])
def test_a_dry_run_needs_no_data(tmp_path: Path, name: str) -> None:
    text = (
        "name: x\nvars: {photos: null}\nsteps:\n"
        "  - data: {builder: folder, source: '${photos}', layout: domain/label, output: data}\n"
        "  - embed: {source: data/manifest.csv, model: 'pixels:2', output: f.h5}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    sets = [f"photos={name}"]
    with pytest.raises(RecipeError, match=f"no such file or folder: {name}, and no step writes it"):
        read_recipe(tmp_path / "r.yaml", sets=sets)
    dry = read_recipe(tmp_path / "r.yaml", sets=sets, dry_run=True)
    assert dry.missing == (f"line 4: no such file or folder: {name}, and no step writes it",)
    lines = shell_lines(dry, dry.jobs)
    (tmp_path / name).mkdir(parents=True)
    there = read_recipe(tmp_path / "r.yaml", sets=sets)
    assert there.missing == ()
    assert lines == shell_lines(there, there.jobs)
    assert len(lines) == 4


def test_a_dry_run_without_data_warns_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ncm_cli.main import run

    (tmp_path / "r.yaml").write_text("name: x\nsteps:\n  - data: {builder: pacs, pacs: gone, output: data}\n")
    assert run(["run", str(tmp_path / "r.yaml"), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "ncm data pacs" in said.out
    assert "no such file or folder" in said.err
