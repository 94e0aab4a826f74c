"""Recipes are read strictly: every problem at once, with its line and the nearest valid key."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.progress import SILENT
from ncm_cli.recipes.catalogue import find_recipe
from ncm_cli.recipes.document import Mistakes, Node, RecipeError, parse, scalar_value
from ncm_cli.recipes.load import Recipe, read_recipe

STEPS = """
  - data: {builder: digits, output: data}
  - embed: {source: data/manifest.csv, model: "pixels:8", output: features.h5}
"""


def _load(tmp_path: Path, text: str, **options: object) -> Recipe:
    file = tmp_path / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return read_recipe(file, **options)  # type: ignore[arg-type]


def _problems(tmp_path: Path, text: str, **options: object) -> dict[int, list[str]]:
    with pytest.raises(RecipeError) as caught:
        _load(tmp_path, text, **options)
    found: dict[int, list[str]] = {}
    for problem in caught.value.problems:
        found.setdefault(problem.line, []).append(f"{problem.path}: {problem.what}")
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-2", -2),
        ("0", 0),
        ("no", "no"),
        ("off", "off"),
        ("0123", "0123"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        (".nan", ".nan"),
        ("true", True),
        ("~", None),
        ("2001-01-01", "2001-01-01"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    """yaml/pyyaml#173."""
    found = scalar_value(text)
    assert found == value
    assert type(found) is type(value)


def test_scalars_of_numbers_come_back(rng_seed: int = 0) -> None:
    rng = np.random.default_rng(rng_seed)
    for number in [*rng.standard_normal(50) * 10.0 ** rng.integers(-12, 12, 50)]:
        assert scalar_value(repr(float(number))) == float(number)
    for whole in rng.integers(-(10**9), 10**9, 50):
        assert scalar_value(str(whole)) == int(whole)


def test_wrong_types_are_named(tmp_path: Path) -> None:
    """yaml/pyyaml#173."""
    text = (
        "name: x\nsteps:\n"
        "  - data: {builder: digits, output: d1, seed: 0123}\n"
        "  - data: {builder: digits, output: d2, label_noise: no}\n"
        "  - data: {builder: digits, output: d3, test_flip: 1:30}\n"
        "  - data: {builder: digits, output: d4, label_noise: 1e-3}\n"
        "  - embed: {source: d4/manifest.csv, output: f.h5, normalize: no}\n"
    )
    found = _problems(tmp_path, text)
    assert found == {
        3: ["steps[1].data.seed: expected a whole number, found text ('0123'); a number has no leading zero"],
        4: ["steps[2].data.label_noise: expected a number, found text ('no')"],
        5: [
            "steps[3].data.test_flip: expected a number, found text ('1:30'); 1:30 isn't a number in YAML 1.2"
        ],
        7: ["steps[5].embed.normalize: expected true or false, found text ('no'); write true or false"],
    }


def test_repeated_and_misspelt_keys(tmp_path: Path) -> None:
    """yaml/pyyaml#165, rbgirshick/yacs#17."""
    text = (
        "name: x\nname: y\nsteps:\n"
        "  - data: {builder: digits, output: data, sed: 1}\n"
        "  - embed:\n      source: data/manifest.csv\n      modell: pixels:8\n"
        "      output: f.h5\n      output: g.h5\n"
        "  - emebd: {}\n"
        "expekt: []\n"
    )
    found = _problems(tmp_path, text)
    assert found[2] == ["name: this key is already on line 1"]
    assert found[4] == ["steps[1].data.sed: no option named 'sed'; did you mean 'seed'?"]
    assert found[7] == ["steps[2].embed.modell: no option named 'modell'; did you mean 'model'?"]
    assert found[9] == ["steps[2].embed.output: this key is already on line 8"]
    assert found[10] == ["steps[3].emebd: no step named 'emebd'; did you mean 'embed'?"]
    assert found[11] == ["expekt: no key named 'expekt'; did you mean 'expect'?"]


def test_the_message_has_lines_and_snippets(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"2 problems in .*recipe\.yaml") as caught:
        _load(tmp_path, f"name: x\nstepps: []\nsteps:{STEPS}\nvars: 3\n")
    lines = dict(caught.value.lines())
    assert "did you mean 'steps'?" in lines["line 2"]
    assert "| stepps: []" in lines["line 2"]
    assert caught.value.exit_code == 3


