"""Pairs that were matched by label: scored with all cells weighted equally; group weights, pairs' rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtri
from sklearn.linear_model import LogisticRegression

from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import check
from ncm_cli.pairs.options import PairsOptions
from ncm_cli.pairs.pairs import pairs
from ncm_cli.probes import choose
from ncm_cli.probes.choose import crossfit
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.probes.problem import Problem, RawRows, Variant
from ncm_cli.probes.reading import read_problem, reread_problem
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.solvers.solve import train_path
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import read_probe
from ncm_cli.theory.bound import bound
from ncm_cli.theory.options import BoundOptions
from tests.world import Heard

SPLITS = ("train", "val", "test", "pool")
AGREE = {"train": 0.9, "val": 0.9, "test": 0.1, "pool": 0.5}
"""How often the place tells the label."""

EVERY = [Variant(*both) for both in itertools.product((False, True), repeat=2)]
EACH_VARIANT = pytest.mark.parametrize(
    "variant",
    [EVERY[3], *(pytest.param(variant, marks=pytest.mark.slow) for variant in EVERY[:3])],
    ids=["weights and rows", "plain", "rows", "weights"],
)


@dataclasses.dataclass
class Places:
    """Cats and dogs on land and water: axis 0 tells the label, and axis 1 more clearly the place."""

    folder: Path
    write: Callable[..., Path]
    X: np.ndarray
    columns: dict[str, list[str]]
    ids: tuple[str, ...] | None = None
    heard: Heard = dataclasses.field(default_factory=Heard)

    @property
    def features(self) -> Path:
        """``f.h5``, written anew."""
        path = self.folder / "f.h5"
        path.unlink(missing_ok=True)
        return self.write("f.h5", self.X, self.columns, ids=self.ids)

    def pairs(self, count: int | None, *, table: Iterable[tuple[int, int]] = (), **options: Any) -> PairStore:
        """``p.h5``: random pairs of a label across places, or of a table of rows."""
        features, path, heard = self.features, self.folder / "p.h5", Heard()
        path.unlink(missing_ok=True)
        how: dict[str, Any] = {"match": "random", "same": "label", "across": "place", "count": count}
        if table:
            source = self.folder / "p.csv"
            source.write_text("id_a,id_b\n" + "".join(f"r{a},r{b}\n" for a, b in table))
            how = {"source": source}
        pairs(check(PairsOptions(features=features, output=path, **how | options)), reporter=heard)
        return read_pairs(path)

    def options(self, **options: Any) -> FitOptions:
        given = {"features": self.folder / "f.h5", "pairs": self.folder / "p.h5"} | options
        return check(FitOptions(output=self.folder / "probe", **given))

    def problem(self, **options: Any) -> Problem:
        return read_problem(self.options(**options), oracle=False, reporter=SILENT)

    def fit(self, **options: Any) -> dict[str, Any]:
        self.heard = Heard()
        return fit(self.options(**options), reporter=self.heard)

    def worst(self, name: str = "probe") -> float:
        """Accuracy of the worst label × place group of the test rows."""
        where = {"where": "split=test", "groups": "label,place"}
        report = evaluate(EvalOptions(probe=self.folder / name, features=self.folder / "f.h5", **where))
        return float(report["worst_group"]["accuracy"])


@pytest.fixture
def places(on_disk: Any) -> Callable[..., Places]:
    """Makes them: sizes of the parts, dimensions, and the least error that a probe can have."""

    def make(
        *sizes: int, dim: int = 8, error: float = 0.1, seed: int = 0, agree: dict[str, float] = AGREE
    ) -> Places:
        rng = np.random.default_rng(seed)
        split = np.repeat(np.arange(len(sizes)), sizes)
        n = len(split)
        y = rng.integers(2, size=n)
        told = rng.random(n) < np.array([agree[SPLITS[part]] for part in split])
        place = np.where(told, y, 1 - y)
        X = rng.normal(size=(n, dim))
        X[:, 0] -= ndtri(error) * (2 * y - 1)
        X[:, 1] += 2 * (2 * place - 1)
        columns = {
            "label": [("cat", "dog")[code] for code in y],
            "place": [("land", "water")[code] for code in place],
            "split": [SPLITS[part] for part in split],
        }
        return Places(on_disk.folder, on_disk.store, X.astype(np.float32), columns)

    return make


@pytest.mark.slow
def test_hard_labels_do_not_end_in_a_constant(places: Any) -> None:
    """A quarter of the rows is told wrong even without the place: flips of such pairs prefer a constant."""
    made = places(2400, 400, 1000, dim=16, error=0.25)
    made.pairs(200)
    report = made.fit(rank="0:12", weight_decay="1e-3,1e-1")
    assert report["verdict"]["code"] == "helps", report["verdict"]["text"]
    assert report["verdict"]["score"] == "cell_error"
    assert report["rank"] > 0
    own, fixed = made.worst(), []
    for rank in (1, 2, 4, 8):
        made.fit(rank=str(rank), weight_decay="1e-1", method="ncm", select="in-domain")
        fixed.append(made.worst())
    assert own >= max(fixed) - 0.05
    made.fit(pairs=None, weight_decay="1e-1")
    assert own >= made.worst() + 0.2, "and what ERM does is far from it"
    made.pairs(200, kind="counterfactual")
    flips = made.fit(weight_decay="1e-3,1e-1", rank="0:16")
    assert flips["verdict"]["score"] == "bound_01"
    least = min(flips["path"], key=lambda one: one["bound_01"])
    assert least["rank"] == 16, "all directions removed: always one answer"
    assert flips["verdict"]["code"] == "constant", "so the same pairs are judged by their flips"
    assert flips["rank"] == 0, "and even then none is written"


def untrained_members(problem: Problem, fold: Any) -> RawRows:
    """Members that a fold isn't trained on, found row by row from the pairs' ids."""
    assert problem.pairs is not None and problem.members is not None
    store = problem.pairs.stores[0]
    ids = {id for own in (store.id_a, store.id_b) for id in np.array(own, object)[fold.measured]}
    mask = np.array([id in ids for id in problem.members.ids])
    return problem.members.take(mask)


def cell_reference(problem: Problem, folds: Any, variant: Variant, rank: int, decay: float) -> dict[str, Any]:
    """What the definition says, by loops, scikit-learn and numpy's SVD."""
    assert problem.pairs is not None and problem.val is not None and problem.extra is not None
    store = problem.pairs.stores[0]
    delta = store.features_a.astype(float) - store.features_b
    sources = [problem.train, problem.extra] if variant.pair_rows else [problem.train]
    X = np.concatenate([np.asarray(rows.X, float) for rows in sources])
    y = np.concatenate([rows.y for rows in sources])
    cell = np.concatenate([rows.codes["cell"] for rows in sources])
    ids = np.concatenate([np.array(list(rows.ids), object) for rows in sources])
    val, val_cell = np.asarray(problem.val.X, float), problem.val.codes["cell"]
    by_val, wrong, cells, flips = [], [], [], []
    for fold in folds:
        untrained = untrained_members(problem, fold)
        left = ~np.isin(ids, np.array(list(untrained.ids), object))
        Q = np.linalg.svd(delta[fold.basis].T, full_matrices=False)[0][:, :rank]
        project = np.eye(X.shape[1]) - Q @ Q.T
        weights = None
        if variant.upweighted:
            weights = 1 / np.bincount(cell[left])[cell[left]]
            weights *= left.sum() / weights.sum()
        model = LogisticRegression(C=1 / (left.sum() * decay), tol=1e-12, max_iter=20_000)
        model.fit(X[left] @ project, y[left], sample_weight=weights)
        by_val.append(model.predict(val @ project) != problem.val.y)
        wrong.append(model.predict(np.asarray(untrained.X, float) @ project) != untrained.y)
        cells.append(untrained.codes["cell"])
        told = [model.predict(x[fold.measured] @ project) for x in (store.features_a, store.features_b)]
        flips.append(told[0] != told[1])
    error = np.concatenate([*wrong, np.mean(by_val, axis=0)])
    every = np.concatenate([*cells, val_cell])
    means = [error[every == code].mean() for code in np.unique(every)]
    return {
        "cell_error": np.mean(means),
        "worst_cell_error": np.max(means),
        "flip_rate": np.concatenate(flips).mean(),
        "val_accuracy": 1 - np.mean(by_val),
    }


