"""Small recipes that would grow beyond all bounds are refused at once, in bounded memory."""

from __future__ import annotations

import random
import resource
import sys
import time
from pathlib import Path

import pytest

from ncm_cli.recipes.document import MAX_DEPTH, MAX_VALUES, RecipeError
from ncm_cli.recipes.load import read_recipe

SECONDS, MEMORY = 4.0, 500 << 20
"""Of the processor; twice what is promised, for slow ones."""


def _chain(first: str, again: str, count: int = 12) -> str:
    """Variables of which each holds the one before it as ``again`` says."""
    lines = [f"  v0: {first}", *(f"  v{i}: {again.replace('V', f'v{i - 1}')}" for i in range(1, count))]
    return "name: x\nvars:\n" + "\n".join(lines) + f"\nsteps:\n  - fit: {{features: ${{v{count - 1}}}}}\n"


def _aliases(again: str, count: int = 12) -> str:
    lines = [f"  v{i}: &v{i} {again.replace('V', f'v{i - 1}') if i else '[1, 1]'}" for i in range(count)]
    return "name: x\nvars:\n" + "\n".join(lines) + "\nsteps:\n  - fit: {features: 1}\n"


BOMBS = {
    "aliases of lists": _aliases(f"[{','.join(['*V'] * 9)}]"),
    "aliases of mappings": _aliases(f"{{{','.join(f'k{i}: *V' for i in range(9))}}}"),
    "an alias of itself": "name: x\nvars: &a [*a]\n",
    "variables in lists": _chain("[1, 1]", f"[{','.join(['${V}'] * 9)}]"),
    "variables in mappings": _chain("{a: 1}", f"{{{','.join(f'k{i}: ${{V}}' for i in range(9))}}}"),
    "variables in text": _chain("aaaaaaaa", "${V}" * 9),
    "one long text often": _chain("a" * 100_000, "${V}" * 9_000, 3),
    "of the matrix": _chain("'${m}'", f"[{','.join(['${V}'] * 9)}]").replace(
        "vars:", "matrix: {m: [1]}\nvars:"
    ),
    "a long chain": "name: x\nvars:\n" + "".join(f"  v{i}: ${{v{i - 1}}}\n" for i in range(3_000, 0, -1)),
    "a chain that nests": _chain("1", "[${V}]", 3_000),
    "brackets": "name: x\nsteps: " + "[" * 200_000,
    "braces": "name: x\nsteps: " + "{a: " * 50_000,
    "dashes": "name: x\nsteps:\n  " + "- " * 100_000 + "a\n",
    "question marks": "name: x\nsteps:\n  " + "? " * 100_000 + "a\n",
    "many values": "name: x\nsteps: [" + "1," * 100_000 + "]\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_grow_is_refused_at_once(tmp_path: Path, name: str) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text(BOMBS[name])
    start, before = time.process_time(), _peak()
    with pytest.raises(RecipeError):
        read_recipe(file, out=tmp_path / "out")
    assert time.process_time() - start < SECONDS
    assert _peak() - before < MEMORY


def _peak() -> int:
    """The most memory that this process has taken, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_random_webs_of_variables_and_aliases_end(tmp_path: Path) -> None:
    rng = random.Random(0)
    file = tmp_path / "web.yaml"
    for _ in range(5):
        lines = []
        for i in range(rng.randrange(2, 14)):
            others = [f"${{v{rng.randrange(14)}}}", *([f"*a{rng.randrange(i)}"] if i else []), "1"]
            inner = ",".join(rng.choice(others) for _ in range(rng.randrange(1, 10)))
            keyed = ",".join(f"k{j}: {rng.choice(others)}" for j in range(rng.randrange(1, 10)))
            lines.append(f"  v{i}: &a{i} " + rng.choice((f"[{inner}]", f"{{{keyed}}}")))
        file.write_text("name: x\nvars:\n" + "\n".join(lines) + "\nsteps:\n  - fit: {features: ${v1}}\n")
        start = time.process_time()
        with pytest.raises(RecipeError):
            read_recipe(file, out=tmp_path / "out")
        assert time.process_time() - start < SECONDS


def test_a_recipe_of_many_values_is_read(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    nested = "[" * (MAX_DEPTH - 2) + "1" + "]" * (MAX_DEPTH - 2)
    many = ",".join(map(str, range(MAX_VALUES // 4)))
    file.write_text(f"name: x\nvars: {{a: &a [{many}], b: *a, c: '${{a}}', d: {nested}}}\nsteps: []\n")
    with pytest.raises(RecipeError, match="1 problem") as refused:
        read_recipe(file, out=tmp_path / "out")
    assert "an empty list" in refused.value.problems[0].what
