"""``ncm embed --from-array``: features that were made elsewhere."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError
from ncm_cli.images.arrays import open_array
from ncm_cli.images.embed import embed
from ncm_cli.images.options import EmbedOptions
from ncm_cli.store.features import FeatureStore


@pytest.fixture
def matrix() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(40, 7)).astype(np.float32)


def manifest(folder: Path, rows: int) -> Path:
    path = folder / "m.csv"
    path.write_text("id,path,label\n" + "".join(f"é {i:02d},nowhere/{i}.png,{i % 2}\n" for i in range(rows)))
    return path


def make(folder: Path, array: Path, rows: int = 40, **changes: Any) -> FeatureStore:
    given = {"encoder_name": "mine", "output": folder / "f.h5"} | changes
    report = embed(EmbedOptions(source=manifest(folder, rows), from_array=array, **given))
    assert report.written
    return FeatureStore(given["output"])


def saved(folder: Path, matrix: np.ndarray, kind: str) -> Path:
    path = folder / f"x.{kind.split('-')[0]}"
    if kind == "npy":
        np.save(path, matrix)
    elif kind == "npy-fortran":
        np.save(path, np.asfortranarray(matrix))
    elif kind == "npz":
        np.savez_compressed(path, features=matrix, other=np.zeros(3))
    elif kind == "npz-fortran":
        np.savez(path, np.asfortranarray(matrix))
    elif kind == "pt":
        torch = pytest.importorskip("torch")
        torch.save(torch.from_numpy(matrix), path)
    elif kind == "pt-dictionary":
        torch = pytest.importorskip("torch")
        torch.save({"features": torch.from_numpy(matrix), "n": 3}, path)
    elif kind == "pt-old":
        torch = pytest.importorskip("torch")
        torch.save(torch.from_numpy(matrix), path, _use_new_zipfile_serialization=False)
    return path


KINDS = [
    "npy",
    "npy-fortran",
    "npz",
    "npz-fortran",
    "pt",
    "pt-dictionary",
    "pt-old",
]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_in_manifest_order(tmp_path: Path, matrix: np.ndarray, kind: str) -> None:
    with make(tmp_path, saved(tmp_path, matrix, kind)) as store:
        np.testing.assert_array_equal(store.read(), matrix)
        assert store.ids[3] == "é 03"
        assert store.encoder["kind"] == "array" and store.encoder["model"] == "mine"
        assert store.categorical("label").text()[:2] == ["0", "1"]
        assert store.files is None
        assert list(store.columns) == ["label"]


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8", ">f4", "<i8"])
def test_other_number_types_become_float32(tmp_path: Path, matrix: np.ndarray, dtype: str) -> None:
    array = (np.abs(matrix) * 20).astype(dtype)
    with make(tmp_path, saved(tmp_path, array, "npy")) as store:
        np.testing.assert_array_equal(store.read(), array.astype(np.float32))


def test_blocks_cover_long_arrays(
    tmp_path: Path, matrix: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncm_cli.images.arrays.BLOCK_BYTES", 100)
    for kind in KINDS:
        source = open_array(saved(tmp_path, matrix, kind))
        blocks = list(source.blocks())
        assert len(blocks) > 3
        np.testing.assert_array_equal(np.concatenate(blocks), matrix)


def test_half_precision_norms_do_not_overflow(tmp_path: Path) -> None:
    """numpy/numpy#8775."""
    array = np.full((40, 1000), 20, np.float16)
    array[1] = -20
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.sum(array[0] ** 2, dtype=np.float16))  # the positive control
    with make(tmp_path, saved(tmp_path, array, "npy"), normalize=True) as store:
        np.testing.assert_allclose(np.linalg.norm(store.read(), axis=1), 1, rtol=1e-6)


def test_what_is_too_large_for_half_precision_is_refused_by_id(tmp_path: Path) -> None:
    """numpy/numpy#8775."""
    with np.errstate(over="ignore"):
        array = np.ones((40, 4)) * 20
        array[7, 2] = 70000
        overflowed = array.astype(np.float16)
    with pytest.raises(InputError, match="1 row of the array") as caught:
        make(tmp_path, saved(tmp_path, overflowed, "npy"))
    assert "é 07" in str(caught.value)
    with pytest.raises(InputError, match="too large for float16") as caught:
        make(tmp_path, saved(tmp_path, array, "npy"), dtype="float16")
    assert "é 07" in str(caught.value)
    with make(tmp_path, saved(tmp_path, array, "npy")) as store:
        assert store.read()[7, 2] == 70000


def test_zero_rows_are_named_when_normalising(tmp_path: Path, matrix: np.ndarray) -> None:
    """numpy/numpy#8775."""
    matrix[[4, 9]] = 0
    array = saved(tmp_path, matrix, "npy")
    with pytest.raises(InputError, match="zero") as caught:
        make(tmp_path, array, normalize=True)
    assert "é 04, é 09" in str(caught.value)
    with make(tmp_path, array) as store:
        assert not store.read()[4].any()


@pytest.mark.parametrize("kind", ["npy", "npz", "pt"])
def test_nan_and_infinity_are_refused_by_id(tmp_path: Path, matrix: np.ndarray, kind: str) -> None:
    """numpy/numpy#5588."""
    matrix[5, 1], matrix[30, 6] = np.nan, -np.inf
    with pytest.raises(InputError, match="2 rows of the array are not finite") as caught:
        make(tmp_path, saved(tmp_path, matrix, kind))
    assert "é 05, é 30" in str(caught.value)
    assert not (tmp_path / "f.h5").exists()


