"""What is said of a fit with pairs: each verdict on hand-made measurements, and where the truth is known."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncm_cli.errors import InputError, UsageError
from ncm_cli.main import run
from ncm_cli.probes.crossfit import CrossFit, Estimate, Scored
from ncm_cli.probes.evaluate import evaluate, logits
from ncm_cli.probes.fit import fit
from ncm_cli.probes.metrics import decide, wilson
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.probes.verdict import LEAST_UNITS, Circumstances, Verdict, judge
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import read_probe
from tests.world import Heard


def made(
    flips: tuple[int, int],
    errors: tuple[int, int] = (30, 30),
    *,
    pairs: int = 200,
    rows: int = 200,
    units: int | None = None,
    regression: bool = False,
) -> CrossFit:
    """Two candidates, rank 0 and rank 4, that flip this many pairs and err on this many rows."""

    def first(count: int, of: int) -> np.ndarray:
        return (np.arange(of) < count).astype(float)

    candidates = []
    for rank, error, flipped in zip((0, 4), errors, flips, strict=True):
        parts = error / rows, flipped / pairs
        bound = {"bound_mse": sum(np.sqrt(parts)) ** 2} if regression else {"bound_01": sum(parts)}
        candidates.append({"rank": rank, "weight_decay": 1e-2, "converged": True} | bound)
    # The constant errs on half of the rows, whatever a probe does there.
    missed = (np.arange(rows) % 2).astype(float)
    return CrossFit(
        candidates=tuple(candidates),
        errors=np.stack([first(count, rows) for count in errors]),
        changes=np.stack([first(count, pairs) for count in flips]),
        unit=np.arange(pairs) % (units or pairs),
        regression=regression,
        constant=Scored(0.5, {"rows": missed}),
    )


CASE = Circumstances(answer="'cat'", about="random pairs across domain, and about no other shift")


def said(found: CrossFit, pick: int = 1, **case: Any) -> Verdict:
    return judge(found, pick, 0, dataclasses.replace(CASE, **case))


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (
            made((80, 4)),
            "helps",
            "flip rate 0.4 with nothing removed, 0.02 with rank 4; validation accuracy 0.85, now 0.85",
        ),
        (
            made((80, 4), (30, 44)),
            "helps",
            "validation accuracy 0.85, now 0.78; bound 0.55, now 0.24 (95 % interval of the change: -0.39",
        ),
        (made((4, 4)), "no-gain", "don't help"),
        (made((4, 3)), "no-gain", "seldom flips them"),
        (made((4, 30)), "no-gain", "don't help"),
        (
            made((60, 59)),
            "no-gain",
            "no rank helps much (least flip rate 0.295, validation accuracy 0.85, at rank 4)",
        ),
        (made((60, 10), (30, 80)), "undecided", "if they do, the bound falls by at most 0.085"),
        (
            made((6000, 1000), (3000, 8000), pairs=20_000, rows=20_000),
            "no-gain",
            "fewer flips cost too much (least flip rate 0.05",
        ),
        (
            made((100, 80), (30, 30)),
            "constant",
            "no rank that was tried beats always answering 'cat' (error 0.5)",
        ),
        (made((10, 4), pairs=40), "helps", "bound 0.4, now 0.25"),
        (made((3, 1), pairs=40), "undecided", "if they do, the bound falls by at most 0.12"),
        (made((20, 0), pairs=LEAST_UNITS - 1), "too-few", "31 pairs that share no row, where 32 are needed"),
        (made((100, 0), units=20), "too-few", "20 sets of 200 pairs that share no row, where 32"),
        (
            made((8, 8), (50, 50), pairs=10),
            "too-few",
            "no lower than that of always answering 'cat' (error 0.5)",
        ),
        (made((80, 4), regression=True), "helps", "mean squared change 0.4 with nothing removed, 0.02 with"),
        (made((4, 4), regression=True), "no-gain", "don't help"),
    ],
)
def test_each_verdict(found: CrossFit, code: str, words: str) -> None:
    verdict = said(found)
    assert verdict.code == code, verdict.text
    assert words in verdict.text
    assert (verdict.pairs, verdict.units) == (found.pairs, found.units)
    assert verdict.bound == found.bound(1)
    assert verdict.erm_bound == found.bound(0)
    assert "random pairs across domain" in verdict.about
    assert "no other shift" in verdict.about


def test_no_gain_is_said_only_where_at_most_two_in_a_hundred_can_be_gained() -> None:
    """Forty pairs without a flip leave .088 to be gained; many more of them don't."""
    assert said(made((0, 0), pairs=40)).code == "undecided"
    assert said(made((0, 0), pairs=400)).code == "no-gain"
    assert said(made((0, 0), pairs=400), least_score=False).code == "no-gain"


