"""Tables as they are shown: whole off a terminal; on one, fitted without breaking a number or an id."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from ncm_cli.console import ConsoleReporter, Ui
from ncm_cli.main import run

LONG = 110
IDS = [f"photos/{'x' * (LONG - 17)}/{i:05}.jpg" for i in range(80)]
RECIPE = """
name: shown
matrix: {seed: [0, 1, 2]}
steps:
  - name: a step of a long name
    fit: {features: f.h5, pairs: p.h5, rank: "0:2", seed: "${seed}", output: "probe${seed}.safetensors"}
  - eval:
      probe: probe${seed}.safetensors
      features: f.h5
      where: split=test
      groups: label
      output: result${seed}.json
table: {the first of the columns: split=test}
expect:
  - {metric: accuracy, where: split=test, value: .5, tolerance: .5, source: "a paper of long title, table 2"}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with features, pairs, probe, result and sweep; the ids have 110 characters."""
    folder = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    labels, domains = np.arange(80) % 2, np.arange(80) // 2 % 2
    X = rng.normal(size=(80, 6)) + 2 * labels[:, None] * np.eye(6)[0] + 3 * domains[:, None] * np.eye(6)[1]
    np.save(folder / "X.npy", X.astype(np.float32))
    splits = ["train", "val", "test", "train"]
    rows = [
        f"{name},{'good' if label else 'bad'},{'studio' if domain else 'street'},{splits[i // 4 % 4]}"
        for i, (name, label, domain) in enumerate(zip(IDS, labels, domains, strict=True))
    ]
    (folder / "m.csv").write_text("\n".join(["id,label,domain,split", *rows]))
    (folder / "recipe.yaml").write_text(RECIPE)
    for line in (
        "embed m.csv --from-array X.npy --encoder-name mine -o f.h5",
        "pairs --match random --same label --across domain -f f.h5 -o p.h5",
        "fit -f f.h5 -p p.h5 -o probe.safetensors",
        "eval probe.safetensors -f f.h5 --where split=test --groups label,domain -o result.json",
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ncm_cli", *line.split()], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return folder


COMMANDS = {
    "pairs": "pairs --match random --same label --across domain -f f.h5 -o p.h5",
    "fit": "fit -f f.h5 -p p.h5 -o probe.safetensors --groups label,domain",
    "eval": "eval probe.safetensors -f f.h5 --where split=test --groups label,domain",
    "info": "info f.h5",
    "info probe": "info probe.safetensors",
    "report": "report result.json p.h5",
    "sweep": "sweep -f f.h5 -p p.h5 --methods erm,irm,ncm --envs domain --groups label,domain "
    "--test split=test --trials 2 --seeds 2 --epochs 1 -o sweep.h5",
    "bound": "bound probe.safetensors -f f.h5 --oracle-pairs p.h5 --bootstrap 20",
    "run": "run recipe.yaml --out run",
}


def words(text: str) -> set[str]:
    """What stands between blanks, terminal codes left out."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return {word for word in plain.split() if not re.fullmatch("─+", word)}


