"""Training rows that resemble rows of a page: the most similar ones, and nearly equal ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ncm_cli.blocks import Codes, Features, joined
from ncm_cli.probes.evaluate import Answers
from ncm_cli.probes.options import EXCLUDE_NEAR
from ncm_cli.results.pictures import Thumbnails, Tile
from ncm_cli.solvers.neighbours import most_similar, near_copies, normalized_rows
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import seen_rows
from ncm_cli.store.roles import read_target

MOST_SIMILAR = 3
"""Training rows beside a picture."""

SIMILAR_SIDE, SIMILAR_BUDGET = 64, 400_000
"""Pixels along their pictures, and bytes of all of them."""

MAX_NEAR = 24
"""Rows of a page that are shown beside the training row they nearly equal, the most similar first."""

Similar = tuple[Tile, str, float]
"""A training row's picture, its class, and its cosine."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingRows:
    """The rows that a probe was trained on, each with the code of its class (−1 without classes)."""

    store: FeatureStore
    rows: Codes
    classes: Codes

    @classmethod
    def of(cls, answers: Answers, store: FeatureStore, trained_on: FeatureStore) -> TrainingRows | None:
        """The training rows of the answers' probe, without the answered rows; None if there are none."""
        probe = answers.probe
        rows = np.flatnonzero(seen_rows(probe, "train", trained_on.ids))
        if trained_on.content_sha256 == store.content_sha256:
            rows = np.setdiff1d(rows, answers.rows)
        classes = np.full(len(rows), -1)
        if probe.classes and trained_on.own_column(probe.target) is not None:
            classes = np.asarray(read_target(trained_on, probe.target, probe.classes).y[rows], np.int64)
        return cls(trained_on, rows, classes) if len(rows) else None

    def with_rows(self, store: FeatureStore, rows: Codes) -> Features:
        """These rows and then those of a store, scaled to unit length."""
        return normalized_rows(joined(self.store.rows_of(self.rows), store.rows_of(rows)), "cosine")

    def similar_to(
        self, answers: Answers, store: FeatureStore, positions: Codes
    ) -> dict[int, Sequence[Similar]]:
        """The most similar training rows of answered rows, by the position of the answer."""
        pictures, names = Thumbnails(side=SIMILAR_SIDE, budget=SIMILAR_BUDGET), answers.probe.classes
        n_train, trained = len(self.rows), np.arange(len(self.rows))
        queries = n_train + np.arange(len(positions))
        neighbours, cosines = most_similar(
            self.with_rows(store, answers.rows[positions]), queries, trained, MOST_SIMILAR
        )
        return {
            position: [
                (
                    pictures.row(self.store, self.store.ids[self.rows[place]]),
                    names[self.classes[place]] if self.classes[place] >= 0 else "",
                    cosine,
                )
                for place, cosine in zip(places.tolist(), of_row.tolist(), strict=True)
            ]
            for position, places, of_row in zip(positions.tolist(), neighbours, cosines, strict=True)
        }

    def near(self, answers: Answers, store: FeatureStore, pictures: Thumbnails) -> dict[str, Any] | None:
        """Answered rows beside the training row that they nearly equal; None if there are none."""
        n_train, n = len(self.rows), len(answers.rows)
        truth = np.asarray(answers.truth, np.int64) if answers.probe.classes else np.full(n, -1)
        copies = near_copies(
            self.with_rows(store, answers.rows),
            n_train + np.arange(n),
            np.arange(n_train),
            np.concatenate([self.classes, truth]),
        )
        if not len(copies.queries):
            return None
        lead = (
            f"{len(copies.queries):,} of {copies.compared:,} rows nearly equal a training row: the cosine of "
        )
        lead += f"their features is {copies.bound} or more. "
        lead += f"A random {copies.compared:,} of {n:,} rows were compared. " if copies.compared < n else ""
        lead += "If they show the same thing, the numbers on this page are better than they should be: "
        lead += f"--overlap {EXCLUDE_NEAR} of ncm fit leaves such training rows out."
        shown = [
            (
                pictures.row(store, store.ids[answers.rows[query - n_train]]),
                pictures.row(self.store, self.store.ids[self.rows[candidate]]),
                cosine,
            )
            for query, candidate, cosine in zip(
                copies.queries[:MAX_NEAR].tolist(),
                copies.candidates[:MAX_NEAR].tolist(),
                copies.cosines[:MAX_NEAR].tolist(),
                strict=True,
            )
        ]
        omitted = len(copies.queries) - len(shown)
        return {"lead": lead, "pairs": shown, "more": omitted}
