"""How many threads BLAS may use: one for small problems, where the others cost more than they save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SMALL_ELEMENTS = 4_000_000
"""Entries of the largest matrix up to which one thread is used.

An exact rank path is thousands of products of a few milliseconds, between which OpenBLAS's threads spin. On
two busy cores a path on 2,000 × 100 rows took 15 times the processor time of one thread, on 5,000 × 512 three
times.
"""


@contextmanager
def blas_threads(elements: int) -> Iterator[None]:
    """Let BLAS use one thread inside, if the largest matrix has at most `SMALL_ELEMENTS` entries."""
    if elements > SMALL_ELEMENTS:
        yield
        return
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield
