"""Reads a recipe file (variables, steps, closing table, known values), or lists all its mistakes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import parse_where
from ncm_cli.probes.metrics import MEASURES
from ncm_cli.recipes.document import MAX_BYTES, Mistakes, Node, Variables, parse, scalar_value
from ncm_cli.recipes.steps import Job, Steps
from ncm_cli.store.files import relative
from ncm_cli.theory.theorem import Terms

KEYS = ("name", "about", "vars", "matrix", "variants", "steps", "table", "expect")
ABOUT = ("what", "data", "time")
"""What a recipe may say of itself, in words: what it shows, the data it needs, the time it takes."""

DEFAULT_TABLE = {"in-domain": "split=val", "test": "split=test"}

DEFAULT_SPREAD = 0.02
"""Distance from a value, in accuracy, within which a mean is reproduced if no spread was published."""

_NUMBERS = ("value", "spread", "tolerance", "min", "max")
_FILTERS = ("where", "method", "rule", "step", "rank")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """A published or known value, and the results to compare with it."""

    metric: str
    """A name in an eval or bound result, dotted if nested; ``worst_group`` is the worst group's accuracy."""
    filters: dict[str, str]
    """``where``, ``method``, ``rule``, ``step`` or matrix variables: the results to average."""
    applies: bool
    """Whether the value is meant for the run's variables, such as its model."""
    value: float | None = None
    spread: float | None = None
    """The published spread of ``value``; None if there is none."""
    tolerance: float | None = None
    """Distance from ``value`` within which a mean is near."""
    min: float | None = None
    max: float | None = None
    source: str
    line: int

    @property
    def reproduced_within(self) -> float:
        """Distance from ``value`` within which a mean is reproduced: the published spread, or else the
        smaller of `DEFAULT_SPREAD` and ``tolerance``."""
        if self.spread is not None:
            return self.spread
        return DEFAULT_SPREAD if self.tolerance is None else min(DEFAULT_SPREAD, self.tolerance)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe, ready to run into one folder."""

    name: str
    file: Path
    sha256: str
    out: Path
    """The run's folder, absolute."""
    vars: dict[str, Any]
    """Variables outside the matrix, as written; None for an empty one."""
    matrix: dict[str, tuple[str, ...]]
    jobs: tuple[Job, ...]
    """In the order in which they run."""
    columns: dict[str, str]
    """Columns of the closing table: heading to row filter."""
    expect: tuple[Expectation, ...]
    missing: tuple[str, ...] = ()
    """Missing inputs, each with its line; only in a dry run."""

    def name_of(self, path: Path) -> str:
        """A path, relative to the run's folder if it is in it."""
        return str(relative(path, self.out))


def read_recipe(
    file: Path,
    *,
    out: Path | None = None,
    sets: Sequence[str] = (),
    dry_run: bool = False,
    allow_outside: bool = False,
) -> Recipe:
    """The recipe in ``file``.

    Parameters
    ----------
    out
        The run's folder, ``runs/NAME`` if None. Like paths in ``sets``, it is relative to the current folder.
    sets
        ``name=value`` texts: YAML values for variables, matrix variables and variants.
    dry_run
        Missing inputs are listed and aren't mistakes, since the shell lines don't depend on them.
    allow_outside
        Steps may write outside the run's folder.

    Raises
    ------
    RecipeError
        All mistakes, each with its line, key path and the nearest valid key.
    """
    raw, root, mistakes = _parsed(file)
    if root is None:
        mistakes.stop_if_any()
    if root is None or not isinstance(root.value, dict):
        found = root.kind() if root else "nothing"
        mistakes.stop(1, "", f"a recipe is a mapping with name and steps; found {found}")
    parts: dict[str, Node] = root.value
    _about(parts.get("about"), mistakes)
    for key in parts:
        if key not in KEYS:
            mistakes.unknown(root.keys[key], key, "key", key, KEYS)
    name = parts.get("name", Node(None, root.line))
    if "name" not in parts:
        mistakes.add(root.line, "name", "a recipe needs a name, such as name: my-study")
    elif not name.is_scalar or not _NAME.fullmatch(name.text):
        mistakes.add(name.line, "name", f"a name is letters, digits, . _ and -; found {name.kind()}")
        name = Node(None, name.line)
    variables = Variables(mistakes, parts, sets)
    folder = Path("runs") / (name.text or file.stem) if out is None else out
    folder = Path(os.path.abspath(folder))  # noqa: PTH100  without .., as the paths of outputs
    steps = Steps(variables, mistakes, file.absolute().parent, folder, dry_run, allow_outside)
    jobs = steps.read(parts.get("steps"), root.line)
    recipe = Recipe(
        name=name.text,
        file=file,
        sha256=hashlib.sha256(raw).hexdigest(),
        out=folder,
        vars={key: _plain(node) for key, node in variables.plain.items()},
        matrix={key: tuple(item.text for item in items) for key, items in variables.matrix.items()},
        jobs=tuple(jobs),
        columns=_table(parts.get("table"), variables, mistakes),
        expect=tuple(_expectations(parts.get("expect"), variables, steps.names, mistakes)),
        missing=tuple(steps.missing),
    )
    mistakes.stop_if_any()
    return recipe


