"""Python gives data frames, arrays and numpy's numbers where a command line gives files and text."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ncm_cli
from ncm_cli.errors import InputError, MismatchError, UsageError
from ncm_cli.given import options_from
from ncm_cli.probes.options import FitOptions
from ncm_cli.store.digests import require_same_encoder
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.tables import write_csv

pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")

N, DIM = 60, 5


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def columns() -> dict[str, list[str]]:
    splits = ["train"] * 40 + ["val"] * 10 + ["test"] * 10
    return {"label": ["cat", "dog"] * (N // 2), "split": splits, "site": ["x", "x", "y"] * (N // 3)}


def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)


def embedded(name: str, **given: Any) -> FeatureStore:
    ncm_cli.run("embed", output=name, **given)
    store = ncm_cli.load(name)
    assert isinstance(store, FeatureStore)
    return store


@pytest.mark.parametrize("library", [pandas, polars])
def test_a_frame_and_an_array_make_the_store_of_their_files(library: Any) -> None:
    X = features()
    np.save("X.npy", X)
    write_csv("rows.csv", list(columns()), zip(*columns().values(), strict=True))
    by_file = embedded("file.h5", source="rows.csv", from_array="X.npy")
    given = embedded("given.h5", source=library.DataFrame(columns()), from_array=X)
    assert given.content_sha256 == by_file.content_sha256
    require_same_encoder("a", given.encoder, "b", by_file.encoder)
    digest = hashlib.sha256(Path("X.npy").read_bytes()).hexdigest()
    assert given.options["from_array"] == f"array sha256-{digest}"
    assert given.options["source"].startswith("data frame sha256-")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_tensor_is_an_array(dtype: torch.dtype) -> None:
    X = torch.tensor(features() * 8).to(dtype).requires_grad_(dtype.is_floating_point)
    store = embedded("t.h5", source=pandas.DataFrame(columns()), from_array=X)
    assert np.array_equal(store.read(), X.detach().float().numpy())


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (np.zeros(N), "or an array .rows, dimensions."),
        (np.zeros((N, 2, 2)), "an array of the wrong shape"),
        (np.full((N, 2), "x"), "doesn't hold real numbers"),
        (np.full((N, 2), None), "doesn't hold real numbers"),
        (np.zeros((N, 2), complex), "doesn't hold real numbers"),
        (torch.zeros(N, 2, dtype=torch.complex64), "doesn't hold real numbers"),
        (torch.eye(N).to_sparse(), "not a plain tensor on the CPU"),
        (np.zeros((N - 1, 2)), "other numbers of rows"),
        (np.full((N, 2), np.nan), "not finite"),
        ([[1.0]] * N, "or an array .rows, dimensions."),
    ],
)
def test_an_array_of_another_kind_is_refused(wrong: Any, match: str) -> None:
    with pytest.raises((InputError, UsageError), match=match):
        ncm_cli.run("embed", source=pandas.DataFrame(columns()), from_array=wrong, output="x.h5")
    assert not Path("x.h5").exists()


def test_options_take_numbers_of_numpy() -> None:
    names = {"features": "f.h5", "output": "p.safetensors", "pairs": "p.h5"}
    options = options_from(FitOptions, names | {"rank": np.array([0, 4]), "folds": np.int64(3)})
    assert (options.rank, options.folds) == ("0,4", 3)
    options = options_from(FitOptions, names | {"weight_decay": np.float64(0.5), "folds": np.array(4)})
    assert (options.weight_decay, options.folds) == ("0.5", 4)
    options = options_from(FitOptions, names | {"weight_decay": [np.float32(0.5), np.float64(0.25)]})
    assert options.weight_decay == "0.5,0.25"
    assert (
        options_from(FitOptions, names | {"rank": np.array([])}).rank == options_from(FitOptions, names).rank
    )
    with pytest.raises(UsageError, match="rank takes text, a number or a list"):
        options_from(FitOptions, names | {"rank": np.zeros((2, 2))})
    with pytest.raises(UsageError, match="folds takes a whole number"):
        options_from(FitOptions, names | {"folds": np.float64(2.5)})


def test_a_frame_where_a_file_is_needed_is_refused() -> None:
    frame = pandas.DataFrame(columns())
    with pytest.raises(UsageError, match="features takes the path of a file or folder"):
        ncm_cli.run("fit", features=frame, output="p.safetensors")
    with pytest.raises(UsageError, match="source takes the path of a file or folder, or a data frame"):
        ncm_cli.run("embed", source=polars.LazyFrame(columns()), from_array=features(), output="x.h5")


def test_pairs_and_pairs_to_drop_are_frames() -> None:
    embedded("f.h5", source=polars.DataFrame(columns()), from_array=features(), encoder_name="mine")
    pairs = pandas.DataFrame({"id_a": range(10), "id_b": range(20, 30)})
    made = ncm_cli.run("pairs", source=pairs, features="f.h5", output="p.h5")
    assert made["pairs"] == 10
    fewer = ncm_cli.run("pairs", source=pairs, drop=pairs[:2], features="f.h5", output="q.h5")
    assert (fewer["pairs"], fewer["dropped"]) == (8, 2)


class TestRowNumbersAsIds:
    def test_rows_are_numbered_from_0_where_no_column_has_ids(self) -> None:
        np.save("X.npy", features())
        write_csv("rows.csv", list(columns()), zip(*columns().values(), strict=True))
        store = embedded("f.h5", source="rows.csv", from_array="X.npy")
        assert list(store.ids) == [str(row) for row in range(N)]
        with pytest.raises(InputError, match="no column named 'id'"):
            ncm_cli.run("embed", source="rows.csv", from_array="X.npy", id_col="id", output="g.h5")

    def test_an_id_of_the_table_is_still_taken(self) -> None:
        frame = pandas.DataFrame({**columns(), "id": [f"r{row}" for row in range(N)]})
        assert embedded("f.h5", source=frame, from_array=features()).ids[0] == "r0"
        frame.loc[3, "id"] = "r2"
        with pytest.raises(InputError, match="1 id is used more than once"):
            ncm_cli.run("embed", source=frame, from_array=features(), output="g.h5")

    def test_numbers_of_different_tables_are_never_joined(self) -> None:
        X, frame = features(), pandas.DataFrame(columns())
        named = {"from_array": X, "encoder_name": "mine"}
        embedded("a.h5", source=frame, **named)
        embedded("again.h5", source=frame, **named)
        embedded("other.h5", source=frame.iloc[::-1], **named)
        same = {"match": "same-id", "features": "a.h5", "output": "p.h5"}
        assert ncm_cli.run("pairs", features_b="again.h5", **same)["pairs"] == N
        with pytest.raises(MismatchError, match="row numbers of different tables"):
            ncm_cli.run("pairs", features_b="other.h5", **same)
        embedded("ids.h5", source=frame.assign(id=range(N)), **named)
        with pytest.raises(MismatchError, match="row numbers of different tables"):
            ncm_cli.run("pairs", features_b="ids.h5", **same)

    def test_rows_of_another_table_were_not_trained_on(self) -> None:
        frame = pandas.DataFrame(columns())
        train, test = frame[frame.split != "test"], frame[frame.split == "test"]
        X, named = features(), {"encoder_name": "mine"}
        embedded("train.h5", source=train, from_array=X[:50], **named)
        embedded("test.h5", source=test, from_array=X[50:], **named)
        pairs = pandas.DataFrame({"id_a": range(20), "id_b": range(20, 40)})
        ncm_cli.run("pairs", source=pairs, features="train.h5", output="p.h5")
        ncm_cli.run("fit", features="train.h5", pairs="p.h5", rank=2, output="probe.safetensors")
        seen = ncm_cli.run("eval", probe="probe.safetensors", features="train.h5", where="split=train")
        assert seen["overlap"]["train"] == 40
        other = ncm_cli.run("eval", probe="probe.safetensors", features="test.h5")
        assert other["overlap"] == {"train": 0, "val": 0}

    def test_members_of_pairs_are_no_rows_of_another_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        frame, X = pandas.DataFrame(columns()), features()
        embedded("a.h5", source=frame.assign(more="x"), from_array=X, encoder_name="mine")
        embedded("b.h5", source=frame, from_array=X, encoder_name="mine")
        pairs = pandas.DataFrame({"id_a": range(20), "id_b": range(20, 40)})
        ncm_cli.run("pairs", source=pairs, features="a.h5", output="p.h5")
        capsys.readouterr()
        ncm_cli.run("fit", features="b.h5", pairs="p.h5", rank=2, output="probe.safetensors")
        assert "40 of 40 pair members aren't in b.h5" in capsys.readouterr().err