@EACH_VARIANT
def test_the_cell_error_is_what_its_definition_says(places: Any, variant: Variant) -> None:
    made = places(300, 80, 1, 60, error=0.2)
    made.pairs(48, where="split=train|pool")
    problem = made.problem(tolerance=1e-10)
    assert problem.cells == ("label", "place")
    assert list(problem.variants) == EVERY
    folds = problem.pairs.folds(4, 0)
    setting = {"ranks": (0, 2), "decays": (1e-2, 1e-1)}
    found = crossfit(problem, folds, variants=[variant], **setting)
    assert found.cell is not None
    assert len(found.cell) == 2 * 48 + 80, "every member once, and every validation row"
    for index, one in enumerate(found.candidates):
        expected = cell_reference(problem, folds, variant, one["rank"], one["weight_decay"])
        for name, value in expected.items():
            assert one[name] == pytest.approx(value, abs=1e-12), (one["rank"], name)
        own = found.cell_error(index)
        assert own.value == pytest.approx(expected["cell_error"], abs=1e-12)
        assert own.low < own.value < own.high
    assert len({round(one["cell_error"], 9) for one in found.candidates}) > 1


def test_the_interval_of_the_cell_error_covers() -> None:
    """Simulated errors of cells of unequal size and unequal difficulty."""
    from ncm_cli.probes.crossfit import CrossFit

    rng = np.random.default_rng(0)
    draws, sizes, rates = 2000, (60, 12, 9, 40), np.array([0.05, 0.4, 0.3, 0.1])
    cell = np.repeat(np.arange(4), sizes)
    wrong = (rng.random((draws, len(cell))) < rates[cell]).astype(float)
    scores = np.stack([wrong[:, cell == code].mean(axis=1) for code in range(4)]).mean(axis=0)
    found = CrossFit(
        candidates=tuple({"rank": 0, "weight_decay": 1.0, "cell_error": score} for score in scores),
        errors=wrong[:, :1],
        changes=np.zeros((draws, 1)),
        unit=np.arange(1),
        regression=False,
        cell_row_errors=wrong,
        cell=cell,
    )
    intervals = [found.cell_error(index) for index in range(draws)]
    assert np.mean([one.low <= rates.mean() <= one.high for one in intervals]) >= 0.93
    assert np.mean([one.high - one.low for one in intervals]) < 0.25, "and they aren't trivial"


