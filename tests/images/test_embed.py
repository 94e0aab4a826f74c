"""What ``ncm embed`` stores of good, odd and bad images, with the pixels encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError, MismatchError, UsageError
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.features import FeatureStore

from .conftest import contents


def area_mean(path: Path, size: int) -> np.ndarray:
    """The pixels encoder on its own."""
    with Image.open(path) as image:
        small = image.convert("RGB").resize((size, size), Image.Resampling.BOX)
    return np.asarray(small, np.float32).reshape(-1) / np.float32(255)


def test_rows_are_the_encoders_output_in_manifest_order(make_pictures: Any) -> None:
    pictures = make_pictures(23)
    report = pictures.embed(batch_size="5")
    assert (report.rows, report.dim, report.new, report.reused) == (23, 12, 23, 0)
    with FeatureStore(pictures.output) as store:
        assert store.ids == tuple(row["id"] for row in pictures.rows)
        expected = np.stack([area_mean(pictures.folder / row["path"], 2) for row in pictures.rows])
        np.testing.assert_array_equal(store.read(), expected)
        assert store.categorical("label").text() == [row["label"] for row in pictures.rows]
        assert (store.label_column, store.split_column) == ("label", "split")
        assert store.fingerprint == fingerprint(store.encoder)
        assert store.files is not None
        assert store.files.path == tuple(str(pictures.folder / row["path"]) for row in pictures.rows)


def test_nothing_else_is_left_beside_the_store(make_pictures: Any) -> None:
    pictures = make_pictures(3)
    before = set(pictures.folder.iterdir())
    pictures.embed()
    assert set(pictures.folder.iterdir()) - before == {pictures.output}


def test_bad_images_are_failures_and_rows_stay_aligned(pictures: Any) -> None:
    """rom1504/clip-retrieval#257, pytorch/vision#138, rom1504/clip-retrieval#89."""
    for name in ("a", "b", "c"):
        path = pictures.add(name, name=f"{name}.jpg", label=name)
        Image.effect_noise((64, 64), 90).convert("RGB").save(path, quality=90)
    cut = pictures.folder / "b.jpg"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    for name, content in (("empty", b""), ("page", b"<html>404</html>")):
        pictures.add(name, name=f"{name}.jpg", label=name).write_bytes(content)
    pictures.add("z", label="z")
    pictures.write()
    report = pictures.embed()
    assert [row.id for row in report.failed] == ["b", "empty", "page"]
    assert all(row.reason and row.path.endswith(".jpg") for row in report.failed)
    assert report.too_many_failed
    with FeatureStore(pictures.output) as store:
        assert store.ids == ("a", "c", "z")
        assert store.categorical("label").text() == ["a", "c", "z"]
        assert store.failed == report.failed
        np.testing.assert_array_equal(store.read()[2], area_mean(pictures.folder / "5.png", 2))
    assert not pictures.embed(max_failures=3).too_many_failed


def test_only_bad_images_leave_no_store(pictures: Any) -> None:
    """rom1504/clip-retrieval#89."""
    for name in ("empty", "page"):
        pictures.add(name, name=f"{name}.jpg").write_bytes(b"<html>" if name == "page" else b"")
    pictures.write()
    with pytest.raises(InputError, match="none of the 2 images could be embedded") as caught:
        pictures.embed()
    assert "empty" in str(caught.value) and "page" in str(caught.value)
    assert {path.name for path in pictures.folder.iterdir()} == {"empty.jpg", "page.jpg", "manifest.csv"}


def test_a_decompression_bomb_is_one_failure_with_the_limit(pictures: Any) -> None:
    """huggingface/dataset-viewer#1192."""
    Image.new("1", (20000, 20000)).save(pictures.add("bomb"))
    pictures.add("good")
    pictures.write()
    report = pictures.embed()
    assert [row.id for row in report.failed] == ["bomb"]
    assert "178,956,970" in report.failed[0].reason
    assert report.rows == 1


