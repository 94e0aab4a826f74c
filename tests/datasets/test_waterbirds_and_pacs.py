"""Waterbirds-CF and PACS from small fake folders: what is kept, what is pasted, and what is refused."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncm_cli.datasets import image_folder
from ncm_cli.datasets import waterbirds as waterbirds_cf
from ncm_cli.datasets.base import data
from ncm_cli.datasets.options import PacsOptions, WaterbirdsCfOptions
from ncm_cli.errors import InputError, UsageError
from ncm_cli.images.background import cover, paste
from ncm_cli.progress import Reporter
from tests.world import Heard, rows_of

COLUMNS = ("img_id", "img_filename", "y", "split", "place", "place_filename")

GROUPS = {(0, 0): 12, (0, 1): 3, (1, 0): 2, (1, 1): 8}
"""Training rows by (y, place) of the fake Waterbirds."""

JPEG_ERROR = 40
"""Largest difference that two encodings of one picture show where it is smooth."""


def _smooth(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    small = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def _write(file: Path, columns: tuple[str, ...], rows: list[list[object]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(rows)


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    """Fake Waterbirds, CUB segmentations and Places in one folder."""
    rng = np.random.default_rng(5)
    places = {0: ("b/bamboo_forest", "f/forest/broadleaf"), 1: ("o/ocean", "l/lake/natural")}
    for folders in places.values():
        for name in folders:
            (tmp_path / "places" / name).mkdir(parents=True)
            for i in range(8):
                size = (int(rng.integers(40, 160)), int(rng.integers(40, 160)))
                _smooth(rng, size).save(tmp_path / "places" / name / f"{i:08d}.jpg")
    rows: list[list[object]] = []
    groups = [(key, 0) for key, n in GROUPS.items() for _ in range(n)]
    groups += [((y, p), split) for split in (1, 2) for y in (0, 1) for p in (0, 1)]
    for number, ((y, place), split) in enumerate(groups, 1):
        name = f"{number % 3:03d}.Species/Bird_{number:04d}.jpg"
        width, height = int(rng.integers(60, 100)), int(rng.integers(60, 100))
        mask = np.zeros((height, width), np.uint8)
        mask[15:45, 20:50] = 255
        bird, ground = (np.asarray(_smooth(rng, (width, height))) for _ in range(2))
        for root, picture in (
            ("waterbirds", np.where(mask[..., None] > 0, bird, ground)),
            ("cub/segmentations", mask),
        ):
            file = (tmp_path / root / name).with_suffix(".png" if "cub" in root else ".jpg")
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(file)
        rows.append([number, name, y, split, place, f"/{places[place][0]}/{number % 2:08d}.jpg"])
    rng.shuffle(rows)
    _write(tmp_path / "waterbirds" / "metadata.csv", COLUMNS, rows)
    return tmp_path


def _build(folder: Path, heard: Reporter | None = None, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "waterbirds": folder / "waterbirds",
        "output": folder / "out",
        "cub": folder / "cub",
        "places": folder / "places",
        "landbirds": 3,
        "waterbirds_count": 2,
        **options,
    }
    return data(WaterbirdsCfOptions(**given), reporter=heard or Reporter())


def _pixels(file: Path) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(file).convert("RGB"), dtype=int)


def test_counterfactuals_differ_outside_the_mask_only(birds: Path) -> None:
    built = _build(birds)
    rows = {row["id"]: row for row in rows_of(Path(built["files"]["manifest"]))}
    pairs = rows_of(Path(built["files"]["pairs"]))
    assert len(pairs) == 5
    for pair in pairs:
        original, twin = rows[pair["id_a"]], rows[pair["id_b"]]
        assert (original["cf"], twin["cf"]) == ("no", "yes")
        assert original["label"] == twin["label"]
        assert {original["place"], twin["place"]} == {"land", "water"}
        assert original["split"] == twin["split"] == "train"
        a = _pixels(Path(original["path"]))
        b = _pixels(Path(built["output"]) / twin["path"])
        assert a.shape == b.shape
        mask = _pixels((birds / "cub/segmentations" / pair["id_a"]).with_suffix(".png"))[..., 0] > 0
        # Inside, away from the edge where JPEG's blocks mix both sides, the bird is the same.
        inside = np.zeros_like(mask)
        inside[24:40, 32:48] = mask[24:40, 32:48]
        assert np.abs(a - b)[inside].max() < JPEG_ERROR
        assert np.abs(a - b)[~mask].mean() > np.abs(a - b)[inside].mean() + 10


def test_groups_are_counted_and_the_rest_is_unchanged(birds: Path) -> None:
    heard = Heard()
    built = _build(birds, heard)
    rows = rows_of(Path(built["files"]["manifest"]))
    counts = Counter((row["label"], row["place"]) for row in rows if row["split"] == "train")
    assert counts == {
        ("landbird", "land"): 12,
        ("landbird", "water"): 3,
        ("waterbird", "land"): 2,
        ("waterbird", "water"): 8,
    }
    assert sum(row["split"] == "val" for row in rows) == sum(row["split"] == "test" for row in rows) == 4
    assert {row["cf"] for row in rows if row["split"] != "train"} == {"no"}
    assert heard.warnings == [
        "training groups 12 / 3 / 2 / 8, published 3498 / 184 / 56 / 1057 "
        "(landbird on land, landbird on water, waterbird on land, waterbird on water)"
    ]
    assert built["counts"]["training groups"][0] == {
        "label": "landbird",
        "place": "land",
        "rows": 12,
        "published": 3498,
    }


def test_backgrounds_are_used_once_and_not_those_of_waterbirds(birds: Path) -> None:
    taken = waterbirds_cf.draw_places(
        birds / "places",
        "water",
        14,
        {"o/ocean/00000000.jpg", "o/ocean/00000001.jpg"},
        np.random.default_rng(0),
    )
    assert len(set(taken)) == 14
    assert not any("ocean/0000000" + digit in str(path) for path in taken for digit in "01")


def test_the_seed_decides(birds: Path) -> None:
    one = rows_of(Path(_build(birds, output=birds / "a")["files"]["pairs"]))
    two = rows_of(Path(_build(birds, output=birds / "b")["files"]["pairs"]))
    other = rows_of(Path(_build(birds, output=birds / "c", seed=1)["files"]["pairs"]))
    assert one == two
    assert one != other


def test_birds_come_from_cub_where_it_has_them(birds: Path) -> None:
    metadata = rows_of(birds / "waterbirds" / "metadata.csv")
    for row in metadata:
        size = _pixels((birds / "cub/segmentations" / row["img_filename"]).with_suffix(".png")).shape
        file = birds / "cub" / "images" / row["img_filename"]
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (size[1], size[0]), (255, 0, 255)).save(file)
    built = _build(birds)
    twin = rows_of(Path(built["files"]["manifest"]))[-1]
    pixel = _pixels(Path(built["output"]) / twin["path"])[30, 35]
    assert np.abs(pixel - [255, 0, 255]).max() < JPEG_ERROR


def _drop(column: str, as_name: str | None = None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "waterbirds" / "metadata.csv"
        rows = rows_of(file)
        columns = tuple(as_name or name if name == column else name for name in COLUMNS)
        kept = tuple(name for name in columns if as_name or name != column)
        _write(file, kept, [[row[name] for name in COLUMNS if as_name or name != column] for row in rows])

    return change


def _first_drawn_mask(folder: Path) -> None:
    for file in (folder / "cub" / "segmentations").rglob("*.png"):
        file.unlink()


def _one_image(folder: Path) -> None:
    next((folder / "waterbirds").rglob("Bird_0004.jpg")).unlink()


def _other_size(folder: Path) -> None:
    for file in (folder / "cub" / "segmentations").rglob("*.png"):
        Image.new("L", (10, 10)).save(file)


def _no_ocean(folder: Path) -> None:
    (folder / "places" / "o").rename(folder / "places" / "x")


def _set(column: str, value: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "waterbirds" / "metadata.csv"
        rows = rows_of(file)
        rows[3][column] = value
        _write(file, COLUMNS, [[row[name] for name in COLUMNS] for row in rows])

    return change


@pytest.mark.parametrize(
    ("change", "match", "parts"),
    [
        (_first_drawn_mask, "no segmentation for a bird", ["cub/segmentations", ".png"]),
        (_one_image, "1 of 33 images aren't there", ["Bird_0004.jpg", "metadata.csv, line"]),
        (_drop("place", "plaec"), "no column place or a", ["plaec", "rename 'plaec'?"]),
        (_drop("y"), "no column y or label", ["img_id, img_filename, split"]),
        (_other_size, "a segmentation of another size", ["10 × 10"]),
        (_no_ocean, "no pictures of 'ocean'", ["places/o/ocean"]),
        (_set("y", "3"), "a value of column 'y'", ["line 5", "'3'"]),
        (_set("split", "dev"), "a value of column 'split'", ["line 5", "'dev'"]),
        (_set("img_filename", ""), "a row without an image", ["line 5"]),
    ],
)
def test_what_lacks_is_named(
    birds: Path, change: Callable[[Path], None], match: str, parts: list[str]
) -> None:
    change(birds)
    with pytest.raises(InputError, match=match) as caught:
        _build(birds)
    for part in parts:
        assert part in str(caught.value)
    assert not (birds / "out").exists()
    assert not list(birds.glob(".*"))


def test_an_image_twice_is_refused(birds: Path) -> None:
    file = birds / "waterbirds" / "metadata.csv"
    rows = [[row[name] for name in COLUMNS] for row in rows_of(file)]
    _write(file, COLUMNS, [*rows, rows[0]])
    with pytest.raises(InputError, match="twice"):
        _build(birds)


def test_too_many_are_asked_for(birds: Path) -> None:
    with pytest.raises(UsageError, match="more landbirds than the majority group has"):
        _build(birds, landbirds=13)
    with pytest.raises(UsageError, match="needs both --cub and --places"):
        _build(birds, cub=None)


def test_plain_waterbirds_is_a_manifest(birds: Path) -> None:
    built = _build(birds, cub=None, places=None)
    rows = rows_of(Path(built["files"]["manifest"]))
    assert len(rows) == 33
    assert "pairs" not in built["files"]
    assert {row["label"] for row in rows} == {"landbird", "waterbird"}


def test_other_names_of_the_columns(birds: Path) -> None:
    """bit-ml/bee."""
    file = birds / "waterbirds" / "metadata.csv"
    rows = [[row[name] for name in COLUMNS] for row in rows_of(file)]
    _write(file, ("img_id", "filename", "y", "split", "a", "place_filename"), rows)
    assert len(rows_of(Path(_build(birds)["files"]["pairs"]))) == 5


def test_metadata_is_read_as_every_table_is(birds: Path) -> None:
    """Saved again by a spreadsheet, with an index: semicolons, a byte order mark, a column without a name."""
    file = birds / "waterbirds" / "metadata.csv"
    before = _build(birds)
    lines = file.read_text(encoding="utf-8").splitlines()
    indexed = [f"{i - 1 if i else ''},{line}".replace(",", ";") for i, line in enumerate(lines)]
    file.write_text("\r\n".join(["sep=;", *indexed]), encoding="utf-8-sig", newline="")
    manifest = rows_of(Path(before["files"]["manifest"]))
    assert rows_of(Path(_build(birds)["files"]["manifest"])) == manifest
    file.write_text("\n".join([*lines[:4], lines[4] + ",extra"]), encoding="utf-8")
    with pytest.raises(InputError, match="row 4 has 7 fields where the header has 6"):
        _build(birds)


@pytest.mark.parametrize("how", ["number", "id", "image"])
def test_an_existing_cf_column_names_the_pairs(birds: Path, how: str) -> None:
    file = birds / "waterbirds" / "metadata.csv"
    rows = rows_of(file)
    originals = [row for row in rows if row["split"] == "0" and row["y"] == row["place"]][:3]
    twins = [row for row in rows if row["split"] == "0" and row["y"] != row["place"]][:3]
    for number, (original, twin) in enumerate(zip(originals, twins, strict=True)):
        twin["split"] = "counterfactual"
        if how == "number":
            original["cf"] = twin["cf"] = str(number)
        else:
            twin["cf"] = original["img_id" if how == "id" else "img_filename"]
    _write(file, (*COLUMNS, "cf"), [[row.get(name, "-1") for name in (*COLUMNS, "cf")] for row in rows])
    built = _build(birds, cub=None, places=None)
    expected = {(a["img_filename"], b["img_filename"]) for a, b in zip(originals, twins, strict=True)}
    assert {(pair["id_a"], pair["id_b"]) for pair in rows_of(Path(built["files"]["pairs"]))} == expected
    manifest = {row["id"]: row for row in rows_of(Path(built["files"]["manifest"]))}
    assert {manifest[b]["split"] for _, b in expected} == {"train"}
    assert {manifest[b]["cf"] for _, b in expected} == {"yes"}
    with pytest.raises(UsageError, match="has counterfactuals already"):
        _build(birds)


def test_a_cf_value_that_names_nothing(birds: Path) -> None:
    file = birds / "waterbirds" / "metadata.csv"
    rows = rows_of(file)
    rows[0]["cf"] = "999"
    _write(file, (*COLUMNS, "cf"), [[row.get(name, "") for name in (*COLUMNS, "cf")] for row in rows])
    with pytest.raises(InputError, match="names no other row") as caught:
        _build(birds, cub=None, places=None)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize("seed", range(6))
def test_places_cover_any_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        place = Image.new("RGB", tuple(int(n) for n in rng.integers(5, 300, 2)), (10, 200, 30))
        size = tuple(int(n) for n in rng.integers(5, 300, 2))
        covered = cover(place, size)  # type: ignore[arg-type]
        assert covered.size == size
        assert np.array_equal(np.asarray(covered), np.full((size[1], size[0], 3), (10, 200, 30)))


def test_covering_crops_the_middle() -> None:
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    assert np.asarray(cover(Image.fromarray(wide), (20, 20))).min() == 255


def test_pasting_mixes_soft_edges() -> None:
    bird, place = Image.new("RGB", (4, 4), (200, 200, 200)), Image.new("RGB", (4, 4), (100, 0, 50))
    mask = np.full((4, 4), 0.5)
    mask[0], mask[1] = 1.0, 0.0
    found = np.asarray(paste(bird, mask, place))
    assert found[0, 0].tolist() == [200, 200, 200]
    assert found[1, 0].tolist() == [100, 0, 50]
    assert found[2, 0].tolist() == [150, 100, 125]


def _fake_pacs(root: Path, n: int = 10) -> Path:
    for domain in ("photo", "sketch"):
        for label in ("dog", "house"):
            folder = root / domain / label
            folder.mkdir(parents=True)
            for i in range(n):
                (folder / f"pic_{i:03d}.jpg").write_bytes(b"")
            (folder / ".DS_Store").write_bytes(b"")
    return root


def test_pacs_splits_each_class_of_each_domain(tmp_path: Path) -> None:
    heard = Heard()
    root = _fake_pacs(tmp_path / "PACS")
    built = data(PacsOptions(pacs=root, output=tmp_path / "out"), reporter=heard)
    rows = rows_of(Path(built["files"]["manifest"]))
    assert len(rows) == len({row["id"] for row in rows}) == 40
    counts = Counter((row["domain"], row["label"], row["split"]) for row in rows)
    assert set(counts.values()) == {8, 2}
    assert all(Path(row["path"]).is_file() for row in rows)
    assert len(heard.warnings) == 1
    assert "photo 20 of 1,670" in heard.warnings[0]
    again = data(PacsOptions(pacs=root, output=tmp_path / "again"), reporter=heard)
    other = data(PacsOptions(pacs=root, output=tmp_path / "other", seed=1), reporter=heard)
    assert rows_of(Path(again["files"]["manifest"])) == rows
    assert rows_of(Path(other["files"]["manifest"])) != rows


def test_pacs_of_the_published_size_is_not_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr(image_folder, "PUBLISHED", {"photo": 20, "sketch": 20})
    data(PacsOptions(pacs=_fake_pacs(tmp_path / "PACS"), output=tmp_path / "out"), reporter=heard)
    assert heard.warnings == []


def test_pacs_limit(tmp_path: Path) -> None:
    options = PacsOptions(pacs=_fake_pacs(tmp_path / "PACS"), output=tmp_path / "out", limit=5)
    rows = rows_of(Path(data(options, reporter=Heard())["files"]["manifest"]))
    assert set(Counter((row["domain"], row["label"]) for row in rows).values()) == {5}


def test_pacs_without_images(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        data(PacsOptions(pacs=tmp_path / "no", output=tmp_path / "out"), reporter=Heard())
    (tmp_path / "PACS" / "photo").mkdir(parents=True)
    with pytest.raises(InputError, match="no images in the folder"):
        data(PacsOptions(pacs=tmp_path / "PACS", output=tmp_path / "out"), reporter=Heard())
    (tmp_path / "PACS" / "photo" / "1.jpg").write_bytes(b"")
    with pytest.raises(InputError, match="don't lie where the layout says") as caught:
        data(PacsOptions(pacs=tmp_path / "PACS", output=tmp_path / "out"), reporter=Heard())
    assert caught.value.expected == "every image under 2 folders"


def test_the_sample_of_pacs(tmp_path: Path, pacs_dir: Path) -> None:
    built = data(PacsOptions(pacs=pacs_dir, output=tmp_path / "out"), reporter=Heard())
    rows = rows_of(Path(built["files"]["manifest"]))
    assert len(rows) == 2780
    assert {row["domain"] for row in rows} == {"art_painting", "cartoon", "photo", "sketch"}