def test_variables_keep_their_type_alone_and_are_text_inside_text(tmp_path: Path) -> None:
    text = (
        "name: x\nvars: {s: 3, noise: 1e-3, where: d${s}, full: '${where}/data'}\nsteps:\n"
        "  - data: {builder: digits, output: ${full}, seed: ${s}, label_noise: ${noise}}\n"
    )
    (job,) = _load(tmp_path, text).jobs
    assert (job.options.seed, job.options.label_noise) == (3, 1e-3)
    assert job.outputs["output"] == tmp_path / "runs/x/d3/data"


def test_a_list_is_taken_where_several_values_can_be(tmp_path: Path) -> None:
    """As in Python: row filters must all hold, and ranks are a list. Other options take one value."""
    text = f"name: x\nsteps:{STEPS}  - fit: {{features: features.h5, output: p, MORE}}\n"
    lists = text.replace("MORE", "weight_decay: [0, 4], test: [split=test, domain=1]")
    options = _load(tmp_path, lists).jobs[-1].options
    assert (options.weight_decay, options.test) == ("0,4", "split=test & domain=1")
    for several in ("seed: [1, 2]", "method: [erm, ncm]", "save_controls: [p, q]"):
        assert "found a list" in _problems(tmp_path, text.replace("MORE", several))[5][0], several


def test_set_is_typed_and_checked(tmp_path: Path) -> None:
    text = (
        f"name: x\nvars: {{s: 0}}\nmatrix: {{seed: [1, 2]}}\nsteps:{STEPS}"
        "  - data: {builder: digits, output: 'd${seed}', seed: ${s}}\n"
    )
    jobs = _load(tmp_path, text, sets=["s=7", "seed=[4, 5, 6]"]).jobs
    assert [job.cell for job in jobs[2:]] == [{"seed": "4"}, {"seed": "5"}, {"seed": "6"}]
    assert {job.options.seed for job in jobs[2:]} == {7}
    found = _problems(tmp_path, text, sets=["sed=1", "s", "s=[", "s=2"])
    assert "--set s=2: s is set twice" in found[0]
    assert "--set sed=1: no variable named 'sed'; did you mean 'seed'?" in found[0]
    assert "--set s: expected --set name=value" in found[0]
    assert any("not YAML" in problem for problem in found[0])
    assert "whole number, found a number ('1e-3')" in _problems(tmp_path, text, sets=["s=1e-3"])[7][0]


def test_variants_change_variables_and_the_matrix(tmp_path: Path) -> None:
    text = (
        "name: x\nvars: {pairs: 128}\nmatrix: {seed: [0, 1, 2]}\n"
        "variants: {quick: {pairs: 16, seed: [0]}}\nsteps:\n"
        "  - data: {builder: digits, output: 'd${seed}', seed: ${seed}, pairs: ${pairs}}\n"
    )
    assert [job.options.pairs for job in _load(tmp_path, text).jobs] == [128] * 3
    assert [job.options.pairs for job in _load(tmp_path, text, sets=["quick=true"]).jobs] == [16]
    both = _load(tmp_path, text, sets=["quick=true", "pairs=32"]).jobs
    assert [job.options.pairs for job in both] == [32]
    found = _problems(tmp_path, text, sets=["quick=yes"])
    assert found[0] == ["--set quick=yes: a variant is switched on by true or off by false"]


def test_a_step_runs_once_for_each_cell_of_the_variables_it_uses(tmp_path: Path) -> None:
    text = (
        "name: x\nvars: {at: 's${seed}'}\nmatrix: {seed: [0, 1], pairs: [8, 16, 32]}\nsteps:\n"
        "  - data: {builder: digits, output: once}\n"
        "  - name: a\n    data: {builder: digits, output: '${at}/a'}\n"
        "  - name: b\n    data: {builder: digits, output: '${at}/b${pairs}', pairs: ${pairs}}\n"
    )
    recipe = _load(tmp_path, text)
    assert [job.title for job in recipe.jobs] == [
        "data",
        *("a (seed 0)", "a (seed 1)"),
        *(f"b (seed {s}, pairs {p})" for s in (0, 1) for p in (8, 16, 32)),
    ]
    assert len({job.key for job in recipe.jobs}) == 9


