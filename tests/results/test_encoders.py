"""A report of several encoders: one row each, in the order of what the pairs gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ncm_cli
from ncm_cli.results.options import ReportOptions
from ncm_cli.results.report import report
from ncm_cli.results.tables import ReportTable
from ncm_cli.store.files import read_result
from ncm_cli.store.tables import write_csv
from tests.world import write_store

PAIRS, ROWS, DIM = 60, 400, 6


def encoder(folder: Path, model: str, nuisance: float, *, weights: str = "w", seed: int = 0) -> None:
    """A store of an encoder that sees the nuisance so strongly, with its pairs, probes and evaluations.

    In training the nuisance tells the label in nine rows of ten, in the test rows in one of ten.
    """
    rng = np.random.default_rng(seed)
    label, split = rng.integers(0, 2, ROWS), np.repeat(["train", "val", "test"], [200, 60, 140])
    agrees = rng.random(ROWS) < np.where(split == "test", 0.1, 0.9)
    place = np.where(agrees, label, 1 - label)
    X = rng.normal(size=(ROWS + PAIRS, DIM))
    X[:ROWS, 0] += 1.6 * (2 * label - 1)
    X[:ROWS, 1] = nuisance * (2 * place - 1) + 0.3 * X[:ROWS, 1]
    # A twin of a training row differs in the nuisance alone.
    X[ROWS:] = X[:PAIRS]
    X[ROWS:, 1] = -X[:PAIRS, 1]
    columns = {
        "label": [*map(str, label), *[""] * PAIRS],
        "place": [*map(str, place), *[""] * PAIRS],
        "split": [*split, *["pool"] * PAIRS],
    }
    folder.mkdir(parents=True)
    described = {"kind": "array", "model": model, "weights": weights}
    write_store(folder / "f.h5", X, columns, encoder=described)
    write_csv(folder / "pairs.csv", ["id_a", "id_b"], [(f"r{i}", f"r{ROWS + i}") for i in range(PAIRS)])
    names: dict[str, Any] = {"features": folder / "f.h5"}
    ncm_cli.run("pairs", source=folder / "pairs.csv", output=folder / "p.h5", **names)
    ncm_cli.run("fit", method="erm", select="in-domain", output=folder / "erm.safetensors", **names)
    fitted = {"pairs": folder / "p.h5", "rank": [0, 1, 2], "seed": seed}
    ncm_cli.run("fit", output=folder / "ncm.safetensors", **fitted, **names)
    for name in ("erm", "ncm"):
        probe, output = folder / f"{name}.safetensors", folder / f"{name}.json"
        ncm_cli.run("eval", probe=probe, where="split=test", output=output, groups="label,place", **names)


def first_table(*folders: Path) -> ReportTable:
    return report(ReportOptions(results=folders)).tables[0]


def column(table: ReportTable, name: str) -> list[str]:
    at = list(table.columns).index(name)
    return [row[at].as_text(intervals=False) for row in table.rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    encoder(folder / "follows", "follows the place", 2.0)
    encoder(folder / "ignores", "ignores the place", 0.05)
    return folder


def test_the_encoder_that_needs_pairs_least_is_first(folder: Path) -> None:
    table = first_table(folder)
    assert table.title == "Encoders"
    assert column(table, "encoder") == ["ignores the place", "follows the place"]
    gains = [float(text) for text in column(table, "gain by the pairs")]
    assert gains[0] < 0.05 < gains[1]
    flips = [float(text) for text in column(table, "flips at rank 0")]
    assert flips[0] < 0.1 < flips[1]
    assert "(helps)" in column(table, "verdict")[1]
    assert "(helps)" not in column(table, "verdict")[0]


def test_accuracies_are_those_of_its_probes(folder: Path) -> None:
    table = first_table(folder)
    for name, head in (("erm", "split=test: accuracy, ERM"), ("ncm", "split=test: accuracy")):
        files = [folder / which / f"{name}.json" for which in ("ignores", "follows")]
        known = [read_result(file)["accuracy"] for file in files]
        assert column(table, head) == [f"{value:.3f}" for value in known]
    accuracy = {head: [float(text) for text in column(table, head)] for head in table.columns[6:8]}
    erm, ncm = accuracy.values()
    assert ncm[1] > erm[1] + 0.1
    assert abs(ncm[0] - erm[0]) < 0.1


def test_one_encoder_has_no_table_of_its_own(folder: Path) -> None:
    assert first_table(folder / "ignores").title == "Methods"


def test_other_weights_of_one_model_are_another_row_and_seeds_are_not(tmp_path: Path) -> None:
    for seed in range(2):
        encoder(tmp_path / f"a{seed}", "clip", 2.0, seed=seed)
    encoder(tmp_path / "b", "clip", 2.0, weights="other")
    table = first_table(tmp_path)
    names = column(table, "encoder")
    assert len(names) == 2
    assert all(name.startswith("clip (") for name in names)
    assert len(set(names)) == 2
    both = next(row for row in table.rows if row[3].spread is not None and row[3].spread.n == 2)
    assert both[1].text == "The pairs help (helps)"
