"""Pairs of a row and its augmented view: what they hold against is said, and domains guard the choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncm_cli.pairs.options import PairsOptions
from ncm_cli.pairs.pairs import pairs
from ncm_cli.probes.cells import comparison_pairs
from ncm_cli.probes.choose import crossfit, untrained_rows
from ncm_cli.probes.fit import fit
from ncm_cli.probes.metrics import PairRows
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.reading import read_problem
from ncm_cli.progress import SILENT
from ncm_cli.solvers.solve import train_path
from tests.world import Heard

ROWS = 500


@dataclasses.dataclass
class Views:
    """Rows whose place (axis 1) tells the label too well, and views of them moved along some axis."""

    folder: Path
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    heard: Heard = dataclasses.field(default_factory=Heard)

    def fit(self, **options: Any) -> None:
        given: dict[str, Any] = {"rank": "0,1", "weight_decay": "1e-2"} | options
        made = FitOptions(
            features=self.folder / "a.h5", pairs=self.folder / "p.h5", output=self.folder / "p", **given
        )
        self.heard = Heard()
        self.report = fit(made, reporter=self.heard)

    @property
    def doubts(self) -> list[str]:
        return [text for text in self.heard.warnings if "across domains doesn't fall" in text]


@pytest.fixture
def views(on_disk: Any) -> Callable[..., Views]:
    def make(
        axis: int, augment: str | None, *, columns: tuple[str, ...] = ("place",), seed: int = 0
    ) -> Views:
        rng = np.random.default_rng(seed)
        y = rng.integers(2, size=ROWS)
        place = np.where(rng.random(ROWS) < 0.85, y, 1 - y)
        X = rng.normal(size=(ROWS, 6))
        X[:, 0] += 1.2 * (2 * y - 1)
        X[:, 1] += 3 * (2 * place - 1)
        X[:, 2] += 0.8 * (2 * y - 1)
        moved = X.copy()
        moved[:, axis] *= -1
        texts = {
            "label": [("cat", "dog")[code] for code in y],
            "split": ["train"] * 350 + ["val"] * 150,
            "place": [("land", "water")[code] for code in place],
            "part": ["a"] * ROWS,
        }
        kept = {name: own for name, own in texts.items() if name in ("label", "split", "part", *columns)}
        encoder = {"kind": "array", "model": "planted", "precision": "fp32", "normalize": False}
        view = encoder | ({"view": {"augment": augment, "seed": 0}} if augment else {})
        first = on_disk.store("a.h5", X.astype(np.float32), kept, encoder=encoder)
        second = on_disk.store("b.h5", moved.astype(np.float32), kept, encoder=view)
        options = {"match": "same-id", "where": "split=train", "count": 120}
        output = on_disk.folder / "p.h5"
        output.unlink(missing_ok=True)
        pairs(PairsOptions(features=first, features_b=second, output=output, **options), reporter=Heard())
        return Views(on_disk.folder)

    return make


def test_the_headline_names_the_augmentation(views: Any) -> None:
    made = views(1, "blur:0.05")
    made.fit()
    verdict = made.report["verdict"]
    assert verdict["code"] == "helps", verdict["text"]
    assert verdict["text"].startswith("The pairs help against blur:0.05: ")
    assert "a row and its blur:0.05 view" in verdict["about"]
    assert verdict["erm_across_flip_rate"]["value"] > 0.1 + verdict["across_flip_rate"]["value"]
    assert not made.doubts
    twice = views(1, None)
    twice.fit()
    assert twice.report["verdict"]["text"].startswith("The pairs help: "), "one thing measured twice"


def test_a_warning_where_flips_across_domains_do_not_fall(views: Any) -> None:
    """The view changes what is no domain: removing it lowers the pairs' flips and nothing else."""
    made = views(2, "gray")
    made.fit(method="ncm", rank="1", weight_decay="1e-2")
    verdict = made.report["verdict"]
    assert verdict["flip_rate"]["value"] < verdict["erm_flip_rate"]["value"]
    assert verdict["across_flip_rate"]["value"] >= verdict["erm_across_flip_rate"]["value"]
    (said,) = made.doubts
    assert "gray may not represent the shift between domains" in said


