"""A cell of the matrix is what the recipe writes, character by character, and never what that parses to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncm_cli.errors import UsageError
from ncm_cli.options import check
from ncm_cli.probes.options import FitOptions
from ncm_cli.recipes.document import RecipeError, scalar_value
from ncm_cli.recipes.load import Recipe, read_recipe
from ncm_cli.recipes.run import shell_lines


def _load(folder: Path, values: str, *sets: str, more: str = "", output: str = "d-${v}") -> Recipe:
    text = (
        f"name: x\nmatrix:\n  v: {values}\nsteps:\n  - data: {{builder: digits, output: '{output}'}}\n{more}"
    )
    (folder / "r.yaml").write_text(text, encoding="utf-8")
    return read_recipe(folder / "r.yaml", out=folder / "out", sets=sets)


def _names(recipe: Recipe) -> list[str]:
    return [job.cell["v"] for job in recipe.jobs]


@pytest.mark.parametrize("set_", [False, True])
@pytest.mark.parametrize(
    "values",
    [["6e1234", "7e5678"], ["1.10", "1.1"], ["1", "1.0", "1e0", "+1"], ["0", "-0"], ["true", "True"]],
)
def test_cells_are_named_as_written(tmp_path: Path, values: list[str], set_: bool) -> None:
    """omry/omegaconf#341."""
    written = f"[{', '.join(values)}]"
    recipe = _load(tmp_path, "[a]", f"v={written}") if set_ else _load(tmp_path, written)
    assert _names(recipe) == values
    assert recipe.matrix == {"v": tuple(values)}
    assert [job.title for job in recipe.jobs] == [f"data (v {value})" for value in values]
    assert [job.outputs["output"].name for job in recipe.jobs] == [f"d-{value}" for value in values]
    assert len({job.key for job in recipe.jobs}) == len(values)


def test_an_option_gets_the_value_as_written(tmp_path: Path) -> None:
    steps = (
        "  - embed: {source: 'd-${v}/manifest.csv', model: '${v}', output: '${v}.h5', pretrained: v-${v}}\n"
    )
    embeds = _load(tmp_path, "[1.10, 1.1]", more=steps).jobs[2:]
    assert [job.options.model for job in embeds] == ["1.10", "1.1"]
    assert [job.options.pretrained for job in embeds] == ["v-1.10", "v-1.1"]
    set_ = _load(tmp_path, "[a]", "v=1.10", more=steps).jobs[1]
    assert set_.options.model == "1.10"
    assert "--model 1.10" in shell_lines(_load(tmp_path, "[1.10]", more=steps), (set_,))[-1]


@given(
    values=st.lists(st.text("0123456789.eE+-_atrue~|=' ", min_size=1, max_size=6), min_size=1, unique=True)
)
@settings(deadline=None, max_examples=60)
def test_distinct_texts_are_as_many_cells_with_these_names(
    tmp_path_factory: pytest.TempPathFactory, values: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("r")
    plain = [value.isalnum() and value[0].isdigit() for value in values]
    written = ", ".join(v if bare else json.dumps(v) for v, bare in zip(values, plain, strict=True))
    recipe = _load(folder, f"[{written}]")
    assert _names(recipe) == values
    assert len({job.key for job in recipe.jobs}) == len(values)
    assert [job.outputs["output"].name for job in recipe.jobs] == [f"d-{value}" for value in values]


@pytest.mark.parametrize("text", ["6e1234", "-7e5678", "1e309", "9" * 400 + ".0"])
def test_a_finite_spelling_never_becomes_infinity(tmp_path: Path, text: str) -> None:
    assert scalar_value(text) == text
    more = f"  - data: {{builder: digits, output: e, label_noise: {text}}}\n"
    with pytest.raises(RecipeError, match="more than a number can hold") as caught:
        _load(tmp_path, "[a]", more=more)
    assert [problem.line for problem in caught.value.problems] == [6]
    with pytest.raises(UsageError, match="--lr must be finite"):
        check(FitOptions(features=Path("f"), output=Path("o"), lr=float(text)))


@pytest.mark.parametrize("values", ["[1.1, '1.1']", '["a", a]', "[1, 2, 1]"])
def test_a_repeated_text_is_refused_with_its_line(tmp_path: Path, values: str) -> None:
    with pytest.raises(RecipeError, match=r"matrix\.v: the value '.*' twice") as caught:
        _load(tmp_path, values)
    assert [problem.line for problem in caught.value.problems] == [3]


def test_values_that_give_one_path_are_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        _load(tmp_path, "[a, ./a, b/../a]", output="${v}")
    assert [(problem.line, problem.what) for problem in caught.value.problems] == [
        (5, "out/a is written in the cells (v a) and (v ./a): choose values that give different paths"),
        (5, "out/a is written in the cells (v a) and (v b/../a): choose values that give different paths"),
    ]


def test_two_variables_that_run_together_are_refused(tmp_path: Path) -> None:
    text = (
        "name: x\nmatrix: {a: [1, 11], b: [1, 11]}\nsteps:\n  - data: {builder: digits, output: '${a}${b}'}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"written in the cells \(a 1, b 11\) and \(a 11, b 1\)"):
        read_recipe(tmp_path / "r.yaml")


def test_a_step_named_with_brackets_has_cells_too(tmp_path: Path) -> None:
    text = (
        "name: x\nmatrix: {a: [1, 2]}\nsteps:\n"
        "  - {name: data (both), data: {builder: digits, output: d, seed: '${a}'}}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"the same in several cells; put \$\{a\} in it"):
        read_recipe(tmp_path / "r.yaml")


def test_cells_with_marks_in_them_have_keys_of_their_own(tmp_path: Path) -> None:
    text = (
        "name: x\nmatrix: {a: ['1|b=2', '1'], b: ['3', '2|b=3']}\nsteps:\n"
        "  - data: {builder: digits, output: '${a} and ${b}'}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    jobs = read_recipe(tmp_path / "r.yaml").jobs
    assert len({job.key for job in jobs}) == len(jobs) == 4


def test_expectations_match_cells_by_their_text(tmp_path: Path) -> None:
    expect = "expect:\n  - {metric: accuracy, v: 1.10, min: .5}\n  - {metric: accuracy, v: 6e1234, min: .5}\n"
    recipe = _load(tmp_path, "[1.10, 1.1, 6e1234]", more=expect)
    assert [one.filters for one in recipe.expect] == [{"v": "1.10"}, {"v": "6e1234"}]


@pytest.mark.parametrize("written", ["1.1", "'1.1'", "11e-1"])
def test_an_expectation_that_spells_a_cell_otherwise_is_refused(tmp_path: Path, written: str) -> None:
    expect = f"expect:\n  - {{metric: accuracy, v: {written}, min: .5}}\n"
    with pytest.raises(RecipeError, match=r"expect\[1\]\.v: the matrix has this value as '1\.10'") as caught:
        _load(tmp_path, "[1.10, 2]", more=expect)
    assert [problem.line for problem in caught.value.problems] == [7]
    assert _load(tmp_path, "[1.10, 2]", "v=[2]", more=expect).expect[0].filters == {"v": written.strip("'")}
