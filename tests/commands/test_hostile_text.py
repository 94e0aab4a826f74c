"""Text of a stranger's file never reaches the terminal as anything but text, and not without end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli import load
from ncm_cli.console import MAX_LINE, Ui, bounded
from ncm_cli.main import run
from ncm_cli.store.columns import Column, FailedRow, Files
from ncm_cli.store.features import write_features
from ncm_cli.store.files import write_result
from ncm_cli.store.probe import Probe, write_probe

EVIL = "\x1b]0title\x07\x1b[2J\x9b31m\r\x08\u202egnp\u2066\u200f\nbad input: spoofed\x7f"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
TOTAL = 40_000
"""Characters that nothing here may print more than."""


def evil(text: str) -> str:
    return f"{text}{EVIL}"


def store(path: Path, long: str = "") -> Path:
    """A feature store with hostile text wherever text may stand."""
    rows = 4
    write_features(
        path,
        ids=[evil(f"{i}") for i in range(rows)],
        blocks=[np.arange(8.0).reshape(4, 2)],
        dim=2,
        columns=[
            Column(evil("label"), np.array([0, 1, 0, 1], np.int32), (evil("a"), evil("b"))),
            Column(evil("split"), np.zeros(rows, np.int32), (evil("test"),)),
            Column("c" + long, np.zeros(rows, np.int32), ("v",)),
        ],
        label_column=evil("label"),
        split_column=evil("split"),
        encoder={"kind": evil("k"), "model": evil("m"), evil("x"): evil("y")},
        files=Files([evil("/p")] * rows, np.zeros(rows, int), np.zeros(rows, int), ["0" * 64] * rows),
        failed=[FailedRow(evil("f"), evil("/f"), evil("why"))],
        options={evil("o"): evil("p"), "source": evil("s")},
    )
    return path


def probe(path: Path, encoder: dict[str, Any], fingerprint: str) -> Path:
    made = Probe(
        weight=np.ones((1, 2)),
        bias=np.zeros(1),
        basis=np.zeros((2, 0)),
        singular_values=np.zeros(0),
        classes=(evil("a"), evil("b")),
        task="classification",
        target=evil("label"),
        meta={
            "encoder": encoder,
            "fingerprint": fingerprint,
            "method": evil("m"),
            "selection": {"rule": evil("r")},
            "flags": [evil("flag")],
        },
    )
    write_probe(path, made)
    return path


RECIPE = {
    "name": "x",
    "vars": {"v": evil("v")},
    "steps": [
        {"fit": {"features": "f.h5", "output": evil("p"), "train": evil("split=a")}, "name": evil("step")},
        {evil("stray"): {evil("key"): evil("value")}},
    ],
    evil("unknown"): evil("value"),
}


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., int]:
    """Run a command, and see to it that nothing is printed that a terminal obeys."""

    def command(*words: object) -> int:
        code = run([str(word) for word in words])
        out, err = capfd.readouterr()
        assert not OBEYED.search(out + err), words
        assert not re.search("^bad input: spoofed", err, re.MULTILINE), words
        assert len(out) + len(err) < TOTAL, words
        return code

    return command


def test_stores_probes_results_and_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., int]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = store(tmp_path / "f.h5")
    with load(file) as opened:  # type: ignore[union-attr]
        own = probe(tmp_path / "p", opened.encoder, opened.fingerprint)  # type: ignore[union-attr]
    assert said("info", file, "--verify", "-v") == 0
    assert said("info", file, "--json") == 0
    assert said("info", own) == 0
    assert said("eval", own, "-f", file, "-o", evil("r.json")) == 0
    assert said("eval", own, "-f", file, "--json") == 0
    for form in ("table", "markdown", "latex", "csv"):
        assert said("report", evil("r.json"), own, "--format", form) == 0
    assert said("report", evil("r.json"), "--json") == 0
    assert said("info", evil("r.json")) == 0
    assert said("predict", own, file, "-o", "out.csv") == 0
    for words in (
        ("eval", own, "-f", file, "--where", evil("no=")),
        ("eval", own, "-f", file, "--groups", evil("none")),
        ("fit", "-f", file, "-o", "q"),
        ("info", evil("missing")),
        (evil("command"),),
        ("fit", evil("--option")),
    ):
        assert said(*words) in (2, 3, 4), words


def test_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., int]) -> None:
    monkeypatch.chdir(tmp_path)
    store(tmp_path / "f.h5")
    file = tmp_path / "r.yaml"
    file.write_text(json.dumps(RECIPE))
    assert said("run", file) == 3
    right = {"name": "x", "steps": [{"fit": {"features": "f.h5", "output": evil("p"), "method": "erm"}}]}
    file.write_text(json.dumps(right))
    assert said("run", file, "--dry-run") == 0
    assert said("run", file) == 3


def test_shell_lines_of_hostile_names_mean_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store(tmp_path / "f.h5")
    right = {
        "name": "x",
        "steps": [{"fit": {"features": "f.h5", "output": "p'\\ é\x1b\x9b\n", "method": "erm"}}],
    }
    Path("r.yaml").write_text(json.dumps(right))
    assert run(["run", "r.yaml", "--dry-run"]) == 0
    line = capfd.readouterr().out.splitlines()[-1]
    assert not OBEYED.search(line)
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout
    assert "runs/x/p'\\ é\x1b\x9b\n".encode() in printed.split(b"\0")


def test_endless_names_are_cut(tmp_path: Path, said: Callable[..., int]) -> None:
    file = store(tmp_path / "f.h5", long="x" * 60_000)
    assert said("info", file) == 0
    assert said("fit", "-f", file, "-o", tmp_path / "p", "--target", "y" * 70_000) == 3
    write_result(tmp_path / "r.json", "eval", {"n": 3, "accuracy": 0.5, "probe": {"method": "m" * 70_000}})
    assert said("report", tmp_path / "r.json") == 0
    assert bounded("a" * 2_000).startswith("aaa")
    assert len(bounded("a" * 2_000)) <= MAX_LINE
    assert bounded("short") == "short"


def test_a_note_is_bounded_and_keeps_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    ui = Ui()
    ui.note("one\ntwo\n  three\n" + "x" * 10_000)
    with ui.reporter.task("[red]label\x1b[2J\n", total=1) as task:
        task.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["one", "  two", "  three"]
    assert all(len(line) < MAX_LINE + 100 for line in lines)


def test_rows_of_predict_on_a_terminal_are_escaped(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    file = store(tmp_path / "f.h5")
    with load(file) as opened:  # type: ignore[union-attr]
        own = probe(tmp_path / "p", opened.encoder, opened.fingerprint)  # type: ignore[union-attr]
    main, side = pty.openpty()
    words = [sys.executable, "-m", "ncm_cli", "predict", str(own), str(file)]
    subprocess.run(words, stdout=side, stderr=subprocess.DEVNULL, check=True)
    os.close(side)
    found = os.read(main, 1 << 16).decode().replace("\r\n", "\n")
    assert "id,class" in found
    assert not OBEYED.search(found)
