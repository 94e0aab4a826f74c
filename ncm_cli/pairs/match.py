"""Pairs without a table: by id across two stores, at random, by nearest neighbour, and MatchDG's
alternation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, listing
from ncm_cli.options import parse_names
from ncm_cli.pairs import matching
from ncm_cli.pairs.matching import Alternation, Pool, alternate, prepare
from ncm_cli.pairs.options import PairsOptions, parse_holdout
from ncm_cli.pairs.table import Members
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import split_filter
from ncm_cli.store.features import FeatureStore

Rows = NDArray[np.int64]
Pairs = tuple[Rows, Rows]


def match(options: PairsOptions, store_a: FeatureStore, store_b: FeatureStore, reporter: Reporter) -> Members:
    """The members that ``--match`` chooses; for all but ``same-id`` also which pairs are held out."""
    if options.match == "same-id":
        return _same_id(options, store_a, store_b, reporter)
    return _Matcher(options, store_a, store_b, reporter).run()


def _same_id(
    options: PairsOptions, store_a: FeatureStore, store_b: FeatureStore, reporter: Reporter
) -> Members:
    rows = np.flatnonzero(store_a.mask(options.where))
    partner = store_b.positions([store_a.ids[i] for i in rows])
    found = partner >= 0
    a, b = rows[found], partner[found]
    if not len(a):
        raise InputError(
            "no id is in both stores",
            where=f"{store_a.path} and {store_b.path}",
            found=f"{listing(store_a.ids[:3])} ... and {listing(store_b.ids[:3])} ...",
            fix="embed the same manifest twice, or give a table of matched ids",
        )
    if not found.all():
        reporter.note(f"{int((~found).sum())} of {len(rows)} ids have no row in {store_b.path.name}")
    for names, differ, word in ((options.same, True, "differ"), (options.across, False, "agree")):
        if names is not None and len(a):
            codes_a, codes_b = _joint_codes(store_a, store_b, parse_names(names))
            unlike = (codes_a[a] != codes_b[b]) | (codes_a[a] < 0)
            drop = unlike if differ else ~unlike | (codes_b[b] < 0)
            if drop.any():
                reporter.note(f"{int(drop.sum())} pairs whose {names} {word} are left out")
            a, b = a[~drop], b[~drop]
    if not len(a):
        raise InputError("no pair is left after --same and --across")
    if options.count is not None:
        if options.count > len(a):
            raise _too_many(options.count, len(a))
        chosen = np.sort(np.random.default_rng(options.seed).permutation(len(a))[: options.count])
        a, b = a[chosen], b[chosen]
    return Members(a, b)


def _too_many(wanted: int, there: int) -> InputError:
    return InputError(
        f"--count {wanted} is more than there can be", found=f"{there} pairs", fix=f"at most --count {there}"
    )


def _joint_codes(store_a: FeatureStore, store_b: FeatureStore, names: tuple[str, ...]) -> Pairs:
    """Codes of the combined columns that mean the same in both stores; −1 where one is missing."""
    codes_a, codes_b = [], []
    for name in names:
        left, right = store_a.categorical(name), store_b.categorical(name)
        number = {category: code for code, category in enumerate(left.categories)}
        for category in right.categories:
            number.setdefault(category, len(number))
        translate = np.array([*(number[category] for category in right.categories), -1], dtype=np.int64)
        codes_a.append(left.codes.astype(np.int64))
        codes_b.append(translate[right.codes])
    joint = matching.as_codes(
        [np.concatenate(pair) for pair in zip(codes_a, codes_b, strict=True)], store_a.rows + store_b.rows
    )
    return joint[: store_a.rows], joint[store_a.rows :]


class _Matcher:
    """Matching over a pool of rows of one or two stores."""

    def __init__(
        self, options: PairsOptions, store_a: FeatureStore, store_b: FeatureStore, reporter: Reporter
    ) -> None:
        self.options, self.reporter = options, reporter
        self.stores = (store_a,) if store_a is store_b else (store_a, store_b)
        rows = [np.flatnonzero(store.mask(self._where(store))) for store in self.stores]
        same, across = self._codes(options.same, rows), self._codes(options.across, rows)
        side = np.concatenate([np.full(len(part), i, dtype=np.int64) for i, part in enumerate(rows)])
        known = (same >= 0) & (across >= 0)
        if not known.all():
            reporter.note(f"{int((~known).sum())} rows without a value of --same or --across are left out")
        self.side, self.rows = side[known], np.concatenate(rows)[known]
        self.pool = Pool(same[known], across[known], self.side, any_across=options.across is None)
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
        both = _joint_codes(self.stores[0], self.stores[-1], parse_names(names))
        return np.concatenate([both[i][part] for i, part in enumerate(rows)])

    def _tell_unmatchable(self) -> None:
        """Say which classes can't be paired; an error if none can."""
        alone = self.pool.unmatchable()
        if not len(alone):
            return
        options = self.options
        texts = [f"{self._cell_name(int(row))} ({self._size(int(row))} rows)" for row in alone]
        only = options.across or "one of the stores"
        if len(alone) == len(np.unique(self.pool.same)):
            raise InputError(
                f"no two rows can be paired: nothing with the same {options.same or 'store'} "
                f"differs in {only}",
                found=listing(texts),
                fix="widen --where, or choose other --same and --across columns",
            )
        self.reporter.warn(
            f"rows that have no partner are left out: with the same {options.same}, "
            f"these have only one value of {only}: {listing(texts)}"
        )

    def _size(self, row: int) -> int:
        return int((self.pool.same == self.pool.same[row]).sum())

    def _cell_name(self, row: int) -> str:
        store = self.stores[int(self.side[row])]
        at = self.rows[row]
        parts = []
        for name in parse_names(self.options.same or ""):
            column = store.categorical(name)
            parts.append(f"{name}={column.categories[column.codes[at]]}")
        return " & ".join(parts) or "all rows"

    def run(self) -> Members:
        """Split the rows into a fitted and a held-out part, match each by itself, and put them together."""
        wanted = parse_holdout(self.options.holdout)
        rng = np.random.default_rng(self.options.seed)
        held = matching.stratified_parts(self.pool, self._fraction(wanted), rng)
        everything = np.arange(len(held))
        parts = [everything[~held], everything[held]]
        matcher = {"random": self._random, "nearest": self._nearest, "iterative": self._iterative}
        found, facts = matcher[str(self.options.match)](parts, rng)
        counts = self._counts(wanted, [len(a) for a, _ in found])
        kept = [self._sample(pairs, count, rng) for pairs, count in zip(found, counts, strict=True)]
        a = np.concatenate([pairs[0] for pairs in kept])
        b = np.concatenate([pairs[1] for pairs in kept])
        holdout = np.repeat([False, True], [len(pairs[0]) for pairs in kept])
        return Members(self.rows[a], self.rows[b], holdout, facts)

    def _fraction(self, wanted: float) -> float:
        """The share of rows to set aside, a little more than needed where a number of pairs is asked for."""
        if wanted < 1:
            return float(wanted)
        expected = self.options.count or self._expected()
        if wanted >= expected:
            raise InputError(
                f"--holdout {wanted} leaves no pair for the basis", found=f"about {expected} pairs"
            )
        # Rows of a cell don't all find partners; what is too much is left out again.
        spare = 1.0 if self.options.count else 1.3
        return min(spare * wanted / expected, 0.9)

    def _expected(self) -> int:
        n = int((self.side == 0).sum())
        return n // 2 if self.options.match == "random" and len(self.stores) == 1 else n

    def _counts(self, wanted: float, there: list[int]) -> list[int]:
        """How many fitted and held-out pairs to keep of those found."""
        total = self.options.count
        if total is None:
            held = there[1] if wanted < 1 else min(int(wanted), there[1])
            fitted = there[0]
        else:
            held = round(wanted * total) if wanted < 1 else int(wanted)
            if total > sum(there):
                raise _too_many(total, sum(there))
            held = min(held, there[1])
            fitted = min(total - held, there[0])
            held = min(total - fitted, there[1])
        if fitted == 0:
            raise InputError("no pair is left for the basis", found=f"{held} held-out pairs")
        if wanted and held == 0:
            self.reporter.warn("too few rows to hold pairs out: none is held out")
        elif wanted >= 1 and held < wanted:
            self.reporter.warn(f"only {held} of the {int(wanted)} pairs wanted are held out")
        return [fitted, held]

    def _sample(self, pairs: Pairs, count: int, rng: np.random.Generator) -> Pairs:
        if count >= len(pairs[0]):
            return pairs
        chosen = np.sort(rng.permutation(len(pairs[0]))[:count])
        return pairs[0][chosen], pairs[1][chosen]

    def _random(self, parts: list[Rows], rng: np.random.Generator) -> tuple[list[Pairs], dict[str, Any]]:
        found = []
        for part in parts:
            a, b = matching.random_pairs(self.pool.subset(part), rng)
            found.append((part[a], part[b]))
        return found, {"strategy": "random", "reuse": "each row at most once"}

    def _nearest(self, parts: list[Rows], rng: np.random.Generator) -> tuple[list[Pairs], dict[str, Any]]:
        metric = self.options.metric or "cosine"
        prepared = prepare(self._features(), metric)
        found, distances = [], []
        for part in parts:
            anchors = self._anchors(part, len(prepared), rng)
            rows = prepared if len(part) == len(prepared) else prepared[part]
            pool = self.pool.subset(part)
            with self.reporter.task("matching", len(anchors)) as task:
                a, b, distance = matching.nearest_pairs(rows, pool, metric, anchors, task.advance)
            fresh = matching.unique_pairs(a, b)
            found.append((part[a[fresh]], part[b[fresh]]))
            distances.append(distance[fresh])
        every = np.concatenate(distances)
        middle = float(np.median(every)) if len(every) else None
        return found, {"strategy": "nearest", "metric": metric, "median_distance": middle}

    def _anchors(self, part: Rows, n: int, rng: np.random.Generator) -> Rows:
        """Rows of a part that look for a neighbour: all, or with ``--count`` random ones, enough for it."""
        eligible = np.flatnonzero(self.side[part] == 0)
        if self.options.count is None:
            return eligible
        # Two rows that are each other's nearest make one pair, so up to twice the number may be needed.
        enough = int(np.ceil(2 * self.options.count * len(part) / n)) + 64
        return np.sort(rng.permutation(eligible)[:enough])

    def _iterative(self, parts: list[Rows], rng: np.random.Generator) -> tuple[list[Pairs], dict[str, Any]]:
        options = self.options
        features = self._features()
        classes = len(np.unique(self.pool.same))
        settings = Alternation(
            metric=options.metric or "euclidean",
            rounds=options.rounds,
            dims=options.dims or max(2, classes - 1),
        )
        with self.reporter.task("rounds", options.rounds, "rounds") as task:
            result = alternate(
                features[parts[0]], self.pool.subset(parts[0]), settings, rng, advance=task.advance
            )
        a, b = result.a, result.b
        found = [(parts[0][a], parts[0][b])]
        held_a, held_b = result.match(features[parts[1]], self.pool.subset(parts[1]))
        found.append((parts[1][held_a], parts[1][held_b]))
        if not result.converged:
            self.reporter.warn(
                f"the matches still changed in round {len(result.changed)} "
                f"({result.changed[-1]:.0%} of them): more --rounds may help"
            )
        facts = {
            **dataclasses.asdict(settings),
            "strategy": "iterative",
            "changed": list(result.changed),
            "converged": result.converged,
        }
        return found, facts

    def _features(self) -> NDArray[np.float32]:
        """(n, d) features of the pool's rows."""
        parts = [store.read(self.rows[self.side == i]) for i, store in enumerate(self.stores)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
