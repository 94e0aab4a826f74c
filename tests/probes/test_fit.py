"""``ncm fit`` from files to a probe: selection, scaling, provenance, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError, MismatchError, UsageError
from ncm_cli.options import check
from ncm_cli.probes.choose import auto_ranks
from ncm_cli.probes.evaluate import logits
from ncm_cli.probes.fit import fit
from ncm_cli.probes.metrics import decide
from ncm_cli.probes.options import FitOptions
from ncm_cli.solvers.path import fit_path
from ncm_cli.solvers.projection import spectrum
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import read_pairs
from ncm_cli.store.probe import Probe, read_probe
from tests.world import Heard


@dataclasses.dataclass
class Run:
    report: dict[str, Any]
    probe: Probe
    heard: Heard

    @property
    def pick(self) -> dict[str, Any]:
        return self.report["path"][self.report["chosen"]]


def run(on_disk: Any, **options: Any) -> Run:
    heard = Heard()
    given = {
        "features": on_disk.features,
        "pairs": on_disk.pairs,
        "output": on_disk.folder / "probe",
    } | options
    made = check(FitOptions(**given))
    report = fit(made, reporter=heard)
    return Run(report, read_probe(made.output), heard)


def measure(probe: Probe, path: Path, where: str = "split=test") -> float:
    with FeatureStore(path) as store:
        rows = np.flatnonzero(store.mask(where))
        texts = np.array(store.categorical("label").text(), dtype=object)[rows]
        truth = np.array([probe.classes.index(text) for text in texts])
        return float(np.mean(decide(logits(probe, store.read(rows))) == truth))


def test_bound_is_the_default_and_finds_what_in_domain_misses(on_disk: Any) -> None:
    bound = run(on_disk)
    assert (bound.report["method"], bound.report["rule"], bound.report["oracle"]) == ("ncm", "bound", False)
    assert "--select bound" in bound.report["note"]
    naive = run(on_disk, select="in-domain", output=on_disk.folder / "naive")
    assert measure(naive.probe, on_disk.features) < 0.4, "the shortcut must be there before it is removed"
    assert measure(bound.probe, on_disk.features) > 0.6
    assert bound.probe.rank >= 3


def test_probe_is_folded_and_says_where_it_comes_from(on_disk: Any) -> None:
    made = run(on_disk)
    probe = made.probe
    assert np.linalg.norm(probe.weight @ probe.basis) <= 1e-6 * np.linalg.norm(probe.weight)
    assert probe.classes == ("cat", "dog")
    assert probe.weight.shape == (1, 24)
    selection = probe.meta["selection"]
    assert len(selection["path"]) == 25 * 5
    assert selection["path"][selection["chosen"]]["bound_01"] == made.pick["bound_01"]
    known = {"val_accuracy", "val_log_loss", "flip_rate", "bound_01", "log_loss_bound"}
    assert set(selection["path"][0]) >= known | {"rank", "weight_decay", "converged"}
    assert "test_accuracy" not in selection["path"][0], "the test rows aren't looked at"
    assert made.pick["bound_01"] == min(entry["bound_01"] for entry in selection["path"])
    data = probe.meta["data"]
    assert (data["train"], data["train_rows"], data["val_rows"]) == ("split=train", 600, 300)
    assert (data["pairs"]["used"], data["pairs"]["held_out"]) == (80, 40)
    with FeatureStore(on_disk.features) as store:
        assert data["features"]["content_sha256"] == store.content_sha256
        assert probe.meta["fingerprint"] == store.fingerprint
    assert probe.meta["converged"] is True


def test_same_inputs_give_the_same_bits(on_disk: Any) -> None:
    one, other = run(on_disk), run(on_disk, output=on_disk.folder / "other")
    assert one.probe.weight.tobytes() == other.probe.weight.tobytes()
    assert one.probe.sha256 == other.probe.sha256


def test_without_pairs_it_is_erm(on_disk: Any) -> None:
    made = run(on_disk, pairs=None)
    assert (made.report["method"], made.report["rule"], made.report["rank"]) == ("erm", "in-domain", 0)
    assert made.probe.basis.shape == (24, 0)
    zero = run(
        on_disk, rank="0", weight_decay=str(made.report["weight_decay"]), output=on_disk.folder / "zero"
    )
    assert np.allclose(zero.probe.weight, made.probe.weight, atol=1e-6), "rank 0 is ERM"
    assert zero.report["rule"] == "only-candidate"


def test_oracle_is_marked_everywhere(on_disk: Any) -> None:
    made = run(on_disk, select="oracle", test="split=test")
    assert made.report["oracle"]
    assert made.probe.meta["selection"]["oracle"] is True
    assert any(flag.startswith("ORACLE") for flag in made.probe.meta["flags"])
    assert made.pick["test_accuracy"] == max(c["test_accuracy"] for c in made.report["path"])
    assert made.report["oracle"] is True


def test_worst_group_selection_uses_the_groups(on_disk: Any) -> None:
    made = run(on_disk, select="worst-group", groups="label,place", rank="0:6")
    assert made.pick["worst_group"] == max(c["worst_group"] for c in made.report["path"])
    with pytest.raises(UsageError, match="needs groups"):
        run(on_disk, select="worst-group")


@pytest.mark.slow
def test_the_final_fit_is_on_all_pairs_however_the_choice_was_made(on_disk: Any) -> None:
    store = read_pairs(on_disk.pairs)
    every = spectrum((store.features_a.astype(np.float64) - store.features_b).T).basis
    for name, held_out in (("held", 40), ("folds", 0)):
        pairs = on_disk.pair_store(f"{name}.h5", store.features_a, store.features_b, held_out=held_out)
        made = run(on_disk, pairs=pairs, output=on_disk.folder / name)
        assert np.allclose(made.probe.basis, every[:, : made.report["rank"]], atol=1e-6)
        assert (made.report["pairs"], made.report["folds"]) == (80, 1 if held_out else 5)


def test_held_out_pairs_are_what_a_choice_is_measured_on(on_disk: Any) -> None:
    made = run(on_disk, rank="0,3", weight_decay="1e-2")
    store = read_pairs(on_disk.pairs)
    a, b = (X.astype(np.float64) for X in (store.features_a, store.features_b))
    held = store.holdout
    basis = spectrum((a - b)[~held].T).basis
    with FeatureStore(on_disk.features) as features:
        rows = features.mask("split=train")
        X, y = features.read(rows), features.categorical("label").codes[rows]
    for fit_, found in zip(fit_path(X, y, 2, basis, [0, 3], [1e-2]), made.report["path"], strict=True):
        told = [decide(x[held] @ fit_.weight.T + fit_.bias) for x in (a, b)]
        assert found["flip_rate"] == pytest.approx(np.mean(told[0] != told[1]))


@pytest.mark.parametrize("kind", ["norm", "standard"])
def test_scaling_is_recorded_and_pairs_are_scaled_alike(on_disk: Any, kind: str) -> None:
    made = run(on_disk, scaling=kind, scale_factor=5.0)
    assert made.probe.meta["scaling"]["kind"] == kind
    assert measure(made.probe, on_disk.features) > 0.6, "eval scales as fit did"
    plain = run(on_disk, output=on_disk.folder / "plain")
    assert not np.allclose(made.probe.basis[:, :1], plain.probe.basis[:, :1], atol=1e-6)


def test_upweight_lifts_the_rare_groups(on_disk: Any) -> None:
    made = on_disk.planted
    X, y = made.rows(2000, 0.9)
    style = (X @ made.directions[:, 1] > 0).astype(int)
    columns = {
        "label": [("a", "b")[code] for code in y],
        "place": [("land", "water")[code] for code in style],
        "split": ["train" if i < 1000 else "val" for i in range(2000)],
    }
    path = on_disk.store("g.h5", X, columns)
    shared = {"features": path, "pairs": None, "weight_decay": "1e-2", "groups": "label,place"}
    plain = run(on_disk, **shared)
    upweighted = run(on_disk, **shared, upweight="label,place")
    assert upweighted.pick["worst_group"] > plain.pick["worst_group"] + 0.1
    assert upweighted.probe.meta["hyper_parameters"]["upweight"] == "label,place"


@pytest.mark.slow
def test_adam_gets_near_the_exact_solution(on_disk: Any) -> None:
    exact = run(on_disk, rank="3", weight_decay="1e-2")
    steps = run(on_disk, rank="3", weight_decay="1e-2", solver="adam", epochs=60, lr=0.02, device="cpu")
    a, b = exact.probe.weight[0], steps.probe.weight[0]
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.98
    assert np.linalg.norm(steps.probe.weight @ steps.probe.basis) <= 1e-6 * np.linalg.norm(steps.probe.weight)
    assert steps.probe.meta["hyper_parameters"]["epochs"] == 60


def test_adam_searches_ranks_too(on_disk: Any) -> None:
    made = run(on_disk, rank="0:4", solver="adam", epochs=15, lr=0.02, device="cpu")
    assert len(made.report["path"]) == 5
    assert made.report["rule"] == "bound"
    assert made.report["rank"] > 0


def test_regression(on_disk: Any) -> None:
    X, y = on_disk.planted.rows(400, 0.9)
    value = y + 0.1 * on_disk.planted.rng.normal(size=400)
    split = ["train" if i < 300 else "val" for i in range(400)]
    path = on_disk.store("r.h5", X, {"split": split, "age": value})
    made = run(on_disk, features=path, task="regression", target="age")
    assert made.report["rule"] == "bound"
    assert made.probe.classes == ()
    assert "the bound on MSE from validation MSE and squared changes of pairs" in made.report["note"]
    assert made.pick["bound_mse"] == min(c["bound_mse"] for c in made.report["path"])
    with pytest.raises(InputError, match="holds numbers, not classes"):
        run(on_disk, features=path, target="age")
    with pytest.raises(UsageError, match="regression is solved exactly"):
        run(on_disk, features=path, task="regression", target="age", solver="adam")


def test_classes_are_those_of_the_training_rows(on_disk: Any) -> None:
    """scikit-learn/scikit-learn#10324."""
    X, y = on_disk.planted.rows(300, 0.9, classes=3)
    label = [("cat", "dog", "fox")[code] for code in y]
    split = ["train"] * 200 + ["val"] * 100
    label[200] = "owl"
    path = on_disk.store("c.h5", X, {"label": label, "split": split})
    made = run(on_disk, features=path, rank="0,3")
    assert made.probe.classes == ("cat", "dog", "fox")
    assert made.probe.weight.shape == (3, 24)
    assert any("owl" in warning for warning in made.heard.warnings)
    assert made.report["val_rows"] == 99


