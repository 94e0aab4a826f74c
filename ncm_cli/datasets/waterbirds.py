"""Waterbirds-CF: Waterbirds whose minority training groups are counterfactual twins of majority birds.

The paper, appendix "Detailed Construction of Waterbirds-CFs": the majority training rows are kept; 184
landbirds and 56 waterbirds drawn from them are pasted on a background of the other kind. Validation and test
rows are kept. Pasting follows Sagawa et al., Distributionally Robust Neural Networks for Group Shifts (2020),
appendix C.1: the bird is cut out by CUB's segmentation and pasted on a picture of Places of the same size.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ncm_cli.datasets.options import WaterbirdsCfOptions
from ncm_cli.errors import InputError, UsageError, listing, nearest
from ncm_cli.images.background import MAX_COVER_PIXELS, paste
from ncm_cli.images.decode import decode, read_bytes
from ncm_cli.images.folder import IMAGE_SUFFIXES
from ncm_cli.images.manifest import absolute_text
from ncm_cli.images.samples import DecodeError
from ncm_cli.progress import Reporter
from ncm_cli.store.files import one_line
from ncm_cli.store.sniff import PICTURES, sniff
from ncm_cli.store.tables import read_table, write_csv

NAMES = {
    "file": ("img_filename", "filename", "image_filename"),
    "label": ("y", "label"),
    "split": ("split",),
    "place": ("place", "a"),
    "id": ("img_id", "id"),
    "place_file": ("place_filename",),
    "cf": ("cf",),
}
"""Fields of metadata.csv, and the columns that may hold each; the last three may be absent."""

VALUES = {
    "label": {"0": "landbird", "1": "waterbird"},
    "place": {"0": "land", "1": "water"},
    "split": {
        "0": "train",
        "1": "val",
        "2": "test",
        "train": "train",
        "val": "val",
        "test": "test",
        "counterfactual": "counterfactual",
        "validation": "val",
        "cf": "counterfactual",
    },
}

UNPAIRED = ("", "-1", "nan", "none")
"""The value of the column ``cf`` for rows without a twin."""

COLUMNS = ("id", "path", "label", "place", "split", "cf")

PUBLISHED = {
    ("landbird", "land"): 3498,
    ("landbird", "water"): 184,
    ("waterbird", "land"): 56,
    ("waterbird", "water"): 1057,
}
"""Training rows of each group, in Waterbirds and in Waterbirds-CF."""

BACKGROUNDS = {"land": ("bamboo_forest", "forest/broadleaf"), "water": ("ocean", "lake/natural")}
"""The categories of Places that stand for each kind."""

MAX_PICTURE_BYTES = 1 << 26
"""Most bytes in the file of a picture."""

MAX_BIRD_PIXELS = 1 << 22
"""Largest picture of a bird; CUB's have at most 500 × 500. Pasting takes a hundred bytes per pixel."""

HOME = {"landbird": "land", "waterbird": "water"}
OTHER = {"land": "water", "water": "land"}


@dataclass(frozen=True, slots=True)
class Bird:
    """One row of the metadata; "" for a column that isn't there."""

    line: int
    file: str
    label: str
    split: str
    place: str
    id: str
    place_file: str
    cf: str

    @property
    def majority(self) -> bool:
        """Whether it is a training bird on its usual background."""
        return self.split == "train" and self.place == HOME[self.label]


def read_metadata(path: Path) -> tuple[list[Bird], bool]:
    """The rows of ``metadata.csv``, and whether it has a ``cf`` column."""
    if not path.is_file():
        raise InputError("no metadata.csv in the Waterbirds folder", where=path.parent)
    table = read_table(path, what="metadata.csv")
    columns = {what: next((n for n in names if n in table.columns), "") for what, names in NAMES.items()}
    for what in ("file", "label", "split", "place"):
        if not columns[what]:
            close = nearest(NAMES[what][0], table.columns)
            raise InputError(
                f"no column {' or '.join(NAMES[what])}",
                where=path,
                found=listing(table.columns),
                fix=f"rename {close!r}?" if close else None,
            )
    birds: dict[str, Bird] = {}
    for row, line in zip(table.rows, table.line_numbers, strict=True):
        cells = {what: row[name] if name else "" for what, name in columns.items()}
        for what, known in VALUES.items():
            if cells[what] not in known and cells[what] not in known.values():
                raise InputError(
                    f"a value of column {columns[what]!r} that can't be read",
                    where=f"{path}, line {line}",
                    found=repr(cells[what]),
                    expected=" or ".join(known),
                )
            cells[what] = known.get(cells[what], cells[what])
        if not cells["file"]:
            raise InputError("a row without an image", where=f"{path}, line {line}")
        if cells["file"] in birds:
            lines = f"{path}, lines {birds[cells['file']].line} and {line}"
            raise InputError(f"the image {cells['file']!r} is listed twice", where=lines)
        cells["cf"] = "" if cells["cf"].lower() in UNPAIRED else cells["cf"]
        birds[cells["file"]] = Bird(line, **{**cells, "id": cells["id"] or cells["file"]})
    return list(birds.values()), bool(columns["cf"])


