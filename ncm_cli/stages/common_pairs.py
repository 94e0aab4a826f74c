"""The pairs of a fit: which of them count, and the rows that their members are."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError
from ncm_cli.methods.projection import Spectrum, spectrum
from ncm_cli.methods.scaling import Scaling
from ncm_cli.methods.scoring import PairRows
from ncm_cli.options.fit import FitOptions
from ncm_cli.options.grids import parse_ranks
from ncm_cli.progress import Reporter
from ncm_cli.stages.common import require_same_encoder
from ncm_cli.stages.common_rows import Filters, content_nodes
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import PairStore, read_pairs

Codes = NDArray[np.int64]
Mask = NDArray[np.bool_]

AUTO_DENSE = 32
"""``--rank auto`` tries every rank up to this one, then ever wider steps."""

AUTO_MOST = 64
"""The most ranks that ``--rank auto`` tries."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """The k pairs of a store, and which of them a fit may use.

    Attributes
    ----------
    usable : bool (k,)
        Those whose members are no validation or test rows.
    held_out : bool (k,)
        The usable ones that the user holds out.
    node_a, node_b : int64 (k,)
        The row of each member: equal where it is one row, or one image by its bytes. Rows of the feature
        store come first, as `content_nodes` numbers them.
    overlapping
        How many pairs have a member among the validation or test rows.
    """

    store: PairStore
    usable: Mask
    held_out: Mask
    node_a: Codes
    node_b: Codes
    overlapping: int

    @property
    def excluded(self) -> int:
        return int((~self.usable).sum())

    def members(self, which: Mask, scaling: Scaling) -> PairRows:
        """Scaled members of some of the pairs."""
        return PairRows(
            a=scaling.apply(self.store.features_a[which]), b=scaling.apply(self.store.features_b[which])
        )

    def spectrum(self, which: Mask, scaling: Scaling) -> Spectrum:
        """The singular spectrum of the scaled differences of some of the pairs."""
        rows = self.members(which, scaling)
        raw = np.concatenate([self.store.features_a[which], self.store.features_b[which]])
        return spectrum((rows.a - rows.b).T, magnitude=scaling.magnitude(raw))


def load_pairs(
    options: FitOptions, features: FeatureStore, filters: Filters, reporter: Reporter
) -> Pairs | None:
    """Read the pair store, check that it belongs to the features, and leave leaking pairs out.

    Members are looked up by id in the feature store that is used now, whenever the pairs were made.

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
    node_a, node_b = member_nodes(store, features)
    strange = int((node_a >= features.rows).sum() + (node_b >= features.rows).sum())
    if strange:
        reporter.note(
            f"{strange:,} of {2 * len(node_a):,} members of pairs are no rows of {features.path.name}: that "
            "they are no validation or test rows can't be checked"
        )
    apart = content_nodes(features)[filters.apart()]
    leaking = np.isin(node_a, apart) | np.isin(node_b, apart)
    usable = np.ones(len(store.id_a), dtype=bool)
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
            usable = ~leaking
            reporter.warn(f"{what}; they are left out (--overlap keep would use them)")
    if not (usable & ~store.holdout).any():
        raise InputError(
            "no pair is left to find directions with",
            where=options.pairs,
            found=f"{len(usable):,} pairs, {int(store.holdout.sum()):,} held out, "
            f"{int((~usable).sum()):,} barred",
            fix="a smaller --holdout in ncm pairs, or pairs of training rows",
        )
    return Pairs(
        store=store,
        usable=usable,
        held_out=store.holdout & usable,
        node_a=node_a,
        node_b=node_b,
        overlapping=int(leaking.sum()),
    )


def member_nodes(store: PairStore, features: FeatureStore) -> tuple[Codes, Codes]:
    """(k,) each: the rows that the members of pairs are; ids that ``features`` lacks get numbers beyond."""
    nodes = content_nodes(features)
    strange: dict[str, int] = {}

    def node(id: str, row: int) -> int:
        return features.rows + strange.setdefault(id, len(strange)) if row < 0 else int(nodes[row])

    found = [
        np.array([node(*member) for member in zip(ids, features.positions(ids).tolist(), strict=True)])
        for ids in (store.id_a, store.id_b)
    ]
    return found[0], found[1]


def resolve_ranks(text: str, method: str, available: int, reporter: Reporter) -> tuple[int, ...]:
    """The ranks to try, of at most ``available``.

    Raises
    ------
    InputError
        No rank of those asked for is available.
    """
    asked = parse_ranks(text)
    if method != "ncm":
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
            f"ranks above {available}, the numerical rank of the pairs that a fold leaves to fit on, are "
            f"skipped ({len(asked) - len(possible)} of {len(asked)})"
        )
    return possible


def auto_ranks(available: int) -> tuple[int, ...]:
    """0 to ``available``: each up to `AUTO_DENSE`, then geometric steps, at most `AUTO_MOST` ranks."""
    if available < AUTO_MOST:
        return tuple(range(available + 1))
    sparse = np.geomspace(AUTO_DENSE, available, AUTO_MOST - AUTO_DENSE)
    return tuple(sorted({*range(AUTO_DENSE + 1), *(round(float(rank)) for rank in sparse)}))
