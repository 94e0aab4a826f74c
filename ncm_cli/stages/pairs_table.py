"""Pairs from a table of matched ids: every problem found before any is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, nearest
from ncm_cli.stages.pairs_members import Members
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.tables import Table

SHOWN = 50
"""Problems that an error lists one by one."""

HINTED = 5
"""Unknown ids that get a suggestion: looking for one reads every id of the store."""

_MARKS = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "y", "t"), True),
    **dict.fromkeys(("0", "0.0", "false", "no", "n", "f"), False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One column of the table and the store in which its ids are looked up."""

    column: str
    option: str
    store: FeatureStore


def pairs_from_table(table: Table, a: Side, b: Side, *, holdout_col: str | None) -> Members:
    """The members of each row's pair.

    Parameters
    ----------
    holdout_col
        Column that says which pairs are held out; None leaves that open.

    Raises
    ------
    InputError
        For columns that aren't there, and, all in one message with their row numbers, for blank ids, ids that
        aren't in the store (ids are text: ``1`` isn't ``01``), pairs of a row with itself and marks of the
        held-out column that are neither yes nor no.
    """
    ids_a = table.column(a.column, option=a.option)
    ids_b = table.column(b.column, option=b.option)
    marks = None if holdout_col is None else table.column(holdout_col, option="--holdout-col")
    at_a, at_b = a.store.positions(ids_a), b.store.positions(ids_b)
    problems = [*_bad_ids(ids_a, at_a, a), *_bad_ids(ids_b, at_b, b)]
    if a.store is b.store:
        same = np.flatnonzero((at_a == at_b) & (at_a >= 0)).tolist()
        problems += [(i, f"{ids_a[i]!r} is paired with itself") for i in same if ids_a[i].strip()]
    holdout = None
    if marks is not None:
        read = [_MARKS.get(mark.casefold()) for mark in marks]
        problems += [
            (i, f"{holdout_col} is {marks[i]!r}, not 1 or 0") for i, mark in enumerate(read) if mark is None
        ]
        holdout = np.array([bool(mark) for mark in read], dtype=bool)
    if problems:
        raise _refusal(problems, table)
    return Members(at_a, at_b, holdout)


def _bad_ids(ids: Sequence[str], positions: NDArray[np.int64], side: Side) -> list[tuple[int, str]]:
    problems, hinted = [], 0
    for index, name in enumerate(ids):
        # A foreign store may hold a blank id; a blank matches nothing all the same.
        if not name.strip():
            problems.append((index, f"{side.column} is blank"))
        elif positions[index] < 0:
            hint = _hint(name, side.store.ids) if hinted < HINTED else None
            hinted += 1
            more = f" (did you mean {hint!r}?)" if hint else ""
            problems.append((index, f"{side.column} {name!r} isn't in {side.store.path.name}{more}"))
    return problems


def _hint(name: str, known: Sequence[str]) -> str | None:
    """An id that differs in what spreadsheets lose (zeros in front, folder, extension), else the nearest."""
    bare = _bare(name)
    same = next((candidate for candidate in known if _bare(candidate) == bare), None)
    return same or nearest(name, known[:5000])


def _bare(name: str) -> str:
    text = name.strip().replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].casefold()
    stem = Path(text).stem or text
    return stem.lstrip("0") or "0"


def _refusal(problems: list[tuple[int, str]], table: Table) -> InputError:
    every = [f"{table.row_name(index)}: {text}" for index, text in sorted(problems)]
    shown = "".join(f"\n    {text}" for text in every[:SHOWN])
    rest = f"\n    and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return InputError(
        f"{len(every)} {'problem' if len(every) == 1 else 'problems'} in the table of pairs",
        where=table.path,
        found=shown + rest,
        expected="ids of rows in the store, as text: '1' isn't '001'",
        fix="correct or remove these rows",
    )
