"""``ncm eval``: groups, averages, what is refused, and what is said beside every number."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError, MismatchError
from ncm_cli.main import run
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.options import EvalOptions
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.probe import read_probe, record_ids, write_probe
from tests.world import ENCODER, Heard, light_seconds, make_probe, write_store


def _store(path: Path, X: np.ndarray, **columns: Any) -> Path:
    more = {name: columns.pop(name) for name in ("ids", "encoder") if name in columns}
    return write_store(path, X, columns, **more)


def _probe(path: Path, weight: Any, classes: tuple[str, ...] = ("cat", "dog"), **more: Any) -> Path:
    meta = {"method": "ncm", "scaling": {"kind": "none", "factor": 1.0}}
    write_probe(path, make_probe(weight, classes, **meta | more))
    return path


def _eval(probe: Path, features: Path, **more: Any) -> tuple[dict[str, Any], Heard]:
    heard = Heard()
    return evaluate(EvalOptions(probe=probe, features=features, **more), reporter=heard), heard


@pytest.fixture
def birds(tmp_path: Path) -> tuple[Path, Path]:
    """400 rows of two labels in two places, feature 0 the label and feature 1 the place; a probe on both."""
    rng = np.random.default_rng(0)
    label, place = rng.integers(0, 2, (2, 400))
    x = rng.normal(size=(400, 3)) + 1.5 * np.stack([2 * label - 1, 2 * place - 1, 0 * label], axis=1)
    columns = {
        "label": [("cat", "dog")[i] for i in label],
        "place": [("land", "water")[i] for i in place],
        "split": rng.choice(["train", "val", "test"], 400).tolist(),
    }
    return _probe(tmp_path / "p.safetensors", [1.0, 0.4, 0.0]), _store(tmp_path / "f.h5", x, **columns)


def test_numbers_agree_with_a_calculation_by_hand(birds: tuple[Path, Path]) -> None:
    body, _ = _eval(*birds, where="split=test", groups="label,place")
    with FeatureStore(birds[1]) as store:
        x, test = store.read().astype(float), store.mask("split=test")
        label, place = (np.array(store.categorical(name).text()) for name in ("label", "place"))
        train = store.mask("split=train")
    right = np.where(x @ [1.0, 0.4, 0.0] > 0, "dog", "cat") == label
    assert body["n"] == test.sum()
    assert body["accuracy"] == pytest.approx(right[test].mean())
    weights, values = [], []
    for entry in body["groups"]:
        inside = (label == entry["group"]["label"]) & (place == entry["group"]["place"])
        assert entry["n"] == (inside & test).sum()
        assert entry["accuracy"] == pytest.approx(right[inside & test].mean())
        assert entry["ci_low"] < entry["accuracy"] <= entry["ci_high"]
        weights.append((inside & train).sum())
        values.append(entry["accuracy"])
    assert body["adjusted_accuracy"] == pytest.approx(np.average(values, weights=weights))
    assert body["reference"]["where"] == "split=train"
    worst = min(body["groups"], key=lambda entry: entry["accuracy"])
    assert body["worst_group"] == {name: worst[name] for name in ("group", "n", "accuracy")}
    assert body["balanced_accuracy"] == pytest.approx(
        np.mean([right[test & (label == name)].mean() for name in ("cat", "dog")])
    )


def test_the_order_of_the_rows_changes_nothing(birds: tuple[Path, Path], tmp_path: Path) -> None:
    """pytorch/vision#4209."""
    with FeatureStore(birds[1]) as store:
        order = np.random.default_rng(1).permutation(store.rows)
        columns = {name: store.categorical(name).text() for name in store.columns}
        shuffled = _store(
            tmp_path / "shuffled.h5",
            store.read(order),
            ids=[store.ids[i] for i in order],
            **{name: [values[i] for i in order] for name, values in columns.items()},
        )
    bodies = []
    for path in (birds[1], shuffled):
        body, _ = _eval(birds[0], path, where="split!=train", groups="label,place")
        bodies.append({k: v for k, v in body.items() if k not in ("features", "options")})
    assert bodies[0] == bodies[1]