def test_beside_a_constant_with_nothing_removed_it_can_not_be_told() -> None:
    """No flips of a probe that always says the same tell nothing of the pairs."""
    verdict = said(made((0, 1), (100, 90), pairs=400))
    assert verdict.code == "undecided", verdict.text
    assert "the bound falls by at most" in verdict.text


def test_where_no_rank_above_0_was_tried_nothing_is_said_of_removing() -> None:
    found = made((80, 80))
    alone = dataclasses.replace(
        found, candidates=found.candidates[:1], errors=found.errors[:1], changes=found.changes[:1]
    )
    verdict = said(alone, 0)
    assert verdict.code == "undecided"
    assert "no rank above 0 was measured" in verdict.text
    assert verdict.reasons == ()


def test_group_weights_that_cost_a_frequent_class_are_no_reason_to_say_no_gain() -> None:
    """Weights help with every cell weighted equally; with nine of ten rows of class 0 they cost .14."""
    cell = np.tile([0, 1, 10, 11], 500)
    of_cell = np.arange(2000) // 4
    plain = ((cell >= 10) & (of_cell % 5 < 3)).astype(float)
    weighted = (of_cell % 5 < 1).astype(float)
    candidates = tuple(
        {"rank": rank, "weight_decay": 1.0, "converged": True, "cell_log_loss": 0.0, "upweighted": up}
        | {"cell_error": float(errors.mean())}
        for rank, up, errors in ((0, False, plain), (0, True, weighted), (1, True, weighted))
    )
    found = CrossFit(
        candidates=candidates,
        errors=np.zeros((3, 400)),
        changes=np.zeros((3, 400)),
        unit=np.arange(400),
        regression=False,
        cell_row_errors=np.stack([plain, weighted, weighted]),
        cell=cell,
        truth=cell // 10,
        shares=np.array([0.9, 0.1]),
        constant=Scored(0.5, {"held_out": (cell >= 10).astype(float)}),
    )
    verdict = judge(found, 1, 0, CASE, control=1)
    assert verdict.code == "undecided", verdict.text
    assert "with classes as frequent as in training, plain training" in verdict.text
    equal = dataclasses.replace(found, shares=np.array([0.5, 0.5]))
    assert judge(equal, 1, 0, CASE, control=1).code == "no-gain"


counts = st.tuples(st.floats(0, 1), st.floats(0, 1))


@settings(max_examples=60, deadline=None)
@given(flips=counts, errors=counts, pairs=st.integers(32, 3000), rows=st.integers(30, 3000))
def test_what_no_gain_and_helps_promise(
    flips: tuple[float, float], errors: tuple[float, float], pairs: int, rows: int
) -> None:
    """Counted here anew: the paired change of the bound with its interval, and the flips there are."""
    flipped = tuple(round(0.3 * share * pairs) for share in flips)
    missed = tuple(round(0.3 * share * rows) for share in errors)
    verdict = said(made(flipped, missed, pairs=pairs, rows=rows))
    # Of nested sets of rows or pairs those that differ are the difference of the counts.
    differ = [abs(one - other) / of for (one, other), of in ((flipped, pairs), (missed, rows))]
    spread = np.sqrt(sum(p * (1 - p) / (of - 1) for p, of in zip(differ, (pairs, rows), strict=True)))
    fall = (flipped[0] - flipped[1]) / pairs + (missed[0] - missed[1]) / rows
    if verdict.code == "no-gain":
        assert min(fall + 1.95 * spread, wilson(flipped[0], pairs)[1]) < 0.02
    if verdict.code == "helps":
        assert fall >= 0.01 and fall - 1.95 * spread > 0
        assert (flipped[0] - flipped[1]) / pairs >= 0.01 - 1e-9, "the pairs' own part"


