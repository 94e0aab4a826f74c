"""The ``table`` and ``expect`` parts of a recipe: what is shown at the end, and known values beside it."""

from __future__ import annotations

from collections.abc import Sequence

from ncm_cli.errors import UsageError
from ncm_cli.options.where import parse_where
from ncm_cli.recipe.document import Entries, Items, Node, Scalar, kind_of, scalar_value
from ncm_cli.recipe.model import Expectation
from ncm_cli.recipe.problems import Problems
from ncm_cli.recipe.variables import Variables

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
