"""Exit codes and streams: the one place where exceptions become messages."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from ncm_cli import main
from ncm_cli import run as run_command
from ncm_cli.console import Ui, plain
from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError, listing, nearest, unknown
from ncm_cli.registry import COMMANDS
from ncm_cli.store.probe import write_probe
from tests import world
from tests.world import write_store


def _run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def app(**_: object) -> None:
        raise error

    monkeypatch.setattr(main, "build_app", lambda only=None: app)
    return main.run([])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("an option is off"), 2),
        (InputError("a bad row", where="m.csv, row 3", found="''", expected="an id", fix="fill it in"), 3),
        (MismatchError("two encoders"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "f.h5"), 3),
        (PermissionError(errno.EACCES, "Permission denied", "f.h5"), 3),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "f.h5"), 3),
        (FileExistsError(errno.EEXIST, "File exists", "folder"), 3),
        (MemoryError(), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_exceptions_have_their_exit_code_and_stay_off_stdout(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run_raising(error, monkeypatch) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err
    if isinstance(error, NcmError):
        assert error.what in err
        assert all(text in err for _, text in error.lines())


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        _run_raising(ZeroDivisionError(), monkeypatch)


@pytest.mark.parametrize("argv", [["embde"], ["embed", "--no-such-option"], ["--what"]])
def test_usage_errors_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage:" in err


def test_version_and_picture_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ncm 0.")
    assert main.run([]) == 0
    assert "features.h5" in capsys.readouterr().out


def test_every_command_is_listed_with_its_own_summary(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        assert main.run([name, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert command.sentence in shown, name


def test_a_closed_pipe_is_no_error() -> None:
    program = f"{sys.executable} -m ncm_cli --help | head -1"
    done = subprocess.run(program, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_ascii_terminals_get_ascii() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ncm_cli"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    done.stdout.decode("ascii")


def test_nearest_and_listing() -> None:
    assert nearest("lable", ["label", "split"]) == "label"
    assert nearest("LABEL", ["label"]) == "label"
    assert nearest("zzz", ["label"]) is None
    assert listing(range(20), limit=3) == "0, 1, 2 and 17 more"
    error = unknown("column", "lable", ["label", "split"], where="f.h5")
    assert "did you mean 'label'?" in str(error)
    assert "label, split" in str(error)


def _shell(line: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A line for bash, in which ``ncm`` is this program, with Python's usual buffers."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    program = f'ncm() {{ {sys.executable} -m ncm_cli "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, and a probe fitted on it."""
    folder = tmp_path_factory.mktemp("small")
    label, split = [f"c{i % 2}" for i in range(40)], ["train"] * 20 + ["val"] * 20
    X = np.random.default_rng(0).normal(size=(40, 3)) + np.arange(40)[:, None] % 2
    write_store(folder / "f.h5", X, {"label": label, "split": split})
    fit = ["fit", "-f", str(folder / "f.h5"), "--weight-decay", "1e-2", "-o", str(folder / "p.safetensors")]
    assert main.run([*fit, "-q"]) == 0
    return folder


LINES = (
    "--version",
    "--help",
    "fit --help",
    "info f.h5",
    "info f.h5 --json",
    "predict p.safetensors f.h5 -q",
)
"""One line for each way in which text gets to standard output."""


@pytest.mark.parametrize(
    ("target", "why"),
    [(">&-", "it is closed"), (">/dev/full", "No space left"), ("<&- >&- 2>e", "it is closed")],
)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.slow
def test_what_standard_output_does_not_take_is_an_error(
    line: str, target: str, why: str, small: Path
) -> None:
    done = _shell(f"ncm {line} {target}; code=$?; [ -f e ] && cat e >&2; rm -f e; exit $code", small)
    assert done.returncode == 3
    assert f"standard output can't be written to\n  found: {why}" in done.stderr
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