def test_a_bound_that_can_not_be_told_from_the_constants_is_no_help() -> None:
    """Bound .45 beside a constant's .5, of forty rows: the paired interval reaches below 0."""
    unsure = said(made((96, 4), (9, 17), pairs=160, rows=40))
    assert unsure.code == "undecided"
    assert "can't be told from that of always answering 'cat' (error 0.5)" in unsure.text
    assert said(made((960, 40), (900, 1700), pairs=1600, rows=4000)).code == "helps"


def test_pairs_of_different_labels_are_a_reason() -> None:
    verdict = said(made((60, 59)), unlike=(12, 200))
    assert verdict.reasons[1] == "the members of 12 of 200 pairs have different labels"


def test_a_pick_of_rank_zero_gains_nothing() -> None:
    verdict = said(made((4, 4)), pick=0)
    assert verdict.code == "no-gain"
    assert "no rank that was tried lowers the bound by 0.01 or more;" in verdict.text


def test_lower_validation_error_alone_is_no_help_of_the_pairs() -> None:
    """A gain that comes from the rows, not from the pairs: another weight decay does as much."""
    assert said(made((4, 4), (60, 20))).code == "undecided", "200 pairs leave .05 to be gained"
    assert said(made((40, 40), (600, 200), pairs=4000, rows=2000)).code == "no-gain"


def test_without_validation_rows_nothing_is_measured() -> None:
    found = CrossFit(
        candidates=made((1, 1)).candidates,
        errors=None,
        changes=np.zeros((2, 50)),
        unit=np.arange(50),
        regression=False,
    )
    verdict = said(found)
    assert (verdict.code, verdict.bound) == ("unmeasured", None)
    assert "no validation rows" in verdict.text


def judged(on_disk: Any, a: np.ndarray, b: np.ndarray, **options: Any) -> tuple[Heard]:
    """`ncm fit` with these pairs, none of them held out."""
    heard = Heard()
    given = {
        "features": on_disk.features,
        "pairs": on_disk.pair_store("judged.h5", a, b),
        "output": on_disk.folder / "probe",
        "weight_decay": "1e-3,1e-1",
    }
    return fit(FitOptions(**given | options), reporter=heard), heard


def _verdict(report: dict[str, Any]) -> Verdict:
    """With its estimates as objects, as `judge` makes it."""
    found = report["verdict"].items()
    return Verdict(**{name: Estimate(**value) if isinstance(value, dict) else value for name, value in found})


def _error(on_disk: Any, name: str = "probe") -> float:
    report = evaluate(EvalOptions(probe=on_disk.folder / name, features=on_disk.features, where="split=test"))
    return 1 - float(report["accuracy"])


def test_clean_pairs_of_a_spurious_direction_help(on_disk: Any) -> None:
    report, _ = judged(on_disk, *on_disk.planted.pairs(80), save_controls=on_disk.folder / "controls")
    verdict = _verdict(report)
    assert verdict.code == "helps", verdict.text
    assert report["rank"] >= 3
    assert verdict.erm_flip_rate is not None
    assert verdict.flip_rate is not None
    assert verdict.erm_flip_rate.value > 0.5 > 0.1 > verdict.flip_rate.value
    erm = _error(on_disk, "controls/erm.safetensors")
    assert _error(on_disk) < erm - 0.2, "and that is true of the test rows"
    assert verdict.bound is not None
    assert verdict.bound.high >= _error(on_disk)


def test_pairs_across_the_label_can_only_make_a_constant(on_disk: Any) -> None:
    made_pairs = on_disk.planted
    X, y = made_pairs.rows(400, 0.95)
    a, b = X[y == 0][:60], X[y == 1][:60]
    report, _ = judged(on_disk, a, b)
    verdict = _verdict(report)
    assert verdict.code == "constant", verdict.text
    assert verdict.bound is not None
    assert verdict.constant_error is not None
    assert verdict.bound.value >= verdict.constant_error
    assert "what they differ in also predicts the label" in verdict.reasons[0]
    assert verdict.reasons[0] in verdict.text
    assert report["rank"] == read_probe(on_disk.folder / "probe").rank == 0
    assert "so the probe removes nothing" in verdict.text