def on_terminal(command: str, folder: Path, width: int) -> str:
    """What a command writes to standard output where that is a terminal of this width."""
    pty = pytest.importorskip("pty")
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, np.array([40, width, 0, 0], np.uint16).tobytes())
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    shown: list[bytes] = []

    def read() -> None:
        try:
            while block := os.read(main, 65536):
                shown.append(block)
        except OSError:  # how a terminal ends
            pass

    thread = threading.Thread(target=read)
    thread.start()
    done = subprocess.run(
        [sys.executable, "-m", "ncm_cli", *command.split()],
        cwd=folder,
        env=environment | {"PYTHONIOENCODING": "utf-8", "TERM": "xterm"},
        stdin=other,
        stdout=other,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(other)
    thread.join()
    os.close(main)
    assert done.returncode == 0, done.stderr
    return b"".join(shown).decode().replace("\r\n", "\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_broken_on_a_terminal_and_nothing_wrapped_off_it(
    name: str, world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vladmandic/sdnext#1520."""
    monkeypatch.chdir(world)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run(COMMANDS[name].split()) == 0
    piped = capsys.readouterr().out
    for width in (80, 50):
        shown = on_terminal(COMMANDS[name], world, width)
        assert words(shown) == words(piped), name
    tables = [line for line in piped.splitlines() if set(line) == {"─"}]
    assert tables
    if name == "pairs":
        suspects = [line for line in piped.splitlines() if "photos/" in line]
        assert len(suspects) == 5
        assert all(sum(one in line for one in IDS) == 2 for line in suspects)
        assert [one for one in IDS if one in shown] == [one for one in IDS if one in piped]
    if name == "fit":
        headings = [
            "rank",
            "weight decay",
            "trained on",
            "cell error",
            "val accuracy",
            "flip rate",
            "in cells",
        ]
        assert re.search(" +".join([*headings, "error bound"]), piped)
    if name.startswith("info"):
        assert run(["info", "f.h5", "--json"]) == 0
        fingerprint = json.loads(capsys.readouterr().out)["fingerprint"]
        assert fingerprint in piped and fingerprint in shown


def show(
    columns: list[str],
    rows: list[list[object]],
    capsys: pytest.CaptureFixture[str],
    *,
    left: int = 1,
    footer: str | None = None,
) -> list[str]:
    Ui().table(columns, rows, left=left, footer=footer)
    return capsys.readouterr().out.splitlines()


def test_off_a_terminal_a_row_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    prose = "a long sentence " * 30
    lines = show(["id", "the first heading", "text"], [[IDS[0], "0.127 ± 0.029", prose]], capsys)
    assert len(lines) == 4
    assert lines[2].split()[:2] == [IDS[0], "0.127±0.029"]
    assert prose.strip() in lines[2]
    assert "the first heading" in lines[0]


@pytest.mark.parametrize("given", ["", "x", "0", "-5"])
def test_columns_that_are_no_number_say_nothing(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", given)
    assert IDS[0] in show(["id", "n"], [[IDS[0], 3]], capsys)[2]


def test_columns_are_respected_off_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = show(["id_a", "id_b", "n"], [[IDS[0], IDS[1], 3], [IDS[1], "short", 4]], capsys, left=2)
    assert lines[0].split() == ["id_a", "id_b", "n"]
    assert [line.split() for line in lines[2:4]] == [[IDS[0], IDS[1], "3"], [IDS[1], "short", "4"]]
    lines = show(["id", "first", "second", "third"], [["a dog.jpg", 1.25, 10**9, "0.127 ± 0.029"]], capsys)
    assert [line.split() for line in lines[:3:2]] == [
        ["id", "first", "second"],
        ["a", "dog.jpg", "1.250", "1,000,000,000"],
    ]
    assert [line.split() for line in lines[4:7:2]] == [["id", "third"], ["a", "dog.jpg", "0.127±0.029"]]


def test_an_id_with_blanks_is_not_broken_and_text_is_wrapped_at_blanks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    name, reason = "my photos/a dog.jpg", "the file is cut in the middle and can't be read"
    lines = show(["failed id", "reason"], [[name, reason]], capsys, left=2)
    assert name in lines[2]
    assert " ".join(line[len(name) :].strip() for line in lines[2:4]) == reason
    assert max(map(len, lines)) <= 50


def test_headings_are_wrapped_first_and_then_columns_stand_below(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ["method", "average accuracy", "worst group accuracy", "log loss of all rows"]
    row: list[object] = ["erm", "0.127 ± 0.029", "0.663 [0.641, 0.684]", 1.25]
    monkeypatch.setenv("COLUMNS", "60")
    lines = show(columns, [row], capsys, footer="over seeds")
    assert lines[-2:] == ["over seeds", ""]
    assert "0.127±0.029  0.663 [0.641, 0.684]" in lines[3]
    assert " ".join(" ".join(lines[:2]).split()) == (
        "average log loss of method accuracy worst group accuracy all rows"
    )
    monkeypatch.setenv("COLUMNS", "44")
    lines = show(columns, [row], capsys)
    assert "0.663 [0.641, 0.684]" in "".join(lines)
    assert lines[-5:] == ["", "method  log loss of all rows", "─" * 28, f"erm{'1.250':>25}", ""]


def test_no_line_ends_between_a_word_and_its_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The pairs help: flip rate 0.755 with nothing removed, 0 with rank 49 (95 % of it: -0.2 to -0.12)."
    for width in range(24, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        Ui().prose(f"{text}\nThis is about 1,234 rows.")
        shown = capsys.readouterr().out
        assert shown.split() == f"{text} This is about 1,234 rows.".split()
        assert not re.search(r"\n[-(]?[.\d]|\n%", shown), shown
        assert max(map(len, shown.splitlines())) <= width
    monkeypatch.delenv("COLUMNS")
    Ui().prose(text)
    assert capsys.readouterr().out == f"{text}\n"


def test_a_rule_in_a_pipe_is_no_wider_than_a_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert show(["id", "text"], [["a", "a long sentence " * 30]], capsys, left=2)[1] == "─" * 100


def test_a_cell_is_one_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(["id", "n"], [["two\nlines\tand\x1b[31m", 1], ["日本", 22]], capsys)
    assert lines[2] == r"two\nlines\tand\x1b[31m   1"
    assert cell_len(lines[2]) == cell_len(lines[3])


def test_a_table_without_rows_has_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(["id", "n"], [], capsys)[0] == "id  n"


text = st.text("ab ü日", min_size=1, max_size=40)
number = st.one_of(st.floats(0, 1), st.integers(0, 10**9), st.just("0.127 ± 0.029"), st.none())


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(20, 120))
def test_no_number_and_no_id_is_ever_broken(data: st.DataObject, width: int) -> None:
    left = data.draw(st.integers(1, 3))
    right = data.draw(st.integers(0, 5))
    headings = ["id", "name", "text"][:left] + data.draw(st.lists(text, min_size=right, max_size=right))
    rows = [
        [*data.draw(st.lists(text, min_size=left, max_size=left)), *(data.draw(number) for _ in range(right))]
        for _ in range(data.draw(st.integers(0, 4)))
    ]
    with pytest.MonkeyPatch.context() as patch:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        patch.setattr(sys, "stdout", stream)
        patch.setenv("COLUMNS", str(width))
        Ui().table(headings, rows, left=left)
        stream.flush()
        shown = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
        patch.delenv("COLUMNS")
        stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        patch.setattr(sys, "stdout", stream)
        Ui().table(headings, rows, left=left)
        stream.flush()
        whole = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert len(whole.splitlines()) == len(rows) + 3
    assert words(shown) == words(whole)


def test_several_tasks_have_a_bar_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    reporter = ConsoleReporter(quiet=False, verbose=False)
    with reporter.task("steps", 2) as first:
        second = reporter.task("embed (seed 1): reading", 10, "images")
        with second as bar:
            bar.advance(3)
            reporter._bars.refresh()
            frame = shown.getvalue().rpartition("steps")
            assert "embed (seed 1): reading" in frame[2] and "3/10" in frame[2]
        first.advance()
        shown.seek(0)
        shown.truncate()
        reporter._bars.refresh()
        assert "steps" in shown.getvalue() and "reading" not in shown.getvalue() and "1/2" in shown.getvalue()
    with reporter.task("later", 1) as last:  # a new display, after the first has ended
        last.advance()
        reporter._bars.refresh()
        assert "later" in shown.getvalue()
