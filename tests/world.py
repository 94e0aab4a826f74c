"""A small world of stores: what one command says of rows and pairs, the others must say too."""

from __future__ import annotations

import csv
import dataclasses
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
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
from ncm_cli.solvers.projection import spectrum
from ncm_cli.store.columns import Column, Files, NumericColumn
from ncm_cli.store.digests import fingerprint
from ncm_cli.store.features import FeatureStore, write_features
from ncm_cli.store.pairs import PairStore, read_pairs, write_pairs
from ncm_cli.store.probe import Probe, read_probe
from ncm_cli.theory.bound import bound
from ncm_cli.theory.options import BoundOptions

ENCODER = {"kind": "array", "model": "made-up", "precision": "fp32", "normalize": False}
DIM, TRAIN, VAL, TEST = 10, 90, 40, 40
ROWS = TRAIN + VAL + TEST
MEMBERS = [(row, row + TRAIN // 2) for row in range(TRAIN // 2)]
"""Pairs of training rows that share no row."""


class Heard(Reporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def note(self, message: str) -> None:
        self.notes.append(message)


HEAVY = {"torch", "torchvision", "open_clip", "sklearn", "timm", "matplotlib"}


def run_light(program: str, *arguments: object, heavy: Set[str] = HEAVY) -> str:
    """What a program prints in a process of its own, in which it loads none of the ``heavy`` libraries."""
    program += f"\nimport sys\nheavy = {set(heavy)!r} & set(sys.modules)\nassert not heavy, heavy\n"
    line = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def light_seconds(*line: object) -> float:
    """The least processor time of three runs of a command that loads nothing heavy."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_light(f"from ncm_cli.main import run\nassert run({[*map(str, line)]!r}) == 0")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def column(name: str, values: Sequence[str] | np.ndarray) -> Column | NumericColumn:
    """A column of numbers, or of texts of which '' is missing."""
    if isinstance(values, np.ndarray):
        return NumericColumn(name, values.astype(float))
    categories = tuple(sorted(set(values) - {""}))
    codes = [categories.index(text) if text else -1 for text in values]
    return Column(name, np.array(codes, np.int32), categories)


def write_store(
    path: Path,
    X: np.ndarray,
    columns: Mapping[str, Sequence[str] | np.ndarray],
    *,
    ids: Sequence[str] | None = None,
    sha256: Sequence[str] | None = None,
    encoder: dict[str, Any] = ENCODER,
    label_column: str = "label",
    split_column: str = "split",
) -> Path:
    """A feature store of X (n, d); its rows are ``r0, r1 ...``, their files of these digests."""
    n = len(X)
    files = None
    if sha256 is not None:
        ones = np.ones(n, np.int64)
        files = Files(
            path=tuple(f"{i}.png" for i in range(n)), size=ones, mtime_ns=ones, sha256=tuple(sha256)
        )
    write_features(
        path,
        ids=ids or [f"r{i}" for i in range(n)],
        blocks=[np.asarray(X, np.float32)],
        dim=X.shape[1],
        columns=[column(name, values) for name, values in columns.items()],
        label_column=label_column if label_column in columns else None,
        split_column=split_column if split_column in columns else None,
        encoder=encoder,
        files=files,
        options={},
    )
    return path


def write_pair_store(
    path: Path,
    a: np.ndarray,
    b: np.ndarray,
    *,
    held_out: int = 0,
    ids: tuple[Sequence[str], Sequence[str]] | None = None,
    labels: tuple[Sequence[str], Sequence[str]] | None = None,
    features: Path | None = None,
    encoder: dict[str, Any] = ENCODER,
) -> Path:
    """A pair store of members (k, d), of which the last are held out; ``features`` names their store."""
    k = len(a)
    holdout = np.arange(k) >= k - held_out
    found = spectrum((a - b).T[:, ~holdout])
    id_a, id_b = ids or ([f"a{i}" for i in range(k)], [f"b{i}" for i in range(k)])
    label_a, label_b = labels or ([""] * k, [""] * k)
    sources = []
    if features is not None:
        with FeatureStore(features) as store:
            sources = [{"path": str(features), "content_sha256": store.content_sha256}]
    made = PairStore(
        features_a=a,
        features_b=b,
        id_a=tuple(id_a),
        id_b=tuple(id_b),
        label_a=tuple(label_a),
        label_b=tuple(label_b),
        holdout=holdout,
        singular_values=found.singular_values[: found.rank],
        strategy="table",
        options={},
        encoder=encoder,
        fingerprint=fingerprint(encoder),
        sources=sources,
        diagnostics={},
    )
    write_pairs(path, made)
    return path


def make_probe(
    weight: Any,
    classes: tuple[str, ...] = ("cat", "dog"),
    *,
    bias: Any = None,
    target: str = "label",
    encoder: dict[str, Any] = ENCODER,
    **meta: Any,
) -> Probe:
    """A probe of this weight, (C, d) or (d,); no classes make it a regression."""
    weight = np.atleast_2d(np.asarray(weight, float))
    return Probe(
        weight=weight,
        bias=np.zeros(len(weight)) if bias is None else np.asarray(bias, float),
        basis=np.zeros((weight.shape[1], 0)),
        singular_values=np.zeros(0),
        classes=classes,
        task="classification" if classes else "regression",
        target=target,
        meta={"encoder": encoder, "fingerprint": fingerprint(encoder), **meta},
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


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
        label_column: str = "label",
        split_column: str = "split",
        **columns: Sequence[str] | np.ndarray,
    ) -> Path:
        """Write a feature store; rows of ``same_image`` are byte-identical files."""
        X = self.X if X is None else X
        names = {"label": label_column, "split": split_column}
        digests = [f"{row:064x}" for row in range(len(X))]
        for row, other in same_image:
            digests[row] = digests[other]
        return write_store(
            self.folder / name,
            X,
            {names.get(key, key): values for key, values in (self.columns | columns).items()},
            ids=ids,
            sha256=digests,
            label_column=label_column,
            split_column=split_column,
        )

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