def read_about(file: Path) -> dict[str, str]:
    """What a recipe says of itself, by the keys of `ABOUT`; "" for keys that it lacks.

    Raises `RecipeError` if that can't be read.
    """
    _, root, mistakes = _parsed(file)
    about = _about(root.value.get("about") if root and isinstance(root.value, dict) else None, mistakes)
    mistakes.stop_if_any()
    return dict.fromkeys(ABOUT, "") | about


def _about(node: Node | None, mistakes: Mistakes) -> dict[str, str]:
    if node is None:
        return {}
    if not isinstance(node.value, dict):
        mistakes.expected(node, "about", f"a mapping of {', '.join(ABOUT)} to text")
        return {}
    for key, value in node.value.items():
        if key not in ABOUT:
            mistakes.unknown(node.keys[key], f"about.{key}", "key", key, ABOUT)
        elif not value.is_scalar:
            mistakes.expected(value, f"about.{key}", "text")
    return {key: value.text for key, value in node.value.items()}


def _parsed(file: Path) -> tuple[bytes, Node | None, Mistakes]:
    """The content of a recipe, its document (None if it has none), and the mistakes in it."""
    raw = _read(file)
    text = raw.decode("utf-8-sig")
    mistakes = Mistakes(file, text)
    return raw, parse(text, mistakes), mistakes


def _read(file: Path) -> bytes:
    if not file.is_file():
        found = "a folder" if file.is_dir() else "no such file"
        raise InputError("the recipe can't be read", where=file, found=found, expected="a YAML file")
    if (size := file.stat().st_size) > MAX_BYTES:
        expected = f"at most {MAX_BYTES:,}"
        raise InputError("this isn't a recipe", where=file, found=f"{size:,} bytes", expected=expected)
    raw = file.read_bytes() if size else b""  # reading a file of the kernel, whose size is 0, may never end
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError("the recipe isn't UTF-8 text", where=f"{file}, line {line}") from None
    return raw


def _plain(node: Node) -> Any:
    """A node as lists, dicts and text as written, for the provenance record."""
    if isinstance(node.value, list):
        return [_plain(item) for item in node.value]
    if isinstance(node.value, dict):
        return {key: _plain(value) for key, value in node.value.items()}
    return None if node.value is None else node.text


def _table(node: Node | None, variables: Variables, mistakes: Mistakes) -> dict[str, str]:
    """The columns of the closing table: heading to row filter."""
    if node is None:
        return DEFAULT_TABLE
    node = variables.fill(node, "table", {})
    if not isinstance(node.value, dict) or not node.value:
        mistakes.expected(node, "table", "headings with row filters")
        return {}
    for heading, value in node.value.items():
        if not value.is_scalar:
            mistakes.expected(value, f"table.{heading}", "a row filter")
            continue
        try:
            parse_where(value.text)
        except UsageError as error:
            mistakes.add(value.line, f"table.{heading}", f"{error.what}: {error.found}")
    return {heading: value.text for heading, value in node.value.items()}


