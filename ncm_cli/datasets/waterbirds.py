"""Paste a bird on a place as the authors of Waterbirds did.

Sagawa et al., Distributionally Robust Neural Networks for Group Shifts (2020), appendix C.1: the bird is cut
out by CUB's segmentation and laid over a picture of Places, resized and cropped to the bird picture's size.

Reading Waterbirds' metadata.csv in the forms that are about.

Waterbirds-CF: Waterbirds whose minority training groups are counterfactual twins of majority birds.

The paper, appendix "Detailed Construction of Waterbirds-CFs": the majority training rows stay; 184 landbirds
and 56 waterbirds drawn from them are pasted on a background of the other kind. Validation and test stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from ncm_cli.datasets.base import Built, CountTable, absolute, building
from ncm_cli.datasets.options import WaterbirdsCfOptions
from ncm_cli.errors import InputError, UsageError, listing, nearest
from ncm_cli.options import as_json, check
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.tables import read_table, write_csv


def cover(place: Image.Image, size: tuple[int, int]) -> Image.Image:
    """``place`` resized and centrally cropped so that it fills ``size`` (width, height) exactly.

    A place smaller than the bird's picture in either direction is enlarged first.
    """
    width, height = size
    if place.width < width or place.height < height:
        enlarge = max(width / place.width, height / place.height)
        larger = (max(width, int(place.width * enlarge)), max(height, int(place.height * enlarge)))
        place = place.resize(larger, Image.Resampling.LANCZOS)
    if place.width / place.height > width / height:
        kept = int(width / height * place.height)
        offset = (place.width - kept) // 2
        box = (offset, 0, place.width - offset, place.height)
    else:
        kept = int(place.width / (width / height))
        offset = (place.height - kept) // 2
        box = (0, offset, place.width, place.height - offset)
    return place.crop(box).resize(size, Image.Resampling.LANCZOS)


def paste(bird: Image.Image, mask: npt.NDArray[np.float64], place: Image.Image) -> Image.Image:
    """The bird (RGB) where ``mask`` (h, w, values in [0, 1]) is 1, the place (RGB) where it is 0."""
    share = mask[..., None]
    front = np.around(np.asarray(bird) * share)
    back = np.around(np.asarray(cover(place, bird.size)) * (1 - share))
    # Both parts are rounded, as the authors do; the sum may pass 255 by one on a soft edge.
    return Image.fromarray(np.minimum(front + back, 255).astype(np.uint8))


NAMES = {
    "id": ("img_id", "id"),
    "file": ("img_filename", "filename", "image_filename"),
    "label": ("y", "label"),
    "split": ("split",),
    "place": ("place", "a"),
    "place_file": ("place_filename",),
}
"""What is needed, and the columns that may hold it."""

SPLITS = {
    "0": "train",
    "1": "val",
    "2": "test",
    **{name: name for name in ("train", "val", "test", "counterfactual")},
    "validation": "val",
    "cf": "counterfactual",
}

LABELS = {"0": "landbird", "1": "waterbird"}
PLACES = {"0": "land", "1": "water"}

UNPAIRED = ("", "-1", "nan", "none")


@dataclass(frozen=True, slots=True)
class Bird:
    """One row of the metadata."""

    line: int
    id: str
    file: str
    label: str
    place: str
    split: str
    place_file: str
    cf: str
    """The text of the ``cf`` column; empty if there is none or the row has no twin."""


def read_metadata(folder: Path) -> tuple[list[Bird], bool]:
    """The rows of ``metadata.csv``, and whether it has a ``cf`` column."""
    path = folder / "metadata.csv"
    if not path.is_file():
        raise InputError("no metadata.csv in the Waterbirds folder", where=folder)
    table = read_table(path, what="metadata.csv")
    columns = _columns(table.columns, path)
    birds = [
        _bird(row, columns, path, line) for row, line in zip(table.rows, table.line_numbers, strict=True)
    ]
    _require_unique(birds, path)
    return birds, "cf" in columns


def _columns(found: Sequence[str], path: Path) -> dict[str, str]:
    columns: dict[str, str] = {}
    for what, names in NAMES.items():
        name = next((name for name in names if name in found), None)
        if name is None and what not in ("place_file", "id"):
            close = nearest(names[0], found)
            raise InputError(
                f"no column {' or '.join(names)}",
                where=path,
                found=listing(found),
                fix=f"rename {close!r}?" if close else None,
            )
        if name is not None:
            columns[what] = name
    if "cf" in found:
        columns["cf"] = "cf"
    return columns


def _bird(row: dict[str, str], columns: dict[str, str], path: Path, line: int) -> Bird:
    values = {what: row[name] for what, name in columns.items()}
    for what, known in (("label", LABELS), ("place", PLACES), ("split", SPLITS)):
        if values[what] not in known and values[what] not in known.values():
            raise InputError(
                f"a value of column {columns[what]!r} that can't be read",
                where=f"{path}, line {line}",
                found=repr(values[what]),
                expected=" or ".join(known),
            )
    if not values["file"]:
        raise InputError("a row without an image", where=f"{path}, line {line}")
    cf = values.get("cf", "")
    return Bird(
        line=line,
        id=values.get("id") or values["file"],
        file=values["file"],
        label=LABELS.get(values["label"], values["label"]),
        place=PLACES.get(values["place"], values["place"]),
        split=SPLITS[values["split"]],
        place_file=values.get("place_file", ""),
        cf="" if cf.lower() in UNPAIRED else cf,
    )


def _require_unique(birds: list[Bird], path: Path) -> None:
    lines: dict[str, int] = {}
    for bird in birds:
        if bird.file in lines:
            raise InputError(
                f"the image {bird.file!r} twice", where=f"{path}, lines {lines[bird.file]} and {bird.line}"
            )
        lines[bird.file] = bird.line


def twins(birds: list[Bird], path: Path) -> list[tuple[Bird, Bird]]:
    """The pairs that the ``cf`` column names, (original, counterfactual).

    A value is either a number that exactly two rows share, or the id or image of the row's twin.
    """
    named = [bird for bird in birds if bird.cf]
    sharing: dict[str, list[Bird]] = {}
    for bird in named:
        sharing.setdefault(bird.cf, []).append(bird)
    if named and all(len(group) == 2 for group in sharing.values()):
        return [_ordered(a, b) for a, b in sharing.values()]
    by_name = {name: bird for bird in birds for name in (bird.file, bird.id)}
    pairs: dict[frozenset[str], tuple[Bird, Bird]] = {}
    for bird in named:
        twin = by_name.get(bird.cf)
        if twin is None or twin is bird:
            raise InputError(
                "a value of column 'cf' that names no other row",
                where=f"{path}, line {bird.line}",
                found=repr(bird.cf),
                expected="the img_id or image of the twin, or a number that exactly two rows share",
            )
        pairs[frozenset((bird.file, twin.file))] = _ordered(bird, twin)
    return list(pairs.values())


def _ordered(a: Bird, b: Bird) -> tuple[Bird, Bird]:
    return (b, a) if a.split == "counterfactual" else (a, b)


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


def build(options: WaterbirdsCfOptions, reporter: Reporter = SILENT) -> Built:
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
