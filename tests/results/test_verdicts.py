"""Probes with a verdict have a table of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.main import run
from ncm_cli.store.probe import write_probe
from tests.world import make_probe


def estimate(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def made(path: Path, verdict: dict | None, *, oracle: bool = False) -> Path:
    controls = [{"name": "erm", "bound": estimate(0.9, 0.8, 1.0)}] if verdict else []
    selection = {"rule": "bound", "oracle": oracle, "verdict": verdict, "controls": controls, "path": []}
    probe = make_probe([0.0, 1.0], ("no", "yes"), rank=1, selection=selection)
    write_probe(path, dataclasses.replace(probe, basis=np.array([[1.0], [0.0]]), singular_values=np.ones(1)))
    return path


def test_the_verdict_stands_beside_bound_and_controls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = {
        "code": "helps",
        "text": "The pairs help.",
        "flip_rate": estimate(0.1, 0.05, 0.2),
        "bound": estimate(0.3, 0.25, 0.4),
        "erm_flip_rate": estimate(0.6, 0.5, 0.7),
        "erm_bound": estimate(0.9, 0.8, 1.0),
    }
    found = [made(tmp_path / "a.safetensors", verdict), made(tmp_path / "erm.safetensors", None)]
    assert run(["report", *map(str, found), "--format", "csv"]) == 0
    shown = capsys.readouterr().out
    assert "The pairs help (helps)" in shown
    for number in ("0.3", "0.25", "0.4", "0.6", "0.9"):
        assert number in shown
    assert "erm.safetensors" not in shown


def test_an_unmeasured_verdict_leaves_its_cells_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = {"code": "unmeasured", "text": "No validation rows.", "flip_rate": None, "bound": None}
    path = made(tmp_path / "a.safetensors", verdict, oracle=True)
    assert run(["report", str(path), "--format", "markdown"]) == 0
    shown = capsys.readouterr().out
    assert "unmeasured" in shown
    assert "ORACLE" in shown