def test_rows_without_a_label_are_left_out_and_said(on_disk: Any) -> None:
    X, y = on_disk.planted.rows(100, 0.9)
    label = ["" if i == 5 else str(code) for i, code in enumerate(y)]
    path = on_disk.store("m.h5", X, {"label": label, "split": ["train"] * 60 + ["val"] * 40})
    made = run(on_disk, features=path, rank="0", weight_decay="1e-2")
    assert made.report["train_rows"] == 59
    assert any("'r5'" in warning for warning in made.heard.warnings)


def test_ranks_beyond_the_pairs(on_disk: Any) -> None:
    with pytest.raises(InputError, match="numerical rank") as refused:
        run(on_disk, rank="60")
    assert refused.value.expected == "at most 24"
    made = run(on_disk, rank="3,60", weight_decay="1e-2")
    assert [c["rank"] for c in made.report["path"]] == [3]
    assert any("skipped" in note for note in made.heard.notes)
    assert not (on_disk.folder / "nothing").exists()


def test_pairs_that_cant_be_cut_into_folds_say_what_to_do(on_disk: Any) -> None:
    a, b = on_disk.planted.pairs(3)
    together = on_disk.pair_store("one.h5", a, b, ids=(("x", "x", "x"), ("p", "q", "r")))
    with pytest.raises(InputError, match="too few pairs to be cut into folds") as refused:
        run(on_disk, pairs=together)
    assert "one --rank and one --weight-decay" in str(refused.value)
    single = run(on_disk, pairs=together, rank="3", weight_decay="1e-2")
    assert (single.report["rule"], single.report["folds"]) == ("only-candidate", 0)
    assert single.report["verdict"] is not None
    assert single.report["verdict"]["code"] == "unmeasured"
    assert "too few pairs to be cut into folds" in single.report["verdict"]["text"]
    assert run(on_disk, pairs=together, select="in-domain").report["rule"] == "in-domain"


