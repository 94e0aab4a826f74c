"""Pairs of several stores in one fit: folds, flips and verdicts by store, guards, records."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ncm_cli
from ncm_cli.errors import InputError, MismatchError, UsageError
from ncm_cli.main import run
from ncm_cli.probes.choose import crossfit
from ncm_cli.probes.options import FitOptions
from ncm_cli.probes.reading import read_problem
from ncm_cli.probes.verdict import LEAST_UNITS
from ncm_cli.progress import SILENT
from ncm_cli.solvers.folds import deal
from ncm_cli.store.pairs import read_pairs
from tests.world import write_pair_store, write_store

ROWS = 700
COLOUR, POSITION = 1, 2


class Two:
    """Rows on whose first axes label, colour and position show; the latter two tell the label too well."""

    def __init__(self, folder: Path, *, idle: bool = False, colours: int = 80, positions: int = 80) -> None:
        self.folder, self.rng = folder, np.random.default_rng(3)
        n = ROWS
        self.label = self.rng.integers(2, size=n)
        told = [np.where(self.rng.random(n) < 0.9, self.label, 1 - self.label) for _ in range(2)]
        if idle:
            told[1] = self.rng.integers(2, size=n)
        self.told = np.stack([self.label, *told], axis=1)
        self.told[500:] = self.rng.integers(2, size=(200, 3))
        self.X = self.rng.normal(size=(n, 12))
        self.X[:, :3] += (2 * self.told - 1) * [1.2, 2.0, 2.0]
        words = (("cat", "dog"), ("red", "green"), ("left", "right"))
        texts = [[two[code] for code in codes] for two, codes in zip(words, self.told.T, strict=True)]
        self.columns = dict(zip(("label", "colour", "position"), texts, strict=True))
        self.columns["split"] = ["train"] * 350 + ["val"] * 150 + ["test"] * 200
        self.features = write_store(folder / "f.h5", self.X, self.columns)
        self.colour = self.twins("colour.h5", COLOUR, range(colours))
        self.position = self.twins("position.h5", POSITION, range(100, 100 + positions))

    def twins(self, name: str, axis: int, rows: range, held_out: int = 0) -> Path:
        """Pairs of rows and the same rows with one axis turned."""
        a = self.X[list(rows)]
        b = a + 0.1 * self.rng.normal(size=a.shape)
        b[:, axis] = -a[:, axis] + 0.3 * self.rng.normal(size=len(a))
        ids = ([f"r{row}" for row in rows], [f"{name}-{row}" for row in rows])
        labels = ([self.columns["label"][row] for row in rows],) * 2
        return write_pair_store(
            self.folder / name,
            a.astype(np.float32),
            b.astype(np.float32),
            ids=ids,
            labels=labels,
            held_out=held_out,
        )

    def matched(self, count: int = 40) -> Path:
        """Random pairs of one label in different positions."""
        path = self.folder / "matched.h5"
        made = {"match": "random", "same": "label", "across": "position", "count": count}
        ncm_cli.run("pairs", features=self.features, output=path, **made)
        return path

    def fit(self, *stores: Path, **options: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"rank": "0:4", "weight_decay": "1e-2,1e-1"} | options
        output = self.folder / "probe.safetensors"
        return ncm_cli.run("fit", features=self.features, pairs=list(stores), output=output, **given)

    def worst_group(self) -> float:
        found = ncm_cli.run(
            "eval",
            probe=self.folder / "probe.safetensors",
            features=self.features,
            where="split=test",
            groups="label,colour,position",
        )
        return float(found["worst_group"]["accuracy"])

    def problem(self, *stores: Path, **options: Any) -> Any:
        made = FitOptions(features=self.features, pairs=stores, output=self.folder / "p", **options)
        return read_problem(made, oracle=False, reporter=SILENT)


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def test_both_stores_remove_what_either_leaves(two: Two) -> None:
    worst = {}
    for name, stores in {
        "none": (),
        "colour": (two.colour,),
        "position": (two.position,),
        "both": (two.colour, two.position),
    }.items():
        report = two.fit(*stores, **({} if stores else {"rank": "0"}))
        worst[name] = two.worst_group()
    assert worst["both"] > max(worst["colour"], worst["position"]) + 0.1
    verdict = report["verdict"]
    assert (verdict["code"], verdict["score"]) == ("helps", "bound_01")
    first, second = verdict["stores"]
    assert first["path"].endswith("colour.h5")
    assert "he pairs of colour.h5 help: " in first["text"]
    assert (first["pairs"], second["pairs"]) == (80, 80)
    flips = [store["flip_rate"]["value"] for store in verdict["stores"]]
    assert verdict["flip_rate"]["value"] == pytest.approx(np.mean(flips)), "of as many pairs"
    assert verdict["bound"]["value"] == pytest.approx(verdict["val_error"]["value"] + sum(flips))
    assert "(colour.h5) or these pairs (position.h5) do" in verdict["about"]


def test_a_store_whose_shift_no_probe_uses_is_told_apart(tmp_path: Path) -> None:
    two = Two(tmp_path, idle=True)
    verdict = two.fit(two.colour, two.position)["verdict"]
    assert "The pairs of colour.h5 help: flip rate " in verdict["stores"][0]["text"]
    helps, idle = verdict["stores"]
    assert helps["code"] == "helps"
    assert idle["code"] in ("no-gain", "undecided")
    assert idle["erm_flip_rate"]["value"] < 0.1


def test_few_pairs_of_one_store_are_too_few_for_its_verdict(tmp_path: Path) -> None:
    two = Two(tmp_path, positions=LEAST_UNITS - 1)
    verdict = two.fit(two.colour, two.position)["verdict"]
    assert [store["code"] for store in verdict["stores"]] == ["helps", "too-few"]


@pytest.mark.parametrize("matched", [False, True], ids=["twins", "and matched"])
def test_scores_are_what_their_definition_says(two: Two, matched: bool) -> None:
    """By loops over folds with numpy's SVD: the pairs of all stores make one stack."""
    stores = (two.colour, two.matched()) if matched else (two.colour, two.position)
    problem = two.problem(*stores)
    assert problem.matched == (False, matched)
    assert bool(problem.cells) is matched
    folds = problem.pairs.folds(5, 0)
    estimates = crossfit(problem, folds, ranks=[0, 2], decays=[1e-2])
    a, b = (
        np.concatenate([getattr(read_pairs(path), name) for path in stores])
        for name in ("features_a", "features_b")
    )
    kind = np.repeat([0, 1], [read_pairs(path).pairs for path in stores])
    for rank, candidate in zip((0, 2), estimates.candidates, strict=True):
        flips: list[list[float]] = [[], []]
        for fold in folds:
            training = problem.without(fold)
            Q = np.linalg.svd((a - b)[fold.basis].T.astype(float), full_matrices=False)[0][:, :rank]
            assert np.allclose(Q @ Q.T, training.basis(rank) @ training.basis(rank).T, atol=1e-6)
            from ncm_cli.solvers.solve import train_path

            (fit,) = train_path(training, problem.options.fold_solving, ranks=[rank], decays=[1e-2])
            for one in (0, 1):
                here = fold.measured & (kind == one)
                told = [(members[here] @ fit.weight.T + fit.bias)[:, 0] > 0 for members in (a, b)]
                flips[one] += list(told[0] != told[1])
        rates = [float(np.mean(one)) for one in flips]
        assert [candidate["flip_rate_1"], candidate["flip_rate_2"]] == pytest.approx(rates)
        assert candidate["flip_rate"] == pytest.approx(np.mean(flips[0] + flips[1]))
        assert candidate["bound_01"] == pytest.approx(1 - candidate["val_accuracy"] + sum(rates))
        if matched:
            assert candidate["cell_bound"] == pytest.approx(candidate["cell_error"] + rates[0])
    assert estimates.score == ("cell_bound" if matched else "bound_01")
    for at, score in enumerate(("bound_01", "cell_error" if matched else "bound_01")):
        alone = estimates.of_store(at)
        assert alone.score == score
        assert alone.candidates[1]["flip_rate"] == estimates.candidates[1][f"flip_rate_{at + 1}"]
        gain = alone.gain(1, 0)
        assert gain.value == pytest.approx(alone.candidates[0][score] - alone.candidates[1][score])
        assert gain.low < gain.value < gain.high


