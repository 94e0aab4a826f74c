"""README and help topics say what is true: the reference is current, links lead somewhere, examples run."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.cells import cell_len

from ncm_cli.commands import help as topics
from ncm_cli.main import run
from ncm_cli.registry import TOPICS
from tests import reference

ROOT = Path(__file__).resolve().parents[1]
HELP = ROOT / "ncm_cli" / "help"
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(HELP.glob("*.md")))}
"""The README and the topics of ``ncm help``, by file."""


def test_the_reference_is_current() -> None:
    assert PAGES[reference.FILE] == reference.reference(), "run: python tests/reference.py"


@pytest.mark.parametrize("name", list(reference.commands()))
def test_help_shows_every_option_and_two_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    for field in reference.fields_of(reference.commands()[name][1]):
        assert field.positional or field.flag in shown, field.flag
    assert "Examples:" in shown
    assert len(re.findall(rf"^\s+ncm {name}\b", shown, flags=re.MULTILINE)) >= 2
    assert "Next:" in shown


def flags(words: str) -> set[str]:
    """What may stand behind the first words of a command line."""
    shared = {"--json", "--quiet", "-q", "--verbose", "-v", "--help"}
    fields = reference.fields_of(reference.commands()[words][1])
    negated = {f"--no-{field.flag[2:]}" for field in fields if field.type is bool}
    return shared.union(negated, *({field.flag, *field.flags} for field in fields))


EVERY = set().union(*map(flags, reference.commands()))
OTHERS = {
    "--version",
    "--install-completion",
    "--head",
    "--port",
    "--address",
    "--array",
    "--index-url",
    "--smoke",
    "--first-seed",
    "--dogs",
    "--leaves",
    "--optimizer",
    "--refit",
    "--sizes",
}
"""Options of other programs, of earlier versions and of ncm itself that pages name."""


def check_line(line: str) -> None:
    """A line's options are its command's."""
    words = re.match(r"ncm (data [a-z-]+|[a-z]+)", line)
    if words and words[1] != "data" and "--" not in words[1]:
        assert words[1] in reference.commands(), line
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", line)) <= flags(words[1]), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_options_that_there_are(page: Path) -> None:
    for line in re.findall(r"(?:^|`)(ncm (?:[^`\n]*\\\n)*[^`\n]*)", PAGES[page], flags=re.MULTILINE):
        check_line(line)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGES[page])) <= EVERY | OTHERS


def test_help_lists_the_topics_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help"]) == 0
    listed = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(TOPICS)
    assert {f"{name}.md" for name in TOPICS} == {path.name for path in HELP.iterdir()}
    assert {*re.findall("More: ncm help (.*)", PAGES[HELP / "examples.md"])} <= {*TOPICS}
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
@pytest.mark.parametrize("name", TOPICS)
def test_a_terminal_shows_all_of_a_topic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    assert run(["help", name]) == 0
    read = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert max(map(cell_len, read.splitlines())) <= 50
    written = re.sub(r"^```\w+", "", topics.topic_page(name), flags=re.MULTILINE)
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


BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
"""A block of code with the mark above it and its language."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pages' examples assume: photos of two domains and two labels, and features made elsewhere.

    The label is the shape, the domain is the colour of the ground.
    """
    rng = np.random.default_rng(0)
    for domain, ground in (("day", 200), ("night", 30)):
        for label in ("bar", "dot"):
            made = tmp_path / "photos" / domain / label
            made.mkdir(parents=True)
            for i in range(40):
                pixels = np.full((32, 32, 3), ground, np.uint8)
                x, y = rng.integers(4, 20, size=2)
                width, height = (4, 12) if label == "bar" else (7, 7)
                pixels[y : y + height, x : x + width] = 255 - ground
                pixels = np.clip(pixels + rng.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(made / f"{i:02}.png")
    shutil.copytree(tmp_path / "photos" / "night" / "dot", tmp_path / "new-photos")
    (tmp_path / "manifest.csv").write_text("id,label\na,x\nb,y\n")
    np.save(tmp_path / "X.npy", np.eye(2, 3))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_line(argv: list[str]) -> None:
    """Run a command, in less time and without CLIP's weights, which can't be had in a test."""
    if argv[0] == "embed" and not {"--model", "--from-array"} & set(argv):
        argv = [*argv, "--model", "pixels:16"]
    if argv[0] == "sweep":
        line = re.sub(r" --(trials|seeds|epochs) \S+", "", shlex.join(argv))
        argv = shlex.split(f"{line} --trials 1 --seeds 1 --epochs 2")
    assert run([*argv]) == 0, argv


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_examples_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = HELP / "start.md"
    for page in sorted(PAGES, key=lambda page: page != start):
        python = []
        capsys.readouterr()
        printed = ""
        for mark, language, code in BLOCK.findall(PAGES[page]):
            if mark.startswith("not run: ") or mark in ("quickstart", "tests"):
                continue
            assert language in ("bash", "make", "python", "text", "yaml"), f"{page}: {code}"
            if language == "bash":
                for line in code.replace("\\\n", "").splitlines():
                    name, *argv = shlex.split(line, comments=True)
                    assert name == "ncm", f"{page}: {line}"
                    run_line(argv)
                printed += capsys.readouterr().out
            elif language == "python":
                python.append(code)
            elif mark == "output":  # its numbers may differ in the last digit elsewhere
                shown, said = (" ".join(re.sub(r"\d+", "0", text).split()) for text in (code, printed))
                assert shown in said, f"{page}: {code}"
            elif language == "yaml":
                (folder / "recipe.yaml").write_text(code)
                assert run(["run", "recipe.yaml", "--dry-run"]) == 0
        if python:
            done = subprocess.run(
                [sys.executable, "-W", "error"], input="\n".join(python), capture_output=True, text=True
            )
            assert done.returncode == 0, f"{page}: {done.stderr}"
    assert len((folder / "predictions.csv").read_text().splitlines()) == 41
