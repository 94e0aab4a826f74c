"""IRM's protocol on digits: shares, pairs and splits are what they are said to be."""

from __future__ import annotations

import dataclasses
import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.datasets import colored
from ncm_cli.datasets.base import data
from ncm_cli.datasets.colored import plan, read_idx
from ncm_cli.datasets.options import ColoredMnistOptions, DigitsOptions
from ncm_cli.errors import InputError, UsageError
from tests.world import rows_of


def _build(
    tmp_path: Path, **options: Any
) -> tuple[dict[str, Any], dict[str, dict[str, str]], list[dict[str, str]]]:
    built = data(DigitsOptions(output=tmp_path / "data", **options))
    rows = {row["id"]: row for row in rows_of(Path(built["files"]["manifest"]))}
    return built, rows, rows_of(Path(built["files"]["pairs"]))


def _pixels(folder: Path, row: dict[str, str]) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(folder / row["path"]), dtype=int)


def test_the_protocols_shares_hold() -> None:
    rng = np.random.default_rng(7)
    shown = rng.integers(0, 10, 60_000)
    options = ColoredMnistOptions(output=Path("unused"), seed=7)
    made = plan(shown, np.arange(50_000), np.arange(50_000, 60_000), options, rng)
    for domain, flip in (("train1", 0.1), ("train2", 0.2), ("test", 0.9)):
        own = [row for row in made.rows if row.domain == domain and row.split in ("train", "val", "test")]
        n = len(own)
        # Five standard errors of a share of n rows.
        tolerance = 5 * np.sqrt(0.25 / n)
        noise = np.mean([row.label != (row.digit < 5) for row in own])
        disagree = np.mean([row.color != row.label for row in own])
        assert abs(noise - 0.25) < tolerance
        assert abs(disagree - flip) < tolerance
    sizes = {
        name: sum(row.domain == name and row.split == "train" for row in made.rows)
        for name in ("train1", "train2")
    }
    assert abs(sizes["train1"] - sizes["train2"]) <= 1


@pytest.mark.slow
def test_twins_are_the_same_digit_in_the_other_colour(tmp_path: Path) -> None:
    built, rows, pairs = _build(tmp_path, pairs=20, holdout_pairs=10, seed=3)
    assert [pair["holdout"] for pair in pairs] == ["0"] * 20 + ["1"] * 10
    assert {pair["wrong"] for pair in pairs} == {"0"}
    for pair in pairs:
        a, b = rows[pair["id_a"]], rows[pair["id_b"]]
        assert (a["label"], a["digit"]) == (b["label"], b["digit"])
        assert a["color"] != b["color"]
        left, right = _pixels(Path(built["output"]), a), _pixels(Path(built["output"]), b)
        assert np.array_equal(left[..., 0], right[..., 1])
        assert np.array_equal(left[..., 1], right[..., 0])
        assert left.any()
        assert not left[..., 2].any()


def test_no_digit_of_the_test_domain_is_in_training_or_pairs(tmp_path: Path) -> None:
    _, rows, pairs = _build(tmp_path, seed=5)
    sources: dict[str, set[str]] = {}
    for row in rows.values():
        sources.setdefault(row["split"], set()).add(row["id"].split("-")[1])
    for one, other in (
        ("train", "val"),
        ("train", "test"),
        ("val", "test"),
        ("held", "train"),
        ("held", "val"),
    ):
        assert not sources[one] & sources[other]
    assert not sources["twin"] & sources["test"]
    assert sources["oracle"] <= sources["test"]
    for pair in pairs:
        assert rows[pair["id_a"]]["split"] == ("held" if pair["holdout"] == "1" else "train")