def with_copies(made: Places) -> Places:
    """The same rows with every row outside validation and test a second time, under another id."""
    split = np.array(made.columns["split"])
    again = np.flatnonzero((split == "train") | (split == "pool"))
    return dataclasses.replace(
        made,
        X=np.concatenate([made.X, made.X[again]]),
        columns={name: [*own, *(own[row] for row in again)] for name, own in made.columns.items()},
        ids=tuple(f"r{row}" for row in range(len(made.X))) + tuple(f"copy{row}" for row in again),
    )


def test_held_out_members_and_their_copies_leave_training_in_every_variant(places: Any) -> None:
    made = with_copies(places(120, 60, 1, 60))
    made.pairs(20, where="split=train|pool", seed=1)
    problem = made.problem()
    assert list(problem.variants) == EVERY
    assert problem.pairs is not None and problem.extra is not None
    store = problem.pairs.stores[0]
    seen = dict.fromkeys(EVERY, 0)
    for fold, variant in itertools.product(problem.pairs.folds(5, 0), EVERY):
        members = np.concatenate([store.features_a[fold.measured], store.features_b[fold.measured]])
        trained = {row.tobytes() for row in np.asarray(problem.without(fold, variant).X, np.float32)}
        whole = {row.tobytes() for row in np.asarray(problem.whole(variant).X, np.float32)}
        held_out = {row.tobytes() for row in members}
        assert not trained & held_out
        seen[variant] += len(whole & held_out)
    assert seen[Variant()] > 5, "they are training rows where no fold holds them out"
    assert seen[Variant(pair_rows=True)] > seen[Variant()], "more so with the pairs' rows"