@pytest.mark.parametrize("target", [">&-", ">/dev/full", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.slow
def test_a_process_without_standard_streams_does_its_work(target: str, small: Path) -> None:
    """What a command writes to files is written, whichever of the streams lead nowhere."""
    assert _shell(f"ncm predict p.safetensors f.h5 -q -o whole.csv {target}", small).returncode == 0
    assert (small / "whole.csv").read_text().count("\n") == 41
    (small / "whole.csv").unlink()


@pytest.mark.slow
def test_an_error_that_found_no_standard_output_keeps_its_own_code(small: Path) -> None:
    done = _shell("ncm info missing.h5 >/dev/full", small)
    assert done.returncode == 3
    assert done.stderr.startswith("bad input: no such file")


@pytest.mark.parametrize(("error", "shown"), [(None, 1), (InputError("bad"), 0)])
def test_warnings_of_libraries_never_stand_before_an_error(
    error: NcmError | None, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def app(**_: object) -> None:
        warnings.warn("a tensor of tomorrow", UserWarning, stacklevel=1)
        if error is not None:
            raise error

    monkeypatch.setattr(main, "build_app", lambda only=None: app)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        main.run([])
    assert [str(one.message) for one in heard] == ["a tensor of tomorrow"] * shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_work_goes_on_where_what_is_said_cannot_be_written(tmp_path: Path) -> None:
    """The reader of a log that has gone, as ``2>&1 | head -1``, or a log on a full disk."""
    for name in ("gone", "full"):
        line = [sys.executable, "-m", "ncm_cli", "data", "digits", "-o", str(tmp_path / name), "--pairs", "4"]
        if name == "gone":
            reader, writer = os.pipe()
            os.close(reader)
        else:
            writer = os.open("/dev/full", os.O_WRONLY)
        done = subprocess.run(line, stdout=subprocess.DEVNULL, stderr=writer, check=False)
        os.close(writer)
        assert done.returncode == 0 and (tmp_path / name / "manifest.csv").exists()


def test_help_cut_short_by_its_reader_is_no_error() -> None:
    program = f"set -o pipefail; {sys.executable} -m ncm_cli embed --help | true"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_help_text_with_colons_holds_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bound", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "5:100:5" in shown and "\N{HUNDRED POINTS SYMBOL}" not in shown


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("report r.json --html", "ncm report --help"),
        ("data digits --seed", "ncm data digits --help"),
        ("fit --seed x", "ncm fit --help"),
        ("--seed 1", "ncm --help"),
    ],
)
def test_a_wrong_line_names_its_own_commands_help(
    line: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(line.split()) == 2
    assert f"try: {advice}\n" in capsys.readouterr().err


def test_a_file_of_another_kind_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"label": list("abab"), "split": ["train", "train", "val", "val"]}
    store = str(world.write_store(tmp_path / "f.h5", np.eye(4), columns))
    probe, table = str(tmp_path / "p.safetensors"), str(tmp_path / "own.csv")
    write_probe(probe, world.make_probe(np.ones(4), ("a", "b")))
    Path(table).write_text("id_a,id_b\nr0,r1\n")
    for line, words in (
        (["fit", "-f", store, "-p", table, "-o", "o"], f"text, such as a table.*try: ncm pairs {table}"),
        (["fit", "-f", store, "-p", store, "-o", "o"], "found: a feature store, ncm_format 'ncm-features'"),
        (["fit", "-f", probe, "-o", "o"], "found: not an HDF5 file but a safetensors file, as probes are"),
        (["fit", "-f", table, "-o", "o"], f"try: ncm embed {table} -o FEATURES.h5"),
        (["eval", store, "-f", store], "found: not a safetensors file but an HDF5 file, as feature and pair"),
    ):
        assert main.run(line) == 3
        assert re.search(words, " ".join(capsys.readouterr().err.split())), line


@pytest.mark.parametrize("joint", [" and ", " AND ", ", ", ","])
def test_filters_joined_by_words_are_met_with_what_was_meant(
    joint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"label": list("abab"), "split": ["test"] * 4}
    store = str(world.write_store(tmp_path / "f.h5", np.eye(4), columns))
    write_probe(tmp_path / "p", world.make_probe(np.ones(4), ("a", "b")))
    assert main.run(["eval", str(tmp_path / "p"), "-f", store, "--where", f"split=test{joint}label=a"]) == 3
    assert "try: 'split=test & label=a': & joins two filters (ncm help where)" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["run", "digits", "--out", ""], ["run", "digits", "--out="], ["info", ""]])
def test_an_empty_value_is_no_current_folder(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(argv) == 2
    err = capsys.readouterr().err
    assert "an empty value" in err and argv[-1].rstrip("=") in err
    with pytest.raises(UsageError, match="out is empty"):
        run_command("run", recipe="digits", out="")


def test_a_current_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main.run(["run", "digits", "--dry-run"]) == 3
    assert "the current folder no longer exists" in capsys.readouterr().err
    tmp_path.mkdir()


def test_a_command_without_arguments_shows_its_help_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["eval"]) == 2
    out, err = capsys.readouterr()
    assert "Usage: ncm eval" in out
    assert err == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.h5"
    path.write_bytes(b"x")
    path.chmod(0)
    assert main.run(["info", str(path)]) == 3
    assert "permission denied" in capsys.readouterr().err.lower()


def test_terminals_get_no_control_characters() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    shown = plain("a\x1b[31m\r\x07\x9b\u202eb\tc\nd\udce9é", stream)
    assert shown == "a\\x1b[31m\\x0d\\x07\\x9b\\u202eb\tc\nd\\udce9é"


def test_names_that_are_not_utf8_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    Ui(json=True).result({"path": "caf\udce9"})
    assert json.loads(capsys.readouterr().out) == {"path": "caf\udce9"}
