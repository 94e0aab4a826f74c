"""Each command names its next one, with its own files, where a terminal shows it."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.main import run
from ncm_cli.next_command import NEXT, next_command
from ncm_cli.options import fields_of
from ncm_cli.probes.options import EvalOptions, FitOptions
from ncm_cli.registry import COMMANDS, options_of
from tests.world import write_store


@pytest.mark.parametrize("words", NEXT)
def test_every_line_is_a_command_that_there_is(words: str) -> None:
    fields = {field.name for field in fields_of(options_of("data digits" if words == "data" else words))}
    names = {"output": "o", "json": "o.json", "features": "f.h5", "pairs_csv": "p.csv", "test": "split=test"}
    line = NEXT[words].format(**names)
    name, command, *arguments = shlex.split(line)
    assert (name, command in COMMANDS) == ("ncm", True)
    assert "output" in fields
    known = {flag for field in fields_of(options_of(command)) for flag in (field.flag, *field.flags)}
    assert {argument for argument in arguments if argument.startswith("-")} <= known


def test_files_are_those_of_the_command_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_store(Path("my f.h5"), np.eye(2), {"label": ["0", "1"], "split": ["train", "test"]})
    write_store(Path("one.h5"), np.eye(2), {"label": ["0", "1"], "domain": ["a", "b"]})
    options = FitOptions(features=Path("my f.h5"), output=Path("p.safetensors"))
    assert next_command("fit", options) == "ncm eval p.safetensors -f 'my f.h5' --where split=test"
    without = dataclasses.replace(options, features=Path("one.h5"))
    assert next_command("fit", without) is None
    line = "ncm eval p.safetensors -f one.h5 --where domain=b"
    assert next_command("fit", dataclasses.replace(without, test="domain=b")) == line
    evaluation = EvalOptions(probe=Path("p.safetensors"), features=Path("f.h5"))
    assert next_command("eval", evaluation) is None
    assert next_command("eval", dataclasses.replace(evaluation, output=Path("r.json"))) == "ncm report r.json"
    assert next_command("run", evaluation) is None


@pytest.mark.parametrize(
    ("terminal", "more"), [(True, ()), (False, ()), (True, ("--quiet",)), (True, ("--json",))]
)
def test_it_is_said_once_where_a_terminal_is(
    terminal: bool, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    labels = list("01" * 20)
    columns = {"label": labels, "split": ["train"] * 20 + ["val"] * 10 + ["test"] * 10}
    X = np.random.default_rng(0).normal(size=(40, 3))
    write_store(tmp_path / "f.h5", X, columns)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    files = [f"--features={tmp_path / 'f.h5'}", f"--output={tmp_path / 'p.safetensors'}"]
    assert run(["fit", *files, "--weight-decay", "1", *more]) == 0
    assert capsys.readouterr().err.count("next: ncm eval ") == (terminal and not more)
