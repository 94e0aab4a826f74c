"""MNIST's IDX files, gzipped or not.

IRM's ColoredMNIST protocol on any set of digit images.

Arjovsky et al., Invariant Risk Minimization (2019), section 6: the label says whether the digit is below 5,
and is wrong for a quarter of the images; the colour says the label, but for 10 % and 20 % of the images of
the two training domains and 90 % of the test domain.

Coloured digits: IRM's ColoredMNIST protocol on the 1,797 8×8 digits that scikit-learn ships.

ColoredMNIST: IRM's protocol on MNIST's own files.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ncm_cli.datasets.base import Built, CountTable, building
from ncm_cli.datasets.options import ColoredMnistOptions, ColoringOptions, DigitsOptions
from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import as_json, check, parse_numbers
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.store.tables import write_csv

FOLDERS = ("", "raw", "MNIST/raw")
"""Where the files may lie in the folder that is given: torchvision nests them."""

MAX_BYTES = 1 << 30
"""MNIST's largest file has 47 MB; a header that asks for more than this is damaged."""


def find_idx(folder: Path, stem: str, kind: str) -> Path:
    """The file ``stem-kind`` or ``stem.kind``, with or without .gz: ``train-images``, ``idx3-ubyte``."""
    names = [f"{stem}{joint}{kind}{suffix}" for joint in "-." for suffix in ("", ".gz")]
    for inner in FOLDERS:
        for name in names:
            if (folder / inner / name).is_file():
                return folder / inner / name
    if not folder.is_dir():
        raise InputError("no such folder of MNIST files", where=folder, fix="--mnist DIR, or --download")
    raise InputError(
        "one of MNIST's files isn't there",
        where=folder,
        expected=f"{names[0]} or {names[1]}, there or in raw or MNIST/raw",
        fix="--mnist DIR with the four IDX files, or --download",
    )