def test_copies_are_told_by_equal_features(places: Any) -> None:
    """With each training row present twice, a probe that interpolates would flip none of its own rows."""
    made = with_copies(places(60, 60, 1, dim=64, error=0.3))
    split = np.array(made.columns["split"])
    members = [(a, b) for a, b in zip(range(20), range(20, 40), strict=True)]
    made.pairs(None, table=members, kind="counterfactual")
    path = made.fit(rank="0,4", weight_decay="1e-4")["path"]
    assert min(one["flip_rate"] for one in path) > 0.2, "its members' copies are not trained on"
    # Validation rows that are training rows of other ids.
    first = np.flatnonzero(split == "val")[:60]
    made.X[first] = made.X[:60]
    for name in ("label", "place"):
        made.columns[name][first[0] : first[-1] + 1] = made.columns[name][:60]
    made.X[first[:20]] = np.random.default_rng(1).normal(size=(20, 64))
    made.features  # noqa: B018 - written anew
    report = made.fit(pairs=None, rank="0", weight_decay="1e-4,1e-3")
    assert report["train_rows"] == 2 * 20, "the others are validation rows, twice each"
    assert report["path"][0]["val_accuracy"] < 0.9
    assert any("training rows have the features of validation or test rows" in w for w in made.heard.warnings)
    kept = made.fit(pairs=None, rank="0", weight_decay="1e-4,1e-3", overlap="keep")
    assert kept["path"][0]["val_accuracy"] > report["path"][0]["val_accuracy"] + 0.1, "that is what it hid"


def cells_of(problem: Problem, rows: RawRows) -> np.ndarray:
    """Which label × place each row is in, from the store's columns."""
    return np.unique(np.stack([rows.y, rows.codes["domain"]]), axis=1, return_inverse=True)[1].ravel()


@pytest.mark.parametrize("pair_rows", [False, True])
def test_weights_are_inverse_cell_frequencies(places: Any, pair_rows: bool) -> None:
    made = places(300, 60, 1, 60)
    made.pairs(20, where="split=train|pool")
    problem = made.problem()
    plain = problem.whole(Variant(False, pair_rows))
    assert plain.weights is None
    variant = Variant(True, pair_rows)
    part, cell = problem.whole(variant), cells_of(problem, problem.rows(variant))
    assert part.weights is not None
    assert len(part.weights) == len(part.X) == (300 + len(problem.extra.ids) if pair_rows else 300)
    counts = np.bincount(cell)
    assert len(counts) == 4 and counts.max() > 3 * counts.min()
    expected = 1 / counts[cell]
    assert part.weights / part.weights.mean() == pytest.approx(expected / expected.mean(), rel=1e-12)


def test_what_competes_is_what_the_options_leave_open(places: Any) -> None:
    made = places(200, 60, 1, 60)
    made.pairs(40, where="split=train|pool")
    quick = {"rank": "0,1", "weight_decay": "1e-2"}

    def variants(**options: Any) -> list[Variant]:
        return list(made.problem(**quick | options).variants)

    assert variants() == EVERY
    assert variants(upweight="none") == [Variant(False, False), Variant(False, True)]
    assert variants(upweight="label,place") == [Variant(True, False), Variant(True, True)]
    assert variants(pair_rows="no") == [Variant(False, False), Variant(True, False)]
    assert variants(pair_rows="yes") == [Variant(False, True), Variant(True, True)]
    assert variants(pair_rows="yes", upweight="none") == [Variant(False, True)]
    assert variants(method="ncm", upweight="auto") == [Variant(False, False), Variant(True, False)]
    assert variants(method="ncm", pair_rows="auto", upweight="auto") == EVERY
    assert variants(method="ncm") == variants(method="erm", rank="0") == [Variant()]
    assert variants(rank="1") == [Variant()], "one setting leaves no choice"
    every = made.fit(**quick)
    assert [Variant(one["upweighted"], one["pair_rows"]) for one in every["path"]] == [
        variant for variant in EVERY for _ in range(2)
    ]
    paper = made.fit(**quick, method="ncm")
    assert not {"upweighted", "pair_rows"} & set(paper["path"][0]), "the paper's method is what it says"
    assert (paper["upweight"], paper["pair_rows"], paper["train_rows"]) == (None, False, 200)


def test_what_can_not_be_tried_is_refused(places: Any) -> None:
    made = places(200, 60, 1, 60)
    made.pairs(20)
    with pytest.raises(InputError, match="the pairs have no labelled rows outside training"):
        made.fit(pair_rows="yes")
    made.pairs(20, kind="counterfactual")
    with pytest.raises(InputError, match="nothing says which cells to weight equally"):
        made.fit(upweight="auto")
    with pytest.raises(UsageError, match="--pair-rows yes needs pairs"):
        made.fit(pairs=None, pair_rows="yes")
    with pytest.raises(UsageError, match="--upweight auto needs pairs"):
        made.fit(pairs=None, upweight="auto")


