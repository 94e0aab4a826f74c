"""Finds training rows that nearly equal validation or test rows, since they may leak as copies do."""

from __future__ import annotations

import numpy as np

from ncm_cli.probes.options import EXCLUDE_NEAR
from ncm_cli.probes.problem import Roles
from ncm_cli.progress import Reporter
from ncm_cli.solvers.neighbours import near_copies, normalized_rows
from ncm_cli.store.roles import Target
from ncm_cli.store.rows import FeatureRows


def treat_near_copies(
    store: FeatureRows, roles: Roles, target: Target, overlap: str, reporter: Reporter
) -> None:
    """Warn of training rows that nearly equal a validation or test row; leave them out by ``--overlap``.

    Rows of equal content aren't counted here: they are found without features.
    """
    train, nodes = roles.rows["train"], store.content_nodes
    others = roles.val_or_test & ~np.isin(nodes, nodes[train])
    rows = np.concatenate([np.flatnonzero(train), np.flatnonzero(others)])
    if not (train.any() and others.any()):
        return
    positions, classes = np.arange(len(rows)), np.full(len(rows), -1)
    if target.classes:
        classes = np.asarray(target.y[rows], np.int64)
    candidates, queries = np.split(positions, [int(train.sum())])
    copies = near_copies(normalized_rows(store.rows_of(rows), "cosine"), queries, candidates, classes)
    if not len(copies.queries):
        return
    leaking = rows[copies.all_candidates]
    first, other = (store.ids[rows[at[0]]] for at in (copies.candidates, copies.queries))
    rows_are = "training row is" if len(leaking) == 1 else "training rows are"
    what = (
        f"{len(leaking):,} {rows_are} nearly equal to validation or test rows (cosine of {copies.bound} or "
        f"more), such as {first!r} to {other!r} ({copies.cosines[0]:.3f})"
    )
    if copies.compared < len(queries):
        what += f" (only {copies.compared:,} of {len(queries):,} validation and test rows were compared)"
    if overlap == EXCLUDE_NEAR:
        train[leaking] = False
        reporter.warn(f"{what}; they are left out of training")
    else:
        reporter.warn(f"{what}; if they show the same thing, --overlap {EXCLUDE_NEAR} leaves them out")
