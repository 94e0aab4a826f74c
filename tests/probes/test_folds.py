"""Folds of pairs: what is measured is never what was fitted on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncm_cli.errors import InputError
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.problem import Problem
from ncm_cli.probes.reading import read_problem
from ncm_cli.progress import SILENT
from ncm_cli.solvers.folds import Fold, deal, set_aside, units


def linked(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(k, k): whether two pairs share a row."""
    same = [x[:, None] == y[None, :] for x in (a, b) for y in (a, b)]
    return np.any(same, axis=0)


def check(folds: list[Fold], a: np.ndarray, b: np.ndarray) -> None:
    """What holds of any folds."""
    measured = np.array([fold.measured for fold in folds])
    assert (measured.sum(axis=0) <= 1).all(), "a pair is measured at most once"
    assert measured.any(axis=1).all()
    for fold in folds:
        assert fold.basis.any()
        assert not (fold.measured & fold.basis).any()
        own = np.unique(np.concatenate([a[fold.measured], b[fold.measured]]))
        assert np.isin(own, fold.untrained_nodes).all(), "the rows of measured pairs are not trained on"
        assert not np.isin(a[fold.basis], fold.untrained_nodes).any()
        assert not np.isin(b[fold.basis], fold.untrained_nodes).any(), "no pair of the basis has such a row"
    untrained = np.concatenate([fold.untrained_nodes for fold in folds])
    assert len(np.unique(untrained)) == len(untrained), "one fold only is not trained on a row"


pairs_of_rows = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).filter(lambda pair: pair[0] != pair[1]),
    min_size=12,
    max_size=60,
)


@settings(max_examples=30, deadline=None)
@given(pairs_of_rows, st.integers(2, 6), st.integers(0, 3))
def test_folds_of_any_pairs(pairs: list[tuple[int, int]], count: int, seed: int) -> None:
    a, b = np.array(pairs).T
    try:
        folds = deal(a, b, count, seed)
    except InputError:
        return
    check(folds, a, b)
    again = deal(a, b, count, seed)
    assert all((x.measured == y.measured).all() for x, y in zip(folds, again, strict=True))


def dealt(a: np.ndarray, b: np.ndarray, count: int, seed: int) -> list[list[list[bool]]]:
    """Measured pairs and bases as the definition says: sets are looked through for their rows one by one."""
    rng = np.random.default_rng(seed)
    together = np.arange(len(a))
    while True:  # the least number of all pairs that share a row, until nothing changes
        least = np.array([together[linked_to].min() for linked_to in linked(a, b)])
        if (least == together).all():
            break
        together = least
    sets = list(dict.fromkeys(together.tolist()))
    part_of: dict[int, int] = {}
    load = [0] * count
    for number in rng.permutation(len(sets)):
        own = together == sets[number]
        rows = sorted({*a[own].tolist(), *b[own].tolist()})
        if own.sum() > 2 / count * len(a) and len(rows) > 2 * count:
            for place, row in enumerate(rng.permutation(len(rows))):
                part_of[rows[row]] = place % count
        else:
            part = load.index(min(load))
            part_of |= dict.fromkeys(rows, part)
            load[part] += int(own.sum())
    found = []
    for part in range(count):
        in_a, in_b = ([part_of[row] == part for row in own.tolist()] for own in (a, b))
        measured = [one and other for one, other in zip(in_a, in_b, strict=True)]
        if any(measured):
            found.append([measured, [not (one or other) for one, other in zip(in_a, in_b, strict=True)]])
    return found


@settings(max_examples=30, deadline=None)
@given(pairs_of_rows, st.integers(2, 6), st.integers(0, 3), st.integers(1, 6))
def test_folds_are_those_of_a_plain_loop(
    pairs: list[tuple[int, int]], count: int, seed: int, spread: int
) -> None:
    """Dense graphs and, with rows spread out, ones of many sets that share no row."""
    a, b = np.array(pairs).T
    b = b + 61 * (np.arange(len(b)) % spread)
    a = a + 61 * (np.arange(len(a)) % spread)
    try:
        folds = deal(a, b, count, seed)
    except InputError:
        assert len(found := dealt(a, b, count, seed)) < 2 or not all(any(basis) for _, basis in found)
        return
    assert [[fold.measured.tolist(), fold.basis.tolist()] for fold in folds] == dealt(a, b, count, seed)


