"""Read a recipe file: structure, variables, steps and expectations, with every problem at once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError
from ncm_cli.recipe.document import MAX_BYTES, Entries, Items, Node, Scalar, kind_of, parse
from ncm_cli.recipe.expect import read_expect, read_table
from ncm_cli.recipe.model import Recipe
from ncm_cli.recipe.problems import Problems
from ncm_cli.recipe.steps import Steps
from ncm_cli.recipe.variables import Variables

KEYS = ("name", "vars", "matrix", "variants", "steps", "table", "expect")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def load(
    file: Path,
    *,
    out: Path | None = None,
    sets: Sequence[str] = (),
    cwd: Path | None = None,
    dry_run: bool = False,
    allow_outside: bool = False,
) -> Recipe:
    """The recipe in ``file``.

    Parameters
    ----------
    out
        The run's folder; left out, ``runs/NAME`` in the current folder.
    sets
        ``name=value`` texts: YAML values for variables, matrix variables and variants.
    cwd
        The folder that ``out``, and paths in ``sets``, are relative to; left out, the current one.
    dry_run
        Inputs that aren't there are no problem, only listed: the shell lines are the same without them.
    allow_outside
        Steps may write outside the run's folder.

    Raises
    ------
    RecipeError
        With every problem found, each with its line, key path and the nearest valid key.
    """
    here = Path.cwd() if cwd is None else cwd
    text, digest = _read(file)
    problems = Problems(file, text)
    root = parse(text, problems)
    if root is None:
        # Text that isn't YAML leaves nothing further to look at.
        problems.stop_if_any()
    if not isinstance(root, Entries):
        found = "nothing" if root is None else kind_of(root)
        problems.add(1, "", f"a recipe is a mapping with name and steps; found {found}")
        root = Entries({}, {}, 1)
        problems.stop_if_any()
    for key in root.entries:
        if key not in KEYS:
            problems.unknown(root.key_lines[key], key, "key", key, KEYS)
    name = _name(root, file, problems)
    variables = Variables(problems)
    get = root.entries.get
    variables.read(get("vars"), get("matrix"), get("variants"), sets, here)
    folder = (here / (Path("runs") / name if out is None else out)).absolute()
    steps = Steps(
        variables,
        problems,
        recipe_folder=file.absolute().parent,
        out=folder,
        cwd=here,
        dry_run=dry_run,
        allow_outside=allow_outside,
    )
    jobs = steps.read(get("steps"), root.line)
    recipe = Recipe(
        name=name,
        file=file,
        sha256=digest,
        out=folder,
        vars={key: _plain(node) for key, node in variables.plain.items()},
        matrix={key: tuple(item.text for item in items) for key, items in variables.matrix.items()},
        jobs=tuple(jobs),
        columns=read_table(get("table"), variables, problems),
        expect=read_expect(get("expect"), variables, steps.names, problems),
        missing=tuple(steps.missing),
    )
    problems.stop_if_any()
    return recipe


def _read(file: Path) -> tuple[str, str]:
    if not file.is_file():
        found = "a folder" if file.is_dir() else "no such file"
        raise InputError("the recipe can't be read", where=file, found=found, expected="a YAML file")
    if file.stat().st_size > MAX_BYTES:
        raise InputError(
            "this isn't a recipe",
            where=file,
            found=f"{file.stat().st_size:,} bytes",
            expected=f"at most {MAX_BYTES:,}",
        )
    raw = file.read_bytes()
    try:
        return raw.decode("utf-8-sig"), hashlib.sha256(raw).hexdigest()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError("the recipe isn't UTF-8 text", where=f"{file}, line {line}") from None


def _name(root: Entries, file: Path, problems: Problems) -> str:
    node = root.entries.get("name")
    if node is None:
        problems.add(root.line, "name", "a recipe needs a name, such as name: my-study")
        return file.stem
    if not isinstance(node, Scalar) or not _NAME.fullmatch(node.text):
        problems.add(node.line, "name", f"a name is letters, digits, . _ and -; found {kind_of(node)}")
        return file.stem
    return node.text


def _plain(node: Node) -> Any:
    """A tree as it is written, for the provenance record."""
    if isinstance(node, Scalar):
        return None if node.value is None else node.text
    if isinstance(node, Items):
        return [_plain(item) for item in node.items]
    return {key: _plain(value) for key, value in node.entries.items()}
