"""The recipes that come with the project: all are valid, and the quick one is right."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ncm_cli import main
from ncm_cli.baselines.choice import plan_configs
from ncm_cli.progress import SILENT
from ncm_cli.recipes.load import Recipe, read_about, read_recipe
from ncm_cli.recipes.run import run, shell_lines

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

METHODS = "methods: ${methods}"

INPUTS = {
    "colored_mnist": ("mnist",),
    "colored_mnist_cnn": ("mnist",),
    "colored_mnist_pixels": ("mnist",),
    "digits": (),
    "dogs": ("images",),
    "encoders": ("images",),
    "finetune": ("mnist",),
    "pacs": ("pacs",),
    "studies": ("mnist",),
    "synthetic": (),
    "waterbirds_cf": ("waterbirds", "cub", "places"),
    "waterbirds_cf_resnet50": ("waterbirds", "cub", "places"),
}
"""The variables that must be given."""


def test_every_recipe_is_listed() -> None:
    assert sorted(INPUTS) == sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _load(name: str, tmp_path: Path, *sets: str) -> Recipe:
    given = [f"{variable}=." for variable in INPUTS[name]]
    return read_recipe(RECIPES / f"{name}.yaml", sets=[*given, *sets])


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_a_recipe_is_valid_and_has_shell_lines(name: str, tmp_path: Path) -> None:
    recipe = _load(name, tmp_path)
    lines = shell_lines(recipe, recipe.jobs)
    assert len(lines) == len(recipe.jobs) + 2
    assert all(line.startswith("ncm ") for line in lines[2:])
    assert recipe.expect or name == "encoders"  # nothing is known of the user's own images
    assert all(one.source for one in recipe.expect)


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_a_recipe_says_what_it_shows_the_data_it_needs_and_the_time_it_takes(name: str) -> None:
    about = read_about(RECIPES / f"{name}.yaml")
    assert all(about.values())
    assert re.findall(r"--set (\w+)=DIR", about["data"]) == list(INPUTS[name])


@pytest.mark.parametrize("name", sorted(set(INPUTS) - {"synthetic"}))
@pytest.mark.slow
def test_the_quick_variant_is_smaller(name: str, tmp_path: Path) -> None:
    whole, quick = _load(name, tmp_path), _load(name, tmp_path, "quick=true")
    assert len(quick.jobs) <= len(whole.jobs)
    assert [job.options for job in quick.jobs] != [job.options for job in whole.jobs]


@pytest.mark.parametrize("name", sorted(name for name, inputs in INPUTS.items() if inputs))
@pytest.mark.slow
def test_a_recipe_says_what_must_be_given(name: str, tmp_path: Path) -> None:
    from ncm_cli.recipes.document import RecipeError

    with pytest.raises(RecipeError) as caught:
        read_recipe(RECIPES / f"{name}.yaml")
    # Without --mnist the step says itself that --download is the other way.
    expected = "--mnist DIR, or --download" if INPUTS[name] == ("mnist",) else "use --set NAME=VALUE"
    assert expected in str(caught.value)


SWEPT = sorted(path.stem for path in RECIPES.glob("*.yaml") if METHODS in path.read_text())


@pytest.mark.parametrize(
    "name", [SWEPT[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SWEPT[1:])]
)
def test_any_of_its_methods_will_do(name: str, tmp_path: Path) -> None:
    """Of each alone, and of two, every sweep can be planned: what is searched need not be theirs."""
    (listed,) = re.findall(r"^  methods: (.*)$", (RECIPES / f"{name}.yaml").read_text(), re.M)
    methods = listed.split(",")
    for chosen in [*methods, f"{methods[0]},{methods[2]}"]:
        sweeps = [job for job in _load(name, tmp_path, f"methods={chosen}").jobs if job.kind == "sweep"]
        for job in sweeps:
            cells = plan_configs(job.options, available_rank=30, reporter=SILENT)
            assert {cell.method for cell in cells} == {name.partition("+")[0] for name in chosen.split(",")}
        assert sweeps


@pytest.mark.slow
def test_digits_by_hand_gives_the_recipes_numbers(tmp_path: Path) -> None:
    by_hand = read_recipe(RECIPES / "digits.yaml", out=Path("hand"), sets=["quick=true"])
    Path("hand").mkdir()
    for program, *words in map(shlex.split, shell_lines(by_hand, by_hand.jobs)):
        assert program in ("cd", "mkdir") or main.run(words) == 0, words
    report = run(read_recipe(RECIPES / "digits.yaml", out=Path("run"), sets=["quick=true"]))
    assert report.exit_code == 0
    for file in sorted((tmp_path / "run" / "seed0").glob("*.json")):
        ours, theirs = (_numbers(json.loads(path.read_text())) for path in (file, _twin(file)))
        assert ours == theirs


def _twin(file: Path) -> Path:
    return file.parents[2] / "hand" / file.parent.name / file.name


def _numbers(value: Any) -> Any:
    """A result without the times, paths and digests of files that name them."""
    left_out = ("created", "path", "options", "features", "probe", "sources", "content_sha256", "sha256")
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items() if key not in left_out}
    return [_numbers(item) for item in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_digits_reproduce_what_is_known(tmp_path: Path) -> None:
    report = run(read_recipe(RECIPES / "digits.yaml", out=Path("run")))
    assert [comparison.state for comparison in report.comparisons] == ["reproduced"] * 3
    rows = {row.step: row for row in report.rows}
    assert rows["ERM"].seeds == rows["NCM"].seeds == 5
    for name, heading, low, high in (
        ("ERM", "in-domain", 0.82, 0.88),
        ("ERM", "test domain", 0.0, 0.25),
        ("NCM", "test domain", 0.60, 0.75),
    ):
        spread = rows[name].columns[heading]
        assert spread is not None
        assert low <= spread.mean <= high


def test_pixels_have_every_published_row(tmp_path: Path) -> None:
    """Six methods by two rules, in the training and in the test domain, all swept by the variant too."""
    sets = [f"mnist={tmp_path}", "published=true"]
    recipe = read_recipe(RECIPES / "colored_mnist_pixels.yaml", sets=sets, dry_run=True)
    rows = [expected for expected in recipe.expect if expected.filters["step"] == "sweep"]
    assert {tuple(row.filters[name] for name in ("method", "rule", "where")) for row in rows} == {
        (method, rule, f"split={split}")
        for method in ("erm", "irm", "ncm", "vrex", "fish", "groupdro")
        for rule in ("in-domain", "oracle")
        for split in ("val", "test")
    }
    assert len(rows) == 24 and all(row.reproduced_within == 0.02 for row in rows)
    (sweep, *_) = (job.options for job in recipe.jobs if job.kind == "sweep")
    assert {name for name, _ in sweep.chosen_methods} == {row.filters["method"] for row in rows}
    assert sweep.trials == 160


@pytest.mark.slow
def test_pixels_quickly(tmp_path: Path, mnist_dir: Path) -> None:
    sets = [f"mnist={mnist_dir}", "quick=true", "trials=1", "epochs=1"]
    report = run(read_recipe(RECIPES / "colored_mnist_pixels.yaml", out=Path("run"), sets=sets))
    rows = {(row.step, row.method): row for row in report.rows}
    erm, ncm = rows["ERM (exact)", "erm"].columns, rows["NCM (exact)", "ncm"].columns
    assert erm["test"] is not None and ncm["test"] is not None
    assert erm["test"].mean < 0.25
    assert ncm["test"].mean > 0.60
    assert ("sweep", "erm") in rows


@pytest.fixture
def waterbirds(tmp_path: Path) -> None:
    """A folder wb of coloured squares, in which 20 of 100 training birds are counterfactuals."""
    import csv

    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    rows = []
    numbers = {(0, 0, 0): 40, (0, 1, 0): 10, (1, 0, 0): 10, (1, 1, 0): 40}
    numbers.update({(y, p, split): 8 for y in (0, 1) for p in (0, 1) for split in (1, 2)})
    for (y, place, split), count in numbers.items():
        for _ in range(count):
            name = f"bird{len(rows):03d}.png"
            picture = rng.integers(0, 60, (8, 8, 3))
            picture[2:6, 2:6, 0] += 100 * y
            picture[..., 2] += 150 * place
            (tmp_path / "wb").mkdir(exist_ok=True)
            Image.fromarray(picture.astype(np.uint8)).save(tmp_path / "wb" / name)
            rows.append([len(rows), name, y, split, place, ""])
    majority = [row for row in rows if row[3] == 0 and row[2] == row[4]]
    minority = [row for row in rows if row[3] == 0 and row[2] != row[4]]
    for a, b in zip([majority[i] for i in (*range(10), *range(40, 50))], minority, strict=True):
        a[5] = b[5] = str(b[0])
        b[3] = "counterfactual"
    with (tmp_path / "wb" / "metadata.csv").open("w", newline="") as stream:
        columns = ["img_id", "img_filename", "y", "split", "place", "cf"]
        csv.writer(stream).writerows([columns, *rows])


@pytest.mark.slow
def test_waterbirds_quickly_on_a_fake_folder(waterbirds: None, text_clip: Path) -> None:
    sets = ["waterbirds=wb", "pretrained=null", "quick=true", "device=cpu", "epochs=1"]
    sets.append(f"model=local-dir:{text_clip}")
    report = run(read_recipe(RECIPES / "waterbirds_cf.yaml", out=Path("run"), sets=sets))
    steps = {row.step for row in report.rows}
    fitted, prompted = {"ERM (exact)", "NCM (exact)", "NCM (paper)", "sweep"}, "zero-shot"
    assert steps == fitted | {prompted, f"{prompted} without pairs", f"{prompted} without text pairs"}
    methods = {row.method for row in report.rows if row.step == "sweep"}
    assert {"erm", "erm+upweight", "ncm", "ncm+upweight", "groupdro", "dfr"} <= methods


@pytest.mark.slow
def test_a_network_quickly_on_a_fake_folder(waterbirds: None) -> None:
    sets = ["waterbirds=wb", "model=timm:test_resnet.r160_in1k", "random_init=true", "image_size=32"]
    sets += ["quick=true", "epochs=2", "device=cpu", "method=[irm,ncm]", "upweighted=[erm]"]
    report = run(read_recipe(RECIPES / "waterbirds_cf_resnet50.yaml", out=Path("run"), sets=sets))
    for method in ("irm", "ncm", "erm+upweight"):
        rows = {row.rule: row for row in report.rows if row.method == method}
        assert {"in-domain", "oracle-worst-group"} <= set(rows)
        found = json.loads(Path(f"run/{method.replace('+', '-')}/seed0.json").read_text())["rules"][
            "in-domain"
        ]
        test = rows["in-domain"].columns["test"]
        assert test is not None
        assert test.mean == found["metrics"]["test_accuracy"]
        assert rows["oracle-worst-group"].oracle
    assert {comparison.state for comparison in report.comparisons} == {"not run"}