@pytest.mark.slow
def test_as_many_sets_as_pairs_are_dealt_evenly() -> None:
    """A hundred thousand pairs of their own: to look through all of them for each would take minutes."""
    k = 100_000
    order = np.random.default_rng(0).permutation(2 * k)
    folds = deal(order[:k], order[k:], 5, 0)
    assert [int(fold.measured.sum()) for fold in folds] == [k // 5] * 5
    assert (np.sum([fold.measured for fold in folds], axis=0) == 1).all()
    assert all((fold.basis == ~fold.measured).all() for fold in folds)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=14, max_size=40), st.integers(2, 5), st.integers(0, 3))
def test_small_sets_partition_the_pairs_and_stay_together(sizes: list[int], count: int, seed: int) -> None:
    """Chains of one to four pairs: each pair is measured once, a chain in one fold, folds about equal."""
    rows, starts = [], 0
    for size in sizes:
        rows += [(starts + i, starts + i + 1) for i in range(size)]
        starts += size + 1
    a, b = np.array(rows).T
    folds = deal(a, b, count, seed)
    check(folds, a, b)
    measured = np.array([fold.measured for fold in folds])
    assert (measured.sum(axis=0) == 1).all(), "they are a partition"
    together = linked(a, b)
    for mask in measured:
        assert not together[mask][:, ~mask].any(), "pairs that share a row are in one fold"
    assert np.ptp(measured.sum(axis=1)) <= 4, "no fold is larger than another by more than a chain"
    every = np.concatenate([np.flatnonzero(mask) for mask in measured])
    number = units(a, b, folds)
    assert len(np.unique(number)) == len(sizes)
    assert ((number[:, None] == number[None, :]) >= together[every][:, every]).all()


def test_a_graph_that_hangs_together_is_cut_by_rows() -> None:
    rng = np.random.default_rng(0)
    every = np.array([(i, j) for i in range(60) for j in range(60, 120)])
    a, b = every[rng.choice(len(every), 600, replace=False)].T
    folds = deal(a, b, 5, 0)
    check(folds, a, b)
    assert len(folds) == 5
    measured = np.any([fold.measured for fold in folds], axis=0)
    assert 0.1 < measured.mean() < 0.3, "about one in five pairs has both rows in one part"
    untrained = np.concatenate([fold.untrained_nodes for fold in folds])
    assert sorted(untrained.tolist()) == list(range(120)), "the rows are a partition"
    basis = np.mean([fold.basis.mean() for fold in folds])
    assert 0.5 < basis < 0.75, "a fold's basis has the pairs with neither row in it"
    # A pair across two parts waits aside in their two folds, and spans the basis of the others.
    across = ~measured
    waits = np.sum([~fold.basis & ~fold.measured for fold in folds], axis=0)
    assert (waits[across] == 2).all()
    assert (waits[measured] == 0).all()


def test_too_few_pairs_are_refused() -> None:
    for a, b in (([0, 0, 0], [1, 2, 3]), ([0], [1]), ([0, 0], [1, 1])):
        with pytest.raises(InputError, match="too few pairs to be cut into folds"):
            deal(np.array(a), np.array(b), 5, 0)
    assert len(deal(np.array([0, 2]), np.array([1, 3]), 5, 0)) == 2, "two pairs are two folds"


def test_held_out_pairs_are_one_fold_and_their_rows_are_in_nothing_else() -> None:
    a, b = np.array([0, 1, 2, 3]), np.array([10, 11, 0, 13])
    (fold,) = set_aside(a, b, np.array([True, False, False, False]))
    assert fold.measured.tolist() == [True, False, False, False]
    assert fold.basis.tolist() == [False, True, False, True], "the third pair has a held-out row"
    assert fold.untrained_nodes.tolist() == [0, 10]
    with pytest.raises(InputError, match="shares a row with the held-out pairs"):
        set_aside(a[[0, 2]], b[[0, 2]], np.array([True, False]))