def test_several_candidates_need_validation_rows(on_disk: Any) -> None:
    X, y = on_disk.planted.rows(100, 0.9)
    path = on_disk.store("n.h5", X, {"label": [str(c) for c in y], "split": ["train"] * 100})
    with pytest.raises(InputError, match="can't choose among several combinations") as refused:
        run(on_disk, features=path)
    assert "--val" in str(refused.value)
    single = run(on_disk, features=path, rank="3", weight_decay="1e-2")
    assert single.report["val_rows"] == 0
    assert "val_accuracy" not in single.report["path"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val": "split=train"}, "validation rows that are training rows as well"),
        ({"val": "split=test"}, "validation rows that are test rows as well"),
        ({"val": "split=val|test"}, "validation rows that are test rows as well"),
        ({"train": "split=train|test", "test": "split=test"}, "test rows that are training rows as well"),
        ({"select": "oracle"}, "needs test rows"),
    ],
)
def test_rows_with_two_parts_to_play_are_refused(on_disk: Any, options: dict[str, str], message: str) -> None:
    """kohpangwei/group_DRO#10."""
    with pytest.raises(InputError, match=message):
        run(on_disk, **options)
    assert not (on_disk.folder / "probe").exists()


def test_pairs_with_a_test_member_are_left_out(on_disk: Any) -> None:
    """Match-R-CNN-Reproduction#3."""
    with FeatureStore(on_disk.features) as store:
        first = np.flatnonzero(store.mask("split=train"))[:30]
        second = np.concatenate([np.flatnonzero(store.mask("split=test"))[:4], first[4:] + 100])
        X, ids = store.read(), np.array(store.ids, dtype=object)
    given = {"ids": (tuple(ids[first]), tuple(ids[second])), "features": on_disk.features, "held_out": 10}
    pairs = on_disk.pair_store("leak.h5", X[first], X[second], **given)
    made = run(on_disk, pairs=pairs)
    assert any("4 pairs have a member among the validation or test rows" in w for w in made.heard.warnings)
    assert made.probe.meta["data"]["pairs"] | {"used": 26, "left_out": 4} == made.probe.meta["data"]["pairs"]
    with pytest.raises(InputError, match="4 pairs have a member"):
        run(on_disk, pairs=pairs, overlap="error")
    kept = run(on_disk, pairs=pairs, overlap="keep")
    assert any(flag.startswith("OVERLAP: 4 pairs") for flag in kept.probe.meta["flags"])


