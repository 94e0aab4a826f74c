"""Reads pair stores for a fit, and leaves out pairs with a validation or test row, as ``--overlap`` says.

Every other rule by which a pair is left out is listed in `ncm_cli.pairs.pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ncm_cli.blocks import Codes, Mask
from ncm_cli.errors import InputError, NcmError, UsageError
from ncm_cli.options import values_of
from ncm_cli.probes.options import PairPaths
from ncm_cli.probes.problem import Pairs, Roles
from ncm_cli.progress import Reporter
from ncm_cli.store.digests import require_same_encoder
from ncm_cli.store.pairs import TEXT, PairStore, read_pairs
from ncm_cli.store.rows import FeatureRows


def read_pair_stores(paths: PairPaths | None) -> list[PairStore]:
    """Read the stores of ``--pairs``, in order; raises `UsageError` if two have the same content."""
    stores: dict[str, tuple[Path, PairStore]] = {}
    for path in values_of(paths):
        store = read_pairs(path)
        if store.content_sha256 in stores:
            first, _ = stores[store.content_sha256]
            raise UsageError(
                "one pair store is given twice",
                where=path,
                found="the same file again" if path == first else f"the pairs of {first}",
                fix="name each pair store once",
            )
        stores[store.content_sha256] = path, store
    return [store for _, store in stores.values()]


def read_usable_pairs(
    paths: PairPaths,
    features: FeatureRows,
    roles: Roles,
    overlap: str,
    reporter: Reporter,
    stores: Sequence[PairStore] = (),
) -> Pairs:
    """Read pair stores, check that they belong to the features, and leave out pairs by ``--overlap``.

    Pairs are left out if a member is a validation or test row, or a copy of one. (``ncm pairs`` has already
    left out some: `pairs.pairs.straddling`.) Members are looked up by id in ``features``, whichever store the
    pairs were made from. Each class of text pairs is one node, so that a fold leaves out whole
    classes. ``stores`` are the pair stores if they are read already.
    """
    stores, strangers = stores or read_pair_stores(paths), dict[str, int]()
    copies = np.append(features.copies_of(roles.val_or_test), False)  # row −1 stands for no row
    parts: list[Pairs] = []
    for path, store in zip(values_of(paths), stores, strict=True):
        if features.encoder:
            encoder = features.encoder
            require_same_encoder(str(features.path), encoder, str(path), store.encoder, ignore_view=True)
        row_a, row_b, node_a, node_b = _located(store, features, strangers, reporter)
        leaking = copies[row_a] | copies[row_b]
        usable = np.ones(store.pairs, dtype=bool)
        if leaking.any():
            first = int(np.flatnonzero(leaking)[0])
            what = (
                f"{int(leaking.sum()):,} pairs have a member among the validation or test rows, "
                f"such as ({store.id_a[first]!r}, {store.id_b[first]!r})"
            )
            refusal = InputError(what, where=path, fix="--overlap exclude leaves them out")
            if not keeps(overlap, refusal, "they are left out", reporter):
                usable = ~leaking
        if not (usable & ~store.holdout).any():
            raise InputError(
                "no pair is left to find directions with",
                where=path,
                found=f"{len(usable):,} pairs, {int(store.holdout.sum()):,} held out, "
                f"{int((~usable).sum()):,} with a validation or test row",
                fix="a smaller --holdout in ncm pairs, or pairs of rows that are neither validation nor test "
                "rows",
            )
        parts.append(
            Pairs(
                stores=(store,),
                paths=(path,),
                kind=np.full(store.pairs, len(parts)),
                usable=usable,
                held_out=store.holdout & usable,
                row_a=row_a,
                row_b=row_b,
                node_a=node_a,
                node_b=node_b,
                overlapping=int(leaking.sum()),
            )
        )
    return Pairs.joined(parts)


def _located(
    store: PairStore, features: FeatureRows, strangers: dict[str, int], reporter: Reporter
) -> tuple[Codes, Codes, Codes, Codes]:
    """The rows and the nodes of first and second members, (k,) each, as `Pairs` has them.

    ``strangers`` numbers the members that the feature store lacks; it is shared by all pair stores.
    """
    row_a, row_b = (features.positions(ids) for ids in (store.id_a, store.id_b))
    numbered = {source.get("row_numbers_of") for source in store.sources}
    if numbered and features.row_numbers_of not in numbered:  # ids are row numbers of another table
        row_a, row_b = np.full_like(row_a, -1), np.full_like(row_b, -1)
    names_a: Sequence[str] = store.id_a
    names_b: Sequence[str] = store.id_b
    if store.strategy == TEXT:
        row_a, row_b = np.full_like(row_a, -1), np.full_like(row_b, -1)
        names_a, names_b = (
            [label or id for label, id in zip(labels, ids, strict=True)]
            for labels, ids in ((store.label_a, names_a), (store.label_b, names_b))
        )
    elif strange := int((row_a < 0).sum() + (row_b < 0).sum()):
        reporter.note(
            f"{strange:,} of {2 * len(row_a):,} pair members aren't in {features.path.name}, so ncm can't "
            "check whether they are validation or test rows"
        )
    nodes = features.content_nodes

    def nodes_of(rows: Codes, names: Sequence[str]) -> Codes:
        return np.array(
            [
                nodes[row] if row >= 0 else features.rows + strangers.setdefault(name, len(strangers))
                for row, name in zip(rows.tolist(), names, strict=True)
            ],
            np.int64,
        )

    return row_a, row_b, nodes_of(row_a, names_a), nodes_of(row_b, names_b)


def keeps(overlap: str, refusal: NcmError, without: str, reporter: Reporter) -> bool:
    """Whether ``--overlap`` keeps what ``refusal`` names; ``error`` raises it, other values report it."""
    if overlap == "error":
        raise refusal
    kept = overlap == "keep"
    reporter.warn(f"{refusal.what}; {'they are kept, as --overlap keep says' if kept else without}")
    return kept


def member_rows(features: FeatureRows, pairs: Pairs, which: Mask) -> Mask:
    """(N,) the rows that are members of usable pairs in a mask (k,); of several copies only the first."""
    chosen = pairs.usable & which
    members = np.concatenate([pairs.node_a[chosen], pairs.node_b[chosen]])
    mask = np.zeros(features.rows, dtype=bool)
    mask[members[members < features.rows]] = True
    return mask