def test_animations_are_told(pictures: Any) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(pictures.add("moving", name="a.gif"), save_all=True, append_images=frames[1:])
    pictures.write()
    pictures.embed()
    assert any("moving" in warning for warning in pictures.said.warnings)


def test_missing_files_are_found_before_any_model_is_loaded(
    make_pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """acoustic-multiclass-training#164."""
    pictures = make_pictures(5)
    (pictures.folder / "4.png").unlink()
    monkeypatch.setattr("ncm_cli.images.embed.load_encoder", lambda *_, **__: pytest.fail("loaded a model"))
    with pytest.raises(InputError, match="1 of 5 image files"):
        pictures.embed()
    assert not pictures.output.exists()


@pytest.mark.parametrize(("workers", "batch_size"), [("0", "1"), ("1", "auto"), ("4", "4"), ("auto", "auto")])
def test_rows_do_not_depend_on_batches_or_workers(pictures: Any, workers: str, batch_size: str) -> None:
    """binli123/dsmil-wsi#19."""
    for i in range(10):
        Image.new("RGB", (8, 8), (25 * i, 10, 255 - 25 * i)).save(pictures.add(f"{i}"))
    pictures.write()
    pictures.embed(workers=workers, batch_size=batch_size)
    with FeatureStore(pictures.output) as store:
        assert store.ids == tuple("0123456789")
        expected = np.array([[25 * i, 10, 255 - 25 * i] * 4 for i in range(10)], np.float32) / np.float32(255)
        np.testing.assert_array_equal(store.read(), expected)


def test_rows_do_not_depend_on_the_manifests_order(make_pictures: Any) -> None:
    """pytorch/vision#4209."""
    pictures = make_pictures(20)
    pictures.embed()
    shuffled = [pictures.rows[i] for i in np.random.default_rng(1).permutation(20)]
    pictures.write(shuffled)
    pictures.embed(output=pictures.folder / "shuffled.h5")
    with FeatureStore(pictures.output) as a, FeatureStore(pictures.folder / "shuffled.h5") as b:
        assert b.ids == tuple(row["id"] for row in shuffled)
        order = b.positions(a.ids)
        np.testing.assert_array_equal(a.read(), b.read(order))
        for name in a.columns:
            assert a.categorical(name).categories == b.categorical(name).categories
            np.testing.assert_array_equal(a.categorical(name).codes, b.categorical(name).codes[order])


def test_another_model_to_the_same_output_is_refused(make_pictures: Any) -> None:
    """pytorch/vision#6234."""
    pictures = make_pictures(4)
    pictures.embed()
    before = contents(pictures.output), pictures.output.stat().st_mtime_ns
    for changes, field in (
        ({"model": "pixels:3"}, "model: pixels:2 there, pixels:3 asked for"),
        ({"normalize": True}, "normalize: false there, true asked for"),
        ({"dtype": "float16"}, "dtype: float32 there, float16 asked for"),
        ({"augment": "grayscale"}, "view"),
    ):
        with pytest.raises(MismatchError, match="other settings") as caught:
            pictures.embed(**changes)
        assert field in str(caught.value)
        assert "--fresh" in str(caught.value)
    assert (contents(pictures.output), pictures.output.stat().st_mtime_ns) == before
    pictures.embed(model="pixels:3", fresh=True)
    with FeatureStore(pictures.output) as store:
        assert store.encoder["model"] == "pixels:3"


@pytest.mark.parametrize("damage", ["half", "nothing", "text"])
def test_what_is_no_whole_store_is_never_built_on(make_pictures: Any, damage: str) -> None:
    """h5py/h5py#879, TE_Density#149."""
    pictures = make_pictures(30)
    pictures.embed()
    clean = contents(pictures.output)
    data = pictures.output.read_bytes()
    broken = {"half": data[: len(data) // 2], "nothing": b"", "text": b"not a store\n"}[damage]
    pictures.output.write_bytes(broken)
    with pytest.raises(InputError, match="isn't a feature store") as caught:
        pictures.embed()
    assert "--fresh" in str(caught.value)
    assert pictures.output.read_bytes() == broken
    pictures.embed(fresh=True)
    assert contents(pictures.output) == clean


def test_a_reader_keeps_the_old_store_during_a_rewrite(make_pictures: Any) -> None:
    """h5py/h5py#1864."""
    pictures = make_pictures(12)
    pictures.embed()
    with FeatureStore(pictures.output) as reader, FeatureStore(pictures.output) as second:
        old = reader.read()
        pictures.write([row | {"label": "bird"} for row in pictures.rows[:6]])
        pictures.embed()
        np.testing.assert_array_equal(reader.read(), old)
        assert set(second.categorical("label").text()) == {"cat", "dog", "fox"}
    with FeatureStore(pictures.output) as store:
        assert store.rows == 6
        assert set(store.categorical("label").text()) == {"bird"}


def test_ids_come_back_as_they_were(pictures: Any) -> None:
    """h5py/h5py#2115."""
    ids = ["001", "é b", "two\nlines", "a,b", 'quo"te', "日本", "x" * 500, "NA"]
    for id in ids:
        pictures.add(id, label="a")
    pictures.write()
    pictures.embed()
    with FeatureStore(pictures.output) as store:
        assert store.ids == tuple(ids)
        assert store.positions(["é b", "001"]).tolist() == [1, 0]


def test_awkward_column_names_and_categories(pictures: Any) -> None:
    """h5py/h5py#2115."""
    for i in range(4):
        pictures.add(f"x{i}", **{"a/b": "é/1", ".": str(i), "note, long": f"line {i}\nand more"})
    pictures.write()
    pictures.embed()
    with FeatureStore(pictures.output) as store:
        assert list(store.columns) == ["a/b", ".", "note, long"]
        assert store.categorical("note, long").text()[3] == "line 3\nand more"


def test_what_the_encoder_gives_that_is_no_feature_is_a_failure(
    make_pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy/numpy#5588, numpy/numpy#8775."""
    from ncm_cli.images import encoder as pixels

    pictures = make_pictures(6)
    (pictures.folder / "5.png").write_bytes(b"no image")
    plain = pixels.PixelsEncoder.encode

    def spoiled(self: Any, items: Any) -> np.ndarray:
        rows = plain(self, items)
        rows[0, 1], rows[1, 0], rows[2] = np.nan, np.inf, 0
        rows[3, 2] = 70000
        return rows

    monkeypatch.setattr(pixels.PixelsEncoder, "encode", spoiled)
    report = pictures.embed(dtype="float16", normalize=True)
    reasons = {row.id: row.reason for row in report.failed}
    assert list(reasons) == ["x000", "x001", "x002", "x003", "x005"]
    assert "is not finite" in reasons["x000"] and "is not finite" in reasons["x001"]
    assert "zero" in reasons["x002"]
    assert "too large for float16" in reasons["x003"]
    assert report.rows == 1


def test_a_black_picture_cannot_be_normalised(pictures: Any) -> None:
    Image.new("RGB", (8, 8)).save(pictures.add("black"))
    pictures.add("other")
    pictures.write()
    assert [row.id for row in pictures.embed(normalize=True).failed] == ["black"]
    assert pictures.embed(output=pictures.folder / "raw.h5").failed == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_failures": -1}, "--max-failures"),
        ({"encoder_name": "x"}, "--encoder-name"),
        ({"layout": "label"}, "--layout is for folders"),
    ],
)
def test_options_that_do_not_go_together(make_pictures: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_pictures(2).embed(**changes)


def test_a_folder_is_embedded_with_its_levels(pictures: Any) -> None:
    for name in ("photo/dog/1.png", "photo/cat/2.png", "art/dog/3.png"):
        pictures.picture(f"images/{name}")
    report = pictures.embed(source=pictures.folder / "images", layout="domain/label")
    assert report.rows == 3
    with FeatureStore(pictures.output) as store:
        assert store.ids == ("art/dog/3.png", "photo/cat/2.png", "photo/dog/1.png")
        assert store.categorical("domain").text() == ["art", "photo", "photo"]
        assert store.label_column == "label"
