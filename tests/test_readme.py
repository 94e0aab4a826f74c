"""README and help topics say what is true: the reference is current, links lead somewhere, examples run."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.cells import cell_len

from ncm_cli.commands.help import FOLDER, page
from ncm_cli.main import run
from ncm_cli.registry import BUILDERS, COMMANDS, TOPICS

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(FOLDER.glob("*.md")))
}
"""The README and the topics of ``ncm help``, by file."""

_spec = importlib.util.spec_from_file_location("reference", Path(__file__).with_name("reference.py"))
assert _spec and _spec.loader
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


def test_the_reference_is_current() -> None:
    assert PAGES[reference.FILE] == reference.reference(), "run: python tests/reference.py"


@pytest.mark.parametrize("name", list(reference.commands()))
def test_help_shows_every_option_and_two_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    for field in reference.fields_of(reference.commands()[name][1]):
        assert field.spec.positional or field.flag in shown, field.flag
    assert "Examples:" in shown
    assert len(re.findall(rf"^\s+ncm {name}\b", shown, flags=re.MULTILINE)) >= 2
    assert "Next:" in shown


@pytest.mark.parametrize("name", list(reference.commands()))
def test_examples_name_options_that_there_are(name: str) -> None:
    command, builder = name.split()[0], name.split()[-1]
    examples = (BUILDERS[builder] if command == "data" else COMMANDS[command]).examples
    known = {"--json"}
    for field in reference.fields_of(reference.commands()[name][1]):
        known |= {field.flag, *field.spec.flags}
    lines = " ".join(re.findall(r"^ *ncm (?:.*\\\n)*.*$", examples, flags=re.MULTILINE))
    assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", lines)) <= known


def test_help_lists_the_topics_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help"]) == 0
    listed = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(TOPICS)
    assert {f"{name}.md" for name in TOPICS} == {path.name for path in FOLDER.iterdir()}
    assert {command.topic for command in [*COMMANDS.values(), *BUILDERS.values()]} <= {"", *TOPICS}
    for name in TOPICS:
        assert f"](ncm_cli/help/{name}.md)" in PAGES[ROOT / "README.md"]


def test_help_shows_a_topic_or_a_commands_options_or_what_comes_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["help", "pairs"]) == 0
    assert capsys.readouterr().out.startswith("# ")
    assert run(["help", "fit"]) == run(["fit", "--help"]) == 0
    first, second = capsys.readouterr().out.split("Usage: ncm fit")[1:]
    assert first.split() == second.split()
    assert "More: ncm help rank" in first
    assert run(["help", "imagse"]) == 2
    assert "did you mean 'images'?" in capsys.readouterr().err


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 50])
@pytest.mark.parametrize("name", TOPICS)
def test_a_terminal_shows_all_of_a_topic(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    assert run(["help", name]) == 0
    read = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert max(map(cell_len, read.splitlines())) <= width
    written = re.sub(r"^```\w+", "", page(name), flags=re.MULTILINE)
    assert Counter(filter(str.isalnum, written)) == Counter(filter(str.isalnum, read))


def anchors(path: Path) -> set[str]:
    """What a code host calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", PAGES[path], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def example(name: str, language: str) -> str:
    """The code of the block that follows ``<!-- example: NAME -->``."""
    found = examples(name, language)
    assert found, f"no example {name}"
    return found[0]


def examples(name: str, language: str) -> list[str]:
    """The code of every block that follows ``<!-- example: NAME -->``, on any page."""
    block = re.compile(rf"<!-- example: {name} -->\n```{language}\n(.*?)```", flags=re.DOTALL)
    return [code for text in PAGES.values() for code in block.findall(text)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two domains of two labels: the label is the shape, the domain is the colour of the ground."""
    rng = np.random.default_rng(0)
    for domain, ground in (("day", 200), ("night", 30)):
        for label in ("bar", "dot"):
            folder = tmp_path / "photos" / domain / label
            folder.mkdir(parents=True)
            for i in range(40):
                pixels = np.full((32, 32, 3), ground, np.uint8)
                x, y = rng.integers(4, 20, size=2)
                width, height = (4, 12) if label == "bar" else (7, 7)
                pixels[y : y + height, x : x + width] = 255 - ground
                pixels = np.clip(pixels + rng.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i:02}.png")
    shutil.copytree(tmp_path / "photos" / "night" / "dot", tmp_path / "new-photos")
    return tmp_path


def shell(command: list[str], folder: Path, script: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder`` with ``ncm`` on the path; CLIP's weights can't be had in a test."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    ncm = tools / "ncm"
    ncm.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ncm_cli "$@"\n')
    ncm.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        command, cwd=folder, env=environment, input=script, capture_output=True, text=True, check=False
    )


def without_clip(text: str) -> str:
    """The same lines with an encoder that needs no weights."""
    return re.sub(r"(ncm embed \S+)", r"\1 --model pixels:16", text)


@pytest.mark.slow
def test_the_tour_runs(photos: Path) -> None:
    done = shell(["bash", "-euo", "pipefail"], photos, without_clip(example("tour", "bash")))
    assert done.returncode == 0, done.stderr
    assert "worst group" in done.stdout
    assert len((photos / "predictions.csv").read_text().splitlines()) == 41


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make isn't installed")
def test_the_makefile_runs_once(photos: Path) -> None:
    (photos / "Makefile").write_text(without_clip(example("makefile", "make")))
    first = shell(["make"], photos)
    assert first.returncode == 0, first.stderr
    assert (photos / "result.json").exists()
    second = shell(["make"], photos)
    assert second.returncode == 0
    assert "ncm" not in second.stdout
    assert "up to date" in second.stdout


@pytest.mark.slow
def test_python_examples_run(photos: Path) -> None:
    tour = without_clip(example("tour", "bash"))
    assert shell(["bash", "-euo", "pipefail"], photos, tour).returncode == 0
    assert examples("python", "python")
    for code in examples("python", "python"):
        done = shell([sys.executable, "-W", "error"], photos, code)
        assert done.returncode == 0, f"{code}\n{done.stderr}"