def test_wrong_pairs_match_another_digit_image(tmp_path: Path) -> None:
    built, rows, pairs = _build(tmp_path, pairs=40, holdout_pairs=20, wrong_fraction=0.25, seed=1)
    wrong = [pair for pair in pairs if pair["wrong"] == "1"]
    assert sum(pair["holdout"] == "0" for pair in wrong) == 10
    assert sum(pair["holdout"] == "1" for pair in wrong) == 5
    for pair in pairs:
        left = _pixels(Path(built["output"]), rows[pair["id_a"]]).sum(axis=2)
        right = _pixels(Path(built["output"]), rows[pair["id_b"]]).sum(axis=2)
        assert np.array_equal(left, right) == (pair["wrong"] == "0")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    one, first, _ = _build(tmp_path / "a", seed=2)
    two, second, _ = _build(tmp_path / "b", seed=2)
    _, third, _ = _build(tmp_path / "c", seed=3)
    assert first == second
    assert first != third
    for row in list(first.values())[:50]:
        assert Path(one["output"], row["path"]).read_bytes() == Path(two["output"], row["path"]).read_bytes()


@pytest.mark.slow
def test_digits_are_scikit_learns(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    pixels, target = colored._load_digits()
    expected, labels = load_digits(return_X_y=True)
    assert np.array_equal(pixels, expected)
    assert np.array_equal(target, labels)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"flips": "0.1,2"}, "--flips takes shares"),
        ({"label_noise": 1.5}, "--label-noise must be at most 1"),
        ({"pairs": -1}, "--pairs must be at least 0"),
        ({"pairs": 5000}, "more pairs than there are training digits"),
        ({"holdout_pairs": 1700}, "more digits than the training domains have"),
    ],
)
def test_impossible_options(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        _build(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    _build(tmp_path, pairs=4, holdout_pairs=2)
    _build(tmp_path, pairs=4, holdout_pairs=2, seed=1)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="holds other files"):
        data(DigitsOptions(output=mine))
    assert (mine / "thesis.tex").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "mine"]


def test_a_file_of_ones_own_in_a_folder_of_a_data_set_is_not_lost(tmp_path: Path) -> None:
    built, _, _ = _build(tmp_path, pairs=4, holdout_pairs=2)
    mine = Path(built["output"]) / "images" / "mine.png"
    mine.write_bytes(b"x")
    with pytest.raises(InputError, match="holds other files") as error:
        _build(tmp_path, pairs=4, holdout_pairs=2)
    assert error.value.found == "images/mine.png" and mine.read_bytes() == b"x"
    mine.unlink()
    _build(tmp_path, pairs=4, holdout_pairs=2)


