"""An output that is a folder in a file's place, or a file in a folder's, is refused before any work.

Nothing is there to work with: a command that looked at its inputs first would say so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ncm_cli
from ncm_cli import main
from ncm_cli.errors import InputError
from ncm_cli.options import Field, command_words, fields_of
from ncm_cli.recipes.document import RecipeError
from ncm_cli.recipes.load import read_recipe
from ncm_cli.registry import BUILDERS, COMMANDS, options_of
from ncm_cli.store import outputs

GIVEN: dict[str, dict[str, Any]] = {
    "data folder": {"source": "photos"},
    "data colored-mnist": {"mnist": "mnist"},
    "data waterbirds-cf": {"waterbirds": "birds"},
    "data pacs": {"pacs": "pacs"},
    "embed": {"source": "m.csv", "model": "pixels:2"},
    "pairs": {"features": "f.h5", "match": "random", "same": "label", "across": "place"},
    "fit": {"features": "f.h5", "pairs": "p.h5"},
    "zeroshot": {"features": "f.h5", "prompts": ("a {}",)},
    "eval": {"probe": "p", "features": "f.h5"},
    "bound": {"probe": "p", "features": "f.h5", "oracle_pairs": "o.h5"},
    "predict": {"probe": "p", "source": "photos"},
    "sweep": {"features": "f.h5", "methods": "erm"},
    "finetune": {"source": "m.csv"},
    "report": {"results": ("r.json",)},
    "info": {"file": "p", "export": "npz"},
    "run": {"recipe": "r.yaml"},
}
"""What a command needs beside its outputs."""


SUFFIXES = {"sweep": ".h5", "finetune": ".safetensors"}
"""How the name of an output has to end."""


def _outputs() -> Iterator[tuple[str, Field]]:
    for words in [*(name for name in COMMANDS if name != "data"), *(f"data {name}" for name in BUILDERS)]:
        for field in fields_of(options_of(words)):
            if field.role == "output":
                yield words, field


CASES = [
    pytest.param(words, field, place, id=f"{words} {field.flag} {place}")
    for words, field in _outputs()
    for place in (("FILE", "FILE/in/it") if field.is_folder else ("FOLDER", "FILE/in-it"))
]


REFUSED = re.compile("the output is a folder|a file where a folder is expected")


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("x")


def _given(words: str, field: Field, place: str) -> dict[str, Any]:
    """The command's options, with one output at a place where it can't go."""
    suffix = SUFFIXES.get(words, "")
    outputs = {other.name: f"out{suffix}" for name, other in _outputs() if name == words and other.required}
    Path(f"FOLDER{suffix}").mkdir(exist_ok=True)
    return GIVEN.get(words, {}) | outputs | {field.name: place if field.is_folder else place + suffix}


@pytest.mark.parametrize(("words", "field", "place"), CASES)
def test_the_command_line_refuses_it(
    words: str, field: Field, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*words.split(), *command_words(options_of(words), _given(words, field, place))]
    assert main.run(line) == 3
    assert REFUSED.search(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "field", "place"), [case for case in CASES if case.values[0] not in ("info", "run")]
)
def test_python_refuses_it(words: str, field: Field, place: str) -> None:
    with pytest.raises(InputError, match=REFUSED):
        ncm_cli.run(words, **_given(words, field, place))


@pytest.mark.parametrize(
    ("words", "field", "place"), [case for case in CASES if case.values[0] not in ("info", "run")]
)
def test_a_recipe_refuses_it_with_its_line(words: str, field: Field, place: str) -> None:
    step, _, builder = words.partition(" ")
    given = _given(words, field, place) | ({"builder": builder} if builder else {})
    lines = (f"      {name}: {json.dumps(value)}\n" for name, value in given.items())
    Path("r.yaml").write_text(f"name: x\nsteps:\n  - {step}:\n{''.join(lines)}")
    with pytest.raises(RecipeError) as refused:
        read_recipe(Path("r.yaml"), out=Path(), dry_run=True)
    (problem,) = refused.value.problems
    assert REFUSED.match(problem.what)
    assert (problem.line, problem.path) == (4 + [*given].index(field.name), f"steps[1].{step}.{field.name}")


@pytest.mark.parametrize(("words", "field"), [*_outputs()])
def test_an_address_is_no_output(words: str, field: Field, capsys: pytest.CaptureFixture[str]) -> None:
    """It was written to a folder called ``s3:``, and the message lost a slash."""
    given = _given(words, field, "s3://bucket/out")
    assert main.run([*words.split(), *command_words(options_of(words), given)]) == 2
    assert f"found: {given[field.name]}" in capsys.readouterr().err
    assert not Path("s3:").exists()


def test_an_address_is_no_output_of_a_recipe() -> None:
    step = "{source: m.csv, model: 'pixels:2', output: 's3://bucket/f.h5'}"
    Path("r.yaml").write_text(f"name: x\nsteps:\n  - embed: {step}\n")
    with pytest.raises(RecipeError, match="outputs can't be written to an address") as refused:
        read_recipe(Path("r.yaml"), out=Path("out"), dry_run=True)
    assert [problem.path for problem in refused.value.problems] == ["steps[1].embed.output"]


def test_a_link_to_a_folder_that_is_not_there_yet_is_a_place_for_it() -> None:
    Path("link").symlink_to("target")
    assert main.run(["data", "digits", "-o", "link", "-q"]) == 0
    assert (Path("target") / "manifest.csv").is_file()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a system without /proc")
def test_the_kernels_folders_are_refused_before_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Root may write to every folder, but nobody makes a file there."""
    assert main.run(["data", "synthetic", "-o", "/proc/x"]) == 3
    assert "a folder that can't be written to\n  where: /proc" in capsys.readouterr().err


def test_a_folder_that_can_not_be_written_to_is_refused_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, but not into a file system that is mounted read-only."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="a folder that can't be written to"):
        ncm_cli.run("fit", features="FILE", output="probe.safetensors")


def test_a_system_without_its_own_file_systems_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.ismount", lambda path: False)
    assert outputs._kernel_devices() == set()
    outputs.refuse_no_folder(tmp_path)
