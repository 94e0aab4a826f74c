"""Orders of rows and LISA's partners."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncm_cli.solvers.batches import drawn_batches, epoch_batches, epoch_order, generator_of, partners


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=120), st.integers(0, 10))
def test_an_epoch_is_a_permutation_that_spreads_every_stratum(codes: list[int], seed: int) -> None:
    strata = torch.tensor(codes)
    order = epoch_order(strata, len(codes), generator_of(seed, 0))
    assert sorted(order.tolist()) == list(range(len(codes)))
    half = order[: len(codes) // 2]
    for code in set(codes):
        total = codes.count(code)
        share = int((strata[half] == code).sum())
        # One row of the stratum's own, and one for each other stratum that may be ahead of its share.
        assert abs(share - total * len(half) / len(codes)) <= 1 + len(set(codes))


def test_epochs_differ_and_seeds_repeat() -> None:
    generator = generator_of(3, 0)
    strata = torch.tensor([0, 1] * 50)
    first, second = epoch_order(strata, 100, generator), epoch_order(strata, 100, generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, epoch_order(strata, 100, generator_of(3, 0)))
    assert not torch.equal(first, epoch_order(strata, 100, generator_of(3, 1)))


def test_rows_of_a_stratum_are_equally_likely_anywhere() -> None:
    generator = generator_of(0, 0)
    strata = torch.tensor([0] * 6 + [1] * 2)
    place = np.zeros(8)
    for _ in range(2000):
        order = epoch_order(strata, 8, generator)
        place += torch.argsort(order).numpy()
    assert np.abs(place / 2000 - 3.5).max() < 0.25


@pytest.mark.parametrize(("n", "size", "count"), [(4795, 256, 19), (10, 3, 4), (5, 100, 1), (7, 0, 1)])
def test_batches_cover_the_rows_evenly(n: int, size: int, count: int) -> None:
    batches = list(epoch_batches(None, n, size, generator_of(0, 0)))
    assert len(batches) == count
    assert sorted(torch.cat(batches).tolist()) == list(range(n))
    widths = [len(rows) for rows in batches]
    assert max(widths) - min(widths) <= 1
    assert size == 0 or max(widths) <= size


def test_drawn_batches_hold_as_many_rows_of_each_environment() -> None:
    strata = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)[torch.randperm(100, generator=generator_of(0, 9))]
    batches = list(drawn_batches(strata, 100, 8, generator_of(1, 0)))
    assert len(batches) == 5
    for rows in batches:
        assert strata[rows].tolist() == [0] * 8 + [1] * 8 + [2] * 8
    seen = torch.cat(
        [torch.cat(list(drawn_batches(strata, 100, 8, generator_of(seed, 0)))) for seed in range(30)]
    )
    assert len(seen.unique()) == 100, "every row is drawn at some time"
    assert len(batches[0].unique()) < 24, "drawn with replacement"
    assert [len(rows) for rows in drawn_batches(None, 100, 30, generator_of(0, 0))] == [30] * 4
    assert torch.equal(next(drawn_batches(strata, 100, 0, generator_of(0, 0))), torch.arange(100))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60),
    st.floats(0, 1, exclude_max=True),
)
def test_partners_share_one_code_and_not_the_other(cells: list[tuple[int, int]], draw: float) -> None:
    primary, secondary = (torch.tensor(part) for part in zip(*cells, strict=True))
    found = partners(primary, secondary, torch.full((len(cells),), draw, dtype=torch.float64))
    for row, partner in enumerate(found.tolist()):
        others = [i for i, cell in enumerate(cells) if cell[0] == cells[row][0] and cell[1] != cells[row][1]]
        assert partner in others if others else partner == row


@pytest.mark.slow
def test_partners_are_uniform() -> None:
    primary = torch.tensor([0, 0, 0, 0, 0, 1])
    secondary = torch.tensor([0, 1, 1, 2, 0, 0])
    draws = torch.linspace(0, 1, 3001)[:-1]
    counts = np.zeros(6)
    for draw in draws:
        counts[int(partners(primary, secondary, draw.repeat(6))[0])] += 1
    np.testing.assert_array_equal(counts, [0, 1000, 1000, 1000, 0, 0])