def test_the_reference_weights_are_said_and_can_be_chosen(birds: tuple[Path, Path]) -> None:
    """PolinaKirichenko/deep_feature_reweighting#1."""
    body, _ = _eval(*birds, where="split=test", groups="label,place", reference="place=land")
    assert body["reference"]["where"] == "place=land"
    land = [entry for entry in body["groups"] if entry["group"]["place"] == "land"]
    with FeatureStore(birds[1]) as store:
        counts = [store.mask(f"place=land & label={entry['group']['label']}").sum() for entry in land]
    assert body["adjusted_accuracy"] == pytest.approx(
        np.average([entry["accuracy"] for entry in land], weights=counts)
    )


def test_both_averages_are_labelled(birds: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """PolinaKirichenko/deep_feature_reweighting#1."""
    command = ["eval", str(birds[0]), "-f", str(birds[1]), "--where", "split=test", "--groups", "label,place"]
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert "average accuracy " in shown
    assert "adjusted average accuracy (groups as in split=train)" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_absent_groups_are_shown_and_dont_count(tmp_path: Path) -> None:
    """BigML-CS-UCLA/SpuCo#22."""
    x = np.array([[1.0], [1.0], [-1.0], [1.0], [-1.0]])
    store = _store(
        tmp_path / "f.h5",
        x,
        label=["dog", "dog", "cat", "cat", "cat"],
        place=["land", "land", "land", "water", "water"],
        split=["test", "test", "test", "test", "train"],
    )
    body, _ = _eval(_probe(tmp_path / "p", [1.0]), store, where="split=test", groups="label,place")
    counts = {tuple(entry["group"].values()): entry["n"] for entry in body["groups"]}
    assert counts == {("cat", "land"): 1, ("cat", "water"): 1, ("dog", "land"): 2, ("dog", "water"): 0}
    absent = next(entry for entry in body["groups"] if entry["n"] == 0)
    assert absent["accuracy"] is absent["ci_low"] is absent["ci_high"] is None
    assert body["worst_group"] == {"group": {"label": "cat", "place": "water"}, "n": 1, "accuracy": 0.0}
    json.dumps(body, allow_nan=False)


def test_reference_groups_without_a_row_are_left_out_aloud(tmp_path: Path) -> None:
    store = _store(
        tmp_path / "f.h5",
        np.array([[1.0], [-1.0], [1.0], [1.0]]),
        label=["dog", "cat", "dog", "cat"],
        split=["test", "train", "train", "train"],
    )
    body, heard = _eval(_probe(tmp_path / "p", [1.0]), store, where="split=test")
    assert body["reference"]["missing_share"] == pytest.approx(2 / 3)
    assert any("66.7% of the reference rows" in text for text in heard.warnings)
    assert body["warnings"] == heard.warnings


@pytest.mark.parametrize("rows", ["split=train", "split=val", "split!=test"])
def test_rows_that_the_probe_has_seen_are_marked(
    rows: str, birds: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """kohpangwei/group_DRO#10."""
    with FeatureStore(birds[1]) as store:
        seen_by = {
            part: record_ids(np.array(store.ids, dtype=object)[store.mask(f"split={part}")])
            for part in ("train", "val")
        }
    path = [{"rank": rank, "weight_decay": 0.1, "converged": True} for rank in range(2)]
    selection = {"rule": "in-domain", "oracle": False, "chosen": 0, "path": path}
    probe = _probe(tmp_path / "seen", [1.0, 0.4, 0.0], rows=seen_by, selection=selection)
    assert run(["eval", str(probe), "-f", str(birds[1]), "--where", rows]) == 0
    shown = capsys.readouterr().out
    marks = {
        "split=train": "[training rows]",
        "split=val": "[validation rows]",
        "split!=test": "[training rows, validation rows]",
    }
    for name in ("average accuracy", "balanced accuracy", "log loss"):
        assert any(
            name in line and marks[rows].split(",")[0].rstrip("]") in line for line in shown.splitlines()
        )
    assert run(["eval", str(probe), "-f", str(birds[1]), "--where", "split=test"]) == 0
    assert "[training" not in capsys.readouterr().out
    body, _ = _eval(probe, birds[1], where=rows)
    seen = body["overlap"]
    assert (seen["train"] > 0, seen["val"] > 0) == ("val" not in rows, "train" not in rows)


def test_the_oracle_mark_travels(
    birds: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = _probe(tmp_path / "o", [1.0, 0.0, 0.0], selection={"rule": "oracle", "oracle": True})
    output = tmp_path / "r.json"
    assert run(["eval", str(probe), "-f", str(birds[1]), "-o", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "ORACLE: chosen by looking at the test rows" in shown
    assert "average accuracy [ORACLE]" in shown
    assert json.loads(output.read_text())["oracle"] is True


def test_features_of_another_encoder_are_refused(birds: tuple[Path, Path], tmp_path: Path) -> None:
    """openai/CLIP#85."""
    store = _store(
        tmp_path / "n.h5", np.eye(3), encoder={**ENCODER, "normalize": True}, label=["cat", "dog", "cat"]
    )
    with pytest.raises(MismatchError, match="different encoders") as caught:
        _eval(birds[0], store)
    assert "normalize: false in the first, true in the second" in str(caught.value)
    output = tmp_path / "r.json"
    assert run(["eval", str(birds[0]), "-f", str(store), "-o", str(output)]) == 4
    assert not output.exists()


def test_classes_that_are_missing_in_the_test_rows(tmp_path: Path) -> None:
    """scikit-learn/scikit-learn#10324."""
    probe = _probe(tmp_path / "p", np.eye(3), ("cat", "dog", "fox"))
    # Alone, dog and fox would have the codes 0 and 1.
    store = _store(tmp_path / "f.h5", np.eye(3)[[1, 2, 2, 0]], label=["dog", "fox", "fox", "fox"])
    body, _ = _eval(probe, store)
    assert body["accuracy"] == 0.75
    assert body["balanced_accuracy"] == pytest.approx((1 + 2 / 3) / 2)


def test_labels_that_the_probe_has_never_seen(birds: tuple[Path, Path], tmp_path: Path) -> None:
    store = _store(tmp_path / "f.h5", np.ones((4, 3)), label=["cat", "owl", "owl", "dog"])
    with pytest.raises(InputError, match="never seen") as caught:
        _eval(birds[0], store)
    assert "owl (2 rows)" in str(caught.value) and "--where 'label!=owl'" in str(caught.value)
    body, _ = _eval(birds[0], store, where="label!=owl")
    assert body["n"] == 2


def test_a_suggested_filter_can_be_pasted_into_a_shell(birds: tuple[Path, Path], tmp_path: Path) -> None:
    strange = ["owl's", "a|b", "x & y", "cat"]
    store = _store(tmp_path / "f.h5", np.ones((4, 3)), label=strange)
    with pytest.raises(InputError, match="never seen") as caught:
        _eval(birds[0], store)
    *_, where = shlex.split(str(caught.value.fix))
    assert _eval(birds[0], store, where=where)[0]["n"] == 1
    for given, meant in (
        ("label=cat,owl's", [True, False, False, True]),
        ("label!=cat,owl's", [False, True, True, False]),
    ):
        with FeatureStore(store) as opened:
            with pytest.raises(InputError, match="no value in column 'label'") as caught:
                opened.mask(given)
            (where,) = shlex.split(str(caught.value.fix))
            assert opened.mask(where).tolist() == meant


def test_rows_without_an_answer_are_left_out_and_counted(birds: tuple[Path, Path], tmp_path: Path) -> None:
    store = _store(
        tmp_path / "f.h5",
        np.ones((4, 3)),
        label=["cat", "", "dog", "dog"],
        place=["land", "land", "", "land"],
    )
    body, heard = _eval(birds[0], store, groups="place")
    assert (body["n"], body["rows_without_answer"]) == (3, 1)
    assert [entry["n"] for entry in body["groups"]] == [2]
    assert any("1 of 4 rows have no label" in text for text in heard.warnings)
    assert any("1 rows without a value of place are in none of its groups" in text for text in heard.warnings)
    blank = _store(tmp_path / "g.h5", np.ones((2, 3)), label=["cat", ""], split=["a", "b"])
    with pytest.raises(InputError, match="no row to evaluate"):
        _eval(birds[0], blank, where="split=b")


def test_one_predicted_class_is_a_warning(birds: tuple[Path, Path], tmp_path: Path) -> None:
    _, heard = _eval(_probe(tmp_path / "flat", [0.0, 0.0, 0.0], bias=[3.0]), birds[1])
    assert any("the probe predicts 'dog' for every row" in text for text in heard.warnings)
    assert not _eval(*birds)[1].warnings


def test_unknown_columns_and_values_list_those_there_are(birds: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="no column named 'plce'") as caught:
        _eval(*birds, groups="label,plce")
    assert "did you mean 'place'?" in str(caught.value) and "label, place, split" in str(caught.value)
    with pytest.raises(InputError, match="no value in column 'split' named 'tset'"):
        _eval(*birds, where="split=tset")
    with pytest.raises(InputError, match="no column named 'y'"):
        _eval(*birds, target="y")


def test_groups_of_columns_under_other_names(birds: tuple[Path, Path], tmp_path: Path) -> None:
    """bit-ml/bee, face-attribute-prediction#5."""
    store = _store(
        tmp_path / "celeba.h5",
        np.array([[1.0, 0, 0], [-1, 0, 0], [1, 0, 0], [-1, 0, 0]]),
        Blond_Hair=["-1", "1", "1", "-1"],
        Male=np.array([-1.0, 1.0, -1.0, 1.0]),
        label=["dog", "cat", "dog", "cat"],
    )
    body, _ = _eval(birds[0], store, groups="Blond_Hair,Male")
    groups = [entry["group"] for entry in body["groups"]]
    assert groups == [{"Blond_Hair": b, "Male": m} for b in ("-1", "1") for m in ("-1", "1")]


def test_many_combinations_list_only_those_that_occur(birds: tuple[Path, Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    store = _store(
        tmp_path / "f.h5",
        rng.normal(size=(100, 3)),
        label=rng.choice(["cat", "dog"], 100).tolist(),
        site=[f"s{i:03d}" for i in rng.integers(0, 90, 100)],
        year=[str(i) for i in rng.integers(2000, 2020, 100)],
    )
    body, _ = _eval(birds[0], store, groups="site,year")
    assert 0 < len(body["groups"]) <= 100
    assert all(row["n"] > 0 for row in body["groups"])


def test_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 2))
    store = _store(tmp_path / "f.h5", x, age=2 * x[:, 0] + 1, site=rng.choice(["a", "b"], 60).tolist())
    probe = _probe(tmp_path / "p", [2.0, 0.0], (), bias=[1.5], target="age")
    body, _ = _eval(probe, store, groups="site")
    assert body["mse"] == pytest.approx(0.25, rel=1e-5)
    assert body["r2"] == pytest.approx(1 - 0.25 / np.var(2 * x[:, 0]), rel=1e-5)
    assert [set(entry) for entry in body["groups"]] == [{"group", "n", "mse"}] * 2
    assert body["worst_group"]["mse"] == pytest.approx(0.25, rel=1e-5)
    assert run(["eval", str(probe), "-f", str(store)]) == 0
    assert "mean squared error" in capsys.readouterr().out
    better = _probe(tmp_path / "q", [2.0, 0.0], (), bias=[1.0], target="age")
    body = _eval(probe, store, compare=better)[0]
    assert body["comparison"]["mse_difference"] == pytest.approx(0.25, rel=1e-5)
    with pytest.raises(InputError, match="holds numbers, not classes") as caught:
        _eval(_probe(tmp_path / "c", [1.0, 0.0], target="age"), store)
    assert "numbers from" in str(caught.value)


def test_compare_with_a_probe_and_with_its_result(birds: tuple[Path, Path], tmp_path: Path) -> None:
    other = _probe(tmp_path / "other", [0.5, 1.0, 0.0])
    saved = tmp_path / "other.json"
    _eval(other, birds[1], where="split=test", output=saved)
    by_probe, _ = _eval(*birds, where="split=test", groups="label,place", compare=other)
    by_result, _ = _eval(*birds, where="split=test", groups="label,place", compare=saved)
    first, second = by_probe["comparison"], by_result["comparison"]
    assert {**first, "other": ""} == {**second, "other": ""}
    alone, _ = _eval(other, birds[1], where="split=test")
    assert first["difference"] == pytest.approx(by_probe["accuracy"] - alone["accuracy"])
    assert first["ci_low"] < first["difference"] < first["ci_high"]
    assert first["only_this_right"] - first["only_other_right"] == round(first["difference"] * first["n"])
    assert sum(entry["n"] for entry in first["groups"]) == first["n"]
    assert first["p_value"] < 0.05
    with pytest.raises(MismatchError, match="different rows"):
        _eval(*birds, where="split=val", compare=saved)


def test_the_column_that_a_probe_predicts_is_never_replaced(birds: tuple[Path, Path], tmp_path: Path) -> None:
    probe, store = _probe(tmp_path / "q", [0.0, 1.0, 0.0], ("cat", "dog"), target="pet"), birds[1]
    with pytest.raises(MismatchError, match="no column 'pet'") as caught:
        _eval(probe, store)
    assert "--target label" in str(caught.value)
    assert _eval(probe, store, target="label")[0]["accuracy"] < 0.7
    with pytest.raises(MismatchError, match="predict different columns") as caught:
        _eval(*birds, compare=probe)
    assert "--target label" in str(caught.value)
    assert _eval(*birds, compare=probe, target="label")[0]["comparison"]["difference"] > 0.2


def test_a_result_of_another_column_is_not_compared_with(birds: tuple[Path, Path], tmp_path: Path) -> None:
    saved = tmp_path / "places.json"
    places = _probe(tmp_path / "q", [0.0, 1.0, 0.0], ("land", "water"), target="place")
    _eval(places, birds[1], output=saved)
    with pytest.raises(MismatchError, match="different columns"):
        _eval(*birds, compare=saved)


@pytest.mark.parametrize("train", ["fold=1", "place=sea", "split=train & place=sea"])
def test_reference_rows_that_the_store_lacks_are_replaced_aloud(
    train: str, birds: tuple[Path, Path], tmp_path: Path
) -> None:
    body, heard = _eval(_probe(tmp_path / "q", [1.0, 0.4, 0.0], data={"train": train}), birds[1])
    assert body["reference"]["where"] == "split=train"
    assert any(f"the store has no rows of {train}" in text for text in heard.warnings)
    _, heard = _eval(_probe(tmp_path / "q", [1.0, 0.4, 0.0], data={"train": "split=train"}), birds[1])
    assert not heard.warnings


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 0.0, 0.0], [1e200, 0.0]])
@pytest.mark.parametrize("same", [True, False])
def test_few_constant_or_huge_rows_are_compared_without_a_number_that_json_lacks(
    task: str, values: list[float], same: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regression = task == "regression"
    label = np.array(values) if regression else ["dog" if value else "cat" for value in values]
    n = len(values)
    store = _store(tmp_path / "f.h5", np.eye(3)[:n], label=label, place=["land", "water", "land"][:n])
    classes = () if regression else ("cat", "dog")
    probe = _probe(tmp_path / "p", [1.0, 2.0, -1.0], classes)
    other = probe if same else _probe(tmp_path / "q", [-1.0, 0.5, 1.0], classes)
    output = tmp_path / "r.json"
    command = ["eval", str(probe), "-f", str(store), "--groups", "place", "--compare", str(other)]
    with np.errstate(over="ignore", invalid="ignore"):
        assert run([*command, "-o", str(output)]) == 0
        shown = capsys.readouterr().out
        assert run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["comparison"]
    assert found == json.loads(output.read_text())["comparison"]
    difference = found["mse_difference" if regression else "difference"]
    low, high = found["ci_low"], found["ci_high"]
    if regression and n == 1:
        assert low is high is None and "unknown from one row" in shown
    elif max(values) < 1e100:
        assert low <= difference <= high
        assert difference == 0 or not same
    for group in found.get("groups", ()):
        assert (group["ci_low"] is None) == (group["n"] == 0)


def test_comparing_a_probe_with_itself_finds_nothing(birds: tuple[Path, Path]) -> None:
    found = _eval(*birds, compare=birds[0])[0]["comparison"]
    assert (found["difference"], found["p_value"]) == (0.0, 1.0)
    assert found["ci_low"] < 0 < found["ci_high"]


def test_the_comparison_is_shown(birds: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    other = _probe(birds[0].parent / "other.safetensors", [0.5, 1.0, 0.0])
    command = ["eval", str(birds[0]), "-f", str(birds[1]), "--groups", "label,place"]
    assert run([*command, "--compare", str(other)]) == 0
    shown = capsys.readouterr().out
    assert "Against other.safetensors" in shown and "McNemar p = " in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_result_file_and_json_say_the_same(
    birds: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "r.json"
    command = ["eval", str(birds[0]), "-f", str(birds[1]), "--where", "split=test", "-o", str(output)]
    assert run([*command, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    saved = json.loads(output.read_text())
    assert saved["kind"] == "eval" and saved["ncm_format"] == "ncm-result"
    assert {name: saved[name] for name in shown} == shown
    assert len(saved["rows"]["right"]) == saved["n"]
    assert {"n", "accuracy", "adjusted_accuracy", "balanced_accuracy", "log_loss", "worst_group"} <= set(
        shown
    )


@pytest.mark.slow
def test_4795_rows_take_about_a_second_and_nothing_heavy(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    columns = {name: rng.choice(["a", "b"], 4795).tolist() for name in ("label", "place", "split")}
    store = _store(tmp_path / "f.h5", rng.normal(size=(4795, 512)), **columns)
    probe = _probe(tmp_path / "p.safetensors", rng.normal(size=512), ("a", "b"))
    # Processor time, which a busy machine changes little; 1 s is the aim, and the rest is for slow machines.
    assert light_seconds("eval", probe, "-f", store, "--groups", "label,place") < 2


def test_a_probe_whose_header_is_as_long_as_a_result_begins_is_a_probe(
    birds: tuple[Path, Path], tmp_path: Path
) -> None:
    """The first bytes of a probe are the length of its header: of 0x7b20 they look like `` {``."""
    path, features = birds
    probe, other, length = read_probe(path), tmp_path / "long", 0
    for _ in range(2):
        meta = {**probe.meta, "note": "x" * (0x7B20 - length if length else 0)}
        write_probe(other, dataclasses.replace(probe, meta=meta))
        length = int.from_bytes(other.read_bytes()[:8], "little")
    assert length == 0x7B20
    assert _eval(path, features, compare=other)[0]["comparison"]
