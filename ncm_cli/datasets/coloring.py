"""IRM's ColoredMNIST protocol on any set of digit images.

Arjovsky et al., Invariant Risk Minimization (2019), section 6: the label says whether the digit is below 5,
and is wrong for a quarter of the images; the colour says the label, but for 10 % and 20 % of the images of
the two training domains and 90 % of the test domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ncm_cli.datasets.folder import CountTable
from ncm_cli.errors import UsageError
from ncm_cli.options.data import ColoringOptions
from ncm_cli.options.grids import parse_numbers
from ncm_cli.store.csv_writer import write_csv

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