@EACH_VARIANT
def test_bound_refits_the_variant_that_was_chosen(
    places: Any, monkeypatch: pytest.MonkeyPatch, variant: Variant
) -> None:
    made = places(200, 60, 60, 60)
    made.pairs(40, where="split=train|pool")
    # Whatever competes, this one is chosen.
    choose_probe = choose.choose_probe

    def choose_variant(problem: Problem, reporter: Reporter) -> Any:
        found = choose_probe(problem, reporter)
        pick = next(
            one
            for one in found.candidates
            if one["rank"] == 1 and Variant(one["upweighted"], one["pair_rows"]) == variant
        )
        return choose.chosen_instead(problem, found, pick)

    monkeypatch.setattr("ncm_cli.probes.fit.choose_probe", choose_variant)
    monkeypatch.setattr("ncm_cli.probes.controls.verdict_code", lambda *_: ("helps", ""))
    report = made.fit(rank="0,1,2", weight_decay="1e-2")
    assert (report["upweight"], report["pair_rows"]) == ("label,place" if variant[0] else None, variant[1])
    probe = read_probe(made.folder / "probe")
    assert probe.meta["hyper_parameters"]["pair_rows"] == variant.pair_rows
    assert probe.meta["options"]["upweight"] == report["upweight"]
    features, pairs_at = made.folder / "f.h5", made.folder / "p.h5"
    again = reread_problem(probe, features, pairs_at, reporter=SILENT)
    assert again.variants == (variant,)
    setting = {"ranks": [1], "decays": [1e-2]}
    (refit,) = train_path(again.whole(), again.options.solving, **setting)
    assert np.allclose(refit.weight, probe.weight, rtol=0, atol=1e-10)
    made_pairs = read_pairs(pairs_at)
    assert made_pairs.strategy == "random"
    split = np.array(made.columns["split"])
    label = np.array(made.columns["label"])
    rows = [
        (row, int(np.flatnonzero((split == "train") & (label == label[row]))[row % 7]))
        for row in np.flatnonzero(split == "test")
    ]
    source = made.folder / "o.csv"
    source.write_text("id_a,id_b\n" + "".join(f"r{a},r{b}\n" for a, b in rows))
    oracle = PairsOptions(
        source=source, features=features, output=made.folder / "oracle.h5", straddling="keep"
    )
    pairs(oracle)
    found = bound(
        BoundOptions(
            probe=made.folder / "probe",
            features=features,
            oracle_pairs=made.folder / "oracle.h5",
            pairs=pairs_at,
            ranks="0:2",
            bootstrap=0,
        )
    )
    for key in ("theta_m_theta", "test_risk", "bound"):
        assert found["path"][1][key] == pytest.approx(found[key], rel=1e-6), key
        assert found["path"][0][key] != pytest.approx(found[key], rel=1e-6), key


def members_across(made: Places, count: int, same: str = "label") -> list[tuple[int, int]]:
    """Pairs of training rows of one value of a column and different places."""
    split, place, kind = (np.array(made.columns[name]) for name in ("split", "place", same))
    found = []
    for value in np.unique(kind):
        own = [
            np.flatnonzero((split == "train") & (kind == value) & (place == side))
            for side in ("land", "water")
        ]
        found += list(zip(*(rows[:count].tolist() for rows in own), strict=False))
    return found


def test_tables_are_matched_or_counterfactual_as_their_members_say(places: Any) -> None:
    made = places(300, 60, 1, agree=AGREE | {"train": 0.6})
    across = members_across(made, 30)
    made.pairs(None, table=across)
    assert made.problem().cells == ("label", "place")
    made.pairs(None, table=across, kind="counterfactual")
    problem = made.problem()
    assert (problem.cells, problem.members) == ((), None)
    # Members of one label that no column tells apart.
    land = np.flatnonzero((np.array(made.columns["place"]) == "land")[:300])
    label = np.array(made.columns["label"])
    one = [rows for name in ("cat", "dog") for rows in land[label[land] == name][:40].reshape(-1, 2).tolist()]
    made.pairs(None, table=one)
    assert made.problem().cells == ()
    made.pairs(None, table=one, kind="matched")
    with pytest.raises(InputError, match="no column that tells their members apart"):
        made.problem()
    # Members of different labels as often as not.
    mixed = [(a, b) for (a, _), (_, b) in zip(across, across[::-1], strict=True)]
    made.pairs(None, table=mixed)
    assert made.problem().cells == ()


