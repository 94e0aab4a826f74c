"""A small world of stores: what one command says of rows and pairs, the others must say too."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.options import check
from ncm_cli.pairs.options import PairsOptions
from ncm_cli.pairs.pairs import pairs
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.fit import fit
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import Column, Files, NumericColumn
from ncm_cli.store.features import write_features
from ncm_cli.store.pairs import PairStore, read_pairs
from ncm_cli.store.probe import Probe, read_probe
from ncm_cli.theory.bound import bound
from ncm_cli.theory.options import BoundOptions

ENCODER = {"kind": "array", "model": "small world"}
DIM, TRAIN, VAL, TEST = 10, 90, 40, 40
ROWS = TRAIN + VAL + TEST


class Heard(Reporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def note(self, message: str) -> None:
        self.notes.append(message)


@dataclasses.dataclass
class World:
    """Rows ``r0`` to ``r169``: training, validation, test; the first two axes tell label and domain."""

    folder: Path
    X: np.ndarray
    columns: dict[str, list[str]]
    heard: Heard = dataclasses.field(default_factory=Heard)

    def store(
        self,
        name: str = "features.h5",
        *,
        X: np.ndarray | None = None,
        ids: Sequence[str] | None = None,
        same_image: Iterable[tuple[int, int]] = (),
        numeric: dict[str, np.ndarray] | None = None,
        label_column: str = "label",
        split_column: str = "split",
        **columns: Sequence[str],
    ) -> Path:
        """Write a feature store; rows of ``same_image`` are byte-identical files."""
        X = self.X if X is None else X
        made: list[Any] = []
        for key, texts in (self.columns | columns).items():
            categories = tuple(sorted({text for text in texts if text}))
            codes = np.array([categories.index(text) if text else -1 for text in texts], np.int32)
            made.append(
                Column({"label": label_column, "split": split_column}.get(key, key), codes, categories)
            )
        numbers = numeric or {}
        made = [column for column in made if column.name not in numbers]
        made += [NumericColumn(key, values) for key, values in numbers.items()]
        digests = [f"{row:064x}" for row in range(len(X))]
        for row, other in same_image:
            digests[row] = digests[other]
        path = self.folder / name
        write_features(
            path,
            ids=ids or [f"r{row}" for row in range(len(X))],
            blocks=[X.astype(np.float32)],
            dim=X.shape[1],
            columns=made,
            label_column=label_column,
            split_column=split_column,
            encoder=ENCODER,
            files=Files(
                path=tuple(f"{row}.png" for row in range(len(X))),
                size=np.ones(len(X), np.int64),
                mtime_ns=np.ones(len(X), np.int64),
                sha256=tuple(digests),
            ),
            options={},
        )
        return path

    def table(self, members: Iterable[tuple[int, int]], **columns: Sequence[str]) -> Path:
        """A table of pairs of rows."""
        path = self.folder / "pairs.csv"
        with path.open("w", newline="", encoding="utf-8") as stream:
            write = csv.writer(stream)
            write.writerow(["id_a", "id_b", *columns])
            for index, (a, b) in enumerate(members):
                write.writerow([f"r{a}", f"r{b}", *(values[index] for values in columns.values())])
        return path

    def pairs(
        self, features: Path, name: str = "pairs.h5", members: Iterable[tuple[int, int]] = (), **options: Any
    ) -> PairStore:
        """``ncm pairs`` on a table of ``members``, or by matching."""
        self.heard = Heard()
        source = {"source": self.table(members)} if members else {}
        made = PairsOptions(features=features, output=self.folder / name, **source, **options)
        pairs(check(made), reporter=self.heard)
        return read_pairs(made.output)

    def fit(self, features: Path, name: str = "probe", **options: Any) -> tuple[Probe, dict[str, Any]]:
        """``ncm fit``."""
        self.heard = Heard()
        made = check(FitOptions(features=features, output=self.folder / name, **options))
        report = fit(made, reporter=self.heard)
        return read_probe(made.output), report

    def eval(self, features: Path, name: str = "probe", **options: Any) -> dict[str, Any]:
        """``ncm eval``."""
        self.heard = Heard()
        made = EvalOptions(probe=self.folder / name, features=features, **options)
        return evaluate(check(made), reporter=self.heard)

    def bound(self, features: Path, name: str = "probe", **options: Any) -> dict[str, Any]:
        """``ncm bound`` on ``oracle.h5``."""
        self.heard = Heard()
        made = BoundOptions(
            probe=self.folder / name,
            features=features,
            oracle_pairs=self.folder / "oracle.h5",
            bootstrap=0,
            **options,
        )
        return bound(check(made), reporter=self.heard)

    def oracle(self, features: Path) -> None:
        """``oracle.h5``: test rows and training rows of the same label."""
        label = np.array(self.columns["label"])
        tests = range(TRAIN + VAL, ROWS)
        members = [(row, int(np.flatnonzero(label[:TRAIN] == label[row])[row % 20])) for row in tests]
        self.pairs(features, "oracle.h5", members, straddling="keep")


def make_world(folder: Path, seed: int = 0) -> World:
    """The label shows on axis 0; more clearly the domain on axis 1, which agrees with it but in test rows."""
    rng = np.random.default_rng(seed)
    label = rng.integers(2, size=ROWS)
    agrees = rng.random(ROWS) < np.where(np.arange(ROWS) < TRAIN + VAL, 0.85, 0.15)
    domain = np.where(agrees, label, 1 - label)
    X = rng.normal(size=(ROWS, DIM))
    X[:, 0] += 1.5 * label
    X[:, 1] += 3.0 * domain
    split = ["train"] * TRAIN + ["val"] * VAL + ["test"] * TEST
    columns = {
        "label": [("cat", "dog")[code] for code in label],
        "domain": [("day", "night")[code] for code in domain],
        "split": split,
    }
    return World(folder, X.astype(np.float32), columns)


PLANTED_DIM, SPURIOUS = 24, 3


@dataclasses.dataclass
class Planted:
    """Rows whose label shows in one direction, and more strongly in `SPURIOUS` others that flip at test."""

    rng: np.random.Generator
    directions: np.ndarray
    """(d, 1 + SPURIOUS) orthonormal: the causal one, then the spurious ones."""

    def rows(self, n: int, agree: float, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
        """Features (n, d) float32 and labels; ``agree`` is how often the spurious part tells the label."""
        y = self.rng.integers(classes, size=n)
        shown = np.where(self.rng.random(n) < agree, y, (y + 1) % classes)
        X = self.rng.normal(size=(n, PLANTED_DIM))
        X -= (X @ self.directions) @ self.directions.T
        causal = 1.2 * (y - (classes - 1) / 2) + self.rng.normal(size=n)
        style = (shown - (classes - 1) / 2)[:, None] * [3.0, 2.0, 1.0] + 0.5 * self.rng.normal(size=(n, 3))
        return (X + np.column_stack([causal, style]) @ self.directions.T).astype(np.float32), y

    def pairs(self, k: int, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
        """Members (k, d) float32: rows, and the same with the other label's spurious part, up to noise."""
        a, _ = self.rows(k, 0.5)
        style = a @ self.directions[:, 1:]
        moved = -2 * style + 0.5 * self.rng.normal(size=(k, SPURIOUS))
        b = a + moved @ self.directions[:, 1:].T + noise * self.rng.normal(size=a.shape)
        return a, b.astype(np.float32)


def planted(seed: int) -> Planted:
    rng = np.random.default_rng(seed)
    return Planted(rng, np.linalg.qr(rng.normal(size=(PLANTED_DIM, 1 + SPURIOUS)))[0])