def test_pairs_that_differ_in_nothing_that_matters_gain_nothing(on_disk: Any) -> None:
    """The members differ in directions that no class shows in: ERM doesn't flip them either."""
    rng = np.random.default_rng(1)
    a, _ = on_disk.planted.rows(300, 0.95)
    moved = 0.3 * rng.normal(size=(300, 4)) @ rng.normal(size=(4, a.shape[1]))
    moved -= moved @ on_disk.planted.directions @ on_disk.planted.directions.T
    report, _ = judged(on_disk, a, (a + moved).astype(np.float32))
    verdict = _verdict(report)
    assert verdict.code == "no-gain", verdict.text
    assert verdict.erm_flip_rate is not None
    assert verdict.erm_flip_rate.value < 0.1
    assert report["rank"] == read_probe(on_disk.folder / "probe").rank == 0


def test_where_every_candidate_is_alike_the_smallest_rank_is_written(on_disk: Any) -> None:
    """Forty pairs that nothing flips, labels that every rank tells: the loss alone would say a rank."""
    X, y = on_disk.planted.rows(300, 0.5)
    X += np.outer(40 * (2 * y - 1), on_disk.planted.directions[:, 0]).astype(np.float32)
    columns = {"label": [("cat", "dog")[code] for code in y], "split": ["train"] * 200 + ["val"] * 100}
    features = on_disk.store("easy.h5", X, columns)
    rng = np.random.default_rng(2)
    moved = rng.normal(size=(40, 4)) @ on_disk.planted.directions[:, 1:].T[[0, 1, 2, 0]]
    a, _ = on_disk.planted.rows(40, 0.5)
    a += np.outer(40 * (2 * (np.arange(40) % 2) - 1), on_disk.planted.directions[:, 0]).astype(np.float32)
    b = (a + moved).astype(np.float32)
    for ranks, smallest in (("0:3", 0), ("1:3", 1)):
        report, _ = judged(on_disk, a, b, features=features, rank=ranks)
        assert {one["bound_01"] for one in report["path"]} == {0.0}
        assert min(report["path"], key=lambda one: one["val_log_loss"])["rank"] > smallest
        assert (report["verdict"]["code"], report["rank"]) == ("undecided", smallest)


@pytest.mark.parametrize(("far", "said_so"), [(3, True), (20, False)])
def test_a_probe_that_gives_nearly_one_answer_is_said(on_disk: Any, far: int, said_so: bool) -> None:
    """Three in ten are dogs; only rows that lie far out are called dogs."""
    x = np.where(np.arange(100) < far, 5.0, -1.0)
    dogs = np.where(np.arange(100) < far, True, np.arange(100) % 10 < 3)
    X = np.concatenate([x, x])[:, None] * np.ones((1, 2))
    label = [("cat", "dog")[int(dog)] for dog in (*dogs, *dogs)]
    split = ["train"] * 100 + ["val"] * 100
    ids = [f"r{row}" for row in range(200)]
    X = np.column_stack([X, 1e-3 * np.arange(200)])  # so that no row is a copy
    features = on_disk.store("n.h5", X.astype(np.float32), {"label": label, "split": split}, ids=ids)
    heard = Heard()
    options = FitOptions(features=features, output=on_disk.folder / "p", weight_decay="1e-3")
    fit(options, reporter=heard)
    found = [text for text in heard.warnings if "nearly a constant" in text]
    assert bool(found) == said_so
    if said_so:
        assert found == [
            "the chosen probe predicts 'cat' for 97 of 100 validation rows: it is nearly a constant"
        ]


def test_ten_pairs_are_too_few(on_disk: Any) -> None:
    report, _ = judged(on_disk, *on_disk.planted.pairs(10))
    verdict = _verdict(report)
    assert (verdict.code, verdict.units) == ("too-few", 10)
    assert "10 pairs that share no row, where 32 are needed" in verdict.text