def test_outputs_of_cells_must_differ(tmp_path: Path) -> None:
    text = (
        "name: x\nmatrix: {seed: [0, 1]}\nsteps:\n  - data: {builder: digits, output: data, seed: ${seed}}\n"
    )
    found = _problems(tmp_path, text)
    assert found[4] == ["steps[1].data.output: runs/x/data is the same in several cells; put ${seed} in it"]


def test_files_between_steps(tmp_path: Path) -> None:
    text = (
        "name: x\nsteps:\n"
        "  - embed: {source: data/manifest.csv, model: 'pixels:8', output: f.h5}\n"
        "  - data: {builder: digits, output: data}\n"
        "  - data: {builder: digits, output: data}\n"
        "  - data: {builder: digits, output: data/inner}\n"
        "  - pairs: {source: nowhere.csv, features: f.h5, output: p.h5}\n"
    )
    found = _problems(tmp_path, text)
    assert found == {
        3: ["steps[1].embed.source: runs/x/data/manifest.csv is read here, but only a later step writes it"],
        5: ["steps[3].data.output: runs/x/data is also written by data"],
        6: ["steps[4].data.output: runs/x/data/inner is also written by data"],
        7: ["steps[5].pairs.source: no such file or folder: nowhere.csv, and no step writes it"],
    }


def test_inputs_are_relative_to_the_recipe_and_set_values_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "recipes" / "near").mkdir()
    file = tmp_path / "recipes" / "r.yaml"
    file.write_text(
        "name: x\nvars: {where: near}\nsteps:\n  - data: {builder: pacs, pacs: ${where}, output: data}\n"
    )
    near = read_recipe(file).jobs[0]
    assert near.inputs["pacs"] == (tmp_path / "recipes" / "near",)
    assert near.options.pacs == Path("recipes/near")
    mine = read_recipe(file, sets=["where=mine"]).jobs[0]
    assert mine.inputs["pacs"] == (tmp_path / "mine",)
    monkeypatch.chdir(tmp_path / "recipes")
    with pytest.raises(RecipeError, match="no such file or folder: mine"):
        read_recipe(file, sets=["where=mine"])


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "pacs").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    text = "name: x\nsteps:\n  - data: {builder: pacs, pacs: ~/pacs, output: ~/out}\n"
    job = _load(tmp_path, text, allow_outside=True).jobs[0]
    assert job.inputs["pacs"] == (home / "pacs",)
    assert job.outputs["output"] == home / "out"


def test_weights_are_a_name_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"x")
    text = (
        f"name: x\nvars: {{w: weights.pt}}\nsteps:{STEPS.replace('output: f', 'pretrained: ${w}, output: f')}"
    )
    job = _load(tmp_path, text).jobs[1]
    assert job.inputs["pretrained"] == (tmp_path / "weights.pt",)
    named = _load(tmp_path, text, sets=["w=openai"]).jobs[1]
    assert "pretrained" not in named.inputs
    assert named.options.pretrained == "openai"


