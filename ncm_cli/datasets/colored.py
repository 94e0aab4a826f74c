"""IRM's ColoredMNIST protocol, on MNIST's own files or on the 1,797 8×8 digits that scikit-learn ships.

Arjovsky et al., Invariant Risk Minimization (2019), section 6: the label says whether the digit is below 5,
and is wrong for a quarter of the images. The colour agrees with the label, except for 10 % and 20 % of the
images in the two training domains, and for 90 % in the test domain.

Test digits never occur in training, validation or pairs. Pairs to learn from are made of training digits,
held-out pairs of digits that are in neither training nor validation.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ncm_cli.datasets.options import ColoredMnistOptions, ColoringOptions, DigitsOptions
from ncm_cli.errors import InputError, UsageError
from ncm_cli.options import parse_numbers
from ncm_cli.progress import Reporter
from ncm_cli.store.tables import write_csv

FOLDERS = ("", "raw", "MNIST/raw")
"""Subfolders in which the files may lie: torchvision nests them."""

MNIST_SIDE = 28
"""Side of MNIST's images."""

MAX_IDX_BYTES = 250_000 * MNIST_SIDE**2
"""Largest IDX file that is read: MNIST's has 60,000 images, the largest similar data set's 240,000."""

COLORS = ("red", "green")
HELD, TWIN, ORACLE = "held", "twin", "oracle"
"""Splits besides train, val and test: first members of held-out pairs, second members of pairs, and second
members of oracle pairs."""

COLUMNS = ("id", "path", "label", "split", "domain", "color", "digit")


def find_idx(folder: Path, name: str) -> Path:
    """The file ``train-images-idx3-ubyte``, or ``train-images.idx3-ubyte``, or either with .gz."""
    names = [f"{name.replace('-idx', f'{joint}idx')}{suffix}" for joint in "-." for suffix in ("", ".gz")]
    for path in (folder / inner / name for inner in FOLDERS for name in names):
        if path.is_file():
            return path
    raise InputError(
        "one of MNIST's files isn't there",
        where=folder,
        found=None if folder.is_dir() else "no such folder",
        expected=f"{names[0]} or {names[1]}, there or in raw or MNIST/raw",
        fix="--mnist DIR with the four IDX files, or --download",
    )


