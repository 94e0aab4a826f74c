"""Which rows are paired, which of the pairs are held out, and which straddle training and test.

Pairs from a table of matched ids: every problem found before any is reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, listing, nearest
from ncm_cli.pairs.matching import components, split_components
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import role_of, split_column, split_values, unrecognised
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.tables import Table

_TRAIN, _TEST = 1, 2
_BITS = {"train": _TRAIN, "val": _TRAIN, "test": _TEST, None: 0}


@dataclasses.dataclass(frozen=True)
class Members:
    """Positions of both members of k pairs in their stores."""

    a: NDArray[np.int64]
    b: NDArray[np.int64]
    holdout: NDArray[np.bool_] | None = None
    """(k,) which pairs are held out; None while that is open."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the strategy has to say, for the diagnostics."""

    def __len__(self) -> int:
        return len(self.a)

    def take(self, keep: NDArray[np.bool_]) -> Members:
        """The pairs in a mask."""
        held = None if self.holdout is None else self.holdout[keep]
        return dataclasses.replace(self, a=self.a[keep], b=self.b[keep], holdout=held)


def shared_ids(store_a: FeatureStore, store_b: FeatureStore, members: Members) -> NDArray[np.int64]:
    """(k,) a number for each set of pairs that hang together by an id.

    An id names the same thing in both stores: an augmented view has the ids of its originals.
    """
    if store_a is store_b:
        return components(members.a, members.b)
    names = np.array(
        [*(store_a.ids[i] for i in members.a), *(store_b.ids[i] for i in members.b)], dtype=object
    )
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
    return components(codes[: len(members)], codes[len(members) :])


def hold_out(
    members: Members, component: NDArray[np.int64], wanted: float, seed: int, reporter: Reporter
) -> Members:
    """Members with their held-out pairs chosen, if they aren't yet.

    Pairs that share an id, directly or through others, go to the same side, so that nothing of a
    held-out pair is in the basis. ``wanted`` below 1 is a fraction of the pairs, otherwise a
    number.
    """
    if members.holdout is not None:
        leaking = np.intersect1d(component[members.holdout], component[~members.holdout])
        if len(leaking):
            reporter.warn(
                f"{int(np.isin(component, leaking).sum())} pairs share an id with pairs on the other side "
                "of the holdout, so the held-out pairs aren't independent of the basis"
            )
        return members
    count = round(wanted * len(members)) if wanted < 1 else int(wanted)
    if count >= len(members) and count > 0:
        raise InputError(
            f"--holdout {count} leaves no pair for the basis",
            found=f"{len(members)} pairs",
            fix="hold out fewer pairs, or a fraction such as 0.25",
        )
    held = split_components(component, count, np.random.default_rng(seed))
    if count and held.sum() < count / 2:
        largest = int(np.bincount(component).max())
        reporter.warn(
            f"only {int(held.sum())} of the {count} pairs wanted are held out: pairs that share ids stay "
            f"together, and the largest such set has {largest} of {len(members)} pairs"
        )
    return dataclasses.replace(members, holdout=held)


def straddling(
    store_a: FeatureStore,
    store_b: FeatureStore,
    members: Members,
    test: str | None,
    rule: str,
    reporter: Reporter,
) -> tuple[Members, list[tuple[str, str]]]:
    """Members without the pairs of a training and a test row (or an error), and the ids of those pairs.

    A row whose file is byte for byte that of a test row counts as a test row too. Without a split
    column nothing is known, and nothing straddles; where its values say nothing, that is said.
    """
    if test is None and (what := unrecognised(store_a, ["train", "test"])):
        strange = None in split_values(store_a).values()
        say = reporter.warn if strange else reporter.note
        say(f"{what}: pairs of training and test rows can't be told from others; --test W names test rows")
    sides_a = _sides(store_a, test)
    sides_b = sides_a if store_a is store_b else _sides(store_b, test)
    both = sides_a[members.a] | sides_b[members.b]
    mixed = both == _TRAIN | _TEST
    ids = [(store_a.ids[i], store_b.ids[j]) for i, j in zip(members.a[mixed], members.b[mixed], strict=True)]
    if ids and rule == "error":
        raise InputError(
            f"{len(ids)} pairs straddle training and test",
            found=listing(f"{a} – {b}" for a, b in ids),
            fix="remove them, or --straddling exclude",
        )
    if ids:
        verb = "left out" if rule == "exclude" else "kept"
        shown = listing((f"{a} – {b}" for a, b in ids), 5)
        reporter.warn(f"{len(ids)} pairs of a training and a test row are {verb}: {shown}")
    if rule == "exclude" and ids:
        members = members.take(~mixed)
    if not len(members):
        raise InputError(
            "every pair straddles training and test",
            fix="pair rows of one side, or --straddling keep if the pairs are for `ncm bound` only",
        )
    in_test = int((both[~mixed] == _TEST).sum())
    if in_test:
        reporter.note(
            f"{in_test} pairs hold test rows: right for the oracle pairs of ncm bound, "
            "but a probe fitted with them has seen the test domain"
        )
    facts = {**members.facts, "test_pairs": in_test}
    return dataclasses.replace(members, facts=facts), ids


def _sides(store: FeatureStore, test: str | None) -> NDArray[np.int64]:
    """(N,) bits: 1 training or validation, 2 test, 3 a training row that is also the file of a test row."""
    sides = np.zeros(store.rows, dtype=np.int64)
    split = split_column(store)
    if split is not None:
        bits = [_BITS[role_of(name)] for name in split.categories] + [0]
        sides = np.array(bits, dtype=np.int64)[split.codes]
    if test is not None:
        chosen = store.mask(test)
        sides = np.where(chosen, _TEST, np.where(sides == _TEST, 0, sides))
        if not (sides & _TRAIN).any():
            # Without a split that is named train, whatever isn't a test row is a training row.
            sides[~chosen] = _TRAIN
    if store.files is not None and (sides == _TEST).any() and (sides == _TRAIN).any():
        digests = np.asarray(store.files.sha256)
        known = digests != ""
        tests = np.isin(digests, digests[(sides == _TEST) & known]) & known
        sides = np.where(tests & (sides == _TRAIN), _TRAIN | _TEST, sides)
    return sides


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