def test_matched_pairs_alone_have_the_cells_of_one_store(two: Two) -> None:
    """Counterfactual pairs beside them add no row to the error in cells."""
    matched = two.matched()
    alone, both = two.problem(matched), two.problem(two.colour, matched)
    assert alone.cells == both.cells == ("label", "position")
    assert list(alone.members.ids) == list(both.members.ids)


@given(
    counts=st.lists(st.integers(10, 80), min_size=1, max_size=3),
    folds=st.integers(2, 6),
    seed=st.integers(0, 99),
    rows=st.integers(150, 400),
)
@settings(max_examples=40, deadline=None)
def test_each_fold_has_its_share_of_every_kind(counts: list[int], folds: int, seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    kind = np.repeat(np.arange(len(counts)), counts)
    a, b = rng.permutation(10 * rows)[: 2 * len(kind)].reshape(2, -1)
    share_row = rng.random(len(kind)) < 0.2
    b[share_row] = a[share_row]  # as of a row and its view
    made = deal(a, b, folds, seed, kind)
    for one, count in enumerate(counts):
        measured = [int(fold.measured[kind == one].sum()) for fold in made]
        assert sum(measured) == count
        assert max(measured) - min(measured) <= max(2, 0.2 * count)
    plain, same = deal(a, b, folds, seed), deal(a, b, folds, seed, np.zeros(len(kind), np.int64))
    for one, other in zip(plain, same, strict=True):
        assert np.array_equal(one.measured, other.measured)


def test_one_store_given_twice_is_refused(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    copy = two.folder / "copy.h5"
    shutil.copy(two.colour, copy)
    with pytest.raises(UsageError, match="one pair store is given twice") as refused:
        two.fit(two.colour, copy)
    assert "colour.h5" in str(refused.value) and "copy.h5" in str(refused.value)
    words = ["fit", "-f", two.features, "-p", two.colour, "-p", two.colour, "-o", two.folder / "x"]
    assert run([*map(str, words)]) == 2
    assert "one pair store is given twice" in capsys.readouterr().err
    recipe = two.folder / "r.yaml"
    pair = f"[{two.colour}, {two.colour}]"
    recipe.write_text(
        f"name: r\nsteps:\n- fit: {{features: {two.features}, pairs: {pair}, output: p.safetensors}}\n"
    )
    assert run(["run", str(recipe), "--dry-run"]) == 3
    assert "one pair store is given twice" in capsys.readouterr().err


def test_the_guards_hold_for_every_store(two: Two) -> None:
    leaking = two.twins("leaking.h5", POSITION, range(300, 420))
    report = two.fit(two.colour, leaking)
    assert report["pairs"] == 80 + 50, "of these rows, 350 to 419 are validation rows"
    with pytest.raises(
        InputError, match="70 pairs have a member among the validation or test rows"
    ) as refused:
        two.fit(two.colour, leaking, overlap="error")
    assert "leaking.h5" in str(refused.value)
    rows = two.X[:40].astype(np.float32)
    other = write_pair_store(
        two.folder / "other.h5", rows, -rows, encoder={"kind": "array", "model": "another"}
    )
    with pytest.raises(MismatchError, match="model"):
        two.fit(two.colour, other)


def test_held_out_pairs_are_wanted_of_all_stores_or_none(two: Two) -> None:
    held = two.twins("held.h5", POSITION, range(100, 180), held_out=30)
    with pytest.raises(InputError, match="held-out pairs in some pair stores, and none in others") as refused:
        two.fit(two.colour, held)
    assert "colour.h5" in str(refused.value)
    also = two.twins("also.h5", COLOUR, range(80), held_out=20)
    report = two.fit(also, held)
    assert (report["folds"], report["held_out"], report["verdict"]["pairs"]) == (1, 50, 50)
    single = two.fit(two.colour, held, rank="2", weight_decay="1e-2")
    assert single["verdict"]["code"] == "unmeasured"


def test_a_store_of_one_pair_cannot_be_cut(two: Two) -> None:
    one = two.twins("one.h5", POSITION, range(100, 101))
    with pytest.raises(InputError, match="too few pairs of one store") as refused:
        two.fit(two.colour, one)
    assert "one.h5" in str(refused.value)


def test_the_record_names_each_store(two: Two) -> None:
    two.fit(two.colour, two.position)
    meta = ncm_cli.load(two.folder / "probe.safetensors").meta
    assert meta["options"]["pairs"] == [str(two.colour), str(two.position)]
    data = meta["data"]["pairs"]
    assert (data["used"], data["held_out"]) == (160, 0)
    assert [(Path(one["path"]).name, one["used"], one["strategy"]) for one in data["stores"]] == [
        ("colour.h5", 80, "table"),
        ("position.h5", 80, "table"),
    ]
    assert "path" not in data
    assert len(meta["selection"]["verdict"]["stores"]) == 2
    two.fit(two.colour)
    meta = ncm_cli.load(two.folder / "probe.safetensors").meta
    assert meta["options"]["pairs"] == str(two.colour), "as it was before there could be several"
    assert {"path", "content_sha256", "strategy"} <= set(meta["data"]["pairs"])
    assert "stores" not in meta["data"]["pairs"] and "stores" not in meta["selection"]["verdict"]


def test_regression_adds_the_roots_of_changes(two: Two) -> None:
    columns = {"split": two.columns["split"], "age": two.X[:, 0] + two.X[:, 1] + 0.1 * two.X[:, 3]}
    two.features = write_store(two.folder / "age.h5", two.X, columns)
    report = two.fit(two.colour, two.position, target="age", task="regression")
    best = report["path"][report["chosen"]]
    roots = [best[name] ** 0.5 for name in ("val_mse", "pair_mse_1", "pair_mse_2")]
    assert best["bound_mse"] == pytest.approx(sum(roots) ** 2)
    codes = [store["code"] for store in report["verdict"]["stores"]]
    assert codes[0] == "helps" and codes[1] != "helps"


def test_the_command_line_shows_every_store(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    output = two.folder / "p.safetensors"
    words = ["fit", "-f", two.features, "-p", two.colour, "-p", two.matched(), "-o", output, "--rank", "0:4"]
    assert run([*map(str, words)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert {"flips", "colour", "matched", "bound"} <= set(shown.split())
    assert "he pairs of colour.h5 help" in shown and "he pairs of matched.h5" in shown
    assert run(["info", str(output)]) == 0
    assert "he pairs of colour.h5" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def fitted(two: Two) -> Two:
    """A probe of two stores, and pairs of test rows with either nuisance turned."""
    two.fit(two.colour, two.position, rank="3", weight_decay="1e-2")
    for name, axis in (("oracle-colour.h5", COLOUR), ("oracle-position.h5", POSITION)):
        two.twins(name, axis, range(500, 600))
    return two


def _bound(two: Two, *stores: Path, **options: Any) -> dict[str, Any]:
    oracle = [two.folder / "oracle-colour.h5", two.folder / "oracle-position.h5"]
    given = {"oracle_pairs": oracle, "pairs": list(stores), "bootstrap": 0} | options
    return ncm_cli.run("bound", probe=two.folder / "probe.safetensors", features=two.features, **given)


def test_bound_has_the_terms_of_all_stores_and_the_flips_of_each(fitted: Two) -> None:
    found = _bound(fitted, fitted.position, fitted.colour, ranks="0:3")
    assert found["path"][3]["bound"] == pytest.approx(found["bound"], rel=1e-6), "in any order, the same fit"
    assert (found["path"][3]["pairs"], found["estimates"]["oracle_pairs"]) == (160, 200)
    by_store = found["oracle_stores"]
    for name in ("flip_rate", "twin_error", "test_error"):
        assert found["zero_one"][name] == pytest.approx(np.mean([store[name] for store in by_store]))
    probe = ncm_cli.load(fitted.folder / "probe.safetensors")
    for store, path in zip(found["pair_stores"], (fitted.colour, fitted.position), strict=True):
        pairs = read_pairs(path)
        told = [
            (rows @ probe.weight.T + probe.bias)[:, 0] > 0 for rows in (pairs.features_a, pairs.features_b)
        ]
        assert (store["path"], store["pairs"]) == (str(path), 80)
        assert store["flip_rate"] == pytest.approx(np.mean(told[0] != told[1]))
    one = _bound(fitted, oracle_pairs=fitted.folder / "oracle-colour.h5")
    assert "oracle_stores" not in one and "pair_stores" not in one
    assert one["zero_one"]["flip_rate"] == by_store[0]["flip_rate"]


def test_bound_wants_all_stores_of_the_fit(fitted: Two) -> None:
    with pytest.raises(MismatchError, match="not the pairs that the probe was fitted with") as refused:
        _bound(fitted, fitted.colour, ranks="0:2")
    assert "position.h5" in str(refused.value)


def test_bound_takes_a_clean_store_for_each(fitted: Two) -> None:
    stores = (fitted.colour, fitted.position)
    clean = []
    for path, axis in zip(stores, (COLOUR, POSITION), strict=True):
        pairs = read_pairs(path)
        b = pairs.features_a.copy()
        b[:, axis] *= -1
        ids = (pairs.id_a, pairs.id_b)
        clean.append(write_pair_store(fitted.folder / f"clean-{path.name}", pairs.features_a, b, ids=ids))
    found = _bound(fitted, *stores, clean_pairs=clean)["noise_corollary"]
    deltas = [np.hstack([read_pairs(path).delta for path in paths]) for paths in (stores, clean)]
    noise = deltas[0] - deltas[1]
    assert found["epsilon_norm"] == pytest.approx(np.linalg.norm(noise, 2), rel=1e-5)
    with pytest.raises(UsageError, match="--clean-pairs isn't given once for each"):
        _bound(fitted, *stores, clean_pairs=clean[:1])


def test_the_first_pairs_are_of_all_stores(fitted: Two) -> None:
    pairs = fitted.problem(fitted.colour, fitted.position).pairs
    assert np.bincount(pairs.kind[pairs.first(20)]).tolist() == [10, 10]
    (alone,) = (fitted.problem(fitted.colour).pairs,)
    assert np.array_equal(np.flatnonzero(alone.first(7)), np.arange(7))


@pytest.mark.parametrize("matched", [False, True], ids=["twins", "and matched"])
def test_sweep_measures_every_store(two: Two, matched: bool) -> None:
    stores = [two.colour, two.matched() if matched else two.position]
    output = two.folder / "s.json"
    given = {"methods": "erm,ncm", "trials": 2, "seeds": 1, "epochs": 2, "device": "cpu"}
    report = ncm_cli.run("sweep", features=two.features, pairs=stores, output=output, **given)
    (pick,) = [row for row in report["rows"] if (row["method"], row["rule"]) == ("ncm", "bound")]
    known = pick["metrics"]
    flips = known["flip_rate_1"] + known["flip_rate_2"]
    assert known["bound_01"] >= flips
    if matched:
        assert known["cell_bound"] == pytest.approx(known["cell_error"] + known["flip_rate_1"])
    assert report["data"]["pairs"] == [str(path) for path in stores]


def test_recipes_take_a_list_and_patterns(two: Two) -> None:
    recipe = two.folder / "r.yaml"
    steps = "".join(
        f"- pairs: {{features: {two.features}, match: random, same: label, across: {name}, "
        f"output: m-{name}.h5}}\n"
        for name in ("colour", "position")
    )
    fit = f"features: {two.features}, rank: 2, weight_decay: 1e-2, output: p.safetensors"
    recipe.write_text(f"name: r\nsteps:\n{steps}- fit: {{pairs: [m-*.h5, {two.colour}], {fit}}}\n")
    out = two.folder / "out"
    assert run(["run", str(recipe), "--out", str(out)]) == 0
    named = ncm_cli.load(out / "p.safetensors").meta["options"]["pairs"]
    assert [Path(path).name for path in named] == ["m-colour.h5", "m-position.h5", "colour.h5"]
    assert run(["run", str(recipe), "--out", str(out)]) == 0, "and is up to date"


def test_the_page_and_report_name_every_store(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    two.fit(two.colour, two.position)
    probe, result, page = (two.folder / name for name in ("probe.safetensors", "e.json", "page.html"))
    ncm_cli.run("eval", probe=probe, features=two.features, where="split=test", output=result)
    assert run(["report", str(result), str(probe), "--html", str(page)]) == 0
    text = page.read_text()
    assert "he pairs of colour.h5 help" in text and "he pairs of position.h5 help" in text
    assert text.count("--pairs") == 2, "both are in the command that made it"
    assert run(["report", str(probe), "--format", "csv"]) == 0
    shown = capsys.readouterr().out
    assert "probe.safetensors: colour.h5" in shown and "probe.safetensors: position.h5" in shown