def test_prompts_stay_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "f.h5").touch()
    prompts = ["a // {}", "{}" + " and so on" * 40]
    step = f"zeroshot: {{features: f.h5, prompts: {json.dumps(prompts)}, output: z}}"
    assert _load(tmp_path, f"name: x\nsteps: [{step}]\n").jobs[0].options.prompts == tuple(prompts)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "a recipe is a mapping with name and steps; found nothing"),
        ("# only a comment\n", "found nothing"),
        ("- 1\n", "found a list"),
        ("word", "found text"),
        ("name: x\n---\nname: y\n", "found another document"),
        ("name: x\nvars:\n\ta: 1\n", "a tab; YAML wants spaces"),
        ("name: [x", "not YAML"),
        ("name: x\nsteps: \x01\n", "line 2: not YAML: unacceptable character"),
        ("name: *x", "found undefined alias 'x'"),
        ("name: !!python/object/apply:os.system [ls]", "isn't allowed"),
        ("name: x\nsteps: " + "[" * 100 + "]" * 100, "nested more than"),
        ("name: x\nsteps: 3\n", "expected a list with one entry for each step, found a number"),
        ("steps: []\n", "a recipe needs a name"),
        ("name: x\nsteps:\n  - {}\n", "expected one step, found none"),
        ("name: x\nsteps:\n  - fit: 3\n", "expected a mapping of options"),
        ("name: x\nsteps:\n  - {nam: a, fit: {rank: x}}\n", "a rank grid that can't be read"),
        ("name: x\nsteps:\n  - {name: 'a ${b}', fit: {}}\n", "a step's name can't hold variables"),
        (
            "name: x\nsteps:\n  - {name: a, fit: {}}\n  - {name: a, fit: {}}\n",
            "line 3 has a step of this name",
        ),
        ("name: x\nsteps:\n  - data: {builder: digit, output: d}\n", "did you mean 'digits'"),
        ("name: ../x\nsteps: []\n", "a name is letters"),
        ("name: x\nvars: {a: '${b}', b: '${a}'}\nsteps: []\n", "defined by itself: a -> b -> a"),
        ("name: x\nvars: {a: 1}\nmatrix: {a: [1]}\nsteps: []\n", "this name is also in vars"),
        ("name: x\nmatrix: {a: []}\nsteps: []\n", "no value"),
        ("name: x\nmatrix: {a: [1, 1]}\nsteps: []\n", "the value '1' twice"),
    ],
)
def test_what_is_not_a_recipe_is_refused(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(RecipeError) as caught:
        _load(tmp_path, text)
    assert match in str(caught.value)


def test_not_utf8_or_not_there(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    with pytest.raises(InputError, match="can't be read"):
        read_recipe(file)
    file.write_bytes(b"name: x\nsteps: \xff\n")
    with pytest.raises(InputError, match="isn't UTF-8") as caught:
        read_recipe(file)
    assert "line 2" in str(caught.value)
    with pytest.raises(InputError, match="can't be read"):
        read_recipe(tmp_path)


def test_aliases_are_allowed(tmp_path: Path) -> None:
    text = "name: x\nvars: {a: &common 5}\nsteps:\n  - data: {builder: digits, output: d, seed: *common}\n"
    assert _load(tmp_path, text).jobs[0].options.seed == 5


def test_a_huge_matrix_is_refused(tmp_path: Path) -> None:
    values = ", ".join(map(str, range(200)))
    text = (
        f"name: x\nmatrix: {{a: [{values}], b: [{values}]}}\nsteps:\n"
        "  - data: {builder: digits, output: 'd${a}-${b}'}\n"
    )
    with pytest.raises(RecipeError, match="problem") as caught:
        _load(tmp_path, text)
    assert "40,000 cells; at most 10,000" in str(caught.value)


def test_private_characters_are_not_taken_for_braces() -> None:
    node = parse('a: "${x} and {y}"', Mistakes(Path("r"), ""))
    assert node.value["a"] == Node("${x} and {y}", 1, "${x} and {y}")  # type: ignore[union-attr]


def test_expectations_are_checked(tmp_path: Path) -> None:
    text = (
        f"name: x\nmatrix: {{seed: [0]}}\nsteps:{STEPS}"
        "expect:\n"
        "  - {metric: accuracy, value: .8, tolerance: .1, where: split=test, seed: 0, source: paper}\n"
        "  - {metric: accuracy, min: .7, tolerance: .1}\n"
        "  - {value: .8, tolerance: .1}\n"
        "  - {metric: accuracy, min: high}\n"
        "  - {metric: accuracy, min: .5, metod: erm}\n"
        "  - {metric: accuracy, min: .5, step: nope}\n"
        "  - {metric: accuracy}\n"
        "  - {metric: acuracy, min: .5}\n"
        "  - {metric: zero_one.flip_rate, max: .5}\n"
        "  - {metric: misalignment_upper, max: .5}\n"
        "  - {metric: accuracy, value: .8, spread: .02, tolerance: .02}\n"
        "  - {metric: accuracy, max: .8, spread: -.1}\n"
    )
    found = _problems(tmp_path, text)
    assert found == {
        8: ["expect[2]: tolerance needs a value"],
        9: ["expect[3]: metric is required, such as metric: accuracy"],
        10: ["expect[4].min: expected a number, found text ('high')"],
        11: ["expect[5].metod: no key named 'metod'; did you mean 'method'?"],
        12: ["expect[6].step: no step named 'nope'; known: data, embed"],
        13: ["expect[7]: value, min or max is required"],
        14: ["expect[8].metric: no metric named 'acuracy'; did you mean 'accuracy'?"],
        17: ["expect[11]: the tolerance, within which a value is near, must be above its spread"],
        18: ["expect[12]: spread needs a value", "expect[12]: spread can't be negative"],
    }


def test_globs_name_the_outputs_of_all_cells(tmp_path: Path) -> None:
    text = (
        "name: x\nmatrix: {seed: [0, 1]}\nsteps:\n"
        "  - data: {builder: digits, output: 's${seed}/data'}\n"
        "  - embed: {source: 's${seed}/data/manifest.csv', model: 'pixels:8', output: 's${seed}/f.h5'}\n"
        "  - fit: {features: 's${seed}/f.h5', output: 's${seed}/p.safetensors'}\n"
        "  - eval: {probe: 's${seed}/p.safetensors', features: 's${seed}/f.h5', output: 's${seed}/e.json'}\n"
        "  - report: {results: 's*/e.json', plots: plots}\n"
    )
    report = _load(tmp_path, text).jobs[-1]
    assert report.inputs["results"] == tuple(tmp_path / f"runs/x/s{i}/e.json" for i in (0, 1))


def test_columns_are_checked_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "birds.csv").write_text("name,file,species,place\n")
    text = (
        "name: x\nsteps:\n"
        "  - data: {builder: digits, output: data}\n"
        "  - embed: {source: data/manifest.csv, model: 'pixels:8', output: f.h5}\n"
        "  - fit: {features: f.h5, train: splt=train, groups: 'label,colour', output: p.safetensors}\n"
        "  - eval: {probe: p.safetensors, features: f.h5, where: split=test & domain!=x, output: e.json}\n"
        "  - embed: {source: birds.csv, path_col: file, label_col: specie, output: b.h5}\n"
        "  - fit: {features: b.h5, target: place, output: q.safetensors}\n"
        "  - fit: {features: b.h5, target: plase, output: r.safetensors}\n"
    )
    found = _problems(tmp_path, text)
    assert found == {
        5: [
            "steps[3].fit.train: no column of the features named 'splt'; did you mean 'split'?",
            "steps[3].fit.groups: no column of the features named 'colour'; did you mean 'color'?",
        ],
        7: ["steps[5].embed.label_col: no column of the manifest named 'specie'; did you mean 'species'?"],
        9: ["steps[7].fit.target: no column of the features named 'plase'; did you mean 'place'?"],
    }


def test_validation_rows_that_are_the_test_rows(tmp_path: Path) -> None:
    """kohpangwei/group_DRO#10."""
    text = (
        f"name: x\nsteps:{STEPS}"
        "  - fit: {features: features.h5, val: split=test, output: p.safetensors}\n"
        "  - sweep: {features: features.h5, val: split=val, test: split=val, output: s.json}\n"
        "  - fit: {features: features.h5, val: split=val, output: q.safetensors}\n"
    )
    found = _problems(tmp_path, text)
    assert found == {
        5: ["steps[3].fit.val: the validation rows are the test rows: split=test"],
        6: ["steps[4].sweep.val: the validation rows are the test rows: split=val"],
    }


def test_what_set_names_is_not_taken_from_the_runs_folder(tmp_path: Path) -> None:
    text = (
        "name: x\nvars: {where: null}\nsteps:\n"
        "  - data: {builder: pacs, pacs: ${where}, output: data}\n"
        "  - embed: {source: data/manifest.csv, root: ., model: 'pixels:8', output: f.h5}\n"
    )
    first, second = _load(tmp_path, text, sets=["where=."]).jobs
    assert first.inputs["pacs"] == (tmp_path,)
    assert second.inputs["root"] == (tmp_path / "runs" / "x",)


def test_values_are_checked_as_the_command_line_checks_them_all_at_once(tmp_path: Path) -> None:
    """Each alone is a usage error of its command; a dry run shows them too."""
    text = (
        "name: x\nsteps:\n"
        "  - data: {builder: digits, output: data, seed: -1, flips: '0.1,2'}\n"
        "  - embed:\n      source: data/manifest.csv\n      model: pixels:x\n      augment: greyscale\n"
        "      device: gpu\n      output: f.h5\n"
        "  - fit:\n      features: f.h5\n      select: bond\n      weight_decay: abc\n      rank: 4-8\n"
        "      train: split\n      val: splt=val\n      lr: -1.5\n      output: p.safetensors\n"
        "  - sweep: {features: f.h5, search: [lr=0, rank=1:4], epochs: 0, methods: 'erm,x', output: s.h5}\n"
        "  - eval: {probe: p.safetensors, features: f.h5, groups: colour, output: e.json}\n"
    )
    found = _problems(tmp_path, text)
    assert found == _problems(tmp_path, text, dry_run=True)
    places = {(line, problem.partition(": ")[0]) for line, own in found.items() for problem in own}
    assert places == {
        *((3, f"steps[1].data.{name}") for name in ("seed", "flips")),
        *((line, f"steps[2].embed.{name}") for line, name in ((6, "model"), (7, "augment"), (8, "device"))),
        *((line, f"steps[3].fit.{name}") for line, name in ((12, "select"), (13, "weight_decay"))),
        *((line, f"steps[3].fit.{name}") for line, name in ((14, "rank"), (15, "train"), (16, "val"))),
        (17, "steps[3].fit.lr"),
        *((19, f"steps[4].sweep.{name}") for name in ("search", "epochs", "methods")),
        (20, "steps[5].eval.groups"),
    }
    (augment,) = found[7]
    assert "no augmentation named 'greyscale'" in augment and "did you mean 'grayscale'?" in augment
    assert "did you mean 'bound'?" in found[12][0]


@pytest.mark.parametrize(
    ("step", "match"),
    [
        ("fit: {features: f.h5, method: ncm, output: o}", r"fit: ncm needs --pairs"),
        (
            "fit: {features: f.h5, method: irm, output: o}",
            r"ncm sweep --methods irm .* --save-probes DIR",
        ),
        ("fit: {features: f.h5, select: worst-group, output: o}", r"fit\.select: --select worst-group needs"),
        ("fit: {features: f.h5, select: bound, output: o}", r"fit\.select: --select bound needs pairs"),
        ("pairs: {features: f.h5, match: random, output: o}", r"pairs\.match: --match random in one store"),
        (
            "pairs: {features: f.h5, output: o}",
            "pairs come either from a table, from --match or from --prompts",
        ),
        (
            "bound: {probe: p, features: f.h5, oracle_pairs: p, ranks: '0:4'}",
            r"bound\.ranks: .* needs --pairs",
        ),
        ("sweep: {features: f.h5, methods: irm, output: s.h5}", "sweep: irm needs --envs"),
        ("sweep: {features: f.h5, methods: erm, output: s.txt}", "a sweep's table can't be 's.txt'"),
        ("sweep: {features: f.h5, grid: true, search: lr=log:1e-4:1, output: s.h5}", "a grid needs values"),
        (
            "embed: {source: f.h5, model: 'pixels:4', device: cuda, output: g.h5}",
            r"embed\.device: pixels runs",
        ),
        ("data: {builder: colored-mnist, output: d}", "where MNIST is must be said"),
        ("data: {builder: waterbirds-cf, waterbirds: ., cub: ., output: d}", r"data\.cub: .* needs both"),
        ("data: {builder: synthetic, spurious: 200, output: d}", r"data\.spurious: --spurious must leave"),
    ],
)
def test_what_a_command_refuses_by_its_options_alone_is_refused_before_the_first_step(
    tmp_path: Path, step: str, match: str
) -> None:
    for name in ("f.h5", "p"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(RecipeError, match=match):
        _load(tmp_path, f"name: x\nsteps:\n  - {step}\n")


def test_a_wrong_step_is_no_reason_to_doubt_what_follows(tmp_path: Path) -> None:
    """What a step with an unknown name, builder or option writes is there for the others."""
    text = (
        "name: x\nsteps:\n"
        "  - data: {builder: digitss, output: data}\n"
        "  - emebd: {source: data/manifest.csv, output: f.h5}\n"
        "  - name: probe\n    fit: {features: f.h5, seed: x, output: p.safetensors}\n"
        "  - eval: {probe: p.safetensors, features: f.h5, output: e.json}\n"
        "expect:\n  - {metric: accuracy, step: probe, min: .5}\n"
    )
    assert sorted(_problems(tmp_path, text)) == [3, 4, 6]


def test_outputs_stay_in_the_runs_folder(tmp_path: Path) -> None:
    text = (
        "name: x\nvars: {at: seed}\nsteps:\n"
        "  - data: {builder: digits, output: ../../elsewhere}\n"
        f"  - data: {{builder: digits, output: {tmp_path}/data}}\n"
        "  - data: {builder: digits, output: '${at}/../../x-more'}\n"
        "  - data: {builder: digits, output: a/../b}\n"
        "  - data: {builder: digits, output: report.json}\n"
        "  - data: {builder: digits, output: .}\n"
        "  - data: {builder: digits, output: ..}\n"
    )
    outside = "is outside the run's folder; ncm run --allow-outside writes there"
    own = {
        8: "runs/x/report.json is reserved for the run itself",
        9: "runs/x is reserved for the run itself",
        10: "runs is reserved for the run itself",
    }
    found = {
        line: [problem.partition(": ")[2] for problem in own]
        for line, own in _problems(tmp_path, text).items()
    }
    places = {4: "elsewhere", 5: "data", 6: "runs/x-more"}
    assert {line: found[line][0] for line in places} == {
        line: f"{place} {outside}" for line, place in places.items()
    }
    assert {line: found[line][0] for line in own} == own
    assert sorted(found) == [4, 5, 6, 8, 9, 10]
    assert sorted(_problems(tmp_path, text, allow_outside=True)) == [8, 9, 10]
    allowed = _load(
        tmp_path, text.partition("  - data: {builder: digits, output: report")[0], allow_outside=True
    )
    assert [job.outputs["output"] for job in allowed.jobs] == [
        *(tmp_path / "elsewhere", tmp_path / "data"),
        *(tmp_path / "runs/x-more", tmp_path / "runs/x/b"),
    ]


@pytest.mark.parametrize("name", ["a" * 5_000, "a\0b"])
def test_an_output_that_no_file_system_takes_is_one_mistake(tmp_path: Path, name: str) -> None:
    text = (
        f"name: x\nsteps:\n  - data: {{builder: digits, output: {json.dumps(name)}}}\n"
        f"  - report: {{results: r.json, output: {json.dumps(name + '.md')}}}\n"
    )
    found = _problems(tmp_path, text, dry_run=True)
    assert sorted(found) == [3, 4]
    assert all(len(own) == 1 and "not the path of a file" in own[0] for own in found.values())


def test_all_tables_of_a_sweep_are_its_own(tmp_path: Path) -> None:
    text = (
        f"name: x\nsteps:{STEPS}"
        "  - sweep: {features: features.h5, methods: erm, output: a.csv}\n"
        "  - sweep: {features: features.h5, methods: erm, output: a.h5}\n"
        "  - report: {results: a.json, output: t.md}\n"
        "  - fit: {features: features.h5, output: a.json}\n"
        "  - sweep: {features: features.h5, methods: erm, output: features.csv}\n"
    )
    found = _problems(tmp_path, text)
    assert sorted(found) == [6, 8, 9]
    assert found[6] == ["steps[4].sweep.output: runs/x/a.h5 is also written by sweep"]
    assert found[9] == ["steps[7].sweep.output: runs/x/features.h5 is also written by embed"]
    lines = text.splitlines(keepends=True)
    report = _load(tmp_path, "".join([*lines[:5], lines[6]])).jobs[-1]
    assert report.inputs["results"] == (tmp_path / "runs/x/a.json",)


def test_a_run_folder_may_lie_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = read_recipe(find_recipe(Path("digits"), SILENT), out=Path("../there"), sets=["quick=true"])
    assert recipe.out == tmp_path / "there" and not recipe.missing