def test_byte_identical_images_leave_training(on_disk: Any) -> None:
    """Match-R-CNN-Reproduction#3."""
    X, y = on_disk.planted.rows(100, 0.9)
    columns = {"label": [str(c) for c in y], "split": ["train"] * 60 + ["val"] * 20 + ["test"] * 20}
    digests = [f"{i:064x}" for i in range(100)]
    digests[10], digests[11] = digests[65], digests[85]
    path = on_disk.store("d.h5", X, columns, sha256=tuple(digests))
    made = run(on_disk, features=path, rank="0", weight_decay="1e-2")
    assert made.report["train_rows"] == 58
    assert any("byte-identical" in w and "'r10' is 'r65'" in w for w in made.heard.warnings)
    with pytest.raises(InputError, match="byte-identical"):
        run(on_disk, features=path, overlap="error")
    kept = run(on_disk, features=path, overlap="keep", rank="0", weight_decay="1e-2")
    assert kept.report["train_rows"] == 60
    assert any("OVERLAP: 2 training images" in flag for flag in kept.probe.meta["flags"])


def test_one_class_is_a_plain_error_and_few_iterations_are_reported(on_disk: Any) -> None:
    """embeddings-benchmark/mteb#944."""
    with pytest.raises(InputError, match="only one class among the training rows") as refused:
        run(on_disk, train="split=train & label=cat")
    assert "'cat'" in str(refused.value)
    with pytest.raises(InputError, match="selects no rows"):
        run(on_disk, train="split=train & label=cat & label=dog")
    few = run(on_disk, max_iter=2, rank="3", weight_decay="1e-4")
    assert few.probe.meta["converged"] is False
    assert any("did not reach the tolerance" in warning for warning in few.heard.warnings)


