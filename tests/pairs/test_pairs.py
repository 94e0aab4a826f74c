"""Pairs from a table: ids as text, every problem named, nothing leaks across the holdout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError
from ncm_cli.pairs.options import PairsOptions, parse_holdout
from ncm_cli.pairs.pairs import pairs
from ncm_cli.solvers.projection import spectrum
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.pairs import PairStore, read_pairs
from tests.world import ENCODER, Heard, write_store

Make = Callable[..., Path]


def _run(source: Path, features: Path, **more: object) -> tuple[PairStore, Heard]:
    heard = Heard()
    output = features.parent / "out.h5"
    pairs(PairsOptions(source=source, features=features, output=output, **more), reporter=heard)
    return read_pairs(output), heard


@pytest.fixture
def store(make_store: Make) -> Path:
    rng = np.random.default_rng(0)
    return make_store("f.h5", rng.normal(size=(40, 8)), label=["x", "y"] * 20)


def test_a_table_gives_members_differences_and_their_spectrum(store: Path, make_table: Make) -> None:
    rows = [(f"r{i}", f"r{i + 20}") for i in range(20)]
    made, _ = _run(make_table(rows), store, holdout="5")
    with FeatureStore(store) as features:
        x = features.read()
    assert made.id_a == tuple(f"r{i}" for i in range(20))
    np.testing.assert_array_equal(made.features_a, x[:20])
    np.testing.assert_array_equal(made.delta, (x[:20] - x[20:]).T)
    assert made.holdout.sum() == 5
    values = np.linalg.svd(made.delta[:, ~made.holdout].astype(float), compute_uv=False)
    np.testing.assert_allclose(made.singular_values, values, rtol=1e-6)
    assert made.label_a[:2] == ("x", "y")
    assert made.strategy == "table"
    assert made.sources[0]["content_sha256"]


def test_blank_ids_and_words_for_nothing(make_store: Make, make_table: Make) -> None:
    """pandas-dev/pandas#10647."""
    features = np.random.default_rng(1).normal(size=(4, 3))
    store = make_store("f.h5", features, ids=["NA", "null", "nan", "None"])
    made, _ = _run(make_table([("NA", "null"), ("nan", "None")]), store, holdout="0")
    assert (made.id_a, made.id_b) == (("NA", "nan"), ("null", "None"))
    with pytest.raises(InputError, match=r"3 problems") as caught:
        _run(make_table([("NA", ""), (" ", ""), ("nan", "None")]), store)
    assert "row 1 (line 2): id_b is blank" in str(caught.value)
    assert "row 2 (line 3): id_a is blank" in str(caught.value)


def test_ids_are_text_and_hints_name_what_spreadsheets_lose(make_store: Make, make_table: Make) -> None:
    store = make_store("f.h5", np.eye(3), ids=["001", "01", "b.png"])
    with pytest.raises(InputError, match="2 problems") as caught:
        _run(make_table([("1", "01"), ("001", "img/b.jpg")]), store)
    assert "row 1 (line 2): id_a '1' isn't in f.h5 (did you mean '001'?)" in str(caught.value)
    assert "row 2 (line 3): id_b 'img/b.jpg' isn't in f.h5 (did you mean 'b.png'?)" in str(caught.value)
    assert not (store.parent / "out.h5").exists()


def test_ids_with_accents_and_zeros_match(make_store: Make, make_table: Make) -> None:
    """h5py/h5py#2115."""
    store = make_store("f.h5", np.eye(2, 5), ids=["001", "é b"])
    made, _ = _run(make_table([("é b", "001")]), store, holdout="0")
    assert made.id_a == ("é b",)


def test_all_unknown_ids_are_listed_with_their_rows(store: Path, make_table: Make) -> None:
    with pytest.raises(InputError, match="30 problems") as caught:
        _run(make_table([(f"zz{i}", "r1") for i in range(30)]), store)
    assert all(f"'zz{i}'" in str(caught.value) for i in range(30))


def test_a_row_paired_with_itself_is_refused(store: Path, make_table: Make) -> None:
    with pytest.raises(InputError, match="1 problem") as caught:
        _run(make_table([("r1", "r2"), ("r3", "r3")]), store)
    assert "row 2 (line 3): 'r3' is paired with itself" in str(caught.value)


def test_repeated_pairs_are_reported_either_way_round(store: Path, make_table: Make) -> None:
    """neural-cherche#4, D-SCRIPT#12."""
    rows = [("r1", "r2"), ("r3", "r4"), ("r2", "r1"), ("r1", "r2"), ("r5", "r6"), ("r7", "r8")]
    made, heard = _run(make_table(rows), store)
    assert made.diagnostics["repeated"]["count"] == 2
    assert made.diagnostics["repeated"]["pairs"][0] == {"id_a": "r2", "id_b": "r1"}
    assert any("2 of 6 pairs repeat" in text for text in heard.warnings)


