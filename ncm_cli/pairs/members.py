"""Which rows are paired, which of the pairs are held out, and which straddle training and test.

Pairs come from a table of matched ids, where every problem is found before any is reported; or without a
table: by id across two stores, at random, by nearest neighbour, or by MatchDG's alternation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.blocks import Features, chosen, joined
from ncm_cli.errors import InputError, listing, nearest
from ncm_cli.options import parse_names
from ncm_cli.pairs import matching
from ncm_cli.pairs.options import PairsOptions, parse_holdout
from ncm_cli.probes.metrics import joint
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import role_of, split_column, split_filter, split_values, unrecognised
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.tables import Table, read_table

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
Stores = tuple[FeatureStore, FeatureStore]


@dataclasses.dataclass(frozen=True)
class Members:
    """Positions of both members of k pairs in their stores."""

    stores: Stores
    """Of the first and the second members; twice the same object if it is one."""
    a: Rows
    b: Rows
    holdout: Mask | None = None
    """(k,) which pairs are held out; None while that is open."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the strategy has to say, for the diagnostics."""
    straddlers: tuple[tuple[str, str], ...] = ()
    """Ids of the pairs of a training and a test row, left out or not."""
    dropped: tuple[tuple[str, str], ...] = ()
    """Ids of the pairs that ``--drop`` has left out."""

    def __len__(self) -> int:
        return len(self.a)

    def ids(self, which: Any = slice(None)) -> list[tuple[str, str]]:
        """Both ids of the pairs in a mask or at positions."""
        ids_a, ids_b = (store.ids for store in self.stores)
        return [(ids_a[i], ids_b[j]) for i, j in zip(self.a[which], self.b[which], strict=True)]

    def take(self, keep: Mask) -> Members:
        """The pairs in a mask."""
        held = None if self.holdout is None else self.holdout[keep]
        return dataclasses.replace(self, a=self.a[keep], b=self.b[keep], holdout=held)

    def components(self) -> Rows:
        """(k,) a number for each set of pairs that hang together by an id.

        An id names the same thing in both stores: an augmented view has the ids of its originals.
        """
        if self.stores[0] is self.stores[1]:
            return matching.components(self.a, self.b)
        codes = np.unique(np.array(self.ids(), dtype=object).reshape(-1), return_inverse=True)[1]
        return matching.components(*codes.reshape(-1, 2).T)


def find_members(options: PairsOptions, stores: Stores, reporter: Reporter) -> Members:
    """The pairs of the table, or those that ``--match`` chooses."""
    if options.source is not None:
        table = read_table(options.source, what="table of pairs")
        if options.holdout_col is None and "holdout" in table.columns:
            reporter.warn("the table's column 'holdout' isn't used: --holdout-col holdout uses it")
        return _from_table(table, options, stores)
    if options.match == "same-id":
        return _same_id(options, stores, reporter)
    return _Matcher(options, stores, reporter).run()


def hold_out(members: Members, component: Rows, wanted: float, seed: int, reporter: Reporter) -> Members:
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
    held = matching.split_components(component, count, np.random.default_rng(seed))
    if count and held.sum() < count / 2:
        largest = int(np.bincount(component).max())
        reporter.warn(
            f"only {int(held.sum())} of the {count} pairs wanted are held out: pairs that share ids stay "
            f"together, and the largest such set has {largest} of {len(members)} pairs"
        )
    return dataclasses.replace(members, holdout=held)


