"""Pairs without a table: who is paired with whom, and what keeps the held-out pairs apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from ncm_cli.errors import InputError, UsageError
from ncm_cli.pairs import matching
from ncm_cli.pairs.matching import Pool
from ncm_cli.pairs.options import PairsOptions
from ncm_cli.pairs.pairs import pairs
from ncm_cli.solvers import neighbours
from ncm_cli.solvers.folds import components, draw_sets
from ncm_cli.solvers.neighbours import normalized_rows
from ncm_cli.store.pairs import PairStore, read_pairs
from tests.world import ENCODER, Heard

Make = Callable[..., Path]


def _run(features: Path, match: str, **more: object) -> tuple[PairStore, Heard]:
    heard = Heard()
    output = features.parent / f"{match}.h5"
    pairs(PairsOptions(match=match, features=features, output=output, **more), reporter=heard)
    return read_pairs(output), heard


def _data(seed: int, n: int = 120, d: int = 8) -> tuple[np.ndarray, dict[str, list[str]]]:
    rng = np.random.default_rng(seed)
    columns = {
        "label": rng.choice(["cat", "dog"], n).tolist(),
        "domain": rng.choice(["art", "photo", "sketch"], n, p=[0.2, 0.5, 0.3]).tolist(),
        "split": rng.choice(["train", "val"], n).tolist(),
    }
    return rng.normal(size=(n, d)).astype(np.float32), columns


def _of(made: PairStore, columns: dict[str, list[str]], name: str) -> tuple[list[str], list[str]]:
    values = columns[name]
    return [values[int(i[1:])] for i in made.id_a], [values[int(i[1:])] for i in made.id_b]


@pytest.mark.parametrize("match", ["random", "nearest", "iterative"])
@pytest.mark.parametrize("seed", range(3))
def test_members_share_the_label_and_differ_in_domain_and_nothing_leaks(
    match: str, seed: int, make_store: Make
) -> None:
    x, columns = _data(seed)
    store = make_store("f.h5", x, **columns)
    settings = {"same": "label", "across": "domain", "where": "split=train", "holdout": "0.25", "seed": seed}
    made, _ = _run(store, match, **settings)
    labels, domains, splits = (_of(made, columns, name) for name in ("label", "domain", "split"))
    assert labels[0] == labels[1]
    assert all(a != b for a, b in zip(*domains, strict=True))
    assert {*splits[0], *splits[1]} == {"train"}
    held = {*np.array(made.id_a)[made.holdout], *np.array(made.id_b)[made.holdout]}
    fitted = {*np.array(made.id_a)[~made.holdout], *np.array(made.id_b)[~made.holdout]}
    assert held and not held & fitted
    assert 0.1 <= made.holdout.mean() <= 0.4
    again, _ = _run(store, match, **settings)
    assert (made.id_a, made.id_b) == (again.id_a, again.id_b)


@pytest.mark.parametrize("match", ["random", "nearest", "iterative"])
def test_count_and_holdout_are_met(match: str, make_store: Make) -> None:
    x, columns = _data(4, n=400)
    store = make_store("f.h5", x, **columns)
    made, _ = _run(store, match, same="label", across="domain", count=40, holdout="10")
    assert made.pairs == 40
    assert made.holdout.sum() == 10
    made, _ = _run(store, match, same="label", across="domain", count=40, holdout="0")
    assert made.pairs == 40 and not made.holdout.any()
    with pytest.raises(InputError, match="--count 5000 is more pairs than can be made"):
        _run(store, match, same="label", across="domain", count=5000)


def test_random_pairs_of_two_equal_domains_are_uniform() -> None:
    pool = Pool(np.zeros(6, int), np.array([0, 0, 0, 1, 1, 1]), np.zeros(6, int))
    counts = np.zeros((6, 6))
    for seed in range(3000):
        a, b = matching.random_pairs(pool, np.random.default_rng(seed))
        counts[np.minimum(a, b), np.maximum(a, b)] += 1
    assert counts[:3, 3:].sum() == 9000
    # Each of the nine pairs occurs 1,000 times on average, with a standard deviation of 26.
    assert np.abs(counts[:3, 3:] - 1000).max() < 130


@st.composite
def _pools(draw: st.DrawFn, least: int = 0) -> Pool:
    n = draw(st.integers(least, 40))

    def codes(values: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(0, values), min_size=n, max_size=n)), dtype=np.int64)

    two = draw(st.booleans())
    across = codes(draw(st.integers(0, 6)))
    side = codes(1) if two else np.zeros(n, dtype=np.int64)
    any_across = draw(st.booleans())
    return Pool(codes(draw(st.integers(0, 2))), across, side, any_across, two_sided=two)


def _compatible(pool: Pool) -> np.ndarray:
    """(n, n) which rows may be paired."""
    apart = ~np.eye(len(pool.same), dtype=bool)
    if not pool.any_across:
        apart = pool.across[:, None] != pool.across
    if pool.two_sided:
        apart &= pool.side[:, None] != pool.side
    return apart & (pool.same[:, None] == pool.same)


def _most(pool: Pool) -> int:
    """The size of a largest matching, found otherwise: in two stores as a bipartite one."""
    if pool.two_sided:
        left, right = np.flatnonzero(pool.side == 0), np.flatnonzero(pool.side == 1)
        graph = csr_array(_compatible(pool)[np.ix_(left, right)].astype(np.int8))
        return int((maximum_bipartite_matching(graph) >= 0).sum())
    most = 0
    for value in np.unique(pool.same):
        across = pool.across[pool.same == value]
        n = len(across)
        most += n // 2 if pool.any_across else min(n // 2, n - int(np.bincount(across).max()))
    return most


@given(_pools(), st.integers(0, 3))
def test_random_pairs_are_as_many_as_there_can_be_each_row_once(pool: Pool, seed: int) -> None:
    a, b = matching.random_pairs(pool, np.random.default_rng(seed))
    used = [*a, *b]
    assert len(set(used)) == len(used)
    assert _compatible(pool)[a, b].all()
    assert len(a) == _most(pool) == pool.most_pairs().sum()
    if pool.two_sided:
        assert (pool.side[a] == 0).all()
    again = matching.random_pairs(pool, np.random.default_rng(seed))
    assert np.array_equal(again, (a, b))


@given(_pools())
def test_unmatchable_are_the_values_whose_rows_have_no_partner(pool: Pool) -> None:
    partner = _compatible(pool).any(axis=1)
    alone = [value for value in np.unique(pool.same) if not partner[pool.same == value].any()]
    assert pool.same[pool.unmatchable()].tolist() == alone


def test_a_part_with_rows_of_one_of_two_stores_has_no_pairs() -> None:
    pool = Pool(np.zeros(4, int), np.zeros(4, int), np.array([0, 0, 0, 1]), any_across=True)
    part = pool.subset(np.array([0, 1, 2]))
    assert not len(matching.random_pairs(part, np.random.default_rng(0))[0])
    assert not len(matching.nearest_pairs(np.ones((3, 2), np.float32), part, "cosine")[0])


@pytest.mark.parametrize("domains", [1, 2, 20_000])
def test_random_pairs_among_many_rows_of_any_number_of_domains(domains: int) -> None:
    n = 20_000
    pool = Pool(np.zeros(n, int), np.arange(n) % domains, np.zeros(n, int))
    a, b = matching.random_pairs(pool, np.random.default_rng(0))
    assert len(a) == (0 if domains == 1 else n // 2)
    assert (pool.across[a] != pool.across[b]).all()


def test_random_pairs_of_several_domains_are_close_to_uniform() -> None:
    """Domains of 3, 2, 2 and 1 rows: there are 48 ways to pair all eight."""
    across = np.repeat(np.arange(4), [3, 2, 2, 1])
    pool = Pool(np.zeros(8, int), across, np.zeros(8, int))
    counts: Counter[frozenset[tuple[int, ...]]] = Counter()
    for seed in range(2400):
        a, b = matching.random_pairs(pool, np.random.default_rng(seed))
        counts[frozenset(tuple(sorted(pair)) for pair in zip(a.tolist(), b.tolist(), strict=True))] += 1
    assert len(counts) == 48
    # 50 each on average, with a standard deviation of 7.
    assert min(counts.values()) > 20 and max(counts.values()) < 85


@given(_pools(least=1), st.sampled_from(["cosine", "euclidean"]), st.integers(1, 9))
def test_nearest_of_any_pool_equals_brute_force(pool: Pool, metric: str, block: int) -> None:
    """Whether cells are searched one by one or together in one batch."""
    n = len(pool.same)
    x = np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "BLOCK_ROWS", block)
        patch.setattr(neighbours, "BLOCK_COLUMNS", block + 4)
        a, b, distance = matching.nearest_pairs(normalized_rows(x, metric), pool, metric)
    y = x.astype(float)
    if metric == "cosine":
        y /= np.linalg.norm(y, axis=1, keepdims=True)
        true = 1 - y @ y.T
    else:
        true = np.linalg.norm(y[:, None] - y[None], axis=2)
    true[~_compatible(pool)] = np.inf
    anchors = np.flatnonzero(np.isfinite(true.min(axis=1, initial=np.inf)) & (pool.side == 0))
    assert a.tolist() == anchors.tolist()
    assert b.tolist() == true[anchors].argmin(axis=1).tolist()
    np.testing.assert_allclose(distance, true[anchors].min(axis=1), atol=1e-5)


def test_nearest_tells_close_neighbours_apart_far_from_the_origin() -> None:
    rng = np.random.default_rng(6)
    x = (rng.normal(size=(40, 4)) * 1e-2 + 50).astype(np.float32)
    pool = Pool(np.zeros(40, int), np.arange(40) % 2, np.zeros(40, int))
    a, b, _ = matching.nearest_pairs(normalized_rows(x, "euclidean"), pool, "euclidean")
    true = np.linalg.norm(x[:, None].astype(float) - x[None], axis=2)
    true[(pool.across[:, None] == pool.across)] = np.inf
    assert (true[a, b] <= true.min(axis=1) * (1 + 1e-3)).all()


def test_of_equally_near_rows_the_first_is_taken_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((9, 3), dtype=np.float32)
    pool = Pool(np.zeros(9, int), np.array([0] * 3 + [1] * 6), np.zeros(9, int))
    for columns in (1, 2, 100):
        monkeypatch.setattr(neighbours, "BLOCK_COLUMNS", columns)
        _, b, _ = matching.nearest_pairs(normalized_rows(x, "cosine"), pool, "cosine")
        assert b.tolist() == [3, 3, 3] + [0] * 6


def test_zero_rows_have_neighbours_too() -> None:
    x = np.zeros((4, 3), dtype=np.float32)
    pool = Pool(np.zeros(4, int), np.array([0, 0, 1, 1]), np.zeros(4, int))
    a, b, distance = matching.nearest_pairs(normalized_rows(x, "cosine"), pool, "cosine")
    assert a.tolist() == [0, 1, 2, 3] and np.isfinite(distance).all() and b.tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("match", ["random", "nearest", "iterative"])
def test_a_class_in_one_domain_only_is_left_out_and_named(match: str, make_store: Make) -> None:
    x, columns = _data(7, n=90)
    columns["label"][:10] = ["owl"] * 10
    columns["domain"][:10] = ["photo"] * 10
    store = make_store("f.h5", x, **columns)
    made, heard = _run(store, match, same="label", across="domain", where="")
    assert not {f"r{i}" for i in range(10)} & {*made.id_a, *made.id_b}
    assert any("label=owl (10 rows)" in text for text in heard.warnings)
    with pytest.raises(InputError, match="no two rows can be paired") as caught:
        _run(store, match, same="label", across="domain", where="domain=photo")
    assert "label=cat" in str(caught.value)


def test_columns_that_arent_there_are_named(make_store: Make) -> None:
    x, columns = _data(8)
    store = make_store("f.h5", x, **columns)
    with pytest.raises(InputError, match="no column named 'domian'") as caught:
        _run(store, "random", same="label", across="domian")
    assert "did you mean 'domain'?" in str(caught.value)
    with pytest.raises(InputError, match="no value in column 'split' named 'training'"):
        _run(store, "random", same="label", across="domain", where="split=training")
    with pytest.raises(UsageError, match="needs --across") as usage:
        _run(store, "random", same="label")
    assert f"ncm info {store} lists them" in str(usage.value)
    with pytest.raises(UsageError, match="needs --same"):
        _run(store, "iterative", across="domain")
    with pytest.raises(UsageError, match="--count must be at least 1"):
        _run(store, "random", same="label", across="domain", count=0)


def test_label_means_the_label_column_whatever_its_name(make_store: Make) -> None:
    x, columns = _data(9)
    y = columns.pop("label")
    store = make_store("f.h5", x, label_column="y", y=y, **columns)
    made, _ = _run(store, "random", same="label", across="domain")
    assert _of(made, {"y": y}, "y")[0] == _of(made, {"y": y}, "y")[1]


def test_rows_without_a_value_are_not_paired(make_store: Make) -> None:
    x, columns = _data(10)
    columns["domain"][:30] = [""] * 30
    made, _ = _run(make_store("f.h5", x, **columns), "nearest", same="label", across="domain")
    assert not {f"r{i}" for i in range(30)} & {*made.id_a, *made.id_b}


def test_same_id_pairs_a_store_with_its_view(make_store: Make) -> None:
    x, columns = _data(11, n=30)
    a = make_store("a.h5", x, ids=[f"i{i}" for i in range(30)], **columns)
    order = np.random.default_rng(0).permutation(25)
    short = {name: [values[i] for i in order] for name, values in columns.items()}
    view = ENCODER | {"view": {"augment": "grayscale"}}
    b = make_store("b.h5", x[order] + 1, ids=[f"i{i}" for i in order], encoder=view, **short)
    made, _ = _run(a, "same-id", features_b=b, holdout="0.2")
    assert made.id_a == made.id_b == tuple(f"i{i}" for i in range(25))
    np.testing.assert_allclose(made.delta, -1, atol=1e-6)
    assert made.holdout.sum() == 5
    some, _ = _run(a, "same-id", features_b=b, count=8, where="label=cat", same="domain")
    assert some.pairs == 8
    with pytest.raises(UsageError, match="rows of two stores"):
        _run(a, "same-id")
    c = make_store("c.h5", x, **columns)
    with pytest.raises(InputError, match="no id is in both stores"):
        _run(a, "same-id", features_b=c)


def test_same_id_leaves_out_rows_without_a_value_in_either_store(make_store: Make) -> None:
    x = np.random.default_rng(14).normal(size=(4, 3))
    ids = ["i0", "i1", "i2", "i3"]
    a = make_store("a.h5", x, ids=ids, domain=["", "art", "art", "art"])
    b = make_store("b.h5", x + 1, ids=ids, domain=["photo", "", "photo", "art"])
    assert _run(a, "same-id", features_b=b, across="domain")[0].id_a == ("i2",)
    assert _run(a, "same-id", features_b=b, same="domain")[0].id_a == ("i3",)


@pytest.mark.parametrize("match", ["random", "nearest"])
def test_two_stores_are_matched_with_each_other(match: str, make_store: Make) -> None:
    x, columns = _data(12, n=40)
    a = make_store("a.h5", x, ids=[f"a{i}" for i in range(40)], label=columns["label"])
    b = make_store("b.h5", x[:30] + 0.01, ids=[f"b{i}" for i in range(30)], label=columns["label"][:30])
    made, _ = _run(a, match, features_b=b, same="label", holdout="0")
    assert all(name.startswith("a") for name in made.id_a)
    assert all(name.startswith("b") for name in made.id_b)
    assert made.label_a == made.label_b
    if match == "nearest":
        known = [i for i in range(made.pairs) if int(made.id_a[i][1:]) < 30]
        assert all(made.id_a[i][1:] == made.id_b[i][1:] for i in known)


@pytest.mark.parametrize("match", ["random", "nearest", "iterative"])
@pytest.mark.parametrize("empty", ["first", "second"])
def test_where_one_of_two_stores_has_no_row_left_nothing_is_paired(
    match: str, empty: str, make_store: Make
) -> None:
    x, columns = _data(13, n=40)
    columns = {"label": columns["label"], "side": ["in"] * 39 + ["out"]}
    a = make_store("a.h5", x, ids=[f"a{i}" for i in range(40)], place=["v"] * 40, **columns)
    b = make_store("b.h5", x, ids=[f"b{i}" for i in range(40)], place=["u"] * 39 + ["v"], **columns)
    first, second = (a, b) if empty == "second" else (b, a)
    with pytest.raises(InputError, match="no row to match") as caught:
        _run(first, match, features_b=second, same="label", where="place=v & side=in")
    assert (caught.value.where, caught.value.found) == (b, "place=v & side=in")


def _hidden_twins(seed: int, n: int = 150) -> tuple[np.ndarray, Pool]:
    """Each object once in each of two domains: what it is in 4 weak directions, and a loud domain part."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, n)
    what = rng.normal(size=(n, 4)) * 0.5 + rng.normal(size=(3, 4))[label] * 2
    loud = rng.normal(size=(2, n, 20)) * 1.5
    rows = np.concatenate([np.concatenate([what, loud[side]], axis=1) for side in (0, 1)])
    pool = Pool(np.tile(label, 2), np.repeat([0, 1], n), np.zeros(2 * n, int))
    return rows.astype(np.float32), pool


