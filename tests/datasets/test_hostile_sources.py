"""What strangers' files can't do to the builders: one clear error, soon, in little memory, nothing lost."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import random
import resource
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ncm_cli.datasets.base import data
from ncm_cli.datasets.colored import read_idx
from ncm_cli.datasets.options import FolderOptions, WaterbirdsCfOptions
from ncm_cli.errors import InputError, UsageError
from ncm_cli.images.background import cover
from ncm_cli.images.manifest import ColumnNames, read_manifest
from ncm_cli.main import run
from tests.world import Heard

MIB = 1 << 20


@contextlib.contextmanager
def little() -> Iterator[None]:
    """At most 2 s, and no more than 500 MiB beside what is taken now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 500 * MIB, before[1]))
    start = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - start < 2


def _header(*shape: int) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)


def _zeros(path: Path, head: bytes, size: int) -> None:
    """A gzip file of a header and zeros, a thousandth of its contents."""
    pack = zlib.compressobj(1, wbits=31)
    with path.open("wb") as file:
        file.write(pack.compress(head))
        for _ in range(size // MIB):
            file.write(pack.compress(bytes(MIB)))
        file.write(pack.flush())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(60_000, 28, 28), (2**32 - 1, 28, 28), (3, 2**31, 2), (0, 28, 28)])
def test_an_idx_file_that_unpacks_to_gigabytes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    _zeros(tmp_path / "x.gz", _header(*shape), 600 * MIB)
    with little(), pytest.raises(InputError, match="an IDX file"):
        read_idx(tmp_path / "x.gz", 3)


def test_damaged_idx_files_are_read_whole_or_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = np.random.default_rng(0).integers(0, 256, (7, 4, 4), dtype=np.uint8)
    raw = _header(7, 4, 4) + whole.tobytes()
    for _ in range(400):
        packed = rng.random() < 0.5
        made = bytearray(gzip.compress(raw) if packed else raw)
        at = rng.randrange(min(len(made), 24) if rng.random() < 0.7 else len(made))
        if rng.random() < 0.3:
            del made[at:]
        else:
            made[at] ^= 1 << rng.randrange(8)
        path = tmp_path / ("x.gz" if packed else "x")
        path.write_bytes(made)
        try:
            found = read_idx(path, 3)
        except InputError:
            continue
        # A pixel of a file without a checksum may be another; the rest is as the header says.
        assert found.size == whole.size
        assert not packed or (found == whole).all()


ODD = (
    "a b",
    " a",
    "a ",
    "a,b",
    'a"b',
    "a\nb",
    "a\rb",
    "#a",
    "é",
    "e\u0301",
    "sep=;",
    "-1",
    "=1+1",
    "a;b|c",
    "\u202ea",
)


def test_folders_with_odd_names_are_read_back_as_they_are(tmp_path: Path) -> None:
    """Names that a table wouldn't keep are left out by name."""
    for name in ODD:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(4):
            (tmp_path / "photos" / name / f"{i}{name}.png").write_bytes(b"x")
    heard = Heard()
    data(FolderOptions(source=tmp_path / "photos", output=tmp_path / "out"), reporter=heard)
    made = read_manifest(tmp_path / "out" / "manifest.csv", ColumnNames(), root=None)
    assert made.files is not None
    for id, path, label in zip(made.ids, [file.path for file in made.files], made.text["label"], strict=True):
        assert Path(path) == tmp_path / "photos" / id
        assert Path(path).is_file()
        assert label == id.split("/")[0]
    assert {*ODD} - {*made.text["label"]} == {" a", "a "}
    assert any(" a/0 a.png" in text for text in heard.warnings)


def folder_of(path: Path) -> FolderOptions:
    return FolderOptions(source=path / "photos", output=path / "o", counts=str(path / "counts.csv"))


def test_counts_of_billions_are_refused_before_anything_is_made_of_them(tmp_path: Path) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "1.png").write_bytes(b"x")
    (tmp_path / "counts.csv").write_text("label,train,val\na,99999999999,1\n")
    with little(), pytest.raises(InputError, match="too few images of a"):
        data(
            FolderOptions(
                source=tmp_path / "photos", output=tmp_path / "o", counts=str(tmp_path / "counts.csv")
            )
        )


@pytest.mark.parametrize(
    "text",
    [
        "label,train\na\0,1\n",
        "label,train\na,1" + "0" * 5000 + "\n",
        "label,train\na,１\nb,x\n",
        "\0" * 99,
        "{}",
    ],
)
def test_tables_of_counts_that_are_no_tables(tmp_path: Path, text: str) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "1.png").write_bytes(b"x")
    (tmp_path / "counts.csv").write_text(text)
    with pytest.raises(InputError):
        data(
            FolderOptions(
                source=tmp_path / "photos", output=tmp_path / "o", counts=str(tmp_path / "counts.csv")
            )
        )


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _foreign(path: Path) -> None:
    path.write_text(json.dumps({"entries": ["kept.txt"]}))