def drop(members: Members, path: Path) -> Members:
    """Members without the pairs of a table, whose ids may come in either order.

    Raises `InputError` that names the rows of pairs that aren't there; one that is left out for straddling
    training and test may be among them.
    """
    table = read_table(path, what="table of pairs to drop")
    ids = members.ids()
    known = {*ids, *members.straddlers}
    listed = list(zip(table.column("id_a"), table.column("id_b"), strict=True))
    # In one store a pair is the same the other way round; of two stores it may be another one.
    either_way = members.stores[0] is members.stores[1]
    wanted = {pair for pair in listed if pair in known}
    wanted |= {(b, a) for a, b in listed if (b, a) in known and (either_way or (a, b) not in known)}
    unknown = [at for at, (a, b) in enumerate(listed) if not {(a, b), (b, a)} & wanted]
    if unknown:
        shown = (f"\n    {table.row_name(at)}: {' – '.join(listed[at])}" for at in unknown[:SHOWN])
        raise InputError(
            f"{len(unknown)} of {len(listed)} pairs to drop aren't among the pairs",
            where=path,
            found="".join(shown) + (f"\n    and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""),
            expected="pairs that the same options make without --drop",
            fix="give the options and the stores with which the looked-at pairs were made, the seed included",
        )
    keep = np.array([pair not in wanted for pair in ids], dtype=bool)
    if not keep.any():
        raise InputError("every pair is dropped", where=path, found=f"{len(ids)} pairs")
    return dataclasses.replace(members.take(keep), dropped=tuple(members.ids(~keep)))


_TRAIN, _TEST = 1, 2
_BITS = {"train": _TRAIN, "val": _TRAIN, "test": _TEST, None: 0}


def straddling(members: Members, test: str | None, rule: str, reporter: Reporter) -> Members:
    """Members without the pairs of a training and a test row, which are named; or an error.

    A row whose file is byte for byte that of a test row counts as a test row too. Without a split
    column nothing is known, and nothing straddles; where its values say nothing, that is said.
    """
    store = members.stores[0]
    if test is None and (what := unrecognised(store, ["train", "test"])):
        say = reporter.warn if None in split_values(store).values() else reporter.note
        say(f"{what}: pairs of training and test rows can't be told from others; --test W names test rows")
    sides = {store: _sides(store, test) for store in dict.fromkeys(members.stores)}
    both = sides[store][members.a] | sides[members.stores[1]][members.b]
    mixed = both == _TRAIN | _TEST
    ids = members.ids(mixed)
    shown = [f"{a} – {b}" for a, b in ids]
    if ids and rule == "error":
        raise InputError(
            f"{len(ids)} pairs straddle training and test",
            found=listing(shown),
            fix="remove them, or --straddling exclude",
        )
    if ids:
        verb = "left out" if rule == "exclude" else "kept"
        reporter.warn(f"{len(ids)} pairs of a training and a test row are {verb}: {listing(shown, 5)}")
    if rule == "exclude":
        members = members.take(~mixed)
    if not len(members):
        raise InputError(
            "every pair straddles training and test",
            fix="pair rows of one side, or --straddling keep if the pairs are for `ncm bound` only",
        )
    in_test = int((both == _TEST).sum())
    if in_test:
        reporter.note(
            f"{in_test} pairs hold test rows: right for the oracle pairs of ncm bound, "
            "but a probe fitted with them has seen the test domain"
        )
    facts = {**members.facts, "test_pairs": in_test}
    return dataclasses.replace(members, facts=facts, straddlers=tuple(ids))


def _sides(store: FeatureStore, test: str | None) -> Rows:
    """(N,) bits: 1 training or validation, 2 test, 3 a training row that is also the file of a test row."""
    sides = np.zeros(store.rows, dtype=np.int64)
    split = split_column(store)
    if split is not None:
        sides = np.array([*(_BITS[role_of(name)] for name in split.categories), 0])[split.codes]
    if test is not None:
        chosen = store.mask(test)
        sides = np.where(chosen, _TEST, np.where(sides == _TEST, 0, sides))
        if not (sides & _TRAIN).any():
            # Without a split that is named train, whatever isn't a test row is a training row.
            sides[~chosen] = _TRAIN
    nodes = store.content_nodes
    tests = np.isin(nodes, nodes[sides == _TEST])
    return np.where(tests & (sides == _TRAIN), _TRAIN | _TEST, sides)


SHOWN = 50
"""Problems that an error lists one by one."""

HINTED = 5
"""Unknown ids of a column that get a suggestion: looking for one reads every id of the store."""

_MARKS = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "y", "t"), True),
    **dict.fromkeys(("0", "0.0", "false", "no", "n", "f"), False),
}