@pytest.mark.parametrize("seed", range(3))
def test_iterative_finds_what_members_share_where_the_nearest_are_lost(seed: int) -> None:
    x, pool = _hidden_twins(seed)
    result = matching.alternate(x, pool, np.random.default_rng(seed), rounds=20, dims=2)
    shared = np.linalg.norm(result.weight[:4]) ** 2 / np.linalg.norm(result.weight) ** 2
    assert shared > 0.95

    def apart(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.median(np.linalg.norm(x[a, :4] - x[b, :4], axis=1)))

    a, b, _ = matching.nearest_pairs(normalized_rows(x, "euclidean"), pool, "euclidean")
    assert apart(result.a, result.b) < 0.85 * apart(a, b)
    # Each object has one twin in 50 rows of its class: the true one is found far more often than by chance.
    assert (np.abs(result.a - result.b) == 150).mean() > 0.08 > 1.5 * (np.abs(a - b) == 150).mean()


def test_iterative_records_how_it_went(make_store: Make) -> None:
    x, columns = _data(13, n=200)
    store = make_store("f.h5", x, **columns)
    made, heard = _run(store, "iterative", same="label", across="domain", rounds=1)
    facts = made.diagnostics["matching"]
    assert len(facts["changed"]) == 1 and facts["converged"] is False
    assert any("more --rounds may help" in text for text in heard.warnings)
    made, _ = _run(store, "iterative", same="label", across="domain", rounds=50)
    assert len(made.diagnostics["matching"]["changed"]) <= 50


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=15))
def test_components_are_numbered_by_their_first_pair(edges: list[tuple[int, int]]) -> None:
    a, b = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    found = components(a, b).tolist()
    nodes = {node: {node} for node in range(13)}
    for left, right in edges:
        merged = nodes[left] | nodes[right]
        nodes |= dict.fromkeys(merged, merged)
    numbers: dict[frozenset[int], int] = {}
    assert found == [numbers.setdefault(frozenset(nodes[left]), len(numbers)) for left, _ in edges]


