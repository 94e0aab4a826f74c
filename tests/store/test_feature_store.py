"""What is written comes back, in any order asked for; what can't be trusted is refused by id."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ncm_cli.errors import InputError, UsageError
from ncm_cli.main import run as command
from ncm_cli.store.columns import Column, Files, NumericColumn
from ncm_cli.store.digests import MAX_STORE_COLUMNS, encode_text
from ncm_cli.store.features import FeatureStore, write_features
from ncm_cli.store.hdf5 import MAX_OBJECTS

from .conftest import store_arguments


def test_round_trip(tmp_path: Path) -> None:
    features = np.random.default_rng(1).standard_normal((300, 5)).astype(np.float32)
    given = store_arguments(features=features)
    write_features(tmp_path / "f.h5", **given)
    with FeatureStore(tmp_path / "f.h5") as store:
        assert (store.rows, store.dim, store.dtype) == (300, 5, "float32")
        assert store.ids == tuple(given["ids"])
        np.testing.assert_array_equal(store.read(), features)
        assert list(store.columns) == ["label", "place", "age/years"]
        for column in given["columns"]:
            found = store.column(column.name)
            if isinstance(column, Column):
                np.testing.assert_array_equal(found.codes, column.codes)
                assert found.categories == column.categories
            else:
                np.testing.assert_array_equal(found.values, column.values)
        assert (store.label_column, store.split_column) == ("label", None)
        assert store.encoder == given["encoder"]
        assert store.failed == tuple(given["failed"])
        assert store.files is not None
        assert store.files.path == given["files"].path
        np.testing.assert_array_equal(store.files.mtime_ns, given["files"].mtime_ns)
        assert (store.options, store.request) == (given["options"], given["request"])


@pytest.mark.parametrize("dim", [3, pytest.param(700_000, marks=pytest.mark.slow)])
def test_rows_in_any_order(tmp_path: Path, dim: int) -> None:
    # 700,000 numbers a row make a block of one row.
    rng = np.random.default_rng(dim)
    features = rng.standard_normal((7, dim)).astype(np.float32)
    write_features(tmp_path / "f.h5", **store_arguments(features=features))
    asked = rng.integers(0, 7, 11)
    with FeatureStore(tmp_path / "f.h5") as store:
        np.testing.assert_array_equal(store.read(asked), features[asked])
        assert store.read([]).shape == (0, dim)
        mask = np.arange(7) % 2 == 0
        np.testing.assert_array_equal(store.read(mask), features[mask])
        parts = list(store.blocks(asked, block_rows=4))
        assert [len(p) for p, _ in parts] == [4, 4, 3]
        np.testing.assert_array_equal(np.concatenate([p for p, _ in parts]), asked)
        np.testing.assert_array_equal(np.concatenate([x for _, x in parts]), features[asked])
        whole = list(store.blocks())
        np.testing.assert_array_equal(np.concatenate([x for _, x in whole]), features)
        for wrong in ([-1], [7]):
            with pytest.raises(IndexError, match="of 7"):
                store.read(wrong)


def test_content_digest_depends_on_content_alone(
    write_store: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def content(**arguments: object) -> str:
        with FeatureStore(write_store(**arguments)) as store:
            return store.content_sha256

    first = content()
    monkeypatch.setattr("ncm_cli.store.hdf5.now", lambda: "2030-01-01T00:00:00+00:00")
    assert content(options={"other": 1}, failed=(), files=None) == first
    assert content(seed=1) != first
    assert content(ids=[f"{i:03d}" for i in range(40)]) != first
    assert content(label_column="place") != first
    columns = store_arguments()["columns"]
    renamed = [Column("class", columns[0].codes, columns[0].categories), *columns[1:]]
    assert content(columns=renamed, label_column="class") != first


def test_filters(write_store: Callable[..., Path]) -> None:
    columns = [
        Column("split", np.array([0, 1, 1, -1], np.int32), ("0", "1")),
        Column("place", np.array([0, 1, 2, 0], np.int32), ("land", "water", "air & sea")),
        NumericColumn("age", np.array([1.0, 2.5, np.nan, 2.5])),
    ]
    path = write_store(features=np.ones((4, 2), np.float32), columns=columns, label_column=None)
    with FeatureStore(path) as store:

        def kept(where: str | None) -> list[int]:
            return np.flatnonzero(store.mask(where)).tolist()

        assert kept(None) == kept("") == [0, 1, 2, 3]
        assert kept("split=0") == [0]
        assert kept("split!=0") == [1, 2, 3]
        assert kept("place = land|water & split=1") == [1]
        assert kept("age=2.50") == [1, 3]
        assert kept("age!=2.5") == [0, 2]
        with pytest.raises(InputError, match="no column named 'plaice'") as error:
            store.mask("plaice=land")
        assert error.value.fix == "did you mean 'place'?"
        with pytest.raises(InputError, match="no value in column 'place' named 'wader'"):
            store.mask("place=wader")
        with pytest.raises(InputError, match="no value '3' in the numeric column 'age'"):
            store.mask("age=3")
        with pytest.raises(UsageError, match="row filter"):
            store.mask("place")
        with pytest.raises(InputError, match="holds numbers, not classes"):
            store.categorical("age")


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40),
        min_size=1,
        max_size=9,
        unique=True,
    )
)
def test_any_text_is_an_id_and_a_category(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.h5"
        column = Column("text", np.arange(len(texts)), tuple(texts))
        write_features(
            path,
            ids=texts,
            blocks=[np.eye(len(texts))],
            dim=len(texts),
            columns=[column],
            label_column="text",
            split_column=None,
            encoder={},
            options={"texts": texts},
        )
        with FeatureStore(path) as store:
            assert list(store.ids) == store.categorical("text").text() == store.options["texts"] == texts
            store.verify()


def test_positions(write_store: Callable[..., Path]) -> None:
    with FeatureStore(write_store()) as store:
        assert store.positions([store.ids[3], "nobody", store.ids[0]]).tolist() == [3, -1, 0]


@pytest.mark.parametrize("name", ["a/b", ".", "..", "50%", "%2F", "é ü", "a.b"])
def test_column_names_survive(write_store: Callable[..., Path], name: str) -> None:
    columns = [NumericColumn(name, np.arange(3.0)), NumericColumn("other", np.arange(3.0))]
    path = write_store(features=np.ones((3, 2)), columns=columns, label_column=None)
    with FeatureStore(path) as store:
        assert list(store.columns) == [name, "other"]
        assert store.column(name).name == name


def test_float16_range_and_arithmetic(write_store: Callable[..., Path]) -> None:
    """numpy/numpy#8775."""
    features = np.full((3, 512), 20.0, np.float16)
    features[1] = 0
    path = write_store(features=features, dtype="float16")
    with FeatureStore(path) as store:
        assert store.dtype == "float16"
        read = store.read()
        assert read.dtype == np.float32
        # In float16 the sum of squares, 204,800, would be infinite.
        assert np.linalg.norm(read[0]) == pytest.approx(20 * np.sqrt(512))
        assert not read[1].any()
    large = np.ones((3, 4), np.float32)
    large[2, 1] = 70000
    with pytest.raises(InputError, match="aren't finite numbers") as error:
        write_store(name="g.h5", features=large, dtype="float16")
    assert "'002 é'" in str(error.value)
    assert "70000 at position 1; too large for float16" in str(error.value)
    assert not path.with_name("g.h5").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_rows_that_are_not_finite_are_refused_by_id(write_store: Callable[..., Path], value: float) -> None:
    """numpy/numpy#5588."""
    features = np.ones((30, 4))
    features[17, 2] = value
    with pytest.raises(InputError, match="aren't finite") as error:
        write_store(features=features)
    assert "'017 é'" in str(error.value)
    assert f"{value:g} at position 2" in str(error.value)