def read_idx(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """The array in an IDX file: uint8 with ``dims`` dimensions.

    Raises `InputError` for a damaged gzip file, another type or number of dimensions, more than
    `MAX_IDX_BYTES` bytes, and a length other than the header's. No more is read than the header states.
    """
    start = 4 + 4 * dims
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            head: bytes = file.read(start)
            shape = struct.unpack(f">{dims}I", head[4:]) if len(head) == start else ()
            size = math.prod(shape)
            body: bytes = file.read(size + 1) if shape and size <= MAX_IDX_BYTES else b""
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            "a gzip file that is cut off or damaged", where=path, found=str(error), fix="get the file again"
        ) from None
    if head[:4] != bytes((0, 0, 8, dims)):
        raise InputError(
            "not one of MNIST's IDX files",
            where=path,
            found=f"it starts with {head[:4].hex(' ') or 'nothing'}",
            expected=f"00 00 08 {dims:02x}: unsigned bytes in {dims} dimension{'s' if dims > 1 else ''}",
        )
    if not shape or len(body) != size:
        stated_size = f"{size:,} bytes, for {' × '.join(map(str, shape))}, behind the header"
        raise InputError(
            "an IDX file that is cut off or damaged"
            if size <= MAX_IDX_BYTES
            else "an IDX file too large to be MNIST's",
            where=path,
            found=f"{'more' if len(body) > size else f'{len(body):,}'} there"
            if size <= MAX_IDX_BYTES
            else stated_size,
            expected=(stated_size if shape else f"a header of {start} bytes")
            if size <= MAX_IDX_BYTES
            else f"at most {MAX_IDX_BYTES:,}",
            fix="get the file again",
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def read_split(folder: Path, stem: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (n, 28, 28) and digits (n,) of ``train`` or ``t10k``."""
    paths = [find_idx(folder, f"{stem}-{name}-ubyte") for name in ("images-idx3", "labels-idx1")]
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    most = labels.max(initial=0)
    if images.shape != (len(labels), MNIST_SIDE, MNIST_SIDE) or most > 9:
        raise InputError(
            "images and labels that aren't MNIST's",
            where=" and ".join(map(str, paths)),
            found=f"{' × '.join(map(str, images.shape))} pixels, {len(labels)} labels up to {most}",
            expected=f"as many images of {MNIST_SIDE} × {MNIST_SIDE} as labels from 0 to 9",
        )
    return images, labels.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Picture:
    """One image of the data set: a digit, by its position in the source, in a colour."""

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
        """Its row of the manifest."""
        return (self.id, self.path, self.label, self.split, self.domain, COLORS[self.color], self.digit)


@dataclass(slots=True)
class Coloring:
    """All pictures, and the pairs between them by id."""

    rows: list[Picture] = field(default_factory=list)
    pairs: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(id_a, id_b, holdout, wrong)"""
    oracle: list[tuple[str, str]] = field(default_factory=list)
    """(a test picture, the same digit coloured as in a training domain)"""


def plan(
    digits: npt.NDArray[np.int64],
    train: npt.NDArray[np.int64],
    test: npt.NDArray[np.int64],
    options: ColoringOptions,
    rng: np.random.Generator,
) -> Coloring:
    """Labels, colours, splits and pairs.

    Parameters
    ----------
    digits : (n,)
        The digit shown by each source image.
    train, test
        Positions of the images of the training domains and of the test domain; disjoint. The training images
        go to the domains in turn, so their order should be random.
    """
    coloring, flips = Coloring(), parse_numbers(options.flips)

    def color(places: npt.NDArray[np.int64], flip: float, split: str, domain: str) -> None:
        labels = (digits[places] < 5) ^ (rng.random(len(places)) < options.label_noise)
        colors = labels ^ (rng.random(len(places)) < flip)
        for i, place in enumerate(places.tolist()):
            name, digit = f"{split}-{place:05d}", int(digits[place])
            coloring.rows.append(Picture(name, place, int(colors[i]), int(labels[i]), digit, split, domain))

    if options.holdout_pairs >= len(train):
        raise UsageError(
            "--holdout-pairs asks for more digits than the training domains have",
            found=options.holdout_pairs,
            expected=f"fewer than {len(train):,}",
        )
    held, train = train[: options.holdout_pairs], train[options.holdout_pairs :]
    for domain, flip in enumerate(flips):
        in_domain = train[domain :: len(flips)]
        n_val = round(len(in_domain) * options.val_fraction)
        color(in_domain[n_val:], flip, "train", f"train{domain + 1}")
        color(in_domain[:n_val], flip, "val", f"train{domain + 1}")
        color(held[domain :: len(flips)], flip, HELD, f"train{domain + 1}")
    color(test, options.test_flip, "test", "test")
    _add_pairs(coloring, "train", options.pairs, options.wrong_fraction, rng)
    _add_pairs(coloring, HELD, options.holdout_pairs, options.wrong_fraction, rng)
    _add_oracle(coloring, options.oracle_pairs, flips, rng)
    return coloring


def _add_pairs(
    coloring: Coloring, split: str, count: int, wrong_fraction: float, rng: np.random.Generator
) -> None:
    """Pair ``count`` pictures of a split with the same digit, or a wrong one, in the other colour."""
    rows = [row for row in coloring.rows if row.split == split]
    if count > len(rows):
        raise UsageError(
            "--pairs asks for more pairs than there are training digits", found=count, expected=len(rows)
        )
    wrong = round(count * wrong_fraction)
    for position, index in enumerate(rng.permutation(len(rows))[:count]):
        row = rows[index]
        partner = rows[(index + rng.integers(1, len(rows))) % len(rows)] if position < wrong else row
        twin = replace(partner, id=f"{row.id}-twin", color=1 - row.color, split=TWIN, domain=row.domain)
        coloring.rows.append(twin)
        coloring.pairs.append((row.id, twin.id, int(split == HELD), int(position < wrong)))


def _add_oracle(coloring: Coloring, count: int, flips: Sequence[float], rng: np.random.Generator) -> None:
    """Pair ``count`` test pictures with the same digit, coloured as in a random training domain."""
    rows = [row for row in coloring.rows if row.split == "test"]
    for index in rng.permutation(len(rows))[:count]:
        row, domain = rows[index], int(rng.integers(len(flips)))
        color, name = row.label ^ int(rng.random() < flips[domain]), f"train{domain + 1}"
        twin = replace(row, id=f"{row.id}-as-{name}", color=color, split=ORACLE, domain=name)
        coloring.rows.append(twin)
        coloring.oracle.append((row.id, twin.id))


def paint(gray: npt.NDArray[np.uint8], rows: Sequence[Picture]) -> Iterator[npt.NDArray[np.uint8]]:
    """The (h, w, 3) uint8 image of each row: the grey source (n, h, w) in the red or the green channel."""
    for row in rows:
        image = np.zeros((*gray.shape[1:], 3), np.uint8)
        image[..., row.color] = gray[row.source]
        yield image


def _write(
    coloring: Coloring, gray: npt.NDArray[np.uint8], folder: Path, reporter: Reporter, *, packed: bool = False
) -> dict[str, Any]:
    """Write tables and images; with ``packed`` the red and green pixels in [0, 1] as one float32 array."""
    kept = [i for i, name in enumerate(COLUMNS) if name != "path" or not packed]
    cells = ([row.cells()[i] for i in kept] for row in coloring.rows)
    write_csv(folder / "manifest.csv", [COLUMNS[i] for i in kept], cells)
    if coloring.pairs:
        write_csv(folder / "pairs.csv", ("id_a", "id_b", "holdout", "wrong"), coloring.pairs)
    if coloring.oracle:
        write_csv(folder / "oracle_pairs.csv", ("id_a", "id_b"), coloring.oracle)
    if packed:
        pixels = np.stack([image[..., :2].reshape(-1) for image in paint(gray, coloring.rows)])
        np.save(folder / "pixels.npy", pixels / np.float32(255))
    else:
        (folder / "images").mkdir()
        with reporter.task("coloured digits", total=len(coloring.rows), unit="images") as task:
            for row, image in zip(coloring.rows, paint(gray, coloring.rows), strict=True):
                # Fast compression: there are tens of thousands of tiny files, which hardly get smaller.
                Image.fromarray(image).save(folder / row.path, format="PNG", compress_level=1)
                task.advance()
    keys = dict.fromkeys((row.split, row.domain) for row in coloring.rows)
    counts: list[dict[str, object]] = []
    for split, domain in keys:
        of_kind = [row for row in coloring.rows if (row.split, row.domain) == (split, domain)]
        shares = {"label 1": sum(row.label for row in of_kind) / len(of_kind)}
        shares["color = label"] = sum(row.color == row.label for row in of_kind) / len(of_kind)
        counts.append({"split": split, "domain": domain, "rows": len(of_kind), **shares})
    return {"rows": len(coloring.rows), "pairs": len(coloring.pairs), "counts": {"rows": counts}}


def build_digits(options: DigitsOptions, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """Write the data set from scikit-learn's digits: no download."""
    pixels, target = _load_digits()
    gray = np.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    rng = np.random.default_rng(options.seed)
    order = rng.permutation(len(target))
    n_test = round(len(target) * options.test_fraction)
    coloring = plan(target.astype(np.int64), order[n_test:], order[:n_test], options, rng)
    return _write(coloring, gray, folder, reporter)


def _load_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The result of scikit-learn's ``load_digits``: pixels (1797, 64) from 0 to 16, and digits (1797,).

    Its file is read without importing scikit-learn, which takes longer than all the rest.
    """
    spec = importlib.util.find_spec("sklearn")
    file = Path(spec.origin if spec and spec.origin else "").parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    return pixels, target


def build_colored_mnist(options: ColoredMnistOptions, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """Write the data set from MNIST; the test domain's digits are those of its test files."""
    source = options.mnist or _downloaded(options.output.parent / "mnist", reporter)
    images, digits = read_split(source, "train")
    test_images, test_digits = read_split(source, "t10k")
    rng = np.random.default_rng(options.seed)
    train = _drawn(len(digits), options.train_digits, "--train-digits", rng)
    test = _drawn(len(test_digits), options.test_digits, "--test-digits", rng) + len(digits)
    coloring = plan(np.concatenate([digits, test_digits]), train, test, options, rng)
    gray = np.concatenate([images, test_images])
    if options.size != MNIST_SIDE:
        # IRM's authors take every other pixel. Means of 2 × 2 keep more of the digit: accuracy of a linear
        # probe on grey digits rises by .008.
        blocks = gray.reshape(len(gray), options.size, 2, options.size, 2)
        gray = np.round(blocks.mean(axis=(2, 4))).astype(np.uint8)
    return _write(coloring, gray, folder, reporter, packed=options.packed)


def _drawn(available: int, count: int, name: str, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    if not 0 < count <= available:
        raise UsageError(f"{name} can't be met", found=count, expected=f"1 to {available:,}")
    return rng.permutation(available)[:count]


def _downloaded(folder: Path, reporter: Reporter) -> Path:
    from torchvision.datasets import MNIST

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
