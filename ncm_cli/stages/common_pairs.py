"""The pairs of a fit: which count, how they are scaled, and the directions they span."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.methods.projection import Spectrum, spectrum
from ncm_cli.methods.scaling import Scaling
from ncm_cli.methods.selection import HeldOut
from ncm_cli.options.fit import FitOptions
from ncm_cli.options.grids import parse_ranks
from ncm_cli.progress import Reporter
from ncm_cli.stages.common import require_same_encoder
from ncm_cli.stages.common_rows import Filters
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import PairStore, read_pairs

Array = NDArray[np.float64]

AUTO_DENSE = 32
"""``--rank auto`` tries every rank up to this one, then ever wider steps."""

AUTO_MOST = 64
"""The most ranks that ``--rank auto`` tries."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Scaled members (k, d) of pairs, and how large their entries were before rounding.

    ``magnitude`` is the root mean square entry of the members in the scaled unit, without centring.
    """

    a: Array
    b: Array
    magnitude: float

    def spectrum(self) -> Spectrum:
        return spectrum((self.a - self.b).T, magnitude=self.magnitude)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs that a fit may use: those that span the basis, and those held out for choosing."""

    store: PairStore
    used: NDArray[np.bool_]
    held_out: NDArray[np.bool_]
    excluded: int
    overlapping: int

    def members(self, scaling: Scaling, which: NDArray[np.bool_]) -> Members:
        a, b = self.store.features_a[which], self.store.features_b[which]
        magnitude = scaling.magnitude(np.concatenate([a, b]))
        return Members(a=scaling.apply(a), b=scaling.apply(b), magnitude=magnitude)

    def held_out_members(self, scaling: Scaling) -> HeldOut | None:
        if not self.held_out.any():
            return None
        return HeldOut(
            a=scaling.apply(self.store.features_a[self.held_out]),
            b=scaling.apply(self.store.features_b[self.held_out]),
        )


def load_pairs(
    options: FitOptions, features: FeatureStore, filters: Filters, reporter: Reporter
) -> Pairs | None:
    """Read the pair store, check that it belongs to the features, and leave leaking pairs out.

    Raises
    ------
    MismatchError
        The pairs were embedded by another encoder.
    InputError
        Pairs that leak under ``--overlap error``, or no pair left.
    """
    if options.pairs is None:
        return None
    store = read_pairs(options.pairs)
    require_same_encoder(
        str(features.path), features.encoder, str(options.pairs), store.encoder, ignore_view=True
    )
    leaking = _leaking(store, features, filters)
    keep = np.ones(len(store.id_a), dtype=bool)
    if leaking.any():
        first = int(np.flatnonzero(leaking)[0])
        what = (
            f"{int(leaking.sum()):,} pairs have a member among the validation or test rows, "
            f"such as ({store.id_a[first]!r}, {store.id_b[first]!r})"
        )
        if options.overlap == "error":
            raise InputError(what, where=options.pairs, fix="--overlap exclude leaves them out")
        if options.overlap == "keep":
            reporter.warn(f"{what}; they are kept, as --overlap keep says")
        else:
            keep = ~leaking
            reporter.warn(f"{what}; they are left out (--overlap keep would use them)")
    used, held_out = ~store.holdout & keep, int(store.holdout.sum())
    if not used.any():
        raise InputError(
            "no pair is left to find directions with",
            where=options.pairs,
            found=f"{len(keep):,} pairs, {held_out:,} held out, {int((~keep).sum()):,} barred",
            fix="a smaller --holdout in ncm pairs, or pairs of training rows",
        )
    return Pairs(
        store=store,
        used=used,
        held_out=store.holdout & keep,
        excluded=int((~keep).sum()),
        overlapping=int(leaking.sum()),
    )


def _leaking(store: PairStore, features: FeatureStore, filters: Filters) -> NDArray[np.bool_]:
    """Pairs with a member, by id, among the validation or test rows of the same feature store."""
    if not any(source.get("content_sha256") == features.content_sha256 for source in store.sources):
        return np.zeros(len(store.id_a), dtype=bool)
    apart = np.zeros(features.rows, dtype=bool)
    for mask in (filters.val_rows, filters.test_rows):
        if mask is not None:
            apart |= mask
    ids = {features.ids[row] for row in np.flatnonzero(apart)}
    return np.array([a in ids or b in ids for a, b in zip(store.id_a, store.id_b, strict=True)], dtype=bool)


def resolve_ranks(text: str, method: str, found: Spectrum | None, reporter: Reporter) -> tuple[int, ...]:
    """The ranks to fit.

    Raises
    ------
    InputError
        No rank of those asked for is available.
    """
    asked = parse_ranks(text)
    available = found.rank if found else 0
    if method != "ncm":
        if asked is not None and asked != (0,):
            raise InputError(
                f"the method {method!r} removes no directions",
                found=f"--rank {text}",
                expected="--method ncm",
            )
        return (0,)
    if asked is None:
        return auto_ranks(available)
    possible = tuple(rank for rank in asked if rank <= available)
    if not possible:
        raise InputError(
            "a rank above the pairs' numerical rank",
            found=f"--rank {text}",
            expected=f"at most {available}",
            fix=f"--rank {available}, or a grid such as 0:{available}, or more pairs",
        )
    if len(possible) < len(asked):
        reporter.note(
            f"ranks above {available}, the pairs' numerical rank, are skipped "
            f"({len(asked) - len(possible)} of {len(asked)})"
        )
    return possible


def auto_ranks(available: int) -> tuple[int, ...]:
    """0 to ``available``: each up to `AUTO_DENSE`, then geometric steps, at most `AUTO_MOST` ranks."""
    if available < AUTO_MOST:
        return tuple(range(available + 1))
    sparse = np.geomspace(AUTO_DENSE, available, AUTO_MOST - AUTO_DENSE)
    return tuple(sorted({*range(AUTO_DENSE + 1), *(round(float(rank)) for rank in sparse)}))