def _odd(path: Path) -> None:
    path.write_text(json.dumps({"ncm_format": "ncm-data", "entries": [["kept.txt"]]}))


@pytest.mark.parametrize("make", [_pipe, _deep, _large, _foreign, _odd])
def test_a_folder_with_a_strange_dataset_json_is_not_replaced(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "1.png").write_bytes(b"x")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "kept.txt").write_text("kept")
    make(tmp_path / "o" / "dataset.json")
    with little(), pytest.raises(InputError, match="holds other files"):
        data(FolderOptions(source=tmp_path / "photos", output=tmp_path / "o"))
    assert (tmp_path / "o" / "kept.txt").read_text() == "kept"


@pytest.mark.parametrize("inside", ["", "images"])
def test_a_data_set_is_not_replaced_by_one_that_is_made_of_it(tmp_path: Path, inside: str) -> None:
    """``ncm data folder d -o d`` lost the images that the new manifest names."""
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        (tmp_path / "photos" / label / "1.png").write_bytes(b"x")
    data(FolderOptions(source=tmp_path / "photos", output=tmp_path / "d"))
    marker = json.loads((tmp_path / "d" / "dataset.json").read_text())
    (tmp_path / "photos").rename(tmp_path / "d" / "images")
    (tmp_path / "d" / "dataset.json").write_text(json.dumps(marker | {"entries": ["images", "manifest.csv"]}))
    with pytest.raises(UsageError, match="it would replace"):
        data(FolderOptions(source=tmp_path / "d" / inside, output=tmp_path / "d", layout="label"))
    assert (tmp_path / "d" / "images" / "a" / "1.png").exists()


@pytest.fixture
def birds(tmp_path: Path) -> WaterbirdsCfOptions:
    """One landbird, its segmentation, and two places."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    for name in ("birds/a.jpg", "cub/segmentations/a.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (picture if name.endswith("jpg") else picture.convert("L")).save(tmp_path / name)
    for name in ("ocean", "lake/natural"):
        (tmp_path / "places" / name).mkdir(parents=True)
    picture.save(tmp_path / "places" / "ocean" / "o.png")
    (tmp_path / "birds" / "metadata.csv").write_text("img_filename,y,split,place\na.jpg,0,0,0\n")
    return WaterbirdsCfOptions(
        waterbirds=tmp_path / "birds",
        output=tmp_path / "out",
        cub=tmp_path / "cub",
        places=tmp_path / "places",
        landbirds=1,
        waterbirds_count=0,
    )


def _bomb(path: Path) -> None:
    """A PNG of 40 kB that is 13,000 × 13,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    side = 13_000
    pack = zlib.compressobj(9)
    rows = b"".join(pack.compress(bytes(side // 8 + 1)) for _ in range(side)) + pack.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def _program(path: Path) -> None:
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 30 20\n%%EndComments\nshowpage\n")


def _narrow(path: Path) -> None:
    Image.new("RGB", (1, 60_000)).save(path)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _nothing(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("which", ["birds/a.jpg", "cub/segmentations/a.png", "places/ocean/o.png"])
@pytest.mark.parametrize("make", [_bomb, _program, _cut, _nothing, _large, _narrow])
def test_pictures_that_are_none(
    tmp_path: Path,
    birds: WaterbirdsCfOptions,
    which: str,
    make: Callable[[Path], None],
) -> None:
    make(tmp_path / which)
    with little(), pytest.raises(InputError) as caught:
        data(birds)
    assert which.rsplit("/")[-1] in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("seed", range(5))
def test_a_place_of_any_shape_covers_or_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        bird, place = (
            [max(1, round(10 ** rng.uniform(0, 2.5))), max(1, round(10 ** rng.uniform(0, 2.5)))] for _ in "ab"
        )
        try:
            made = cover(Image.new("RGB", place), (bird[0], bird[1]))
        except InputError as error:
            assert "too narrow" in str(error)
            continue
        assert made.size == tuple(bird)


@pytest.mark.parametrize(
    "name", ["a\0.jpg", "x" * 5000 + ".jpg", "../a.jpg", ".", "a/../../birds", "\n", "/etc/passwd"]
)
def test_metadata_with_hostile_names(tmp_path: Path, birds: WaterbirdsCfOptions, name: str) -> None:
    with (tmp_path / "birds" / "metadata.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("img_filename", "y", "split", "place"), (name, 0, 0, 0)])
    command = ["data", "waterbirds-cf", str(birds.waterbirds), "-o", str(birds.output), "--quiet"]
    assert run([*command, "--cub", str(birds.cub), "--places", str(birds.places), "--landbirds", "1"]) in (
        2,
        3,
    )
    assert not birds.output.exists()
