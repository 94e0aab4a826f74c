"""The ``table`` and ``expect`` parts of a recipe: what is shown at the end, and known values beside it.

Read a recipe file: structure, variables, steps and expectations, with every problem at once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import parse_where
from ncm_cli.recipes.document import (
    MAX_BYTES,
    Entries,
    Expectation,
    Items,
    Node,
    Problems,
    Recipe,
    Scalar,
    kind_of,
    parse,
    scalar_value,
)
from ncm_cli.recipes.steps import Steps
from ncm_cli.recipes.variables import Variables

DEFAULT_TABLE = {"in-domain": "split=val", "test": "split=test"}

_NUMBERS = ("value", "tolerance", "min", "max")
_TEXTS = ("metric", "source")
_FILTERS = ("where", "method", "rule", "step", "rank")


def read_table(node: Node | None, variables: Variables, problems: Problems) -> dict[str, str]:
    """Heading to row filter of the closing table."""
    if node is None:
        return dict(DEFAULT_TABLE)
    node = variables.fill(node, "table", {})
    if not isinstance(node, Entries) or not node.entries:
        problems.add(node.line, "table", f"expected headings with row filters, found {kind_of(node)}")
        return {}
    table = {}
    for heading, value in node.entries.items():
        if not isinstance(value, Scalar) or value.value is None:
            problems.add(value.line, f"table.{heading}", f"expected a row filter, found {kind_of(value)}")
            continue
        try:
            parse_where(value.text)
        except UsageError as error:
            problems.add(value.line, f"table.{heading}", f"{error.what}: {error.found}")
        table[heading] = value.text
    return table


def read_expect(
    node: Node | None, variables: Variables, steps: Sequence[str], problems: Problems
) -> tuple[Expectation, ...]:
    """The known values that the closing table is compared with."""
    if node is None:
        return ()
    if not isinstance(node, Items):
        problems.add(node.line, "expect", f"expected a list, found {kind_of(node)}")
        return ()
    found = []
    for number, item in enumerate(node.items, 1):
        path = f"expect[{number}]"
        filled = variables.fill(item, path, {})
        if not isinstance(filled, Entries):
            problems.add(filled.line, path, f"expected a mapping, found {kind_of(filled)}")
            continue
        one = _one(filled, path, variables, steps, problems)
        if one is not None:
            found.append(one)
    return tuple(found)


def _one(
    node: Entries, path: str, variables: Variables, steps: Sequence[str], problems: Problems
) -> Expectation | None:
    known = [*_TEXTS, *_NUMBERS, *_FILTERS, *variables.matrix, *variables.plain]
    numbers: dict[str, float | None] = dict.fromkeys(_NUMBERS)
    texts: dict[str, str] = {}
    right = True
    for key, value in node.entries.items():
        inner, line = f"{path}.{key}", node.key_lines[key]
        if key not in known:
            problems.unknown(line, inner, "key", key, known)
            right = False
        elif not isinstance(value, Scalar) or value.value is None:
            problems.add(line, inner, f"expected a value, found {kind_of(value)}")
            right = False
        elif key not in _NUMBERS:
            texts[key] = value.text
            other = _other_spelling(value.text, variables.matrix.get(key, ()))
            if other is not None:
                problems.add(line, inner, f"the matrix writes this value as {other!r}; write it likewise")
                right = False
        elif isinstance(value.value, int | float) and not isinstance(value.value, bool):
            numbers[key] = float(value.value)
        else:
            problems.add(line, inner, f"expected a number, found {kind_of(value)}")
            right = False
    step = texts.get("step")
    if step is not None and step not in steps:
        problems.unknown(node.key_lines["step"], f"{path}.step", "step", step, steps)
        right = False
    if not right:
        return None
    for what, wrong in _wrong(texts, numbers).items():
        if wrong:
            problems.add(node.line, path, what)
            right = False
    if not right:
        return None
    source = texts.pop("source", "")
    metric = texts.pop("metric")
    return Expectation(
        metric=metric,
        applies=_take_variables(texts, variables),
        filters=texts,
        source=source,
        line=node.line,
        **numbers,
    )


def _other_spelling(text: str, cells: Sequence[Scalar]) -> str | None:
    """How the matrix writes a number that an expectation writes otherwise: its cells go by their text."""
    value = scalar_value(text)
    if isinstance(value, str) or any(cell.text == text for cell in cells):
        return None
    return next((cell.text for cell in cells if scalar_value(cell.text) == value), None)


def _take_variables(texts: dict[str, str], variables: Variables) -> bool:
    """Take the keys that are variables out of the filters; whether the variables have those values."""
    names = [name for name in texts if name in variables.plain and name not in _FILTERS]
    wanted = {name: texts.pop(name) for name in names}
    found = ((variables.plain[name], text) for name, text in wanted.items())
    return all(isinstance(node, Scalar) and node.text == text for node, text in found)


def _wrong(texts: dict[str, str], numbers: dict[str, float | None]) -> dict[str, bool]:
    """Sentences about one expectation, each with whether it applies."""
    value, tolerance, low, high = (numbers[name] for name in _NUMBERS)
    return {
        "metric is required, such as metric: accuracy": "metric" not in texts,
        "value and tolerance, or min, or max is required": value is None and low is None and high is None,
        "value needs a tolerance": value is not None and tolerance is None,
        "tolerance needs a value": tolerance is not None and value is None,
        "tolerance can't be negative": tolerance is not None and tolerance < 0,
    }


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