@pytest.mark.parametrize("match", ["random", pytest.param("iterative", marks=pytest.mark.slow)])
def test_matching_by_label_is_matched_unless_it_is_said_otherwise(places: Any, match: str) -> None:
    made = places(200, 60, 1)
    made.pairs(20, match=match)
    assert made.problem().cells == ("label", "place")
    made.pairs(20, match=match, kind="counterfactual")
    assert made.problem().cells == ()
    made.pairs(20, match=match, same="place", across="label")
    assert made.problem().cells == (), "matched by something else than the label"


def test_marks_that_can_not_be_are_refused(places: Any) -> None:
    made = places(60, 20, 1)
    more = {"same": None, "across": None, "features_b": made.features}
    with pytest.raises(UsageError, match="--kind matched is for different rows"):
        made.pairs(None, match="same-id", kind="matched", **more)


def test_a_class_without_a_pair_and_unequal_pairs_are_warned_of(places: Any) -> None:
    made = places(400, 60, 1)
    quick = {"rank": "0,1", "weight_decay": "1e-2"}
    made.pairs(20)
    made.fit(**quick)
    assert not [text for text in made.heard.warnings if "pair is of" in text or "unequal" in text]
    made.pairs(None, where="split=train & label=cat")
    made.fit(**quick)
    assert [text for text in made.heard.warnings if "no pair is of the class 'dog'" in text]
    cats, dogs = (
        [pair for pair in members_across(made, 30) if made.columns["label"][pair[0]] == name]
        for name in ("cat", "dog")
    )
    made.pairs(None, table=[*cats[:12], *dogs[:2]])
    made.fit(**quick)
    (said,) = [text for text in made.heard.warnings if "unequal over classes" in text]
    assert said == "the pairs are unequal over classes: 12 pairs of 'cat' and 2 of 'dog'"


def test_the_verdict_names_what_the_pairs_are_of(places: Any) -> None:
    made = places(400, 60, 1)
    made.pairs(30, where="split=train & place=land|water")
    said = made.fit(rank="0,1", weight_decay="1e-2")["verdict"]["about"]
    store = read_pairs(made.folder / "p.h5")
    for name in ("cat", "dog"):
        assert f"{name} ({store.label_a.count(name)})" in said
    assert "from rows with split=train & place=land|water" in said
    assert "random pairs across place with the same label" in said


def test_too_few_pairs_of_a_rare_cell_say_what_to_do(places: Any) -> None:
    made = places(150, 60, 1, agree=AGREE | {"train": 0.95})
    made.pairs(None)
    verdict = made.fit(rank="0,1", weight_decay="1e-2")["verdict"]
    assert verdict["code"] == "too-few"
    assert "the rarest label × place cell has" in verdict["text"]
    assert "rows outside training" in verdict["text"]


@pytest.mark.slow
def test_flips_within_cells_are_shown_beside_those_of_the_pairs(places: Any) -> None:
    made = places(600, 200, 1, error=0.3)
    made.pairs(40)
    verdict = made.fit(rank="0:2", weight_decay="1e-2")["verdict"]
    assert 0 < verdict["within_flip_rate"]["value"] < 1
    assert verdict["across_flip_rate"] is None
    assert "worst_cell_error" in verdict and verdict["worst_cell_error"] >= verdict["cell_error"]["value"]


def test_where_every_candidate_is_alike_the_smallest_rank_is_written(places: Any) -> None:
    """Labels that axis 0 tells without error, and places that say nothing about them."""
    made = places(300, 100, 1, agree=dict.fromkeys(SPLITS, 0.5))
    y = np.array([name == "dog" for name in made.columns["label"]])
    made.X[:, 0] = 50 * (2 * y - 1)
    made.pairs(50)
    report = made.fit(rank="0:3", weight_decay="1e-3,1e-2", upweight="none")
    assert {one["cell_error"] for one in report["path"]} == {0.0}
    assert report["rank"] == 0
    assert report["verdict"]["code"] in ("no-gain", "undecided")
