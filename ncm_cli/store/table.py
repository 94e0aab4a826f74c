"""A table in memory: text by column, with the names of its rows for messages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ncm_cli.errors import InputError, listing, nearest

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
"""The separators, in order of preference when several fit equally well."""

MAX_TABLE_COLUMNS = 100_000
"""Most columns of a table; a wider one is nearly always transposed, or a matrix."""

_SAVED_INDEX = re.compile(r"Unnamed: \d+(_level_\d+)?|__index_level_\d+__")
"""The names that pandas gives to a column or an index without one."""

_IMAGE_NAME = re.compile(r".+\.(png|jpe?g|webp|bmp|tiff?|gif)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?")


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes
    ----------
    path
        The file, for messages.
    columns
        The names in the header; columns without a name (a saved index) are left out.
    values
        One list of text for each column, all of the same length. Blanks around a value are dropped.
    line_numbers
        The line of the file on which each row begins; the header is line 1 of an ordinary file.
    delimiter
        The separator.
    notes
        Remarks for messages, such as lines taken for comments.
    """

    path: Path
    columns: tuple[str, ...]
    values: dict[str, list[str]]
    line_numbers: Sequence[int]
    delimiter: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.line_numbers)

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """The rows as dictionaries, column to text."""
        names = self.columns
        return [dict(zip(names, row, strict=True)) for row in zip(*self.values.values(), strict=True)]

    def row_name(self, index: int) -> str:
        """The name of row ``index`` in messages: its number from 1, and its line in the file."""
        return f"row {index + 1} (line {self.line_numbers[index]})"

    def column(self, name: str, *, option: str | None = None) -> list[str]:
        """The values of one column; `InputError` that lists the columns if there is none of this name.

        ``option`` is the command-line option that chooses the column, for the hint.
        """
        if name in self.values:
            return self.values[name]
        close = nearest(name, self.columns)
        hints = [f"did you mean {close!r}?"] if close else []
        if any(map(_IMAGE_NAME.fullmatch, self.columns)) or all(map(_NUMBER.fullmatch, self.columns)):
            hints.append("the names look like a row's values: put a line with the columns' names above them")
        elif option:
            hints.append(f"name the column with {option}")
        if len(self.columns) == 1:
            hints.append(f"only one column was found: {self._why_one_column()}")
        raise InputError(
            f"no column named {name!r}",
            where=self.path,
            expected=f"one of: {listing(self.columns)}",
            fix="; ".join([*hints, *self.notes]) or None,
        )

    def _why_one_column(self) -> str:
        (header,) = self.columns
        words = len(header.split())
        for i, value in enumerate(self.values[header] if words > 1 else ()):
            if (count := len(value.split())) != words:
                row = self.row_name(i)
                return f"{words} words in the header and {count} in {row}; write a comma between the columns"
        return f"there are no {'s, '.join(DELIMITERS.values())}s in the header"


def without_saved_index(names: Iterable[str]) -> list[str]:
    """The columns that have a name, and not one that pandas gave to an index."""
    return [name for name in names if name.strip() and not _SAVED_INDEX.fullmatch(name)]


def refuse_repeated(names: Iterable[str], where: object) -> None:
    """Raise `InputError` for columns with the same name."""
    repeated = [repr(name) for name, count in Counter(names).items() if count > 1]
    if repeated:
        found, fix = listing(repeated), "rename one of them"
        raise InputError("a column name is used twice", where=where, found=found, fix=fix)


Numbered = TypeVar("Numbered", bound="NumberedRows")


class NumberedRows(Table):
    """Rows without lines, as of a Parquet file: messages name them by number."""

    @classmethod
    def of(
        cls: type[Numbered], path: Path, texts: dict[str, list[str]], notes: Sequence[str] = ()
    ) -> Numbered:
        """A table of these columns, which are equally long; there is at least one."""
        rows = range(len(next(iter(texts.values()))))
        return cls(path, tuple(texts), texts, rows, ",", tuple(notes))

    def row_name(self, index: int) -> str:
        """The row's number, from 1."""
        return f"row {index + 1}"