def read_idx(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """An array of unsigned bytes with ``dims`` dimensions.

    Raises `InputError` for a damaged gzip file, another type, another number of dimensions, and a length that
    differs from what the header says.
    """
    raw = _bytes(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or raw[3] != dims:
        raise InputError(
            "not one of MNIST's IDX files",
            where=path,
            found=f"it starts with {raw[:4].hex(' ') or 'nothing'}",
            expected=f"00 00 08 {dims:02x}: unsigned bytes in {dims} dimension{'s' if dims > 1 else ''}",
        )
    start = 4 + 4 * dims
    if len(raw) < start:
        raise InputError("an IDX file that ends in its header", where=path, found=f"{len(raw)} bytes")
    shape = struct.unpack(f">{dims}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        raise InputError(
            "an IDX file that is cut off or damaged",
            where=path,
            found=f"{len(raw) - start:,} bytes of values",
            expected=f"{math.prod(shape):,}, for {' × '.join(map(str, shape))}",
            fix="get the file again",
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _bytes(path: Path) -> bytes:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            raw: bytes = file.read(MAX_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            "a gzip file that is cut off or damaged", where=path, found=str(error), fix="get the file again"
        ) from None
    if len(raw) > MAX_BYTES:
        raise InputError(
            "far larger than any of MNIST's files", where=path, found=f"over {MAX_BYTES:,} bytes"
        )
    return raw


def read_split(folder: Path, stem: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (n, h, w) and digits (n,) of ``train`` or ``t10k``."""
    image_path = find_idx(folder, f"{stem}-images", "idx3-ubyte")
    label_path = find_idx(folder, f"{stem}-labels", "idx1-ubyte")
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if len(images) != len(labels):
        raise InputError(
            "images and labels of different numbers",
            where=f"{image_path.name} and {label_path.name} in {image_path.parent}",
            found=f"{len(images):,} images, {len(labels):,} labels",
        )
    if labels.size and labels.max() > 9:
        row = int(np.argmax(labels > 9))
        raise InputError("a label that is no digit", where=f"{label_path}, row {row}", found=int(labels[row]))
    return images, labels.astype(np.int64)


COLORS = ("red", "green")
HELD, TWIN, ORACLE = "held", "twin", "oracle"
"""Splits beside train, val and test: digits of held-out pairs, every pair's second member, and the second
members of oracle pairs."""

COLUMNS = ("id", "path", "label", "split", "domain", "color", "digit")


@dataclass(frozen=True, slots=True)
class Row:
    """One image of the data set: a digit (by its place in the source) in a colour."""

    id: str
    source: int
    color: int
    label: int
    digit: int
    split: str
    domain: str

    @property
    def path(self) -> str:
        return f"images/{self.id}.png"

    def cells(self) -> tuple[object, ...]:
        return (self.id, self.path, self.label, self.split, self.domain, COLORS[self.color], self.digit)


@dataclass(slots=True)
class Plan:
    """Every row, and the pairs between them by id."""

    rows: list[Row] = field(default_factory=list)
    pairs: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(id_a, id_b, holdout, wrong)"""
    oracle: list[tuple[str, str]] = field(default_factory=list)
    """(a test image, the same digit coloured as in a training domain)"""


def plan(
    digits: npt.NDArray[np.int64],
    train: npt.NDArray[np.int64],
    test: npt.NDArray[np.int64],
    options: ColoringOptions,
    rng: np.random.Generator,
) -> Plan:
    """Labels, colours, splits and pairs.

    Parameters
    ----------
    digits : (n,)
        The digit shown by each source image.
    train, test
        Places of the images of the training domains and of the test domain; disjoint. The training images
        are dealt to the domains in turn, so their order should be random.
    """
    made = Plan()
    flips = parse_numbers(options.flips)
    if options.holdout_pairs >= len(train):
        raise UsageError(
            "--holdout-pairs asks for more digits than the training domains have",
            found=options.holdout_pairs,
            expected=f"fewer than {len(train):,}",
        )
    held, train = train[: options.holdout_pairs], train[options.holdout_pairs :]
    for domain, flip in enumerate(flips):
        own = train[domain :: len(flips)]
        n_val = round(len(own) * options.val_fraction)
        name = f"train{domain + 1}"
        made.rows += _colored(digits, own[n_val:], flip, options.label_noise, "train", name, rng)
        made.rows += _colored(digits, own[:n_val], flip, options.label_noise, "val", name, rng)
        own = held[domain :: len(flips)]
        made.rows += _colored(digits, own, flip, options.label_noise, HELD, name, rng)
    made.rows += _colored(digits, test, options.test_flip, options.label_noise, "test", "test", rng)
    _add_pairs(made, "train", options.pairs, options.wrong_fraction, rng)
    _add_pairs(made, HELD, options.holdout_pairs, options.wrong_fraction, rng)
    _add_oracle(made, options.oracle_pairs, flips, rng)
    return made


def _colored(
    digits: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    flip: float,
    noise: float,
    split: str,
    domain: str,
    rng: np.random.Generator,
) -> list[Row]:
    label = (digits[places] < 5) ^ (rng.random(len(places)) < noise)
    color = label ^ (rng.random(len(places)) < flip)
    return [
        Row(f"{split}-{place:05d}", int(place), int(c), int(y), int(digits[place]), split, domain)
        for place, c, y in zip(places, color, label, strict=True)
    ]


def _add_pairs(made: Plan, split: str, count: int, wrong_fraction: float, rng: np.random.Generator) -> None:
    """Pairs of ``count`` rows of a split with the same digit in the other colour."""
    rows = [row for row in made.rows if row.split == split]
    if count > len(rows):
        raise UsageError(
            "--pairs asks for more pairs than there are training digits", found=count, expected=len(rows)
        )
    chosen = rng.permutation(len(rows))[:count]
    n_wrong = round(count * wrong_fraction)
    for position, index in enumerate(chosen):
        row = rows[index]
        wrong = position < n_wrong
        source = row
        if wrong:
            source = rows[(index + rng.integers(1, len(rows))) % len(rows)]
        twin = Row(
            f"{row.id}-twin", source.source, 1 - row.color, source.label, source.digit, TWIN, row.domain
        )
        made.rows.append(twin)
        made.pairs.append((row.id, twin.id, int(split == HELD), int(wrong)))


def _add_oracle(made: Plan, count: int, flips: Sequence[float], rng: np.random.Generator) -> None:
    """Test rows with themselves as a training domain, drawn at random, would have coloured them."""
    rows = [row for row in made.rows if row.split == "test"]
    for index in rng.permutation(len(rows))[:count]:
        row = rows[index]
        domain = int(rng.integers(len(flips)))
        color = row.label ^ int(rng.random() < flips[domain])
        twin = Row(
            f"{row.id}-as-train{domain + 1}",
            row.source,
            color,
            row.label,
            row.digit,
            ORACLE,
            f"train{domain + 1}",
        )
        made.rows.append(twin)
        made.oracle.append((row.id, twin.id))


def paint(gray: npt.NDArray[np.uint8], rows: Sequence[Row]) -> Iterator[npt.NDArray[np.uint8]]:
    """The (h, w, 3) uint8 image of each row: the grey source (n, h, w) in the red or the green channel."""
    for row in rows:
        image = np.zeros((*gray.shape[1:], 3), np.uint8)
        image[..., row.color] = gray[row.source]
        yield image


def write_tables(folder: Path, made: Plan, *, with_path: bool = True) -> dict[str, str]:
    """manifest.csv, pairs.csv and oracle_pairs.csv; returns the role of each file."""
    kept = [i for i, name in enumerate(COLUMNS) if with_path or name != "path"]
    rows = ([row.cells()[i] for i in kept] for row in made.rows)
    write_csv(folder / "manifest.csv", [COLUMNS[i] for i in kept], rows)
    files = {"manifest": "manifest.csv"}
    if made.pairs:
        write_csv(folder / "pairs.csv", ("id_a", "id_b", "holdout", "wrong"), made.pairs)
        files["pairs"] = "pairs.csv"
    if made.oracle:
        write_csv(folder / "oracle_pairs.csv", ("id_a", "id_b"), made.oracle)
        files["oracle_pairs"] = "oracle_pairs.csv"
    return files


def write_images(folder: Path, gray: npt.NDArray[np.uint8], rows: Sequence[Row]) -> Iterator[None]:
    """Write each row's PNG file; yields after each."""
    from PIL import Image

    (folder / "images").mkdir()
    for row, image in zip(rows, paint(gray, rows), strict=True):
        # Level 1 of zlib: ten thousands of tiny files are written, and size hardly differs.
        Image.fromarray(image).save(folder / row.path, format="PNG", compress_level=1)
        yield


def counts(made: Plan) -> CountTable:
    """Rows, label shares and colour agreement of each split and domain."""
    keys = list(dict.fromkeys((row.split, row.domain) for row in made.rows))
    table = []
    for split, domain in keys:
        own = [row for row in made.rows if (row.split, row.domain) == (split, domain)]
        agree = sum(row.color == row.label for row in own) / len(own)
        table.append((split, domain, len(own), sum(row.label for row in own) / len(own), agree))
    return CountTable(
        title="rows", columns=("split", "domain", "rows", "label 1", "colour = label"), rows=tuple(table)
    )


def build_digits(options: DigitsOptions, reporter: Reporter = SILENT) -> Built:
    """Write the data set: no download.

    Test digits never occur in training, validation or pairs. Pairs to learn from are made of training
    digits, held-out pairs of digits that are neither in training nor in validation.
    """
    check(options)
    digits, target = _load_digits()
    gray = np.round(digits.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    rng = np.random.default_rng(options.seed)
    order = rng.permutation(len(target))
    n_test = round(len(target) * options.test_fraction)
    made = plan(target.astype(np.int64), order[n_test:], order[:n_test], options, rng)
    with building(options.output, "digits", as_json(options)) as folder:
        files = write_tables(folder, made)
        with reporter.task("digits", total=len(made.rows), unit="images") as task:
            for _ in write_images(folder, gray, made.rows):
                task.advance()
    return Built(
        builder="digits",
        output=options.output,
        files={role: options.output / name for role, name in files.items()},
        facts={"rows": len(made.rows), "pairs": len(made.pairs), "seed": options.seed},
        tables=(counts(made),),
    )


def _load_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What scikit-learn's ``load_digits`` returns: pixels (1797, 64) from 0 to 16, and digits (1797,).

    Its file is read without importing scikit-learn, which takes longer than all the rest.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    return pixels, target


SIDE = 28

PACKED = "pixels.npy"


def build_colored_mnist(options: ColoredMnistOptions, reporter: Reporter = SILENT) -> Built:
    """Write the data set.

    Training and validation digits are drawn from MNIST's training files, test digits from its test files.
    Pairs to learn from are made of training digits, held-out pairs of digits that are neither in training nor
    in validation.
    """
    check(options)
    folder = _source(options, reporter)
    images, digits = read_split(folder, "train")
    test_images, test_digits = read_split(folder, "t10k")
    for which in (images, test_images):
        if which.shape[1:] != (SIDE, SIDE):
            raise InputError(
                "images of another size", where=folder, found=which.shape[1:], expected=(SIDE, SIDE)
            )
    rng = np.random.default_rng(options.seed)
    train = _drawn(len(digits), options.train_digits, "--train-digits", rng)
    test = _drawn(len(test_digits), options.test_digits, "--test-digits", rng) + len(digits)
    made = plan(np.concatenate([digits, test_digits]), train, test, options, rng)
    gray = _shrunk(np.concatenate([images, test_images]), options.size)
    files = _write(options, made, gray, reporter)
    return Built(
        builder="colored-mnist",
        output=options.output,
        files={role: options.output / name for role, name in files.items()},
        facts={"rows": len(made.rows), "pairs": len(made.pairs), "seed": options.seed},
        tables=(counts(made),),
    )


def _shrunk(images: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """Images (n, 28, 28) as they are, or as (n, 14, 14) means of 2 × 2 pixels.

    IRM's authors take every other pixel instead; means keep more of the digit: a linear probe on grey digits
    gains .008.
    """
    if size == SIDE:
        return images
    blocks = images.reshape(len(images), size, 2, size, 2)
    return np.round(blocks.mean(axis=(2, 4))).astype(np.uint8)


def _write(
    options: ColoredMnistOptions, made: Plan, gray: npt.NDArray[np.uint8], reporter: Reporter
) -> dict[str, str]:
    with building(options.output, "colored-mnist", as_json(options)) as folder:
        files = write_tables(folder, made, with_path=not options.packed)
        with reporter.task("coloured digits", total=len(made.rows), unit="images") as task:
            if options.packed:
                _pack(folder / PACKED, gray, made.rows)
                files["pixels"] = PACKED
                task.advance(len(made.rows))
            else:
                for _ in write_images(folder, gray, made.rows):
                    task.advance()
    return files


def _pack(path: Path, gray: npt.NDArray[np.uint8], rows: list[Row]) -> None:
    """Red and green pixels of each row in [0, 1], (n, 2 · size²) float32, in manifest order."""
    pixels = 2 * gray.shape[1] * gray.shape[2]
    array = np.lib.format.open_memmap(path, "w+", dtype=np.float32, shape=(len(rows), pixels))
    for i, image in enumerate(paint(gray, rows)):
        array[i] = image[..., :2].reshape(-1)
    array /= 255
    array.flush()


def _drawn(available: int, count: int, name: str, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    if not 0 < count <= available:
        raise UsageError(f"{name} can't be met", found=count, expected=f"1 to {available:,}")
    return rng.permutation(available)[:count]


def _source(options: ColoredMnistOptions, reporter: Reporter) -> Path:
    if options.mnist is not None:
        return options.mnist
    from torchvision.datasets import MNIST

    folder = options.output.parent / "mnist"
    reporter.note(f"downloading MNIST to {folder}")
    try:
        MNIST(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        raise InputError(
            "MNIST can't be downloaded",
            found=str(error).splitlines()[0],
            fix="get the files and give --mnist DIR",
        ) from None
    return folder