@pytest.mark.parametrize("axis", [1, 2])
def test_the_guarded_bound_takes_the_larger_of_the_two_flip_rates(views: Any, axis: int) -> None:
    made = views(axis, "gray")
    made.fit(rank="0:1", weight_decay="1e-3,1e-1")
    path = made.report["path"]
    for one in path:
        worse = max(one["flip_rate"], one["across_flip_rate"])
        assert one["guarded_bound"] == pytest.approx(1 - one["val_accuracy"] + worse, abs=1e-12)
        assert one["bound_01"] == pytest.approx(1 - one["val_accuracy"] + one["flip_rate"], abs=1e-12)
    assert made.report["verdict"]["score"] == "guarded_bound"
    if made.report["verdict"]["code"] in ("helps", "undecided"):
        least = min(one["guarded_bound"] for one in path)
        assert path[made.report["chosen"]]["guarded_bound"] == least
    assert {one["flip_rate"] > one["across_flip_rate"] for one in path} >= {False}


def test_without_domains_there_is_nothing_to_guard_with(views: Any) -> None:
    made = views(1, "gray", columns=())
    made.fit()
    assert "guarded_bound" not in made.report["path"][0]
    assert made.report["verdict"]["across_flip_rate"] is None
    assert not made.doubts


def test_flips_across_domains_are_of_untrained_rows(views: Any) -> None:
    """One fold: its untrained rows are not in training, and their random pairs are what is counted."""
    made = views(2, "gray")
    options = FitOptions(
        features=made.folder / "a.h5", pairs=made.folder / "p.h5", output=made.folder / "p", rank="0,1"
    )
    problem = read_problem(options, oracle=False, reporter=SILENT)
    assert problem.cells == () and problem.members is not None and problem.pairs is not None
    assert len(problem.members.ids) == 120
    folds = problem.pairs.folds(2, 0)
    setting: dict[str, Any] = {"ranks": [0, 1], "decays": [1e-2]}
    flips: list[np.ndarray] = []
    for fold in folds:
        part = problem.without(fold)
        rows, random = untrained_rows(problem, fold, part)
        assert rows is None and isinstance(random, PairRows)
        fits = train_path(part, options.fold_solving, **setting)
        told = [[(x @ one.weight[0] + one.bias[0] > 0) for x in (random.a, random.b)] for one in fits]
        flips.append(np.array([a != b for a, b in told]))
        trained = {row.tobytes() for row in np.asarray(part.X)}
        assert not trained & {row.tobytes() for x in (random.a, random.b) for row in np.asarray(x, float)}
    found = crossfit(problem, folds, **setting)
    rates = np.concatenate(flips, axis=1).mean(axis=1)
    assert [one["across_flip_rate"] for one in found.candidates] == pytest.approx(rates, abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=60),
    across=st.booleans(),
    seed=st.integers(0, 5),
)
def test_comparison_pairs_are_of_one_label_and_of_one_domain_or_two(
    rows: list[tuple[int, int]], across: bool, seed: int
) -> None:
    label, domain = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    a, b = comparison_pairs(label, domain, across=across, seed=seed)
    assert (label[a] == label[b]).all()
    assert ((domain[a] != domain[b]) == across).all()
    every = np.concatenate([a, b])
    assert len(np.unique(every)) == len(every), "a row is in one pair at most"
    for code in np.unique(label):
        counts = np.bincount(domain[label == code], minlength=4)
        total = counts.sum()
        most = min(total // 2, total - counts.max()) if across else (counts // 2).sum()
        assert (label[a] == code).sum() <= most
        if not across or counts.max() <= total // 2:
            assert (label[a] == code).sum() == most, "and as many pairs as there can be"