@pytest.mark.parametrize("seed", range(8))
def test_pairs_that_share_an_id_are_on_one_side_of_the_holdout(
    seed: int, make_store: Make, make_table: Make
) -> None:
    rng = np.random.default_rng(seed)
    store = make_store("f.h5", rng.normal(size=(60, 4)))
    drawn = {tuple(rng.choice(60, 2, replace=False)) for _ in range(25)}
    rows = [(f"r{i}", f"r{j}") for i, j in sorted(drawn)]
    made, _ = _run(make_table([*rows, *rows[:3]]), store, holdout="0.3", seed=seed)
    held = {*np.array(made.id_a)[made.holdout], *np.array(made.id_b)[made.holdout]}
    fitted = {*np.array(made.id_a)[~made.holdout], *np.array(made.id_b)[~made.holdout]}
    assert held and not held & fitted


def test_the_holdout_has_the_size_asked_for_and_depends_on_the_seed(store: Path, make_table: Make) -> None:
    table = make_table([(f"r{i}", f"r{i + 20}") for i in range(20)])
    masks = [_run(table, store, holdout="0.25", seed=seed)[0].holdout for seed in (0, 0, 1)]
    assert [mask.sum() for mask in masks] == [5, 5, 5]
    assert (masks[0] == masks[1]).all() and (masks[0] != masks[2]).any()
    assert _run(table, store, holdout="7")[0].holdout.sum() == 7
    assert _run(table, store, holdout="0")[0].holdout.sum() == 0
    assert _run(table, store)[0].holdout.sum() == 0, "none unless asked for"


def test_a_holdout_that_cant_be_made_is_said(store: Path, make_table: Make) -> None:
    chain = make_table([(f"r{i}", f"r{i + 1}") for i in range(20)])
    made, heard = _run(chain, store, holdout="0.25")
    assert made.holdout.sum() == 0
    assert any("only 0 of the 5 pairs wanted are held out" in text for text in heard.warnings)
    with pytest.raises(InputError, match="leaves no pair"):
        _run(chain, store, holdout="20")


def test_a_column_can_say_which_pairs_are_held_out(store: Path, make_table: Make) -> None:
    rows = [("r1", "r2", "1", "x"), ("r3", "r4", "no", "x"), ("r5", "r2", "0", "x")]
    header = ("id_a", "id_b", "holdout", "note")
    made, heard = _run(make_table(rows, header), store, holdout_col="holdout")
    assert made.holdout.tolist() == [True, False, False]
    assert any("2 pairs share an id" in text for text in heard.warnings)
    _, heard = _run(make_table(rows, header), store)
    assert any("isn't used" in text for text in heard.notes)
    with pytest.raises(InputError, match="1 problem") as caught:
        _run(make_table([*rows, ("r8", "r9", "perhaps", "")], header), store, holdout_col="holdout")
    assert "row 4 (line 5): holdout is 'perhaps', not 1 or 0" in str(caught.value)
    with pytest.raises(InputError, match="every pair is held out"):
        _run(make_table(rows[:1], header), store, holdout_col="holdout")


def test_unknown_columns_of_the_table_are_named(store: Path, make_table: Make) -> None:
    with pytest.raises(InputError, match="no column named 'id_a'") as caught:
        _run(make_table([("r1", "r2")], ("ida", "id_b")), store)
    assert "did you mean 'ida'?" in str(caught.value) and "--a-col" in str(caught.value)
    made, _ = _run(make_table([("r1", "r2")], ("left", "right")), store, a_col="left", b_col="right")
    assert made.pairs == 1


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "1.0", "nan", "inf", "2e400"])
def test_holdouts_that_mean_nothing_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError, match="--holdout"):
        parse_holdout(text)


def test_either_a_table_or_a_strategy(store: Path, make_table: Make) -> None:
    with pytest.raises(UsageError, match="either from a table, from --match or from --prompts"):
        pairs(PairsOptions(features=store, output=store.parent / "o.h5"))
    with pytest.raises(UsageError, match="either from a table"):
        _run(make_table([("r1", "r2")]), store, match="random")
    with pytest.raises(UsageError, match="--same needs --match"):
        _run(make_table([("r1", "r2")]), store, same="label")


def test_two_stores_of_one_encoder_or_a_view_of_it(make_store: Make, make_table: Make) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(2, 6, 3)).astype(np.float32)
    first = make_store("a.h5", a)
    view = make_store("b.h5", b, encoder={**ENCODER, "view": {"augment": "grayscale", "seed": 0}})
    table = make_table([("r0", "r0"), ("r1", "r5")])
    made, _ = _run(table, first, features_b=view, holdout="0")
    np.testing.assert_array_equal(made.delta, np.stack([a[0] - b[0], a[1] - b[5]], axis=1))
    assert "view" not in made.encoder
    assert len(made.sources) == 2
    other = make_store("c.h5", b, encoder={**ENCODER, "normalize": True})
    with pytest.raises(MismatchError, match="different encoders") as caught:
        _run(table, first, features_b=other)
    assert "normalize: false in the first, true in the second" in str(caught.value)