def test_float64_that_does_not_fit_float32_is_refused(tmp_path: Path) -> None:
    array = np.ones((40, 3))
    array[2, 0] = 1e300
    with pytest.raises(InputError, match="is not finite") as caught:
        make(tmp_path, saved(tmp_path, array, "npy"))
    assert "é 02" in str(caught.value)


def test_other_numbers_of_rows_are_refused(tmp_path: Path, matrix: np.ndarray) -> None:
    with pytest.raises(InputError, match="other numbers of rows") as caught:
        make(tmp_path, saved(tmp_path, matrix, "npy"), rows=41)
    assert "40 rows in the array, 41 in" in str(caught.value)


def test_names_decide_what_may_be_used_together(tmp_path: Path, matrix: np.ndarray) -> None:
    array = saved(tmp_path, matrix, "npy")
    with make(tmp_path, array) as a, make(tmp_path, array, output=tmp_path / "g.h5") as b:
        assert a.fingerprint == b.fingerprint
    with make(tmp_path, array, output=tmp_path / "h.h5", encoder_name=None) as c:
        assert c.fingerprint != a.fingerprint
        assert c.encoder["model"].startswith("sha256-")
    with pytest.raises(MismatchError, match="other settings") as caught:
        make(tmp_path, array, encoder_name="yours")
    assert "model: mine there, yours asked for" in str(caught.value)
    with make(tmp_path, array, encoder_name="yours", fresh=True) as d:
        assert d.encoder["model"] == "yours"


def test_a_changed_array_replaces_the_store(tmp_path: Path, matrix: np.ndarray) -> None:
    make(tmp_path, saved(tmp_path, matrix, "npy")).close()
    with make(tmp_path, saved(tmp_path, matrix + 1, "npy")) as store:
        np.testing.assert_array_equal(store.read(), matrix + 1)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/ncm-test-evil",)


@pytest.mark.parametrize("kind", ["npy", "npz", "pt"])
def test_nothing_is_unpickled(tmp_path: Path, kind: str) -> None:
    mark = Path("/tmp/ncm-test-evil")
    path = tmp_path / f"x.{kind}"
    if kind == "npy":
        np.save(path, np.array([[Evil()]], dtype=object), allow_pickle=True)
    elif kind == "npz":
        np.savez(path, np.array([[Evil()]], dtype=object))
    else:
        path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError):
        make(tmp_path, path, rows=1)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(4), "wrong shape"),
        (np.zeros((2, 3, 4)), "wrong shape"),
        (np.zeros((0, 3)), "wrong shape"),
        (np.zeros((4, 0)), "wrong shape"),
        (np.zeros((4, 2), complex), "real numbers"),
        (np.zeros((4, 2), bool), "real numbers"),
        (np.full((4, 2), "x"), "real numbers"),
        (np.zeros(4, [("a", "f4"), ("b", "f4")]), "wrong shape|real numbers"),
        (np.zeros((4, 2), "M8[s]"), "real numbers"),
    ],
)
def test_arrays_of_other_kinds_are_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_array(saved(tmp_path, array, "npy"))


@pytest.mark.parametrize(
    ("thing", "found"),
    [
        ("module", r"an object of torch\.nn\.modules\.linear\.Linear"),
        ([1, 2], "found: a list$"),
        ({"a": 3, "b": [1]}, "found: a dict with 'a': int, 'b': list$"),
        ({}, "found: a dict with none$"),
    ],
)
def test_a_pt_without_a_plain_matrix_names_what_it_holds_and_the_file(
    tmp_path: Path, thing: object, found: str
) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(2, 2) if thing == "module" else thing, tmp_path / "bad.pt")
    with pytest.raises(InputError, match=f"(?m){found}") as caught:
        make(tmp_path, tmp_path / "bad.pt")
    assert f"where: {tmp_path / 'bad.pt'}" in str(caught.value)


@pytest.mark.parametrize("kind", ["npy", "npz", "pt"])
def test_damaged_files_are_refused(tmp_path: Path, matrix: np.ndarray, kind: str) -> None:
    path = saved(tmp_path, matrix, kind)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for damage in [
        b"",
        b"text\n",
        data[: len(data) // 2],
        data[:-30],
        rng.bytes(300),
        data[:10] + rng.bytes(500),
    ]:
        path.write_bytes(damage)
        with pytest.raises(NcmError):
            make(tmp_path, path)
    assert not (tmp_path / "f.h5").exists()


def test_an_npy_that_is_none_is_told_without_foreign_advice(tmp_path: Path, matrix: np.ndarray) -> None:
    path = saved(tmp_path, matrix, "npy")
    whole = path.read_bytes()
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    objects = (tmp_path / "objects.npy").read_bytes()
    for data, found in (
        (b"id,label", "doesn't begin as .npy files do"),
        (objects, "an array of Python objects"),
        (whole[: len(whole) // 2], "fewer bytes than its header says"),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match="can't be read") as caught:
            make(tmp_path, path)
        assert found in str(caught.value.found) and "allow_pickle" not in str(caught.value)


def test_a_header_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000, 1000000), }".ljust(117) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(InputError, match="can't be read"):
        make(tmp_path, path)


def test_options_for_images_are_refused(tmp_path: Path, matrix: np.ndarray) -> None:
    array = saved(tmp_path, matrix, "npy")
    with pytest.raises(UsageError, match="--model, --root can't be combined"):
        make(tmp_path, array, model="pixels:2", root=tmp_path)
    with pytest.raises(UsageError, match="needs a manifest"):
        embed(EmbedOptions(source=tmp_path, output=tmp_path / "f.h5", from_array=array))
    with pytest.raises(UsageError, match="would replace --from-array"):
        make(tmp_path, array, output=array)
    with pytest.raises(InputError, match="an unknown format"):
        make(tmp_path, manifest(tmp_path, 3))