@pytest.fixture
def problem(on_disk: Any) -> Problem:
    """Pairs of training rows, of which rows 0 and 40, and 3 and 70, are one image."""
    made = on_disk.planted
    X, y = made.rows(130, 0.9)
    digests = [f"{row:064x}" for row in range(130)]
    digests[40], digests[70] = digests[0], digests[3]
    columns = {
        "label": [("cat", "dog")[code] for code in y],
        "split": ["train"] * 100 + ["val"] * 30,
    }
    features = on_disk.store("rows.h5", X, columns, sha256=tuple(digests))
    ids = tuple(tuple(f"r{row}" for row in rows) for rows in (range(20), range(20, 40)))
    more = (("r40", "r41", "strange"), ("r42", "r43", "r44"))
    pairs = on_disk.pair_store(
        "rows-p.h5",
        np.concatenate([X[:20], X[[40, 41, 90]]]),
        np.concatenate([X[20:40], X[[42, 43, 44]]]),
        ids=tuple(ids[side] + more[side] for side in (0, 1)),
    )
    options = FitOptions(features=features, pairs=pairs, output=on_disk.folder / "p")
    return read_problem(options, oracle=False, reporter=SILENT)


def test_what_is_left_holds_neither_pairs_nor_rows_nor_copies_of_a_fold(problem: Problem) -> None:
    assert problem.pairs is not None
    a, b = problem.pairs.node_a, problem.pairs.node_b
    assert a[0] == a[20], "row 40 is the image of row 0"
    folds = problem.pairs.folds(5, 0)
    check(folds, a, b)
    store, seen = problem.pairs.stores[0], 0
    for fold in folds:
        part = problem.without(fold)
        trained = {row.tobytes() for row in part.X}
        ids = dict(zip(problem.train.ids, problem.train.X.astype(np.float64), strict=True))
        members = {
            id for ids_ in (store.id_a, store.id_b) for id in np.array(ids_, dtype=object)[fold.measured]
        }
        copies = {"r0": "r40", "r40": "r0", "r3": "r70", "r70": "r3"}
        untrained = {*members, *(copies[id] for id in members if id in copies)} & set(ids)
        assert untrained
        assert not trained & {ids[id].tobytes() for id in untrained}
        assert len(part.X) == len(ids) - len(untrained), "and nothing else is left out"
        seen += len(untrained)
        deltas = (store.features_a - store.features_b)[fold.measured].astype(np.float64)
        assert part.spectrum is not None
        assert part.pairs == int(fold.basis.sum())
        basis = part.spectrum.basis[:, : part.spectrum.rank]
        left = deltas - deltas @ basis @ basis.T
        assert (np.linalg.norm(left, axis=1) > 0.1).all(), "no measured difference is in the basis"
    assert seen == 20 + 20 + 4 + 1 + 1, "every member's row once: 45 of the store, and row 70"
    first = next(fold for fold in folds if fold.measured[0])
    assert first.measured[20], "pairs that share a byte-identical image are in one fold"


def test_scaling_is_fitted_on_what_is_left(on_disk: Any) -> None:
    options = FitOptions(
        features=on_disk.features, pairs=on_disk.pairs, output=on_disk.folder / "p", scaling="standard"
    )
    problem = read_problem(options, oracle=False, reporter=SILENT)
    (fold,) = problem.pairs.folds(5, 0)
    part = problem.without(fold)
    assert np.allclose(part.X.mean(axis=0), 0, atol=1e-9)
    assert np.allclose(part.X.std(axis=0), 1, atol=1e-9)


def test_a_fold_that_leaves_one_class_is_refused(on_disk: Any) -> None:
    X, y = on_disk.planted.rows(60, 0.9)
    y[:2], y[2:40] = 1, 0
    columns = {"label": [str(code) for code in y], "split": ["train"] * 40 + ["val"] * 20}
    features = on_disk.store("rare.h5", X, columns)
    ids = (("r0", "r5", "r7"), ("r1", "r6", "r8"))
    pairs = on_disk.pair_store("rare-p.h5", X[[0, 5, 7]], X[[1, 6, 8]], ids=ids)
    options = FitOptions(features=features, pairs=pairs, output=on_disk.folder / "p")
    problem = read_problem(options, oracle=False, reporter=SILENT)
    with pytest.raises(InputError, match="leaves fewer than two classes to train on"):
        [problem.without(fold) for fold in problem.pairs.folds(5, 0)]