def _from_table(table: Table, options: PairsOptions, stores: Stores) -> Members:
    """The members of each row's pair.

    One `InputError` names, with their row numbers, all blank ids, ids that aren't in the store (ids are text:
    ``1`` isn't ``01``), pairs of a row with itself and marks of the held-out column that are neither yes nor
    no.
    """
    problems: list[tuple[int, str]] = []
    found: list[Rows] = []
    columns = ((options.a_col, "--a-col"), (options.b_col, "--b-col"))
    for (column, option), store in zip(columns, stores, strict=True):
        ids = table.column(column, option=option)
        at = store.positions(ids)
        unknown = 0
        for index, name in enumerate(ids):
            # A foreign store may hold a blank id; a blank matches nothing all the same.
            if not name.strip():
                problems.append((index, f"{column} is blank"))
            elif at[index] < 0:
                unknown += 1
                hint = _hint(name, store.ids) if unknown <= HINTED else None
                more = f" (did you mean {hint!r}?)" if hint else ""
                problems.append((index, f"{column} {name!r} isn't in {store.path.name}{more}"))
            elif found and stores[0] is stores[1] and found[0][index] == at[index]:
                problems.append((index, f"{name!r} is paired with itself"))
        found.append(at)
    holdout = None
    if options.holdout_col is not None:
        marks = table.column(options.holdout_col, option="--holdout-col")
        read = [_MARKS.get(mark.casefold()) for mark in marks]
        holdout = np.array([bool(mark) for mark in read], dtype=bool)
        problems += [
            (index, f"{options.holdout_col} is {marks[index]!r}, not 1 or 0")
            for index, mark in enumerate(read)
            if mark is None
        ]
    if problems:
        every = [f"\n    {table.row_name(index)}: {text}" for index, text in sorted(problems)]
        rest = f"\n    and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
        raise InputError(
            f"{len(every)} {'problem' if len(every) == 1 else 'problems'} in the table of pairs",
            where=table.path,
            found="".join(every[:SHOWN]) + rest,
            expected="ids of rows in the store, as text: '1' isn't '001'",
            fix="correct or remove these rows",
        )
    return Members(stores, found[0], found[1], holdout)


def _hint(name: str, known: Sequence[str]) -> str | None:
    """An id that differs in what spreadsheets lose (zeros in front, folder, extension), else the nearest."""

    def bare(name: str) -> str:
        text = name.strip().replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].casefold()
        return (Path(text).stem or text).lstrip("0") or "0"

    wanted = bare(name)
    return next((one for one in known if bare(one) == wanted), None) or nearest(name, known[:5000])


def _same_id(options: PairsOptions, stores: Stores, reporter: Reporter) -> Members:
    rows = np.flatnonzero(stores[0].mask(options.where))
    partner = stores[1].positions(stores[0].ids[rows])
    found = partner >= 0
    if not found.any():
        shown = (f"{listing(store.ids[:3])} ..." for store in stores)
        raise InputError(
            "no id is in both stores",
            where=f"{stores[0].path} and {stores[1].path}",
            found=" and ".join(shown),
            fix="embed the same manifest twice, or give a table of matched ids",
        )
    if not found.all():
        reporter.note(f"{int((~found).sum())} of {len(rows)} ids have no row in {stores[1].path.name}")
    members = Members(stores, rows[found], partner[found])
    for names, word in ((options.same, "differ"), (options.across, "agree")):
        if names is not None:
            codes_a, codes_b = _joint_codes(stores, names)
            a, b = codes_a[members.a], codes_b[members.b]
            keep = (a >= 0) & (b >= 0) & ((a == b) == (word == "differ"))
            if not keep.all():
                reporter.note(f"{int((~keep).sum())} pairs whose {names} {word} are left out")
            members = members.take(keep)
    if not len(members):
        raise InputError("no pair is left after --same and --across")
    if options.count is None:
        return members
    _require_enough(options.count, len(members))
    chosen = np.random.default_rng(options.seed).permutation(len(members))[: options.count]
    return members.take(np.isin(np.arange(len(members)), chosen))


def _require_enough(wanted: int, there: int) -> None:
    if wanted > there:
        raise InputError(
            f"--count {wanted} is more than there can be",
            found=f"{there} pairs",
            fix=f"at most --count {there}",
        )


