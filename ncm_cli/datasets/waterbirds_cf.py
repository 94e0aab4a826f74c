"""Waterbirds-CF: Waterbirds whose minority training groups are counterfactual twins of majority birds.

The paper, appendix "Detailed Construction of Waterbirds-CFs": the majority training rows stay; 184 landbirds
and 56 waterbirds drawn from them are pasted on a background of the other kind. Validation and test stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from ncm_cli.datasets.folder import Built, CountTable, absolute, building
from ncm_cli.datasets.paste import paste
from ncm_cli.datasets.waterbirds_table import Bird, read_metadata, twins
from ncm_cli.errors import InputError, UsageError, listing
from ncm_cli.options.data import WaterbirdsCfOptions
from ncm_cli.options.spec import as_json, check
from ncm_cli.progress import Reporter
from ncm_cli.store.csv_writer import write_csv

COLUMNS = ("id", "path", "label", "place", "split", "cf")

PUBLISHED = {
    ("landbird", "land"): 3498,
    ("landbird", "water"): 184,
    ("waterbird", "land"): 56,
    ("waterbird", "water"): 1057,
}
"""Training rows of each group, in Waterbirds and in Waterbirds-CF."""

BACKGROUNDS = {
    "land": ("bamboo_forest", "forest/broadleaf"),
    "water": ("ocean", "lake/natural"),
}
"""The categories of Places that stand for each kind."""

HOME = {"landbird": "land", "waterbird": "water"}

SUFFIXES = {".jpg", ".jpeg", ".png"}

Row = tuple[object, ...]


def build(options: WaterbirdsCfOptions, reporter: Reporter) -> Built:
    """Write manifest.csv and, unless the folder is plain Waterbirds, pairs.csv and the new images.

    With ``cub`` and ``places`` counterfactuals are made; a ``cf`` column in metadata.csv is used as it is;
    with neither, the manifest holds Waterbirds as it is, without pairs.
    """
    check(options)
    birds, has_cf = read_metadata(options.waterbirds)
    making = options.cub is not None
    if making and has_cf:
        raise UsageError(
            "this folder has counterfactuals already",
            where=options.waterbirds,
            fix="leave --cub and --places out",
        )
    _require_images(options.waterbirds, birds)
    made: list[Row]
    with building(options.output, "waterbirds-cf", as_json(options)) as folder:
        if making:
            rows, pairs = _make(options, birds, folder, reporter)
        else:
            rows = [_row(bird, options.waterbirds) for bird in birds]
            metadata = options.waterbirds / "metadata.csv"
            pairs = [(a.file, b.file) for a, b in twins(birds, metadata)] if has_cf else []
        made = rows
        write_csv(folder / "manifest.csv", COLUMNS, rows)
        if pairs:
            write_csv(folder / "pairs.csv", ("id_a", "id_b"), pairs)
    counts = Counter((str(row[2]), str(row[3])) for row in made if row[4] == "train")
    _compare(counts, reporter)
    files = {"manifest": options.output / "manifest.csv"}
    if pairs:
        files["pairs"] = options.output / "pairs.csv"
    return Built(
        builder="waterbirds-cf",
        output=options.output,
        files=files,
        facts={"rows": len(made), "pairs": len(pairs), "seed": options.seed},
        tables=(_table(counts),),
    )


def _row(bird: Bird, folder: Path) -> Row:
    """A manifest row; counterfactuals of an existing folder are training rows here."""
    cf = bird.split == "counterfactual"
    path = absolute(folder / bird.file)
    split = "train" if cf else bird.split
    return (bird.file, path, bird.label, bird.place, split, "yes" if cf else "no")


def _make(
    options: WaterbirdsCfOptions, birds: list[Bird], folder: Path, reporter: Reporter
) -> tuple[list[Row], list[tuple[str, str]]]:
    assert options.cub is not None and options.places is not None
    rng = np.random.default_rng(options.seed)
    majority = [bird for bird in birds if bird.split == "train" and bird.place == HOME[bird.label]]
    drawn = [
        *_draw(majority, "landbird", options.landbirds, "--landbirds", rng),
        *_draw(majority, "waterbird", options.waterbirds_count, "--waterbirds-count", rng),
    ]
    masks = [_mask_path(options.cub, bird) for bird in drawn]
    used = {bird.place_file.strip("/") for bird in birds}
    places = _draw_places(options.places, drawn, used, rng)
    kept = [bird for bird in birds if bird.split != "train" or bird.place == HOME[bird.label]]
    rows = [_row(bird, options.waterbirds) for bird in kept]
    pairs = []
    (folder / "images").mkdir()
    with reporter.task("counterfactuals", total=len(drawn), unit="images") as task:
        for number, (bird, mask, place) in enumerate(zip(drawn, masks, places, strict=True)):
            name = f"images/{number:04d}-{Path(bird.file).stem}.jpg"
            _paste_one(options, bird, mask, place).save(folder / name)
            other = "water" if bird.place == "land" else "land"
            rows.append((f"cf/{bird.file}", name, bird.label, other, "train", "yes"))
            pairs.append((bird.file, f"cf/{bird.file}"))
            task.advance()
    return rows, pairs


def _draw(majority: list[Bird], label: str, count: int, option: str, rng: np.random.Generator) -> list[Bird]:
    own = [bird for bird in majority if bird.label == label]
    if not 0 <= count <= len(own):
        raise UsageError(
            f"{option} asks for more {label}s than the majority group has", found=count, expected=len(own)
        )
    return [own[i] for i in rng.permutation(len(own))[:count]]


def _mask_path(cub: Path, bird: Bird) -> Path:
    """A bird's segmentation: the image's name with .png, in ``segmentations`` or in the folder itself."""
    name = str(Path(bird.file).with_suffix(".png"))
    tried = [cub / "segmentations" / name, cub / name]
    for path in tried:
        if path.is_file():
            return path
    raise InputError("no segmentation for a bird", where=bird.file, found=f"no {tried[0]}", fix="--cub DIR")


def _draw_places(root: Path, drawn: Sequence[Bird], used: set[str], rng: np.random.Generator) -> list[Path]:
    """A background of the other kind for each bird.

    None is taken twice, and none that Waterbirds uses where there are enough others.
    """
    found: list[Path] = []
    pools: dict[str, list[Path]] = {}
    for bird in drawn:
        kind = "water" if bird.place == "land" else "land"
        if kind not in pools:
            need = sum(other.place == bird.place for other in drawn)
            pools[kind] = _pool(root, kind, need, used, rng)
        found.append(pools[kind].pop())
    return found


def _pool(root: Path, kind: str, need: int, used: set[str], rng: np.random.Generator) -> list[Path]:
    files: list[Path] = []
    for category in BACKGROUNDS[kind]:
        files += _category(root, category)
    unused = [file for file in files if not any(str(file).endswith(f"/{name}") for name in used if name)]
    pool = unused if len(unused) >= need else files
    if len(pool) < need:
        raise InputError(
            f"too few pictures of {kind}",
            where=root,
            found=f"{len(pool):,} in {' and '.join(BACKGROUNDS[kind])}",
            expected=f"at least {need:,}",
        )
    return [pool[i] for i in rng.permutation(len(pool))[:need]]


def _category(root: Path, category: str) -> list[Path]:
    names = [f"{category[0]}/{category}", category, category.replace("/", "-"), category.replace("/", "_")]
    tried = [root / prefix / name for prefix in ("", "data_large") for name in names]
    for folder in tried:
        if folder.is_dir():
            return [file for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES]
    raise InputError(
        f"no pictures of {category!r} in the Places folder", where=root, expected=f"{tried[0]}, or {tried[1]}"
    )


def _paste_one(options: WaterbirdsCfOptions, bird: Bird, mask: Path, place: Path) -> Image.Image:
    assert options.cub is not None
    original = options.cub / "images" / bird.file
    source = original if original.is_file() else options.waterbirds / bird.file
    front, cut = _open(source).convert("RGB"), _open(mask).convert("L")
    if front.size != cut.size:
        raise InputError(
            "a segmentation of another size than its bird",
            where=mask,
            found=f"{cut.width} × {cut.height}",
            expected=f"{front.width} × {front.height}, as {source}",
        )
    share: npt.NDArray[np.float64] = np.asarray(cut) / 255
    return paste(front, share, _open(place).convert("RGB"))


def _open(path: Path) -> Image.Image:
    try:
        image = Image.open(path)
        image.load()
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise InputError("an image that can't be read", where=path, found=str(error)) from None
    return image


def _require_images(folder: Path, birds: list[Bird]) -> None:
    missing = [bird for bird in birds if not (folder / bird.file).is_file()]
    if missing:
        raise InputError(
            f"{len(missing):,} of {len(birds):,} images aren't there",
            where=f"{folder / 'metadata.csv'}, line {missing[0].line}",
            found=listing([f"no {folder / bird.file}" for bird in missing], 3),
        )


def _compare(counts: Counter[tuple[str, str]], reporter: Reporter) -> None:
    if dict(counts) != PUBLISHED:
        have = " / ".join(str(counts[group]) for group in PUBLISHED)
        published = " / ".join(str(n) for n in PUBLISHED.values())
        names = ", ".join(f"{label} on {place}" for label, place in PUBLISHED)
        reporter.warn(f"training groups {have}, published {published} ({names})")


def _table(counts: Counter[tuple[str, str]]) -> CountTable:
    rows = tuple((label, place, counts[label, place], n) for (label, place), n in PUBLISHED.items())
    return CountTable(title="training groups", columns=("label", "place", "rows", "published"), rows=rows)
