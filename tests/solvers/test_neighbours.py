"""Rows that are nearly copies of others: found as by brute force, none by chance, within a bound of work."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from ncm_cli.blocks import RowBlocks
from ncm_cli.solvers import neighbours
from ncm_cli.solvers.neighbours import NEAR_COSINE, near_copies, normalized_rows
from tests.world import ROWS, TRAIN, World


def _planted(seed: int, d: int = 32) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
    """300 candidates, then 200 queries of which ten are nearly a candidate, with three classes."""
    rng = np.random.default_rng(seed)
    x, classes = rng.normal(size=(500, d)).astype(np.float32), rng.integers(3, size=500)
    x[np.arange(500), classes] += 2
    twins = dict(
        zip((300 + rng.permutation(200)[:10]).tolist(), rng.permutation(300)[:10].tolist(), strict=True)
    )
    for query, candidate in twins.items():
        x[query] = 3 * x[candidate] + 0.3 * rng.normal(size=d)
        classes[query] = classes[candidate]
    return x, classes, twins


@pytest.mark.parametrize("seed", range(3))
def test_planted_copies_are_found_and_no_others(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, classes, twins = _planted(seed)
    queries, candidates = np.arange(300, 500), np.arange(300)
    found = near_copies(normalized_rows(x, "cosine"), queries, candidates, classes)
    assert dict(zip(found.queries.tolist(), found.candidates.tolist(), strict=True)) == twins
    assert found.all_candidates.tolist() == sorted(twins.values()) and found.compared == 200
    search = NearestNeighbors(n_neighbors=1, metric="cosine").fit(x[:300].astype(float))
    distance, place = search.kneighbors(x[300:].astype(float))
    near = np.flatnonzero(1 - distance[:, 0] >= found.threshold)
    assert np.array_equal(near + 300, np.sort(found.queries))
    assert np.array_equal(place[found.queries - 300, 0], found.candidates)
    np.testing.assert_allclose(found.cosines, 1 - distance[found.queries - 300, 0], atol=1e-6)
    assert (np.diff(found.cosines) <= 0).all()
    # The same in small blocks, and from rows that are read when needed.
    monkeypatch.setattr(neighbours, "BLOCK_ROWS", 7)
    monkeypatch.setattr(neighbours, "BLOCK_COLUMNS", 11)
    read = RowBlocks(lambda rows: x[rows], np.arange(500), x.shape[1])
    for rows in (x, read):
        again = near_copies(normalized_rows(rows, "cosine"), queries, candidates, classes)
        assert np.array_equal(again.queries, found.queries) and again.threshold == pytest.approx(
            found.threshold
        )


def test_different_rows_of_few_dimensions_or_alike_encoders_are_no_copies() -> None:
    rng = np.random.default_rng(0)
    queries, candidates = np.arange(300, 600), np.arange(300)
    for d, shift in ((8, 0.0), (16, 0.0), (64, 0.0), (64, 8.0)):
        x, classes = rng.normal(size=(600, d)).astype(np.float32) + shift, rng.integers(2, size=600)
        rows = normalized_rows(x, "cosine")
        for codes in (classes, np.full(600, -1)):
            found = near_copies(rows, queries, candidates, codes)
            assert found.threshold >= NEAR_COSINE and not len(found.queries)
        # All of these are alike: a threshold of its own would name every row.
        assert ((rows[queries] @ rows[candidates].T).max(axis=1) > NEAR_COSINE).all() == (shift > 0)


def test_beyond_the_bound_of_work_a_sample_is_compared() -> None:
    x, classes, twins = _planted(5)
    queries, candidates = np.arange(300, 500), np.arange(300)
    found = near_copies(
        normalized_rows(x, "cosine"), queries, candidates, classes, most=50 * 300 * x.shape[1]
    )
    assert found.compared == 50 and set(found.queries.tolist()) < set(twins)
    none = near_copies(normalized_rows(x, "cosine"), queries[:0], candidates, classes)
    assert (none.compared, len(none.queries), len(none.all_candidates)) == (0, 0, 0)


def test_fit_names_them_and_leaves_them_out_where_told(world: World) -> None:
    x, strangers = world.X.copy(), (3, 17)
    rng = np.random.default_rng(4)
    wide = rng.normal(size=(ROWS, 40)).astype(np.float32)
    x = np.concatenate([x, wide], axis=1)
    x[TRAIN], x[ROWS - 1] = 1.001 * x[strangers[0]], x[strangers[1]]
    x[TRAIN, 5] += 0.01
    x[ROWS - 1, 5] += 0.01
    label = list(world.columns["label"])
    label[TRAIN], label[ROWS - 1] = label[3], label[17]
    features = world.store(X=x, label=label)
    trained, _ = world.fit(features, method="erm")
    (said,) = [text for text in world.heard.warnings if "nearly equal" in text]
    assert said.startswith("2 training rows are nearly equal to validation or test rows (cosine of 0.9")
    assert "--overlap exclude-near leaves them out" in said
    assert any(f"'r{row}' to 'r{other}'" in said for row, other in ((3, TRAIN), (17, ROWS - 1)))
    left, _ = world.fit(features, method="erm", overlap="exclude-near")
    assert any("they are left out of training" in text for text in world.heard.warnings)
    assert trained.meta["data"]["train_rows"] == left.meta["data"]["train_rows"] + 2
    # Copies by their files are told apart without features, and named once.
    x[ROWS - 1] = x[17]
    features = world.store("same.h5", X=x, label=label, same_image=[(17, ROWS - 1)])
    world.fit(features, method="erm")
    texts = [text for text in world.heard.warnings if "byte-identical" in text or "nearly" in text]
    assert (
        len(texts) == 2
        and texts[0].startswith("1 training images")
        and texts[1].startswith("1 training row is")
    )


def test_the_world_has_none(world: World) -> None:
    world.fit(world.store(), method="erm")
    assert not [text for text in world.heard.warnings if "nearly" in text]