def test_rows_that_are_not_finite_are_refused_on_reading_too(write_store: Callable[..., Path]) -> None:
    """numpy/numpy#5588."""
    path = write_store()
    with h5py.File(path, "r+") as file:
        file["features"][5, 1] = np.nan
        for name in ("header_sha256", "digests_sha256", "content_sha256"):
            del file.attrs[name]
    with FeatureStore(path) as store:
        assert store.read([4]).shape == (1, 8)
        with pytest.raises(InputError, match="aren't finite") as error:
            store.read()
        assert "'005 é'" in str(error.value)


def test_ids_in_foreign_files_are_text(write_store: Callable[..., Path], tmp_path: Path) -> None:
    """h5py/h5py#2115."""
    ids = ["001", "01", "é b"]
    ours = write_store(features=np.eye(3), ids=ids, columns=[], label_column=None, files=None, failed=())
    foreign = tmp_path / "foreign.h5"
    with h5py.File(foreign, "w") as file:
        file["features"] = np.eye(3, dtype=">f4")
        file["id"] = np.array([id.encode() for id in ids], dtype="S9")
        file.attrs.update(
            {
                "ncm_format": np.bytes_("ncm-features"),
                "ncm_format_version": 1,
                "encoder": np.bytes_('{"kind": "mine"}'),
            }
        )
    with FeatureStore(ours) as a, FeatureStore(foreign) as b:
        assert a.ids == b.ids == tuple(ids)
        assert b.positions(a.ids).tolist() == [0, 1, 2]
        np.testing.assert_array_equal(a.read(), b.read())
        assert a.content_sha256 == b.content_sha256
        assert b.failed == () and b.files is None and not b.columns
        b.verify()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": ["a", "b", "a"]}, "repeated ids"),
        ({"ids": ["a", "", "c"]}, "blank id"),
        ({"ids": ["a", "b\0", "c"]}, "an id that can't be stored"),
        ({"ids": ["a", "\ud800", "c"]}, "isn't Unicode"),
        ({"ids": ["a", "b" * 5000, "c"]}, "an id that can't be stored"),
        ({"ids": ["a", "b"]}, "more features than ids"),
        ({"ids": ["a", "b", "c", "d"]}, "fewer features than ids"),
        ({"ids": []}, "no rows"),
        ({"blocks": [np.ones((3, 5))]}, "wrong shape"),
        ({"blocks": [np.ones((3, 4), complex)]}, "wrong shape or type"),
        ({"blocks": [np.array([["a"] * 4] * 3)]}, "wrong shape or type"),
        ({"dim": 0, "blocks": [np.ones((3, 0))]}, "width"),
        ({"label_column": "nobody"}, "label column isn't among"),
        ({"columns": [Column("x", np.array([0, 1, 2]), ("a", "b"))]}, "codes out of range"),
        ({"columns": [Column("x", np.array([0, 1]), ("a", "b"))]}, "wrong length"),
        ({"columns": [Column("x", np.zeros(3, int), ("a", "a"))]}, "repeated"),
        ({"columns": [NumericColumn("x", np.array([0, 1, np.inf]))]}, "infinite"),
        ({"dtype": "float64"}, "type"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(
    tmp_path: Path, changes: dict, message: str
) -> None:
    plain = {"columns": [], "label_column": None, "files": None, "features": np.ones((3, 4))}
    with pytest.raises(InputError, match=message):
        write_features(tmp_path / "f.h5", **store_arguments(**plain | changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("over", [0, 1])
def test_as_many_columns_as_can_be_read_again(
    write_store: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, over: int
) -> None:
    """A hundredth of either limit, which shows the same: all columns that may be written can be read."""
    monkeypatch.setattr("ncm_cli.store.digests.MAX_STORE_COLUMNS", MAX_STORE_COLUMNS // 100)
    monkeypatch.setattr("ncm_cli.store.hdf5.MAX_OBJECTS", MAX_OBJECTS // 100)
    columns = [
        Column(f"c{i}", np.zeros(40, np.int32), ("a",)) for i in range(MAX_STORE_COLUMNS // 100 + over)
    ]
    if over:
        with pytest.raises(InputError, match="more columns than a store takes") as error:
            write_store(columns=columns, label_column=None)
        assert "leave some out of the table" in str(error.value.fix)
    else:
        with FeatureStore(write_store(columns=columns, label_column=None)) as store:
            assert list(store.columns) == [column.name for column in columns]


def test_paths_that_are_not_utf8_survive_and_ids_are_refused(write_store: Callable[..., Path]) -> None:
    paths, none = ("a\udcff", "b"), np.zeros(2, np.int64)
    given: dict[str, Any] = {"features": np.ones((2, 2)), "columns": [], "label_column": None}
    files = Files(path=paths, size=none, mtime_ns=none, sha256=("0" * 64, "1" * 64))
    with FeatureStore(write_store(**given, ids=["a", "b"], files=files)) as store:
        assert store.files is not None
        assert store.files.path == paths
    with pytest.raises(InputError, match="an id that isn't Unicode text"):
        write_store(**given, ids=list(paths), files=None)


@pytest.mark.parametrize("name", ["id", "columns/label/categories", "sha256"])
@pytest.mark.parametrize("row", [0, 1])
def test_texts_that_are_not_utf8_are_refused_on_read(
    write_store: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str, row: int
) -> None:
    # As another program would write them, with digests that fit.
    with monkeypatch.context() as patch:
        patch.setattr("ncm_cli.store.hdf5.encode_text", _latin(name.rpartition("/")[2], row))
        path = write_store()
    with FeatureStore(path) as store, pytest.raises(InputError, match="a damaged file") as refused:
        store.verify()
    assert "isn't UTF-8" in str(refused.value.found)
    assert f"row {row}" in str(refused.value.found)
    assert command(["info", str(path), "--verify", "-q"]) == 3


def _latin(name: str, row: int) -> Callable[..., list[bytes]]:
    """`encode_text`, but that one text isn't UTF-8."""
    what = {"id": "an id", "categories": "a category of column 'label'", "sha256": "a digest"}[name]

    def encoded(items: Sequence[str], of: str, *, any_bytes: bool = False) -> list[bytes]:
        made = encode_text(items, of, any_bytes=any_bytes)
        if of == what and row < len(made):
            made[row] = "é".encode("latin-1")
        return made

    return encoded


@pytest.mark.slow
def test_writing_and_reading_take_bounded_memory(tmp_path: Path) -> None:
    block = np.ones((500, 512), np.float32)
    given = store_arguments(features=block[:1])
    count = 80
    given |= {"ids": [str(i) for i in range(500 * count)], "columns": [], "label_column": None, "files": None}
    tracemalloc.start()
    write_features(tmp_path / "f.h5", **given | {"blocks": (block for _ in range(count))})
    with FeatureStore(tmp_path / "f.h5") as store:
        for _, features in store.blocks():
            assert features.shape[0] <= 8192
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 82 MB of features; ids take a few.
    assert peak < 40e6


def test_rows_that_are_the_same_have_the_first_ones_number(tmp_path: Path) -> None:
    """By image digests where there are any, else by features byte for byte: each to its first row."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, 25, 60)
    features = rng.standard_normal((25, 8)).astype(np.float32)[source]
    features[7] = np.nextafter(features[7], 2)  # nearly the same isn't the same
    source[7] = 99
    first = [source.tolist().index(one) for one in source.tolist()]
    assert len(set(first)) < 40
    path = tmp_path / "f.h5"
    write_features(path, **store_arguments(features=features, files=None, failed=()))
    with FeatureStore(path) as store:
        assert not store.has_files
        assert store.content_nodes.tolist() == first
        assert store.content_nodes.dtype == np.int64
    given = store_arguments(features=features)
    write_features(tmp_path / "g.h5", **given)
    with FeatureStore(tmp_path / "g.h5") as store:
        assert store.has_files
        assert store.content_nodes.tolist() == list(range(60)), "other files may have the same features"
