"""Simulated problems with a known nuisance, for bench_best_probe.py.

Features (N, d) are noise, the label's own signal along one direction, and a nuisance that agrees with the
label in most training rows. ``domain`` says which way the nuisance is turned.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ncm_cli.store.columns import Column
from ncm_cli.store.features import write_features

ENCODER = {"kind": "array", "model": "simulated"}

GENERATORS = ("one direction", "several directions", "noise by class", "heavy tails", "label noise")
"""How the nuisance, or the noise, is made; see `Generator`."""


def write_store(
    path: Path,
    X: np.ndarray,
    columns: Mapping[str, Any],
    *,
    ids: list[str] | None = None,
    encoder: Mapping[str, Any] = ENCODER,
) -> None:
    """A feature store of rows (N, d) with columns of N texts each, ``label`` and, if there, ``split``."""
    made = []
    for name, values in columns.items():
        known, codes = np.unique(np.asarray(values), return_inverse=True)
        made.append(Column(name, codes.astype(np.int32), tuple(map(str, known))))
    write_features(
        path,
        ids=ids or [f"r{i}" for i in range(len(X))],
        blocks=[X.astype(np.float32)],
        dim=X.shape[1],
        columns=made,
        label_column="label",
        split_column="split" if "split" in columns else None,
        encoder=encoder,
        options={},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Rows of a simulated problem; ``twins`` are ids of counterfactual pairs."""

    X: np.ndarray
    label: np.ndarray
    """(N,) −1 or 1."""
    place: np.ndarray
    """(N,) −1 or 1: which way the nuisance is turned."""
    split: np.ndarray
    kind: str = "train"
    pairs: int = 0
    twins: tuple[tuple[str, str], ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the feature store."""
        label = np.where(self.label > 0, "b", "a")
        domain = np.where(self.place > 0, "water", "land")
        write_store(path, self.X, {"label": label, "domain": domain, "split": self.split})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generator:
    """A distribution of rows.

    ``error`` is that of the best probe on the core alone (with noise by class, nearly); ``nuisance`` the size
    of the nuisance in units of the noise, 0 for none.
    """

    name: str
    dim: int
    error: float
    nuisance: float = 2.0

    def rows(
        self, rng: np.random.Generator, basis: np.ndarray, label: np.ndarray, place: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Features (N, d) of rows with these labels and places, and of their twins in the other place."""
        n, normal = len(label), statistics.NormalDist()
        shown, error = label, self.error
        if self.name == "label noise":
            # A tenth as many errors are the features' own; the other labels are wrong.
            error = self.error / 10
            wrong = rng.random(n) < (self.error - error) / (1 - 2 * error)
            shown = np.where(wrong, -label, label)
        X = rng.normal(size=(n, self.dim))
        if self.name == "noise by class":
            X *= np.where(label > 0, 1.3, 0.7)[:, None]
        X += -normal.inv_cdf(error) * shown[:, None] * basis[:, 0]
        width = 4 if self.name == "several directions" else 1
        size = 1 + 0.3 * rng.normal(size=(n, width))
        if self.name == "heavy tails":
            size = np.abs(rng.standard_t(3, size=(n, width))) + 0.2
        moved = (self.nuisance / np.sqrt(width) * size * place[:, None]) @ basis[:, 1 : 1 + width].T
        return X + moved, X - moved

    def basis(self, rng: np.random.Generator) -> np.ndarray:
        """(d, 5) orthonormal: the core, and four directions of nuisance."""
        return np.linalg.qr(rng.normal(size=(self.dim, 5)))[0]


def drawn(rng: np.random.Generator, n: int, share: float, agree: float) -> tuple[np.ndarray, np.ndarray]:
    """Labels (n,), a share of them 1, and places (n,), which agree with them as often as said."""
    label = np.where(rng.random(n) < share, 1, -1)
    return label, np.where(rng.random(n) < agree, label, -label)


def draw_hard(seed: int, generator: str, dim: int, rows: int, error: float, *, spare: bool) -> Problem:
    """Nine in ten training rows agree with their place; test rows and 600 spare rows, five in ten."""
    rng = np.random.default_rng(seed)
    made, sizes = Generator(name=generator, dim=dim, error=error), (rows, rows // 4, 2000, 600 * spare)
    basis, parts = (
        made.basis(rng),
        [drawn(rng, n, 0.5, a) for n, a in zip(sizes, (0.9, 0.9, 0.5, 0.5), strict=True)],
    )
    label, place = (np.concatenate(part) for part in zip(*parts, strict=True))
    X, _ = made.rows(rng, basis, label, place)
    return Problem(X=X, label=label, place=place, split=np.repeat(("train", "val", "test", "pool"), sizes))


def draw_any(seed: int) -> Problem:
    """A small problem of any kind: strength of the nuisance, pairs, classes and generator are all drawn.

    The test rows are of the domain that the pairs stand for. For counterfactuals that is the twins', with
    every nuisance turned; for matched pairs label and place are independent.
    """
    rng = np.random.default_rng(seed)
    kind = ("counterfactual", "train", "spare")[seed % 3]
    dim, n = round(16 * 4 ** float(rng.random())), int(rng.integers(500, 1201))
    nuisance = 0.0 if rng.random() < 0.15 else float(rng.uniform(0.25, 3))
    made = Generator(
        name=str(rng.choice(GENERATORS)), dim=dim, error=float(rng.uniform(0.03, 0.3)), nuisance=nuisance
    )
    agree, share = float(rng.uniform(0.65, 0.97)), float(rng.choice((0.5, 0.5, 0.2, 0.8)))
    count = round(16 * 16 ** float(rng.random()))
    apart = 0.5 if kind != "counterfactual" else 1 - agree
    sizes = {"train": (n, agree), "val": (n // 4, agree), "test": (4000, apart)}
    if kind == "spare":
        sizes["pool"] = (3 * count + 100, 0.5)
    basis, parts = made.basis(rng), [drawn(rng, number, share, a) for number, a in sizes.values()]
    label, place = (np.concatenate(part) for part in zip(*parts, strict=True))
    split = np.repeat(list(sizes), [number for number, _ in sizes.values()])
    X, turned = made.rows(rng, basis, label, place)
    twins: tuple[tuple[str, str], ...] = ()
    if kind == "counterfactual":
        own = rng.choice(n, size=min(count, n), replace=False)
        twins = tuple((f"r{i}", f"r{len(X) + j}") for j, i in enumerate(own))
        X, label = np.concatenate([X, turned[own]]), np.concatenate([label, label[own]])
        place, split = np.concatenate([place, -place[own]]), np.concatenate([split, ["twin"] * len(own)])
    facts = {"kind": kind, "agree": agree, "share": share, **dataclasses.asdict(made)}
    return Problem(
        X=X, label=label, place=place, split=split, kind=kind, pairs=count, twins=twins, facts=facts
    )