def _idx(array: np.ndarray[Any, Any]) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def _fake_mnist(folder: Path, *, zipped: bool, joint: str = "-", n: int = 300) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(11)
    folder.mkdir(parents=True)
    train: np.ndarray[Any, Any] = np.empty(0)
    for stem, count in (("train", n), ("t10k", n // 3)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        train = images if stem == "train" else train
        for name, array in ((f"images{joint}idx3-ubyte", images), (f"labels{joint}idx1-ubyte", labels)):
            raw = _idx(array)
            file = folder / (f"{stem}-{name}" + (".gz" if zipped else ""))
            file.write_bytes(gzip.compress(raw) if zipped else raw)
    return train


def _mnist_options(tmp_path: Path, **options: Any) -> ColoredMnistOptions:
    small = {"train_digits": 200, "test_digits": 60, "pairs": 20, "holdout_pairs": 10, "oracle_pairs": 10}
    return ColoredMnistOptions(output=tmp_path / "out", mnist=tmp_path / "mnist", **{**small, **options})


@pytest.mark.parametrize(
    ("zipped", "inner", "joint"), [(True, "mnist", "-"), (False, "mnist/MNIST/raw", ".")]
)
@pytest.mark.parametrize("size", [14, 28])
def test_images_and_packed_pixels_agree(
    tmp_path: Path, zipped: bool, inner: str, joint: str, size: int
) -> None:
    gray = _fake_mnist(tmp_path / inner, zipped=zipped, joint=joint)
    built = data(_mnist_options(tmp_path, size=size))
    rows = rows_of(Path(built["files"]["manifest"]))
    images = np.stack([_pixels(Path(built["output"]), row) for row in rows])
    options = dataclasses.replace(
        _mnist_options(tmp_path, size=size, packed=True), output=tmp_path / "packed"
    )
    packed = data(options)
    array = np.load(Path(packed["files"]["pixels"]), allow_pickle=False)
    assert array.shape == (len(rows), 2 * size * size)
    assert array.dtype == np.float32
    assert np.allclose(array, images[..., :2].reshape(len(rows), -1) / 255, atol=1e-7)
    same = [{k: v for k, v in row.items() if k != "path"} for row in rows]
    assert rows_of(Path(packed["files"]["manifest"])) == same
    first = next(row for row in rows if row["split"] == "train")
    source = gray[int(first["id"].split("-")[1])].astype(float)
    if size == 14:
        source = np.round(source.reshape(14, 2, 14, 2).mean(axis=(1, 3)))
    assert np.array_equal(_pixels(Path(built["output"]), first).sum(axis=2), source)


def _break(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "mnist"
    _fake_mnist(folder, zipped=how.startswith("gz"))
    images = folder / ("train-images-idx3-ubyte" + (".gz" if how.startswith("gz") else ""))
    labels = folder / "train-labels-idx1-ubyte"
    raw = images.read_bytes()
    if how == "missing":
        images.unlink()
    elif how == "cut":
        images.write_bytes(raw[:5000])
    elif how == "gz cut":
        images.write_bytes(raw[: len(raw) // 2])
    elif how == "gz text":
        images.write_bytes(b"not gzip at all")
    elif how == "swapped":
        images.write_bytes(labels.read_bytes())
    elif how == "header":
        images.write_bytes(raw[:9])
    elif how == "empty":
        images.write_bytes(b"")
    elif how == "longer":
        images.write_bytes(raw + b"x")
    elif how == "labels":
        labels.write_bytes(_idx(np.zeros(299, np.uint8)))
    elif how == "digit":
        values = np.zeros(300, np.uint8)
        values[17] = 10
        labels.write_bytes(_idx(values))
    elif how == "size":
        images.write_bytes(_idx(np.zeros((300, 32, 32), np.uint8)))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("missing", "one of MNIST's files isn't there"),
        ("cut", "cut off or damaged"),
        ("gz cut", "gzip file that is cut off"),
        ("gz text", "gzip file that is cut off or damaged"),
        ("swapped", "not one of MNIST's IDX files"),
        ("header", "cut off or damaged"),
        ("empty", "not one of MNIST's IDX files"),
        ("longer", "cut off or damaged"),
        ("labels", "300 × 28 × 28 pixels, 299 labels"),
        ("digit", "300 labels up to 10"),
        ("size", "300 × 32 × 32 pixels"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, how: str, match: str) -> None:
    _break(tmp_path, how)
    with pytest.raises(InputError) as caught:
        data(_mnist_options(tmp_path))
    assert match in str(caught.value)
    assert str(tmp_path / "mnist") in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["mnist"]


def test_a_header_that_asks_for_too_much_is_refused_by_length(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 2**31, 2**31, 2**31))
    with pytest.raises(InputError, match="too large to be MNIST's"):
        read_idx(file, 3)


def test_where_mnist_is_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="where MNIST is"):
        data(ColoredMnistOptions(output=tmp_path / "out"))


@pytest.mark.slow
def test_real_mnist_is_read(tmp_path: Path, mnist_dir: Path) -> None:
    options = ColoredMnistOptions(
        output=tmp_path / "out",
        mnist=mnist_dir,
        train_digits=1000,
        test_digits=200,
        pairs=10,
        holdout_pairs=10,
    )
    built = data(options)
    rows = rows_of(Path(built["files"]["manifest"]))
    assert sum(row["split"] == "test" for row in rows) == 200
    # The digit five is the first training image of MNIST.
    images, labels = colored.read_split(mnist_dir, "train")
    assert (len(images), int(labels[0])) == (60_000, 5)