def _expectations(
    node: Node | None, variables: Variables, steps: Iterable[str], mistakes: Mistakes
) -> Iterator[Expectation]:
    """The known values that the closing table is compared with."""
    if node is None:
        return
    if not isinstance(node.value, list):
        mistakes.expected(node, "expect", "a list")
        return
    for number, item in enumerate(node.value, 1):
        path = f"expect[{number}]"
        filled = variables.fill(item, path, {})
        if not isinstance(filled.value, dict):
            mistakes.expected(filled, path, "a mapping")
        elif (expectation := _expectation(filled, path, variables, steps, mistakes)) is not None:
            yield expectation


METRICS = (
    *(name for measures in MEASURES.values() for name in measures),
    *("worst_group", "n", "predicted_classes"),
    *(field.name for field in fields(Terms) if field.name != "loss"),
    *("test_risk", "slack", "zero_one", "noise_corollary", "summary", "oracle", "estimates", "metrics"),
)
"""Numbers in results of ``eval`` and ``bound``, and first parts of names such as ``zero_one.flip_rate``."""


def _expectation(
    node: Node, path: str, variables: Variables, steps: Iterable[str], mistakes: Mistakes
) -> Expectation | None:
    known = ["metric", "source", *_NUMBERS, *_FILTERS, *variables.matrix, *variables.plain]
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    for key, value in node.value.items():
        inner, line = f"{path}.{key}", node.keys[key]
        if key not in known:
            mistakes.unknown(line, inner, "key", key, known)
        elif not value.is_scalar:
            mistakes.expected(value, inner, "a value")
        elif key not in _NUMBERS:
            texts[key] = value.text
            if key == "step" and value.text not in steps:
                mistakes.unknown(line, inner, "step", value.text, steps)
            if key == "metric" and value.text.split(".")[0] not in METRICS:
                mistakes.unknown(line, inner, "metric", value.text, METRICS)
            cells = [cell.text for cell in variables.matrix.get(key, ())]
            number = scalar_value(value.text)
            same = [text for text in cells if scalar_value(text) == number and not isinstance(number, str)]
            if same and value.text not in cells:  # cells are compared as text
                mistakes.add(line, inner, f"the matrix has this value as {same[0]!r}; write it the same way")
        elif isinstance(value.value, int | float) and not isinstance(value.value, bool):
            numbers[key] = float(value.value)
        else:
            mistakes.expected(value, inner, "a number")
    if len(numbers) + len(texts) < len(node.value):
        return None
    spread, tolerance = numbers.get("spread"), numbers.get("tolerance")
    wrong = {
        "metric is required, such as metric: accuracy": "metric" not in texts,
        "value, min or max is required": not numbers.keys() & {"value", "min", "max"},
        "spread needs a value": spread is not None and "value" not in numbers,
        "tolerance needs a value": tolerance is not None and "value" not in numbers,
        "spread can't be negative": spread is not None and spread < 0,
        "tolerance can't be negative": tolerance is not None and tolerance < 0,
        "the tolerance, within which a value is near, must be above its spread": (
            spread is not None and tolerance is not None and 0 <= tolerance <= spread
        ),
    }
    for what in [what for what, applies in wrong.items() if applies]:
        mistakes.add(node.line, path, what)
    metric, source = texts.pop("metric", ""), texts.pop("source", "")
    # Variables outside the matrix don't select results; they say for which runs the value is meant.
    needed = {key: texts.pop(key) for key in list(texts) if key in variables.plain and key not in _FILTERS}
    given = {key: variables.plain[key] for key in needed}
    applies = all(given[key].is_scalar and given[key].text == text for key, text in needed.items())
    return Expectation(
        metric=metric, applies=applies, filters=texts, source=source, line=node.line, **numbers
    )
