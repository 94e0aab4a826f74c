"""The recipes that come with ncm: listed, found by name, copied.

They are the folder ``recipes`` of the repository, which a built package has as ``ncm_cli/recipes/shipped``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, UsageError, unknown
from ncm_cli.options import is_file
from ncm_cli.progress import Reporter
from ncm_cli.recipes.load import read_about
from ncm_cli.store.files import write_bytes

SUFFIX = ".yaml"

_HERE = Path(__file__).resolve().parent


def shipped_recipes() -> dict[str, Path]:
    """The recipes by name, in alphabetical order."""
    folder = next(path for path in (_HERE / "shipped", _HERE.parents[1] / "recipes") if path.is_dir())
    return {file.stem: file for file in sorted(folder.glob(f"*{SUFFIX}"))}


def catalogue() -> list[dict[str, Any]]:
    """Name, file and what `read_about` says of each recipe."""
    return [{"name": name, "file": str(file), **read_about(file)} for name, file in shipped_recipes().items()]


def find_recipe(asked: Path, reporter: Reporter) -> Path:
    """The file that ``ncm run`` is asked for: the user's file, or a recipe that comes with ncm.

    If there are both, the user's file is taken, and a note says so. Raises `InputError` if there is neither.
    """
    recipes = shipped_recipes()
    if is_file(asked):
        if str(asked) in recipes:
            reporter.note(f"{asked} is the file in this folder, not the recipe that comes with ncm")
        return asked
    if shipped := recipes.get(str(asked)):
        if is_file(user_file := asked.with_suffix(SUFFIX)):
            reporter.note(f"{asked} is the recipe that comes with ncm; ncm run {user_file} runs the file")
        return shipped
    if is_name(asked):
        raise unknown("recipe", str(asked), recipes)
    if asked.stem in recipes and asked.suffix == SUFFIX and not asked.is_dir():
        raise InputError(
            "the recipe can't be read",
            where=asked,
            found="no such file",
            fix=f"ncm run {asked.stem}, the one that comes with ncm",
        )
    return asked  # reading it reports the error


def is_name(asked: Path) -> bool:
    """Whether it is only a name, without folder or suffix, and not that of a file or folder here."""
    return len(asked.parts) == 1 and not asked.suffix and not asked.exists()


def copy_recipe(asked: Path, *, replace: bool) -> Path:
    """Write a recipe that comes with ncm into the current folder, for changes; returns the new file.

    Raises `InputError` if there is a file of that name, unless ``replace``.
    """
    recipes = shipped_recipes()
    if str(asked) not in recipes:
        raise unknown("recipe", str(asked), recipes, error=UsageError)
    copy = Path(f"{asked}{SUFFIX}")
    if copy.exists() and not replace:
        raise InputError("the file exists already", where=copy, fix="--force replaces it")
    # The shell lines in its comments should run the copy.
    text = recipes[str(asked)].read_text(encoding="utf-8").replace(f"ncm run {asked}", f"ncm run {copy}")
    write_bytes(copy, text.encode())
    return copy