def twins(birds: Sequence[Bird], path: Path) -> list[tuple[str, str]]:
    """The pairs that the ``cf`` column names: images (original, counterfactual).

    A value is either a number that two rows share, or the id or image of the row's twin.
    """
    named = [bird for bird in birds if bird.cf]
    sharing: dict[str, list[Bird]] = {}
    for bird in named:
        sharing.setdefault(bird.cf, []).append(bird)
    if any(len(group) != 2 for group in sharing.values()):
        by_name = {name: bird for bird in birds for name in (bird.file, bird.id)}
        sharing = {}
        for bird in named:
            twin = by_name.get(bird.cf)
            if twin is None or twin is bird:
                raise InputError(
                    "a value of column 'cf' that names no other row",
                    where=f"{path}, line {bird.line}",
                    found=repr(bird.cf),
                    expected="the img_id or image of the twin, or a number that exactly two rows share",
                )
            sharing["\n".join(sorted((bird.file, twin.file)))] = [bird, twin]
    pairs = [sorted(group, key=lambda bird: bird.split == "counterfactual") for group in sharing.values()]
    return [(original.file, twin.file) for original, twin in pairs]


def build_waterbirds(options: WaterbirdsCfOptions, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """Write manifest.csv and, unless the folder is plain Waterbirds, pairs.csv and the new images.

    With ``cub`` and ``places`` counterfactuals are made; without them, pairs are read from a ``cf`` column in
    metadata.csv, if there is one.
    """
    root = options.waterbirds
    metadata = root / "metadata.csv"
    birds, has_cf = read_metadata(metadata)
    if options.cub is not None and has_cf:
        raise UsageError(
            "this folder has counterfactuals already", where=root, fix="leave --cub and --places out"
        )
    missing = [bird for bird in birds if not (root / bird.file).is_file()]
    if missing:
        raise InputError(
            f"{len(missing):,} of {len(birds):,} images aren't there",
            where=f"{metadata}, line {missing[0].line}",
            found=listing([f"no {root / bird.file}" for bird in missing], 3),
        )
    pasted: list[tuple[str, ...]] = []
    pairs = twins(birds, metadata)
    if options.cub is not None and options.places is not None:
        pasted, pairs = _counterfactuals(options, options.cub, options.places, birds, folder, reporter)
        birds = [bird for bird in birds if bird.split != "train" or bird.majority]
    rows: list[tuple[str, ...]] = []
    for bird in birds:
        twin = bird.split == "counterfactual"  # training rows in our manifest
        values = (bird.label, bird.place, "train" if twin else bird.split, "yes" if twin else "no")
        rows.append((bird.file, absolute_text(root / bird.file), *values))
    rows += pasted
    write_csv(folder / "manifest.csv", COLUMNS, rows)
    if pairs:
        write_csv(folder / "pairs.csv", ("id_a", "id_b"), pairs)
    counts = Counter((row[2], row[3]) for row in rows if row[4] == "train")
    if dict(counts) != PUBLISHED:
        have = " / ".join(str(counts[group]) for group in PUBLISHED)
        published = " / ".join(str(n) for n in PUBLISHED.values())
        names = ", ".join(f"{label} on {place}" for label, place in PUBLISHED)
        reporter.warn(f"training groups {have}, published {published} ({names})")
    groups = [
        {"label": label, "place": place, "rows": counts[label, place], "published": n}
        for (label, place), n in PUBLISHED.items()
    ]
    return {"rows": len(rows), "pairs": len(pairs), "counts": {"training groups": groups}}


def _counterfactuals(
    options: WaterbirdsCfOptions,
    cub: Path,
    places: Path,
    birds: Sequence[Bird],
    folder: Path,
    reporter: Reporter,
) -> tuple[list[tuple[str, ...]], list[tuple[str, str]]]:
    """Draw birds and paste them on the other background; returns their manifest rows and pairs."""
    rng = np.random.default_rng(options.seed)
    drawn = []
    for label, count, flag in (
        ("landbird", options.landbirds, "--landbirds"),
        ("waterbird", options.waterbirds_count, "--waterbirds-count"),
    ):
        majority = [bird for bird in birds if bird.majority and bird.label == label]
        if count > len(majority):
            raise UsageError(
                f"{flag} asks for more {label}s than the majority group has",
                found=count,
                expected=len(majority),
            )
        drawn += [majority[i] for i in rng.permutation(len(majority))[:count]]
    masks = [_mask(cub, bird) for bird in drawn]
    used = {bird.place_file.strip("/") for bird in birds}
    kinds = [OTHER[bird.place] for bird in drawn]
    pools = {kind: draw_places(places, kind, kinds.count(kind), used, rng) for kind in dict.fromkeys(kinds)}
    rows: list[tuple[str, ...]] = []
    pairs = []
    (folder / "images").mkdir()
    with reporter.task("counterfactuals", total=len(drawn), unit="images") as task:
        for number, (bird, mask, kind) in enumerate(zip(drawn, masks, kinds, strict=True)):
            name = f"images/{number:04d}-{Path(bird.file).stem}.jpg"
            own_image = cub / "images" / bird.file
            source = own_image if own_image.is_file() else options.waterbirds / bird.file
            picture, segmentation = _open(source, "RGB", MAX_BIRD_PIXELS), _open(mask, "L", MAX_BIRD_PIXELS)
            if picture.size != segmentation.size:
                raise InputError(
                    "a segmentation of another size than its bird",
                    where=mask,
                    found=f"{segmentation.width} × {segmentation.height}",
                    expected=f"{picture.width} × {picture.height}, as {source}",
                )
            place = pools[kind].pop()
            try:
                pasted = paste(picture, np.asarray(segmentation) / 255, _open(place, "RGB", MAX_COVER_PIXELS))
            except InputError as error:
                error.where = place
                raise
            pasted.save(folder / name)
            rows.append((f"cf/{bird.file}", name, bird.label, kind, "train", "yes"))
            pairs.append((bird.file, f"cf/{bird.file}"))
            task.advance()
    return rows, pairs


def _mask(cub: Path, bird: Bird) -> Path:
    """A bird's segmentation: its image's name with .png, in ``segmentations`` or directly in the folder."""
    name = Path(bird.file).with_suffix(".png")
    tried = [cub / "segmentations" / name, cub / name]
    for path in tried:
        if path.is_file():
            return path
    raise InputError("no segmentation for a bird", where=bird.file, found=f"no {tried[0]}", fix="--cub DIR")


def draw_places(root: Path, kind: str, need: int, used: set[str], rng: np.random.Generator) -> list[Path]:
    """``need`` different backgrounds of a kind; those in ``used`` are avoided if there are enough others."""
    files: list[Path] = []
    for category in BACKGROUNDS[kind]:
        names = [f"{category[0]}/{category}", *(category.replace("/", joint) for joint in "/-_")]
        tried = [root / prefix / name for prefix in ("", "data_large") for name in names]
        folder = next((path for path in tried if path.is_dir()), None)
        if folder is None:
            raise InputError(
                f"no pictures of {category!r} in the Places folder",
                where=root,
                expected=f"{tried[0]}, or {tried[1]}",
            )
        files += [file for file in sorted(folder.iterdir()) if file.suffix.lower() in IMAGE_SUFFIXES]
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


def _open(path: Path, mode: str, most: int) -> Image.Image:
    """A picture as stored, without its EXIF rotation; refuses damaged ones and more than ``most`` pixels."""
    try:
        if (size := path.stat().st_size) > MAX_PICTURE_BYTES:
            raise DecodeError(f"{size:,} bytes, over the limit of {MAX_PICTURE_BYTES:,}")
        data = read_bytes(path)
        formats = [kind] if (kind := sniff(data)) in PICTURES else []
        if formats:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                width, height = Image.open(io.BytesIO(data), formats=formats).size
            if width * height > most:
                raise DecodeError(f"{width:,} × {height:,} pixels, over the limit of {most:,}")
        decode(data)
        return Image.open(io.BytesIO(data), formats=formats).convert(mode)
    except Exception as error:  # Pillow's plugins raise anything on hostile bytes
        raise InputError("an image that can't be read", where=path, found=one_line(error)) from None
