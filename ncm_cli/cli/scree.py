"""A singular spectrum as a plot in text."""

from __future__ import annotations

from collections.abc import Sequence

BAR = 36
"""Characters of the longest bar; the whole line stays under 80 columns."""

EVERY = 12
"""Leading values that all get a line; further ones are thinned out."""


def scree(values: Sequence[float], *, gap: int = 0, total: float | None = None) -> str:
    """Lines with rank, singular value, share of the squared total so far, and a bar.

    Parameters
    ----------
    values
        Singular values in descending order.
    gap
        The rank behind which the largest gap is; marked if not 0.
    total
        Sum of squares of all singular values; of ``values`` if left out.
    """
    if not len(values):
        return "no direction: every difference is zero"
    shown = _shown(len(values), gap)
    whole = total or sum(value * value for value in values) or 1.0
    sums, running = {}, 0.0
    for index, value in enumerate(values, start=1):
        running += value * value
        sums[index] = running
    lines = [f"{'rank':>5}  {'sigma':>10}  {'share':>6}"]
    for rank in shown:
        value = values[rank - 1]
        bar = "█" * max(1, round(BAR * value / values[0])) if value > 0 else ""
        mark = "  <- largest gap" if rank == gap else ""
        lines.append(f"{rank:>5}  {value:>10.4g}  {sums[rank] / whole:>6.1%}  {bar}{mark}")
    return "\n".join(lines)


def _shown(n: int, gap: int) -> list[int]:
    """The first dozen ranks, then about every factor of 1.4 (2, 2.8, 4 ...), the gap and the last."""
    ranks = set(range(1, min(n, EVERY) + 1)) | {n}
    step = float(EVERY)
    while step < n:
        ranks.add(int(step))
        step *= 2**0.5
    if 0 < gap <= n:
        ranks.add(gap)
    return sorted(ranks)