def test_a_pair_of_a_training_and_a_test_row(make_store: Make, make_table: Make) -> None:
    """Match-R-CNN-Reproduction#3."""
    features = np.random.default_rng(3).normal(size=(6, 4))
    split = ["train", "train", "test", "val", "test", "train"]
    store = make_store("f.h5", features, split=split)
    table = make_table([("r0", "r1"), ("r0", "r2"), ("r3", "r4"), ("r1", "r5")])
    made, heard = _run(table, store, holdout="0")
    assert list(zip(made.id_a, made.id_b, strict=True)) == [("r0", "r1"), ("r1", "r5")]
    assert made.diagnostics["straddling"]["count"] == 2
    assert any("left out: r0 – r2, r3 – r4" in text for text in heard.warnings)
    with pytest.raises(InputError, match="2 pairs straddle training and test"):
        _run(table, store, straddling="error")
    assert _run(table, store, straddling="keep", holdout="0")[0].pairs == 4
    with pytest.raises(InputError, match="every pair straddles"):
        _run(make_table([("r0", "r2")]), store)


def test_a_training_row_that_is_a_test_file_byte_for_byte(make_store: Make, make_table: Make) -> None:
    """Match-R-CNN-Reproduction#3."""
    features = np.random.default_rng(4).normal(size=(5, 4))
    digests = ("a" * 64, "b" * 64, "c" * 64, "a" * 64, "d" * 64)
    store = make_store("f.h5", features, split=["train", "train", "train", "test", "train"], sha256=digests)
    made, _ = _run(make_table([("r0", "r1"), ("r2", "r4")]), store, holdout="0")
    assert made.id_a == ("r2",)
    assert made.diagnostics["straddling"]["pairs"] == [{"id_a": "r0", "id_b": "r1"}]


def test_test_rows_can_be_named(make_store: Make, make_table: Make) -> None:
    store = make_store("f.h5", np.random.default_rng(5).normal(size=(4, 3)), split=["0", "0", "2", "1"])
    table = make_table([("r0", "r1"), ("r1", "r2")])
    assert _run(table, store, holdout="0")[0].pairs == 2
    assert _run(table, store, holdout="0", test="split=2")[0].pairs == 1


def test_labels_that_disagree_are_counted(store: Path, make_table: Make) -> None:
    made, heard = _run(make_table([("r0", "r1"), ("r0", "r2"), ("r3", "r5")]), store, holdout="0")
    assert made.diagnostics["label_disagreement"]["count"] == 1
    assert made.diagnostics["label_disagreement"]["pairs"] == [{"id_a": "r0", "id_b": "r1"}]
    assert any("1 of 3 pairs have different labels" in text for text in heard.warnings)


def test_pairs_need_no_labels(make_store: Make, make_table: Make) -> None:
    store = make_store("f.h5", np.random.default_rng(6).normal(size=(4, 3)))
    made, _ = _run(make_table([("r0", "r1"), ("r2", "r3")]), store, holdout="0")
    assert made.diagnostics["label_disagreement"] is None
    assert made.label_a == ("", "")


def test_identical_features_and_zero_differences(make_store: Make, make_table: Make) -> None:
    x = np.random.default_rng(7).normal(size=(6, 4))
    x[1] = x[0]
    made, heard = _run(
        make_table([("r0", "r1"), ("r2", "r3"), ("r4", "r5")]), make_store("f.h5", x), holdout="0"
    )
    assert made.diagnostics["identical"]["count"] == 1
    assert made.rank == 2
    assert any("identical features" in text for text in heard.warnings)
    made, heard = _run(make_table([("r0", "r1")]), make_store("g.h5", x), holdout="0")
    assert made.rank == 0
    assert any("nothing can be removed" in text for text in heard.warnings)


def test_the_order_of_the_rows_changes_the_spectrum_by_nothing_that_matters(
    store: Path, make_table: Make
) -> None:
    rows = [(f"r{i}", f"r{i + 20}") for i in range(20)]
    one, _ = _run(make_table(rows), store, holdout="0")
    shuffled = [rows[i][::-1] for i in np.random.default_rng(8).permutation(20)]
    two, _ = _run(make_table(shuffled), store, holdout="0")
    np.testing.assert_allclose(one.singular_values, two.singular_values, rtol=1e-9)
    bases = [spectrum(made.delta).basis for made in (one, two)]
    np.testing.assert_allclose(bases[0] @ bases[0].T, bases[1] @ bases[1].T, atol=1e-9)


