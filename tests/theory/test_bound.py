"""``ncm bound`` on stores: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.errors import InputError, MismatchError, UsageError
from ncm_cli.main import run
from ncm_cli.store.files import read_result
from ncm_cli.store.pairs import read_pairs, write_pairs
from ncm_cli.theory.bound import bound
from ncm_cli.theory.options import BoundOptions
from tests.world import ENCODER, Heard

from .bound_files import make, write_pairs_of

KEYS = [
    *("loss", "spurious_dim", "rank", "s", "term_1", "theta_m_theta", "term_2", "term_2_upper", "bound"),
    *("erm_bound", "noise_corollary", "test_risk", "slack", "holds", "exact", "zero_one"),
]
NOISE_KEYS = {"applicable", "value", "epsilon_norm", "sigma_s", "sigma_s_next"}


def _options(folder: Path, **changes: object) -> BoundOptions:
    base = BoundOptions(
        probe=folder / "probe.safetensors", features=folder / "features.h5", oracle_pairs=folder / "oracle.h5"
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(("classes", "loss"), [(2, "logistic"), (4, "cross-entropy"), (0, "squared")])
@pytest.mark.parametrize("rank", [0, 2, 3, 5])
def test_the_bound_holds_for_every_loss_and_rank(tmp_path: Path, classes: int, loss: str, rank: int) -> None:
    make(tmp_path, seed=rank + 10 * classes, classes=classes, rank=rank)
    report = bound(_options(tmp_path))
    assert report["loss"] == loss and report["rank"] == rank
    assert report["exact"] and report["holds"] and report["slack"] >= 0
    assert report["spurious_dim"] == 3 and report["estimates"]["spurious_dim"] == "estimated"
    assert (report["zero_one"] is None) == (classes == 0)
    if report["zero_one"]:
        assert report["zero_one"]["test_error"] <= report["zero_one"]["bound"] + 1e-12
    if rank >= 3:
        assert report["term_2"] < 0.2 * report["erm_bound"]


def test_json_has_the_names_scripts_rely_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, classes=2)
    line = f"bound {tmp_path}/probe.safetensors --features {tmp_path}/features.h5"
    line += f" --oracle-pairs {tmp_path}/oracle.h5 -o {tmp_path}/bound.json --json"
    assert run(line.split()) == 0
    shown = json.loads(capsys.readouterr().out)
    saved = read_result(tmp_path / "bound.json", kind="bound")
    for key in KEYS:
        assert shown[key] == saved[key]
    assert set(shown["noise_corollary"]) >= NOISE_KEYS
    assert set(shown["zero_one"]) == {"twin_error", "flip_rate", "bound", "test_error"}
    assert shown["bound"] == pytest.approx(shown["term_1"] + shown["term_2"])
    assert shown["slack"] == pytest.approx(shown["bound"] - shown["test_risk"])
    low, high = shown["intervals"]["bound"]
    assert low < shown["bound"] < high
    assert shown["estimates"]["oracle_pairs"] == 200


def test_table_and_explanations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, classes=2)
    line = f"bound {tmp_path}/probe.safetensors --features {tmp_path}/features.h5"
    line += f" --oracle-pairs {tmp_path}/oracle.h5 --oracle-train split=train --pairs {tmp_path}/noisy.h5"
    assert run([*line.split(), "--ranks", "0:2", "--explain"]) == 0
    out = capsys.readouterr().out
    for part in (
        "Term I",
        "Term II",
        "λ₁",
        "ERM bound",
        "Thm 1",
        "Cor. 2",
        "The bound holds",
        "not applicable",
    ):
        assert part in out
    assert "exact: Term I is taken on the twins" in out
    assert out.count("\n  ") > 20


def test_term_1_on_training_rows_is_up_to_sampling_error(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    twins, train = bound(_options(tmp_path)), bound(_options(tmp_path, train="split=train"))
    assert twins["exact"] and not train["exact"]
    assert train["estimates"]["train_rows"] == 300
    assert train["term_1"] != twins["term_1"]
    assert train["term_2"] == twins["term_2"]
    assert train["estimates"]["term_1_on"] == "training rows"


def test_noise_corollary_with_clean_pairs(tmp_path: Path) -> None:
    make(tmp_path, classes=2, rank=3)
    shared = {"pairs": tmp_path / "noisy.h5", "clean_pairs": tmp_path / "clean.h5"}
    good = bound(_options(tmp_path, **shared))
    assert good["noise_corollary"]["applicable"], good["noise_corollary"]["reasons"]
    assert good["noise_corollary"]["epsilon_norm"] == pytest.approx(0.01, rel=1e-2)
    assert good["noise_corollary"]["value"] is not None and good["noise_corollary"]["value"] >= good["term_2"]
    fewer = bound(_options(tmp_path, **shared, spurious_dim=5))
    assert not fewer["noise_corollary"]["applicable"] and fewer["noise_corollary"]["value"] is not None
    assert "below |I| = 5" in fewer["noise_corollary"]["reasons"][0]


def test_a_result_with_a_given_number_of_directions_is_read(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    bound(_options(tmp_path, spurious_dim=3, output=tmp_path / "b.json"))
    assert read_result(tmp_path / "b.json")["estimates"]["tolerance"] is None


def test_clean_pairs_of_other_ids_are_refused(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    store = read_pairs(tmp_path / "clean.h5")
    write_pairs(tmp_path / "clean.h5", dataclasses.replace(store, id_a=tuple(f"x{i}" for i in store.id_a)))
    with pytest.raises(MismatchError, match="lack the ids of some noisy pairs"):
        bound(_options(tmp_path, pairs=tmp_path / "noisy.h5", clean_pairs=tmp_path / "clean.h5"))


def test_pairs_that_the_probe_was_not_fitted_with_are_refused(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    assert bound(_options(tmp_path, pairs=tmp_path / "noisy.h5", ranks="0,1"))["path"]
    with pytest.raises(MismatchError, match="not the pairs that the probe was fitted with"):
        bound(_options(tmp_path, pairs=tmp_path / "oracle.h5", ranks="0,1"))


def test_oracle_pairs_the_wrong_way_round_are_refused(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    store = read_pairs(tmp_path / "oracle.h5")
    turned = dataclasses.replace(
        store,
        features_a=store.features_b,
        features_b=store.features_a,
        id_a=store.id_b,
        id_b=store.id_a,
    )
    write_pairs(tmp_path / "oracle.h5", turned)
    with pytest.raises(InputError, match="the wrong way round"):
        bound(_options(tmp_path))


def test_oracle_pairs_of_training_rows_are_warned_about(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    store = read_pairs(tmp_path / "oracle.h5")
    ids = tuple(f"t-{i}" for i in range(len(store.id_a)))
    write_pairs(tmp_path / "oracle.h5", dataclasses.replace(store, id_a=ids))
    listener = Heard()
    bound(_options(tmp_path), reporter=listener)
    assert any("200 of 200 oracle pairs have a first member that the probe" in w for w in listener.warnings)


def test_rank_path_meets_the_probe_at_its_own_rank(tmp_path: Path) -> None:
    make(tmp_path, classes=3, rank=3)
    listener = Heard()
    report = bound(_options(tmp_path, pairs=tmp_path / "noisy.h5", ranks="0:20"), reporter=listener)
    assert [row["rank"] for row in report["path"]] == list(range(9))
    assert "ranks above 8 are skipped" in listener.notes[0]
    own = report["path"][3]
    assert own["term_1"] == pytest.approx(report["term_1"], rel=1e-4)
    assert own["term_2"] == pytest.approx(report["term_2"], rel=1e-4)
    assert own["test_risk"] == pytest.approx(report["test_risk"], rel=1e-4)
    for row in report["path"]:
        assert row["test_risk"] <= row["bound"] + 1e-9
        assert row["test_error"] <= row["zero_one_bound"] + 1e-12


def test_pair_counts_use_more_and_more_pairs(tmp_path: Path) -> None:
    make(tmp_path, classes=2, rank=3)
    report = bound(_options(tmp_path, pairs=tmp_path / "noisy.h5", pair_counts="0:3,40,99"))
    assert [(row["pairs"], row["rank"]) for row in report["pair_counts"]] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (40, 3),
    ]
    assert report["pair_counts"][-1]["test_risk"] == pytest.approx(report["test_risk"], rel=1e-4)
    assert report["pair_counts"][0]["term_2"] > 5 * report["pair_counts"][-1]["term_2"]


@pytest.mark.parametrize("option", [{"ranks": "0:3"}, {"pair_counts": "5"}, {"clean_pairs": Path("c.h5")}])
def test_options_that_need_pairs(tmp_path: Path, option: dict) -> None:
    with pytest.raises(UsageError, match="needs --pairs"):
        bound(_options(tmp_path, **option))


def test_another_encoder_is_refused(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    store = read_pairs(tmp_path / "oracle.h5")
    encoder = {**ENCODER, "model": "other"}
    from ncm_cli.store.digests import fingerprint

    write_pairs(
        tmp_path / "oracle.h5", dataclasses.replace(store, encoder=encoder, fingerprint=fingerprint(encoder))
    )
    with pytest.raises(MismatchError, match="different encoders") as caught:
        bound(_options(tmp_path))
    assert "model" in str(caught.value)


def _relabel(
    path: Path, labels_a: tuple[str, ...], labels_b: tuple[str, ...], *, rename: bool = True
) -> None:
    store = read_pairs(path)
    ids = tuple(f"new-{i}" for i in range(store.pairs)) if rename else store.id_a
    write_pairs(path, dataclasses.replace(store, id_a=ids, label_a=labels_a, label_b=labels_b))


def test_unlabelled_oracle_pairs(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    store = read_pairs(tmp_path / "oracle.h5")
    some = ("", *store.label_a[1:])
    _relabel(tmp_path / "oracle.h5", some, some)
    listener = Heard()
    report = bound(_options(tmp_path), reporter=listener)
    assert report["estimates"]["oracle_pairs"] == 199 and report["estimates"]["unlabelled_pairs"] == 1
    assert "1 of 200 oracle pairs have no known label" in listener.warnings[0]
    none = ("",) * 200
    _relabel(tmp_path / "oracle.h5", none, none)
    with pytest.raises(InputError, match="no oracle pair has a label"):
        bound(_options(tmp_path))


def test_labels_come_from_the_features_by_id(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    expected = bound(_options(tmp_path))["test_risk"]
    none = ("",) * 200
    _relabel(tmp_path / "oracle.h5", none, none, rename=False)
    assert bound(_options(tmp_path))["test_risk"] == expected


def test_members_of_different_labels_are_said(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    store = read_pairs(tmp_path / "oracle.h5")
    other = tuple("class 1" if label == "class 0" else "class 0" for label in store.label_a[:7])
    _relabel(tmp_path / "oracle.h5", store.label_a, (*other, *store.label_b[7:]))
    listener = Heard()
    report = bound(_options(tmp_path), reporter=listener)
    assert report["estimates"]["disagreeing_pairs"] == 7 and report["holds"]
    assert "7 oracle pairs have members of different labels" in listener.warnings[0]


def test_one_oracle_pair_is_enough(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    store = read_pairs(tmp_path / "oracle.h5")
    write_pairs_of(
        tmp_path / "oracle.h5", store.features_a[:1], store.features_b[:1], [store.label_a[0]], name="o"
    )
    report = bound(_options(tmp_path))
    assert report["estimates"]["oracle_pairs"] == 1 and report["spurious_dim"] == 1 and report["holds"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bootstrap": -1}, "--bootstrap must be at least 0"),
        ({"spurious_dim": -2}, "--spurious-dim must be at least 0"),
    ],
)
def test_numbers_out_of_range(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bound(_options(tmp_path, **change))


def test_more_spurious_dimensions_than_dimensions(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    with pytest.raises(UsageError, match="more than the features have dimensions"):
        bound(_options(tmp_path, spurious_dim=9))


def test_training_rows_that_are_none(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    with pytest.raises(InputError, match="no rows for Term I"):
        bound(_options(tmp_path, train="split=train & split=test"))


def test_no_bootstrap(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    assert bound(_options(tmp_path, bootstrap=0))["intervals"] == {}


def test_result_is_the_same_bits(tmp_path: Path) -> None:
    make(tmp_path, classes=3)
    first, second = (bound(_options(tmp_path)) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert np.isfinite(first["bound"])


def test_oracle_trained_on_the_test_domain(tmp_path: Path) -> None:
    make(tmp_path, classes=2, rank=0)
    store = read_pairs(tmp_path / "oracle.h5")
    write_pairs_of(
        tmp_path / "oracle.h5", store.features_a[:100], store.features_b[:100], list(store.label_a[:100])
    )
    oracle = bound(_options(tmp_path, oracle_train="split=test"))["oracle"]
    assert oracle is not None and oracle["train_rows"] == 200
    assert oracle["test_error"] < 0.2 and oracle["gap"] > 0.05


def test_oracle_is_not_trained_on_the_rows_it_is_measured_on(tmp_path: Path) -> None:
    make(tmp_path, classes=2)
    with pytest.raises(InputError, match="trained on the rows it is measured on"):
        bound(_options(tmp_path, oracle_train="split=test"))


def test_summary_of_a_path(tmp_path: Path) -> None:
    make(tmp_path, classes=2, rank=3)
    found = bound(_options(tmp_path, pairs=tmp_path / "noisy.h5", ranks="0:6"))
    summary = found["summary"]
    assert summary is not None
    errors = [row["test_error"] for row in found["path"]]
    assert summary["best_test_accuracy"] == pytest.approx(1 - min(errors))
    assert summary["erm_test_accuracy"] == pytest.approx(1 - errors[0])
    bounds = [row["zero_one_bound"] for row in found["path"]]
    assert summary["bound_rank"] == bounds.index(min(bounds))
    assert summary["bound_regret"] >= 0


def test_what_is_wholly_removed_has_an_interval_of_nothing(tmp_path: Path) -> None:
    """A basis of all dimensions leaves no shift in, in no resample."""
    make(tmp_path, rank=8)
    report = bound(_options(tmp_path))
    assert report["misalignment"] == pytest.approx(0, abs=1e-9)
    low, high = report["intervals"]["misalignment"]
    assert 0 <= low <= high < 1e-9