def test_without_validation_rows_a_single_setting_is_unmeasured(on_disk: Any) -> None:
    X, y = on_disk.planted.rows(100, 0.9)
    features = on_disk.store("n.h5", X, {"label": [f"c{code}" for code in y], "split": ["train"] * 100})
    one = {"features": features, "rank": "3", "weight_decay": "1e-2"}
    report, _ = judged(on_disk, *on_disk.planted.pairs(40), **one)
    verdict = _verdict(report)
    assert verdict.code == "unmeasured"
    assert "no validation rows" in verdict.text
    assert report["controls"] == []
    (on_disk.folder / "probe").unlink()
    with pytest.raises(InputError, match="no controls to save") as caught:
        judged(on_disk, *on_disk.planted.pairs(40), **one, save_controls=on_disk.folder / "c")
    assert caught.value.found == "no validation rows"
    assert not (on_disk.folder / "probe").exists()
    assert not (on_disk.folder / "c").exists()


def test_pairs_that_cannot_be_measured_have_no_controls_and_leave_nothing(on_disk: Any) -> None:
    a, b = on_disk.planted.pairs(1)
    one = {"rank": "1", "weight_decay": "1e-2", "save_controls": on_disk.folder / "c"}
    with pytest.raises(InputError, match="no controls to save"):
        judged(on_disk, a, b, **one)
    assert not (on_disk.folder / "probe").exists()
    assert not (on_disk.folder / "c").exists()


@pytest.mark.parametrize(
    "select", [None, *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("in-domain", "oracle"))]
)
def test_every_rule_has_a_verdict(on_disk: Any, select: str | None) -> None:
    options: dict[str, Any] = {"select": select, "rank": "0:4"} if select else {"rank": "3"}
    options |= {"test": "split=test"} if select == "oracle" else {}
    report, _ = judged(on_disk, *on_disk.planted.pairs(60), **options | {"weight_decay": "1e-2"})
    verdict = _verdict(report)
    assert verdict.bound is not None
    if select == "in-domain":
        assert verdict.code == "constant", "validation rows alone prefer the shortcut"
        assert "this probe" in verdict.text
        assert "no rank" not in verdict.text, "the others weren't measured"
        assert "--select bound" in verdict.text
    else:
        assert verdict.code == "helps", verdict.text


@pytest.mark.parametrize("solver", ["lbfgs", pytest.param("adam", marks=pytest.mark.slow)])
def test_erm_that_uses_no_pairs_is_measured_beside_itself(on_disk: Any, solver: str) -> None:
    more = {"weight_decay": "1e-2", "solver": solver, "epochs": 3, "device": "cpu"}
    report, _ = judged(on_disk, *on_disk.planted.pairs(60), method="erm", **more)
    verdict = _verdict(report)
    assert verdict.code == "unmeasured"
    assert "erm doesn't use them" in verdict.text
    erm = {control["name"]: control for control in report["controls"]}["erm"]
    assert verdict.bound == verdict.erm_bound == Estimate(**erm["bound"])