_TEXT = st.text(alphabet=st.sampled_from("ab01\"',;\t\n\r\0é \\/r"), max_size=12)
_BYTES = st.one_of(
    st.binary(max_size=120),
    st.lists(st.lists(_TEXT, max_size=4), max_size=6).map(
        lambda rows: "\n".join(",".join(row) for row in rows).encode()
    ),
    st.lists(st.tuples(st.sampled_from(["r0", "r1", "r2", "", " ", "x", "R1"]), _TEXT), max_size=5).map(
        lambda rows: ("id_a,id_b\n" + "\n".join(",".join(row) for row in rows)).encode()
    ),
)


@pytest.fixture(scope="module")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("malformed") / "f.h5", np.eye(3, 4), {})


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=_BYTES)
@pytest.mark.slow
def test_malformed_tables_raise_nothing_but_our_errors(data: bytes, small_store: Path) -> None:
    table = small_store.parent / "pairs.csv"
    table.write_bytes(data)
    output = small_store.parent / "out.h5"
    output.unlink(missing_ok=True)
    try:
        pairs(PairsOptions(source=table, features=small_store, output=output))
    except NcmError as error:
        assert error.what
        assert not output.exists()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_isnt_finite_is_refused_by_id_before_any_svd(
    value: float, store: Path, make_table: Make
) -> None:
    """numpy/numpy#5588."""
    import h5py

    with h5py.File(store, "r+") as file:
        features = file["features"][:]
        features[3, 2] = value
        del file["features"]
        file.create_dataset("features", data=features)
        # As another program would write it, without digests.
        for name in [name for name in file.attrs if "sha256" in name or "digest" in name]:
            del file.attrs[name]
        for name in [name for name in file if "sha256" in name]:
            del file[name]
    with pytest.raises(InputError, match=r"finite|NaN") as caught:
        _run(make_table([("r3", "r4"), ("r5", "r6")]), store)
    assert "r3" in str(caught.value)
    assert not (store.parent / "out.h5").exists()


def test_dropped_pairs_leave_the_others_as_they_were(store: Path, make_table: Make) -> None:
    rows = [(f"r{i}", f"r{i + 20}") for i in range(20)]
    table = make_table(rows)
    whole, _ = _run(table, store, holdout="0.25")
    drop = make_table([("r3", "r23"), ("r27", "r7"), ("r3", "r23")], name="drop.csv")
    made, _ = _run(table, store, holdout="0.25", drop=drop)
    keep = [i for i in range(20) if i not in (3, 7)]
    assert made.id_a == tuple(whole.id_a[i] for i in keep)
    np.testing.assert_array_equal(made.holdout, whole.holdout[keep])
    assert made.diagnostics["dropped"] == [{"id_a": f"r{i}", "id_b": f"r{i + 20}"} for i in (3, 7)]
    assert made.diagnostics["pairs"] == 18
    for bad, message in (([("r3", "r24")], "1 of 1 pairs to drop"), (rows, "every pair is dropped")):
        with pytest.raises(InputError, match=message):
            _run(table, store, drop=make_table(bad, name="bad.csv"))
    with pytest.raises(InputError, match=r"row 2 \(line 3\): r1 – nope"):
        _run(table, store, drop=make_table([rows[0], ("r1", "nope")], name="bad.csv"))


@pytest.mark.parametrize("match", ["random", "nearest"])
def test_dropping_does_not_match_again(match: str, make_store: Make, make_table: Make) -> None:
    rng = np.random.default_rng(3)
    store = make_store(
        "f.h5", rng.normal(size=(60, 4)), label=["x", "y"] * 30, domain=["p"] * 30 + ["q"] * 30
    )
    output = store.parent / "out.h5"
    options = PairsOptions(
        match=match, same="label", across="domain", features=store, output=output, holdout="0.3", count=20
    )
    pairs(options)
    whole = read_pairs(output)
    drop = make_table([(whole.id_b[5], whole.id_a[5])], name="drop.csv")
    pairs(dataclasses.replace(options, drop=drop))
    made = read_pairs(output)
    assert made.pairs == 19
    assert [*zip(made.id_a, made.id_b, made.holdout.tolist(), strict=True)] == [
        pair
        for i, pair in enumerate(zip(whole.id_a, whole.id_b, whole.holdout.tolist(), strict=True))
        if i != 5
    ]


def test_a_straddling_pair_may_be_dropped(make_store: Make, make_table: Make) -> None:
    store = make_store("f.h5", np.eye(6), split=["train"] * 5 + ["test"])
    table = make_table([("r0", "r1"), ("r2", "r3"), ("r4", "r5")])
    made, _ = _run(table, store, drop=make_table([("r5", "r4"), ("r0", "r1")], name="drop.csv"))
    assert made.id_a == ("r2",)
