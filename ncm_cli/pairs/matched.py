"""Pairs without a table: rows with the same id in two stores, or rows matched by `matching`.

Rows that find no partner by ``--same`` and ``--across`` are left out and counted.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ncm_cli.blocks import Features, chosen, joined
from ncm_cli.errors import InputError, listing
from ncm_cli.options import parse_names
from ncm_cli.pairs import matching
from ncm_cli.pairs.members import Members, Positions, Stores, repeated
from ncm_cli.pairs.options import PairsOptions, parse_holdout
from ncm_cli.probes.metrics import joint
from ncm_cli.progress import Reporter
from ncm_cli.solvers.neighbours import normalized_rows
from ncm_cli.store.roles import split_filter
from ncm_cli.store.rows import FeatureRows


def same_id(options: PairsOptions, stores: Stores, reporter: Reporter) -> Members:
    """Pairs of rows with the same id in both stores."""
    rows = np.flatnonzero(stores[0].mask(options.where))
    partner = stores[1].positions(stores[0].ids[rows])
    in_both = partner >= 0
    if not in_both.any():
        shown = (f"{listing(store.ids[:3])} ..." for store in stores)
        raise InputError(
            "no id is in both stores",
            where=f"{stores[0].path} and {stores[1].path}",
            found=" and ".join(shown),
            fix="embed the same manifest twice, or give a table of matched ids",
        )
    if not in_both.all():
        reporter.note(f"{int((~in_both).sum())} of {len(rows)} ids have no row in {stores[1].path.name}")
    members = Members(stores, rows[in_both], partner[in_both])
    for names, word in ((options.same, "differ"), (options.across, "agree")):
        if names is not None:
            codes_a, codes_b = _joint_codes(stores, names)
            a, b = codes_a[members.a], codes_b[members.b]
            keep = (a >= 0) & (b >= 0) & ((a == b) == (word == "differ"))
            if not keep.all():
                reporter.note(
                    f"{int((~keep).sum())} pairs whose values of {names} {word} or are missing are left out"
                )
            members = members.take(keep)
    if not len(members):
        raise InputError(
            "no pair is left after --same and --across",
            where=f"{stores[0].path} and {stores[1].path}",
            found=f"{int(in_both.sum())} ids in both stores, all left out",
            fix="other --same and --across columns",
        )
    if options.count is None:
        return members
    _require_enough(options.count, len(members))
    drawn = np.random.default_rng(options.seed).permutation(len(members))[: options.count]
    return members.take(np.isin(np.arange(len(members)), drawn))


def _require_enough(wanted: int, available: int) -> None:
    if wanted > available:
        raise InputError(
            f"--count {wanted} is more pairs than can be made",
            found=f"{available} pairs",
            fix=f"at most --count {available}",
        )


def _joint_codes(stores: Stores, names: str) -> tuple[Positions, Positions]:
    """Codes of the combined columns, equal in both stores for equal values; −1 if a value is missing."""
    rows = stores[0].rows
    columns = [np.zeros(rows + stores[1].rows, np.int64)]
    for name in parse_names(names):
        left, right = (store.categorical(name) for store in stores)
        categories = dict.fromkeys([*left.categories, *right.categories])
        code_of = {category: code for code, category in enumerate(categories)}
        translate = np.array([*(code_of[category] for category in right.categories), -1])
        columns.append(np.concatenate([left.codes.astype(np.int64), translate[right.codes]]))
    codes = joint(np.stack(columns, axis=1))
    return codes[:rows], codes[rows:]


PartPairs = tuple[list[tuple[Positions, Positions]], dict[str, Any]]
"""The pairs of the fitted and of the held-out part, as positions in each part, and facts on the matching."""


class Matcher:
    """Matching among rows of one or two stores."""

    def __init__(self, options: PairsOptions, stores: Stores, reporter: Reporter) -> None:
        self.options, self.stores, self.reporter = options, stores, reporter
        wheres = {store: self._where(store) for store in stores}
        if options.where is None:
            for training in dict.fromkeys(filter(None, wheres.values())):
                reporter.note(f"matching among the rows of {training} (--where W for others)")
        rows = [np.flatnonzero(store.mask(where)) for store, where in wheres.items()]
        for (store, where), part in zip(wheres.items(), rows, strict=True):
            if not len(part):
                raise InputError("no row to match", where=store.path, found=where, fix="another --where")
        same, across = self._codes(options.same, rows), self._codes(options.across, rows)
        side = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
        known = (same >= 0) & (across >= 0)
        if not known.all():
            reporter.note(f"{int((~known).sum())} rows without a value of --same or --across are left out")
        self.rows, self.side = np.concatenate(rows)[known], side[known]
        # Also where no row of the second store is left: rows of the first aren't paired with each other.
        self.pool = matching.Pool(
            same[known], across[known], self.side, any_across=options.across is None, two_sided=len(rows) == 2
        )
        self._tell_unmatchable()

    def _where(self, store: FeatureRows) -> str | None:
        """``--where``, by default the training rows, so that no pair has a row that probes are tested on."""
        given = self.options.where
        return (
            given if given is not None or self.options.straddling == "keep" else split_filter(store, "train")
        )

    def _codes(self, names: str | None, rows: list[Positions]) -> Positions:
        if names is None:
            return np.zeros(sum(map(len, rows)), dtype=np.int64)
        codes = _joint_codes(self.stores, names)
        return np.concatenate([of_store[part] for of_store, part in zip(codes, rows, strict=False)])

    def _tell_unmatchable(self) -> None:
        """Warn of values of ``--same`` whose rows can't be paired; raises an error if none can."""
        options, same = self.options, self.pool.same
        alone = self.pool.unmatchable()
        texts = []
        for row in alone:
            store, at = self.stores[self.side[row]], self.rows[row]
            columns = [store.categorical(name) for name in parse_names(options.same or "")]
            cell = " & ".join(f"{column.name}={column.categories[column.codes[at]]}" for column in columns)
            texts.append(f"{cell or 'all rows'} ({int((same == same[row]).sum())} rows)")
        alike = f" with the same {options.same}" if options.same else ""
        differ = [f"differ in {options.across}"] if options.across else []
        two_stores = self.stores[0] is not self.stores[1]
        apart = " and ".join([*differ, *["are in different stores"] * two_stores])
        if texts and len(alone) == len(np.unique(same)):
            raise InputError(
                f"no two rows can be paired: no two rows{alike} {apart}",
                found=listing(texts),
                fix="widen --where, or choose other --same and --across columns",
            )
        if texts:
            self.reporter.warn(
                f"rows without a partner are left out, since no two of them{alike} {apart}: {listing(texts)}"
            )

    def run(self) -> Members:
        """Split the rows into a fitted and a held-out part, and match within each."""
        wanted = parse_holdout(self.options.holdout)
        self.rng = np.random.default_rng(self.options.seed)
        held = matching.stratified_parts(self.pool, self._fraction(wanted), self.rng)
        self.parts = [np.flatnonzero(~held), np.flatnonzero(held)]
        self.pools = [self.pool.subset(part) for part in self.parts]
        matchers = {"random": self._random, "nearest": self._nearest, "iterative": self._iterative}
        pairs, facts = matchers[str(self.options.match)]()
        counts = self._counts(wanted, *(len(a) for a, _ in pairs))
        kept = []
        for (a, b), part, count in zip(pairs, self.parts, counts, strict=True):
            drawn = np.sort(self.rng.permutation(len(a))[:count]) if count < len(a) else slice(None)
            kept.append((part[a[drawn]], part[b[drawn]]))
        a, b = map(np.concatenate, zip(*kept, strict=True))
        facts = {"strategy": self.options.match, **facts}
        return Members(self.stores, self.rows[a], self.rows[b], np.repeat([False, True], counts), facts)

    def _fraction(self, wanted: float) -> float:
        """The share of the rows to hold out; for a number of pairs, enough rows for at least that many."""
        if wanted < 1:
            return float(wanted)
        n = int((self.side == 0).sum())
        halved = self.options.match == "random" and not self.pool.two_sided
        expected = self.options.count or (n // 2 if halved else n)
        if wanted >= expected:
            found = f"about {expected} pairs"
            raise InputError(f"--holdout {wanted} leaves no pair for the basis", found=found)
        # Not every row of a cell finds a partner; surplus pairs are dropped later.
        spare = 1.0 if self.options.count else 1.3
        return min(spare * wanted / expected, 0.9)

    def _counts(self, wanted: float, fitted: int, held: int) -> tuple[int, int]:
        """The numbers of fitted and of held-out pairs to keep."""
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
            self.reporter.warn("too few rows to hold out pairs: none are held out")
        elif wanted >= 1 and held < wanted:
            self.reporter.warn(f"only {held} of the {int(wanted)} pairs wanted are held out")
        return fitted, held

    def _random(self) -> PartPairs:
        pairs = [matching.random_pairs(pool, self.rng) for pool in self.pools]
        return pairs, {"reuse": "each row at most once"}

    def _nearest(self) -> PartPairs:
        prepared = normalized_rows(self._features(), "cosine")
        pairs, distances = [], []
        for part, pool in zip(self.parts, self.pools, strict=True):
            anchors = np.flatnonzero(pool.side == 0)
            if self.options.count is not None:
                # Two rows that are each other's nearest make one pair: twice as many anchors may be needed.
                needed = int(np.ceil(2 * self.options.count * len(part) / len(prepared))) + 64
                anchors = self.rng.permutation(anchors)[:needed]
            rows = prepared if len(part) == len(prepared) else chosen(prepared, part)
            with self.reporter.task("matching", len(anchors)) as task:
                a, b, distance = matching.nearest_pairs(rows, pool, "cosine", anchors, task.advance)
            fresh = ~repeated(a, b, either_way=True)
            pairs.append((a[fresh], b[fresh]))
            distances.append(distance[fresh])
        median = float(np.median(np.concatenate(distances))) if any(map(len, distances)) else None
        return pairs, {"metric": "cosine", "median_distance": median}

    def _iterative(self) -> PartPairs:
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
