"""Views on another background: what is pasted and drawn, refused by name, and made anew."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.errors import InputError, UsageError
from ncm_cli.images.background import (
    Beside,
    Ring,
    again,
    mask_names,
    own_colours,
    paste,
    read_mask,
    without_object,
)
from ncm_cli.images.decode import decode
from ncm_cli.images.options import EmbedOptions
from ncm_cli.images.samples import DecodeError
from ncm_cli.main import run
from ncm_cli.options import check
from ncm_cli.results.pictures import Thumbnails
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.tables import write_csv

from .conftest import Pictures, contents

SIDE = 16
GROUNDS = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250), (250, 0, 250)]


class Objects(Pictures):
    """White squares in the left half of pictures of flat colour, and their masks."""

    def __init__(self, folder: Path, count: int = 6) -> None:
        super().__init__(folder)
        self.masks = folder / "masks"
        self.masks.mkdir()
        for i in range(count):
            self.draw(i)
        if count:
            self.write()

    def draw(self, i: int, *, split: str = "train") -> None:
        pixels = np.full((SIDE, SIDE, 3), GROUNDS[i % len(GROUNDS)], np.uint8)
        pixels[4:12, 2:8] = 255
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[4:12, 2:8] = 255
        Image.fromarray(pixels).save(self.folder / f"{i}.png")
        Image.fromarray(mask).save(self.masks / f"o{i}.png")
        self.rows.append({"id": f"o{i}", "path": f"{i}.png", "label": "ab"[i % 2], "split": split})

    def view(self, **more: Any) -> Any:
        given = {"augment": "background", "masks": self.masks, "output": self.folder / "view.h5"}
        return self.embed(**(given | {"model": f"pixels:{SIDE}", "workers": "0"} | more))

    def seen(self, name: str = "view.h5") -> dict[str, np.ndarray]:
        """The pictures that were embedded, uint8, by id."""
        with FeatureStore(self.folder / name) as store:
            rows = np.rint(store.read() * 255).astype(np.uint8).reshape(-1, SIDE, SIDE, 3)
            return dict(zip(store.ids, rows, strict=True))

    def reasons(self, report: Any) -> dict[str, str]:
        return {row.id: row.reason for row in report.failed}


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path)


def test_the_object_stays_and_its_ground_is_that_of_another_image(objects: Objects) -> None:
    objects.view()
    for i, picture in enumerate(objects.seen().values()):
        assert (picture[4:12, 2:8] == 255).all()
        ground = picture.copy()
        ground[4:12, 2:8] = ground[0, 0]
        assert (ground == ground[0, 0]).all(), "the other image's object is gone"
        assert tuple(ground[0, 0]) in set(GROUNDS) - {GROUNDS[i]}
    first = contents(objects.folder / "view.h5")
    objects.view(output=objects.folder / "again.h5", workers="2")
    assert contents(objects.folder / "again.h5")["features"] == first["features"]
    objects.view(output=objects.folder / "other.h5", seed=1)
    assert contents(objects.folder / "other.h5")["features"] != first["features"]


@pytest.mark.parametrize("fill", ["grey", "noise"])
def test_grey_and_noise(objects: Objects, fill: str) -> None:
    objects.view(fill=fill)
    for picture in objects.seen().values():
        assert (picture[4:12, 2:8] == 255).all()
        ground = np.concatenate([picture[:4].reshape(-1, 3), picture[12:].reshape(-1, 3)])
        assert (ground == 128).all() == (fill == "grey")
        assert ground.std() > 30 or fill == "grey"
    with FeatureStore(objects.folder / "view.h5") as store:
        assert store.encoder["view"] == {"augment": "background", "seed": 0, "backgrounds": fill}


def test_a_folder_of_backgrounds(objects: Objects) -> None:
    (objects.folder / "places" / "sea").mkdir(parents=True)
    Image.new("RGB", (40, 20), (1, 2, 3)).save(objects.folder / "places" / "sea" / "a.png")
    objects.view(backgrounds=objects.folder / "places")
    assert all(tuple(picture[0, 0]) == (1, 2, 3) for picture in objects.seen().values())


def test_backgrounds_are_of_the_same_split(tmp_path: Path) -> None:
    objects = Objects(tmp_path, 0)
    for i in range(24):
        objects.draw(i, split=["train", "test"][i % 2])
    objects.write()
    objects.view()
    with FeatureStore(tmp_path / "view.h5") as store:
        assert store.files is not None
        for id, text in zip(store.ids, store.files.beside, strict=True):
            beside = Beside.of(text)
            assert beside is not None
            other = int(Path(beside.backgrounds[-1][0]).stem)
            assert other % 2 == int(id[1:]) % 2 and f"o{other}" != id


def test_edges_are_soft_and_masks_of_another_size_are_averaged(tmp_path: Path) -> None:
    levels = np.zeros((8, 8), np.uint8)
    levels[:, 4:] = 255
    levels[:, 3] = 100
    Image.fromarray(levels).save(tmp_path / "m.png")
    same = read_mask("m", (8, 8), {"m": (tmp_path / "m.png").read_bytes()})
    np.testing.assert_array_equal(same, levels / 255)
    half = read_mask("m", (4, 4), {"m": (tmp_path / "m.png").read_bytes()})
    assert 0 < half[0, 1] < 1 and half[0, 3] == 1
    mixed = np.asarray(paste(Image.new("RGB", (8, 8), (200,) * 3), same, Image.new("RGB", (8, 8), (50,) * 3)))
    assert mixed[0, 3, 0] == round(200 * 100 / 255) + round(50 * 155 / 255)


def test_what_is_filled_in_comes_from_around_the_object() -> None:
    x = np.linspace(0, 200, 60)
    pixels = np.repeat(np.repeat(x[None, :, None], 40, 0), 3, 2).astype(np.uint8)
    share = np.zeros((40, 60))
    share[10:30, 20:40] = 1
    spoiled = pixels.copy()
    spoiled[share > 0] = (255, 0, 255)
    found = np.asarray(without_object(Image.fromarray(spoiled), share)).astype(int)
    outside = share == 0
    outside[9:31, 19:41] = False
    np.testing.assert_array_equal(found[outside], pixels[outside])
    assert np.abs(found - pixels).mean() < 12, "near the gradient that the object hides"
    with pytest.raises(DecodeError, match="leaves no background"):
        without_object(Image.fromarray(spoiled), np.ones((40, 60)))


def test_no_seam_of_the_old_background_is_left() -> None:
    """A picture that was pasted with soft edges is pasted anew as if it had never had another background."""
    rng = np.random.default_rng(0)
    share = (
        np.asarray(Image.fromarray((rng.random((5, 5)) > 0.5).astype(np.uint8) * 255).resize((60, 60))) / 255
    )
    share[:, :12] = share[:, -12:] = 0
    plain = Image.new("RGB", (60, 60), (230, 220, 90))
    old, new = Image.new("RGB", (60, 60), (10, 40, 160)), Image.new("RGB", (60, 60), (90, 20, 30))
    picture, wanted = paste(plain, share, old), np.asarray(paste(plain, share, new)).astype(int)
    found = np.asarray(paste(own_colours(picture, share), share, new)).astype(int)
    assert np.abs(found - wanted).max() <= 2
    assert np.abs(np.asarray(paste(picture, share, new)).astype(int) - wanted).max() > 20


def test_masks_follow_the_picture_as_exif_turns_it(objects: Objects) -> None:
    pixels = np.zeros((6, 12, 3), np.uint8)
    pixels[:, 6:] = 200  # shown, after a quarter turn, in the lower half
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(objects.folder / "0.png", exif=exif)
    mask = np.zeros((12, 6), np.uint8)
    mask[6:] = 255
    Image.fromarray(mask).save(objects.masks / "o0.png")
    assert not objects.view(fill="grey").failed
    seen = objects.seen()["o0"]
    assert (seen[9:] == 200).all() and (seen[:7] == 128).all()
    Image.fromarray(np.rot90(mask)).save(objects.masks / "o0.png")
    reason = objects.reasons(objects.view(fill="grey"))["o0"]
    assert "masks are of pictures as EXIF turns them: 12 × 6, where the picture is 6 × 12" in reason


def test_bad_masks_are_named_and_the_rest_is_embedded(objects: Objects) -> None:
    (objects.masks / "o0.png").unlink()
    Image.new("L", (SIDE, SIDE), 0).save(objects.masks / "o1.png")
    Image.new("L", (SIDE, SIDE), 255).save(objects.masks / "o2.png")
    levels = np.zeros((SIDE, SIDE), np.uint8)
    levels[:4] = 1
    Image.fromarray(levels).save(objects.masks / "o3.png")
    (objects.masks / "o4.png").write_bytes(b"no picture")
    for i in range(6, 10):
        objects.draw(i)
    cut_out = np.zeros((SIDE, SIDE, 4), np.uint8)
    cut_out[:4] = 200, 40, 40, 255
    Image.fromarray(cut_out).save(objects.masks / "o8.png")
    Image.new("RGBA", (SIDE, SIDE), (255, 255, 255, 0)).save(objects.masks / "o9.png")
    objects.write()
    report = objects.view()
    found = objects.reasons(report)
    assert list(found) == ["o0", "o1", "o2", "o3", "o4", "o8", "o9"]
    assert found["o0"] == f"no mask: no o0.png in {objects.masks}"
    assert found["o1"] == "its mask o1.png is empty"
    assert found["o2"].startswith("its mask o2.png is full: no background is left")
    assert found["o3"] == "its mask o3.png is empty (its greatest value is 1; the object is 255)"
    assert "content starts with 'no picture'" in found["o4"]
    assert found["o8"].startswith("its mask o8.png is a coloured picture; a mask is grey")
    assert found["o9"].endswith("transparency doesn't count")
    # An image without an object is a background; those that can't be one are passed over.
    with FeatureStore(objects.folder / "view.h5") as store:
        assert store.files is not None
        used = [Beside.of(text).backgrounds[-1][0] for text in store.files.beside]  # type: ignore[union-attr]
    assert {Path(path).name for path in used} <= {"1.png", "5.png", "6.png", "7.png"}


def test_masks_that_fit_no_image_are_an_error_or_a_note(objects: Objects) -> None:
    Image.new("L", (4, 4)).save(objects.masks / "stray.png")
    objects.view()
    assert "1 masks belong to no image" in objects.said.notes
    with pytest.raises(InputError, match="none of the images has a mask") as caught:
        objects.view(masks=objects.folder, output=objects.folder / "n.h5")
    assert "named by the images' ids: o0.png" in str(caught.value)
    with pytest.raises(InputError, match="a folder can't be read"):
        objects.view(masks=objects.folder / "nowhere", output=objects.folder / "n.h5")
    assert not (objects.folder / "n.h5").exists()


def test_the_names_of_masks() -> None:
    assert mask_names("a.jpg") == ["a.jpg.png", "a.png"]
    assert mask_names("/photo/dog/a.JPEG") == ["photo/dog/a.JPEG.png", "photo/dog/a.png"]
    assert mask_names("v1.5") == ["v1.5.png"]


def test_a_changed_mask_or_background_makes_its_rows_anew(objects: Objects) -> None:
    objects.view()
    before = objects.seen()
    assert (again_ := objects.view()).new == 0 and not again_.written
    for file in objects.masks.iterdir():  # touched, and the same
        os.utime(file)
    assert objects.view().new == 0
    assert not objects.view().written, "the new times are kept"
    with FeatureStore(objects.folder / "view.h5") as store:
        assert store.files is not None
        users = [
            id
            for id, text in zip(store.ids, store.files.beside, strict=True)
            if id == "o3" or "masks/o3.png" in text
        ]
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[2:14, 2:10] = 255
    Image.fromarray(mask).save(objects.masks / "o3.png")
    report = objects.view()
    assert (report.new, report.reused) == (len(users), 6 - len(users))
    after = objects.seen()
    assert not np.array_equal(before["o3"], after["o3"])
    assert all(np.array_equal(before[id], after[id]) for id in before if id not in users)
    other = objects.folder / "reused.h5"
    assert objects.view(output=other, reuse=objects.folder / "view.h5").new == 0
    Image.new("RGB", (SIDE, SIDE), (9, 9, 9)).save(objects.folder / "1.png")
    changed = objects.view()
    assert 1 <= changed.new < 6
    assert objects.view(verify=True).new == 0


def test_a_new_image_changes_the_views_of_few_others() -> None:
    ids = [f"{i}" for i in range(400)]
    first, more = Ring.over(ids, 0), Ring.over([*ids, "new"], 0)
    drawn = [next(first.after(0, id)) for id in ids]
    changed = sum(next(more.after(0, id)) != other for id, other in zip(ids, drawn, strict=True))
    assert changed < 12
    assert all(id != other for id, other in zip(ids, drawn, strict=True))
    assert len(set(drawn)) > 150
    assert len(list(first.after(0, "1"))) == 8


def test_an_interrupted_run_goes_on_and_shards_agree(objects: Objects) -> None:
    objects.view()
    for part in ("0/2", "1/2"):
        objects.view(output=objects.folder / "s.h5", shard=part, batch_size="2")
    with FeatureStore(objects.folder / "view.h5") as whole, FeatureStore(objects.folder / "s.h5") as joined:
        assert whole.read().tobytes() == joined.read().tobytes()
        assert whole.files is not None and joined.files is not None
        assert list(whole.files.beside) == list(joined.files.beside)


def test_a_plain_store_and_its_view_are_one_encoder_and_the_page_shows_the_view(objects: Objects) -> None:
    objects.embed(model=f"pixels:{SIDE}")
    objects.view()
    line = [
        "pairs",
        "--match",
        "same-id",
        "-f",
        "features.h5",
        "--features-b",
        "view.h5",
        "-o",
        "p.h5",
        "--where",
        "split=train",
    ]
    os.chdir(objects.folder)
    assert run(line) == 0
    seen = objects.seen()["o1"]
    with FeatureStore(objects.folder / "view.h5") as store:
        assert store.files is not None
        text = store.files.beside_of(1)
        shown = again(decode(objects.folder / "1.png"), "o1", text, store.encoder["view"], decode)
        np.testing.assert_array_equal(np.asarray(shown), seen)
        assert Thumbnails().row(store, "o1").src is not None
        Path(json.loads(text)["mask"]).unlink()
        assert Thumbnails().row(store, "o1").why == "its mask o1.png: no such file"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"augment": "background"}, "needs masks"),
        ({"masks": Path("m")}, "--masks needs --augment background"),
        ({"augment": "grayscale", "fill": "grey"}, "--fill needs --augment background"),
        ({"augment": "flip+background", "masks": Path("m")}, "comes first"),
        (
            {"augment": "background", "masks": Path("m"), "backgrounds": Path("b"), "fill": "grey"},
            "both say what replaces",
        ),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(EmbedOptions(source=Path("m.csv"), output=Path("f.h5"), **given))


def test_what_isnt_local_is_refused(objects: Objects) -> None:
    with pytest.raises(UsageError, match="local files only"):
        objects.view(masks=Path("s3://bucket/masks"))
    rows = [{"id": "a", "path": "https://host.invalid/a.png"}, {"id": "b", "path": "0.png"}]
    objects.write(rows)
    with pytest.raises(UsageError, match="local files only") as caught:
        objects.view()
    assert "https://host.invalid/a.png" in str(caught.value)


def test_more_augmentations_follow(objects: Objects) -> None:
    objects.view(fill="grey")
    objects.view(fill="grey", augment="background+flip", output=objects.folder / "flip.h5")
    for id, picture in objects.seen("flip.h5").items():
        np.testing.assert_array_equal(picture, objects.seen()[id][:, ::-1])


def test_a_recipe_takes_masks(objects: Objects) -> None:
    os.chdir(objects.folder)
    write_csv(Path("m.csv"), ("id", "path"), [(f"o{i}", f"{i}.png") for i in range(6)])
    step = "{source: m.csv, model: 'pixels:4', augment: background, masks: masks, fill: noise, output: v.h5}"
    Path("r.yaml").write_text(f"name: r\nsteps:\n  - embed: {step}\n")
    assert run(["run", "r.yaml"]) == 0
    with FeatureStore(Path("runs/r/v.h5")) as store:
        first = store.read().copy()
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[:3] = 255
    Image.fromarray(mask).save(objects.masks / "o2.png")
    assert run(["run", "r.yaml"]) == 0, "a changed mask makes the step run again"
    with FeatureStore(Path("runs/r/v.h5")) as store:
        assert (store.read() != first).any(axis=1).tolist() == [id == "o2" for id in store.ids]


def test_a_record_that_cant_be_read_is_made_anew(objects: Objects) -> None:
    assert Beside.of("") is Beside.of("{}") is Beside.of('{"mask": 1, "backgrounds": [1]}') is None
    beside = Beside("m.png", (("a.png", "b.png"),), "f", "s")
    assert Beside.of(beside.text) == beside
    assert dataclasses.replace(beside, backgrounds=()).paths == ["m.png"]


@pytest.mark.slow
def test_digits_on_backgrounds_that_predict_the_label(mnist_dir: Path) -> None:
    """ERM follows the background; pairs restore what the digits alone give: the benchmark asserts it."""
    import subprocess
    import sys

    bench = Path(__file__).parents[1] / "benchmarks" / "bench_masks.py"
    line = [sys.executable, str(bench), "--mnist", str(mnist_dir), "--seeds", "1"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