def test_components_and_their_split() -> None:
    a, b = np.array([0, 2, 4, 1, 9]), np.array([1, 3, 5, 6, 9])
    assert components(a, b).tolist() == [0, 1, 2, 0, 3]
    for seed in range(20):
        held = draw_sets(np.array([0, 1, 2, 0, 3]), 3, seed)
        assert held.sum() in (2, 3) and held[0] == held[3]


@pytest.mark.parametrize("match", ["random", "nearest", "iterative"])
def test_training_rows_are_matched_unless_others_are_asked_for(match: str, make_store: Make) -> None:
    x, columns = _data(8, n=300)
    columns["split"] = np.random.default_rng(8).choice(["train", "val", "test"], 300).tolist()
    store = make_store("f.h5", x, **columns)
    made, heard = _run(store, match, same="label", across="domain", count=20)
    assert made.pairs == 20
    assert {*_of(made, columns, "split")[0], *_of(made, columns, "split")[1]} == {"train"}
    assert any("split=train" in text for text in heard.notes)


def test_options_that_a_strategy_does_not_read_are_said(make_store: Make) -> None:
    x, columns = _data(9, n=120)
    store = make_store("f.h5", x, **columns)
    _, heard = _run(store, "random", same="label", across="domain", dims=2, rounds=3)
    assert "no effect with --match random: --rounds, --dims" in heard.warnings
    _, heard = _run(store, "iterative", same="label", across="domain", dims=2)
    assert not any("no effect" in text for text in heard.warnings)
