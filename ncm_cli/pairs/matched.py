"""Pairs without a table: by id across two stores, or chosen among the rows by `matching`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ncm_cli.blocks import Features, chosen, joined
from ncm_cli.errors import InputError, listing
from ncm_cli.options import parse_names
from ncm_cli.pairs import matching
from ncm_cli.pairs.members import Members, Rows, Stores, repeated
from ncm_cli.pairs.options import PairsOptions, parse_holdout
from ncm_cli.probes.metrics import joint
from ncm_cli.progress import Reporter
from ncm_cli.store.roles import split_filter
from ncm_cli.store.rows import FeatureRows


def same_id(options: PairsOptions, stores: Stores, reporter: Reporter) -> Members:
    """The rows of one id in both stores."""
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


class Matcher:
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

    def _where(self, store: FeatureRows) -> str | None:
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
        prepared = matching.normalized_rows(self._features(), "cosine")
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
            fresh = ~repeated(a, b, either_way=True)
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