def test_pairs_of_another_encoder_are_refused(on_disk: Any) -> None:
    a, b = on_disk.planted.pairs(20)
    other = {"kind": "array", "model": "another", "precision": "fp32", "normalize": True}
    pairs = on_disk.pair_store("other.h5", a, b, encoder=other)
    with pytest.raises(MismatchError, match="features of different encoders") as refused:
        run(on_disk, pairs=pairs)
    assert refused.value.exit_code == 4
    assert "normalize" in str(refused.value)
    assert not (on_disk.folder / "probe").exists()


def test_ncm_without_pairs_and_ranks_without_ncm_are_refused(on_disk: Any) -> None:
    with pytest.raises(UsageError, match="ncm needs --pairs"):
        run(on_disk, pairs=None, method="ncm")
    with pytest.raises(UsageError, match="removes no directions"):
        run(on_disk, method="erm", rank="3")
    with pytest.raises(UsageError, match="did you mean 'bound'"):
        run(on_disk, select="bounds")


def test_erm_with_pairs_still_measures_its_flip_rate(on_disk: Any) -> None:
    made = run(on_disk, method="erm")
    assert made.report["rule"] == "bound"
    assert made.report["rank"] == 0
    assert made.pick["flip_rate"] > 0.3


@pytest.mark.parametrize("method", ["irm", "vrex", "groupdro", "fish", "lisa", "matchdg", "leace", "dfr"])
def test_other_methods_are_the_sweeps(on_disk: Any, method: str) -> None:
    with pytest.raises(UsageError, match=f"ncm fit doesn't train '{method}'") as refused:
        run(on_disk, method=method)
    assert refused.value.fix == f"ncm sweep --methods {method} ... --save-probes DIR"
    with pytest.raises(UsageError, match="no method named 'nmc'") as refused:
        run(on_disk, method="nmc")
    assert refused.value.fix == "did you mean 'ncm'?"


def test_auto_ranks_are_dense_then_sparse() -> None:
    assert auto_ranks(0) == (0,)
    assert auto_ranks(20) == tuple(range(21))
    many = auto_ranks(400)
    assert len(many) <= 64
    assert many[:33] == tuple(range(33))
    assert many[-1] == 400


def test_options_that_nothing_reads_are_said(on_disk: Any) -> None:
    made = run(on_disk, rank="2", weight_decay="1e-2", lr=0.5, scale_factor=3.0)
    (said,) = [text for text in made.heard.warnings if "no effect" in text]
    assert said == "no effect with --method ncm --solver lbfgs: --scale-factor, --lr"
    assert not any("no effect" in text for text in run(on_disk, rank="2", weight_decay="1e-2").heard.warnings)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_decay": "1,-1"}, "--weight-decay must be at least 0"),
        ({"tolerance": 0.0}, "--tolerance must be above 0"),
        ({"scaling": "norm", "scale_factor": 0.0}, "--scale-factor must be above 0"),
        ({"scaling": "norm", "scale_factor": float("nan")}, "--scale-factor must be finite"),
    ],
)
def test_values_that_no_data_could_make_right_are_usage_errors(
    on_disk: Any, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(on_disk, **changed)
