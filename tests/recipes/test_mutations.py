"""Whatever is done to a recipe, it is read or all its problems are shown, never a traceback."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from ncm_cli.recipes.document import RecipeError
from ncm_cli.recipes.load import Recipe, read_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))

INPUTS = ("mnist", "images", "pacs", "waterbirds", "cub", "places")

ITEM = re.compile(r"([A-Za-z_][\w-]*): +(\"[^\"\n]*\"|'[^'\n]*'|\$\{\w+\}|[^,{}\[\]#\n $][^,{}\[\]#\n]*)")
"""``key: value``, wherever it stands."""

VALUES = (
    *("null", "[]", "{}", "-1", "0", "1.5", "1e400", "abc", "''", "true", "yes", "0x10", "1:30", "🦆"),
    *("[1, [2]]", "{a: 1}", "${nope}", "${seed}", "~nobody/x", "../../x", "/x.h5", "/", ".", "-", "a" * 5000),
    *("'split'", "'label='", "label", "erm,nope", "report.json", "1e-3,abc", '"\\0"'),
)
BROKEN = ("*a", "!!python/x 1", "%", "${", "'")
"""Values after which a text may be no YAML any more."""


def _load(folder: Path, name: str, text: str, *, dry_run: bool = False) -> Recipe | None:
    """The recipe, or None; what it needs is there."""
    file = folder / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    variables = re.findall(r"^  (\w+): ", text.partition("vars:")[2].partition("\n\n")[0], re.M)
    sets = [f"{given}=." for given in INPUTS if given in variables]
    sets += ["quick=true"] if "quick: {" in text else []
    return read_recipe(file, sets=sets, out=folder / "out", dry_run=dry_run)


def _mutated(text: str, rng: random.Random) -> str:
    item = rng.choice(list(ITEM.finditer(text)))
    kind = rng.choice(("value", "value", "value", "key", "item", "line"))
    if kind == "value":
        return text[: item.start(2)] + rng.choice((*VALUES, *BROKEN)) + text[item.end(2) :]
    if kind == "key":
        return text[: item.start()] + rng.choice(("x", "builder", "")) + text[item.start() + 1 :]
    if kind == "item":
        return text[: item.start()] + text[item.end() :].removeprefix(", ")
    lines = text.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    lines[number] *= rng.choice((0, 2))
    return "".join(lines)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "digits" else []) for name in NAMES]
)
def test_a_mutated_recipe_is_read_or_refused(name: str, tmp_path: Path) -> None:
    rng, refused = random.Random(name), 0
    for number in range(12):
        text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
        for _ in range(rng.choice((1, 1, 2, 5))):
            text = _mutated(text, rng)
        try:
            _load(tmp_path, name, text, dry_run=number % 3 == 0)
        except RecipeError as error:
            refused += 1
            assert error.problems and all(problem.what for problem in error.problems)
            assert str(error)
    assert refused


def _problems(folder: Path, name: str, text: str) -> set[tuple[int, str]]:
    try:
        _load(folder, name, text)
    except RecipeError as error:
        return {(problem.line, problem.path) for problem in error.problems}
    return set()


@pytest.mark.parametrize(
    "name", ["digits", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dogs", "waterbirds_cf"))]
)
def test_two_wrong_values_are_shown_together(name: str, tmp_path: Path) -> None:
    """Of values that nothing else depends on: each problem alone is among those of both."""
    rng, both = random.Random(name), 0
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    steps = text.index("\nsteps:"), text.index("\nexpect:")
    free = ("select", "rank", "seed", "groups", "where", "scaling", "model", "solver", "epochs", "methods")
    items = [item for item in ITEM.finditer(text, *steps) if item[1] in free]
    while both < 6:
        one, two = sorted(rng.sample(items, 2), key=lambda item: item.start())
        wrong = [rng.choice(("[1, [2]]", "{a: 1}", "'label='", "erm,nope", "-1")) for _ in range(2)]
        alone = [
            _problems(tmp_path, name, text[: item.start(2)] + value + text[item.end(2) :])
            for item, value in zip((one, two), wrong, strict=True)
        ]
        if not all(alone) or any(not path for found in alone for _, path in found):
            continue  # one of them is right, or leaves no YAML
        changed = text[: one.start(2)] + wrong[0] + text[one.end(2) : two.start(2)]
        assert alone[0] | alone[1] <= _problems(tmp_path, name, changed + wrong[1] + text[two.end(2) :])
        both += 1