@pytest.mark.slow
def test_controls_are_written_as_probes(on_disk: Any) -> None:
    """Each is what `ncm fit` makes of the same rows, and eval and read_probe take it."""
    X, y = on_disk.planted.rows(300, 0.9)
    split = np.array(["train"] * 150 + ["pool"] * 50 + ["val"] * 100)
    columns = {
        "label": [("cat", "dog")[code] for code in y],
        "split": split.tolist(),
        "place": [("a", "b", "b")[i % 3] for i in range(300)],
    }
    features = on_disk.store("c.h5", X, columns)
    folder = on_disk.folder / "made" / "controls"
    line = f"pairs --match random --same label --across place -f {features} -o {on_disk.folder}/m.h5"
    assert run([*line.split(), "--where", "split=train|pool", "--quiet"]) == 0
    shared = {"features": features, "weight_decay": "1e-2,1"}
    options = FitOptions(
        **shared,
        pairs=on_disk.folder / "m.h5",
        output=on_disk.folder / "probe",
        rank="0:3",
        groups="label,place",
        save_controls=folder,
    )
    report = fit(options)
    names = [control["name"] for control in report["controls"]]
    assert names == ["constant", "erm", "erm-pair-rows", "erm-upweighted", "erm-upweighted-pair-rows"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.safetensors" for name in names)
    decay = {control["name"]: control["weight_decay"] for control in report["controls"]}
    pairs = read_pairs(on_disk.folder / "m.h5")
    members = {int(id[1:]) for id in (*pairs.id_a, *pairs.id_b)}
    split[[row for row in members if split[row] == "pool"]] = "train"
    wider = on_disk.store("wider.h5", X, columns | {"split": split.tolist()})
    same: dict[str, dict[str, Any]] = {
        "erm": {},
        "erm-upweighted": {"upweight": "label,place"},
        "erm-pair-rows": {"features": wider},
        "erm-upweighted-pair-rows": {"features": wider, "upweight": "label,place"},
    }
    with FeatureStore(features) as store:
        everything = store.read()
    for name in names:
        probe = read_probe(folder / f"{name}.safetensors")
        assert probe.meta["method"] == name
        assert probe.classes == ("cat", "dog")
        found = evaluate(
            EvalOptions(probe=folder / f"{name}.safetensors", features=features, where="split=val")
        )
        told = decide(logits(probe, everything))
        if name == "constant":
            assert len(np.unique(told)) == 1
            assert 1 - found["accuracy"] == pytest.approx(report["controls"][0]["bound"]["value"])
            continue
        path = on_disk.folder / "same"
        fit(FitOptions(**shared | {"weight_decay": str(decay[name])} | same[name], output=path))
        own = read_probe(path)
        assert np.allclose(probe.weight, own.weight, atol=1e-5), name
        assert probe.meta["hyper_parameters"]["upweight"] == same[name].get("upweight")
    trained = read_probe(folder / "erm-pair-rows.safetensors").meta["data"]["train_rows"]
    assert trained == (split == "train").sum() > 160


def test_a_control_never_replaces_the_probe(on_disk: Any) -> None:
    one = {"rank": "1", "weight_decay": "1e-2", "save_controls": on_disk.folder}
    with pytest.raises(UsageError, match="the same name"):
        judged(on_disk, *on_disk.planted.pairs(40), **one, output=on_disk.folder / "erm.safetensors")
    assert not (on_disk.folder / "erm.safetensors").exists()


def test_controls_need_pairs(on_disk: Any) -> None:
    with pytest.raises(UsageError, match="--save-controls needs pairs"):
        fit(FitOptions(features=on_disk.features, output=on_disk.folder / "p", save_controls=on_disk.folder))
    assert not (on_disk.folder / "p").exists()


def test_a_control_is_measured_like_the_pick(on_disk: Any) -> None:
    """ERM on the same rows is rank 0 of the path; the constant errs as its class is missing."""
    report, _ = judged(on_disk, *on_disk.planted.pairs(60), rank="0,3")
    controls = {control["name"]: control for control in report["controls"]}
    rank_0 = min(
        (one for one in report["path"] if one["rank"] == 0),
        key=lambda one: (one["bound_01"], one["val_log_loss"]),
    )
    assert controls["erm"]["bound"]["value"] == pytest.approx(min(rank_0["bound_01"], 1))
    assert controls["erm"]["weight_decay"] == rank_0["weight_decay"]
    with FeatureStore(on_disk.features) as store:
        codes = store.categorical("label").codes
        train, val = (codes[store.mask(f"split={part}")] for part in ("train", "val"))
    commonest = np.bincount(train).argmax()
    assert controls["constant"]["bound"]["value"] == pytest.approx(np.mean(val != commonest))
    assert controls["constant"]["flip_rate"]["value"] == 0


def test_a_constant_pick_and_the_end_of_the_ranks_are_said(on_disk: Any) -> None:
    rng = np.random.default_rng(2)
    X = rng.normal(size=(150, 24)).astype(np.float32)
    label = ["cat" if row % 5 else "dog" for row in range(150)]
    features = on_disk.store("k.h5", X, {"label": label, "split": ["train"] * 90 + ["val"] * 60})
    pairs = on_disk.planted.pairs(60)
    _, heard = judged(on_disk, *pairs, features=features, weight_decay="10", rank="0:2")
    assert any("it is a constant" in text for text in heard.warnings)
    report, heard = judged(on_disk, *pairs, rank="0:2")
    assert report["rank"] == 2
    assert any("--rank 0:24 tries more" in text for text in heard.warnings)
    few, heard = judged(on_disk, *on_disk.planted.pairs(20), rank="14:16")
    assert few["rank"] <= 16
    said_of_ranks = [text for text in heard.warnings + heard.notes if "these pairs allow" in text]
    if few["rank"] == 16:
        assert "16 is the largest that these pairs allow" in said_of_ranks[0], "a fold leaves 16 pairs"


def test_the_command_says_the_verdict(on_disk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = on_disk.planted.pairs(60)
    pairs = on_disk.pair_store("said.h5", a, b)
    line = f"fit -f {on_disk.features} -p {pairs} --rank 0:4 --weight-decay 1e-2 -o {on_disk.folder}/p"
    assert run(line.split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "The pairs help: flip rate" in out
    assert "and about no other shift" in out
    assert "always the same answer" in out
    assert run([*line.split(), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["verdict"]["code"] == "helps"
    assert body["verdict"] == read_probe(on_disk.folder / "p").meta["selection"]["verdict"]
    assert {control["name"] for control in body["controls"]} == {"constant", "erm"}


def test_a_bound_a_hair_below_the_constants_is_no_help() -> None:
    nearly = made((160, 12), (30, 87))  # bound .495 beside a constant's .5
    assert nearly.candidates[1]["rank"] == 4
    assert said(nearly).code == "constant"


def test_a_pick_that_gives_one_answer_is_no_help() -> None:
    found = made((160, 4), (30, 44))
    assert said(found).code == "helps"
    assert said(found, one_answer=True).code == "constant"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_pairs_across_the_label_never_help(on_disk: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    X, y = on_disk.planted.rows(200, 0.5)
    cats, others = X[y == 0][:60], X[y == 1][:60]
    k = min(len(cats), len(others))
    order = rng.permutation(k)
    report, _ = judged(on_disk, cats[:k], others[order])
    assert _verdict(report).code != "helps", _verdict(report).text


def test_intervals_of_one_measured_pair_are_null_in_json(
    on_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = on_disk.planted.pairs(20)
    pairs = on_disk.pair_store("held.h5", a, b, held_out=1)
    output = on_disk.folder / "p.safetensors"
    assert run(["fit", "-f", str(on_disk.features), "-p", str(pairs), "-o", str(output), "--json"]) == 0

    def refuse(token: str) -> None:
        raise AssertionError(token)

    verdict = json.loads(capsys.readouterr().out, parse_constant=refuse)["verdict"]
    assert (verdict["code"], verdict["units"]) == ("too-few", 1)
    assert verdict["gain"]["low"] is None, "one pair says nothing of its own error"


def test_classes_as_frequent_as_in_training_weigh_the_cells_of_a_gain() -> None:
    """With cells weighted equally the pick is better by .1; with nine of ten rows of class 0 it is worse."""
    cell = np.repeat([0, 1, 10, 11], 50)
    truth = cell // 10
    erm, pick = np.zeros(200), np.zeros(200)
    pick[:10] = pick[50:60] = 1.0  # a fifth of class 0, in both domains
    erm[100:120] = erm[150:170] = 1.0  # two fifths of class 1
    candidate = {"weight_decay": 1.0, "converged": True, "cell_error": 0.0, "cell_log_loss": 0.0}
    found = CrossFit(
        candidates=({"rank": 0, **candidate, "cell_error": 0.2}, {"rank": 1, **candidate, "cell_error": 0.1}),
        errors=np.zeros((2, 1)),
        changes=np.zeros((2, 1)),
        unit=np.zeros(1, int),
        regression=False,
        cell_row_errors=np.stack([erm, pick]),
        cell=cell,
        truth=truth,
        shares=np.array([0.9, 0.1]),
    )
    assert found.gain(1, 0).value == pytest.approx(0.1)
    frequent = found.frequent_gain(1, 0)
    assert frequent is not None
    assert frequent.value == pytest.approx(0.1 * 0.4 - 0.9 * 0.2)
    assert frequent.high < 0