def _joint_codes(stores: Stores, names: str) -> tuple[Rows, Rows]:
    """Codes of the combined columns that mean the same in both stores; −1 where one is missing."""
    rows = stores[0].rows
    made = [np.zeros(rows + stores[1].rows, np.int64)]
    for name in parse_names(names):
        left, right = (store.categorical(name) for store in stores)
        number = {
            name: code for code, name in enumerate(dict.fromkeys([*left.categories, *right.categories]))
        }
        translate = np.array([*(number[category] for category in right.categories), -1])
        made.append(np.concatenate([left.codes.astype(np.int64), translate[right.codes]]))
    codes = joint(np.stack(made, axis=1))
    return codes[:rows], codes[rows:]


Found = tuple[list[tuple[Rows, Rows]], dict[str, Any]]
"""Pairs of the fitted and of the held-out part, as positions in it, and what there is to say."""


class _Matcher:
    """Matching over a pool of rows of one or two stores."""

    def __init__(self, options: PairsOptions, stores: Stores, reporter: Reporter) -> None:
        self.options, self.stores, self.reporter = options, stores, reporter
        rows = [np.flatnonzero(store.mask(self._where(store))) for store in dict.fromkeys(stores)]
        same, across = self._codes(options.same, rows), self._codes(options.across, rows)
        side = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
        known = (same >= 0) & (across >= 0)
        if not known.all():
            reporter.note(f"{int((~known).sum())} rows without a value of --same or --across are left out")
        self.rows, self.side = np.concatenate(rows)[known], side[known]
        self.pool = matching.Pool(same[known], across[known], self.side, any_across=options.across is None)
        self._tell_unmatchable()

    def _where(self, store: FeatureStore) -> str | None:
        """``--where``; without it the training rows, so that no pair has seen what a probe is judged by."""
        options, where = self.options, split_filter(store, "train")
        if options.where is not None or options.straddling == "keep" or where is None:
            return options.where
        self.reporter.note(f"matching among the rows of {where} (--where W for others)")
        return where

    def _codes(self, names: str | None, rows: list[Rows]) -> Rows:
        if names is None:
            return np.zeros(sum(map(len, rows)), dtype=np.int64)
        codes = _joint_codes(self.stores, names)
        return np.concatenate([own[part] for own, part in zip(codes, rows, strict=False)])

    def _tell_unmatchable(self) -> None:
        """Say which classes can't be paired; an error if none can."""
        options, same = self.options, self.pool.same
        alone = self.pool.unmatchable()
        texts = []
        for row in alone:
            store, at = self.stores[self.side[row]], self.rows[row]
            columns = [store.categorical(name) for name in parse_names(options.same or "")]
            cell = " & ".join(f"{column.name}={column.categories[column.codes[at]]}" for column in columns)
            texts.append(f"{cell or 'all rows'} ({int((same == same[row]).sum())} rows)")
        only = options.across or "one of the stores"
        if texts and len(alone) == len(np.unique(same)):
            raise InputError(
                f"no two rows can be paired: nothing with the same {options.same or 'store'} "
                f"differs in {only}",
                found=listing(texts),
                fix="widen --where, or choose other --same and --across columns",
            )
        if texts:
            self.reporter.warn(
                f"rows that have no partner are left out: with the same {options.same}, "
                f"these have only one value of {only}: {listing(texts)}"
            )

    def run(self) -> Members:
        """Split the rows into a fitted and a held-out part, match each by itself, and put them together."""
        wanted = parse_holdout(self.options.holdout)
        self.rng = np.random.default_rng(self.options.seed)
        held = matching.stratified_parts(self.pool, self._fraction(wanted), self.rng)
        self.parts = [np.flatnonzero(~held), np.flatnonzero(held)]
        self.pools = [self.pool.subset(part) for part in self.parts]
        matchers = {"random": self._random, "nearest": self._nearest, "iterative": self._iterative}
        found, facts = matchers[str(self.options.match)]()
        counts = self._counts(wanted, *(len(a) for a, _ in found))
        kept = []
        for (a, b), part, count in zip(found, self.parts, counts, strict=True):
            chosen = np.sort(self.rng.permutation(len(a))[:count]) if count < len(a) else slice(None)
            kept.append((part[a[chosen]], part[b[chosen]]))
        a, b = (np.concatenate(own) for own in zip(*kept, strict=True))
        facts = {"strategy": self.options.match, **facts}
        return Members(self.stores, self.rows[a], self.rows[b], np.repeat([False, True], counts), facts)

    def _fraction(self, wanted: float) -> float:
        """The share of rows to set aside, a little more than needed where a number of pairs is asked for."""
        if wanted < 1:
            return float(wanted)
        n = int((self.side == 0).sum())
        halved = self.options.match == "random" and not self.pool.two_sided
        expected = self.options.count or (n // 2 if halved else n)
        if wanted >= expected:
            found = f"about {expected} pairs"
            raise InputError(f"--holdout {wanted} leaves no pair for the basis", found=found)
        # Rows of a cell don't all find partners; what is too much is left out again.
        spare = 1.0 if self.options.count else 1.3
        return min(spare * wanted / expected, 0.9)

    def _counts(self, wanted: float, fitted: int, held: int) -> tuple[int, int]:
        """How many fitted and held-out pairs to keep of those found."""
        total = self.options.count
        goal = int(wanted)
        if wanted < 1:
            goal = held if total is None else round(wanted * total)
        if total is not None:
            _require_enough(total, fitted + held)
            fitted = min(total - min(goal, held), fitted)
            goal = max(goal, total - fitted)
        held = min(goal, held)
        if fitted == 0:
            raise InputError("no pair is left for the basis", found=f"{held} held-out pairs")
        if wanted and held == 0:
            self.reporter.warn("too few rows to hold pairs out: none is held out")
        elif wanted >= 1 and held < wanted:
            self.reporter.warn(f"only {held} of the {int(wanted)} pairs wanted are held out")
        return fitted, held

    def _random(self) -> Found:
        found = [matching.random_pairs(pool, self.rng) for pool in self.pools]
        return found, {"reuse": "each row at most once"}

    def _nearest(self) -> Found:
        prepared = matching.prepare(self._features(), "cosine")
        found, distances = [], []
        for part, pool in zip(self.parts, self.pools, strict=True):
            anchors = np.flatnonzero(pool.side == 0)
            if self.options.count is not None:
                # Two rows that are each other's nearest make one pair: up to twice the number is needed.
                enough = int(np.ceil(2 * self.options.count * len(part) / len(prepared))) + 64
                anchors = self.rng.permutation(anchors)[:enough]
            rows = prepared if len(part) == len(prepared) else chosen(prepared, part)
            with self.reporter.task("matching", len(anchors)) as task:
                a, b, distance = matching.nearest_pairs(rows, pool, "cosine", anchors, task.advance)
            fresh = ~matching.repeated(a, b, either_way=True)
            found.append((a[fresh], b[fresh]))
            distances.append(distance[fresh])
        every = np.concatenate(distances)
        middle = float(np.median(every)) if len(every) else None
        return found, {"metric": "cosine", "median_distance": middle}

    def _iterative(self) -> Found:
        rounds = self.options.rounds
        dims = self.options.dims or max(2, len(np.unique(self.pool.same)) - 1)
        features = self._features()
        fitted, held = (chosen(features, part) for part in self.parts)
        with self.reporter.task("rounds", rounds, "rounds") as task:
            result = matching.alternate(
                fitted, self.pools[0], self.rng, rounds=rounds, dims=dims, advance=task.advance
            )
        changed = list(result.changed)
        if not result.converged:
            self.reporter.warn(
                f"the matches still changed in round {len(changed)} "
                f"({changed[-1]:.0%} of them): more --rounds may help"
            )
        facts = {"metric": "euclidean", "rounds": rounds, "dims": dims}
        facts |= {"changed": changed, "converged": result.converged}
        return [(result.a, result.b), result.match(held, self.pools[1])], facts

    def _features(self) -> Features:
        """(n, d) features of the pool's rows."""
        stores = enumerate(dict.fromkeys(self.stores))
        return functools.reduce(joined, [store.rows_of(self.rows[self.side == i]) for i, store in stores])
