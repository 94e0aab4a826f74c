"""Shell completion of options: choices, names, and the columns and values of files on the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ncm_cli.errors import NcmError
from ncm_cli.options import COLUMN_METAVARS, Field
from ncm_cli.registry import at_address


def completion(field: Field) -> Callable[[Any, str], list[str]] | None:
    """``complete(ctx, incomplete)`` of an option; None where the shell's own completion of files will do.

    ``ctx.params`` holds the options before this one. Files that can't be read give no completions.
    """
    if field.choices:
        return lambda ctx, incomplete: _begun(incomplete, field.choices)
    if field.names:
        return lambda ctx, incomplete: _of_list(incomplete, _names(field), "+,")
    if field.metavar in COLUMN_METAVARS:

        def complete(ctx: Any, incomplete: str) -> list[str]:
            given = ctx.params.get(field.columns_of)
            given = given[0] if isinstance(given, list | tuple) and given else given or _file_of_line()
            try:
                columns = _columns(Path(given)) if given else {}
            except (NcmError, OSError):
                columns = {}
            return (
                _filter(incomplete, columns)
                if field.metavar == "WHERE"
                else _of_list(incomplete, columns, ",;")
            )

        return complete
    return None


def _file_of_line() -> str | None:
    """The first file on the line, since click drops arguments while the last option has no value."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return next((word for word in line.split()[1:] if Path(word).is_file()), None)


def _names(field: Field) -> Iterable[str]:
    names = at_address(field.names)
    return names() if callable(names) else names


def _begun(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _of_list(incomplete: str, names: Iterable[str], separators: str) -> list[str]:
    """The names for the last item of a list such as ``label,pl``."""
    before, last = re.fullmatch(f"(.*[{separators}])?(.*)", incomplete, re.DOTALL).groups("")  # type: ignore[union-attr]
    return [before + name for name in _begun(last, names)]


def _filter(incomplete: str, columns: dict[str, list[str]]) -> list[str]:
    """Columns, or values behind a ``=``, for the last term of a row filter."""
    before, term = re.fullmatch(r"(.*&\s*)?(.*)", incomplete, re.DOTALL).groups("")  # type: ignore[union-attr]
    column, equals, values = term.partition("=")
    if not equals:
        return [f"{before}{name}=" for name in _begun(column, columns)]
    head = f"{before}{column}="
    return [head + value for value in _of_list(values, columns.get(column.removesuffix("!"), []), "|")]


def _columns(file: Path) -> dict[str, list[str]]:
    """The columns of a table or feature store, each with its values (none for a table)."""
    from ncm_cli.store.columns import Column
    from ncm_cli.store.features import FeatureStore
    from ncm_cli.store.tables import read_header

    if file.suffix != ".h5":
        return {name: [] for name in read_header(file)}
    with FeatureStore(file) as store:
        columns = {
            name: list(column.categories) if isinstance(column, Column) else []
            for name, column in store.columns.items()
        }
        roles = {"label": store.label_column, "split": store.split_column}
        return columns | {role: columns[name] for role, name in roles.items() if name in columns}
